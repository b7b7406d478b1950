"""The operator of debug prints, callbacks and checks: the batch dim joins those in front."""

from __future__ import annotations

from typing import Any

from tsfunc.ops.dims import batches_first
from tsfunc.ops.registry import Args, BatchDims, Kwargs, RuleLevel, row


@row("tsfunc_debug::call")
def call(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Pass all examples at once; the operator itself goes over them."""
    values, effect, batch_dims = args
    size = level.batch_size
    stacked = batches_first(values, bdims[0], size)
    op(stacked, effect, batch_dims + 1)
    return None, None
