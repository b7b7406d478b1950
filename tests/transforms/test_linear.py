"""stop_gradient, hvp and linear_transpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.func
from torch import Tensor

import tsfunc
from tests.transforms.support import same
from tsfunc import MetaTensorType as Meta
from tsfunc import grad, hvp, jvp, linear_transpose, specialize, stop_gradient, vmap
from tsfunc.errors import DescriptorError

X = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
XS = torch.stack([X, X.sin(), X.cos()])
A = torch.arange(6.0, dtype=torch.float64).view(2, 3)


def half_known(x: Tensor) -> Any:
    known: Any = stop_gradient({"x": [x.sin(), "other"]})
    return (x * known["x"][0]).sum()


NESTINGS: dict[str, tuple[Callable[[Callable[[Tensor], Tensor]], Any], Tensor]] = {
    "grad": (grad, X),
    "vmap(grad)": (lambda f: vmap(grad(f)), XS),
    "grad(vmap)": (lambda f: grad(lambda x: vmap(f)(x).sum()), XS),
    "jvp": (lambda f: lambda x: jvp(f, (x,), (x,))[1], X),
    "jvp(vmap)": (lambda f: lambda x: jvp(vmap(f), (x,), (x,))[1], XS),
    "specialize(vmap(grad))": (lambda f: specialize(vmap(grad(f))), XS),
    "vmap(specialize)": (lambda f: vmap(specialize(grad(f))), XS),
}


@pytest.mark.parametrize("name", NESTINGS)
def test_stopped_values_are_constants(name: str) -> None:
    """The reference is a function of two arguments that is differentiated by one."""
    build, x = NESTINGS[name]
    constant = x.sin()
    got = build(half_known)(x)
    if name == "jvp":
        same(got, (x * constant).sum())
    elif name == "jvp(vmap)":
        same(got, (x * constant).sum(1))
    else:
        same(got, constant)


def test_stopped_values_are_constants_of_every_order_and_level() -> None:
    same(grad(lambda x: grad(half_known)(x).sum())(X), torch.zeros_like(X))
    same(jvp(grad(half_known), (X,), (X,))[1], torch.zeros_like(X))

    def inner(x: Tensor) -> Any:
        return vmap(grad(lambda y: (stop_gradient(x) * y * x).sum()))(XS).sum()

    same(grad(inner)(X), 3 * X)


def cubes(x: Tensor, y: Tensor) -> Tensor:
    return (x**3 * y.sin()).sum()


def test_hvp_is_the_hessian_times_the_vector() -> None:
    hessian = torch.func.hessian(lambda x: cubes(x, X))(X)
    same(hvp(lambda x: cubes(x, X), (X,), (XS[1],)), hessian @ XS[1])
    blocks = torch.func.hessian(cubes, (0, 1))(X, XS[1])
    want = tuple(row[0] @ XS[2] + row[1] @ X for row in blocks)
    same(hvp(cubes, (X, XS[1]), (XS[2], X)), want)
    tree = hvp(lambda p: cubes(p["x"], p["y"]), ({"x": X, "y": X},), ({"x": X, "y": X},))
    assert set(tree) == {"x", "y"}


def test_hvp_under_transforms() -> None:
    def product(x: Tensor) -> Tensor:
        return hvp(lambda x: (x.sin() * x).sum(), (x,), (x,))

    each = torch.stack([product(x) for x in XS])
    same(vmap(product)(XS), each)
    same(specialize(vmap(product))(XS), each)
    # By hand: f'' is 2 cos x - x sin x, times x, which gives x f''.
    want = (2 * X.cos() - X * X.sin()) + X * (-3 * X.sin() - X * X.cos())
    same(grad(lambda x: product(x).sum())(X), want)
    same(tsfunc.jacfwd(product)(X), want.diag())


LINEAR: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "product": (lambda x: A @ x, (X,)),
    "several": (lambda x, y: (x + 2 * y, y.sum()), (X, X)),
    "containers": (lambda p: {"out": p["a"][1:] - p["b"].flip(0)[:2]}, ({"a": X, "b": X},)),
    "indices": (lambda x: x[torch.tensor([2, 0, 0])], (X,)),
    "a mask": (lambda x: torch.where(A > 2, x, 0.0), (A,)),
    "in place": (lambda x: x.clone().mul_(3).T, (A,)),
    "a transform": (lambda x: vmap(lambda row: row.sum() * X)(x), (A,)),
    "a scan": (lambda x: tsfunc.scan(lambda c, row: (c + row, c), x[0], x)[1], (A,)),
}


@pytest.mark.parametrize("name", LINEAR)
def test_the_transpose_is_that_of_the_matrix(name: str) -> None:
    func, primals = LINEAR[name]
    leaves = tsfunc.pytrees.leaves_of
    described = tsfunc.pytrees.tree_map(
        lambda x: Meta(list(x.shape), dtype=x.dtype, device="cpu"), primals
    )
    out = func(*primals)
    cotangent = tsfunc.pytrees.tree_map(lambda x: (x + 1).cos(), out)
    for given in (primals, described):
        pulled = linear_transpose(func, *given)(cotangent)
        left = sum((a * b).sum() for a, b in zip(leaves(out), leaves(cotangent), strict=True))
        right = sum((a * b).sum() for a, b in zip(leaves(primals), leaves(pulled), strict=True))
        torch.testing.assert_close(left, right)
        same(pulled, tsfunc.vjp(func, *primals)[1](cotangent))


def test_transposes_under_transforms() -> None:
    like = Meta([3], dtype=torch.float64)

    def transposed(a: Tensor, ct: Tensor) -> Tensor:
        return linear_transpose(lambda v: a @ v, like)(ct)[0]

    ct = X[:2]
    same(transposed(A, ct), A.T @ ct)
    same(vmap(transposed)(A.expand(2, 2, 3), XS[:2, :2]), XS[:2, :2] @ A)
    same(grad(lambda a: transposed(a, ct).sum())(A), ct[:, None].expand(2, 3))
    same(grad(lambda ct: transposed(A, ct).sum())(ct), A.sum(1))
    same(jvp(lambda ct: transposed(A, ct), (ct,), (ct,))[1], A.T @ ct)
    same(vmap(grad(lambda a: transposed(a, ct).sum()))(A[None]), ct[:, None].expand(1, 2, 3))
    same(specialize(transposed)(A, ct), A.T @ ct)
    same(specialize(vmap(transposed, (None, 0)))(A, XS[:, :2]), XS[:, :2] @ A)
    # The transpose of the transpose is the function.
    back = linear_transpose(lambda ct: transposed(A, ct), ct)
    same(back(X)[0], A @ X)


def test_the_transpose_of_complex_functions_does_not_conjugate() -> None:
    z = torch.complex(X, XS[1])
    same(linear_transpose(lambda v: (1 + 2j) * v, z)(z)[0], (1 + 2j) * z)


NOT_LINEAR = [torch.sin, torch.abs, lambda x: x * x, lambda x: x.sum() * x]


@pytest.mark.parametrize("func", NOT_LINEAR, ids=range(len(NOT_LINEAR)))
def test_functions_that_are_not_linear_are_refused(func: Callable[[Tensor], Tensor]) -> None:
    for where in (func, lambda x: vmap(func)(x[None])[0]):
        with pytest.raises(ValueError, match="not linear: its derivative depends on the value"):
            linear_transpose(where, X)
    with pytest.raises(ValueError, match="not linear"):
        vmap(lambda x: linear_transpose(func, x)(x)[0])(XS)


def test_functions_that_can_not_be_transposed_are_refused() -> None:
    with pytest.raises(ValueError, match="does not map zeros to zeros"):
        linear_transpose(lambda x: x + 1, X)
    with pytest.raises(ValueError, match="expected tensors or MetaTensorTypes as primals, got int"):
        linear_transpose(lambda x: x, 3)
    with pytest.raises(DescriptorError, match="with a dtype and fixed sizes"):
        linear_transpose(lambda x: x, Meta(["n"], dtype=torch.float32))
    with pytest.raises(
        RuntimeError, match=r"linear_transpose\(.*\)\(cotangents\): expected a cotangent"
    ):
        linear_transpose(lambda x: A @ x, X)(X)
