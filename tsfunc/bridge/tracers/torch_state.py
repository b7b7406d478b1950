"""torch's thread-local state: the part that a level captures, and how it is restored.

NOTE [the factory keys]
Random and factory functions have no tensor argument that leads to a level. While a level that must
see them is active, a key that torch itself no longer uses is in the thread-local include set.
Python kernels registered for the key see exactly the operators that they are registered for, and
all other operators skip it at no cost. There are two such keys, because C++ makes small tensors of
its own in many operators (``x * 2`` makes a scalar): a vmap must see only the random functions, a
trace must see all of them. torch.vmap has a key of its own.

A backward pass in a trace computes with values that a graph outside of the trace has saved. The
kernels of the pass compute in the memory of the tensors that they make, and its formulas make
tangents of these values. A tensor of the trace would have no memory, and would end with the trace.
So the factories that these kernels call, below autograd, and zero tangents of fixed sizes are
torch's own. Other factories of a formula are the trace's. An unused key in the exclude set marks
torch's code of a pass: it has no other effect, and the handlers restore the sets of their level.
Outside of passes, kernels compute only with numbers and with zero tangents of tensors without dims,
and copy these to other dtypes: the copies are torch's own too.

NOTE [autocast and rules]
Autocast is a property of the call. Autocast's kernels are in C++, run before those of tracers, and
cast the arguments of the operators on torch's list; arguments at the dispatch handler have been
cast already. The operators that a rule calls in place of another operator must not cast again: on
the CPU autocast does not cast ``mv``, but would cast a ``matmul`` in its rule. Only the parts that
a composite would call itself are cast, if autocast was on at the function handler, which records
this, because C++ turns autocast off before the dispatch handler. Levels do not capture autocast.

The C++ dispatcher's thread-local sets of included and excluded keys determine among others whether
autograd and autocast apply. ``_ForceDispatchKeyGuard`` replaces both sets for a block, and
``_IncludeDispatchKeyGuard`` and ``_ExcludeDispatchKeyGuard`` add to one;
``_SetExcludeDispatchKeyGuard`` also removes a key. ``_dispatch_keyset_full_after`` returns all keys
of a lower priority than one key. ``_is_fwd_grad_enabled`` tells whether operators push tangents on
this thread; ``_current_graph_task_id`` is not -1 on a thread that runs a backward pass.
"""

from __future__ import annotations

import functools
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import or_
from types import TracebackType
from typing import Any, Final

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
    _get_dispatch_mode,
    _IncludeDispatchKeyGuard,
    _is_any_autocast_enabled,
    _is_fwd_grad_enabled,
    _len_torch_dispatch_stack,
    _parse_dispatch_key,
    _set_grad_enabled,
    _SetExcludeDispatchKeyGuard,
    _TorchDispatchModeKey,
)
from torch._C import DispatchKey as TorchKey
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad

from tsfunc.bridge.tracers.interrupts import release_guards, resets
from tsfunc.dispatch.state import outside_all_levels

_is_grad_enabled = torch.is_grad_enabled

AUTOGRAD = DispatchKeySet(TorchKey.AutogradFunctionality).add(TorchKey.ADInplaceOrView)

RANDOM_KEY_NAME = "VmapMode"
FACTORY_KEY_NAME = "TESTING_ONLY_GenericMode"
_RANDOM_KEY: Any = _parse_dispatch_key(RANDOM_KEY_NAME)
_FACTORY_KEY: Any = _parse_dispatch_key(FACTORY_KEY_NAME)
_PASS_KEY: Any = _parse_dispatch_key("TESTING_ONLY_GenericWrapper")
_PASS = DispatchKeySet(_PASS_KEY)
_BOTH_KEYS = DispatchKeySet(_RANDOM_KEY).add(_FACTORY_KEY)


_AUTOCAST = tuple(key for name, key in TorchKey.__members__.items() if name.startswith("Autocast"))
_EVERY_AUTOCAST = functools.reduce(or_, map(DispatchKeySet, _AUTOCAST))


class _AutocastState(threading.local):
    """``exclude``: the exclude set at the function handler if autocast is on, None if it is off."""

    exclude: Any = None


autocast_state = resets(_AutocastState())


def is_autocasting() -> bool:
    """True if autocast is on for this call, or was on at the function handler."""
    return autocast_state.exclude is not None or _is_any_autocast_enabled()


class autocast_of_the_call:
    """Context manager that records autocast for the dispatch handler."""

    __slots__ = ("previous",)

    def __enter__(self) -> None:
        self.previous = autocast_state.exclude
        on = _is_any_autocast_enabled()
        autocast_state.exclude = _dispatch_tls_local_exclude_set() if on else None

    def __exit__(self, *error: object) -> None:
        autocast_state.exclude = self.previous


