"""Descriptors with other sizes in the places of named ones, and descriptors as Python."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from tsfunc.types.class_names import class_name
from tsfunc.types.descriptors import (
    Anything,
    Descriptor,
    DictOf,
    FieldsOf,
    InstanceOf,
    ListOf,
    NamedOf,
    Nested,
    OfType,
    OneOf,
    TensorOf,
    TupleOf,
    Value,
)
from tsfunc.types.dims import Dim, DimExpr, DimForm, DimSpec, parse_dim, spell_dim
from tsfunc.types.grammar import assert_never
from tsfunc.types.meta import MetaTensorType

_NAME = re.compile(r"[^\W\d]\w*")


def with_dims(descriptor: Descriptor, dims: Mapping[str, DimSpec]) -> Descriptor:
    """A descriptor in which some named sizes are something else.

    Args:
        descriptor: of one parameter.
        dims: by name what is in the place of a size; None leaves it open, and with it what is
            computed from it.

    Example:
        >>> from tsfunc import Dim, MetaTensorType
        >>> with_dims(MetaTensorType(["n", "2*n", 3]), {"n": Dim("n", min=5)})
        MetaTensorType(shape=(Dim('n', min=5), '2 * n', 3))
        >>> with_dims(MetaTensorType(["n", "n+1"]), {"n": "2*m"}).shape
        ('2 * m', '2 * m + 1')
    """

    def inside(each: Descriptor) -> Descriptor:
        return with_dims(each, dims)

    match descriptor:
        case MetaTensorType(shape=None) | Anything() | InstanceOf() | OfType() | Value():
            return descriptor
        case MetaTensorType(shape=shape):
            assert shape is not None
            sizes = tuple(
                each if each is ... else spell_dim(_size(parse_dim(each), dims)) for each in shape
            )
            return dataclasses.replace(descriptor, shape=sizes)
        case TensorOf(cls, meta):
            found = with_dims(meta, dims)
            assert isinstance(found, MetaTensorType)
            return TensorOf(cls, found)
        case ListOf(element):
            return ListOf(inside(element))
        case TupleOf(element):
            return TupleOf(inside(element))
        case DictOf(key, item):
            return DictOf(key, inside(item))
        case OneOf(alternatives):
            return OneOf(tuple(map(inside, alternatives)))
        case Nested() | NamedOf() | FieldsOf():
            children = tuple(map(inside, descriptor.children))
            return dataclasses.replace(descriptor, children=children)
        case _:
            assert_never(descriptor)


def _size(form: DimForm, dims: Mapping[str, DimSpec]) -> DimForm:
    match form:
        case Dim(name):
            return parse_dim(dims[name]) if name in dims else form
        case DimExpr():
            found = {name: parse_dim(dims.get(name, name)) for name in form.names}
            if None in found.values():
                return None
            words = {name: _operand(each) for name, each in found.items()}
            return parse_dim(_NAME.sub(lambda name: words[name[0]], form.text))
        case _:
            return form


def _operand(form: DimForm) -> str:
    """A size as part of an expression."""
    return form.name if isinstance(form, Dim) else f"({spell_dim(form)})"


def as_python(descriptor: Descriptor) -> str:
    """A descriptor as it would be written in a program that has imported what it names.

    Example:
        >>> from tsfunc.types import as_descriptor
        >>> as_python(as_descriptor([MetaTensorType(["n", 3]), int, "relu"]))
        "[MetaTensorType(shape=['n', 3]), int, 'relu']"
    """
    match descriptor:
        case MetaTensorType():
            text = repr(descriptor)
            if descriptor.shape is None:
                return text
            # A list reads better, and is what the documentation writes.
            return text.replace(f"shape={descriptor.shape!r}", f"shape={[*descriptor.shape]!r}")
        case Value(value):
            return repr(value)
        case ListOf(element):
            return f"List[{as_python(element)}]"
        case TupleOf(element):
            return f"Tuple[{as_python(element)}, ...]"
        case DictOf(key, item):
            return f"Dict[{as_python(key)}, {as_python(item)}]"
        case OneOf(alternatives):
            return f"Union[{', '.join(map(as_python, alternatives))}]"
        case InstanceOf(cls):
            return class_name(cls)
        case Nested(kind, entries, children) if kind is dict:
            pairs = zip(entries, children, strict=True)
            return f"{{{', '.join(f'{key!r}: {as_python(child)}' for key, child in pairs)}}}"
        case Nested(kind, _, children) if kind in (list, tuple):
            items = ", ".join(map(as_python, children))
            if kind is list:
                return f"[{items}]"
            return f"({items},)" if len(children) == 1 else f"({items})"
        case TensorOf() | Anything() | OfType() | Nested() | NamedOf() | FieldsOf():
            return str(descriptor)
        case _:
            assert_never(descriptor)
