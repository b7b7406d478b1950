"""``linear_solve`` and ``implicit_root``: results that an equation defines, with its derivatives.

NOTE [implicit derivatives]
How a solver finds ``x`` is its own business. From ``A x = b`` follows ``A dx = db - dA x``, and
from ``f(x) = 0`` follows ``f'(x) dx = -df``: a tangent is the solution of a linear equation, and a
cotangent that of the transposed one. These are solved by the same operator, so that they can be
differentiated in their turn, and no solver is differentiated through. The operator is one
``autograd.Function``, of which the closed-over tensors are arguments: NOTE [closed-over tensors] in
``closures``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tsfunc import pytrees
from tsfunc.bridge.grad.mapped_function import differentiable
from tsfunc.bridge.tracers.tracebacks import boundary
from tsfunc.bridge.tracers.tracer import current_tracer_level, innermost_level, seen_here
from tsfunc.transforms.arguments import flatten_tensors, split_aux
from tsfunc.transforms.closures import Converted, converted
from tsfunc.transforms.equations import Closed, Linear, Root, Values, solved, transpose
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
    """The solution ``x`` of ``matvec(x) = b``, differentiated by what defines it.

    Args:
        matvec: a linear function, from pytrees like ``b`` to such.
        b: a pytree of tensors.
        solve: takes ``matvec`` and ``b``, and returns the solution.
        transpose_solve: takes the transpose of ``matvec`` (for complex tensors the one without
            conjugation) and a right-hand side, and returns the solution; for reverse mode. By
            default the transpose's matrix is made and solved with.
        symmetric: whether ``matvec`` is its own transpose: then ``solve`` solves both.
        has_aux: whether ``solve`` and ``transpose_solve`` return a pair of the solution and
            anything else. That of ``solve`` is returned too, without derivatives.

    Returns:
        What ``solve`` returns. Its derivatives, of any order and in both modes, are those of the
        solution: by ``b``, and by all that ``matvec`` closes over.

    Raises:
        TypeError: what ``matvec`` or a solver returns is not like ``b``.
        DataDependentError: under ``vmap`` or in a program, a solver that looks at data, as a
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

    As ``jax.lax.custom_linear_solve``.
    """
    unknown = _Unknown("linear_solve", b, has_aux)
    if symmetric:
        transpose_solve = solve

    def product(*values: Any) -> Any:
        return unknown.leaves("matvec", matvec(unknown.tree(values)))

    def transposed(values: Any) -> Any:
        given = unknown.leaves("the argument of the transposed matvec", values)
        return unknown.tree(transpose(lambda *x: tuple(product(*x)), given))

    operator = matvec if symmetric else transposed
    other = transpose_solve or unknown.solved_densely
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
    """A root of ``f``, differentiated by what defines it.

    Args:
        f: from pytrees of tensors like ``initial_guess`` to such.
        initial_guess: where ``solve`` starts; a root has no derivative by it.
        solve: takes ``f`` and the guess, and returns the root.
        tangent_solve: takes the derivative of ``f`` at the root, a linear function, and a
            right-hand side, and returns the solution; it must itself be linear in the right-hand
            side and differentiable. By default the derivative's matrix is made and solved with.
        has_aux: whether ``solve`` returns a pair of the root and anything else, which is returned
            too, without derivatives.

    Returns:
        What ``solve`` returns. Its derivatives, of any order and in both modes, are those of the
        root by all that ``f`` closes over: the implicit function theorem's.

    Raises:
        TypeError: what ``f`` or a solver returns is not like the guess.
        DataDependentError: under ``vmap`` or in a program, a solver that looks at data, as a
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

    As ``jax.lax.custom_root``: Christianson, "Reverse accumulation and implicit functions" (1998).
    """
    unknown = _Unknown("implicit_root", initial_guess, has_aux)
    count = len(unknown.flat)

    def residual(*values: Any) -> Any:
        return unknown.leaves("f", f(unknown.tree(values[:count])))

    def pushed(*values: Any) -> Any:
        """The solution of the tangents' equation at a root, for the right-hand side after it."""
        root, given = values[:count], values[count:]

        def derivative(tangent: Any) -> Any:
            leaves = unknown.leaves("the argument of the derivative of f", tangent, root)
            return unknown.tree(jvp(lambda *x: tuple(residual(*x)), root, tuple(leaves))[1])

        solver = tangent_solve or unknown.densely
        return unknown.leaves("tangent_solve", solver(derivative, unknown.tree(given)))

    return unknown.result(Root, [residual, unknown.solver("solve", solve, f), pushed])


