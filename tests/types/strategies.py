"""Random types, and classes for them."""

from __future__ import annotations

import enum
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from hypothesis import assume
from hypothesis import strategies as st

from tsfunc.types import (
    ANY,
    BOOL,
    DOUBLE,
    FLOAT,
    INT,
    NONE,
    STR,
    TENSOR,
    Dim,
    DimExpr,
    DimForm,
    MetaTensorType,
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
    is_subtype,
    optional,
)

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn)


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 0
    HIGH = 1


class Base: ...


class Left(Base): ...


class Right(Base): ...


class Leaf(Left): ...


@dataclass
class Record:
    width: int
    weight: torch.Tensor


class Encoder(Protocol):
    def encode(self, x: torch.Tensor, depth: int) -> torch.Tensor: ...


class Deep(Encoder):
    def encode(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        return x


class Mine(torch.Tensor): ...


class PyRRef:
    """A stand-in for torch's class of this name, which needs a process group."""

    def __init__(self, value: object) -> None:
        self.value = value

    def is_owner(self) -> bool:
        return True

    def local_value(self) -> object:
        return self.value


NOMINAL: tuple[TSType, ...] = (
    TSBuiltinClass(torch.device),
    TSBuiltinClass(torch.nn.ModuleList),
    *(TSCustomClass(cls) for cls in (Base, Left, Right, Leaf, Record, Deep, torch.nn.Linear)),
    TSEnum(Color),
    TSEnum(Level),
    TSModuleInterface(Encoder),
    TSTensor(torch.nn.Parameter),
    TSTensor(Mine),
)
SIMPLE: tuple[TSType, ...] = (ANY, INT, FLOAT, DOUBLE, BOOL, STR, NONE, TENSOR)


def metas(
    names: bool = True, computed: bool = True, leading: bool = True
) -> st.SearchStrategy[MetaTensorType]:
    """Draw descriptors of tensors; with `names` also named sizes, and expressions of them."""
    dim: st.SearchStrategy[int | str | Dim | None] = st.none() | st.integers(0, 3)
    if names:
        bounded = st.builds(Dim, st.just("k"), st.none() | st.just(1), st.none() | st.just(2))
        dim = dim | st.sampled_from(["n", "m", "2*n+m"] if computed else ["n", "m"]) | bounded
    shapes = st.lists(dim, max_size=3)
    return st.builds(
        described,
        dtype=st.none() | st.sampled_from(DTYPES),
        shape=st.none() | shapes | shapes.map(lambda dims: [..., *dims] if leading else dims),
        device=st.sampled_from([None, "cpu", "cuda", "cuda:1"]),
        requires_grad=st.sampled_from([None, None, True, False]),
        layout=st.sampled_from([None, None, torch.strided, torch.sparse_coo]),
    )


def described(**known: Any) -> MetaTensorType:
    """Return a descriptor; for numbers without a derivative it omits `requires_grad`."""
    dtype = known.get("dtype")
    if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
        known["requires_grad"] = known.get("requires_grad") and None
    return MetaTensorType(**known)


NAMED = {"n": 2, "m": 0, "k": 1}
"""What the names of sizes stand for in generated values."""


def values(type_: TSType) -> st.SearchStrategy[Any]:
    """Draw values of a type; tensors are strided, on the CPU, with sizes as in `NAMED`."""
    match type_:
        case TSMetaType():
            return st.sampled_from([3, None, "a", [], (1, 2.0), Base()])
        case TSPrimitiveType(name):
            return _SINGLE[name]
        case TSOptional(element):
            return st.none() | values(element)
        case TSList(element):
            return st.lists(values(element), max_size=2)
        case TSDict(key, item):
            keys = st.sampled_from(["a", "b"]) if key in (STR, ANY) else values(key)
            return st.dictionaries(keys, values(item), max_size=2)
        case TSTuple(elements):
            return st.tuples(*map(values, elements))
        case TSNamedTuple(names, elements):
            made: Any = namedtuple("Made", names)  # type: ignore[misc]
            return st.builds(made, *map(values, elements))
        case TSFuture(element):
            return values(element).map(_future)
        case TSTensor(cls, meta):
            return st.builds(_tensor, st.just(cls), st.just(meta))
        case TSBuiltinClass():
            return st.just(_BUILTIN[type_.cls])
        case TSEnum(cls):
            return st.sampled_from(list(cls))
        case TSCustomClass(cls):
            return st.builds(_ARGUMENTS.get(cls, cls))
        case TSModuleInterface():
            return st.just(Deep())
        case TSRRef(element):
            return values(element).map(PyRRef)
        case Value(value):
            return st.just(value)
        case TSUnion(alternatives):
            return st.one_of(*map(values, alternatives))
        case TSTupleOf(element):
            return st.lists(values(element), max_size=2).map(tuple)
        case TSPytree(kind, entries, children):
            parts = st.tuples(*map(values, children))
            return parts.map(
                lambda each: kind(zip(entries, each, strict=True) if kind is dict else each)
            )
        case TSFields(cls, names, children):
            return st.builds(cls, **dict(zip(names, map(values, children), strict=True)))
        case _:
            raise AssertionError(f"no values of {type_}")


_SINGLE: dict[str, st.SearchStrategy[Any]] = {
    "int": st.integers(-1, 1),
    "float": st.floats(),
    "double": st.floats(),
    "bool": st.booleans(),
    "str": st.text(max_size=2),
    "None": st.none(),
}
_BUILTIN: dict[type, Any] = {
    torch.device: torch.device("cpu"),
    torch.nn.ModuleList: torch.nn.ModuleList(),
}
_ARGUMENTS: dict[type, Callable[[], Any]] = {
    Record: lambda: Record(3, torch.ones(1)),
    torch.nn.Linear: lambda: torch.nn.Linear(1, 2),
}


def _future(value: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(value)
    return future


def _tensor(cls: type[torch.Tensor], meta: MetaTensorType) -> torch.Tensor:
    """Return a tensor that satisfies a descriptor from `metas`, on the CPU."""
    sizes = [_size(dim) for dim in meta.dims or meta.trailing]
    assume(meta.device is None or meta.device.type == "cpu")
    assume(meta.layout in (None, torch.strided) and all(size >= 0 for size in sizes))
    dtype = meta.dtype or torch.float32
    differentiable = dtype.is_floating_point and dtype.itemsize > 1
    assume(differentiable or not (meta.requires_grad or cls is torch.nn.Parameter))
    tensor = torch.zeros(sizes, dtype=dtype)
    if cls is torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad=meta.requires_grad is not False)
    return tensor.as_subclass(cls).requires_grad_(meta.requires_grad is True)


def _size(dim: DimForm) -> int:
    if isinstance(dim, DimExpr):
        return dim.evaluate(NAMED)
    if isinstance(dim, Dim):
        return NAMED[dim.name]
    return 1 if dim is None else dim


def types(
    names: bool = True, computed: bool = True, leading: bool = True
) -> st.SearchStrategy[TSType]:
    """Draw any type of the language; without `names`, no size in it has a name."""
    tensors: st.SearchStrategy[TSType] = st.builds(
        TSTensor,
        st.sampled_from([torch.Tensor, torch.Tensor, torch.nn.Parameter]),
        metas(names, computed, leading),
    )
    leaves = st.sampled_from([*SIMPLE, *NOMINAL]) | tensors
    keys = st.sampled_from([STR, INT, FLOAT, BOOL, TENSOR, ANY])

    def grow(inner: st.SearchStrategy[TSType]) -> st.SearchStrategy[TSType]:
        several = st.lists(inner, max_size=3).map(tuple)
        return st.one_of(
            st.builds(TSTuple, several),
            several.map(lambda each: TSNamedTuple(tuple("abc"[: len(each)]), each)),
            st.builds(TSList, inner),
            st.builds(TSDict, keys, inner),
            st.builds(optional, inner),
            st.builds(TSFuture, inner),
            st.builds(TSRRef, inner),
        )

    return st.recursive(leaves, grow, max_leaves=6)


def call_types(names: bool = True) -> st.SearchStrategy[TSType]:
    """Draw types of arguments, with literals, unions and containers of fixed children."""
    literals = st.sampled_from([Value(1), Value(True), Value("a"), Value(1.5), Value(Color.RED)])

    def grow(inner: st.SearchStrategy[TSType]) -> st.SearchStrategy[TSType]:
        several = st.lists(inner, max_size=2).map(tuple)
        return st.one_of(
            st.builds(TSUnion, st.lists(inner, min_size=1, max_size=3).map(tuple)),
            st.builds(TSTupleOf, inner),
            st.builds(TSList, inner),
            st.builds(TSTuple, several),
            several.map(lambda each: TSPytree(list, tuple(range(len(each))), each)),
            several.map(lambda each: TSPytree(dict, tuple("ab"[: len(each)]), each)),
            st.builds(TSFields, st.just(Record), st.just(("width",)), st.tuples(inner)).map(
                lambda each: TSFields(Record, ("width", "weight"), (*each.children, TENSOR))
            ),
        )

    return st.recursive(literals | types(names, computed=False), grow, max_leaves=5)


def below(type_: TSType) -> st.SearchStrategy[TSType]:
    """Draw subtypes of a type; no size in them has a name."""
    simple = st.sampled_from([t for t in (*SIMPLE, *NOMINAL) if is_subtype(t, type_)] or [type_])
    if isinstance(type_, TSTensor):
        return simple | st.builds(TSTensor, st.just(type_.cls), _more_known(type_.meta))
    if isinstance(type_, TSOptional):
        return st.one_of(simple, st.just(type_), below(type_.element))
    if isinstance(type_, TSList | TSDict):
        return _composed(type_, _described)
    if type_.parts:
        return _composed(type_, below)
    return simple


def _composed(
    type_: TSType, make: Callable[[TSType], st.SearchStrategy[TSType]]
) -> st.SearchStrategy[TSType]:
    children = st.tuples(*map(make, type_.parts))
    return children.map(lambda found: type_.with_parts(found))


def _described(type_: TSType) -> st.SearchStrategy[TSType]:
    """Draw the same type with more known about its tensors."""
    if isinstance(type_, TSTensor):
        return st.builds(TSTensor, st.just(type_.cls), _more_known(type_.meta))
    return _composed(type_, _described)


def _more_known(meta: MetaTensorType) -> st.SearchStrategy[MetaTensorType]:
    def fill(other: MetaTensorType) -> MetaTensorType:
        dims = other.shape
        if meta.shape is not None:
            dims = tuple(1 if dim is None else dim for dim in meta.shape)
        known = {
            name: getattr(other if getattr(meta, name) is None else meta, name)
            for name in ("dtype", "device", "requires_grad", "layout")
        }
        if known["requires_grad"] and meta.dtype is None:
            known["dtype"] = None  # the concrete one, since not every dtype is known
        return described(shape=dims, **known)

    return st.just(meta) | metas(names=False).map(fill)
