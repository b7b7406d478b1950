"""Each backend computes what the function computes: loops, their derivatives, aliases, and writes.

Carries are random in ways that make their memory hard to manage: expanded, transposed, views of
inputs, one tensor twice, inputs that are also results.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tsfunc import (
    MetaTensorType,
    associative_scan,
    cond,
    custom_vjp,
    fori_loop,
    grad,
    hessian,
    implicit_root,
    jacfwd,
    jacrev,
    jvp,
    linear_solve,
    pytrees,
    scan,
    specialize,
    vmap,
    while_loop,
)
from tsfunc.errors import ExportError

# Warnings of torch's own compilers.
pytestmark = pytest.mark.filterwarnings("ignore")
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="Inductor needs gcc")
W = torch.tensor([0.7, -0.4, 1.1])


@dataclass(frozen=True)
class Case:
    """A function, a function that draws its arguments, and the named dims among these."""

    func: Callable[..., Any]
    shapes: Sequence[Sequence[int]]
    dims: Mapping[str, Sequence[Any]] | None = None
    quick: bool = False  # True if Inductor compiles it in the quick part, too

    def args(self, longer: int = 0) -> list[Tensor]:
        """Return arguments; those of named dims may be longer."""
        named = list((self.dims or {}).values())
        shapes = [
            [n + longer * isinstance(dim, str) for n, dim in zip(shape, dims, strict=True)]
            for shape, dims in zip(self.shapes, named or self.shapes, strict=True)
        ]
        return [torch.randn(shape) for shape in shapes]


def rnn(h0: Tensor, xs: Tensor) -> Any:
    return scan(lambda h, x: (torch.tanh(W * h + x),) * 2, h0, xs)


def by_seconds(h0: Tensor, xs: Tensor) -> Any:
    return scan(lambda h, x: (torch.tanh(h @ h.mT + x), h.sum(-1)), h0, xs)


def kalman(a: Tensor, ys: Tensor) -> Any:
    """A filter that solves a system at each step, and of which one result is used."""
    q, r = torch.eye(3) * 0.1, torch.eye(2) * 0.2
    h = torch.tensor([[1.0, 0.5, -0.3], [0.2, -1.0, 0.4]])

    def step(carry: Any, y: Tensor) -> Any:
        m, p = carry
        m, p = a @ m, a @ p @ a.T + q
        s = h @ p @ h.T + r
        gain = p @ h.T @ torch.linalg.inv(s)
        return (m + gain @ (y - h @ m), p - gain @ s @ gain.T), m

    return scan(step, (torch.zeros(3), torch.eye(3)), ys)[1]


def solved(a: Tensor, b: Tensor) -> Tensor:
    """Return the solution for a matrix that is far from singular."""
    return torch.linalg.solve(torch.eye(2) * 3 + a.sin(), b)


def parallel_sums(a: Tensor, xs: Tensor) -> Tensor:
    """Inverses of sums of inverses of positive definite matrices, which are associative."""
    inv = torch.linalg.inv
    given = (a @ xs) @ (a @ xs).mT + torch.eye(2)
    return associative_scan(lambda x, y: inv(inv(x) + inv(y)), given).sum()


def mse(p: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return (torch.tanh(x @ p) - y).square().mean()


def adapted(p: Tensor, xs: Tensor, ys: Tensor) -> Any:
    """Return the mean loss over tasks, each after some steps of gradient descent."""

    def of_task(x: Tensor, y: Tensor) -> Tensor:
        last, _ = scan(lambda c, _: (c - 0.1 * grad(mse)(c, x, y), None), p, None, length=2)
        return mse(last, x, y)

    return vmap(of_task)(xs, ys).mean()


def collatz_like(x: Tensor) -> Any:
    return while_loop(lambda c: c.abs().sum() < 30, lambda c: c.mT * 2 + x, x.mT)


def newton(x: Tensor) -> Any:
    return while_loop(lambda y: ((y * y - x).abs() > 1e-3).any(), lambda y: (y + x / y) / 2, x)


def without_steps(x: Tensor, w: Tensor) -> Any:
    return while_loop(lambda c: (c.abs() > 1e3).any(), lambda c: (c * w).sin() + w, x)


def counted(x: Tensor, steps: Tensor) -> Any:
    return fori_loop(0, steps, lambda i, c: c.sin() * i + x, x)


def fixed_point(x: Tensor) -> Any:
    """Return a root that a loop finds up to a tolerance."""

    def solver(f: Any, z: Tensor) -> Any:
        return while_loop(lambda z: f(z).norm() > 1e-6, lambda z: z - f(z), z)

    return implicit_root(lambda z: z - torch.tanh(z * x / 8 + x), torch.zeros(3), solver)


def linear_solution(x: Tensor, y: Tensor) -> Any:
    """Return the solution of a diagonally dominant system, by a fixed number of steps."""

    def solver(f: Any, b: Tensor) -> Any:
        return fori_loop(0, 60, lambda i, z: z - (f(z) - b) / 3, torch.zeros_like(b))

    return linear_solve(lambda v: v * (3 + x.sin()) + v.flip(0) * y.cos() / 4, x * y, solver)


def mixed(x: Tensor) -> Any:
    return cond(x.sum() > 0, lambda: x.mT.sin(), lambda: x.mT.contiguous().cos())


LOOPS: dict[str, Case] = {
    "expanded carry": Case(lambda h, xs: rnn(h.expand(4, 3), xs), [(3,), (5, 4, 3)]),
    "carry made inside of vmap": Case(
        vmap(lambda xs: rnn(torch.zeros(3), xs)), [(4, 5, 3)], quick=True
    ),
    "transposed carry": Case(lambda h, xs: by_seconds(h.mT, xs), [(3, 3), (5, 3, 3)]),
    "carry that is a view of an input": Case(
        lambda h, xs: (rnn(h[:, 1], xs), h), [(3, 4), (5, 3)]
    ),
    "carry of one tensor twice": Case(
        lambda h, xs: scan(lambda c, x: ((c[1] + x, c[0] * W), c[0]), (h, h), xs), [(3,), (5, 3)]
    ),
    "carry that is an input and a result": Case(
        lambda h, xs: (h, *scan(lambda c, x: (x, c), h, xs)), [(3,), (5, 3)]
    ),
    "carries that change places": Case(
        lambda h, xs: fori_loop(0, 3, lambda i, c: (c[1], c[0]), (h, xs[0])), [(3,), (5, 3)]
    ),
    "while_loop over a transposed tensor": Case(collatz_like, [(3, 3)], quick=True),
    "cond of two layouts": Case(mixed, [(3, 4)], quick=True),
    "gradient through an expanded carry": Case(
        grad(lambda h, xs: rnn(h.expand(4, 3), xs)[0].sum()), [(3,), (5, 4, 3)], quick=True
    ),
    "gradient of a closed-over tensor under vmap": Case(
        grad(lambda w, xs: vmap(lambda x: rnn(w, x)[1].sum())(xs).sum()), [(3,), (4, 5, 3)]
    ),
    "jvp of a scan": Case(
        lambda h, xs: jvp(lambda h: rnn(h.expand(4, 3), xs), (h,), (h * 2,)), [(3,), (5, 4, 3)]
    ),
    "gradient of a while_loop": Case(
        grad(lambda x: newton(x.exp() + 1).sum()), [(3,)], quick=True
    ),
    "gradient of a while_loop without steps": Case(
        grad(lambda x, w: without_steps(x, w).sin().sum(), argnums=(0, 1)), [(3,), (3,)]
    ),
    "gradient of a fori_loop with a traced bound": Case(
        grad(lambda x: counted(x, (x.sum() > 0).long() + 2).sum()), [(3,)]
    ),
    "Hessian of a cond": Case(hessian(lambda x: mixed(x)[1].sin().sum()), [(3, 4)]),
    "Hessian of a scan": Case(
        hessian(lambda h, xs: rnn(h, xs)[0].square().sum()), [(3,), (5, 3)]
    ),
    "Jacobian of an implicit root": Case(jacrev(fixed_point), [(3,)], quick=True),
    "Hessian of an implicit root": Case(
        hessian(lambda x: fixed_point(x).sin().sum()), [(3,)]
    ),
    "Hessian of a linear solution": Case(
        hessian(lambda x, y: linear_solution(x, y).sin().sum(), argnums=(0, 1)), [(3,), (3,)]
    ),
    "slices that are not contiguous": Case(
        lambda h, xs: scan(lambda c, x: (c * x.flatten()[:3].sin(), x.flatten(0, 1)), h,
                           xs.permute(2, 1, 3, 0)),
        [(3,), (2, 3, 4, 5)],
    ),
    "gradient of a cond of two layouts": Case(grad(lambda x: mixed(x)[1].sum()), [(3, 4)]),
    "vmap of a cond": Case(
        vmap(lambda x: cond(x.sum() > 0, lambda: x.mT + 1, lambda: x.mT.contiguous())),
        [(4, 3, 2)],
    ),
    "vmap of a while_loop": Case(
        vmap(lambda x: while_loop(lambda c: c.sum() < 9, lambda c: c.mT + 1, x.mT)), [(4, 3, 3)]
    ),
    "Kalman filter": Case(kalman, [(3, 3), (6, 2)], quick=True),
    "Kalman filter of open length": Case(kalman, [(3, 3), (6, 2)], {"a": [3, 3], "ys": ["t", 2]}),
    "gradient of a Kalman filter": Case(
        grad(lambda a, ys: kalman(a, ys).sum()), [(3, 3), (6, 2)], {"a": [3, 3], "ys": ["t", 2]}
    ),
    "gradient of a scan that solves": Case(
        grad(lambda a, xs: scan(lambda c, x: (solved(a, c) + x, None), xs[0], xs)[0].sum()),
        [(2, 2), (4, 2)], quick=True,
    ),
    "gradient of an associative_scan that inverts": Case(
        grad(parallel_sums), [(2, 2), (5, 2, 2)],
    ),
    "solve and cholesky in bodies": Case(
        lambda x: scan(
            lambda c, r: (torch.linalg.solve(torch.linalg.cholesky(r @ r.mT + torch.eye(3)), c), c),
            torch.eye(3), x,
        ),
        [(4, 3, 3)],
    ),
    "associative_scan of open length": Case(
        lambda a, b: associative_scan(
            lambda x, y: (x[0] * y[0], y[0] * x[1] + y[1]), (a.sigmoid(), b)
        ),
        [(7, 3), (7, 3)], {"a": ["t", 3], "b": ["t", 3]}, quick=True,
    ),
    "gradient of an associative_scan of open length": Case(
        grad(lambda a, b: associative_scan(
            lambda x, y: (x[0] * y[0], y[0] * x[1] + y[1]), (a.sigmoid(), b)
        )[1].sum()),
        [(7, 3), (7, 3)], {"a": ["t", 3], "b": ["t", 3]},
    ),
    "gradient through gradient steps": Case(
        grad(adapted), [(2,), (3, 4, 2), (3, 4)]
    ),
    "gradient through gradient steps, of open sizes": Case(
        grad(adapted), [(2,), (3, 4, 2), (3, 4)],
        {"p": [2], "xs": ["tasks", "n", 2], "ys": ["tasks", "n"]},
    ),
}  # fmt: skip


def write_and_return(x: Tensor, y: Tensor) -> Any:
    x.add_(y)
    x[0].mul_(2)
    return x, x[1], x * y, y


def write_through_a_view(x: Tensor, y: Tensor) -> Any:
    flat = x.view(-1)
    flat[1:3] = 7.0
    y.copy_(x)
    return flat, y.T


ALIASES: dict[str, Case] = {
    "inputs returned, and their views": Case(
        lambda x, y: (x, x.T, y, y[0], x + y, x), [(3, 3), (3, 3)]
    ),
    "one result twice": Case(lambda x, y: [(x * y).sin()] * 2, [(3, 3), (3, 3)]),
    "writes to inputs": Case(write_and_return, [(3, 3), (3, 3)], quick=True),
    "writes through views": Case(write_through_a_view, [(3, 3), (3, 3)]),
    "an expanded result": Case(lambda x, y: (x.sum(0).expand(4, 3), y.T), [(3, 3), (3, 3)]),
    "a loop over an input that is written to": Case(
        lambda h, xs: (xs.mul_(2), rnn(h, xs), h.add_(1)), [(3,), (5, 3)]
    ),
}  # fmt: skip

BACKENDS = ("python", "aot_eager", "inductor")


def _each(cases: Mapping[str, Case]) -> list[Any]:
    """Yield every case with every backend; those that Inductor compiles slowly are slow."""
    return [
        pytest.param(
            case, backend, id=f"{name}-{backend}",
            marks=[needs_gcc, *([] if case.quick else [pytest.mark.slow])]
            if backend == "inductor" else [],
        )
        for name, case in cases.items() for backend in BACKENDS
    ]  # fmt: skip


def _specialized(case: Case, backend: str) -> Any:
    dims = {key: MetaTensorType(list(value)) for key, value in (case.dims or {}).items()}
    return specialize(case.func, dims or None, backend=backend)


@pytest.mark.parametrize(("case", "backend"), _each(LOOPS))
def test_loops(case: Case, backend: str) -> None:
    f = _specialized(case, backend)
    for longer in (0, 3) if case.dims else (0, 0):
        args = case.args(longer)
        given = [x.clone() for x in args]
        torch.testing.assert_close(f(*args), case.func(*given), rtol=1e-4, atol=1e-4)
        assert all(map(torch.equal, args, given))


@pytest.mark.parametrize(("case", "backend"), _each(ALIASES))
def test_aliases_and_writes(case: Case, backend: str) -> None:
    f = _specialized(case, backend)
    for _ in range(2):
        args = case.args()
        given = [x.clone() for x in args]
        got, want = f(*args), case.func(*given)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(args, given)
        assert _aliases(pytrees.leaves_of(got), args) == _aliases(pytrees.leaves_of(want), given)


def _aliases(results: Sequence[Tensor], args: Sequence[Tensor]) -> list[list[bool]]:
    """Return which results share the memory of which arguments."""
    return [[_memory(out) == _memory(x) for x in args] for out in results]


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_arguments_that_share_memory(backend: str) -> None:
    """The arguments are separate first, then halves of one tensor, then one tensor twice."""
    f = specialize(write_and_return, backend=backend)
    cuts: list[Callable[[Tensor, Tensor], Any]] = [
        lambda x, y: (x[:2], y[:2]),
        lambda x, _: (x[:2], x[2:]),
        lambda x, _: (x[:2], x[:2]),
    ]
    for cut in cuts:
        ours, theirs = torch.randn(2, 4, 3).expand(2, 2, 4, 3).clone()
        torch.testing.assert_close(f(*cut(*ours)), write_and_return(*cut(*theirs)))
        torch.testing.assert_close(ours, theirs)


CAPTURED: dict[str, Callable[..., Any]] = {
    "scan": lambda x, y: scan(lambda c, _: (c * y + x, c), torch.ones(3), None, length=3),
    "cond": lambda x, y: cond(x.sum() > 0, lambda: x * y, lambda: x - y),
    "while_loop": lambda x, y: while_loop(
        lambda c: c.sum() < 9, lambda c: c * (1 + y) + x + 1, torch.ones(3)
    ),
}


@pytest.mark.parametrize(
    ("flow", "backend"),
    [
        *((flow, "aot_eager") for flow in CAPTURED),
        pytest.param("scan", "inductor", marks=needs_gcc),
    ],
)
def test_captured_arguments_that_share_memory(flow: str, backend: str) -> None:
    """torch's control flow refuses operands of one storage while it is traced."""
    func, both = CAPTURED[flow], torch.rand(2, 3)
    f = specialize(func, backend=backend)
    for pair in [both, both[:1].expand(2, 3), both[[1, 1]], both.T.contiguous().T, both + 1]:
        torch.testing.assert_close(f(*pair), func(*pair))
    torch.testing.assert_close(f(both[1], both[1]), func(both[1], both[1]))


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=[needs_gcc, pytest.mark.slow])]
)
def test_a_failed_check_in_a_body_is_an_error(backend: str) -> None:
    """A matrix without an inverse raises, as it does without a backend."""
    f = specialize(
        lambda xs: scan(lambda c, x: (torch.linalg.inv(x) @ c, c), torch.eye(2), xs),
        backend=backend,
    )
    xs = torch.eye(2).expand(3, 2, 2).clone()
    torch.testing.assert_close(f(xs)[0], torch.eye(2))
    xs[1] = 0
    with pytest.raises(RuntimeError, match="singular"):
        f(xs)


