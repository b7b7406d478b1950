"""torch's thread-local state: the part that a level captures, and how it is restored.

NOTE [the factory keys]
Random and factory functions have no tensor argument that leads to a level. While a level that must
see them is active, a key that torch itself no longer uses is in the thread-local include set.
Python kernels registered for the key see exactly the operators that they are registered for, and
all other operators skip it at no cost. There are two such keys, because C++ makes small tensors of
its own in many operators (``x * 2`` makes a scalar): a vmap must see only the random functions, a
trace must see all of them. torch.vmap has a key of its own.

NOTE [autocast and rules]
Autocast is a property of the call. Its kernels are in C++, run before those of tracers, and cast
the arguments of the operators on torch's list; arguments at the dispatch handler have been cast
already. The operators that a rule calls in place of another operator must not cast again: on the
CPU autocast does not cast ``mv``, but would cast a ``matmul`` in its rule. Only the parts that a
composite would call itself are cast, if autocast was on at the function handler, which records
this, because C++ turns autocast off before the dispatch handler. Levels do not capture autocast.

NOTE [guards in frames]
Some of torch's Python functions hold a dispatch guard in a local variable (``guard =
torch._C._DisableFuncTorch()``, while a tensor is printed). If such a function raises, the traceback
keeps its frame, and so the guard. When the exception is freed, at any later time, the guard
restores the thread's dispatch keys to those of the call of the function. Inside a trace these keys
exclude the Python key, and kernels get tensors without memory. A block that restores the keys
therefore clears torch's frames in the traceback first.

Private names used here (torch 2.13 and 2.14 have them all; ``tests/bridge/test_private_names.py``
fails by name if one is missing):

- ``_dispatch_tls_local_include_set``, ``_dispatch_tls_local_exclude_set``: the C++ dispatcher's
  thread-local sets, which determine among others whether autograd and autocast apply;
- ``_dispatch_tls_is_dispatch_key_excluded``: whether a key is in the exclude set;
- ``_ForceDispatchKeyGuard``: replaces both sets for a block;
- ``_ExcludeDispatchKeyGuard``: adds to the exclude set for a block;
- ``_IncludeDispatchKeyGuard``: adds a key to the include set for a block;
- ``_parse_dispatch_key``, ``DispatchKeySet``, ``DispatchKey``;
- ``_dispatch_keyset_full_after``: all keys of a lower priority than one key;
- ``_len_torch_dispatch_stack``: the number of active dispatch modes on this thread;
- ``_get_dispatch_mode``, ``_TorchDispatchModeKey``: the active dispatch mode of a kind;
- ``_set_grad_enabled``: the function behind ``torch.set_grad_enabled``, as graphs call it;
- ``_is_any_autocast_enabled``: whether autocast is on for any device, and ``_DisableAutocast``,
  which excludes its keys for a block;
- ``_DisableTorchDispatch``: takes operators past all dispatch modes for a block;
- ``_is_fwd_grad_enabled``: whether operators push tangents on this thread, and
  ``forward_ad._set_fwd_grad_enabled``, which sets this for a block;
- ``_functorch.maybe_current_level``: the depth of torch.func's stack;
- ``_functorch.pyfunctorch.temporarily_clear_interpreter_stack``: deactivates the transforms of
  torch.func for a block;
- ``_dispatch_has_kernel_for_dispatch_key``: whether an operator has a kernel for a key;
- ``_current_graph_task_id``: not -1 on a thread that runs a backward pass.

A program is made under certain settings and serves calls under the same settings. They are read at
every call, so each is read by the cheapest function.

Private names used here (torch 2.13 and 2.14), each the C++ function behind a public one:
``_is_any_autocast_enabled`` (``is_autocast_enabled`` for every type of device),
``_get_deterministic_algorithms`` and ``_get_deterministic_algorithms_warn_only``,
``_get_cudnn_deterministic``, ``_get_cudnn_benchmark``, ``_get_float32_matmul_precision``;
``_len_torch_function_stack`` tells whether any function mode is active, such as the mode that
``set_default_device`` enters; ``nn.modules.module._has_any_global_hook``, and the dicts of these
hooks.
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dis import opmap
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from operator import or_
from types import FrameType, TracebackType
from typing import Any, Final, NamedTuple

import torch
from torch._C import (
    DisableTorchFunction,
    DispatchKeySet,
    _current_graph_task_id,
    _DisableAutocast,
    _DisableTorchDispatch,
    _dispatch_has_kernel_for_dispatch_key,
    _dispatch_keyset_full_after,
    _dispatch_tls_is_dispatch_key_excluded,
    _dispatch_tls_local_exclude_set,
    _dispatch_tls_local_include_set,
    _ExcludeDispatchKeyGuard,
    _ForceDispatchKeyGuard,
    _functorch,
    _get_cudnn_benchmark,
    _get_cudnn_deterministic,
    _get_deterministic_algorithms,
    _get_deterministic_algorithms_warn_only,
    _get_dispatch_mode,
    _get_float32_matmul_precision,
    _IncludeDispatchKeyGuard,
    _is_any_autocast_enabled,
    _is_fwd_grad_enabled,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
    _parse_dispatch_key,
    _set_grad_enabled,
    _TorchDispatchModeKey,
)
from torch._C import DispatchKey as TorchKey
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.nn.modules import module

from tsfunc.dispatch.state import outside_all_levels as outside_levels_of_ours
from tsfunc.dispatch.state import tls
from tsfunc.dispatch.undoing import resets
from tsfunc.tracebacks import MODULES

_is_grad_enabled = torch.is_grad_enabled
_TORCH_ROOT = os.path.dirname(torch.__file__) + os.sep
_OWN_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep

AUTOGRAD = DispatchKeySet(TorchKey.AutogradFunctionality).add(TorchKey.ADInplaceOrView)

RANDOM_KEY_NAME = "VmapMode"
FACTORY_KEY_NAME = "TESTING_ONLY_GenericMode"
_RANDOM_KEY: Any = _parse_dispatch_key(RANDOM_KEY_NAME)
_FACTORY_KEY: Any = _parse_dispatch_key(FACTORY_KEY_NAME)
_BOTH_KEYS = DispatchKeySet(_RANDOM_KEY).add(_FACTORY_KEY)


_AUTOCAST = tuple(key for name, key in TorchKey.__members__.items() if name.startswith("Autocast"))
_EVERY_AUTOCAST = functools.reduce(or_, map(DispatchKeySet, _AUTOCAST))


class _Casting(threading.local):
    """``exclude``: the exclude set at the function handler if autocast is on, None if it is off."""

    exclude: Any = None


casting = resets(_Casting())


def is_casting() -> bool:
    """True if autocast is on for this call, or was on at the function handler."""
    return casting.exclude is not None or _is_any_autocast_enabled()


class autocast_of_the_call:
    """Context manager that records autocast for the dispatch handler."""

    __slots__ = ("previous",)

    def __enter__(self) -> None:
        self.previous = casting.exclude
        on = _is_any_autocast_enabled()
        casting.exclude = _dispatch_tls_local_exclude_set() if on else None

    def __exit__(self, *error: object) -> None:
        casting.exclude = self.previous


class without_casting:
    """Context manager that disables autocast, also for the parts of composites."""

    __slots__ = ("guard", "previous")

    def __enter__(self) -> None:
        self.previous = casting.exclude
        self.guard = _DisableAutocast()
        self.guard.__enter__()
        casting.exclude = None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        casting.exclude = self.previous
        self.guard.__exit__(kind, error, trace)


def is_cast(name: str) -> bool:
    """True if autocast, as set for this call, has a kernel of its own for an operator."""
    exclude = casting.exclude or _dispatch_tls_local_exclude_set()
    return any(
        not exclude.has(key) and _dispatch_has_kernel_for_dispatch_key(name, key.name)
        for key in _AUTOCAST
    )


class _KeySets:
    """torch's dispatch key sets of a thread as levels capture them: without autocast.

    Attributes:
        include: the keys that are included.
        exclude: the keys that are excluded, among them all of autocast's.
        packed: both sets as 16 bytes, for compiled handlers.
        guards: free guards that restore the sets; threads share them, and each is entered once at
            a time.
    """

    __slots__ = ("exclude", "guards", "include", "packed")

    def __init__(self, include: Any, exclude: Any) -> None:
        self.include = include
        self.exclude = exclude | _EVERY_AUTOCAST
        self.packed = struct.pack("QQ", include.raw_repr(), self.exclude.raw_repr())
        self.guards: list[Any] = []


# The key sets that levels have captured: a process has few different ones.
_key_sets: dict[tuple[int, int], _KeySets] = {}
_MOST_KEY_SETS = 256


def _captured_key_sets() -> _KeySets:
    """Return the sets of this thread; equal sets are one object."""
    include, exclude = _dispatch_tls_local_include_set(), _dispatch_tls_local_exclude_set()
    key = include.raw_repr(), exclude.raw_repr()
    sets = _key_sets.get(key)
    if sets is None:
        if len(_key_sets) >= _MOST_KEY_SETS:
            _key_sets.clear()
        sets = _key_sets[key] = _KeySets(include, exclude)
    return sets


class TorchState:
    """The part of torch's thread-local state that a level captures, without autocast.

    ``rerun_by`` is the backward pass, by id, that runs the function again (``rerunning``), or -1.
    ``quiet`` is more than 0 while a backward pass runs over the graph of an outer level, and its
    results are not differentiated: the pass must not be recorded there. ``paused`` is True while
    ``grad_mode`` is False because a function turned grad mode off. ``guards`` are free guards that
    restore the sets for a single call; ``key_sets`` has both sets as 16 bytes, for compiled
    handlers.
    ``in_modes`` is True if dispatch modes were active: the include set then has their keys, which
    must not be restored after a mode's handler has removed the last mode.
    """

    __slots__ = (
        "exclude", "grad_mode", "guards", "in_modes", "include", "key_sets", "paused", "quiet",
        "rerun_by",
    )  # fmt: skip

    def __init__(self) -> None:
        sets = _captured_key_sets()
        self.include = sets.include
        self.exclude = sets.exclude
        self.guards = sets.guards
        self.key_sets = sets.packed
        self.grad_mode = _is_grad_enabled()
        self.in_modes = _len_torch_dispatch_stack() > 0
        self.quiet = 0
        self.rerun_by = _reruns.by
        self.paused = False

    def __call__(self) -> RestoredTorchState:
        return RestoredTorchState(self)


def _in_inference_mode(include: Any, exclude: Any) -> tuple[Any, Any]:
    """Return the sets as torch changes them when it enters inference mode."""
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        exclude = exclude.add(getattr(TorchKey, key))
    return include.remove(TorchKey.ADInplaceOrView), exclude


def _with_autocast(exclude: Any) -> Any:
    """Return the exclude set with autocast as set for this call."""
    return exclude - (_EVERY_AUTOCAST - casting.exclude)


def records_inside(state: TorchState) -> bool:
    """Return True if autograd records on the values inside of a level's tensors.

    The engine turns grad mode off while it runs a backward pass, which does not mean these values.
    """
    now = torch.is_grad_enabled() or (
        not state.quiet and _current_graph_task_id() not in (-1, state.rerun_by)
    )
    return state.grad_mode and now


class _Reruns(threading.local):
    """The backward pass, by id, that runs a function again on this thread, or -1."""

    by = -1


_reruns: Final = resets(_Reruns())


@contextmanager
def rerunning(states: Sequence[TorchState]) -> Iterator[None]:
    """Context manager: a backward pass runs a function again, which sets grad mode itself.

    Args:
        states: the states that the active levels have captured.
    """
    before, own = [state.rerun_by for state in states], _reruns.by
    _reruns.by = _current_graph_task_id()
    for state in states:
        state.rerun_by = _reruns.by
    try:
        yield
    finally:
        _reruns.by = own
        for state, by in zip(states, before, strict=True):
            state.rerun_by = by


def in_backward_formula() -> bool:
    """Return True in a backward pass, except in a function that the pass runs again."""
    return _current_graph_task_id() not in (-1, _reruns.by)


class RestoredTorchState:
    """Context manager that restores the captured sets, and grad mode off if it was captured so.

    A ``torch.no_grad()`` in the transformed function holds for outer levels too, as it would
    without the transform, and so does inference mode. The no_grad that the autograd engine sets
    for a backward pass does not: it applies only to the tracers' own level.
    """

    __slots__ = ("guard", "previous", "state")

    def __init__(self, state: TorchState) -> None:
        self.state = state

    def __enter__(self) -> None:
        state = self.state
        now = torch.is_grad_enabled()
        include, exclude = state.include, state.exclude
        if not now and torch.is_inference_mode_enabled():
            include, exclude = _in_inference_mode(include, exclude)
        if casting.exclude is not None:
            exclude = _with_autocast(exclude)
        if state.in_modes and not _len_torch_dispatch_stack():
            include = include.remove(TorchKey.Python).remove(TorchKey.PythonTLSSnapshot)
        self.guard = _ForceDispatchKeyGuard(include, exclude)
        self.guard.__enter__()
        want = records_inside(state)
        self.previous: bool | None = None
        if want is not now:
            self.previous = now
            torch.set_grad_enabled(want)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if value is not None:
            release_guards(value)
        if self.previous is not None:
            torch.set_grad_enabled(self.previous)
        self.guard.__exit__(kind, value, trace)


set_grad_mode = _set_grad_enabled
tangents_enabled = _is_fwd_grad_enabled
any_autocast = _is_any_autocast_enabled


def in_dispatch_modes() -> bool:
    """True if dispatch modes (``TorchDispatchMode``) are active on this thread."""
    return _len_torch_dispatch_stack() > 0


def in_fake_mode() -> bool:
    """True if a fake mode is active, as in a trace; fake tensors carry no tangents."""
    return _get_dispatch_mode(_TorchDispatchModeKey.FAKE) is not None


def below_autograd() -> bool:
    """True if torch is below its autograd here, as in the handlers of dispatch modes."""
    return _dispatch_tls_is_dispatch_key_excluded(TorchKey.ADInplaceOrView)


def without_autograd() -> Any:
    """Context manager: C++ skips autograd, so composites reach ``__torch_dispatch__`` whole."""
    return _ExcludeDispatchKeyGuard(AUTOGRAD)


def without_autocast() -> Any:
    """Context manager: operators run without autocast."""
    return _DisableAutocast()


def with_random_key() -> Any:
    """Context manager: random functions reach the kernels of ``registrations``."""
    return _IncludeDispatchKeyGuard(_RANDOM_KEY)


def with_factory_key() -> Any:
    """Context manager: other factory functions reach the kernels of ``registrations``."""
    return _IncludeDispatchKeyGuard(_FACTORY_KEY)


def after(key: str) -> Any:
    """Return the dispatch keys after one, for a kernel that redispatches its call."""
    parsed: Any = _parse_dispatch_key(key)
    return _dispatch_keyset_full_after(parsed)


def is_storing_data() -> bool:
    """Return True while ``torch.tensor(data)`` makes the tensor that it will write the data to.

    torch.tensor disables torch.func's wrappers meanwhile, which have no memory either. A call of
    ``lift_fresh`` follows, which returns the result.
    """
    return _dispatch_tls_is_dispatch_key_excluded(TorchKey.FuncTorchDynamicLayerFrontMode)


def without_tangents() -> Any:
    """Context manager: no operator pushes tangents."""
    return forward_ad._set_fwd_grad_enabled(False)


def without_factory_keys() -> Any:
    """Context manager: factory and random functions are torch's own."""
    return _ExcludeDispatchKeyGuard(_BOTH_KEYS)


