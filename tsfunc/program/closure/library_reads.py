"""Reads of libraries in the user's code, which become guards or warnings."""

from __future__ import annotations

import builtins
import os
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from tsfunc.errors import ReadOnceWarning
from tsfunc.program.closure import libraries
from tsfunc.program.closure.guard_builder import Source
from tsfunc.program.closure.instances import Instances
from tsfunc.program.closure.side_effects import MISSING
from tsfunc.program.closure.variables import CODE

_PLAIN = (int, float, bool, str)
_HAVE_MEMBERS = (types.ModuleType, type)


class LibraryReads:
    """Adds the reads of libraries in a function's code to the guards of a trace.

    Args:
        instances: the watched objects of the trace.
        name: returns the name of an object in the generated code.
        met: called with each class that is read.
    """

    def __init__(
        self, instances: Instances, name: Callable[[Any], str], met: Callable[[type], None]
    ) -> None:
        self.instances = instances
        self.builder = instances.builder
        self.guard_lines = instances.builder.lines_of(own=True)
        self._name, self._met = name, met
        self._holds_environment = False

    def look(
        self, owner: Any, name: str | None, value: Any, attributes: Sequence[str], line: str,
        bare: bool,
    ) -> None:  # fmt: skip
        """Look at a variable and the attributes that the code reads from it.

        Args:
            owner: the object that has the variable.
            name: the name of the variable.
            value: its value.
            attributes: the chain of attributes that the code reads from it.
            line: the line of the read.
            bare: whether the last attribute is called without arguments.
        """
        if value is MISSING and isinstance(owner, dict):
            value = vars(builtins).get(str(name), MISSING)
        way = tuple(attributes)
        above = last = value
        self._look_at_environment(None, None, value)
        for attribute in way:
            above, last = last, libraries.reached(last, (attribute,))
            self._look_at_environment(above, attribute, last)
        if libraries.is_setting(value, way):
            at = self.guard_lines.bind(".".join((self.guard_lines.name(value), *way)))
            self.builder.guard(last, Source(at, ".".join(way), "", True))
            return
        for question in libraries.settings_of(last):
            self._ask(question)
        if way and libraries.changes_of_object(value, way[0]):
            self._warn(f"{type(value).__name__}.{way[0]}", line)
        if libraries.is_library(above):
            self.hold_member(value, way)
            self.instances.generators.mentioned(last, line)
            if libraries.is_question(last):
                self._ask(last)
            if libraries.changes_by_itself(above, way[-1] if way else None, last, bare):
                self._warn(getattr(last, "__qualname__", str(last)), line)

    def hold_member(self, owner: Any, way: Sequence[str]) -> None:
        """Guard an attribute that is read from a library, since it may be replaced."""
        above = libraries.reached(owner, way[:-1])
        if not way or not libraries.is_library(above) or not isinstance(above, _HAVE_MEMBERS):
            return
        found = vars(above).get(way[-1], MISSING)
        if isinstance(found, (*CODE, *_PLAIN, types.NoneType)):
            self.guard_lines.require_member(above, way[-1], found)
            if isinstance(found, type):
                self._met(found)
        elif isinstance(found, list) or (found is MISSING and isinstance(above, types.ModuleType)):
            # A list may be filled; a module's __getattr__ may make a flag at each read.
            value = libraries.reached(above, way[-1:])
            if isinstance(value, (list, *_PLAIN)):
                text = f"{above.__name__}.{way[-1]}"
                at = self.guard_lines.bind(f"{self._name(above)}.{way[-1]}")
                self.builder.guard(value, Source(at, text, text, True))

    def hold_environment(self) -> None:
        """Guard all environment variables of the process: the ones that are read are not known."""
        if not self._holds_environment:
            self._holds_environment = True
            at = self.guard_lines.name(os.environ)
            self.guard_lines.require(f"{at} == {self.guard_lines.name(dict(os.environ))}")

    def _look_at_environment(self, owner: Any, name: str | None, value: Any) -> None:
        if libraries.asks_environment(owner, name, value):
            self.hold_environment()

    def _ask(self, question: Callable[[], Any]) -> None:
        """Guard the answer of a function without arguments."""
        at = self.guard_lines.bind(f"{self._name(question)}()")
        self.builder.guard(question(), Source(at, f"{question.__name__}()", "", True))

    def _warn(self, function: str, line: str) -> None:
        """Warn of a function that may give another result at another call."""
        if self.builder.closure != "freeze":
            place, _, _ = line.rpartition(", in ")
            filename, _, number = place.rpartition(":")
            warnings.warn_explicit(
                f"specialize({self.instances.name}): {function} may give something else at another "
                f"call, and a program keeps what the first call got. If results depend on it, read "
                f"it before the call and pass it.",
                ReadOnceWarning, filename, int(number),
            )  # fmt: skip
