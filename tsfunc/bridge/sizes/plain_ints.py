"""Symbolic ints where torch's Python functions ask for the number: plain ints of schemas.

NOTE [plain ints]
Some operators take an int of which torch does not expect that a trace may not know it: the steps of
``linspace``, the offset of ``diagonal``, the classes of ``one_hot``. The parser of arguments asks a
symbolic int for its number there, which ties the program to it. So the operator is called past the
parser, and what the result looks like is found out as NOTE [questions of operators] in
``fake_results`` says. Where that can't be done (``x.sum(k)`` of dims of several sizes), the parser
is asked after all. ``torch.tensor`` has no schema, and becomes ``torch.full``.

Private names used here (torch 2.11 to 2.13): the kind of an argument's ``real_type`` in an
overload's ``_schema`` tells ``int`` and ``SymInt`` apart; ``SymInt.node.hint`` is the number of the
call; ``torch.return_types`` has the tuples with names that functions of several results return.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from tsfunc.bridge.tracers.operators import operator_of, overload_for
from tsfunc.bridge.tracers.tracer import MARKED, TracerLevel, innermost_level
from tsfunc.dispatch import current_levels

_NUMBERS = torch.SymInt | torch.SymFloat | torch.SymBool
_LISTS = (list, tuple, torch.Size)


def has_symbols(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether there is a symbolic number among arguments, or in a list of them."""
    return _any(args) or (bool(kwargs) and _any(kwargs.values()))


def _any(values: Any) -> bool:
    return any(
        isinstance(value, _NUMBERS) or (type(value) in _LISTS and _any(value)) for value in values
    )


def past_the_parser(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """A call with symbolic numbers: NOTE [plain ints]; NotImplemented where it is as any call."""
    if func in (torch.tensor, torch.as_tensor):
        return _tensor(*args, **kwargs) if kwargs.keys() <= {"dtype", "device"} else NotImplemented
    packet = func if isinstance(func, OpOverloadPacket) else _packet(func)
    if packet is None:
        return NotImplemented
    overload = overload_for(packet, _hinted(args), {k: _hinted([v])[0] for k, v in kwargs.items()})
    if overload is None:
        return NotImplemented
    if packet is not func and not _takes_plain_int(overload, args, kwargs):
        return NotImplemented
    try:
        return _called(overload, _as_lists(args), {k: _as_lists([v])[0] for k, v in kwargs.items()})
    except Exception:  # the parser's way says what is wrong, if anything is
        return NotImplemented


def _called(overload: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    op = operator_of(overload)
    level = innermost_level((*args, *kwargs.values()))
    if level is not None and (level.autograd or _any_marked((*args, *kwargs.values()))):
        return NotImplemented  # autograd, and what sees calls of marked tracers, is on the way
    if level is not None:
        out = op.call(tuple(args), kwargs, True)
        made = getattr(torch.return_types, overload._schema.name.removeprefix("aten::"), None)
        return out if made is None else made(out)
    name = overload._schema.name.removeprefix("aten::")
    for each in reversed(current_levels()):
        if isinstance(each, TracerLevel) and each.sees_factory(name, op.random):
            return op.run_at(each, tuple(args), kwargs)
    return NotImplemented


def _as_lists(values: Sequence[Any]) -> list[Any]:
    """Arguments as the parser passes them on, where a shape is a list of sizes."""
    return [list(value) if isinstance(value, torch.Size) else value for value in values]


def _any_marked(values: Sequence[Any]) -> bool:
    items = (x for value in values for x in (value if type(value) in (list, tuple) else (value,)))
    return any(type(x) in MARKED for x in items)


@functools.cache
def _packet(func: Callable[..., Any]) -> OpOverloadPacket | None:
    """The operator that a function of torch's is, as its name says."""
    owner = getattr(func, "__module__", None) or getattr(func, "__objclass__", None)
    if type(func) not in _C_FUNCTIONS or owner is None:
        return None
    found = getattr(torch.ops.aten, func.__name__, None)
    return found if isinstance(found, OpOverloadPacket) else None


# Functions of torch's that are written in C++, methods among them.
_C_FUNCTIONS = (type(torch.sin), type(torch.Tensor.add))


def _hinted(values: Sequence[Any]) -> list[Any]:
    """Arguments with the numbers of the call for symbolic ones; for those of data others stand."""
    return [
        type(value)(_hinted(value)) if type(value) in _LISTS
        else _hint(value) if isinstance(value, _NUMBERS)
        else value
        for value in values
    ]  # fmt: skip


def _hint(value: Any) -> Any:
    hint = value.node.hint
    return _STANDS_FOR_DATA[type(value)] if hint is None else hint


_STANDS_FOR_DATA = {torch.SymInt: 2, torch.SymFloat: 2.0, torch.SymBool: True}


def _takes_plain_int(overload: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a symbolic int is given for an argument that is a plain one."""
    return any(
        _any([args[i] if i < len(args) else kwargs.get(name)]) for i, name in _plain_ints(overload)
    )


@functools.cache
def _plain_ints(overload: OpOverload) -> Sequence[tuple[int, str]]:
    """The arguments that are ints, or lists of ints, and for which a symbolic one is none."""
    found = []
    for i, argument in enumerate(overload._schema.arguments):
        kind = argument.real_type
        while kind.kind() in ("OptionalType", "ListType"):
            kind = kind.getElementType()
        if kind.kind() == "IntType":
            found.append((i, argument.name))
    return found


def _tensor(data: Any, dtype: torch.dtype | None = None, device: Any = None) -> Any:
    """``torch.tensor`` of symbolic numbers, or of lists of them."""
    if type(data) in _LISTS:
        if dtype is None and _has_floats(data):
            dtype = torch.get_default_dtype()
        parts = [_tensor(part, dtype, device) for part in data]
        return NotImplemented if NotImplemented in parts else torch.stack(parts)
    if dtype is None:
        if not isinstance(data, bool | int | float | _NUMBERS):
            return NotImplemented
        dtype = _dtype_of(data)
    return torch.full((), data, dtype=dtype, device=device)


def _dtype_of(number: Any) -> torch.dtype:
    """The type that ``torch.tensor`` gives a number."""
    if isinstance(number, bool | torch.SymBool):
        return torch.bool
    return torch.get_default_dtype() if _has_floats([number]) else torch.int64


def _has_floats(values: Sequence[Any]) -> bool:
    return any(
        _has_floats(value) if type(value) in _LISTS
        else isinstance(value, float | torch.SymFloat)
        for value in values
    )  # fmt: skip
