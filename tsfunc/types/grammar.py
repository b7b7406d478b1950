"""The types of the language.

The grammar is that of the TorchScript type system proposal, with one class for each of its rules,
and additional types for descriptors of a call::

    TSAllType        = TSType | TSInstanceClass
    TSType           = TSMetaType | TSPrimitiveType | TSStructuralType | TSNominalType | TSCallType
    TSStructuralType = TSTuple | TSNamedTuple | TSList | TSDict | TSOptional | TSFuture | TSRRef
    TSNominalType    = TSBuiltinClass | TSTensor | TSCustomClass | TSEnum | TSModuleInterface
    TSCallType       = Value | TSUnion | TSTupleOf | TSPytree | TSFields
    TSInstanceClass  = TSModuleType

A descriptor is a type in the form that `as_descriptor` returns: it has a `TSUnion` in place of
``Optional``, and dataclasses and named tuples are expanded to their fields.

A class has all that belongs to its type (``base``): its text, its parts, its check, its code and
its order. Types without parts are in ``single.py``, the others in ``containers.py``.
"""

from __future__ import annotations

from typing import TypeAlias

from tsfunc.errors import AnnotationError
from tsfunc.types.base import Order, TSAllType, TSType, plain
from tsfunc.types.containers import (
    TSDict,
    TSFields,
    TSFuture,
    TSList,
    TSNamedTuple,
    TSOptional,
    TSPytree,
    TSRRef,
    TSTuple,
    TSTupleOf,
    TSUnion,
    is_key_type,
    key_error,
    may_be_key,
    optional,
)
from tsfunc.types.single import (
    ANY,
    BOOL,
    DOUBLE,
    FLOAT,
    INT,
    NONE,
    PRIMITIVES,
    STR,
    TENSOR,
    TSBuiltinClass,
    TSCustomClass,
    TSEnum,
    TSMetaType,
    TSModuleInterface,
    TSModuleType,
    TSPrimitiveType,
    TSTensor,
    Value,
    literal,
    primitive_of,
)

TSStructuralType: TypeAlias = (
    TSTuple | TSNamedTuple | TSList | TSDict | TSOptional | TSFuture | TSRRef
)
TSNominalType: TypeAlias = TSBuiltinClass | TSTensor | TSCustomClass | TSEnum | TSModuleInterface
TSCallType: TypeAlias = Value | TSUnion | TSTupleOf | TSPytree | TSFields
Descriptor: TypeAlias = TSType
TSInstanceClass: TypeAlias = TSModuleType

GENERIC: dict[str, type[TSType]] = {
    word: cls
    for cls in (TSTuple, TSList, TSDict, TSOptional, TSFuture, TSRRef)
    for word in cls.words
}
"""The types that are written with others in brackets, by the words before the brackets."""


def require_type(type_: object) -> None:
    """Raise unless an object is a type."""
    if not isinstance(type_, TSAllType):
        raise AnnotationError(
            f"expected a type of the language, got {type_!r} of type {type(type_).__name__}; "
            f"tsfunc.types.from_annotation makes a type of it"
        )


__all__ = [
    "ANY",
    "BOOL",
    "DOUBLE",
    "FLOAT",
    "GENERIC",
    "INT",
    "NONE",
    "PRIMITIVES",
    "STR",
    "TENSOR",
    "Descriptor",
    "Order",
    "TSAllType",
    "TSBuiltinClass",
    "TSCallType",
    "TSCustomClass",
    "TSDict",
    "TSEnum",
    "TSFields",
    "TSFuture",
    "TSInstanceClass",
    "TSList",
    "TSMetaType",
    "TSModuleInterface",
    "TSModuleType",
    "TSNamedTuple",
    "TSNominalType",
    "TSOptional",
    "TSPrimitiveType",
    "TSPytree",
    "TSRRef",
    "TSStructuralType",
    "TSTensor",
    "TSTuple",
    "TSTupleOf",
    "TSType",
    "TSUnion",
    "Value",
    "is_key_type",
    "key_error",
    "literal",
    "may_be_key",
    "optional",
    "plain",
    "primitive_of",
    "require_type",
]
