"""Batches without examples, for kernels that fail on them.

NOTE [no examples]
A rule folds the batch dim into the dims of a kernel. Some kernels reject a dim of size 0 (FFTs by
MKL, groups of a convolution), or can't infer the size of another dim. The shapes and dtypes of the
results are the same for every example, so the operator runs on one made-up example, and an empty
slice of its results is returned.
"""

from __future__ import annotations

from typing import Any

import optree
import torch

from tsfunc.bridge.tracers.batch_tracer import BatchLevel, rewrap, unwrap
from tsfunc.bridge.tracers.operators import CALL_ERRORS, TorchOperator
from tsfunc.dispatch import Operator
from tsfunc.errors import TsfuncError
from tsfunc.ops.dims import InplaceRefused
from tsfunc.ops.registry import Args, Kwargs

_GOLDEN = 0.6180339887
# Deliberate errors, which are raised for a batch of any size.
_DELIBERATE = (TsfuncError, InplaceRefused, NotImplementedError)


def may_fail_on_empty_batch(level: BatchLevel, error: Exception) -> bool:
    """True if an operator may have failed because the batch has no examples."""
    size = level.batch_size
    return type(size) is int and size == 0 and not isinstance(error, _DELIBERATE)


def run_on_made_up_example(
    op: Operator, level: BatchLevel, args: Args, kwargs: Kwargs, error: Exception
) -> Any:
    """Return the results of an operator for a batch without examples.

    Raises:
        Exception: the original error, if the operator fails on the made-up example as well.
    """
    leaves, tree = optree.tree_flatten((tuple(args), dict(kwargs)), none_is_leaf=True)
    example = [_example(*unwrap(leaf, level)) for leaf in leaves]
    one_args, one_kwargs = optree.tree_unflatten(tree, example)
    try:
        out = op.outward(*one_args, **one_kwargs)
    except CALL_ERRORS:
        raise error from None
    if isinstance(op, TorchOperator) and op.inplace:
        return args[0]  # nothing to write
    return rewrap(op, level, args, kwargs, optree.tree_map(_empty_slice, out), 0)


def _example(value: Any, dim: int | None) -> Any:
    """Return a made-up example of an empty batch, connected to the graph of the batch."""
    if dim is None:  # the operator may write into it
        return value.clone() if isinstance(value, torch.Tensor) else value
    shape = [1 if d == dim else size for d, size in enumerate(value.shape)]
    made_up = value.new_zeros(shape)
    if value.is_floating_point() or value.is_complex():
        # Distinct numbers, so that matrices have full rank.
        numbers = torch.arange(made_up.numel(), device=value.device) * _GOLDEN
        made_up = (numbers.frac() + 0.1).to(value.dtype).view(shape)
    return torch.cat([value, made_up], dim).select(dim, 0)


def _empty_slice(x: Any) -> Any:
    return x.unsqueeze(0).narrow(0, 0, 0) if isinstance(x, torch.Tensor) else x
