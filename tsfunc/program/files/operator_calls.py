"""Calls of operators in files, checked against their schemas, and the types of nodes.

A program of a file runs torch's operators, so each call is checked before it is accepted: the
operator exists, it has these arguments, and their types match the schema. The check does not call
the operator.
"""

from __future__ import annotations

import functools
import json
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx

from tsfunc.bridge.sizes.expressions import (
    FUNCTIONS_OF_MATH,
    OPERATORS,
    RECORDED_FUNCTIONS,
    form_of_size,
    is_small,
    size_of_form,
)
from tsfunc.bridge.sizes.fake_mode import new_fake_input
from tsfunc.bridge.sizes.symbols import Symbols
from tsfunc.bridge.tracers.operators import TorchOperator, operator_of
from tsfunc.bridge.tracers.schemas import operator_signature
from tsfunc.ops.catalogue.signature import OperatorSignature
from tsfunc.program.fields import LONGEST_INT, Field
from tsfunc.program.files.json_values import ValueReader, printable_text
from tsfunc.program.graphs.properties import Properties, properties_of_node
from tsfunc.types.values import plain_name

# --- operators of a file: looked up by name, with their arguments checked against their schemas


# The types of values in a graph: a tensor, a number, or a list or tuple of the types of items.
TENSOR, NUMBER, NOTHING = "tensor", "number", "nothing"
ValueType = Any

_NAME = re.compile(r"\w{1,80}::\w{1,120}(?:\.\w{1,80})?", re.ASCII)
# These read or write files, communicate with other processes, or call functions of this process.
_REACH_OUT = re.compile(r"aten::from_file|debugprims::|c10d::|symm_mem::|profiler::|tsfunc_debug::")

# The functions that a program calls besides operators: arithmetic on sizes. ``getitem`` is apart.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{
        name: getattr(operator, name)
        for name in (
            "add", "sub", "mul", "floordiv", "mod", "pow", "truediv", "neg", "pos", "abs",
            "eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "not_", "xor", "invert",
            "lshift", "rshift",
        )
    },
    **{name: getattr(math, name) for name in ("trunc", "ceil", "floor")},
    **FUNCTIONS_OF_MATH,
    **{function.__name__: function for function in RECORDED_FUNCTIONS.values()},
    **{
        name: getattr(torch, name)
        for name in ("sym_max", "sym_min", "sym_float", "sym_int", "sym_ite", "sym_not")
    },
    "int": int, "float": float, "bool": bool, "min": min, "max": max, "round": round,
    "Size": torch.Size,
}  # fmt: skip
NAMES_OF_FUNCTIONS = {function: name for name, function in FUNCTIONS.items()}


@functools.cache
def _signature(name: str) -> OperatorSignature | None:
    return (
        operator_signature(name) if _NAME.fullmatch(name) and not _REACH_OUT.match(name) else None
    )


def operator_named(field: Field, made_with: str) -> tuple[TorchOperator, OperatorSignature]:
    """Return the operator of a name, and its schema."""
    name = field.text()
    signature = _signature(name)
    if signature is None:
        space = name.partition("::")[0][:40]
        field.fail(
            f"there is no operator {name[:80]!r} for a program here: torch is "
            f"{torch.__version__}, the file was made with {made_with}. If it is one of your own, "
            f"import the module that registers it ({space}) before loading"
        )
    overload: Any = signature.call
    return operator_of(overload), signature


def function_named(field: Field) -> Callable[..., Any]:
    """Return the Python function on numbers of a name."""
    return field.one_of(FUNCTIONS, "a function on sizes")


def type_of_results(signature: OperatorSignature) -> ValueType:
    types = [_type_of(type_) for type_ in signature.returns]
    if not types:
        return NOTHING
    return types[0] if len(types) == 1 else tuple(types)


def _type_of(type_: str) -> ValueType:
    if type_.endswith("[]"):
        return [_type_of(type_[:-2])]
    return TENSOR if type_.rstrip("?") == "Tensor" else NUMBER


