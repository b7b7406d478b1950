"""The assumptions of a trace about the arguments of a call.

NOTE [numbers by their types]
A number whose descriptor is its type, ``int`` or ``float``, is an input of the program, and a
symbol in the trace. A fact that the trace relies on (a size is positive, an ``if`` takes one side)
becomes a condition of the program: a number that breaks the condition has a program of its own. If
the trace needs the number itself (``range(k)``, a dim to sum over), the condition fixes the
number. An ``int`` may have any value: 0, 1 and negative values differ from others only if the
trace depends on it. Three kinds of numbers are constants: floats that are not finite, ints beyond
C++'s range, and floats whose sign of zero the function depends on (``SignedZeroError``). A
``bool`` has two values, each with its own program.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch

from tsfunc import pytrees
from tsfunc.bridge.sizes.symbols import can_be_symbol
from tsfunc.bridge.trace.opaque import OpaqueValue
from tsfunc.bridge.trace.tensor_guards import check_layout
from tsfunc.errors import TypeCheckError
from tsfunc.program.guarding.layouts import layout_of, strides_with
from tsfunc.types import Bindings, Contract, Dim, DimExpr, DimForm
from tsfunc.types.annotation import attribute_types
from tsfunc.types.containers import TSFields, TSPytree
from tsfunc.types.dims import parse_dim
from tsfunc.types.grammar import Descriptor
from tsfunc.types.single import ANY, TSMetaType, TSPrimitiveType, Value
from tsfunc.types.sizes import solved_for
from tsfunc.types.unions import TSUnion
from tsfunc.types.values import is_array

# --- the inputs of a program: the assumptions of a trace about the tensors among the arguments


@dataclass(frozen=True)
class InputSpec:
    """The assumptions of a trace about one tensor among the flattened arguments.

    Attributes:
        position: its index among them.
        name: its name in the program.
        sample: the tensor itself; its data is not read.
        dims: for each dim its size, named dim or expression of named dims.
        any_grad: True if ``requires_grad`` is not guarded.
    """

    position: int
    name: str
    sample: torch.Tensor = dataclasses.field(repr=False)
    dims: tuple[DimForm, ...]
    any_grad: bool = False

    @property
    def is_fixed(self) -> bool:
        """True if each dim has a fixed size."""
        return all(isinstance(dim, int) for dim in self.dims)

    @property
    def layout_key(self) -> Any:
        """The memory layout that the guard of a program checks."""
        x = self.sample
        if x.layout is not torch.strided or x.is_nested:
            return x.layout
        if x.is_contiguous():
            return "contiguous"
        return tuple(x.stride()) if self.is_fixed else layout_of(x.shape, x.stride())

    def strides(self, shape: Sequence[Any]) -> list[Any]:
        """Return the sample's strides; for symbolic sizes, strides of its layout."""
        strides = self.sample.stride()
        if all(isinstance(size, int) for size in shape):
            return list(strides)
        return strides_with(layout_of(self.sample.shape, strides), shape)

    def shape(self, sizes: Mapping[str, Any]) -> list[Any]:
        """Return its shape for these sizes (numbers or symbols) of the named dims."""
        return [
            sizes[dim.name]
            if isinstance(dim, Dim)
            else dim.evaluate(sizes)
            if isinstance(dim, DimExpr)
            else dim
            for dim in self.dims
        ]


def sizes_of_call(inputs: Sequence[InputSpec]) -> dict[str, int]:
    """Return the size of each named dim in the call that was traced."""
    sizes = {
        dim.name: size
        for spec in inputs
        for dim, size in zip(spec.dims, spec.sample.shape, strict=True)
        if isinstance(dim, Dim)
    }
    samples = {spec.position: spec.sample for spec in inputs}
    for position, k, expression, name in solving_order(inputs, sizes):
        factors = None if name is None else solved_for(expression.text, name)
        if name is not None and factors is not None:
            slope, rest = (DimExpr(text).evaluate(sizes) for text in factors)
            sizes[name] = (samples[position].shape[k] - rest) // slope
    return sizes


