"""Collectives: operations across the examples of a named axis.

Each collective takes a pytree and the name of an axis. ``vmap(f, axis_name="i")`` binds a name to
the examples of a batch; ``shard_map`` and ``mesh_axes`` bind names to the ranks of a mesh. The
functions are those of ``jax.lax`` and have the same transposes: the gradient of a sum over an axis
is a sum over the axis.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from operator import mul
from typing import Any, TypeVar, cast

import torch

from tsfunc import pytrees
from tsfunc.bridge.control import axis_collectives as physical
from tsfunc.bridge.control.axis_collectives import Axis
from tsfunc.bridge.tracers.batch_tracer import BatchLevel
from tsfunc.user_code import folding

_Tree = TypeVar("_Tree")


@folding("psum")
def psum(x: _Tree, axis_name: Hashable | Sequence[Hashable]) -> _Tree:
    """Return the sum over the examples of an axis, the same for each example.

    Args:
        x: a pytree of tensors and numbers.
        axis_name: the axis, or a tuple of axes.

    Returns:
        A pytree like ``x``. A number counts as equal in all examples: the result is the number
        times the axis size.

    Raises:
        UnboundAxisError: no active transform binds the name.

    Example:
        >>> import torch
        >>> from tsfunc import psum, vmap
        >>> vmap(lambda x: x / psum(x, "i"), axis_name="i")(torch.tensor([1., 3.]))
        tensor([0.2500, 0.7500])

    Corresponds to ``jax.lax.psum``.
    """
    out: Any = x
    for level in _levels(axis_name, "psum"):
        if type(out) is torch.Tensor:
            out = physical.sum_over_axis(level, out)
            continue
        of = functools.partial(physical.sum_over_axis, level)
        out = _each("psum", out, of, functools.partial(mul, level.batch_size))
    return cast(_Tree, out)


@folding("pmean")
def pmean(x: _Tree, axis_name: Hashable | Sequence[Hashable]) -> _Tree:
    """Return the mean over the examples of an axis, the same for each example.

    Args:
        x: a pytree of tensors and numbers.
        axis_name: the axis, or a tuple of axes.

    Returns:
        A pytree like ``x``.

    Raises:
        UnboundAxisError: no active transform binds the name.

    Example:
        >>> import torch
        >>> from tsfunc import pmean, vmap
        >>> vmap(lambda x: x - pmean(x, "i"), axis_name="i")(torch.tensor([1., 3.]))
        tensor([-1.,  1.])

    Corresponds to ``jax.lax.pmean``.
    """
    size = 1
    for level in _levels(axis_name, "pmean"):
        size *= level.batch_size
    return pytrees.tree_map(lambda leaf: leaf / size, psum(x, axis_name))


@folding("pmax")
def pmax(x: _Tree, axis_name: Hashable | Sequence[Hashable]) -> _Tree:
    """Return the elementwise maximum over the examples of an axis, the same for each example.

    Args:
        x: a pytree of tensors and numbers.
        axis_name: the axis, or a tuple of axes.

    Returns:
        A pytree like ``x``. Examples with equal values share the gradient.

    Raises:
        UnboundAxisError: no active transform binds the name.

    Example:
        >>> import torch
        >>> from tsfunc import pmax, vmap
        >>> vmap(lambda x: pmax(x, "i"), axis_name="i")(torch.tensor([1., 3.]))
        tensor([3., 3.])

    Corresponds to ``jax.lax.pmax``.
    """
    return _extreme("pmax", torch.amax, x, axis_name)


@folding("pmin")
def pmin(x: _Tree, axis_name: Hashable | Sequence[Hashable]) -> _Tree:
    """Return the elementwise minimum over the examples of an axis, the same for each example.

    Args:
        x: a pytree of tensors and numbers.
        axis_name: the axis, or a tuple of axes.

    Returns:
        A pytree like ``x``. Examples with equal values share the gradient.

    Raises:
        UnboundAxisError: no active transform binds the name.

    Example:
        >>> import torch
        >>> from tsfunc import pmin, vmap
        >>> vmap(lambda x: pmin(x, "i"), axis_name="i")(torch.tensor([1., 3.]))
        tensor([1., 1.])

    Corresponds to ``jax.lax.pmin``.
    """
    return _extreme("pmin", torch.amin, x, axis_name)


def _extreme(label: str, of: Callable[..., Any], x: Any, axis_name: Any) -> Any:
    for level in _levels(axis_name, label):
        x = _each(label, x, functools.partial(_of_gathered, of, level), _itself)
    return x


def _of_gathered(of: Callable[..., Any], level: Axis, leaf: torch.Tensor) -> Any:
    return of(physical.all_gather(level, leaf, 0), 0)


@folding("all_gather")
def all_gather(x: Any, axis_name: Hashable, *, axis: int = 0, tiled: bool = False) -> Any:
    """Return the examples of an axis stacked along a new dim, the same for each example.

    Args:
        x: a pytree of tensors and numbers.
        axis_name: the axis, or a tuple of axes, of which the last varies fastest.
        axis: the position of the new dim.
        tiled: if True, the examples are concatenated along the existing dim ``axis`` instead.

    Returns:
        A pytree with the structure of ``x``.

    Raises:
        UnboundAxisError: no active transform binds the name.

    Example:
        >>> import torch
        >>> from tsfunc import all_gather, vmap
        >>> vmap(lambda x: all_gather(x, "i"), axis_name="i")(torch.tensor([1., 3.]))
        tensor([[1., 3.],
                [1., 3.]])

    Corresponds to ``jax.lax.all_gather``.
    """
    levels = _levels(axis_name, "all_gather")

    def gathered(leaf: torch.Tensor) -> torch.Tensor:
        at = _axis("all_gather", leaf, axis, 0 if tiled else 1)
        merged = tiled
        for level in reversed(levels):
            by_index = physical.all_gather(level, leaf, at)
            leaf = by_index.flatten(at, at + 1) if merged else by_index
            merged = True
        return leaf

    return _each("all_gather", x, gathered, _of_number(gathered))


@folding("psum_scatter")
def psum_scatter(
    x: Any,
    axis_name: Hashable | Sequence[Hashable],
    *,
    scatter_dimension: int = 0,
    tiled: bool = False,
) -> Any:
    """Sum over the examples of an axis, and return to each example its slice of the sum.

    Args:
        x: a pytree of tensors, whose dim ``scatter_dimension`` has the size of the axis (with
            ``tiled``, a multiple of it).
        axis_name: the axis. A tuple of axes acts as one axis, in which the last varies fastest.
        scatter_dimension: the dim that is split into slices.
        tiled: if True, the dim is kept with the size of a slice; otherwise it is removed.

    Returns:
        A pytree with the structure of ``x``.

    Raises:
        UnboundAxisError: no active transform binds the name.
        ValueError: the size of the dim does not fit the axis.

    Example:
        >>> import torch
        >>> from tsfunc import psum_scatter, vmap
        >>> vmap(lambda x: psum_scatter(x, "i"), axis_name="i")(torch.tensor([[1, 2], [3, 4]]))
        tensor([4, 6])

    Corresponds to ``jax.lax.psum_scatter``.
    """
    levels = _levels(axis_name, "psum_scatter")

    def scattered(leaf: torch.Tensor) -> torch.Tensor:
        at = _axis("psum_scatter", leaf, scatter_dimension, 0)
        parts = _split_dim("psum_scatter", leaf, at, levels, tiled)
        for level in levels:
            parts = physical.reduce_scatter(level, parts, at)
        return parts

    return _each("psum_scatter", x, scattered)


@folding("all_to_all")
def all_to_all(
    x: Any,
    axis_name: Hashable | Sequence[Hashable],
    split_axis: int,
    concat_axis: int,
    *,
    tiled: bool = False,
) -> Any:
    """Send each example of an axis its slice of a dim, and stack the received slices along a dim.

    Args:
        x: a pytree of tensors, whose dim ``split_axis`` has the size of the axis (with ``tiled``,
            a multiple of it).
        axis_name: the axis. A tuple of axes acts as one axis, in which the last varies fastest.
        split_axis: the dim that is split; it is removed (with ``tiled``, it becomes smaller).
        concat_axis: the position of the new dim of the received slices (with ``tiled``, the dim
            along which they are concatenated).
        tiled: if True, the number of dims does not change.

    Returns:
        A pytree with the structure of ``x``.

    Raises:
        UnboundAxisError: no active transform binds the name.
        ValueError: the size of the dim does not fit the axis.

    Example:
        >>> import torch
        >>> from tsfunc import all_to_all, vmap
        >>> vmap(lambda x: all_to_all(x, "i", 0, 0), axis_name="i")(torch.tensor([[1, 2], [3, 4]]))
        tensor([[1, 3],
                [2, 4]])

    Corresponds to ``jax.lax.all_to_all``.
    """
    levels = _levels(axis_name, "all_to_all")

    def exchanged(leaf: torch.Tensor) -> torch.Tensor:
        split = _axis("all_to_all", leaf, split_axis, 0)
        concat = _axis("all_to_all", leaf, concat_axis, 0)
        parts = _split_dim("all_to_all", leaf, split, levels, tiled)
        # The dims of the axes move to the front, so that each exchange keeps its dim in place.
        parts = parts.movedim(list(range(split, split + len(levels))), list(range(len(levels))))
        for at, level in enumerate(levels):
            parts = physical.all_to_all(level, parts, at, at)
        parts = parts.flatten(0, len(levels) - 1).movedim(0, concat)
        # The dim of a slice keeps its position; the received dim is in front of the concatenated
        # dim.
        return parts.flatten(concat, concat + 1) if tiled else parts

    return _each("all_to_all", x, exchanged)


@folding("ppermute")
def ppermute(
    x: Any, axis_name: Hashable | Sequence[Hashable], perm: Sequence[tuple[int, int]]
) -> Any:
    """Send values of examples to other examples of an axis.

    Args:
        x: a pytree of tensors and numbers.
        axis_name: the axis. A tuple of axes acts as one axis, in which the last varies fastest.
        perm: pairs (source, destination) of example numbers; each number is at most once a source
            and at most once a destination.

    Returns:
        A pytree with the structure of ``x``: the received values, or zeros for examples that
        receive none.

    Raises:
        UnboundAxisError: no active transform binds the name.
        ValueError: ``perm`` has an invalid number, or a number sends or receives twice.

    Example:
        >>> import torch
        >>> from tsfunc import ppermute, vmap
        >>> shift = lambda x: ppermute(x, "i", [(0, 1), (1, 2)])
        >>> vmap(shift, axis_name="i")(torch.tensor([1, 2, 3]))
        tensor([0, 1, 2])

    Corresponds to ``jax.lax.ppermute``.
    """
    levels = _levels(axis_name, "ppermute")
    size = math.prod(level.batch_size for level in levels)
    for side, numbers in zip(("source", "destination"), zip(*perm, strict=True), strict=False):
        if len(set(numbers)) != len(numbers) or not all(0 <= n < size for n in numbers):
            raise ValueError(
                f"ppermute: perm: expected each {side} to be an example's number (0 to "
                f"{size - 1}), at most once, got {list(perm)}."
            )
    permuted = functools.partial(_permute, levels, perm)
    return _each("ppermute", x, permuted, _of_number(permuted))


def _permute(levels: Sequence[Axis], perm: Sequence[tuple[int, int]], leaf: torch.Tensor) -> Any:
    """Return the permuted values; over several axes, by gathering the values of all examples."""
    if len(levels) == 1:
        return physical.permute(levels[0], leaf, perm)
    for level in reversed(levels):
        leaf = physical.all_gather(level, leaf, 0)
    senders = {receiver: sender for sender, receiver in perm}
    size = math.prod(level.batch_size for level in levels)
    flat = leaf.flatten(0, len(levels) - 1)
    chosen = torch.tensor([senders.get(i, size) for i in range(size)], device=leaf.device)
    flat = torch.cat([flat, torch.zeros_like(flat[:1])]).index_select(0, chosen)
    return flat[_index_along(levels, leaf.device)]


@folding("axis_index")
def axis_index(axis_name: Hashable, *, device: torch.device | str | None = None) -> torch.Tensor:
    """Return each example's index along an axis.

    Args:
        axis_name: the axis. A tuple of axes acts as one axis, in which the last varies fastest.
        device: the device of the tensor; by default torch's default device.

    Returns:
        An int64 tensor of shape ``()``, from 0 to the axis size, exclusive.

    Raises:
        UnboundAxisError: no active transform binds the name.

    Example:
        >>> import torch
        >>> from tsfunc import axis_index, vmap
        >>> vmap(lambda x: x * axis_index("i"), axis_name="i")(torch.ones(3))
        tensor([0., 1., 2.])

    Corresponds to ``jax.lax.axis_index``.
    """
    on = None if device is None else torch.device(device)
    levels = _levels(axis_name, "axis_index", alone=True)
    return _index_along(levels, on)


def _index_along(levels: Sequence[Axis], device: torch.device | None) -> torch.Tensor:
    """Return each example's index along several axes that act as one axis."""
    first, *others = levels
    index = physical.axis_index(first, device)
    for level in others:
        index = index * physical.axis_size(level) + physical.axis_index(level, device)
    return index


