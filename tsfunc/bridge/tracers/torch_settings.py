"""torch's settings: those in which a function is traced, and those that its program depends on.

A program depends on these settings of torch: it is made under them and serves calls under the same.
Every call reads the settings, each by the cheapest function.

A function is traced without modes. The modes (``TorchFunctionMode``, ``TorchDispatchMode``) see the
run of the program. A mode that saw the trace too would act twice, and the program would keep its
effects for calls without the mode. For the same reason the function may not seed torch's generator.

NOTE [is_compiling on one thread]
A trace makes ``torch.compiler.is_compiling()`` True, which libraries call before they look at a
tensor's data, or cache a value across calls. torch keeps one flag for all threads, and
torch.compile on one thread may save and restore the flag while another thread traces. While any
trace runs, the flag is therefore an object that is true on the tracing threads and false on the
others. If torch saves it and restores it later, it is false on all threads. If torch already
compiles or exports, the flag stays True.

Dispatch modes of torch's own tools have a ``_mode_key``. ``DeviceContext`` is the mode of the
default device, a setting that traces observe. ``torch._compile`` and ``torch._dynamo.eval_frame``
wrap the functions that seed the default generator, so their frames are between these and the
caller.

The settings are read by the C++ functions behind public ones: ``_is_any_autocast_enabled``
(``is_autocast_enabled`` for every type of device), ``_get_deterministic_algorithms`` and
``_get_deterministic_algorithms_warn_only``, ``_get_cudnn_deterministic``,
``_get_cudnn_benchmark``, ``_get_float32_matmul_precision``; ``_len_torch_function_stack`` tells
whether any function mode is active, such as the mode that ``set_default_device`` enters;
``nn.modules.module._has_any_global_hook``, and the dicts of these hooks.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final, NamedTuple

import torch
from torch._C import (
    _DisableTorchDispatch,
    _get_cudnn_benchmark,
    _get_cudnn_deterministic,
    _get_deterministic_algorithms,
    _get_deterministic_algorithms_warn_only,
    _get_float32_matmul_precision,
    _is_any_autocast_enabled,
    _len_torch_function_stack,
    _pop_torch_dispatch_stack,
    _pop_torch_function_stack,
    _push_on_torch_dispatch_stack,
    _push_on_torch_function_stack,
)
from torch.nn.modules import module
from torch.nn.utils import parametrize
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from tsfunc.bridge import compiled
from tsfunc.bridge.tracers.interrupts import resets, undoing
from tsfunc.dispatch.keys import DispatchKey
from tsfunc.dispatch.state import overriding, tls
from tsfunc.errors import TypeCheckError
from tsfunc.user_code import Location, is_user_frame, user_location

# --- settings that a program depends on


class Setting(NamedTuple):
    """A setting.

    Attributes:
        read: returns its value.
        choices: the values that it can have; empty if these are all of the value's type.
    """

    name: str
    read: Callable[[], Any]
    choices: tuple[Any, ...] = ()

    def admits(self, value: Any) -> bool:
        """True if the setting can have a value."""
        return type(value) is type(self.read()) and (not self.choices or value in self.choices)


def autocast() -> tuple[Any, ...]:
    """Return the dtype of each device type with autocast on, and True if casts are cached."""
    if not _is_any_autocast_enabled():
        return ()
    dtypes = [(kind, torch.get_autocast_dtype(kind)) for kind in _autocast_devices()
             if torch.is_autocast_enabled(kind)]  # fmt: skip
    return (*dtypes, torch.is_autocast_cache_enabled())


@functools.cache
def _autocast_devices() -> tuple[str, ...]:
    kinds = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla", "privateuseone")
    return tuple(kind for kind in kinds if torch.amp.is_autocast_available(kind))


def bound_mesh_axes() -> str:
    """Return the mesh axes that are bound, with their sizes and checks."""
    levels = tls.state.levels
    return "; ".join([level.binding for level in levels if level.binding]) if levels else ""


def default_device() -> torch.device:
    """Return the device on which factories make tensors."""
    # torch's function costs as much as ten operators. Without function modes the device is the CPU.
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
    Setting(
        "float32 matmul precision", _get_float32_matmul_precision, ("highest", "high", "medium")
    ),
    Setting("mesh axes", bound_mesh_axes),
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


def settings_condition(now: tuple[Any, ...], name: Callable[[Any], str]) -> str:
    """Return a Python expression that is true if the settings have changed.

    Args:
        now: the result of :func:`settings`.
        name: returns a name for an object that the expression uses.
    """
    *plain, casts, device = now
    parts = []
    for setting, value in zip(_PLAIN, plain, strict=True):
        if value == "":
            continue  # with no axis bound, the function has found none
        differs = "is not" if isinstance(value, bool | torch.dtype) else "!="
        parts.append(f"{name(setting.read)}() {differs} {name(value)}")
    if casts:
        parts.append(f"{name(autocast)}() != {name(casts)}")
    else:
        parts.append(f"{name(_is_any_autocast_enabled)}()")
    default = f"{name(default_device)}() != {name(device)}"
    parts.append(
        f"{name(_len_torch_function_stack)}() and {default}" if device == _CPU else default
    )
    changed = " or ".join(parts)
    if _handlers is None or casts or device != _CPU or plain[-1] != "":
        return changed
    are_settings = name(_handlers.settings_check(tuple(plain[:-1])))  # its False may be wrong
    return f"not {are_settings}() and ({changed})"


_handlers = compiled.load()


# --- modes


@contextmanager
def outside_modes() -> Iterator[None]:
    """Deactivate the user's modes on this thread within a block."""
    functions = [_pop_torch_function_stack() for _ in range(_len_torch_function_stack())]
    device_contexts = [mode for mode in functions if isinstance(mode, DeviceContext)]
    for mode in reversed(device_contexts):
        _push_on_torch_function_stack(mode)
    dispatchers: list[Any] = []
    while _ends_with_users(_get_current_dispatch_mode_stack()):
        dispatchers.append(_pop_torch_dispatch_stack(None))
    try:
        yield
    finally:
        for mode in reversed(dispatchers):
            _push_on_torch_dispatch_stack(mode)
        for _ in device_contexts:
            _pop_torch_function_stack()
        for mode in reversed(functions):
            _push_on_torch_function_stack(mode)