class _Unknown:
    """What an equation is solved for: tensors like given ones, in a pytree."""

    def __init__(self, what: str, like: Any, has_aux: bool) -> None:
        self.what = what
        leaves, self.spec = flatten_tensors(what, "the tensors to solve for", like)
        self.flat = [seen_here(x) for x in leaves]
        for x in self.flat:
            if not differentiable(x):
                raise TypeError(
                    f"{what}: the unknown must be of tensors of floating point or complex dtype, "
                    f"got {x.dtype}."
                )
        self.has_aux = has_aux
        self.structure: Any = None

    def tree(self, values: Values) -> Any:
        return pytrees.unflatten(self.spec, values)

    def leaves(self, who: str, value: Any, like: Values = ()) -> list[torch.Tensor]:
        """The tensors of what must be like the unknown; numbers stand for tensors of them."""
        flat, spec = pytrees.flatten(value)
        if spec != self.spec:
            raise TypeError(
                f"{self.what}: {who} must have the structure of the unknown, {self.spec}, got "
                f"{spec}."
            )
        pairs = zip(flat, self.flat, strict=True)
        flat = [torch.full_like(x, v) if isinstance(v, int | float) else v for v, x in pairs]
        for found, wanted in zip(flat, self.flat, strict=True):
            if found.shape != wanted.shape or found.dtype != wanted.dtype:
                raise TypeError(
                    f"{self.what}: {who} must have the types and shapes of the unknown: expected "
                    f"{wanted.dtype} of shape {tuple(wanted.shape)}, got {found.dtype} of shape "
                    f"{tuple(found.shape)}."
                )
        return flat

    def solver(
        self, who: str, solver: Solver, operator: Callable[[Any], Any]
    ) -> Callable[..., Any]:
        """A solver as a function of tensors that returns the unknown's and the auxiliary part."""

        def run(*values: Any) -> Any:
            found = solver(operator, self.tree(values[: len(self.flat)]))
            x, aux = split_aux(f"{self.what}: {who}", found, self.has_aux)
            return self.leaves(who, x), aux

        return run

    def densely(self, derivative: Callable[[Any], Any], given: Any) -> Any:
        """The solution of a linear equation, by the matrix of its function."""
        sizes = [x.numel() for x in self.flat]

        def column(entries: torch.Tensor) -> torch.Tensor:
            parts = zip(entries.split(sizes), self.flat, strict=True)
            tangent = self.tree([part.view(x.shape).to(x.dtype) for part, x in parts])
            return _joined(pytrees.leaves_of(derivative(tangent)))

        rhs = _joined(pytrees.leaves_of(given))
        basis = torch.eye(sum(sizes), dtype=rhs.dtype, device=rhs.device)
        found = torch.linalg.solve(vmap(column)(basis).T, rhs)
        parts = zip(found.split(sizes), self.flat, strict=True)
        return self.tree([part.view(x.shape).to(x.dtype) for part, x in parts])

    def solved_densely(self, operator: Callable[[Any], Any], given: Any) -> Any:
        """As a solver of the user's, whose auxiliary part nobody sees."""
        found = self.densely(operator, given)
        return (found, None) if self.has_aux else found

    def result(self, kind: Any, functions: Sequence[Callable[..., Any]]) -> Any:
        """What the second of an equation's functions, its solver, returns.

        What a solver of plain tensors does is nobody's business: it is called as it is.
        """
        plain = current_tracer_level() is None and innermost_level(self.flat) is None
        closed: dict[int, Any] = {}
        parts: list[Closed] = []
        for i, function in enumerate(functions):
            if i and plain:
                parts.append(_as_it_is(function, self if i == 1 else None))
            else:
                examples = [*self.flat, *self.flat] if kind is Root and i == 2 else self.flat
                found = converted(self.what, function, examples)
                for value in found.closed:
                    closed.setdefault(id(value), value)
                parts.append(_of_closed(found, [list(closed).index(id(x)) for x in found.closed]))
                self.structure = found.tree if i == 1 else self.structure
        leaves = solved(kind(self.what, len(self.flat), *parts), self.flat, [*closed.values()])
        x, aux = pytrees.unflatten(self.structure, leaves)
        return (self.tree(x), aux) if self.has_aux else self.tree(x)


def _as_it_is(function: Callable[..., Any], unknown: _Unknown | None) -> Closed:
    def run(values: Values, closed: Values) -> Values:
        leaves, tree = pytrees.flatten(function(*values))
        if unknown is not None:
            unknown.structure = tree
        return leaves

    return run


def _of_closed(found: Converted, at: Sequence[int]) -> Closed:
    return lambda values, closed: found.run(*values, *[closed[i] for i in at])


def _joined(values: Values) -> torch.Tensor:
    return torch.cat([x.reshape(-1) for x in values])