def type_of_item(of: ValueType, index: int) -> ValueType | None:
    """Return the type of an item of several values; None if the index is out of range."""
    if isinstance(of, list):
        return of[0] if index >= 0 else None
    return of[index] if isinstance(of, tuple) and 0 <= index < len(of) else None


def misfit(
    signature: OperatorSignature,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    type_of: Callable[[torch.fx.Node], ValueType],
) -> str | None:
    """Return the mismatch between a call and an operator's schema; None if they match."""
    try:
        arguments = {argument.name: value for argument, value in signature.bind(args, kwargs)}
    except TypeError as error:
        return str(error)
    for argument in signature.arguments:
        if argument.name not in arguments:
            if argument.required:
                return f"{signature.name}: expected an argument {argument.name}, got none"
            continue
        value = arguments[argument.name]
        single = argument.count and argument.type.rstrip("?").endswith("[]")
        if single and not isinstance(value, list | tuple) and value is not None:
            value = [value]
        if not _fits(value, argument.type, type_of):
            expected = f"{argument.name} of type {argument.type}"
            return f"{signature.name}: expected {expected}, got {value!r:.60}"
    return None


def _fits(value: Any, type_: str, type_of: Callable[[torch.fx.Node], ValueType]) -> bool:
    if type_.endswith("?"):
        return value is None or _fits(value, type_[:-1], type_of)
    if type_.endswith("[]"):
        if isinstance(value, torch.fx.Node):
            type_of_value = type_of(value)
            inner = TENSOR if type_.rstrip("?[]") == "Tensor" else NUMBER
            return (
                bool(type_of_value)
                and isinstance(type_of_value, list | tuple)
                and all(k == inner for k in type_of_value)
            )
        return isinstance(value, list | tuple) and all(
            _fits(item, type_[:-2], type_of) for item in value
        )
    if isinstance(value, torch.fx.Node):
        type_of_value = type_of(value)
        return type_ in _KINDS_OF[type_of_value] if isinstance(type_of_value, str) else False
    if type_ in ("int", "SymInt"):
        return type(value) in (int, bool) and -LONGEST_INT <= value < LONGEST_INT
    allowed = _PYTHON.get(type_)
    return allowed is not None and type(value) in allowed


_NUMBERS = (int, float, bool, complex)
_PYTHON: dict[str, tuple[type, ...]] = {
    "Tensor": _NUMBERS,  # torch converts a number to a tensor
    "number": _NUMBERS,
    "Scalar": _NUMBERS,
    "complex": _NUMBERS,
    "float": (int, float, bool),
    "SymFloat": (int, float, bool),
    "bool": (bool,),
    "SymBool": (bool,),
    "str": (str,),
    "ScalarType": (torch.dtype,),
    "Layout": (torch.layout,),
    "MemoryFormat": (torch.memory_format,),
    "Device": (torch.device,),
    "Generator": (torch.Generator,),
}
_KINDS_OF: dict[str, frozenset[str]] = {
    TENSOR: frozenset({"Tensor"}),
    NUMBER: frozenset(
        "Tensor number Scalar complex float SymFloat int SymInt bool SymBool".split()
    ),
    NOTHING: frozenset(),
}


# --- types of the tensors in a graph, as JSON and back: dtypes, sizes, strides, devices


_MOST_PARTS = 1000  # the maximum number of operators and operands of one size


def encode_type(value: torch.Tensor, names: Mapping[Any, Any]) -> Any | None:
    """Return a fake tensor as JSON; None if its sizes are not expressions of named dims."""
    if value.layout is not torch.strided:
        return None
    shape = [form_of_size(size, names) for size in value.shape]
    strides = [form_of_size(step, names) for step in value.stride()]
    if None in shape or None in strides:
        return None
    return {
        "dtype": plain_name(value.dtype),
        "shape": shape,
        "strides": strides,
        "device": str(value.device),
    }


_KINDS_OF_NUMBERS = {"int": int, "float": float}


