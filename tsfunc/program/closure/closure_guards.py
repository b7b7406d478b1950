"""The guards on closed-over values, as frozen data.

The closed-over values of a function are those that it reads besides its arguments: cells, globals,
defaults, and the attributes and elements on paths from these or from objects among the arguments.
A guard is one object with all forms of its fact: the Python that checks it (``lines``) and its
text for people (``texts``). Each is over a :class:`Source`, the path on which the function found
the value. A new kind of guard is a class in this file. The guards on arguments are in
``guarding/guards.py``.

:class:`ClosureGuards` collects the guards of a trace, and the values on these paths that the
program is called with.

NOTE [guards by depth]
The guards of a model are on thousands of values: each submodule has dicts of parameters, buffers,
submodules and hooks, most of them empty. Checked one after the other in Python, they took longer
than a small model itself. The values whose paths have the same number of steps are therefore
checked together: the types of all of them in one call into C, then the keys of all dicts and the
missing names, then the other facts in the order of the reads. A step is taken only from a value
whose own guards, and those of all shorter paths, hold.
"""

from __future__ import annotations

import copy
import itertools
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from tsfunc._text import count_text
from tsfunc.bridge.sizes.symbols import Condition
from tsfunc.program.closure.guard_codegen import (
    Enter,
    GuardFunction,
    SettingsAre,
    compile_guard,
    differs,
    keys_condition,
    lines_of_tensors,
    tensor_lines,
)
from tsfunc.program.guard import (
    ABSENT,
    Difference,
    Guard,
    GuardCode,
    Names,
    Part,
    Source,
    UnquotedText,
)
from tsfunc.types.values import describe, same_value

# --- guards on values that were read


@dataclass(frozen=True, eq=False)
class SourceGuard(Guard):
    """A guard on the value at the end of a path."""

    part = Part.VALUES
    source: Source

    def value_sources(self) -> tuple[Source, ...]:
        return (self.source,)

    def lines(self, code: GuardCode) -> Iterable[str]:
        return (f"if {self.failure_condition(code.variable(self.source), code)}: return None",)

    def failure_condition(self, at: str, code: GuardCode) -> str:
        """Return the condition under which the guard fails, for the variable of the value."""
        raise NotImplementedError

    def texts(self, name: Names) -> Iterable[str]:
        shown = self.fact_text()
        return (f"{self.source.text} {shown}",) if self.source.text and shown else ()

    def fact_text(self) -> str:
        """Return the fact without the name of the value; empty if it is not worth a line."""
        return ""


@dataclass(frozen=True, eq=False)
class ValueGuard(SourceGuard):
    """A guard on a value itself."""

    value: Any

    def differences(self, *values: Any) -> Iterable[Difference]:
        yield Difference(self.source.text, values[0], self.value)

    def fact_text(self) -> str:
        return f"is {describe(self.value)}"


class SameObject(ValueGuard):
    """The identity of a value."""

    def failure_condition(self, at: str, code: GuardCode) -> str:
        return f"{at} is not {code.name(self.value)}"


class EqualValue(ValueGuard):
    """A value of a type that compares by value: equal, and of the same type."""

    def failure_condition(self, at: str, code: GuardCode) -> str:
        return differs(at, self.value, code)


class SameContents(ValueGuard):
    """The elements of a container of plain values, compared as a whole.

    Attributes:
        value: the container, or a copy of it if it can change.
    """

    def failure_condition(self, at: str, code: GuardCode) -> str:
        return f"not {code.name(same_value)}({at}, {code.name(self.value)})"


