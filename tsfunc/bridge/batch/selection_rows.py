"""Products with matrices, functions of rows, and losses, for selections.

See NOTE [selections] in ``selections``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.nn import functional

from tsfunc.bridge.batch.selections import (
    Selection,
    SelectionRules,
    arguments_by_name,
    together,
)
from tsfunc.bridge.tracers.function_registry import Stage
from tsfunc.bridge.tracers.operators import objects_in
from tsfunc.ops.dims import wrap_dim
from tsfunc.ops.registry import Kwargs

_T = torch.Tensor


def _matmul(func: Callable[..., Any], args: Sequence[Any], kwargs: Kwargs) -> Any:
    """Multiply rows or columns by a matrix, or contract two selections over their elements."""
    x, y = args if not kwargs else (*args, *kwargs.values())
    if func.__name__ == "__rmatmul__":
        x, y = y, x
    if isinstance(x, Selection) and isinstance(y, Selection):
        # The contracted dim is the last of x, and the last but one of y.
        if x.after != 0 or y.after != min(y.elements.dim() - 1, 1):
            return NotImplemented
        elements = y.in_order_of(x.mask, x.source)
        keep = y.mask if elements is y.elements else x.mask
        return torch.matmul(x.filled(0), torch.where(keep.reshape(-1, *[1] * y.after), elements, 0))
    if isinstance(x, Selection):
        if not x.after:
            return NotImplemented
        after = x.after - 1 if y.dim() == 1 else x.after
        if y.dim() > 2:
            return NotImplemented
        return x.like(torch.matmul(x.elements, y), after)
    if y.after or y.elements.dim() < 2:
        return NotImplemented
    return y.like(torch.matmul(x, y.elements))


def _rows(func: Callable[..., Any], args: Sequence[Any], kwargs: Kwargs) -> Any:
    """Functions of the last dim that don't mix rows."""
    x = args[0]
    if not isinstance(x, Selection) or not x.after:
        return NotImplemented
    if any(isinstance(value, Selection) for value in (*args[1:], *kwargs.values())):
        return NotImplemented
    return x.like(func(x.elements, *args[1:], **kwargs))


def _layer_norm(func: Callable[..., Any], args: Sequence[Any], kwargs: Kwargs) -> Any:
    shape = arguments_by_name(args, kwargs, "normalized_shape")["normalized_shape"]
    return _rows(func, args, kwargs) if len(shape) <= args[0].after else NotImplemented


def _embedding(func: Callable[..., Any], args: Sequence[Any], kwargs: Kwargs) -> Any:
    x = args[0]
    if not isinstance(x, Selection) or any(objects_in(Selection, (*args[1:], *kwargs.values()))):
        return NotImplemented
    return x.like(func(x.elements, *args[1:], **kwargs), x.after + 1)


def _transposed(func: Callable[..., Any], args: Sequence[Any], kwargs: Kwargs) -> Any:
    x = args[0]
    if x.elements.dim() == 1:
        return x.like(x.elements)
    out = func(x.elements, *args[1:], **kwargs)
    if x.elements.dim() != 2:
        return NotImplemented
    return x.like(out, 1 - x.after)


def _row_pairs(func: Callable[..., Any], args: Sequence[Any], kwargs: Kwargs) -> Any:
    """Functions of the rows of two tensors that return a number for each pair of rows."""
    options = dict(kwargs)
    lead, values = together(args[:2], func.__name__)
    dim = options.get("dim", args[2] if len(args) > 2 else 1)
    if func is functional.cosine_similarity and wrap_dim(dim, lead.elements.dim()) <= (
        lead.element_dim + lead.elements.dim()
    ):
        return NotImplemented
    if not lead.after:
        return NotImplemented
    keepdim = options.get("keepdim", False)
    out = func(*values, *args[2:], **options)
    return lead.like(out, lead.after if keepdim else lead.after - 1)


