"""Batches of no examples, where a kernel can't do without.

NOTE [no examples]
A rule folds the batch into dims that kernels have, and some of these don't take a dim of size 0
(transforms by MKL, groups of a convolution), or leave open what the size of another one is. What
the results look like can be told from any example: the operator is run on one that is made up, and
none of it is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import optree
import torch

from tsfunc.bridge.tracers.batch_tracer import BatchLevel, rewrap, unwrap
from tsfunc.bridge.tracers.operators import TorchOperator
from tsfunc.dispatch import Operator
from tsfunc.errors import TsfuncError
from tsfunc.ops.dims import InplaceRefused

_GOLDEN = 0.6180339887
# Errors that are meant.
_MEANT = (TsfuncError, InplaceRefused, NotImplementedError)


def is_out_of_examples(level: BatchLevel, error: Exception) -> bool:
    """Whether an operator may have failed for that there are none."""
    size = level.batch_size
    return type(size) is int and size == 0 and not isinstance(error, _MEANT)


def run_without(
    op: Operator,
    level: BatchLevel,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    error: Exception,
) -> Any:
    """The results of an operator for no examples.

    Raises:
        Exception: the error, where the operator does not take the example that is made up.
    """
    leaves, tree = optree.tree_flatten((tuple(args), dict(kwargs)), none_is_leaf=True)
    example = [_example(*unwrap(leaf, level)) for leaf in leaves]
    one_args, one_kwargs = optree.tree_unflatten(tree, example)
    try:
        out = op.outward(*one_args, **one_kwargs)
    except Exception:
        raise error from None
    if isinstance(op, TorchOperator) and op.inplace:
        return args[0]  # in which there is nothing to write
    return rewrap(op, level, args, kwargs, optree.tree_map(_none_of, out), 0)


def _example(value: Any, dim: int | None) -> Any:
    """An example of a batch that has none, in the graph of the batch."""
    if dim is None:  # the operator may write into it
        return value.clone() if isinstance(value, torch.Tensor) else value
    shape = [1 if d == dim else size for d, size in enumerate(value.shape)]
    made_up = value.new_zeros(shape)
    if value.is_floating_point() or value.is_complex():
        # No two alike, so that matrices have full rank.
        numbers = torch.arange(made_up.numel(), device=value.device) * _GOLDEN
        made_up = (numbers.frac() + 0.1).to(value.dtype).view(shape)
    return torch.cat([value, made_up], dim).select(dim, 0)


def _none_of(x: Any) -> Any:
    return x.unsqueeze(0).narrow(0, 0, 0) if isinstance(x, torch.Tensor) else x
