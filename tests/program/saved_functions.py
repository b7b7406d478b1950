"""Files of several kinds of functions, which the tests damage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tsfunc
from tsfunc import Dim, specialize
from tsfunc import MetaTensorType as Meta


class Out(NamedTuple):
    z: Any
    n: Any


TIED = torch.randn(3, 4)
PART = TIED[:, ::2]
COUNT = torch.zeros(2)


def whole(x: Tensor, y: Tensor, *, k: float) -> dict[str, Any]:
    """Named dims, numbers, several results, containers, aliased state, constants."""
    h = F.linear(x, TIED) * k
    top, at = h.max(0)
    a, *_ = h.unbind(1)
    made = torch.ones(x.shape[0] * 2 + y.shape[0], dtype=torch.float64)
    return {"out": Out(top, [at, None, x.shape[0] + 1]), "a": a[1:], "made": made, "p": PART + 1}


def flowing(x: Tensor, times: Tensor) -> Any:
    """Each kind of control flow, and derivatives of some."""

    def loop(x: Tensor) -> Any:
        _, total = tsfunc.while_loop(
            lambda i, y: i < times, lambda i, y: (i + 1, y.sin() * 2), (torch.tensor(0), x)
        )
        return total.sum()

    chosen = tsfunc.cond(x.sum() > 0, torch.sin, torch.cos, x)
    last, steps = tsfunc.scan(lambda c, row: (c * row, c + row), torch.ones(3), chosen)
    slope = tsfunc.grad(lambda x: tsfunc.cond(x.sum() > 0, torch.exp, torch.sin, x).sum())(x)
    return loop(x), last, steps, slope, tsfunc.associative_scan(torch.add, x)


def counting(x: Tensor) -> Tensor:
    """State that is written into, and quiet parts."""
    with torch.no_grad():
        COUNT.add_(x.sum())
    return x * COUNT + x.to(torch.bfloat16).float()


class Running(nn.Module):
    """State that is assigned."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(2))
        self.last = 0

    def forward(self, x: Tensor) -> Tensor:
        self.total, self.last = self.total + x, 3
        return self.total * 2


def chosen(x: Tensor, how: str, shift: Tensor | None = None) -> Any:
    """A function with several descriptors, optional arguments, and types of all kinds."""
    y = x + shift if shift is not None else x
    return (y.sum(0) if how == "sum" else y.to(torch.complex64) * (1 + 2j)), y > 0


def block(x: Tensor) -> Tensor:
    return F.dropout(x @ x.T, 0.5).sin().sum(0)


def again(x: Tensor) -> Any:
    """A function that runs parts again: checkpoints of all policies, random draws, a shape."""
    policies = tsfunc.checkpoint_policies
    both = policies.save_from_both_policies(policies.dots_saveable, policies.nothing_saveable)
    found = [
        tsfunc.checkpoint(block, policy=policy)(x)
        for policy in (None, both, [torch.ops.aten.mm, torch.ops.aten.sin.default])
    ]

    def chosen(x: Tensor) -> Tensor:
        return tsfunc.cond(x.sum() > 0, F.dropout, torch.cos, x).sum()

    slope = tsfunc.grad(lambda x: tsfunc.checkpoint(block)(x).sum())(x)
    return found, slope, tsfunc.grad(chosen)(x), x.shape


@tsfunc.custom_vjp
def clipped(x: Tensor) -> Tensor:
    return x**2


clipped.defvjp(lambda x: (clipped(x), x), lambda x, ct: ((2 * x * ct).clamp(-1, 1),))


@tsfunc.custom_jvp
def exponential(x: Tensor) -> Tensor:
    return x.exp()


@exponential.defjvp
def _(primals: Any, tangents: Any) -> Any:
    found = exponential(*primals)
    return found, 2 * found * tangents[0]


