"""Batch normalization: the batch of a vmap is folded into the channels, which stay separate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from tsfunc.ops.dims import NoExamples, align, batch_to_front, expand_at, flat_by_example
from tsfunc.ops.refusal import refuse_like_torch
from tsfunc.ops.registry import Args, BatchDims, Kwargs, RuleLevel, row


def _refuse_update() -> None:
    raise RuntimeError(
        "vmap: Batch norm got a batched tensor as input while the running_mean or running_var, "
        "which will be updated in place, were not batched. Give each example its own (stack the "
        "buffers and map over them), set track_running_stats=False, use eval mode, or replace "
        "the layer by a GroupNorm."
    )


def _channels(x: Tensor, bdim: int | None, size: int) -> Tensor:
    """Return the tensor as (N, batch * C, ...)."""
    return expand_at(x, bdim, size, 1).flatten(1, 2)


def _split_statistics(x: Tensor, size: int) -> tuple[Tensor, int | None]:
    """Split statistics of the kernel by example.

    An empty vector (not computed) is returned unchanged.
    """
    if x.dim() != 1 or x.shape[0] == 0:
        return x, None
    return x.unflatten(0, (size, x.shape[0] // size)), 0


def _results(results: Sequence[Tensor], size: int, dim: int) -> Any:
    """Return (out, mean, rstd, reserve?), with the batch unfolded from ``dim`` of ``out``."""
    out = results[0]
    pairs = [(out.unflatten(dim, (size, out.shape[dim] // size)), dim)]
    if dim == 1:
        pairs += [_split_statistics(r, size) for r in results[1:3]]  # type: ignore[misc]
    else:
        pairs += [(r, None) for r in results[1:3]]  # type: ignore[misc]
    pairs += [(r, None) for r in results[3:]]  # type: ignore[misc]
    return tuple(r for r, _ in pairs), tuple(d for _, d in pairs)


def _normalize(
    call: Callable[..., Any],
    level: RuleLevel,
    bdims: BatchDims,
    tensors: Sequence[Any],
    training: bool,
    momentum: float = 1,
) -> Any:
    """Run ``call(x, weight, bias, running_mean, running_var)`` with the batch folded away.

    In training the running statistics are updated, except with a momentum of 0.
    """
    x, weight, bias, mean, var = tensors
    bdim, p, q, m, v = bdims
    size = level.batch_size
    if bdim is None and m is None and v is None:
        right = x.dim() - 2
        out, *stats = call(x, None, None, mean, var)
        (out, to), n = (out, None), len(stats)
        for value, d, apply in ((weight, p, Tensor.mul), (bias, q, Tensor.add)):
            if value is not None:
                column = batch_to_front(value, d).reshape(
                    *batch_to_front(value, d).shape, *[1] * right
                )
                if to is None and d is None:
                    out = apply(out, column)
                else:
                    (out, column), to = align((out, column), (to, None if d is None else 0))
                    out = apply(out, column)
        return (out, *stats), (to, *[None] * n)
    if not training and p is None and q is None and m is None and v is None:
        return _results(
            call(batch_to_front(x, bdim).flatten(0, 1), weight, bias, mean, var), size, 0
        )
    updated = training and mean is not None and momentum != 0 and mean.numel() != 0
    if updated and bdim is not None and (m is None or v is None):
        _refuse_update()
    flat = [flat_by_example(t, bdim, size) for t, bdim in zip(tensors[1:], bdims[1:], strict=True)]
    if training and mean is not None:
        # The kernel writes into a copy, because autograd saves the original.
        flat[2:] = [t.clone() for t in flat[2:] if t is not None]
    results = call(_channels(x, bdim, size), *flat)
    if updated:
        for running, d, new in ((mean, m, flat[2]), (var, v, flat[3])):
            assert new is not None
            rows = new.view(size, -1)  # the rows of unbatched statistics are all equal
            batch_to_front(running, d).copy_(rows[0] if d is None else rows)
    return _results(results, size, 1)


@row(
    "aten::native_batch_norm", "aten::_native_batch_norm_legit",
    "aten::cudnn_batch_norm", "aten::miopen_batch_norm",
)  # fmt: skip
@refuse_like_torch
def batch_norm(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Training is an argument."""
    return _normalize(lambda *t: op(*t, *args[5:]), level, bdims[:5], args[:5], args[5], args[6])


