"""linear_solve and implicit_root: derivatives of the solution do not depend on the solver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tsfunc
from tests.transforms.support import same
from tsfunc import MetaTensorType as Meta
from tsfunc import grad, implicit_root, jvp, linear_solve, specialize, vmap
from tsfunc.errors import DataDependentError

F64 = torch.float64
A = torch.tensor([[3.0, 0.4, -0.2], [0.1, 2.0, 0.5], [0.3, -0.6, 4.0]], dtype=F64)
B = torch.tensor([0.5, -1.0, 2.0], dtype=F64)
MATRICES = torch.stack([A, A.T + 1, A @ A])
SIDES = torch.stack([B, 2 * B.flip(0), -B])

Function = Callable[..., Any]


def solved(a: Tensor, b: Tensor) -> Any:
    """Solve by a function that autograd can't differentiate."""

    def solve(matvec: Function, b: Tensor) -> Any:
        return torch.linalg.solve(a.detach(), b.detach())

    def transpose_solve(matvec: Function, b: Tensor) -> Any:
        return torch.linalg.solve(a.detach().T, b.detach())

    return linear_solve(lambda x: a @ x, b, solve, transpose_solve)


def iterated(a: Tensor, b: Tensor) -> Any:
    """Solve by Jacobi's iteration, which uses ``matvec`` alone."""

    def solve(matvec: Function, b: Tensor) -> Any:
        return tsfunc.fori_loop(0, 200, lambda i, x: x + (b - matvec(x)) / 8, torch.zeros_like(b))

    return linear_solve(lambda x: a @ x, b, solve, solve)


def rooted(a: Tensor, b: Tensor) -> Any:
    """Solve a linear equation as a root of its residual."""

    def solve(f: Function, x: Tensor) -> Any:
        return torch.linalg.solve(a.detach(), b.detach())

    return implicit_root(lambda x: a @ x - b, torch.zeros(3, dtype=F64), solve)


def summed(f: Function) -> Function:
    return lambda *args: sum(x.sin().sum() for x in _tuple(f(*args)))


