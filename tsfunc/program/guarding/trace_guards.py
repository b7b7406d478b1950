"""The guards on facts about the arguments that a trace relied on, beside their types and sizes.

A new kind of guard is a ``TraceGuard`` in this file (its code, text and JSON);
``calling/capture.py`` makes the guards at the end of a trace.

NOTE [tensor aliasing]
A trace makes a tracer for each tensor among the arguments, so ``x is y`` is False in the trace, as
it is in most calls. The function's code may have an identity comparison of objects that may be
tensors (``code_reads`` detects it). Equal arguments then share one tracer, and an argument that the
function has from elsewhere (a parameter of its module) is passed as that tensor. Later calls are
then guarded on the same identities. Other functions have one program for both kinds of calls.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tsfunc.bridge.control.node_writes import memory_key
from tsfunc.bridge.sizes.symbols import Condition
from tsfunc.bridge.trace.tensor_guards import PropertyGuard, reader_of
from tsfunc.errors import DescriptorError
from tsfunc.program.closure.closure_guards import ConditionHolds
from tsfunc.program.closure.guard_codegen import compile_guard
from tsfunc.program.fields import Field
from tsfunc.program.guard import Guard, GuardCode, Names, Part, kinds_in_files
from tsfunc.program.guarding.guards import variable_of_size, variables_of
from tsfunc.program.guarding.inputs import InputSpec, NumberSpec
from tsfunc.types import Dim
from tsfunc.types.size_constraints import constraint_code


class DescribedArguments(NamedTuple):
    """The arguments of a call in a file, to which its guards refer.

    Attributes:
        numbers: the numbers that are inputs.
        tensors: the positions of the tensors.
    """

    named_dims: Mapping[str, Dim]
    numbers: Sequence[NumberSpec]
    tensors: Collection[int]


@dataclass(frozen=True, eq=False)
class TraceGuard(Guard):
    """A fact about the arguments that a trace relied on, beside their types and sizes."""

    part = Part.FACTS

    def holds(self, flat: Sequence[Any], sizes: Mapping[str, int]) -> bool:
        """True if the fact holds for some arguments and sizes of named dims."""
        code = GuardCode()
        check = compile_guard(
            ", ".join(["args", *map(variable_of_size, sizes)]),
            [*self.lines(code)],
            "True",
            code.scope,
        )
        return check(flat, *sizes.values()) is True

    def is_storable(self, names: Collection[str]) -> bool:
        """True if a file can hold the fact, given the names of dims and of numbers."""
        return True

    def for_fixed_numbers(self) -> TraceGuard | None:
        """Return the fact for calls with the numbers of the traced call; None if it is implied."""
        return self

    def to_json(self) -> Any:
        raise NotImplementedError

    @classmethod
    def from_json(cls, field: Field, described: DescribedArguments) -> TraceGuard:
        """Return the guard that ``to_json`` wrote."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class ArgumentCondition(ConditionHolds, TraceGuard):
    """A condition on named dims and numbers among the arguments."""

    part = Part.FACTS
    json_key = "condition"

    def is_storable(self, names: Collection[str]) -> bool:
        try:
            constraint_code(self.condition.constraint, {name: name for name in names})
        except DescriptorError:
            return False
        return True

    def for_fixed_numbers(self) -> ArgumentCondition | None:
        condition = self.condition
        if not condition.dims:
            return None
        return ArgumentCondition(condition._replace(constraint=condition.fixed))

    def to_json(self) -> str:
        return self.condition.constraint

    @classmethod
    def from_json(cls, field: Field, described: DescribedArguments) -> ArgumentCondition:
        text, named_dims = field.line(), described.named_dims
        variables = variables_of(named_dims, described.numbers)
        try:
            code = constraint_code(text, variables)
            shown = constraint_code(text, {name: name for name in variables})
        except DescriptorError as error:
            field.fail(str(error))
        return cls(Condition(code, shown, tuple(named_dims), text))


@dataclass(frozen=True, eq=False)
class Property(TraceGuard):
    """A fact about a tensor argument that the function read, other than its type and sizes."""

    order = 1
    json_key = "property"
    guard: PropertyGuard

    def lines(self, code: GuardCode) -> Iterable[str]:
        holds = code.name(self.guard.holds)
        return (f"if not {holds}(args[{self.guard.position}]): return None",)

    def texts(self, name: Names) -> Iterable[str]:
        return (f"{self.guard.fact.format(name(self.guard.position))} is {self.guard.answer}",)

    def to_json(self) -> Any:
        answer = self.guard.answer
        return {
            "argument": self.guard.position,
            "fact": self.guard.fact,
            "answer": list(answer) if isinstance(answer, tuple) else answer,
        }

    @classmethod
    def from_json(cls, field: Field, described: DescribedArguments) -> Property:
        argument, fact, answer = field.record("argument", "fact", "answer")
        text = fact.line()
        if reader_of(text) is None:
            fact.fail("not a property of tensors that a guard can have")
        value = answer.value
        if isinstance(value, list):
            value = tuple(each.integer(0) for each in answer.items())
        elif value is not None and not isinstance(value, bool | int):
            answer.fail_expected("true, false, a number or numbers")
        return cls(PropertyGuard(_position(argument, described.tensors), text, value))


