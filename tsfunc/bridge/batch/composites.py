"""Replacements for torch functions that read tensor values while they run.

The composite kernels of such functions, or their Python code, call ``.item()`` or ``bool()`` on
tensors to check arguments or to slice. For tracers, the function handler calls the replacements
below, which use operators without such reads, so that every level sees these operators. Checks are
made for all examples at once.

``DECOMPOSITIONS`` holds the replacements of operators that C++ code calls too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from tsfunc.bridge.batch.symbolic_composites import reads_in_trace
from tsfunc.bridge.tracers.batch_tracer import BatchTracer, wrap
from tsfunc.bridge.tracers.decompositions import DECOMPOSITIONS
from tsfunc.bridge.tracers.function_registry import FunctionRules
from tsfunc.bridge.tracers.tracer import Tracer, innermost_level
from tsfunc.bridge.writing.emulated_views import gather
from tsfunc.ops.dims import wrap_dim
from tsfunc.ops.random import require_one_distribution
from tsfunc.ops.reductions import unweighted_covariance
from tsfunc.ops.refusal import require

function_rules: Final = FunctionRules()


@function_rules.replace(torch.narrow, Tensor.narrow, numbers=True)
def _narrow(x: Tensor, dim: int, start: Any, length: int) -> Any:
    """``narrow`` with a start for each example (NOTE [gathered views])."""
    if not isinstance(start, Tracer):
        return NotImplemented
    dim = wrap_dim(dim, x.dim())
    if start.dim() or start.is_floating_point() or start.dtype is torch.bool:
        raise RuntimeError("start must be an 0-dim integral Tensor.")
    size = x.shape[dim]
    low, high = start >= -size, torch.where(start < 0, start + size, start) + length <= size
    require(
        low & high,
        f"narrow: start and length ({length}) exceed the dimension's size ({size}) for some "
        f"example",
    )
    positions = torch.where(start < 0, start + size, start) + torch.arange(length, device=x.device)
    return gather(x, dim, positions)


@function_rules.replace(F.affine_grid, torch.affine_grid_generator)
def _affine_grid(theta: Tensor, size: Sequence[Any], align_corners: bool | None = None) -> Any:
    """Compute the grid for traced sizes: the derivative of torch's operator takes numbers only."""
    if not any(isinstance(extent, torch.SymInt) for extent in size):
        return NotImplemented
    for extent in size:  # one by one: torch takes their ``min``, which compares them all
        if extent <= 0:
            raise ValueError(f"affine_grid: expected sizes that are not 0, got {[*size]}")
    batch, _, *shape = size
    rank = len(shape)
    if rank not in (2, 3) or theta.dim() != 3 or theta.shape[1:] != (rank, rank + 1):
        raise ValueError(
            f"affine_grid: expected theta of shape ({batch}, {rank}, {rank + 1}) for a size of "
            f"{len(size)} numbers (4 or 5), got {tuple(theta.shape)} and {[*size]}"
        )
    points = [_grid_points(extent, bool(align_corners), theta) for extent in shape]
    axes = torch.meshgrid(*points, indexing="ij")
    base = torch.stack(axes[::-1], -1).flatten(0, -2)
    moved = base @ theta[..., :-1].mT + theta[..., -1].unsqueeze(1)
    return moved.view(batch, *shape, rank)


def _grid_points(size: Any, align_corners: bool, like: Tensor) -> Tensor:
    """Return the positions of pixels from -1 to 1; one pixel is at 0."""
    steps = 2 * torch.arange(size, dtype=like.dtype, device=like.device) - (size - 1)
    return steps / (torch.sym_max(size - 1, 1) if align_corners else size)


@function_rules.replace(torch.vander)
def _vander(x: Tensor, N: int | None = None, increasing: bool = False) -> Any:
    """Multiply the powers; the C++ code writes them into an untraced tensor."""
    if not isinstance(x, Tracer) or x.dim() != 1 or not x.dispatch_level.autograd:
        return NotImplemented
    count = x.shape[0] if N is None else N
    if count < 0:
        return NotImplemented
    out = _powers(x, count)
    return out if increasing else out.flip(-1)