class TestRefusals:
    def test_a_compiler_that_fails_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from torch._dynamo.backends import registry

        def failing(module: Any, examples: Any) -> Any:
            raise RuntimeError("no luck\nmore")

        monkeypatch.setattr(registry, "lookup_backend", lambda name: failing)
        f = specialize(lambda x: x * 2, backend="failing")
        with pytest.raises(ExportError, match=r"'failing' can't compile.*no luck\. Leave the back"):
            f(torch.ones(2))


@pytest.mark.parametrize("derivative", [lambda f: f, grad])
def test_a_solver_that_stops_at_a_tolerance(derivative: Any) -> None:
    f = derivative(lambda x: fixed_point(x).sum())
    x = torch.rand(3)
    torch.testing.assert_close(specialize(f, backend="aot_eager")(x), f(x))


@pytest.mark.parametrize(
    "loop",
    [
        lambda c, y: while_loop(lambda c: c.sum() > 1, lambda c: c.sin() * y, c),
        lambda c, y: fori_loop(0, 3, lambda i, c: c.sin() * y, c),
    ],
    ids=["while_loop", "fori_loop"],
)
def test_the_derivative_of_a_loop_in_a_scan(loop: Any) -> None:
    def scanned(x: Tensor) -> Any:
        def step(c: Tensor, y: Tensor) -> Any:
            c = loop(c, y)
            return c, c

        return scan(step, x, torch.arange(3.0) + 0.5)[0].sum()

    x = torch.rand(()) + 2
    result = specialize(grad(scanned), backend="aot_eager")(x)
    torch.testing.assert_close(result, grad(scanned)(x))


