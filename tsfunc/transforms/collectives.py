"""Collectives: operations across the examples of a named axis.

Each takes pytrees and the name of the axis. ``vmap(f, axis_name="i")`` binds a name to the examples
of a batch, ``shard_map`` and ``mesh_axes`` bind one to the ranks of a mesh. The functions are those
of ``jax.lax``, and so are their transposes: the gradient of a sum over an axis is a sum over the
axis.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from operator import mul
from typing import Any

import torch

from tsfunc import pytrees
from tsfunc.bridge.control import collectives as physical
from tsfunc.bridge.control.collectives import Axis
from tsfunc.bridge.tracers.batch_tracer import BatchLevel


def psum(x: Any, axis_name: Hashable | Sequence[Hashable]) -> Any:
    """The sum over the examples of an axis, the same for each.

    Args:
        x: a pytree of tensors and numbers.
        axis_name: an axis, or a tuple of them.

    Returns:
        What has the structure of ``x``; a number times the size of the axis for a number.

    Raises:
        UnboundAxisError: no active ``vmap`` has that name.

    Example:
        >>> import torch
        >>> from tsfunc import psum, vmap
        >>> vmap(lambda x: x / psum(x, "i"), axis_name="i")(torch.tensor([1., 3.]))
        tensor([0.2500, 0.7500])

    As ``jax.lax.psum``.
    """
    for level in _levels(axis_name, "psum"):
        of = functools.partial(physical.total, level)
        x = _each("psum", x, of, functools.partial(mul, level.batch_size))
    return x


def pmean(x: Any, axis_name: Hashable | Sequence[Hashable]) -> Any:
    """The mean over the examples of an axis, the same for each.

    Arguments, result and errors are those of :func:`psum`.

    Example:
        >>> import torch
        >>> from tsfunc import pmean, vmap
        >>> vmap(lambda x: x - pmean(x, "i"), axis_name="i")(torch.tensor([1., 3.]))
        tensor([-1.,  1.])

    As ``jax.lax.pmean``.
    """
    size = 1
    for level in _levels(axis_name, "pmean"):
        size *= level.batch_size
    return pytrees.tree_map(lambda leaf: leaf / size, psum(x, axis_name))


def pmax(x: Any, axis_name: Hashable | Sequence[Hashable]) -> Any:
    """The greatest value among the examples of an axis, element by element, the same for each.

    Arguments, result and errors are those of :func:`psum`. Where examples are equal, the gradient
    is shared among them.

    Example:
        >>> import torch
        >>> from tsfunc import pmax, vmap
        >>> vmap(lambda x: pmax(x, "i"), axis_name="i")(torch.tensor([1., 3.]))
        tensor([3., 3.])

    As ``jax.lax.pmax``.
    """
    return _extreme("pmax", torch.amax, x, axis_name)


def pmin(x: Any, axis_name: Hashable | Sequence[Hashable]) -> Any:
    """The least value among the examples of an axis, element by element, the same for each.

    Arguments, result and errors are those of :func:`pmax`.

    Example:
        >>> import torch
        >>> from tsfunc import pmin, vmap
        >>> vmap(lambda x: pmin(x, "i"), axis_name="i")(torch.tensor([1., 3.]))
        tensor([1., 1.])

    As ``jax.lax.pmin``.
    """
    return _extreme("pmin", torch.amin, x, axis_name)


def _extreme(what: str, of: Callable[..., Any], x: Any, axis_name: Any) -> Any:
    for level in _levels(axis_name, what):
        x = _each(what, x, functools.partial(_of_gathered, of, level), _itself)
    return x


def _of_gathered(of: Callable[..., Any], level: Axis, leaf: torch.Tensor) -> Any:
    return of(physical.gathered(level, leaf, 0), 0)


def all_gather(x: Any, axis_name: Hashable, *, axis: int = 0, tiled: bool = False) -> Any:
    """The examples of an axis along a new dim, the same for each.

    Args:
        x: a pytree of tensors and numbers.
        axis_name: the axis; of a tuple of them the examples of the first come slowest.
        axis: where the new dim stands.
        tiled: whether they are put one after the other along the dim ``axis`` that there is.

    Returns:
        What has the structure of ``x``.

    Raises:
        UnboundAxisError: no active ``vmap`` has that name.

    Example:
        >>> import torch
        >>> from tsfunc import all_gather, vmap
        >>> vmap(lambda x: all_gather(x, "i"), axis_name="i")(torch.tensor([1., 3.]))
        tensor([[1., 3.],
                [1., 3.]])

    As ``jax.lax.all_gather``.
    """
    levels = _levels(axis_name, "all_gather")

    def gathered(leaf: torch.Tensor) -> torch.Tensor:
        at = _axis("all_gather", leaf, axis, 0 if tiled else 1)
        merged = tiled
        for level in reversed(levels):
            found = physical.gathered(level, leaf, at)
            leaf = found.flatten(at, at + 1) if merged else found
            merged = True
        return leaf

    return _each("all_gather", x, gathered, _of_number(gathered))


def psum_scatter(
    x: Any,
    axis_name: Hashable | Sequence[Hashable],
    *,
    scatter_dimension: int = 0,
    tiled: bool = False,
) -> Any:
    """The sum over the examples of an axis, of which each is given its slice.

    Args:
        x: a pytree of tensors, whose dim ``scatter_dimension`` has the axis' size (with
            ``tiled`` a multiple of it).
        axis_name: the axis, or a tuple of them: their examples are one axis, those of the last
            name counted first.
        scatter_dimension: the dim that the slices are of.
        tiled: whether the dim is kept, each example's part of it in its place.

    Returns:
        What has the structure of ``x``.

    Raises:
        UnboundAxisError: no active ``vmap`` has that name.
        ValueError: the dim's size does not fit.

    Example:
        >>> import torch
        >>> from tsfunc import psum_scatter, vmap
        >>> vmap(lambda x: psum_scatter(x, "i"), axis_name="i")(torch.tensor([[1, 2], [3, 4]]))
        tensor([4, 6])

    As ``jax.lax.psum_scatter``.
    """
    levels = _levels(axis_name, "psum_scatter")

    def scattered(leaf: torch.Tensor) -> torch.Tensor:
        at = _axis("psum_scatter", leaf, scatter_dimension, 0)
        found = _split("psum_scatter", leaf, at, levels, tiled)
        for level in levels:
            found = physical.scattered(level, found, at)
        return found

    return _each("psum_scatter", x, scattered)


def all_to_all(
    x: Any,
    axis_name: Hashable | Sequence[Hashable],
    split_axis: int,
    concat_axis: int,
    *,
    tiled: bool = False,
) -> Any:
    """Sends each example of an axis its slice of a dim, and collects what comes along another.

    Args:
        x: a pytree of tensors, whose dim ``split_axis`` has the axis' size (with ``tiled`` a
            multiple of it).
        axis_name: the axis, or a tuple of them: their examples are one axis, those of the last
            name counted first.
        split_axis: the dim that slices are sent of; it goes (with ``tiled`` it gets smaller).
        concat_axis: where the dim of what comes in stands (with ``tiled`` the dim that it is
            put along).
        tiled: whether dims are kept.

    Returns:
        What has the structure of ``x``.

    Raises:
        UnboundAxisError: no active ``vmap`` has that name.
        ValueError: the dim's size does not fit.

    Example:
        >>> import torch
        >>> from tsfunc import all_to_all, vmap
        >>> vmap(lambda x: all_to_all(x, "i", 0, 0), axis_name="i")(torch.tensor([[1, 2], [3, 4]]))
        tensor([[1, 3],
                [2, 4]])

    As ``jax.lax.all_to_all``.
    """
    levels = _levels(axis_name, "all_to_all")

    def exchanged(leaf: torch.Tensor) -> torch.Tensor:
        split = _axis("all_to_all", leaf, split_axis, 0)
        concat = _axis("all_to_all", leaf, concat_axis, 0)
        found = _split("all_to_all", leaf, split, levels, tiled)
        # What is sent by one axis after the other keeps its place at the front.
        found = found.movedim(list(range(split, split + len(levels))), list(range(len(levels))))
        for at, level in enumerate(levels):
            found = physical.exchanged(level, found, at, at)
        found = found.flatten(0, len(levels) - 1).movedim(0, concat)
        # The slices' own dim is where it was; what comes in stands before the dim it is put along.
        return found.flatten(concat, concat + 1) if tiled else found

    return _each("all_to_all", x, exchanged)


def ppermute(
    x: Any, axis_name: Hashable | Sequence[Hashable], perm: Sequence[tuple[int, int]]
) -> Any:
    """Sends examples' values to other examples of an axis.

    Args:
        x: a pytree of tensors and numbers.
        axis_name: the axis, or a tuple of them: their examples are numbered as one axis, those of
            the last name counted first.
        perm: pairs of the example that sends and the one that receives, each at most once.

    Returns:
        What has the structure of ``x``: what came; zeros for those to whom nothing was sent.

    Raises:
        UnboundAxisError: no active ``vmap`` has that name.
        ValueError: a number is no example's, or sends or receives twice.

    Example:
        >>> import torch
        >>> from tsfunc import ppermute, vmap
        >>> shift = lambda x: ppermute(x, "i", [(0, 1), (1, 2)])
        >>> vmap(shift, axis_name="i")(torch.tensor([1, 2, 3]))
        tensor([0, 1, 2])

    As ``jax.lax.ppermute``.
    """
    levels = _levels(axis_name, "ppermute")
    size = math.prod(level.batch_size for level in levels)
    for side, numbers in zip(("source", "destination"), zip(*perm, strict=True), strict=False):
        if len(set(numbers)) != len(numbers) or not all(0 <= n < size for n in numbers):
            raise ValueError(
                f"ppermute: each {side} must be an example's number (0 to {size - 1}), and stand "
                f"in perm at most once, got {list(perm)}."
            )
    permuted = functools.partial(_permuted, levels, perm)
    return _each("ppermute", x, permuted, _of_number(permuted))


def _permuted(levels: Sequence[Axis], perm: Sequence[tuple[int, int]], leaf: torch.Tensor) -> Any:
    """What the examples send each other; by several axes, out of all examples' values."""
    if len(levels) == 1:
        return physical.permuted(levels[0], leaf, perm)
    for level in reversed(levels):
        leaf = physical.gathered(level, leaf, 0)
    senders = {receiver: sender for sender, receiver in perm}
    size = math.prod(level.batch_size for level in levels)
    found = leaf.flatten(0, len(levels) - 1)
    chosen = torch.tensor([senders.get(i, size) for i in range(size)], device=leaf.device)
    found = torch.cat([found, torch.zeros_like(found[:1])]).index_select(0, chosen)
    return found[_index_along(levels, leaf.device)]


