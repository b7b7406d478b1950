"""Third derivatives of normalizations, softmax, attention and solvers are their formulas'."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tsfunc

Scalar = Callable[[Tensor], Tensor]
Mode = Callable[[Scalar, Tensor], Scalar]
WEIGHT, BIAS = torch.tensor([0.7, -1.2, 0.3, 2.0]).double(), torch.linspace(-1, 1, 4).double()
X = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(0)).double()
DIRECTIONS = torch.randn(3, *X.shape, generator=torch.Generator().manual_seed(1)).double()
EPS = 1e-3
MASK = torch.tensor([[1, 0, 1, 0], [0, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 1]], dtype=torch.bool)


def normalized(x: Tensor, dims: list[int]) -> Tensor:
    var = x.var(dims, correction=0, keepdim=True)
    return (x - x.mean(dims, keepdim=True)) / (var + EPS).sqrt()


def column(x: Tensor) -> Tensor:
    return x.unsqueeze(-1)


def attended(x: Tensor, **kwargs: Any) -> Tensor:
    """Attention among the parts of a tensor of the shape (3, 4, 2), as 3 samples with 2 heads."""
    query, key, value = x[:, None], x.flip(1)[:, None] * 0.5, x.sin()[:, None]
    heads = query.repeat(1, 2, 1, 1) * column(column(torch.tensor([1.0, 0.7]).double()))
    if not kwargs.get("enable_gqa"):
        key, value = key.repeat(1, 2, 1, 1), value.repeat(1, 2, 1, 1)
    return F.scaled_dot_product_attention(heads, key, value, **kwargs)[:, 0].add(0.3)


def attended_by_formula(x: Tensor, mask: Tensor | None = None, scale: float = 2**-0.5) -> Tensor:
    scores = x @ (x.flip(1) * 0.5).mT * scale
    if mask is not None and mask.dtype == torch.bool:
        weights = scores.exp() * mask
        weights = weights / weights.sum(-1, keepdim=True)
    else:
        weights = (scores if mask is None else scores + mask).softmax(-1)
    return weights @ x.sin() + 0.3


def matrices(x: Tensor) -> Tensor:
    """Two by two matrices that have inverses."""
    return x[:, :2].sin() + 3 * torch.eye(2, dtype=x.dtype)


def inverse(a: Tensor) -> Tensor:
    """The inverse of two by two matrices, by its formula."""
    p, q, r, s = a[..., 0, 0], a[..., 0, 1], a[..., 1, 0], a[..., 1, 1]
    adjugate = torch.stack([torch.stack([s, -q], -1), torch.stack([-r, p], -1)], -2)
    return adjugate / column(column(p * s - q * r))


def whole(y: Tensor) -> Tensor:
    """Results of the shape (3, 2, 2) or (3, 2), in the shape of the tests."""
    matrix = y if y.dim() == 3 else column(y).expand(3, 2, 2)
    return torch.cat([matrix, matrix.cos()], 1)


NORMS: dict[str, tuple[Scalar, Scalar]] = {
    "layer_norm": (
        lambda x: F.layer_norm(x, (4, 2), column(WEIGHT).expand(4, 2), None, EPS),
        lambda x: normalized(x, [-1, -2]) * column(WEIGHT),
    ),
    "layer_norm, whole": (
        lambda x: F.layer_norm(x, (3, 4, 2), eps=EPS),
        lambda x: normalized(x, [0, 1, 2]),
    ),
    "batch_norm": (
        lambda x: F.batch_norm(x, None, None, WEIGHT, BIAS, training=True, eps=EPS),
        lambda x: normalized(x, [0, 2]) * column(WEIGHT) + column(BIAS),
    ),
    "batch_norm by its statistics": (
        lambda x: F.batch_norm(x, BIAS, WEIGHT.square(), WEIGHT, BIAS, eps=EPS),
        lambda x: (
            (x - column(BIAS)) / column((WEIGHT.square() + EPS).sqrt()) * column(WEIGHT)
            + column(BIAS)
        ),
    ),
    "instance_norm": (
        lambda x: F.instance_norm(x, eps=EPS),
        lambda x: normalized(x, [2]),
    ),
    "solve": (
        lambda x: whole(torch.linalg.solve(matrices(x), x[:, 2:])),
        lambda x: whole(inverse(matrices(x)) @ x[:, 2:]),
    ),
    "solve, vectors": (
        lambda x: whole(torch.linalg.solve(matrices(x), x[:, 2])),
        lambda x: whole((inverse(matrices(x)) @ column(x[:, 2]))[..., 0]),
    ),
    "solve, from the right": (
        lambda x: whole(torch.linalg.solve(matrices(x), x[:, 2:], left=False)),
        lambda x: whole(x[:, 2:] @ inverse(matrices(x))),
    ),
    "group_norm": (
        lambda x: F.group_norm(x, 2, WEIGHT, BIAS, EPS),
        lambda x: normalized(x.view(3, 2, 4), [2]).view(3, 4, 2) * column(WEIGHT) + column(BIAS),
    ),
    "softmax": (lambda x: x.softmax(1), lambda x: x.exp() / x.exp().sum(1, keepdim=True)),
    "log_softmax": (
        lambda x: x.log_softmax(1),
        lambda x: x - x.exp().sum(1, keepdim=True).log(),
    ),
    "logsumexp": (
        lambda x: x.logsumexp([0, 1], keepdim=True).expand(3, 4, 2),
        lambda x: x.exp().sum([0, 1]).log().expand(3, 4, 2),
    ),
    "glu": (
        lambda x: F.glu(x, 1).repeat(1, 2, 1),
        lambda x: (x[:, :2] / (1 + (-x[:, 2:]).exp())).repeat(1, 2, 1),
    ),
    "attention": (attended, attended_by_formula),
    "causal attention": (
        lambda x: attended(x, is_causal=True, scale=0.3),
        lambda x: attended_by_formula(x, torch.ones(4, 4, dtype=torch.bool).tril(), 0.3),
    ),
    "attention with a mask": (
        lambda x: attended(x, attn_mask=MASK),
        lambda x: attended_by_formula(x, MASK),
    ),
    "attention with a bias": (
        lambda x: attended(x, attn_mask=BIAS.outer(WEIGHT)),
        lambda x: attended_by_formula(x, BIAS.outer(WEIGHT)),
    ),
    "attention with shared heads": (
        lambda x: attended(x, enable_gqa=True),
        attended_by_formula,
    ),
}


def reverse(f: Scalar, along: Tensor) -> Scalar:
    return lambda x: (tsfunc.grad(f)(x) * along).sum()


def forward(f: Scalar, along: Tensor) -> Scalar:
    def pushed(x: Tensor) -> Tensor:
        tangent: Tensor = tsfunc.jvp(f, (x,), (along,))[1]
        return tangent

    return pushed


def mapped(f: Scalar, along: Tensor) -> Scalar:
    def second(x: Tensor) -> Tensor:
        grads: Tensor = tsfunc.vmap(tsfunc.grad(f), in_dims=1)(torch.stack([x.sin(), x], 1))
        return (grads[1] * along).sum()

    return second


@pytest.mark.parametrize("modes", list(itertools.product((reverse, forward, mapped), repeat=3)))
@pytest.mark.parametrize("name", NORMS)
def test_third_derivatives(
    name: str, modes: tuple[Callable[[Scalar, Tensor], Scalar], ...]
) -> None:
    def cubed(norm: Scalar) -> Scalar:
        return lambda x: (norm(x).pow(3) * X.sin()).sum()

    got, want = (cubed(f) for f in NORMS[name])
    for mode, along in zip(modes, DIRECTIONS, strict=True):
        got, want = mode(got, along), reverse(want, along)
    torch.testing.assert_close(got(X), want(X), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", ["layer_norm", "batch_norm"])
def test_by_the_parameters(name: str) -> None:
    """Mixed derivatives by input, weight and bias."""
    weight, bias = WEIGHT, BIAS

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if name == "layer_norm":
            out = F.layer_norm(x.mT, (4,), weight, bias, EPS).mT
        else:
            out = F.batch_norm(x, None, None, weight, bias, training=True, eps=EPS)
        return (out.pow(3) * X.cos()).sum()

    def written(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        out = normalized(x, [1] if name == "layer_norm" else [0, 2])
        return ((out * column(weight) + column(bias)).pow(3) * X.cos()).sum()

    def third(f: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        for _ in range(2):

            def total(*args: Tensor, f: Callable[..., Tensor] = f) -> Tensor:
                grads = tsfunc.grad(f, argnums=(0, 1, 2))(*args)
                return torch.stack(
                    [(g * (k + 1) / 50).sin().sum() for k, g in enumerate(grads)]
                ).sum()

            f = total
        out: tuple[Tensor, ...] = tsfunc.grad(f, argnums=(0, 1, 2))(X, weight, bias)
        return out

    torch.testing.assert_close(third(norm), third(written), rtol=1e-7, atol=1e-7)


def _cubed(f: Scalar, x: Tensor) -> Tensor:
    return f(x).pow(3).sum()


def test_in_a_program() -> None:
    def third(x: Tensor) -> Tensor:
        f = NORMS["layer_norm"][0]
        for along in DIRECTIONS:
            f = reverse(functools.partial(_cubed, f), along)
        return f(x)

    torch.testing.assert_close(tsfunc.specialize(third, {})(X), third(X))
