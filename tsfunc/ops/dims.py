"""Helpers of batching rules: logical and physical dims, and alignment of tensors.

A *logical* dim is one that the user sees. The *physical* value of a batched tensor has the batch
dim besides, at ``bdim`` (None: not batched).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NoReturn

import torch
from torch import Tensor


def with_defaults(args: Sequence[Any], *defaults: Any) -> list[Any]:
    """Return the positional arguments, followed by the defaults of the missing ones."""
    return [*args, *defaults[len(args) :]]


def logical_rank(x: Tensor, bdim: int | None) -> int:
    """Return the number of logical dims."""
    return x.dim() if bdim is None else x.dim() - 1


def logical_shape(x: Tensor, bdim: int | None) -> list[Any]:
    return [size for dim, size in enumerate(x.shape) if dim != bdim]


def wrap_dim(dim: int, rank: int) -> int:
    """Return a dim counted from the front. A tensor without dims accepts 0 and -1, as in torch."""
    span = rank or 1
    if not -span <= dim < span:
        raise IndexError(
            "Dimension out of range (expected to be in range of "
            f"[{-span}, {span - 1}], but got {dim})"
        )
    return dim + span if dim < 0 else dim


def physical_dim(dim: int, rank: int, bdim: int) -> int:
    """Return the physical dim of a logical dim, for a logical rank and a batch dim."""
    dim = wrap_dim(dim, rank)
    return dim if dim < bdim else dim + 1


def physical_dims(dims: Sequence[int], rank: int, bdim: int) -> list[int]:
    """Return ``physical_dim`` of each of several dims."""
    return [physical_dim(dim, rank, bdim) for dim in dims]


def memory_order(shape: Sequence[int], *operands: Sequence[int]) -> list[int]:
    """Return the dims from the outermost in memory inwards, as torch orders those of a result.

    An expanded dim is in no order with others. Dims of one stride are ordered by their sizes, if
    these are ints.

    Args:
        operands: the strides of the tensors that the result is made of; the first ones decide.

    Source: ``TensorIteratorBase::reorder_dimensions`` and ``infer_dense_strides`` in torch.
    """
    order: list[int] = []

    def is_inside(dim: int, other: int) -> bool | None:
        """True if a dim belongs inside of another one, False if outside; None if it is open."""
        for steps in operands:
            step, other_step = steps[dim], steps[other]
            if step and other_step:
                if step != other_step:
                    return step < other_step
                size, other_size = shape[dim], shape[other]
                if type(size) is type(other_size) is int and size < other_size:
                    return True
        return None

    for dim in reversed(range(len(shape))):
        order.insert(0, dim)
        at = 0
        for k in range(1, len(order)):
            inside = is_inside(dim, order[k])
            if inside:
                order[at], order[k] = order[k], dim
                at = k
            elif inside is False:
                break
    return order


def dense_strides(shape: Sequence[Any], order: Sequence[int] = ()) -> list[Any]:
    """Return the strides of a tensor without gaps; ``order`` has the dims, the outermost first."""
    strides: list[Any] = [1] * len(shape)
    step: Any = 1
    for dim in reversed(order or range(len(shape))):
        strides[dim], size = step, shape[dim]
        step = step * (max(size, 1) if isinstance(size, int) else size)
    return strides


def permuted_back(x: Tensor, order: Sequence[int]) -> Tensor:
    """Return the tensor whose ``permute(order)`` is ``x``."""
    return x.permute(sorted(range(len(order)), key=order.__getitem__))


def in_memory_order(x: Tensor, order: Sequence[int]) -> Tensor:
    """Return a tensor without gaps whose dims have an order in memory, copied if it needs to be."""
    return permuted_back(x.permute([*order]).contiguous(), order)


def memory_span(shape: Sequence[Any], strides: Sequence[Any]) -> Any:
    """Return the number of elements of memory from the first to the last element of a tensor."""
    if 0 in [size for size in shape if isinstance(size, int)]:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))


def is_expanded(x: Tensor) -> bool:
    """True if several elements of a tensor share a place in memory along a dim."""
    return x.layout is torch.strided and any(
        type(step) is int and step == 0 and not (type(size) is int and size == 1)
        for size, step in zip(x.shape, x.stride(), strict=True)
    )


def without_overlaps(x: Tensor) -> Tensor:
    """Return a copy of an expanded tensor that has an element for each of its own."""
    steps = x.stride()
    if not all(type(step) is int for step in steps):
        return x.contiguous()
    return in_memory_order(x, memory_order(x.shape, steps))


def check_dims_of_scalar(dims: Sequence[int]) -> None:
    """Raise torch's error if the dims are out of range for a scalar, or repeated."""
    for dim in dims:
        wrap_dim(dim, 0)
    if len(dims) > 1:
        raise RuntimeError("dim 0 appears multiple times in the list of dims")


