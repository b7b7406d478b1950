"""Functions with custom rules in files: a loaded function has the same derivatives.

The reference is the function itself, under each transform that uses a rule.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

import tsfunc
from tests.program.saved_functions import (
    MADE,
    Scaling,
    Turning,
    clipped,
    exponential,
    ruled,
    solving,
)
from tsfunc import Dim, grad, hessian, jacfwd, jvp, load, specialize, vmap
from tsfunc import MetaTensorType as Meta
from tsfunc.errors import UndefinedDerivativeError

KEPT = Path(__file__).parent / "files"
COLUMN = torch.tensor([1.0, -2.0, 3.0])


def saved(f: Any, folder: Path, *args: Any, dims: Any = None) -> Any:
    """Return a function specialized for a call, saved and loaded."""
    made = specialize(f, dims)
    made(*args)
    made.save(folder / "f.tsf")
    return load(folder / "f.tsf")


def applied(function: Any, *args: Any) -> Any:
    return function.apply(*args)


# --- functions, each with a rule that differs from the derivatives of its operators


@functools.partial(tsfunc.custom_vjp, nondiff_argnums=(1,))
def power(x: Tensor, k: int) -> Tensor:
    return x**k


power.defvjp(lambda x, k: (x**k, (x,)), lambda k, kept, ct: (2 * k * ct * kept[0] ** (k - 1),))


@tsfunc.custom_vjp
def of_tree(tree: Any) -> Any:
    return {"a": tree["x"] * 2, "b": (tree["y"].sum(), 3)}


of_tree.defvjp(
    lambda tree: (of_tree(tree), (tree["y"].shape[0], "kept")),
    lambda kept, ct: ({"x": 3 * ct["a"], "y": 5 * ct["b"][0].expand(kept[0])},),
)


@tsfunc.custom_jvp
def times(x: Tensor, y: Tensor) -> Tensor:
    return x * y


times.defjvps(lambda t, ans, x, y: t * y, lambda t, ans, x, y: 3 * x * t)


@tsfunc.custom_gradient
def halved(x: Tensor) -> Any:
    return x.sin(), lambda ct: ct * x.cos() / 2


class Pair(torch.autograd.Function):
    """A function of two results, one of which may have no cotangent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, flag: bool = True) -> Any:
        ctx.save_for_backward(x, y)
        ctx.set_materialize_grads(False)
        return x * y, x + y

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        x, y = ctx.saved_tensors
        found: list[Any] = [None, None]
        if cotangents[0] is not None:
            found = [cotangents[0] * y, cotangents[0] * x]
        if cotangents[1] is not None:
            found = [cotangents[1] if pulled is None else pulled + cotangents[1]
                     for pulled in found]  # fmt: skip
        return (*[f if n else None for f, n in zip(found, ctx.needs_input_grad, strict=False)],
                None)  # fmt: skip


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return 5 * cotangents[0]


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * cotangents[0] * x.cos()


def of_closed(x: Tensor, w: Tensor) -> Tensor:
    """A function with a rule that closes over a traced tensor, and over one from outside."""

    @tsfunc.custom_vjp
    def f(y: Tensor) -> Tensor:
        return y * w.detach() * COLUMN[0]

    f.defvjp(lambda y: (f(y), y.shape), lambda shape, ct: (7 * ct.expand(shape) * COLUMN[1],))
    return f(x)


def linear(a: Tensor, b: Tensor) -> Any:
    def solver(of: Tensor) -> Any:
        return lambda matvec, b: torch.linalg.solve(of, b)

    a = a + 4 * torch.eye(a.shape[0])
    return tsfunc.linear_solve(lambda x: a @ x, b, solver(a), solver(a.T))


def root(a: Tensor) -> Any:
    def newton(f: Any, x: Tensor) -> Any:
        return tsfunc.fori_loop(0, 15, lambda i, x: x - f(x) / (2 * x), x)

    return tsfunc.implicit_root(lambda x: x * x - a, torch.ones_like(a), newton)


N, ROWS = {"x": Meta(["n"])}, {"x": Meta(["n", 3])}
BOTH = {"x": Meta(["n"]), "y": Meta(["n"])}
X, Y, M = torch.rand(5) + 0.5, torch.rand(5) + 1, torch.randn(4, 3)