@folding("axis_size")
def axis_size(axis_name: Hashable) -> int:
    """Return the number of examples of an axis.

    Args:
        axis_name: the axis, or a tuple of axes for the product of their sizes.

    Returns:
        An int, the same for every example.

    Raises:
        UnboundAxisError: no active transform binds the name.

    Example:
        >>> import torch
        >>> from tsfunc import axis_size, vmap
        >>> vmap(lambda x: x * axis_size("i"), axis_name="i")(torch.ones(3))
        tensor([3., 3., 3.])

    Corresponds to ``jax.lax.axis_size``.
    """
    levels = _levels(axis_name, "axis_size", alone=True)
    return math.prod(map(physical.axis_size, levels))


def _levels(names: Any, label: str, *, alone: bool = False) -> list[Axis]:
    """Return the levels that bind the names; levels that a batch is spread over come before it."""
    levels: list[Axis] = []
    for name in _names(names):
        level = physical.level_named(name, label, alone=alone)
        if isinstance(level, BatchLevel):
            levels += level.spread_over
        levels.append(level)
    return levels


def _names(names: Any) -> tuple[Any, ...]:
    return tuple(names) if isinstance(names, tuple | list) else (names,)


def _itself(number: Any) -> Any:
    return number


def _of_number(of: Callable[[torch.Tensor], Any]) -> Callable[[Any], Any]:
    return lambda number: of(torch.as_tensor(number))


