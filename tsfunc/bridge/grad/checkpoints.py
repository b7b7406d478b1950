"""``torch.utils.checkpoint``: functions that a backward pass runs again.

NOTE [run again in a backward pass]
A checkpoint keeps its function's inputs, and what autograd would have saved of the function is
computed again where a backward pass asks for it. Under ``grad(vmap(f))`` that is after the vmap has
ended, and it may be on another thread; but the inputs are values of the vmap, and random functions
are to draw as they did. So the function is run again under the dispatch state of the checkpoint,
and for so long the levels that have ended are active again.

The reentrant form is one node of the graph, whose backward runs another backward pass. Torch has it
refuse passes that are asked for certain inputs, as those of transforms are, and tracers of a level
where no autograd is recorded would go through it without a graph. Where a transform is active the
other form is run instead, which gives the same.

Private names used here (torch 2.11 to 2.13): ``torch.utils.checkpoint`` looks up
``_checkpoint_without_reentrant_generator`` for the one form and ``CheckpointFunction`` for the
other.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch.utils.checkpoint
from torch.utils.checkpoint import CheckpointFunction

from tsfunc.bridge.grad.autograd import differentiates_here, differentiating
from tsfunc.bridge.grad.duals import Duals
from tsfunc.bridge.tracers.ended import entered_again
from tsfunc.bridge.tracers.factories import on_first_transform
from tsfunc.bridge.tracers.reruns import another_run, first_run
from tsfunc.bridge.tracers.tracer import TracerLevel, current_tracer_level, innermost_level
from tsfunc.dispatch.state import tls, using

_theirs: Callable[..., Any] = torch.utils.checkpoint._checkpoint_without_reentrant_generator
_Steps = Generator[None, None, None]
# How many arguments it has between the function and the function's own arguments.
_OPTIONS = list(inspect.signature(_theirs).parameters).index("args") - 1


@on_first_transform
def _install() -> None:
    """Has checkpoints run their functions again at the levels that they were made in."""
    torch.utils.checkpoint._checkpoint_without_reentrant_generator = _generator


@functools.wraps(_theirs)
def _generator(fn: Callable[..., Any], *options: Any, **kwargs: Any) -> Any:
    state = tls.state
    options, args = options[:_OPTIONS], options[_OPTIONS:]
    given = innermost_level(args)
    if not state.levels and given is not None:
        state = given.inner  # on a thread that was started inside of it
    inside = differentiates_here()
    recorded = [(x, x.autograd) for x in state.levels if isinstance(x, TracerLevel)]
    duals = Duals(state)
    made: list[Any] = []

    def again(*args: Any, **kwargs: Any) -> Any:
        with (
            entered_again(state.forgetful()),
            _recording_at(recorded),
            differentiating() if inside else nullcontext(),
            another_run(made),
            duals.again(args) as given,
        ):
            return fn(*given, **kwargs)

    generator = _theirs(again, *options, *args, **kwargs)
    return _noting(generator, duals, args, made)


def _noting(generator: _Steps, duals: Duals, args: Sequence[Any], made: list[Any]) -> _Steps:
    """The generator, which yields where the function runs for the first time."""
    next(generator)
    try:
        with (
            duals.first(args) if duals.levels else nullcontext(),
            using(tls.state.forgetful()),
            first_run(made),
        ):
            yield
    except BaseException as error:
        generator.throw(error)
        raise
    yield from generator


@contextmanager
def _recording_at(levels: Sequence[tuple[TracerLevel, int]]) -> Iterator[None]:
    """Within the block levels record autograd where they did."""
    added = [(level, max(0, count - level.autograd)) for level, count in levels]
    for level, more in added:
        level.autograd += more
    try:
        yield
    finally:
        for level, more in added:
            level.autograd -= more


def is_reentrant(cls: type) -> bool:
    """Whether a function is the reentrant form, where the other one is to be run instead."""
    if cls is not CheckpointFunction:
        return False
    return differentiates_here() or current_tracer_level() is not None


def not_reentrant(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    """The other form, with the arguments of the reentrant one's node."""
    return torch.utils.checkpoint.checkpoint(
        function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
    )
