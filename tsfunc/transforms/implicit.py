"""``linear_solve`` and ``implicit_root``: solutions of equations, with implicit derivatives.

NOTE [implicit derivatives]
The derivatives do not depend on the way in which a solver finds ``x``. ``A x = b`` implies
``A dx = db - dA x``, and ``f(x) = 0`` implies ``f'(x) dx = -df``: a tangent is the solution of a
linear equation, and a cotangent is the solution of the transposed equation. The same operator
solves these equations, so they can be differentiated again, and no derivative runs through a
solver. The operator is one ``autograd.Function`` with the closed-over tensors as arguments:
NOTE [closed-over tensors] in ``closures``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tsfunc import pytrees
from tsfunc.bridge.grad.autograd import is_differentiable
from tsfunc.bridge.tracers.boundaries import boundary
from tsfunc.bridge.tracers.level_proxies import as_seen_by_current_level
from tsfunc.bridge.tracers.tracer import TracerLevel, innermost_level
from tsfunc.dispatch.state import innermost_of
from tsfunc.transforms.argnums import flatten_tensors, split_aux
from tsfunc.transforms.closures import ClosureConverted, convert_closure
from tsfunc.transforms.control.call_forms import check_callable
from tsfunc.transforms.equations import Linear, Root, Values, WithConsts, solve_equation, transpose
from tsfunc.transforms.forward import jvp
from tsfunc.transforms.vmap import vmap

Solver = Callable[[Callable[[Any], Any], Any], Any]


@boundary("linear_solve")
def linear_solve(
    matvec: Callable[[Any], Any],
    b: Any,
    solve: Solver,
    transpose_solve: Solver | None = None,
    symmetric: bool = False,
    has_aux: bool = False,
) -> Any:
    """Return the solution ``x`` of ``matvec(x) = b``, with implicit derivatives.

    Args:
        matvec: a linear function from pytrees like ``b`` to pytrees like ``b``.
        b: a pytree of tensors.
        solve: takes ``matvec`` and ``b``, and returns the solution.
        transpose_solve: for reverse mode: takes the transpose of ``matvec`` (without conjugation
            for complex tensors) and a right-hand side, and returns the solution. By default the
            matrix of the transpose is computed and solved.
        symmetric: if True, ``matvec`` is its own transpose, and ``solve`` solves both equations.
        has_aux: if True, ``solve`` and ``transpose_solve`` return a pair of the solution and an
            auxiliary value. The auxiliary value of ``solve`` is returned too, without derivatives.

    Returns:
        The result of ``solve``. Its derivatives, of any order and in both modes, are those of the
        solution by ``b`` and by the tensors that ``matvec`` closes over.

    Raises:
        TypeError: ``matvec`` or a solver returns a result that is not like ``b``.
        DataDependentError: under ``vmap`` or in a program, a solver reads values of tensors, as a
            Python loop up to a tolerance does. Use ``tsfunc.while_loop``.

    Example:
        >>> import torch
        >>> from tsfunc import grad, linear_solve
        >>> def f(a):
        ...     def divided(matvec, b):
        ...         return b / a
        ...     return linear_solve(lambda x: a * x, torch.ones(2), divided, symmetric=True).sum()
        >>> grad(f)(torch.tensor([2., 4.]))
        tensor([-0.2500, -0.0625])

    Corresponds to ``jax.lax.custom_linear_solve``.
    """
    check_callable("linear_solve", matvec=matvec, solve=solve)
    unknown = _Unknown("linear_solve", b, has_aux)
    if symmetric:
        transpose_solve = solve

    def product(*values: Any) -> Any:
        return unknown.leaves("matvec", matvec(unknown.tree(values)))

    def transposed(values: Any) -> Any:
        leaves = unknown.leaves("the argument of the transposed matvec", values)
        return unknown.tree(transpose(lambda *x: tuple(product(*x)), leaves))

    operator = matvec if symmetric else transposed
    other = transpose_solve or unknown.dense_solver
    functions = [
        product,
        unknown.solver("solve", solve, matvec),
        unknown.solver("transpose_solve", other, operator),
    ]
    return unknown.result(Linear, functions)


@boundary("implicit_root")
def implicit_root(
    f: Callable[[Any], Any],
    initial_guess: Any,
    solve: Solver,
    tangent_solve: Solver | None = None,
    has_aux: bool = False,
) -> Any:
    """Return a root of ``f``, with implicit derivatives.

    Args:
        f: a function from pytrees like ``initial_guess`` to pytrees like it.
        initial_guess: the start of ``solve``; the root has no derivative by it.
        solve: takes ``f`` and the guess, and returns the root.
        tangent_solve: takes the derivative of ``f`` at the root, a linear function, and a
            right-hand side, and returns the solution. The solution must be linear in the right-hand
            side and differentiable. By default the matrix of the derivative is computed and solved.
        has_aux: if True, ``solve`` returns a pair of the root and an auxiliary value, which is
            returned too, without derivatives.

    Returns:
        The result of ``solve``. Its derivatives, of any order and in both modes, are those of the
        root by the tensors that ``f`` closes over, by the implicit function theorem.

    Raises:
        TypeError: ``f`` or a solver returns a result that is not like the guess.
        DataDependentError: under ``vmap`` or in a program, a solver reads values of tensors, as a
            Python loop up to a tolerance does. Use ``tsfunc.while_loop``.

    Example:
        >>> import torch
        >>> from tsfunc import fori_loop, grad, implicit_root
        >>> def newton(f, x):
        ...     return fori_loop(0, 20, lambda i, x: x - f(x) / (2 * x), x)
        >>> def sqrt(a):
        ...     return implicit_root(lambda x: x * x - a, torch.ones(()), newton)
        >>> grad(sqrt)(torch.tensor(4.))
        tensor(0.2500)

    Similar to ``jax.lax.custom_root``: Christianson, "Reverse accumulation and implicit functions"
    (1998).
    """
    check_callable("implicit_root", f=f, solve=solve)
    unknown = _Unknown("implicit_root", initial_guess, has_aux)
    count = len(unknown.flat)

    def residual(*values: Any) -> Any:
        return unknown.leaves("f", f(unknown.tree(values[:count])))

    def pushforward(*values: Any) -> Any:
        """Return the tangent solution at a root; the arguments are the root and the rhs."""
        root, rhs = values[:count], values[count:]

        def derivative(tangent: Any) -> Any:
            leaves = unknown.leaves("the argument of the derivative of f", tangent, root)
            return unknown.tree(jvp(lambda *x: tuple(residual(*x)), root, tuple(leaves))[1])

        solver = tangent_solve or unknown.solve_densely
        return unknown.leaves("tangent_solve", solver(derivative, unknown.tree(rhs)))

    return unknown.result(Root, [residual, unknown.solver("solve", solve, f), pushforward])


class _Unknown:
    """The unknown of an equation: a pytree of tensors like given ones."""

    def __init__(self, label: str, like: Any, has_aux: bool) -> None:
        self.label = label
        leaves, self.spec = flatten_tensors(label, "the tensors to solve for", like)
        self.flat = [as_seen_by_current_level(x) for x in leaves]
        for x in self.flat:
            if not is_differentiable(x):
                raise TypeError(
                    f"{label}: the unknown: expected tensors of floating point or complex dtype, "
                    f"got {x.dtype}."
                )
        self.has_aux = has_aux
        self.structure: Any = None

    def tree(self, values: Values) -> Any:
        return pytrees.unflatten(self.spec, values)

    def leaves(self, role: str, value: Any, like: Values = ()) -> list[torch.Tensor]:
        """Return the tensors of a value that must be like the unknown; numbers become tensors."""
        flat, spec = pytrees.flatten(value)
        if spec != self.spec:
            raise TypeError(
                f"{self.label}: {role}: expected the structure of the unknown, "
                f"{pytrees.structure_text(self.spec)}, got {pytrees.structure_text(spec)}."
            )
        pairs = zip(flat, self.flat, strict=True)
        flat = [torch.full_like(x, v) if isinstance(v, int | float) else v for v, x in pairs]
        for got, expected in zip(flat, self.flat, strict=True):
            if got.shape != expected.shape or got.dtype != expected.dtype:
                raise TypeError(
                    f"{self.label}: {role}: expected {expected.dtype} of shape "
                    f"{tuple(expected.shape)}, as the unknown, got {got.dtype} of shape "
                    f"{tuple(got.shape)}."
                )
        return flat

    def solver(
        self, role: str, solver: Solver, operator: Callable[[Any], Any]
    ) -> Callable[..., Any]:
        """Return a solver as a function of tensors; it returns the solution and aux."""

        def run(*values: Any) -> Any:
            returned = solver(operator, self.tree(values[: len(self.flat)]))
            x, aux = split_aux(f"{self.label}: {role}", returned, self.has_aux)
            return self.leaves(role, x), aux

        return run

    def solve_densely(self, derivative: Callable[[Any], Any], right_side: Any) -> Any:
        """Return the solution of a linear equation, computed with the matrix of its function."""
        sizes = [x.numel() for x in self.flat]

        def column(entries: torch.Tensor) -> torch.Tensor:
            parts = zip(entries.split(sizes), self.flat, strict=True)
            tangent = self.tree([part.view(x.shape).to(x.dtype) for part, x in parts])
            return _join(pytrees.leaves_of(derivative(tangent)))

        rhs = _join(pytrees.leaves_of(right_side))
        basis = torch.eye(sum(sizes), dtype=rhs.dtype, device=rhs.device)
        solution = torch.linalg.solve(vmap(column)(basis).T, rhs)
        parts = zip(solution.split(sizes), self.flat, strict=True)
        return self.tree([part.view(x.shape).to(x.dtype) for part, x in parts])

    def dense_solver(self, operator: Callable[[Any], Any], right_side: Any) -> Any:
        """Solve densely, with the signature of a user's solver; the auxiliary part is None."""
        solution = self.solve_densely(operator, right_side)
        return (solution, None) if self.has_aux else solution

    def result(self, kind: Any, functions: Sequence[Callable[..., Any]]) -> Any:
        """Return the result of an equation's solver, the second of its functions.

        On plain tensors a solver is called as it is, without a trace.
        """
        plain = innermost_of(TracerLevel) is None and innermost_level(self.flat) is None
        consts: dict[int, Any] = {}
        parts: list[WithConsts] = []
        for i, function in enumerate(functions):
            if i and plain:
                parts.append(_without_trace(function, self if i == 1 else None))
            else:
                examples = [*self.flat, *self.flat] if kind is Root and i == 2 else self.flat
                graph = convert_closure(self.label, function, examples)
                for value in graph.closed:
                    consts.setdefault(id(value), value)
                parts.append(_with_consts(graph, [list(consts).index(id(x)) for x in graph.closed]))
                self.structure = graph.tree if i == 1 else self.structure
        leaves = solve_equation(
            kind(self.label, len(self.flat), *parts), self.flat, [*consts.values()]
        )
        x, aux = pytrees.unflatten(self.structure, leaves)
        return (self.tree(x), aux) if self.has_aux else self.tree(x)


def _without_trace(function: Callable[..., Any], unknown: _Unknown | None) -> WithConsts:
    def run(values: Values, consts: Values) -> Values:
        leaves, tree = pytrees.flatten(function(*values))
        if unknown is not None:
            unknown.structure = tree
        return leaves

    return run


def _with_consts(graph: ClosureConverted, at: Sequence[int]) -> WithConsts:
    return lambda values, consts: graph.run(*values, *[consts[i] for i in at])


def _join(values: Values) -> torch.Tensor:
    return torch.cat([x.reshape(-1) for x in values])
