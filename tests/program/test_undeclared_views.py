"""Views whose schemas declare no alias, in programs that write into them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tsfunc import grad, jvp, specialize, vmap
from tsfunc.bridge.control.node_writes import NEW_MEMORY

aten = torch.ops.aten
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "_unsafe_view": lambda x: aten._unsafe_view(x, [4, 3]),
    "unsafe_split": lambda x: aten.unsafe_split(x, 2)[0],
    "unsafe_split_with_sizes": lambda x: aten.unsafe_split_with_sizes(x, [1, 2])[1],
    "unsafe_chunk": lambda x: aten.unsafe_chunk(x, 2)[0],
}


@pytest.mark.parametrize("name", VIEWS)
def test_equal_values_keep_their_own_memory(name: str) -> None:
    view = VIEWS[name]

    def f(x: Tensor) -> Tensor:
        first, second = view(x @ x.mT @ x), view(x @ x.mT @ x)
        first.add_(1)
        second.mul_(x[0, 0])
        return first * second

    x = torch.randn(3, 4, dtype=torch.float64)
    torch.testing.assert_close(specialize(f)(x), f(x))


FRESH: dict[str, Callable[[Tensor], Any]] = {
    "matmul": lambda x: aten.matmul(x, torch.eye(x.shape[-1])),
    "linear": lambda x: aten.linear(x, torch.eye(x.shape[-1])),
    "bilinear": lambda x: aten.bilinear(x, x, torch.ones(1, x.shape[-1], x.shape[-1])),
    "outer": lambda x: aten.outer(x[0], torch.ones(1)),
    "inner": lambda x: aten.inner(x, torch.eye(x.shape[-1])),
    "kron": lambda x: aten.kron(x, torch.ones(1, 1)),
    "square": lambda x: aten.square(x),
    "absolute": lambda x: aten.absolute(x),
    "negative": lambda x: aten.negative(x),
    "divide.Tensor": lambda x: aten.divide(x, torch.ones(())),
    "divide.Scalar": lambda x: aten.divide.Scalar(x, 1),
    "multiply.Tensor": lambda x: aten.multiply(x, torch.ones(())),
    "multiply.Scalar": lambda x: aten.multiply.Scalar(x, 1),
    "subtract.Tensor": lambda x: aten.subtract(x, torch.zeros(())),
    "subtract.Scalar": lambda x: aten.subtract.Scalar(x, 0),
    "true_divide.Tensor": lambda x: aten.true_divide(x, torch.ones(())),
    "true_divide.Scalar": lambda x: aten.true_divide.Scalar(x, 1),
    "softmax.int": lambda x: aten.softmax(x, 0),
    "log_softmax.int": lambda x: aten.log_softmax(x, 0),
    "layer_norm": lambda x: aten.layer_norm(x, [x.shape[-1]]),
    "group_norm": lambda x: aten.group_norm(x[None], 1),
    "rms_norm": lambda x: aten.rms_norm(x, [x.shape[-1]]),
    "conv1d": lambda x: aten.conv1d(x, torch.ones(x.shape[0], x.shape[0], 1)),
    "conv2d": lambda x: aten.conv2d(x[None], torch.ones(1, 1, 1, 1)),
    "conv3d": lambda x: aten.conv3d(x[None, None], torch.ones(1, 1, 1, 1, 1)),
    "where.Scalar": lambda x: aten.where.Scalar(x > 0, 1.0, 2.0),
    "where.ScalarSelf": lambda x: aten.where.ScalarSelf(x > 9, 1.0, x),
    "where.ScalarOther": lambda x: aten.where.ScalarOther(x < 9, x, 1.0),
    "std": lambda x: aten.std(x),
    "std.dim": lambda x: aten.std(x, [0]),
    "var": lambda x: aten.var(x),
    "var.dim": lambda x: aten.var(x, [0]),
    "concat": lambda x: aten.concat([x]),
    "hstack": lambda x: aten.hstack([x]),
    "vstack": lambda x: aten.vstack([x]),
    "cosine_similarity": lambda x: aten.cosine_similarity(x, x),
    "cross_entropy_loss": lambda x: aten.cross_entropy_loss(x, x.softmax(-1), reduction=0),
}


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("name", sorted(NEW_MEMORY))
def test_results_of_composites_with_new_memory(name: str) -> None:
    for shape in ((3, 4), (2, 1), (1, 1), (1, 3)):
        x = torch.linspace(-1, 1, shape[0] * shape[1]).reshape(shape)
        out = FRESH[name.removeprefix("aten::")](x)
        assert out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_factors_that_are_computed_twice() -> None:
    """The tangents of ``lu_factor`` are written into a view of this kind."""

    def f(x: Tensor) -> Tensor:
        def factors(x: Tensor) -> Tensor:
            return torch.linalg.lu_factor(x)[0]

        return (factors(x) * factors(x)).sum()

    def mapped(x: Tensor) -> Tensor:
        return vmap(grad(f))(torch.stack([x.sin(), x])).sum()

    x, v = torch.randn(2, 3, 3, dtype=torch.float64).unbind()
    pushed: Any = lambda x: jvp(mapped, (x,), (v,))[1]  # noqa: E731
    torch.testing.assert_close(specialize(pushed)(x), pushed(x))


@pytest.mark.parametrize("linear", [torch.mean, lambda x: x * 2], ids=["mean", "scale"])
def test_tangents_from_outside_are_read_by_the_program(linear: Callable[[Tensor], Tensor]) -> None:
    """Only the tangent reaches an operator, which once ran during the trace."""
    x, v = torch.randn(2, 3, dtype=torch.float64).unbind()

    def pushed(f: Any) -> Any:
        return lambda x: jvp(f, (x,), (v,))[1]

    twice, batch = pushed(pushed(linear)), x.expand(2, 3)
    torch.testing.assert_close(specialize(twice)(x), twice(x))
    torch.testing.assert_close(specialize(vmap(pushed(linear)))(batch), vmap(pushed(linear))(batch))