def _loss_options(kwargs: Kwargs) -> dict[str, Any] | None:
    """Return the options of a loss, or None if a deprecated option is given."""
    options = dict(kwargs)
    old = [options.pop(name, None) for name in ("size_average", "reduce")]
    return options if old == [None, None] else None


def _loss(func: Callable[..., Any], args: Sequence[Any], kwargs: Kwargs) -> Any:
    """Compute the elementwise losses of a selection, then apply ``reduction``."""
    options = _loss_options(kwargs)
    if options is None or len(args) != 2:
        return NotImplemented
    reduction = options.pop("reduction", "mean")
    names = list(options)
    lead, values = together([*args, *options.values()], func.__name__)
    options = dict(zip(names, values[len(args) :], strict=True))
    losses = func(*torch.broadcast_tensors(*values[: len(args)]), reduction="none", **options)
    return _reduce(lead.like(losses), reduction)


def _reduce(losses: Selection, reduction: str) -> Any:
    if reduction == "none":
        return losses
    if reduction == "batchmean":
        if not losses.is_first:
            return NotImplemented
        return losses.sum() / losses.count()
    return losses.mean() if reduction == "mean" else losses.sum()


def _cross_entropy(func: Callable[..., Any], args: Sequence[Any], kwargs: Kwargs) -> Any:
    """``cross_entropy`` or ``nll_loss`` of a selection of rows and a selection of classes."""
    options = _loss_options(arguments_by_name(args, kwargs, "target", "weight"))
    if options is None or len(args) > 3:
        return NotImplemented
    x, target = args[0], options.pop("target")
    if any(not isinstance(operand, Selection) or not operand.is_first for operand in (x, target)):
        return NotImplemented
    if not x.after:
        return NotImplemented
    reduction = options.pop("reduction", "mean")
    classes = target.in_order_of(x.mask, x.source)
    losses = x.like(func(x.elements, classes, reduction="none", **options), x.after - 1)
    if reduction != "mean" or classes.is_floating_point():
        return _reduce(losses, reduction)
    # The mean divides by the weights of the rows' classes, and skips ignored rows.
    counted = classes != options.get("ignore_index", -100)
    weight = options.get("weight")
    share: torch.Tensor = counted
    if weight is not None:
        share = torch.where(counted, weight[torch.where(counted, classes, 0)], 0)
    return losses.sum() / losses.like(share).sum()


def _normalize(func: Callable[..., Any], args: Sequence[Any], kwargs: Kwargs) -> Any:
    x, by_name = args[0], arguments_by_name(args, kwargs, "p", "dim")
    if not isinstance(by_name.get("p", 2.0), int | float) or by_name.get("p", 2.0) <= 0:
        return NotImplemented
    over = wrap_dim(by_name.get("dim", 1), x.elements.dim()) == x.element_dim + x.elements.dim()
    return x.like(func(x.filled(0) if over else x.elements, **by_name))


function_rules: Final = SelectionRules()
function_rules.serve(_matmul, "matmul mm mv dot __matmul__ __rmatmul__")
function_rules.serve(_rows, "linear", functional)
function_rules.serve(_normalize, "normalize", functional)
function_rules.serve(_layer_norm, "layer_norm rms_norm", functional)
function_rules.serve(_row_pairs, "cosine_similarity pairwise_distance", functional)
function_rules.serve(_embedding, "embedding", functional)
function_rules.serve(_transposed, "t transpose")
function_rules.add(
    Stage.SELECTION,
    lambda func, args, kwargs: _transposed(lambda x: x.mT, args, kwargs),
    _T.T.__get__,  # type: ignore[attr-defined]
    _T.mT.__get__,  # type: ignore[attr-defined]
)
function_rules.serve(
    _loss,
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits kl_div poisson_nll_loss soft_margin_loss",
    functional,
)
function_rules.serve(_cross_entropy, "cross_entropy nll_loss", functional)
