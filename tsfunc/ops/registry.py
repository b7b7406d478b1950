"""The catalogue: one row per operator, with its shape category and its batching rule.

A row is declared once, in the file of its category::

    @row(Category.FIXED, "aten::addbmm")
    def addbmm(op, level, dims, args, kwargs): ...

    rows(Category.TENSOR_ITERATOR, pointwise, "aten::sin", "aten::add.Tensor")

Names are the dispatcher's (``aten::add.Tensor``; a default overload has no suffix).

NOTE [batching rules]
A rule is ``rule(op, level, dims, args, kwargs) -> (out, out_dims)``.

``op``
    what was called: an ``OpOverload``, or, for rows whose rule only passes it on
    (pointwise), a Python callable such as ``torch.sin``.
``level``
    the batch it runs for: ``level.batch_size``, ``level.randomness``.
``dims``
    one entry for each of ``args``: where the batch dim of that tensor lies (never negative),
    or None for what is not batched; a list of such entries for a list of tensors of which
    one at least is batched. At least one entry is not None.
``args``, ``kwargs``
    as the operator's schema has them, each batched tensor replaced by its physical value,
    which has the batch dim as an additional dim. ``kwargs`` are the keyword-only ones.
    Trailing arguments that were not given are absent from ``args``.
``out``, ``out_dims``
    the physical result and where its batch dim lies: an int or None for a tensor;
    for a tuple or list of results either a tuple with an entry each or one for all.
    Results that are no tensors are passed through.

A rule trusts its input, works on dims where they lie, calls one batched kernel, and never
writes into its arguments unless the operator does. An in-place row returns ``args[0]``.
A rule returns ``NotImplemented`` for a call that it does not cover: the loop takes it.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tsfunc.errors import DispatchError


class Category(enum.Enum):
    """How an operator's result shape follows from its arguments'."""

    TENSOR_ITERATOR = "TensorIterator"
    FIXED = "Fixed"
    N_DIMENSIONAL = "N-Dimensional"
    IDENTITY = "Identity"
    FLATTEN = "Flatten"
    COMPOSITE = "Composite"
    BATCHED = "Batched"
    FEATURE_BATCHED = "FeatureBatched"
    FACTORY = "Factory"
    TRIVIAL = "Trivial"
    SPARSE = "Sparse"
    DYNAMIC = "Dynamic"
    VARIADIC = "Variadic"
    OTHER = "Other"


class Splitter(Protocol):
    """What a vmap with ``data_dependent="split"`` has for values that differ between examples."""

    def agree(self, answers: Tensor) -> Tensor | None:
        """Goes on with examples that answer alike: their places, or None where all do."""


class BatchLevel(Protocol):
    """What a rule may know of the vmap that it runs for."""

    @property
    def batch_size(self) -> int: ...
    @property
    def randomness(self) -> str: ...
    @property
    def splitter(self) -> Splitter | None: ...
    def examples(self, device: torch.device) -> Tensor:
        """The index of each example of the batch in the whole vmapped call."""

    def draws(self, generator: torch.Generator | None) -> None:
        """A random operator is about to draw from the generator, None being torch's own."""


Dims = Sequence[Any]
Rule = Callable[[Any, BatchLevel, Dims, Sequence[Any], Mapping[str, Any]], Any]


@dataclass(frozen=True)
class Row:
    """One operator: its name, its category, its batching rule and where that is written."""

    name: str
    category: Category
    rule: Rule | None
    source: str


_rows: dict[str, Row] = {}


def rows(category: Category, rule: Rule | None, *names: str) -> None:
    """Declares operators of one category that share a batching rule."""
    frame = inspect.currentframe()
    caller = frame.f_back if frame is not None else None
    source = f"{caller.f_code.co_filename}:{caller.f_lineno}" if caller is not None else "?"
    _declare(category, rule, names, source)


def row(category: Category, *names: str) -> Callable[[Rule], Rule]:
    """Decorates the batching rule of one operator, or of variants that share it."""

    def declare(rule: Rule) -> Rule:
        code = getattr(rule, "__code__", None)
        source = f"{code.co_filename}:{code.co_firstlineno}" if code is not None else "?"
        _declare(category, rule, names, source)
        return rule

    return declare


def _declare(category: Category, rule: Rule | None, names: Sequence[str], source: str) -> None:
    for name in names:
        if name in _rows:
            raise DispatchError(
                f"{name} has a row already, declared at {_rows[name].source}; "
                f"the second one is at {source}. Remove one of them."
            )
        _rows[name] = Row(name, category, rule, source)


def find(name: str) -> Row | None:
    """The row of an operator, or None where it has none."""
    return _rows.get(name)


def all_rows() -> Mapping[str, Row]:
    """Every row, by the operator's name."""
    return _rows
