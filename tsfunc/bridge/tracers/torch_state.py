"""torch's own thread-local state: what a level captures of it, and how it is brought back.

Private names used here (torch 2.11 to 2.13 have them all; ``tests/bridge/test_private_names.py``
fails by name when one goes):

- ``_dispatch_tls_local_include_set``, ``_dispatch_tls_local_exclude_set``: the C++ dispatcher's
  thread-local sets, which hold among others whether autograd and autocast apply;
- ``_dispatch_tls_is_dispatch_key_excluded``: whether a key is in the exclude set;
- ``_ForceDispatchKeyGuard``: replaces both sets for a block;
- ``_ExcludeDispatchKeyGuard``: adds to the exclude set for a block;
- ``_IncludeDispatchKeyGuard``: adds a key to the include set for a block;
- ``_parse_dispatch_key``, ``DispatchKeySet``, ``DispatchKey``;
- ``_dispatch_keyset_full_after``: all keys of a lower priority than one;
- ``_len_torch_dispatch_stack``: how many dispatch modes are active on this thread;
- ``_get_dispatch_mode``, ``_TorchDispatchModeKey``: the dispatch mode of a kind that is active;
- ``_set_grad_enabled``: the function behind ``torch.set_grad_enabled``, as graphs call it;
- ``_is_any_autocast_enabled``: whether autocast is on, for whichever device, and
  ``_DisableAutocast``, which excludes its keys for a block;
- ``_is_fwd_grad_enabled``: whether operators push tangents on this thread, and
  ``forward_ad._set_fwd_grad_enabled``, which says so for a block;
- ``_functorch.maybe_current_level`` is the depth of torch.func's stack;
- ``_functorch.pyfunctorch.temporarily_clear_interpreter_stack``: no transform of torch.func is
  active within a block;
- ``_dispatch_has_kernel_for_dispatch_key``: whether an operator has a kernel for a key;
- ``_current_graph_task_id``: not -1 on a thread that runs a backward pass.
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from operator import or_
from types import TracebackType
from typing import Any

import torch
from torch._C import DispatchKey as TorchKey
from torch._C import (
    DispatchKeySet,
    _current_graph_task_id,
    _DisableAutocast,
    _dispatch_has_kernel_for_dispatch_key,
    _dispatch_keyset_full_after,
    _dispatch_tls_is_dispatch_key_excluded,
    _dispatch_tls_local_exclude_set,
    _dispatch_tls_local_include_set,
    _ExcludeDispatchKeyGuard,
    _ForceDispatchKeyGuard,
    _functorch,
    _get_dispatch_mode,
    _IncludeDispatchKeyGuard,
    _is_any_autocast_enabled,
    _is_fwd_grad_enabled,
    _len_torch_dispatch_stack,
    _parse_dispatch_key,
    _set_grad_enabled,
    _TorchDispatchModeKey,
)
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad

_TORCH_ROOT = os.path.dirname(torch.__file__) + os.sep
_OWN_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep

AUTOGRAD = DispatchKeySet(TorchKey.AutogradFunctionality).add(TorchKey.ADInplaceOrView)

# NOTE [the factory keys]
# Random and factory functions have no tensor argument by which a level could be found. While a
# level is active that must see them, a key that torch itself has no more use for is in the
# thread-local include set: Python kernels registered for it see just the operators that they
# are registered for, and all others pass it at no cost. There are two such keys, since C++ makes
# small tensors of its own in many operators (``x * 2`` makes a scalar): a vmap must see the
# random functions only, a trace all of them. torch.vmap has a key of its own.
RANDOM_KEY_NAME = "VmapMode"
FACTORY_KEY_NAME = "TESTING_ONLY_GenericMode"
_RANDOM_KEY: Any = _parse_dispatch_key(RANDOM_KEY_NAME)
_FACTORY_KEY: Any = _parse_dispatch_key(FACTORY_KEY_NAME)
_BOTH_KEYS = DispatchKeySet(_RANDOM_KEY).add(_FACTORY_KEY)


# NOTE [autocast and rules]
# Autocast is a matter of the call. Its kernels are C++'s, come before any tracer's, and cast what
# operators on torch's list of them are given; so what arrives at door 2 has been cast. What a rule
# calls in place of an operator must not be cast once more: ``mv`` is left as it is, ``matmul`` is
# not. Only what a composite would call itself is cast, where autocast was on at door 1, which
# leaves word here: at door 2 C++ has it off. Levels capture none.
_AUTOCAST = tuple(key for name, key in TorchKey.__members__.items() if name.startswith("Autocast"))
_EVERY_AUTOCAST = functools.reduce(or_, map(DispatchKeySet, _AUTOCAST))


class _Casting(threading.local):
    """``exclude``: the exclude set at door 1 where autocast is on, None where it is off."""

    exclude: Any = None


casting = _Casting()


def is_casting() -> bool:
    """Whether autocast is on for this call, or was at door 1."""
    return casting.exclude is not None or _is_any_autocast_enabled()


class autocast_of_the_call:
    """Context manager: leaves word of autocast for door 2."""

    __slots__ = ("previous",)

    def __enter__(self) -> None:
        self.previous = casting.exclude
        on = _is_any_autocast_enabled()
        casting.exclude = _dispatch_tls_local_exclude_set() if on else None

    def __exit__(self, *error: object) -> None:
        casting.exclude = self.previous


class without_casting:
    """Context manager: nothing is cast, nor are the parts of composites."""

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
    """Whether autocast, as it is for this call, has a kernel of its own for an operator."""
    exclude = casting.exclude or _dispatch_tls_local_exclude_set()
    return any(
        not exclude.has(key) and _dispatch_has_kernel_for_dispatch_key(name, key.name)
        for key in _AUTOCAST
    )


class TorchState:
    """What a level captures of torch's thread-local state, less autocast.

    ``quiet`` is more than 0 while a backward pass runs, over the graph of a level further out,
    whose results nobody will differentiate: what it computes is not to be recorded there.
    ``guards`` bring the sets back for a single call; ``key_sets`` are both sets as 16 bytes, which
    compiled handlers read. ``in_modes`` is True if dispatch modes were active: the include set has
    their keys, which must not be restored where a mode's handler has taken the last mode away.
    """

    __slots__ = ("exclude", "grad_mode", "guards", "in_modes", "include", "key_sets", "quiet")

    def __init__(self) -> None:
        self.include = _dispatch_tls_local_include_set()
        self.exclude = _dispatch_tls_local_exclude_set() | _EVERY_AUTOCAST
        self.grad_mode = torch.is_grad_enabled()
        self.in_modes = _len_torch_dispatch_stack() > 0
        self.quiet = 0
        self.guards: list[Any] = []
        self.key_sets = struct.pack("QQ", self.include.raw_repr(), self.exclude.raw_repr())

    def __call__(self) -> RestoredTorchState:
        return RestoredTorchState(self)


def _in_inference_mode(include: Any, exclude: Any) -> tuple[Any, Any]:
    """The sets as torch changes them where it enters inference mode."""
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        exclude = exclude.add(getattr(TorchKey, key))
    return include.remove(TorchKey.ADInplaceOrView), exclude


def _with_autocast(exclude: Any) -> Any:
    """The set with autocast as it is for this call."""
    return exclude - (_EVERY_AUTOCAST - casting.exclude)


class RestoredTorchState:
    """Context manager: the captured sets, and no grad mode that the level did not have.

    A ``torch.no_grad()`` in the transformed function holds for outer levels too, as it would
    without the transform, and so does an inference mode. The one that the autograd engine puts
    around a backward pass does not: that belongs to the tracers' own level alone.
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
        want = state.grad_mode and (now or (not state.quiet and _current_graph_task_id() != -1))
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
    """Whether dispatch modes (``TorchDispatchMode``) are active on this thread."""
    return _len_torch_dispatch_stack() > 0