def outside_functorch() -> AbstractContextManager[Any]:
    """Context manager: no torch.func transform is active, which would wrap new tensors."""
    active = _functorch.maybe_current_level() is not None
    return temporarily_clear_interpreter_stack() if active else nullcontext()


_SUSPENDABLE = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR
_YIELDS = tuple(opmap[name] for name in ("YIELD_VALUE", "YIELD_FROM", "SEND") if name in opmap)


def _may_go_on(frame: FrameType) -> bool:
    """Return True for the frame of a generator that may not have ended: clearing it ends it."""
    code = frame.f_code
    return bool(code.co_flags & _SUSPENDABLE) and code.co_code[max(frame.f_lasti, 0)] in _YIELDS


def release_guards(error: BaseException, *, ours: bool = False) -> None:
    """Free the locals of torch's frames in a traceback: NOTE [guards in frames].

    Modules and their functions hold no guards, and keep their locals: a note describes them.
    The thread's dispatch keys are arbitrary afterwards; the caller restores them.

    Args:
        error: the exception with the traceback.
        ours: whether to clear the frames of this package and of generator-based context managers
            too, which may hold guards that an interrupt stopped them from leaving.
    """
    roots = (_TORCH_ROOT, _OWN_ROOT, contextlib.__file__) if ours else _TORCH_ROOT
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        exception = pending.pop()
        if exception is None or id(exception) in seen:
            continue
        seen.add(id(exception))
        pending += (exception.__cause__, exception.__context__)
        step = exception.__traceback__
        while step is not None:
            frame = step.tb_frame
            file = frame.f_code.co_filename
            if file.startswith(roots) and not file.startswith(MODULES) and not _may_go_on(frame):
                with suppress(RuntimeError):  # the frame is still executing
                    frame.clear()
            step = step.tb_next


