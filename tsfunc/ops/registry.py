"""The registry of batching rules: one row per operator that has a rule.

A row is declared once, in the file of its family::

    @row("aten::addbmm")
    def addbmm(op, level, bdims, args, kwargs): ...

    rows(pointwise, "aten::sin", "aten::add.Tensor")

Names are those of torch's dispatcher (``aten::add.Tensor``; a default overload has no suffix).
The shape category of an operator is in the catalogue (``ops/catalogue``), for operators with and
without a row.

NOTE [batching rules]
A rule is ``rule(op, level, bdims, args, kwargs) -> (out, out_dims)``.

``op``
    the called operator: an ``OpOverload``. Rules that only pass it on (pointwise) also get a
    Python callable such as ``torch.sin``.
``level``
    the vmap level of the call: ``level.batch_size``, ``level.randomness``.
``bdims``
    one entry for each of ``args``: the batch dim of that tensor (never negative), or None for an
    argument that is not batched. A list of tensors, at least one of them batched, has a list of
    such entries. At least one entry is not None.
``args``, ``kwargs``
    the arguments as in the operator's schema, with each batched tensor replaced by its physical
    value, which has the batch dim as an additional dim. ``kwargs`` are the keyword-only ones.
    Trailing arguments that were not given are absent from ``args``.
``out``, ``out_dims``
    the physical result and its batch dim: an int or None for a tensor. A tuple or list of results
    has either a tuple with one entry each, or one entry for all. Results that are not tensors
    are returned unchanged.

In the code of rules ``bdim`` is the batch dim of the first tensor or of the result, and ``p``,
``q``, ``r`` and so on are those of other tensors.

A rule does not check its input again, leaves dims where they are, calls one batched kernel, and
writes into its arguments only if the operator does. An in-place row returns ``args[0]``. The calls
of torch that a rule makes depend on the arguments' metadata and on those that are not tensors; a
rule that reads data reads it by torch's operators (NOTE [recipes] in ``bridge/tracers/recipes``).
A rule returns ``NotImplemented`` for a call that it does not cover; the per-example loop runs it.

A rule of this form is complete. Four declarations beside it add what a rule alone can't have:

``@checked`` (``refusal``)
    required if the kernel accepts calls that the operator refuses for one example.
``takes_keywords`` (``keywords``)
    required if batched tensors may be keyword arguments: NOTE [batched keywords].
``VIEWS.row``, ``COPIES.row`` (``views``, ``identity``)
    in place of ``row`` for operators of these families, which a trace runs without data if their
    kernels do not read the device. No result depends on it.
``@shifted`` (``shifts``)
    for speed alone: how the arguments change if the batch dim is first. Compiled handlers then call
    the operator without the rule.
"""

from __future__ import annotations

import enum
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tsfunc import hooks
from tsfunc.errors import DispatchError
from tsfunc.user_code import code_location_text


class Category(enum.Enum):
    """An operator's shape category: how its result's shape follows from its arguments' shapes."""

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
    """The part of a vmap with ``data_dependent="split"`` that separates unequal examples."""

    def agree(self, answers: Tensor) -> Tensor | None:
        """Continue with examples of equal rows; return their indices, or None if all are equal."""


class RuleLevel(Protocol):
    """The interface of a vmap level that batching rules use."""

    @property
    def batch_size(self) -> int: ...
    @property
    def randomness(self) -> str: ...
    @property
    def splitter(self) -> Splitter | None: ...
    @property
    def in_backward_formula(self) -> bool:
        """True while a backward formula of torch runs."""

    def outside(self) -> AbstractContextManager[None]:
        """Context manager: torch runs on plain tensors, and no level or mode sees it."""

    def example_indices(self, device: torch.device) -> Tensor:
        """Return the index of each example of the batch in the whole vmapped call."""

    def random_key(self, generator: torch.Generator | None) -> Tensor:
        """Return the two words of the call's key, from a generator (None: torch's default)."""

    def next_draw(self) -> int | Tensor:
        """Count a draw; return the number before, of all examples or of each."""

    def on_random_op(self, generator: torch.Generator | None) -> None:
        """Record that an operator is about to draw from the generator (None: torch's default)."""


# The parameters of a rule: NOTE [batching rules].
BatchDims = Sequence[Any]
Args = Sequence[Any]
Kwargs = Mapping[str, Any]
Rule = Callable[[Any, RuleLevel, BatchDims, Args, Kwargs], Any]


@dataclass(frozen=True)
class Row:
    """One operator: its name, its batching rule and the source location of the rule.

    ``category`` is set for an operator that is not in the catalogue, as it was registered, and
    ``family`` for one that was declared by a :class:`Family`.
    """

    name: str
    rule: Rule | None
    source: str
    category: Category | None = None
    family: Family | None = None


_rows: dict[str, Row] = {}


def aten_names(names: str) -> list[str]:
    """Return the full names of ATen operators from a text with their short names."""
    return [f"aten::{name}" for name in names.split()]


def rows(rule: Rule, *names: str, family: Family | None = None) -> None:
    """Declare operators that share a batching rule."""
    caller = sys._getframe(1)
    declare(rule, names, f"{caller.f_code.co_filename}:{caller.f_lineno}", family=family)


def row(*names: str, family: Family | None = None) -> Callable[[Rule], Rule]:
    """Decorate the batching rule of one operator, or of several variants that share the rule."""

    def declared(rule: Rule) -> Rule:
        declare(rule, names, code_location_text(rule) or "?", family=family)
        return rule

    return declared


class Family:
    """Operators that have a property in common; the family's file says which.

    ``row`` and ``rows`` are the functions of these names, for operators of the family.
    """

    def __init__(self) -> None:
        self.row = functools.partial(row, family=self)
        self.rows = functools.partial(rows, family=self)


def declare(
    rule: Rule | None,
    names: Sequence[str],
    source: str,
    category: Category | None = None,
    family: Family | None = None,
) -> None:
    """Add rows.

    Raises:
        DispatchError: an operator has a row already, or a name is not a string.
    """
    for name in names:
        if not isinstance(name, str):
            raise DispatchError(
                f"a row at {source}: expected an operator's name, such as 'aten::sin', got "
                f"{name!r}. Shape categories are in tsfunc/ops/catalogue/decided.txt."
            )
        if name in _rows:
            raise DispatchError(
                f"{name} has a row already, declared at {_rows[name].source}; "
                f"the second one is at {source}. Remove one of them."
            )
        _rows[name] = Row(name, rule, source, category, family)
        for listener in hooks.row_declared.functions:
            listener(_rows[name])


def find(name: str) -> Row | None:
    """Return the row of an operator, or None if it has none."""
    return _rows.get(name)


def all_rows() -> Mapping[str, Row]:
    """Return every row by the operator's name."""
    return _rows
