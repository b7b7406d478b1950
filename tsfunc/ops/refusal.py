"""What torch refuses for each example is refused for the batch, in torch's own words.

NOTE [calls that torch refuses]
A rule calls a kernel on values with one dim more, which may take what the operator itself does
not: ``matmul`` in place of ``mm`` takes vectors, a decomposition takes a stack of vectors for a
matrix. So rules whose kernel is less strict than the operator look at the ranks, and where these
are wrong, run the operator on one example, for its error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tsfunc.ops.dims import logical_rank, op_name
from tsfunc.ops.registry import Dims


def refused(op: Any, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Raises torch's error for one example; NotImplemented where torch takes the call after all.

    The error is of torch's type; the shapes that the examples have are added to its message.
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
    """One example's own tensor, which may be written to."""
    if isinstance(value, list | tuple):
        dims = at if isinstance(at, list | tuple) else [at] * len(value)
        return [_example(item, dim) for item, dim in zip(value, dims, strict=True)]
    if not isinstance(value, Tensor) or at is None:
        return value
    if value.shape[at] == 0:
        return value.new_zeros([size for dim, size in enumerate(value.shape) if dim != at])
    return value.select(at, 0).clone()


def ranks_at_least(dims: Dims, args: Sequence[Any], *ranks: int) -> bool:
    """Whether each of the first arguments, tensors, has as many logical dims at least."""
    return all(logical_rank(x, at) >= rank for x, at, rank in zip(args, dims, ranks, strict=False))


def ranks_are(dims: Dims, args: Sequence[Any], *ranks: int) -> bool:
    """Whether the first arguments, tensors, have just as many logical dims."""
    return all(logical_rank(x, at) == rank for x, at, rank in zip(args, dims, ranks, strict=False))


def require(condition: Tensor, message: str) -> None:
    """Raises unless a condition on values holds for all examples; a device is not waited for."""
    torch.ops.aten._assert_async.msg(condition.all(), message)