SECOND: dict[str, Callable[..., Any]] = {
    "jvp of grad": lambda x, w: jvp(grad(lambda x: (newton(x.exp() + w) ** 3).sum()), (x,), (x,)),
    "grad of grad": grad(lambda x, w: grad(lambda x: newton(x.exp() + w).sum())(x).sin().sum()),
    "jvp of jvp": lambda x, w: jvp(
        lambda x: jvp(lambda x: newton(x.exp() + w), (x,), (w,))[1], (x,), (w,)
    ),
    "grad of a vmapped grad": grad(
        lambda x, w: vmap(grad(lambda x, w: newton(x.exp() + w) ** 3))(x, w).sin().sum()
    ),
    "in a scan": grad(
        lambda x, w: grad(lambda x: scan(lambda c, y: (newton(c.exp() + y), c), x, w)[0])(x[0])
    ),
}


@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives_of_loops(name: str) -> None:
    """torch's own second derivatives are wrong."""
    f = SECOND[name]
    x, w = torch.rand(3), torch.rand(3) + 1
    torch.testing.assert_close(specialize(f)(x, w), f(x, w))
    torch.testing.assert_close(specialize(f, backend="aot_eager")(x, w), f(x, w))


SECOND_OF_SOLUTIONS: dict[str, Callable[..., Any]] = {
    "hessian": lambda f: hessian(lambda x, y: f(x, y).sin().sum(), argnums=(0, 1)),
    "jacfwd of jacfwd": lambda f: jacfwd(jacfwd(f, 1)),
    "jacfwd of jacrev": lambda f: jacfwd(jacrev(f, 1)),
    "jacrev of jacfwd": lambda f: jacrev(jacfwd(f, 1)),
    "jacrev of jacrev": lambda f: jacrev(jacrev(f, 1)),
    "hessian of vmap": lambda f: hessian(
        lambda x, y: vmap(f, (None, 0))(x, torch.stack([y, y * 2])).sin().sum()
    ),
    "vmap of hessian": lambda f: (
        lambda x, y: vmap(hessian(lambda x, y: f(x, y).sin().sum()), (-1, None))(
            torch.stack([x, y, x * y, x + y], 1), y
        )
    ),
    "jvp of hessian": lambda f: (
        lambda x, y: jvp(hessian(lambda x: f(x, y).sin().sum()), (x,), (y,))
    ),
}