def faking() -> bool:
    """Whether tensors without data are worked out, as a trace does, which carry no tangents."""
    return _get_dispatch_mode(_TorchDispatchModeKey.FAKE) is not None


def below_autograd() -> bool:
    """Whether torch is past its autograd here, as in the handlers of its dispatch modes."""
    return _dispatch_tls_is_dispatch_key_excluded(TorchKey.ADInplaceOrView)


def without_autograd() -> Any:
    """Context manager: C++ goes straight to ``__torch_dispatch__``, composites arrive whole."""
    return _ExcludeDispatchKeyGuard(AUTOGRAD)


def without_autocast() -> Any:
    """Context manager: operators are called as they are, whatever autocast says."""
    return _DisableAutocast()


def with_random_key() -> Any:
    """Context manager: random functions reach the kernels of ``factories``."""
    return _IncludeDispatchKeyGuard(_RANDOM_KEY)


def with_factory_key() -> Any:
    """Context manager: other factory functions reach the kernels of ``factories``."""
    return _IncludeDispatchKeyGuard(_FACTORY_KEY)


def after(key: str) -> Any:
    """The dispatch keys that come after one: what is left of a call that its kernel passes on."""
    parsed: Any = _parse_dispatch_key(key)
    return _dispatch_keyset_full_after(parsed)


