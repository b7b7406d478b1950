"""Functions with custom rules, traced into graphs: the file form of a call of user Python.

NOTE [functions in files]
A call of an ``autograd.Function``, or of a function with a custom rule, is one node of a program,
which runs the user's Python. When the program is saved, the function and its derivative are each
traced into a graph (``program/files/callees.py``), as a specialized function is, with the named
dims of the program and the sizes of its call. A rule whose control flow depends on data, or on
sizes beyond the guarantees of the descriptors, has no file form. A function with a batching rule of
the user has none either. A rule is traced for a call that requests all derivatives: by all tensors
with a differentiable dtype, with cotangents and tangents for all such results. If some are missing
when the program runs, zeros are passed instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd import Function

from tsfunc import pytrees
from tsfunc.bridge.grad.autograd import is_differentiable
from tsfunc.bridge.grad.mapped_function import FunctionContext, has_setup, torch_jvp
from tsfunc.bridge.grad.once_differentiable import is_marked
from tsfunc.errors import UndefinedDerivativeError
from tsfunc.program.files.callees import CalleeGraph, CalleeWriter, TracedCallee
from tsfunc.program.files.json_values import NoFileForm
from tsfunc.transforms.control.autograd_functions import OperandType, PythonCallee
from tsfunc.transforms.control.custom_function_graphs import (
    DimNames,
    PassedTree,
    Tracing,
    Values,
    differentiable_indices,
    size_of,
    types_of,
)
from tsfunc.transforms.control.custom_functions import (
    CustomAutogradFunction,
    CustomJvp,
    CustomVjp,
    LinearSolution,
    RootSolution,
)
from tsfunc.transforms.custom_jvp import custom_jvp
from tsfunc.transforms.custom_rules import ResultMetadata, RuleCall
from tsfunc.transforms.custom_vjp import cotangents_by_rule, custom_vjp
from tsfunc.transforms.custom_vmap import custom_vmap
from tsfunc.transforms.equations import Linear, SolveFunction


def traced_callee(callee: PythonCallee, callees: CalleeWriter) -> TracedCallee:
    """Return a function of the user as graphs.

    Args:
        callees: the functions of the program that calls it.

    Raises:
        NoFileForm: a part of the function can't be traced.
    """
    function = callee.function
    if function is custom_vmap.kind or function.vmap is not Function.vmap:
        raise NoFileForm(
            Tracing.name_of(callee),
            ", which has a batching rule of its own (def_vmap, or the method vmap of an "
            "autograd.Function). A file holds a function and its derivative; save a program of the "
            "function without that rule, or of the vmap of it.",
        )
    tracing = Tracing(callee, callees.named_dims, callees.sizes, callees.described)
    if function is custom_vjp.kind:
        return with_vjp(tracing)
    if function is custom_jvp.kind:
        return with_jvp(tracing)
    if function is SolveFunction:
        return solution(tracing)
    return Methods(tracing).traced()


def key_of(callee: PythonCallee) -> Any:
    """Return a key that identifies a function with its static arguments within a program."""
    function, leaves = callee.function, [*callee.leaves]
    tree: Any = callee.tree
    if leaves and isinstance(leaves[0], RuleCall):
        call = leaves.pop(0)
        function = function, call.rule, tuple(call.positions), call.count, tuple(call.sized)
        leaves += call.leaves
        tree = tree, call.tree, len(call.closed)
    return (
        function, tree, tuple(map(_static_key, leaves)), tuple(callee.types),
        tuple(callee.numbers), tuple(callee.positions),
    )  # fmt: skip


def _static_key(leaf: Any) -> Any:
    """Return the key of a static argument, different for equal numbers of different types."""
    if leaf is None or isinstance(leaf, bool | int | float | complex | str):
        return type(leaf), repr(leaf)
    return id(leaf)


# --- functions with rules, and solutions of equations


@dataclass
class _RuleCall:
    """A call of a function with a rule, in the trace of one of its parts."""

    call: RuleCall
    sizes: Values
    operands: Values

    @property
    def arguments(self) -> tuple[Any, Any]:
        return self.call.arguments(self.sizes, self.operands)

    def take_results_of(
        self, other: RuleCall, types: Sequence[OperandType], names: DimNames
    ) -> None:
        """Copy the result structure of the call, which was found in another trace."""
        self.call.out_tree, self.call.out_places = other.out_tree, other.out_places
        self.call.out_leaves = other.out_leaves
        self.call.results = tuple(
            ResultMetadata(tuple(map(size_of, names.dims(x))), x.dtype, x.device) for x in types
        )


def _rule_call(callee: PythonCallee, values: Sequence[Any]) -> _RuleCall:
    call, sizes, *operands = callee.filled(values)
    call = replace(call)
    call.perturbed = [is_differentiable(x) for x in operands]
    return _RuleCall(call, sizes, operands)


def _trace_primal(tracing: Tracing, calls: list[RuleCall]) -> CalleeGraph:
    """Trace the function itself as a part; its call is appended to ``calls``."""
    callee = tracing.callee

    def run(values: list[Any]) -> Values:
        bound = _rule_call(callee, values)
        calls.append(bound.call)
        return callee.function.primal_results(bound.call, bound.sizes, *bound.operands)

    return tracing.part("the function itself", run, tracing.operands)


def with_vjp(tracing: Tracing) -> CustomVjp:
    callee, operands = tracing.callee, tracing.operands
    calls: list[RuleCall] = []
    primal = _trace_primal(tracing, calls)
    results = types_of(primal)
    differentiable = differentiable_indices(results)
    residual_trees: list[PassedTree] = []

    def forward(values: list[Any]) -> Values:
        bound = _rule_call(callee, values)
        rule: Any = bound.call.rule
        with bound.call.substituting_consts(bound.operands):
            out, residuals = rule.forward(bound.call, *bound.arguments)
            results = bound.call.result_tensors(out, bound.operands)
        residual_trees.append(PassedTree(residuals))
        return *results, *residual_trees[-1].tensors

    first = tracing.part("the fwd rule", forward, operands)
    types = types_of(first)[len(results) :]
    residual_trees[-1].forget()
    start = len(operands)
    stop = start + len(types)

    def backward(values: list[Any]) -> Values:
        bound = _rule_call(callee, values[:start])
        bound.take_results_of(calls[-1], results, tracing.names)
        residuals = residual_trees[-1].filled(values[start:stop], tracing.names)
        cotangents: list[Any] = [None] * len(results)
        for j, value in zip(differentiable, values[stop:], strict=True):
            cotangents[j] = value
        with bound.call.substituting_consts(bound.operands):
            cts_in: Values = cotangents_by_rule(
                bound.call, *bound.arguments, residuals, cotangents, bound.operands
            )
        return cts_in

    cotangents = [results[j] for j in differentiable]
    last = tracing.part("the bwd rule", backward, [*operands, *types, *cotangents], callee.tensors)
    traced = CustomVjp(*tracing.head(len(results)))
    traced.count, traced.differentiable = calls[-1].count, differentiable
    traced.primal, traced.forward, traced.backward = primal, first, last
    return traced


def with_jvp(tracing: Tracing) -> CustomJvp:
    callee, operands = tracing.callee, tracing.operands
    calls: list[RuleCall] = []
    primal = _trace_primal(tracing, calls)
    results, count = types_of(primal), calls[-1].count
    wrt = [i for i in differentiable_indices(callee.types) if i < count]

    def pushforward(values: list[Any]) -> Values:
        bound = _rule_call(callee, values[: len(operands)])
        bound.take_results_of(calls[-1], results, tracing.names)
        tangents: list[Any] = [None] * count
        for i, value in zip(wrt, values[len(operands) :], strict=True):
            tangents[i] = value
        rule: Any = bound.call.rule
        with bound.call.substituting_consts(bound.operands):
            tangents_out: Values = rule.pushforward(
                bound.call, bound.sizes, bound.operands, tangents
            )
        return tangents_out

    tangents = [callee.types[i] for i in wrt]
    traced = CustomJvp(*tracing.head(len(results)))
    traced.count, traced.wrt, traced.primal = count, wrt, primal
    traced.push = tracing.part("the rule", pushforward, [*operands, *tangents])
    return traced


def solution(tracing: Tracing) -> LinearSolution | RootSolution:
    callee = tracing.callee
    call = callee.leaves[0]
    equation, count = call.equation, call.equation.count

    def closed(func: Callable[[Values, Values], Values], many: int) -> Callable[..., Values]:
        def run(values: list[Any]) -> Values:
            _, *rest = callee.filled([*values[:count], *values[many:]])
            results = func(values[:many], rest[count:])
            return [x for x in results if isinstance(x, torch.Tensor)]

        return run

    operands, unknown = tracing.operands, tracing.operands[:count]
    solve = tracing.part("its solver", closed(equation.solve, count), operands)
    traced: Any
    if isinstance(equation, Linear):
        traced = LinearSolution(*tracing.head(len(solve.results)))
        traced.product = tracing.part("its function", closed(equation.product, count), operands)
        traced.transposed = tracing.part(
            "the solver of its transpose", closed(equation.transposed, count), operands
        )
    else:
        traced = RootSolution(*tracing.head(len(solve.results)))
        traced.residual = tracing.part("its function", closed(equation.residual, count), operands)
        traced.tangent = tracing.part(
            "the solver of its derivative",
            closed(equation.tangent, 2 * count), [*unknown, *operands],
        )  # fmt: skip
    traced.name, traced.count, traced.solve = call.equation.label, count, solve
    return traced


# --- the methods of an autograd.Function


class Methods:
    """Tracer of the methods of an ``autograd.Function``.

    Attributes:
        outputs: for each value that ``forward`` returns, its index among the tensors, or None.
        kept: the values that ``forward`` stored on its ctx.
    """

    def __init__(self, tracing: Tracing) -> None:
        self.tracing, self.callee = tracing, tracing.callee
        self.cls = tracing.callee.function
        self.traced_function = CustomAutogradFunction(*tracing.head(0))
        self.outputs: list[int | None] = []

    def traced(self) -> CustomAutogradFunction:
        traced, tracing, cls = self.traced_function, self.tracing, self.cls
        traced.forward = tracing.part("forward", self._forward, tracing.operands)
        self.saved.forget()
        types = types_of(traced.forward)
        differentiable = differentiable_indices(types[: traced.results])
        traced.differentiable = [j for j in differentiable if j not in traced.non_differentiable]
        traced.wrt = [
            i for i in differentiable_indices(self.callee.types) if i in self._arguments()
        ]
        everything = [*self.callee.types, *types]
        numbers = tracing.operands[traced.tensors :]
        self.first = len(traced.saved)
        inputs = [*(everything[at] for at in traced.saved), *numbers, *self.callee.types]
        method = cls.backward if cls.backward is not Function.backward else cls.vjp
        traced.once_differentiable = is_marked(cls)
        traced.backward = traced.push = traced.refusal = None
        try:
            if method is not Function.backward:
                wrapped = traced.once_differentiable
                self.backward = getattr(method, "__wrapped__", method) if wrapped else method
                cotangents = [types[j] for j in traced.differentiable]
                traced.backward = tracing.part("backward", self._backward, [*inputs, *cotangents])
            if cls.jvp is not torch_jvp:
                tangents = [self.callee.types[i] for i in traced.wrt]
                traced.push = tracing.part("jvp", self._pushforward, [*inputs, *tangents])
        except UndefinedDerivativeError as error:
            traced.refusal = str(error)
        return traced

    def _needs(self, values: Values) -> list[bool]:
        args = self.callee.filled(values)
        return [is_differentiable(x) for x in args]

    def _forward(self, values: list[Any]) -> Values:
        cls, traced, ctx = self.cls, self.traced_function, FunctionContext(self._needs(values))
        args = self.callee.filled(values)
        if has_setup(cls):
            out = cls.forward(*args)
            cls.setup_context(ctx, tuple(args), out)
        else:
            out = cls.forward(ctx, *args)
        outputs = out if isinstance(out, tuple | list) else (out,)
        leaves = pytrees.leaves_of(out)
        results = [x for x in leaves if isinstance(x, torch.Tensor)]
        numbers = {id(x): j for j, x in enumerate(results)}
        self.outputs = [numbers.get(id(x)) for x in outputs]
        traced.results = len(results)
        attributes = dict(vars(ctx))
        tensors = [*values[: traced.tensors], *results]
        traced.dirty = [_place(x, tensors) for x in attributes.pop("dirty")]
        inert = [_place(x, tensors) - traced.tensors for x in attributes.pop("not_differentiable")]
        traced.non_differentiable = [j for j in inert if j >= 0]
        del attributes["materialize"]
        self.saved = PassedTree(attributes)
        others: list[torch.Tensor] = []
        positions = []
        for x in self.saved.tensors:
            at = _place(x, [*tensors, *others])
            if at < 0:
                at = len(tensors) + len(others)
                others.append(x)
            positions.append(at)
        traced.saved = positions
        return *results, *others

    def _context(self, values: list[Any], method: str) -> FunctionContext:
        ctx = FunctionContext()
        vars(ctx).update(self.saved.filled(values[: self.first], self.tracing.names))
        return ctx.seen_by(method)

    def _backward(self, values: list[Any]) -> Values:
        traced = self.traced_function
        cotangents = values[self.first + traced.numbers + traced.tensors :]
        of: dict[int | None, Any] = dict(zip(traced.differentiable, cotangents, strict=True))
        ctx = self._context(values, "backward")
        returned = self.backward(ctx, *(of.get(j) for j in self.outputs))
        returned = returned if isinstance(returned, tuple | list) else (returned,)
        cts_in: list[Any] = [None] * traced.tensors
        for i, ct in zip(self._arguments(), returned, strict=False):
            if i is not None:
                cts_in[i] = ct
        return cts_in

    def _arguments(self) -> list[int | None]:
        """Return for each argument the index of its tensor; None for other arguments."""
        traced = self.traced_function
        args = self.callee.filled(
            [_ArgumentIndex(i) for i in range(traced.tensors + traced.numbers)]
        )
        return [
            x.number if isinstance(x, _ArgumentIndex) and x.number < traced.tensors else None
            for x in args
        ]

    def _pushforward(self, values: list[Any]) -> Values:
        traced = self.traced_function
        after = values[self.first + traced.numbers + traced.tensors :]
        by_tensor = dict(zip(traced.wrt, after, strict=True))
        tangents = [None if i is None else by_tensor.get(i) for i in self._arguments()]
        returned = self.cls.jvp(self._context(values, "jvp"), *tangents)
        returned = returned if isinstance(returned, tuple | list) else (returned,)
        tangents_out: list[Any] = [None] * traced.results
        for j, tangent in zip(self.outputs, returned, strict=False):
            if j is not None:
                tangents_out[j] = tangent
        return tangents_out


@dataclass(frozen=True)
class _ArgumentIndex:
    """Placeholder of a value among the arguments."""

    number: int


def _place(x: torch.Tensor, tensors: Sequence[torch.Tensor]) -> int:
    """Return the index of a tensor among others, by identity; -1 if it is not there."""
    return next((i for i, other in enumerate(tensors) if other is x), -1)
