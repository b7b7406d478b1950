"""Convolution and its backward: one convolution, with the batch folded into one of its dims.

NOTE [folding a convolution]
A convolution relates an input (N, C, ...), a result (N, O, ...) and a weight (O, C/g, ...) or,
transposed, (C, O/g, ...). Two of the three are given. If one of them is batched, the batch is
folded into a dim that only this tensor and the third one share: N for input and result, C for
input and weight, O for result and weight. If both are batched, each example becomes a group.
Channels are counted within groups: a folded C is (g, batch, C/g), and a folded C/g is
(batch, C/g).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tsfunc.ops.batched import fold, unfold
from tsfunc.ops.dims import (
    align,
    batch_to_front,
    expand_to_front,
    logical_rank,
    logical_shape,
    with_defaults,
)
from tsfunc.ops.refusal import raise_as_one_example, refuse_like_torch
from tsfunc.ops.registry import Args, BatchDims, Kwargs, Rule, RuleLevel, row, rows


def _fold(x: Tensor, bdim: int, dim: int) -> Tensor:
    """Fold the batch into logical dim ``dim``, as its outer part."""
    return x.movedim(bdim, dim).flatten(dim, dim + 1)


def _fold_grouped(x: Tensor, bdim: int, dim: int, groups: int) -> Tensor:
    """Fold the batch into the channels, inside of each group."""
    if groups == 1:
        return _fold(x, bdim, dim)
    x = x.movedim(bdim, 0)
    x = x.unflatten(dim + 1, (groups, x.shape[dim + 1] // groups))
    return x.movedim(0, dim + 1).flatten(dim, dim + 2)


def _unfold(x: Tensor, dim: int, size: int) -> tuple[Tensor, int]:
    return x.unflatten(dim, (size, x.shape[dim] // size)), dim


def _unfold_grouped(x: Tensor, dim: int, size: int, groups: int) -> tuple[Tensor, int]:
    if groups == 1:
        return _unfold(x, dim, size)
    x = x.unflatten(dim, (groups, size, x.shape[dim] // (size * groups)))
    return x.movedim(dim + 1, 0).flatten(dim + 1, dim + 2), 0


def _placeholder_like(like: Tensor, bdim: int | None, dim: int, size: int) -> Tensor:
    """Return a tensor whose shape alone the kernel reads; dim ``dim`` is ``size`` times larger."""
    shape = list(like.shape)
    if bdim is not None:
        del shape[bdim]
    shape[dim] = shape[dim] * size
    return like.new_zeros(()).expand(shape)


def _with_bias(
    out: Tensor, bdim: int | None, bias: Tensor | None, p: int | None
) -> tuple[Tensor, int]:
    if bias is not None:
        spatial = logical_rank(out, bdim) - 2
        bias = bias.movedim(p, 0) if p else bias
        for _ in range(spatial):
            bias = bias.unsqueeze(-1)
        (out, bias), bdim = align((out, bias), (bdim, None if p is None else 0))
        out = out + bias
    assert bdim is not None
    return out, bdim


@row("aten::convolution", "aten::convolution_overrideable")
@refuse_like_torch
def convolution(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Fold the batch into N, O or the groups: NOTE [folding a convolution]."""
    x, weight, bias, *rest, groups = args
    p, q, r = bdims[:3]
    transposed = rest[3]
    size = level.batch_size
    if bias is not None and bias.dtype != x.dtype:  # a separate sum would promote the bias
        return raise_as_one_example(op, bdims, args, kwargs)
    if q is None:
        if p is None:
            return _with_bias(op(x, weight, None, *rest, groups), None, bias, r)
        shared = bias if r is None else None
        out = op(_fold(x, p, 0), weight, shared, *rest, groups)
        return _with_bias(*_unfold(out, 0, size), bias if r is not None else None, r)
    if p is None:
        if transposed:
            weight = _fold(weight, q, 1)
        else:
            weight = _fold_grouped(weight, q, 0, groups)
        out = op(x, weight, None, *rest, groups)
        return _with_bias(*_unfold_grouped(out, 1, size, groups), bias, r)
    if bias is not None:
        bias = expand_to_front(bias, r, size).flatten()
    out = op(_fold(x, p, 1), _fold(weight, q, 0), bias, *rest, groups * size)
    return _unfold(out, 1, size)


def _input_grad(
    op: Any, size: int, bdims: BatchDims, tensors: Sequence[Any], rest: Sequence[Any], groups: int
) -> tuple[Tensor, int | None]:
    """Return the input's gradient from the result's gradient and the weight."""
    grad, x, weight = tensors
    p, bdim, q = bdims
    transposed, mask = rest[3], [True, False, False]

    def run(grad: Tensor, x: Tensor, weight: Tensor, groups: int) -> Tensor:
        return op(grad, x, weight, None, *rest, groups, mask)[0]

    if p is None and q is None:
        return run(grad, _placeholder_like(x, bdim, 0, 1), weight, groups), None
    if q is None:
        out = run(_fold(grad, p, 0), _placeholder_like(x, bdim, 0, size), weight, groups)
        return _unfold(out, 0, size)
    x = _placeholder_like(x, bdim, 1, size)
    if p is None:
        weight = _fold_grouped(weight, q, 0, groups) if transposed else _fold(weight, q, 1)
        return _unfold_grouped(run(grad, x, weight, groups), 1, size, groups)
    return _unfold(run(_fold(grad, p, 1), x, _fold(weight, q, 0), groups * size), 1, size)


