"""What a thread includes and excludes, and the levels that capture it.

All mutable state of the dispatcher that belongs to a call is here: one immutable
:class:`State` a thread, replaced and put back by context managers.

NOTE [state captured by a level]
A level remembers the state that held where it was entered. Its kernels run under that state,
on whichever thread they are called: the backward pass runs on threads of its own, where the
thread-local state is another. So a kernel's level is found from its arguments first, and only
without any from the state.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any, Final, Protocol, TypeVar

from tsfunc.dispatch.keys import BACKEND_BITS, WIDTH, DispatchKey, DispatchKeySet, bits_of
from tsfunc.dispatch.recorder import Recorder
from tsfunc.errors import DispatchError

# The lowest bit of each level: shifted by a key's priority, that key at every level. Deeper
# levels than that are not excluded until they are entered.
_EVERY_LEVEL: Final = sum(1 << (level * WIDTH) for level in range(64))
_BACKEND_SELECT: Final = 1 << DispatchKey.BackendSelect.priority
_PACKAGE: Final = __file__.rsplit("dispatch", 1)[0]


class RemapArgs(Protocol):
    """Remaps the arguments of a call in the function handler (``bridge/control/subsets``)."""

    def __call__(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]] | None:
        """The arguments that the callable is to be called with instead; None: those that it has."""

    def anew(self) -> RemapArgs:
        """One that remembers nothing of the calls that this one has seen."""


class State:
    """The include set, the mask of what is not excluded, and the active levels of a thread.

    ``mask`` lacks what the user has excluded and what a running kernel has put on. The first
    kind is in ``excluded`` too: it goes on to hold at levels that are entered later. The state is
    ``plain`` if nothing is included, excluded or recorded. ``served`` is the operator whose
    backend kernel runs: redispatching that operator has reached its end.
    """

    __slots__ = (
        "_below",
        "_ends",
        "excluded",
        "include",
        "levels",
        "mask",
        "plain",
        "recorder",
        "remap_args",
        "running",
        "served",
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
    ) -> None:
        self.include = include
        self.mask = mask
        self.levels = levels
        self.running = running
        self.excluded = excluded
        self.recorder = recorder
        self.remap_args = remap_args
        self.plain = not (include or excluded or recorder)
        self.served: object = None
        self._below: dict[int, State] | None = None
        self._ends: dict[tuple[object, int], State] | None = None

    def below(self, bit: int) -> State:
        """Return the state that the level-0 kernel of ``bit`` runs under.

        The kernel excludes its own bit and all higher ones, so that calling the operator again
        reaches the next key. Backends stay: they are the end of every call. Keys that the user
        has excluded stay excluded.
        """
        known = self._below
        if known is None:
            known = self._below = {}
        state = known.get(bit)
        if state is None:
            mask = self.mask & ((1 << bit) - 1) | BACKEND_BITS & ~self.excluded
            state = known[bit] = State(
                self.include, mask, self.levels, None, self.excluded, self.recorder,
                self.remap_args,
            )  # fmt: skip
        return state

    def at_end(self, op: object, bit: int) -> State:
        """Return the state that the kernel of ``op`` for the backend ``bit`` runs under.

        It excludes what :meth:`below` excludes, except BackendSelect, which factories go by. The
        kernel may call other operators, and its own on other values.
        """
        known = self._ends
        if known is None:
            known = self._ends = {}
        state = known.get((op, bit))
        if state is None:
            mask = self.below(bit).mask | _BACKEND_SELECT & ~self.excluded
            state = known[op, bit] = self._copy(self.include, mask, self.excluded)
            state.served = op
        return state

    def serving(self, op: object) -> State:
        """Return this state, in which redispatching ``op`` has reached its end."""
        state = self._copy(self.include, self.mask, self.excluded)
        state.running, state.served = self.running, op
        return state

    def changed(self, include: int, mask: int, excluded: int, recorder: Recorder | None) -> State:
        """Return this state with other sets and another recorder."""
        state = State(include, mask, self.levels, self.running, excluded, recorder, self.remap_args)
        state.served = self.served
        return state

    def _copy(self, include: int, mask: int, excluded: int) -> State:
        return State(include, mask, self.levels, None, excluded, self.recorder, self.remap_args)

    def forgetful(self) -> State:
        """This state, in which nothing is taken over yet: for what is to run twice alike."""
        if self.remap_args is None:
            return self
        return self.with_levels(self.levels, self.remap_args.anew())

    def with_levels(self, levels: tuple[Level, ...], remap_args: RemapArgs | None = None) -> State:
        """This state with other levels active, as deep as those that are."""
        return State(
            self.include, self.mask, levels, self.running, self.excluded, self.recorder,
            remap_args or self.remap_args,
        )  # fmt: skip


class _ThreadState(threading.local):
    state = State(0, -1, ())


tls: Final = _ThreadState()


class _Global:
    """The keys that every call of every thread considers."""

    bits = _BACKEND_SELECT


global_set: Final = _Global()
_global_lock = threading.Lock()


def global_keys() -> DispatchKeySet:
    """The global set: keys that every call on every thread considers."""
    return DispatchKeySet.from_bits(global_set.bits)


def include_globally(*keys: DispatchKey) -> None:
    """Adds keys (at level 0) to the global set, for all threads."""
    with _global_lock:
        global_set.bits |= DispatchKeySet(*keys).bits


def exclude_globally(*keys: DispatchKey) -> None:
    """Takes keys (at level 0) out of the global set again, for all threads."""
    with _global_lock:
        global_set.bits &= ~DispatchKeySet(*keys).bits


def included() -> DispatchKeySet:
    """The include set of this thread."""
    return DispatchKeySet.from_bits(tls.state.include)


def excluded() -> DispatchKeySet:
    """Return the exclude set of this thread.

    Inside a kernel it is a complement: it holds the kernel's bit and all higher ones. Backends
    are excluded only where the user excludes them.
    """
    return DispatchKeySet.from_bits(~tls.state.mask)


class using:
    """Context manager: runs the block under a state, and puts the previous one back."""

    __slots__ = ("_previous", "_state")

    def __init__(self, state: State) -> None:
        self._state = state

    def __enter__(self) -> None:
        self._previous = tls.state
        tls.state = self._state

    def __exit__(self, *exc: object) -> None:
        tls.state = self._previous


@contextmanager
def include(*keys: DispatchKey | DispatchKeySet) -> Iterator[None]:
    """Context manager: adds keys (at level 0) or a key set to this thread's include set.

    Nestable; the previous set is restored also after an exception.

    Example:
        >>> from tsfunc import dispatch
        >>> with dispatch.include(dispatch.DispatchKey.Trace):
        ...     print(dispatch.included())
        DispatchKeySet(Trace@0)
    """
    bits = DispatchKeySet(*keys).bits
    old = tls.state
    both = old.include | bits
    tls.state = old.changed(both, old.mask, old.excluded, old.recorder)
    try:
        yield
    finally:
        tls.state = old


@contextmanager
def exclude(*keys: DispatchKey | DispatchKeySet) -> Iterator[None]:
    """Context manager: adds keys (at every level) or a key set to this thread's exclude set.

    A key excluded stays so at levels that are entered in the block. Excluding beats including.
    Nestable; the previous set is restored also after an exception.

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
    old = tls.state
    mask = old.mask & ~bits
    both = old.excluded | bits
    tls.state = old.changed(old.include, mask, both, old.recorder)
    try:
        yield
    finally:
        tls.state = old


