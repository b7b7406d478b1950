"""Errors of torch for single examples, raised for a batch.

NOTE [calls that torch refuses]
A batching rule calls a kernel on tensors with one more dim, and that kernel can accept arguments
that the operator rejects: ``matmul`` in place of ``mm`` accepts vectors, and a decomposition
accepts a stack of vectors as a matrix. A rule whose kernel is less strict than the operator
therefore checks the logical ranks. If they are wrong, the rule runs the operator on one example,
which raises torch's error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tsfunc.ops.dims import logical_rank, op_name
from tsfunc.ops.registry import Dims


def refused(op: Any, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Raise torch's error for one example; return NotImplemented if torch accepts the call.

    The error has the type of torch's error. The shapes of the examples are appended to its
    message.
    """
    padded = [*dims, *[None] * (len(args) - len(dims))][: len(args)]
    examples = [_example(arg, at) for arg, at in zip(args, padded, strict=True)]
    try:
        op(*examples, **kwargs)
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        shapes = ", ".join(str(tuple(x.shape)) for x in examples if isinstance(x, Tensor))
        raise type(error)(
            f"{error}\nShape mismatch inside of vmap: {op_name(op)} was called on examples of "
            f"shape {shapes}."
        ) from None
    return NotImplemented


def _example(value: Any, at: Any) -> Any:
    """Return the tensor of one example, which can be written to without a change of the batch."""
    if isinstance(value, list | tuple):
        dims = at if isinstance(at, list | tuple) else [at] * len(value)
        return [_example(item, dim) for item, dim in zip(value, dims, strict=True)]
    if not isinstance(value, Tensor) or at is None:
        return value
    if value.shape[at] == 0:
        return value.new_zeros([size for dim, size in enumerate(value.shape) if dim != at])
    return value.select(at, 0).clone()


def ranks_at_least(dims: Dims, args: Sequence[Any], *ranks: int) -> bool:
    """True if each of the first arguments, tensors, has at least the given logical rank."""
    return all(logical_rank(x, at) >= rank for x, at, rank in zip(args, dims, ranks, strict=False))


def ranks_are(dims: Dims, args: Sequence[Any], *ranks: int) -> bool:
    """True if each of the first arguments, tensors, has exactly the given logical rank."""
    return all(logical_rank(x, at) == rank for x, at, rank in zip(args, dims, ranks, strict=False))


def require(condition: Tensor, message: str) -> None:
    """Raise if a condition on values is false for any example, without a synchronization."""
    torch.ops.aten._assert_async.msg(condition.all(), message)
