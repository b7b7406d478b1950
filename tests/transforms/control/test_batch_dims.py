"""A body sees the batch dims of a vmap where they are: ``in_dims`` and ``out_dims`` at any place.

Each function takes a matrix, a vector, a number and a table of each example, any of which may be
shared, and mixes their dims, so that a batch dim at a wrong position gives other values. All sizes
differ. The seed is the one in pytest's header.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import tsfunc
from tests.transforms.support import loop, same
from tsfunc import (
    checkpoint,
    cond,
    fori_loop,
    grad,
    jvp,
    scan,
    specialize,
    switch,
    vmap,
    while_loop,
)

Fn = Callable[..., tuple[Tensor, ...]]
MIX = torch.tensor([[0.2, -0.5, 0.4], [0.7, 0.1, -0.3], [-0.2, 0.6, 0.3]], dtype=torch.float64)
STEPS = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)
RANKS = (2, 1, 0, 2)
SHAPES = ((2, 3), (3,), (), (5, 3))


def _mixed(x: Tensor, w: Tensor) -> Tensor:
    return (x @ MIX * w).sin()


def _either(x: Tensor, w: Tensor, table: Tensor) -> tuple[Callable[..., Any], Callable[..., Any]]:
    return (
        lambda y: (_mixed(y, w), (table * w).T),
        lambda y: (y.cos() * table.sum(), (table + x.sum(0)).T),
    )


def _cond_by_example(x: Tensor, w: Tensor, s: Tensor, table: Tensor, flag: Tensor) -> Any:
    return cond(s > 0, *_either(x, w, table), x)


def _cond_for_all(x: Tensor, w: Tensor, s: Tensor, table: Tensor, flag: Tensor) -> Any:
    return cond(flag > 0, *_either(x, w, table), x)


def _switch_by_example(x: Tensor, w: Tensor, s: Tensor, table: Tensor, flag: Tensor) -> Any:
    return switch((s <= 0).long(), _either(x, w, table), x)


def _switch_for_all(x: Tensor, w: Tensor, s: Tensor, table: Tensor, flag: Tensor) -> Any:
    return switch((flag <= 0).long(), _either(x, w, table), x)


def _by_example(x: Tensor, w: Tensor, s: Tensor, table: Tensor, flag: Tensor) -> Any:
    return _either(x, w, table)[0 if s > 0 else 1](x)


def _for_all(x: Tensor, w: Tensor, s: Tensor, table: Tensor, flag: Tensor) -> Any:
    return _either(x, w, table)[0 if flag > 0 else 1](x)


def _while(x: Tensor, w: Tensor, s: Tensor, table: Tensor, flag: Tensor) -> Any:
    def body(state: Any) -> Any:
        n, y, z = state
        return n + 1, _mixed(y, w) + x, (z + y.sum(0)) * w

    found = while_loop(lambda state: state[0] < s.abs() * 2, body, (torch.zeros(()), x, table))
    return found[1:]


def _while_plain(x: Tensor, w: Tensor, s: Tensor, table: Tensor, flag: Tensor) -> Any:
    n, y, z = 0, x, table
    while n < s.abs() * 2:
        n, y, z = n + 1, _mixed(y, w) + x, (z + y.sum(0)) * w
    return y, z


def _fori(x: Tensor, w: Tensor, s: Tensor, table: Tensor, flag: Tensor) -> Any:
    def body(i: Any, state: Any) -> Any:
        return _mixed(state[0], w) + x * i, (state[1] + state[0].sum(0)) * w

    return fori_loop(0, 3, body, (torch.ones_like(MIX[:2]), table))


def _fori_plain(x: Tensor, w: Tensor, s: Tensor, table: Tensor, flag: Tensor) -> Any:
    y, z = torch.ones_like(MIX[:2]), table
    for i in range(3):
        y, z = _mixed(y, w) + x * i, (z + y.sum(0)) * w
    return y, z


def _scan(x: Tensor, w: Tensor, s: Tensor, table: Tensor, flag: Tensor) -> Any:
    def step(y: Tensor, row: Tensor) -> Any:
        y = y @ MIX * row + x * w
        return y, (y.T, row * w)

    y, (ys, rows) = scan(step, torch.ones_like(MIX[:2]), table)
    return y, ys, rows


def _scan_plain(x: Tensor, w: Tensor, s: Tensor, table: Tensor, flag: Tensor) -> Any:
    y, ys = torch.ones_like(MIX[:2]), []
    for row in table:
        y = y @ MIX * row + x * w
        ys.append(y.T)
    return y, torch.stack(ys), table * w


def _scan_columns(x: Tensor, w: Tensor, s: Tensor, table: Tensor, flag: Tensor) -> Any:
    def step(y: Tensor, column: Tensor) -> Any:
        y = y * column.sum() + x[0, 1]
        return y, y.T * w[:, None]

    return scan(step, x, table, dim=1, reverse=True)


def _scan_columns_plain(x: Tensor, w: Tensor, s: Tensor, table: Tensor, flag: Tensor) -> Any:
    y, ys = x, []
    for column in reversed(table.unbind(1)):
        y = y * column.sum() + x[0, 1]
        ys.append(y.T * w[:, None])
    return y, torch.stack(ys[::-1], 1)


def _scan_of_cond(by: str) -> Fn:
    def f(x: Tensor, w: Tensor, s: Tensor, table: Tensor, flag: Tensor) -> Any:
        def step(y: Tensor, k: Tensor) -> Any:
            pred = k > 0 if by == "step" else s * k > 0
            y = cond(pred, lambda y: y @ MIX * k + x, lambda y: y * w - x, y)
            return y, y.T

        return scan(step, torch.ones_like(MIX[:2]), STEPS)

    return f


def _scan_of_cond_plain(by: str) -> Fn:
    def f(x: Tensor, w: Tensor, s: Tensor, table: Tensor, flag: Tensor) -> Any:
        y, ys = torch.ones_like(MIX[:2]), []
        for k in STEPS:
            y = y @ MIX * k + x if (k if by == "step" else s * k) > 0 else y * w - x
            ys.append(y.T)
        return y, torch.stack(ys)

    return f


def _map(batch_size: int | None) -> Fn:
    def f(x: Tensor, w: Tensor, s: Tensor, table: Tensor, flag: Tensor) -> Any:
        return tsfunc.map(lambda row: (_mixed(x, row), row * w), table, batch_size=batch_size)

    return f


def _map_plain(x: Tensor, w: Tensor, s: Tensor, table: Tensor, flag: Tensor) -> Any:
    return torch.stack([_mixed(x, row) for row in table]), table * w


def _associative(x: Tensor, w: Tensor, s: Tensor, table: Tensor, flag: Tensor) -> Any:
    v = w * w + 1
    return (
        tsfunc.associative_scan(lambda a, b: a * b / v, table * v, dim=0),
        tsfunc.associative_scan(torch.add, x * w, axis=1),
    )


def _associative_plain(x: Tensor, w: Tensor, s: Tensor, table: Tensor, flag: Tensor) -> Any:
    return table.cumprod(0) * (w * w + 1), (x * w).cumsum(1)


def _checkpoint(x: Tensor, w: Tensor, s: Tensor, table: Tensor, flag: Tensor) -> Any:
    return checkpoint(lambda y: (_mixed(y, w).T, table.T * s))(x)


def _rules_plain(x: Tensor, w: Tensor, s: Tensor, table: Tensor, flag: Tensor) -> Any:
    return _mixed(x, w).T, table.T * s


def _turned(x: Tensor, w: Tensor) -> Tensor:
    return _mixed(x, w).T.clone()


def _pulled(kept: Sequence[Tensor], cotangent: Tensor) -> tuple[Tensor, Tensor]:
    x, w = kept
    inner = cotangent.T * (x @ MIX * w).cos()
    return (inner * w) @ MIX.T, (inner * (x @ MIX)).sum(0)


_by_vjp = tsfunc.custom_vjp(_turned)
_by_vjp.defvjp(lambda x, w: (_turned(x, w), (x, w)), _pulled)
_by_jvp = tsfunc.custom_jvp(_turned)
_by_jvp.defjvp(lambda primals, tangents: jvp(_turned, primals, tangents))
_by_vmap = tsfunc.custom_vmap(_turned)


@_by_vmap.def_vmap
def _(size: int, batched: Sequence[bool], x: Tensor, w: Tensor) -> Any:
    dims = tuple(0 if flag else None for flag in batched)
    return vmap(_turned, in_dims=dims)(x, w), True


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return _turned(x, w)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        return _pulled(ctx.saved_tensors, cotangent)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Any:
        return jvp(_turned, ctx.saved_tensors, tangents)[1]


def _ruled(func: Callable[..., Tensor]) -> Fn:
    return lambda x, w, s, table, flag: (func(x, w), table.T * s)


def _solve(x: Tensor, w: Tensor, s: Tensor, table: Tensor, flag: Tensor) -> Any:
    a = x.T @ x + 2 * torch.eye(3).to(x)

    def product(v: Tensor) -> Tensor:
        return a @ v

    def direct(product: Callable[[Tensor], Tensor], b: Tensor) -> Tensor:
        columns = vmap(product, out_dims=1)(torch.eye(3).to(b))
        return torch.linalg.solve(columns, b)

    return tsfunc.linear_solve(product, w, direct, symmetric=True), table.T * s


def _solve_plain(x: Tensor, w: Tensor, s: Tensor, table: Tensor, flag: Tensor) -> Any:
    return torch.linalg.solve(x.T @ x + 2 * torch.eye(3).to(x), w), table.T * s


def _root(x: Tensor, w: Tensor, s: Tensor, table: Tensor, flag: Tensor) -> Any:
    target = x.sum(0)

    def residual(y: Tensor) -> Tensor:
        return y - 0.2 * torch.tanh(MIX @ y + w) - target

    def solver(f: Callable[[Tensor], Tensor], guess: Tensor) -> Tensor:
        return fori_loop(0, 40, lambda i, y: y - f(y), guess)

    def tangent(g: Callable[[Tensor], Tensor], y: Tensor) -> Tensor:
        return torch.linalg.solve(vmap(g, out_dims=1)(torch.eye(3).to(y)), y)

    return tsfunc.implicit_root(residual, torch.zeros_like(MIX[0]), solver, tangent), table.T * s


def _root_plain(x: Tensor, w: Tensor, s: Tensor, table: Tensor, flag: Tensor) -> Any:
    y = torch.zeros_like(MIX[0])
    for _ in range(40):
        y = 0.2 * torch.tanh(MIX @ y + w) + x.sum(0)
    return y, table.T * s


def _nested(x: Tensor, w: Tensor, s: Tensor, table: Tensor, flag: Tensor) -> Any:
    def going(state: Any) -> Any:
        return state[0] < s + 1

    def body(i: Any, y: Tensor) -> Tensor:
        def looped(y: Tensor) -> Tensor:
            return while_loop(going, lambda t: (t[0] + 1, t[1] * w), (s * 0, y))[1]

        y = cond(s > i * 0.3, lambda y: _mixed(y, w) + x, looped, y)
        return checkpoint(lambda y: y.sin() + x * 0.1)(y)

    branches = (lambda: table * w, lambda: tsfunc.map(lambda row: row @ MIX * w, table))
    return fori_loop(0, 3, body, x), switch((flag > 0).long(), branches).T


def _nested_plain(x: Tensor, w: Tensor, s: Tensor, table: Tensor, flag: Tensor) -> Any:
    y = x
    for i in range(3):
        if s > i * 0.3:
            y = _mixed(y, w) + x
        else:
            n = 0
            while n < s + 1:
                n, y = n + 1, y * w
        y = y.sin() + x * 0.1
    return y, (table @ MIX * w if flag > 0 else table * w).T


def _vmap_within(x: Tensor, w: Tensor, s: Tensor, table: Tensor, flag: Tensor) -> Any:
    def body(i: Any, y: Tensor) -> Tensor:
        columns = vmap(lambda column, k: column * k + x.sum(), in_dims=(1, 0), out_dims=1)
        return columns(y, w)

    rows = vmap(lambda row: cond(row.sum() > 0, lambda: row * x.sum(0), lambda: w + row))
    columns = vmap(
        lambda col: cond(flag > 0, lambda: x * col.sum(), lambda: x - col.sum()), 1, out_dims=-1
    )
    return fori_loop(0, 2, body, x), rows(table), columns(table)


def _vmap_within_plain(x: Tensor, w: Tensor, s: Tensor, table: Tensor, flag: Tensor) -> Any:
    y = x
    for _ in range(2):
        y = y * w + x.sum()
    rows = [row * x.sum(0) if row.sum() > 0 else w + row for row in table]
    columns = [x * col.sum() if flag > 0 else x - col.sum() for col in table.unbind(1)]
    return y, torch.stack(rows), torch.stack(columns, -1)


ROWS: dict[str, tuple[Fn, Fn]] = {
    "cond, by example": (_cond_by_example, _by_example),
    "cond, one choice": (_cond_for_all, _for_all),
    "switch, by example": (_switch_by_example, _by_example),
    "switch, one choice": (_switch_for_all, _for_all),
    "while_loop": (_while, _while_plain),
    "fori_loop": (_fori, _fori_plain),
    "scan": (_scan, _scan_plain),
    "scan along columns": (_scan_columns, _scan_columns_plain),
    "scan of cond, by step": (_scan_of_cond("step"), _scan_of_cond_plain("step")),
    "scan of cond, by example": (_scan_of_cond("example"), _scan_of_cond_plain("example")),
    "map": (_map(None), _map_plain),
    "map, two rows at a time": (_map(2), _map_plain),
    "associative_scan": (_associative, _associative_plain),
    "checkpoint": (_checkpoint, _rules_plain),
    "custom_vjp": (_ruled(_by_vjp), _rules_plain),
    "custom_jvp": (_ruled(_by_jvp), _rules_plain),
    "custom_vmap": (_ruled(_by_vmap), _rules_plain),
    "autograd.Function": (_ruled(_Function.apply), _rules_plain),
    "linear_solve": (_solve, _solve_plain),
    "implicit_root": (_root, _root_plain),
    "control flow in control flow": (_nested, _nested_plain),
    "vmap in control flow": (_vmap_within, _vmap_within_plain),
}


class Case:
    """A function under a word of transforms, and the same by loops over examples.

    The letters of a word are applied from its end: V is a vmap with random dims, G a gradient by
    all arguments but the number, J a pushforward by them.
    """

    def __init__(self, row: str, word: str, seed: str) -> None:
        self.rng = random.Random(seed)
        self.shapes = [list(shape) for shape in SHAPES]
        flag = torch.tensor(self.rng.choice((1.0, -1.0)))
        ours, plain = ROWS[row]
        self.ours: Fn = lambda *args: tuple(ours(*args, flag))
        self.plain: Fn = lambda *args: tuple(plain(*args, flag))
        self.ranks = [y.dim() for y in self.plain(*self.inputs())]
        sizes = iter((4, 6, 7))
        self.dims: list[Any] = []
        for letter in reversed(word):
            if letter == "V":
                self.map(next(sizes))
            elif letter == "G":
                self.ours, self.plain = _gradient(self.ours), _gradient(self.plain)
                self.ranks = [len(self.shapes[i]) for i in (0, 1, 3)]
            else:
                self.ours, self.plain = _pushed(self.ours), _pushed(self.plain)

    def inputs(self) -> list[Tensor]:
        seed = torch.Generator(device="cpu").manual_seed(self.rng.randrange(2**31))
        made = [torch.randn(s, dtype=torch.float64, generator=seed, device="cpu")
                for s in self.shapes]  # fmt: skip
        return [x.to(torch.get_default_device()) for x in made]

    def map(self, size: int, in_dims: Sequence[int | None] = ()) -> None:
        if not in_dims:
            last = [len(shape) for shape in self.shapes]
            drawn = [self.rng.choice([*range(-n - 1, n + 1), None]) for n in last]
            if not any(dim is not None for dim in drawn):
                drawn[0] = self.rng.choice((0, 1, -1))
            in_dims = tuple(drawn)
        out_dims = tuple(self.rng.choice(range(-rank - 1, rank + 1)) for rank in self.ranks)
        self.dims.append((in_dims, out_dims))
        self.ours = vmap(self.ours, in_dims=tuple(in_dims), out_dims=out_dims)
        self.plain = loop(self.plain, size, in_dims, out_dims)
        self.ranks = [rank + 1 for rank in self.ranks]
        for shape, dim in zip(self.shapes, in_dims, strict=True):
            if dim is not None:
                shape.insert(dim % (len(shape) + 1), size)


def _gradient(f: Fn) -> Fn:
    def total(*args: Tensor) -> Tensor:
        return sum((y.sin() * (1 + y)).sum() for y in f(*args))  # type: ignore[return-value]

    return grad(total, argnums=(0, 1, 3))


def _pushed(f: Fn) -> Fn:
    def pushed(x: Tensor, w: Tensor, s: Tensor, table: Tensor) -> Any:
        tangents = (x.cos(), w.sin(), table * table)
        return jvp(lambda x, w, table: f(x, w, s, table), (x, w, table), tangents)[1]

    return pushed


WORDS = ("V", "VG", "VJ", "GV", "JV", "VV", "VVG", "VGV", "VJG", "GVV", "VGJ", "JJ", "JVJ")


def _cells(quick: int) -> list[Any]:
    """Return every row with every word; ``quick`` words of a row run in the quick suite."""
    cells = []
    for i, row in enumerate(ROWS):
        for j, word in enumerate(WORDS):
            marks = () if (j - 3 * i) % len(WORDS) < quick else (pytest.mark.slow,)
            cells.append(pytest.param(row, word, marks=marks, id=f"{row}-{word}"))
    return cells


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> str:
    return f"{request.config.option.hypothesis_seed} {request.node.nodeid}"


@pytest.mark.parametrize(("row", "word"), _cells(1))
def test_vmap_over_any_dims_is_the_loop(row: str, word: str, seed: str) -> None:
    case = Case(row, word, seed)
    inputs = case.inputs()
    same(case.ours(*inputs), case.plain(*inputs), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("row", "word"), _cells(2))
def test_a_program_over_any_dims_is_the_loop(row: str, word: str, seed: str) -> None:
    case = Case(row, word, seed)
    inputs = case.inputs()
    same(specialize(case.ours)(*inputs), case.plain(*inputs), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("row", list(ROWS))
def test_tangents_of_tensors_that_no_vmap_maps(row: str, seed: str) -> None:
    case = Case(row, "", seed)
    case.map(4, (None, None, 0, None))
    ours, plain = _pushed(case.ours), _pushed(case.plain)
    inputs = case.inputs()
    same(ours(*inputs), plain(*inputs), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    "row", ["custom_jvp", "autograd.Function", "linear_solve", "implicit_root"]
)
def test_tangents_of_tensors_that_only_the_outer_vmap_maps(row: str, seed: str) -> None:
    case = Case(row, "", seed)
    case.map(4, (None, None, 0, None))
    case.ours, case.plain = _pushed(case.ours), _pushed(case.plain)
    case.map(6, (0, -1, None, 1))
    inputs = case.inputs()
    same(case.ours(*inputs), case.plain(*inputs), rtol=1e-8, atol=1e-8)
