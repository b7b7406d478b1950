"""The boundary of a transform: the thread's state, and the user's lines of calls.

The boundary folds the traceback of an error: NOTE [folded tracebacks] in ``tracebacks.py``.

NOTE [interrupts]
A signal handler may raise between any two steps of a thread (Ctrl-C raises KeyboardInterrupt),
also between the steps that enter or leave a level. Python runs handlers at the start of a Python
function, at the back edge of a loop, and after calls into C: never between plain assignments, and
never between a ``with`` statement and the methods of a context manager written in C. Two
constructs therefore protect the outermost call of a transform: one C++ guard, which restores
torch's dispatch keys, and a ``finally`` block with only assignments. If the call raises, all other
state is restored (``_restore``), once more if that is interrupted, and first of all by the next
outermost call if that is interrupted too.

A call is any entry into this package that changes the state of the thread for a while: a public
transform, a program (unless it consists of torch's operators alone), a trace, and what autograd
calls in a backward pass that the user has started.

A torch guard that an interrupted frame has entered and not left restores older keys when it is
freed. The traceback keeps such frames, so their variables are released before the keys are
restored (NOTE [guards in frames] in ``torch_state``).

Private names used here (torch 2.13 and 2.14): ``_PreserveDispatchKeyGuard`` restores the thread's
dispatch keys; ``forward_ad._current_level`` is torch's dual level.
"""

from __future__ import annotations

import bisect
import functools
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, TypeVar, cast

import torch
from torch._C import (
    DisableTorchFunctionSubclass,
    _autograd,
    _current_autograd_node,
    _PreserveDispatchKeyGuard,
)
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from tsfunc.bridge.tracers.dynamo import copy_outside_dynamo, run_compiled_code_eagerly
from tsfunc.bridge.tracers.thread_state import restore_thread_state, thread_state
from tsfunc.bridge.tracers.torch_state import release_guards
from tsfunc.config import config
from tsfunc.dispatch.state import active_levels, tls
from tsfunc.dispatch.undoing import open_blocks, reset_locals, run_after_failure, undo_to
from tsfunc.dispatch.user_code import user_location
from tsfunc.tracebacks import Location, describes_arguments, fold, is_boundary, label

# --- the thread's state at the outermost transform


F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")


class _OutermostTransform(threading.local):
    """The outermost transform of a thread.

    Attributes:
        inside: True while a transform runs.
        unrestored: the state before a transform that could not restore all of it.
        guard: restores the dispatch keys when it is left.
        random_guards: free guards of ``watching_random``; making one costs more than entering it.
        recording: the number of transforms that record on this thread.
        forward: the number of jvps that put tangents on plain tensors on this thread.
    """

    inside = False
    unrestored: tuple[Any, ...] | None = None
    recording = 0
    forward = 0

    def __init__(self) -> None:
        self.guard = _PreserveDispatchKeyGuard()
        self.random_guards: list[Any] = []


outermost = _OutermostTransform()

# Called with the index of torch's dual level before the transform, -1 for none.
_leave_dual_level: list[Callable[[int], None]] = []


def leaves_dual_level(restore: Callable[[int], None]) -> Callable[[int], None]:
    """Register a function that leaves torch's dual level after a failure."""
    _leave_dual_level.append(restore)
    return restore


def _restore(before: tuple[Any, ...]) -> None:
    """Restore the state before an outermost transform that has failed."""
    state, recording, plain, dual, blocks, of_torch = before
    outermost.recording, outermost.forward = recording, plain
    reset_locals()
    for leave in _leave_dual_level:
        leave(dual)
    restore_thread_state(of_torch)
    me, kept = threading.get_ident(), set(state.levels)
    for level, thread in tuple(active_levels.items()):
        if thread == me and level not in kept:
            level.alive = False
            active_levels.pop(level, None)
    tls.state = state
    undo_to(blocks)
    run_after_failure()
    outermost.unrestored = None


def _compiled_code_is_unsupported() -> bool:
    """Return True inside the transforms whose values compiled code can't take."""
    return bool(tls.state.levels or outermost.forward or outermost.recording > 1)


