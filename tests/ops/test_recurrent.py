"""Recurrent layers and fused cells against the loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tsfunc.ops  # noqa: F401  (declares rows)
from tests.ops.harness import Level, check, compare, plan
from tsfunc.ops.registry import find

aten = torch.ops.aten


def rand(*shape: int) -> torch.Tensor:
    seeded = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(shape, generator=seeded) / 2


def layer_args(biased: bool) -> tuple[torch.Tensor, ...]:
    weights = (rand(16, 3), rand(16, 4))
    more = (rand(16), rand(16) * 2) if biased else weights
    return (rand(5, 2, 3), *weights, *more, rand(2, 4), rand(2, 4) * 2)


def flags(biased: bool, reverse: bool) -> tuple[object, ...]:
    return (reverse, [], 2, 4, 1, biased, False, False, False)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="the kernel is oneDNN's")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("chosen", [(0,), (5,), (0, 5, 6), (1,), (0, 1, 2, 3, 4, 5, 6)])
def test_lstm_layer(biased: bool, reverse: bool, chosen: tuple[int, ...]) -> None:
    row = find("aten::mkldnn_rnn_layer")
    assert row is not None and row.rule is not None
    op, args, options = aten.mkldnn_rnn_layer.default, layer_args(biased), flags(biased, reverse)
    made = plan([*args, *options], {(i, None): args[i].dim() for i in chosen}, 3)
    outs, bdims = row.rule(op, Level(), made.dims, made.args, {})
    # The last result is the kernel's workspace for its backward pass.
    compare(outs[:3], bdims[:3], [op(*example)[:3] for example in made.examples], "layer")


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="the kernel is oneDNN's")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_lstm_layer_backward(biased: bool, reverse: bool) -> None:
    row = find("aten::mkldnn_rnn_layer_backward")
    assert row is not None and row.rule is not None
    args = layer_args(biased)
    kinds: tuple[Any, ...] = (reverse, 2, 4, 1, biased, True, False, [], False)
    examples, expected = [], []
    for i in range(3):
        leaves = [a * (1 - i / 8) for a in args]
        training: tuple[Any, ...] = (reverse, [], 2, 4, 1, biased, False, False, True)
        out, h, c, memory = aten.mkldnn_rnn_layer(*leaves, *training)
        grads = (out * 2 + 1, h + 1, c - 1)
        call = (*leaves, out, h, c, *grads)
        examples.append(call)
        expected.append(aten.mkldnn_rnn_layer_backward(*call, *kinds, memory))
    stacked = [torch.stack(parts) for parts in zip(*examples, strict=True)]
    bdims = [0] * 13 + [None] * 10
    op = aten.mkldnn_rnn_layer_backward.default
    outs, out_dims = row.rule(op, Level(), bdims, [*stacked, *kinds, torch.empty(0)], {})
    assert out_dims == 0
    for k, (mine, *theirs) in enumerate(zip(outs, *expected, strict=True)):
        if biased or k not in (3, 4):  # without biases their gradients are undefined
            torch.testing.assert_close(mine, torch.stack(theirs), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels are for GPUs only")
def test_fused_cells() -> None:
    for name, gates in (("lstm", 4), ("gru", 3)):
        x, y, state = rand(2, gates * 4).cuda(), rand(2, gates * 4).cuda(), rand(2, 4).cuda()
        b, d = rand(gates * 4).cuda(), rand(gates * 4).cuda() * 2
        op = getattr(aten, f"_thnn_fused_{name}_cell").default
        assert check(op, x, y, state, choices=[(0,), (0, 1, 2)])
        assert check(op, x, y, state, b, d, choices=[(0,), (0, 1, 2, 3, 4), (3,)])
