"""Recurrent layers: whole-layer kernels of the CPU, and fused cells of GPUs.

NOTE [an LSTM layer and its gradient]
If all examples share the weights, the examples are further sequences of one call. If the weights
are batched, or if each example needs its own weight gradients, the layer is decomposed. All
products that do not depend on the previous step are one product over all steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tsfunc.ops.dims import align, batches_first, expand_at, expand_to_front
from tsfunc.ops.registry import Args, BatchDims, Kwargs, RuleLevel, row

LSTM = 2  # the kernel's number of an LSTM layer


def _gates(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Multiply ``x`` (batch, steps, N, features) by the weights (batch, 4 * hidden, features)."""
    weight, *biases = weights
    out: Tensor = x.flatten(1, 2).matmul(weight.mT).unflatten(1, x.shape[1:3])
    for bias in biases:
        out = out + bias[:, None, None]
    return out


def _activate(gates: Tensor) -> list[Tensor]:
    i, f, g, o = gates.chunk(4, -1)
    return [i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()]


def _layer(
    x: Tensor, weights: Sequence[Tensor], h: Tensor, c: Tensor, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Run all steps; every tensor has the batch dim first."""
    gates = _gates(x, (weights[0], *weights[2:]))
    steps = range(x.shape[1])
    out: list[Any] = [None] * x.shape[1]
    for t in reversed(steps) if reverse else steps:
        i, f, g, o = _activate(gates[:, t] + h.matmul(weights[1].mT))
        c = f * c + i * g
        h = o * c.tanh()
        out[t] = h
    return torch.stack(out, 1), h, c


def _state(x: Tensor, bdim: int | None, size: int) -> Tensor:
    """Return a state as (batch, N, hidden); it can have a dim of size 1 for its one layer."""
    x = expand_to_front(x, bdim, size)
    return x.squeeze(1) if x.dim() == 4 else x


@row("aten::mkldnn_rnn_layer")
def layer(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Batch an LSTM layer: NOTE [an LSTM layer and its gradient]."""
    x, *weights, h, c, reverse, batch_sizes, mode, _, _, biased = args[:13]
    size = level.batch_size
    if batch_sizes or mode != LSTM:
        return NotImplemented
    if all(bdim is None for bdim in bdims[1:5]):
        x = expand_at(x, bdims[0], size, 1).flatten(1, 2).contiguous()
        states = [_state(v, d, size).flatten(0, 1) for v, d in ((h, bdims[5]), (c, bdims[6]))]
        out, *states, memory = op(x, *weights, *(s.contiguous() for s in states), *args[7:])
        n = out.shape[1] // size
        out, bdim = out.unflatten(1, (size, n)), 1
        states = [s.unflatten(0, (size, n)) for s in states]
    else:
        x, *weights = batches_first(args[:5], bdims[:5], size)
        states = [_state(v, d, size) for v, d in ((h, bdims[5]), (c, bdims[6]))]
        weights = weights if biased else weights[:2]
        out, *states = _layer(x, weights, states[0], states[1], reverse)
        bdim, memory = 0, x.new_empty((0,), dtype=torch.uint8)
    if h.dim() - (bdims[5] is not None) == 3:
        states = [s.unsqueeze(1) for s in states]
    return (out, *states, memory), (bdim, 0, 0, None)


def _cells(gates: Sequence[Tensor], c: Tensor) -> Tensor:
    """Return the cell state before the first step and after each step."""
    i, f, g, _ = gates
    states = [c]
    for t in range(i.shape[1]):
        states.append(f[:, t] * states[-1] + i[:, t] * g[:, t])
    return torch.stack(states, 1)


def _gate_grads(
    gates: Sequence[Tensor], cells: Tensor, weight: Tensor, grads: Sequence[Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of all gates and of the first state, from the last step backward."""
    i, f, g, o = gates
    grad_out, dh, dc = grads
    shaped = cells.tanh()[:, 1:]
    slope = o * (1 - shaped * shaped)
    by_step: list[Any] = [None] * i.shape[1]
    for t in reversed(range(i.shape[1])):
        dh = dh if grad_out is None else dh + grad_out[:, t]
        dc = dc + dh * slope[:, t]
        it, ft, gt, ot = i[:, t], f[:, t], g[:, t], o[:, t]
        parts = (
            dc * gt * it * (1 - it),
            dc * cells[:, t] * ft * (1 - ft),
            dc * it * (1 - gt * gt),
            dh * shaped[:, t] * ot * (1 - ot),
        )
        by_step[t] = torch.cat(parts, -1)
        dc = dc * ft
        dh = by_step[t].matmul(weight)
    return torch.stack(by_step, 1), dh, dc


@row("aten::mkldnn_rnn_layer_backward")
def layer_backward(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Recompute the gates and run the backward pass: NOTE [an LSTM layer and its gradient]."""
    reverse, mode, _, _, biased, _, _, batch_sizes = args[13:21]
    if batch_sizes or mode != LSTM:
        return NotImplemented
    size = level.batch_size
    full: list[Any] = [
        None if v is None else expand_to_front(v, bdim, size)
        for v, bdim in zip(args[:13], bdims[:13], strict=True)
    ]
    x, w, u, b1, b2, h, c, out, _, _, grad_out, grad_h, grad_c = full
    shape = h.shape
    h, c, grad_h, grad_c = (
        v.squeeze(1) if v is not None and v.dim() == 4 else v for v in (h, c, grad_h, grad_c)
    )
    if reverse:
        x, out = x.flip(1), out.flip(1)
        grad_out = None if grad_out is None else grad_out.flip(1)
    before = torch.cat((h.unsqueeze(1), out[:, :-1]), 1)
    gates = _gates(x, (w, b1, b2) if biased else (w,)) + _gates(before, (u,))
    active = _activate(gates)
    zeros = torch.zeros_like(h)
    grads = (grad_out, *(zeros if g is None else g for g in (grad_h, grad_c)))
    dgates, dh, dc = _gate_grads(active, _cells(active, c), u, grads)
    rows = dgates.flatten(1, 2)
    dx = rows.matmul(w).unflatten(1, x.shape[1:3])
    dw, du = (rows.mT.matmul(v.flatten(1, 2)) for v in (x, before))
    db = rows.sum(1)
    return (dx.flip(1) if reverse else dx, dw, du, db, db, dh.view(shape), dc.view(shape)), 0


def _with_bias(
    x: Tensor, bdim: int | None, bias: Tensor | None, p: int | None, size: int
) -> tuple[Tensor, Tensor | None]:
    """Fold the batch of the gates into the samples. A batched bias is added first."""
    if bias is not None and p is not None:
        (x, bias), bdim = align((x, bias), (bdim, p))
        x, bias = x + bias, None
    return expand_to_front(x, bdim, size).flatten(0, 1).contiguous(), bias


def _split_gates(x: Tensor | None, size: int) -> Tensor | None:
    return None if x is None else x.unflatten(0, (size, x.shape[0] // size))


@row("aten::_thnn_fused_lstm_cell", "aten::_thnn_fused_gru_cell")
def fused_cell(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Fold the batch into the samples."""
    size = level.batch_size
    biases, positions = [*args[3:], None, None][:2], [*bdims[3:], None, None][:2]
    if (positions[0] is None) != (positions[1] is None):  # the kernel requires both biases or none
        positions = [0, 0]
        biases = batches_first(biases, [*bdims[3:]], size)
    x, b = _with_bias(args[0], bdims[0], biases[0], positions[0], size)
    y, d = _with_bias(args[1], bdims[1], biases[1], positions[1], size)
    state = expand_to_front(args[2], bdims[2], size).flatten(0, 1).contiguous()
    return tuple(_split_gates(o, size) for o in op(x, y, state, b, d)), 0


@row("aten::_thnn_fused_lstm_cell_backward_impl")
def fused_lstm_cell_backward(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """The bias gradient is the sum of the gate gradients over each example's samples."""
    size = level.batch_size
    tensors = [
        None if v is None else expand_to_front(v, bdim, size).flatten(0, 1).contiguous()
        for v, bdim in zip(args[:5], bdims[:5], strict=True)
    ]
    gates, state, _ = (_split_gates(o, size) for o in op(*tensors, False))
    assert gates is not None
    return (gates, state, gates.sum(1) if args[5] else None), 0


@row("aten::_thnn_fused_gru_cell_backward")
def fused_gru_cell_backward(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Run the backward kernel of a GRU cell; each part of its gates has a bias."""
    size = level.batch_size
    tensors = [
        expand_to_front(v, bdim, size).flatten(0, 1).contiguous()
        for v, bdim in zip(args[:2], bdims[:2], strict=True)
    ]
    x, y, state, _, _ = (_split_gates(o, size) for o in op(*tensors, False))
    assert x is not None and y is not None
    biases = (x.sum(1), y.sum(1)) if args[2] else (None, None)
    return (x, y, state, *biases), 0