@pytest.mark.parametrize("name", SECOND_OF_SOLUTIONS)
@pytest.mark.parametrize("solution", ["root", "linear"])
def test_second_derivatives_of_solutions(solution: str, name: str) -> None:
    """The reference differentiates through the steps of the solver, by torch's own derivatives."""
    x, y = torch.rand(2, 3, dtype=torch.float64)
    if solution == "root":

        def f(x: Tensor, y: Tensor) -> Any:
            def solver(f: Any, z: Tensor) -> Any:
                return while_loop(lambda z: f(z).norm() > 1e-12, lambda z: z - f(z), z)

            return implicit_root(lambda z: z - torch.tanh(z * x / 8 + y.sin()), y * 0, solver)

        def by_steps(x: Tensor, y: Tensor) -> Any:
            z = torch.zeros_like(y)
            for _ in range(40):
                z = torch.tanh(z * x / 8 + y.sin())
            return z
    else:
        f = linear_solution

        def by_steps(x: Tensor, y: Tensor) -> Any:
            matrix = torch.diag(3 + x.sin()) + torch.diag(y.cos() / 4).flip(1)
            return torch.linalg.solve(matrix, x * y)

    derivative = SECOND_OF_SOLUTIONS[name]
    want = derivative(by_steps)(x, y)
    for backend in BACKENDS[:2]:
        got = specialize(derivative(f), backend=backend)(x, y)
        torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-7)