@dataclass(frozen=True, eq=False)
class _Groups:
    """Tensor arguments that have something in common, and those that do not.

    Attributes:
        groups: the positions of the tensors, those of a group together.
    """

    groups: tuple[tuple[int, ...], ...]

    def to_json(self) -> Any:
        return [list(group) for group in self.groups]

    @classmethod
    def from_json(cls, field: Field, described: DescribedArguments) -> Any:
        return cls(tuple(_group(group, described.tensors) for group in field.items()))


@dataclass(frozen=True, eq=False)
class Aliasing(_Groups, TraceGuard):
    """Arguments that are the same tensor, and those that are not: NOTE [tensor aliasing]."""

    order = 2
    json_key = "aliasing"

    @classmethod
    def of(cls, inputs: Sequence[InputSpec]) -> Aliasing:
        """Return the guard that a call meets with these tensors."""
        groups: dict[int, list[int]] = {}
        for spec in inputs:
            groups.setdefault(id(spec.sample), []).append(spec.position)
        return cls(tuple(map(tuple, groups.values())))

    def lines(self, code: GuardCode) -> Iterable[str]:
        parts = [f"args[{x}] is args[{other}]" for x, *others in self.groups for other in others]
        if len(self.groups) > 1:
            ids = ", ".join(f"id(args[{group[0]}])" for group in self.groups)
            parts.append(f"len({{{ids}}}) == {len(self.groups)}")
        return (f"if not ({' and '.join(parts)}): return None",) if parts else ()

    def texts(self, name: Names) -> Iterator[str]:
        for first, *others in self.groups:
            yield from (f"{name(first)} is {name(other)}" for other in others)
        if len(self.groups) > 1:
            distinct = ", ".join(name(group[0]) for group in self.groups)
            yield f"{distinct} are different tensors"


@dataclass(frozen=True, eq=False)
class SharedMemory(_Groups, TraceGuard):
    """Arguments that share memory, and those that do not.

    A body of control flow writes into copies of the tensors that it closes over, one for each
    memory: NOTE [bodies without writes] in ``bridge/control/traced_bodies``.
    """

    order = 3
    json_key = "memory"

    @classmethod
    def of(cls, flat: Sequence[Any], positions: Iterable[int]) -> SharedMemory:
        """Return the guard that a call meets with the tensors at these positions."""
        groups: dict[Any, list[int]] = {}
        for position in positions:
            groups.setdefault(memory_key(flat[position]), []).append(position)
        return cls(tuple(map(tuple, groups.values())))

    def is_met(self, flat: Sequence[Any]) -> bool:
        """True if the same tensors of a call share memory."""
        positions = sorted(position for group in self.groups for position in group)
        return SharedMemory.of(flat, positions).groups == self.groups

    def lines(self, code: GuardCode) -> Iterable[str]:
        return (f"if not {code.name(self.is_met)}(args): return None",)

    def texts(self, name: Names) -> Iterator[str]:
        for group in self.groups:
            if len(group) > 1:
                yield f"{', '.join(map(name, group))} share memory"
        if len(self.groups) > 1:
            yield f"{', '.join(name(group[0]) for group in self.groups)} do not share memory"


_BY_JSON_KEY = kinds_in_files(TraceGuard)


# --- guards in files


def trace_guard_to_json(guard: TraceGuard) -> Any:
    return {guard.json_key: guard.to_json()}


def read_trace_guard(field: Field, described: DescribedArguments) -> TraceGuard:
    """Return the guard that ``trace_guard_to_json`` wrote."""
    for key, kind in _BY_JSON_KEY.items():
        if field.get(key) is not None:
            (value,) = field.record(key)
            return kind.from_json(value, described)
    field.fail_expected(f"a guard: {', '.join(_BY_JSON_KEY)}")


def _group(field: Field, positions: Collection[int]) -> tuple[int, ...]:
    group = tuple(_position(guard_field, positions) for guard_field in field.items())
    if not group:
        field.fail_expected("the places of arguments")
    return group


def _position(field: Field, positions: Collection[int]) -> int:
    position = field.integer(0)
    if position not in positions:
        field.fail_expected("the place of a tensor among the arguments")
    return position
