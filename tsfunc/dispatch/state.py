"""Thread-local state of the dispatcher: included and excluded keys, and the active levels.

All mutable state that belongs to a call is here: one immutable :class:`State` per thread, which
context managers replace and restore.

NOTE [state captured by a level]
A level captures the state in which it is made. Its kernels run under that state on every thread:
the backward pass runs on threads of its own, which have another thread-local state. The level of a
kernel is therefore found from the call's arguments first, and from the thread's state only if no
argument has a level.

NOTE [threads inside of a transform]
A thread that is started inside of a transform does not have the transform's levels, but may use its
values, which name their level. A level that the thread enters must then be inside of that level, so
the first level of a thread is deeper than all levels that are active on other threads. The greater
depth is harmless for independent threads. Threads that enter levels in turns would go ever deeper,
so a first level is the outermost one if other threads are ``_DEEPEST_ELSEWHERE`` deep or more.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any, Final, Protocol, TypeVar

from tsfunc import hooks
from tsfunc.dispatch.keys import BACKEND_BITS, WIDTH, DispatchKey, DispatchKeySet, bits_of
from tsfunc.dispatch.recorder import Recorder
from tsfunc.errors import DispatchError

# The lowest bit of each level: shifted by a key's priority, it is that key at every level.
# Exclusion covers 64 levels.
_EVERY_LEVEL: Final = sum(1 << (level * WIDTH) for level in range(64))
_BACKEND_SELECT: Final = 1 << DispatchKey.BackendSelect.priority
_PACKAGE: Final = __file__.rsplit("dispatch", 1)[0]


class RemapArgs(Protocol):
    """Function that remaps the arguments of a handled call (``bridge/control/subsets``)."""

    def __call__(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]] | None:
        """Return the new arguments of the callable; None if they do not change."""

    def remapped(self, value: Any) -> Any:
        """Return an argument with other tensors in the place of those that are remapped."""

    def fresh(self) -> RemapArgs:
        """Return a copy without the calls that this object has recorded."""


class State:
    """The include set, the mask of keys that are not excluded, and the active levels of a thread.

    ``mask`` lacks the keys that the user has excluded and the keys that a running kernel masks.
    The user's exclusions are in ``excluded`` too, and also hold at levels that are entered later.
    The state is ``plain`` if nothing is included, excluded or recorded. ``backend_operator`` is the
    operator whose backend kernel runs, and ``backend_keys`` are those of the levels that record
    what this kernel calls: a redispatch of that operator has no key left, beside these. A state
    without levels has the depth of the hidden levels of its thread in ``hidden``
    (``outside_all_levels``).
    """

    __slots__ = (
        "_backend_states",
        "_kernel_states",
        "backend_keys",
        "backend_operator",
        "excluded",
        "hidden",
        "include",
        "levels",
        "mask",
        "plain",
        "recorder",
        "remap_args",
        "running",
    )  # fmt: skip

    def __init__(
        self,
        include: int,
        mask: int,
        levels: tuple[Level, ...],
        running: Level | None = None,
        excluded: int = 0,
        recorder: Recorder | None = None,
        remap_args: RemapArgs | None = None,
        backend_operator: object = None,
        backend_keys: int = 0,
        hidden: int = 0,
    ) -> None:
        self.include = include
        self.mask = mask
        self.levels = levels
        self.running = running
        self.excluded = excluded
        self.recorder = recorder
        self.remap_args = remap_args
        self.plain = not (include or excluded or recorder)
        self.backend_operator = backend_operator
        self.backend_keys = backend_keys
        self.hidden = hidden
        self._kernel_states: dict[int, State] | None = None
        self._backend_states: dict[tuple[object, int], State] | None = None

    def kernel_state(self, bit: int) -> State:
        """Return the state that the level-0 kernel of ``bit`` runs under.

        The kernel excludes its own bit and all higher ones, so that calling the operator again
        reaches the next key. Backends are not excluded, since they end every call. Keys that the
        user has excluded stay excluded.
        """
        states = self._kernel_states
        if states is None:
            states = self._kernel_states = {}
        state = states.get(bit)
        if state is None:
            mask = self.mask & ((1 << bit) - 1) | BACKEND_BITS & ~self.excluded
            state = states[bit] = self.replace(
                mask=mask, running=None, backend_operator=None, backend_keys=0
            )
        return state

    def backend_state(self, op: object, bit: int) -> State:
        """Return the state that the kernel of ``op`` for the backend ``bit`` runs under.

        The state excludes the same keys as :meth:`kernel_state`, except BackendSelect, which
        factories need. The kernel may call other operators, and its own operator on other values.
        """
        states = self._backend_states
        if states is None:
            states = self._backend_states = {}
        state = states.get((op, bit))
        if state is None:
            mask = self.kernel_state(bit).mask | _BACKEND_SELECT & ~self.excluded
            state = states[op, bit] = self.replace(
                mask=mask, running=None, backend_operator=op, backend_keys=0
            )
        return state

    def replace(self, **changes: Any) -> State:
        """Return a copy with other values of some attributes."""
        attributes: dict[str, Any] = {
            "include": self.include, "mask": self.mask, "levels": self.levels,
            "running": self.running, "excluded": self.excluded, "recorder": self.recorder,
            "remap_args": self.remap_args, "backend_operator": self.backend_operator,
            "backend_keys": self.backend_keys, "hidden": self.hidden,
        }  # fmt: skip
        return State(**attributes | changes)

    def with_fresh_remap_args(self) -> State:
        """Return this state with a fresh ``remap_args``, to run a function a second time."""
        return self if self.remap_args is None else self.replace(remap_args=self.remap_args.fresh())


class _ThreadState(threading.local):
    state = State(0, -1, ())


tls: Final = _ThreadState()


class _Global:
    """The keys that every call of every thread considers."""

    bits = _BACKEND_SELECT


global_set: Final = _Global()
_global_lock = threading.Lock()


def global_keys() -> DispatchKeySet:
    """Return the global set: keys that every call on every thread considers."""
    return DispatchKeySet.from_bits(global_set.bits)


def include_globally(*keys: DispatchKey) -> None:
    """Add keys (at level 0) to the global set, for all threads."""
    with _global_lock:
        global_set.bits |= DispatchKeySet(*keys).bits


def exclude_globally(*keys: DispatchKey) -> None:
    """Remove keys (at level 0) from the global set, for all threads."""
    with _global_lock:
        global_set.bits &= ~DispatchKeySet(*keys).bits


def included() -> DispatchKeySet:
    """Return the include set of this thread."""
    return DispatchKeySet.from_bits(tls.state.include)


def excluded() -> DispatchKeySet:
    """Return the exclude set of this thread.

    Inside a kernel the set is a complement: it holds the kernel's bit and all higher ones.
    Backends are excluded only if the user excludes them.
    """
    return DispatchKeySet.from_bits(~tls.state.mask)


class using:
    """Context manager: run the block under a state, and restore the previous one."""

    __slots__ = ("_previous", "_state")

    def __init__(self, state: State) -> None:
        self._state = state

    def __enter__(self) -> None:
        self._previous = tls.state
        tls.state = self._state

    def __exit__(self, *exc: object) -> None:
        tls.state = self._previous


@contextmanager
def overriding(owner: Any, **attributes: Any) -> Iterator[None]:
    """Context manager: set attributes of an object, such as a local of threads, for the block."""
    before = {name: getattr(owner, name) for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def include(*keys: DispatchKey | DispatchKeySet) -> Iterator[None]:
    """Context manager: add keys (at level 0) or a key set to this thread's include set.

    Nestable; the previous set is restored even after an exception.

    Example:
        >>> from tsfunc import dispatch
        >>> with dispatch.include(dispatch.DispatchKey.Trace):
        ...     print(dispatch.included())
        DispatchKeySet(Trace@0)
    """
    bits = DispatchKeySet(*keys).bits
    with using(tls.state.replace(include=tls.state.include | bits)):
        yield


@contextmanager
def exclude(*keys: DispatchKey | DispatchKeySet) -> Iterator[None]:
    """Context manager: add keys (at every level) or a key set to this thread's exclude set.

    An excluded key stays excluded at levels that are entered in the block. Exclusion takes
    precedence over inclusion. Nestable; the previous set is restored even after an exception.

    Example:
        >>> from tsfunc import dispatch
        >>> Trace = dispatch.DispatchKey.Trace
        >>> with dispatch.exclude(Trace):
        ...     print(Trace in dispatch.excluded())
        True
    """
    bits = 0
    for key in keys:
        if isinstance(key, DispatchKey):
            bits |= _EVERY_LEVEL << key.priority
        else:
            bits |= bits_of(key)
    state = tls.state
    with using(state.replace(mask=state.mask & ~bits, excluded=state.excluded | bits)):
        yield


Restore = Callable[[], AbstractContextManager[Any]]


def on_capture(capture: Callable[[], Restore]) -> None:
    """Register state outside of this package that levels capture too.

    ``capture()`` is called when a level is made, and returns a function; the context manager that
    this function returns restores the captured state.
    """
    hooks.capture_state.add(capture)


def _user_code(frame: FrameType) -> tuple[CodeType, int]:
    """Return the nearest code outside this package and its line."""
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return frame.f_code, frame.f_lineno


@contextmanager
def _enter_all(restores: Sequence[Restore]) -> Iterator[None]:
    """Enter the context manager of each function, and exit all that were entered."""
    with ExitStack() as stack:
        for restore in restores:
            stack.enter_context(restore())
        yield


_NOTHING_TO_RESTORE: Final = nullcontext()


L = TypeVar("L", bound="Level")

# The levels that are entered and not exited yet, each with the thread that entered it.
active_levels: Final[dict[Level, int]] = {}


@lru_cache(maxsize=1024)
def _masks(depth: int, priority: int) -> tuple[int, int]:
    """Return the bit of a level's key, and all bits from the level inward."""
    return 1 << (depth * WIDTH + priority), -1 << (depth * WIDTH)


