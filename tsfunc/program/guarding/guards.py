"""The guards on the arguments of a program: facts about each call that it answers.

A guard is one object with all forms of its fact: the generated Python that checks it (``lines``),
its text for people (``texts``), what explains a call that it refuses (``facts``), and its part of
the key under which a program is found for other sizes (``key``). A new kind of guard is a class in
this file, and a place in ``KINDS``. Guards on values that the function reads beside its arguments
are in ``closure/read_guards.py``, with the base class.

A guard that holds implies that the descriptors hold: it fixes everything that they describe except
the sizes of named dims, and it checks these sizes itself.

NOTE [tensor aliasing]
A trace makes a tracer for each tensor among the arguments, so ``x is y`` is False in the trace, as
it is in most calls. If the function's code has an identity comparison of objects that may be
tensors (``code_reads`` detects it), equal arguments share one tracer, and an argument that the
function has from elsewhere (a parameter of its module) is passed as that tensor. Later calls are
then guarded on the same identities. Other functions have one program for both kinds of calls.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tsfunc.bridge.sizes.symbols import Condition
from tsfunc.bridge.trace.quick_checks import quick_check
from tsfunc.bridge.trace.tensor_guards import PropertyGuard, is_tensor_of, users_class
from tsfunc.program.closure.guard_builder import has_value, is_instance
from tsfunc.program.closure.read_guards import Guard, GuardCode, Names, same_float
from tsfunc.program.closure.viewed_state import has_contents, viewed_state
from tsfunc.program.guarding.inputs import InputSpec, ScalarSpec, solving_order
from tsfunc.program.guarding.layouts import layout_of
from tsfunc.types import Dim, DimExpr
from tsfunc.types.codegen import refused_sizes
from tsfunc.types.sizes import solved_for
from tsfunc.types.tensor_text import tensor_text
from tsfunc.types.values import describe, same_value

Facts = Mapping[str, Any]
Groups = tuple[tuple[int, ...], ...]


class Word(str):
    """A text that is shown without quotes: a named dim, the name of a class."""


@dataclass(frozen=True, eq=False)
class ArgumentGuard(Guard):
    """A guard on one of the flattened arguments.

    Attributes:
        position: the index of the argument.
    """

    position: int

    @property
    def key(self) -> Any:
        """The part of the fact that is the same for other sizes of named dims, and numbers."""
        raise NotImplementedError

    def facts(self, name: Names) -> Facts:
        """Return the parts of the fact that a call may fail, by the user's names."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class TypeIs(ArgumentGuard):
    """An object's class; its attributes are guarded where the function reads them."""

    cls: type

    def texts(self, name: Names) -> Iterable[str]:
        return (f"type({name(self.position)}) is {self.cls.__qualname__}",)

    def facts(self, name: Names) -> Facts:
        return {f"type({name(self.position)})": Word(self.cls.__qualname__)}

    @property
    def key(self) -> Any:
        return self.cls, None


@dataclass(frozen=True, eq=False)
class ValueIs(ArgumentGuard):
    """An argument that is a constant of the program: an equal value, or the same object."""

    value: Any

    def lines(self, code: GuardCode) -> Iterable[str]:
        return f"a = args[{self.position}]", _static(self.position, self.value, code.scope)

    def texts(self, name: Names) -> Iterable[str]:
        return (f"{name(self.position)} is {describe(self.value)}",)

    def facts(self, name: Names) -> Facts:
        return {name(self.position): self.value}

    @property
    def key(self) -> Any:
        return type(self.value), _static_key(self.value)


@dataclass(frozen=True, eq=False)
class AnyNumber(ArgumentGuard):
    """A number that is an input of the program: its type, and that it is finite."""

    spec: ScalarSpec
    value: int | float

    def lines(self, code: GuardCode) -> Iterable[str]:
        code.scope["isfinite"] = math.isfinite
        held = "int" if type(self.value) is int else "float or not isfinite(a)"
        return f"a = args[{self.position}]", f"if type(a) is not {held}: return None"

    def texts(self, name: Names) -> Iterable[str]:
        return (f"{name(self.position)}: any {type(self.value).__name__}",)

    def facts(self, name: Names) -> Facts:
        return {name(self.position): self.value}

    @property
    def key(self) -> Any:
        return type(self.spec.value), self.spec.name


