"""The inputs of a program: what a trace takes for granted of the tensors among the arguments.

NOTE [numbers by their types]
A number whose descriptor is its type, ``int`` or ``float``, is an input of the program, and a
symbol in the trace. What the trace finds out about it (that it is positive, where it is a size;
which side of an ``if`` it takes) becomes a condition of the program: a number for which it does not
hold has a program of its own. Where the number itself is asked for (``range(k)``, a dim to sum
over), that condition is that it is this number. It may be any int: 0, 1 and negative ones differ
from others where something asks. What is no finite float, ints that C++ has no room for, and a
float of which the function asks for a zero (``SignedZeroError``), are burnt in. A ``bool`` has but
two values, and each a program.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch

from tsfunc.bridge.trace.asked import users_class
from tsfunc.errors import TypeCheckError
from tsfunc.program.reading.holding import is_instance
from tsfunc.program.reading.shown import has_contents
from tsfunc.types import Bindings, CompiledDescriptors, Dim, DimExpr, DimForm
from tsfunc.types.descriptors import child_at
from tsfunc.types.dims import parse_dim
from tsfunc.types.grammar import (
    Descriptor,
    TSDict,
    TSFields,
    TSList,
    TSNamedTuple,
    TSPrimitiveType,
    TSPytree,
    TSTuple,
    TSTupleOf,
    TSUnion,
    Value,
)
from tsfunc.types.polynomials import solved_for


@dataclass(frozen=True)
class InputSpec:
    """What a trace takes for granted of one tensor among the flattened arguments.

    Attributes:
        position: where it stands among them.
        name: what the program calls it.
        example: the tensor itself; its data is not looked at.
        dims: for each dim its size, or the named dim or expression that it is.
        any_grad: whether it may require grad or not, whatever the example does.
    """

    position: int
    name: str
    example: torch.Tensor
    dims: tuple[DimForm, ...]
    any_grad: bool = False

    def shape(self, sizes: Mapping[str, Any]) -> list[Any]:
        """Its shape where the named dims have these sizes, numbers or symbols."""
        return [
            sizes[dim.name]
            if isinstance(dim, Dim)
            else dim.evaluate(sizes)
            if isinstance(dim, DimExpr)
            else dim
            for dim in self.dims
        ]


def sizes_of_call(inputs: Sequence[InputSpec]) -> dict[str, int]:
    """The size of each named dim in the call that was traced."""
    sizes = {
        dim.name: size
        for spec in inputs
        for dim, size in zip(spec.dims, spec.example.shape, strict=True)
        if isinstance(dim, Dim)
    }
    examples = {spec.position: spec.example for spec in inputs}
    for position, k, expression, name in solving_order(inputs, sizes):
        factors = None if name is None else solved_for(expression.text, name)
        if name is not None and factors is not None:
            slope, rest = (DimExpr(text).evaluate(sizes) for text in factors)
            sizes[name] = (examples[position].shape[k] - rest) // slope
    return sizes


@dataclass(frozen=True)
class ScalarSpec:
    """A number among the flattened arguments of which a descriptor gives the type alone.

    Attributes:
        position: where it stands among them.
        name: what the program calls it.
        value: the number of the call that is traced.
    """

    position: int
    name: str
    value: int | float

    def admits(self, value: Any) -> bool:
        """Whether another number may come in its place, as far as its type says."""
        return type(value) is type(self.value) and _is_tame(value)


def describe_scalars(
    flat: Sequence[Any],
    places: Mapping[int, tuple[Any, ...]],
    contract: CompiledDescriptors | None,
    inputs: Sequence[InputSpec],
    bounds: Mapping[str, Dim],
) -> list[ScalarSpec]:
    """The numbers that a descriptor calls ``int`` or ``float``: NOTE [numbers by their types]."""
    taken = {*(spec.name for spec in inputs), *bounds}
    found = []
    for i, value in enumerate(flat):
        if contract is None or type(value) not in (int, float) or not _is_tame(value):
            continue
        name, *path = places[i]
        if name in contract.descriptors and _is_by_type(
            contract.descriptors[name], tuple(path), value
        ):
            found.append(ScalarSpec(i, _input_name(places[i], taken), value))
    return found


def _is_tame(value: int | float) -> bool:
    """Whether a symbol can have the value."""
    if isinstance(value, float):
        return math.isfinite(value)
    return abs(value) < 1 << 62


def _is_by_type(descriptor: Descriptor, path: tuple[Any, ...], value: int | float) -> bool:
    """Whether a descriptor calls what lies at a path by the number's type."""
    match descriptor:
        case TSPrimitiveType(name):
            return not path and name == type(value).__name__
        case TSUnion(alternatives):
            return Value(value) not in alternatives and any(
                _is_by_type(each, path, value) for each in alternatives
            )
        case TSList(element) | TSTupleOf(element) | TSDict(value=element):
            return bool(path) and _is_by_type(element, path[1:], value)
        case TSNamedTuple() | TSTuple() | TSPytree() | TSFields():
            child = child_at(descriptor, path)
            return child is not None and _is_by_type(child, path[1:], value)
        case _:
            return False