@dataclass(frozen=True)
class NumberSpec:
    """A number among the flattened arguments whose descriptor is its type.

    Attributes:
        position: its index among them.
        name: its name in the program.
        value: its value in the call that is traced.
        undescribed: True if it is an input without a descriptor: NOTE [automatic dynamic sizes].
    """

    position: int
    name: str
    value: int | float
    undescribed: bool = False

    def admits(self, value: Any) -> bool:
        """True if another number may replace it, judged by its type."""
        return type(value) is type(self.value) and can_be_symbol(value)


def number_specs(
    flat: Sequence[Any],
    argument_paths: Mapping[int, tuple[Any, ...]],
    contract: Contract | None,
    inputs: Sequence[InputSpec],
    named_dims: Mapping[str, Dim],
    undescribed: Collection[int] = (),
) -> list[NumberSpec]:
    """Return the numbers described as ``int`` or ``float``: NOTE [numbers by their types].

    Args:
        undescribed: the positions of other numbers that are inputs: NOTE [automatic dynamic
            sizes].
    """
    used_names = {*(spec.name for spec in inputs), *named_dims}
    described = {} if contract is None else contract.descriptors
    specs = []
    for i, value in enumerate(flat):
        if not can_be_symbol(value):
            continue
        name, *path = argument_paths[i]
        if name in described and _is_by_type(described[name], tuple(path), value):
            specs.append(NumberSpec(i, _input_name(argument_paths[i], used_names), value))
        elif i in undescribed:
            specs.append(
                NumberSpec(i, _input_name(argument_paths[i], used_names), value, undescribed=True)
            )
    return specs


def _is_by_type(descriptor: Descriptor, path: tuple[Any, ...], value: int | float) -> bool:
    """True if a descriptor describes the value at a path by the number's type."""
    match descriptor:
        case TSPrimitiveType(name):
            return not path and name == type(value).__name__
        case TSUnion(alternatives):
            return Value(value) not in alternatives and any(
                _is_by_type(alternative, path, value) for alternative in alternatives
            )
        case _:
            child = descriptor.child_at(path)
            return child is not None and _is_by_type(child, path[1:], value)


def input_text(spec: InputSpec) -> str:
    """Return the dtype and dims of an input as a text."""
    dims = ", ".join(dim.name if isinstance(dim, Dim) else str(dim) for dim in spec.dims)
    return f"{str(spec.sample.dtype).removeprefix('torch.')}[{dims}]"


def tensor_inputs(
    flat: Sequence[Any],
    argument_paths: Mapping[int, tuple[Any, ...]],
    contract: Contract | None,
    bindings: Bindings | None,
) -> tuple[list[InputSpec], dict[str, Dim]]:
    """Return the tensors among the arguments, and the named dims.

    Raises:
        TypeCheckError: a tensor has a layout that a trace can't follow.
    """
    named_dims: dict[str, Dim] = {}
    if contract is not None and bindings is not None:
        named_dims = {name: contract.dims[name] for name in bindings.sizes}
    inputs = []
    used: set[str] = set()
    used_names: set[str] = set()
    for i, value in enumerate(flat):
        if not isinstance(value, torch.Tensor):
            continue
        path = argument_paths[i]
        check_layout(value, ".".join(map(str, path)))
        forms = bindings.dims(path) if bindings is not None else None
        dims = _dims(value, forms, named_dims)
        for dim in dims:
            used.update(dims_in(dim))
        inputs.append(InputSpec(i, _input_name(path, used_names), value, dims))
    return inputs, {name: dim for name, dim in named_dims.items() if name in used}