def _each(
    label: str,
    x: Any,
    of: Callable[[torch.Tensor], Any],
    of_number: Callable[[Any], Any] | None = None,
) -> Any:
    def of_leaf(leaf: Any) -> Any:
        if leaf is None:
            return None
        if isinstance(leaf, torch.Tensor):
            return of(leaf)
        if of_number is not None and isinstance(leaf, bool | int | float | complex):
            return of_number(leaf)
        raise TypeError(f"{label}: expected tensors, got {type(leaf).__name__}.")

    return pytrees.tree_map(of_leaf, x)


def _axis(label: str, leaf: torch.Tensor, axis: int, new: int) -> int:
    """Return a dim counted from the front, among the tensor's dims and ``new`` more."""
    rank = leaf.dim() + new
    if not -rank <= axis < rank:
        raise ValueError(
            f"{label}: expected a dim of a tensor of shape {tuple(leaf.shape)}, got {axis}."
        )
    return axis % rank


def _split_dim(
    label: str, leaf: torch.Tensor, at: int, levels: Sequence[Axis], tiled: bool
) -> torch.Tensor:
    """Return the tensor with the dim ``at`` split into dims of the axes' sizes."""
    sizes = [level.batch_size for level in levels]
    size, axis_total = leaf.shape[at], math.prod(sizes)
    if size % axis_total if tiled else size != axis_total:
        expected = f"a multiple of {axis_total}" if tiled else f"{axis_total}"
        names = " and ".join(repr(level.axis_name) for level in levels)
        of = "the size of the axis" if len(levels) == 1 else "the product of the sizes of the axes"
        raise ValueError(
            f"{label}: the size of dim {at}: expected {expected}, {of} {names}, got a tensor of "
            f"shape {tuple(leaf.shape)}."
        )
    if tiled:
        sizes.append(size // axis_total)
    return leaf if sizes == [size] else leaf.unflatten(at, sizes)
