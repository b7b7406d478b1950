"""Operators whose tangents come from their backward formulas.

NOTE [tangents by pullbacks]
The backward formulas of the operators here are right to any order if autograd records them, while
their tangent formulas can't be differentiated. A call with tangents is one node of its level's
graph, an ``autograd.Function`` of three parts:

- The values are the operator's results for arguments without tangents.
- The tangents are the pullback of the pullback, which is linear in the cotangents.
- The backward is the pullback as a function of the arguments, whose tangents it keeps, and of the
  cotangents. If they have tangents, this function is such a node too.

torch's own node would not do: it saves results with the tangents of torch's formula, and the
backward formulas read them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.autograd import Function, forward_ad

from tsfunc.bridge.grad import autograd
from tsfunc.bridge.grad.apply_hook import call_torch_apply
from tsfunc.bridge.tracers.interrupts import restoring_thread_state
from tsfunc.bridge.tracers.tracer import TracerLevel, innermost_level

# A function of tensors of one level that can be differentiated; its results are tensors.
_Map = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def call_with_tangents(overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call an operator with arguments that have tangents at their level."""
    level = innermost_level(args)
    positions = [position for position, arg in enumerate(args) if autograd.is_differentiable(arg)]
    rest = [None if position in positions else arg for position, arg in enumerate(args)]
    single = False

    def operator(values: Sequence[Tensor]) -> Sequence[Tensor]:
        nonlocal single
        filled = list(rest)
        for position, value in zip(positions, values, strict=True):
            filled[position] = value
        outs = overload(*filled, **kwargs)
        single = isinstance(outs, Tensor)
        return (outs,) if single else outs

    outs = _apply(operator, [args[position] for position in positions], level)
    return outs[0] if single else tuple(outs)


def _apply(function: _Map, values: Sequence[Tensor], level: TracerLevel | None) -> Sequence[Tensor]:
    """Call a function of a level's tensors, as a node if one of the tensors has a tangent."""
    values = [autograd.lift(value, level) for value in values]
    if any(autograd.unpack_dual(value)[1] is not None for value in values):
        return call_torch_apply(_Node, function, level, torch.is_grad_enabled(), *values)
    create = torch.is_grad_enabled()
    with autograd.recording_at(level):
        outs = function(values)
    return outs if create else [autograd.detach_at_level(out) for out in outs]


class _Node(Function):
    """A function of tensors of one level in the graph of the level."""

    @staticmethod
    def forward(
        ctx: Any, function: _Map, level: TracerLevel | None, grad_mode: bool, *values: Tensor
    ) -> Any:
        ctx.function, ctx.level = function, level
        ctx.save_for_backward(*values)
        ctx.save_for_forward(*values)
        ctx.set_materialize_grads(False)
        with autograd.outside_graph(grad_mode), autograd.recording_at(level):
            primals = [autograd.unpack_dual(value)[0] for value in values]
            leaves = [autograd.fresh_input(autograd.detach_at_level(x), level) for x in primals]
            outs = function(leaves)
            with DisableTorchFunctionSubclass():
                constant = [not out.requires_grad for out in outs]
            outs = tuple(autograd.detach_at_level(out) for out in outs)
        ctx.mark_non_differentiable(*(x for x, fixed in zip(outs, constant, strict=True) if fixed))
        return outs

    @staticmethod
    @restoring_thread_state
    def backward(ctx: Any, *cotangents: Any) -> Any:
        by_output = {i: ct for i, ct in enumerate(cotangents) if ct is not None}
        values = ctx.saved_tensors
        # The cotangents may be of a level further in, such as that of a vmap of the pullback.
        level = innermost_level([*values, *by_output.values()])
        pullback = _pullback(ctx.function, len(values), list(by_output), level)
        return (None, None, None, *_apply(pullback, [*values, *by_output.values()], level))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        # torch calls this with tangents switched off, but those of outer levels are propagated.
        with forward_ad._set_fwd_grad_enabled(True):
            return _tangents(ctx.function, ctx.saved_tensors, tangents[3:], ctx.level)


def _pullback(
    function: _Map, count: int, positions: Sequence[int], level: TracerLevel | None
) -> _Map:
    """Return the function of arguments and cotangents that pulls the cotangents back.

    Args:
        positions: the positions of the results that have cotangents.
    """

    def pullback(values: Sequence[Tensor]) -> Sequence[Tensor]:
        leaves = [autograd.fresh_input(value, level) for value in values[:count]]
        outs = function(leaves)
        gradients = _backward([outs[i] for i in positions], values[count:], leaves)
        pairs = zip(gradients, leaves, strict=True)
        return [torch.zeros_like(x) if g is None else g for g, x in pairs]

    return pullback


def _tangents(
    function: _Map,
    values: Sequence[Tensor],
    tangents: Sequence[Tensor | None],
    level: TracerLevel | None,
) -> tuple[Tensor | None, ...]:
    """Return the tangents of the function's results; None for one that is not differentiable."""
    with autograd.recording_at(level):
        primals = [autograd.unpack_dual(value)[0] for value in values]
        positions = [i for i, tangent in enumerate(tangents) if tangent is not None]
        for i in positions:
            primals[i] = autograd.fresh_input(primals[i], level)
        outs = function(primals)
        with DisableTorchFunctionSubclass():
            recorded = [i for i, out in enumerate(outs) if out.requires_grad]
        cotangents = [autograd.fresh_input(torch.zeros_like(outs[i]), level) for i in recorded]
        cts_in = _backward([outs[i] for i in recorded], cotangents, [primals[i] for i in positions])
        pairs = [(g, tangents[i]) for g, i in zip(cts_in, positions, strict=True) if g is not None]
        tangents_out = _backward([g for g, _ in pairs], [t for _, t in pairs], cotangents)
    present = [tangent for tangent in tangents if tangent is not None]
    connected = any(autograd.requires_grad(x, level) for x in (*values, *present))
    results: list[Tensor | None] = [None] * len(outs)
    for i, tangent in zip(recorded, tangents_out, strict=True):
        if tangent is None:  # torch takes None only for results that are not differentiable
            results[i] = autograd.detach_at_level(torch.zeros_like(outs[i]))
        else:
            results[i] = tangent if connected else autograd.detach_at_level(tangent)
    return tuple(results)


def _backward(outputs: Any, cotangents: Any, inputs: Any) -> list[Tensor | None]:
    return autograd.backward(outputs, cotangents, inputs, create_graph=True, retain_graph=True)