def _tuple(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


def slopes(f: Function) -> Any:
    return grad(summed(f), (0, 1))


def pushed(f: Function) -> Function:
    return lambda a, b: jvp(f, (a, b), (a.cos(), b.cos()))[1]


def by_pushforward(a: Tensor, b: Tensor) -> Any:
    """The operator is a derivative that was recorded before: (1 + cos(a).T @ cos(a)) x = b."""

    def solve(matvec: Function, b: Tensor) -> Any:
        return torch.linalg.solve(tsfunc.jacfwd(matvec)(b), b)

    x = torch.ones_like(b)
    _, push = tsfunc.linearize(lambda x: (a * x).sin().sum(1), x)
    _, pull = tsfunc.vjp(lambda x: (a * x).sin().sum(1), x)
    return linear_solve(lambda v: v + pull(push(v))[0], b, solve, symmetric=True)


def normal_equations(a: Tensor, b: Tensor) -> Any:
    j = a * a.cos()
    return torch.linalg.solve(torch.eye(3, dtype=F64) + j.T @ j, b)


NESTINGS: dict[str, Callable[[Function], Any]] = {
    "itself": lambda f: f(A, B),
    "grad": lambda f: slopes(f)(A, B),
    "jvp": lambda f: pushed(f)(A, B),
    "jacrev": lambda f: tsfunc.jacrev(f, (0, 1))(A, B),
    "jacfwd": lambda f: tsfunc.jacfwd(f, (0, 1))(A, B),
    "hessian": lambda f: tsfunc.hessian(summed(f), (0, 1))(A, B),
    "grad(grad)": lambda f: slopes(slopes(f))(A, B),
    "grad(jvp)": lambda f: slopes(pushed(f))(A, B),
    "jvp(jvp)": lambda f: pushed(pushed(f))(A, B),
    "vmap": lambda f: vmap(f)(MATRICES, SIDES),
    "vmap of the matrix": lambda f: vmap(f, (0, None))(MATRICES, B),
    "vmap of the side": lambda f: vmap(f, (None, 0))(A, SIDES),
    "vmap(grad)": lambda f: vmap(slopes(f))(MATRICES, SIDES),
    "grad(vmap)": lambda f: slopes(vmap(f))(MATRICES, SIDES),
    "vmap(jvp)": lambda f: vmap(pushed(f))(MATRICES, SIDES),
    "jvp(vmap(grad))": lambda f: jvp(vmap(slopes(f)), (MATRICES, SIDES), (MATRICES, SIDES))[1],
    "vmap(vmap(grad))": lambda f: vmap(vmap(slopes(f), (0, None)), (None, 0))(MATRICES, SIDES),
    "specialize(grad)": lambda f: specialize(lambda a, b: slopes(f)(a, b))(A, B),
    "grad(specialize)": lambda f: slopes(specialize(lambda a, b: f(a, b)))(A, B),
    "specialize(vmap(grad))": lambda f: specialize(vmap(slopes(f)))(MATRICES, SIDES),
    "vmap(specialize)": lambda f: vmap(specialize(lambda a, b: f(a, b)))(MATRICES, SIDES),
}


@pytest.mark.parametrize("nesting", NESTINGS)
@pytest.mark.parametrize("func", [solved, rooted])
def test_derivatives_are_those_of_the_solution(func: Function, nesting: str) -> None:
    build = NESTINGS[nesting]
    same(build(func), build(lambda a, b: torch.linalg.solve(a, b)), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("nesting", ["grad", "jvp", "grad(vmap)", "specialize(vmap(grad))"])
def test_an_operator_of_recorded_derivatives(nesting: str) -> None:
    run = NESTINGS[nesting]
    same(run(by_pushforward), run(normal_equations), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("nesting", NESTINGS)
def test_a_solver_that_iterates(nesting: str) -> None:
    def diagonally(f: Function) -> Function:
        eye = 3 * torch.eye(3, dtype=F64)
        return lambda a, b: f(a / 9 + eye, b)

    build = NESTINGS[nesting]
    wanted = build(diagonally(lambda a, b: torch.linalg.solve(a, b)))
    same(build(diagonally(iterated)), wanted, rtol=1e-6, atol=1e-9)


def test_programs_of_named_sizes() -> None:
    program = specialize(
        lambda a, b: solved(a * a.shape[0], b),
        {"a": Meta(shape=["n", "n"], dtype=F64), "b": Meta(shape=["n"], dtype=F64)},
    )
    for n in (3, 5):
        a = torch.eye(n, dtype=F64) + torch.ones(n, n, dtype=F64) / 7
        b = torch.arange(1.0, n + 1, dtype=F64)
        same(
            slopes(program)(a, b), slopes(lambda a, b: torch.linalg.solve(a * a.shape[0], b))(a, b)
        )
    assert program.cache_info().programs == 1


def test_a_symmetric_operator_of_a_pytree() -> None:
    def f(w: Tensor, b: Any) -> Any:
        def matvec(x: Any) -> Any:
            return {"u": w * x["u"] + x["v"].sum(), "v": 4 * x["v"] + x["u"].sum()}

        def solve(matvec: Function, b: Any) -> Any:
            basis = torch.eye(5, dtype=F64)
            rows = [matvec({"u": e[:3], "v": e[3:]}) for e in basis]
            matrix = torch.stack([torch.cat([row["u"], row["v"]]) for row in rows])
            found = torch.linalg.solve(matrix.detach(), torch.cat([b["u"], b["v"]]).detach())
            return {"u": found[:3], "v": found[3:]}

        return linear_solve(matvec, b, solve, symmetric=True)

    def plain(w: Tensor, b: Any) -> Any:
        matrix = torch.zeros(5, 5, dtype=F64)
        matrix[:3, 3:] = matrix[3:, :3] = 1
        matrix = matrix + torch.diag(torch.cat([w, torch.full((2,), 4.0, dtype=F64)]))
        found = torch.linalg.solve(matrix, torch.cat([b["u"], b["v"]]))
        return {"u": found[:3], "v": found[3:]}

    w, b = A.diagonal() + 5, {"u": B, "v": B[:2].exp()}

    def total(f: Function) -> Function:
        return lambda w, b: sum(x.sin().sum() for x in f(w, b).values())

    same(f(w, b), plain(w, b))
    same(grad(total(f), (0, 1))(w, b), grad(total(plain), (0, 1))(w, b))
    each = {"u": SIDES, "v": SIDES[:, :2]}
    for g in (grad(total(f), (0, 1)), specialize(grad(total(f), (0, 1)))):
        same(vmap(g, (None, 0))(w, each), vmap(grad(total(plain), (0, 1)), (None, 0))(w, each))


def test_complex_equations() -> None:
    a = A + 1j * A.flip(0) / 5
    b = B + 1j * B.flip(0)

    def f(a: Tensor, b: Tensor) -> Any:
        return linear_solve(
            lambda x: a @ x, b,
            lambda _, b: torch.linalg.solve(a, b),
            lambda _, b: torch.linalg.solve(a.T, b),
        )  # fmt: skip

    def total(f: Function) -> Function:
        return lambda a, b: (f(a, b) * torch.tensor([1, 2j, 3 - 1j])).sum().abs()

    want = grad(total(lambda a, b: torch.linalg.solve(a, b)), (0, 1))(a, b)
    same(grad(total(f), (0, 1))(a, b), want)
    symmetric = a + a.T

    def g(a: Tensor, b: Tensor) -> Any:
        return linear_solve(
            lambda x: (a + a.T) @ x, b, lambda _, b: torch.linalg.solve(a + a.T, b), symmetric=True
        )

    want = grad(total(lambda a, b: torch.linalg.solve(a + a.T, b)), (0, 1))(a, b)
    same(grad(total(g), (0, 1))(a, b), want)
    assert not torch.equal(symmetric, symmetric.mH)


def test_solvers_of_plain_tensors_may_look_at_data() -> None:
    steps = []

    def bisected(f: Function, x: Tensor) -> Any:
        low, high = torch.zeros_like(x), torch.full_like(x, 10.0)
        while (high - low).max() > 1e-12:  # Python's loop, and the number of its steps
            middle = (low + high) / 2
            low, high = (
                torch.where(f(middle) < 0, middle, low),
                torch.where(f(middle) < 0, high, middle),
            )
        steps.append(1)
        return low, {"steps": len(steps), "width": high - low}

    def root(a: Tensor) -> Any:
        return implicit_root(lambda x: x**3 - a, torch.ones_like(a), bisected, has_aux=True)

    a = torch.tensor([8.0, 27.0], dtype=F64)
    x, aux = root(a)
    same(x, torch.tensor([2.0, 3.0], dtype=F64), atol=1e-9, rtol=0.0)
    assert aux["steps"] == 1 and aux["width"].max() < 1e-11
    same(grad(lambda a: root(a)[0].sum())(a), 1 / (3 * x**2))
    second = grad(lambda a: grad(lambda a: root(a)[0].sum())(a).sum())
    same(second(a), -2 / 9 * a ** (-5 / 3))
    with pytest.raises(DataDependentError, match="implicit_root"):
        vmap(root)(a)


def test_the_tangent_equation_uses_the_given_solver() -> None:
    calls = []

    def tangent_solve(g: Function, y: Tensor) -> Tensor:
        calls.append(1)
        return y / g(1.0)

    def sqrt(a: Tensor) -> Any:
        return implicit_root(lambda x: x * x - a, a, lambda f, x: x.detach().sqrt(), tangent_solve)

    a = torch.tensor(4.0, dtype=F64)
    assert grad(sqrt)(a) == 0.25 and calls
    same(grad(grad(sqrt))(a), torch.tensor(-1 / 32, dtype=F64))
    same(jvp(sqrt, (a,), (a,)), (a.sqrt(), a.sqrt() / 2))
    same(vmap(grad(sqrt))(SIDES[0].abs()), 0.5 / SIDES[0].abs().sqrt())


def test_tensors_of_the_guess_and_the_solver_have_no_derivative() -> None:
    a = torch.tensor(2.0, dtype=F64, requires_grad=True)

    def f(guess: Tensor, used: Tensor) -> Any:
        return implicit_root(lambda x: x - a, guess, lambda f, x: a + 0 * x * used)

    x = torch.tensor(1.0, dtype=F64)
    assert [g.item() for g in grad(f, (0, 1))(x, x)] == [0.0, 0.0]
    f(x, x).backward()
    assert a.grad == 1  # a captured tensor, by torch's own backward


@pytest.mark.parametrize("dtype", [F64, torch.complex128])
def test_the_transposed_equation_is_solved_by_its_matrix_by_default(dtype: torch.dtype) -> None:
    a = (torch.rand(3, 3, dtype=dtype) + 3 * torch.eye(3)).to(dtype)
    b = torch.rand(3, dtype=dtype)

    def ours(a: Tensor, b: Tensor) -> Any:
        def solve(matvec: Any, b: Any) -> Any:
            return {"x": torch.linalg.solve(a.detach(), b["x"])}, "aux"

        def product(tree: Any) -> Any:
            return {"x": a @ tree["x"]}

        found, aux = linear_solve(product, {"x": b}, solve, has_aux=True)
        assert aux == "aux"
        return found["x"].abs().square().sum()

    def plain(a: Tensor, b: Tensor) -> Any:
        return torch.linalg.solve(a, b).abs().square().sum()

    for of in (grad, lambda f, by: vmap(grad(f, by), in_dims=(None, 0))):
        for by in (0, 1):
            given = b if of is grad else torch.stack([b, 2 * b])
            torch.testing.assert_close(of(ours, by)(a, given), of(plain, by)(a, given))


def test_errors() -> None:
    with pytest.raises(TypeError, match=r"linear_solve: matvec: expected the structure"):
        linear_solve(lambda x: (x,), B, lambda _, b: b)
    with pytest.raises(TypeError, match=r"solve: expected .*\(3,"):
        linear_solve(lambda x: x, B, lambda _, b: b[:2])
    with pytest.raises(TypeError, match=r"implicit_root: f: expected .*, got torch.float32"):
        implicit_root(lambda x: x.float(), B, lambda f, x: x)
    with pytest.raises(TypeError, match=r"expected tensors of floating point"):
        linear_solve(lambda x: x, torch.arange(3), lambda _, b: b)
    with pytest.raises(RuntimeError, match=r"linear_solve: solve.*tuple"):
        linear_solve(lambda x: x, B, lambda _, b: b, has_aux=True)


def test_a_solution_by_recorded_derivatives_requires_no_grad() -> None:
    assert not by_pushforward(A, B).requires_grad
    assert not vmap(by_pushforward)(MATRICES, SIDES).requires_grad
    assert by_pushforward(A.clone().requires_grad_(), B).requires_grad
