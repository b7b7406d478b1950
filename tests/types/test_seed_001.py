"""The ideas of the input descriptor proposal, each shown by a call."""

from __future__ import annotations

from typing import Any, Dict, List  # noqa: UP035

import pytest
import torch
from torch import Tensor, nn

from tsfunc import MetaTensorType, infer_descriptors, specialize
from tsfunc.errors import DescriptorViolation


class MyModel(nn.Module):
    def forward(self, x: Tensor, flag: bool) -> Tensor:
        if flag:
            return torch.add(x, 1)
        return torch.sub(x, 1)


def test_the_example() -> None:
    meta = MetaTensorType([100, 200], dtype=float)
    specialized = specialize(MyModel(), {"x": meta, "flag": True})
    x = torch.randn(100, 200, dtype=torch.float64)
    assert specialized(x, True).equal(x + 1)
    assert "sub" not in str(specialized.program)
    bad = torch.ones(100, dtype=torch.float64)
    with pytest.raises(DescriptorViolation, match=r"x\.shape: expected \[100, 200\], got \[100\]"):
        specialized(bad, True)
    with pytest.raises(DescriptorViolation, match="flag: expected the value True"):
        specialized(x, False)


def test_a_subset_of_parameters() -> None:
    specialized = specialize(MyModel(), {"flag": False})
    for shape in ((2,), (3, 4)):
        assert specialized(torch.ones(shape), False).equal(torch.zeros(shape))
    assert specialized.cache_info().programs == 2


def scaled(x: Any, by: Any, mode: Any) -> Any:
    return torch.sum(x * by) if mode == "sum" else x * by


def test_three_kinds_of_specialization() -> None:
    # A number by its type is an input, a size by its name is open, a string by its value is a
    # constant.
    specialized = specialize(
        lambda x, by, mode: scaled(x, by, mode),
        {"x": MetaTensorType(["n"]), "by": float, "mode": "sum"},
    )
    for n, by in ((3, 2.0), (5, 0.5), (9, -1.0)):
        assert specialized(torch.ones(n), by, "sum") == n * by
    assert specialized.cache_info().programs == 1
    with pytest.raises(DescriptorViolation, match="by: expected float, got 2"):
        specialized(torch.ones(3), 2, "sum")


def test_a_descriptor_goes_before_the_annotation() -> None:
    def doubled(x: int) -> Any:
        return x * 2

    specialized: Any = specialize(doubled, {"x": MetaTensorType(["n"])})
    assert specialized(torch.ones(3)).equal(torch.full((3,), 2.0))


@pytest.mark.parametrize(
    ("shape", "good", "bad"),
    [
        ([100, 200], [(100, 200)], (100, 100)),
        (["i", "i", 100], [(2, 2, 100), (7, 7, 100)], (2, 3, 100)),
        (["i1", "i2", "i3"], [(2, 3, 4), (5, 5, 5)], (2, 3)),
    ],
)
def test_symbolic_lengths(shape: Any, good: list[Any], bad: Any) -> None:
    specialized = specialize(lambda x: x + 1, {"x": MetaTensorType(shape)})
    for each in good:
        assert specialized(torch.zeros(each)).equal(torch.ones(each))
    assert specialized.cache_info().programs == 1
    with pytest.raises(DescriptorViolation):
        specialized(torch.zeros(bad))


def test_the_same_string_is_the_same_size_in_all_descriptors() -> None:
    row = MetaTensorType(["i"])
    specialized = specialize(
        lambda x, ys: x + sum(ys["a"]),
        {"x": row, "ys": Dict[str, List[row]]},  # type: ignore[valid-type]  # noqa: UP006
    )
    assert specialized(torch.ones(3), {"a": [torch.ones(3)] * 2}).equal(torch.full((3,), 3.0))
    with pytest.raises(
        DescriptorViolation,
        match=r"ys\['a'\]\[1\].*: expected 3 \(i is 3 at x\.shape\[0\]\), got 4",
    ):
        specialized(torch.ones(3), {"a": [torch.ones(3), torch.ones(4)]})


def test_gradual_widening() -> None:
    def f(x: Tensor) -> Tensor:
        return x.relu()

    inputs = [
        torch.randn(3, 4),
        torch.randn(5, 4),
        torch.randn(2, 3, 4),
        torch.randn(2, 4).double(),
    ]
    d = infer_descriptors({"x": inputs[0]})
    seen = []
    for x in inputs:
        try:
            specialize(f, d)(x)
        except DescriptorViolation:
            wider = d.widen({"x": x})
            assert d < wider
            d = wider
        assert specialize(f, d)(x).equal(x.relu())
        seen.append(str(d).split(" cpu")[0])
    assert seen == ["x: f32[3, 4]", "x: f32[n, 4]", "x: f32[..., n, 4]", "x: tensor[..., n, 4]"]


def test_one_function_described_by_two_callers() -> None:
    def f(x: Tensor) -> Tensor:
        return x.cumsum(0)

    rows = specialize(f, {"x": MetaTensorType(["n"])})
    images = specialize(f, {"x": MetaTensorType(["n", 3, "h", "w"], dtype=torch.float32)})
    assert rows(torch.ones(3)).equal(f(torch.ones(3)))
    assert images(torch.ones(2, 3, 4, 4)).equal(f(torch.ones(2, 3, 4, 4)))
    with pytest.raises(DescriptorViolation):
        rows(torch.ones(2, 3, 4, 4))


@pytest.mark.parametrize("on", [True, False])
def test_values_that_do_not_match_are_refused(on: bool) -> None:
    # torch.jit.trace would answer the second call with the branch of the first.
    specialized = specialize(MyModel())
    assert specialized(torch.ones(2), True).equal(torch.full((2,), 2.0))
    assert specialized(torch.ones(2), on).equal(torch.full((2,), 2.0 if on else 0.0))