def axis_index(axis_name: Hashable, *, device: torch.device | str | None = None) -> torch.Tensor:
    """Each example's number along an axis, an int64 tensor of no dims.

    Args:
        axis_name: the axis; of a tuple of them, the number among all examples of all, those of the
            last counted first.
        device: where the tensor is; by default on torch's default device.

    Raises:
        UnboundAxisError: no active ``vmap`` has that name.

    Example:
        >>> import torch
        >>> from tsfunc import axis_index, vmap
        >>> vmap(lambda x: x * axis_index("i"), axis_name="i")(torch.ones(3))
        tensor([0., 1., 2.])

    As ``jax.lax.axis_index``.
    """
    on = None if device is None else torch.device(device)
    levels = _levels(axis_name, "axis_index", alone=True)
    return _index_along(levels, on)


def _index_along(levels: Sequence[Axis], device: torch.device | None) -> torch.Tensor:
    """Return each example's index along several axes together."""
    first, *others = levels
    found = physical.index(first, device)
    for level in others:
        found = found * physical.size(level) + physical.index(level, device)
    return found


def axis_size(axis_name: Hashable) -> int:
    """How many examples an axis has.

    Args:
        axis_name: the axis; of a tuple of them the product.

    Raises:
        UnboundAxisError: no active ``vmap`` has that name.

    Example:
        >>> import torch
        >>> from tsfunc import axis_size, vmap
        >>> vmap(lambda x: x * axis_size("i"), axis_name="i")(torch.ones(3))
        tensor([3., 3., 3.])

    As ``jax.lax.axis_size``.
    """
    levels = _levels(axis_name, "axis_size", alone=True)
    return math.prod(map(physical.size, levels))