Restore = Callable[[], AbstractContextManager[Any]]
_captures: list[Callable[[], Restore]] = []


def on_capture(capture: Callable[[], Restore]) -> None:
    """Registers state outside of this package that levels capture too.

    ``capture()`` is called where a level is made and returns a function whose context manager
    brings what it saw back.
    """
    _captures.append(capture)


def _user_code(frame: FrameType) -> tuple[CodeType, int]:
    """The nearest code outside this package, kept without its frame."""
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return frame.f_code, frame.f_lineno


@contextmanager
def _restoring(restores: Sequence[Restore]) -> Iterator[None]:
    """Enters what each restorer returns, and leaves those entered whatever happens."""
    with ExitStack() as stack:
        for restore in restores:
            stack.enter_context(restore())
        yield


_NOTHING_TO_RESTORE: Final = nullcontext()


L = TypeVar("L", bound="Level")

# Those that are entered and not left yet, each with the thread that entered it.
active_levels: Final[dict[Level, int]] = {}


@lru_cache(maxsize=1024)
def _masks(depth: int, priority: int) -> tuple[int, int]:
    """The bit of a level's key, and all bits from the level inward."""
    return 1 << (depth * WIDTH + priority), -1 << (depth * WIDTH)


# NOTE [threads inside of a transform]
# A thread that is started inside of a transform does not have its levels, but may well use its
# values, which lead to their level by themselves. A level that the thread enters then has to be
# inside of that one, so the first one of a thread goes deeper than all that are active elsewhere.
# Where threads have nothing to do with one another that does no harm; it must not add up.
_DEEPEST_ELSEWHERE: Final = 16


def _depth_elsewhere() -> int:
    """How deep the levels of other threads go."""
    if not active_levels:
        return 0
    me = threading.get_ident()
    depths = [level.depth for level, thread in tuple(active_levels.items()) if thread != me]
    deepest = max(depths, default=0)
    return deepest if deepest < _DEEPEST_ELSEWHERE else 0


