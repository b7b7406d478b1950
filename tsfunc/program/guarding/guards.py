"""The guards on the arguments of a program: facts about each call that it serves.

A guard is one object with all forms of its fact: the generated Python that checks it (``lines``),
its text for people (``texts``), what explains a call that it refuses (``facts``), its part of the
key under which a program is found for other sizes (``key``), and its JSON in files (``to_json`` and
``from_json``). A new kind of guard is a class in this file; ``guards_on_arguments`` makes it.
Guards on other facts about the arguments are in ``trace_guards.py``, and those on values that the
function reads besides its arguments in ``closure/closure_guards.py``; the base class of all is in
``program/guard.py``.

A guard that holds implies that the descriptors hold: it fixes everything that they describe except
the sizes of named dims, and it checks these sizes itself.
"""

from __future__ import annotations

import copy
import keyword
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from tsfunc.bridge.trace.tensor_guards import users_class
from tsfunc.errors import DescriptorError
from tsfunc.program.closure.guard_builder import has_contents, has_value, viewed_state
from tsfunc.program.closure.guard_codegen import (
    differs,
    lines_of_tensors,
    strides_condition,
    tensor_lines,
)
from tsfunc.program.fields import IDENTIFIER, Field
from tsfunc.program.guard import Guard, GuardCode, Names, Part, UnquotedText, kinds_in_files
from tsfunc.program.guarding.inputs import InputSpec, NumberSpec, solving_order
from tsfunc.program.guarding.layouts import layout_of
from tsfunc.types import Dim, DimExpr, DimForm, MetaTensorType, TSTensor, parse_descriptor
from tsfunc.types.check_codegen import refused_sizes
from tsfunc.types.dims import parse_dim
from tsfunc.types.sizes import solved_for
from tsfunc.types.values import describe, plain_name, same_value, tensor_text

Facts = Mapping[str, Any]
Encode = Callable[[Any], Any]
"""Returns a value as JSON."""


class ValueDecoder(Protocol):
    """Reads values from JSON."""

    def decode(self, field: Field) -> Any: ...

    def device(self, field: Field) -> torch.device: ...

    def dtype(self, field: Field) -> torch.dtype: ...


class ArgumentReader(NamedTuple):
    """The parts of a file that the guards on its arguments refer to.

    Attributes:
        fake: the mode in which the tensors of the file are made.
        names: the names of dims and of the numbers read so far.
    """

    values: ValueDecoder
    named_dims: Mapping[str, Dim]
    fake: AbstractContextManager[Any]
    names: set[str]


@dataclass(frozen=True, eq=False)
class ArgumentGuard(Guard):
    """A guard on one of the flattened arguments.

    Attributes:
        position: the index of the argument.
    """

    part = Part.ARGUMENTS
    position: int

    @property
    def key(self) -> Any:
        """The part of the fact that is the same for other sizes of named dims, and numbers."""
        raise NotImplementedError

    def facts(self, name: Names) -> Facts:
        """Return the parts of the fact that a call may fail, by the user's names."""
        raise NotImplementedError

    def to_json(self, encode: Encode) -> Any:
        raise NotImplementedError

    @classmethod
    def from_json(cls, position: int, field: Field, reader: ArgumentReader) -> ArgumentGuard:
        """Return the guard that ``to_json`` wrote."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class TypeIs(ArgumentGuard):
    """An object's class; its attributes are guarded where the function reads them."""

    cls: type

    def lines(self, code: GuardCode) -> Iterable[str]:
        """Return no lines: ``TypeOf`` guards the object among the values that were read."""
        return ()

    def texts(self, name: Names) -> Iterable[str]:
        return (f"type({name(self.position)}) is {self.cls.__qualname__}",)

    def facts(self, name: Names) -> Facts:
        return {f"type({name(self.position)})": UnquotedText(self.cls.__qualname__)}

    @property
    def key(self) -> Any:
        return self.cls, None

    def to_json(self, encode: Encode) -> Any:
        return encode(WatchedPlaceholder(self.cls))