def refuse_arrays(
    flat: Sequence[Any],
    argument_paths: Mapping[int, tuple[Any, ...]],
    contract: Contract | None,
    name_of: Callable[[int], str],
) -> None:
    """Refuse arrays of numbers whose parameters have no descriptor.

    The elements of an array would be constants, so that each array would have a program of its own.

    Args:
        name_of: returns the user's spelling of a flattened argument.

    Raises:
        TypeCheckError: an argument without a descriptor is an array.
    """
    described = {} if contract is None else contract.descriptors
    for i, value in enumerate(flat):
        if not is_array(value) or value.dtype.kind not in "biufc":
            continue
        if argument_paths[i][0] not in described:
            raise TypeCheckError(
                f"specialize: expected tensors and Python values, got a NumPy array for "
                f"{name_of(i)}. Pass torch.from_numpy(array), which is an input of the program. An "
                f"array that the descriptors describe as numpy.ndarray is a constant, and each "
                f"array has a program of its own."
            )


def _dims(
    value: torch.Tensor, forms: Sequence[DimForm] | None, named_dims: Mapping[str, Dim]
) -> tuple[DimForm, ...]:
    dims: list[DimForm] = []
    forms = (*(None,) * (value.dim() - len(forms or ())), *(forms or ()))
    for size, form in zip(value.shape, forms, strict=True):
        if isinstance(form, Dim) and form.name in named_dims:
            dims.append(named_dims[form.name])
        elif isinstance(form, DimExpr) and all(name in named_dims for name in form.names):
            dims.append(form)
        else:
            dims.append(size)
    return tuple(dims)


def dims_in(dim: DimForm) -> tuple[str, ...]:
    """Return the named dims in a dim."""
    if isinstance(dim, Dim):
        return (dim.name,)
    return dim.names if isinstance(dim, DimExpr) else ()


def solving_order(
    inputs: Sequence[InputSpec], bound: Iterable[str]
) -> Iterator[tuple[int, int, DimExpr, str | None]]:
    """Yield the computed dims of some inputs, in an order that gives a size to each of their names.

    Args:
        bound: the names that have a size, since a dim consists of the name alone.

    Yields:
        The input's position, the dim, the expression, and the name to solve it for; None if all
        names of the expression have a size.
    """
    sized = set(bound)
    pending = [
        (spec.position, k, dim)
        for spec in inputs
        for k, dim in enumerate(spec.dims)
        if isinstance(dim, DimExpr)
    ]
    while pending:
        later = []
        for position, k, dim in pending:
            unknown = [name for name in dim.names if name not in sized]
            if len(unknown) > 1 or (unknown and solved_for(dim.text, unknown[0]) is None):
                later.append((position, k, dim))
                continue
            sized.update(unknown)
            yield position, k, dim, unknown[0] if unknown else None
        assert len(later) < len(pending), "the descriptors have been checked to give every name"
        pending = later


def with_fixed_sizes(spec: InputSpec, small: Mapping[str, int]) -> InputSpec:
    """Return the input with some named dims replaced by their sizes in the call."""
    dims: list[DimForm] = []
    for size, dim in zip(spec.sample.shape, spec.dims, strict=True):
        dims.append(_with_names_fixed(dim, size, small))
    return dataclasses.replace(spec, dims=tuple(dims))


def with_bounds(spec: InputSpec, dims: Mapping[str, Dim]) -> InputSpec:
    """Return the input with other bounds for some named dims."""
    bounded = [dims.get(dim.name, dim) if isinstance(dim, Dim) else dim for dim in spec.dims]
    return dataclasses.replace(spec, dims=tuple(bounded))


def _with_names_fixed(dim: DimForm, size: int, small: Mapping[str, int]) -> DimForm:
    """Return a dim with some names replaced by numbers."""
    names = dims_in(dim)
    if not any(name in small for name in names):
        return dim
    if not isinstance(dim, DimExpr) or all(name in small for name in names):
        return size
    text = re.sub(r"[^\W\d]\w*", lambda name: str(small.get(name[0], name[0])), dim.text)
    return parse_dim(DimExpr(text).normal)