@custom_vjp
def scaled_sine(x: Tensor) -> Tensor:
    return x * x.sin()


scaled_sine.defvjp(lambda x: (scaled_sine(x), x), lambda x, ct: (ct * (x.sin() + x * x.cos()),))


def test_a_custom_rule_in_nested_bodies() -> None:
    """Before its trace for torch, the call has to be assumed to draw random numbers."""

    def f(x: Tensor) -> Any:
        def loop(x: Tensor) -> Any:
            return fori_loop(0, 2, lambda i, x: scaled_sine(x + i), x)

        return cond(x.sum() > 0, loop, torch.cos, x).sum()

    program = specialize(grad(f), backend="aot_eager")
    for x in (torch.rand(3), -torch.rand(3)):
        torch.testing.assert_close(program(x), grad(f)(x))


def _two_carries(x: Tensor, first: Tensor, w: Tensor) -> Any:
    """The carries: one that does not require grad at first, and depends on another that does."""
    _, count, out = while_loop(
        lambda c, i, d: (c.sum() < 9) & (i < 5),
        lambda c, i, d: (c * 1.5, i + 1, d * 0.5 + c.cos() * w * d),
        (x, torch.tensor(0), first),
    )
    return (out * count).sin()


# The loop captures its other values, so that only some carries require grad.
TANGENTS: dict[str, Callable[..., Any]] = {
    "jvp": lambda x, d, w: jvp(lambda x: _two_carries(x, d, w), (x,), (w,)),
    "jvp by a captured value": lambda x, d, w: jvp(lambda w: _two_carries(x, d, w), (w,), (x,)),
    "jvp by all": lambda x, d, w: jvp(_two_carries, (x, d, w), (w, x, d)),
    "jacfwd": lambda x, d, w: jacfwd(lambda x: _two_carries(x, d, w))(x),
    "vmap of jvp": lambda x, d, w: vmap(lambda x: jvp(lambda x: _two_carries(x, d, w), (x,), (w,)))(
        torch.stack([x, x * 3, x * 50])
    ),
    "jvp of vmap": lambda x, d, w: jvp(
        vmap(lambda x: _two_carries(x, d, w)), (x.outer(x),), (w.outer(x),)
    ),
    "grad": lambda x, d, w: grad(lambda x: _two_carries(x, d, w).sum())(x),
    "grad of jvp": lambda x, d, w: grad(
        lambda x: jvp(lambda x: _two_carries(x, d, w), (x,), (w,))[1].sum()
    )(x),
    "grad of a branch": lambda x, d, w: grad(
        lambda x: cond(x.sum() > 0, lambda y: _two_carries(y, d, w), torch.sin, x).sum()
    )(x),
}


