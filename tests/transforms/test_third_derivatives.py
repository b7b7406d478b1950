"""Third derivatives of normalizations, norms, softmax, attention and solvers match formulas."""

from __future__ import annotations

import functools
import itertools
import math
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
SIGNS = torch.tensor([1, -1, -1])
MASK = torch.tensor([[1, 0, 1, 0], [0, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 1]], dtype=torch.bool)


def normalized(x: Tensor, dims: list[int]) -> Tensor:
    var = x.var(dims, correction=0, keepdim=True)
    return (x - x.mean(dims, keepdim=True)) / (var + EPS).sqrt()


def column(x: Tensor) -> Tensor:
    return x.unsqueeze(-1)


def attended(x: Tensor, **kwargs: Any) -> Tensor:
    """Return self-attention of a tensor of the shape (3, 4, 2), as 3 samples with 2 heads."""
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
    """Return invertible matrices of two rows."""
    return x[:, :2].sin() + 3 * torch.eye(2, dtype=x.dtype)


def inverse(a: Tensor) -> Tensor:
    """Return the inverse of two by two matrices, by its formula."""
    p, q, r, s = a[..., 0, 0], a[..., 0, 1], a[..., 1, 0], a[..., 1, 1]
    adjugate = torch.stack([torch.stack([s, -q], -1), torch.stack([-r, p], -1)], -2)
    return adjugate / column(column(p * s - q * r))


def lower(x: Tensor) -> Tensor:
    return torch.linalg.cholesky(matrices(x) @ matrices(x).mT)


def det(a: Tensor) -> Tensor:
    return a[..., 0, 0] * a[..., 1, 1] - a[..., 0, 1] * a[..., 1, 0]


def norm(x: Tensor, p: float = 2) -> Tensor:
    """Return the norms over the last dim, which is kept."""
    return x.abs().pow(p).sum(-1, keepdim=True).pow(1 / p)


def every(y: Tensor) -> Tensor:
    """Return numbers for each sample, in the shape of the tests."""
    return y.reshape(3, -1)[:, :1, None].expand(3, 4, 2)


def whole(y: Tensor) -> Tensor:
    """Return results of the shape (3, 2, 2) or (3, 2), in the shape of the tests."""
    matrix = y if y.dim() == 3 else column(y).expand(3, 2, 2)
    return torch.cat([matrix, matrix.cos()], 1)


def householder(x: Tensor, tau: Tensor) -> Tensor:
    """Return the first two columns of the product of a reflection and the identity."""
    v = torch.cat([torch.ones(3, 1).double(), x[:, 1:, 0]], 1)
    eye: Tensor = torch.eye(4, 2).double()
    return eye - tau[:, None, None] * v[:, :, None] * v[:, None, :2]


def with_zeros(x: Tensor) -> Tensor:
    """Return the tensor shifted so that ``X`` has zeros in its second column."""
    return x - X * (torch.arange(4) == 1).double()[:, None]


