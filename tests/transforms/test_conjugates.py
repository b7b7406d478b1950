"""Lazily conjugated and negated tensors behave the same under every transform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.func
from torch import Tensor

from tests.transforms.support import same
from tsfunc import checkpoint, cond, grad, jacfwd, jacrev, jvp, specialize, vjp, vmap

Fn = Callable[[Tensor], Tensor]


def _imaginary_part_written(z: Tensor) -> Tensor:
    y = z.clone()
    y.conj().imag.mul_(2)
    return y.imag


def _conjugate_written(z: Tensor) -> Tensor:
    y = z.clone()
    y.conj().mul_(2j)
    return y.imag


FUNCTIONS: dict[str, Fn] = {
    "imag": lambda z: z.conj().imag,
    "real": lambda z: z.conj().real,
    "imag without conj": lambda z: z.imag.conj(),
    "resolve_conj": lambda z: torch.view_as_real(z.conj().resolve_conj()),
    "resolve_neg": lambda z: z.conj().imag.resolve_neg(),
    "a negated one multiplied": lambda z: z.conj().imag * 2,
    "mH": lambda z: (z[None].mH @ z[None]).imag,
    "H": lambda z: z[None].H.real,
    "vdot": lambda z: torch.vdot(z, z * 1j).imag,
    "vecdot": lambda z: torch.linalg.vecdot(z, z * (1 + 1j)).real,
    "abs": lambda z: (z * z.conj()).abs(),
    "a view": lambda z: z.conj()[:1].imag,
    "twice": lambda z: z.conj().conj().imag,
    "matmul": lambda z: (z.conj()[None] @ z[:, None]).real,
    "is_conj": lambda z: (z.conj() if z.conj().is_conj() else z).real * 1,
    "the imaginary part written": _imaginary_part_written,
    "the conjugate written": _conjugate_written,
    "copy_": lambda z: torch.empty_like(z).copy_(z.conj()).imag,
    "cat": lambda z: torch.cat([z.conj(), z]).imag,
    "where": lambda z: torch.where(torch.tensor([True, False, True]), z.conj(), z).imag,
    "clone": lambda z: z.conj().clone().imag,
    "reshape": lambda z: z.conj().reshape(3, 1).imag,
    "flip": lambda z: z.conj().flip(0).real,
    "stack": lambda z: torch.stack([z.conj().imag, z.real]).sum(0),
}


def _loss(f: Fn) -> Fn:
    return lambda z: (f(z) ** 2).sum().sin()


def _gradient(f: Fn, z: Tensor) -> Tensor:
    z = z.clone().requires_grad_()
    return torch.autograd.grad(_loss(f)(z), z)[0]


def _alike(got: Tensor, want: Tensor) -> None:
    same(got.resolve_conj().resolve_neg(), want.resolve_conj().resolve_neg())


@pytest.fixture(params=list(FUNCTIONS))
def f(request: pytest.FixtureRequest) -> Fn:
    return FUNCTIONS[request.param]


def _examples() -> Tensor:
    return torch.randn(3, 2, dtype=torch.complex128)


def test_programs_of_lazy_conjugates(f: Fn) -> None:
    z = _examples()[:, 0]
    for first in (z, z.conj()):
        program = specialize(f)
        for x in (first, z, z.conj()):
            _alike(program(x), f(x))
    _alike(specialize(lambda z: (f(z), z.conj()))(z)[1], z.conj())
    _alike(specialize(lambda z: cond(z.real.sum() > -99, f, lambda z: f(z) * 0, z))(z), f(z))


def test_batches_of_lazy_conjugates(f: Fn) -> None:
    zs = _examples()
    for x in (zs, zs.conj()):
        want = torch.stack([f(x[:, i]) for i in range(2)])
        _alike(vmap(f, in_dims=1)(x), want)
        _alike(specialize(vmap(f, in_dims=1))(x), want)


def test_derivatives_of_lazy_conjugates(f: Fn) -> None:
    zs = _examples()
    z = zs[:, 1].clone()
    want = torch.stack([_gradient(f, zs[:, i]) for i in range(2)])
    _alike(grad(_loss(f))(z), want[1])
    _alike(specialize(grad(_loss(f)))(z), want[1])
    kept: Any = checkpoint(f)
    _alike(specialize(grad(_loss(kept)))(z), want[1])
    _alike(vmap(grad(_loss(f)), in_dims=1)(zs), want)
    _alike(specialize(vmap(grad(_loss(f)), in_dims=1))(zs), want)
    _alike(grad(lambda zs: vmap(_loss(f), in_dims=1)(zs).sum())(zs), want.T)


def test_tangents_of_lazy_conjugates(f: Fn) -> None:
    zs = _examples()

    def push(z: Tensor) -> Tensor:
        return jvp(f, (z,), (z * 1j,))[1]

    want = torch.stack([torch.func.jvp(f, (z,), (z * 1j,))[1] for z in zs.unbind(1)])
    _alike(push(zs[:, 0]), want[0])
    _alike(specialize(push)(zs[:, 0]), want[0])
    _alike(vmap(push, in_dims=1)(zs), want)


def _of_parts(f: Fn, w: Tensor) -> Fn:
    """Return a function of real numbers, with a product of a conjugate in its formulas."""

    def loss(x: Tensor) -> Tensor:
        z = torch.complex(x[0], x[1])
        return _loss(f)(z * w.conj() + z.conj().angle()) + _loss(f)((z * z).exp())

    return loss


def test_second_and_third_derivatives_by_batched_pullbacks(f: Fn) -> None:
    # Numbers of this size keep the loss well-conditioned.
    x = torch.rand(2, 3, dtype=torch.float64) + 0.2
    w = torch.rand(3, dtype=torch.complex128) + 0.2
    loss = _of_parts(f, w)
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)

    def rows(y: Tensor) -> Tensor:
        given: list[Any] = [
            torch.autograd.grad(one, leaf, create_graph=True, allow_unused=True)[0]
            for one in y.flatten()
        ]
        return torch.stack([torch.zeros_like(leaf) if g is None else g for g in given])

    second = rows(first)
    third = rows(second).reshape(2, 3, 2, 3, 2, 3).detach()
    _alike(jacrev(jacrev(loss))(x), second.reshape(2, 3, 2, 3).detach())
    _alike(jacrev(jacrev(jacrev(loss)))(x), third)
    _alike(jacfwd(jacrev(jacrev(loss)))(x), third)
    # The pullback of a gradient by a conjugate that is captured.
    v = w.clone().requires_grad_()

    def by_captured(batched: Callable[[Fn], Fn]) -> Tensor:
        value, pull = vjp(_of_parts(f, v), x)
        rows = batched(lambda ct: pull(ct)[0])(torch.stack([value, value * 2]).detach())
        return torch.autograd.grad((rows**2).sum(), v)[0]

    def loop(pull: Fn) -> Fn:
        return lambda cts: torch.stack([pull(ct) for ct in cts])

    _alike(by_captured(vmap), by_captured(loop))


def test_tangents_of_tangents(f: Fn) -> None:
    zs = _examples()

    def pushed(jvp: Any) -> Fn:
        def push(z: Tensor) -> Tensor:
            return jvp(lambda z: jvp(_loss(f), (z,), (z * 1j,))[1], (z,), (z * 2,))[1]

        return push

    want = torch.stack([pushed(torch.func.jvp)(z) for z in zs.unbind(1)])
    _alike(pushed(jvp)(zs[:, 0]), want[0])
    _alike(specialize(pushed(jvp))(zs[:, 0]), want[0])
    _alike(vmap(pushed(jvp), in_dims=1)(zs), want)
