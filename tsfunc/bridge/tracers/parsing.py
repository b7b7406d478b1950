"""Maps a call of a torch function to the overload and arguments that C++ would dispatch.

``torch.roll(x, 1, -1)`` is a call of ``aten::roll`` with ``(x, [1], [-1])``, as torch's parsers
determine in C++. This module determines the operator and its arguments once for the types of a
call's arguments, and keeps both as a :class:`Form`: later calls of that form are converted to the
schema's arguments without C++.

NOTE [forms of calls]
The types of the arguments, and of the items in their lists, determine the overload. A call of the
function on *probes*, tensors that only report the operator they reach, finds it. The schema and
the type of an argument determine its conversion: a number is passed as it is, a number in place of
a list of numbers is repeated, a tuple becomes a list, and trailing arguments that equal the
schema's defaults are omitted. A form is kept only if it reproduces the arguments of the probes,
for the call itself and for a call with other, distinct numbers. Calls that types do not determine
(symbolic numbers, names of dims) have no form.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch._C import _disabled_torch_function_impl

from tsfunc.bridge.tracers.operators import C_FUNCTIONS, TorchOperator, operator_of
from tsfunc.bridge.tracers.registrations import register_dispatch_handler
from tsfunc.bridge.tracers.torch_state import (
    exclude_autocast_keys,
    in_dispatch_modes,
    without_autograd,
    without_factory_keys,
)
from tsfunc.bridge.tracers.tracer import NO_KWARGS
from tsfunc.ops.registry import Args, Kwargs

Convert = Callable[[Any], Any]  # returns None if the value does not fit the form

_NO_DEFAULT: Final = object()
_SEQUENCES: Final = frozenset({list, tuple, torch.Size})
_INT: Final = frozenset({int})

# The types of Python values that C++ takes unchanged, by the schema's types.
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

# The Python functions' names for arguments of the schemas.
_OTHER_NAMES: Final = {"input": "self", "axis": "dim", "keepdims": "keepdim"}


class Form:
    """The conversion of a function's calls with certain argument types to a schema's arguments.

    Attributes:
        result: the class of a named tuple of results.
        places: for each argument of the schema, the position of its value among the call's
            arguments and the values of its keyword arguments, or -1 for the default.
    """

    __slots__ = ("as_it_is", "defaults", "named", "op", "packed", "places", "positions", "result")

    def __init__(self, op: TorchOperator, result: Any) -> None:
        self.op, self.result = op, result
        # For each positional argument of the schema: its position in the call's positional
        # arguments, keyword arguments and defaults, in this order; and its conversion.
        self.positions: list[tuple[int, Convert | None]] = []
        self.defaults: list[Any] = []
        # The keyword arguments: name, position, conversion, default.
        self.named: list[tuple[str, int, Convert | None, Any]] = []
        # The first of several numbers that form one list: ``x.repeat(2, 1)``.
        self.packed: int | None = None
        self.places: tuple[int, ...] = ()
        self.as_it_is = False

    def arguments(
        self, args: Args, kwargs: Kwargs
    ) -> tuple[Sequence[Any], Mapping[str, Any]] | None:
        """Return a call's arguments in the schema's order; None if the call has another form."""
        if self.as_it_is:
            return args, kwargs
        if self.packed is not None:
            args = (*args[: self.packed], args[self.packed :])
        return self.arguments_in((*args, *kwargs.values()))

    def arguments_in(self, values: Sequence[Any]) -> tuple[list[Any], Mapping[str, Any]] | None:
        """Return packed arguments, followed by those of keywords, in the schema's order.

        The arguments may be the values inside of tracers. None if the call has another form.
        """
        defaults = self.defaults
        values = (*values, *defaults)
        positional = []
        for position, convert in self.positions:
            value = values[position]
            if convert is not None:
                value = convert(value)
                if value is None:
                    return None
            positional.append(value)
        last = len(positional) - 1
        while last >= 0 and type(value := positional[last]) is type(defaults[last]):
            if value != defaults[last]:
                break
            del positional[last]
            last -= 1
        if not self.named:
            return positional, NO_KWARGS
        named = {}
        for name, position, convert, default in self.named:
            value = values[position]
            if convert is not None:
                value = convert(value)
                if value is None:
                    return None
            if type(value) is not type(default) or value != default:
                named[name] = value
        return positional, named

    def result_of(self, out: Any) -> Any:
        """Return several results in the function's class: a named tuple, or a tuple."""
        if self.result is not None:
            return self.result(out)
        return tuple(out) if type(out) is list else out

    def bdims_in_order(self, bdims: Sequence[Any], count: int) -> list[Any]:
        """Return the batch dims of a call's arguments in the schema's order."""
        if self.as_it_is:
            return list(bdims)
        packed = self.packed
        if packed is not None:
            bdims = [*bdims[:packed], None, *bdims[count:]]
        return [
            bdims[position] if position < len(bdims) else None for position, _ in self.positions
        ]


