"""Calls of functions of whole batches, such as ``custom_vmap`` rules, on the tracers of a vmap.

NOTE [functions of whole batches]
A ``custom_vmap`` rule takes and returns physical values with the batch dim first. At the levels
outside of the vmap the rule is an ordinary function. If the vmap's own level differentiates by an
argument, the call is an ``autograd.Function`` of that level. The backward of the Function calls
another function of whole batches, the pullback of the rule, and can therefore be differentiated
again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function

from tsfunc import pytrees
from tsfunc.bridge.grad.autograd import is_differentiable, outside_graph, requires_grad, unpack_dual
from tsfunc.bridge.grad.custom_function import torch_apply
from tsfunc.bridge.grad.linear_maps import is_recorded, value_batch_first
from tsfunc.bridge.tracers.batch_tracer import BatchLevel, BatchTracer, wrap
from tsfunc.bridge.tracers.interrupts import restoring_thread_state
from tsfunc.bridge.tracers.level_proxies import as_seen_by_current_level
from tsfunc.bridge.tracers.tracer import innermost_level
from tsfunc.errors import CustomRuleError
from tsfunc.transforms.argnums import with_replaced
from tsfunc.transforms.forward import jvp
from tsfunc.transforms.reverse import vjp
from tsfunc.transforms.vmap import vmap

# Takes values and a flag for each, True if batched; returns results and such flags.
WholeBatch = Callable[[Sequence[Any], Sequence[bool]], tuple[Sequence[Any], Sequence[bool]]]


def level_to_batch(leaves: Sequence[Any]) -> BatchLevel | None:
    """Return the innermost level of the leaves if it is a vmap's and a leaf is batched there.

    A leaf that is the same for all examples counts as batched if its tangent is batched.
    """
    level = innermost_level(leaves)
    if not isinstance(level, BatchLevel):
        return None
    return level if any(_is_batched_at(leaf, level) for leaf in leaves) else None


def _is_batched_at(leaf: Any, level: BatchLevel) -> bool:
    if not (isinstance(leaf, BatchTracer) and leaf.dispatch_level is level):
        return False
    return leaf.bdim is not None or (
        level.forward > 0 and _is_batched_at(unpack_dual(leaf)[1], level)
    )


def call_rule(
    label: str,
    rule: Callable[..., Any],
    args: tuple[Any, ...],
    otherwise: Callable[..., Any],
    check: Callable[[Any, Any], None],
) -> Any:
    """Call a ``custom_vmap`` rule if an argument is batched, and the function otherwise.

    Args:
        check: called with the arguments of one example and the rule's result.
    """
    leaves, tree = pytrees.flatten(pytrees.tree_map(as_seen_by_current_level, args))
    level = level_to_batch(leaves)
    if level is None:
        return otherwise(*args)
    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    structure: list[Any] = []

    def whole(values: Sequence[Any], batched: Sequence[bool]) -> Any:
        filled, flags = list(leaves), [False] * len(leaves)
        for position, value, flag in zip(positions, values, batched, strict=True):
            filled[position], flags[position] = value, flag
        in_batched = list(pytrees.unflatten(tree, flags))
        returned = rule(level.batch_size, in_batched, *pytrees.unflatten(tree, filled))
        out, flat = checked_result(label, returned, level.batch_size)
        if not structure:
            check(pytrees.unflatten(tree, leaves), returned[0])
            structure.append(pytrees.structure_of(returned[0]))
        return out, flat

    outs = call_whole_batch(whole, level, [leaves[i] for i in positions])
    return pytrees.unflatten(structure[0], outs)


def checked_result(label: str, returned: Any, size: Any) -> tuple[list[Any], list[bool]]:
    """Return the flattened result of a ``custom_vmap`` rule, and a flag for each leaf.

    Raises:
        CustomRuleError: the rule returned a wrong result.
    """
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise CustomRuleError(
            f"{label}: expected a pair, the result of all examples and the flags of its batched "
            f"leaves, got {type(returned).__name__}."
        )
    out = pytrees.leaves_of(returned[0])
    try:
        flat = pytrees.broadcast_prefix(returned[1], returned[0], lambda x: isinstance(x, bool))
    except ValueError:
        raise CustomRuleError(
            f"{label}: expected, besides the result, a pytree of bools that is a prefix of it, got "
            f"{returned[1]!r}."
        ) from None
    _check_sizes(label, out, flat, size)
    return out, flat


def _check_sizes(label: str, out: Sequence[Any], batched: Sequence[bool], size: int) -> None:
    for value, flag in zip(out, batched, strict=True):
        if value is None:  # JAX does not count None as a leaf
            continue
        if flag and (not isinstance(value, torch.Tensor) or value.shape[:1] != (size,)):
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise CustomRuleError(
                f"{label}: expected a first dim of size {size}, the number of examples, for a "
                f"result with the flag True, got {shape}."
            )


def call_whole_batch(
    whole: WholeBatch, level: BatchLevel, tensors: Sequence[torch.Tensor]
) -> Sequence[Any]:
    """Call a function of whole batches on tensors of a level and of vmaps inside of it."""
    inner = innermost_level(tensors)
    if isinstance(inner, BatchLevel) and inner is not level and inner.depth > level.depth:
        return call_whole_batch(_for_inner_vmap(inner, whole, level), inner, tensors)
    recorded = [
        isinstance(x, BatchTracer) and x.dispatch_level is level and is_recorded(x) for x in tensors
    ]
    plan = _BatchCall(whole, level, recorded)
    if not any(recorded):
        return plan.run(tensors)
    lifted = [
        x if isinstance(x, BatchTracer) and x.dispatch_level is level else level.lift(x)
        for x in tensors
    ]
    outs = torch_apply(_RecordedBatchCall, plan, torch.is_grad_enabled(), *lifted)
    return plan.filled(outs)


def _for_inner_vmap(inner: BatchLevel, whole: WholeBatch, level: BatchLevel) -> WholeBatch:
    """Return a function of whole batches of ``level`` for tensors of a vmap inside of that level.

    The function is batched over the inner vmap. The cotangents of a Jacobian's rows are such
    tensors.
    """

    def through(values: Sequence[Any], inside: Sequence[bool]) -> Any:
        def mapped(values: Sequence[Any], flags: Sequence[bool]) -> Any:
            batched: list[bool] = []

            def one(*values: Any) -> tuple[Any, ...]:
                outs, batched[:] = whole(values, flags)
                return tuple(outs)

            dims = [int(flag) if here else None for here, flag in zip(inside, flags, strict=True)]
            outs = vmap(one, tuple(dims), randomness=inner.randomness)(*values)
            pairs = zip(outs, batched, strict=True)
            return [x.movedim(0, 1) if flag else x for x, flag in pairs], batched

        if not any(inside):
            results = call_whole_batch(whole, level, values)
        else:
            results = call_whole_batch(mapped, level, values)
        return results, [any(inside)] * len(results)

    return through


@dataclass(eq=False)
class _BatchCall:
    """A call: the function, the level, and flags of the tensors to differentiate by.

    Tensors with cotangents are passed to the function batched, since their cotangents are batched.
    """

    whole: WholeBatch
    level: BatchLevel
    recorded: Sequence[bool]
    others: Sequence[Any] = ()

    def values(self, tensors: Sequence[Any]) -> tuple[list[Any], list[bool]]:
        values, flags = [], []
        for x, recorded in zip(tensors, self.recorded, strict=True):
            of_level = isinstance(x, BatchTracer) and x.dispatch_level is self.level
            if of_level and (x.bdim is not None or (recorded and requires_grad(x, self.level))):
                values.append(value_batch_first(x, self.level))
                flags.append(True)
            else:
                values.append(x.value if of_level else x)
                flags.append(False)
        return values, flags

    def run(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the results; tensors are wrapped as tracers of the level."""
        level = self.level
        with level.restored():
            outs, flags = self.whole(*self.values(tensors))
        self.others = [None if isinstance(x, torch.Tensor) else x for x in outs]
        return [
            wrap(x, 0 if flag else None, level) if isinstance(x, torch.Tensor) else x
            for x, flag in zip(outs, flags, strict=True)
        ]

    def filled(self, tensors: Sequence[Any]) -> list[Any]:
        rest = iter(tensors)
        return [next(rest) if x is None else x for x in self.others]


