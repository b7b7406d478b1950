"""Per-example gradients of small models of other libraries, with random weights.

transformers and torchvision are not dependencies of this package (``pip install tsfunc[bench]``
brings them); without them their benchmarks are left out.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from benchmarks.timing import Case
from benchmarks.variants import OURS, SPECIALIZED, compiled, variants
from tools.libraries import load_torchvision

WORDS, LENGTH, CLASSES = 50, 16, 10
TEXT: dict[str, Any] = {
    "vocab_size": WORDS,
    "max_position_embeddings": 32,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "attn_implementation": "eager",
}
Loss = Callable[[nn.Module, dict[str, Tensor], Tensor, Tensor], Tensor]


def next_words(model: nn.Module, params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    options = {"input_ids": x[None], "use_cache": False}
    logits: Tensor = functional_call(model, params, (), options).logits[0]
    return F.cross_entropy(logits[:-1], x[1:])


def text_class(model: nn.Module, params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    logits: Tensor = functional_call(model, params, (), {"input_ids": x[None]}).logits[0]
    return F.cross_entropy(logits, y)


def image_class(model: nn.Module, params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(functional_call(model, params, (x[None],))[0], y)


def gpt2(library: Any) -> nn.Module:
    options = {
        "n_layer": 2, "n_head": 4, "n_embd": 32, "vocab_size": WORDS, "n_positions": 32,
        "bos_token_id": 1, "eos_token_id": 2, "attn_implementation": "eager",
    }  # fmt: skip
    return library.GPT2LMHeadModel(library.GPT2Config(**options))


def bert(library: Any) -> nn.Module:
    config = library.BertConfig(num_labels=CLASSES, **TEXT)
    return library.BertForSequenceClassification(config)


def llama(library: Any) -> nn.Module:
    config = library.LlamaConfig(num_key_value_heads=2, **TEXT)
    return library.LlamaForCausalLM(config)


def resnet18(library: Any) -> nn.Module:
    """ResNet-18 with group norm, since batch norm mixes the examples."""
    return library.models.resnet18(
        num_classes=CLASSES, norm_layer=lambda channels: nn.GroupNorm(8, channels)
    )


def library(name: str) -> Any:
    """Import a library; None if it is not installed."""
    if importlib.util.find_spec(name) is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of libraries
        load_torchvision()
        return importlib.import_module(name)


def per_example(model: nn.Module, loss: Loss) -> Callable[[ModuleType], Callable[..., Any]]:
    """Return the maker of per-example gradients from the transforms of a library."""

    def of(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss(model, params, x, y)

    def make(transforms: ModuleType) -> Callable[..., Any]:
        return transforms.vmap(transforms.grad(of), (None, 0, 0))

    return make


def cases() -> Iterator[Case]:
    texts, images = torch.randint(3, WORDS, (8, LENGTH)), torch.randn(4, 3, 32, 32)
    for owner, what, build, loss, x in (
        ("transformers", "transformers' GPT-2, 8 texts", gpt2, next_words, texts),
        ("transformers", "transformers' BERT, 8 texts", bert, text_class, texts),
        ("transformers", "transformers' Llama, 8 texts", llama, next_words, texts),
        ("torchvision", "torchvision's ResNet-18, 4 images", resnet18, image_class, images),
    ):
        found = library(owner)
        if found is None:
            continue
        model = build(found).eval()
        params = {name: p.detach() for name, p in model.named_parameters()}
        make = per_example(model, loss)
        args = (params, x, torch.randint(CLASSES, (len(x),)))
        yield Case(
            f"models: per-example gradients of {what}",
            variants(make, *args) | compiled(make(torch.func), *args),
            goals={OURS: 1.0, SPECIALIZED: 0.3},
        )
