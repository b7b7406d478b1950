"""Random numbers of transformed functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from tests.semantics.transform_tables import (
    BATCHED,
    SAME,
    Transform,
    X,
    every,
)
from tsfunc import (
    checkpoint,
    cond,
    grad_and_value,
    jvp,
    specialize,
    vmap,
)


def noisy(x: Tensor) -> Tensor:
    return x * torch.rand(2) + F.dropout(x) + torch.randn_like(x)


DRAWS: dict[str, Transform] = {
    **SAME,
    "jvp": lambda f: lambda x: jvp(f, (x,), (x,))[0],
    "grad_and_value": lambda f: (
        lambda x: grad_and_value(lambda x: (lambda y: (y.sum(), y))(f(x)), has_aux=True)(x)[1][1]
    ),
    "grad(checkpoint)": lambda f: (
        lambda x: grad_and_value(
            lambda x: (lambda y: (y.sum(), y))(checkpoint(f)(x)), has_aux=True
        )(x)[1][1]
    ),
}


@every(DRAWS)
def test_random_numbers_are_those_of_the_function(transform: Transform) -> None:
    g = transform(noisy)
    g(X)
    torch.manual_seed(3)
    want = [noisy(X), noisy(X), torch.rand(1)]
    torch.manual_seed(3)
    torch.testing.assert_close([g(X), g(X), torch.rand(1)], want)


SAME_DRAWS: dict[str, Transform] = {
    "vmap": lambda f: vmap(f, randomness="same"),
    "specialize(vmap)": lambda f: specialize(vmap(f, randomness="same")),
    "vmap(specialize)": lambda f: vmap(specialize(f), randomness="same"),
    "vmap(checkpoint)": lambda f: vmap(checkpoint(f), randomness="same"),
}


@pytest.mark.parametrize("name", list(BATCHED))
def test_random_numbers_of_a_batch_follow_randomness(name: str) -> None:
    """They are refused by default; "same" draws the numbers of one example."""
    with pytest.raises(RuntimeError, match="randomness"):
        BATCHED[name](noisy)(X)
    g = SAME_DRAWS[name](noisy)
    g(X)
    torch.manual_seed(3)
    found = [g(X), g(X), torch.rand(1)]
    torch.manual_seed(3)
    state = torch.get_rng_state()
    for got in found[:2]:
        start = torch.get_rng_state()
        rows = []
        for x in X:
            torch.set_rng_state(start)
            rows.append(noisy(x))
        torch.testing.assert_close(got, torch.stack(rows))
    assert not torch.equal(torch.get_rng_state(), state)
    assert torch.equal(found[2], torch.rand(1)), "the generator is where one example leaves it"


def again(f: Callable[..., Tensor], *args: Tensor) -> Tensor:
    out: Tensor = torch_checkpoint(f, *args, use_reentrant=False)
    return out


RERUN: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x.sin(), 0.4).exp(),
    "in place": lambda x: (x * torch.empty(2).uniform_()).exp(),
    "written": lambda x: (x * torch.rand(2).mul_(2).add_(1)).exp(),
    "several": lambda x: (F.dropout(x) * torch.randn_like(x)).cos() * torch.rand(2),
    "a branch": lambda x: (
        cond(x.sum() > 0, lambda x: F.dropout(x).exp(), lambda x: (x * torch.rand(2)).exp(), x) * x
    ).cos(),
    "a checkpoint inside": lambda x: (again(lambda y: F.dropout(y).exp(), x) * torch.rand(2)).exp(),
}
DERIVED: dict[str, Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Any]]] = {
    "grad": lambda f: specialize(grad_and_value(lambda x: f(x).sum())),
    "second": lambda f: specialize(
        grad_and_value(lambda x: grad_and_value(lambda x: f(x).sum())(x)[0].square().sum())
    ),
    "vmap": lambda f: specialize(vmap(grad_and_value(lambda x: f(x).sum()), randomness="split")),
}


# Under vmap the checkpoint refuses a branch that draws: its reruns save other tensors.
RERUNS = [
    (name, each) for name in RERUN for each in DERIVED if (name, each) != ("a branch", "vmap")
]


@pytest.mark.parametrize(("name", "derivative"), RERUNS)
def test_a_program_of_a_checkpoint_of_torch_draws_as_without_it(name: str, derivative: str) -> None:
    """The backward pass has the numbers of the first run, and draws none."""
    func, derive = RERUN[name], DERIVED[derivative]
    x = torch.tensor([[0.3, -0.2], [0.5, 1.0]])[slice(None) if derivative == "vmap" else 0]
    kept, plain = derive(lambda x: again(func, x)), derive(func)
    found = []
    for f in (kept, plain):
        torch.manual_seed(3)
        found.append([f(x), f(2 * x), torch.rand(1)])
    torch.testing.assert_close(found[0], found[1])
