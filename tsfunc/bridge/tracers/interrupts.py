"""The state of a thread around its outermost transform, restored if an interrupt cuts it off.

NOTE [interrupts]
A signal handler may raise between any two steps of a thread (Ctrl-C raises KeyboardInterrupt),
also between the steps that enter or leave a level. Python runs handlers at the start of a Python
function, at the back edge of a loop, and after calls into C: never between plain assignments, and
never between a ``with`` statement and the methods of a context manager written in C. Two
constructs therefore protect the outermost call of a transform: one C++ guard, which restores
torch's dispatch keys, and a ``finally`` block with only assignments. If the call raises,
``_restore`` restores all other state. If an interrupt stops ``_restore``, it runs again; if that
run is stopped, too, the next outermost call restores the state before it begins.

A call is any entry into this package that changes the state of the thread for a while: a public
transform, a program (unless it consists of torch's operators alone), a trace, and the calls of
autograd in a backward pass that the user has started.

The state is restored in three ways:

- Changes that transforms make for the time of a block are undone: NOTE [changes undone after an
  interrupt].
- torch's context managers are Python, and an interrupt may cut off their first or last steps:
  ``torch.no_grad`` has turned grad mode off, and is not entered. Only dispatch keys and what C++
  guards hold are safe. Everything else that transforms and the functions in them change by a
  context manager is read before the call, by the cheapest functions, and compared after a failure.
- A torch guard that an interrupted frame has entered and not left restores older keys when it is
  freed. The traceback keeps such frames, so their variables are released before the keys are
  restored: NOTE [guards in frames].

torch's own dispatch modes would end the process, and so would its fake tensors: NOTE [modes that
enter themselves] and NOTE [metadata without interrupts] in ``mode_handlers``.

NOTE [changes undone after an interrupt]
A signal handler may raise where a block begins or ends: after a change was made and before the
block protects it, or in the middle of the code that undoes it. Two kinds of changes would outlive
the call then. Both are undone when the thread's outermost transform is left with an exception:

- attributes of a ``threading.local``: those of the locals in ``resets`` are at their defaults
  whenever no transform runs, and are reset to them;
- changes elsewhere (a flag of torch's, the threshold of the garbage collector, a method of a user's
  class): the block is an ``undoing``, which notes the function that undoes the change before it is
  made, and drops the note after the function has run to its end. The functions that are still noted
  run again, the last one first.

NOTE [guards in frames]
Some of torch's Python functions hold a dispatch guard in a local variable (``guard =
torch._C._DisableFuncTorch()``, while a tensor is printed). If such a function raises, the traceback
keeps its frame, and so the guard. When the exception is freed, at any later time, the guard
restores the thread's dispatch keys to those of the call of the function. Inside a trace these keys
exclude the Python key, and kernels get tensors without memory. A block that restores the keys
therefore clears torch's frames in the traceback first.

NOTE [errors in place of interrupts]
An interrupt may stop torch's code between two steps that belong together. The ``finally`` block or
the ``__exit__`` around it then fails ("trying to set the current ProxyTorchDispatchMode, but one
already exists"), and this error takes the place of the interrupt, which is its context. The
outermost call raises the interrupt instead. The first frame of the interrupt's traceback is the one
that was handling it when the error was raised: if that is a frame of the user's code, the user has
caught the interrupt and the error stays.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dis import opmap
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from types import FrameType
from typing import Any, Final, TypeVar, cast

import torch
from torch._C import (  # type: ignore[attr-defined]
    _autograd,
    _functorch,
    _get_torch_function_state,
    _InferenceMode,
    _is_fwd_grad_enabled,
    _is_torch_function_enabled,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
    _only_lift_cpu_tensors,
    _pop_torch_function_stack,
    _PreserveDispatchKeyGuard,
    _push_on_torch_function_stack,
    _set_fwd_grad_enabled,
    _set_grad_enabled,
    _set_only_lift_cpu_tensors,
    _set_torch_function_state,
    _TorchFunctionState,
    autocast_decrement_nesting,
    autocast_increment_nesting,
    clear_autocast_cache,
    get_autocast_dtype,
    is_autocast_cache_enabled,
    is_grad_enabled,
    is_inference_mode_enabled,
    set_autocast_cache_enabled,
    set_autocast_dtype,
)
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _python_dispatch

from tsfunc import hooks
from tsfunc.bridge.tracers.dynamo import run_compiled_code_eagerly
from tsfunc.bridge.tracers.mode_handlers import guard_handlers, put_back, replace, replacements
from tsfunc.dispatch.state import active_levels, tls
from tsfunc.user_code import MODULES, AbandonedRun

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")

# --- changes for the time of a block


class _Noted(threading.local):
    """The blocks of a thread that are not left yet, the innermost last."""

    def __init__(self) -> None:
        self.blocks: list[undoing] = []


_noted: Final = _Noted()


class undoing:
    """Context manager: undo a change at the end of the block, whatever ends it.

    Args:
        undo: called at the end of the block, perhaps more than once, and perhaps before the change
            was made. It must set the value from before the block, and not count changes.
    """

    __slots__ = ("_undo",)

    def __init__(self, undo: Callable[[], object]) -> None:
        self._undo = undo

    def __enter__(self) -> None:
        if is_dynamo_compiling():
            return
        _noted.blocks.append(self)

    def __exit__(self, *error: object) -> None:
        if is_dynamo_compiling():
            self._undo()
            return
        blocks = _noted.blocks
        # A block that an interrupt cut off may end later, when its frame is freed.
        if self in blocks:
            _undo_to(blocks.index(self))


def open_blocks() -> int:
    """Return the number of blocks of this thread that are not left yet."""
    return len(_noted.blocks)


def _undo_to(count: int) -> None:
    """Undo the changes of all blocks of this thread but the first ``count``."""
    blocks = _noted.blocks
    while len(blocks) > count:
        blocks[-1]._undo()
        blocks.pop()


@contextlib.contextmanager
def while_torch_traces() -> Iterator[None]:
    """Let torch trace: an interrupt does not end the process, nor leave anomaly mode switched on.

    See NOTE [metadata without interrupts] in ``mode_handlers``. AOTAutograd traces derivatives in
    anomaly mode, which is one switch for the process.
    """
    handlers = replacements()
    anomaly = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    with (
        undoing(functools.partial(torch.set_anomaly_enabled, *anomaly)),
        undoing(functools.partial(put_back, handlers)),
    ):
        replace(handlers)
        yield


_L = TypeVar("_L", bound=threading.local)
_locals: list[Any] = []


def resets(local: _L) -> _L:
    """Register a local of threads that is at its defaults whenever no transform runs."""
    _locals.append(local)
    return local


# --- torch's state of a thread


_ENABLED = _TorchFunctionState.ENABLED
_FLAGS = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)
_top_hooks = _autograd._top_saved_tensors_default_hooks
_current_level = _functorch.maybe_current_level
# Guards that set inference mode after a failure: each would set the mode back when it is freed.
_inference_guards: list[Any] = []


def _thread_state() -> tuple[Any, ...]:
    return (
        is_inference_mode_enabled(),
        is_grad_enabled(),
        _is_fwd_grad_enabled(),
        _is_torch_function_enabled() or _get_torch_function_state(),
        _get_current_function_mode_stack() if _len_torch_function_stack() else (),
        _dispatch_modes() if _len_torch_dispatch_stack() else None,
        _current_level(),
        _top_hooks(True),
        _only_lift_cpu_tensors(),
        (_autocast_depth(), is_autocast_cache_enabled(), get_autocast_dtype("cpu")),
        (warnings.filters, warnings.showwarning, warnings._showwarnmsg_impl),  # type: ignore[attr-defined]
    )


def _restore_thread_state(before: tuple[Any, ...]) -> None:
    """Restore the state of this thread; an interrupt may stop it, and it may run again."""
    (
        inference, grad, forward, function_state, functions, dispatchers, functorch, hooks, lifts,
        autocast, filters,
    ) = before  # fmt: skip
    if is_inference_mode_enabled() is not inference:
        guard = _InferenceMode(inference)
        _inference_guards.append(guard)
        guard.__enter__()
    _set_fwd_grad_enabled(forward)
    _set_torch_function_state(_ENABLED if function_state is True else function_state)
    _restore_stack(
        functions, _get_current_function_mode_stack, _pop_torch_function_stack,
        _push_on_torch_function_stack,
    )  # fmt: skip
    _restore_dispatch_modes(dispatchers)
    while (_current_level() or 0) > (functorch or 0):
        _functorch.pop_dynamic_layer_stack()
    while not _same_hooks(now := _top_hooks(True), hooks) and now is not None:
        _autograd._pop_saved_tensors_default_hooks()
    if hooks is not None and _top_hooks(True) is None:
        _autograd._push_saved_tensors_default_hooks(*hooks)
    _set_only_lift_cpu_tensors(lifts)
    _restore_autocast(*autocast)
    _restore_warnings(*filters)
    _set_grad_enabled(grad)


def _restore_stack(
    before: Sequence[Any],
    now: Callable[[], Sequence[Any]],
    pop: Callable[[], Any],
    push: Callable[[Any], Any],
) -> None:
    """Replace the modes of a stack from the first one on that differs."""
    modes = now()
    same = 0
    while same < min(len(modes), len(before)) and modes[same] is before[same]:
        same += 1
    for _ in modes[same:]:
        pop()
    for mode in before[same:]:
        push(mode)


_Modes = tuple[Sequence[Any], Sequence[bool], Sequence[tuple[deque[bool], int]]]


def _dispatch_modes() -> _Modes:
    """Return the stack of dispatch modes, and torch's state about it in Python."""
    flags = vars(_python_dispatch)
    stack = _python_dispatch._get_current_dispatch_mode_stack()
    former_flags = [(x, len(x)) for mode in stack for x in _former_flags(mode)]
    return stack, [flags[name] for name in _FLAGS], former_flags