@contextmanager
def outside_all_modes() -> Iterator[None]:
    """Deactivate all modes on this thread within a block, those of torch's own tools included.

    Operators in the block compute with data, even if the block runs while a trace works out a
    result on tensors without data.
    """
    with outside_modes(), _DisableTorchDispatch():
        yield


_CACHE = "_cache"


@contextmanager
def own_parametrizations() -> Iterator[None]:
    """Context manager: ``torch.nn.utils.parametrize.cached()`` around the block does not reach in.

    The cache has the weights of the tensors that modules have outside of the block.
    """
    before = getattr(parametrize, _CACHE)
    with undoing(functools.partial(setattr, parametrize, _CACHE, before)):
        setattr(parametrize, _CACHE, {})
        yield


def _ends_with_users(stack: Any) -> bool:
    """True if the innermost dispatch mode is the user's, not one of torch's own tools."""
    return bool(stack) and getattr(stack[-1], "_mode_key", None) is None


# --- changes of the process for as long as some thread traces


class SharedChange:
    """A change of the process that lasts while one of its blocks is active, on any thread.

    Args:
        make: makes the change; each block calls it at its beginning.
        undo: undoes the change, at the end of the last block.
    """

    def __init__(self, make: Callable[[], None], undo: Callable[[], None]) -> None:
        self._make, self._undo = make, undo
        self._lock = threading.Lock()
        self._active: set[object] = set()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Run a block under the change."""
        block = object()
        with undoing(functools.partial(self._end, block)):
            with self._lock:
                self._active.add(block)
                self._make()
            yield

    def _end(self, block: object) -> None:
        with self._lock:
            self._active.discard(block)
            if not self._active:
                self._undo()


# --- seeds


GeneratorDraws = list[tuple[torch.Generator, Location]]


class _Seeding(threading.local):
    """The innermost trace of this thread, if there is one.

    Attributes:
        label: its name in errors.
        draws: the generators that the function has named (``generator=``), and the user's lines.
    """

    label: str | None = None
    draws: GeneratorDraws | None = None


_seeding: Final = resets(_Seeding())


class _WatchedGenerator:
    """A replacement of the default generator while some thread traces."""

    def __getattr__(self, name: str) -> Any:
        if _seeding.label is not None and _is_user_call():
            raise TypeCheckError(
                f"{_seeding.label}: the seed or the state of torch's random numbers is set or read "
                f"at {user_location()} (.{name} of the default generator), which a program does "
                f"not do again. Do it before the call, or use a torch.Generator that is seeded "
                f"before."
            )
        return getattr(torch.default_generator, name)


_RANDOM: Final[Any] = torch.random
_WATCHED: Final = _WatchedGenerator()
_traces_watch_seeds: Final = SharedChange(
    lambda: setattr(_RANDOM, "default_generator", _WATCHED),
    lambda: setattr(_RANDOM, "default_generator", torch.default_generator),
)


@contextmanager
def no_seeding(label: str) -> Iterator[GeneratorDraws]:
    """Context manager that stops the user's code from seeding or reading the default generator.

    Its value lists the draws from other generators in the block.
    """
    draws: GeneratorDraws = []
    with overriding(_seeding, label=label, draws=draws), _traces_watch_seeds():
        yield draws


def address_of_generator(generator: torch.Generator) -> int:
    """Return a number that is the same for all Python objects of one generator.

    A handler of operators gets another object than the function has named.
    """
    return int(generator._cdata)  # type: ignore[attr-defined]


def note_draw(generator: torch.Generator) -> None:
    """Note that the function of the innermost trace draws from a generator that it names."""
    if _seeding.draws is not None:
        _seeding.draws.append((generator, user_location()))


# The modules that call the generator for the caller of a function of ``torch.random``.
_BETWEEN = ("torch.random", "torch._compile", "torch._dynamo.", "contextlib")


def _is_user_call() -> bool:
    """True if code outside of torch and this package calls a function of ``torch.random``."""
    frame = inspect.currentframe()
    frame = frame and frame.f_back and frame.f_back.f_back
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_BETWEEN):
        frame = frame.f_back
    return frame is not None and is_user_frame(frame)


# --- the flag of torch.compiler.is_compiling


class _TracingBlocks(threading.local):
    """Attribute ``active``: True inside of :func:`as_if_compiling`."""

    active = False


_tracing_blocks: Final = resets(_TracingBlocks())


class _TrueOnTracingThreads:
    """A flag that is true on tracing threads, and combines with other values like a bool."""

    __slots__ = ()

    def __bool__(self) -> bool:
        return _tracing_blocks.active or any(
            level.key is DispatchKey.Trace for level in tls.state.levels
        )

    def __eq__(self, other: object) -> bool:
        return bool(self) == other

    def __hash__(self) -> int:
        return hash(bool(self))

    def __and__(self, other: Any) -> Any:
        return bool(self) & other

    def __or__(self, other: Any) -> Any:
        return bool(self) | other

    def __xor__(self, other: Any) -> Any:
        return bool(self) ^ other

    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__

    def __int__(self) -> int:
        return int(bool(self))

    def __repr__(self) -> str:
        return repr(bool(self))


_FLAG: Final = _TrueOnTracingThreads()


def _set_flag() -> None:
    if not torch.compiler._is_compiling_flag:
        torch.compiler._is_compiling_flag = _FLAG  # type: ignore[assignment]


def _reset_flag() -> None:
    if torch.compiler._is_compiling_flag is _FLAG:  # type: ignore[comparison-overlap]
        torch.compiler._is_compiling_flag = False


traces_compile: Final = SharedChange(_set_flag, _reset_flag)
"""A block in which ``torch.compiler.is_compiling()`` is True inside of traces, on any thread."""


@contextmanager
def as_if_compiling() -> Iterator[None]:
    """Make ``torch.compiler.is_compiling()`` True on this thread, in a block without a trace."""
    with overriding(_tracing_blocks, active=True), traces_compile():
        yield


# --- functions of modules that others replace while functions are traced


_ours: list[tuple[ModuleType, Mapping[str, Any], Mapping[str, Any]]] = []


def replaces_in_traces(
    module: ModuleType, in_traces: Mapping[str, Any], others: Mapping[str, Any]
) -> None:
    """Declare functions that replace those of a module while functions are traced.

    Other threads call them too, so they must do the same as the functions of the module there.
    """
    _ours.append((module, in_traces, others))


def replaced_function(function: Any) -> Any:
    """Return the module's function that a function replaces in traces; other values unchanged."""
    for _, replacements, others in _ours:
        for name, other in others.items():
            if other is function:
                return replacements[name]
    return function


def _replace_all() -> None:
    for replaced, replacements, others in _ours:
        _replace(replaced, replacements, others)


def _restore_all() -> None:
    for replaced, replacements, others in _ours:
        _replace(replaced, others, replacements)


traces_replace_functions: Final = SharedChange(_replace_all, _restore_all)
"""A block in which the functions of :func:`replaces_in_traces` are in their modules."""


def _replace(module: ModuleType, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Replace functions of a module, except for those that something else has replaced."""
    members = vars(module)
    for name, function in after.items():
        if members.get(name) is before[name]:
            members[name] = function
