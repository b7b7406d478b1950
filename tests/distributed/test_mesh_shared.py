"""Values that all ranks share: arguments with P(), and tensors that the body captures.

Derivatives by them are sums over the ranks, at every order and in every branch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tsfunc
from tests.distributed.checks import Check, Checks, failures, mesh_of, on_two_ranks
from tsfunc import P, VirtualMesh, shard_map

close = torch.testing.assert_close
Body = Callable[[Tensor, Tensor], Any]
Loss = Callable[[Tensor], Any]


def inner_gradient(w: Tensor, x: Tensor) -> Any:
    def energy(v: Tensor) -> Any:
        return (v * w * w).sin().sum() + tsfunc.psum(v.sum() * w, "i")

    return tsfunc.grad(energy)(x)


def scanned(w: Tensor, x: Tensor) -> Any:
    def step(carry: Tensor, t: Tensor) -> Any:
        return carry * w + tsfunc.psum(t * w, "i"), None

    return tsfunc.scan(step, x[0], x)[0].expand(2)


def grown(w: Tensor, x: Tensor) -> Any:
    return tsfunc.while_loop(lambda c: c.sum() < 4, lambda c: c + w.cos(), x)


def by_index(w: Tensor, x: Tensor) -> Any:
    at = (x.sum() > 2).long()
    return tsfunc.switch(at, [torch.sin, lambda x: x * w, lambda x: x * w * w], x)


# Functions of one rank's shard and a shared value.
BODIES: dict[str, Body] = {
    "pointwise": lambda w, x: (x * w).sin(),
    "sum": lambda w, x: tsfunc.psum((x * w).sin().sum(), "i") * w * x,
    "vmap": lambda w, x: tsfunc.vmap(lambda v: (v * w).sin())(x),
    "inner gradient": inner_gradient,
    "scan": scanned,
    # Branches and loops without exchanges, in which ranks choose differently.
    "a branch without w": lambda w, x: tsfunc.cond(x.sum() > 2, lambda x: x * w, torch.sin, x),
    "a linear branch": lambda w, x: tsfunc.cond(
        x.sum() > 2, lambda x: x * w, lambda x: (x * w).sin(), x
    ),
    "switch": by_index,
    "while_loop": grown,
    "checkpoint": lambda w, x: tsfunc.checkpoint(lambda x: (x * w).sin())(x),
    "specialize": lambda w, x: tsfunc.specialize(lambda x: (x * w).sin())(x),
}  # fmt: skip


def cubed(loss: Loss) -> Loss:
    return tsfunc.grad(tsfunc.grad(tsfunc.grad(loss)))


def accumulated(loss: Loss, w: Tensor) -> Any:
    leaf = w.clone().requires_grad_()
    loss(leaf).backward()
    return leaf.grad


USES: dict[str, Callable[[Loss, Tensor], Any]] = {
    "value": lambda loss, w: loss(w),
    "grad": lambda loss, w: tsfunc.grad(loss)(w),
    "jvp": lambda loss, w: tsfunc.jvp(loss, (w,), (w.cos(),)),
    "hessian": lambda loss, w: tsfunc.hessian(loss)(w),
    "grad of grad": lambda loss, w: tsfunc.grad(tsfunc.grad(loss))(w),
    "third order": lambda loss, w: cubed(loss)(w),
    "vmap": lambda loss, w: tsfunc.vmap(loss)(torch.stack([w, 2 * w])),
    "vmap of grad": lambda loss, w: tsfunc.vmap(tsfunc.grad(loss))(torch.stack([w, 2 * w])),
    "grad of vmap": lambda loss, w: tsfunc.grad(
        lambda w: tsfunc.vmap(loss)(torch.stack([w, 2 * w])).sum()
    )(w),
    "specialize of grad": lambda loss, w: tsfunc.specialize(tsfunc.grad(loss))(w),
    "grad of specialize": lambda loss, w: tsfunc.grad(tsfunc.specialize(loss))(w),
    "backward": accumulated,
}


def loss_over(body: Body, over: Any, captured: bool, x: Tensor) -> Loss:
    if captured:
        return lambda w: shard_map(lambda x: body(w, x), over, P("i"), P("i"))(x).sum()
    mapped = shard_map(body, over, (P(), P("i")), P("i"))
    return lambda w: mapped(w, x).sum()


def same_as_virtual(body: Body, captured: bool) -> Check:
    def run(rank: int, size: int) -> None:
        x, w = torch.arange(2.0 * size).double(), torch.tensor(0.3).double()
        real, virtual = mesh_of(("i",), (size,)), VirtualMesh(i=size)
        for name, use in USES.items():
            if body is inner_gradient and name == "backward":
                continue  # backward() of the result of grad is refused
            got = use(loss_over(body, real, captured, x), w)
            want = use(loss_over(body, virtual, captured, x), w)
            close(got, want, msg=f"{name}: {got}, and over a VirtualMesh {want}")

    return run


CHECKS = Checks(
    (f"{name}, {'captured' if captured else 'argument'}", same_as_virtual(body, captured))
    for name, body in BODIES.items()
    for captured in (False, True)
)


@CHECKS.check
def derivatives_of_whole_tensors(rank: int, size: int) -> None:
    """Return the derivatives by torch.func, of a function of whole tensors."""
    x, w = torch.arange(2.0 * size).double(), torch.tensor(0.3).double()
    mesh = mesh_of(("i",), (size,))

    def whole(w: Tensor) -> Any:
        return (x * w).sin().square().sum()

    def body(w: Tensor, x: Tensor) -> Any:
        return tsfunc.psum((x * w).sin().square().sum(), "i")

    losses: list[Loss] = [
        lambda w: shard_map(body, mesh, (P(), P("i")), P())(w, x),
        lambda w: shard_map(lambda x: body(w, x), mesh, P("i"), P())(x),
    ]
    for loss in losses:
        wanted: Loss = whole
        got: Loss = loss
        for _ in range(3):
            wanted, got = torch.func.grad(wanted), tsfunc.grad(got)
            close(got(w), wanted(w))


@CHECKS.check
def captured_modules(rank: int, size: int) -> None:
    """A module that a body captures gets the gradients of the whole batch."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(2 * size, 3)
    wanted = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
    mesh = mesh_of(("i",), (size,))
    for mapped in (
        shard_map(net, mesh, P("i"), P("i")),
        shard_map(lambda x: net(x), mesh, P("i"), P("i")),
        tsfunc.specialize(shard_map(lambda x: net(x), mesh, P("i"), P("i"))),
    ):
        net.zero_grad()
        mapped(x).square().sum().backward()
        for parameter, want in zip(net.parameters(), wanted, strict=True):
            close(parameter.grad, want)


# Each body with one of the two kinds of sharing in the quick tests; all others are slow.
QUICK = {name: check for i, (name, check) in enumerate(CHECKS.items()) if i % 4 in (0, 3)}
QUICK |= {each.__name__: each for each in (derivatives_of_whole_tensors, captured_modules)}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_checks_hold_on_every_rank(ranks: int) -> None:
    found = failures(CHECKS, ranks)
    bad = {name: texts for name, texts in found.items() if texts}
    assert not bad, "\n".join(f"{name}: {texts[0]}" for name, texts in bad.items())


def test_the_function_has_the_name_of_jax_too() -> None:
    """``shard_map`` takes its function by the keywords ``func`` and ``f``."""
    options: dict[str, Any] = {"mesh": VirtualMesh(i=2), "in_specs": P("i"), "out_specs": P("i")}
    x = torch.randn(4)
    expected = shard_map(lambda x: torch.sort(x), VirtualMesh(i=2), P("i"), P("i"))(x)
    for name in ("func", "f"):
        options[name] = torch.sort
        close(shard_map(**options)(x), expected)
        del options[name]


test_on_two_ranks = on_two_ranks(QUICK)