def _former_flags(mode: Any) -> list[deque[bool]]:
    """Return the stacks in which an active mode keeps the flags from before each of its blocks."""
    attributes: dict[str, Any] = getattr(mode, "__dict__", {})
    return [value for name, value in attributes.items() if name.endswith("dispatch_mode_flags")]


def _restore_dispatch_modes(before: _Modes | None) -> None:
    modes, flags, former_flags = before or ((), [False] * len(_FLAGS), ())
    for former, length in former_flags:  # a mode that enters itself again in its own handler
        while len(former) > length:
            former.pop()
    _restore_stack(
        modes,
        _python_dispatch._get_current_dispatch_mode_stack,
        _python_dispatch._pop_mode,
        _python_dispatch._push_mode,
    )
    vars(_python_dispatch).update(zip(_FLAGS, flags, strict=True))
    module: Any = _python_dispatch
    module.set_is_in_mode_without_ignore_compile_internals(flags[-1])


def _same_hooks(one: Any, other: Any) -> bool:
    """True for two pairs of hooks of saved tensors, or None, that are the same."""
    return one is other or (
        None not in (one, other) and all(a is b for a, b in zip(one, other, strict=True))
    )


def _autocast_depth() -> int:
    """Return the number of autocast blocks, which only the functions that change it tell."""
    try:
        return autocast_increment_nesting() - 1
    finally:
        autocast_decrement_nesting()


