"""Values of an inner vmap that are written into tensors of an outer vmap, and into their views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.transforms.support import loop
from tsfunc import grad, jacfwd, specialize, vmap

Made = Callable[[Tensor], Tensor]
VIEWS: dict[str, Made] = {
    "slice": lambda y: y[1:],
    "row": lambda y: y[0],
    "steps": lambda y: y[:, ::2],
    "transposed": lambda y: y.T,
    "diagonal": lambda y: y.diagonal(),
    "flat": lambda y: y.flatten(),
    "itself": lambda y: y,
    "view of a view": lambda y: y[1:][..., 1:],
    "detached": lambda y: y.detach(),
    "detached slice": lambda y: y[:, 1:].detach(),
}
DIMS = [((0, None), (0, 1)), ((0, None), (0, 2)), ((1, None), (None, 1)), ((2, 0), (1, None))]
Dims = Sequence[Sequence[int | None]]


def written(view: Made, other: Made) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that writes to a view of a tensor that depends on ``b`` alone."""

    def function(a: Tensor, b: Tensor) -> Tensor:
        y = b * 1
        w, z = other(y), view(y)
        z.add_(a.sum())
        z[..., 0] = a[0, 1]
        return (y * a[0, 0]).sum() + w.square().sum() + z.sin().sum()

    return function


def arguments(dims: Dims) -> list[Tensor]:
    """Return 3 by 3 matrices with the batch dims of two vmaps, of 4 and 5 examples."""
    shapes = [[3, 3], [3, 3]]
    for each, size in zip(dims, (4, 5), strict=True):
        for shape, dim in zip(shapes, each, strict=True):
            if dim is not None:
                shape.insert(dim, size)
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def same(result: Any, expected: Sequence[Tensor]) -> None:
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("name", VIEWS)
def test_writes_into_views_of_an_outer_vmaps_tensor(name: str, dims: Dims) -> None:
    """They equal the loop: eagerly, differentiated at every level, and in programs."""
    names = list(VIEWS)
    other = VIEWS[names[names.index(name) - 1]]
    function, (inner, outer) = written(VIEWS[name], other), dims
    a, b = arguments(dims)
    nested = vmap(vmap(function, tuple(inner)), tuple(outer))

    def summed(call: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda a, b: call(a, b).square().sum()

    def looped(a: Tensor, b: Tensor) -> Tensor:
        def examples(a: Tensor, b: Tensor) -> Tensor:
            return loop(function, 4, tuple(inner))(a, b)

        return loop(examples, 5, tuple(outer))(a, b)

    leaves = [a.clone().requires_grad_(), b.clone().requires_grad_()]
    expected = looped(a, b)
    gradients = torch.autograd.grad(summed(looped)(*leaves), leaves)
    gradient = grad(summed(nested), (0, 1))
    several = vmap(gradient)
    twice = torch.stack([a, a]), torch.stack([b, b])
    same([nested(a, b)], [expected])
    same([both[1] for both in several(*twice)], gradients)
    same(jacfwd(summed(nested), (0, 1))(a, b), gradients)
    for backend in ("python", "aot_eager"):
        same([specialize(nested, backend=backend)(a, b)], [expected])
        same(specialize(gradient, backend=backend)(a, b), gradients)
