"""Fourier transforms along logical dims; the batch dim keeps its position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tsfunc.ops.dims import (
    batch_to_front,
    every_dim,
    expand_to_front,
    physical_dim,
    physical_dims,
    with_defaults,
)
from tsfunc.ops.refusal import raise_as_one_example, refuse_like_torch, require
from tsfunc.ops.registry import Args, BatchDims, Kwargs, Rule, RuleLevel, row, rows


@row("aten::_fft_r2c", "aten::_fft_c2c", "aten::_fft_c2r")
def fourier(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """The second argument has the dims; other arguments do not refer to dims."""
    x, bdim = args[0], bdims[0]
    return op(x, physical_dims(args[1], x.dim() - 1, bdim), *args[2:], **kwargs), bdim


def along_one(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Batch ``f(x, n, dim, norm)``."""
    x, bdim = args[0], bdims[0]
    if x.dim() == 1:
        return raise_as_one_example(op, bdims, args, kwargs)
    n, dim, norm = with_defaults(args[1:], None, -1, None)
    return op(x, n, physical_dim(dim, x.dim() - 1, bdim), norm), bdim


def along_several(default: Sequence[int] | None) -> Rule:
    """Batch ``f(x, sizes, dims, norm)``; ``dims`` has a default, or one dim per size."""

    def rule(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
        x, bdim = args[0], bdims[0]
        rank = x.dim() - 1
        sizes, along, norm = with_defaults(args[1:], None, default, None)
        if rank == 0 or (along is None and sizes is not None and len(sizes) > rank):
            raise_as_one_example(op, bdims, args, kwargs)
            if rank or along or sizes:
                return NotImplemented
            # torch accepts a scalar, which has no dim to transform.
            return op(x.unsqueeze(1), None, [1], norm).squeeze(1), 0
        if along is None and sizes is not None:
            along = range(rank - len(sizes), rank)
        target = every_dim(rank, bdim) if along is None else physical_dims(along, rank, bdim)
        return op(x, sizes, target, norm), bdim

    return rule


def shifted(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Shift each dim by half of its size, all dims by default."""
    x, bdim = args[0], bdims[0]
    rank = x.dim() - 1
    if rank == 0:
        return raise_as_one_example(op, bdims, args, kwargs)
    if len(args) > 1 and args[1] is not None:
        return op(x, physical_dims(args[1], rank, bdim)), bdim
    return op(x, every_dim(rank, bdim)), bdim


_ONE = "fft ifft rfft irfft hfft ihfft".split()
rows(along_one, *(f"aten::fft_{name}" for name in _ONE))
rows(along_several((-2, -1)), *(f"aten::fft_{name}2" for name in _ONE))
rows(along_several(None), *(f"aten::fft_{name}n" for name in _ONE))
rows(shifted, "aten::fft_fftshift", "aten::fft_ifftshift")


def _overlap_and_add(frames: Tensor, hop: int) -> Tensor:
    """Sum frames, of shape (..., count, size), each ``hop`` elements after the one before."""
    *leading, count, size = frames.shape
    columns = frames.reshape(-1, count, size).mT
    length = size + hop * (count - 1)
    out = torch.nn.functional.fold(columns, (1, length), (1, size), stride=(1, hop))
    return out.reshape(*leading, length)


def _with_windows(x: Tensor, window: Tensor, rest: Sequence[Any]) -> Tensor:
    """Return ``istft`` of a batch, whose windows differ between the examples.

    Args:
        x: the spectra, with the batch dim first.
        window: the windows, with the batch dim first.
        rest: the arguments after the first one.
    """
    n_fft, hop, width, _, center, normalized, onesided, length, as_complex = with_defaults(
        rest, None, None, None, None, True, False, None, None, False
    )
    hop = n_fft // 4 if hop is None else hop
    half = n_fft // 2 + 1
    is_half = x.shape[-2] != n_fft if onesided is None else onesided
    expected = half if is_half else n_fft
    # A program has no example that torch could check.
    if x.shape[-2] != expected or (as_complex and is_half):
        raise RuntimeError(
            f"istft: expected {expected} frequencies for n_fft={n_fft}, onesided={onesided} and "
            f"return_complex={as_complex}, got {x.shape[-2]}."
        )
    if not 0 < hop <= (n_fft if width is None else width):
        raise RuntimeError(f"istft: expected 0 < hop_length <= win_length, got {hop} and {width}")
    before = (n_fft - window.shape[-1]) // 2
    window = pad(window, (before, n_fft - window.shape[-1] - before))
    window = window.reshape(-1, *[1] * (x.dim() - 2), n_fft)

    norm, spectra = "ortho" if normalized else "backward", x.mT
    if as_complex:
        frames = torch.fft.ifft(spectra, norm=norm)
    else:
        spectra = spectra if is_half else spectra[..., :half]
        frames = torch.fft.irfft(spectra, n_fft, norm=norm)
    out = _overlap_and_add(frames * window, hop)
    weight = _overlap_and_add((window * window).expand(frames.shape), hop)

    whole, begin = out.shape[-1], half - 1 if center else 0
    end = whole - begin if length is None else begin + length
    out, weight = out[..., begin:end], weight[..., begin:end]
    if type(out.shape[-1]) is int and not out.shape[-1]:
        raise RuntimeError("istft: expected at least one element in the result, got none")
    require(weight.abs() > 1e-11, "istft: window overlap add min: 1")
    return pad(out / weight, (0, max(end - whole, 0)))


@row("aten::istft")
@refuse_like_torch
def istft(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """The examples of a shared window are more channels; torch checks the window's values."""
    x, *rest = args
    window_bdim = bdims[4] if len(bdims) > 4 else None
    if window_bdim is not None:
        size = level.batch_size
        window = expand_to_front(args[4], window_bdim, size)
        return _with_windows(expand_to_front(x, bdims[0], size), window, rest), 0
    x = batch_to_front(x, bdims[0])
    if x.dim() == 3:
        return op(x, *rest), 0
    out = op(x.flatten(0, 1), *rest)
    return out.unflatten(0, x.shape[:2]), 0
