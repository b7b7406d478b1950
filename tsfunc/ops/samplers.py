"""Samples for ``randomness="split"``: the numbers of each example, from its own random words.

See NOTE [random numbers of an example] in ``philox``. The rules in ``random`` call these functions.
Samples have the batch dim first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tsfunc.ops import distributions
from tsfunc.ops.dims import broadcast_to_front, function_name, logical_shape, op_name, unit_dims
from tsfunc.ops.philox import Philox
from tsfunc.ops.registry import Args, BatchDims, Kwargs, RuleLevel

Sampler = Callable[..., Tensor]


def draw_for(level: RuleLevel, device: Any, kwargs: Mapping[str, Any]) -> Philox:
    """Return the source of random words for a call with these keyword arguments."""
    return Philox(level, torch.device(device), kwargs.get("generator"))


def _require(condition: bool, op: Any, message: str) -> None:
    if not condition:
        raise RuntimeError(f"{function_name(op)}: expected {message}")


def _uniform(
    op: Any, draw: Philox, count: Any, dtype: torch.dtype, low: float = 0.0, high: float = 1.0
) -> Tensor:
    _require(low <= high, op, f"from <= to, got from={low}, to={high}")
    u = distributions.uniform(draw, count, dtype)
    return u if (low, high) == (0.0, 1.0) else u * (high - low) + low


def _draw_normal(
    op: Any, draw: Philox, count: Any, dtype: torch.dtype, mean: float = 0.0, std: float = 1.0
) -> Tensor:
    _require(std >= 0.0, op, f"std >= 0.0, got std={std}")
    z = distributions.normal(draw, count, dtype)
    return z if (mean, std) == (0.0, 1.0) else z * std + mean


def _log_normal(
    op: Any, draw: Philox, count: Any, dtype: torch.dtype, mean: float = 1.0, std: float = 2.0
) -> Tensor:
    _require(std > 0.0, op, f"std > 0.0, got std={std}")
    return (distributions.normal(draw, count, dtype) * std + mean).exp()


def _draw_exponential(
    op: Any, draw: Philox, count: Any, dtype: torch.dtype, rate: float = 1.0
) -> Tensor:
    _require(rate > 0.0, op, f"lambda > 0.0, got lambda={rate}")
    return distributions.exponential(draw, count, dtype) / rate


def _cauchy(
    op: Any, draw: Philox, count: Any, dtype: torch.dtype, median: float = 0.0, scale: float = 1.0
) -> Tensor:
    _require(scale > 0.0, op, f"sigma > 0.0, got sigma={scale}")
    return distributions.cauchy(draw, count, dtype) * scale + median


def _geometric(op: Any, draw: Philox, count: Any, dtype: torch.dtype, chance: float) -> Tensor:
    _require(0 < chance < 1, op, f"p in (0, 1), got p={chance}")
    return distributions.geometric(draw, count, chance)


def _bernoulli(
    op: Any, draw: Philox, count: Any, dtype: torch.dtype, chance: float = 0.5
) -> Tensor:
    _require(0 <= chance <= 1, op, f"p in [0, 1], got p={chance}")
    return distributions.bernoulli(draw, count, chance)


def _greatest(dtype: torch.dtype) -> int:
    """Return the largest integer that ``random_`` draws without bounds."""
    if dtype is torch.bool:
        return 1
    if dtype.is_floating_point:
        return 1 << round(1 - math.log2(torch.finfo(dtype).eps))
    return torch.iinfo(dtype).max


def _draw_between(op: Any, draw: Philox, count: Any, low: int, high: int) -> Tensor:
    _require(low < high, op, f"from < to, got from={low}, to={high}")
    return distributions.integers(draw, count, low, high - low)


def _random(op: Any, draw: Philox, count: Any, dtype: torch.dtype, *bounds: int | None) -> Tensor:
    low, high = (0, *bounds)[-2:] if bounds else (0, None)
    return _draw_between(op, draw, count, low or 0, _greatest(dtype) + 1 if high is None else high)


def _randint(op: Any, draw: Philox, count: Any, dtype: torch.dtype, *bounds: int) -> Tensor:
    low, high = (0, *bounds)[-2:]
    return _draw_between(op, draw, count, low, high)


# By the operator's name without overload and trailing underscore.
_SAMPLERS: dict[str, Sampler] = {
    "rand": _uniform, "rand_like": _uniform, "uniform": _uniform,
    "randn": _draw_normal, "randn_like": _draw_normal, "normal": _draw_normal,
    "normal_functional": _draw_normal,
    "randint": _randint, "randint_like": _randint, "random": _random,
    "log_normal": _log_normal, "exponential": _draw_exponential, "cauchy": _cauchy,
    "geometric": _geometric, "bernoulli": _bernoulli,
}  # fmt: skip


def in_shape(rows: Tensor, shape: Sequence[Any]) -> Tensor:
    """Reshape one row per example to the shape of an example.

    An explicit row count allows 0 elements.
    """
    return rows.reshape(rows.shape[0], *shape)


def sampled(
    op: Any, level: RuleLevel, shape: Sequence[Any], dtype: torch.dtype, device: Any,
    params: Sequence[Any], kwargs: Mapping[str, Any],
) -> Tensor:  # fmt: skip
    """Return numbers of a shape for each example, with the batch dim first."""
    sampler = _SAMPLERS[op_name(op).partition("::")[2].partition(".")[0].rstrip("_")]
    draw = draw_for(level, device, kwargs)
    count: Any = math.prod(shape)
    if dtype.is_complex:
        # The variance of a complex normal number is 1, the sum over both parts.
        real = dtype.to_real()
        if sampler is _draw_normal:
            params = (0.0, math.sqrt(0.5))
        parts = sampler(op, draw, 2 * count, real, *params).to(real)
        out = torch.view_as_complex(in_shape(parts, (count, 2)))
    else:
        out = sampler(op, draw, count, dtype, *params).to(dtype)
    return in_shape(out, shape)


def parameter_rows(x: Tensor, bdim: int | None, shape: Sequence[Any]) -> Tensor:
    """Return a parameter as rows of float64 numbers: one row per example, or one row for all."""
    x = x.detach()
    x = broadcast_to_front(x, bdim)
    x = unit_dims(x, 1, len(shape) - x.dim() + 1)
    return x.expand(x.shape[0], *shape).reshape(x.shape[0], math.prod(shape)).to(torch.float64)


def without_gradient(out: Tensor, *params: Any) -> Tensor:
    """Make the derivative by the parameters zero, as torch does, instead of undefined."""
    for param in params:
        if isinstance(param, Tensor) and param.requires_grad:
            never = torch.zeros((), dtype=torch.bool, device=out.device)
            out = torch.where(never, param.sum().to(out.dtype), out)
    return out


def broadcast_shape(args: Sequence[Any], bdims: BatchDims) -> Sequence[Any]:
    shapes = [
        logical_shape(x, bdim)
        for x, bdim in zip(args, bdims, strict=False)
        if isinstance(x, Tensor)
    ]
    return list(torch.broadcast_shapes(*shapes))


def multinomial(
    op: Any, draw: Philox, x: Tensor, bdim: int | None, number: int, replacement: bool
) -> Tensor:
    """Return drawn categories: by search in the cumulative weights.

    Without replacement, they have the largest weights after division by exponential numbers.
    """
    weights = broadcast_to_front(x.detach(), bdim)
    lead, kinds = weights.shape[1:-1], weights.shape[-1]
    _require(number > 0, op, f"num_samples > 0, got num_samples={number}")
    _require(
        replacement or number <= kinds, op,
        f"num_samples <= {kinds}, the number of categories, without replacement, got {number}",
    )  # fmt: skip
    if type(weights) is Tensor:
        fine = (weights >= 0).all() & (weights.sum(-1) > 0).all() & weights.isfinite().all()
        _require(bool(fine), op, "weights that are finite, not negative, and not all 0")
    weights = weights.to(torch.float64)
    if replacement:
        count: Any = math.prod(lead) * number
        u = in_shape(distributions.uniform(draw, count, torch.float64), (*lead, number))
        sums = weights.cumsum(-1)
        sums = sums.expand(max(u.shape[0], sums.shape[0]), *sums.shape[1:]).contiguous()
        indices = torch.searchsorted(sums, (u * sums[..., -1:]).contiguous(), right=True)
        last = kinds - 1 - (weights > 0).flip(-1).to(torch.int8).argmax(-1, keepdim=True)
        return torch.minimum(indices, last)
    count = math.prod(lead) * kinds
    waits = in_shape(distributions.exponential(draw, count, torch.float64), (*lead, kinds))
    return (weights / waits).topk(number, -1).indices


def _samples(
    draw: Philox, name: str, args: Sequence[Any], bdims: BatchDims, shape: Sequence[Any]
) -> Tensor:
    params = [parameter_rows(x, bdim, shape) for x, bdim in zip(args, bdims, strict=False)]
    if name == "aten::poisson":
        return distributions.poisson(draw, params[0])
    if name == "aten::binomial":
        return distributions.binomial(draw, params[0], params[1])
    return distributions.gamma(draw, params[0])


def of_parameters(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Tensor:
    """Return numbers of poisson, binomial, gamma and dirichlet, whose parameters are tensors."""
    shape, dtype = broadcast_shape(args, bdims), args[0].dtype
    draw = draw_for(level, args[0].device, kwargs)
    out = in_shape(_samples(draw, op_name(op), args, bdims, shape), shape)
    if op_name(op) == "aten::_sample_dirichlet":
        return (out / out.sum(-1, keepdim=True)).clamp_min(torch.finfo(dtype).tiny).to(dtype)
    if op_name(op) == "aten::_standard_gamma":
        out = out.clamp_min(torch.finfo(dtype).tiny).to(dtype)
        return _with_implicit_gradient(args[0], bdims[0], out)
    return without_gradient(out.to(dtype), *args)


def _with_implicit_gradient(shape: Tensor, bdim: int | None, out: Tensor) -> Tensor:
    """Attach the derivative of gamma numbers by their parameter; torch has its formula."""
    alpha = broadcast_to_front(shape, bdim)
    plain = type(alpha) in (Tensor, torch.nn.Parameter)
    if plain and not alpha.requires_grad and forward_ad.unpack_dual(alpha).tangent is None:
        return out
    fixed = alpha.detach()
    slope: Tensor = torch.ops.aten._standard_gamma_grad(fixed.expand_as(out), out)
    return out + (alpha - fixed) * slope
