"""Views whose schemas declare no alias, in programs that write into them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tsfunc import grad, jvp, specialize, vmap

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


def test_factors_that_are_computed_twice() -> None:
    """The tangents of ``lu_factor`` are written into such a view."""

    def f(x: Tensor) -> Tensor:
        def factors(x: Tensor) -> Tensor:
            lu: Tensor = torch.linalg.lu_factor(x)[0]
            return lu

        return (factors(x) * factors(x)).sum()

    def mapped(x: Tensor) -> Tensor:
        total: Tensor = vmap(grad(f))(torch.stack([x.sin(), x])).sum()
        return total

    x, v = torch.randn(2, 3, 3, dtype=torch.float64).unbind()
    pushed: Any = lambda x: jvp(mapped, (x,), (v,))[1]  # noqa: E731
    torch.testing.assert_close(specialize(pushed)(x), pushed(x))


@pytest.mark.parametrize("linear", [torch.mean, lambda x: x * 2], ids=["mean", "scale"])
def test_tangents_from_outside_are_read_by_the_program(linear: Callable[[Tensor], Tensor]) -> None:
    """The tangent alone reaches an operator, which ran while the program was traced."""
    x, v = torch.randn(2, 3, dtype=torch.float64).unbind()

    def pushed(f: Any) -> Any:
        return lambda x: jvp(f, (x,), (v,))[1]

    twice, batch = pushed(pushed(linear)), x.expand(2, 3)
    torch.testing.assert_close(specialize(twice)(x), twice(x))
    torch.testing.assert_close(specialize(vmap(pushed(linear)))(batch), vmap(pushed(linear))(batch))
