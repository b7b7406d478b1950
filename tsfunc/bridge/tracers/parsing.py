"""What C++ makes of a call of one of torch's functions: the overload, and what it is given.

``torch.roll(x, 1, -1)`` is a call of ``aten::roll`` with ``(x, [1], [-1])``, as torch's parsers say
in C++. Here that is found out once for the types of a call's arguments and kept as a
:class:`Form`: later calls of that form are put in the schema's terms without entering C++.

NOTE [forms of calls]
Which overload is meant follows from the types of the arguments, and of what is in lists of them. It
is found by calling the function on *probes*, tensors that do nothing but tell which operator they
were given to. What becomes of each argument follows from the schema and the argument's type: a
number goes as it is, one for a list of numbers is repeated, a tuple becomes a list, and what is as
the schema has it by default is left out at the end. A form is kept only if it gives just what the
probes were given, for the call itself and for one with other numbers, all of them different. What
is not told by types (symbolic numbers, names of dims) has none.

Private names used here (torch 2.11 to 2.13): ``Tensor._make_wrapper_subclass`` makes a tensor
without storage; ``_C._disabled_torch_function_impl`` is no ``__torch_function__``;
``OpOverload._schema`` names an operator's arguments and results.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch._C import _disabled_torch_function_impl

from tsfunc.bridge.tracers.operators import TorchOperator, operator_of
from tsfunc.bridge.tracers.torch_state import (
    in_dispatch_modes,
    without_autocast,
    without_autograd,
    without_factory_keys,
)

Convert = Callable[[Any], Any]  # None where it is not what the form is of

_NO_DEFAULT: Final = object()
_SEQUENCES: Final = frozenset({list, tuple, torch.Size})
_INT: Final = frozenset({int})

# The types of Python values that go to C++ as they are, by the schema's types.
_AS_THEY_ARE: Final[Mapping[str, frozenset[type]]] = {
    "int": _INT,
    "float": frozenset({float}),
    "bool": frozenset({bool}),
    "number": frozenset({int, float, bool, complex}),
    "str": frozenset({str}),
    "ScalarType": frozenset({torch.dtype}),
    "MemoryFormat": frozenset({torch.memory_format}),
    "Device": frozenset({torch.device}),
    "Layout": frozenset({torch.layout}),
}

# What the Python functions call arguments of the schemas.
_OTHER_NAMES: Final = {"input": "self", "axis": "dim", "keepdims": "keepdim"}


class Form:
    """How calls of a function with arguments of certain types are put in a schema's terms.

    Attributes:
        op: the operator.
        parts: what runs its parts, where that is how it is served.
        result: the class of a tuple of results that have names.
    """

    __slots__ = ("as_it_is", "defaults", "named", "op", "packed", "parts", "places", "result")

    def __init__(self, op: TorchOperator, result: Any) -> None:
        self.op, self.result = op, result
        self.parts: Callable[..., Any] | None = None
        # Of the schema's arguments by position: where each is among those of the call, by position
        # first and then by name, or after them among the defaults; and what becomes of it.
        self.places: list[tuple[int, Convert | None]] = []
        self.defaults: list[Any] = []
        # Those by name: name, place, what becomes of it, default.
        self.named: list[tuple[str, int, Convert | None, Any]] = []
        # The first of the numbers that are one list together: ``x.repeat(2, 1)``.
        self.packed: int | None = None
        self.as_it_is = False

    def arguments(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]] | None:
        """A call's arguments as the schema has them; None for a call of another form."""
        if self.as_it_is:
            return args, kwargs
        if self.packed is not None:
            args = (*args[: self.packed], args[self.packed :])
        defaults = self.defaults
        given = (*args, *kwargs.values(), *defaults)
        found = []
        for place, convert in self.places:
            value = given[place]
            if convert is not None:
                value = convert(value)
                if value is None:
                    return None
            found.append(value)
        while found and _is_default(found[-1], defaults[len(found) - 1]):
            del found[-1]
        named = {}
        for name, place, convert, default in self.named:
            value = given[place]
            if convert is not None:
                value = convert(value)
                if value is None:
                    return None
            if not _is_default(value, default):
                named[name] = value
        return found, named


