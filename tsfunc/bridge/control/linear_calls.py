"""Calls of linear functions that were made outside of the body that calls them.

NOTE [pullbacks of a whole batch]
A pullback that the function of a vmap makes has saved tensors of the whole batch. In a body that
runs on an active subset it is called outside of the subset: the cotangents of the other examples
are zeros, and the body gets its examples' part of the results. A body that is traced for one
example can't call it, so its choice is traced for the whole batch.

NOTE [backward passes in bodies]
A backward pass in the body of control flow uses tensors that were saved outside of the body, if a
pullback that was made there is called or differentiated inside. If a vmap inside of the trace
differentiates, torch has put their graphs and tangents on the vmap's tracers. These tracers must
become inputs of the body as they are, before the vmap's kernel takes them apart. The function mode
of a body does not meet operators of the autograd engine, so a dispatch mode replaces the arguments.
The engine puts the graph and the tangent of a saved tensor on an alias that it has just made. The
alias is therefore made outside of the body, and operators that only compare the types of tensors do
not make inputs of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Final, cast

import torch
from torch._C import DisableTorchFunction, _RestorePythonTLSSnapshot  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode

from tsfunc.bridge.control.attempts import CannotUnbatch
from tsfunc.bridge.control.bodies import BodyLevel, HiddenVmap
from tsfunc.bridge.control.subset_arguments import ArgRemapper
from tsfunc.bridge.control.subsets import SubsetLevel, scatter_subset
from tsfunc.bridge.tracers.batch_tracer import BatchLevel, wrap
from tsfunc.bridge.tracers.interrupts import resets
from tsfunc.bridge.tracers.level_proxies import LevelProxy, as_seen_by_current_level
from tsfunc.bridge.tracers.nesting import nested_tracers
from tsfunc.bridge.tracers.operators import map_items
from tsfunc.bridge.tracers.tracer import TracerLevel
from tsfunc.dispatch.state import Level, overriding, replacing_captured_levels, tls, using


def call_where_made(
    func: Callable[[Sequence[Any]], Sequence[Any]],
    saved: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
) -> Sequence[torch.Tensor]:
    """Call a linear function of tensors: NOTE [pullbacks of a whole batch].

    Args:
        saved: tensors that the function has kept, such as the outputs of the function that a
            pullback belongs to.
        values: its arguments, as the running code sees them.

    Raises:
        CannotUnbatch: the running code is traced for one example.
    """
    proxies = [level for level in tls.state.levels if isinstance(level, LevelProxy)]
    if not proxies:
        return func(values)
    batches = [level for level in _levels_of(saved) if isinstance(level, BatchLevel)]
    for proxy in proxies:
        if isinstance(proxy, BodyLevel) and any(map(proxy.is_outside, saved)):
            proxy.pulls_back = True
        if isinstance(proxy, HiddenVmap) and any(x.root is proxy.root for x in batches):
            raise CannotUnbatch(proxy.parent.original.root)
    call = _CallOutside(_wholes_of(saved))
    with call.differentiating():
        values = [call.scattered(value) for value in values]
        with call.outside(), _saved_tensors_as_inputs(call):
            results = func(values)
        results = [as_seen_by_current_level(result) for result in results]
    return [call.of_standing_examples(result) for result in results]


def _levels_of(values: Sequence[torch.Tensor]) -> set[Level]:
    return {tracer.dispatch_level for value in values for tracer in nested_tracers(value)}


def _active_subsets() -> list[SubsetLevel]:
    """Return the active subsets, the innermost first."""
    return [level for level in reversed(tls.state.levels) if isinstance(level, SubsetLevel)]


def _wholes_of(values: Sequence[torch.Tensor]) -> dict[SubsetLevel, BatchLevel]:
    """Return for each active subset the level of the whole batch that tensors belong to."""
    levels = _levels_of(values)
    return {
        subset: level
        for subset in _active_subsets()
        for level in levels
        if isinstance(level, BatchLevel) and subset.comes_from(level)
    }


class _CallOutside:
    """A call outside of subsets from inside of them: NOTE [pullbacks of a whole batch].

    Args:
        wholes: for each subset, the level of the whole batch.
    """

    def __init__(self, wholes: Mapping[SubsetLevel, BatchLevel]) -> None:
        self.wholes = wholes
        self.masks = [_stands_for_itself(subset, level) for subset, level in self.wholes.items()]
        self.remap_args = cast("ArgRemapper | None", tls.state.remap_args)

    @contextmanager
    def differentiating(self) -> Iterator[None]:
        """Context manager: levels of whole batches differentiate as their subsets do."""
        counts = [(whole, whole.autograd, whole.forward) for whole in self.wholes.values()]
        for subset, whole in self.wholes.items():
            whole.autograd, whole.forward = subset.autograd, subset.forward
        try:
            yield
        finally:
            for whole, autograd, forward in counts:
                whole.autograd, whole.forward = autograd, forward

    def outside(self) -> AbstractContextManager[None]:
        """Context manager: levels of whole batches are active in the place of their subsets."""
        remapper = self.remap_args
        while remapper is not None and remapper.subset in self.wholes:
            remapper = remapper.outside
        return _replacing(self.wholes, remapper)

    def scattered(self, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the whole batches: zeros for examples outside of the subsets."""
        for (subset, level), mask in zip(self.wholes.items(), self.masks, strict=True):
            if mask is not None:
                value = torch.where(mask, value, torch.zeros_like(value))
            value = scatter_subset(value, subset, level)
        return value

    def inside(self) -> AbstractContextManager[None]:
        """Context manager in :meth:`outside`: the subsets are active again."""
        return _replacing({level: x for x, level in self.wholes.items()}, self.remap_args)

    def seen_outside(self, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor that was saved outside of a body and of its subsets, as a pass sees it.

        The body sees a tensor as its subsets do.
        """
        with self.inside(), overriding(_pass, call=None):
            seen = as_seen_by_current_level(value)
            levels = _levels_of([seen])
            subsets = [x for x in _active_subsets() if x in levels]
            outermost = {subset: [*subset.ancestors()][-1] for subset in subsets}
            wholes = {**outermost, **self.wholes, **_wholes_of([value])}
            return _CallOutside({x: wholes[x] for x in subsets}).scattered(seen)

    def of_standing_examples(self, result: torch.Tensor) -> torch.Tensor:
        """Return a result whose derivatives are those of the examples that stand for themselves."""
        for mask in self.masks:
            if mask is not None:
                result = torch.where(mask, result, result.detach())
        return result


@contextmanager
def _replacing(levels: Mapping[Any, Any], remap_args: ArgRemapper | None) -> Iterator[None]:
    """Context manager: levels are active in the place of others."""

    def seen(active: Sequence[Level]) -> tuple[Level, ...]:
        return tuple([levels.get(level, level) for level in active])

    state = tls.state
    replaced = state.replace(levels=seen(state.levels), remap_args=remap_args)
    with replacing_captured_levels(state.levels, seen), using(replaced):
        yield


@contextmanager
def _saved_tensors_as_inputs(call: _CallOutside) -> Iterator[None]:
    """Context manager for a backward pass: NOTE [backward passes in bodies]."""
    levels = tls.state.levels
    batches = [level for level in levels if isinstance(level, BatchLevel)]
    with ExitStack() as stack:
        for body in [x for x in levels if isinstance(x, BodyLevel) and x.pulls_back]:
            inside = [level for level in batches if level.depth > body.depth]
            if any(level.autograd or level.forward for level in inside):
                stack.enter_context(_SavedTensorMode(body, call))
                stack.enter_context(overriding(_pass, call=call))
        yield


class _Pass(threading.local):
    """The backward pass in a body on this thread: NOTE [backward passes in bodies]."""

    call: _CallOutside | None = None


_pass: Final = resets(_Pass())


def saved_as_seen(value: Any) -> Any:
    """Return a tensor that a node of a graph has saved, as its backward must see it."""
    call = _pass.call
    return as_seen_by_current_level(value) if call is None else call.seen_outside(value)


def refuse_tangents_in_subsets(trace: TracerLevel, saved: Sequence[torch.Tensor]) -> None:
    """Refuse the backward of a call in a body that an active subset runs, if it needs tangents.

    Raises:
        NotImplementedError: a jvp at a vmap inside of the trace differentiates the backward.
    """
    if _pass.call is None or not (_pass.call.wholes or _active_subsets()):
        return
    if any(level.forward for level in _levels_of(saved) if isinstance(level, BatchLevel)):
        raise NotImplementedError(
            f"{trace.name}: a program has no forward-mode derivative of a pullback of control "
            f"flow, of a checkpoint or of a custom rule, if the function of a vmap made it outside "
            f"of a branch or a loop's step, and only some examples call it inside. Call vjp inside "
            f"of the branch or step, or use reverse mode."
        )


class _SavedTensorMode(TorchDispatchMode):
    """Makes tensors from outside of a body inputs: NOTE [backward passes in bodies]."""

    def __init__(self, body: BodyLevel, call: _CallOutside) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.body, self.call = body, call

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _pass.call is not self.call:
            with DisableTorchFunction():
                return op(*args, **kwargs)
        if op in _ALIASES or not _returns_tensors(op):
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
            body = self.body.outermost_without(tensors)
            if body is not None:
                with body.around_the_call(), DisableTorchFunction():
                    return op(*args, **kwargs)
        args = [map_items(self._input_of, arg) for arg in args]
        kwargs = {name: map_items(self._input_of, arg) for name, arg in kwargs.items()}
        with DisableTorchFunction():  # the engine's calls do not meet function handlers
            return op(*args, **kwargs)

    def _input_of(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not self.body.is_outside(value):
            return value
        # The layout of an operand is a part of the graph. An interrupt could cut off a generator's
        # entry, as that of torch.overrides.enable_reentrant_dispatch, which ends the process.
        with _RestorePythonTLSSnapshot():
            return self.call.seen_outside(value)


def _returns_tensors(op: Any) -> bool:
    return any("Tensor" in str(result.type) for result in op._schema.returns)


_ALIASES = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)


def _stands_for_itself(subset: SubsetLevel, whole: BatchLevel) -> torch.Tensor | None:
    """Return True for each example that no other one stands for; None if that holds for all."""
    with subset.restored():
        mask = _mask_of(subset, whole)
    return None if mask is None else wrap(mask, 0, subset)


def _mask_of(subset: SubsetLevel, whole: BatchLevel) -> torch.Tensor | None:
    mask = as_seen_by_current_level(subset.mask)
    parent = subset.parent
    if parent is whole or not isinstance(parent, SubsetLevel):
        return cast("torch.Tensor | None", mask)
    outer = _mask_of(parent, whole)
    if outer is None:
        return cast("torch.Tensor | None", mask)
    outer = outer.index_select(0, as_seen_by_current_level(subset.index))
    return outer if mask is None else mask & outer
