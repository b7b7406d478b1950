"""Type checks of the results of branches and bodies, with their error messages.

NOTE [numbers among results]
A Python number has a kind and no dtype. A number takes the dtype of the tensor, or the kind of the
number, that another branch or step returns in its place, as in arithmetic (JAX's weak types). A
number may be widened in this way, as an int to a float, but not narrowed. A bool is not
interchangeable with the ints 0 and 1. Symbolic sizes are numbers of a trace.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import optree
import torch

from tsfunc import pytrees
from tsfunc.bridge.sizes.symbolic_numbers import kind_of, size_text
from tsfunc.bridge.tracers.batch_tracer import BatchLevel, wrap
from tsfunc.bridge.tracers.user_queries import SYMBOLIC, same_number
from tsfunc.errors import DescriptorError, TypeCheckError
from tsfunc.transforms.abstract_eval import AbstractTensor
from tsfunc.types import DimSpec, MetaTensorType, TSTensor, TSType, of_value
from tsfunc.types.control_flow_types import branch_faults, carry_faults
from tsfunc.types.dims import parse_dim, spell_dim
from tsfunc.types.lattice import nominal_view
from tsfunc.types.sizes import DimExpr
from tsfunc.types.values import array_advice, is_array, same_value

BRANCH_ADVICE = (
    "Make the branches return the same structure of the same types, for example with x.to(dtype), "
    "torch.broadcast_to or torch.zeros_like."
)


def leaf_type_text(leaf: Any) -> str:
    """Return a leaf's type as messages show it: ``f32[3, 4]``, ``int``, ``'a string'``."""
    plain = isinstance(leaf, torch.Tensor) or is_number(leaf)
    return str(_type(leaf)) if plain else repr(leaf)


def _type(leaf: Any, *, device: bool = False) -> TSType:
    """Return a leaf's type; for a tensor the properties that control flow must keep."""
    if isinstance(leaf, torch.Tensor):
        dims = [_described_dim(size) for size in leaf.shape]
        at = leaf.device if device else None
        return TSTensor(meta=MetaTensorType(dims, dtype=leaf.dtype, device=at))
    return nominal_view(of_value(kind_of(leaf)() if isinstance(leaf, SYMBOLIC) else leaf))


def _described_dim(size: Any) -> DimSpec:
    if isinstance(size, int):
        return size
    try:
        return spell_dim(parse_dim(DimExpr(size_text(size)).normal))
    except DescriptorError:  # descriptors can't express the size
        return None