def _levels(names: Any, what: str, *, alone: bool = False) -> list[Axis]:
    """The levels that bind the names; those of a batch that is spread over ranks come before it."""
    levels: list[Axis] = []
    for name in _names(names):
        level = physical.level_named(name, what, alone=alone)
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
    what: str,
    x: Any,
    of: Callable[[torch.Tensor], Any],
    of_number: Callable[[Any], Any] | None = None,
) -> Any:
    def one(leaf: Any) -> Any:
        if leaf is None:
            return None
        if isinstance(leaf, torch.Tensor):
            return of(leaf)
        if of_number is not None and isinstance(leaf, bool | int | float | complex):
            return of_number(leaf)
        raise TypeError(f"{what}: expected tensors, got {type(leaf).__name__}.")

    return pytrees.tree_map(one, x)


def _axis(what: str, leaf: torch.Tensor, axis: int, new: int) -> int:
    """A dim counted from the front; of those that there are and ``new`` more."""
    rank = leaf.dim() + new
    if not -rank <= axis < rank:
        raise ValueError(f"{what}: a tensor of shape {tuple(leaf.shape)} has no dim {axis}.")
    return axis % rank


def _split(
    what: str, leaf: torch.Tensor, at: int, levels: Sequence[Axis], tiled: bool
) -> torch.Tensor:
    """The tensor with dims of the axes' sizes at ``at``."""
    sizes = [level.batch_size for level in levels]
    size, wanted = leaf.shape[at], math.prod(sizes)
    if size % wanted if tiled else size != wanted:
        must = f"be a multiple of {wanted}" if tiled else f"be {wanted}"
        names = " and ".join(repr(level.axis_name) for level in levels)
        of = "the size of the axis" if len(levels) == 1 else "the product of the sizes of the axes"
        raise ValueError(
            f"{what}: the size of dim {at} must {must}, {of} {names}, got a tensor of shape "
            f"{tuple(leaf.shape)}."
        )
    if tiled:
        sizes.append(size // wanted)
    return leaf if sizes == [size] else leaf.unflatten(at, sizes)