_DEEPEST_ELSEWHERE: Final = 16


def _depth_elsewhere(state: State) -> int:
    """Return the depth of the deepest level of the other threads, and of the hidden levels."""
    if not active_levels:
        return 0
    me = threading.get_ident()
    depths = [level.depth for level, thread in tuple(active_levels.items()) if thread != me]
    deepest = max(depths, default=0)
    return max(state.hidden, deepest if deepest < _DEEPEST_ELSEWHERE else 0)


class Level:
    """An active transform: one more level of a key, inside the levels active at its creation.

    As a context manager the level is the innermost level of this thread. A level is entered once:
    ``alive`` is False after the block. With ``modal=True`` the include set of the block has the
    level's key, so that calls without any of the level's values reach its kernels too.

    Attributes:
        autograd: nonzero while a transform records derivatives on the level's values.
        key: the key whose kernels the level runs.
        depth: 1 for the outermost level.
        key_bit: the bit of (depth, key), which the level's values contribute to a call's key set.
        alive: True until the transform ends.
        outer: the state that the level's kernels run under.
        name: the name of the level in error messages.
        binding: for a level without values, the text of the name that it binds; a program that is
            made inside of the level is valid for this binding only.
        forbids_random: True if random operators that reach the level raise an error.
        restores: make the context managers under which the level's kernels run, beside ``outer``.
    """

    __slots__ = ("_entered", "_inner", "_kernel_states", "_modal", "_site", "alive", "depth", "key",
                 "key_bit", "name", "outer", "restores")  # fmt: skip

    autograd: int = 0
    binding: str = ""
    forbids_random: bool = False
    depth: int

    def __init__(self, key: DispatchKey, name: str | None = None, *, modal: bool = False) -> None:
        captured = tls.state
        self.key = key
        levels = captured.levels
        self.depth = depth = (levels[-1].depth if levels else _depth_elsewhere(captured)) + 1
        self.key_bit = _masks(depth, key.priority)[0]
        self.alive = True
        self.outer = captured
        self._modal = modal
        self._inner: State | None = None
        self.name = name or key.name
        self._site = _user_code(sys._getframe(1))
        self._kernel_states: dict[int, State] = {}
        captures = hooks.capture_state.functions
        self.restores = tuple([capture() for capture in captures]) if captures else ()
        if captured.recorder is not None:
            # Keeps the level's calls without plans also on threads with a plain state.
            self.restores += (nullcontext,)
        self._entered = False

    @property
    def inner(self) -> State:
        """The state of the code that runs inside of the level."""
        state = self._inner
        if state is None:
            outer, depth = self.outer, self.depth
            excluded, mask = outer.excluded, outer.mask
            if mask != -1:
                # Levels from here inward are new: the mask of a running kernel does not apply to
                # them.
                inward = _masks(depth, self.key.priority)[1]
                mask |= inward & ~excluded if excluded else inward
            include = outer.include | self.key_bit if self._modal else outer.include
            state = self._inner = State(
                include, mask, (*outer.levels, self), None, excluded, outer.recorder,
                outer.remap_args,
            )  # fmt: skip
        return state

    @inner.setter
    def inner(self, state: State) -> None:
        self._inner = state

    def replace_states(self, outer: State, inner: State) -> None:
        """Replace the states of the level's kernels and of the code inside of it."""
        self.outer, self._inner, self._kernel_states = outer, inner, {}

    def __enter__(self: L) -> L:
        if self._entered or tls.state is not self.outer:
            self._refuse_entering()
        self._entered = True
        tls.state = self.inner
        active_levels[self] = threading.get_ident()
        return self

    def __exit__(self, *exc: object) -> None:
        tls.state = self.outer
        self.alive = False
        active_levels.pop(self, None)
        # These states refer to the level: without them no cycle keeps it, and the call's arguments,
        # until the next garbage collection. They are made again if a backward pass needs them.
        self._inner = None
        self._kernel_states.clear()

    def _refuse_entering(self) -> None:
        raise DispatchError(
            f"{self.name} (made at {self.site}): "
            + (
                "the level was entered before, and serves for one block only."
                if self._entered
                else "the level was made under another dispatch state than it is entered under."
            )
            + f" Write `with {type(self).__name__}(...) as level:`."
        )

    def within(self, other: Level) -> bool:
        """True if this level replaces ``other`` and its kernels take values of ``other``."""
        return False

    @property
    def site(self) -> str:
        """The ``file:line`` of the user's code that made the level."""
        code, line = self._site
        return f"{code.co_filename}:{line}"

    def kernel_state(self, bit: int) -> State:
        """Return the captured state with ``bit`` and up excluded, for this level's kernels."""
        state = self._kernel_states.get(bit)
        if state is None:
            outer = self.outer
            mask = outer.mask & ((1 << bit) - 1)
            state = State(outer.include, mask, outer.levels, self, outer.excluded, outer.recorder)
            self._kernel_states[bit] = state
        return state

    def at_own_level(self) -> AbstractContextManager[None]:
        """Context manager: run inside of this level, for kernels that use its values."""
        return using(self.inner)

    def guard(self) -> AbstractContextManager[Any]:
        """Context manager: restore the state outside of this package that the level captured."""
        return _enter_all(self.restores) if self.restores else _NOTHING_TO_RESTORE

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context manager: restore all captured state (NOTE [state captured by a level])."""
        with using(self.outer), self.guard():
            yield


class replacing_captured_levels:
    """Context manager: change the levels in the captured states of other levels.

    Levels change while some of them replace others (``bridge/control/subsets``): operators that the
    kernels of inner levels call must reach the replacing levels even when no argument belongs to
    them.

    Args:
        seen: function from a state's levels to the levels that replace them.
    """

    __slots__ = ("_inside", "_previous", "_seen")

    def __init__(
        self, inside: Sequence[Level], seen: Callable[[Sequence[Level]], tuple[Level, ...]]
    ) -> None:
        self._inside, self._seen = inside, seen

    def __enter__(self) -> None:
        self._previous = [(level, level.outer, level.inner) for level in self._inside]
        for level in self._inside:
            level.replace_states(
                level.outer.replace(levels=self._seen(level.outer.levels)),
                level.inner.replace(levels=self._seen(level.inner.levels)),
            )

    def __exit__(self, *exc: object) -> None:
        for level, outer, inner in self._previous:
            level.replace_states(outer, inner)


def outside_all_levels() -> AbstractContextManager[None]:
    """Context manager: no active level, and no included or excluded key.

    A level that is entered in the block is deeper than the levels outside of it, whose values the
    block may use: a traced function may call a pullback whose graph has such values.
    """
    before = tls.state
    hidden = before.levels[-1].depth if before.levels else before.hidden
    return using(State(0, -1, (), recorder=before.recorder, hidden=hidden))


def running_level() -> Level | None:
    """Return the level whose kernel runs; None outside of a level's kernel."""
    return tls.state.running


def current_levels() -> tuple[Level, ...]:
    """Return the active levels of this thread, the innermost last."""
    return tls.state.levels


def innermost_of(kind: type[L], levels: Sequence[Level] | None = None) -> L | None:
    """Return the innermost level of a class, or None.

    Args:
        levels: levels, the innermost last; by default the active levels of this thread.
    """
    for level in reversed(tls.state.levels if levels is None else levels):
        if isinstance(level, kind):
            return level
    return None
