"""torch's own control flow inside of our transforms: torch.cond and similar functions."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import tsfunc
from tsfunc import MetaTensorType as Meta

SCALE = torch.tensor([0.5, 2.0, 1.5])


def chosen(x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda y: y.sin() * SCALE, lambda y: y.cos() + SCALE, (x,))


def chosen_of_nothing(x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda: x * 2, lambda: x - SCALE)


def doubled(x: Tensor) -> Tensor:
    found = while_loop(
        lambda i, y: (i < 3) & (y.sum() < 40), lambda i, y: (i + 1, y * 2), (torch.tensor(0), x)
    )
    return found[1]


def running(x: Tensor) -> Tensor:
    last, ys = scan(lambda c, y: (c + y, c * y), x[0] * SCALE, x.outer(SCALE))
    return last + ys.sum(0)


def each(x: Tensor) -> Tensor:
    along: Any = torch_map
    return along(lambda row, y: row.sin() + y, x.outer(SCALE), SCALE)


def products(x: Tensor) -> Tensor:
    return associative_scan(torch.mul, x.outer(SCALE), 0, combine_mode="generic")


# The equivalent in Python for each, since torch.func does not support torch's operators.
PLAIN: dict[Callable[..., Any], Callable[..., Any]] = {
    chosen: lambda x: x.sin() * SCALE if x.sum() > 0 else x.cos() + SCALE,
    chosen_of_nothing: lambda x: x * 2 if x.sum() > 0 else x - SCALE,
    doubled: lambda x: next(x * 2**i for i in range(4) if i == 3 or (x * 2**i).sum() >= 40),
    running: lambda x: (
        (x[0] + x.sum()) * SCALE
        + sum((x[0] + x[:i].sum()) * x[i] * SCALE * SCALE for i in range(len(x)))
    ),
    each: lambda x: x.outer(SCALE).sin() + SCALE,
    products: lambda x: x.outer(SCALE).cumprod(0),
}
INPUTS = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([-1.0, 0.5, -3.0]), torch.full((3,), 30.0)]


@pytest.mark.parametrize("f", PLAIN, ids=lambda f: f.__name__)
class TestInsideOf:
    def test_specialize(self, f: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
        program = tsfunc.specialize(f)
        for x in INPUTS:
            torch.testing.assert_close(program(x), PLAIN[f](x))
        assert program.cache_info().programs == 1
        program.save(tmp_path / "f.tsf")
        torch.testing.assert_close(tsfunc.load(tmp_path / "f.tsf")(INPUTS[1]), PLAIN[f](INPUTS[1]))

    def test_vmap(self, f: Callable[[Tensor], Tensor]) -> None:
        want = torch.stack([PLAIN[f](x) for x in INPUTS])
        torch.testing.assert_close(tsfunc.vmap(f)(torch.stack(INPUTS)), want)
        torch.testing.assert_close(tsfunc.specialize(tsfunc.vmap(f))(torch.stack(INPUTS)), want)

    def test_derivatives(self, f: Callable[[Tensor], Tensor]) -> None:
        def total(g: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            return lambda x: (g(x) ** 2).sum()

        for x in INPUTS[:2]:
            want = torch.func.grad(total(PLAIN[f]))(x)
            torch.testing.assert_close(tsfunc.vmap(tsfunc.grad(total(f)))(x[None])[0], want)
            torch.testing.assert_close(tsfunc.grad(total(tsfunc.specialize(f)))(x), want)
            torch.testing.assert_close(tsfunc.specialize(tsfunc.grad(total(f)))(x), want)

    def test_derivatives_of_plain_tensors(self, f: Callable[[Tensor], Tensor]) -> None:
        """torch's own operators drop tangents and second derivatives without an error."""

        def total(g: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            return lambda x: (g(x) ** 2).sum()

        by_rows = torch.autograd.functional
        for x in INPUTS[:2]:
            t = torch.randn(3)
            want = by_rows.jacobian(PLAIN[f], x) @ t
            torch.testing.assert_close(tsfunc.jvp(f, (x,), (t,)), (PLAIN[f](x), want))
            torch.testing.assert_close(tsfunc.linearize(f, x)[1](t), want)
            want = by_rows.hessian(total(PLAIN[f]), x) @ t
            torch.testing.assert_close(tsfunc.hvp(total(f), (x,), (t,)), want)
            torch.testing.assert_close(tsfunc.linearize(tsfunc.grad(total(f)), x)[1](t), want)
            torch.testing.assert_close(tsfunc.jacrev(tsfunc.grad(total(f)))(x) @ t, want)
            torch.testing.assert_close(tsfunc.vjp(tsfunc.grad(total(f)), x)[1](t)[0], want)


SIZES = [torch.tensor([1.0, 0.5]), torch.tensor([-0.7, 0.2])]


def _branch(x: Tensor) -> Any:
    return tsfunc.cond(x.sum() > 0, lambda y: y**3, lambda y: y.sin() * y, x).sum()


def _loop(x: Tensor) -> Any:
    return tsfunc.while_loop(lambda c: c.sum() < 9, lambda c: c + c**2, x).sum()


def _steps(x: Tensor) -> Any:
    return tsfunc.scan(lambda c, y: (c * y, c * y * y), x, torch.stack([x, x]))[0].sum()


# Derivatives by plain tensors up to the third, as functions of the transforms.
ORDERS: dict[str, Callable[[Any, Callable[[Tensor], Any], Tensor], Any]] = {
    "grad(grad)": lambda t, f, x: t.grad(lambda y: (t.grad(f)(y) * y).sum())(x),
    "grad(grad(grad))": lambda t, f, x: t.grad(
        lambda z: (t.grad(lambda y: (t.grad(f)(y) * y).sum())(z) * z).sum()
    )(x),
    "jvp(grad)": lambda t, f, x: t.jvp(t.grad(f), (x,), (x,))[1],
    "jvp(jvp)": lambda t, f, x: t.jvp(lambda y: t.jvp(f, (y,), (x,))[1], (x,), (x,))[1],
    "jacrev(jacrev)": lambda t, f, x: t.jacrev(t.jacrev(f))(x),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("f", [chosen, running, each, products], ids=lambda f: f.__name__)
def test_derivatives_of_derivatives(f: Callable[[Tensor], Tensor], order: str) -> None:
    for x in INPUTS[:2]:
        got = ORDERS[order](tsfunc, lambda y: (f(y) ** 2).sum(), x)
        want = ORDERS[order](torch.func, lambda y: (PLAIN[f](y) ** 2).sum(), x)
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("f", [_branch, _loop, _steps])
def test_derivatives_of_derivatives_of_exported_programs(f: Any, order: str) -> None:
    for x in SIZES[:1] if f is _loop else SIZES:
        program = tsfunc.specialize(f)
        program(x)
        exported = program.to_exported_program().module()
        want = ORDERS[order](tsfunc, f, x)
        torch.testing.assert_close(ORDERS[order](tsfunc, exported, x), want)
        module = program.graph_module
        torch.testing.assert_close(ORDERS[order](tsfunc, lambda y: module(y)[0], x), want)  # noqa: B023


def test_the_size_of_a_call_chooses() -> None:
    def f(x: Tensor) -> Any:
        return torch.cond(x.shape[0] > 4, torch.sin, torch.cos, (x,))

    g = tsfunc.specialize(f, {"x": Meta(["n", 2])})
    for n in (3, 9):
        x = torch.randn(n, 2)
        torch.testing.assert_close(g(x), x.sin() if n > 4 else x.cos())
    assert g.cache_info().programs == 1
    branches = [torch.sin, torch.cos, torch.exp]
    h = tsfunc.specialize(lambda x: tsfunc.switch(x.shape[0] % 3, branches, x), {"x": Meta(["n"])})
    for n, want in ((3, torch.sin), (4, torch.cos), (8, torch.exp)):
        torch.testing.assert_close(h(torch.ones(n)), want(torch.ones(n)))


def test_a_size_of_data_chooses(tmp_path: Path) -> None:
    def f(x: Tensor) -> Any:
        found = x.nonzero()
        return torch.cond(found.shape[0] > 1, lambda y: y + 1, lambda y: y - 1, (found,))

    g = tsfunc.specialize(f)
    g(torch.ones(3))
    g.save(tmp_path / "g.tsf")
    for h in (g, tsfunc.load(tmp_path / "g.tsf")):
        for x in (torch.tensor([1.0, 0, 2]), torch.tensor([0, 0, 1.0])):
            found = x.nonzero()
            torch.testing.assert_close(h(x), found + 1 if len(found) > 1 else found - 1)


def test_modules_with_torchs_operators_are_functions_as_others() -> None:
    module = tsfunc.specialize(chosen)
    module(INPUTS[0])
    again = tsfunc.specialize(module.graph_module)
    exported = module.to_exported_program()
    file = io.BytesIO()
    torch.export.save(exported, file)
    for x in INPUTS[:2]:
        torch.testing.assert_close(again(x)[0], PLAIN[chosen](x))
        torch.testing.assert_close(tsfunc.specialize(exported.module())(x), PLAIN[chosen](x))
        torch.testing.assert_close(
            tsfunc.grad(lambda x: again(x)[0].sum())(x),
            torch.func.grad(lambda x: PLAIN[chosen](x).sum())(x),
        )


def test_outside_of_transforms_torchs_own_runs() -> None:
    for x in INPUTS[:2]:
        torch.testing.assert_close(torch.compile(chosen, backend="eager")(x), PLAIN[chosen](x))
        torch.testing.assert_close(chosen(x), PLAIN[chosen](x))


@pytest.mark.parametrize("reverse", [False, True])
def test_an_associative_scan_over_a_named_dim(reverse: bool) -> None:
    """torch's own associative scan halves the elements until one is left."""

    def f(x: Tensor, y: Tensor) -> Any:
        def step(a: Any, b: Any) -> Any:
            return a[0] * b[0], a[1] * b[0] + b[1]

        return associative_scan(step, (x, y), 0, reverse=reverse, combine_mode="generic")

    like = Meta(["n", 3])
    g = tsfunc.specialize(f, {"x": like, "y": like})
    for n in (6, 9, 2, 1, 21):
        x, y = torch.rand(2, n, 3)
        torch.testing.assert_close(g(x, y), f(x, y))
    assert g.cache_info().programs == 2  # one program is for n = 1


BODIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "vmap": torch.vmap(lambda a, b: a * b),
    "vmap that closes over": lambda a, b: torch.vmap(lambda z: (z * a).sin().sum())(b[None])[0],
    "grad": lambda a, b: torch.func.grad(lambda z: (z * a).sin().sum())(b).sum(),
    "jacrev": lambda a, b: torch.func.jacrev(lambda z: z.sin() * a)(b).sum(0),
}


@pytest.mark.parametrize("name", BODIES)
def test_torch_func_in_bodies(name: str) -> None:
    """Tensors of torch.func's transforms do not count as tensors from outside of the body."""
    body = BODIES[name]

    def f(x: Tensor) -> Any:
        last, ys = tsfunc.scan(lambda c, y: (body(c, y) + c, c), x[0], x)
        return tsfunc.cond(x.sum() > 0, lambda: ys + body(x[0], x[1]), lambda: ys), last

    g = tsfunc.specialize(f)
    for x in (torch.rand(5, 3), -torch.rand(5, 3)):
        torch.testing.assert_close(g(x), f(x))
    assert g.cache_info().programs == 1