@contextmanager
def preserve_dispatch_keys() -> Iterator[None]:
    """Context manager: restore the thread's dispatch keys, whatever the block raises."""
    include, exclude = _dispatch_tls_local_include_set(), _dispatch_tls_local_exclude_set()
    with _ForceDispatchKeyGuard(include, exclude):
        try:
            yield
        except BaseException as error:
            release_guards(error)
            raise


@contextmanager
def outside_all_levels() -> Iterator[None]:
    """Context manager: set torch's dispatch keys as if no level and no handler were active.

    No torch.func transform is active in the block either: on their way outwards, its kernels
    expect the dispatcher in the state in which they left it. The Python key is never excluded in
    the block, because tracers without it would be tensors without memory.
    """
    with outside_functorch():
        include = _dispatch_tls_local_include_set().remove(_RANDOM_KEY).remove(_FACTORY_KEY)
        exclude = _dispatch_tls_local_exclude_set().remove(TorchKey.Python)
        with _ForceDispatchKeyGuard(include, exclude):
            try:
                yield
            except BaseException as error:
                release_guards(error)
                raise


@contextmanager
def on_plain_tensors() -> Iterator[None]:
    """Context manager: torch runs on plain tensors; no level, mode or graph sees it."""
    with (
        outside_all_levels(),
        outside_levels_of_ours(),
        DisableTorchFunction(),
        _DisableTorchDispatch(),
        torch.no_grad(),
    ):
        yield