@dataclass(frozen=True, eq=False)
class TypeOf(SourceGuard):
    """The class of a value whose contents are guarded where they are read."""

    order = -3
    cls: type

    def differences(self, *values: Any) -> Iterable[Difference]:
        yield Difference(f"type({self.source.text})", type(values[0]), self.cls)

    def failure_condition(self, at: str, code: GuardCode) -> str:
        return f"type({at}) is not {code.name(self.cls)}"

    def texts(self, name: Names) -> Iterable[str]:
        text = self.source.text
        contents = text and not issubclass(self.cls, list | tuple | dict)  # these show their own
        return (f"type({text}) is {self.cls.__qualname__}",) if contents else ()

    @classmethod
    def lines_of_many(cls, guards: Sequence[TypeOf], code: GuardCode) -> Iterator[str]:
        """Compare all types in one call into C."""
        found = ", ".join(code.variable(guard.source) for guard in guards)
        is_, expected = map(code.name, (operator.is_, [guard.cls for guard in guards]))
        yield f"if not all(map({is_}, map(type, ({found},)), {expected})): return None"


@dataclass(frozen=True, eq=False)
class KeysAre(SourceGuard):
    """The keys of a dict and their order; 1 and 1.0 are equal but different keys.

    Attributes:
        plain: True if the value is one of Python's own dicts, which are false if they are empty.
    """

    order = -2
    keys: Sequence[Any]
    plain: bool = False

    def differences(self, *values: Any) -> Iterable[Difference]:
        now, before = (
            tuple(key if type(key) in (str, int) else describe(key) for key in keys)
            for keys in (values[0], self.keys)
        )
        yield Difference(f"the keys of {self.source.text}", now, before)

    def failure_condition(self, at: str, code: GuardCode) -> str:
        return keys_condition([at], [self.keys], code.name)

    def fact_text(self) -> str:
        return f"has the keys {', '.join(map(describe, self.keys))}" if self.keys else "is empty"

    @classmethod
    def lines_of_many(cls, guards: Sequence[KeysAre], code: GuardCode) -> Iterator[str]:
        """Compare the keys of all dicts in three calls into C."""
        empty = [code.variable(guard.source) for guard in guards if guard.plain and not guard.keys]
        if empty:
            yield f"if any(({', '.join(empty)},)): return None"
        rest = [guard for guard in guards if guard.keys or not guard.plain]
        if rest:
            found = [code.variable(guard.source) for guard in rest]
            differ = keys_condition(found, [guard.keys for guard in rest], code.name)
            yield f"if {differ}: return None"


_NOT_COMPARED: Any = object()


@dataclass(frozen=True, eq=False)
class LengthIs(SourceGuard):
    """The number of elements of a sequence; of a deque also its maximum."""

    length: int
    most: Any = _NOT_COMPARED

    def differences(self, *values: Any) -> Iterable[Difference]:
        text, now = self.source.text, len(values[0])
        if now != self.length:
            yield Difference(f"len({text})", now, self.length)
        else:
            yield Difference(f"{text}.maxlen", values[0].maxlen, self.most)

    def failure_condition(self, at: str, code: GuardCode) -> str:
        most = "" if self.most is _NOT_COMPARED else f" or {at}.maxlen != {self.most}"
        return f"len({at}) != {self.length}{most}"

    def fact_text(self) -> str:
        return f"has {count_text(self.length, 'element')}"


@dataclass(frozen=True, eq=False)
class SameObjectAs(SourceGuard):
    """Two paths that lead to one object."""

    other: Source

    def value_sources(self) -> tuple[Source, ...]:
        return self.source, self.other

    def failure_condition(self, at: str, code: GuardCode) -> str:
        return f"{at} is not {code.variable(self.other)}"

    def differences(self, *values: Any) -> Iterable[Difference]:
        if self.other.text:
            yield Difference(f"{self.source.text} is {self.other.text}", False, True)

    def fact_text(self) -> str:
        return f"is {self.other.text}" if self.other.text != self.source.text else ""


@dataclass(frozen=True, eq=False)
class NotOneOf(SourceGuard):
    """A value that is none of some objects, which the guard keeps alive."""

    others: Sequence[Any]

    def differences(self, *values: Any) -> Iterable[Difference]:
        yield Difference(self.source.text, values[0], UnquotedText("another object"))

    def failure_condition(self, at: str, code: GuardCode) -> str:
        return f"id({at}) in {code.name(frozenset(map(id, self.others)))}"