@dataclass(frozen=True, eq=False)
class TensorMeta(ArgumentGuard):
    """A tensor's class, dtype, device, layout and sizes."""

    spec: InputSpec

    def lines(self, code: GuardCode) -> Iterable[str]:
        checks = _tensor(self.spec, code.scope, code.bound, code.bounds)
        return f"a = args[{self.position}]", *checks

    @classmethod
    def lines_of_many(cls, guards: Sequence[TensorMeta], code: GuardCode) -> Iterator[str]:
        """Check tensors of fixed sizes at once in C++, and one by one if that fails."""
        fixed = [guard for guard in guards if _is_fixed(guard.spec)]
        yield from super().lines_of_many([x for x in guards if not _is_fixed(x.spec)], code)
        closely = super().lines_of_many(fixed, code)
        check = quick_check([guard.spec.example for guard in fixed])
        if check is None:
            yield from closely
            return
        code.scope["quick"] = check
        every = ", ".join(f"args[{guard.position}]" for guard in fixed)
        yield f"if not quick({'*args' if len(fixed) == code.count else every}):"
        yield from (f"    {line}" for line in closely)

    def texts(self, name: Names) -> Iterable[str]:
        x = self.spec.example
        layout = "contiguous" if x.is_contiguous() else f"strides {tuple(x.stride())}"
        dims = [dim.name if isinstance(dim, Dim) else dim for dim in self.spec.dims]
        grad = None if self.spec.any_grad else x.requires_grad
        text = tensor_text(x.dtype, dims, x.device, grad)
        return (f"{name(self.position)}: {text} {layout}",)

    def facts(self, name: Names) -> Facts:
        x, at = self.spec.example, name(self.position)
        facts = {f"{at}.dtype": x.dtype, f"{at}.device": x.device, f"{at}.dim()": x.dim()}
        facts[f"{at}.requires_grad"] = x.requires_grad
        for k, dim in enumerate(self.spec.dims):
            word = dim.name if isinstance(dim, Dim) else dim
            facts[f"{at}.shape[{k}]"] = dim if isinstance(dim, int) else Word(word)
        contiguous = x.is_contiguous()
        facts[f"{at}.stride()"] = Word("contiguous") if contiguous else tuple(x.stride())
        return facts

    @property
    def key(self) -> Any:
        x = self.spec.example
        shape = tuple(str(dim) for dim in self.spec.dims)
        return shape, (x.dtype, x.device, x.requires_grad, _layout_key(self.spec),
                       users_class(type(x)))  # fmt: skip


@dataclass(frozen=True, eq=False)
class DimIs(Guard):
    """The sizes that a named dim may have; they are checked where the first tensor binds it."""

    dim: Dim

    def texts(self, name: Names) -> Iterable[str]:
        dim = self.dim
        return (str(Dim(dim.name, max(2, dim.min or 0), dim.max, dim.multiple_of, dim.one_of)),)


@dataclass(frozen=True, eq=False)
class SizesAre(Guard):
    """The sizes of tensors that are expressions of named dims."""

    inputs: Sequence[InputSpec]

    def lines(self, code: GuardCode) -> Iterator[str]:
        for i, k, dim, unknown in solving_order(self.inputs, code.bound):
            size = f"args[{i}].shape[{k}]"
            if unknown is None:
                yield f"if {size} != ({_spelled(dim.text)}): return None"
            else:
                yield from _solved(size, dim, unknown, code.bounds[unknown])

    def texts(self, name: Names) -> Iterator[str]:
        for spec in self.inputs:
            for k, size in enumerate(spec.dims):
                if isinstance(size, DimExpr):
                    yield f"{name(spec.position)}.shape[{k}] == {size}"


@dataclass(frozen=True, eq=False)
class Holds(Guard):
    """A condition on named dims and numbers among the inputs."""

    condition: Condition

    def lines(self, code: GuardCode) -> Iterable[str]:
        code.scope["math"] = math
        return (f"if not ({self.condition.code}): return None",)

    def texts(self, name: Names) -> Iterable[str]:
        return (self.condition.text,)


@dataclass(frozen=True, eq=False)
class Property(Guard):
    """A fact about a tensor argument that the function read, other than its type and sizes."""

    read: PropertyGuard

    def lines(self, code: GuardCode) -> Iterable[str]:
        asked = f"asked_{len(code.scope)}"
        code.scope[asked] = self.read.holds
        return (f"if not {asked}(args[{self.read.position}]): return None",)

    def texts(self, name: Names) -> Iterable[str]:
        return (f"{self.read.fact.format(name(self.read.position))} is {self.read.answer}",)