class suspend_autocast:
    """Context manager that disables autocast, also for the parts of composites."""

    __slots__ = ("guard", "previous")

    def __enter__(self) -> None:
        self.previous = autocast_state.exclude
        self.guard = _DisableAutocast()
        self.guard.__enter__()
        autocast_state.exclude = None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        autocast_state.exclude = self.previous
        self.guard.__exit__(kind, error, trace)


def has_autocast_kernel(name: str) -> bool:
    """True if autocast, as set for this call, has a kernel of its own for an operator."""
    exclude = autocast_state.exclude or _dispatch_tls_local_exclude_set()
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


class _Passes(threading.local):
    """``count``: a list of the number of tsfunc's backward passes that run on this thread."""

    count: list[int] | None = None


_passes: Final = resets(_Passes())


def own_passes() -> list[int]:
    """Return the list of one number, how many backward passes of tsfunc run on this thread."""
    count = _passes.count
    if count is None:
        count = _passes.count = [0]
    return count


def code_of_pass() -> Any:
    """Context manager: torch's code of a backward pass runs (NOTE [the factory keys])."""
    return _ExcludeDispatchKeyGuard(_PASS) if reaches_factory_kernels() else nullcontext()


def in_code_of_pass() -> bool:
    """True if torch's code of a backward pass runs, and no rule that it has called."""
    return bool(_dispatch_tls_is_dispatch_key_excluded(_PASS_KEY))


