"""The batching rules: one row per operator that has one.

A row is declared once, in the file of its family::

    @row("aten::addbmm")
    def addbmm(op, level, dims, args, kwargs): ...

    rows(pointwise, "aten::sin", "aten::add.Tensor")

Names are the dispatcher's (``aten::add.Tensor``; a default overload has no suffix). An operator's
shape category is in the catalogue (``ops/catalogue``), whether it has a row or not.

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
import sys
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
    @property
    def in_formula(self) -> bool:
        """Whether it is a backward formula of torch's that asks."""

    def examples(self, device: torch.device) -> Tensor:
        """The index of each example of the batch in the whole vmapped call."""

    def keys(self, nonce: Tensor, generator: torch.Generator | None) -> Tensor:
        """The key for a draw with that nonce: for all examples, or a row for each."""

    def draws(self, generator: torch.Generator | None) -> None:
        """A random operator is about to draw from the generator, None being torch's own."""


Dims = Sequence[Any]
Rule = Callable[[Any, BatchLevel, Dims, Sequence[Any], Mapping[str, Any]], Any]


@dataclass(frozen=True)
class Row:
    """One operator: its name, its batching rule and where that is written.

    ``category`` is that of an operator which the catalogue does not know, as registered.
    """

    name: str
    rule: Rule | None
    source: str
    category: Category | None = None


_rows: dict[str, Row] = {}


def rows(rule: Rule, *names: str) -> None:
    """Declares operators that share a batching rule."""
    caller = sys._getframe(1)
    declare(rule, names, f"{caller.f_code.co_filename}:{caller.f_lineno}")


def row(*names: str) -> Callable[[Rule], Rule]:
    """Decorates the batching rule of one operator, or of variants that share it."""

    def declared(rule: Rule) -> Rule:
        code = getattr(rule, "__code__", None)
        source = f"{code.co_filename}:{code.co_firstlineno}" if code is not None else "?"
        declare(rule, names, source)
        return rule

    return declared


def declare(
    rule: Rule | None, names: Sequence[str], source: str, category: Category | None = None
) -> None:
    """Adds rows; a second one for the same operator is refused."""
    for name in names:
        if not isinstance(name, str):
            raise DispatchError(
                f"A row at {source} is declared for {name!r}; expected an operator's name, such as "
                f"'aten::sin'. Shape categories are in tsfunc/ops/catalogue/decided.txt."
            )
        if name in _rows:
            raise DispatchError(
                f"{name} has a row already, declared at {_rows[name].source}; "
                f"the second one is at {source}. Remove one of them."
            )
        _rows[name] = Row(name, rule, source, category)
        for listener in _listeners:
            listener(_rows[name])


_listeners: list[Callable[[Row], None]] = []


def on_declare(listener: Callable[[Row], None]) -> Callable[[Row], None]:
    """Has ``listener(row)`` called for each row that is declared from now on."""
    _listeners.append(listener)
    return listener


def find(name: str) -> Row | None:
    """The row of an operator, or None where it has none."""
    return _rows.get(name)


def all_rows() -> Mapping[str, Row]:
    """Every row, by the operator's name."""
    return _rows