FUNCTIONS: dict[str, tuple[Callable[..., Any], Any, tuple[Tensor, ...]]] = {
    "vjp": (lambda x: clipped(x) * 2, ROWS, (M,)),
    "vjp, fixed argument": (lambda x: power(x, 3) + power(x, 2), N, (X,)),
    "vjp, closed over": (of_closed, {"x": Meta(["n"]), "w": Meta(["n"])}, (X, Y)),
    "gradient": (lambda x: halved(x), N, (X,)),
    "jvp": (lambda x: exponential(x) * 2, ROWS, (M,)),
    "jvp, two": (lambda x, y: times(x, y), BOTH, (X, Y)),
    "jvp in a vmap": (lambda x: vmap(lambda x: exponential(x).sum())(x), ROWS, (M,)),
    "jvp in a vmap of a gradient": (
        lambda x: vmap(grad(lambda x: exponential(x).sum()))(x), ROWS, (M,),
    ),
    "old": (lambda x: applied(Scaling, x, 3.0)[0] * 2, ROWS, (M,)),
    "new": (lambda x: applied(Turning, x, x.shape[0]) * 2, ROWS, (M,)),
    "pair": (lambda x, y: applied(Pair, x, y, False)[0] * applied(Pair, x, y)[1], BOTH, (X, Y)),
    "in place": (lambda x: applied(InPlace, x.clone()) * 3, N, (X,)),
    "once": (lambda x: applied(Once, x), N, (X,)),
    "in control flow": (
        lambda x: tsfunc.cond(x.sum() > 0, lambda x: halved(x) * clipped(x), torch.sin, x), N, (X,),
    ),
    "in a scan": (
        lambda x: tsfunc.scan(lambda c, r: (c + r.sum(), halved(r)), torch.zeros(()), x)[1],
        ROWS, (M,),
    ),
    "in a checkpoint": (tsfunc.checkpoint(lambda x: halved(x) * exponential(x)), N, (X,)),
    "of an expression": (
        lambda x: applied(Turning, x.reshape(-1), 2) * 2, {"x": Meta(["2*n", 3])}, (M,),
    ),
    "linear": (linear, {"a": Meta(["n", "n"]), "b": Meta(["n"])}, (torch.rand(3, 3), Y[:3])),
    "root": (root, {"a": Meta(["n"])}, (X,)),
}  # fmt: skip


def total(f: Any) -> Any:
    return lambda *args: f(*args).sin().sum()


def stacked(*args: Tensor) -> list[Tensor]:
    return [torch.stack([x, x * 1.5, x + 0.25]) for x in args]


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "value": lambda f, *args: f(*args),
    "grad": lambda f, *args: grad(total(f))(*args),
    "grad of grad": lambda f, *args: grad(lambda *a: grad(total(f))(*a).sin().sum())(*args),
    "jvp": lambda f, *args: jvp(f, args, tuple(x.cos() for x in args)),
    "vmap": lambda f, *args: vmap(f)(*stacked(*args)),
    "vmap of one": lambda f, *args: vmap(f)(*[x[None] for x in args]),
    "vmap of the first": lambda f, x, *args: vmap(f, (0, *[None] * len(args)))(
        torch.stack([x, x + 1]), *args
    ),
    "vmap of vmap": lambda f, *args: vmap(vmap(f))(*stacked(*stacked(*args))),
    "vmap of grad": lambda f, *args: vmap(grad(total(f)))(*stacked(*args)),
    "jacfwd": lambda f, *args: jacfwd(f)(*args),
    "hessian": lambda f, *args: hessian(total(f))(*args),
}
# A refusal by the function itself: a derivative that its rule does not have.
REFUSED = {
    ("once", "grad of grad"), ("once", "jvp"), ("once", "jacfwd"), ("once", "hessian"),
    # A fault of the function itself, with and without a program.
    ("jvp in a vmap", "hessian"), ("jvp in a vmap of a gradient", "hessian"),
}  # fmt: skip


QUICK = {"vjp", "jvp", "new", "once"}  # the others together take long


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FUNCTIONS],
)
def test_as_the_function_itself(name: str, tmp_path: Path) -> None:
    f, dims, args = FUNCTIONS[name]
    loaded = saved(f, tmp_path, *args, dims=dims)
    for transform, run in TRANSFORMS.items():
        if (name, transform) not in REFUSED:
            _same(transform, run(loaded, *args), run(f, *args))
    loaded.save(tmp_path / "again.tsf", exact=True)
    again = load(tmp_path / "again.tsf")
    for transform in ("value", "grad"):
        _same(transform, TRANSFORMS[transform](again, *args), TRANSFORMS[transform](f, *args))


