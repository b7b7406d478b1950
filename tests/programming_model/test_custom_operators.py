"""torch.export's programming model, "Custom operators": by example."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tsfunc import MetaTensorType as Meta
from tsfunc import specialize


@torch.library.custom_op("programming_model::sin", mutates_args=())
def sin(x: Tensor) -> Tensor:
    return torch.from_numpy(np.sin(x.numpy()))


@torch.library.register_fake("programming_model::sin")  # type: ignore[untyped-decorator]
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("programming_model::custom_nonzero", mutates_args=())
def custom_nonzero(x: Tensor) -> Tensor:
    return x.nonzero()


@torch.library.register_fake("programming_model::custom_nonzero")  # type: ignore[untyped-decorator]
def _(x: Tensor) -> Tensor:
    count = torch.library.get_ctx().new_dynamic_size()
    return x.new_empty([count, x.dim()], dtype=torch.int64)


@torch.library.custom_op("programming_model::add_to", mutates_args={"x"})
def add_to(x: Tensor, y: Tensor) -> None:
    x.add_(y)


@torch.library.custom_op("programming_model::unknown", mutates_args=())
def unknown(x: Tensor) -> Tensor:
    return x.clone()


@pytest.mark.parametrize("described", [None, {"x": Meta(["n"])}])
def test_an_operator_with_a_fake_kernel(described: dict[str, Meta] | None) -> None:
    f = specialize(lambda x: sin(x) * 2, described)
    for n in (3, 5):
        x = torch.randn(n)
        torch.testing.assert_close(f(x), x.sin() * 2)
    assert f.cache_info().programs == (1 if described else 2)


def test_a_fake_kernel_with_a_size_that_depends_on_data() -> None:
    f = specialize(lambda x: (custom_nonzero(x) + 1, torch.ones(custom_nonzero(x).shape[0])))
    for x in (torch.tensor([0.0, 1.0, 2.0]), torch.zeros(3)):
        torch.testing.assert_close(f(x), (x.nonzero() + 1, torch.ones(x.nonzero().shape[0])))
    assert f.cache_info().programs == 1


def test_an_operator_that_writes() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        add_to(x, y)
        return x * 2

    g, x = specialize(f), torch.ones(2)
    for i in (2, 3):
        assert g(x, torch.ones(2)).equal(torch.full((2,), 2.0 * i)) and x[0] == i


def test_an_operator_without_a_fake_kernel_is_an_error_that_names_it() -> None:
    with pytest.raises(Exception, match=r"programming_model.*unknown"):
        specialize(lambda x: unknown(x))(torch.ones(2))


@torch.library.custom_op("programming_model::index_select", mutates_args=())
def index_select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    return x.index_select(dim, index)


@torch.library.register_fake("programming_model::index_select")  # type: ignore[untyped-decorator]
def _(x: Tensor, dim: int, index: Tensor) -> Tensor:
    size = list(x.size())
    if x.dim() > 0:
        size[dim] = index.numel()
    return x.new_empty(size)


def test_the_fake_kernel_tells_the_shape_of_the_result() -> None:
    f = specialize(
        lambda x, index: index_select(x, 1, index) * 2,
        {"x": Meta(["n", "m"]), "index": Meta(["k"])},
    )
    for n, m, k in ((3, 4, 5), (2, 7, 3)):
        x, index = torch.randn(n, m), torch.randint(m, (k,))
        torch.testing.assert_close(f(x, index), x[:, index] * 2)
    assert f.cache_info().programs == 1
    assert any(each.shape == ("n", "k") for each in f.properties().values())