def same_type(a: Any, b: Any) -> bool:
    """True if two leaves are interchangeable: the join of their types is their type."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype is b.dtype and a.shape == b.shape and a.device == b.device
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        number, tensor = (b, a) if isinstance(a, torch.Tensor) else (a, b)
        return is_number(number) and tensor.dim() == 0 and _fits(number, tensor.dtype)
    if is_number(a) and is_number(b):
        return (kind_of(a) is bool) is (kind_of(b) is bool)
    return same_value(a, b)


_NUMBERS: Final = (bool, int, float, complex, *SYMBOLIC)


def is_number(value: Any) -> bool:
    return isinstance(value, _NUMBERS)


def _fits(number: Any, dtype: torch.dtype) -> bool:
    """True if a number may become a tensor of the dtype: NOTE [numbers among results]."""
    kind = kind_of(number)
    if kind is bool or dtype is torch.bool:
        return kind is bool and dtype is torch.bool
    if kind is int:
        return True
    return dtype.is_complex or (kind is float and dtype.is_floating_point)


def common_dtype(column: Sequence[Any]) -> torch.dtype | None:
    """Return the common dtype of numbers at one path: that of a tensor if there is one."""
    for leaf in column:
        if isinstance(leaf, torch.Tensor):
            return leaf.dtype
    if not all(map(is_number, column)):
        return None
    return torch.tensor([kind_of(leaf)() for leaf in column]).dtype


def numbers_to_tensors(tree: Any) -> Any:
    """Return a tree with its numbers as tensors, the form of per-example results."""
    return pytrees.tree_map(lambda x: as_tensor(x) if is_number(x) else x, tree)


def as_tensor(number: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
    """Return a number as a tensor of shape ``()``; by default its dtype is that of its kind."""
    return torch.full((), number, dtype=dtype or common_dtype((number,)), device=device)


def check_branches(label: str, names: tuple[str, str], results: tuple[Any, Any]) -> None:
    """Check that two branches return values of one type: ``tsfunc.types.join_branches``, exactly.

    Raises:
        TypeCheckError: the types differ; the message has both types and each path at which they
            differ.
    """
    _check_faults(
        label, names, results, functools.partial(branch_faults, exact=True), BRANCH_ADVICE
    )


def check_carried(
    label: str, names: tuple[str, str], carries: tuple[Any, Any], advice: str
) -> None:
    """Check that a body's result can replace its carry: ``check_carry`` of types.

    Raises:
        TypeCheckError: the result has another type; the message is as for :func:`check_branches`.
    """
    _check_faults(label, names, carries, carry_faults, advice)


def check_pair(label: str, pair: Any) -> None:
    """Check that a step of a scan returns a carry and a result.

    Raises:
        TypeError: the step does not return a pair.
    """
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise TypeError(
            f"{label}: expected a pair as the result of the function, the next carry and a "
            f"result (None for no "
            f"result), got {show(pair)}."
        )


_Faults = Callable[[TSType, TSType, str], list[str]]


def _check_faults(
    label: str, names: tuple[str, str], trees: tuple[Any, Any], faults: _Faults, advice: str
) -> None:
    (left, left_spec), (right, right_spec) = pytrees.flatten(trees[0]), pytrees.flatten(trees[1])
    differing = ""
    if left_spec == right_spec:
        # Fast path: most results have one type.
        if all(same_type(a, b) for a, b in zip(left, right, strict=True)):
            return
        paths = optree.tree_paths(trees[0], none_is_leaf=True, namespace=pytrees.NAMESPACE)
        lines = [
            f"  {line}"
            for path, a, b in zip(paths, left, right, strict=True)
            for line in _faults_of(a, b, _path(path), faults)
        ]
        differing = "\n" + "\n".join(lines)
    raise TypeCheckError(
        f"{label}: expected {names[0]} and {names[1]} to have one type, got\n"
        f"  {names[0]}: {show(trees[0])}\n  {names[1]}: {show(trees[1])}{differing}\n{advice}"
    )


def _faults_of(a: Any, b: Any, path: str, faults: _Faults) -> list[str]:
    """Return the lines of an error message for two leaves of different types."""
    if same_type(a, b):
        return []
    both = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    device = both and a.device != b.device
    lines = faults(_type(a, device=device), _type(b, device=device), path)
    if not lines:  # unequal values of one type
        lines = [f"At {path} one is {a!r}, the other {b!r}."]
    return [*lines, array_advice(a).strip()] if is_array(a) else lines


def _path(path: Sequence[Any]) -> str:
    return "result" + "".join(f"[{part!r}]" for part in path)


def show(tree: Any) -> str:
    """Return a tree as text with the types of its leaves."""
    described = pytrees.tree_map(lambda leaf: _Description(leaf_type_text(leaf)), tree)
    return repr(described)


class _Description:
    """Placeholder of a leaf in a printed structure."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def combine_leaves(
    trees: Sequence[Any], combine: Callable[[Sequence[torch.Tensor]], torch.Tensor]
) -> Any:
    """Combine results of one type leaf by leaf; numbers become tensors, others are unchanged."""
    flat = [pytrees.flatten(tree) for tree in trees]
    leaves = [_one(column, combine) for column in zip(*(leaves for leaves, _ in flat), strict=True)]
    return optree.tree_unflatten(flat[0][1], leaves)


def _one(column: Sequence[Any], combine: Callable[[Sequence[torch.Tensor]], torch.Tensor]) -> Any:
    first = column[0]
    tensor = next((leaf for leaf in column if isinstance(leaf, torch.Tensor)), None)
    if tensor is None and not is_number(first):
        return first
    device = None if tensor is None else tensor.device
    dtype = common_dtype(column)
    if tensor is None and all(same_number(leaf, first) for leaf in column):
        return as_tensor(first, dtype)
    if all(leaf is first for leaf in column):
        return first
    tensors: list[Any] = [
        leaf if isinstance(leaf, torch.Tensor) else as_tensor(leaf, dtype, device)
        for leaf in column
    ]
    return combine(tensors)


def where(
    level: BatchLevel, mask: torch.Tensor, new: torch.Tensor, old: torch.Tensor
) -> torch.Tensor:
    """Return the new value of the examples in a mask of a vmap, and the old one of the others."""
    return torch.where(wrap(mask, 0, level), new, old)


def slice_like(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return an empty tensor like a slice of a tensor, which may have no slices."""
    at = dim % x.dim()
    return x.new_empty([*x.shape[:at], *x.shape[at + 1 :]])


def stacked_dim(rank: int, dim: int) -> int:
    """Return the dim to stack results of a rank along: ``dim``, or 0 if the rank is too small."""
    return dim if -rank - 1 <= dim <= rank else 0


def stack_of_no_steps(like: Any, dim: int) -> Any:
    """Return the stacked results of no steps: tensors with a dim of size 0."""

    def empty(leaf: Any) -> Any:
        if is_number(leaf):
            leaf = AbstractTensor(
                (), torch.tensor(kind_of(leaf)()).dtype, torch.get_default_device()
            )
        if not isinstance(leaf, AbstractTensor):
            return leaf
        at = stacked_dim(len(leaf.shape), dim) % (len(leaf.shape) + 1)
        shape = [*leaf.shape[:at], 0, *leaf.shape[at:]]
        return torch.empty(shape, dtype=leaf.dtype, device=leaf.device)

    return pytrees.tree_map(empty, like)
