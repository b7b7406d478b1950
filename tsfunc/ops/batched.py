"""Operators on a batch of samples (N, C, ...): the batch of the vmap is folded into N.

Pooling, resampling and patch operators accept samples with or without the dim N; without it, the
batch of the vmap becomes N. Folding hides the rank of a sample, so the rules are checked:
NOTE [calls that torch refuses] in ``refusal``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tsfunc.ops.dims import expand_to_front
from tsfunc.ops.refusal import refuse_like_torch
from tsfunc.ops.registry import Args, BatchDims, Kwargs, Rule, RuleLevel, aten_names, row, rows


def fold(x: Tensor, bdim: int | None, size: int, core: int) -> Tensor:
    """Return the tensor with the batch and N as one dim, before the ``core`` sample dims."""
    x = expand_to_front(x, bdim, size)
    if x.dim() > core + 1:
        x = x.flatten(0, x.dim() - 1 - core)
    # Some kernels assume contiguous index tensors.
    return x if x.is_floating_point() else x.contiguous()


def unfold(out: Any, size: Any, has_n: bool) -> Any:
    """Split the batch and N again, in one or several results."""
    if not has_n:
        return out
    if isinstance(out, Tensor):
        return out.unflatten(0, (size, out.shape[0] // size))
    return tuple(None if o is None else unfold(o, size, has_n) for o in out)


def folded(core: int, *positions: int) -> Rule:
    """Return the rule of an operator with samples of ``core`` dims as arguments ``positions``."""
    first = positions[0]

    def rule(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
        size = level.batch_size
        new = list(args)
        for i in positions:
            new[i] = fold(args[i], bdims[i], size, core)
        x = args[first]
        has_n = x.dim() - (bdims[first] is not None) > core
        return unfold(op(*new, **kwargs), size, has_n), 0

    return refuse_like_torch(rule)


rows(
    folded(3, 0),
    *aten_names(
        "max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d im2col "
        "mkldnn_max_pool2d max_pool2d adaptive_avg_pool2d"
    ),
)  # fmt: skip
rows(folded(3, 0, 1, 7), "aten::max_pool2d_with_indices_backward")
rows(
    folded(3, 0, 1),
    *aten_names("avg_pool2d_backward _adaptive_avg_pool2d_backward max_unpool2d"),
)  # fmt: skip
rows(folded(3, 0, 1, 2), "aten::adaptive_max_pool2d_backward")
rows(folded(3, 0, 1, 4), "aten::fractional_max_pool2d_backward")
rows(
    folded(4, 0),
    *aten_names(
        "max_pool3d_with_indices avg_pool3d _adaptive_avg_pool3d adaptive_max_pool3d max_pool3d "
        "adaptive_avg_pool3d"
    ),
)  # fmt: skip
rows(folded(4, 0, 1, 7), "aten::max_pool3d_with_indices_backward")
rows(
    folded(4, 0, 1),
    *aten_names("avg_pool3d_backward _adaptive_avg_pool3d_backward max_unpool3d"),
)  # fmt: skip
rows(folded(4, 0, 1, 2), "aten::adaptive_max_pool3d_backward")
rows(folded(4, 0, 1, 4), "aten::fractional_max_pool3d_backward")
rows(folded(2, 0), "aten::col2im")


def fractional(core: int) -> Rule:
    """Return the rule of fractional pooling, whose random samples always have a dim N."""

    def rule(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
        x, kernel, output, samples = args
        size = level.batch_size
        has_n = x.dim() - (bdims[0] is not None) > core
        samples = expand_to_front(samples, bdims[3], size).flatten(0, 1)
        return unfold(op(fold(x, bdims[0], size, core), kernel, output, samples), size, has_n), 0

    return refuse_like_torch(rule)


rows(fractional(3), "aten::fractional_max_pool2d")
rows(fractional(4), "aten::fractional_max_pool3d")


def _upsampling_names(suffix: str) -> list[str]:
    two = ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa")
    kinds = [
        *(f"upsample_{kind}" for kind in "linear1d bilinear2d trilinear3d bicubic2d".split()),
        *(f"upsample_nearest{n}d" for n in (1, 2, 3)),
        *(f"_upsample_nearest_exact{n}d" for n in (1, 2, 3)),
        *two,
    ]
    return [f"aten::{kind}{suffix}" for kind in kinds]


def upsample(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """The input is always (N, C, ...)."""
    size = level.batch_size
    out = op(fold(args[0], bdims[0], size, args[0].dim() - 2), *args[1:], **kwargs)
    return unfold(out, size, True), 0


def upsample_backward(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """The shape of the input is an argument."""
    grad, output_size, (n, *shape), *rest = args
    size = level.batch_size
    grad = fold(grad, bdims[0], size, grad.dim() - 2)
    return unfold(op(grad, output_size, [n * size, *shape], *rest, **kwargs), size, True), 0


rows(upsample, *_upsampling_names(""), *_upsampling_names(".vec"))
rows(upsample_backward, *_upsampling_names("_backward"))


@row("aten::grid_sampler_2d", "aten::grid_sampler_3d")
@refuse_like_torch
def grid_sampler(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Images sampled at shared points become channels; points of a shared image become rows.

    Images are not folded into channels if that would copy them.
    """
    x, grid, *rest = args
    size = level.batch_size
    if bdims[1] is None and (bdims[0] == 1 or grid.shape[0] == 1):
        x = x.movedim(bdims[0], 1)
        out = op(x.flatten(1, 2), grid, *rest)
        return out.unflatten(1, x.shape[1:3]), 1
    if bdims[0] is None:
        grid = grid.movedim(bdims[1], 1)
        out = op(x, grid.flatten(1, 2), *rest)
        return out.unflatten(2, grid.shape[1:3]), 2
    x, grid = (expand_to_front(args[i], bdims[i], size).flatten(0, 1) for i in (0, 1))
    return unfold(op(x, grid, *rest), size, True), 0


@row("aten::grid_sampler_2d_backward", "aten::grid_sampler_3d_backward")
def grid_sampler_backward(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Fold the batch into N."""
    size = level.batch_size
    pairs = zip(args[:3], bdims[:3], strict=True)
    tensors = [expand_to_front(v, d, size).flatten(0, 1) for v, d in pairs]
    return unfold(op(*tensors, *args[3:]), size, True), 0


@row("aten::affine_grid_generator")
@refuse_like_torch
def affine_grid_generator(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """The shape of the result is an argument."""
    theta, (n, *shape), align = args
    size = level.batch_size
    theta = expand_to_front(theta, bdims[0], size).flatten(0, 1)
    return unfold(op(theta, [n * size, *shape], align), size, True), 0
