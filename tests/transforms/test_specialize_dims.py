"""Sizes of specialized functions: multiples, choices, expressions, unknown leading dims."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tsfunc import Dim, specialize
from tsfunc import MetaTensorType as Meta
from tsfunc.errors import DescriptorViolation

CASES: list[tuple[Callable[..., Any], dict[str, Any], list[list[list[int]]], list[list[int]]]] = [
    (
        lambda x: x.reshape(-1, 4).sum(0),
        {"x": Meta([Dim("n", multiple_of=8)])},
        [[[8]], [[24]], [[0]]],
        [[12]],
    ),
    (
        lambda x: x.reshape(2, -1) + x.shape[0],
        {"x": Meta(["2*n"])},
        [[[8]], [[24]], [[2]], [[0]]],
        [[7]],
    ),
    (
        lambda x, y: x.reshape(y.shape[0], -1) * y[:, None],
        {"x": Meta(["a*b"]), "y": Meta(["a"])},
        [[[6], [2]], [[20], [4]], [[3], [3]], [[5], [1]]],
        [[7], [2]],
    ),
    (
        lambda x, y: torch.cat([x, y]) * x.shape[0],
        {"x": Meta(["n+1"]), "y": Meta(["n+2"])},
        [[[6], [7]], [[20], [21]], [[1], [2]]],
        [[3], [5]],
    ),
    (
        lambda x, y, z: torch.cat([x, y]) + z,
        {"x": Meta(["a"]), "y": Meta(["b"]), "z": Meta(["b+a"])},
        [[[5], [4], [9]], [[5], [5], [10]], [[1], [1], [2]]],
        [[3], [5], [9]],
    ),
    (
        lambda x, y: x.reshape(-1) + y,
        {"x": Meta(["n", "n"]), "y": Meta(["n**2"])},
        [[[5, 5], [25]], [[4, 4], [16]], [[1, 1], [1]]],
        [[3, 3], [6]],
    ),
    (
        lambda x, y: x.sum() * y,
        {"x": Meta([Dim("n", min=4)]), "y": Meta(["n//2"])},
        [[[8], [4]], [[6], [3]]],
        [[8], [3]],
    ),
    (
        lambda x, a, b: torch.cat(torch.gradient(x, spacing=(a, b)), 1),
        {"x": Meta(["n", "m"]), "a": Meta(["n"]), "b": Meta(["m"])},
        [[[5, 4], [5], [4]], [[3, 7], [3], [7]], [[6, 6], [6], [6]]],
        [[5, 4], [4], [4]],
    ),
    (
        lambda x, a: torch.gradient(x, spacing=(a,), edge_order=2)[0],
        {"x": Meta(["n"]), "a": Meta(["n"])},
        [[[5], [5]], [[4], [4]], [[9], [9]]],
        [[5], [4]],
    ),
    (
        lambda x: x * 2,
        {"x": Meta([Dim("n", one_of=[2, 4, 7]), 3])},
        [[[2, 3]], [[7, 3]]],
        [[3, 3]],
    ),
    (
        lambda x: x.sum(-2),
        {"x": Meta([..., "n", 3])},
        [[[2, 3]], [[4, 3]], [[5, 7, 3]], [[5, 8, 3]], [[1, 1, 3]]],
        [[3]],
    ),
]


@pytest.mark.parametrize(("func", "descriptors", "good", "bad"), CASES)
def test_programs_for_sizes(
    func: Callable[..., Any], descriptors: dict[str, Any], good: Any, bad: Any
) -> None:
    s = specialize(func, descriptors)
    for _ in range(2):
        for shapes in good:
            args = [torch.randn(shape) for shape in shapes]
            torch.testing.assert_close(s(*args), func(*args))
        with pytest.raises(DescriptorViolation):
            s(*(torch.randn(shape) for shape in bad))
    assert s.cache_info().misses <= len(good) + 2  # a refused call is not kept


@pytest.mark.parametrize(
    ("descriptors", "shapes"),
    [
        ({"x": Meta([Dim("n", multiple_of=4)])}, [[8], [12], [400]]),
        ({"x": Meta(["2*n+1"])}, [[5], [9], [401]]),
        ({"x": Meta([Dim("n", min=3, max=9)])}, [[3], [9], [4]]),
    ],
)
def test_one_program_serves_all_sizes(descriptors: dict[str, Any], shapes: list[Any]) -> None:
    s = specialize(lambda x: x.flip(0).cumsum(0) + x.shape[0], descriptors)
    for shape in shapes:
        x = torch.randn(shape)
        torch.testing.assert_close(s(x), x.flip(0).cumsum(0) + x.shape[0])
    assert s.cache_info().programs == 1


def test_the_trace_knows_the_multiple_of_a_size() -> None:
    def halves(x: Tensor) -> Tensor:
        n = x.shape[0]
        return x[: n // 2] if n % 2 == 0 else x

    s = specialize(halves, {"x": Meta([Dim("n", multiple_of=4)])})
    assert s(torch.ones(8)).shape == (4,) and s(torch.ones(20)).shape == (10,)
    assert s.cache_info().programs == 1


def test_equal_sizes_of_two_names_stay_distinct() -> None:
    s = specialize(lambda x, y: x.sum() + y.sum(), {"x": Meta(["n"]), "y": Meta(["m"])})
    assert s(torch.ones(3), torch.ones(3)) == 6
    assert s(torch.ones(3), torch.ones(4)) == 7 and s.cache_info().programs == 1


def test_more_names_than_anyone_writes() -> None:
    names = [f"n{i}" for i in range(20)]
    s = specialize(lambda *xs: sum(x.sum() for x in xs), {"xs": tuple(Meta([n]) for n in names)})
    assert s(*(torch.ones(i + 2) for i in range(20))) == 230
    assert s(*(torch.ones(i + 5) for i in range(20))) == 290
    assert s.cache_info().programs == 1


@pytest.mark.parametrize(
    ("meta", "x"),
    [
        (Meta(["n", 3], dtype=torch.float32, strides=[1, "n"]), torch.ones(3, 5).t()),
        (
            Meta(["n", 3, 4, 4], dtype=torch.float32, memory_format=torch.channels_last),
            torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
        ),
        (Meta([Dim("n", multiple_of=4), "2*n"], dtype=torch.float32), torch.ones(8, 16)),
    ],
)
def test_lowered_ahead_of_any_call(meta: Meta, x: Tensor) -> None:
    s = specialize(lambda x: x * 2)
    s.lower({"x": meta})
    assert s(x).equal(2 * x) and s(x).stride() == x.stride()
    assert s.cache_info().programs == 1


@pytest.mark.parametrize("name", ["addcmul_", "addcdiv_", "lerp_"])
def test_in_place_operators_broadcast_to_symbolic_sizes(name: str) -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return getattr(x.clone(), name)(y, x[:1])

    s = specialize(f, {"x": Meta(["n", 2]), "y": Meta([2])})
    y = torch.rand(2, dtype=torch.float64) + 1
    for n in (3, 5, 2):
        x = torch.rand(n, 2, dtype=torch.float64) + 1
        torch.testing.assert_close(s(x, y), f(x, y))
    assert s.cache_info().programs == 1
    with pytest.raises(RuntimeError, match=r"must match|match the broadcast shape"):
        specialize(lambda x: getattr(x.clone(), name)(x[None], x), {"x": Meta(["n"])})(y)