class Level:
    """An active transform: one more level of a key, on top of those active where it is made.

    As a context manager it makes itself the innermost level of this thread; when it ends,
    ``alive`` is False for good. With ``modal=True`` its key is in the include set of the
    block, so that calls without any of its values reach its kernels too.

    Attributes:
        autograd: nonzero while a transform records derivatives on the level's values.
        key: the key whose kernels it runs.
        depth: 1 for the outermost level.
        bits: the bit of (depth, key), what its values contribute to a call's key set.
        alive: True until the transform ends.
        outer: the state that its kernels run under.
        name: how errors call it.
        binding: for a level without values, the text of the name that it binds: programs that are
            made inside of it are made for this binding.
    """

    __slots__ = ("_entered", "_kernel_states", "_restores", "_site", "alive", "bits", "depth",
                 "inner", "key", "name", "outer")  # fmt: skip

    autograd: int = 0
    binding: str = ""
    depth: int

    def __init__(self, key: DispatchKey, name: str | None = None, *, modal: bool = False) -> None:
        captured = tls.state
        self.key = key
        levels = captured.levels
        self.depth = depth = (levels[-1].depth if levels else _depth_elsewhere()) + 1
        self.bits, inward = _masks(depth, key.priority)
        self.alive = True
        self.outer = captured
        # Levels from here inward are new: a mask that a running kernel has put on them goes.
        excluded = captured.excluded
        recorder = captured.recorder
        mask = captured.mask
        if mask != -1:
            mask |= inward & ~excluded if excluded else inward
        include = captured.include | self.bits if modal else captured.include
        self.inner = State(
            include, mask, (*captured.levels, self), None, excluded, recorder, captured.remap_args
        )
        self.name = name or key.name
        self._site = _user_code(sys._getframe(1))
        self._kernel_states: dict[int, State] = {}
        self._restores = tuple([capture() for capture in _captures]) if _captures else ()
        if recorder is not None:
            # Takes the level's calls past the short ways also on threads with a plain state.
            self._restores += (nullcontext,)
        self._entered = False

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
        """Whether it is in another level's place, and its kernels take in that one's values."""
        return False

    @property
    def site(self) -> str:
        """``file:line`` of the user's code that made the level."""
        code, line = self._site
        return f"{code.co_filename}:{line}"

    def kernel_state(self, bit: int) -> State:
        """What a kernel of this level runs under: the captured state, from ``bit`` up excluded."""
        state = self._kernel_states.get(bit)
        if state is None:
            outer = self.outer
            mask = outer.mask & ((1 << bit) - 1)
            state = State(outer.include, mask, outer.levels, self, outer.excluded, outer.recorder)
            self._kernel_states[bit] = state
        return state

    def at_own_level(self) -> AbstractContextManager[None]:
        """Context manager: as inside of the transform, for kernels that call on its own values."""
        return using(self.inner)

    def guard(self) -> AbstractContextManager[Any]:
        """Context manager: what the level captured outside of this package's own state."""
        return _restoring(self._restores) if self._restores else _NOTHING_TO_RESTORE

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context manager: all that was captured, on any thread (NOTE [state captured ...])."""
        with using(self.outer), self.guard():
            yield


class capturing:
    """Context manager: levels have captured other levels than those they were made in.

    While other levels replace these (``bridge/control/subsets``): what the
    kernels of the levels inside call is to meet them too, also where it has no values of theirs.

    Args:
        inside: the levels whose captured states change.
        seen: the levels that are in the places of some.
    """

    __slots__ = ("_inside", "_previous", "_seen")

    def __init__(
        self, inside: Sequence[Level], seen: Callable[[Sequence[Level]], tuple[Level, ...]]
    ) -> None:
        self._inside, self._seen = inside, seen

    def __enter__(self) -> None:
        self._previous = [(x.outer, x.inner, x._kernel_states) for x in self._inside]
        for level in self._inside:
            level.outer = level.outer.with_levels(self._seen(level.outer.levels))
            level.inner = level.inner.with_levels(self._seen(level.inner.levels))
            level._kernel_states = {}

    def __exit__(self, *exc: object) -> None:
        for level, (outer, inner, kernels) in zip(self._inside, self._previous, strict=True):
            level.outer, level.inner, level._kernel_states = outer, inner, kernels


def outside_all_levels() -> AbstractContextManager[None]:
    """Context manager: no level is active, and nothing included or excluded."""
    return using(State(0, -1, (), recorder=tls.state.recorder))


def running_level() -> Level | None:
    """Inside a kernel of a level: that level."""
    return tls.state.running


def current_levels() -> tuple[Level, ...]:
    """The active levels of this thread, the innermost last."""
    return tls.state.levels
