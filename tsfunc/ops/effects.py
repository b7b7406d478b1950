"""The operator of debug prints, callbacks and checks: the batch dim joins those in front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tsfunc.ops.dims import expand_to_front
from tsfunc.ops.registry import Dims, RuleLevel, row


@row("tsfunc_debug::call")
def call(
    op: Any, level: RuleLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Pass all examples at once; the operator itself goes over them."""
    values, effect, batch_dims = args
    size = level.batch_size
    stacked = [expand_to_front(x, at, size) for x, at in zip(values, dims[0], strict=True)]
    op(stacked, effect, batch_dims + 1)
    return None, None