def every_dim(rank: int, bdim: int) -> list[int]:
    """Return all physical dims except the batch dim, as for a reduction without dims."""
    return [dim for dim in range(rank + 1) if dim != bdim]


def batch_to_front(x: Tensor, bdim: int | None) -> Tensor:
    """Return the tensor with its batch dim first; an unbatched tensor is returned unchanged."""
    return x.movedim(bdim, 0) if bdim else x


def expand_to_front(x: Tensor, bdim: int | None, size: int) -> Tensor:
    """Return the tensor with a batch dim first; an unbatched tensor is expanded, with stride 0."""
    return x.expand(size, *x.shape) if bdim is None else batch_to_front(x, bdim)


def broadcast_to_front(x: Tensor, bdim: int | None) -> Tensor:
    """Return the tensor with a batch dim first, which broadcasts for an unbatched tensor."""
    return x.unsqueeze(0) if bdim is None else batch_to_front(x, bdim)


def batches_first(
    tensors: Sequence[Tensor], bdims: Sequence[int | None], size: int
) -> list[Tensor]:
    """Return ``expand_to_front`` of each of several tensors."""
    return [expand_to_front(x, bdim, size) for x, bdim in zip(tensors, bdims, strict=True)]


def aligned_batches(
    tensors: Sequence[Tensor],
    bdims: Sequence[int | None],
    ranks: Sequence[int],
    size: int | None = None,
) -> list[Tensor]:
    """Return tensors with the batch dim first and as many leading logical dims.

    Args:
        ranks: the logical dims of each tensor that are not leading ones: those of a matrix.
        size: the number of examples; without it an unbatched tensor gets a batch dim of size 1.
    """
    lead = max(logical_rank(x, bdim) - r for x, bdim, r in zip(tensors, bdims, ranks, strict=True))
    return [
        unit_dims(
            broadcast_to_front(x, bdim) if size is None else expand_to_front(x, bdim, size),
            1,
            lead + r - logical_rank(x, bdim),
        )
        for x, bdim, r in zip(tensors, bdims, ranks, strict=True)
    ]


def flat_by_example(x: Tensor | None, bdim: int | None, size: int) -> Tensor | None:
    """Return the values of all examples in one dim, one example after the other; None for None."""
    return None if x is None else expand_to_front(x, bdim, size).flatten()


def at_least_one_entry(x: Tensor) -> Tensor:
    """Return the tensor with an entry of zeros along dim 1, if it is empty or may be in a trace."""
    size = x.shape[1]
    if isinstance(size, int) and size:
        return x
    return torch.cat([x, x.new_zeros([x.shape[0], 1, *x.shape[2:]])], 1)


def flatten_logical(x: Tensor) -> Tensor:
    """Return the tensor with all logical dims flattened into dim 1; its batch dim is first."""
    return x.flatten(1) if x.dim() > 1 else x.unsqueeze(1)


def flatten_examples(x: Tensor, bdim: int | None) -> Tensor:
    """Return the tensor with its batch dim first and all logical dims flattened into one."""
    return flatten_logical(batch_to_front(x, bdim))


def expand_at(x: Tensor, bdim: int | None, size: int, to: int) -> Tensor:
    """Return the tensor with its batch dim at ``to``; an unbatched tensor is expanded."""
    if bdim is None:
        shape = list(x.shape)
        shape.insert(to, size)
        return x.unsqueeze(to).expand(shape)
    return x if bdim == to else x.movedim(bdim, to)


def unit_dims(x: Tensor, dim: int, count: int) -> Tensor:
    """Insert ``count`` dims of size 1 at ``dim``."""
    for _ in range(count):
        x = x.unsqueeze(dim)
    return x


def align_batch_dim(x: Tensor, bdim: int | None, right: int) -> Tensor:
    """Move the batch dim so that ``right`` logical dims follow it.

    An unbatched tensor with more than ``right`` dims gets a dim of size 1 in the place of the
    batch dim, so that its leading dims do not broadcast with the batch dim.
    """
    if bdim is None:
        return x.unsqueeze(-right - 1) if x.dim() > right else x
    rank = x.dim() - 1
    if rank - bdim == right:
        return x
    if rank >= right:
        return x.movedim(bdim, rank - right)
    return unit_dims(batch_to_front(x, bdim), 1, right - rank)


