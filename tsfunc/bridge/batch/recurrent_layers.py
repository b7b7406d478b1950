"""Function rules of recurrent layers and cells, and their computation by other operators.

torch has one operator for all layers and steps of an ``LSTM``, and its C++ code takes as many steps
as the example has. A scan of one step serves all lengths. The product of the inputs and their
weights does not depend on the step before, so it is a single product over all steps.

Layers take packed sequences on one of three paths: NOTE [packed sequences] in ``packed_sequences``.

NOTE [workspaces of oneDNN]
On CPUs, oneDNN runs an LSTM in single or half precision as one operator, whose kernel returns a
workspace for the backward operator only in grad mode. A program runs without grad mode. A layer
whose derivative is in the program is therefore computed by other operators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import linear

from tsfunc.bridge.batch.packed_sequences import Packing, batch_level_of, is_in_trace, refuse_packed
from tsfunc.bridge.batch.symbolic_composites import needs_plain_sizes
from tsfunc.bridge.sizes.sized_indexing import is_traced_here
from tsfunc.bridge.tracers.batch_tracer import BatchTracer
from tsfunc.bridge.tracers.decompositions import decomposition_of, is_outside, lifting_factories
from tsfunc.bridge.tracers.function_registry import FunctionRules, Stage
from tsfunc.bridge.tracers.tracer import call_torch, innermost_level, lift_where
from tsfunc.ops.registry import Args, Kwargs

# The computation of one step: from the input's product, the states before and the weights to the
# states after it; the first state is also the result.
_Cell = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor]], "tuple[Tensor, ...]"]


def _lstm(
    projected: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    h, c = states
    hidden, *bias = weights[:-1] if _projects(h, c) else weights
    i, f, g, o = (projected + linear(h, hidden, *bias)).chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return (linear(h, weights[-1]) if _projects(*states) else h), c


def _projects(h: Tensor, c: Tensor) -> bool:
    """True if an LSTM has a projection: its result is smaller than its cell state."""
    return h.shape[-1] != c.shape[-1]


def _gru(
    projected: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    (h,) = states
    of_input = projected.chunk(3, 1)
    before = linear(h, *weights).chunk(3, 1)
    r, z = ((of_input[k] + before[k]).sigmoid() for k in range(2))
    new = (of_input[2] + r * before[2]).tanh()
    return ((h - new) * z + new,)


def _elman(activate: Callable[[Tensor], Tensor]) -> _Cell:
    def cell(
        projected: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        return (activate(projected + linear(states[0], *weights)),)

    return cell


def _layers(
    cell: _Cell, x: Tensor, hx: Any, params: Sequence[Tensor], has_biases: bool, num_layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_first: bool = False,
    packing: Packing | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute a recurrent layer; the arguments after the cell are those of torch's operator.

    Args:
        packing: where the steps of packed sequences are, if the input is their rows.
    """
    states = [hx] if isinstance(hx, Tensor) else list(hx)
    x = x.transpose(0, 1) if batch_first else x
    directions = 2 if bidirectional else 1
    count = len(params) // (num_layers * directions)
    last = []
    for k in range(num_layers):
        outs = []
        for d in range(directions):
            at = k * directions + d
            weights = params[at * count : (at + 1) * count]
            first = [state[at] for state in states]
            out, *ended = _one_layer(cell, x, first, weights, has_biases, d == 1, packing)
            outs.append(out)
            last.append(ended)
        x = torch.cat(outs, -1) if bidirectional else outs[0]
        if dropout and train and k < num_layers - 1:
            x = torch.dropout(x, dropout, True)
    ends = [torch.stack(column) for column in zip(*last, strict=True)]
    return (x.transpose(0, 1) if batch_first else x), *ends


