"""Reductions of selections: NOTE [selections] in ``selections``.

Each reduction is a call on all elements, with the neutral element of the reduction in place of the
elements that are not selected: zero for a sum, the smallest number for a maximum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.nn import functional

from tsfunc.bridge.batch.selections import Selection, SelectionRules, arguments_by_name
from tsfunc.ops.dims import wrap_dim
from tsfunc.ops.refusal import require
from tsfunc.ops.registry import Kwargs

_T = torch.Tensor
_DIM = ("dim", "keepdim")


def _reduced_dims(x: Selection, dim: Any) -> tuple[list[int], bool]:
    """Return the reduced dims, and True if the dim of the elements is among them."""
    rank = x.elements.dim()
    dims = [] if dim is None else [dim] if isinstance(dim, int) else list(dim)
    wrapped = [wrap_dim(dim, rank) for dim in dims] or list(range(rank))
    return wrapped, x.element_dim + rank in wrapped


def _as_reduced(x: Selection, out: torch.Tensor, spans: Sequence[int], keepdim: bool) -> Any:
    """Return a result that keeps the dim of the elements, as a selection."""
    behind = [dim for dim in spans if dim > x.element_dim + x.elements.dim()]
    return x.like(out, x.after if keepdim else x.after - len(behind))


def _limit(x: torch.Tensor, largest: bool) -> Any:
    """Return the largest or the smallest number of the tensor's dtype."""
    if x.dtype is torch.bool:
        return largest
    if x.is_floating_point():
        return math.inf if largest else -math.inf
    info = torch.iinfo(x.dtype)
    return info.max if largest else info.min


def _reduction(names: Sequence[str], neutral: Callable[[torch.Tensor], Any], some: bool) -> Any:
    """Return the handler of reductions with a neutral element.

    If ``some`` is True, each example must select at least one element.
    """

    def served(func: Callable[..., Any], args: Sequence[Any], kwargs: Kwargs) -> Any:
        x, by_name = args[0], arguments_by_name(args, kwargs, *names)
        dim = by_name.get("dim")
        if not isinstance(x, Selection) or not isinstance(dim, int | tuple | list | None):
            return NotImplemented
        spans, over = _reduced_dims(x, dim)
        if not over:
            return _as_reduced(x, func(x.elements, **by_name), spans, by_name.get("keepdim", False))
        if some:
            _require_some(x, func.__name__)
        return func(x.filled(neutral(x.elements)), **by_name)

    return served


def _require_some(x: Selection, name: str) -> None:
    require(x.count() > 0, f"{name}(): for some example the mask selects no element")


def _mean(func: Callable[..., Any], args: Sequence[Any], kwargs: Kwargs) -> Any:
    x, by_name = args[0], arguments_by_name(args, kwargs, *_DIM)
    spans, over = _reduced_dims(x, by_name.get("dim"))
    if not over:
        return _as_reduced(x, func(x.elements, **by_name), spans, by_name.get("keepdim", False))
    dtype = by_name.get("dtype") or x.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        return func(x.elements, **by_name)  # torch raises the error
    elements = x.elements.to(dtype)
    keep = x.column()
    if func.__name__ == "nanmean":
        keep = keep & ~elements.isnan()
    keep = keep.expand_as(elements)
    total = torch.where(keep, elements, 0).sum(spans, by_name.get("keepdim", False))
    return total / keep.sum(spans, by_name.get("keepdim", False))


def _variance(func: Callable[..., Any], args: Sequence[Any], kwargs: Kwargs) -> Any:
    x = args[0]
    if len(args) > 1 and isinstance(args[1], bool):
        args = (x, None, *args[1:])
    by_name = arguments_by_name(args, kwargs, "dim", "unbiased", "keepdim")
    correction = by_name.pop("correction", None)
    unbiased = by_name.pop("unbiased", True)
    if correction is None:
        correction = int(unbiased)
    keepdim = by_name.get("keepdim", False)
    spans, over = _reduced_dims(x, by_name.get("dim"))
    if not over:
        out = func(x.elements, spans, correction=correction, keepdim=keepdim)
        return _as_reduced(x, out, spans, keepdim)
    keep = x.column().expand_as(x.elements)
    count = keep.sum(spans, True)
    mean = torch.where(keep, x.elements, 0).sum(spans, True) / count
    off = torch.where(keep, x.elements - mean, 0)
    squares = (off * off.conj()).real if off.is_complex() else off * off
    out = squares.sum(spans, True) / (count - correction).clamp(min=0)
    if not keepdim:
        out = out.squeeze(spans)
    if func.__name__ == "var":
        return out
    # If all elements are equal, the derivative is 0, as torch defines it.
    return torch.where(out == 0, 0.0, torch.where(out == 0, 1.0, out).sqrt())


def _norm(func: Callable[..., Any], args: Sequence[Any], kwargs: Kwargs) -> Any:
    order = "ord" if func is torch.linalg.vector_norm else "p"
    by_name = arguments_by_name(args, kwargs, order, *_DIM)
    power = by_name.get(order)
    if not isinstance(args[0], Selection) or (
        power not in (None, "fro") and not (isinstance(power, int | float) and power > 0)
    ):
        return NotImplemented
    served = _reduction((order, *_DIM), lambda x: 0, some=power == math.inf)
    return served(func, args, kwargs)