# The condition that a dict has a key.
IN_DICT = "{1!r} in {0}"


@dataclass(frozen=True, eq=False)
class Missing(SourceGuard):
    """An attribute, a key or a variable that is missing.

    Attributes:
        name: the name that is missing.
        how: the condition that it is there, with ``{0}`` for the value and ``{1}`` for the name.
    """

    order = -1
    name: str
    how: str = "hasattr({0}, {1!r})"

    def differences(self, *values: Any) -> Iterable[Difference]:
        name = f"{self.name!r} of {self.source.text}"
        yield Difference(name, UnquotedText("present"), ABSENT)

    def failure_condition(self, at: str, code: GuardCode) -> str:
        return self.how.format(at, self.name)

    @classmethod
    def lines_of_many(cls, guards: Sequence[Missing], code: GuardCode) -> Iterator[str]:
        """Look for all missing keys in one call into C."""
        keys = [guard for guard in guards if guard.how == IN_DICT]
        if keys:
            found = ", ".join(code.variable(guard.source) for guard in keys)
            contains, names = map(code.name, (operator.contains, [guard.name for guard in keys]))
            yield f"if any(map({contains}, ({found},), {names})): return None"
        for guard in guards:
            if guard.how != IN_DICT:
                yield from guard.lines(code)


@dataclass(frozen=True, eq=False)
class TensorConstant(SourceGuard):
    """The type and sizes of a tensor of the function; an assignment of ``.data`` changes these."""

    part = Part.TENSORS
    tensor: torch.Tensor

    def differences(self, *values: Any) -> Iterable[Difference]:
        yield Difference(self.source.text, values[0], self.tensor)

    @classmethod
    def lines_of_many(cls, guards: Sequence[TensorConstant], code: GuardCode) -> Iterator[str]:
        variables = [code.variable(guard.source) for guard in guards]
        one_by_one = [
            line
            for at, guard in zip(variables, guards, strict=True)
            for line in (
                f"if type({at}) is not {code.name(type(guard.tensor))}: return None",
                *tensor_lines(at, guard.tensor, code),
            )
        ]
        tensors = [guard.tensor for guard in guards]
        return lines_of_tensors(f"({', '.join(variables)},)", tensors, one_by_one, code)


@dataclass(frozen=True, eq=False)
class TensorInput(SourceGuard):
    """The type and sizes of a tensor that is an input of the program."""

    sample: torch.Tensor

    def differences(self, *values: Any) -> Iterable[Difference]:
        yield Difference(self.source.text, values[0], self.sample)

    def lines(self, code: GuardCode) -> Iterable[str]:
        return tensor_lines(code.variable(self.source), self.sample, code)

    def fact_text(self) -> str:
        return f"is {describe(self.sample)}"


@dataclass(frozen=True, eq=False)
class AnyClosureNumber(SourceGuard):
    """A number that is an input of the program: its type, and that a symbol can have the value.

    Attributes:
        value: its value in the traced call.
        admits: returns True for the values that a symbol can have.
    """

    variable: str
    kind: type
    value: int | float
    admits: Callable[[Any], bool]

    def is_in(self, condition: str) -> bool:
        """True if the code of a condition has the variable of the number."""
        return re.search(rf"\b{self.variable}\b", condition) is not None

    def differences(self, *values: Any) -> Iterable[Difference]:
        if type(values[0]) is self.kind:
            yield Difference(self.source.text, values[0], self.value)
        else:
            yield Difference(f"type({self.source.text})", type(values[0]), self.kind)

    def lines(self, code: GuardCode) -> Iterable[str]:
        at, kind = code.variable(self.source), code.name(self.kind)
        return (
            f"if type({at}) is not {kind} or not {code.name(self.admits)}({at}): return None",
            f"{self.variable} = {at}",
        )

    def fact_text(self) -> str:
        return f"is any {self.kind.__name__}"


