"""``scan``, ``map`` and ``associative_scan``: a function along a dim, with a carry or without.

The number of steps is a size, which is the same for all examples of a vmap: under vmap and the
derivatives these are the loops that they look like, on batched values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch

from tsfunc import pytrees
from tsfunc.bridge.bodies import current_trace
from tsfunc.transforms.control.outputs import check_carried, none_stacked, slice_like
from tsfunc.transforms.control.programs import record_scan
from tsfunc.transforms.outlines import eval_shape
from tsfunc.transforms.vmap import vmap

_ADVICE = (
    "The carry keeps its structure, types and shapes from step to step: convert what the function "
    "returns first (x.to(dtype)), or start with what it returns."
)


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int = 1,
    *,
    dim: int = 0,
) -> tuple[Any, Any]:
    """Calls a function along a dim, handing a carry from step to step, and stacks what it gives.

    Args:
        f: takes the carry and the slices of ``xs`` at one place; returns the next carry, of the
            same type, and a pytree of results.
        init: the first carry, any pytree.
        xs: a pytree of tensors, which have the same size in ``dim``; or None.
        length: how many steps; needed where there is no ``xs``.
        reverse: whether to begin with the last slice. Results stand where their slices did.
        unroll: in a program, how many steps one turn of its loop has; elsewhere of no effect.
        dim: the dim of ``xs`` to go along, and of the stacked results.

    Returns:
        The last carry, and the results, stacked.

    Raises:
        ValueError: there is nothing to go along, or sizes differ.
        TypeError: ``f`` does not return a pair.
        TypeCheckError: the carry changes its type.

    Example:
        >>> import torch
        >>> from tsfunc import scan
        >>> scan(lambda total, x: (total + x, total + x), torch.tensor(0), torch.arange(4))
        (tensor(6), tensor([0, 1, 3, 6]))

    As ``jax.lax.scan``; ``dim`` is ``torch``'s.
    """
    leaves, spec = pytrees.flatten(xs)
    if xs is None:
        leaves = []
    count = _length("scan", leaves, length, dim)
    none = isinstance(count, int) and count == 0  # a symbolic size is not asked
    if current_trace() is not None and not none:
        return record_scan("scan", f, init, xs, length, reverse, dim, _ADVICE)
    slices = [_slices("scan", leaf, dim) for leaf in leaves]
    step = Step("scan", f)
    carry, ys = init, []
    for i in reversed(range(count)) if reverse else range(count):
        x = optree.tree_unflatten(spec, [part[i] for part in slices]) if leaves else None
        carry, y = step(carry, x)
        ys.append(y)
    if none:
        x = optree.tree_unflatten(spec, [slice_like(x, dim) for x in leaves]) if leaves else None
        return init, none_stacked(eval_shape(step, init, x)[1], dim)
    if reverse:
        ys.reverse()
    return carry, stacked(ys, dim)


class Step:
    """One step of a scan, with a look at what the first one returns."""

    def __init__(self, what: str, f: Callable[[Any, Any], tuple[Any, Any]]) -> None:
        self.what, self.f = what, f
        self.checked = False

    def __call__(self, carry: Any, x: Any) -> tuple[Any, Any]:
        found: Any = self.f(carry, x)
        if not self.checked:
            if not isinstance(found, tuple | list) or len(found) != 2:
                raise TypeError(
                    f"{self.what}: the function must return a pair, the next carry and a result "
                    f"(None for no result), got {type(found).__name__}."
                )
            names = ("the carry", "the carry that the function returns")
            check_carried(self.what, names, (carry, found[0]), _ADVICE)
            self.checked = True
        new, y = found
        return new, y


def _length(what: str, leaves: Sequence[Any], length: int | None, dim: int) -> int:
    """How many steps there are to make."""
    sizes = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(
                f"{what}: expected tensors to go along, got {type(leaf).__name__}. Give what is "
                f"the same for all steps by closing over it."
            )
        if not -leaf.dim() <= dim < leaf.dim():
            raise ValueError(
                f"{what}: a tensor of shape {tuple(leaf.shape)} has no dim {dim} to go along."
            )
        sizes.append(leaf.shape[dim])
    if length is not None:
        sizes.append(length)
    if not sizes:
        raise ValueError(f"{what}: there is no tensor to go along; give length=.")
    if any(size != sizes[0] for size in sizes):
        raise ValueError(
            f"{what}: expected one size in dim {dim}, got {sizes}"
            + (" (the last is length=)." if length is not None else ".")
        )
    return sizes[0]


def _slices(what: str, leaf: torch.Tensor, dim: int) -> Sequence[torch.Tensor]:
    return leaf.unbind(dim)


def stacked(ys: Sequence[Any], dim: int) -> Any:
    """Results of the steps as one pytree, their tensors stacked."""
    flat = [pytrees.flatten(y) for y in ys]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return optree.tree_unflatten(flat[0][1], [_stack(column, dim) for column in columns])


def _stack(column: Sequence[Any], dim: int) -> Any:
    if all(leaf is None for leaf in column):
        return None
    return torch.stack([torch.as_tensor(leaf) for leaf in column], dim)


def map(f: Callable[..., Any], xs: Any, *args: Any, batch_size: int | None = None) -> Any:
    """Calls a function with each slice along the first dim, one after the other, and stacks.

    Args:
        f: takes the slices at one place, and ``args``; returns a pytree.
        xs: a pytree of tensors, which have the same size in their first dim.
        args: the same for every call.
        batch_size: how many slices are taken at a time, by ``vmap``. By default one, so that the
            memory is that of one call.

    Returns:
        The results, stacked along a new first dim.

    Raises:
        ValueError: there is nothing to go along, or sizes differ.

    Example:
        >>> import torch
        >>> import tsfunc
        >>> tsfunc.map(torch.sum, torch.ones(3, 2))
        tensor([2., 2., 2.])

    As ``jax.lax.map``; further ``args`` are those of ``torch``'s ``map``.
    """
    if batch_size is not None:
        if batch_size < 1:
            raise ValueError(f"map: batch_size must be at least 1, got {batch_size}.")
        mapped = vmap(lambda x: f(x, *args), randomness="different", chunk_size=batch_size)
        return mapped(xs)
    return scan(lambda carry, x: (carry, f(x, *args)), None, xs)[1]


def associative_scan(
    fn: Callable[[Any, Any], Any],
    elems: Any,
    reverse: bool | int = False,
    axis: int = 0,
    *,
    dim: int | None = None,
) -> Any:
    """Combines the slices along a dim from the left, in a number of steps that is its logarithm.

    Args:
        fn: an associative function of two pytrees like ``elems``. It is called with many slices
            at a time, and is to combine them place by place along ``axis``, as elementwise
            functions and ``vmap(g)`` do.
        elems: a pytree of tensors, which have the same size in ``axis``.
        reverse: whether to combine from the right.
        axis: the dim to go along.
        dim: the same by torch's name, which also takes ``fn`` as torch does: as a function of
            single slices. So does an int in the third place.

    Returns:
        What has the structure of ``elems``: at each place the combination of all up to it.

    Raises:
        ValueError: sizes differ.
        TypeCheckError: ``fn`` returns another type than it takes.

    Example:
        >>> import torch
        >>> from tsfunc import associative_scan
        >>> associative_scan(torch.mul, torch.tensor([1, 2, 3, 4]))
        tensor([ 1,  2,  6, 24])

    As ``jax.lax.associative_scan``: Blelloch, "Prefix sums and their applications" (1990).
    """
    if type(reverse) is int:
        dim, reverse = reverse, False
    if dim is not None:
        fn, axis = vmap(fn, in_dims=dim, out_dims=dim), dim
    leaves, spec = pytrees.flatten(elems)
    size = _length("associative_scan", leaves, None, axis)
    axes = [axis % leaf.dim() for leaf in leaves]
    if reverse:
        leaves = [leaf.flip(at) for leaf, at in zip(leaves, axes, strict=True)]

    def combine(left: Sequence[Any], right: Sequence[Any]) -> Sequence[Any]:
        operands = optree.tree_unflatten(spec, left), optree.tree_unflatten(spec, right)
        found = fn(*operands)
        names = ("the elements", "what the function returns")
        check_carried("associative_scan", names, (operands[0], found), "They must have one type.")
        return pytrees.flatten(found)[0]

    done = _prefixes(combine, leaves, axes, size)
    if reverse:
        done = [leaf.flip(at) for leaf, at in zip(done, axes, strict=True)]
    return optree.tree_unflatten(spec, list(done))


Combine = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]


def _prefixes(
    combine: Combine, leaves: Sequence[torch.Tensor], axes: Sequence[int], size: int
) -> Sequence[torch.Tensor]:
    """Pairs are combined, their prefixes found, and those of the places between from these."""
    if size < 2:
        return leaves

    def every(parts: Sequence[torch.Tensor], start: int, stop: int, step: int) -> list[Any]:
        return [
            part[(slice(None),) * at + (slice(start, stop, step),)]
            for part, at in zip(parts, axes, strict=True)
        ]

    pairs = combine(every(leaves, 0, size - 1, 2), every(leaves, 1, size, 2))
    odd = _prefixes(combine, pairs, axes, size // 2)
    first = every(leaves, 0, 1, 1)
    if size > 2:
        before = every(odd, 0, (size - 1) // 2, 1)
        rest = combine(before, every(leaves, 2, size, 2))
        even = [torch.cat(two, at) for *two, at in zip(first, rest, axes, strict=True)]
    else:
        even = first
    return [_interleaved(a, b, at, size) for a, b, at in zip(even, odd, axes, strict=True)]


def _interleaved(even: torch.Tensor, odd: torch.Tensor, at: int, size: int) -> torch.Tensor:
    """The entries of two tensors in turn along a dim; the first may have one more."""
    count = size // 2
    both = torch.stack([even.narrow(at, 0, count), odd], at + 1).flatten(at, at + 1)
    return both if size % 2 == 0 else torch.cat([both, even.narrow(at, count, 1)], at)