# --- settings that a program depends on


class Setting(NamedTuple):
    """A setting: its name, and the function that reads it."""

    name: str
    read: Callable[[], Any]


def autocast() -> tuple[Any, ...]:
    """Return the dtype of each device type with autocast on, and whether casts are cached."""
    if not _is_any_autocast_enabled():
        return ()
    dtypes = [(kind, torch.get_autocast_dtype(kind)) for kind in _autocast_devices()
             if torch.is_autocast_enabled(kind)]  # fmt: skip
    return (*dtypes, torch.is_autocast_cache_enabled())


@functools.cache
def _autocast_devices() -> tuple[str, ...]:
    kinds = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla", "privateuseone")
    return tuple(kind for kind in kinds if torch.amp.is_autocast_available(kind))


def mesh_axes() -> str:
    """Return the mesh axes that are bound, with their sizes and checks."""
    levels = tls.state.levels
    return "; ".join([level.binding for level in levels if level.binding]) if levels else ""


def default_device() -> torch.device:
    """Return the device on which factories make tensors."""
    # torch's function costs as much as ten operators; without function modes the device is the
    # CPU.
    return torch.get_default_device() if _len_torch_function_stack() else _CPU


_CPU = torch.device("cpu")

_PLAIN = (
    Setting("grad mode", torch.is_grad_enabled),
    Setting("inference mode", torch.is_inference_mode_enabled),
    Setting("default dtype", torch.get_default_dtype),
    Setting("deterministic algorithms", _get_deterministic_algorithms),
    Setting("warn_only of deterministic algorithms", _get_deterministic_algorithms_warn_only),
    Setting("cudnn.deterministic", _get_cudnn_deterministic),
    Setting("cudnn.benchmark", _get_cudnn_benchmark),
    Setting("float32 matmul precision", _get_float32_matmul_precision),
    Setting("mesh axes", mesh_axes),
)
SETTINGS = (*_PLAIN, Setting("autocast", autocast), Setting("default device", default_device))