def _restore_autocast(depth: int, caches: bool, dtype: torch.dtype) -> None:
    while (now := _autocast_depth()) > depth:
        autocast_decrement_nesting()
        if now == 1:
            clear_autocast_cache()
    while _autocast_depth() < depth:
        autocast_increment_nesting()
    set_autocast_cache_enabled(caches)
    set_autocast_dtype("cpu", dtype)


def _restore_warnings(filters: Any, show: Any, show_message: Any) -> None:
    """Restore the state that ``warnings.catch_warnings`` replaces."""
    module: Any = warnings
    if module.filters is not filters:
        module.filters = filters
        with warnings.catch_warnings():  # its end clears what Python has cached of the filters
            pass
    module.showwarning, module._showwarnmsg_impl = show, show_message


# --- guards in the frames of a traceback


_TORCH_ROOT = os.path.dirname(torch.__file__) + os.sep
_OWN_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
_LIBRARIES = (_TORCH_ROOT, _OWN_ROOT, contextlib.__file__)
_SUSPENDABLE = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR
_YIELDS = tuple(opmap[name] for name in ("YIELD_VALUE", "YIELD_FROM", "SEND") if name in opmap)


def _may_go_on(frame: FrameType) -> bool:
    """True for the frame of a generator that may not have ended: clearing it ends it."""
    code = frame.f_code
    return bool(code.co_flags & _SUSPENDABLE) and code.co_code[max(frame.f_lasti, 0)] in _YIELDS