def _extremum(largest: bool) -> Any:
    """Return the handler of ``max`` or ``min`` of all elements, along a dim, or of two tensors."""
    both = torch.maximum if largest else torch.minimum

    def served(func: Callable[..., Any], args: Sequence[Any], kwargs: Kwargs) -> Any:
        by_name = arguments_by_name(args, kwargs, "dim", "keepdim")
        other = by_name.get("other", by_name.get("dim"))
        if isinstance(other, torch.Tensor):
            return both(args[0], other)
        x = args[0]
        if other is not None and not _reduced_dims(x, other)[1]:
            values, at = func(x.elements, **by_name)
            keepdim = by_name.get("keepdim", False)
            spans = _reduced_dims(x, other)[0]
            return type(func(torch.zeros(1), 0))(
                (_as_reduced(x, values, spans, keepdim), _as_reduced(x, at, spans, keepdim))
            )
        _require_some(x, func.__name__)
        if other is None:
            return func(x.filled(_limit(x.elements, not largest)))
        return func(_selected_first(x, _limit(x.elements, not largest)), **by_name)

    return served


def _selected_first(x: Selection, rest: Any) -> torch.Tensor:
    """Move the selected elements to the front, so that an index along the dim counts them."""
    order = (~x.mask).byte().argsort(stable=True)
    return x.filled(rest).index_select(x.element_dim, order)


def _arg_extremum(largest: bool) -> Any:
    """Return the handler of ``argmax`` or ``argmin``."""

    def served(func: Callable[..., Any], args: Sequence[Any], kwargs: Kwargs) -> Any:
        x, by_name = args[0], arguments_by_name(args, kwargs, *_DIM)
        dim, keepdim = by_name.get("dim"), by_name.get("keepdim", False)
        if dim is None and not x.is_first:
            return NotImplemented  # the result is an index into the flattened tensor
        spans, over = _reduced_dims(x, dim)
        if not over:
            return _as_reduced(x, func(x.elements, **by_name), spans, keepdim)
        _require_some(x, func.__name__)
        return func(_selected_first(x, _limit(x.elements, not largest)), **by_name)

    return served


def _keeping_size(neutral: Callable[[torch.Tensor], Any]) -> Any:
    """Return the handler of functions along a dim that keep its size."""

    def served(func: Callable[..., Any], args: Sequence[Any], kwargs: Kwargs) -> Any:
        x, by_name = args[0], arguments_by_name(args, kwargs, "dim")
        if not isinstance(x, Selection) or not isinstance(by_name.get("dim"), int):
            return NotImplemented
        over = _reduced_dims(x, by_name["dim"])[1]
        return x.like(func(x.filled(neutral(x.elements)) if over else x.elements, **by_name))

    return served


def _median(func: Callable[..., Any], args: Sequence[Any], kwargs: Kwargs) -> Any:
    x = args[0]
    if len(args) > 1 or kwargs:
        return NotImplemented
    mask = x.column().expand_as(x.elements).reshape(-1)
    values = x.elements.reshape(-1)
    # Add small and large numbers around the selected ones so that the middle stays the same.
    count = mask.sum()
    below = (mask.shape[0] - 1) // 2 - (count - 1) // 2
    low = (~mask).cumsum(0) <= below
    rest = torch.where(low, _limit(values, False), _limit(values, True)).to(values.dtype)
    middle = func(torch.where(mask, values, rest))
    if not values.is_floating_point():
        _require_some(x, "median")
        return middle
    return torch.where(count == 0, math.nan, middle)


function_rules: Final = SelectionRules()
function_rules.serve(_reduction(_DIM, lambda x: 0, False), "sum nansum count_nonzero any")
function_rules.serve(_reduction(_DIM, lambda x: 1, False), "prod all")
function_rules.serve(_reduction(_DIM, lambda x: -math.inf, False), "logsumexp")
function_rules.serve(_reduction(_DIM, lambda x: _limit(x, False), True), "amax")
function_rules.serve(_reduction(_DIM, lambda x: _limit(x, True), True), "amin")
function_rules.serve(_mean, "mean nanmean")
function_rules.serve(_variance, "var std")
function_rules.serve(_norm, "norm")
function_rules.serve(_norm, "vector_norm", torch.linalg)
function_rules.serve(_extremum(True), "max")
function_rules.serve(_extremum(False), "min")
function_rules.serve(_arg_extremum(True), "argmax")
function_rules.serve(_arg_extremum(False), "argmin")
function_rules.serve(_median, "median")
function_rules.serve(
    _keeping_size(lambda x: -math.inf), "softmax log_softmax", torch, _T, functional
)
function_rules.serve(_keeping_size(lambda x: 0), "cumsum")
function_rules.serve(_keeping_size(lambda x: 1), "cumprod")