@dataclass(frozen=True, eq=False)
class Aliasing(Guard):
    """Arguments that are the same tensor, and those that are not: NOTE [tensor aliasing].

    Attributes:
        groups: the positions of the tensors, grouped by identity.
    """

    groups: Groups

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


@dataclass(frozen=True)
class Watched:
    """Stand-in for an object whose attributes are watched."""

    cls: type


KINDS: tuple[type[Guard], ...] = (
    TypeIs, ValueIs, AnyNumber, TensorMeta, DimIs, SizesAre, Holds, Property, Aliasing,
)  # fmt: skip
"""The kinds of guards, in the order of their code: a size is bound before a condition uses it."""


def guards_on_arguments(
    flat: Sequence[Any], inputs: Sequence[InputSpec], scalars: Sequence[ScalarSpec] = ()
) -> list[ArgumentGuard]:
    """Return a guard for each flattened argument.

    Args:
        flat: the flattened arguments, or the leaves of a ``CallSpec``.
        inputs: the tensors among them.
        scalars: the numbers among them that are inputs.
    """
    specs = {spec.position: spec for spec in inputs}
    numbers = {spec.position: spec for spec in scalars}
    found: list[ArgumentGuard] = []
    for i, value in enumerate(flat):
        if i in specs:
            found.append(TensorMeta(i, specs[i]))
        elif i in numbers:
            found.append(AnyNumber(i, numbers[i], value))
        elif isinstance(value, Watched) or is_instance(value):
            found.append(TypeIs(i, value.cls if isinstance(value, Watched) else type(value)))
        else:
            found.append(ValueIs(i, value))
    return found


def guard_lines(
    guards: Sequence[Guard], bounds: Mapping[str, Dim], count: int
) -> tuple[list[str], dict[str, Any]]:
    """Return lines that return None if a guard fails, and the objects that they refer to by name.

    Args:
        guards: the guards.
        bounds: the named dims.
        count: the number of flattened arguments.
    """
    code = GuardCode(bounds, count)
    for kind in KINDS:
        code.add([guard for guard in guards if type(guard) is kind])
    return code.lines, code.scope


# --- the code and the keys of single guards


_PLAIN = (int, bool, str, type(None))


def variables_of(bounds: Mapping[str, Dim], scalars: Sequence[ScalarSpec]) -> dict[str, str]:
    """Return the variables of named dims and numbers in conditions."""
    numbers = {spec.name: f"args[{spec.position}]" for spec in scalars}
    return {**{name: _size(name) for name in bounds}, **numbers}


def _spelled(text: str) -> str:
    """Return an expression in the guard's variables."""
    return re.sub(r"[^\W\d]\w*", lambda found: _size(found[0]), text)


def _solved(size: str, dim: DimExpr, name: str, limits: Dim) -> list[str]:
    """Return lines that solve an expression for a name, given the size of its dim."""
    slope, rest = map(_spelled, solved_for(dim.text, name) or ())
    return [
        f"d = {slope}",
        f"if not d or ({size} - ({rest})) % d: return None",
        f"{_size(name)} = ({size} - ({rest})) // d",
        *_bounds(_size(name), limits),
    ]


def _bounds(size: str, limits: Dim) -> list[str]:
    """Return lines that check bounds; for 0 and 1 see NOTE [sizes 0 and 1]."""
    return [
        f"if {refused}: return None" for refused in (f"{size} < 2", *refused_sizes(limits, size))
    ]


def _size(name: str) -> str:
    """Return the variable for a named dim; the prefix avoids clashes with other variables."""
    return f"size_{name}"


def _is_fixed(spec: InputSpec) -> bool:
    return all(isinstance(dim, int) for dim in spec.dims)


def _static(i: int, value: Any, scope: dict[str, Any]) -> str:
    """Return the guard of a constant argument: the same number or string, or the same object.

    The guard of an object with elements or other contents checks the contents as well.
    """
    scope[f"value_{i}"] = value
    if isinstance(value, complex | frozenset):  # `==` may hold for different values
        scope["same_value"] = same_value
        return f"if not same_value(value_{i}, a): return None"
    if has_contents(value):
        inside = viewed_state(value)
        expression, now = inside or ("{}", copy.copy(value))
        scope[f"inside_{i}"], scope["same_value"] = now, same_value
        own = f"same_value(inside_{i}, {expression.format('a')})"
        alone = hasattr(type(value), "__setitem__") or inside is not None
        return f"if {f'a is not value_{i} or ' if alone else ''}not {own}: return None"
    if isinstance(value, float):
        scope["same_float"] = same_float
        return f"if not same_float(a, value_{i}): return None"
    if type(value) in _PLAIN or has_value(type(value)):
        scope[f"type_{i}"] = type(value)
        return f"if type(a) is not type_{i} or a != value_{i}: return None"
    return f"if a is not value_{i}: return None"