@dataclass(frozen=True, eq=False)
class ConditionHolds(Guard):
    """A condition on numbers that are inputs and on named dims, which the function has tested."""

    part = Part.VALUES
    condition: Condition

    def lines(self, code: GuardCode) -> Iterable[str]:
        """Compute the condition; it does not hold for numbers with which it can't be computed."""
        return (
            "try:",
            f"    if not ({self.condition.code}): return None",
            "except (ArithmeticError, ValueError): return None",
        )

    def texts(self, name: Names) -> Iterable[str]:
        return (self.condition.text,)


@dataclass(frozen=True, eq=False)
class ResultIs(Guard):
    """The result of a function of values that were read: a setting, a property of a tensor.

    Attributes:
        name: the result in the user's words; a statement if the result is True.
    """

    part = Part.VALUES
    function: Callable[..., Any]
    sources: tuple[Source, ...]
    expected: Any
    name: str

    def value_sources(self) -> tuple[Source, ...]:
        return self.sources

    def lines(self, code: GuardCode) -> Iterable[str]:
        values = ", ".join(map(code.variable, self.sources))
        call = f"{code.name(self.function)}({values})"
        return (f"if {call} != {code.name(self.expected)}: return None",)

    def texts(self, name: Names) -> Iterable[str]:
        if self.expected is True:
            return (self.name,)
        shown = self.expected if isinstance(self.expected, bool | int | float) else "unchanged"
        return (f"{self.name} is {shown}",)

    def differences(self, *values: Any) -> Iterable[Difference]:
        now, before = self.function(*values), self.expected
        if not isinstance(before, dict):
            yield Difference(self.name, now, before)
            return
        for key in dict.fromkeys((*now, *before)):
            one, other = now.get(key, ABSENT), before.get(key, ABSENT)
            if one is ABSENT or other is ABSENT or one != other:
                yield Difference(f"{self.name}[{key!r}]", one, other)


@dataclass(frozen=True, eq=False)
class Distinct(Guard):
    """Objects of which no two are the same."""

    part = Part.VALUES
    sources: tuple[Source, ...]

    def value_sources(self) -> tuple[Source, ...]:
        return self.sources

    def lines(self, code: GuardCode) -> Iterable[str]:
        ids = ", ".join(f"id({code.variable(source)})" for source in self.sources)
        return (f"if len({{{ids}}}) != {len(self.sources)}: return None",)

    def texts(self, name: Names) -> Iterable[str]:
        named = [source.text for source in self.sources if source.text]
        return (f"{', '.join(named)} are different objects",) if len(named) > 1 else ()

    def differences(self, *values: Any) -> Iterable[Difference]:
        named = [
            (source.text, value)
            for source, value in zip(self.sources, values, strict=True)
            if source.text
        ]
        for (left, one), (right, other) in itertools.combinations(named, 2):
            if one is other:
                yield Difference(f"{left} is {right}", True, False)


@dataclass(frozen=True, eq=False)
class MemberIs(Guard):
    """A member of a library's module or class, or a method of a user's: identity or equality."""

    part = Part.MEMBERS
    owner: Any
    name: str
    value: Any

    def differences(self, *values: Any) -> Iterable[Difference]:
        now = vars(self.owner).get(self.name, ABSENT)
        yield Difference(f"{self.owner.__name__}.{self.name}", now, self.value)

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

    part = Part.MEMBERS
    order = 1
    owner: Any
    name: str

    def differences(self, *values: Any) -> Iterable[Difference]:
        yield Difference(f"{self.owner.__name__}.{self.name}", vars(self.owner)[self.name], ABSENT)

    @classmethod
    def lines_of_many(cls, guards: Sequence[NoMember], code: GuardCode) -> Iterator[str]:
        """Check the names of each owner at once."""
        owners: dict[int, tuple[Any, set[str]]] = {}
        for guard in guards:
            owners.setdefault(id(guard.owner), (guard.owner, set()))[1].add(guard.name)
        for owner, names in owners.values():
            attributes, absent = code.name(vars(owner)), code.name(frozenset(names))
            yield f"if not {attributes}.keys().isdisjoint({absent}): return None"


