"""Restores a thread's state when its outermost transform ends, even if it is interrupted.

NOTE [interrupts]
A signal handler may raise between any two steps of a thread (Ctrl-C raises KeyboardInterrupt),
also between the steps that enter or leave a level. Python runs handlers at the start of a Python
function, at the back edge of a loop, and after calls into C: never between plain assignments, and
never between a ``with`` statement and the methods of a context manager written in C. Two
constructs therefore protect the outermost call of a transform: one C++ guard, which restores
torch's dispatch keys, and a ``finally`` block with only assignments. All other state is restored
if the call raises. If that is interrupted too, the next outermost call restores it first.

A torch guard that an interrupted frame has entered and not left restores older keys when it is
freed. The traceback keeps such frames, so their variables are released before the keys are
restored (NOTE [guards in frames] in ``torch_state``).

Private names used here (torch 2.11 to 2.14): ``_PreserveDispatchKeyGuard`` restores the thread's
dispatch keys; ``_is_fwd_grad_enabled`` and its setter switch forward mode,
``_get_torch_function_state`` and its setter calls of ``__torch_function__``; the lengths of torch's
mode stacks, and the functions that pop a mode; ``_functorch`` has torch.func's stack.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from torch._C import (  # type: ignore[attr-defined]
    _functorch,
    _get_torch_function_state,
    _is_fwd_grad_enabled,
    _is_torch_function_enabled,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
    _PreserveDispatchKeyGuard,
    _set_fwd_grad_enabled,
    _set_grad_enabled,
    _set_torch_function_state,
    _TorchFunctionState,
    is_grad_enabled,
)
from torch.autograd import forward_ad
from torch.overrides import _pop_mode
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode

from tsfunc.bridge.tracers.dynamo import run_compiled_as_python
from tsfunc.bridge.tracers.torch_state import casting, release_guards
from tsfunc.dispatch.state import active_levels, tls

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")

_ENABLED = _TorchFunctionState.ENABLED


class _Entered(threading.local):
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


entered = _Entered()

# Called with the index of torch's dual level before the transform, -1 for none.
_leave_dual_level: list[Callable[[int], None]] = []


def leaves_dual_level(restore: Callable[[int], None]) -> Callable[[int], None]:
    """Register a function that leaves torch's dual level after a failure."""
    _leave_dual_level.append(restore)
    return restore


def _restore(before: tuple[Any, ...]) -> None:
    (
        state, recording, plain, grad, forward, function_state, functions, modes, functorch, cast,
        dual,
    ) = before  # fmt: skip
    tls.state = state
    entered.recording, entered.forward, casting.exclude = recording, plain, cast
    _set_grad_enabled(grad)
    _set_fwd_grad_enabled(forward)
    _set_torch_function_state(_ENABLED if function_state is True else function_state)
    for leave in _leave_dual_level:
        leave(dual)
    while _len_torch_function_stack() > functions:
        _pop_mode()
    while _len_torch_dispatch_stack() > modes:
        _pop_dispatch_mode()
    while (_functorch.maybe_current_level() or 0) > (functorch or 0):
        _functorch.pop_dynamic_layer_stack()
    me, kept = threading.get_ident(), set(state.levels)
    for level, thread in tuple(active_levels.items()):
        if thread == me and level not in kept:
            level.alive = False
            active_levels.pop(level, None)


def _beyond_compiled_code() -> bool:
    """Return True inside the transforms whose values compiled code can't take."""
    return bool(tls.state.levels or entered.forward or entered.recording > 1)


def leave_whole(call: Callable[..., R], args: Sequence[Any], kwargs: Mapping[str, Any]) -> R:
    """Run the outermost transform of a thread; restore the thread's state when it is left."""
    run_compiled_as_python(_beyond_compiled_code)
    own = entered
    if own.unrestored is not None:
        _restore(own.unrestored)
        own.unrestored = None
    state = tls.state
    before = (
        state, own.recording, own.forward, is_grad_enabled(), _is_fwd_grad_enabled(),
        _is_torch_function_enabled() or _get_torch_function_state(),
        _len_torch_function_stack(), _len_torch_dispatch_stack(),
        _functorch.maybe_current_level(), casting.exclude, forward_ad._current_level,
    )  # fmt: skip
    with own.guard:
        try:
            own.inside = True
            return call(*args, **kwargs)
        except BaseException as error:
            own.unrestored = before
            release_guards(error, ours=True)
            _restore(before)
            own.unrestored = None
            raise
        finally:
            own.inside = False
            tls.state = state


def protected(call: F) -> F:
    """Decorate a function that may be the outermost one of a thread: NOTE [interrupts]."""

    @functools.wraps(call)
    def entering(*args: Any, **kwargs: Any) -> Any:
        if entered.inside:
            return call(*args, **kwargs)
        return leave_whole(call, args, kwargs)

    return cast(F, entering)