@dataclass(frozen=True, eq=False)
class ValueIs(ArgumentGuard):
    """An argument that is a constant of the program: an equal value, or the same object."""

    order = 2
    json_key = "value"
    value: Any

    def lines(self, code: GuardCode) -> Iterable[str]:
        return f"a = args[{self.position}]", _static(self.value, code)

    def texts(self, name: Names) -> Iterable[str]:
        return (f"{name(self.position)} is {describe(self.value)}",)

    def facts(self, name: Names) -> Facts:
        return {name(self.position): self.value}

    @property
    def key(self) -> Any:
        return type(self.value), _static_key(self.value)

    def to_json(self, encode: Encode) -> Any:
        return {"value": encode(self.value)}

    @classmethod
    def from_json(cls, position: int, field: Field, reader: ArgumentReader) -> ValueIs:
        (value,) = field.record("value")
        return cls(position, reader.values.decode(value))


@dataclass(frozen=True, eq=False)
class AnyNumber(ArgumentGuard):
    """A number that is an input of the program: its type, and that it is finite."""

    order = 1
    json_key = "number"
    spec: NumberSpec
    value: int | float

    def lines(self, code: GuardCode) -> Iterable[str]:
        finite = f"float or not {code.name(math.isfinite)}(a)"
        type_name = "int" if type(self.value) is int else finite
        return f"a = args[{self.position}]", f"if type(a) is not {type_name}: return None"

    def texts(self, name: Names) -> Iterable[str]:
        return (f"{name(self.position)}: any {type(self.value).__name__}",)

    def facts(self, name: Names) -> Facts:
        return {name(self.position): self.value}

    @property
    def key(self) -> Any:
        return type(self.spec.value), self.spec.name

    def to_json(self, encode: Encode) -> Any:
        return {"value": encode(self.value), "number": self.spec.name}

    @classmethod
    def from_json(cls, position: int, field: Field, reader: ArgumentReader) -> AnyNumber:
        value, name = field.record("value", "number")
        spec = read_number_spec(name, position, reader.values.decode(value), reader.names)
        reader.names.add(spec.name)
        return cls(position, spec, spec.value)


@dataclass(frozen=True, eq=False)
class TensorMeta(ArgumentGuard):
    """A tensor's class, dtype, device, layout and sizes."""

    order = 3
    json_key = "tensor"
    spec: InputSpec

    def lines(self, code: GuardCode) -> Iterable[str]:
        spec = self.spec
        sizes = None if spec.is_fixed else self._size_lines(code)
        checks = tensor_lines("a", spec.sample, code, sizes, spec.any_grad)
        return f"a = args[{self.position}]", *checks

    def _size_lines(self, code: GuardCode) -> list[str]:
        """Return lines that check sizes of which some are symbolic, and the strides."""
        dims, sample = self.spec.dims, self.spec.sample
        lines = ["s = a.shape", f"if len(s) != {len(dims)}: return None"]
        for k, dim in enumerate(dims):
            lines.extend(_dim_lines(k, dim, code.bound, code.named_dims))
        if sample.is_contiguous():
            return [*lines, f"if {strides_condition('a', sample)}: return None"]
        layout = code.name(layout_of(sample.shape, sample.stride()))
        return [*lines, f"if {code.name(layout_of)}(s, a.stride()) != {layout}: return None"]

    @classmethod
    def lines_of_many(cls, guards: Sequence[TensorMeta], code: GuardCode) -> Iterator[str]:
        fixed = [guard for guard in guards if guard.spec.is_fixed]
        yield from super().lines_of_many([x for x in guards if not x.spec.is_fixed], code)
        every = "".join(f"args[{guard.position}], " for guard in fixed)
        yield from lines_of_tensors(
            "args" if len(fixed) == code.count else f"({every})",
            [guard.spec.sample for guard in fixed],
            super().lines_of_many(fixed, code),
            code,
        )

    def texts(self, name: Names) -> Iterable[str]:
        x = self.spec.sample
        layout = "contiguous" if x.is_contiguous() else f"strides {tuple(x.stride())}"
        dims = [dim.name if isinstance(dim, Dim) else dim for dim in self.spec.dims]
        grad = None if self.spec.any_grad else x.requires_grad
        text = tensor_text(x.dtype, dims, x.device, grad)
        return (f"{name(self.position)}: {text} {layout}",)

    def facts(self, name: Names) -> Facts:
        x, at = self.spec.sample, name(self.position)
        facts = {f"{at}.dtype": x.dtype, f"{at}.device": x.device, f"{at}.dim()": x.dim()}
        facts[f"{at}.requires_grad"] = x.requires_grad
        for k, dim in enumerate(self.spec.dims):
            word = dim.name if isinstance(dim, Dim) else dim
            facts[f"{at}.shape[{k}]"] = dim if isinstance(dim, int) else UnquotedText(word)
        contiguous = x.is_contiguous()
        facts[f"{at}.stride()"] = UnquotedText("contiguous") if contiguous else tuple(x.stride())
        return facts

    @property
    def key(self) -> Any:
        x = self.spec.sample
        shape = tuple(str(dim) for dim in self.spec.dims)
        return shape, (x.dtype, x.device, x.requires_grad, self.spec.layout_key,
                       users_class(type(x)))  # fmt: skip

    def to_json(self, encode: Encode) -> Any:
        spec, x = self.spec, self.spec.sample
        return {
            "tensor": spec.name,
            "dtype": plain_name(x.dtype),
            "device": str(x.device),
            "requires_grad": None if spec.any_grad else x.requires_grad,
            "shape": list(x.shape),
            "strides": list(x.stride()),
            "dims": [
                dim if isinstance(dim, int) else dim.name if isinstance(dim, Dim) else str(dim)
                for dim in spec.dims
            ],
        }

    @classmethod
    def from_json(cls, position: int, field: Field, reader: ArgumentReader) -> TensorMeta:
        values = reader.values
        name, dtype, device, grad, shape_field, strides, dims_field = field.record(
            "tensor", "dtype", "device", "requires_grad", "shape", "strides", "dims"
        )
        shape = [size.integer(0) for size in shape_field.items()]
        steps = [step.integer(0) for step in strides.items(len(shape))]
        dims = tuple(_read_size(dim, reader.named_dims) for dim in dims_field.items(len(shape)))
        any_grad = grad.value is None
        try:
            with reader.fake:
                sample = torch.empty_strided(
                    shape, steps, dtype=values.dtype(dtype), device=values.device(device)
                ).requires_grad_(not any_grad and grad.flag())
        except (RuntimeError, OverflowError, TypeError) as error:
            field.fail(f"there is no such tensor: {str(error).splitlines()[0]}")
        return cls(position, InputSpec(position, name.line(), sample, dims, any_grad))