class TorchState:
    """The part of torch's thread-local state that a level captures, without autocast.

    ``rerun_by`` is the backward pass, by id, that runs the function again (``mark_rerun``), or -1.
    ``quiet`` is more than 0 while a backward pass runs over the graph of an outer level, and its
    results are not differentiated: the pass must not be recorded there. ``passes`` is a list of one
    number, shared by the levels of a thread: how many backward passes of tsfunc run. Only these
    turn grad mode off without meaning the values of a level; in a pass that the function starts,
    for example by ``torch.autograd.grad``, grad mode means the values too. ``paused`` is True while
    ``grad_mode`` is False because a function turned grad mode off. ``guards`` are free guards that
    restore the sets for a single call; ``key_sets`` has both sets as 16 bytes, for compiled
    handlers.
    ``in_modes`` is True if dispatch modes were active: the include set then has their keys, which
    must not be restored after a mode's handler has removed the last mode.
    """

    __slots__ = (
        "exclude", "grad_mode", "guards", "in_modes", "include", "key_sets", "passes", "paused",
        "quiet", "rerun_by",
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
        self.passes = own_passes()
        self.rerun_by = _reruns.by
        self.paused = False

    def __call__(self) -> RestoredTorchState:
        return RestoredTorchState(self)

    def keys(self) -> AbstractContextManager[Any]:
        """Context manager: restore the captured sets as they are, and not grad mode."""
        guard: AbstractContextManager[Any] = _ForceDispatchKeyGuard(self.include, self.exclude)
        return guard


def _in_inference_mode(include: Any, exclude: Any) -> tuple[Any, Any]:
    """Return the sets as torch changes them when it enters inference mode."""
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        exclude = exclude.add(getattr(TorchKey, key))
    return include.remove(TorchKey.ADInplaceOrView), exclude


def records_on_values(state: TorchState) -> bool:
    """True if autograd records on the values inside of a level's tensors.

    The engine turns grad mode off for a backward pass of tsfunc, which does not mean these values.
    """
    now = _is_grad_enabled() or (
        not state.quiet
        and state.passes[0] > 0
        and _current_graph_task_id() not in (-1, state.rerun_by)
    )
    return state.grad_mode and now


class Rerun:
    """A run of a function that a backward pass runs again, such as a checkpoint's.

    Attributes:
        first: the serial number of the first run.
    """

    __slots__ = ("first",)

    def __init__(self, first: int) -> None:
        self.first = first


class _Reruns(threading.local):
    """The backward pass, by id, that runs a function again on this thread, or -1; and the run."""

    by = -1
    run: Rerun | None = None


_reruns: Final = resets(_Reruns())


@contextmanager
def mark_rerun(run: Rerun, states: Sequence[TorchState], in_formula: bool) -> Iterator[None]:
    """Context manager: a backward pass runs a function again, which sets grad mode itself.

    Args:
        run: the run in the block.
        states: the states that the active levels have captured.
        in_formula: True if the first run was a part of a backward formula.
    """
    before, running = [state.rerun_by for state in states], (_reruns.by, _reruns.run)
    _reruns.by, _reruns.run = -1 if in_formula else _current_graph_task_id(), run
    for state in states:
        state.rerun_by = _reruns.by
    try:
        yield
    finally:
        _reruns.by, _reruns.run = running
        for state, by in zip(states, before, strict=True):
            state.rerun_by = by


def current_rerun() -> Rerun | None:
    """Return the innermost such run on this thread."""
    return _reruns.run


def in_backward_formula() -> bool:
    """True in a backward pass, except in a function that the pass runs again."""
    return _current_graph_task_id() not in (-1, _reruns.by)


@contextmanager
def recording_from_here(states: Sequence[TorchState]) -> Iterator[None]:
    """Context manager: if grad mode is on, it means the values inside of the levels' tensors, too.

    The graph of a body is differentiated by itself: a ``torch.no_grad()`` around the derivative
    concerns the call of the body, and a ``torch.no_grad()`` in the body concerns its operators.

    Args:
        states: the states that the levels have captured.
    """
    before = [(state.grad_mode, state.paused) for state in states]
    if _is_grad_enabled():
        for state in states:
            state.grad_mode, state.paused = True, False
    try:
        yield
    finally:
        for state, (grad_mode, paused) in zip(states, before, strict=True):
            state.grad_mode, state.paused = grad_mode, paused


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
        if autocast_state.exclude is not None:
            exclude = exclude - (_EVERY_AUTOCAST - autocast_state.exclude)
        if state.in_modes and not _len_torch_dispatch_stack():
            include = include.remove(TorchKey.Python).remove(TorchKey.PythonTLSSnapshot)
        self.guard = _ForceDispatchKeyGuard(include, exclude)
        self.guard.__enter__()
        want = records_on_values(state)
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


def with_views() -> Any:
    """Context manager: C++ makes aliases that share a version counter, also below autograd."""
    return _SetExcludeDispatchKeyGuard(TorchKey.ADInplaceOrView, False)


def exclude_autocast_keys() -> Any:
    """Context manager: operators run without autocast."""
    return _DisableAutocast()


def with_random_key() -> Any:
    """Context manager: random functions reach the kernels of ``registrations``."""
    return _IncludeDispatchKeyGuard(_RANDOM_KEY)


def with_factory_key() -> Any:
    """Context manager: other factory functions reach the kernels of ``registrations``."""
    return _IncludeDispatchKeyGuard(_FACTORY_KEY)


def reaches_factory_kernels() -> bool:
    """True if factory functions that are not random reach the kernels of ``registrations``."""
    return bool(_dispatch_tls_local_include_set().has(_FACTORY_KEY))


def rule_of_pass() -> Any:
    """Context manager: the code is that of a rule which a backward pass has called."""
    return _SetExcludeDispatchKeyGuard(_PASS_KEY, False)


def after(key: str) -> Any:
    """Return the dispatch keys after one, for a kernel that redispatches its call."""
    parsed: Any = _parse_dispatch_key(key)
    return _dispatch_keyset_full_after(parsed)


def is_storing_data() -> bool:
    """True while ``torch.tensor(data)`` makes the tensor that it will write the data to.

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


def preserve_dispatch_keys() -> AbstractContextManager[None]:
    """Context manager: restore the thread's dispatch keys, whatever the block raises."""
    return _with_dispatch_keys(_dispatch_tls_local_include_set(), _dispatch_tls_local_exclude_set())


@contextmanager
def _with_dispatch_keys(include: DispatchKeySet, exclude: DispatchKeySet) -> Iterator[None]:
    """Context manager: the thread includes and excludes these keys of torch."""
    with _ForceDispatchKeyGuard(include, exclude):
        try:
            yield
        except BaseException as error:
            release_guards(error)
            raise


@contextmanager
def outside_all_transforms() -> Iterator[None]:
    """Context manager: no level, no handler and no transform of torch.func is active.

    The dispatch keys of torch are as without them. The Python key is never excluded in the block,
    because tracers without it would be tensors without memory. The kernels of torch.func expect
    the dispatcher in the state in which they left it, so no transform of theirs is active either.
    """
    with outside_functorch(), outside_all_levels():
        include = _dispatch_tls_local_include_set().remove(_RANDOM_KEY).remove(_FACTORY_KEY)
        exclude = _dispatch_tls_local_exclude_set().remove(TorchKey.Python)
        with _with_dispatch_keys(include, exclude):
            yield


@contextmanager
def on_plain_tensors() -> Iterator[None]:
    """Context manager: torch runs on plain tensors; no level, mode or graph sees it."""
    with (
        outside_all_transforms(),
        DisableTorchFunction(),
        _DisableTorchDispatch(),
        torch.no_grad(),
    ):
        yield
