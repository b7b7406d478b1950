"""Derivatives of eigenvectors and singular vectors, against finite differences and autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tsfunc
from tsfunc import grad, jacfwd, jacrev, jvp, specialize, vmap

STEP = 1e-6


def of_eig(a: Tensor) -> Tensor:
    """A function of a matrix that does not depend on the phases of its eigenvectors."""
    values, vectors = torch.linalg.eig(a)
    return torch.cat([(vectors * values.unsqueeze(-2)).abs().flatten(), values.real])


def of_eigh(a: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(a + a.mH)
    return torch.cat([values.sin(), vectors.abs().square().flatten()])


def of_eigvalsh(a: Tensor) -> Tensor:
    values: Tensor = torch.linalg.eigvalsh(a + a.mH)
    return values.sin()


def of_svd(a: Tensor) -> Tensor:
    left, values, right = torch.linalg.svd(a, full_matrices=False)
    return torch.cat([left.abs().flatten(), values.sin(), (left * values @ right).imag.flatten()])


def of_parts(func: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the function of the real and imaginary parts of a matrix."""
    return lambda parts: func(torch.complex(parts[0], parts[1]))


def rotation(seed: int) -> Tensor:
    """Return a real matrix with a pair of distant complex eigenvalues."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(3, 3, dtype=torch.float64, generator=generator) / 5
    turn = torch.tensor([[0.0, -2.0, 0.3], [2.0, 0.5, 0.0], [0.1, 0.2, 4.0]], dtype=torch.float64)
    return turn + noise


def parts(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(2, 3, 3, dtype=torch.float64, generator=generator) / 3
    noise[0] += torch.diag(torch.tensor([1.0, 3.0, -2.0], dtype=torch.float64))
    return noise


CASES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[int], Tensor]]] = {
    "eig of a real matrix": (of_eig, rotation),
    "eig of a complex matrix": (of_parts(of_eig), parts),
    "eigh of a real matrix": (of_eigh, rotation),
    "eigh of a complex matrix": (of_parts(of_eigh), parts),
    "eigvalsh of a complex matrix": (of_parts(of_eigvalsh), parts),
    "svd of a complex matrix": (of_parts(of_svd), parts),
}


def differences(func: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return the Jacobian of a function by central differences, with the input's dims last."""
    flat = [
        (func(x + STEP * e) - func(x - STEP * e)) / (2 * STEP)
        for e in torch.eye(x.numel(), dtype=x.dtype).reshape(-1, *x.shape)
    ]
    return torch.stack(flat, -1).reshape(*flat[0].shape, *x.shape)


@pytest.mark.parametrize("outer", [jacfwd, jacrev])
@pytest.mark.parametrize("inner", [jacfwd, jacrev])
@pytest.mark.parametrize("name", CASES)
def test_second_derivatives(name: str, inner: Any, outer: Any) -> None:
    func, drawn = CASES[name]
    seed = int(torch.randint(1 << 20, ()))
    print(f"seed {seed}")
    x = drawn(seed)
    torch.testing.assert_close(
        outer(inner(func))(x), differences(inner(func), x), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("name", CASES)
def test_third_derivatives(name: str) -> None:
    func, drawn = CASES[name]
    seed = int(torch.randint(1 << 20, ()))
    print(f"seed {seed}")
    x = drawn(seed)
    t = torch.ones_like(x)

    def second(x: Tensor) -> Any:
        return jvp(lambda x: jvp(func, (x,), (t,))[1], (x,), (t,))[1].sum()

    expected = differences(second, x)
    torch.testing.assert_close(grad(second)(x), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(jacfwd(second)(x), expected, rtol=1e-4, atol=1e-5)
    batch = torch.stack([x, drawn(seed + 1)])
    torch.testing.assert_close(vmap(grad(second))(batch)[0], expected, rtol=1e-4, atol=1e-5)


def test_the_gradient_of_complex_singular_vectors_under_vmap() -> None:
    """torch compares the cotangents in C++; here it does so for all examples at once."""
    seed = int(torch.randint(1 << 20, ()))
    print(f"seed {seed}")
    batch = torch.stack([parts(seed + i) for i in range(4)])

    def loss(x: Tensor) -> Tensor:
        return of_parts(of_svd)(x).square().sum()

    expected = torch.stack([torch.autograd.functional.jacobian(loss, x) for x in batch])
    each = grad(loss)
    torch.testing.assert_close(vmap(each, 2, 1)(batch.movedim(0, 2)), expected.movedim(0, 1))
    nested = vmap(vmap(each))(batch.unflatten(0, (2, 2)))
    torch.testing.assert_close(nested.flatten(0, 1), expected)
    torch.testing.assert_close(specialize(each)(batch[0]), expected[0])
    torch.testing.assert_close(specialize(vmap(each))(batch), expected)
    assert vmap(each)(batch[:0]).shape == batch[:0].shape


def test_a_gradient_that_depends_on_phases_is_refused_under_vmap() -> None:
    def loss(x: Tensor) -> Tensor:
        left: Tensor = torch.linalg.svd(torch.complex(x[0], x[1]))[0]
        return left.real.sum()

    batch = torch.stack([parts(i) for i in range(2)])
    with pytest.raises(RuntimeError, match="phase"):
        grad(loss)(batch[0])
    with pytest.raises(tsfunc.errors.TsfuncError):
        vmap(grad(loss))(batch)
    program = specialize(grad(loss))
    with pytest.raises(tsfunc.errors.FailedCheckError):
        program(batch[0])


UNSYMMETRIC: dict[str, Callable[[Tensor], Tensor]] = {
    "eigenvectors": lambda a: torch.linalg.eigh(a)[1].abs(),
    "eigenvalues": lambda a: torch.linalg.eigh(a)[0].sin(),
    "both": lambda a: (lambda v, q: (q * v.sin().unsqueeze(-2)) @ q.mT)(*torch.linalg.eigh(a)),
    "upper triangle": lambda a: torch.linalg.eigh(a, UPLO="U")[1].square(),
    "eigvalsh": lambda a: torch.linalg.eigvalsh(a).sin(),
}


@pytest.mark.parametrize("name", UNSYMMETRIC)
def test_eigh_is_differentiated_as_of_the_symmetric_part(name: str) -> None:
    """The tangents are not symmetric."""
    func = UNSYMMETRIC[name]
    seed = int(torch.randint(1 << 20, ()))
    print(f"seed {seed}")
    x = rotation(seed)
    x = x + x.mT

    def loss(a: Tensor) -> Tensor:
        out = func(a)
        return (out * torch.arange(1, out.numel() + 1).reshape(out.shape)).sum()

    def symmetric(a: Tensor) -> Tensor:
        return loss((a + a.mT) / 2)

    expected = torch.autograd.functional.jacobian(symmetric, x)
    for of in (jacfwd, jacrev):
        torch.testing.assert_close(of(loss)(x), expected)
    expected = torch.autograd.functional.hessian(symmetric, x)
    for inner in (jacfwd, jacrev):
        for outer in (jacfwd, jacrev):
            torch.testing.assert_close(outer(inner(loss))(x), expected)
