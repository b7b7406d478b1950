"""Products of vectors and matrices against the loop."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch

import tsfunc
from tests.ops.harness import Level, check
from tsfunc.ops.registry import find

aten = torch.ops.aten


def rand(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(len(shape)))


SHAPES = [
    ((4,), (4,)),
    ((2, 4), (4,)),
    ((4,), (4, 5)),
    ((2, 4), (4, 5)),
    ((6, 2, 4), (4,)),
    ((6, 2, 4), (4, 5)),
    ((2, 4), (6, 4, 5)),
    ((4,), (6, 4, 5)),
    ((6, 2, 4), (6, 4, 5)),
    ((7, 1, 2, 4), (6, 4, 5)),
    ((6, 2, 4), (7, 1, 4, 5)),
    ((0, 4), (4, 5)),
    ((2, 0), (0, 5)),
    ((6, 2, 4), (6, 4, 0)),
]


@pytest.mark.parametrize("shapes", SHAPES)
def test_matmul(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    assert check(aten.matmul.default, rand(*shapes[0]), rand(*shapes[1]))


@pytest.mark.parametrize("batched", [(0, 0), (0, None), (None, 0)], ids=str)
@pytest.mark.parametrize(
    ("name", "x", "y"),
    [
        ("mm", (0, 3), (3, 4)), ("mm", (2, 0), (0, 4)), ("mv", (3, 0), (0,)), ("dot", (0,), (0,)),
        ("vdot", (0,), (0,)), ("matmul", (0, 3), (3, 4)),
        ("nn.functional.linear", (0, 3), (4, 3)), ("nn.functional.linear", (0,), (4, 0)),
    ],
)  # fmt: skip
def test_products_without_elements_refuse_two_dtypes(
    name: str, x: tuple[int, ...], y: tuple[int, ...], batched: tuple[int | None, int | None]
) -> None:
    product = operator.attrgetter(name)(torch)
    args = [torch.ones(x, dtype=torch.float64), torch.ones(y, dtype=torch.float32)]
    with pytest.raises(RuntimeError):
        product(*args)
    batch = [
        arg if dim is None else torch.stack([arg] * 2)
        for arg, dim in zip(args, batched, strict=True)
    ]
    with pytest.raises(RuntimeError, match="dtype"):
        tsfunc.vmap(product, batched)(*batch)


def test_products_of_fixed_rank() -> None:
    assert check(aten.mm.default, rand(2, 4), rand(4, 5))
    assert check(aten.mm.default, rand(2, 4).long(), rand(4, 5).long())
    assert check(aten.bmm.default, rand(6, 2, 4), rand(6, 4, 5))
    assert check(aten.mv.default, rand(2, 4), rand(4))
    assert check(aten.dot.default, rand(4), rand(4))
    z = rand(4, dtype=torch.complex128)
    assert check(aten.vdot.default, z, z * 1j)
    assert check(aten.ger.default, rand(4), rand(5))
    assert check(aten.outer.default, rand(4), rand(5))


@pytest.mark.parametrize("lead", [(), (2,), (2, 5), (2, 1, 5), (0,), (0, 5)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(lead: tuple[int, ...], bias: bool) -> None:
    b = (rand(6),) if bias else ()
    assert check(aten.linear.default, rand(*lead, 4), rand(6, 4), *b)


def test_linear_with_one_output() -> None:
    assert check(aten.linear.default, rand(2, 4), rand(4))


@pytest.mark.parametrize("kwargs", [{}, {"beta": 0.5, "alpha": 2}, {"beta": 0}])
@pytest.mark.parametrize("suffix", ["", "_"])
def test_added_products(kwargs: dict[str, Any], suffix: str) -> None:
    def op(name: str) -> Any:
        return getattr(aten, name + suffix).default

    for shape in [(2, 5)] if suffix else [(2, 5), (5,), (), (2, 1)]:
        assert check(op("addmm"), rand(*shape), rand(2, 4), rand(4, 5), **kwargs)
        assert check(op("addbmm"), rand(*shape), rand(3, 2, 4), rand(3, 4, 5), **kwargs)
        assert check(op("addr"), rand(*shape), rand(2), rand(5), **kwargs)
    for shape in [(3, 2, 5)] if suffix else [(3, 2, 5), (5,), (2, 5)]:
        assert check(op("baddbmm"), rand(*shape), rand(3, 2, 4), rand(3, 4, 5), **kwargs)
    for shape in [(2,)] if suffix else [(2,), ()]:
        assert check(op("addmv"), rand(*shape), rand(2, 4), rand(4), **kwargs)


def test_beta_of_zero_ignores_nan() -> None:
    nan = torch.full((2, 5), torch.nan, dtype=torch.float64)
    assert check(aten.addmm.default, nan, rand(2, 4), rand(4, 5), beta=0)


def test_inplace_into_an_unbatched_tensor_is_refused() -> None:
    found = find("aten::addmm_")
    assert found is not None and found.rule is not None
    with pytest.raises(RuntimeError, match="not batched over this vmap"):
        args = [rand(2, 5), rand(3, 2, 4), rand(4, 5)]
        found.rule(aten.addmm_.default, Level(), [None, 0, None], args, {})


def test_trilinear() -> None:
    x, y, w = rand(2, 3), rand(2, 4), rand(5, 3, 4)
    assert check(aten._trilinear.default, x, w, y, [1, 3], [0], [1, 2], [2, 3])


@pytest.mark.parametrize("dims", [(-1, None), (None, 1), (1, -1), (0, 2)])
def test_kron(dims: tuple[int | None, int | None]) -> None:
    """The product is reshaped, whatever the memory order of the examples is."""
    x, y = rand(5, 4), rand(10, 2)
    inputs = [
        v if d is None else torch.stack([v, v + 1, v * 2], d)
        for v, d in zip((x, y), dims, strict=True)
    ]
    want = torch.stack(
        [
            torch.kron(
                *[v if d is None else v.select(d, i) for v, d in zip(inputs, dims, strict=True)]
            )
            for i in range(3)
        ]
    )
    torch.testing.assert_close(tsfunc.vmap(torch.kron, dims)(*inputs), want)