@pytest.mark.parametrize("name", TANGENTS)
def test_tangents_and_cotangents_of_compiled_loops(name: str) -> None:
    f = TANGENTS[name]
    x, d, w = torch.rand(3) + 0.1, torch.rand(3), torch.rand(3)
    torch.testing.assert_close(specialize(f, backend="aot_eager")(x, d, w), f(x, d, w))


@pytest.mark.parametrize("in_branch", [False, True])
def test_gradients_by_torch_of_compiled_loops_with_carries_that_do_not_require_grad(
    in_branch: bool,
) -> None:
    d, w = torch.rand(3), torch.rand(3)

    def f(x: Tensor) -> Any:
        if in_branch:
            return cond(x.sum() > 0, lambda y: _two_carries(y, d, w), torch.sin, x)
        return _two_carries(x, d, w)

    compiled, x = specialize(f, backend="aot_eager"), torch.rand(3) + 0.1
    torch.testing.assert_close(grad(lambda x: compiled(x).sum())(x), grad(lambda x: f(x).sum())(x))


def in_another_loop(x: Tensor) -> Any:
    def body(c: Tensor) -> Any:
        return while_loop(lambda d: d.sum() < c.sum() + 1, lambda d: d * 1.3, c)

    return while_loop(lambda c: c.sum() < 20, body, x)


