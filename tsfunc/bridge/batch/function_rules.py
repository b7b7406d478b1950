"""The table of Python callables that the function handler passes straight to a batching rule.

A rule that only passes its operator on (pointwise) serves the Python callable as well:
``torch.add`` parses its arguments on values as it would on tracers. Callables of other categories
are listed by name if their rule takes exactly the arguments of the Python function. The callables
of an operator with a registered Batch kernel are not in the table, so that they are dispatched
like any other call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tsfunc.bridge.batch.function_rule_forms import forms
from tsfunc.bridge.tracers.fast_handlers import FORMS, FUNCTION_RULES, NAMED, VIEWS
from tsfunc.bridge.tracers.operators import TorchOperator
from tsfunc.dispatch import DispatchKey, Operator
from tsfunc.dispatch.table import on_register
from tsfunc.ops import all_rows, find
from tsfunc.ops.registry import Row, Rule, on_declare
from tsfunc.ops.tensor_iterator import pointwise

# Names whose operator depends on the arguments (where(condition) is nonzero).
_AMBIGUOUS = frozenset({"where", "max", "min", "to", "copy_", "fill_"})

_DUNDERS = {
    "add": ("__add__", "__radd__"),
    "sub": ("__sub__", "__rsub__"),
    "mul": ("__mul__", "__rmul__"),
    "div": ("__truediv__", "__rtruediv__"),
    "pow": ("__pow__", "__rpow__"),
    "remainder": ("__mod__",),
    "neg": ("__neg__",),
    "abs": ("__abs__",),
    "eq": ("__eq__",),
    "ne": ("__ne__",),
    "lt": ("__lt__",),
    "le": ("__le__",),
    "gt": ("__gt__",),
    "ge": ("__ge__",),
    "bitwise_and": ("__and__",),
    "bitwise_or": ("__or__",),
    "bitwise_xor": ("__xor__",),
    "bitwise_not": ("__invert__",),
}

# Pairs of a Python function and the operator whose rule takes its positional arguments unchanged.
_OTHERS: tuple[tuple[Any, str], ...] = (
    (torch.nn.functional.linear, "aten::linear"),
    (torch.matmul, "aten::matmul"),
    (torch.Tensor.matmul, "aten::matmul"),
    (torch.Tensor.__matmul__, "aten::matmul"),
    (torch.mm, "aten::mm"),
    (torch.Tensor.mm, "aten::mm"),
    (torch.mv, "aten::mv"),
    (torch.Tensor.mv, "aten::mv"),
    (torch.dot, "aten::dot"),
    (torch.Tensor.dot, "aten::dot"),
    (torch.bmm, "aten::bmm"),
    (torch.Tensor.bmm, "aten::bmm"),
    (torch.clamp, "aten::clamp"),
    (torch.Tensor.clamp, "aten::clamp"),
)


def _pointwise() -> Iterator[tuple[Any, Rule]]:
    """Yield each callable whose overloads all have the pointwise rule."""
    names: dict[str, Rule | None] = {}
    for name, row in all_rows().items():
        base = _base(name)
        names[base] = row.rule if names.get(base, row.rule) is row.rule else None
    owners = (torch, torch.Tensor, torch.nn.functional, torch.special)
    for base, rule in names.items():
        if rule is not pointwise or base in _AMBIGUOUS | _registered or base.endswith("_"):
            continue
        for name in (base, *_DUNDERS.get(base, ())):
            for owner in owners:
                found = getattr(owner, name, None)
                if found is not None:
                    yield found, rule


_registered: set[str] = set()


@on_register
def _give_way(op: Operator, key: DispatchKey | None) -> None:
    """Clear the tables, so that a user's Batch kernel or row takes precedence."""
    if isinstance(op, TorchOperator) and key in (None, DispatchKey.Batch):
        _registered.add(_base(op.name))
        FUNCTION_RULES.clear()  # the next vmap refills it
        NAMED.clear()
        FORMS.clear()
        op.direct_rule = op.function = op.by_tracers = None


@on_declare
def _new_row(row: Row) -> None:
    """Clear ``FORMS``, which may hold calls of an operator that had no row before."""
    FORMS.clear()


def _base(name: str) -> str:
    return name.partition("::")[2].partition(".")[0]


def fill() -> None:
    """Fill the tables of function rules; the first vmap calls this function."""
    for found, rule in _pointwise():
        FUNCTION_RULES[found] = NAMED[found] = rule
    for func, name in _OTHERS:
        own = _rule_of(name)
        if own is not None:
            FUNCTION_RULES[func] = own
    for found, rule, view in forms(_rule_of):
        FUNCTION_RULES[found] = NAMED[found] = rule
        if view:
            VIEWS.add(found)


def _rule_of(name: str) -> Rule | None:
    """Return the rule of an operator, or None if it has none or a user's kernel replaces it."""
    row = find(name)
    return None if row is None or _base(name) in _registered else row.rule
