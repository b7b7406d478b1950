"""What examples would answer, which of them agree, and some of them taken out of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tsfunc.errors import DataDependentError
from tsfunc.ops.dims import op_name
from tsfunc.ops.registry import BatchLevel


class BatchChanged(Exception):
    """Internal: examples were put off, so the rule is to be called again with the values left."""


def agree(op: Any, level: BatchLevel, answers: Tensor) -> None:
    """Goes on where all examples have the same answers, a row each.

    Raises:
        BatchChanged: they had not; in the level's batch they have now.
        DataDependentError: there is no example.
    """
    assert level.splitter is not None
    if not level.batch_size:
        raise DataDependentError(
            f"vmap: {op_name(op)}: the result's size depends on the values, and a batch of size 0 "
            f"has none. Return early for an empty batch."
        )
    if level.splitter.agree(answers) is not None:
        raise BatchChanged


def agree_on_results(op: Any, level: BatchLevel, results: Sequence[Any]) -> None:
    """As :func:`agree`, on the shapes and Python values of a result for each example."""
    known: dict[Any, int] = {}
    kinds = [known.setdefault(_kind(result), len(known)) for result in results]
    agree(op, level, torch.tensor(kinds, device="cpu"))


def _kind(result: Any) -> Any:
    """What has to be the same for results to be stacked."""
    if isinstance(result, Tensor):
        return tuple(result.shape), result.dtype
    if isinstance(result, list | tuple):
        return tuple([_kind(item) for item in result])
    return type(result), repr(result)


def take_examples(x: Tensor, at: int, places: Tensor) -> Tensor:
    """Some of the examples: a view where they are neighbours, else laid out as the value is."""
    count = len(places)
    if count == 0 or int(places[-1]) - int(places[0]) + 1 == count:
        return x.narrow(at, int(places[0]) if count else 0, count)
    if x.layout is not torch.strided:
        return x.index_select(at, places.to(x.device))
    strides = x.stride()
    if strides[at] == 0:
        return x.narrow(at, 0, count)
    order = sorted(range(x.dim()), key=lambda dim: -strides[dim])
    if order == sorted(order):
        return x.index_select(at, places.to(x.device))
    laid = x.permute(order).index_select(order.index(at), places.to(x.device))
    return laid.permute([order.index(dim) for dim in range(x.dim())])


def groups_of(answers: torch.Tensor) -> list[torch.Tensor]:
    """The places of the rows that are the same bit by bit, by their first place."""
    rows = _bits(answers.reshape(answers.shape[0], -1))
    # A list: rows that are tracers of an outer level are read there, which may part examples too.
    found: dict[Any, list[int]] = {}
    if rows.shape[1] == 1:
        for place, answer in enumerate(rows.squeeze(1).tolist()):
            found.setdefault(answer, []).append(place)
    else:
        for place, row in enumerate(rows.tolist()):
            found.setdefault(tuple(row), []).append(place)
    return [torch.tensor(places, device="cpu") for places in found.values()]


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(rows: torch.Tensor) -> torch.Tensor:
    """Numbers as integers of the same bits, so that NaNs equal themselves."""
    if rows.is_complex():
        rows = torch.view_as_real(rows).flatten(1)
    if rows.is_floating_point():
        return rows.contiguous().view(_INTEGERS[rows.element_size()])
    return rows


def answers_of(value: torch.Tensor, at: int, name: str) -> torch.Tensor:
    """A row for each example that tells apart what a method would answer for them."""
    value = value.movedim(at, 0)
    if name in ("__bool__", "is_nonzero"):
        return value != 0
    if name in ("__int__", "__index__") and value.is_floating_point():
        return value.trunc() + 0.0  # without the sign of -0.0
    return value
