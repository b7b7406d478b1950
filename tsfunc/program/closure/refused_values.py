"""The values besides the arguments for which the guards of a program refuse a call."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from tsfunc.bridge.sizes.symbols import Condition
from tsfunc.program.closure.closure_guards import (
    AnyClosureNumber,
    ClosureGuards,
    ConditionHolds,
    SourceGuard,
)
from tsfunc.program.guard import Guard, OfBranch
from tsfunc.types.values import same_value

_SHOWN = 8  # the number of refusing guards that are named


def refused_values(
    reads: ClosureGuards, now: tuple[Any, ...], flat: Sequence[Any]
) -> dict[str, tuple[Any, Any]] | None:
    """Return the values that a call reads and the guards refuse.

    Args:
        now: torch's settings.

    Returns:
        The name of each with its value in the call and the guarded one, in the order of the
        reads; None if all guards hold, or if those that fail have no names.
    """
    found: dict[str, tuple[Any, Any]] = {}
    paths: list[tuple[Any, ...]] = []
    for guard in itertools.islice(_refusing_guards(reads, now, flat), _SHOWN):
        if isinstance(guard, ConditionHolds):
            found |= _numbers_of(reads, guard.condition, now, flat)
        if isinstance(guard, SourceGuard) and not guard.source.text:
            continue
        sources = guard.value_sources()
        values = ClosureGuards([], [(source, None) for source in sources]).function(now)(flat)
        if values is None or any(
            source.path[: len(path)] == path for source in sources for path in paths
        ):
            continue  # it is in a container that is refused
        named = {
            difference.name: (difference.now, difference.before)
            for difference in guard.differences(*values)
        }
        if named:
            paths.extend(source.path for source in sources)
            found |= named
    return found or None


def _numbers_of(
    reads: ClosureGuards, condition: Condition, now: tuple[Any, ...], flat: Sequence[Any]
) -> dict[str, tuple[Any, Any]]:
    """Return the numbers of a condition, with their values in a call and in the trace."""
    found = {}
    for number in reads.guards:
        if isinstance(number, AnyClosureNumber) and number.is_in(condition.code):
            value = ClosureGuards([], [(number.source, None)]).function(now)(flat)
            if value is not None and not same_value(number.value, value[0]):
                before = (
                    number.value if condition.number is not None else OfBranch(repr(number.value))
                )
                found[number.source.text] = value[0], before
    return found


def _refusing_guards(
    reads: ClosureGuards, now: tuple[Any, ...], flat: Sequence[Any]
) -> Iterator[Guard]:
    """Yield the guards that refuse a call; of many guards they are found by halves."""

    def hold(guards: Sequence[Guard]) -> bool:
        return ClosureGuards([*guards]).function(now)(flat) is not None

    def search(guards: Sequence[Guard]) -> Iterator[Guard]:
        if hold([*numbers, *guards]):
            return
        if len(guards) == 1:
            yield guards[0]
            return
        half = len(guards) // 2
        yield from search(guards[:half])
        yield from search(guards[half:])

    numbers = [guard for guard in reads.guards if isinstance(guard, AnyClosureNumber)]
    refusing = [guard for guard in numbers if not hold([guard])]
    if refusing:  # the conditions on these numbers can't be evaluated
        yield from refusing
    else:
        yield from search([x for x in reads.guards if not isinstance(x, AnyClosureNumber)])
