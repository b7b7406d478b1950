"""Operators whose result sizes, or Python results, depend on values.

With ``data_dependent="split"`` a rule first requires that the examples agree
(``splitting.check_equal_rows``). After that, the level's batch has only examples whose results can
be stacked. Without it, these operators raise an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from tsfunc.dispatch.messages import SPLIT
from tsfunc.errors import DataDependentError
from tsfunc.ops.dims import (
    align,
    batch_to_front,
    flatten_examples,
    flatten_logical,
    function_name,
    logical_rank,
    logical_shape,
    op_name,
)
from tsfunc.ops.refusal import refuse_like_torch, require
from tsfunc.ops.registry import Args, BatchDims, Kwargs, RuleLevel, row, rows
from tsfunc.ops.splitting import agree_on_results, check_equal_rows, common_value
from tsfunc.user_code import user_location

OUTSIDE = f"or call it outside of the vmapped function. {SPLIT}"


def refuse_dynamic_size(op: Any, instead: str) -> NoReturn:
    """Raise the error for results whose sizes can differ between examples."""
    raise DataDependentError(
        f"vmap: {function_name(op)}, at {user_location()}: the size of the result depends on the "
        f"values of a batched tensor, so it would differ from example to example (torch.func says: "
        f"vmap: We do not support batching operators that can output dynamic shape. Attempted to "
        f"vmap over {op_name(op)}). {instead}, {OUTSIDE}."
    )


@row("aten::_local_scalar_dense", "aten::item")
def item(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Return a Python value that all examples share.

    Without ``data_dependent="split"`` this works only in backward formulas, which read values to
    choose a computation.

    Raises:
        DataDependentError: the vmap does not split batches, and the value is not read by a formula
            or differs between examples.
    """
    example = args[0].select(bdims[0], 0)
    if level.splitter is None:
        if level.in_backward_formula and common_value(args[0], "item") is not None:
            return op(example), None
        raise DataDependentError(
            f"vmap: It looks like you're calling .item() on a Tensor. We don't support vmap over "
            f"calling .item() on a Tensor, please try to rewrite what you're doing with other "
            f"operations ({function_name(op)} at {user_location()} has to return one Python "
            f"value, but each example has its own), {OUTSIDE}."
        )
    check_equal_rows(op, level, batch_to_front(args[0], bdims[0]))
    return op(example), None


