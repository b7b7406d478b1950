"""Segment reductions: the kernels accept any number of dims before the reduced dim."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tsfunc.ops.dims import expand_to_front, logical_rank, wrap_dim
from tsfunc.ops.keywords import keyword_bdim, takes_keywords
from tsfunc.ops.registry import Args, BatchDims, Kwargs, RuleLevel, row

NAMES = ("aten::segment_reduce", "aten::_segment_reduce_backward")


@row(*NAMES)
def segment_reduce(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """The batch dim is one more leading dim; each example has its own segments.

    ``args`` are the data and the name of the reduction. In the backward pass the gradient and the
    result precede the data.
    """
    size = level.batch_size
    *tensors, reduction = args
    rank = logical_rank(tensors[-1], bdims[len(tensors) - 1])
    batched = [expand_to_front(x, bdim, size) for x, bdim in zip(tensors, bdims, strict=False)]
    named = dict(kwargs)
    for name in ("lengths", "offsets"):
        if isinstance(named.get(name), Tensor):
            named[name] = expand_to_front(named[name], keyword_bdim(bdims, args, name), size)
    if len(tensors) == 1:  # the kernel's checks compute the least length
        named["unsafe"] = named.get("unsafe", False) or size == 0
    named["axis"] = wrap_dim(named.get("axis", 0), rank) + 1
    return op(*batched, reduction, **named), 0


takes_keywords(NAMES, "lengths", "offsets")