def _same(what: str, got: Any, want: Any) -> None:
    try:
        torch.testing.assert_close(got, want)
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from None


@pytest.mark.parametrize(
    "name", ["new", *(pytest.param(name, marks=pytest.mark.slow) for name in ("vjp", "jvp", "old"))]
)
def test_other_sizes(name: str, tmp_path: Path) -> None:
    f, dims, args = FUNCTIONS[name]
    loaded = saved(f, tmp_path, *args, dims=dims)
    for n in (2, 3, 9):
        x = torch.randn(n, 3)
        for transform in ("value", "grad", "vmap of grad"):
            run = TRANSFORMS[transform]
            _same(transform, run(loaded, x), run(f, x))


def test_trees(tmp_path: Path) -> None:
    def f(x: Tensor, y: Tensor) -> Any:
        found = of_tree({"x": x, "y": y})
        return found["a"].sum() * found["b"][0] * found["b"][1]

    loaded = saved(f, tmp_path, X, M[0], dims={"x": Meta(["n"]), "y": Meta(["m"])})
    torch.testing.assert_close(
        grad(loaded, argnums=(0, 1))(X, M[0]), grad(f, argnums=(0, 1))(X, M[0])
    )


def words_of(call: Any) -> str:
    with pytest.raises(UndefinedDerivativeError) as raised:
        call()
    return str(raised.value)


def test_refusals_of_the_rule(tmp_path: Path) -> None:
    def once(x: Tensor) -> Any:
        return applied(Once, x).sum()

    loaded = saved(once, tmp_path, X)
    slope = saved(grad(once), tmp_path, X)
    torch.testing.assert_close(slope(X), 2 * X.cos())
    refused = [
        words_of(lambda each=each: grad(lambda x: each(x).sum())(X))
        for each in (grad(once), grad(loaded), slope)
    ]
    assert "marked with @once_differentiable" in refused[0]
    assert refused == refused[:1] * 3
    fixed = saved(lambda x, w: of_closed(x, w) + power(w, 2), tmp_path, X, Y)
    assert torch.equal(fixed(X, Y), of_closed(X, Y) + Y**2)