def release_guards(error: BaseException, *, ours: bool = False) -> None:
    """Free the locals of torch's frames in a traceback: NOTE [guards in frames].

    Modules and their functions hold no guards, and keep their locals: a note describes them.
    The thread's dispatch keys are arbitrary afterwards; the caller restores them.

    Args:
        ours: True to clear the frames of this package and of generator-based context managers
            too, which may hold guards that an interrupt stopped them from leaving.
    """
    roots = _LIBRARIES if ours else _TORCH_ROOT
    for exception in _with_causes(error):
        step = exception.__traceback__
        while step is not None:
            frame = step.tb_frame
            file = frame.f_code.co_filename
            if file.startswith(roots) and not file.startswith(MODULES) and not _may_go_on(frame):
                with suppress(RuntimeError):  # the frame is still executing
                    frame.clear()
            step = step.tb_next


def _with_causes(error: BaseException) -> list[BaseException]:
    """Return an exception, its causes and contexts, and theirs, each once."""
    found: dict[int, BaseException] = {}
    pending: list[BaseException | None] = [error]
    while pending:
        exception = pending.pop()
        if exception is not None and id(exception) not in found:
            found[id(exception)] = exception
            pending += (exception.__cause__, exception.__context__)
    return list(found.values())


# --- interrupts that an error of a library replaces


_NO_INTERRUPTS = (Exception, GeneratorExit, AbandonedRun)


def _replaced_interrupt(error: BaseException) -> BaseException | None:
    """Return the interrupt that led to an error: NOTE [errors in place of interrupts]."""
    for exception in _with_causes(error):
        if exception is error or isinstance(exception, _NO_INTERRUPTS):
            continue
        step = exception.__traceback__
        if step is not None and step.tb_frame.f_code.co_filename.startswith(_LIBRARIES):
            return exception
    return None


# --- the outermost transform


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


def _restore(before: tuple[Any, ...]) -> None:
    """Restore the state before an outermost transform that has failed."""
    state, recording, plain, dual, blocks, of_torch = before
    outermost.recording, outermost.forward = recording, plain
    for local in _locals:
        vars(local).clear()
        local.__init__()
    for leave in hooks.leave_dual_level.functions:
        leave(dual)
    _restore_thread_state(of_torch)
    me, levels = threading.get_ident(), set(state.levels)
    for level, thread in tuple(active_levels.items()):
        if thread == me and level not in levels:
            level.alive = False
            active_levels.pop(level, None)
    tls.state = state
    _undo_to(blocks)
    for function in hooks.transform_failed.functions:
        function()
    outermost.unrestored = None


def _compiled_code_is_unsupported() -> bool:
    """True inside the transforms whose values compiled code can't take."""
    return bool(tls.state.levels or outermost.forward or outermost.recording > 1)


def run_outermost(call: Callable[..., R], args: Sequence[Any], kwargs: Mapping[str, Any]) -> R:
    """Run the outermost transform of a thread; restore the thread's state when it is left."""
    if "torch._dynamo.eval_frame" in sys.modules:
        run_compiled_code_eagerly(_compiled_code_is_unsupported)
    guard_handlers()
    thread = outermost
    if thread.unrestored is not None:
        _restore(thread.unrestored)
    state = tls.state
    before = (
        state, thread.recording, thread.forward, forward_ad._current_level, open_blocks(),
        _thread_state(),
    )  # fmt: skip
    try:
        with thread.guard:
            try:
                thread.inside = True
                return call(*args, **kwargs)
            except BaseException as error:
                thread.unrestored = before
                release_guards(error, ours=True)
                raise
            finally:
                thread.inside = False
                tls.state = state
    except BaseException as error:
        _restore(before)
        interrupt = _replaced_interrupt(error)
        if interrupt is not None:
            raise interrupt from None
        raise
    finally:
        if thread.unrestored is not None:  # the restoration was interrupted
            _restore(before)


def restoring_thread_state(call: F) -> F:
    """Decorate a function that may be the outermost one of a thread: NOTE [interrupts]."""

    @functools.wraps(call)
    def entering(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or outermost.inside:
            return call(*args, **kwargs)
        return run_outermost(call, args, kwargs)

    return cast(F, entering)