def _weight_grad(
    op: Any, size: int, bdims: BatchDims, tensors: Sequence[Any], rest: Sequence[Any], groups: int
) -> tuple[Tensor, int | None]:
    """Return the weight's gradient from the result's gradient and the input."""
    grad, x, weight = tensors
    p, q, bdim = bdims
    transposed, mask = rest[3], [False, True, False]

    def run(grad: Tensor, x: Tensor, dim: int, by: int, groups: int) -> Tensor:
        return op(grad, x, _placeholder_like(weight, bdim, dim, by), None, *rest, groups, mask)[1]

    if p is None and q is None:
        return run(grad, x, 0, 1, groups), None
    if p is not None and q is not None:
        out = run(_fold(grad, p, 1), _fold(x, q, 1), 0, size, groups * size)
        return _unfold(out, 0, size)
    # The batch is folded into an outer dim of the weight in one form, into an inner dim in the
    # other.
    inner = transposed if q is None else not transposed
    if q is None:
        grad = _fold_grouped(grad, p, 1, groups)
    else:
        x = _fold_grouped(x, q, 1, groups)
    out = run(grad, x, 1 if inner else 0, size, groups)
    return _unfold(out, 1, size) if inner else _unfold_grouped(out, 0, size, groups)


def _bias_grad(grad: Tensor, bdim: int | None) -> tuple[Tensor, int | None]:
    """Sum over all dims except the channels."""
    if bdim is None:
        return grad.sum([0, *range(2, grad.dim())]), None
    channels = 1 if bdim > 1 else 2
    kept_dims = (bdim, channels)
    return grad.sum([d for d in range(grad.dim()) if d not in kept_dims]), int(bdim > channels)


@row("aten::convolution_backward", "aten::convolution_backward_overrideable")
def convolution_backward(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Compute each gradient separately, because each folds the batch into another dim."""
    if len(args) == 11:
        *tensors, _, stride, padding, dilation, transposed, output_padding, groups, mask = args
    else:  # the overrideable form has no bias sizes
        *tensors, stride, padding, dilation, transposed, output_padding, groups, mask = args
    rest = (stride, padding, dilation, transposed, output_padding)
    results: list[tuple[Tensor | None, int | None]] = [(None, None)] * 3
    size = level.batch_size
    function = torch.ops.aten.convolution_backward
    if mask[0]:
        results[0] = _input_grad(function, size, bdims[:3], tensors, rest, groups)
    if mask[1]:
        results[1] = _weight_grad(function, size, bdims[:3], tensors, rest, groups)
    if mask[2]:
        results[2] = _bias_grad(tensors[0], bdims[0])
    return tuple(out for out, _ in results), tuple(bdim for _, bdim in results)


_WHOLE = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}


def _convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int,
) -> Tensor:  # fmt: skip
    """Call a convolution; complex ones by torch's functions, because its kernels lack them."""
    if x.is_complex():
        return _WHOLE[x.dim() - 2](x, weight, bias, stride, padding, dilation, groups)
    return torch.ops.aten.convolution.default(
        x, weight, bias, stride, padding, dilation, transposed, output_padding, groups
    )


def _per_spatial_dim(value: Any, spatial: int) -> list[Any]:
    """Return one number per spatial dim; a list of one number applies to all dims."""
    return [*value] * spatial if len(value) == 1 else [*value]


def convolution_rule(spatial: int) -> Rule:
    """Return the rule of ``conv1d``, ``conv2d`` or ``conv3d``, with or without a dim N.

    The padding is a list of numbers or a string.
    """

    def rule(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
        x, weight, bias, stride, padding, dilation, groups = with_defaults(
            args, None, None, None, [1], [0], [1], 1
        )
        p, q, r = with_defaults(bdims[:3], None, None, None)
        rank = logical_rank(x, p)
        if rank not in (spatial + 1, spatial + 2):
            return raise_as_one_example(op, bdims, args, kwargs)
        if q is None and r is None:  # fold the batch into N
            out = op(fold(x, p, level.batch_size, spatial + 1), *args[1:], **kwargs)
            return unfold(out, level.batch_size, rank == spatial + 2), 0
        if rank == spatial + 1:
            x, p = (x.unsqueeze(0), None) if p is None else (batch_to_front(x, p).unsqueeze(1), 0)
        stride, dilation = _per_spatial_dim(stride, spatial), _per_spatial_dim(dilation, spatial)
        if isinstance(padding, str):
            if padding == "same" and any(step != 1 for step in stride):
                return raise_as_one_example(op, bdims, args, kwargs)
            x, p, padding = _pad_input(x, p, padding, logical_shape(weight, q)[2:], dilation)
        padding = _per_spatial_dim(padding, spatial)
        rest = (stride, padding, dilation, False, [0] * spatial, groups)
        result = convolution(_convolve, level, (p, q, r), (x, weight, bias, *rest), kwargs)
        if result is NotImplemented:
            return result
        out, bdim = result
        return (out, bdim) if rank == spatial + 2 else (batch_to_front(out, bdim).squeeze(1), 0)

    return rule


def _pad_input(
    x: Tensor, bdim: int | None, how: str, kernel: Sequence[Any], dilation: Sequence[Any]
) -> tuple[Tensor, int | None, list[Any]]:
    """Return the input, its batch dim and numeric padding; "same" can pad one side more."""
    if how == "valid":
        return x, bdim, [0]
    totals = [step * (size - 1) for step, size in zip(dilation, kernel, strict=True)]
    if all(total % 2 == 0 for total in totals):
        return x, bdim, [total // 2 for total in totals]
    pad = [side for total in reversed(totals) for side in (total // 2, total - total // 2)]
    return torch.constant_pad_nd(batch_to_front(x, bdim), pad), None if bdim is None else 0, [0]


for _rank in (1, 2, 3):
    rows(convolution_rule(_rank), f"aten::conv{_rank}d", f"aten::conv{_rank}d.padding")
