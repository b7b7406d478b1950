"""The function rules of the stage BATCHING: callables that are passed straight to a batching rule.

A rule that only passes its operator on (pointwise) serves the Python callable as well:
``torch.add`` parses its arguments on values as it would on tracers. Callables of other categories
are listed by name if their rule takes exactly the arguments of the Python function, or a form of
them (``argument_forms``). A Batch kernel that a user registers for an operator removes the rules of
the operator's callables, so that they are dispatched like any other call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch

from tsfunc import hooks
from tsfunc.bridge.batch.argument_forms import forms
from tsfunc.bridge.tracers.call_plans import FUNCTION_PLANS
from tsfunc.bridge.tracers.function_registry import PYTHON_OPERATORS, FunctionRules, Stage, registry
from tsfunc.bridge.tracers.operators import TorchOperator
from tsfunc.dispatch import DispatchKey, Operator
from tsfunc.ops import all_rows, find
from tsfunc.ops.registry import Row, Rule
from tsfunc.ops.tensor_iterator import pointwise, pointwise_inplace

# Names whose operator depends on the arguments (where(condition) is nonzero).
_AMBIGUOUS = frozenset({"where", "max", "min", "to", "copy_", "fill_"})

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
    """Yield each callable whose overloads all have the pointwise rule, with that rule."""
    names: dict[str, Rule | None] = {}
    for name, row in all_rows().items():
        base = _base(name)
        names[base] = row.rule if names.get(base, row.rule) is row.rule else None
    for base, rule in names.items():
        if base in _AMBIGUOUS or base.endswith("__"):
            continue
        if rule is pointwise or rule is pointwise_inplace:
            for function in _callables(base):
                yield function, rule


def _callables(base: str) -> Iterator[Any]:
    """Yield the callables of torch that are named like an operator."""
    functions = set()
    for name in (base, *PYTHON_OPERATORS.get(base, ())):
        for owner in (torch, torch.Tensor, torch.nn.functional, torch.special):
            function = getattr(owner, name, None)
            if function is not None and function not in functions:
                functions.add(function)
                yield function


@hooks.kernel_registered.add
def _remove_rules(op: Operator, key: DispatchKey | None) -> None:
    """Remove what is cached of an operator, so that a user's Batch kernel or row is called."""
    if isinstance(op, TorchOperator) and key in (None, DispatchKey.Batch):
        base = _base(op.name)
        registry.remove(Stage.BATCHING, [*_callables(base), *_by_operator.get(base, ())])
        FUNCTION_PLANS.clear()
        op.direct_rule = op.function = op.by_tracers = op.plans = None


@hooks.row_declared.add
def _forget_operator(row: Row) -> None:
    """Clear the plans, which may hold calls of an operator that had no row before."""
    FUNCTION_PLANS.clear()


def _base(name: str) -> str:
    return name.partition("::")[2].partition(".")[0]


def _rule_of(name: str) -> Rule | None:
    row = find(name)
    return None if row is None else row.rule


# The callables of rules that call an operator of another name, by that name.
_by_operator: dict[str, list[Any]] = {}
function_rules: Final = FunctionRules()


def _declare() -> None:
    for function, rule in _pointwise():
        function_rules.add(Stage.BATCHING, rule, function, options=True)
    for function, name in _OTHERS:
        _declare_one(name, function, _rule_of(name))
    for name, function, rule, view in forms(_rule_of):
        _declare_one(name, function, rule, view=view, options=True)


def _declare_one(
    operators: str, function: Any, rule: Rule | None, *, view: bool = False, options: bool = False
) -> None:
    if rule is not None:
        function_rules.add(Stage.BATCHING, rule, function, view=view, options=options)
        for operator in operators.split():
            _by_operator.setdefault(_base(operator), []).append(function)


_declare()
