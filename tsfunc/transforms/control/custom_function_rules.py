"""Functions with custom rules, and solutions of equations, traced into graphs part by part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tsfunc import pytrees
from tsfunc.bridge.grad.mapped_function import differentiable
from tsfunc.program.files.callees import CalleeGraph
from tsfunc.transforms.control.custom_function_graphs import (
    DimNames,
    Kept,
    Tracing,
    Values,
    batches_of,
    size_of,
    smooth_of,
    types_of,
)
from tsfunc.transforms.control.custom_functions import (
    CustomJvp,
    CustomVjp,
    CustomVmap,
    LinearSolution,
    RootSolution,
)
from tsfunc.transforms.control.functions import OperandType, PythonCallee
from tsfunc.transforms.custom_rules import ResultMetadata, RuleCall
from tsfunc.transforms.custom_vjp import pulled_by_rule
from tsfunc.transforms.equations import Linear


@dataclass
class _RuleCall:
    """A call of a function with a rule, in the trace of one of its parts."""

    call: RuleCall
    sizes: Values
    operands: Values

    @property
    def arguments(self) -> tuple[Any, Any]:
        return self.call.arguments(self.sizes, self.operands)

    def knowing(self, other: RuleCall, types: Sequence[OperandType], names: DimNames) -> None:
        """Copy the result structure of the call, which was found in another trace."""
        self.call.out_tree, self.call.out_places = other.out_tree, other.out_places
        self.call.out_leaves = other.out_leaves
        self.call.results = tuple(
            ResultMetadata(tuple(map(size_of, names.dims(x))), x.dtype, x.device) for x in types
        )


def _rule_call(callee: PythonCallee, values: Sequence[Any]) -> _RuleCall:
    call, sizes, *operands = callee.filled(values)
    call = replace(call)
    call.perturbed = [differentiable(x) for x in operands]
    return _RuleCall(call, sizes, operands)


def _primal(tracing: Tracing, calls: list[RuleCall]) -> CalleeGraph:
    """Trace the function itself as a part; its call is appended to ``calls``."""
    callee = tracing.callee

    def run(values: list[Any]) -> Values:
        made = _rule_call(callee, values)
        calls.append(made.call)
        found: Values = callee.function.outline(made.call, made.sizes, *made.operands)
        return found

    return tracing.part("the function itself", run, tracing.operands)


def with_vjp(tracing: Tracing) -> CustomVjp:
    callee, given = tracing.callee, tracing.operands
    calls: list[RuleCall] = []
    primal = _primal(tracing, calls)
    results = types_of(primal)
    smooth = smooth_of(results)
    kept: list[Kept] = []

    def forward(values: list[Any]) -> Values:
        made = _rule_call(callee, values)
        rule: Any = made.call.rule
        with made.call.seeing(made.operands):
            out, residuals = rule.forward(made.call, *made.arguments)
            found = made.call.kept(out, made.operands)
        kept.append(Kept(residuals))
        return *found, *kept[-1].tensors

    first = tracing.part("the fwd rule", forward, given)
    types = types_of(first)[len(results) :]
    kept[-1].forget()
    start = len(given)
    stop = start + len(types)

    def backward(values: list[Any]) -> Values:
        made = _rule_call(callee, values[:start])
        made.knowing(calls[-1], results, tracing.names)
        residuals = kept[-1].filled(values[start:stop], tracing.names)
        cotangents: list[Any] = [None] * len(results)
        for j, value in zip(smooth, values[stop:], strict=True):
            cotangents[j] = value
        with made.call.seeing(made.operands):
            found: Values = pulled_by_rule(
                made.call, *made.arguments, residuals, cotangents, made.operands
            )
        return found

    cotangents = [results[j] for j in smooth]
    last = tracing.part("the bwd rule", backward, [*given, *types, *cotangents], callee.tensors)
    made = CustomVjp(*tracing.head(len(results)))
    made.count, made.smooth = calls[-1].count, smooth
    made.primal, made.forward, made.backward = primal, first, last
    return made


def with_jvp(tracing: Tracing) -> CustomJvp:
    callee, given = tracing.callee, tracing.operands
    calls: list[RuleCall] = []
    primal = _primal(tracing, calls)
    results, count = types_of(primal), calls[-1].count
    by = [i for i in smooth_of(callee.types) if i < count]

    def push(values: list[Any]) -> Values:
        made = _rule_call(callee, values[: len(given)])
        made.knowing(calls[-1], results, tracing.names)
        tangents: list[Any] = [None] * count
        for i, value in zip(by, values[len(given) :], strict=True):
            tangents[i] = value
        rule: Any = made.call.rule
        with made.call.seeing(made.operands):
            found: Values = rule.pushed(made.call, made.sizes, made.operands, tangents)
        return found

    tangents = [callee.types[i] for i in by]
    made = CustomJvp(*tracing.head(len(results)))
    made.count, made.by, made.primal = count, by, primal
    made.push = tracing.part("the rule", push, [*given, *tangents])
    return made


def with_vmap(tracing: Tracing, batched: bool) -> CustomVmap:
    callee = tracing.callee
    calls: list[RuleCall] = []
    made_primal = _primal(tracing, calls)
    results = len(made_primal.results)
    own = len(calls[-1].places)  # the operands after these are closed over by the rule

    def rule(values: list[Any], flags: Sequence[bool], size: Any) -> tuple[Values, Values]:
        made = _rule_call(callee, values)
        of: Any = made.call.rule
        marks = of.whole(*made.call.arguments(made.sizes, flags))
        batched_args = [pytrees.tree_map(lambda x: x is True, arg) for arg in marks]
        with made.call.seeing(made.operands):
            found = of.rule(size, batched_args, *of.whole(*made.arguments))
        out, out_flags = of.checked(found, size)
        pairs = zip(out, out_flags, strict=True)
        kept = [(x, flag) for x, flag in pairs if isinstance(x, torch.Tensor)]
        return [x for x, _ in kept], [flag for _, flag in kept]

    made = CustomVmap(*tracing.head(results))
    made.primal = made_primal
    made.batches = batches_of(tracing, rule, own) if batched else ()
    return made


def solution(tracing: Tracing) -> LinearSolution | RootSolution:
    callee = tracing.callee
    call = callee.leaves[0]
    equation, count = call.equation, call.equation.count

    def closed(func: Callable[[Values, Values], Values], many: int) -> Callable[..., Values]:
        def run(values: list[Any]) -> Values:
            _, *rest = callee.filled([*values[:count], *values[many:]])
            found = func(values[:many], rest[count:])
            return [x for x in found if isinstance(x, torch.Tensor)]

        return run

    given, unknown = tracing.operands, tracing.operands[:count]
    solve = tracing.part("its solver", closed(equation.solve, count), given)
    made: Any
    if isinstance(equation, Linear):
        made = LinearSolution(*tracing.head(len(solve.results)))
        made.product = tracing.part("its function", closed(equation.product, count), given)
        made.transposed = tracing.part(
            "the solver of its transpose", closed(equation.transposed, count), given
        )
    else:
        made = RootSolution(*tracing.head(len(solve.results)))
        made.residual = tracing.part("its function", closed(equation.residual, count), given)
        made.tangent = tracing.part(
            "the solver of its derivative",
            closed(equation.tangent, 2 * count), [*unknown, *given],
        )  # fmt: skip
    made.name, made.count, made.solve = call.equation.what, count, solve
    return made  # type: ignore[no-any-return]
