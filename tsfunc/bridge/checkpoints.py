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
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.utils.checkpoint
from torch.utils.checkpoint import CheckpointFunction

from tsfunc.bridge.autograd import differentiates_here, differentiating
from tsfunc.bridge.factories import on_first_transform, watching_random
from tsfunc.bridge.tracer import TracerLevel, current_tracer_level, innermost_level
from tsfunc.dispatch import Level
from tsfunc.dispatch.state import State, active_levels, tls, using

_theirs: Callable[..., Any] = torch.utils.checkpoint._checkpoint_without_reentrant_generator


@on_first_transform
def _install() -> None:
    """Has checkpoints run their functions again at the levels that they were made in."""
    torch.utils.checkpoint._checkpoint_without_reentrant_generator = _generator


@functools.wraps(_theirs)
def _generator(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    state = tls.state
    given = innermost_level(args)
    if not state.levels and given is not None:
        state = given.inner  # on a thread that was started inside of it
    if not state.levels and not differentiates_here():
        return _theirs(fn, *args, **kwargs)

    def again(*args: Any, **kwargs: Any) -> Any:
        with _entered_again(state), differentiating():
            return fn(*args, **kwargs)

    return _theirs(again, *args, **kwargs)


_running: Counter[int] = Counter()  # by its id, how often a level that has ended runs again
_lock = threading.Lock()


@contextmanager
def _entered_again(state: State) -> Iterator[None]:
    """The levels of a state are active, and it is this thread's, within the block."""
    with _lock:
        levels = [root for root in map(_root, state.levels) if not root.alive or _running[id(root)]]
        for level in levels:
            _running[id(level)] += 1
            level.alive = True
            active_levels[level] = threading.get_ident()
    try:
        with using(state), watching_random():
            yield
    finally:
        with _lock:
            for level in levels:
                _running[id(level)] -= 1
                if not _running[id(level)]:
                    del _running[id(level)]
                    level.alive = False
                    active_levels.pop(level, None)


def _root(level: Level) -> Level:
    return level.root if isinstance(level, TracerLevel) else level


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
