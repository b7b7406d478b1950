"""The guards on the members of classes and modules that a trace has read."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tsfunc.program.closure.guard_codegen import Guard, GuardCode


@dataclass(frozen=True, eq=False)
class MemberIs(Guard):
    """A member of a library's module or class, or a method of a user's: identity or equality."""

    owner: Any
    name: str
    value: Any

    @classmethod
    def lines_of_many(cls, guards: Sequence[MemberIs], code: GuardCode) -> Iterator[str]:
        """Check the members of each owner at once."""
        owners: dict[int, tuple[Any, dict[str, Any]]] = {}
        for guard in guards:
            owners.setdefault(id(guard.owner), (guard.owner, {}))[1][guard.name] = guard.value
        for owner, members in owners.values():
            read = operator.itemgetter(*members)
            get, of, before = map(code.name, (read, vars(owner), read(members)))
            # Tuples compare their items by identity first, and NaN does not equal itself.
            # A function of ``math`` equals its replacement: NOTE [functions of math].
            of_math = owner is math and any(map(callable, members.values()))
            differs = "is not" if len(members) == 1 and not of_math else "!="
            yield f"if {get}({of}) {differs} {before}: return None"


@dataclass(frozen=True, eq=False)
class NoMember(Guard):
    """A name that a class itself does not have."""

    owner: Any
    name: str

    @classmethod
    def lines_of_many(cls, guards: Sequence[NoMember], code: GuardCode) -> Iterator[str]:
        """Check the names of each owner at once."""
        owners: dict[int, tuple[Any, set[str]]] = {}
        for guard in guards:
            owners.setdefault(id(guard.owner), (guard.owner, set()))[1].add(guard.name)
        for owner, names in owners.values():
            held, absent = code.name(vars(owner)), code.name(frozenset(names))
            yield f"if not {held}.keys().isdisjoint({absent}): return None"