@row("aten::equal", "aten::allclose")
def compare_tensors(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Compare whole tensors: the result is one bool, which the examples must share.

    Without ``data_dependent="split"`` this works only in backward formulas: that of a complex
    ``svd`` compares its cotangents, to refuse those that depend on the phases of the vectors.
    """
    (x, y), bdim = align(args[:2], bdims[:2])
    exact = op_name(op) == "aten::equal"
    alike = logical_shape(args[0], bdims[0]) == logical_shape(args[1], bdims[1])
    if level.splitter is None:
        # True for the batch is True for each example.
        if level.in_backward_formula and (alike or not exact) and op(x, y, *args[2:], **kwargs):
            return True, None
        raise DataDependentError(
            f"vmap: {function_name(op)}, at {user_location()}, answers with one Python bool, but "
            f"each example has its own answer. Compare element by element, (x == y).all(), and "
            f"keep the result a tensor, {OUTSIDE}."
        )
    if alike or not exact:
        same = torch.eq(x, y) if exact else torch.isclose(x, y, *args[2:], **kwargs)
        check_equal_rows(op, level, flatten_examples(same, bdim).all(1))
    example = [
        x if bdim is None else x.select(bdim, 0) for x, bdim in zip(args, bdims, strict=True)
    ]
    return op(*example, **kwargs), None


def _run_each_example(
    op: Any,
    level: RuleLevel,
    bdims: BatchDims,
    args: Args,
    kwargs: Kwargs,
    instead: str = "Use torch.where or a mask of the full size instead",
) -> Any:
    """Run the operator on one example after the other, and stack results of equal size."""
    if level.splitter is None:
        refuse_dynamic_size(op, instead)
    results = []
    for i in range(level.batch_size):
        example = [
            x if bdim is None else x.select(bdim, i) for x, bdim in zip(args, bdims, strict=True)
        ]
        results.append(op(*example, **kwargs))
    agree_on_results(op, level, results)
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    return tuple(torch.stack(parts) for parts in zip(*results, strict=True)), 0


rows(
    _run_each_example,
    "aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::unique_dim_consecutive",
)  # fmt: skip


@row("aten::bincount")
@refuse_like_torch
def bincount(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Add to the bins of all examples, if ``minlength`` says how many bins there are.

    Raises:
        DataDependentError: ``minlength`` is 0, or an example has a number without a bin.
    """
    x, weights, least = (*args, None, None)[:3]
    weights, least = kwargs.get("weights", weights), kwargs.get("minlength", least) or 0
    mapped = bdims[0] is not None
    if mapped and (level.splitter is not None or not least):
        advice = "Give bincount a minlength above the numbers of all examples"
        return _run_each_example(op, level, bdims, args, kwargs, advice)
    x = batch_to_front(x, bdims[0]) if mapped else x.unsqueeze(0)
    count = least if mapped else op(x[0], None, least).shape[0]
    if weights is None or x.shape[1] == 0:
        weights = torch.ones((), dtype=torch.int64, device=x.device).expand(x.shape)
    else:
        weights = batch_to_front(weights, bdims[1]) if bdims[1] is not None else weights[None]
        weights = weights if weights.dtype is torch.float32 else weights.double()
    places = x.long().expand(level.batch_size, x.shape[1])
    bins = torch.zeros(level.batch_size, count, dtype=weights.dtype, device=x.device)
    try:
        return bins.scatter_add_(1, places, weights.expand(places.shape)), 0
    except RuntimeError as error:
        raise DataDependentError(
            f"vmap: bincount, at {user_location()}: expected numbers from 0 to {least - 1}, since "
            f"the examples have {least} bins each (minlength={least}), got another one ({error}). "
            f"Give it a minlength above the numbers of all examples, {OUTSIDE}"
        ) from None


def nonzeros(op: Any, level: RuleLevel, masks: Sequence[Tensor]) -> list[Tensor]:
    """Return the indices of nonzero elements; the examples must agree on their number.

    Args:
        masks: tensors with the batch dim first.

    Returns:
        For each mask a tensor (example, element, dim).
    """
    counts = torch.stack([flatten_logical(mask).count_nonzero(1) for mask in masks], 1)
    check_equal_rows(op, level, counts)
    flat = [mask.nonzero() for mask in masks]
    size = level.batch_size
    return [
        positions.view(size, positions.shape[0] // size, positions.shape[1])[:, :, 1:]
        for positions in flat
    ]


@row("aten::nonzero")
def nonzero(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Make one call for all examples, which have equally many nonzero elements."""
    if level.splitter is None:
        refuse_dynamic_size(op, "Use torch.where or a mask of the full size instead")
    return nonzeros(op, level, [batch_to_front(args[0], bdims[0])])[0], 0


@row("aten::nonzero_numpy", "aten::argwhere", "aten::where")
def argument_nonzero(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Other forms of ``nonzero``."""
    if level.splitter is None:
        refuse_dynamic_size(op, "Use torch.where or a mask of the full size instead")
    x = batch_to_front(args[0], bdims[0])
    if op_name(op) == "aten::argwhere":
        return nonzeros(op, level, [x])[0], 0
    if x.dim() == 1:
        x = x.unsqueeze(1)
    return nonzeros(op, level, [x])[0].unbind(2), 0


@row("aten::masked_select")
@refuse_like_torch
def masked_select(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Select with a shared mask, which gives equally many elements for each example."""
    x, mask = args
    if bdims[1] is not None:
        return _masked_select(op, level, bdims, x, mask)
    x = batch_to_front(x, bdims[0])
    for _ in range(mask.dim() - logical_rank(x, 0)):
        x = x.unsqueeze(1)
    x = x.expand(x.shape[0], *torch.broadcast_shapes(x.shape[1:], mask.shape))
    # The number of positions of one mask has one name in a trace; a view of it is another mask.
    mask = mask if mask.shape == x.shape[1:] else mask.expand(x.shape[1:])
    positions = mask.nonzero().unbind(1)
    if not positions:
        return flatten_logical(x)[:, mask.reshape(1)], 0
    selected: Tensor = torch.ops.aten.index.Tensor(x, [None, *positions])
    return selected, 0


def _masked_select(op: Any, level: RuleLevel, bdims: BatchDims, x: Tensor, mask: Tensor) -> Any:
    """Select with one mask per example."""
    if level.splitter is None:
        refuse_dynamic_size(op, "Use torch.where(mask, x, fill) instead")
    (x, mask), bdim = align([x, mask], bdims)
    x, mask = (batch_to_front(t, bdim) for t in torch.broadcast_tensors(x, mask))
    check_equal_rows(op, level, flatten_logical(mask).count_nonzero(1))
    out = op(x, mask)
    return out.view(level.batch_size, out.shape[0] // level.batch_size), 0


@row("aten::repeat_interleave.Tensor")
def repeat_interleave(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """With a known output size, search each index in the running sums of the counts."""
    count = kwargs.get("output_size")
    counts = batch_to_front(args[0], bdims[0])
    ends, sums = counts.cumsum(1), counts.sum(1)
    if count is None:
        if level.splitter is None:
            refuse_dynamic_size(
                op, "Give repeat_interleave an output_size that holds for all examples"
            )
        check_equal_rows(op, level, sums)
        count = int(sums[0])
    else:
        require(sums == count, "repeat_interleave: output_size is not the sum of the repeats")
    positions = torch.arange(count, device=ends.device).expand(ends.shape[0], count).contiguous()
    return torch.searchsorted(ends, positions, right=True).to(args[0].dtype), 0


@row("aten::nonzero_static")
def nonzero_static(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Scatter the index of each nonzero element to its ordinal; others go to an extra column."""
    x = batch_to_front(args[0], bdims[0]) != 0
    size, fill = kwargs["size"], kwargs.get("fill_value", -1)
    flat = flatten_logical(x)
    order = flat.cumsum(1) - 1
    order = torch.where(flat, order, size).clamp(max=size)
    ordinals = order.new_full((x.shape[0], size + 1), -1)
    positions = torch.arange(flat.shape[1], device=x.device).expand(flat.shape)
    ordinals = ordinals.scatter(1, order, positions)[:, :size]
    columns = []
    rest = ordinals
    for extent in reversed(x.shape[1:]):
        extent = max(extent, 1)  # avoids a division by 0 if there are no elements
        columns.append(torch.where(ordinals < 0, fill, rest % extent))
        rest = rest // extent
    if not columns:
        return ordinals.new_empty((x.shape[0], size, 0)), 0
    return torch.stack(columns[::-1], -1), 0


@row("aten::_is_any_true", "aten::_is_all_true")
def is_true(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Reduce over all examples.

    Only torch's internal checks call it (anomaly mode, TORCH_CHECK_TENSOR_ALL).
    """
    return op(args[0]), None


@row("aten::_assert_async", "aten::_assert_async.msg")
def assert_async(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """The condition must hold for every example."""
    op(torch.ops.aten._is_all_true(args[0]), *args[1:])
    return None, None
