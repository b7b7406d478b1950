"""Views: logical dims are shifted past the batch dim, and the result is a view of its argument.

The ``_copy`` variants of views have the same rules. The rules also serve in-place operators that
change the shape of a tensor; those call the functional operator: NOTE [changes of shape in place].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from tsfunc.ops.dims import (
    batch_to_front,
    check_dims_of_scalar,
    every_dim,
    logical_shape,
    memory_span,
    physical_dim,
    physical_dims,
    unit_dims,
    with_defaults,
    wrap_dim,
)
from tsfunc.ops.refusal import raise_as_one_example, refuse_like_torch
from tsfunc.ops.registry import Args, BatchDims, Family, Kwargs, Rule, RuleLevel, aten_names
from tsfunc.ops.shifts import Shift, shift_arguments

VIEWS: Final = Family()
"""Operators whose result shows memory of their argument, and those that copy it instead."""


def same(x: Tensor) -> Tensor:
    """Return a view of all of ``x``, for view operators that have no effect."""
    return torch.transpose(x, 0, 0)


def known_sizes(sizes: Sequence[Any], x: Tensor, bdim: int) -> list[Any]:
    """Replace -1 by the size computed from one example.

    An empty batch would leave it undefined.
    """
    out = list(sizes)
    if -1 in out:
        product: Any = 1
        for size in out:
            if not (isinstance(size, int) and size == -1):
                product = product * size
        if not (isinstance(product, int) and product == 0):
            total: Any = 1
            for dim, size in enumerate(x.shape):
                if dim != bdim:
                    total = total * size
            out[out.index(-1)] = total // product
    return out


def _batched_sizes(bdims: BatchDims, args: Args) -> list[Any] | None:
    """Return the requested sizes preceded by the batch size; None if several of them are -1."""
    x = args[0]
    sizes = args[1] if len(args) == 2 and not isinstance(args[1], int) else args[1:]
    if sum([type(size) is int and size == -1 for size in sizes]) > 1:
        return None
    return [x.shape[bdims[0]], *known_sizes(sizes, x, bdims[0])]


@VIEWS.row("aten::reshape", "aten::view_copy")
@shift_arguments(Shift.SAME, Shift.SIZES)
def reshape(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Reshape with the batch dim first."""
    sizes = _batched_sizes(bdims, args)
    if sizes is None:
        return raise_as_one_example(op, bdims, args, kwargs)
    return op(batch_to_front(args[0], bdims[0]), sizes), 0


