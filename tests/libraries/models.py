"""Small models of other libraries, with random weights, for ``test_models``."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tools.libraries import load_torchvision
from tsfunc import Dim
from tsfunc import MetaTensorType as Meta


@dataclass(frozen=True)
class Model:
    """A model, and its inputs.

    Attributes:
        build: makes the model; it imports the library, or skips the test.
        shape: the shape of an input, with ``"b"`` for the batch and ``"s"`` for the length.
        call: returns the result for an input, as one tensor.
        tokens: True if inputs are numbers of tokens.
    """

    build: Callable[[], Any]
    shape: tuple[int | str, ...]
    call: Callable[[Any, Tensor], Tensor]
    tokens: bool = False

    def make(self) -> Any:
        """Return the model in float64, as for inference."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of libraries
            return self.build().double().eval()

    def inputs(self, batch: int, length: int) -> Tensor:
        sizes = {"b": batch, "s": length}
        shape = [sizes[n] if isinstance(n, str) else n for n in self.shape]
        return torch.randint(3, 50, shape) if self.tokens else torch.randn(shape).double()

    @property
    def descriptor(self) -> Meta:
        """Return the type of all inputs; the bounds come from position embeddings and UNets."""
        dims = {"b": Dim("b", max=63), "s": Dim("s", max=32)}
        return Meta([dims[n] if isinstance(n, str) else n for n in self.shape])


