"""The programs that a specialized function keeps, and which calls each of them answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree

from tsfunc.bridge.tracer import Tracer
from tsfunc.program.forms import CallForm
from tsfunc.program.program import Program
from tsfunc.program.reach import Reach


class CacheInfo(NamedTuple):
    """What a specialized function keeps: its programs, and why each was made."""

    hits: int
    misses: int
    programs: int
    limit: int
    reasons: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Entry:
    """A program and the calls that it may answer.

    Attributes:
        program: what runs.
        tree: the structure of the arguments.
        accepts: whether it may answer a call: None, or what to run it on after the flattened
            arguments.
        reach: the same without a look at the arguments that are no objects.
        reason: the call that it was made for.
        signature: what that has in common with calls of other sizes.
        form: what is taken for granted of the arguments.
    """

    program: Program
    tree: optree.PyTreeSpec
    accepts: Reach
    reach: Reach
    reason: str
    signature: Any
    form: CallForm


class Cache:
    """Entries, the most recently used first.

    Args:
        limit: how many are kept.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.entries: list[Entry] = []
        self.hits = self.misses = 0

    def find(self, flat: list[Any], tree: optree.PyTreeSpec) -> tuple[Program, list[Any]] | None:
        """The program for a call, and what it is to run on."""
        for i, entry in enumerate(self.entries):
            if entry.tree == tree:
                reached = entry.accepts(flat)
                if reached is None:
                    continue
                self.hits += 1
                if i:
                    self.entries.insert(0, self.entries.pop(i))
                return entry.program, [*flat, *reached] if reached else flat
        return None

    def known(self, signature: Any, flat: Sequence[Any]) -> tuple[Entry, Sequence[Any]] | None:
        """The symbolic program for a call, if another size of it was seen before."""
        for entry in self.entries:
            if entry.signature == signature:
                reached = entry.reach(flat)
                if reached is not None:
                    return entry, reached
        return None

    def keep(self, entry: Entry) -> None:
        """Puts a program first among the entries."""
        if any(isinstance(value, Tracer) for value in entry.program.lifted.values()):
            return  # it belongs to an outer transform that is active now, and ends with it
        self.entries.insert(0, entry)
        del self.entries[self.limit :]

    @property
    def programs(self) -> tuple[Program, ...]:
        """All programs, the most recently used first."""
        return tuple(dict.fromkeys(entry.program for entry in self.entries))

    def info(self) -> CacheInfo:
        """How many calls found a program, and why each program was made."""
        reasons = tuple(entry.reason for entry in self.entries)
        return CacheInfo(self.hits, self.misses, len(self.programs), self.limit, reasons)

    def clear(self) -> None:
        """Forgets all programs."""
        self.entries.clear()
        self.hits = self.misses = 0