def short_text(spec: InputSpec) -> str:
    """The type and sizes of an input."""
    dims = ", ".join(dim.name if isinstance(dim, Dim) else str(dim) for dim in spec.dims)
    return f"{str(spec.example.dtype).removeprefix('torch.')}[{dims}]"


def describe_inputs(
    flat: Sequence[Any],
    places: Mapping[int, tuple[Any, ...]],
    contract: CompiledDescriptors | None,
    bindings: Bindings | None,
) -> tuple[list[InputSpec], dict[str, Dim]]:
    """The tensors among the arguments, and the named dims.

    Raises:
        TypeCheckError: a tensor is of a compressed sparse layout.
    """
    bounds: dict[str, Dim] = {}
    if contract is not None and bindings is not None:
        bounds = {name: contract.dims[name] for name in bindings.sizes}
    inputs = []
    used: set[str] = set()
    taken: set[str] = set()
    for i, value in enumerate(flat):
        if not isinstance(value, torch.Tensor):
            continue
        path = places[i]
        if value.layout in _COMPRESSED:
            raise TypeCheckError(
                f"specialize: expected strided or COO tensors, got {value.layout} for "
                f"{'.'.join(map(str, path))}. A trace can't follow compressed tensors. Pass "
                f"x.to_dense() or x.to_sparse()."
            )
        forms = bindings.dims(path) if bindings is not None else None
        dims = _dims(value, forms, bounds)
        for dim in dims:
            used.update(names_in(dim))
        inputs.append(InputSpec(i, _input_name(path, taken), value, dims))
    return inputs, {name: dim for name, dim in bounds.items() if name in used}


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def _dims(
    value: torch.Tensor,
    forms: Sequence[DimForm] | None,
    bounds: Mapping[str, Dim],
) -> tuple[DimForm, ...]:
    found: list[DimForm] = []
    forms = (*(None,) * (value.dim() - len(forms or ())), *(forms or ()))
    for size, form in zip(value.shape, forms, strict=True):
        if isinstance(form, Dim) and form.name in bounds:
            found.append(bounds[form.name])
        elif isinstance(form, DimExpr) and all(name in bounds for name in form.names):
            found.append(form)
        else:
            found.append(size)
    return tuple(found)


def names_in(dim: DimForm) -> tuple[str, ...]:
    """The named dims that a dim speaks of."""
    if isinstance(dim, Dim):
        return (dim.name,)
    return dim.names if isinstance(dim, DimExpr) else ()