def is_persistent(owner: torch.nn.Module, name: str) -> bool:
    """True if a module's buffer is part of its ``state_dict()``, which may have hooks."""
    return name not in owner._non_persistent_buffers_set


def hooks_of_all_modules() -> tuple[Any, ...]:
    """Return the hooks that torch calls with every module, in order."""
    if not module._has_any_global_hook():
        return ()
    kinds = (
        module._global_forward_pre_hooks, module._global_forward_hooks,
        module._global_backward_pre_hooks, module._global_backward_hooks,
    )  # fmt: skip
    return tuple(hook for kind in kinds for hook in kind.values())


def settings() -> tuple[Any, ...]:
    """Return the values of all settings, in the order of ``SETTINGS``."""
    return tuple([setting.read() for setting in SETTINGS])


def settings_condition(now: tuple[Any, ...], scope: dict[str, Any]) -> str:
    """Return a Python expression that is true if the settings have changed.

    Args:
        now: the result of :func:`settings`.
        scope: receives the names in the expression.
    """
    *plain, casts, device = now
    parts = []
    for i, (setting, value) in enumerate(zip(_PLAIN, plain, strict=True)):
        if value == "":
            continue  # with no axis bound, the function has found none
        scope[f"setting_{i}"], scope[f"is_{i}"] = setting.read, value
        same = "is" if isinstance(value, bool | torch.dtype) else "=="
        parts.append(f"setting_{i}() {'is not' if same == 'is' else '!='} is_{i}")
    scope |= {"autocast": autocast, "any_autocast": _is_any_autocast_enabled, "casts": casts}
    scope |= {"modes": _len_torch_function_stack, "device": device}
    scope["default_device"] = default_device
    parts.append("autocast() != casts" if casts else "any_autocast()")
    ours = "default_device() != device"
    parts.append(f"modes() and {ours}" if device == _CPU else ours)
    return " or ".join(parts)
