"""The reason for a new program: the differences of a call from the calls that have a program."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch

from tsfunc.program.guard import ABSENT, OfBranch, UnquotedText
from tsfunc.program.guarding.call_spec import ANY, FORM_PREFIXES, STRUCTURE_PREFIX
from tsfunc.program.guarding.guards import Facts
from tsfunc.types.values import describe, plain_name, same_value

FIRST_CALL = "the first call"
UNSEEN = "something has changed that the function reads besides its arguments"
_SHOWN = 4  # maximum number of differences in a reason


def reason_for(facts: Facts, known_calls: Iterable[Facts]) -> str:
    """Return the differences of a call from the nearest of the calls that have a program.

    Args:
        known_calls: the facts of each program's call, the last used first.
    """
    nearest: list[str] | None = None
    for others in known_calls:
        names = primary_differences(facts, others)
        if nearest is None or len(names) < len(nearest):
            nearest = [
                difference_text(name, facts.get(name, ABSENT), others.get(name, ABSENT))
                for name in names
            ]
    if nearest is None:
        return FIRST_CALL
    if not nearest:
        return UNSEEN
    shown = nearest[:_SHOWN]
    if len(nearest) > _SHOWN:
        shown.append(f"and {len(nearest) - _SHOWN} more")
    return "; ".join(shown)


def primary_differences(facts: Facts, others: Facts) -> list[str]:
    """Return the names of the facts in which two calls differ, without those that follow.

    Other values of a container follow from its structure, and sizes from the number of dims.
    """
    names = differing_facts(facts, others)
    names = [name for name in names if not name.startswith(FORM_PREFIXES)] or names
    for name in names:
        if name.startswith(STRUCTURE_PREFIX):
            inside = re.compile(rf"(type\()?{re.escape(name.removeprefix(STRUCTURE_PREFIX))}[\[.)]")
            names = [other for other in names if other == name or not inside.match(other)]
        elif name.endswith(".dim()"):
            at = name.removesuffix("dim()")
            names = [x for x in names if not x.startswith((f"{at}shape[", f"{at}stride("))]
    return names


def differing_facts(facts: Facts, others: Facts) -> list[str]:
    """Return the names of the facts in which two calls differ."""
    names = []
    for name in dict.fromkeys((*facts, *others)):
        now, before = facts.get(name, ABSENT), others.get(name, ABSENT)
        if now is not before and before is not ANY and not same_value(now, before):
            names.append(name)
    return names


def difference_text(name: str, now: Any, before: Any) -> str:
    """Return a text that shows two values of a fact."""
    return f"{name}: {fact_text(now)}, was {fact_text(before)}"


def fact_text(value: Any) -> str:
    if value is ABSENT:
        return "absent"
    if isinstance(value, torch.dtype | torch.device | torch.layout):
        return plain_name(value)
    if isinstance(value, type):
        return value.__qualname__
    plain = type(value) in (int, bool, float, tuple, UnquotedText, OfBranch)
    return str(value) if plain else describe(value)
