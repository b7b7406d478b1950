"""Fourier transforms: along logical dims, the batch where it lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tsfunc.ops.dims import physical_dims
from tsfunc.ops.registry import BatchLevel, Dims, row


@row("aten::_fft_r2c", "aten::_fft_c2c", "aten::_fft_c2r")
def fourier(
    op: Any, level: BatchLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """The second argument names the dims; all else is about their sizes."""
    x, at = args[0], dims[0]
    return op(x, physical_dims(args[1], x.dim() - 1, at), *args[2:], **kwargs), at
