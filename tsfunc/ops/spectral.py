"""Fourier transforms along logical dims; the batch dim keeps its position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tsfunc.ops.dims import every_dim, physical_dim, physical_dims, with_defaults
from tsfunc.ops.refusal import raise_as_one_example
from tsfunc.ops.registry import Dims, Rule, RuleLevel, row, rows


@row("aten::_fft_r2c", "aten::_fft_c2c", "aten::_fft_c2r")
def fourier(
    op: Any, level: RuleLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """The second argument has the dims; other arguments do not refer to dims."""
    x, at = args[0], dims[0]
    return op(x, physical_dims(args[1], x.dim() - 1, at), *args[2:], **kwargs), at


def along_one(
    op: Any, level: RuleLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Batch ``f(x, n, dim, norm)``."""
    x, at = args[0], dims[0]
    if x.dim() == 1:
        return raise_as_one_example(op, dims, args, kwargs)
    n, dim, norm = with_defaults(args[1:], None, -1, None)
    return op(x, n, physical_dim(dim, x.dim() - 1, at), norm), at


def along_several(default: Sequence[int] | None) -> Rule:
    """Batch ``f(x, sizes, dims, norm)``; ``dims`` has a default, or one dim per size."""

    def rule(
        op: Any, level: RuleLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        x, at = args[0], dims[0]
        rank = x.dim() - 1
        sizes, along, norm = with_defaults(args[1:], None, default, None)
        if rank == 0 or (along is None and sizes is not None and len(sizes) > rank):
            raise_as_one_example(op, dims, args, kwargs)
            if rank or along or sizes:
                return NotImplemented
            # torch accepts a scalar, which has no dim to transform.
            return op(x.unsqueeze(1), None, [1], norm).squeeze(1), 0
        if along is None and sizes is not None:
            along = range(rank - len(sizes), rank)
        target = every_dim(rank, at) if along is None else physical_dims(along, rank, at)
        return op(x, sizes, target, norm), at

    return rule


def shifted(
    op: Any, level: RuleLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Shift each dim by half of its size, all dims by default."""
    x, at = args[0], dims[0]
    rank = x.dim() - 1
    if rank == 0:
        return raise_as_one_example(op, dims, args, kwargs)
    if len(args) > 1 and args[1] is not None:
        return op(x, physical_dims(args[1], rank, at)), at
    return op(x, every_dim(rank, at)), at


_ONE = "fft ifft rfft irfft hfft ihfft".split()
rows(along_one, *(f"aten::fft_{name}" for name in _ONE))
rows(along_several((-2, -1)), *(f"aten::fft_{name}2" for name in _ONE))
rows(along_several(None), *(f"aten::fft_{name}n" for name in _ONE))
rows(shifted, "aten::fft_fftshift", "aten::fft_ifftshift")