class Scaling(torch.autograd.Function):
    """A function that owns a tensor, a shape and a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Any:
        wave = x.sin()
        ctx.save_for_backward(x, wave)
        ctx.by, ctx.shape = by, x.shape
        return (wave * by).sum(0), x.argmax(0)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        x, wave = ctx.saved_tensors
        pulled = cotangents[0].expand(ctx.shape) * x.cos() * ctx.by
        return pulled + 0 * wave, None


class Turning(torch.autograd.Function):
    """A function with both derivatives."""

    @staticmethod
    def forward(x: Tensor, size: int) -> Tensor:
        return x.sin() * size

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0], output)
        ctx.size = inputs[1]

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 3 * cotangents[0] * x.cos() * ctx.size, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        x, _ = ctx.saved_tensors
        return 3 * tangents[0] * x.cos() * ctx.size


GENERATOR = torch.Generator().manual_seed(3)


def ruled(x: Tensor) -> Any:
    """Functions with custom rules, derivatives and batches of some; random numbers."""
    apply: Any = Scaling.apply
    turned: Any = Turning.apply
    total, at = apply(x, 2.0)
    slope = tsfunc.vmap(tsfunc.grad(lambda x: exponential(x).sum()))(x)
    noise = torch.rand(x.shape, generator=GENERATOR)
    return clipped(x), total, at, slope, turned(x, x.shape[0]), noise


def solving(a: Tensor, b: Tensor) -> Any:
    """Solutions of equations."""

    def solve(matvec: Any, b: Tensor) -> Any:
        return torch.linalg.solve(a, b)

    def newton(f: Any, x: Tensor) -> Any:
        return tsfunc.fori_loop(0, 12, lambda i, x: x - f(x) / (2 * x), x)

    root = tsfunc.implicit_root(lambda x: x * x - b * b - 1, torch.ones_like(b), newton)
    return tsfunc.linear_solve(lambda x: a @ x, b, solve), root


def numbered(x: Tensor, k: int, s: float) -> Any:
    """A function whose number inputs are in sizes, in arithmetic, and in conditions."""
    if k < 2 or s > 8.0:
        return x
    return x[:k] * s, torch.zeros(2 * k + 1), k // 2, (s + 1) * k, x.repeat(k, 1)


def _numbered() -> Any:
    f = specialize(numbered, {"x": Meta(["n", 2]), "k": int, "s": float})
    f(torch.ones(4, 2), 3, 0.5)
    return f


def _ruled() -> Any:
    f = specialize(ruled, {"x": Meta(["n", 3])})
    f(torch.randn(4, 3))
    return f


def _solving() -> Any:
    f = specialize(solving, {"a": Meta(["n", "n"]), "b": Meta(["n"])})
    f(torch.eye(3) * 2, torch.ones(3))
    return f


def _again() -> Any:
    f = specialize(again, {"x": Meta(["n", 3])})
    f(torch.randn(4, 3))
    return f


def _whole() -> Any:
    f = specialize(whole, {"x": Meta(["n", 4]), "y": Meta(["m"])})
    f(torch.randn(5, 4), torch.randn(2), k=2.0)
    return f


def _net() -> Any:
    f = specialize(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU()))
    f(torch.randn(6, 4))
    return f


def _flowing() -> Any:
    f = specialize(flowing, {"x": Meta(["n", 3])})
    f(torch.randn(4, 3), torch.tensor(3))
    return f


def _counting() -> Any:
    f = specialize(counting)
    f(torch.ones(2))
    return f


def _running() -> Any:
    f = specialize(Running())
    f(torch.ones(2))
    return f


def _chosen() -> Any:
    wide = Meta([Dim("n", max=64), "2*n+1"], dtype=torch.float32)
    f = specialize(chosen, [{"x": wide, "how": "sum"}, {"x": Meta([..., 2]), "how": "scale"}])
    f(torch.ones(2, 5), "sum")
    f(torch.ones(3, 1, 2), "scale", torch.ones(2, dtype=torch.float64))
    return f


def checking(x: Tensor, y: Tensor) -> Any:
    """Conditions on named dims, and shapes among the results."""
    if x.shape[0] % 2:
        raise ValueError("x is odd")
    torch._check(x.shape[0] >= y.shape[0])
    return x[: y.shape[0]] + y, x.shape


def _checking() -> Any:
    f = specialize(checking, {"x": Meta(["n"]), "y": Meta(["m"])})
    f(torch.ones(6), torch.ones(3))
    return f


MADE: dict[str, tuple[Callable[[], Any], bool]] = {
    "whole": (_whole, False),
    "net": (_net, True),
    "flowing": (_flowing, True),
    "counting": (_counting, False),
    "running": (_running, True),
    "chosen": (_chosen, False),
    "checking": (_checking, True),
    "again": (_again, True),
    "numbered": (_numbered, True),
    "ruled": (_ruled, True),
    "solving": (_solving, True),
}


def files(folder: Path) -> Iterator[bytes]:
    """Return the file of each function."""
    for name, (make, exact) in MADE.items():
        path = folder / f"made_{name}.tsf"
        make().save(path, exact=exact)
        yield path.read_bytes()