def _one_layer(
    cell: _Cell, x: Tensor, first: Sequence[Tensor], weights: Sequence[Tensor], has_biases: bool,
    reverse: bool, packing: Packing | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the results of one layer in one direction, after the states of the last step."""
    of_input = weights[0], *(weights[2:3] if has_biases else ())
    others = weights[1], *(weights[3:] if has_biases else weights[2:])
    projected = linear(x, *of_input)
    rows = [projected] if packing is None else [packing.pad(projected), packing.active]
    if reverse:
        rows = [row.flip(0) for row in rows]

    def step(*values: Tensor) -> tuple[Tensor, ...]:
        states, rest = values[: len(first)], values[len(first) :]
        new = cell(rest[0], states, rest[len(rows) :])
        if packing is not None:
            active = rest[1].unsqueeze(1)
            new = tuple(torch.where(active, *pair) for pair in zip(new, states, strict=True))
        new = tuple(state.contiguous() for state in new)
        return *new, new[0].clone()

    # torch requires states of one layout, and operands that do not share memory.
    begin = [state.clone(memory_format=torch.contiguous_format) for state in first]
    *ended, out = torch.ops.higher_order.scan(step, begin, rows, tuple(w.clone() for w in others))
    out = out.flip(0) if reverse else out
    return (out if packing is None else packing.packed(out)), *ended


def _step(
    cell: _Cell, x: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, *biases: Tensor | None
) -> Any:
    """Compute one step; the arguments after the cell are those of torch's ``lstm_cell``."""
    states = [hx] if isinstance(hx, Tensor) else list(hx)
    of_input, of_state = (*biases, None, None)[:2]
    state = cell(
        linear(x, w_ih, of_input), states, (w_hh,) if of_state is None else (w_hh, of_state)
    )
    return state[0] if isinstance(hx, Tensor) else state


_CELLS: dict[str, _Cell] = {
    "lstm": _lstm, "gru": _gru, "rnn_tanh": _elman(torch.tanh), "rnn_relu": _elman(torch.relu),
}  # fmt: skip

# The computations of recurrent operators that have a dim of time, by the operator's name.
LAYERS: dict[str, Callable[..., Any]] = {
    f"aten::{name}.input": functools.partial(_layers, cell) for name, cell in _CELLS.items()
}
# torch's functions for cells and for layers.
_STEPS: Final = {
    getattr(torch._VF, f"{name}_cell"): functools.partial(_step, cell)
    for name, cell in _CELLS.items()
}
_FUNCTIONS: Final = {getattr(torch._VF, name): LAYERS[f"aten::{name}.input"] for name in _CELLS}


def _is_packed(func: Callable[..., Any], args: Sequence[Any]) -> bool:
    """True if a layer is called on a packed sequence: data, sizes of steps, states, weights."""
    return func in _FUNCTIONS and isinstance(args[3], list | tuple)


def _compute_by_operators(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Compute a call of a cell or a layer by other operators."""
    if not _is_packed(func, args):
        compute = _STEPS[func] if func in _STEPS else _FUNCTIONS[func]
        return compute(*args, **kwargs)
    data, batch_sizes, hx, *rest = args
    states = hx if isinstance(hx, Tensor) else hx[0]
    packing = Packing.of(batch_sizes, data, states.shape[1])
    return _FUNCTIONS[func](data, hx, *rest, packing=packing, **kwargs)


def _recurrent(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    """Call torch with all tensors lifted to the innermost level, or compute the call here.

    The C++ code of recurrent cells writes batched values into tensors made from the states. The C++
    code can't run with symbolic sizes, so other operators compute the call where autograd records
    its steps, and also if the layer's kernel needs grad mode.
    """
    packed = _is_packed(func, args)
    if packed and isinstance(args[1], BatchTracer):
        refuse_packed(func)
    composed = is_in_trace(args, args[1]) if packed else needs_plain_sizes(*args)
    is_lstm = _FUNCTIONS.get(func) is LAYERS["aten::lstm.input"]
    if composed or (is_lstm and _needs_workspace(args)):
        return _compute_by_operators(func, args, kwargs)
    level = batch_level_of(args)
    if level is not None:
        lifted = [lift_where(arg, level, is_outside) for arg in args]
        if packed:
            layer = decomposition_of(getattr(torch.ops.aten, func.__name__).data)
            with lifting_factories(level):
                return layer(lifted[0], args[1], *lifted[2:], **kwargs)
        args = tuple(lifted)
    return call_torch(func, types, args, kwargs)


def _needs_workspace(args: Sequence[Any]) -> bool:
    """True if oneDNN may run an LSTM whose derivative is traced: NOTE [workspaces of oneDNN]."""
    x, level = args[0], innermost_level(args)
    if level is None or not level.autograd or not is_traced_here():
        return False
    return x.device.type == "cpu" and x.dtype is not torch.float64


function_rules: Final = FunctionRules()
function_rules.add(Stage.METHOD, _recurrent, *_STEPS, *_FUNCTIONS)
