"""torch's state of a thread as it is before the outermost transform, restored if that fails.

torch's context managers are Python, and an interrupt may cut off their first or last steps:
``torch.no_grad`` has turned grad mode off, and is not entered. Only dispatch keys and what C++
guards hold are safe. Everything else that transforms and the functions in them change by a context
manager is read before the call, by the cheapest functions, and compared after a failure.

Private names used here (torch 2.13 and 2.14): ``_is_fwd_grad_enabled`` and its setter switch
forward mode, ``_get_torch_function_state`` and its setter calls of ``__torch_function__``; the
lengths of torch's mode stacks, and the functions that pop, push and list modes; in Python,
``_is_in_torch_dispatch_mode`` and two more flags repeat what the stack of dispatch modes says;
``_functorch`` has torch.func's stack; ``_autograd`` has the stack of hooks of saved tensors;
``_InferenceMode`` sets inference mode; ``_only_lift_cpu_tensors`` is a flag that fake modes set.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

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
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _python_dispatch

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


def thread_state() -> tuple[Any, ...]:
    """Return the state of this thread."""
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


def restore_thread_state(before: tuple[Any, ...]) -> None:
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
    """Return the stack of dispatch modes, and what torch keeps about it in Python."""
    flags = vars(_python_dispatch)
    stack = _python_dispatch._get_current_dispatch_mode_stack()
    kept = [(x, len(x)) for mode in stack for x in _former_flags(mode)]
    return stack, [flags[name] for name in _FLAGS], kept


def _former_flags(mode: Any) -> list[deque[bool]]:
    """Return the stacks in which an active mode keeps the flags from before each of its blocks."""
    own: dict[str, Any] = getattr(mode, "__dict__", {})
    return [value for name, value in own.items() if name.endswith("dispatch_mode_flags")]


def _restore_dispatch_modes(before: _Modes | None) -> None:
    modes, flags, kept = before or ((), [False] * len(_FLAGS), ())
    for former, length in kept:  # a mode that enters itself again in its own handler
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
    """Return True for two pairs of hooks of saved tensors, or None, that are the same."""
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
    """Restore what ``warnings.catch_warnings`` replaces."""
    module: Any = warnings
    if module.filters is not filters:
        module.filters = filters
        with warnings.catch_warnings():  # its end clears what Python has cached of the filters
            pass
    module.showwarning, module._showwarnmsg_impl = show, show_message
