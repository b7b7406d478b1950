"""Every operator of control flow under every transform equals the plain Python loop.

A row is an operator with a kind of body: pytree operands, captured tensors, writes in place; and
the same function in plain Python. A column is a transform of the function. Each cell draws the
batch dims of its vmaps, the mapped tensors, and the examples, from the seed in pytest's header
(``--hypothesis-seed``).
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tsfunc
from tsfunc import grad, jvp, specialize, vmap

Fn = Callable[[torch.Tensor], Any]
W = torch.tensor([0.5, -0.25, 1.5], dtype=torch.float64)


def _cond_dense(x: torch.Tensor) -> Any:
    def yes(tree: Any) -> Any:
        return {"a": tree["x"].sin(), "b": (tree["y"] * 2,)}

    def no(tree: Any) -> Any:
        return {"a": tree["x"] ** 2, "b": (tree["y"] - tree["x"],)}

    out = tsfunc.cond(x.sum() > 0, yes, no, {"x": x, "y": x * W})
    return out["a"].sum() + (out["b"][0] * out["b"][0]).sum()


def _cond_dense_plain(x: torch.Tensor) -> Any:
    y = x * W
    if x.sum() > 0:
        return x.sin().sum() + (4 * y * y).sum()
    return (x**2).sum() + ((y - x) * (y - x)).sum()


def _cond_closed(x: torch.Tensor) -> Any:
    return tsfunc.cond(x.sum() > 0, lambda: (x * W).cos().sum(), lambda: (x**3).sum())


def _cond_closed_plain(x: torch.Tensor) -> Any:
    return (x * W).cos().sum() if x.sum() > 0 else (x**3).sum()


def _cond_inplace(x: torch.Tensor) -> Any:
    def yes(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y.mul_(x).add_(1)
        return y.sum()

    def no(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        y[0] = x[1].sin()
        return y.prod()

    return tsfunc.cond(x.sum() > 0, yes, no, x)


def _cond_inplace_plain(x: torch.Tensor) -> Any:
    if x.sum() > 0:
        return (x * x + 1).sum()
    return x[1].sin() * x[1] * x[2]


def _switch(kind: str) -> Fn:
    def f(x: torch.Tensor) -> Any:
        index = (x.sum() > -1).long() + (x.sum() > 1).long()
        y = x * W

        def dense(i: int) -> Callable[[Any], Any]:
            return lambda pair: [pair[0] * (i + 1), pair[1].sin()]

        def closed(i: int) -> Callable[[], Any]:
            return lambda: [x * (i + 1), y.sin()]

        def inplace(i: int) -> Callable[[Any], Any]:
            def branch(pair: Any) -> Any:
                first = pair[0].clone()
                first *= i + 1
                return [first, pair[1].clone().sin_()]

            return branch

        if kind == "closed":
            out = tsfunc.switch(index, [closed(i) for i in range(3)])
        else:
            made = dense if kind == "dense" else inplace
            out = tsfunc.switch(index, [made(i) for i in range(3)], [x, y])
        return (out[0] * out[1]).sum()

    return f


def _switch_plain(x: torch.Tensor) -> Any:
    i = int(x.sum() > -1) + int(x.sum() > 1)
    return (x * (i + 1) * (x * W).sin()).sum()


def _while(kind: str) -> Fn:
    def f(x: torch.Tensor) -> Any:
        def going(state: Any) -> torch.Tensor:
            return state["n"] < x.sum().abs() * 2

        def dense(state: Any) -> Any:
            return {
                "n": state["n"] + 1,
                "x": (state["x"][0] * state["w"]).sin() + 1,
                "w": state["w"],
            }

        def body(state: Any) -> Any:
            if kind == "dense":
                return {**state, "n": state["n"] + 1, "x": (state["x"] * state["w"]).sin() + 1}
            if kind == "closed":
                return {**state, "n": state["n"] + 1, "x": (state["x"] * W).sin() + x / x}
            new = state["x"].clone()
            new *= state["w"]
            new.sin_()
            new[0:3] += 1
            return {**state, "n": state["n"] + 1, "x": new}

        out = tsfunc.while_loop(going, body, {"n": torch.zeros(()), "x": x, "w": W})
        return (out["x"] * x).sum()

    return f


def _while_plain(x: torch.Tensor) -> Any:
    n, y = 0, x
    while n < x.sum().abs() * 2:
        n, y = n + 1, (y * W).sin() + 1
    return (y * x).sum()


def _fori(kind: str) -> Fn:
    def f(x: torch.Tensor) -> Any:
        def body(i: Any, pair: Any) -> Any:
            a, b = pair
            if kind == "dense":
                return a * b, b + i
            if kind == "closed":
                return a * (x * W + i), b
            new = a.clone()
            new.mul_(b)
            return new, b + i

        start = x * W
        out = tsfunc.fori_loop(0, 4, body, (torch.ones_like(x), start))
        return (out[0] * x).sum()

    return f


def _fori_plain(kind: str) -> Fn:
    def f(x: torch.Tensor) -> Any:
        a, b = torch.ones_like(x), x * W
        for i in range(4):
            a, b = (a * (x * W + i), b) if kind == "closed" else (a * b, b + i)
        return (a * x).sum()

    return f


XS = torch.tensor([[0.3, 1.0, -2.0], [0.1, 0.2, 0.5], [-1.0, 0.4, 0.2]], dtype=torch.float64)


def _scan(kind: str) -> Fn:
    def f(x: torch.Tensor) -> Any:
        def body(carry: Any, row: Any) -> Any:
            c, n = carry["c"], carry["n"]
            if kind == "closed":
                new = (c * x + row["r"]).sin()
            elif kind == "inplace":
                new = c * x
                new += row["r"]
                new.sin_()
            else:
                new = (c * row["x"] + row["r"]).sin()
            return {"c": new, "n": n + 1}, (new * n, new.sum())

        rows = {"r": XS, "x": x.expand(3, 3)}
        carry, (ys, sums) = tsfunc.scan(body, {"c": x, "n": torch.ones(())}, rows)
        return (carry["c"] * ys).sum() + sums.prod()

    return f


def _scan_plain(x: torch.Tensor) -> Any:
    c, ys, sums = x, [], []
    for n, row in enumerate(XS):
        c = (c * x + row).sin()
        ys.append(c * (n + 1))
        sums.append(c.sum())
    return (c * torch.stack(ys)).sum() + torch.stack(sums).prod()


def _map(kind: str) -> Fn:
    def f(x: torch.Tensor) -> Any:
        def body(row: Any) -> Any:
            if kind == "closed":
                return row["r"] * x, (row["r"].sum() * x).cos()
            new = row["r"] * row["x"]
            other = row["r"].sum() * row["x"]
            return new, other.cos_() if kind == "inplace" else other.cos()

        a, b = tsfunc.map(body, {"r": XS, "x": x.expand(3, 3)})
        return (a * b).sum()

    return f


def _map_plain(x: torch.Tensor) -> Any:
    return sum(((r * x) * (r.sum() * x).cos()).sum() for r in XS)


def _associative(kind: str) -> Fn:
    def f(x: torch.Tensor) -> Any:
        def combine(left: Any, right: Any) -> Any:
            if kind == "inplace":
                product = left["p"] * right["p"]
                total = left["s"].clone()
                total += right["s"]
                return {"p": product, "s": total}
            one = (x / x).sum() / 3 if kind == "closed" else 1
            return {"p": left["p"] * right["p"] * one, "s": left["s"] + right["s"]}

        elems = {"p": XS * x, "s": XS * x}
        out = tsfunc.associative_scan(combine, elems)
        return (out["p"] * out["s"]).sum()

    return f


def _associative_plain(x: torch.Tensor) -> Any:
    return ((XS * x).cumprod(0) * (XS * x).cumsum(0)).sum()


KINDS = ("dense", "closed", "inplace")
ROWS: dict[str, tuple[Fn, Fn]] = {
    "cond-dense": (_cond_dense, _cond_dense_plain),
    "cond-closed": (_cond_closed, _cond_closed_plain),
    "cond-inplace": (_cond_inplace, _cond_inplace_plain),
    **{f"switch-{kind}": (_switch(kind), _switch_plain) for kind in KINDS},
    **{f"while_loop-{kind}": (_while(kind), _while_plain) for kind in KINDS},
    **{f"fori_loop-{kind}": (_fori(kind), _fori_plain(kind)) for kind in KINDS},
    **{f"scan-{kind}": (_scan(kind), _scan_plain) for kind in KINDS},
    **{f"map-{kind}": (_map(kind), _map_plain) for kind in KINDS},
    **{f"associative_scan-{kind}": (_associative(kind), _associative_plain) for kind in KINDS},
}

Mapped = Callable[[Fn], Fn]
Transform = Callable[[Fn, Mapped], Fn]


def _jvp_of(f: Fn) -> Fn:
    return lambda x: jvp(f, (x,), (x.cos(),))[1]


# Each takes the function and a batching function: vmap, or the loop.
COLUMNS: dict[str, Transform] = {
    "plain": lambda f, mapped: mapped(f) if mapped is _looped else _looped(f),
    "grad": lambda f, mapped: _looped(grad(f)),
    "jvp": lambda f, mapped: _looped(_jvp_of(f)),
    "vmap": lambda f, mapped: mapped(f),
    "vmap(grad)": lambda f, mapped: mapped(grad(f)),
    "vmap(jvp)": lambda f, mapped: mapped(_jvp_of(f)),
    "grad(vmap)": lambda f, mapped: grad(lambda x: mapped(f)(x).sin().sum()),
    "jvp(vmap)": lambda f, mapped: _jvp_of(mapped(f)),
    "jvp(grad)": lambda f, mapped: _looped(_jvp_of(grad(f))),
    "grad(grad)": lambda f, mapped: _looped(grad(lambda x: grad(f)(x).sin().sum())),
    "vmap(jvp(grad))": lambda f, mapped: mapped(_jvp_of(grad(f))),
    "vmap(vmap)": lambda f, mapped: lambda x: mapped(mapped(f))(_pairs(x)).flatten(0, 1),
    "vmap(vmap(grad))": lambda f, mapped: lambda x: (
        mapped(mapped(grad(f)))(_pairs(x)).flatten(0, 1)
    ),
    "vmap(grad(vmap))": lambda f, mapped: lambda x: (
        mapped(grad(lambda rows: mapped(f)(rows).sin().sum()))(_pairs(x)).flatten(0, 1)
    ),
}  # fmt: skip


def _looped(f: Fn) -> Fn:
    return lambda xs: torch.stack([f(x) for x in xs])


def _pairs(x: torch.Tensor) -> torch.Tensor:
    """Return a batch of batches of different sizes."""
    return x.view(2, x.shape[0] // 2, *x.shape[1:])


class Places:
    """``vmap`` with random batch dims, as a function of a batch whose dim is the first."""

    def __init__(self, seed: str) -> None:
        draw = random.Random(seed)
        # For a batch of vectors and for a batch of batches: the positions of the batch dims.
        self.given = {2: draw.choice((0, 1, -1)), 3: draw.choice((0, 1, 2, -1, -2))}
        self.returned = {2: draw.choice((0, -1)), 3: draw.choice((0, -1))}
        signs = torch.tensor([1.0, -1.0, 0.2, 1.0, -1.0, 1.0, -0.5, 0.3])
        sizes = torch.tensor([[draw.uniform(0.1, 1.2) for _ in range(3)] for _ in signs])
        # Examples that all differ, some of which choose differently.
        self.inputs = (sizes * signs[:, None]).double()[: draw.choice((6, 8))]

    def __call__(self, f: Fn) -> Fn:
        def mapped(x: torch.Tensor) -> torch.Tensor:
            given, returned = self.given[x.dim()], self.returned[x.dim()]
            found = vmap(f, in_dims=given, out_dims=returned)(x.movedim(0, given))
            return found.movedim(returned, 0)

        return mapped


def _cells(part: int) -> list[Any]:
    """Yield every cell; a fixed selection, one in ``part``, runs in the quick suite."""
    cells = []
    for row, column in itertools.product(ROWS, COLUMNS):
        quick = zlib.crc32(f"{row} {column}".encode()) % part == 0
        marks = () if quick else (pytest.mark.slow,)
        cells.append(pytest.param(row, column, marks=marks, id=f"{row}-{column}"))
    return cells


@pytest.fixture
def places(request: pytest.FixtureRequest) -> Places:
    seed = request.config.option.hypothesis_seed
    return Places(f"{seed} {request.node.nodeid}")


@pytest.mark.parametrize(("row", "column"), _cells(2))
def test_the_transform_of_control_flow_is_that_of_the_python_loop(
    row: str, column: str, places: Places
) -> None:
    ours, plain = ROWS[row]
    transform = COLUMNS[column]
    x = places.inputs
    torch.testing.assert_close(transform(ours, places)(x), transform(plain, _looped)(x))


@pytest.mark.parametrize(("row", "column"), _cells(4))
def test_specialized_it_is_too(row: str, column: str, places: Places) -> None:
    ours, plain = ROWS[row]
    transform = COLUMNS[column]
    x = places.inputs
    found = specialize(transform(ours, places))(x)
    torch.testing.assert_close(found, transform(plain, _looped)(x))


@pytest.mark.parametrize(("row", "column"), _cells(4))
def test_a_program_with_control_flow_is_transformed_as_it_is(
    row: str, column: str, places: Places
) -> None:
    ours, plain = ROWS[row]
    transform = COLUMNS[column]
    x = places.inputs
    found = transform(specialize(ours), places)(x)
    torch.testing.assert_close(found, transform(plain, _looped)(x))
