"""The recorder: which kernel served each call that was dispatched, and from where."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tsfunc.dispatch.keys import DispatchKey, split_bit
from tsfunc.dispatch.places import Place


@dataclass(frozen=True)
class Use:
    """One way in which an operator was served from one line.

    Attributes:
        operator: its name.
        place: the line that called it.
        backward: whether the backward pass of that line called it.
        key: the key that it was dispatched to.
        transform: the transform whose level it met, and ``depth`` that level's.
        how: what the kernel said of itself (:func:`note`), else how it was registered.
        rule: the name of the kernel or of what it ran, and ``source`` its ``file:line``.
        within: the operator whose parts it belongs to, or the empty string.
    """

    operator: str
    place: Place
    backward: bool
    key: str
    transform: str
    depth: int
    how: str = ""
    rule: str = ""
    source: str = ""
    within: str = ""


@dataclass
class Count:
    """How often a use was met, how long that took together, and when it was met first."""

    times: int
    seconds: float
    first: int


class Kernel(Protocol):
    """What a recorder asks of a kernel's entry in the table."""

    @property
    def kind(self) -> str: ...
    @property
    def site(self) -> str: ...


class Called(Protocol):
    """What it asks of an operator."""

    @property
    def name(self) -> str: ...
    def entry(self, key: DispatchKey) -> Kernel | None: ...


class Met(Protocol):
    """What it asks of a level."""

    @property
    def name(self) -> str: ...


class _Running(threading.local):
    """The calls that run on a thread, the innermost last."""

    def __init__(self) -> None:
        self.calls: list[Use] = []


class Recorder:
    """Collects the uses of operators.

    Args:
        place: the line that is to be named for a call that is made now, and whether it is the
            backward pass of it.

    Attributes:
        uses: what was met, and how often.
        started: how many calls were met.
        exchanges: for each axis of a mesh and each collective along it, how often it was called
            and how many bytes this rank gave to it.
    """

    def __init__(self, place: Callable[[], tuple[Place, bool]]) -> None:
        self.place = place
        self.uses: dict[Use, Count] = {}
        self.started = 0
        self.exchanges: dict[tuple[str, str], tuple[int, int]] = {}
        self._running = _Running()
        self._lock = threading.Lock()

    def watched(
        self,
        op: Called,
        bit: int,
        level: Met | None,
        kernel: Callable[..., Any],
        boxed: bool,
    ) -> Callable[..., Any]:
        """The kernel with its call recorded, to be called as a boxed one.

        Calls that belong to no level are those that kernels make at the end.
        """
        depth, key = split_bit(bit)
        entry = op.entry(key)
        if not depth or level is None or entry is None:
            return kernel if boxed else lambda op, args, kwargs: kernel(*args, **kwargs)
        name = name_of_rule(kernel)
        place, backward = self.place()
        within = self._within(depth)
        use = Use(
            op.name, place, backward, key.name, level.name, depth, entry.kind, name, entry.site,
            within,
        )  # fmt: skip

        def recorded(op: Called, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            if boxed:
                return self.run(use, lambda: kernel(op, args, kwargs))
            return self.run(use, lambda: kernel(*args, **kwargs))

        return recorded

    def run(self, use: Use, call: Callable[[], Any], *, alone: bool = False) -> Any:
        """Makes a call, and records it with what it notes of itself.

        With ``alone`` it is left out where other calls are made within it: they say more.
        """
        with self._lock:
            first = self.started
            self.started += 1
        calls = self._running.calls
        calls.append(use)
        start = time.perf_counter()
        try:
            return call()
        finally:
            seconds = time.perf_counter() - start
            use = calls.pop()
            if not alone or self.started == first + 1:
                self._count(use, seconds, first)

    def _count(self, use: Use, seconds: float, first: int) -> None:
        with self._lock:
            count = self.uses.setdefault(use, Count(0, 0.0, first))
            count.times += 1
            count.seconds += seconds
            count.first = min(count.first, first)

    def note(self, how: str, rule: str = "", source: str = "") -> None:
        """What the kernel that runs does with its call."""
        calls = self._running.calls
        if calls:
            calls[-1] = replace(calls[-1], how=how, rule=rule, source=source)

    def exchanged(self, axis: str, collective: str, size: int) -> None:
        """Record a collective along a mesh axis, of a value of so many bytes."""
        with self._lock:
            times, sent = self.exchanges.get((axis, collective), (0, 0))
            self.exchanges[axis, collective] = times + 1, sent + size

    def _within(self, depth: int) -> str:
        """The innermost running operator of a level."""
        return next((u.operator for u in reversed(self._running.calls) if u.depth == depth), "")


def name_of_rule(func: Callable[..., Any]) -> str:
    """How reports call a kernel or rule."""
    return getattr(func, "__qualname__", repr(func)).replace(".<locals>", "")