@dataclass(eq=False)
class ClosureGuards:
    """The guards on the values that a trace has read, in the order of the reads.

    Attributes:
        inputs: the values that the program is called with after the arguments, by their sources.
    """

    guards: list[Guard] = field(default_factory=list)
    inputs: list[tuple[Source, Any]] = field(default_factory=list)

    @property
    def values(self) -> tuple[Any, ...]:
        """The current values of the inputs."""
        return tuple(value for _, value in self.inputs)

    def add(self, *guards: Guard) -> None:
        self.guards.extend(guards)

    def add_input(self, source: Source, value: Any) -> int:
        """Add a value to the inputs; return its index among them."""
        for i, (source_of_input, _) in enumerate(self.inputs):
            if source_of_input.path == source.path:
                return i
        self.inputs.append((source, value))
        return len(self.inputs) - 1

    def guard_contents(self, source: Source, value: Any) -> None:
        """Guard a container of plain values by the equality of the whole."""
        self.add(SameContents(source, copy.copy(value)))

    def guard_input(self, source: Source, tensor: torch.Tensor) -> None:
        """Guard a tensor by its type and sizes, and add it to the inputs."""
        self.add(TensorInput(source, tensor))
        self.inputs.append((source, tensor))

    def guard_identity(self, source: Source, tensor: torch.Tensor) -> None:
        """Guard a tensor by its identity, type and sizes."""
        self.add(SameObject(source, tensor), TensorConstant(source, tensor))

    def make_input(self, source: Source, tensor: torch.Tensor) -> None:
        """Relax a tensor's guard from identity to type and sizes, and add it to the inputs."""
        at = next(
            i for i, guard in enumerate(self.guards)
            if isinstance(guard, SameObject) and guard.value is tensor
            and guard.source.path == source.path
        )  # fmt: skip
        assert isinstance(self.guards[at + 1], TensorConstant)
        self.guards[at : at + 2] = [TensorInput(source, tensor)]
        self.inputs.append((source, tensor))

    def function(
        self,
        now: tuple[Any, ...],
        lines: Sequence[str] = (),
        objects: Mapping[str, Any] = MappingProxyType({}),
        lazy: bool = False,
    ) -> GuardFunction:
        """Return the guard function of the flattened arguments, which returns the inputs.

        Args:
            now: torch's settings.
            lines: lines about the arguments, which come first.
            objects: the objects that these lines use, by name.
            lazy: True if the function is compiled at its first call, which may never happen.
        """
        code, inputs = self._code(now, lines, objects)
        results = "".join(f"{name}, " for name in inputs)
        return compile_guard("args", code.lines, f"({results})", code.scope, lazy)

    def entry_code(
        self, now: tuple[Any, ...], opening: Sequence[str], lines: Sequence[str],
        objects: Mapping[str, Any],
    ) -> Enter:  # fmt: skip
        """Return the guard function for unflattened arguments; it returns all program inputs.

        Args:
            opening: lines that flatten ``args, kwargs`` to ``args``.
        """
        code, inputs = self._code(now, [*opening, *lines], objects)
        results = f"[{', '.join(['*args', *inputs])}]" if inputs else "args"
        return compile_guard("args, kwargs", code.lines, results, code.scope)

    def _code(
        self, now: tuple[Any, ...], lines: Sequence[str], objects: Mapping[str, Any]
    ) -> tuple[GuardCode, list[str]]:
        """Return the code of all guards, and the variables of the inputs."""
        code = GuardCode(objects=objects)
        code.add([SettingsAre(now)])
        code.lines.extend(lines)
        code.add(self.guards)
        return code, [code.variable(source) for source, _ in self.inputs]
