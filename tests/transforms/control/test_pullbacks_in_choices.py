"""Pullbacks of a vmap's function in branches and steps that some examples take.

The law: ``vmap`` is the loop over the examples, whose branches call the pullback of one example.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import tsfunc
from tsfunc import cond, fori_loop, grad, linear_transpose, linearize, scan, switch, vjp, vmap
from tsfunc import while_loop as repeat

Linear = Callable[[Tensor], Tensor]
WEIGHT = torch.randn(3, 3, dtype=torch.float64)


def nonlinear(x: Tensor) -> Tensor:
    return (WEIGHT @ x).tanh() * x.sin()


def of_vjp(x: Tensor) -> tuple[Tensor, Linear]:
    out, pull = vjp(nonlinear, x)
    return out, lambda s: pull(s)[0]


def of_transpose(x: Tensor) -> tuple[Tensor, Linear]:
    out, push = linearize(nonlinear, x)
    back = linear_transpose(push, x)
    return out, lambda s: back(s)[0]


MAKERS: dict[str, Callable[[Tensor], tuple[Tensor, Linear]]] = {
    "vjp": of_vjp,
    "linearize": lambda x: linearize(nonlinear, x),
    "linear_transpose": of_transpose,
}
USES: dict[str, Callable[[Linear, Tensor, Tensor], Tensor]] = {
    "cond": lambda op, s, x: cond(x[0] > 0, lambda s: op(s) * 2, lambda s: s, s),
    "both branches": lambda op, s, x: cond(x[0] > 0, op, lambda s: op(s.cos()), s),
    "switch": lambda op, s, x: switch(
        (x[0] > 0).long() + (x[1] > 0).long(), [op, lambda s: s, lambda s: op(op(s))], s
    ),
    "while_loop": lambda op, s, x: repeat(
        lambda c: c[1] < (x[0] > 0).long() * 2 + 1,
        lambda c: (op(c[0]) / 2, c[1] + 1),
        (s, torch.tensor(0)),
    )[0],
    "fori_loop": lambda op, s, x: fori_loop(
        0, 2, lambda i, c: cond(c[0] > 0, op, lambda c: c / 2, c), s
    ),
    "scan": lambda op, s, x: scan(
        lambda c, a: (cond(c[0] > a, op, lambda c: c / 2, c), c.sum()),
        s,
        torch.tensor([0.0, 0.5], dtype=x.dtype),
    )[0],
    "nested": lambda op, s, x: cond(
        x[0] > 0, lambda s: cond(x[1] > 0, op, lambda s: s * 2, s), lambda s: s, s
    ),
    "one made in a branch": lambda op, s, x: cond(
        x[0] > 0,
        lambda s: cond(x[1] > 0, lambda s: op(of_vjp(s)[1](s)), lambda s: s * 2, s),
        lambda s: s,
        s,
    ),
    "vmap in a branch": lambda op, s, x: cond(
        x[0] > 0, lambda s: vmap(op)(torch.stack([s, s * 2])).sum(0), lambda s: s, s
    ),
    "grad in a branch": lambda op, s, x: cond(
        x[0] > 0, lambda s: grad(lambda s: (op(s) * s).sum())(s), lambda s: s, s
    ),
    "jvp in a branch": lambda op, s, x: cond(
        x[0] > 0, lambda s: tsfunc.jvp(op, (s,), (x,))[1], lambda s: s, s
    ),
}
AROUND: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda f: f,
    "grad": lambda f: grad(lambda x: f(x).sin().sum()),
    "hessian": lambda f: tsfunc.hessian(lambda x: f(x).sin().sum()),
    "vmap": lambda f: lambda x: vmap(f)(torch.stack([x, -x, x.flip(0)])),
    "vmap of jacfwd": lambda f: lambda x: vmap(tsfunc.jacfwd(f))(torch.stack([x, -x, x.flip(0)])),
}


def chosen(maker: str, use: str) -> Callable[[Tensor], Tensor]:
    def f(x: Tensor) -> Tensor:
        out, op = MAKERS[maker](x)
        return USES[use](op, out, x)

    return f


def of_examples(f: Callable[[Tensor], Any], xs: Tensor) -> Any:
    return tree_map(lambda *results: torch.stack(results), *[f(x) for x in xs])


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("maker", MAKERS)
def test_a_pullback_in_a_choice_by_example_is_that_of_the_example(
    maker: str, use: str, around: str
) -> None:
    f = AROUND[around](chosen(maker, use))
    xs = torch.randn(5, 3, dtype=torch.float64)
    if "vmap" in around:
        one = chosen(maker, use) if around == "vmap" else tsfunc.jacfwd(chosen(maker, use))
        nested = [torch.stack([x, -x, x.flip(0)]) for x in xs]
        expected = torch.stack([of_examples(one, group) for group in nested])
    else:
        expected = of_examples(f, xs)
    torch.testing.assert_close(vmap(f, in_dims=1)(xs.T), expected)
    weighted = grad(lambda xs: sum((leaf**2).sum() for leaf in tree_leaves(vmap(f)(xs))))
    if around == "nothing":
        by_loop = grad(lambda xs: sum((f(x) ** 2).sum() for x in xs))
        torch.testing.assert_close(weighted(xs), by_loop(xs))


@pytest.mark.parametrize("use", [name for name in USES if not name.startswith(("grad", "jvp"))])
@pytest.mark.parametrize("maker", MAKERS)
def test_a_program_of_such_a_choice(maker: str, use: str) -> None:
    f = chosen(maker, use)
    xs = torch.randn(5, 3, dtype=torch.float64)
    torch.testing.assert_close(tsfunc.specialize(vmap(f))(xs), of_examples(f, xs))


DERIVATIVES: dict[str, Callable[[Any], Any]] = {
    "jacrev": tsfunc.jacrev,
    "jacfwd": tsfunc.jacfwd,
    "grad of grad": lambda f: grad(lambda x: grad(lambda x: f(x).sum())(x).sin().sum()),
}
STEPS: dict[str, Callable[[Linear, Tensor, Tensor], Tensor]] = {
    "one choice for all": lambda op, s, x: cond(torch.tensor(True), op, lambda s: s, s),
    "nested steps": lambda op, s, x: fori_loop(
        0, 2, lambda i, c: cond(torch.tensor(True), lambda c: op(c) * x, lambda c: c, c), s
    ),
    "steps of a vmap": lambda op, s, x: vmap(
        lambda a: scan(lambda c, b: (op(c) * a + b, c.sum()), s, torch.stack([x, x.cos()]))[0]
    )(x).sum(0),
    "grad in steps": lambda op, s, x: scan(
        lambda c, b: (grad(lambda c: op(c).square().sum())(c) + b, c.sum()),
        s,
        torch.stack([x, x.cos()]),
    )[0],
}

# Uses in which only some examples call the pullback in a body of control flow.
BY_EXAMPLE = (
    "while_loop", "fori_loop", "scan", "nested", "one made in a branch", "grad in a branch",
    "jvp in a branch",
)  # fmt: skip


def of_checkpoint(x: Tensor) -> tuple[Tensor, Linear]:
    out, pull = vjp(tsfunc.checkpoint(nonlinear), x)
    return out, lambda s: pull(s)[0]


def used(maker: Callable[[Tensor], tuple[Tensor, Linear]], use: str) -> Callable[[Tensor], Tensor]:
    def f(x: Tensor) -> Tensor:
        out, op = maker(x)
        return {**USES, **STEPS}[use](op, out, x)

    return f


@pytest.mark.parametrize(
    ("maker", "use"),
    [
        (maker, use)
        for maker in (*MAKERS, "vjp of checkpoint")
        for use in (*USES, *STEPS)
        if (maker, use) != ("vjp of checkpoint", "jvp in a branch")  # refused: the next test
    ],
)
def test_a_program_differentiates_by_what_such_a_pullback_has_kept(maker: str, use: str) -> None:
    forward = maker != "vjp of checkpoint" or use not in BY_EXAMPLE
    names = [name for name in DERIVATIVES if forward or name != "jacfwd"]
    name = names[int(torch.randint(len(names), ()))]
    f = DERIVATIVES[name](used({**MAKERS, "vjp of checkpoint": of_checkpoint}[maker], use))
    xs = torch.randn(4, 3, dtype=torch.float64)
    program = tsfunc.specialize(vmap(f, in_dims=1))
    torch.testing.assert_close(
        program(xs.T), of_examples(f, xs), msg=lambda text: f"{name}: {text}"
    )


@pytest.mark.parametrize("use", BY_EXAMPLE)
def test_a_program_refuses_tangents_of_a_pullback_of_a_checkpoint_in_such_a_choice(
    use: str,
) -> None:
    f = tsfunc.jacfwd(used(of_checkpoint, use))
    with pytest.raises(NotImplementedError, match="Call vjp inside of the branch"):
        tsfunc.specialize(vmap(f))(torch.randn(4, 3, dtype=torch.float64))