@function_rules.replace(torch.linalg.vander)
def _linalg_vander(x: Tensor, *, N: int | None = None) -> Any:
    if not isinstance(x, Tracer) or not x.dim() or not x.dispatch_level.autograd:
        return NotImplemented
    count = x.shape[-1] if N is None else N
    if count < 2:
        return NotImplemented
    return _powers(x, count)


def _powers(x: Tensor, count: int) -> Tensor:
    """Return the powers of each element, from the power 0 on, in a new last dim."""
    column = x.unsqueeze(-1)
    powers = column.expand(*x.shape, max(count - 1, 0)).cumprod(-1)
    return torch.cat([torch.ones_like(column), powers], -1)[..., :count]


@function_rules.replace(torch._sparse_sum)
def _sparse_sum(x: Tensor, *dim: Any, **kwargs: Any) -> Any:
    """Sum all elements over dims; the C++ code sums stored values, whose number may differ."""
    if dim or kwargs or not isinstance(x, BatchTracer) or not x.dispatch_level.autograd:
        return NotImplemented
    if x.value.layout is not torch.sparse_coo:
        return NotImplemented
    return torch._sparse_sum(x, list(range(x.dim())))


@function_rules.replace(torch.istft, Tensor.istft)
def _istft(*args: Any, **kwargs: Any) -> Any:
    """Call the Python decomposition; the C++ code reads the windows' values to check them."""
    level = innermost_level((*args, *kwargs.values()))
    if level is None or not level.autograd:
        return NotImplemented
    return torch.ops.aten.istft.default.decompose(*args, **kwargs)


def _fills_number(kinds: Sequence[Any]) -> bool:
    return len(kinds) > 3 and kinds[3] in (int, float, bool, complex)


@function_rules.replace(torch.index_fill, Tensor.index_fill, left_to_torch=_fills_number)
def _index_fill(x: Tensor, dim: int, index: Tensor, value: Any) -> Any:
    """``index_fill`` with a tensor as the value.

    The derivative of torch's operator looks for duplicate values in the index.
    """
    if not isinstance(value, Tensor) or not isinstance(index, Tracer):
        return NotImplemented
    return x.masked_fill(_filled_places(x, dim, index), _number_to_fill(value, x))


@function_rules.replace(Tensor.index_fill_, left_to_torch=_fills_number)
def _index_fill_inplace(x: Tensor, dim: int, index: Tensor, value: Any) -> Any:
    if not isinstance(value, Tensor) or not isinstance(index, Tracer):
        return NotImplemented
    return x.masked_fill_(_filled_places(x, dim, index), _number_to_fill(value, x))


