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
    call.perturbed = [is_differentiable(x) for x in operands]
    return _RuleCall(call, sizes, operands)


def _primal(tracing: Tracing, calls: list[RuleCall]) -> CalleeGraph:
    """Trace the function itself as a part; its call is appended to ``calls``."""
    callee = tracing.callee

    def run(values: list[Any]) -> Values:
        made = _rule_call(callee, values)
        calls.append(made.call)
        return callee.function.primal_results(made.call, made.sizes, *made.operands)

    return tracing.part("the function itself", run, tracing.operands)


def with_vjp(tracing: Tracing) -> CustomVjp:
    callee, given = tracing.callee, tracing.operands
    calls: list[RuleCall] = []
    primal = _primal(tracing, calls)
    results = types_of(primal)
    differentiable = differentiable_indices(results)
    kept: list[PassedTree] = []

    def forward(values: list[Any]) -> Values:
        made = _rule_call(callee, values)
        rule: Any = made.call.rule
        with made.call.substituting_consts(made.operands):
            out, residuals = rule.forward(made.call, *made.arguments)
            results = made.call.result_tensors(out, made.operands)
        kept.append(PassedTree(residuals))
        return *results, *kept[-1].tensors

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
        for j, value in zip(differentiable, values[stop:], strict=True):
            cotangents[j] = value
        with made.call.substituting_consts(made.operands):
            cts_in: Values = cotangents_by_rule(
                made.call, *made.arguments, residuals, cotangents, made.operands
            )
        return cts_in

    cotangents = [results[j] for j in differentiable]
    last = tracing.part("the bwd rule", backward, [*given, *types, *cotangents], callee.tensors)
    made = CustomVjp(*tracing.head(len(results)))
    made.count, made.differentiable = calls[-1].count, differentiable
    made.primal, made.forward, made.backward = primal, first, last
    return made


def with_jvp(tracing: Tracing) -> CustomJvp:
    callee, given = tracing.callee, tracing.operands
    calls: list[RuleCall] = []
    primal = _primal(tracing, calls)
    results, count = types_of(primal), calls[-1].count
    wrt = [i for i in differentiable_indices(callee.types) if i < count]

    def pushforward(values: list[Any]) -> Values:
        made = _rule_call(callee, values[: len(given)])
        made.knowing(calls[-1], results, tracing.names)
        tangents: list[Any] = [None] * count
        for i, value in zip(wrt, values[len(given) :], strict=True):
            tangents[i] = value
        rule: Any = made.call.rule
        with made.call.substituting_consts(made.operands):
            tangents_out: Values = rule.pushforward(made.call, made.sizes, made.operands, tangents)
        return tangents_out

    tangents = [callee.types[i] for i in wrt]
    made = CustomJvp(*tracing.head(len(results)))
    made.count, made.wrt, made.primal = count, wrt, primal
    made.push = tracing.part("the rule", pushforward, [*given, *tangents])
    return made


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
    made.name, made.count, made.solve = call.equation.label, count, solve
    return made


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
        self.made = CustomAutogradFunction(*tracing.head(0))
        self.outputs: list[int | None] = []

    def traced(self) -> CustomAutogradFunction:
        made, tracing, cls = self.made, self.tracing, self.cls
        made.forward = tracing.part("forward", self._forward, tracing.operands)
        self.saved.forget()
        types = types_of(made.forward)
        differentiable = differentiable_indices(types[: made.results])
        made.differentiable = [j for j in differentiable if j not in made.non_differentiable]
        made.wrt = [i for i in differentiable_indices(self.callee.types) if i in self._arguments()]
        everything = [*self.callee.types, *types]
        numbers = tracing.operands[made.tensors :]
        self.first = len(made.saved)
        given = [*(everything[at] for at in made.saved), *numbers, *self.callee.types]
        method = cls.backward if cls.backward is not Function.backward else cls.vjp
        made.once_differentiable = is_marked(cls)
        made.backward = made.push = made.refusal = None
        try:
            if method is not Function.backward:
                wrapped = made.once_differentiable
                self.backward = getattr(method, "__wrapped__", method) if wrapped else method
                cotangents = [types[j] for j in made.differentiable]
                made.backward = tracing.part("backward", self._backward, [*given, *cotangents])
            if cls.jvp is not torch_jvp:
                tangents = [self.callee.types[i] for i in made.wrt]
                made.push = tracing.part("jvp", self._pushforward, [*given, *tangents])
        except UndefinedDerivativeError as error:
            made.refusal = str(error)
        return made

    def _needs(self, values: Values) -> list[bool]:
        args = self.callee.filled(values)
        return [is_differentiable(x) for x in args]

    def _forward(self, values: list[Any]) -> Values:
        cls, made, ctx = self.cls, self.made, FunctionContext(self._needs(values))
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
        made.results = len(results)
        attributes = dict(vars(ctx))
        known = [*values[: made.tensors], *results]
        made.dirty = [_place(x, known) for x in attributes.pop("dirty")]
        inert = [_place(x, known) - made.tensors for x in attributes.pop("not_differentiable")]
        made.non_differentiable = [j for j in inert if j >= 0]
        del attributes["materialize"]
        self.saved = PassedTree(attributes)
        others: list[torch.Tensor] = []
        positions = []
        for x in self.saved.tensors:
            at = _place(x, [*known, *others])
            if at < 0:
                at = len(known) + len(others)
                others.append(x)
            positions.append(at)
        made.saved = positions
        return *results, *others

    def _context(self, values: list[Any], method: str) -> FunctionContext:
        ctx = FunctionContext()
        vars(ctx).update(self.saved.filled(values[: self.first], self.tracing.names))
        return ctx.seen_by(method)

    def _backward(self, values: list[Any]) -> Values:
        made = self.made
        given = values[self.first + made.numbers + made.tensors :]
        of: dict[int | None, Any] = dict(zip(made.differentiable, given, strict=True))
        ctx = self._context(values, "backward")
        returned = self.backward(ctx, *(of.get(j) for j in self.outputs))
        returned = returned if isinstance(returned, tuple | list) else (returned,)
        cts_in: list[Any] = [None] * made.tensors
        for i, ct in zip(self._arguments(), returned, strict=False):
            if i is not None:
                cts_in[i] = ct
        return cts_in

    def _arguments(self) -> list[int | None]:
        """Return for each argument the index of its tensor; None for other arguments."""
        made = self.made
        args = self.callee.filled([_ArgumentIndex(i) for i in range(made.tensors + made.numbers)])
        return [
            x.number if isinstance(x, _ArgumentIndex) and x.number < made.tensors else None
            for x in args
        ]

    def _pushforward(self, values: list[Any]) -> Values:
        made = self.made
        given = dict(zip(made.wrt, values[self.first + made.numbers + made.tensors :], strict=True))
        tangents = [None if i is None else given.get(i) for i in self._arguments()]
        returned = self.cls.jvp(self._context(values, "jvp"), *tangents)
        returned = returned if isinstance(returned, tuple | list) else (returned,)
        tangents_out: list[Any] = [None] * made.results
        for j, tangent in zip(self.outputs, returned, strict=False):
            if j is not None:
                tangents_out[j] = tangent
        return tangents_out


@dataclass(frozen=True)
class _ArgumentIndex:
    """Placeholder of a value among the arguments."""

    number: int


def _place(x: torch.Tensor, known: Sequence[torch.Tensor]) -> int:
    """Return the index of a tensor among others, by identity; -1 if it is not there."""
    return next((i for i, other in enumerate(known) if other is x), -1)
