"""Descriptors with named sizes replaced, and descriptors as Python code."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from tsfunc.types.dims import Dim, DimForm, DimSpec, parse_dim, spell_dim
from tsfunc.types.grammar import (
    Descriptor,
    TSDict,
    TSList,
    TSPytree,
    TSTensor,
    TSTuple,
    TSTupleOf,
    TSUnion,
    Value,
    map_tensors,
)
from tsfunc.types.meta import MetaTensorType
from tsfunc.types.sizes import DimExpr


def with_dims(descriptor: Descriptor, dims: Mapping[str, DimSpec]) -> Descriptor:
    """Return a descriptor with some named sizes replaced.

    Args:
        descriptor: the descriptor of one parameter.
        dims: name to the new size; None makes the size open, and all sizes computed from it.

    Example:
        >>> from tsfunc import Dim, MetaTensorType
        >>> from tsfunc.types import as_descriptor
        >>> print(with_dims(as_descriptor(MetaTensorType(["n", "2*n", 3])), {"n": Dim("n", min=5)}))
        tensor[n>=5, 2 * n, 3]
        >>> print(with_dims(as_descriptor(MetaTensorType(["n", "n+1"])), {"n": "2*m"}))
        tensor[2 * m, 2 * m + 1]
    """

    def named(meta: MetaTensorType) -> MetaTensorType:
        if meta.shape is None:
            return meta
        shape = tuple(
            each if each is ... else spell_dim(_size(parse_dim(each), dims)) for each in meta.shape
        )
        return dataclasses.replace(meta, shape=shape)

    return map_tensors(descriptor, named)


def _size(form: DimForm, dims: Mapping[str, DimSpec]) -> DimForm:
    match form:
        case Dim(name):
            return parse_dim(dims[name]) if name in dims else form
        case DimExpr():
            found = {name: parse_dim(dims.get(name, name)) for name in form.names}
            if None in found.values():
                return None
            texts = {
                name: each.name if isinstance(each, Dim) else str(each)
                for name, each in found.items()
            }
            return parse_dim(form.substitute(texts))
        case _:
            return form


def as_python(descriptor: Descriptor) -> str:
    """Return a descriptor as Python code, for a scope that has imported its names.

    Example:
        >>> from tsfunc.types import as_descriptor
        >>> as_python(as_descriptor([MetaTensorType(["n", 3]), int, "relu"]))
        "[MetaTensorType(shape=['n', 3]), int, 'relu']"
    """
    match descriptor:
        case TSTensor(torch.Tensor, meta):
            text = repr(meta)
            if meta.shape is None:
                return text
            # A list is easier to read, and is the form in the documentation.
            return text.replace(f"shape={meta.shape!r}", f"shape={[*meta.shape]!r}")
        case Value(value):
            return repr(value)
        case TSList(element):
            return f"List[{as_python(element)}]"
        case TSTupleOf(element):
            return f"Tuple[{as_python(element)}, ...]"
        case TSDict(key, item):
            return f"Dict[{as_python(key)}, {as_python(item)}]"
        case TSUnion(alternatives):
            return f"Union[{', '.join(map(as_python, alternatives))}]"
        case TSTuple(elements):
            items = ", ".join(map(as_python, elements))
            return f"({items},)" if len(elements) == 1 else f"({items})"
        case TSPytree(kind, entries, children) if kind is dict:
            pairs = zip(entries, children, strict=True)
            return f"{{{', '.join(f'{key!r}: {as_python(child)}' for key, child in pairs)}}}"
        case TSPytree(kind, _, children) if kind is list:
            return f"[{', '.join(map(as_python, children))}]"
        case _:
            return str(descriptor)
