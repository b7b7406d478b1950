"""The recorder: the kernels that served dispatched calls, and the lines that made the calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tsfunc.dispatch.keys import DispatchKey, split_bit
from tsfunc.user_code import Location


@dataclass(frozen=True)
class KernelUse:
    """The calls of an operator from one line that were served in the same way.

    Attributes:
        operator: the name of the operator.
        location: the line that called the operator.
        backward: True if the call came from the backward pass of that line.
        key: the key that the call was dispatched to.
        transform: the name of the transform whose level served the call.
        depth: the depth of that level.
        how: the description that the kernel gave (:func:`note`), else the kind of its
            registration.
        rule: the name of the kernel or of the rule that it ran.
        source: the ``file:line`` of the rule.
        within: the operator that this operator is a part of, or an empty string.
    """

    operator: str
    location: Location
    backward: bool
    key: str
    transform: str
    depth: int
    how: str = ""
    rule: str = ""
    source: str = ""
    within: str = ""


@dataclass
class UseCount:
    """The number of calls of a use, their total time, and the number of the first call."""

    times: int
    seconds: float
    first: int


class KernelEntry(Protocol):
    """The attributes that a recorder reads of a kernel's entry in the table."""

    @property
    def kind(self) -> str: ...
    @property
    def site(self) -> str: ...


class CalledOperator(Protocol):
    """The attributes that a recorder reads of an operator."""

    @property
    def name(self) -> str: ...
    def entry(self, key: DispatchKey) -> KernelEntry | None: ...


class CallLevel(Protocol):
    """The attributes that a recorder reads of a level."""

    @property
    def name(self) -> str: ...


class _RunningCalls(threading.local):
    """The calls that run on a thread, the innermost last."""

    def __init__(self) -> None:
        self.calls: list[KernelUse] = []


class Recorder:
    """Collector of the uses of operators.

    Args:
        location: function that returns the line to name for the current call, and True if the call
            comes from the backward pass of that line.

    Attributes:
        uses: the number of calls and the time of each use.
        started: the number of calls so far.
        exchanges: for each pair (mesh axis, collective), the number of calls and the number of
            bytes that this rank sent.
    """

    def __init__(self, location: Callable[[], tuple[Location, bool]]) -> None:
        self.location = location
        self.uses: dict[KernelUse, UseCount] = {}
        self.started = 0
        self.exchanges: dict[tuple[str, str], tuple[int, int]] = {}
        self._running = _RunningCalls()
        self._lock = threading.Lock()

    def with_recording(
        self,
        op: CalledOperator,
        bit: int,
        level: CallLevel | None,
        kernel: Callable[..., Any],
        boxed: bool,
    ) -> Callable[..., Any]:
        """Return the kernel, as a boxed kernel that records its call.

        Calls at level 0 are not recorded: kernels make them at the end of every call.
        """
        depth, key = split_bit(bit)
        entry = op.entry(key)
        if not depth or level is None or entry is None:
            return kernel if boxed else lambda op, args, kwargs: kernel(*args, **kwargs)
        name = name_of_rule(kernel)
        location, backward = self.location()
        within = self._within(depth)
        use = KernelUse(
            op.name, location, backward, key.name, level.name, depth, entry.kind, name, entry.site,
            within,
        )  # fmt: skip

        def recorded(op: CalledOperator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            if boxed:
                return self.run(use, lambda: kernel(op, args, kwargs))
            return self.run(use, lambda: kernel(*args, **kwargs))

        return recorded

    def run(self, use: KernelUse, call: Callable[[], Any], *, alone: bool = False) -> Any:
        """Make a call and record it, together with the notes of its kernel.

        A call that returns NotImplemented is not recorded. With ``alone=True``, a call that makes
        other calls is not recorded either: its own calls are.
        """
        with self._lock:
            first = self.started
            self.started += 1
        calls = self._running.calls
        calls.append(use)
        start = time.perf_counter()
        served = True
        try:
            out = call()
            served = out is not NotImplemented
            return out
        finally:
            seconds = time.perf_counter() - start
            use = calls.pop()
            if served and (not alone or self.started == first + 1):
                self._count(use, seconds, first)

    def _count(self, use: KernelUse, seconds: float, first: int) -> None:
        with self._lock:
            count = self.uses.setdefault(use, UseCount(0, 0.0, first))
            count.times += 1
            count.seconds += seconds
            count.first = min(count.first, first)

    @property
    def running(self) -> Sequence[KernelUse]:
        """The calls that run on this thread, the innermost last."""
        return self._running.calls

    def note(self, how: str, rule: str = "", source: str = "") -> None:
        """Describe how the running kernel serves its call."""
        calls = self._running.calls
        if calls:
            calls[-1] = replace(calls[-1], how=how, rule=rule, source=source)

    def record_collective(self, axis: str, collective: str, size: int) -> None:
        """Record a collective along a mesh axis, of a value of ``size`` bytes."""
        with self._lock:
            times, sent = self.exchanges.get((axis, collective), (0, 0))
            self.exchanges[axis, collective] = times + 1, sent + size

    def _within(self, depth: int) -> str:
        """Return the innermost running operator of a level."""
        return next((u.operator for u in reversed(self._running.calls) if u.depth == depth), "")


def name_of_rule(func: Callable[..., Any]) -> str:
    """Return the name of a kernel or rule for reports."""
    return getattr(func, "__qualname__", repr(func)).replace(".<locals>", "")
