"""Functions with custom rules as graphs: the callees of a loaded program.

Each class rebuilds the user's function with the public tools: one with a ``custom_vjp`` is a
``custom_vjp`` whose function and rules are graphs. The rebuilt function therefore behaves the same
under transforms. All graphs take the function's tensors and then its numbers; rules take more
values after these. A function with a batching rule of the user has no such form.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from tsfunc.bridge.grad.autograd import is_differentiable
from tsfunc.errors import UndefinedDerivativeError
from tsfunc.program.files.callees import CalleeGraph, PartType, TracedCallee, register_callee
from tsfunc.program.files.operator_calls import TENSOR
from tsfunc.transforms.custom_jvp import custom_jvp
from tsfunc.transforms.custom_rules import apply
from tsfunc.transforms.custom_vjp import custom_vjp
from tsfunc.transforms.equations import Linear, Root, WithConsts, solve_equation
from tsfunc.transforms.symbolic_zeros import SymbolicZero


class CustomVjp(TracedCallee):
    """A function with a ``custom_vjp``.

    Attributes:
        primal: the graph of the function.
        forward: the same with the residuals as further results.
        backward: takes the residuals and a cotangent for each result of ``differentiable``; returns
            a cotangent or None for each tensor that is differentiated by.
        differentiable: the indices of the results that have cotangents.
    """

    kind = "vjp"
    part_names = ("primal", "forward", "backward")
    index_names = ("differentiable",)
    primal: CalleeGraph
    forward: CalleeGraph
    backward: CalleeGraph
    differentiable: Sequence[int]

    def type_of_part(self, name: str) -> PartType:
        if name != "backward":
            return PartType(self.own, self.results, more=name == "forward")
        residuals = len(self.forward.results) - self.results
        inputs = [*self.own, *[TENSOR] * (residuals + len(self.differentiable))]
        return PartType(inputs, self.count, zeros=True)

    def limits(self) -> Mapping[str, int]:
        return {"differentiable": self.results}

    @functools.cached_property
    def _rule(self) -> Any:
        total = self.tensors + self.numbers

        def fwd(*args: Any) -> tuple[Any, Any]:
            outputs = self.forward(*args)
            saved = [x if i in self.backward.inputs else None for i, x in enumerate(args)]
            return tuple(outputs[: self.results]), (saved[: self.count], outputs[self.results :])

        def bwd(*args: Any) -> Sequence[Any]:
            *fixed, (saved, residuals), cotangents = args
            chosen = [cotangents[j] for j in self.differentiable]
            return self.backward(*saved, *fixed, *residuals, *chosen)

        rule = custom_vjp(_named_part(self.name, self.primal), tuple(range(self.count, total)))
        rule.defvjp(fwd, bwd)
        return rule

    def __call__(self, *operands: Any) -> Sequence[Any]:
        return self._rule(*operands)


class CustomJvp(TracedCallee):
    """A function with a ``custom_jvp``.

    Attributes:
        primal: the graph of the function.
        push: takes a tangent for each tensor of ``wrt``; returns a tangent or None for each result.
        wrt: the indices of the tensors that have tangents.
    """

    kind = "jvp"
    part_names = ("primal", "push")
    index_names = ("wrt",)
    primal: CalleeGraph
    push: CalleeGraph
    wrt: Sequence[int]

    def type_of_part(self, name: str) -> PartType:
        if name == "primal":
            return PartType(self.own, self.results)
        return PartType([*self.own, *[TENSOR] * len(self.wrt)], self.results, zeros=True)

    def limits(self) -> Mapping[str, int]:
        return {"wrt": self.count}

    @functools.cached_property
    def _rule(self) -> Any:
        total = self.tensors + self.numbers

        def rule(*args: Any) -> tuple[Any, Any]:
            *fixed, primals, tangents = args
            tangents_out = self.push(*primals, *fixed, *(tangents[i] for i in self.wrt))
            zeros = (SymbolicZero(torch.Size(), torch.bool),) * self.results  # not used
            return zeros, tuple(tangents_out)

        function = custom_jvp(_named_part(self.name, self.primal), tuple(range(self.count, total)))
        function.defjvp(rule)
        return function

    def __call__(self, *operands: Any) -> Sequence[Any]:
        return self._rule(*operands)


@dataclass(frozen=True)
class _Shaped:
    """Placeholder of a tensor of which only the shape is used."""

    shape: Any


class CustomAutogradFunction(TracedCallee):
    """An ``autograd.Function``.

    Attributes:
        forward: the graph of ``forward``, with the other values saved for derivatives as further
            results.
        saved: the saved values, as indices among the tensors, the results and these other values.
        dirty: the tensors that are marked dirty.
        non_differentiable: the results that are marked as not differentiable.
        differentiable: the results that have cotangents.
        wrt: the tensors that have tangents.
        backward: takes the saved values, the numbers, tensors with the shapes of the function's,
            and a cotangent for each result of ``differentiable``; returns a cotangent or None for
            each tensor. None without reverse mode.
        push: the ``jvp`` method: takes the same inputs as ``backward`` with a tangent for each
            tensor of ``wrt`` in place of cotangents; returns a tangent or None for each result.
    """

    kind = "methods"
    part_names = ("forward", "backward", "push")
    optional = frozenset({"backward", "push"})
    index_names = ("saved", "dirty", "non_differentiable", "differentiable", "wrt")

    forward: CalleeGraph
    saved: Sequence[int]
    dirty: Sequence[int]
    non_differentiable: Sequence[int]
    differentiable: Sequence[int]
    wrt: Sequence[int]
    backward: CalleeGraph | None
    push: CalleeGraph | None

    def type_of_part(self, name: str) -> PartType:
        if name == "forward":
            return PartType(self.own, self.results, more=True)
        of = self.differentiable if name == "backward" else self.wrt
        inputs = [*[TENSOR] * len(self.saved), *self.own[self.tensors :], *[TENSOR] * self.tensors]
        results = self.tensors if name == "backward" else self.results
        return PartType([*inputs, *[TENSOR] * len(of)], results, zeros=True)

    def limits(self) -> Mapping[str, int]:
        tensors, results = self.tensors, self.results
        return {
            "saved": tensors + len(self.forward.results), "dirty": tensors,
            "non_differentiable": results, "differentiable": results, "wrt": tensors,
        }  # fmt: skip

    def __call__(self, *operands: Any) -> Sequence[Any]:
        return apply(self._function, *operands)

    @functools.cached_property
    def _function(self) -> Any:
        members: dict[str, Any] = {}
        count = self.tensors + self.results
        if all(at < count for at in self.saved):  # torch's own transforms can take it too
            members["forward"] = lambda *args: tuple(self.forward(*args))
            members["setup_context"] = self._keep
        else:
            members["forward"] = self._forward
        if self.backward is not None or self.refusal is not None:
            pullback = self._pullback
            members["backward"] = (
                once_differentiable(pullback) if self.once_differentiable else pullback
            )
        if self.push is not None:
            members["jvp"] = self._pushforward
        namespace = {name: staticmethod(member) for name, member in members.items()}
        return type(self.name, (Function,), namespace)

    def _forward(self, ctx: Any, *args: Any) -> tuple[Any, ...]:
        outputs = tuple(self.forward(*args))
        self._keep(ctx, args, outputs)
        return outputs[: self.results]

    def _keep(self, ctx: Any, args: Sequence[Any], outputs: Sequence[Any]) -> None:
        tensors = (*args[: self.tensors], *outputs)
        saved = [tensors[at] for at in self.saved]
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)
        ctx.numbers = args[self.tensors :]
        ctx.shapes = [x.shape for x in args[: self.tensors]]
        if self.dirty:
            ctx.mark_dirty(*(args[i] for i in self.dirty))
        inert = [x for j, x in enumerate(outputs[: self.results])
                 if j in self.non_differentiable or not is_differentiable(x)]  # fmt: skip
        ctx.mark_non_differentiable(*inert)

    def _pullback(self, ctx: Any, *cotangents: Any) -> Any:
        if self.refusal is not None:
            raise UndefinedDerivativeError(self.refusal)
        assert self.backward is not None
        cts_in = self.backward(
            *self._first_inputs(ctx), *(cotangents[j] for j in self.differentiable)
        )
        return (*cts_in, *[None] * self.numbers)

    def _pushforward(self, ctx: Any, *tangents: Any) -> Any:
        assert self.push is not None
        return tuple(self.push(*self._first_inputs(ctx), *(tangents[i] for i in self.wrt)))

    def _first_inputs(self, ctx: Any) -> Sequence[Any]:
        """Return the first inputs of both derivatives."""
        shapes = [_Shaped(shape) for shape in ctx.shapes]
        return *ctx.saved_tensors, *ctx.numbers, *shapes


class _Solution(TracedCallee):
    """The solution of an equation for its first ``count`` tensors.

    The function takes the right-hand side or a guess, and the values that the equation closes over.
    """

    solve: CalleeGraph

    @property
    def most_counted(self) -> int:
        return min(self.tensors, self.results)

    def type_of_part(self, name: str) -> PartType:
        if name == "solve":
            return PartType(self.own, self.results)
        first = [TENSOR] * self.count if name == "tangent" else []
        other = name in ("tangent", "transposed")  # a solver, which may have other results
        return PartType([*first, *self.own], self.count, more=other)

    def __call__(self, *operands: Any) -> Sequence[Any]:
        solve, other, last = (_with_consts(part) for part in self.parts)
        equation = self.equation(self.name, self.count, other, solve, last)
        return solve_equation(equation, operands[: self.count], operands[self.count :])

    equation: ClassVar[Callable[..., Any]]


class LinearSolution(_Solution):
    """A ``linear_solve``; its parts are those of ``equations.Linear``."""

    kind = "linear"
    part_names = ("solve", "product", "transposed")
    equation = Linear
    product: CalleeGraph
    transposed: CalleeGraph


class RootSolution(_Solution):
    """An ``implicit_root``; its parts are those of ``equations.Root``."""

    kind = "root"
    part_names = ("solve", "residual", "tangent")
    equation = Root
    residual: CalleeGraph
    tangent: CalleeGraph


def _with_consts(part: CalleeGraph) -> WithConsts:
    return lambda values, closed: part(*values, *closed)


def _named_part(name: str, part: CalleeGraph) -> Callable[..., Any]:
    """Return a part as a function that has the user's name in error messages."""

    def function(*args: Any) -> Any:
        return tuple(part(*args))

    function.__name__ = function.__qualname__ = name
    return function


def register_callees() -> None:
    """Register every kind of function for files."""
    for cls in (CustomVjp, CustomJvp, CustomAutogradFunction, LinearSolution, RootSolution):
        register_callee(cls)