def library(name: str) -> Any:
    """Import a library, or skip the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load_torchvision()
        return pytest.importorskip(name)


_TRANSFORMER: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
}  # fmt: skip
_TEXT: dict[str, Any] = {"vocab_size": 50, "max_position_embeddings": 32}


def gpt2(attention: str) -> Any:
    t = library("transformers")
    return t.GPT2LMHeadModel(
        t.GPT2Config(
            n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=32, bos_token_id=1,
            eos_token_id=2, attn_implementation=attention,
        )
    )  # fmt: skip


def llama(attention: str) -> Any:
    t = library("transformers")
    options = {**_TRANSFORMER, **_TEXT, "attn_implementation": attention}
    return t.LlamaForCausalLM(t.LlamaConfig(num_key_value_heads=1, **options))


# Decoders of transformers that differ in norms, positions, attention windows or biases.
DECODERS = ("Gemma", "Gemma2", "Qwen2", "Qwen3", "Mistral", "OPT", "GPTNeoX")


def decoder(kind: str) -> Any:
    t = library("transformers")
    options = {**_TRANSFORMER, **_TEXT, "pad_token_id": 0}
    if kind == "OPT":
        options.update(ffn_dim=32, word_embed_proj_dim=16)
    elif kind != "GPTNeoX":
        options.update(num_key_value_heads=1, head_dim=8)
    return getattr(t, f"{kind}ForCausalLM")(getattr(t, f"{kind}Config")(**options))


def bert(attention: str) -> Any:
    t = library("transformers")
    options = {**_TRANSFORMER, **_TEXT, "attn_implementation": attention}
    return t.BertForSequenceClassification(t.BertConfig(**options))


def t5(attention: str) -> Any:
    t = library("transformers")
    return t.T5ForConditionalGeneration(
        t.T5Config(
            vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
            decoder_start_token_id=0, pad_token_id=0, attn_implementation=attention,
        )
    )  # fmt: skip


def vit(attention: str) -> Any:
    t = library("transformers")
    options = {**_TRANSFORMER, "attn_implementation": attention}
    return t.ViTForImageClassification(t.ViTConfig(image_size=16, patch_size=4, **options))


def mamba() -> Any:
    t = library("transformers")
    t.logging.set_verbosity_error()  # its faster kernels are not installed
    return t.MambaForCausalLM(
        t.MambaConfig(
            vocab_size=50, hidden_size=16, state_size=4, num_hidden_layers=1, conv_kernel=3,
            time_step_rank=2,
        )
    )  # fmt: skip


def _group_norm(channels: int, **kwargs: Any) -> nn.Module:
    return nn.GroupNorm(2, channels)


def timm_model(kind: str) -> Any:
    timm = library("timm")
    if kind == "vit":
        options: Any = {"patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
        return timm.models.VisionTransformer(img_size=32, num_classes=5, **options)
    if kind == "convnext":
        return timm.models.ConvNeXt(depths=(1, 1, 1, 1), dims=(8, 8, 8, 8), num_classes=5)
    if kind == "mixer":
        options = {"patch_size": 8, "num_blocks": 1, "embed_dim": 16}
        return timm.models.MlpMixer(img_size=32, num_classes=5, **options)
    block = timm.models.resnet.BasicBlock
    options = {"channels": (8, 8, 8, 8), "norm_layer": _group_norm, "num_classes": 5}
    return timm.models.ResNet(block, (1, 1, 1, 1), **options)


def torchvision_model(kind: str) -> Any:
    models = library("torchvision").models
    if kind == "vit":
        options = {"num_layers": 1, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32}
        return models.VisionTransformer(image_size=32, patch_size=8, num_classes=5, **options)
    block = models.resnet.BasicBlock
    return models.ResNet(block, [1, 1, 1, 1], num_classes=5, norm_layer=_group_norm)


_UNET: dict[str, Any] = {
    "block_out_channels": (8, 8), "layers_per_block": 1, "norm_num_groups": 4,
    "attention_head_dim": 4, "sample_size": 8,
}  # fmt: skip


def unet() -> Any:
    return library("diffusers").UNet2DModel(
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        **_UNET,
    )


def unet_with_condition() -> Any:
    return library("diffusers").UNet2DConditionModel(
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=64,
        in_channels=4,
        out_channels=4,
        **_UNET,
    )


def _logits(model: Any, x: Tensor) -> Tensor:
    return model(input_ids=x, use_cache=False).logits


def _classes(model: Any, x: Tensor) -> Tensor:
    return model(x).logits


def _to_itself(model: Any, x: Tensor) -> Tensor:
    return model(input_ids=x, decoder_input_ids=x, use_cache=False).logits


def _plain(model: Any, x: Tensor) -> Tensor:
    return model(x)


def _denoised(model: Any, x: Tensor) -> Tensor:
    return model(x, 3).sample


def _denoised_with_condition(model: Any, x: Tensor) -> Tensor:
    return model(x, 3, encoder_hidden_states=x.flatten(2)).sample


def _text(build: Callable[[str], Any], call: Callable[[Any, Tensor], Tensor]) -> dict[str, Model]:
    def model(attention: str) -> Model:
        return Model(lambda: build(attention), ("b", "s"), call, tokens=True)

    return {attention: model(attention) for attention in ("eager", "sdpa")}


def _images(build: Callable[[str], Any], kind: str) -> Model:
    return Model(lambda: build(kind), ("b", 3, 32, 32), _plain)


_TIMM = ("vit", "convnext", "mixer", "resnet")
_TEXT_MODELS = {
    "GPT-2": _text(gpt2, _logits),
    "Llama": _text(llama, _logits),
    "BERT": _text(bert, _classes),
    "T5": _text(t5, _to_itself),
}
MODELS: dict[str, Model] = {
    **{
        f"{name} of transformers, {attention} attention": model
        for name, models in _TEXT_MODELS.items()
        for attention, model in models.items()
    },
    **{
        f"{kind} of transformers": Model(
            functools.partial(decoder, kind), ("b", "s"), _logits, tokens=True
        )
        for kind in DECODERS
    },
    "ViT of transformers": Model(lambda: vit("sdpa"), ("b", 3, 16, 16), _classes),
    "Mamba of transformers": Model(mamba, ("b", "s"), _logits, tokens=True),
    **{f"{kind} of timm": _images(timm_model, kind) for kind in _TIMM},
    **{f"{kind} of torchvision": _images(torchvision_model, kind) for kind in ("vit", "resnet")},
    "UNet of diffusers": Model(unet, ("b", 3, 8, 8), _denoised),
    "UNet of diffusers with a condition": Model(
        unet_with_condition, ("b", 4, 8, 8), _denoised_with_condition
    ),
}