def run_outermost(call: Callable[..., R], args: Sequence[Any], kwargs: Mapping[str, Any]) -> R:
    """Run the outermost transform of a thread; restore the thread's state when it is left."""
    if "torch._dynamo.eval_frame" in sys.modules:
        run_compiled_code_eagerly(_compiled_code_is_unsupported)
    own = outermost
    if own.unrestored is not None:
        _restore(own.unrestored)
    state = tls.state
    before = (
        state, own.recording, own.forward, forward_ad._current_level, open_blocks(), thread_state(),
    )  # fmt: skip
    try:
        with own.guard:
            try:
                own.inside = True
                return call(*args, **kwargs)
            except BaseException as error:
                own.unrestored = before
                release_guards(error, ours=True)
                raise
            finally:
                own.inside = False
                tls.state = state
    except BaseException:
        _restore(before)
        raise
    finally:
        if own.unrestored is not None:  # the restoration was interrupted
            _restore(before)


def restoring_thread_state(call: F) -> F:
    """Decorate a function that may be the outermost one of a thread: NOTE [interrupts]."""

    @functools.wraps(call)
    def entering(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or outermost.inside:
            return call(*args, **kwargs)
        return run_outermost(call, args, kwargs)

    return cast(F, entering)


# --- the public calls


def boundary(name: str, func: Any = None, traceable: bool = False) -> Callable[[F], F]:
    """Decorate a callable that users call: the traceback of an error that leaves it is folded.

    The outermost one of a thread restores the thread's state: NOTE [interrupts].

    Args:
        name: the transform's name in the note.
        func: the user's function, if the callable is made for one.
        traceable: True if Dynamo may trace the callable, which then delegates to torch.func's
            transform; otherwise Dynamo traces neither the callable nor its callees.
    """

    def decorate(entry: F) -> F:
        def entered(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling():
                return entry(*args, **kwargs)
            try:
                call: Callable[..., Any] = entry
                if config.debug_nans_set:
                    call, args, kwargs = watched_for_nans, (entry, args, kwargs), {}
                if outermost.inside:
                    return call(*args, **kwargs)
                return run_outermost(call, args, kwargs)
            except Exception as error:
                fold(error, lambda: label(name, func))
                raise

        is_boundary(entered)
        wrapped: Any = functools.wraps(entry)(
            entered if traceable else copy_outside_dynamo(entered)
        )
        return cast(F, wrapped)

    return decorate


WatchedCall = Callable[[Callable[..., Any], Any, Any], Any]
_watch: list[WatchedCall] = []


def on_debug_nans(call: WatchedCall) -> WatchedCall:
    """Register the function that makes a call and looks for NaNs."""
    _watch.append(call)
    return call


def watched_for_nans(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function and look for NaNs: ``config.debug_nans``."""
    return _watch[0](func, args, kwargs)


@describes_arguments
def _arguments(frame: FrameType) -> str:
    """Return the tensors among the arguments of a function, by name, as text."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    shown = []
    for name in code.co_varnames[:count]:
        value: Any = frame.f_locals.get(name)
        # isinstance would fail for a stand-in of a value of type Any.
        if issubclass(type(value), torch.Tensor):
            with DisableTorchFunctionSubclass():
                shape = ", ".join(map(_size, value.shape))
                shown.append(f"{name}: {str(value.dtype).removeprefix('torch.')}[{shape}]")
    return ", ".join(shown)


def _size(size: Any) -> str:
    """Return a size as text: an int, or an expression of named dims."""
    symbols = getattr(size.node.shape_env, "symbols", None) if type(size) is torch.SymInt else None
    return str(size) if symbols is None else str(symbols.spell_size(size))


# --- the user's lines of calls


class UserLines:
    """Finds the user's line of a call; in a backward pass, the line of the forward call.

    Autograd numbers its nodes as it makes them, each just before its operator reaches a tracer.
    The node with number n therefore belongs to the first call that found the counter beyond n.
    """

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._locations: list[Location] = []

    def here(self) -> tuple[Location, bool]:
        """Return the line, and whether the call belongs to its backward pass."""
        node = _current_autograd_node()
        location = self._of(node._sequence_nr()) if node is not None else None
        backward = location is not None
        location = location or user_location()
        number = _autograd._get_sequence_nr()
        # An autograd thread has a counter of its own.
        if not self._numbers or number >= self._numbers[-1]:
            self._numbers.append(number)
            self._locations.append(location)
        return location, backward

    def _of(self, number: int) -> Location | None:
        i = bisect.bisect_right(self._numbers, number)
        return self._locations[i] if i < len(self._locations) else None
