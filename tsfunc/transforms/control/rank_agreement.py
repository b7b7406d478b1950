"""Choices that the ranks make together if the bodies exchange values along a mesh axis.

Each rank has its own predicate. A rank that takes another branch than the others would leave them
waiting in a collective. If a body exchanges values over mesh axes, the ranks along these axes
therefore exchange their predicates first. If the predicates are equal, all ranks run the one
branch; otherwise all ranks run every branch and select, as a ``vmap`` does whose examples choose
differently. A loop continues until the last rank is done, and a rank that is done keeps its carry.
For bodies without such exchanges, each rank chooses alone.

Inside of ``shard_map`` the choice is made together as well if it concerns a derivative or a vmap
from outside: the transposes of the boundary are exchanges, and would be missing on a rank whose
branch does not use an argument. In a program the branches are bodies of one node on every rank,
so this concerns only programs whose tensors from outside require gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tsfunc import pytrees
from tsfunc.bridge.control.attempts import NeedsWholeBatch
from tsfunc.bridge.grad.autograd import is_perturbed
from tsfunc.bridge.mesh.levels import MeshAxes, MeshLevel, mesh_levels, observe_axes
from tsfunc.bridge.trace.trace_level import TraceTracer, current_trace
from tsfunc.bridge.trace.trace_rules import records_outside
from tsfunc.bridge.tracers.level_proxies import as_seen_by_current_level
from tsfunc.bridge.tracers.nesting import nested_tracers
from tsfunc.dispatch.state import tls
from tsfunc.transforms.abstract_eval import abstract_results
from tsfunc.transforms.closure_convert import consts_of
from tsfunc.transforms.collectives import pmax, pmin, psum

Branch = Callable[..., Any]


def axes_of_exchanges(
    label: str, functions: Sequence[Branch], operands: Sequence[Any]
) -> list[MeshLevel]:
    """Return the active mesh axes over which the functions exchange values, the outermost first.

    The functions are run once on tensors without data. If that fails, all active mesh axes are
    returned: an unneeded agreement costs a collective and changes no value.
    """
    levels = mesh_levels()
    if not levels:
        return []
    bounded = [level for level in levels if level.has_boundary]
    if bounded and _is_seen_outside(bounded, functions, operands):
        return bounded
    axes = MeshAxes()

    def outlined(function: Branch) -> Branch:
        def run(*args: Any) -> Any:
            with axes.bound():
                return function(*args)

        return run

    with observe_axes() as seen:
        for function in functions:
            try:
                abstract_results(label, outlined(function), operands, {})
            except (Exception, NeedsWholeBatch):
                return levels
    return [level for level in levels if level.axis_name in seen]


def _is_seen_outside(
    levels: Sequence[MeshLevel], functions: Sequence[Branch], operands: Sequence[Any]
) -> bool:
    """True if a transform outside of the levels, or a derivative, applies to the arguments."""
    active = list(tls.state.levels)
    outer = active[: active.index(levels[0])]
    traced = current_trace() is not None
    tensors = [x for x in pytrees.leaves_of(tuple(operands)) if isinstance(x, torch.Tensor)]
    for x in (*tensors, *consts_of(functions)):
        value = as_seen_by_current_level(x)
        if not traced and is_perturbed(value):
            return True
        for tracer in nested_tracers(value):
            if isinstance(tracer, TraceTracer) and records_outside(tracer):
                return True
            if not traced and tracer.dispatch_level in outer:
                return True
    return False


def agreed_predicate(
    pred: Any, axes: Sequence[MeshLevel], true_fun: Branch, false_fun: Branch
) -> tuple[torch.Tensor, tuple[Branch, Branch, Branch]]:
    """Return an index that is equal on all ranks, and the branches that it chooses from.

    The third branch runs both functions and selects by this rank's own predicate.
    """
    predicate = torch.as_tensor(pred).reshape(()) != 0
    total = psum(predicate.to(torch.int64), _names(axes))
    size = math.prod(level.batch_size for level in axes)
    some = torch.where(total == size, 1, 2)

    def both(*operands: Any) -> Any:
        return _where(predicate, true_fun(*operands), false_fun(*operands))

    return torch.where(total == 0, 0, some), (false_fun, true_fun, both)


def agreed_index(
    index: Any, axes: Sequence[MeshLevel], branches: Sequence[Branch]
) -> tuple[torch.Tensor, tuple[Branch, ...]]:
    """Return an index that is equal on all ranks, and the branches with one more.

    The last branch runs all branches and selects by this rank's own index.
    """
    own_index = torch.as_tensor(index).reshape(()).clamp(0, len(branches) - 1)
    least, most = pmin(own_index, _names(axes)), pmax(own_index, _names(axes))

    def every(*operands: Any) -> Any:
        out = branches[0](*operands)
        for i, branch in enumerate(branches[1:], 1):
            out = _where(own_index == i, branch(*operands), out)
        return out

    return torch.where(least == most, least, len(branches)), (*branches, every)


def agreed_loop(
    axes: Sequence[MeshLevel], cond_fun: Callable[[Any], Any], body_fun: Callable[[Any], Any]
) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return the condition and the body of a loop that ends on all ranks at once."""

    def on(carry: Any) -> torch.Tensor:
        return torch.as_tensor(cond_fun(carry)).reshape(()) != 0

    def some_go_on(carry: Any) -> torch.Tensor:
        total: torch.Tensor = psum(on(carry).to(torch.int64), _names(axes))
        return total > 0

    def body(carry: Any) -> Any:
        return _where(on(carry), body_fun(carry), carry)

    return some_go_on, body


def _names(axes: Sequence[MeshLevel]) -> tuple[str, ...]:
    return tuple(level.axis_name for level in axes)


def _where(mask: torch.Tensor, new: Any, old: Any) -> Any:
    """Select between two results of one structure."""
    news, tree = pytrees.flatten(new)
    olds = pytrees.leaves_of(old)

    def one(a: Any, b: Any) -> Any:
        tensors = isinstance(a, torch.Tensor | int | float | complex)
        return torch.where(mask, a, b) if tensors else a

    return pytrees.unflatten(tree, [one(a, b) for a, b in zip(news, olds, strict=True)])
