"""``torch.utils.checkpoint``: functions that a backward pass runs again.

NOTE [recomputation]
A checkpoint saves its function's inputs. A backward pass runs the function again to recompute the
tensors that autograd would have saved. A module whose tensors ``functional_call`` replaced has them
again during that run. Under ``grad(vmap(f))`` the backward pass comes after the vmap has ended, and
maybe on another thread; but the inputs are values of the vmap, and random functions must draw the
same numbers. The function therefore runs again under the dispatch state of the checkpoint, and
levels that have ended are active again during that run. A ``no_grad`` in the function is the
function's own, although the engine too turns grad mode off for a backward pass.

The reentrant form is one node of the graph, whose backward runs another backward pass. torch makes
it refuse passes with given inputs, which transforms use. Tracers of a level without autograd would
also pass through it without a graph. While a transform is active, the other form runs instead,
which gives the same results.

``torch.utils.checkpoint`` looks up ``CheckpointFunction`` for the reentrant form. For the other
form it looks up ``_checkpoint_without_reentrant_generator`` up to torch 2.13, which takes the
function's arguments after its options. Since torch 2.14 the name is
``_checkpoint_without_reentrant_generator_impl``, which takes them as a tuple and a dict.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch.utils.checkpoint
from torch.utils.checkpoint import CheckpointFunction

from tsfunc.bridge.grad.autograd import differentiates_here
from tsfunc.bridge.grad.duals import Duals
from tsfunc.bridge.trace.trace_level import current_trace
from tsfunc.bridge.tracers.draw_keys import DrawCountSnapshot
from tsfunc.bridge.tracers.interrupts import outermost, restoring_thread_state
from tsfunc.bridge.tracers.reentry import reenter
from tsfunc.bridge.tracers.registrations import on_first_transform, watching_random
from tsfunc.bridge.tracers.replaced_state import replaced_states, with_states
from tsfunc.bridge.tracers.replay import RunRecord, recording_objects, reuse_recorded
from tsfunc.bridge.tracers.torch_state import Rerun, in_backward_formula, mark_rerun
from tsfunc.bridge.tracers.tracer import TracerLevel, innermost_level, serials
from tsfunc.dispatch.state import innermost_of, overriding, tls, using
from tsfunc.ops.registry import Args, Kwargs

_Steps = Generator[None, None, None]
_CURRENT = "_checkpoint_without_reentrant_generator_impl"
_FORMER = "_checkpoint_without_reentrant_generator"
_NAME = _CURRENT if hasattr(torch.utils.checkpoint, _CURRENT) else _FORMER
_torch_generators: Callable[..., Any] = getattr(torch.utils.checkpoint, _NAME)
# The number of parameters between the function and the function's own arguments.
_OPTIONS = list(inspect.signature(_torch_generators).parameters).index("args") - 1


@functools.wraps(_torch_generators)
def _current(fn: Callable[..., Any], args: Args, kwargs: Kwargs, **options: Any) -> _Steps:
    preserves = options.get("preserve_rng_state", True)
    return _generator(
        fn, args, preserves, lambda again: _torch_generators(again, args, kwargs, **options)
    )


@functools.wraps(_torch_generators)
def _former(fn: Callable[..., Any], *options_and_args: Any, **kwargs: Any) -> _Steps:
    preserves, args = options_and_args[0], options_and_args[_OPTIONS:]
    return _generator(
        fn, args, preserves, lambda again: _torch_generators(again, *options_and_args, **kwargs)
    )


# Checkpoints rerun functions at the levels where they were made.
on_first_transform(
    setattr, torch.utils.checkpoint, _NAME, _current if _NAME == _CURRENT else _former
)


def _generator(
    fn: Callable[..., Any],
    args: Sequence[Any],
    preserves_draws: bool,
    make: Callable[[Callable[..., Any]], _Steps],
) -> _Steps:
    """Return the steps of a checkpoint whose function runs again at the levels of this call.

    Args:
        preserves_draws: True if the function draws the same random numbers again.
        make: makes torch's generator for the function that runs again.
    """
    state = tls.state
    level_of_args = innermost_level(args)
    if not state.levels and level_of_args is not None:
        state = level_of_args.inner  # for a thread that was started inside of the level
    captured = [level.torch_state for level in state.levels if isinstance(level, TracerLevel)]
    derivatives = max(outermost.recording, int(differentiates_here()))
    recorded = [(x, x.autograd) for x in state.levels if isinstance(x, TracerLevel)]
    duals = Duals(state)
    record = RunRecord(current_trace() if preserves_draws else None)
    snapshot = DrawCountSnapshot()
    states = replaced_states()
    first, in_formula = next(serials), in_backward_formula()

    @restoring_thread_state
    def rerun(*args: Any, **kwargs: Any) -> Any:
        with (
            reenter(state.with_fresh_remap_args()),
            mark_rerun(Rerun(first), captured, in_formula),
            _recording_at(recorded),
            _inside_derivatives(derivatives),
            reuse_recorded(record),
            snapshot.replaying(),
            with_states(states),
            duals.rerun(args) as rerun_args,
        ):
            return fn(*rerun_args, **kwargs)

    return _rerunnable_steps(make(rerun), duals, args, record)


def _rerunnable_steps(
    generator: _Steps, duals: Duals, args: Sequence[Any], record: RunRecord
) -> _Steps:
    """Return the steps of the generator; the function's first run is at the ``yield``."""
    next(generator)
    try:
        with (
            duals.first(args) if duals.levels else nullcontext(),
            using(tls.state.with_fresh_remap_args()),
            recording_objects(record),
        ):
            yield
    except BaseException as error:
        generator.throw(error)
        raise
    yield from generator


@contextmanager
def _recording_at(levels: Sequence[tuple[TracerLevel, int]]) -> Iterator[None]:
    """Context manager: levels record autograd at least as often as in the given counts."""
    added = [(level, max(0, count - level.autograd)) for level, count in levels]
    for level, more in added:
        level.autograd += more
    try:
        yield
    finally:
        for level, more in added:
            level.autograd -= more


@contextmanager
def _inside_derivatives(count: int) -> Iterator[None]:
    """Context manager: the given number of derivatives record on this thread.

    Some operators are decomposed inside of several derivatives (NOTE [derivatives of forward
    formulas]), and a function that runs again must save as many tensors as before.
    """
    with overriding(outermost, recording=count), watching_random() if count > 1 else nullcontext():
        yield


def is_reentrant(cls: type) -> bool:
    """True if a Function is the reentrant form and a transform is active."""
    if cls is not CheckpointFunction:
        return False
    return differentiates_here() or innermost_of(TracerLevel) is not None


def not_reentrant(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    """Run the non-reentrant form, with the arguments of the reentrant form's node."""
    return torch.utils.checkpoint.checkpoint(
        function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
    )