@row("aten::batch_norm")
@refuse_like_torch
def batch_norm_alone(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Batch norm whose statistics are not returned."""
    (out,), (bdim,) = _normalize(
        lambda *t: (op(*t, *args[5:]),), level, bdims[:5], args[:5], args[5], args[6]
    )
    return out, bdim


@row("aten::_native_batch_norm_legit.no_stats")
@refuse_like_torch
def batch_norm_no_stats(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Batch norm without running statistics."""
    return _normalize(
        lambda x, w, b, _, __: op(x, w, b, *args[3:]),
        level, (*bdims[:3], None, None), (*args[:3], None, None), True,
    )  # fmt: skip


@row(
    "aten::_native_batch_norm_legit_no_training", "aten::_batch_norm_no_update",
)  # fmt: skip
@refuse_like_torch
def batch_norm_evaluating(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Batch norm in evaluation mode."""
    return _normalize(lambda *t: op(*t, *args[5:]), level, bdims[:5], args[:5], False)


@row("aten::_batch_norm_with_update")
@refuse_like_torch
def batch_norm_training(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Batch norm in training mode. The derivative requires a weight."""

    def call(x: Tensor, weight: Tensor | None, *rest: Any) -> Any:
        weight = x.new_ones(x.shape[1]) if weight is None else weight
        return op(x, weight, *rest, *args[5:])

    return _normalize(call, level, bdims[:5], args[:5], True, args[5])


@row(
    "aten::_native_batch_norm_legit_functional", "aten::_batch_norm_with_update_functional",
)  # fmt: skip
@refuse_like_torch
def batch_norm_functional(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """The new running statistics are results, which can be batched."""
    size = level.batch_size
    flat = [flat_by_example(t, bdim, size) for t, bdim in zip(args[1:5], bdims[1:5], strict=True)]
    *results, mean, var = op(_channels(args[0], bdims[0], size), *flat, *args[5:])
    outs, out_dims = _results(results, size, 1)
    (mean, m), (var, v) = _split_statistics(mean, size), _split_statistics(var, size)
    return (*outs, mean, var), (*out_dims, m, v)


def _backward(
    call: Callable[..., Any], level: RuleLevel, bdims: BatchDims, tensors: Sequence[Any]
) -> Any:
    """Run ``call(grad, x, weight, running_mean, running_var, save_mean, save_invstd)``.

    Raises:
        NoExamples: the batch is empty.
    """
    size = level.batch_size
    if not size:
        raise NoExamples  # without channels the kernel divides by zero and crashes the process
    full = [_channels(t, bdim, size) for t, bdim in zip(tensors[:2], bdims[:2], strict=True)]
    flat = [flat_by_example(t, bdim, size) for t, bdim in zip(tensors[2:], bdims[2:], strict=True)]
    grad_x, *grads = call(*full, *flat)
    if grad_x is not None:
        grad_x = grad_x.unflatten(1, (size, grad_x.shape[1] // size))
    grads = [None if g is None else _split_statistics(g, size)[0] for g in grads]
    return (grad_x, *grads), (1, 0, 0)


@row("aten::native_batch_norm_backward", "aten::batch_norm_backward")
def batch_norm_backward(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Fold the batch as in the forward pass; arguments after the statistics are passed on."""
    return _backward(lambda *t: op(*t, *args[7:]), level, bdims[:7], args[:7])


@row("aten::cudnn_batch_norm_backward")
def cudnn_batch_norm_backward(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """The first two arguments are swapped."""
    return _backward(
        lambda grad, x, *t: op(x, grad, *t, *args[7:]),
        level, (bdims[1], bdims[0], *bdims[2:7]), (args[1], args[0], *args[2:7]),
    )  # fmt: skip
