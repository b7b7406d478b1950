"""Numbers that a function reads from containers and objects, and that vary between calls.

NOTE [numbers that vary]
A number that a trace reads from outside is guarded by its value. If a later call fails because of
it, as when a scheduler changes ``optimizer.param_groups[0]["lr"]``, the next trace makes it an
input: the function computes with a symbolic number, in its place for the time of the trace, and the
program reads the current value at every call. Questions about the number (``if lr > 0``) become
guards. If the function can't be traced with the symbol (it is a key of a dict, say), the number
stays guarded by its value, and each value has its own program.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from tsfunc.program.closure.read_guards import ReadGuards, ReadNumber, Source
from tsfunc.types.values import same_value

Read = int | float | type
Earlier = Mapping[str, Collection[Read]]


class Varying(NamedTuple):
    """A number that is an input of a program.

    Attributes:
        name: its name in the program.
        source: its place.
        variable: its variable in the generated guard.
        value: its value in the traced call.
        position: its index among the values that the program is called with after the arguments.
    """

    name: str
    source: Source
    variable: str
    value: int | float
    position: int


class Numbers:
    """The numbers of one trace.

    Args:
        earlier: the values of such numbers in earlier traces, by the user's spelling; the type of
            those that were inputs. A number that differs from one of its type is an input.

    Attributes:
        read: the value of each number that was read, by the user's spelling; the type of an input.
        inputs: the numbers that are inputs, by the user's spelling.
        symbol: returns the symbolic number for an input; None before the trace has begun.
    """

    def __init__(self, earlier: Earlier = MappingProxyType({})) -> None:
        self._earlier = earlier
        self.read: dict[str, Read] = {}
        self.inputs: dict[str, Varying] = {}
        self.symbol: Callable[[Varying], Any] | None = None
        self._symbols: dict[str, Any] = {}
        self._waiting: list[tuple[Any, Any, Callable[[], Any]]] = []
        self._replaced: list[tuple[Any, Any, Any, Any]] = []

    def is_input(self, value: Any, text: str) -> bool:
        """Note that a value is read at a place; return True if it is an input of the program."""
        if type(value) not in (int, float):
            return False
        earlier = self._earlier.get(text, ())
        varies = any(
            each is type(value) or (type(each) is type(value) and not same_value(each, value))
            for each in earlier
        )
        self.read[text] = type(value) if varies and _is_tame(value) else value
        return self.read[text] is not value

    def are_inputs(self, values: tuple[Any, ...], text: str) -> bool:
        """Return True if one of the elements of a tuple is an input of the program."""
        found = [self.is_input(each, f"{text}[{i}]") for i, each in enumerate(values)]
        return any(found)

    def add(self, value: Any, source: Source, guards: ReadGuards) -> None:
        """Make a number an input: guard its type only."""
        if source.text not in self.inputs:
            variable = f"number_{len(self.inputs)}"
            guards.add(ReadNumber(source, variable, type(value), _is_tame))
            name = re.sub(r"\W+", "_", source.text).strip("_")
            position = guards.result(source, value)
            self.inputs[source.text] = Varying(name, source, variable, value, position)

    def of(self, text: str) -> Any:
        """Return the symbolic number of an input; its value before the trace has begun."""
        varying = self.inputs[text]
        if self.symbol is None:
            return varying.value
        if text not in self._symbols:
            self._symbols[text] = self.symbol(varying)
        return self._symbols[text]

    def put_into(self, container: Any, key: Any, made: Callable[[], Any]) -> None:
        """Replace an element of a container from the start of the trace, by one with symbols."""
        if self.symbol is None:
            self._waiting.append((container, key, made))
            return
        before, container[key] = container[key], made()
        self._replaced.append((container, key, container[key], before))

    def start(self, symbol: Callable[[Varying], Any]) -> None:
        """Begin the trace."""
        self.symbol = symbol
        for each in self._waiting:
            self.put_into(*each)

    def put_back(self) -> None:
        """Restore the numbers in their containers, where the function has left the symbols."""
        for container, key, symbol, before in self._replaced:
            if _items(container).get(key) is symbol:
                container[key] = before
        self._replaced.clear()

    def is_same(self, now: Any, before: Any) -> bool:
        """Return True if an element is the one before, or the symbol in its place."""
        return now is before or any(now is x and before is y for _, _, x, y in self._replaced)


def _items(container: Any) -> Mapping[Any, Any]:
    return container if isinstance(container, Mapping) else dict(enumerate(container))


def _is_tame(value: int | float) -> bool:
    """Return True if a symbol can have the value."""
    return math.isfinite(value) if isinstance(value, float) else abs(value) < 1 << 62
