"""Random numbers of transformed functions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.semantics.transform_tables import (
    BATCHED,
    SAME,
    Transform,
    X,
    every,
)
from tsfunc import (
    checkpoint,
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
