"""Fits symbolic results for operators whose fake-tensor rules do not support symbolic sizes.

Each size of a result is an expression in the sizes of the arguments that matches the operator's
results at several fixed sizes (``shape_probe``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import optree
import torch
from torch._C import DisableTorchFunction
from torch._subclasses.fake_tensor import FakeTensorMode

from tsfunc.bridge.sizes.shape_probe import ENOUGH, ShapeProbe, at
from tsfunc.bridge.tracers.user_queries import suppress_guards
from tsfunc.ops.dims import dense_strides, memory_order


def fit_shapes(probe: ShapeProbe, fake: FakeTensorMode) -> Any:
    """Return the results of a call, fitted to results at fixed sizes; None if no fit exists."""
    taken: list[tuple[dict[Any, int], Any]] = []
    for sizes in probe.sizes():
        results = probe.results(sizes)
        if results is None and not taken:
            return None  # the operator refuses the sizes of the call itself
        if results is not None:
            taken.append((sizes, results))
    if len(taken) <= ENOUGH:
        return None
    atoms = _sizes_in((probe.args, probe.kwargs))
    leaves, tree = optree.tree_flatten(taken[0][1], none_is_leaf=True)
    columns = [optree.tree_leaves(results, none_is_leaf=True) for _, results in taken]
    if any(len(column) != len(leaves) for column in columns):
        return None
    points = [sizes for sizes, _ in taken]
    fitted = []
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            if any(column[i] != leaf for column in columns):
                return None
            fitted.append(leaf)
            continue
        like = _fit_tensor([column[i] for column in columns], points, atoms, fake)
        if like is None:
            return None
        fitted.append(like)
    return optree.tree_unflatten(tree, fitted)


def _fit_tensor(
    samples: Sequence[torch.Tensor],
    points: Sequence[Mapping[Any, int]],
    atoms: Sequence[Any],
    fake: FakeTensorMode,
) -> torch.Tensor | None:
    """Return a fake tensor that matches each sample at its sizes, or None."""
    first = samples[0]
    if any(not isinstance(x, torch.Tensor) or x.dim() != first.dim() for x in samples):
        return None
    shape = []
    for dim in range(first.dim()):
        size = _fitted_expression([int(x.shape[dim]) for x in samples], points, atoms)
        if size is None:
            return None
        shape.append(size)
    strides = dense_strides(shape, memory_order(first.shape, first.stride()))
    with DisableTorchFunction(), fake, suppress_guards(fake):
        return torch.empty_strided(shape, strides, dtype=first.dtype, device=first.device)


def _sizes_in(values: Any) -> list[Any]:
    """Return the distinct symbolic sizes of tensors, and symbolic ints, among arguments."""
    sizes: dict[Any, Any] = {}
    for leaf in optree.tree_leaves(values, none_is_leaf=True):
        for size in leaf.shape if isinstance(leaf, torch.Tensor) else (leaf,):
            if isinstance(size, torch.SymInt):
                sizes.setdefault(size.node.expr, size)
    return list(sizes.values())


def _fitted_expression(
    wanted: Sequence[int], points: Sequence[Mapping[Any, int]], atoms: Sequence[Any]
) -> Any:
    """Return an expression in some sizes that has the wanted values, or None."""
    if len(set(wanted)) == 1:
        return wanted[0]
    for candidate in _candidates(wanted, points, atoms):
        pairs = zip(points, wanted, strict=True)
        if all(at([candidate], sizes) == [value] for sizes, value in pairs):
            return candidate
    return None


def _candidates(
    wanted: Sequence[int], points: Sequence[Mapping[Any, int]], atoms: Sequence[Any]
) -> Iterator[Any]:
    yield from atoms
    for atom in atoms:
        here, there = at([atom], points[0])[0], at([atom], points[1])[0]
        if here != there and (wanted[1] - wanted[0]) % (there - here) == 0:
            slope = (wanted[1] - wanted[0]) // (there - here)
            yield slope * atom + (wanted[0] - slope * here)
        for by in (2, 3, 4, 8):
            yield atom // by + (wanted[0] - here // by)
            yield (atom + 1) // by + (wanted[0] - (here + 1) // by)
    for some, other in itertools.combinations(atoms, 2):
        one, two = at([some, other], points[0])
        yield some + other + (wanted[0] - one - two)
        yield some - other + (wanted[0] - one + two)
        yield other - some + (wanted[0] - two + one)
        yield some * other
        yield torch.sym_min(some, other)
        yield torch.sym_max(some, other)
        for k in (-4, -3, -2, -1, 1, 2, 3, 4):
            yield torch.sym_min(some + k, other)
            yield torch.sym_min(some, other + k)
    for several in itertools.combinations(atoms, 3):
        yield several[0] * several[1] * several[2]
        yield several[0] + several[1] + several[2]