@dataclass(frozen=True, eq=False)
class DimIs(Guard):
    """The sizes that a named dim may have; they are checked where the first tensor binds it."""

    part = Part.SIZES
    dim: Dim

    def lines(self, code: GuardCode) -> Iterable[str]:
        """Return no lines: the first tensor with the dim checks its size."""
        return ()

    def texts(self, name: Names) -> Iterable[str]:
        dim = self.dim
        return (str(Dim(dim.name, max(2, dim.min or 0), dim.max, dim.multiple_of, dim.one_of)),)

    def to_json(self) -> str:
        return str(MetaTensorType([self.dim]))

    @classmethod
    def from_json(cls, field: Field, name: str) -> DimIs:
        try:
            described = parse_descriptor(field.line()[:200])
            dims = described.meta.dims if isinstance(described, TSTensor) else None
        except DescriptorError as error:
            field.fail(str(error))
        dim = dims[0] if dims is not None and len(dims) == 1 else None
        if not isinstance(dim, Dim) or dim.name != name:
            field.fail_expected(f"a description of the dim {name[:40]!r}")
        return cls(dim)


@dataclass(frozen=True, eq=False)
class SizesAre(Guard):
    """The sizes of tensors that are expressions of named dims."""

    part = Part.SIZES
    order = 1
    inputs: Sequence[InputSpec]

    def lines(self, code: GuardCode) -> Iterator[str]:
        for i, k, dim, unknown in solving_order(self.inputs, code.bound):
            size = f"args[{i}].shape[{k}]"
            if unknown is None:
                yield f"if {size} != ({_in_guard_variables(dim.text)}): return None"
            else:
                yield from _lines_solving(size, dim, unknown, code.named_dims[unknown])

    def texts(self, name: Names) -> Iterator[str]:
        for spec in self.inputs:
            for k, size in enumerate(spec.dims):
                if isinstance(size, DimExpr):
                    yield f"{name(spec.position)}.shape[{k}] == {size}"


@dataclass(frozen=True)
class WatchedPlaceholder:
    """Stand-in for an object whose attributes are watched."""

    cls: type


# --- guards in files


_BY_JSON_KEY = kinds_in_files(ArgumentGuard)


