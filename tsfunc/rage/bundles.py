"""Bundles: the record of a run as a readable text, to attach to a bug report."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tsfunc._text import count_text
from tsfunc.rage.event_recorder import SUFFIX, Event, describe_run, events, folder_of_files


@dataclass(frozen=True)
class Run:
    """A run of Python in which tsfunc was used.

    Attributes:
        about: versions, platform, command.
        events: the recorded events, the newest last.
    """

    about: Mapping[str, Any]
    events: Sequence[Event]

    def __str__(self) -> str:
        """Return a summary of the run in one line."""
        if not self.events:
            return f"{self.about.get('command', '?')}: nothing happened"
        first, last = self.events[0], self.events[-1]
        refused = sum(event.kind in _REFUSALS for event in self.events)
        return (
            f"{_moment(first.seconds)} to {_moment(last.seconds)[-8:]} UTC, "
            f"{self.about.get('command', '?')}: "
            f"{count_text(len(self.events), 'event')}, {count_text(refused, 'refusal')}"
        )


_REFUSALS = ("error", "trace failed")


def runs(folder: Path | None = None) -> list[Run]:
    """Return the runs whose files are kept, the newest first.

    Args:
        folder: the folder of the files; by default the folder that this process writes to.
    """
    folder = folder or folder_of_files()
    if folder is None or not folder.is_dir():
        return []
    return [_read_run(file) for file in sorted(folder.glob(f"*{SUFFIX}"), reverse=True)]


def _read_run(file: Path) -> Run:
    """Read the file of a run; malformed lines are skipped."""
    about: dict[str, Any] = {}
    events: list[Event] = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        entry = _entry(line)
        event = _event(entry)
        if event is None:
            about = about or entry
        elif events and event.times > 1 and events[-1].seconds == event.seconds:
            events[-1] = event  # a repeated event, now with the number of times
        else:
            events.append(event)
    return Run(about, events)


def _entry(line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}


def _event(entry: Mapping[str, Any]) -> Event | None:
    match entry:
        case {"seconds": int() | float() as seconds, "kind": str(kind), "facts": dict(facts)}:
            times = entry.get("times", 1)
            return Event(seconds, kind, facts, times if isinstance(times, int) else 1)
        case _:
            return None


def bundle(run: Run | None = None) -> str:
    """Return the record of a run as Markdown.

    Args:
        run: one of ``runs()``; by default the current run.

    Example:
        >>> from tsfunc import rage
        >>> rage.record("example", size=3)
        >>> print(rage.bundle()[:14])
        # tsfunc: rage
    """
    run = run or Run(describe_run(), events())
    about = "\n".join(f"- {name}: {value}" for name, value in run.about.items())
    return "\n\n".join(["# tsfunc: rage", about, *map(_in_words, run.events)]) + "\n"


def _in_words(event: Event) -> str:
    times = f" ({event.times} times)" if event.times > 1 else ""
    short, long = [], []
    for name, value in event.facts.items():
        text = str(value)
        if "\n" in text:
            long.append(f"{name}:\n\n" + "\n".join(f"    {line}" for line in text.splitlines()))
        else:
            short.append(f"- {name}: {text}")
    head = f"## {_moment(event.seconds)} {event.kind}{times}"
    return "\n\n".join([head, *(["\n".join(short)] if short else []), *long])


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
