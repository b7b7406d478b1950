"""The derivatives of solutions of equations: NOTE [implicit derivatives] in ``implicit``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function

from tsfunc.bridge.grad.autograd import is_differentiable
from tsfunc.bridge.tracers.interrupts import restoring_thread_state
from tsfunc.transforms.argnums import with_replaced
from tsfunc.transforms.forward import jvp
from tsfunc.transforms.reverse import vjp

Values = Sequence[Any]
# Takes values and the closed-over values: tensors, and symbolic sizes of a trace.
WithConsts = Callable[[Values, Values], Sequence[Any]]


@dataclass(frozen=True)
class Linear:
    """The equation ``A x = b``, solved for ``x``.

    Attributes:
        label: the name of the function that the user called.
        count: the number of tensors in ``x``.
        solve: the solver; it returns ``x`` and then its other results.
        transposed: the solver of the transposed equation.
    """

    label: str
    count: int
    product: WithConsts
    solve: WithConsts
    transposed: WithConsts

    def adjoint(self, ct: Values, consts: Values) -> Values:
        """Return the cotangent of the right-hand side from the cotangent of the solution."""

        def product(values: Values, consts: Values) -> Values:
            return transpose(lambda *v: tuple(self.product(v, consts)), values)

        other = Linear(self.label, self.count, product, self.transposed, self.solve)
        return _conjugate(solve_equation(other, _conjugate(ct), consts)[: self.count])

    def pullback(self, x: Values, ct: Values, consts: Values) -> tuple[Values, list[Any]]:
        """Return the cotangents of the right-hand side and of the closed-over values."""
        w = self.adjoint(ct, consts)
        return w, _pullback(functools.partial(self.product, x), consts, w)

    def pushforward(
        self, x: Values, input_tangents: Values, consts: Values, tangents: Values
    ) -> list[Any]:
        """Return the tangents of the solution for tangents of the equation's inputs.

        A tangent None means zeros.
        """
        moved = _pushforward(functools.partial(self.product, x), consts, tangents)
        zeros = [torch.zeros_like(value) for value in x]
        rhs = [z if t is None else t for t, z in zip(input_tangents, zeros, strict=True)]
        if moved is not None:
            rhs = [r - m for r, m in zip(rhs, moved, strict=True)]
        return solve_equation(self, rhs, consts)[: self.count]


@dataclass(frozen=True)
class Root:
    """The equation ``f(x) = 0``, solved for ``x`` from a guess.

    Attributes:
        label: the name of the function that the user called.
        count: the number of tensors in ``x``.
        solve: the solver; it returns ``x`` and then its other results.
        tangent: the solver of the tangent equation, from ``x`` and the right-hand side.
    """

    label: str
    count: int
    residual: WithConsts
    solve: WithConsts
    tangent: WithConsts

    def at_root(self) -> Linear:
        """Return the tangent equation; the root comes first among its closed-over values."""
        count = self.count

        def product(values: Values, consts: Values) -> Values:
            def residual(*x: Any) -> Any:
                return tuple(self.residual(x, consts[count:]))

            return jvp(residual, tuple(consts[:count]), tuple(values))[1]

        def solve(values: Values, consts: Values) -> Values:
            return self.tangent([*consts[:count], *values], consts[count:])

        def transposed(values: Values, consts: Values) -> Values:
            return transpose(lambda *v: tuple(solve(v, consts)), values)

        return Linear(self.label, count, product, solve, transposed)

    def pullback(self, x: Values, ct: Values, consts: Values) -> tuple[Values, list[Any]]:
        w = self.at_root().adjoint(ct, [*x, *consts])
        return [None] * self.count, _pullback(functools.partial(self.residual, x), consts, w)

    def pushforward(
        self, x: Values, input_tangents: Values, consts: Values, tangents: Values
    ) -> list[Any]:
        moved = _pushforward(functools.partial(self.residual, x), consts, tangents)
        if moved is None:
            return [torch.zeros_like(value) for value in x]
        return solve_equation(self.at_root(), [-m for m in moved], [*x, *consts])[: self.count]


def _conjugate(values: Values) -> list[torch.Tensor]:
    return [x.conj() if x.is_complex() else x for x in values]


def transpose(linear: Callable[..., Any], values: Values) -> list[torch.Tensor]:
    """Return the transpose of a linear map at cotangents ``values``; vjp gives its conjugate."""
    _, pullback = vjp(linear, *[torch.zeros_like(x) for x in values])
    return _conjugate(pullback(tuple(_conjugate(values))))


def _differentiable_positions(consts: Values) -> list[int]:
    return [i for i, x in enumerate(consts) if is_differentiable(x)]


def _pullback(function: Callable[[Values], Values], consts: Values, w: Values) -> list[Any]:
    """Return the cotangents of the closed-over tensors for the cotangent minus ``w``."""
    by = _differentiable_positions(consts)
    gradients: list[Any] = [None] * len(consts)
    if by:
        _, pullback = vjp(
            lambda *replaced: tuple(function(with_replaced(consts, by, replaced))),
            *[consts[i] for i in by],
        )
        for i, value in zip(by, pullback(tuple(-x for x in w)), strict=True):
            gradients[i] = value
    return gradients


def _pushforward(function: Callable[[Values], Values], consts: Values, tangents: Values) -> Any:
    """Return the tangents of a function of the closed-over tensors; None if there are none."""
    by = [i for i in _differentiable_positions(consts) if tangents[i] is not None]
    if not by:
        return None
    return jvp(
        lambda *replaced: tuple(function(with_replaced(consts, by, replaced))),
        tuple(consts[i] for i in by),
        tuple(tangents[i] for i in by),
    )[1]


TENSOR = object()  # placeholder for a tensor among other results


class SolverCall:
    """One call of an equation's solver, and its non-tensor results."""

    def __init__(self, equation: Linear | Root) -> None:
        self.equation = equation
        self.rest: list[Any] = []

    def tensors(self, inputs: Values, consts: Values) -> tuple[torch.Tensor, ...]:
        leaves = self.equation.solve(inputs, consts)
        self.rest = [TENSOR if isinstance(x, torch.Tensor) else x for x in leaves]
        return tuple(x for x in leaves if isinstance(x, torch.Tensor))


