"""torch's layers under vmap, and per-example gradients of them, against the loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import tsfunc
from tsfunc.errors import SlowFallbackWarning

Params = dict[str, Tensor]


class First(nn.Module):
    """Return the first result of a layer with several."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)[0]


class SelfAttention(nn.Module):
    def __init__(self, weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.weights = weights

    def forward(self, x: Tensor) -> Any:
        return self.attention(x, x, x, need_weights=self.weights)[0]


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(8, 5),
    ).eval()  # fmt: skip


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), (4,)),
    "layer norm": (lambda: nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8)), (2, 4)),
    "convolutional": (convolutional, (2, 3, 10, 10)),
    "batch norm": (lambda: nn.BatchNorm1d(3, track_running_stats=False), (4, 3, 5)),
    "attention": (lambda: SelfAttention(False), (2, 5, 8)),
    "attention with weights": (lambda: SelfAttention(True), (2, 5, 8)),
    "attention without N": (lambda: SelfAttention(True), (5, 8)),
    "attention in eval mode": (lambda: SelfAttention(False).eval(), (2, 5, 8)),
    "lstm": (lambda: First(nn.LSTM(4, 6, num_layers=2, bidirectional=True)), (5, 2, 4)),
    "lstm, batch first": (lambda: First(nn.LSTM(4, 6, batch_first=True)), (2, 5, 4)),
    "lstm without N": (lambda: First(nn.LSTM(4, 6)), (5, 4)),
}


def without_loops(f: Callable[..., Any], in_dims: Any, *args: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error", SlowFallbackWarning)
        return tsfunc.vmap(f, in_dims=in_dims)(*args)


def made(name: str) -> tuple[nn.Module, Params, Tensor]:
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    layer = make()
    params = {k: v.detach() for k, v in layer.named_parameters()}
    return layer, params, torch.randn(3, *shape)


def close(got: Any, expected: list[Any]) -> None:
    if isinstance(got, dict):
        for name, value in got.items():
            close(value, [e[name] for e in expected])
        return
    torch.testing.assert_close(got, torch.stack(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_equal_the_loop(name: str, stacked: bool) -> None:
    layer, params, x = made(name)
    buffers = dict(layer.named_buffers())

    def run(params: Params, x: Tensor) -> Any:
        return functional_call(layer, (params, buffers), (x,))

    def loss(params: Params, x: Tensor) -> Tensor:
        return (run(params, x) ** 2).sum()

    each = [{k: v * (1 + i / 10 * stacked) for k, v in params.items()} for i in range(3)]
    given = {k: torch.stack([e[k] for e in each]) for k in params} if stacked else params
    in_dims = (0 if stacked else None, 0)
    expected = [run(p, e) for p, e in zip(each, x, strict=True)]
    close(without_loops(run, in_dims, given, x), expected)
    grads = [torch.func.grad(loss)(p, e) for p, e in zip(each, x, strict=True)]
    close(without_loops(tsfunc.grad(loss), in_dims, given, x), grads)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_layer(train: bool, batch_first: bool, norm_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        8, 2, 16, dropout=0.0, batch_first=batch_first, norm_first=norm_first
    ).train(train)
    x = torch.randn(3, 5, 2, 8)
    close(without_loops(layer, 0, x), [layer(e) for e in x])


def test_encoder_layer_with_a_padding_mask_for_each_example() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x, mask = torch.randn(3, 2, 5, 8), torch.rand(3, 2, 5) > 0.7
    mask[..., 0] = False

    def run(x: Tensor, mask: Tensor) -> Any:
        return layer(x, src_key_padding_mask=mask)

    close(without_loops(run, 0, x, mask), [run(*e) for e in zip(x, mask, strict=True)])


@pytest.mark.parametrize(
    "options",
    [{}, {"reduction": "sum"}, {"label_smoothing": 0.1}, {"ignore_index": 1}, {"weight": True}],
    ids=str,
)
def test_cross_entropy(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    x, target = torch.randn(3, 4, 5), torch.randint(5, (3, 4))
    target[0, 0] = 2
    if "weight" in options:
        options = {"weight": torch.rand(5)}

    def loss(x: Tensor, target: Tensor) -> Any:
        return nn.functional.cross_entropy(x, target, **options)

    examples = list(zip(x, target, strict=True))
    close(without_loops(loss, 0, x, target), [loss(*e) for e in examples])
    grads = [torch.func.grad(loss)(*e) for e in examples]
    close(without_loops(tsfunc.grad(loss), 0, x, target), grads)