def _ints(value: Sequence[Any]) -> list[int] | None:
    return list(value) if _INT.issuperset(map(type, value)) else None


def _tensors_of_argument(value: Sequence[Any]) -> list[Any] | None:
    return list(value) if value and all(isinstance(x, torch.Tensor) for x in value) else None


def _repeated(times: int) -> Convert:
    return lambda number: [number] * times


class _NoForm(Exception):
    """The types of a call do not determine its form."""


def _conversion(argument: Any, kind: type) -> Convert | None:
    """Return the conversion of a value of a type for an argument of a schema."""
    text = str(argument.real_type)
    optional = text.startswith("Optional[")
    if optional:
        text = text[len("Optional[") : -1]
    if kind in _AS_THEY_ARE.get(text, ()) or (optional and kind is type(None)):
        return None
    if text == "Tensor" and (issubclass(kind, torch.Tensor) or kind in _AS_THEY_ARE["number"]):
        return None
    if text == "float" and kind is int:
        return float
    if text == "List[int]" and kind is int and argument.N:
        return _repeated(argument.N)
    if text == "List[int]" and kind in _SEQUENCES:
        return _ints
    if text == "List[Tensor]" and kind in _SEQUENCES:
        return _tensors_of_argument
    raise _NoForm


def _positions_of_keywords(schema: Any, names: Iterable[str], start: int) -> dict[str, int]:
    """Return the position of each keyword after the other arguments, by the schema's name."""
    argument_names = {argument.name for argument in schema.arguments}
    position_of: dict[str, int] = {}
    for position, name in enumerate(names, start):
        if name not in argument_names:
            name = _OTHER_NAMES.get(name, name)
        if name not in argument_names or name in position_of:
            raise _NoForm
        position_of[name] = position
    return position_of


def _add_keyword_only(
    form: Form, schema: Any, position_of: Mapping[str, int], kinds: Sequence[Any]
) -> None:
    """Add the conversions of a schema's keyword-only arguments to a form."""
    for argument in schema.arguments:
        if not argument.kwarg_only:
            continue
        position = position_of.get(argument.name)
        if position is not None:
            convert = _conversion(argument, kinds[position])
            if "Tensor" in str(argument.real_type):
                raise _NoForm  # NOTE [batched keywords] in ``ops/keywords``
            form.named.append((argument.name, position, convert, _default_of(argument)))
        elif not argument.has_default_value():
            raise _NoForm


def _form_of(op: TorchOperator, args: Args, kwargs: Kwargs) -> Form:
    """Return the conversion of a call to an operator's schema, by the types of its arguments."""
    schema: Any = op.overload._schema
    form = Form(op, _result_class(schema))
    by_position = [a for a in schema.arguments if not a.kwarg_only]
    kinds = list(map(type, args))
    last = by_position[-1] if by_position else None
    if len(args) >= len(by_position) > 1 and str(last.real_type) == "List[int]":  # type: ignore[union-attr]
        first = len(by_position) - 1
        if not last.N and _INT.issuperset(kinds[first:]):  # type: ignore[union-attr]
            form.packed = first
            kinds[first:] = [tuple]
    if len(kinds) > len(by_position):
        raise _NoForm
    position_of = _positions_of_keywords(schema, kwargs, len(kinds))
    kinds += map(type, kwargs.values())
    for i, argument in enumerate(by_position):
        if i < len(args) and argument.name in position_of:
            raise _NoForm
        form.defaults.append(_default_of(argument))
        position = (
            i if i < len(kinds) - len(kwargs) else position_of.get(argument.name, len(kinds) + i)
        )
        left_out = position >= len(kinds)
        form.positions.append(
            (position, None if left_out else _conversion(argument, kinds[position]))
        )
    # Omitted trailing arguments are not part of a call.
    while form.positions and form.positions[-1][0] >= len(kinds):
        if form.defaults[len(form.positions) - 1] is _NO_DEFAULT:
            raise _NoForm
        del form.positions[-1]
    if any(
        form.defaults[p - len(kinds)] is _NO_DEFAULT for p, _ in form.positions if p >= len(kinds)
    ):
        raise _NoForm
    _add_keyword_only(form, schema, position_of, kinds)
    place_of = {name: place for name, place, *_ in form.named}
    for argument, (place, _) in zip(by_position, form.positions, strict=False):
        if place < len(kinds):
            place_of[argument.name] = place
    form.places = tuple(place_of.get(argument.name, -1) for argument in schema.arguments)
    form.as_it_is = (
        not kwargs
        and form.packed is None
        and all(
            convert is None and position == i
            for i, (position, convert) in enumerate(form.positions)
        )
        and not any(
            type(default) is kind for default, kind in zip(form.defaults, kinds, strict=False)
        )
    )
    return form