@VIEWS.row("aten::view")
@shift_arguments(Shift.SAME, Shift.SIZES)
def view(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """With the batch dim first, a physical view exists if a view of each example exists.

    Otherwise the tracer can need a copy of its value, which a rule cannot make.
    """
    sizes = _batched_sizes(bdims, args)
    if sizes is None:
        return raise_as_one_example(op, bdims, args, kwargs)
    try:
        return op(batch_to_front(args[0], bdims[0]), sizes), 0
    except (RuntimeError, ValueError):  # fake tensors raise ValueError
        return NotImplemented


@VIEWS.row("aten::_unsafe_view")
def unsafe_view(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Reshape: the batch dim of an intermediate result can lie between other dims."""
    return view(torch.ops.aten.reshape.default, level, bdims, args, kwargs)


@VIEWS.row("aten::_reshape_alias", "aten::_reshape_alias_copy")
def reshape_alias(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """The strides are those of a view with the given sizes, so they are ignored."""
    x = batch_to_front(args[0], bdims[0])
    return x.reshape([x.shape[0], *args[1]]), 0


@VIEWS.row("aten::expand", "aten::expand_copy", "aten::broadcast_to")
@shift_arguments(Shift.SAME, Shift.ALL_SIZES)
def expand(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """New dims come before all logical dims, and after a batch dim that is first."""
    x, bdim = args[0], bdims[0]
    sizes = list(args[1])
    new = len(sizes) - x.dim() + 1
    if new > 0 and -1 in sizes[:new]:  # a size to keep, of a dim that did not exist
        return raise_as_one_example(op, bdims, args, kwargs)
    if bdim == 0:
        x = unit_dims(x, 1, new)
    else:
        bdim += new
    sizes.insert(bdim, -1)
    return op(x, sizes, **kwargs), bdim


@VIEWS.row("aten::permute", "aten::permute_copy")
@shift_arguments(Shift.SAME, Shift.ORDER)
def permute(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """The batch dim keeps its position."""
    x, bdim = args[0], bdims[0]
    order = physical_dims(args[1], x.dim() - 1, bdim)
    order.insert(bdim, bdim)
    return op(x, order), bdim


@VIEWS.row(
    "aten::transpose.int",
    "aten::transpose_copy.int",
    "aten::swapaxes",
    "aten::swapdims",
    "aten::transpose_",
    "aten::swapaxes_",
    "aten::swapdims_",
)
@shift_arguments(Shift.SAME, Shift.DIM, Shift.DIM)
def transpose(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Exchange two logical dims; the batch dim keeps its position."""
    x, first, second = args
    bdim = bdims[0]
    rank = x.dim() - 1
    if rank == 0:
        wrap_dim(first, rank), wrap_dim(second, rank)
        return op(x, 0, 0), bdim
    return op(x, physical_dim(first, rank, bdim), physical_dim(second, rank, bdim)), bdim


@VIEWS.row("aten::t", "aten::t_copy", "aten::t_")
def t(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Transpose a matrix; vectors and scalars are returned as views."""
    x, bdim = args[0], bdims[0]
    rank = x.dim() - 1
    if rank == 2:
        return torch.transpose(x, *every_dim(2, bdim)), bdim
    if rank > 2:
        raise RuntimeError(f"t() expects a tensor with <= 2 dimensions, but self is {rank}D")
    return same(x), bdim


@VIEWS.row("aten::squeeze", "aten::squeeze_copy", "aten::squeeze_")
def squeeze(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Remove all logical dims of size 1, but never the batch dim."""
    x = batch_to_front(args[0], bdims[0])
    return torch.squeeze(x, list(range(1, x.dim()))), 0


@VIEWS.row("aten::squeeze.dim", "aten::squeeze_copy.dim", "aten::squeeze_.dim")
@shift_arguments(Shift.SAME, Shift.DIM)
def squeeze_dim(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """The batch dim moves only if the removed dim lies before it."""
    x, bdim = args[0], bdims[0]
    rank = x.dim() - 1
    if rank == 0:
        wrap_dim(args[1], 0)
        return same(x), bdim
    dim = physical_dim(args[1], rank, bdim)
    return op(x, dim), bdim - 1 if dim < bdim and x.shape[dim] == 1 else bdim


@VIEWS.row("aten::squeeze.dims", "aten::squeeze_copy.dims", "aten::squeeze_.dims")
@shift_arguments(Shift.SAME, Shift.DIMS)
def squeeze_dims(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Remove several dims of size 1 from each example."""
    x, bdim = args[0], bdims[0]
    rank = x.dim() - 1
    if rank == 0:
        check_dims_of_scalar(args[1])
        return same(x), bdim
    target = physical_dims(args[1], rank, bdim)
    return op(x, target), bdim - sum([d < bdim and x.shape[d] == 1 for d in target])


@VIEWS.row("aten::unsqueeze", "aten::unsqueeze_copy", "aten::unsqueeze_")
@shift_arguments(Shift.SAME, Shift.NEW_DIM)
def unsqueeze(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """A new dim at the position of the batch dim is inserted after it.

    A first batch dim stays first.
    """
    x, bdim = args[0], bdims[0]
    dim = wrap_dim(args[1], x.dim())
    return (op(x, dim), bdim + 1) if dim < bdim else (op(x, dim + 1), bdim)


def view_along_dim(position: int, removed: bool = False) -> Rule:
    """Return the rule of a view along one logical dim, the first by default.

    Args:
        position: the position of the dim among the arguments.
        removed: True if the result lacks the dim.
    """

    @shift_arguments(*[Shift.SAME] * position, Shift.DIM)
    def rule(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
        x, bdim = args[0], bdims[0]
        if x.dim() == 1:
            return raise_as_one_example(op, bdims, args, kwargs)
        dim = physical_dim(args[position] if len(args) > position else 0, x.dim() - 1, bdim)
        out = op(*args[:position], dim, *args[position + 1 :])
        return out, bdim - 1 if removed and dim < bdim else bdim

    return rule


VIEWS.rows(
    view_along_dim(1, removed=True),
    *aten_names("select.int select_copy.int unbind.int unbind_copy.int"),
)
VIEWS.rows(view_along_dim(1), *aten_names("slice.Tensor slice_copy.Tensor narrow narrow_copy"))
VIEWS.rows(
    view_along_dim(2),
    *aten_names(
        "split.Tensor split.sizes split_with_sizes split_copy.Tensor split_with_sizes_copy "
        "unsafe_split.Tensor unsafe_split_with_sizes chunk unsafe_chunk tensor_split.sections "
        "tensor_split.indices"
    ),
)


@VIEWS.row("aten::diagonal", "aten::diagonal_copy")
@shift_arguments(Shift.SAME, Shift.SAME, Shift.DIM, Shift.DIM)
def diagonal(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Remove two dims and append the diagonal as the last dim."""
    x, bdim = args[0], bdims[0]
    offset, dim1, dim2 = with_defaults(args[1:], 0, 0, 1)
    first, second = physical_dims((dim1, dim2), x.dim() - 1, bdim)
    return op(x, offset, first, second), bdim - (first < bdim) - (second < bdim)


@VIEWS.row("aten::unfold", "aten::unfold_copy")
def unfold(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """The dim of the windows is last. A scalar is one window."""
    x, dim, size, step = args
    bdim = bdims[0]
    if x.dim() == 1:
        wrap_dim(dim, 0)
        return op(x.unsqueeze(1), 1, size, step).squeeze(1), 0
    return op(x, physical_dim(dim, x.dim() - 1, bdim), size, step), bdim


# NOTE [offsets into memory]
# The storage offset of a batched tensor is that of its physical value, where the first example
# begins. An offset given to as_strided counts from the same origin, and shifts each example by the
# same distance.
def _check_memory(
    x: Tensor, bdim: int, sizes: Sequence[Any], strides: Sequence[Any], offset: Any
) -> None:
    """Raise if a view of an example would reach beyond the memory of that example."""
    if len(sizes) != len(strides):
        raise RuntimeError(
            f"as_strided: mismatch in length of strides and shape: size and stride must have the "
            f"same length, got {list(sizes)} and {list(strides)}"
        )
    if any(type(number) is not int for number in (*sizes, *strides, offset)) or 0 in sizes:
        return
    begin: Any = x.storage_offset()
    shape = logical_shape(x, bdim)
    steps = [step for dim, step in enumerate(x.stride()) if dim != bdim]
    last = offset + memory_span(sizes, strides) - 1
    end = begin + memory_span(shape, steps) - 1
    if 0 in shape or offset < begin or last > end:
        raise RuntimeError(
            f"vmap: as_strided(size={list(sizes)}, stride={list(strides)}, storage_offset="
            f"{offset}) reads memory from {offset} to {last}, but the first example, of shape "
            f"{tuple(shape)}, has that from {begin} to {end}. This is not "
            f"supported inside of vmap: use other views (slices, unfold, diagonal) instead."
        )


@VIEWS.row("aten::as_strided", "aten::as_strided_copy", "aten::as_strided_")
def as_strided(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """The batch dim keeps its stride: NOTE [offsets into memory]."""
    x, sizes, strides, offset = with_defaults(args, None, None, None, None)
    bdim = bdims[0]
    if offset is None:
        offset = x.storage_offset()
    _check_memory(x, bdim, sizes, strides, offset)
    return op(x, [x.shape[bdim], *sizes], [x.stride(bdim), *strides], offset), 0


@VIEWS.row("aten::as_strided_scatter")
@refuse_like_torch
def as_strided_scatter(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Scatter into a strided view of each example; an unbatched target is copied for each."""
    x, source, sizes, strides, offset = with_defaults(args, None, None, None, None, None)
    bdim = bdims[0]
    if bdim is not None and level.batch_size and x.stride(bdim) == 0:
        x, bdim = x.select(bdim, 0), None
    begin = x.storage_offset()
    if offset is None:
        offset = begin
    if bdim is None:
        span = memory_span(x.shape, x.stride())
        copies = x.new_empty_strided([level.batch_size, *x.shape], [span, *x.stride()])
        x, bdim, offset = copies.copy_(x), 0, offset - begin
    _check_memory(x, bdim, sizes, strides, offset)
    source = batch_to_front(source, bdims[1])
    sizes = [x.shape[bdim], *sizes]
    return op(x, source.expand(sizes), sizes, [x.stride(bdim), *strides], offset), bdim


@VIEWS.row("aten::view.dtype", "aten::view_copy.dtype", "aten::view_as_complex")
def view_last(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """These operators change the last dim, so the batch dim moves away from it."""
    x, bdim = args[0], bdims[0]
    if x.dim() == 1 and (len(args) == 1 or args[1].itemsize != x.dtype.itemsize):
        return raise_as_one_example(op, bdims, args, kwargs)
    if bdim == x.dim() - 1 and bdim:
        x, bdim = x.movedim(bdim, 0), 0
    if len(args) == 1 and x.stride(-1) != 1:
        return NotImplemented  # a rule cannot copy the value, as with ``view``
    return op(x, *args[1:]), bdim


@VIEWS.row("aten::real", "aten::imag")
def part_of_complex(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Views of the physical value, lazily conjugated or not."""
    return op(args[0]), bdims[0]


@VIEWS.row("aten::view_as_real", "aten::view_as_real_copy")
def view_as_real(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Resolve conjugation: the physical value can have a conjugate bit that the tracer lacks."""
    return op(args[0].resolve_conj()), bdims[0]


@VIEWS.row("aten::unflatten.int")
@shift_arguments(Shift.SAME, Shift.DIM)
def unflatten(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """The batch dim moves if the new dims lie before it."""
    x, bdim = args[0], bdims[0]
    if x.dim() == 1:
        return raise_as_one_example(op, bdims, args, kwargs)
    dim = physical_dim(args[1], x.dim() - 1, bdim)
    out = op(x, dim, args[2])
    return out, bdim + len(args[2]) - 1 if dim < bdim else bdim


@VIEWS.row("aten::flatten.using_ints")
@shift_arguments(Shift.SAME, Shift.DIM, Shift.DIM)
def flatten(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Flatten logical dims only. A scalar becomes a vector."""
    x = batch_to_front(args[0], bdims[0])
    rank = x.dim() - 1
    first, last = (wrap_dim(d, rank) for d in with_defaults(args[1:], 0, -1))
    if rank == 0:
        return x.unsqueeze(1), 0
    return op(x, first + 1, last + 1), 0


VIEWS.rows(reshape, "aten::_reshape_copy")


@VIEWS.row(
    "aten::movedim.int", "aten::movedim.intlist", "aten::moveaxis.int", "aten::moveaxis.intlist"
)
def movedim(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """The batch dim is moved first, and all other dims count from the one after it."""
    x = batch_to_front(args[0], bdims[0])
    rank = x.dim() - 1
    source, to = ([d] if isinstance(d, int) else d for d in args[1:])
    positions = physical_dims(source, rank, 0), physical_dims(to, rank, 0)
    return (torch.movedim(x, *positions) if rank else same(x)), 0


@VIEWS.row("aten::diag")
def diag(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Return a copy of a matrix's diagonal, or the matrix with a vector as its diagonal."""
    x, offset = batch_to_front(args[0], bdims[0]), args[1] if len(args) > 1 else 0
    if x.dim() == 3:
        return torch.diagonal_copy(x, offset, 1, 2), 0
    return (
        (torch.diag_embed(x, offset), 0)
        if x.dim() == 2
        else raise_as_one_example(op, bdims, args, kwargs)
    )