def solving_order(
    inputs: Sequence[InputSpec], bound: Iterable[str]
) -> Iterator[tuple[int, int, DimExpr, str | None]]:
    """The computed dims of some inputs, in an order in which all of their names get a size.

    Args:
        inputs: the inputs.
        bound: the names that have one, being a dim alone.

    Returns:
        For each the input's position, the dim, the expression, and the name that it is to be
        solved for; None where all of its names are known.
    """
    known = set(bound)
    pending = [
        (spec.position, k, dim)
        for spec in inputs
        for k, dim in enumerate(spec.dims)
        if isinstance(dim, DimExpr)
    ]
    while pending:
        later = []
        for position, k, dim in pending:
            unknown = [name for name in dim.names if name not in known]
            if len(unknown) > 1 or (unknown and solved_for(dim.text, unknown[0]) is None):
                later.append((position, k, dim))
                continue
            known.update(unknown)
            yield position, k, dim, unknown[0] if unknown else None
        assert len(later) < len(pending), "the descriptors have been checked to give every name"
        pending = later


def with_sizes_fixed(spec: InputSpec, small: Mapping[str, int]) -> InputSpec:
    """The input with the sizes of some named dims taken from the call."""
    dims: list[DimForm] = []
    for size, dim in zip(spec.example.shape, spec.dims, strict=True):
        dims.append(_with_names_fixed(dim, size, small))
    return dataclasses.replace(spec, dims=tuple(dims))


def with_dims_raised(spec: InputSpec, raised: Mapping[str, Dim]) -> InputSpec:
    """The input with other bounds for some named dims."""
    dims = [raised.get(dim.name, dim) if isinstance(dim, Dim) else dim for dim in spec.dims]
    return dataclasses.replace(spec, dims=tuple(dims))


def _with_names_fixed(dim: DimForm, size: int, small: Mapping[str, int]) -> DimForm:
    """A dim in which some names are numbers."""
    names = names_in(dim)
    if not any(name in small for name in names):
        return dim
    if not isinstance(dim, DimExpr) or all(name in small for name in names):
        return size
    text = re.sub(r"[^\W\d]\w*", lambda name: str(small.get(name[0], name[0])), dim.text)
    return parse_dim(DimExpr(text).normal)


def call_signature(
    flat: Sequence[Any],
    tree: optree.PyTreeSpec,
    orders: Any,
    ambient: Any,
    inputs: Sequence[InputSpec],
    scalars: Sequence[ScalarSpec],
) -> Any:
    """What calls have in common that differ in no more than sizes of named dims and numbers."""
    leaves: list[tuple[Any, Any]] = [(type(value), _static_key(value)) for value in flat]
    for scalar in scalars:
        leaves[scalar.position] = type(scalar.value), scalar.name
    for spec in inputs:
        x = spec.example
        shape = tuple(str(dim) for dim in spec.dims)
        kind = x.dtype, x.device, x.requires_grad, _layout_key(spec), users_class(type(x))
        leaves[spec.position] = shape, kind
    return tree, orders, ambient, tuple(leaves)


def _layout_key(spec: InputSpec) -> Any:
    """The layout in memory that the guard of a program holds its calls to."""
    x = spec.example
    if x.layout is not torch.strided or x.is_nested:
        return x.layout
    if x.is_contiguous():
        return "contiguous"
    fixed = all(isinstance(dim, int) for dim in spec.dims)
    return tuple(x.stride()) if fixed else ("order", *order_of_strides(x))


def order_of_strides(x: torch.Tensor) -> list[int]:
    """The dims of a tensor, by their strides."""
    return sorted(range(x.dim()), key=lambda k: (x.stride(k), -k))


def _static_key(value: Any) -> Any:
    """What tells a leaf from others of its class; of an object, what is read of it does."""
    if isinstance(value, float):
        return repr(value), math.copysign(1, value)
    if isinstance(value, int | str):
        return repr(value)
    if has_contents(value):
        return object()  # which may have changed
    return None if is_instance(value) else id(value)


def _input_name(path: Sequence[Any], taken: set[str]) -> str:
    """A name for an input in the program's source, from where it stands in the arguments."""
    words = ["".join(c if c.isalnum() else "_" for c in str(part)) for part in path]
    name = "_".join(words)
    if not name.isidentifier() or name == "args":
        name = f"arg_{name}"
    while name in taken:
        name += "_"
    taken.add(name)
    return name
