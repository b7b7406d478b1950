"""The record: a ring of events in memory, and a file of events for each run of Python."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# --- the removal of private data


LONGEST = 8_000  # characters of one fact: enough for a program of 100 operators
_CUT = "\n[...]\n"

_END = r"\s:,;'\"`()\[\]{}<>"  # the characters that end a path without quotes
_QUOTED = re.compile(r"""(["'`])(?:~|[A-Za-z]:|\.\.?)?[\\/]+(?:[^"'`\n]*[\\/])?([^"'`\\/\n]*)\1""")
# The pattern starts at a separator and looks back from there, which is ten times as fast.
_BARE = re.compile(rf"[\\/](?<![\w.)\]\\/].)[\\/]*(?:[^{_END}\\/]+[\\/]+)*(?P<name>[^{_END}\\/]+)")
_VALUES = re.compile(r"(?P<kind>tensor|Parameter|array)\((?:[^()]|\([^()]*\))*\)")


def scrub(text: str) -> str:
    """Return a text for the record: paths without folders, tensors without values."""
    if len(text) > LONGEST:
        text = text[: LONGEST // 2] + _CUT + text[-LONGEST // 2 :]
    if "/" in text or "\\" in text:
        for folder in _known_folders():
            text = text.replace(folder, "/")
        text = _QUOTED.sub(r"\1\2\1", text.replace("~/", "/"))
        text = _BARE.sub(r"\g<name>", text)
    if "tensor(" in text or "Parameter(" in text or "array(" in text:
        text = _VALUES.sub(r"\g<kind>(...)", text)
    return text


def _known_folders() -> list[str]:
    """Return folders that are likely to contain code, the longest first; names may have spaces."""
    folders = {os.path.expanduser("~"), sys.prefix, *sys.path}
    try:
        folders.add(os.getcwd())
    except OSError:  # the folder was deleted
        pass
    separate = {os.path.join(folder, "") for folder in folders if os.path.isabs(folder)}
    return sorted(separate - {os.sep}, key=len, reverse=True)


VARIABLE = "TSFUNC_RAGE"
EVENTS = 256  # events kept in memory
BYTES = 256 * 1024  # the size limit of a run's file
RUNS = 16  # the number of files kept
SUFFIX = ".jsonl"


@dataclass
class Event:
    """An action or a refusal of tsfunc.

    Attributes:
        seconds: the time since the epoch.
        kind: the kind of event: "specialized", "trace failed", "error", "warning" ...
        times: the number of equal events in a row.
    """

    seconds: float
    kind: str
    facts: Mapping[str, str | int | float]
    times: int = 1

    def line(self) -> str:
        """Return the event as a line of a file."""
        about: dict[str, Any] = {"seconds": round(self.seconds, 6), "kind": self.kind}
        if self.times > 1:
            about["times"] = self.times
        return json.dumps({**about, "facts": self.facts}) + "\n"


class EventRecorder:
    """Recorder of events that forgets the oldest ones; never raises and never blocks for long."""

    def __init__(self) -> None:
        self.events: deque[Event] = deque(maxlen=EVENTS)
        self._renew()

    def _renew(self) -> None:
        """Begin a new file: at creation, and in a forked process."""
        self._lock = threading.RLock()
        self._file: Path | None = None
        self._written = 0
        self._gone_wrong = False

    def record(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Record an event; facts other than numbers are kept as text."""
        plain_facts = {name: _plain(value) for name, value in facts.items()}
        with self._lock:
            last = self.events[-1] if self.events else None
            if last is not None and (last.kind, last.facts) == (kind, plain_facts):
                last.times += 1
                return
            event = Event(time.time(), kind, plain_facts)
            self.events.append(event)
            if not self._gone_wrong:
                try:
                    self._write(
                        event.line() if last is None else _line_of_repetitions(last) + event.line()
                    )
                except (OSError, ImportError):  # a full disk must not make a call fail
                    self._gone_wrong = True

    def _write(self, lines: str) -> None:
        if self._file is None:
            folder = folder_of_files()
            if folder is None:
                self._gone_wrong = True
                return
            self._file = _new_file(folder)
            lines = _run_heading() + lines
        size = len(lines.encode())
        if self._written + size <= BYTES:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(lines)
            self._written += size
        else:
            self._begin_anew(self._file)

    def _begin_anew(self, file: Path) -> None:
        """Rewrite the file with the newest events only, up to half of the size limit."""
        lines: list[str] = []
        size = 0
        for event in reversed(self.events):
            line = event.line()
            size += len(line.encode())
            if size > BYTES // 2:
                break
            lines.append(line)
        text = _run_heading() + "".join(reversed(lines))
        handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=".")
        with open(handle, "w", encoding="utf-8") as new:
            new.write(text)
        os.replace(temporary, file)
        self._written = len(text.encode())


def _line_of_repetitions(event: Event) -> str:
    """Return the line of an event with its final count, if the event was repeated."""
    return event.line() if event.times > 1 else ""


def _plain(value: Any) -> str | int | float:
    if isinstance(value, bool | int | float):
        return value
    return scrub(str(value))


def folder_of_files() -> Path | None:
    """Return the folder of the files: TSFUNC_RAGE, or the user's log folder; None for "off"."""
    said = os.environ.get(VARIABLE, "")
    if said.lower() in ("off", "0", "no", "false"):
        return None
    if said:
        return Path(said)
    # Imported here, so that `import tsfunc` does not import it.
    import platformdirs

    return platformdirs.user_log_path("tsfunc", appauthor=False) / "rage"


def _new_file(folder: Path) -> Path:
    """Make an empty file for this run that only the user may read; remove the oldest files."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    older = sorted(folder.glob(f"*{SUFFIX}"))
    for file in older[: max(0, len(older) - RUNS + 1)]:
        file.unlink(missing_ok=True)
    started = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    file = folder / f"{started}-{os.getpid()}{SUFFIX}"
    file.touch(mode=0o600)
    return file


def describe_run() -> dict[str, str | int]:
    """Return the versions, the platform and the command of this run."""
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


def _run_heading() -> str:
    return json.dumps(describe_run()) + "\n"


_recorder = EventRecorder()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_recorder._renew)


def record(kind: str, **facts: Any) -> None:
    """Record an event, in memory and in the run's file; never raises.

    Args:
        kind: the kind of event, in a word or two.
        facts: details by name. Numbers are kept; other values become text, without folders and
            tensor values, and cut if the text is long.

    Example:
        >>> from tsfunc import rage
        >>> rage.record("example", file="/home/me/train.py", size=3)
        >>> rage.events()[-1].facts
        {'file': 'train.py', 'size': 3}
    """
    _recorder.record(kind, facts)


def events() -> tuple[Event, ...]:
    """Return the events of this run that are still in memory, the newest last."""
    with _recorder._lock:
        return tuple(_recorder.events)
