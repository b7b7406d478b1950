"""Recurrent layers over a named dim of time, as torch's scan.

torch has one operator for all layers and steps of an ``LSTM``. torch's tools decompose it into as
many steps as the example has, which refuses every other length. A scan of one step serves all
lengths. The product of the inputs and their weights does not depend on the step before, so it is a
single product over all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch.nn.functional import linear

from tsfunc.bridge.tracers.operators import TorchOperator

# The computation of one step: from the input's product, the states before and the weights to the
# states after it; the first state is also the result.
_Cell = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor]], "tuple[Tensor, ...]"]


def _lstm(given: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    h, c = states
    hidden, *bias = weights[:-1] if _projects(h, c) else weights
    i, f, g, o = (given + linear(h, hidden, *bias)).chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return (linear(h, weights[-1]) if _projects(*states) else h), c


def _projects(h: Tensor, c: Tensor) -> bool:
    """Return True if an LSTM has a projection: its result is smaller than its cell state."""
    return h.shape[-1] != c.shape[-1]


def _gru(given: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    (h,) = states
    ours = given.chunk(3, 1)
    before = linear(h, *weights).chunk(3, 1)
    r, z = ((ours[k] + before[k]).sigmoid() for k in range(2))
    new = (ours[2] + r * before[2]).tanh()
    return ((h - new) * z + new,)


def _elman(activate: Callable[[Tensor], Tensor]) -> _Cell:
    def cell(
        given: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        return (activate(given + linear(states[0], *weights)),)

    return cell


_CELLS: dict[str, _Cell] = {
    "aten::lstm.input": _lstm,
    "aten::gru.input": _gru,
    "aten::rnn_tanh.input": _elman(torch.tanh),
    "aten::rnn_relu.input": _elman(torch.relu),
}


def has_open_time(node: torch.fx.Node) -> bool:
    """Return True if a node is a recurrent layer with a symbolic number of steps."""
    op = node.meta.get("op")
    if not isinstance(op, TorchOperator) or op.name not in _CELLS:
        return False
    x: Any = node.args[0]
    return isinstance(x.meta["val"].shape[1 if node.args[-1] else 0], torch.SymInt)


def as_scan(node: torch.fx.Node) -> Callable[..., Any]:
    """Return a function of a recurrent layer's arguments that computes it with torch's scan."""
    cell = _CELLS[node.meta["op"].name]

    def layers(
        x: Tensor, hx: Any, params: Sequence[Tensor], has_biases: bool, num_layers: int,
        dropout: float, train: bool, bidirectional: bool, batch_first: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        states = [hx] if isinstance(hx, Tensor) else list(hx)
        x = x.transpose(0, 1) if batch_first else x
        directions = 2 if bidirectional else 1
        count = len(params) // (num_layers * directions)
        last = []
        for k in range(num_layers):
            found = []
            for d in range(directions):
                at = k * directions + d
                weights = params[at * count : (at + 1) * count]
                first = [state[at] for state in states]
                out, *ended = _over_time(cell, x, first, weights, has_biases, reverse=d == 1)
                found.append(out)
                last.append(ended)
            x = torch.cat(found, -1) if bidirectional else found[0]
            if dropout and train and k < num_layers - 1:
                x = torch.dropout(x, dropout, True)
        ends = [torch.stack(column) for column in zip(*last, strict=True)]
        return (x.transpose(0, 1) if batch_first else x), *ends

    return layers


def _over_time(
    cell: _Cell, x: Tensor, first: Sequence[Tensor], weights: Sequence[Tensor], has_biases: bool,
    reverse: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the results of one layer in one direction, after the states of the last step."""
    of_input = weights[0], *(weights[2:3] if has_biases else ())
    others = weights[1], *(weights[3:] if has_biases else weights[2:])
    given = linear(x, *of_input)
    given = given.flip(0) if reverse else given

    def step(*values: Tensor) -> tuple[Tensor, ...]:
        states, rest = values[: len(first)], values[len(first) :]
        new = cell(rest[0], states, rest[1:])
        new = tuple(state.contiguous() for state in new)
        return *new, new[0].clone()

    # torch requires states of one layout, and operands that do not share memory.
    begin = [state.clone(memory_format=torch.contiguous_format) for state in first]
    *ended, out = torch.ops.higher_order.scan(
        step, begin, [given], tuple(w.clone() for w in others)
    )
    return (out.flip(0) if reverse else out), *ended