def _tensor(
    spec: InputSpec, scope: dict[str, Any], bound: set[str], bounds: Mapping[str, Dim]
) -> list[str]:
    """Return the guard of a tensor: type, device, memory layout and fixed sizes."""
    i, example = spec.position, spec.example
    scope[f"dtype_{i}"], scope[f"device_{i}"] = example.dtype, example.device
    scope[f"layout_{i}"] = example.layout
    scope[f"class_{i}"], scope["is_tensor_of"] = users_class(type(example)), is_tensor_of
    plain = "Tensor" if scope[f"class_{i}"] is torch.Tensor else f"class_{i}"
    grad = "" if spec.any_grad else f" or a.requires_grad is not {example.requires_grad}"
    lines = [
        f"if type(a) is not {plain} and not is_tensor_of(a, class_{i}): return None",
        f"if a.dtype is not dtype_{i} or a.device != device_{i}{grad}: return None",
        f"if a.layout is not layout_{i}: return None",  # some have no strides
    ]
    if _is_fixed(spec):
        lines.append(f"if a.shape != {tuple(spec.dims)!r}: return None")
        if not example.is_contiguous():
            lines.append(f"if a.stride() != {tuple(example.stride())!r}: return None")
            return lines
    else:
        lines += ["s = a.shape", f"if len(s) != {len(spec.dims)}: return None"]
        for k, dim in enumerate(spec.dims):
            lines.extend(_dim(k, dim, bound, bounds))
        if not example.is_contiguous():
            scope["layout_of"] = layout_of
            scope[f"strides_{i}"] = layout_of(example.shape, example.stride())
            lines.append(f"if layout_of(s, a.stride()) != strides_{i}: return None")
            return lines
    lines.append("if not a.is_contiguous(): return None")
    return lines


def _dim(k: int, dim: Any, bound: set[str], bounds: Mapping[str, Dim]) -> list[str]:
    if isinstance(dim, int):
        return [f"if s[{k}] != {dim}: return None"]
    if not isinstance(dim, Dim):
        return []
    size = _size(dim.name)
    if dim.name in bound:
        return [f"if s[{k}] != {size}: return None"]
    bound.add(dim.name)
    return [f"{size} = s[{k}]", *_bounds(size, bounds[dim.name])]


def _layout_key(spec: InputSpec) -> Any:
    """Return the memory layout that the guard of a program checks."""
    x = spec.example
    if x.layout is not torch.strided or x.is_nested:
        return x.layout
    if x.is_contiguous():
        return "contiguous"
    fixed = all(isinstance(dim, int) for dim in spec.dims)
    return tuple(x.stride()) if fixed else layout_of(x.shape, x.stride())


def _static_key(value: Any) -> Any:
    """Return a key that differs for different constants of a class."""
    if isinstance(value, float):
        return repr(value), math.copysign(1, value)
    if isinstance(value, int | str):
        return repr(value)
    if has_contents(value):
        return object()  # the contents may have changed
    return id(value)


# --- arguments that are the same tensor, or a tensor that the function also has from elsewhere


def as_one(
    inputs: Sequence[InputSpec], tracers: Sequence[Any], own: Mapping[int, torch.Tensor]
) -> list[Any]:
    """Return the values that the function gets for its tensors: one object for each tensor.

    Args:
        inputs: the tensors among the arguments.
        tracers: their tracers.
        own: tensors that the function has from elsewhere, by id.
    """
    first: dict[int, Any] = dict(own)
    return [
        first.setdefault(id(spec.example), tracer)
        for spec, tracer in zip(inputs, tracers, strict=True)
    ]


def groups_of(inputs: Sequence[InputSpec]) -> Groups:
    """Return the positions of the tensors among the arguments, grouped by identity."""
    found: dict[int, list[int]] = {}
    for spec in inputs:
        found.setdefault(id(spec.example), []).append(spec.position)
    return tuple(tuple(group) for group in found.values())