def _input_name(path: Sequence[Any], used_names: set[str]) -> str:
    """Return a name for an input in the program's source, made from its path in the arguments."""
    words = ["".join(c if c.isalnum() else "_" for c in str(part)) for part in path]
    name = "_".join(words)
    if not name.isidentifier() or name == "args":
        name = f"arg_{name}"
    while name in used_names:
        name += "_"
    used_names.add(name)
    return name


# --- arguments described as ``Any``, which a trace gets as stand-ins: see ``bridge/trace/opaque``


Hide = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
"""A function of positional and keyword arguments that hides those described as ``Any``."""


def hide_opaque_arguments(
    described: Mapping[str, Descriptor],
    signature: inspect.Signature,
    spell: Callable[[Sequence[Any]], str],
) -> Hide:
    """Return a function that replaces each value with the descriptor ``Any`` by an opaque value.

    A container described as ``Any`` gets one opaque value, so that it can't be iterated or
    measured. In an annotation ``Any`` promises nothing, as to type checkers (PEP 484).

    Args:
        described: parameter name to descriptor.
        signature: the parameters of the function that is traced.
        spell: returns a path in the user's spelling.
    """

    def hide(
        args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def hidden(parameter: str, value: Any, *path: Any) -> Any:
            if parameter not in described:
                return value
            return _with_opaque_parts(
                described[parameter], value, path, lambda at: (spell((parameter, *at)), parameter)
            )

        positions = signature.bind(*range(len(args)), **{name: name for name in kwargs}).arguments
        new_args, new_kwargs = list(args), dict(kwargs)
        for parameter, at in positions.items():
            # A starred parameter gathers positions in a tuple, or names in a dict.
            if isinstance(at, tuple):
                for i, each in enumerate(at):
                    new_args[each] = hidden(parameter, args[each], i)
            elif isinstance(at, dict):
                for name in at:
                    new_kwargs[name] = hidden(parameter, kwargs[name], name)
            elif isinstance(at, int):
                new_args[at] = hidden(parameter, args[at])
            else:
                new_kwargs[at] = hidden(parameter, kwargs[at])
        return tuple(new_args), new_kwargs

    return hide


def _with_opaque_parts(
    declared: Descriptor,
    value: Any,
    path: tuple[Any, ...],
    words: Callable[[tuple[Any, ...]], tuple[str, str]],
) -> Any:
    """Return the value at a path with each part of type ``Any`` replaced by an opaque value."""
    if value is None:
        return None
    if _is_any(declared, path):
        return OpaqueValue(value, *words(path))
    if optree.tree_is_leaf(value, none_is_leaf=True, namespace=pytrees.NAMESPACE):
        return value
    node = optree.tree_flatten_one_level(value, none_is_leaf=True, namespace=pytrees.NAMESPACE)
    children = [
        _with_opaque_parts(declared, child, (*path, entry), words)
        for entry, child in zip(node.entries, node.children, strict=True)
    ]
    unchanged = all(one is other for one, other in zip(children, node.children, strict=True))
    return value if unchanged else node.unflatten_func(node.metadata, children)


def _is_any(declared: Descriptor, path: tuple[Any, ...]) -> bool:
    """True if a descriptor has type ``Any`` for the value at a path."""
    match declared:
        case TSMetaType():
            return True
        case TSUnion(alternatives):
            return any(_is_any(alternative, path) for alternative in alternatives)
        case _:
            child = declared.child_at(path) if path else None
            if child is None or (child == ANY and _is_annotated_as_any(declared, path[0])):
                return False
            return _is_any(child, path[1:])


def _is_annotated_as_any(declared: Descriptor, entry: Any) -> bool:
    """True for the field of a class that does not annotate it with a type, or with ``Any``."""
    match declared:
        case TSFields(cls):
            name = str(entry)
        case TSPytree(cls) if optree.is_namedtuple_class(cls):
            name = optree.namedtuple_fields(cls)[entry]
        case _:
            return False
    return attribute_types(cls).get(name, ANY) == ANY
