"""The facts in which a call differs from those that have a program: the reason of a retrace."""

from __future__ import annotations

from typing import Any, NamedTuple

ABSENT: Any = object()
"""The value of a fact that a call does not have."""


class UnquotedText(str):
    """A text that is shown without quotes: a named dim, the name of a class."""


class OfBranch(str):
    """The text of a number with which the function took another branch."""


class Difference(NamedTuple):
    """A fact that another call violates: its name, its value in that call, the guarded value."""

    name: str
    now: Any
    before: Any
