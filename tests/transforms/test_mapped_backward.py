"""``backward`` of an ``autograd.Function`` of one vmap, pulled back inside of a later vmap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tsfunc


class Shifted(torch.autograd.Function):
    """``torch.roll`` of the last dim, by a composite operator, with its own derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, by: int) -> Tensor:
        places = torch.arange(x.shape[-1]).roll(by)
        return torch.take_along_dim(x, places.view(*[1] * (x.dim() - 1), -1), -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.by = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return Shifted.apply(gradient, -ctx.by), None  # type: ignore[no-untyped-call]


def loss(shift: Callable[..., Any]) -> Callable[[Tensor], Any]:
    return lambda x: (shift(x.sin(), 1) * shift(x.exp(), 2)).sum()


# Each jacrev pulls back inside of a vmap that begins after the inner vmap ended.
TOWERS: dict[str, Callable[[Any, Any, Tensor], Any]] = {
    "jacrev(jacrev)": lambda T, f, x: T.jacrev(T.jacrev(f))(x[0]),
    "jacrev(jacrev(jacrev))": lambda T, f, x: T.jacrev(T.jacrev(T.jacrev(f)))(x[0]),
    "jacrev(grad)": lambda T, f, x: T.jacrev(T.grad(f))(x[0]),
    "jacrev(vmap)": lambda T, f, x: T.jacrev(T.vmap(f))(x),
    "jacrev(vmap(grad))": lambda T, f, x: T.jacrev(T.vmap(T.grad(f)))(x),
    "jacrev(vmap(jacrev))": lambda T, f, x: T.jacrev(T.vmap(T.jacrev(f)))(x),
    "vmap(jacrev(jacrev))": lambda T, f, x: T.vmap(T.jacrev(T.jacrev(f)))(x),
    "vmap(jacrev(vmap(jacrev)))": lambda T, f, x: T.vmap(T.jacrev(T.vmap(T.jacrev(f))))(
        torch.stack([x, x.cos()])
    ),
}


@pytest.mark.parametrize("name", TOWERS)
def test_towers_of_backward_passes_and_maps(name: str) -> None:
    x = torch.randn(2, 3, dtype=torch.float64)
    expected = TOWERS[name](torch.func, loss(lambda x, by: x.roll(by, -1)), x)
    torch.testing.assert_close(TOWERS[name](tsfunc, loss(Shifted.apply), x), expected)


def test_a_vector_of_cotangents_of_a_pullback_made_before() -> None:
    x, vs = torch.randn(2, 3), torch.randn(4, 2)
    pull = tsfunc.vjp(tsfunc.vmap(loss(Shifted.apply)), x)[1]
    plain_pull = torch.func.vjp(torch.func.vmap(loss(lambda x, by: x.roll(by, -1))), x)[1]
    torch.testing.assert_close(
        tsfunc.vmap(lambda v: pull(v)[0])(vs), torch.stack([plain_pull(v)[0] for v in vs])
    )