def _is_default(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)


def _ints(value: Sequence[Any]) -> list[int] | None:
    return list(value) if _INT.issuperset(map(type, value)) else None


def _tensors(value: Sequence[Any]) -> list[Any] | None:
    return list(value) if value and all(isinstance(x, torch.Tensor) for x in value) else None


def _repeated(times: int) -> Convert:
    return lambda number: [number] * times


class _NoForm(Exception):
    """A call that is not told by its types."""


def _conversion(argument: Any, kind: type) -> Convert | None:
    """What becomes of a value of a type as an argument of a schema."""
    text = str(argument.real_type)
    optional = text.startswith("Optional[")
    if optional:
        text = text[len("Optional[") : -1]
    if kind in _AS_THEY_ARE.get(text, ()) or (optional and kind is type(None)):
        return None
    if text == "Tensor" and issubclass(kind, torch.Tensor):
        return None
    if text == "float" and kind is int:
        return float
    if text == "List[int]" and kind is int and argument.N:
        return _repeated(argument.N)
    if text == "List[int]" and kind in _SEQUENCES:
        return _ints
    if text == "List[Tensor]" and kind in _SEQUENCES:
        return _tensors
    raise _NoForm


def _form_of(
    op: TorchOperator, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Form:
    """How a call of an operator by a Python function is put in the schema's terms, by types."""
    schema: Any = op.overload._schema
    form = Form(op, _result_class(schema))
    by_position = [a for a in schema.arguments if not a.kwarg_only]
    by_name = {a.name: a for a in schema.arguments if a.kwarg_only}
    kinds = list(map(type, args))
    last = by_position[-1] if by_position else None
    if len(args) >= len(by_position) > 1 and str(last.real_type) == "List[int]":  # type: ignore[union-attr]
        first = len(by_position) - 1
        if not last.N and _INT.issuperset(kinds[first:]):  # type: ignore[union-attr]
            form.packed = first
            kinds[first:] = [tuple]
    if len(kinds) > len(by_position):
        raise _NoForm
    known = {argument.name for argument in schema.arguments}
    place_of = {}
    for place, name in enumerate(kwargs, start=len(kinds)):
        if name not in known:
            name = _OTHER_NAMES.get(name, name)
        if name not in known or name in place_of:
            raise _NoForm
        place_of[name] = place
    kinds += map(type, kwargs.values())
    for i, argument in enumerate(by_position):
        if i < len(args) and argument.name in place_of:
            raise _NoForm
        form.defaults.append(_default_of(argument))
        place = i if i < len(kinds) - len(kwargs) else place_of.get(argument.name, len(kinds) + i)
        left_out = place >= len(kinds)
        form.places.append((place, None if left_out else _conversion(argument, kinds[place])))
    # What is left out in the end is no argument of a call.
    while form.places and form.places[-1][0] >= len(kinds):
        if form.defaults[len(form.places) - 1] is _NO_DEFAULT:
            raise _NoForm
        del form.places[-1]
    if any(form.defaults[p - len(kinds)] is _NO_DEFAULT for p, _ in form.places if p >= len(kinds)):
        raise _NoForm
    for name, argument in by_name.items():
        if name in place_of:
            place = place_of[name]
            convert = _conversion(argument, kinds[place])
            if "Tensor" in str(argument.real_type):
                raise _NoForm  # NOTE [batched keywords] in ``ops/keywords``
            form.named.append((name, place, convert, _default_of(argument)))
        elif not argument.has_default_value():
            raise _NoForm
    form.as_it_is = (
        not kwargs
        and form.packed is None
        and all(convert is None and place == i for i, (place, convert) in enumerate(form.places))
        and not any(
            type(default) is kind for default, kind in zip(form.defaults, kinds, strict=False)
        )
    )
    return form


def _default_of(argument: Any) -> Any:
    return argument.default_value if argument.has_default_value() else _NO_DEFAULT


def _result_class(schema: Any) -> Any:
    """What the Python function returns several results as. Types and numbers are not followed."""
    if not all(str(value.type) in ("Tensor", "List[Tensor]") for value in schema.returns):
        raise _NoForm
    names = [value.name for value in schema.returns]
    if len(names) < 2 or not all(names):
        return None
    found = getattr(torch.return_types, schema.name.partition("::")[2], None)
    if found is None:
        raise _NoForm
    return found


class _Told(Exception):
    """What a probe was given to."""


class _Probe(torch.Tensor):
    """A tensor that tells which operator it is given to."""

    __torch_function__ = _disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise _Told(func, args, kwargs or {})


def _probe(like: torch.Tensor) -> torch.Tensor:
    # Of any sizes: those of the tensor itself may be symbolic.
    probe: torch.Tensor = torch.Tensor._make_wrapper_subclass(
        _Probe, (2,) * like.dim(), dtype=like.dtype, device=like.device
    )
    return probe


def _replaced(value: Any, numbers: Any) -> Any:
    """An argument with probes for its tensors, and other numbers, if there are some to be taken."""
    if isinstance(value, torch.Tensor):
        return _probe(value)
    if type(value) in _SEQUENCES:
        return type(value)([_replaced(item, numbers) for item in value])
    if numbers is not None and type(value) in (int, float):
        return type(value)(next(numbers))
    return value


def _alike(mine: Any, told: Any) -> bool:
    if isinstance(told, torch.Tensor) or isinstance(mine, torch.Tensor):
        return mine is told
    if type(mine) is not type(told):
        return False
    if isinstance(told, list | tuple):
        return len(mine) == len(told) and all(map(_alike, mine, told))
    if isinstance(told, dict):
        return mine.keys() == told.keys() and all(_alike(mine[name], told[name]) for name in told)
    return bool(mine == told)


# Factories are given what torch.empty takes, whether it says something or not.
_SAYS_NOTHING: Final = {"dtype": None, "layout": None, "device": None, "pin_memory": False}


def _tell(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """The operator that a call arrives at, and with what."""
    try:
        with without_autograd(), without_factory_keys(), without_autocast():
            function(*args, **kwargs)
    except _Told as told:
        overload, args, kwargs = told.args
        said = {n: x for n, x in kwargs.items() if _SAYS_NOTHING.get(n, _NO_DEFAULT) is not x}
        return overload, args, said
    except Exception:
        raise _NoForm from None  # torch refuses it: an error of the user's, raised where it is made
    raise _NoForm


# Functions and methods that are written in C, and no slots such as ``__add__``.
_FUNCTIONS: Final = (type(torch.sin), type(torch.Tensor.add))


def has_forms(function: Any) -> bool:
    """Whether a function may be one that torch parses the arguments of an operator for."""
    return isinstance(function, _FUNCTIONS) and hasattr(torch.ops.aten, function.__name__)


def find_form(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Form | None:
    """The form of a call, None where there is none: NOTE [forms of calls].

    Nobody else is to see the call: no dispatch mode is active.
    """
    assert not in_dispatch_modes()
    form: Form | None = None
    try:
        for numbers in (None, itertools.count(1001)):
            given = [_replaced(arg, numbers) for arg in args]
            named = {name: _replaced(arg, numbers) for name, arg in kwargs.items()}
            overload, *told = _tell(function, given, named)
            op = operator_of(overload)
            if form is None:
                if op.overload._schema.name != f"aten::{function.__name__}":
                    return None
                form = _form_of(op, function, given, named)
            if form.op is not op:
                return None
            mine = form.arguments(given, named)
            if mine is None or not _alike(tuple(mine[0]), told[0]) or not _alike(mine[1], told[1]):
                return None
    except _NoForm:
        return None
    return form
