"""The grammar of the types, and the words that name them in annotations.

The grammar is that of the TorchScript type system proposal, with one class for each of its rules,
and additional types for descriptors of a call::

    TSAllType        = TSType | TSInstanceClass
    TSType           = TSMetaType | TSPrimitiveType | TSStructuralType | TSNominalType | TSCallType
    TSStructuralType = TSTuple | TSNamedTuple | TSList | TSDict | TSOptional | TSFuture | TSRRef
    TSNominalType    = TSBuiltinClass | TSTensor | TSCustomClass | TSEnum | TSModuleInterface
    TSCallType       = Value | TSUnion | TSTupleOf | TSPytree | TSFields
    TSInstanceClass  = TSModuleType

A descriptor is a type in the form that ``as_descriptor`` returns: it has a ``TSUnion`` in place of
``Optional``, and dataclasses and named tuples are expanded to their fields.

A class has all that belongs to its type (``base``): its text, its parts, its check, its code and
its order. Types without parts are in ``single.py``, the others in ``containers.py``,
``unions.py`` and ``futures.py``. ``GENERIC`` has the types that are written with others in
brackets.
"""

from __future__ import annotations

from typing import TypeAlias

from tsfunc.errors import AnnotationError
from tsfunc.types.base import TSAllType, TSType
from tsfunc.types.containers import (
    TSDict,
    TSFields,
    TSList,
    TSNamedTuple,
    TSPytree,
    TSTuple,
    TSTupleOf,
)
from tsfunc.types.futures import TSFuture, TSRRef
from tsfunc.types.single import (
    TSBuiltinClass,
    TSCustomClass,
    TSEnum,
    TSModuleInterface,
    TSModuleType,
    TSTensor,
    Value,
)
from tsfunc.types.unions import TSOptional, TSUnion

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