def products(x: Tensor) -> Tensor:
    """Return the products of the columns up to each one."""
    first, second, third, last = x.unbind(1)
    columns = [first, first * second, first * second * third, first * second * third * last]
    return torch.stack(columns, 1)


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
    "det": (lambda x: every(torch.linalg.det(matrices(x))), lambda x: every(det(matrices(x)))),
    "det of one matrix": (
        lambda x: torch.linalg.det(matrices(x)[0]).expand(3, 4, 2),
        lambda x: det(matrices(x)[0]).expand(3, 4, 2),
    ),
    "slogdet": (
        lambda x: every(torch.linalg.slogdet(matrices(x))[1]),
        lambda x: every(det(matrices(x)).log()),
    ),
    "cholesky_inverse": (
        lambda x: whole(torch.cholesky_inverse(lower(x))),
        lambda x: whole(inverse(matrices(x) @ matrices(x).mT)),
    ),
    "cholesky_inverse, upper": (
        lambda x: whole(torch.cholesky_inverse(lower(x).mT, upper=True)),
        lambda x: whole(inverse(matrices(x) @ matrices(x).mT)),
    ),
    "triangular_solve": (
        lambda x: whole(torch.triangular_solve(x[:, 2:], matrices(x))[0]),
        lambda x: whole(inverse(matrices(x).triu()) @ x[:, 2:]),
    ),
    "eigvalsh": (
        lambda x: every(torch.linalg.eigvalsh(matrices(x) + matrices(x).mT).square().sum(-1)),
        lambda x: every((matrices(x) + matrices(x).mT).square().sum([-1, -2])),
    ),
    "householder_product": (
        lambda x: torch.linalg.householder_product(x, x[:, 0, :1]),
        lambda x: householder(x, x[:, 0, 0]),
    ),
    "householder_product without reflections": (
        lambda x: x[:, :, :2] * torch.linalg.householder_product(x, x[:, 0, :0]),
        lambda x: x[:, :, :2] * torch.eye(4, 2).double(),
    ),
    "cumprod": (lambda x: with_zeros(x).cumprod(1), lambda x: products(with_zeros(x))),
    "cumprod in place": (
        lambda x: with_zeros(x).cumprod_(1),
        lambda x: products(with_zeros(x)),
    ),
    "vector_norm": (
        lambda x: torch.linalg.vector_norm(x, dim=2, keepdim=True).expand(3, 4, 2),
        lambda x: norm(x).expand(3, 4, 2),
    ),
    "matrix_norm": (
        lambda x: every(torch.linalg.matrix_norm(x)),
        lambda x: every(norm(x.flatten(1))),
    ),
    "norm of order 3": (
        lambda x: x.norm(3, 2, keepdim=True).expand(3, 4, 2),
        lambda x: norm(x, 3).expand(3, 4, 2),
    ),
    "norm of order 1.5": (
        lambda x: torch.norm(x, 1.5).expand(3, 4, 2),
        lambda x: norm(x.flatten(), 1.5).expand(3, 4, 2),
    ),
    "normalize": (lambda x: F.normalize(x, dim=2), lambda x: x / norm(x)),
    "cosine_similarity": (
        lambda x: torch.cosine_similarity(x, x.cos(), 2)[..., None].expand(3, 4, 2),
        lambda x: (x * x.cos()).sum(2, keepdim=True) / norm(x) / norm(x.cos()) * torch.ones(2),
    ),
    "renorm": (
        lambda x: torch.renorm(x, 2, 0, 0.5),
        lambda x: x * every(0.5 / (norm(x.flatten(1)) + 1e-7)),
    ),
    "renorm in place": (
        lambda x: x.clone().renorm_(2, 0, 0.5),
        lambda x: x * every(0.5 / (norm(x.flatten(1)) + 1e-7)),
    ),
    "dist": (
        lambda x: torch.dist(x, x.cos()).expand(3, 4, 2),
        lambda x: norm((x - x.cos()).flatten()).expand(3, 4, 2),
    ),
    "cdist": (
        lambda x: torch.cdist(x, x.cos() + 3)[..., :2],
        lambda x: norm(x[:, :, None] - x[:, None].cos() - 3)[..., 0][..., :2],
    ),
    "cdist of order 3": (
        lambda x: torch.cdist(x, x.cos() + 3, p=3)[..., :2],
        lambda x: norm(x[:, :, None] - x[:, None].cos() - 3, 3)[..., 0][..., :2],
    ),
    "pdist": (
        lambda x: torch.pdist(x.flatten(1))[0].expand(3, 4, 2),
        lambda x: norm(x.flatten(1)[0] - x.flatten(1)[1]).expand(3, 4, 2),
    ),
    "weight_norm": (
        lambda x: torch._weight_norm(x, x[:, :1, :1].sin(), 0),
        lambda x: x * every(x[:, :1, :1].sin() / norm(x.flatten(1))[..., None]),
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
    "logit": (
        lambda x: torch.logit(0.9 * x.cos().square()),
        lambda x: (1 / (1 / (0.9 * x.cos().square()) - 1)).log(),
    ),
    "logit of clamped values": (
        lambda x: torch.logit(x.cos().square(), 0.2),
        lambda x: (1 / (1 / x.cos().square().clamp(0.2, 0.8) - 1)).log(),
    ),
    "std": (
        lambda x: torch.stack([x.std(1), *torch.std_mean(x, 1, correction=0)]).sum(0)[:, None],
        lambda x: (x.var(1).sqrt() + x.var(1, correction=0).sqrt() + x.mean(1)).unsqueeze(1),
    ),
    "sgn of a complex number": (
        lambda x: torch.view_as_real(torch.complex(x, x.exp()).sgn()).sum(-1),
        lambda x: (x + x.exp()) / (x * x + x.exp().square()).sqrt(),
    ),
    "sgn of a complex number, in place": (
        lambda x: torch.view_as_real(torch.complex(x, x.exp()).sgn_()).sum(-1),
        lambda x: (x + x.exp()) / (x * x + x.exp().square()).sqrt(),
    ),
    "logsumexp of complex numbers": (
        lambda x: torch.view_as_real(torch.complex(x, x.sin()).logsumexp(1, True)).sum(-1),
        lambda x: torch.view_as_real(torch.complex(x, x.sin()).exp().sum(1, True).log()).sum(-1),
    ),
    "binary cross entropy": (
        lambda x: F.binary_cross_entropy(x.sigmoid(), x.sin().square(), reduction="none"),
        lambda x: torch.log1p(x.exp()) - x * x.sin().square(),
    ),
    "copysign": (
        lambda x: torch.copysign(x.sin() * x, x.cos()) + torch.copysign(x.exp(), -1.0),
        lambda x: (x.sin() * x).abs() * x.cos().sign() - x.exp(),
    ),
    "copysign in place": (
        lambda x: (x.sin() * x).copysign_(x.cos()) + x.exp().clone().copysign_(-1.0),
        lambda x: (x.sin() * x).abs() * x.cos().sign() - x.exp(),
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
        return tsfunc.jvp(f, (x,), (along,))[1]

    return pushed


def mapped(f: Scalar, along: Tensor) -> Scalar:
    def second(x: Tensor) -> Tensor:
        grads: Tensor = tsfunc.vmap(tsfunc.grad(f), in_dims=1)(torch.stack([x.sin(), x], 1))
        return (grads[1] * along).sum()

    return second


@pytest.mark.filterwarnings("ignore:torch.triangular_solve is deprecated")
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
        return tsfunc.grad(f, argnums=(0, 1, 2))(X, weight, bias)

    torch.testing.assert_close(third(norm), third(written), rtol=1e-7, atol=1e-7)


embedding_loss = functools.partial(F.cosine_embedding_loss, margin=-0.9, reduction="none")


def cosine(x: Tensor) -> Tensor:
    """Return the cosine between two tensors along the last dim, which are rows of four numbers."""
    return x.prod(-1).sum(-1) / x.square().sum(1).prod(-1).sqrt()


FOURTH: dict[str, tuple[Scalar, Scalar]] = {
    "std": NORMS["std"],
    "binary cross entropy": NORMS["binary cross entropy"],
    "cosine embedding loss": (
        lambda x: column(column(embedding_loss(x[..., 0], x[..., 1], SIGNS))),
        lambda x: column(column(torch.where(SIGNS == 1, 1 - cosine(x), cosine(x) + 0.9))),
    ),
    "abs of complex numbers": (
        lambda x: torch.complex(x, x.exp()).abs(),
        lambda x: (x * x + x.exp().square()).sqrt(),
    ),
}


@pytest.mark.parametrize(
    "modes",
    [(reverse, forward, forward, reverse), (forward, reverse, forward, reverse)],
    ids=["rffr", "frfr"],
)
@pytest.mark.parametrize("name", FOURTH)
def test_fourth_derivatives(
    name: str, modes: tuple[Callable[[Scalar, Tensor], Scalar], ...]
) -> None:
    """torch's formulas write in place into values that a fourth derivative reads."""

    def cubed(f: Scalar) -> Scalar:
        return lambda x: (f(x).pow(3) * X.sin()).sum()

    got, want = (cubed(f) for f in FOURTH[name])
    for mode, along in zip(modes, (*DIRECTIONS, X.cos()), strict=True):
        got, want = mode(got, along), reverse(want, along)
    torch.testing.assert_close(got(X), want(X), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("modes", list(itertools.product((reverse, forward), repeat=2)))
def test_second_derivatives_of_hardsigmoid(
    modes: tuple[Callable[[Scalar, Tensor], Scalar], ...],
) -> None:
    """torch's own backward operator has no derivative; it divides by 6 in single precision."""
    got: Scalar = functools.partial(_cubed, F.hardsigmoid)
    want: Scalar = functools.partial(_cubed, lambda x: ((x + 3) / 6).clamp(0, 1))
    for mode, along in zip(modes, DIRECTIONS[:2], strict=True):
        got, want = mode(got, along), reverse(want, along)
    torch.testing.assert_close(got(X * 4), want(X * 4), rtol=1e-6, atol=1e-7)


def test_batch_norm_with_an_update() -> None:
    """The operator has a backward operator of its own."""
    mean, var = torch.zeros(4).double(), torch.ones(4).double()

    def norm(x: Tensor) -> Tensor:
        return torch.ops.aten._batch_norm_with_update(
            x, WEIGHT, BIAS, mean.clone(), var.clone(), 0.1, EPS
        )[0]

    got: Scalar = functools.partial(_cubed, norm)
    want: Scalar = functools.partial(_cubed, NORMS["batch_norm"][1])
    for along in DIRECTIONS:
        got, want = reverse(got, along), reverse(want, along)
    torch.testing.assert_close(got(X), want(X), rtol=1e-8, atol=1e-8)


def _cubed(f: Scalar, x: Tensor) -> Tensor:
    return f(x).pow(3).sum()


@pytest.mark.filterwarnings("ignore:torch.triangular_solve is deprecated")
@pytest.mark.parametrize("name", NORMS)
def test_in_a_program(name: str) -> None:
    def third(x: Tensor) -> Tensor:
        f = NORMS[name][0]
        for along in DIRECTIONS:
            f = reverse(functools.partial(_cubed, f), along)
        return f(x)

    torch.testing.assert_close(tsfunc.specialize(third, {})(X), third(X))


@pytest.mark.parametrize(
    "name",
    "layer_norm,batch_norm,weight_norm,cdist,logit,logit of clamped values".split(","),
)
def test_of_a_program_of_a_gradient(name: str) -> None:
    """The program calls backward formulas, which are differentiated when it runs."""

    def cubed(f: Scalar) -> Scalar:
        return lambda x: (f(x).pow(3) * X.sin()).sum()

    got, want = (cubed(f) for f in NORMS[name])
    program: Scalar = tsfunc.specialize(reverse(got, DIRECTIONS[0]))
    got = reverse(program, DIRECTIONS[1])
    for along in DIRECTIONS[:2]:
        want = reverse(want, along)
    torch.testing.assert_close(tsfunc.grad(got)(X), tsfunc.grad(want)(X), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("eps", [None, 0.0, 0.1, 0.5, -1.0])
def test_the_gradient_of_logit_at_every_kind_of_value(eps: float | None) -> None:
    x = torch.tensor([-1, 0, 0.05, 0.3, 0.5, 0.9, 1, 1.2, math.nan])
    program = tsfunc.specialize(tsfunc.grad(lambda x: torch.logit(x, eps).sum()))
    want = tsfunc.grad(lambda x: torch.logit(x, eps).sum())(x)
    torch.testing.assert_close(tsfunc.vjp(program, x)[0], want, equal_nan=True)


@pytest.mark.parametrize("matrix", ["identity", "two equal columns", "zero"])
def test_determinants_of_matrices_with_equal_singular_values(matrix: str) -> None:
    eye = torch.eye(3).double()
    equal = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 1]]).double()
    a = {"identity": eye, "two equal columns": equal, "zero": eye[:1, :1] * 0}[matrix]

    def by_permutations(a: Tensor) -> Tensor:
        return a[0, 0] if len(a) == 1 else torch.linalg.cross(a[0], a[1]) @ a[2]

    transforms: list[Any] = [tsfunc.jacrev, tsfunc.jacfwd]
    for modes in itertools.product(transforms, repeat=2):
        got: Any = torch.linalg.det
        want: Any = by_permutations
        for mode in modes:
            got, want = mode(got), mode(want)
        torch.testing.assert_close(got(a), want(a), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(tsfunc.vmap(got)(a[None]), want(a)[None], rtol=1e-9, atol=1e-9)


def test_copysign_of_a_number_where_nothing_is_mapped() -> None:
    """C++ makes a tensor of the number before the kernels of derivatives see it."""
    for x in (X, torch.arange(3), torch.ones(2, dtype=torch.int32)):
        found = tsfunc.vmap(lambda a, x=x: torch.copysign(x, -1.0) + a.sum() * 0)(X)
        same = torch.copysign(x, -1.0)
        torch.testing.assert_close(found, same.expand(3, *x.shape), check_dtype=False)


@pytest.mark.parametrize("shape", [(3, 0), (0, 3), (5, 0, 0)])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_nested_derivatives_of_softmax_of_empty_tensors(name: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float32)

    def tangent(x: Tensor) -> Tensor:
        f = functools.partial(getattr(torch, name), dim=1, dtype=torch.float64)
        return tsfunc.jvp(f, (x,), (torch.ones_like(x),))[1]

    out, pullback = tsfunc.vjp(tangent, x)
    assert out.shape == shape and out.dtype == torch.float64
    assert pullback(out)[0].shape == shape


def _pulled(api: Any, f: Scalar, x: Tensor) -> Any:
    """Return a function for the gradient of f with fixed cotangents, none of them zero."""
    cotangent = (torch.linspace(-1.0, 2.0, x.numel(), dtype=X.dtype) + 0.1).to(x.dtype)
    return lambda x: api.vjp(f, x)[1](cotangent)[0]


@pytest.mark.parametrize("gap", [0.0, 30.0, 1e4])
@pytest.mark.parametrize("transform", [tsfunc.jacfwd, tsfunc.jacrev])
def test_second_derivatives_of_logcumsumexp_of_values_far_apart(gap: float, transform: Any) -> None:
    """They agree with torch.func's, which are right if no cotangent is zero."""
    x = torch.cat([X[0, :1, 0] + gap, X[0, 1:, 0]])

    def scan(x: Tensor) -> Tensor:
        return torch.logcumsumexp(x, 0)

    want = torch.func.jacrev(_pulled(torch.func, scan, x))(x)
    torch.testing.assert_close(transform(_pulled(tsfunc, scan, x))(x), want, rtol=1e-8, atol=1e-8)


def test_second_derivatives_of_logcumsumexp_of_complex_numbers() -> None:
    x = X[0, :, 0]
    z, tangent = torch.complex(x, x.sin()), torch.complex(x.cos(), x.sin())
    got, want = (
        tsfunc.jvp(_pulled(tsfunc, f, z), (z,), (tangent,))[1]
        for f in (lambda z: torch.logcumsumexp(z, 0), lambda z: z.exp().cumsum(0).log())
    )
    torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-8)


def test_hessians_of_logcumsumexp_with_zero_cotangents() -> None:
    """The rows of a Jacobian have zero cotangents, for which torch's second derivative is wrong."""

    def twice(f: Scalar) -> Tensor:
        def weighted(x: Tensor) -> Tensor:
            return torch.atan2(f(x), WEIGHT)

        return tsfunc.jacrev(tsfunc.jacrev(weighted))(X[0, :, 0])

    want = twice(lambda x: x.exp().cumsum(0).log())
    torch.testing.assert_close(twice(lambda x: x.logcumsumexp(0)), want, rtol=1e-9, atol=1e-9)