def _filled_places(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """Return a bool mask of the filled positions, which broadcasts with ``x``."""
    if not x.dim():
        return torch.zeros((), dtype=torch.bool, device=x.device).index_fill(dim, index, True)
    mask = torch.zeros(x.shape[dim], dtype=torch.bool, device=x.device)
    shape = [1] * x.dim()
    shape[dim] = x.shape[dim]
    return mask.index_fill(0, index, True).view(shape)


def _number_to_fill(value: Tensor, x: Tensor) -> Tensor:
    if value.is_complex() and not x.is_complex():
        raise RuntimeError(
            "index_fill_(): Converting complex Scalar to non-complex type is not supported"
        )
    if value.dim():
        raise RuntimeError(
            f"index_fill_ only supports a 0-dimensional value tensor, but got tensor with "
            f"{value.dim()} dimension(s)."
        )
    return value


def _has_bounds_alike(kinds: Sequence[Any]) -> bool:
    """True if both bounds are numbers or both are tensors, by the kinds of arguments."""
    numbers = [kind in (int, float, bool) for kind in kinds[1:] if kind is not type(None)]
    return all(numbers) or not any(numbers)


@function_rules.replace(
    torch.clamp,
    Tensor.clamp,
    torch.clip,
    Tensor.clip,
    numbers=True,
    left_to_torch=_has_bounds_alike,
)
def _clamp(input: Tensor, min: Any = None, max: Any = None, *, out: Tensor | None = None) -> Any:
    """``clamp`` between a number and a tensor without dims, which torch reads as a number."""
    if not _is_number_beside_tensor(min, max):
        return NotImplemented
    low, high = _bounds_like_numbers(input, (min, max))
    return torch.clamp(input, low, high) if out is None else torch.clamp(input, low, high, out=out)


@function_rules.replace(
    torch.clamp_,
    Tensor.clamp_,
    torch.clip_,
    Tensor.clip_,
    numbers=True,
    left_to_torch=_has_bounds_alike,
)
def _clamp_inplace(input: Tensor, min: Any = None, max: Any = None) -> Any:
    if not _is_number_beside_tensor(min, max):
        return NotImplemented
    return input.clamp_(*_bounds_like_numbers(input, (min, max)))


def _is_number_beside_tensor(min: Any, max: Any) -> bool:
    """True if one bound is a number, and the other one a tracer without dims."""
    number, tensor = (max, min) if isinstance(min, Tracer) else (min, max)
    is_number = isinstance(number, int | float | torch.SymInt | torch.SymFloat)
    return is_number and isinstance(tensor, Tracer) and not tensor.dim()


def _bounds_like_numbers(x: Tensor, bounds: Sequence[Any]) -> list[Tensor]:
    """Return the bounds as tensors that count as numbers in type promotion."""
    dtype = x.dtype
    for bound in bounds:
        floats = bound.is_floating_point() if isinstance(bound, Tensor) else type(bound) is float
        dtype = torch.result_type(torch.empty(0, dtype=dtype), 1.0 if floats else 1)
    return [
        bound.to(dtype)
        if isinstance(bound, Tensor)
        else torch.full((), bound, dtype=dtype, device=x.device)
        for bound in bounds
    ]


def _has_no_weights(kinds: Sequence[Any]) -> bool:
    return all(kind in (int, type(None)) for kind in kinds[1:])


@function_rules.replace(torch.cov, Tensor.cov, left_to_torch=_has_no_weights, symbolic=True)
def _cov(
    x: Tensor,
    *,
    correction: int = 1,
    fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> Any:
    """Covariance with weights, whose values torch reads to check them, or in a trace.

    torch also reads a tensor to check the degrees of freedom.
    """
    unweighted = fweights is None and aweights is None
    if (unweighted and not reads_in_trace(x)) or x.dtype is torch.bool:
        return NotImplemented
    if x.dim() > 2:
        raise RuntimeError(f"cov(): expected input to have two or fewer dimensions, got {x.dim()}")
    x = x.reshape(1, -1) if x.dim() < 2 else x
    weights: Tensor | None = None
    for name, weight in (("fweights", fweights), ("aweights", aweights)):
        if weight is None:
            continue
        if weight.shape != x.shape[1:]:
            raise RuntimeError(
                f"cov(): expected {name} to have one value for each of {x.shape[1]} observations, "
                f"got the shape {tuple(weight.shape)}"
            )
        floating = weight.is_floating_point()
        integral = not (floating or weight.is_complex() or weight.dtype is torch.bool)
        expected = floating if name == "aweights" else integral
        if not expected:
            kind = "integral" if name == "fweights" else "floating point"
            raise RuntimeError(f"cov(): expected {name} to have {kind} dtype, got {weight.dtype}")
        require(weight >= 0, f"cov(): {name} cannot be negative")
        weights = weight if weights is None else weights * weight
    if weights is None:
        return unweighted_covariance(x, correction).squeeze()
    total = weights.sum()
    require(total != 0, "cov(): weights sum to zero, can't be normalized")
    mean = (x * weights).sum(1) / total
    if aweights is None:
        degrees = total - correction
    else:
        degrees = total - correction * (weights * aweights).sum() / total
    centred = x - mean.unsqueeze(1)
    products = centred @ (centred * weights).mT.conj()
    return (products / degrees.clamp(min=0)).squeeze()


@function_rules.replace(torch.gradient)
def _gradient(x: Tensor, *, spacing: Any = None, dim: Any = None, edge_order: int = 1) -> Any:
    """``gradient`` with coordinate tensors, by the formulas of ``numpy.gradient``."""
    if not isinstance(spacing, list | tuple) or not any(isinstance(s, Tensor) for s in spacing):
        return NotImplemented
    dims = range(x.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    rank = x.dim()
    in_range = all(-rank <= d < rank for d in dims) and len({d % rank for d in dims}) == len(dims)
    in_rank = all(points.dim() == 1 for points in spacing if isinstance(points, Tensor))
    if len(spacing) != len(dims) or edge_order not in (1, 2) or not (in_range and in_rank):
        return NotImplemented  # torch raises the error
    return tuple(
        _differences(x, points, d % rank, edge_order)
        for points, d in zip(spacing, dims, strict=True)
    )


def _differences(x: Tensor, points: Tensor, dim: int, edge_order: int) -> Tensor:
    """Differences along one dim: three-point weights inside, one-sided at the ends."""
    steps = points.diff().view(-1, *[1] * (x.dim() - 1 - dim))
    pairs = steps.shape[0] - 1
    before, after = steps.narrow(0, 0, pairs), steps.narrow(0, 1, pairs)

    def part(values: Tensor, along: int, start: int, count: int) -> Tensor:
        return values.narrow(along, start if start >= 0 else values.shape[along] + start, count)

    count = x.shape[dim] - 2
    left, center, right = (x.narrow(dim, start, count) for start in range(3))
    both = before + after
    inside = (
        left * (-after / (before * both))
        + center * ((after - before) / (before * after))
        + right * (before / (after * both))
    )
    if edge_order == 1:
        first = (part(x, dim, 1, 1) - part(x, dim, 0, 1)) / part(steps, 0, 0, 1)
        last = (part(x, dim, -1, 1) - part(x, dim, -2, 1)) / part(steps, 0, -1, 1)
    else:
        p, q = part(steps, 0, 0, 1), part(steps, 0, 1, 1)
        first = (
            part(x, dim, 0, 1) * (-(2 * p + q) / (p * (p + q)))
            + part(x, dim, 1, 1) * ((p + q) / (p * q))
            + part(x, dim, 2, 1) * (-p / (q * (p + q)))
        )
        p, q = part(steps, 0, -2, 1), part(steps, 0, -1, 1)
        last = (
            part(x, dim, -3, 1) * (q / (p * (p + q)))
            + part(x, dim, -2, 1) * (-(p + q) / (p * q))
            + part(x, dim, -1, 1) * ((2 * q + p) / (q * (p + q)))
        )
    return torch.cat([first, inside, last], dim)


@function_rules.replace(F.gaussian_nll_loss)
def _gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Any,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Any:
    """``gaussian_nll_loss`` with a traced variance; torch's function reads its values."""
    if not isinstance(var, Tracer):
        return NotImplemented
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not valid")
    if torch.ops.aten._is_any_true(var < 0):
        raise ValueError("var has negative entry/entries")
    if var.shape != input.shape:
        if input.shape[:-1] == var.shape:
            var = var.unsqueeze(-1)
        elif (
            input.dim() != var.dim()
            or sum(
                variance_size
                for size, variance_size in zip(input.shape, var.shape, strict=True)
                if size != variance_size
            )
            != 1
        ):
            raise ValueError("var is of incorrect size")
    var = var.clone()
    with torch.no_grad():  # keeps var's derivative at clamped elements
        var.clamp_(min=eps)
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    if reduction == "none":
        return loss
    return loss.mean() if reduction == "mean" else loss.sum()


def _has_no_numbers(kinds: Sequence[Any]) -> bool:
    return not any(kind is int or kind is float for kind in kinds)


@function_rules.replace(
    F.scaled_dot_product_attention, left_to_torch=_has_no_numbers
)  # without dropout
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention with dropout; torch draws the random numbers into an untraced tensor."""
    if not dropout_p:
        return NotImplemented
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = (query @ key.mT) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        if attn_mask is not None:
            raise RuntimeError("scaled_dot_product_attention: is_causal takes no attn_mask")
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        else:
            scores = scores + attn_mask
    weights = torch.ops.aten._safe_softmax(scores, -1)
    return torch.dropout(weights, dropout_p, True) @ value


def _ctc_loss(x: Tensor, targets: Tensor, lengths: Any, target_lengths: Any, *rest: Any) -> Any:
    """``ctc_loss`` with the lengths as tensors.

    torch's mean reduction writes a list of lengths into a new tensor.
    """
    tensors = (torch.tensor(lengths), torch.tensor(target_lengths))
    return torch.ops.aten.ctc_loss.Tensor(x, targets, *tensors, *rest)


@function_rules.replace(torch.ctc_loss)
def _mean_of_ctc_losses(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Any:
    if reduction != 1 or isinstance(target_lengths, Tensor):
        return NotImplemented
    lengths = (input_lengths, target_lengths)
    return _ctc_loss(log_probs, targets, *lengths, blank, reduction, zero_infinity)


@function_rules.replace(F.linear_cross_entropy)
def _linear_cross_entropy(*args: Any, options: Any = None, **kwargs: Any) -> Any:
    """Compute the loss without chunks; torch's chunked operator is opaque to the tracers."""
    if options is None:
        return NotImplemented
    return F.linear_cross_entropy(*args, **kwargs)


@function_rules.replace(torch.histogramdd)
def _histogramdd(
    x: Tensor, bins: Any, range: Any = None, weight: Tensor | None = None, density: bool = False
) -> Any:
    """``histogramdd`` with edges that are tensors.

    torch's parser takes a list of tracers for a list of ints.
    """
    if not (isinstance(bins, list | tuple) and any(isinstance(b, Tensor) for b in bins)):
        return NotImplemented
    overload = torch.ops.aten.histogramdd.TensorList_bins
    counts, edges = overload(x, list(bins), range, weight, density)
    return torch.return_types.histogramdd((counts, tuple(edges)))


@function_rules.replace(torch.bernoulli, Tensor.bernoulli)
def _bernoulli(x: Tensor, p: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Count ``x`` as a tensor of probabilities even if ``p`` is a number, as torch.func does."""
    if isinstance(x, BatchTracer) and p is not None and not isinstance(p, Tensor):
        require_one_distribution(torch.bernoulli, x.dispatch_level, [x.bdim])
    return NotImplemented


@function_rules.replace(Tensor.resize_as_)
def _resize_as(
    x: Tensor, template: Tensor, *, memory_format: torch.memory_format | None = None
) -> Tensor:
    """Resize to the template's shape and layout, without reading its values."""
    if memory_format is torch.preserve_format:
        memory_format = next(
            (
                wanted
                for wanted in (torch.channels_last, torch.channels_last_3d)
                if template.is_contiguous(memory_format=wanted) and not template.is_contiguous()
            ),
            None,
        )
    return x.resize_(template.shape, memory_format=memory_format)


DECOMPOSITIONS["aten::resize_as_"] = _resize_as
DECOMPOSITIONS["aten::ctc_loss.IntList"] = _ctc_loss


@function_rules.replace(Tensor.coalesce)
def _coalesce(x: Tensor) -> Any:
    """Coalesce the values of all examples at once.

    Indices and the number of stored elements differ from example to example.
    """
    if not isinstance(x, BatchTracer) or x.value.layout is not torch.sparse_coo:
        return NotImplemented
    with x.dispatch_level.restored():
        value = x.value.coalesce()
    return wrap(value, x.bdim, x.dispatch_level)