class _RecordedBatchCall(Function):
    """A recorded call in the autograd graph of the vmap's own level."""

    @staticmethod
    def forward(ctx: Any, plan: _BatchCall, grad_mode: bool, *tensors: Any) -> Any:
        ctx.plan = plan
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)
        with outside_graph(grad_mode):
            outs = tuple(x for x in plan.run(tensors) if isinstance(x, torch.Tensor))
        ctx.mark_non_differentiable(*[x for x in outs if not is_differentiable(x)])
        return outs

    @staticmethod
    @restoring_thread_state
    def backward(ctx: Any, *cotangents: Any) -> Any:
        plan, tensors = ctx.plan, ctx.saved_tensors
        wrt = [i for i, x in enumerate(tensors) if plan.recorded[i] and is_differentiable(x)]
        of = [j for j, ct in enumerate(cotangents) if ct is not None and is_differentiable(ct)]

        def pullback_of_batch(values: Sequence[Any], flags: Sequence[bool]) -> Any:
            inputs, is_batched = _batched_at(
                values[: len(tensors)], flags, wrt, plan.level.batch_size
            )
            cotangents_of_batch = values[len(tensors) :]

            def run(*chosen: Any) -> tuple[Any, ...]:
                outs, batched = plan.whole(with_replaced(inputs, wrt, chosen), is_batched)
                results = [(x, b) for x, b in zip(outs, batched, strict=True)
                         if isinstance(x, torch.Tensor)]  # fmt: skip
                return tuple(_expand(*results[j], plan.level.batch_size) for j in of)

            _, pullback = vjp(run, *(inputs[i] for i in wrt))
            size = plan.level.batch_size
            pairs = zip(cotangents_of_batch, flags[len(tensors) :], strict=True)
            cts_in = pullback(tuple(_expand(ct, flag, size) for ct, flag in pairs))
            return cts_in, [True] * len(wrt)

        results = call_whole_batch(
            pullback_of_batch, plan.level, [*tensors, *(cotangents[j] for j in of)]
        )
        cts_in: list[Any] = [None] * len(tensors)
        for i, value in zip(wrt, results, strict=True):
            cts_in[i] = value
        return (None, None, *cts_in)

    @staticmethod
    def jvp(ctx: Any, _plan: Any, _mode: Any, *tangents: Any) -> Any:
        plan, tensors = ctx.plan, ctx.saved_tensors
        wrt = [i for i, t in enumerate(tangents) if t is not None]

        def pushforward_of_batch(values: Sequence[Any], flags: Sequence[bool]) -> Any:
            inputs, is_batched = _batched_at(
                values[: len(tensors)], flags, wrt, plan.level.batch_size
            )
            tangents_of_batch = values[len(tensors) :]
            batched: list[bool] = []

            def run(*chosen: Any) -> tuple[Any, ...]:
                outs, tangents_out = plan.whole(with_replaced(inputs, wrt, chosen), is_batched)
                pairs = zip(outs, tangents_out, strict=True)
                tensor_pairs = [(x, b) for x, b in pairs if isinstance(x, torch.Tensor)]
                batched[:] = [b for _, b in tensor_pairs]
                return tuple(x for x, _ in tensor_pairs)

            primals = tuple(inputs[i] for i in wrt)
            directions = tuple(
                _expand(t, flag, plan.level.batch_size)
                for t, flag in zip(tangents_of_batch, flags[len(tensors) :], strict=True)
            )
            return jvp(run, primals, directions)[1], batched

        return tuple(
            call_whole_batch(
                pushforward_of_batch, plan.level, [*tensors, *(tangents[i] for i in wrt)]
            )
        )


def _batched_at(
    values: Sequence[Any], flags: Sequence[bool], wrt: Sequence[int], size: int
) -> tuple[list[Any], list[bool]]:
    """Return the values with those at ``wrt`` expanded to batched ones, and the new flags."""
    batch = [
        _expand(value, flag, size) if i in wrt else value
        for i, (value, flag) in enumerate(zip(values, flags, strict=False))
    ]
    return batch, [flag or i in wrt for i, flag in enumerate(flags[: len(values)])]


def _expand(value: torch.Tensor, batched: bool, size: int) -> torch.Tensor:
    return value if batched else value.unsqueeze(0).expand(size, *value.shape)