def read_argument_guard(position: int, field: Field, reader: ArgumentReader) -> ArgumentGuard:
    """Return the guard on an argument that ``to_json`` wrote."""
    for key, kind in _BY_JSON_KEY.items():
        if field.get(key) is not None:
            return kind.from_json(position, field, reader)
    field.fail_expected("a number, a value or a tensor")


def read_number_spec(
    field: Field, position: int, value: Any, used_names: Collection[str]
) -> NumberSpec:
    """Return a number among the arguments that may vary within its type."""
    name = field.text(IDENTIFIER, "the name of a number")
    spec = NumberSpec(position, name, value)
    if type(value) not in (int, float) or not spec.admits(value):
        field.fail("only a number that is finite can be another one")
    if name in used_names or keyword.iskeyword(name):
        field.fail_expected("another name")
    return spec


def _read_size(field: Field, named_dims: Mapping[str, Dim]) -> DimForm:
    if type(field.value) is int:
        return field.integer(0)
    try:
        dim = parse_dim(field.line()[:200])
    except DescriptorError as error:
        field.fail(str(error))
    names = [dim.name] if isinstance(dim, Dim) else dim.names if isinstance(dim, DimExpr) else ()
    if not names or any(name not in named_dims for name in names):
        field.fail_expected("a size, or one made of named dims")
    return named_dims[dim.name] if isinstance(dim, Dim) else dim


# --- the code and the keys of single guards


def variables_of(named_dims: Mapping[str, Dim], numbers: Sequence[NumberSpec]) -> dict[str, str]:
    sizes = {name: variable_of_size(name) for name in named_dims}
    return {**sizes, **{spec.name: f"args[{spec.position}]" for spec in numbers}}


def _in_guard_variables(text: str) -> str:
    """Return an expression in the guard's variables."""
    return re.sub(r"[^\W\d]\w*", lambda match: variable_of_size(match[0]), text)


def _lines_solving(size: str, dim: DimExpr, name: str, limits: Dim) -> list[str]:
    """Return lines that solve an expression for a name, given the size of its dim."""
    slope, rest = map(_in_guard_variables, solved_for(dim.text, name) or ())
    return [
        f"d = {slope}",
        f"if not d or ({size} - ({rest})) % d: return None",
        f"{variable_of_size(name)} = ({size} - ({rest})) // d",
        *_bounds(variable_of_size(name), limits),
    ]


def _bounds(size: str, limits: Dim) -> list[str]:
    """Return lines that check bounds; for 0 and 1 see NOTE [sizes 0 and 1]."""
    return [
        f"if {refused}: return None" for refused in (f"{size} < 2", *refused_sizes(limits, size))
    ]


def variable_of_size(name: str) -> str:
    """Return the variable for a named dim; the prefix avoids clashes with other variables."""
    return f"size_{name}"


def _static(value: Any, code: GuardCode) -> str:
    """Return the guard of a constant argument: the same number or string, or the same object.

    The guard of an object with elements or other contents checks the contents as well.
    """
    name = code.name
    if has_contents(value) and not isinstance(value, complex | frozenset):
        inside = viewed_state(value)
        expression, now = inside or ("{}", copy.copy(value))
        same_contents = f"{name(same_value)}({name(now)}, {expression.format('a')})"
        mutable = hasattr(type(value), "__setitem__") or inside is not None
        return (
            f"if {f'a is not {name(value)} or ' if mutable else ''}not {same_contents}: return None"
        )
    if has_value(type(value)):
        return f"if {differs('a', value, code)}: return None"
    return f"if a is not {name(value)}: return None"


def _dim_lines(k: int, dim: Any, bound: set[str], named_dims: Mapping[str, Dim]) -> list[str]:
    if isinstance(dim, int):
        return [f"if s[{k}] != {dim}: return None"]
    if not isinstance(dim, Dim):
        return []
    size = variable_of_size(dim.name)
    if dim.name in bound:
        return [f"if s[{k}] != {size}: return None"]
    bound.add(dim.name)
    return [f"{size} = s[{k}]", *_bounds(size, named_dims[dim.name])]


def _static_key(value: Any) -> Any:
    """Return a key that differs for different constants of a class."""
    if isinstance(value, float):
        return repr(value), math.copysign(1, value)
    if isinstance(value, int | str):
        return repr(value)
    if has_contents(value):
        return object()  # the contents may have changed
    return id(value)
