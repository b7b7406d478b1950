"""Checks: a descriptor compiled to a function that reports the mismatches of a value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tsfunc.types.check_context import Check, CheckContext, Failure, Path, place_text
from tsfunc.types.classes import primitive_of
from tsfunc.types.conformance import mismatches
from tsfunc.types.container_checks import (
    dict_check,
    fields_check,
    named_check,
    nested_check,
    one_of_check,
    sequence_check,
)
from tsfunc.types.descriptors import PYTHON_CLASSES
from tsfunc.types.dims import Dim
from tsfunc.types.grammar import (
    NONE,
    Descriptor,
    TSBuiltinClass,
    TSCustomClass,
    TSDict,
    TSEnum,
    TSFields,
    TSFuture,
    TSList,
    TSMetaType,
    TSModuleInterface,
    TSNamedTuple,
    TSOptional,
    TSPrimitiveType,
    TSPytree,
    TSRRef,
    TSTensor,
    TSTuple,
    TSTupleOf,
    TSType,
    TSUnion,
    Value,
    alternatives_of,
    assert_never,
)
from tsfunc.types.meta import MetaTensorType
from tsfunc.types.tensor_checks import tensor_check
from tsfunc.types.values import describe, same_value


def compile_check(descriptor: Descriptor, dims: Mapping[str, Dim]) -> Check | None:
    """Return the check of a descriptor; None if all values fit. `dims` has all bounds of names."""
    match descriptor:
        case TSTensor(cls, meta):
            if cls is torch.Tensor:
                return tensor_check(meta, dims)
            only_class = meta == MetaTensorType()
            return (
                _class_check(cls)
                if only_class
                else _both(_class_check(cls), tensor_check(meta, dims))
            )
        case TSMetaType():
            return None
        case TSPrimitiveType("None"):
            return _value_check(None)
        case TSPrimitiveType(name):
            return _class_check(PYTHON_CLASSES[name])
        case TSBuiltinClass(cls) | TSCustomClass(cls) | TSEnum(cls):
            return _class_check(cls)
        case TSFuture() | TSRRef() | TSModuleInterface():
            return _type_check(descriptor)
        case Value(value):
            return _value_check(value)
        case TSList(element):
            return sequence_check(list, compile_check(element, dims))
        case TSTupleOf(element):
            return sequence_check(tuple, compile_check(element, dims))
        case TSDict(key, item):
            return dict_check(compile_check(key, dims), compile_check(item, dims))
        case TSUnion() | TSOptional():
            rest = [each for each in alternatives_of(descriptor) if each != NONE]
            return one_of_check(descriptor, [compile_check(each, dims) for each in rest])
        case TSTuple(children):
            return nested_check(tuple, dict(enumerate(compile_check(x, dims) for x in children)))
        case TSPytree(kind, entries, children):
            checks = [compile_check(child, dims) for child in children]
            return nested_check(kind, dict(zip(entries, checks, strict=True)))
        case TSNamedTuple(names, children):
            checks = [compile_check(child, dims) for child in children]
            return named_check(names, checks)
        case TSFields(cls, names, children):
            checks = [compile_check(child, dims) for child in children]
            fields = fields_check(cls, dict(zip(names, checks, strict=True)))
            return _both(_class_check(cls), fields)
        case _:
            assert_never(descriptor)


def _both(first: Check, second: Check) -> Check:
    """Return a check that runs the second only if the first passes."""

    def check(value: Any, path: Path, context: CheckContext) -> None:
        before = len(context.failures)
        first(value, path, context)
        if len(context.failures) == before:
            second(value, path, context)

    return check


# --- classes and values


def _class_check(cls: type) -> Check:
    def check(value: Any, path: Path, context: CheckContext) -> None:
        # In Python a bool and the members of some enums are ints; in the language they are not.
        derived = cls in _NUMBERS and type(value) is not cls
        if not isinstance(value, cls) or (derived and str(primitive_of(value)) != cls.__name__):
            context.fail(path, "", f"expected {cls.__name__}, got {describe(value)}")

    return check


_NUMBERS = (int, float, str)


def _type_check(type_: TSType) -> Check:
    def check(value: Any, path: Path, context: CheckContext) -> None:
        for found in mismatches([(place_text(path, context.arguments), value, type_)]):
            deeper = found.path != place_text(path, context.arguments)
            line = f"{found.path}: expected {found.expected}, got {found.got}"
            context.failures.append(Failure((len(path), deeper), line))

    return check


def _value_check(expected: object) -> Check:
    def check(value: Any, path: Path, context: CheckContext) -> None:
        if value is not expected and not same_value(expected, value):
            context.fail(path, "", f"expected the value {describe(expected)}, got {_other(value)}")

    def _other(value: object) -> str:
        same_text = describe(value) == describe(expected)
        return f"another {describe(value)}" if same_text else describe(value)

    return check