def solve_equation(equation: Linear | Root, inputs: Values, consts: Values) -> list[Any]:
    """Return the solution, followed by the solver's other results.

    Args:
        inputs: the right-hand side, or the guess.
        consts: the values that the equation's functions close over.
    """
    call = SolverCall(equation)
    apply: Any = SolveFunction.apply
    tensors = iter(apply(call, *inputs, *consts))
    return [next(tensors) if x is TENSOR else x for x in call.rest]


class SolveFunction(Function):
    @staticmethod
    def forward(call: SolverCall, *values: Any) -> Any:
        count = call.equation.count
        tensors = call.tensors(values[:count], values[count:])
        return tuple(x.view_as(x) if any(x is v for v in values) else x for x in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        call, *values = inputs
        ctx.call = call
        ctx.numbers = [TENSOR if isinstance(x, torch.Tensor) else x for x in values]
        tensors = [x for x in values if isinstance(x, torch.Tensor)]
        ctx.save_for_backward(*output[: call.equation.count], *tensors)
        ctx.save_for_forward(*output[: call.equation.count], *tensors)
        ctx.mark_non_differentiable(*output[call.equation.count :])

    @staticmethod
    def parts(ctx: Any) -> tuple[Values, Values]:
        """Return the solution and the closed-over values."""
        count = ctx.call.equation.count
        saved = ctx.saved_tensors
        rest = iter(saved[count:])
        values = [next(rest) if x is TENSOR else x for x in ctx.numbers]
        return saved[:count], values[count:]

    @staticmethod
    @restoring_thread_state
    def backward(ctx: Any, *cotangents: Any) -> Any:
        x, consts = SolveFunction.parts(ctx)
        input_cts, others = ctx.call.equation.pullback(x, cotangents[: len(x)], consts)
        return (None, *input_cts, *others)

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Any) -> Any:
        x, consts = SolveFunction.parts(ctx)
        tangents_out = ctx.call.equation.pushforward(
            x, tangents[: len(x)], consts, tangents[len(x) :]
        )
        others = ctx.call.rest.count(TENSOR) - len(x)
        return (*tangents_out, *[None] * others)