def _default_of(argument: Any) -> Any:
    return argument.default_value if argument.has_default_value() else _NO_DEFAULT


def _result_class(schema: Any) -> Any:
    """Return the named tuple class of several results; other result types raise _NoForm."""
    if not all(str(value.type) in ("Tensor", "List[Tensor]") for value in schema.returns):
        raise _NoForm
    names = [value.name for value in schema.returns]
    if len(names) < 2 or not all(names):
        return None
    cls = getattr(torch.return_types, schema.name.partition("::")[2], None)
    if cls is None:
        raise _NoForm
    return cls


class _DispatchedCall(Exception):
    """Carries the operator and arguments of a call that reached a probe."""


class _Probe(torch.Tensor):
    """A tensor whose operators raise, with the call that was dispatched."""

    __torch_function__ = _disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise _DispatchedCall(func, args, kwargs or {})


@functools.cache
def _prepare_probes(name: str) -> None:
    """Register the dispatch handler of probes for a function's operators, once."""
    packet = getattr(torch.ops.aten, name)
    overloads = [getattr(packet, other) for other in packet.overloads()]
    handler = vars(_Probe)["__torch_dispatch__"].__func__
    register_dispatch_handler(_Probe, handler, [overload.name() for overload in overloads])


def _probe(like: torch.Tensor) -> torch.Tensor:
    # With arbitrary sizes, because those of the tensor itself may be symbolic.
    return torch.Tensor._make_wrapper_subclass(
        _Probe, (2,) * like.dim(), dtype=like.dtype, device=like.device
    )


def _replace_values(value: Any, numbers: Any) -> Any:
    """Replace the tensors of an argument by probes, and its numbers by other numbers if given."""
    if isinstance(value, torch.Tensor):
        return _probe(value)
    if type(value) in _SEQUENCES:
        return type(value)([_replace_values(item, numbers) for item in value])
    if numbers is not None and type(value) in (int, float):
        return type(value)(next(numbers))
    return value


def _same_argument(passed: Any, dispatched: Any) -> bool:
    if isinstance(dispatched, torch.Tensor) or isinstance(passed, torch.Tensor):
        return passed is dispatched
    if type(passed) is not type(dispatched):
        return False
    if isinstance(dispatched, list | tuple):
        return len(passed) == len(dispatched) and all(map(_same_argument, passed, dispatched))
    if isinstance(dispatched, dict):
        return passed.keys() == dispatched.keys() and all(
            _same_argument(passed[name], dispatched[name]) for name in dispatched
        )
    return bool(passed == dispatched)


# Factories get these arguments of torch.empty even if they are not set.
_UNSET: Final = {"dtype": None, "layout": None, "device": None, "pin_memory": False}


def _dispatched_call(function: Any, args: Args, kwargs: Kwargs) -> tuple[Any, Any, Any]:
    """Return the operator and the arguments that a call dispatches."""
    try:
        with without_autograd(), without_factory_keys(), exclude_autocast_keys():
            function(*args, **kwargs)
    except _DispatchedCall as dispatched:
        overload, args, kwargs = dispatched.args
        keywords = {n: x for n, x in kwargs.items() if _UNSET.get(n, _NO_DEFAULT) is not x}
        return overload, args, keywords
    except Exception:
        raise _NoForm from None  # torch refuses the call; the real call raises the user's error
    raise _NoForm


def has_forms(function: Any) -> bool:
    """True if torch may parse the arguments of an operator for a function."""
    if not isinstance(function, C_FUNCTIONS):
        return False
    # Every object has __eq__: that of the namespace has no overloads.
    return hasattr(getattr(torch.ops.aten, function.__name__, None), "overloads")


def find_form(function: Any, args: Args, kwargs: Kwargs) -> Form | None:
    """Return the form of a call, None for a call without a form: NOTE [forms of calls].

    No dispatch mode may be active, because a mode would see the probes.
    """
    assert not in_dispatch_modes()
    _prepare_probes(function.__name__)
    form: Form | None = None
    try:
        for numbers in (None, itertools.count(1001)):
            probes = [_replace_values(arg, numbers) for arg in args]
            named = {name: _replace_values(arg, numbers) for name, arg in kwargs.items()}
            overload, *dispatched = _dispatched_call(function, probes, named)
            op = operator_of(overload)
            if form is None:
                if op.overload._schema.name != f"aten::{function.__name__}":
                    return None
                form = _form_of(op, probes, named)
            if form.op is not op:
                return None
            parsed = form.arguments(probes, named)
            if parsed is None:
                return None
            if not all(map(_same_argument, (tuple(parsed[0]), parsed[1]), dispatched)):
                return None
    except _NoForm:
        return None
    return form