@pytest.mark.parametrize(
    ("loop", "backend"),
    [
        *((loop, "aot_eager") for loop in (newton, in_another_loop)),
        pytest.param(newton, "inductor", marks=needs_gcc),
        pytest.param(in_another_loop, "inductor", marks=[needs_gcc, pytest.mark.slow]),
    ],
)
def test_a_backward_pass_outside_of_a_compiled_loop(loop: Any, backend: str) -> None:
    gradients = []
    start = torch.rand(3) + 1
    for f in (loop, specialize(loop, backend=backend)):
        x = start.clone().requires_grad_()
        f(x).sin().sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_derivatives_of_compiled_loops_of_any_number_of_steps(steps: int) -> None:
    def f(x: Tensor, n: Tensor) -> Any:
        return fori_loop(0, n, lambda i, c: (c * x).sin() + x, x.cos())

    x, n = torch.rand(3) + 0.5, torch.tensor(steps)

    def derivative(x: Tensor, n: Tensor) -> Any:
        return grad(lambda x: f(x, n).sin().sum())(x)

    compiled = specialize(f, backend="aot_eager")
    torch.testing.assert_close(specialize(derivative, backend="aot_eager")(x, n), derivative(x, n))
    torch.testing.assert_close(grad(lambda x: compiled(x, n).sin().sum())(x), derivative(x, n))
