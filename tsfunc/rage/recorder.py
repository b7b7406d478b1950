"""The record itself: a ring of events in memory, and a file of them for each run of Python."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tsfunc.rage.scrubbing import scrubbed

VARIABLE = "TSFUNC_RAGE"
EVENTS = 256  # that memory holds
BYTES = 256 * 1024  # of a run's file
RUNS = 16  # whose files are kept
SUFFIX = ".jsonl"


@dataclass
class Event:
    """Something that tsfunc did or refused.

    Attributes:
        seconds: when, since the epoch.
        kind: what it was: "specialized", "trace failed", "error", "warning" ...
        facts: what is known of it.
        times: how often the same happened in a row.
    """

    seconds: float
    kind: str
    facts: Mapping[str, str | int | float]
    times: int = 1

    def line(self) -> str:
        """It as a line of a file."""
        about = {"seconds": round(self.seconds, 6), "kind": self.kind, **_if_many(self.times)}
        return json.dumps({**about, "facts": self.facts}) + "\n"


def _if_many(times: int) -> dict[str, int]:
    return {"times": times} if times > 1 else {}


class Recorder:
    """Takes events, and forgets the oldest. It never raises, and never waits for long."""

    def __init__(self) -> None:
        self.events: deque[Event] = deque(maxlen=EVENTS)
        self._renew()

    def _renew(self) -> None:
        """Begins a file of its own: at first, and in a process that was forked off."""
        self._lock = threading.RLock()
        self._file: Path | None = None
        self._written = 0
        self._gone_wrong = False

    def record(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Keeps an event, its facts as text where they are no numbers."""
        kept = {name: _plain(value) for name, value in facts.items()}
        with self._lock:
            last = self.events[-1] if self.events else None
            if last is not None and (last.kind, last.facts) == (kind, kept):
                last.times += 1
                return
            event = Event(time.time(), kind, kept)
            self.events.append(event)
            if not self._gone_wrong:
                try:
                    self._write(event.line() if last is None else _again(last) + event.line())
                except (OSError, ImportError):  # a full disk is no reason for a call to fail
                    self._gone_wrong = True

    def _write(self, lines: str) -> None:
        if self._file is None:
            folder = folder_of_files()
            if folder is None:
                self._gone_wrong = True
                return
            self._file = _new_file(folder)
            lines = _heading() + lines
        size = len(lines.encode())
        if self._written + size <= BYTES:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(lines)
            self._written += size
        else:
            self._begin_anew(self._file)

    def _begin_anew(self, file: Path) -> None:
        """Writes the file again with no more than the newest events, to half of its size."""
        lines: list[str] = []
        size = 0
        for event in reversed(self.events):
            line = event.line()
            size += len(line.encode())
            if size > BYTES // 2:
                break
            lines.append(line)
        text = _heading() + "".join(reversed(lines))
        handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=".")
        with open(handle, "w", encoding="utf-8") as new:
            new.write(text)
        os.replace(temporary, file)
        self._written = len(text.encode())


def _again(event: Event) -> str:
    """The line of an event that has happened more often than its first line says."""
    return event.line() if event.times > 1 else ""


def _plain(value: Any) -> str | int | float:
    if isinstance(value, bool | int | float):
        return value
    return scrubbed(str(value))


def folder_of_files() -> Path | None:
    """Where the files lie: what TSFUNC_RAGE says, None for "off"; else the user's own logs."""
    said = os.environ.get(VARIABLE, "")
    if said.lower() in ("off", "0", "no", "false"):
        return None
    if said:
        return Path(said)
    # Here, and not above: `import tsfunc` is to do without.
    import platformdirs

    return platformdirs.user_log_path("tsfunc", appauthor=False) / "rage"


def _new_file(folder: Path) -> Path:
    """An empty file for this run that nobody else may read; the oldest ones go."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    older = sorted(folder.glob(f"*{SUFFIX}"))
    for file in older[: max(0, len(older) - RUNS + 1)]:
        file.unlink(missing_ok=True)
    started = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    file = folder / f"{started}-{os.getpid()}{SUFFIX}"
    file.touch(mode=0o600)
    return file


def heading() -> dict[str, str | int]:
    """What runs, and on what."""
    torch, tsfunc = sys.modules.get("torch"), sys.modules.get("tsfunc")
    return {
        "tsfunc": str(getattr(tsfunc, "__version__", "?")),
        "torch": str(getattr(torch, "__version__", "?")),
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "machine": platform.machine(),
        "cores": os.cpu_count() or 0,
        "command": os.path.basename(sys.argv[0]) if sys.argv else "",
        "process": os.getpid(),
    }


def _heading() -> str:
    return json.dumps(heading()) + "\n"


_recorder = Recorder()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_recorder._renew)


def record(kind: str, **facts: Any) -> None:
    """Keeps what has happened, in memory and in the run's file; it never raises.

    Args:
        kind: what it was, in a word or two.
        facts: numbers, and what is kept as text: without folders and tensors' values, and cut
            where it is long.

    Example:
        >>> from tsfunc import rage
        >>> rage.record("example", file="/home/me/train.py", size=3)
        >>> rage.events()[-1].facts
        {'file': 'train.py', 'size': 3}
    """
    _recorder.record(kind, facts)


def events() -> tuple[Event, ...]:
    """The events of this run that are still remembered, the newest last."""
    with _recorder._lock:
        return tuple(_recorder.events)