def storing_data() -> bool:
    """Whether ``torch.tensor(data)`` is making the tensor whose memory it will write the data to.

    It keeps torch.func's wrappers, which have no memory either, away for that while. The result is
    a call of ``lift_fresh``, which comes after.
    """
    return _dispatch_tls_is_dispatch_key_excluded(TorchKey.FuncTorchDynamicLayerFrontMode)


def without_tangents() -> Any:
    """Context manager: no operator pushes tangents."""
    return forward_ad._set_fwd_grad_enabled(False)


def without_factory_keys() -> Any:
    """Context manager: factory and random functions are torch's own."""
    return _ExcludeDispatchKeyGuard(_BOTH_KEYS)


def outside_functorch() -> AbstractContextManager[Any]:
    """Context manager: no transform of torch.func is active, which would wrap what is made."""
    active = _functorch.maybe_current_level() is not None
    return temporarily_clear_interpreter_stack() if active else nullcontext()


# NOTE [guards in frames]
# Some of torch's Python functions hold a dispatch guard in a local variable (``guard =
# torch._C._DisableFuncTorch()``, where a tensor is printed). If they raise, the traceback keeps
# their frames, and so the guard. It restores the thread's dispatch keys when the exception is
# freed: at any later time, to the keys of the place where the function was called. Inside a trace
# these exclude the Python key, and kernels get tensors without memory. So a block that restores
# the keys clears torch's frames in the traceback first.
_SUSPENDABLE = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR


def release_guards(error: BaseException, *, ours: bool = False) -> None:
    """Free the locals of torch's frames in a traceback: NOTE [guards in frames].

    The thread's dispatch keys are arbitrary afterwards; the caller restores them.

    Args:
        ours: whether to free those of this package's frames too, and of context managers that
            generators make, which may hold what an interrupt has kept them from leaving.
    """
    roots = (_TORCH_ROOT, _OWN_ROOT, contextlib.__file__) if ours else _TORCH_ROOT
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        found = pending.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        pending += (found.__cause__, found.__context__)
        step = found.__traceback__
        while step is not None:
            code = step.tb_frame.f_code
            if code.co_filename.startswith(roots) and not code.co_flags & _SUSPENDABLE:
                with suppress(RuntimeError):  # the frame is still executing
                    step.tb_frame.clear()
            step = step.tb_next


@contextmanager
def kept_keys() -> Iterator[None]:
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
    """Context manager: torch's dispatch keys as if no level and no handler were active here.

    No transform of torch.func is active either: on their way outwards its kernels expect the
    dispatcher at the place where they have left it. The Python key is never excluded in the block:
    tracers without it would be tensors without memory.
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