def encode_display_meta(node: torch.fx.Node) -> Any | None:
    """Return the displayed properties of a value as JSON, if ``encode_type`` can't write it."""
    properties = properties_of_node(node)
    if properties is None:
        return None
    if isinstance(properties.dtype, type):
        return {
            "number": properties.dtype.__name__,
            "text": printable_text(properties.expression or ""),
        }
    if properties.layout is not torch.strided:
        return None
    return {
        "dtype": plain_name(properties.dtype),
        "shape": [dim if isinstance(dim, int) else printable_text(dim) for dim in properties.shape],
        "device": str(properties.device),
    }


class NodeTypes:
    """Reads types, and sets the fake tensors of nodes from them.

    Args:
        symbols: has the named dims.
    """

    def __init__(self, symbols: Symbols, values: ValueReader) -> None:
        self._symbols = symbols
        self._named = {**symbols.sizes, **symbols.numbers}
        self._values = values
        self._sizes: dict[str, Any] = {}
        self._types: dict[str, torch.Tensor] = {}

    def read(self, field: Field, node: torch.fx.Node) -> None:
        """Set the type of a node; nodes of the same type share a fake tensor.

        Each input has its own fake tensor, so that the graph can be called with them.
        """
        key = json.dumps(field.value)
        if node.op == "placeholder" or key not in self._types:
            self._types[key] = self._tensor(field)
        node.meta["val"] = self._types[key]
        node.meta["dims"] = tuple(map(self._symbols.spell_size, self._types[key].shape))

    def _tensor(self, field: Field) -> torch.Tensor:
        """Return a fake tensor of a type."""
        dtype, shape_field, stride_field, device = field.record(
            "dtype", "shape", "strides", "device"
        )
        shape = [self._size(size) for size in shape_field.items()]
        strides = [self._size(step) for step in stride_field.items(len(shape))]
        try:
            return new_fake_input(
                self._symbols.fake,
                shape,
                strides,
                self._values.dtype(dtype),
                self._values.device(device),
            )
        except (RuntimeError, OverflowError, ValueError, TypeError) as error:
            field.fail(f"there is no such tensor: {str(error).splitlines()[0]}")

    def read_display_meta(self, field: Field, node: torch.fx.Node) -> None:
        """Set the properties that ``encode_display_meta`` wrote on a node, for display."""
        if field.get("number") is not None:
            number, text = field.record("number", "text")
            kind = number.one_of(_KINDS_OF_NUMBERS, "int or float")
            node.meta["display_meta"] = Properties(kind, expression=text.line())
            return
        dtype, shape, device = field.record("dtype", "shape", "device")
        dims = [
            dim.integer(0) if isinstance(dim.value, int) else dim.line() for dim in shape.items()
        ]
        node.meta["display_meta"] = Properties(
            self._values.dtype(dtype), tuple(dims), self._values.device(device), torch.strided
        )

    def read_number(self, field: Field, node: torch.fx.Node) -> None:
        """Set the size of a node that is a number."""
        size = self._size(field)
        node.meta["number"] = size
        node.meta["expr"] = self._symbols.spell_size(size)

    def _size(self, field: Field) -> Any:
        if type(field.value) is int:
            return field.integer(0)
        key = json.dumps(field.value)
        if key not in self._sizes:
            self._count(field, _MOST_PARTS)
            if not is_small(field.value):
                field.fail("the size is too long")
            try:
                self._sizes[key] = size_of_form(field.value, self._named)
            except (ValueError, TypeError, ZeroDivisionError, OverflowError) as error:
                field.fail(f"not a size: {error}")
        return self._sizes[key]

    def _count(self, field: Field, left: int) -> int:
        """Check the parts of a size; return the number of parts that are still allowed."""
        if type(field.value) is list:
            for part in field.items():
                left = self._count(part, left)
        elif type(field.value) is int:
            field.integer()
        elif type(field.value) is not str or (
            field.value not in OPERATORS and field.value not in self._named
        ):
            field.fail_expected("a size")
        if left <= 0:
            field.fail("the size is too long")
        return left - 1