def align(
    args: Sequence[Any], bdims: Sequence[int | None], right: int | None = None
) -> tuple[list[Any], int]:
    """Align tensors so that they broadcast as their logical values do.

    Args:
        args: the tensors; other values are returned unchanged.
        bdims: the batch dim of each, or None.
        right: the number of dims that follow the batch dim. By default, it is the number of dims
            that follow it in the batched tensor of the largest rank, which is then not moved. If
            an unbatched tensor has a larger rank, all dims follow the batch dim, so that each
            example of the result has the layout that it has without vmap.

    Returns:
        The aligned arguments and the batch dim of the result.
    """
    top, lead, following = 0, -1, 0
    for arg, bdim in zip(args, bdims, strict=False):
        if isinstance(arg, Tensor):
            rank = arg.dim()
            if bdim is not None:
                rank -= 1
                if rank > lead:
                    lead, following = rank, rank - bdim
            if rank > top:
                top = rank
    if right is None:
        right = following if lead == top else top
    placed = [
        align_batch_dim(arg, bdim, right) if isinstance(arg, Tensor) else arg
        for arg, bdim in zip(args, bdims, strict=False)
    ]
    return placed, max(top, right) - right


@lru_cache(maxsize=1024)
def promote_scalar_dtype(high: torch.dtype, low: torch.dtype) -> torch.dtype:
    """Return the dtype of a tensor with dims combined with a scalar tensor.

    The dtype of the scalar tensor counts only if its kind is higher.
    """
    if high.is_complex:
        return high
    if high.is_floating_point:
        return high.to_complex() if low.is_complex else high
    if high is torch.bool or low.is_complex or low.is_floating_point:
        return torch.promote_types(high, low)
    return high


def _join(joined: torch.dtype | None, dtype: torch.dtype) -> torch.dtype:
    return dtype if joined is None or joined is dtype else torch.promote_types(joined, dtype)


def promote_scalars(args: Sequence[Any], bdims: Sequence[int | None]) -> Sequence[Any]:
    """Cast batched tensors without logical dims if torch would promote them wrongly.

    A scalar tensor affects the result dtype only by its kind. The physical value of a batched
    scalar has one dim, so torch would treat it like any other tensor. A bool affects no dtype and
    stays a bool, which some operators refuse.
    """
    wide: torch.dtype | None = None
    narrow: torch.dtype | None = None
    device: torch.device | None = None
    scalars = False
    for arg, bdim in zip(args, bdims, strict=False):
        if isinstance(arg, Tensor):
            if arg.dim() > (0 if bdim is None else 1):
                wide, device = _join(wide, arg.dtype), arg.device
            else:
                narrow = _join(narrow, arg.dtype)
                scalars = scalars or bdim is not None
    if not scalars or narrow is None:
        return args
    target = narrow if wide is None else promote_scalar_dtype(wide, narrow)
    return [
        arg.to(
            device=arg.device if device is None else device,
            dtype=arg.dtype if arg.dtype is torch.bool else target,
        )
        if bdim is not None and arg.dim() == 1
        else arg
        for arg, bdim in zip(args, bdims, strict=False)
    ]


def in_accumulation_dtype(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor in the dtype in which kernels of half precision accumulate."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def op_name(op: Any) -> str:
    """Return the catalogue name of an operator, or the ``__name__`` of a plain callable."""
    name = getattr(op, "name", None)
    return str(name()) if callable(name) else str(getattr(op, "__name__", op))


def function_name(op: Any) -> str:
    """Return the name of an operator, or of its name, in errors: ``randn`` for ``aten::randn``."""
    name = op_name(op)
    if not name.startswith("aten::"):
        return name
    name = name.removeprefix("aten::").partition(".")[0]
    # The functions of several operators have versions of them: ``_unique2``.
    name = name.lstrip("_").rstrip("0123456789") if name.startswith("_") else name
    return name.removeprefix("native_")


class NoExamples(Exception):
    """Raised by a rule if the structure of its results cannot be derived from an empty batch."""


class InplaceRefused(RuntimeError):
    """Batched values would be written into a tensor that is not batched."""


def refuse_inplace(op: Any) -> NoReturn:
    """Raise the error for a write of batched values into a tensor that is not batched."""
    name = op_name(op)
    base = name.removeprefix("aten::").partition(".")[0]
    raise InplaceRefused(
        f"vmap: {name} writes batched values in place into a tensor that is not batched over "
        "this vmap (it was made outside, or without a batched input). Use the out-of-place "
        f"{base.rstrip('_')} instead, or make the tensor from a batched one (for instance "
        "x.new_zeros). In torch.func's words: vmap: inplace arithmetic(self, *extra_args) is "
        "not possible because there exists a Tensor `other` in extra_args that has more "
        "elements than `self`."
    )
