"""Splitting of a batch by values: compare the examples, group equal ones, take some of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tsfunc.errors import DataDependentError
from tsfunc.ops.compressed import is_compressed, select_examples
from tsfunc.ops.dims import function_name, memory_order, permuted_back
from tsfunc.ops.registry import RuleLevel


class BatchChanged(Exception):
    """Internal: examples were deferred, so the rule must run again on the remaining batch."""


def check_equal_rows(op: Any, level: RuleLevel, answers: Tensor) -> None:
    """Check that the rows of ``answers``, one for each example, are equal.

    Raises:
        BatchChanged: the rows differ; the level's batch now has only examples with equal rows.
        DataDependentError: the batch is empty.
    """
    assert level.splitter is not None
    if not level.batch_size:
        raise DataDependentError(
            f"vmap: {function_name(op)}: the result's size depends on the values, and a batch of "
            f"size 0 has none. Return early for an empty batch."
        )
    if level.splitter.agree(answers) is not None:
        raise BatchChanged


def agree_on_results(op: Any, level: RuleLevel, results: Sequence[Any]) -> None:
    """Check that the results of the examples are equal in shapes and Python values."""
    numbers: dict[Any, int] = {}
    kinds = [numbers.setdefault(_result_properties(result), len(numbers)) for result in results]
    check_equal_rows(op, level, torch.tensor(kinds, device="cpu"))


def _result_properties(result: Any) -> Any:
    """Return the properties of a result that must be equal for results to be stacked."""
    if isinstance(result, Tensor):
        return tuple(result.shape), result.dtype
    if isinstance(result, list | tuple):
        return tuple([_result_properties(item) for item in result])
    return type(result), repr(result)


def take_examples(x: Tensor, bdim: int, positions: Tensor) -> Tensor:
    """Return some of the examples: a view if they are adjacent, else a copy in the same layout."""
    count = len(positions)
    if is_compressed(x):
        return select_examples(x, positions.to(x.device))
    if x.layout is not torch.strided:
        return x.index_select(bdim, positions.to(x.device))
    if count == 0 or int(positions[-1]) - int(positions[0]) + 1 == count:
        return x.narrow(bdim, int(positions[0]) if count else 0, count)
    strides = x.stride()
    if strides[bdim] == 0:
        return x.narrow(bdim, 0, count)
    order = memory_order(x.shape, strides)
    if order == sorted(order):
        return x.index_select(bdim, positions.to(x.device))
    laid = x.permute(order).index_select(order.index(bdim), positions.to(x.device))
    return permuted_back(laid, order)


_FEW = 256  # up to this number of rows, comparing in Python is faster than by operators


def groups_of(answers: Tensor) -> list[Tensor]:
    """Return the indices of each group of rows that are equal bit by bit, in ascending order."""
    rows = _bits(answers.reshape(answers.shape[0], -1))
    if type(rows) is Tensor and len(rows) > _FEW:
        rows = rows.cpu()
        if rows.shape[1] == 1:
            kind = torch.unique(rows, return_inverse=True)[1].squeeze(1)
        else:
            kind = torch.unique(rows, dim=0, return_inverse=True)[1]
        counts = torch.bincount(kind).tolist()
        return list(kind.argsort(stable=True).split(counts))
    # A list: rows can be tracers of an outer level, and reading those can split examples too.
    groups: dict[Any, list[int]] = {}
    for position, row in enumerate(rows.tolist()):
        groups.setdefault(tuple(row), []).append(position)
    return [torch.tensor(positions, device="cpu") for positions in groups.values()]


_SINGLE: dict[str, Callable[[Any], Any]] = {
    "__bool__": bool, "is_nonzero": bool, "__int__": int, "__float__": float, "item": lambda x: x,
}  # fmt: skip


def common_value(value: Tensor, name: str) -> Any:
    """Return a method's answer if a cheap check finds it equal for all examples; else None.

    ``value`` has one number for each example.
    """
    single = _SINGLE.get(name)
    if single is None or value.is_complex():
        return None
    if value.numel() > _FEW:
        first = value.reshape(-1)[0]
        if not bool((value == first).all()):
            return None
        number = first.item()
    else:
        numbers = value.reshape(-1).tolist()
        number = numbers[0]
        if numbers.count(number) != len(numbers):
            return None
    # 0.0 == -0.0, although their signs differ; infinities and NaN do not convert to integers.
    if isinstance(number, float) and (number == 0 or not math.isfinite(number)):
        return None
    return single(number)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(rows: torch.Tensor) -> torch.Tensor:
    """Return the values as integers with the same bits, so that a NaN equals itself."""
    if rows.is_complex():
        rows = torch.view_as_real(rows).flatten(1)
    if rows.is_floating_point():
        return rows.contiguous().view(_INTEGERS[rows.element_size()])
    return rows


def comparison_rows(value: torch.Tensor, bdim: int, name: str) -> torch.Tensor:
    """Return a row per example; equal rows mean that a method returns equal results for them."""
    value = value.movedim(bdim, 0)
    if name in ("__bool__", "is_nonzero"):
        return value != 0
    if name in ("__int__", "__index__") and value.is_floating_point():
        return value.trunc() + 0.0  # the addition turns -0.0 into 0.0
    return value