def test_a_function_without_a_derivative(tmp_path: Path) -> None:
    class Alone(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

    loaded = saved(lambda x: applied(Alone, x), tmp_path, X)
    torch.testing.assert_close(loaded(X), X * 2)
    with pytest.raises(NotImplementedError, match="backward"):
        grad(total(loaded))(X)


@tsfunc.custom_vjp
def choosing_vjp(x: Tensor) -> Tensor:
    return x * 2


def by_sign(of: Tensor, x: Tensor) -> Any:
    return tsfunc.cond(of.sum() > 0, lambda x: x * 3, lambda x: x * 5, x)


choosing_vjp.defvjp(lambda x: (x * 2, x), lambda x, ct: (by_sign(x, ct),))


@tsfunc.custom_jvp
def choosing_jvp(x: Tensor) -> Tensor:
    return x * 2


choosing_jvp.defjvp(lambda primals, tangents: (primals[0] * 2, by_sign(primals[0], tangents[0])))


class Choosing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return by_sign(ctx.saved_tensors[0], cotangents[0])


CHOOSING: dict[str, Any] = {
    "vjp": choosing_vjp, "jvp": choosing_jvp,
    "methods": functools.partial(applied, Choosing),
}  # fmt: skip


class TestRefusals:
    def test_a_rule_that_looks_at_data(self, tmp_path: Path) -> None:
        class Looking(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x * 2

            @staticmethod
            def backward(ctx: Any, *cotangents: Any) -> Any:
                return cotangents[0] * 2 if cotangents[0].sum() > 0 else cotangents[0]

        def f(x: Tensor) -> Any:
            return applied(Looking, x)

        with pytest.raises(ValueError) as caught:
            saved(f, tmp_path, X)
        said = str(caught.value)
        here = re.escape(__file__)
        assert re.match(rf"save\(f\): a file can't hold Looking \(at {here}:\d+, in applied", said)
        assert "of which backward can't be traced into a graph without Python: a traced" in said
        assert re.search(rf"\(__bool__, at {here}:\d+, in backward: return cotangents", said)
        assert "Write a choice with tsfunc.cond(pred, true_fn, false_fn, *operands)" in said

    @pytest.mark.parametrize("kind", ["vjp", "jvp", "methods"])
    def test_a_choice_by_data_that_is_written_as_one_is_saved(
        self, kind: str, tmp_path: Path
    ) -> None:
        """The function follows the error's advice: ``cond`` in place of ``if``."""
        f = CHOOSING[kind]
        loaded = saved(lambda x: f(x), tmp_path, X, dims=N)
        x = torch.stack([X, -X])
        torch.testing.assert_close(vmap(loaded)(x), vmap(f)(x))
        torch.testing.assert_close(vmap(grad(total(loaded)))(x), vmap(grad(total(f)))(x))

    def test_a_rule_without_end(self, tmp_path: Path) -> None:
        @functools.partial(tsfunc.custom_jvp, nondiff_argnums=(0,))
        def bessel(k: int, x: Tensor) -> Tensor:
            return torch.sin(k * x)

        @bessel.defjvp
        def rule(k: int, primals: Any, tangents: Any) -> Any:
            (x,) = primals
            slope = (bessel(k - 1, x) - bessel(k + 1, x)) / 2
            return bessel(k, x), slope * tangents[0]

        with pytest.raises(ValueError, match="rules, which call others, without end"):
            saved(lambda x: bessel(2, x), tmp_path, X)

    def test_a_rule_that_reads_sizes(self, tmp_path: Path) -> None:
        @tsfunc.custom_vjp
        def f(x: Tensor) -> Tensor:
            return x * 2

        f.defvjp(lambda x: (x * 2, x), lambda x, ct: (ct * (2 if x.shape[0] > 4 else 3),))
        with pytest.raises(ValueError, match="of which the bwd rule can't be traced") as caught:
            saved(lambda x: f(x), tmp_path, X, dims=N)
        assert re.search(
            rf"  n > 4  \(at {re.escape(__file__)}:\d+, in <lambda>", str(caught.value)
        )
        offered = eval(str(caught.value).splitlines()[-1], {**vars(tsfunc), "torch": torch})
        for loaded in (
            saved(lambda x: f(x), tmp_path, X, dims=offered),
            saved(lambda x: f(x), tmp_path, X),
        ):
            torch.testing.assert_close(grad(total(loaded))(X), grad(total(f))(X))

    def test_a_rule_of_two_descriptors_has_the_bounds_of_each(self, tmp_path: Path) -> None:
        @tsfunc.custom_vjp
        def f(x: Tensor) -> Tensor:
            return x * 2

        f.defvjp(lambda x: (x * 2, x), lambda x, ct: (ct * (2 if x.shape[0] > 4 else 3),))
        made = specialize(
            lambda x: f(x),
            [{"x": Meta([Dim("n", max=4)])}, {"x": Meta([Dim("n", min=5)])}],
        )
        inputs = [torch.randn(n) for n in (3, 4, 5, 9)]
        for x in inputs:
            made(x)
        made.save(tmp_path / "f.tsf")
        loaded = load(tmp_path / "f.tsf")
        for x in inputs:
            torch.testing.assert_close(grad(total(loaded))(x), grad(total(f))(x))

    @pytest.mark.parametrize("kind", ["vmap", "sequential", "method", "in a rule"])
    def test_a_batching_rule_of_the_user(self, kind: str, tmp_path: Path) -> None:
        @tsfunc.custom_vmap
        def shifted(x: Tensor) -> Tensor:
            return x.sin()

        @shifted.def_vmap
        def _(size: int, batched: Any, x: Tensor) -> Any:
            return x.sin() * size, True

        @tsfunc.sequential_vmap
        def doubled(x: Tensor) -> Tensor:
            return x.sin() * 2

        class Batched(Turning):
            @staticmethod
            def vmap(info: Any, in_dims: Any, x: Tensor, size: int) -> Any:
                return applied(Turning, x, size), in_dims[0]

        @tsfunc.custom_vjp
        def ruled(x: Tensor) -> Tensor:
            return x * 2

        ruled.defvjp(lambda x: (x * 2, x), lambda x, ct: (ct * shifted(x),))
        functions: dict[str, tuple[str, Any]] = {
            "vmap": ("shifted", lambda x: shifted(x)),
            "sequential": ("doubled", lambda x: doubled(x)),
            "method": ("Batched", lambda x: applied(Batched, x, 2)),
            "in a rule": ("shifted", lambda x: ruled(x)),
        }
        name, f = functions[kind]
        with pytest.raises(ValueError, match="which has a batching rule of its own") as caught:
            saved(f, tmp_path, X, dims=N)
        here = re.escape(__file__)
        assert re.search(rf"can't hold {name} \(at {here}:\d+, in ", str(caught.value))
        torch.testing.assert_close(vmap(specialize(f))(X[None]), vmap(f)(X[None]))
        if kind != "in a rule":  # a vmap in the program has called the rule in the trace
            loaded = saved(vmap(f), tmp_path, X[None])
            torch.testing.assert_close(loaded(X[None]), vmap(f)(X[None]))

    def test_a_generator_among_the_arguments(self, tmp_path: Path) -> None:
        def f(x: Tensor, source: torch.Generator) -> Tensor:
            return x + torch.rand(3, generator=source)

        with pytest.raises(ValueError, match=r"the argument args\[1\], a Generator"):
            saved(f, tmp_path, COLUMN, torch.Generator())

    def test_other_settings(self, tmp_path: Path) -> None:
        f = specialize(lambda x: halved(x))
        with torch.autocast("cpu"):
            f(X)
        with pytest.raises(ValueError, match="called under another autocast than that of now"):
            f.save(tmp_path / "f.tsf")


def test_generators(tmp_path: Path) -> None:
    """Each loaded function has its own generators, in the states that they were in."""
    source = torch.Generator().manual_seed(3)

    def f(x: Tensor) -> Any:
        more = tsfunc.cond(x.sum() > 0, lambda x: x + torch.rand(3, generator=source), torch.sin, x)
        return more, torch.randn(x.shape, generator=source)

    made = specialize(f, {"x": Meta([3])})
    made(COLUMN)
    made.save(tmp_path / "f.tsf")
    one, other = load(tmp_path / "f.tsf"), load(tmp_path / "f.tsf")
    for _ in range(3):
        want = made(COLUMN)
        torch.testing.assert_close(one(COLUMN), want, rtol=0, atol=0)
        torch.testing.assert_close(other(COLUMN), want, rtol=0, atol=0)
    one.save(tmp_path / "f.tsf")
    torch.testing.assert_close(load(tmp_path / "f.tsf")(COLUMN), made(COLUMN), rtol=0, atol=0)


def test_which_arguments_require_grad(tmp_path: Path) -> None:
    """A derivative by some arguments of a function that was saved without any."""

    def f(tree: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return (tree["w"] * x + tree["b"] * y).sin().sum()

    tree = {"w": X, "b": Y}
    loaded = saved(f, tmp_path, tree, X, Y)
    for argnums in (0, 1, (0, 2), (1, 2)):
        got, want = (grad(each, argnums=argnums)(tree, X, Y) for each in (loaded, f))
        torch.testing.assert_close(got, want)


class TestKeptFiles:
    """Files in the repository, written by earlier code, load and have the same results."""

    def test_a_kept_file_with_rules_loads(self) -> None:
        loaded = load(KEPT / "rules.tsf")
        for n in (4, 7):
            x = torch.randn(n, 3)
            *got, noise = loaded(x)
            *want, _ = ruled(x)
            torch.testing.assert_close(got, want)
            assert noise.shape == x.shape
            slopes = [
                vmap(
                    grad(lambda x, f=f: sum(f(x)[i].sum() for i in (0, 1, 3, 4))), randomness="same"
                )(x[None])
                for f in (loaded, ruled)
            ]
            torch.testing.assert_close(*slopes)
        loaded.program.verify()

    def test_a_kept_file_with_equations_loads(self) -> None:
        loaded = load(KEPT / "equations.tsf")
        a, b = torch.rand(4, 4) + 4 * torch.eye(4), torch.rand(4)
        torch.testing.assert_close(loaded(a, b), solving(a, b))


def test_the_order_in_which_functions_are_written(tmp_path: Path) -> None:
    """Repeated saves of a function write the same file."""
    found = []
    for name in ("a", "b"):
        MADE["solving"][0]().save(tmp_path / name, exact=True)
        found.append((tmp_path / name).read_bytes())
    assert found[0] == found[1]
