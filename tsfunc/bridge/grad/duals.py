"""The duals that a function uses, rebuilt for another run after their jvp has ended.

NOTE [duals of a rerun]
A checkpoint in a jvp inside of a reverse-mode transform runs its function again after the jvp has
ended, when tensors have lost their tangents. During the first run, a function mode therefore looks
at the tensor arguments of each call. The mode stores the tangents of the tensors that outlive the
run, which the function closes over. In another run, the mode replaces these tensors, and the
function's arguments, by duals with the stored tangents.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass
from torch.overrides import TorchFunctionMode

from tsfunc.bridge.grad.autograd import make_dual, unpack_dual
from tsfunc.bridge.grad.dual_level import dual_level, may_carry_outer_tangents, no_duals
from tsfunc.bridge.tracers.batch_tracer import BatchTracer, wrap
from tsfunc.bridge.tracers.grad_level import GradTracer
from tsfunc.bridge.tracers.operators import map_items
from tsfunc.bridge.tracers.torch_state import below_autograd, in_fake_mode, tangents_enabled
from tsfunc.bridge.tracers.tracer import TracerLevel
from tsfunc.dispatch.state import State

# Rebuilds the dual of a tensor that has lost its tangents.
_Build = Callable[[Any], torch.Tensor]


class Duals:
    """The duals of a function that may run again.

    Args:
        state: the dispatch state of the call.
    """

    def __init__(self, state: State) -> None:
        self.around = frozenset(state.levels)
        self.active = [x for x in state.levels if isinstance(x, TracerLevel)]
        self.levels: list[TracerLevel | None] = [None] if may_carry_outer_tangents(None) else []
        self.levels += [x for x in self.active if x.forward]
        self.enabled = tangents_enabled()
        self.rebuilders: list[_Build | None] = []
        self.closure_rebuilders: dict[int, tuple[weakref.ref[torch.Tensor], _Build]] = {}

    @contextmanager
    def first(self, args: Sequence[Any]) -> Iterator[None]:
        """Context manager for the first run, which stores the tangents."""
        self.rebuilders = [_rebuilder(arg) for arg in args]
        with _TangentCollector(self.keep, self.around):
            yield

    @contextmanager
    def rerun(self, args: Sequence[Any]) -> Iterator[Sequence[Any]]:
        """Context manager for another run; yields the arguments to call the function with.

        The run may be inside of a jvp that the first run was not in.
        """
        with no_duals(self.active, self.enabled), ExitStack() as stack:
            if not self.levels:
                yield args
                return
            for level in self.levels:
                stack.enter_context(dual_level(level))
            pairs = zip(args, self.rebuilders, strict=True)
            arguments = [arg if build is None else build(arg) for arg, build in pairs]
            stack.enter_context(_TangentCollector(self.replaced, self.around))
            yield arguments

    def keep(self, value: torch.Tensor) -> torch.Tensor:
        """Store how to rebuild the tangents of a tensor while it lives; return the tensor."""
        key = id(value)
        if key not in self.closure_rebuilders and (build := _rebuilder(value)) is not None:
            self.closure_rebuilders[key] = (
                weakref.ref(value, lambda _: self.closure_rebuilders.pop(key, None)),
                build,
            )
        return value

    def replaced(self, value: torch.Tensor) -> torch.Tensor:
        """Return the dual that replaces a tensor in another run, or the tensor itself."""
        ref, build = self.closure_rebuilders.get(id(value), (None, None))
        return build(value) if build is not None and ref is not None and ref() is value else value


class _TangentCollector(TorchFunctionMode):
    """Calls ``replace`` on the tensors from outside among the arguments of each call."""

    def __init__(self, replace: Callable[[torch.Tensor], torch.Tensor], around: Any) -> None:
        super().__init__()
        self.replace, self.around = replace, around

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if below_autograd() or in_fake_mode() or not tangents_enabled():
            return func(*args, **kwargs)  # no tangents are visible here
        args = [map_items(self.seen, arg) for arg in args]
        return func(*args, **{name: map_items(self.seen, arg) for name, arg in kwargs.items()})

    def seen(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if not isinstance(value, BatchTracer | GradTracer) or value.dispatch_level in self.around:
            return self.replace(value)
        # A tracer of a transform inside of the function, which may wrap a tensor from outside.
        value.value = self.seen(value.value)
        return value


def _rebuilder(value: Any) -> _Build | None:
    """Return a function that rebuilds a tensor's tangents; None if no level has one for it."""
    if not isinstance(value, torch.Tensor):
        return None
    tracer = isinstance(value, BatchTracer | GradTracer)
    inside = _rebuilder(value.value) if isinstance(value, BatchTracer | GradTracer) else None
    tangent = unpack_dual(value)[1]
    if tangent is None and inside is None:
        return None
    level = value.dispatch_level if tracer else None  # type: ignore[attr-defined]
    rebuild = _rebuilder(tangent)  # a jvp around the tangent's own jvp

    def build(value: Any) -> torch.Tensor:
        inner = None if inside is None else inside(value.value)
        # A tensor that still has all of its tangents is returned itself: a call may write to it.
        primal = value if inner is None or inner is value.value else _wrap_like(inner, value)
        if tangent is None or unpack_dual(primal)[1] is not None:
            return primal
        return make_dual(primal, tangent if rebuild is None else rebuild(tangent), level)

    return build


def _wrap_like(inner: torch.Tensor, tracer: Any) -> torch.Tensor:
    """Return a tracer like another one with another value and the same ``requires_grad``."""
    level = tracer.dispatch_level
    if isinstance(tracer, BatchTracer):
        tracer_inside: torch.Tensor = wrap(inner, tracer.bdim, level)
    else:
        tracer_inside = level.lift(inner)
    with DisableTorchFunctionSubclass():
        return tracer_inside.requires_grad_(tracer.requires_grad)
