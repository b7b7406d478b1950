"""torch.distributed's functional collectives: one call for the whole batch.

Every rank maps over its own batch, and all batches have the same size. Example ``i`` of a batch
exchanges values with example ``i`` of the batches of the other ranks.

A result of these operators has no value until ``wait_tensor`` is called on it. A loop over the
examples would stack results before that call; these rules keep one result and its wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tsfunc.ops.dims import batch_to_front, logical_rank, wrap_dim
from tsfunc.ops.refusal import raise_as_one_example
from tsfunc.ops.registry import Args, BatchDims, Kwargs, RuleLevel, row

_SINGLE = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")


def _wait(x: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(x)


def _along_first_dim(x: Tensor, bdim: int | None) -> tuple[Tensor, int | None]:
    """Return the contiguous tensor with the first logical dim first, and its batch dim."""
    return (x if bdim is None else x.movedim(bdim, 1)).contiguous(), None if bdim is None else 1


@row(
    "_c10d_functional::all_reduce",
    "_c10d_functional::broadcast",
    "_c10d_functional::wait_tensor",
    "_c10d_functional::isend",
)
def elementwise(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Elementwise collectives: the batch dim keeps its position."""
    return op(args[0].contiguous(), *args[1:], **kwargs), bdims[0]


@row("_c10d_functional::all_reduce_", "_c10d_functional::broadcast_")
def elementwise_in_place(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Elementwise collectives in place; a non-contiguous tensor is sent as a copy."""
    target = args[0]
    if target.is_contiguous():
        op(*args, **kwargs)
    else:
        target.copy_(_wait(op(target.contiguous(), *args[1:], **kwargs)))
    return target, bdims[0]


@row(
    *(
        f"{namespace}::{name}"
        for namespace in ("_c10d_functional", "_c10d_functional_autograd")
        for name in _SINGLE
    )
)
def along_first_dim(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Collectives that concatenate or split the first dim: the batch dim goes behind it."""
    if not logical_rank(args[0], bdims[0]):
        return raise_as_one_example(op, bdims, args, kwargs)
    x, bdim = _along_first_dim(args[0], bdims[0])
    return op(x, *args[1:], **kwargs), bdim


@row("_c10d_functional::all_reduce_coalesced")
def all_elementwise(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Elementwise collectives of several tensors, some of which can be unbatched."""
    return op([x.contiguous() for x in args[0]], *args[1:], **kwargs), tuple(bdims[0])


@row(
    "_c10d_functional::all_gather_into_tensor_coalesced",
    "_c10d_functional::reduce_scatter_tensor_coalesced",
)
def all_along_first_dim(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Collectives along the first dim of several tensors, some of which can be unbatched."""
    if not all(map(logical_rank, args[0], bdims[0])):
        return raise_as_one_example(op, bdims, args, kwargs)
    moved = [_along_first_dim(x, bdim) for x, bdim in zip(args[0], bdims[0], strict=True)]
    return op([x for x, _ in moved], *args[1:], **kwargs), tuple(bdim for _, bdim in moved)


@row("_dtensor::shard_dim_alltoall")
def shard_dim_alltoall(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Change the dim along which a DTensor is sharded."""
    x, gather_dim, shard_dim, *group = args
    rank = logical_rank(x, bdims[0])
    gather, shard = wrap_dim(gather_dim, rank) + 1, wrap_dim(shard_dim, rank) + 1
    return op(batch_to_front(x, bdims[0]).contiguous(), gather, shard, *group, **kwargs), 0


# The kinds of exchange along a mesh axis whose integer arguments are dims.
_OF_DIMS = ("gather", "scatter", "all_to_all", "slice", "tile")


@row("tsfunc_mesh::map")
def exchange(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Exchange the whole batch among ranks at once, with the batch dim first."""
    x, kind, ints, *rest = args
    if kind in _OF_DIMS:
        ints = [number + 1 for number in ints]
    return op(batch_to_front(x, bdims[0]), kind, ints, *rest, **kwargs), 0


# For these operators and linear reductions the operator maps tangents as it maps primals.
LINEAR: Mapping[str, Callable[[Sequence[Any]], bool]] = {
    **{
        f"_c10d_functional::{name}": lambda args: True
        for name in (
            "wait_tensor", "_wrap_tensor_autograd", "broadcast", "all_gather_into_tensor",
            "all_to_all_single", "all_gather_into_tensor_coalesced",
        )
    },
    **{
        f"_c10d_functional_autograd::{name}": lambda args: True
        for name in ("all_gather_into_tensor", "all_to_all_single")
    },
    **{
        f"{namespace}::{name}": lambda args: str(args[1]).lower() in ("sum", "avg")
        for namespace, names in (
            ("_c10d_functional", (
                "all_reduce", "reduce_scatter_tensor", "all_reduce_coalesced",
                "reduce_scatter_tensor_coalesced",
            )),
            ("_c10d_functional_autograd", ("reduce_scatter_tensor",)),
        )
        for name in names
    },
    "_dtensor::shard_dim_alltoall": lambda args: True,
}  # fmt: skip
