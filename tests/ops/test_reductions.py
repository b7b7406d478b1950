"""Reductions and scans: every form of each; scalars accept dim 0 and -1."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import tsfunc
from tests.ops.harness import Level, check, overload, rows_of
from tsfunc.ops import find

SHAPES = [(2, 4, 5), (4, 1), (4,), ()]
DIM_LISTS = [None, [], [0], [-1], [0, -1], [1], [2, 0], [0, 1, 2]]
DIMS = [0, 1, -1, -2]

BY_DIMS = """sum.dim_IntList mean.dim nansum amax amin logsumexp special_logsumexp all.dims
    any.dims""".split()
BY_DIM = """prod.dim_int max.dim min.dim median.dim nanmedian.dim all.dim any.dim _aminmax.dim mode
    argmax argmin""".split()
BY_DIMS_KEYWORD_KEEPDIM = """var.correction std.correction var_mean.correction
    std_mean.correction hash_tensor""".split()
BY_DIMS_AFTER_ORDER = "linalg_vector_norm norm.ScalarOpt_dim".split()
BY_DIMS_AFTER_UNBIASED = "var.dim std.dim var_mean.dim std_mean.dim".split()
OF_ALL = "sum mean prod max min all any median nanmedian norm.Scalar aminmax".split()
ALONG = "cumsum cumprod cummax cummin logcumsumexp _logcumsumexp cumsum_ cumprod_".split()
SOFTMAX = """_softmax _log_softmax _safe_softmax softmax.int log_softmax.int special_softmax
    special_log_softmax""".split()
SINGLY = """aten::aminmax aten::cov
    aten::dist aten::renorm aten::renorm_ aten::kthvalue aten::count_nonzero
    aten::norm.ScalarOpt_dtype aten::norm.ScalarOpt_dim_dtype aten::_softmax_backward_data
    aten::_log_softmax_backward_data aten::glu aten::glu_backward aten::glu_jvp
    aten::glu_backward_jvp aten::count_nonzero.dim_IntList""".split()


def runs(name: str, *args: Any, **kwargs: Any) -> int:
    return check(overload(f"aten::{name}"), *args, **kwargs)


def test_every_row_is_here() -> None:
    by_dims = [BY_DIMS, BY_DIMS_KEYWORD_KEEPDIM, BY_DIMS_AFTER_ORDER, BY_DIMS_AFTER_UNBIASED]
    groups: list[list[str]] = [*by_dims, BY_DIM, OF_ALL, ALONG, SOFTMAX]
    here = {f"aten::{name}" for group in groups for name in group} | set(SINGLY)
    assert here == set(rows_of("reductions.py"))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", BY_DIMS)
def test_by_dims(name: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    ran = 0
    for dims in DIM_LISTS:
        # These functions refuse None, and torch's own logsumexp fails for an empty list.
        if dims is None and name in ("amax", "amin", "logsumexp", "special_logsumexp"):
            continue
        ran += runs(name, x, dims) + runs(name, x, dims, True)
    assert ran


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", BY_DIM)
def test_by_dim(name: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    assert sum(runs(name, x, dim) + runs(name, x, dim, True) for dim in DIMS)
    assert sum(runs(name, (x * 3).long(), dim) for dim in DIMS)


@pytest.mark.parametrize("shape", SHAPES)
def test_without_a_dim(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    assert runs("argmax", x) and runs("argmax", x, None, True) and runs("argmin", x, None)
    assert runs("mode", x) and runs("nansum", x) and runs("amax", x) and runs("any.dims", x)
    assert runs("count_nonzero", x) and runs("linalg_vector_norm", x)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", BY_DIMS_KEYWORD_KEEPDIM)
def test_keyword_keepdim(name: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    given: dict[str, Any] = {} if name == "hash_tensor" else {"correction": 0}
    ran = runs(name, x)
    for dims in DIM_LISTS[1:]:
        ran += runs(name, x, dims) + runs(name, x, dims, keepdim=True, **given)
    assert ran


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", BY_DIMS_AFTER_UNBIASED)
@pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")
def test_unbiased_or_not(name: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    ran = 0
    for dims in DIM_LISTS:
        ran += runs(name, x, dims) + runs(name, x, dims, False, True)
    assert ran


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", BY_DIMS_AFTER_ORDER)
def test_norms(name: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    ran = 0
    for order in (2, 1, float("inf"), 0.5):
        for dims in DIM_LISTS[1:]:
            ran += runs(name, x, order, dims) + runs(name, x, order, dims, True)
    assert ran
    assert runs("norm.ScalarOpt_dtype", x, 2, dtype=torch.float64)
    assert runs("norm.ScalarOpt_dim_dtype", x, 2, [-1], True, dtype=torch.float64)
    assert runs("linalg_vector_norm", x, 2, [-1], dtype=torch.float64)
    assert runs("dist", x, torch.randn(shape), 3) and runs("dist", x, torch.randn(()))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", OF_ALL)
def test_of_all(name: str, shape: tuple[int, ...]) -> None:
    assert runs(name, torch.randn(shape))
    assert runs(name, torch.randn(shape).double())
    if name in ("sum", "prod", "mean"):
        assert runs(name, torch.randn(shape), dtype=torch.float64)
    if name in ("sum", "prod", "max", "any"):
        assert runs(name, torch.randint(9, shape))


@pytest.mark.parametrize("shape", SHAPES)
def test_aminmax_and_count(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).relu()
    assert runs("aminmax", x, keepdim=True)
    for dim in (0, -1):
        assert runs("aminmax", x, dim=dim) and runs("aminmax", x, dim=dim, keepdim=True)
        assert runs("count_nonzero", x, dim)
        assert runs("count_nonzero.dim_IntList", x, [dim])
        assert runs("kthvalue", x, 1, dim) and runs("kthvalue", x, 1, dim, True)
    assert runs("kthvalue", x, 1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ALONG)
def test_reductions_along_a_dim(name: str, shape: tuple[int, ...]) -> None:
    assert sum(runs(name, torch.randn(shape), dim) for dim in DIMS)
    if name in ("cumsum", "cumprod"):
        assert runs(name, torch.randint(9, shape), -1, dtype=torch.float32)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SOFTMAX)
def test_softmax(name: str, shape: tuple[int, ...]) -> None:
    last = (False,) if name in ("_softmax", "_log_softmax") else ()
    assert sum(runs(name, torch.randn(shape), dim, *last) for dim in DIMS)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["_softmax_backward_data", "_log_softmax_backward_data"])
def test_softmax_backward(name: str, shape: tuple[int, ...]) -> None:
    grad, out = torch.randn(shape), torch.rand(shape)
    assert sum(runs(name, grad, out, dim, torch.float32) for dim in DIMS)


def test_glu() -> None:
    x, half = torch.randn(2, 4, 6), torch.randn(2, 2, 6)
    assert runs("glu", torch.randn(4)) and runs("glu", x) and runs("glu", x, 1)
    assert runs("glu_backward", half, x, 1) and runs("glu_backward", half, x, -2)
    assert runs("glu_jvp", half, x, x, 1, choices=[(0, 1, 2), (2,)])
    assert runs("glu_backward_jvp", x, half, x, half, x, 1, choices=[(0, 1, 2, 3, 4), (1,)])


def test_renorm() -> None:
    for dim in (0, 1, -1):
        assert runs("renorm", torch.randn(2, 4, 5) * 3, 2, dim, 1.5)
        assert runs("renorm_", torch.randn(2, 4, 5) * 3, 2, dim, 1.5)
        assert runs("renorm", torch.randn(2, 4, 5) * 3, 1, dim, 100.0)


@pytest.mark.parametrize("name", ["sum.dim_IntList", "max.dim", "_softmax", "count_nonzero"])
def test_a_dim_out_of_range(name: str) -> None:
    row = find(f"aten::{name}")
    assert row is not None and row.rule is not None
    rest = (False,) if name == "_softmax" else ()
    for rank in (0, 2):
        bad: Any = [rank + 1] if name == "sum.dim_IntList" else rank + 1
        with pytest.raises(IndexError, match="Dimension out of range"):
            x = torch.zeros([3] * (rank + 1))
            row.rule(overload(row.name), Level(3), [0, None], (x, bad, *rest), {})


def test_empty_dims() -> None:
    assert runs("sum.dim_IntList", torch.zeros(0, 4), [0])
    assert runs("sum", torch.zeros(0, 4)) and runs("cumsum", torch.zeros(0, 4), 0)
    assert runs("_softmax", torch.zeros(0, 4), 0, False)


@pytest.mark.parametrize("f", [torch.median, torch.nanmedian])
def test_elements_equal_to_a_median_share_its_derivative(f: Any) -> None:
    x = torch.tensor([[1.0, 1.0, 1.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    want = torch.stack([tsfunc.grad(f)(row) for row in x])
    assert want[0].tolist() == pytest.approx([1 / 3] * 3 + [0.0] * 2)
    torch.testing.assert_close(tsfunc.vmap(tsfunc.grad(f))(x), want)
    torch.testing.assert_close(tsfunc.grad(lambda x: tsfunc.vmap(f)(x).sum())(x), want)


@pytest.mark.parametrize("f", [torch.var, torch.std, torch.var_mean, torch.std_mean])
def test_no_examples_have_no_variance_to_warn_of(f: Any) -> None:
    def total(x: torch.Tensor) -> torch.Tensor:
        parts = f(x)
        return torch.stack(parts if isinstance(parts, tuple) else [parts]).sum(0)

    x = torch.ones(0, 3, 4)
    assert tsfunc.vmap(total)(x).shape == (0,)
    assert tsfunc.vmap(tsfunc.grad(total))(x).shape == (0, 3, 4)


@pytest.mark.parametrize("density", [False, True])
def test_histograms_of_the_same_points_by_weights_of_each_example(density: bool) -> None:
    points = torch.linspace(-1, 1, 10, dtype=torch.float64).sin().view(5, 2)
    weights = torch.linspace(0.1, 1.5, 15, dtype=torch.float64).view(3, 5)

    def count(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.histogramdd(x, [2, 3], weight=weight, density=density)[0]

    want = torch.stack([count(points, weight) for weight in weights])
    torch.testing.assert_close(tsfunc.vmap(count, (None, 0), strict=True)(points, weights), want)
    assert tsfunc.vmap(count, (None, 0))(points, weights[:0]).shape == (0, 2, 3)


SELECTIONS: dict[str, Any] = {
    "kthvalue": lambda x: torch.kthvalue(x, 1),
    "kthvalue, keepdim": lambda x: torch.kthvalue(x, 1, -1, True),
    "mode": torch.mode,
    "cummax": lambda x: torch.cummax(x, 0),
    "cummin": lambda x: torch.cummin(x, -1),
}


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool, torch.float32, torch.int32])
@pytest.mark.parametrize("name", SELECTIONS)
def test_the_selected_element_of_a_scalar_of_any_dtype(name: str, dtype: torch.dtype) -> None:
    """torch has no kernel for complex numbers, and calls none for a scalar."""
    f = SELECTIONS[name]
    x = torch.tensor([3, 0, 1, 2]).to(dtype)
    for batch, mapped in ((x, tsfunc.vmap(f)), (x.view(2, 2), tsfunc.vmap(tsfunc.vmap(f)))):
        values, indices = mapped(batch)
        expected = [f(each) for each in x]
        assert values.flatten().equal(torch.stack([each[0] for each in expected]))
        assert indices.flatten().equal(torch.stack([each[1] for each in expected]))


@pytest.mark.parametrize("name", ["cov", "corrcoef"])
@pytest.mark.parametrize("shape", [(4,), (1, 4), (3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128, torch.int64])
def test_covariance(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    chosen = random.Random(torch.initial_seed() + len(shape))
    dim = chosen.randint(0, len(shape))
    x = torch.randint(-9, 9, (5, *shape)).to(dtype) * (1 if dtype is torch.int64 else 0.7)
    function = getattr(torch, name)
    options = {"correction": chosen.choice([0, 1, 2])} if name == "cov" else {}
    expected = torch.stack([function(row, **options) for row in x])

    def f(row: torch.Tensor) -> torch.Tensor:
        return function(row, **options)

    found = tsfunc.vmap(f, dim)(x.movedim(0, dim))
    torch.testing.assert_close(found, expected, equal_nan=True)
    program = tsfunc.specialize(tsfunc.vmap(f, dim))
    torch.testing.assert_close(program(x.movedim(0, dim)), expected, equal_nan=True)


def test_covariance_warns_of_missing_degrees_of_freedom() -> None:
    with pytest.warns(UserWarning, match="degrees of freedom is <= 0"):
        tsfunc.vmap(torch.cov)(torch.randn(3, 2, 1))


@pytest.mark.parametrize("name", ["cov", "corrcoef"])
def test_covariance_is_differentiated_in_the_body_of_a_program(name: str) -> None:
    function = getattr(torch, name)
    weights = torch.randn(3, 3)

    def as_it_is(x: torch.Tensor) -> torch.Tensor:
        return (function(x) * weights).sum()

    def of_sine(x: torch.Tensor) -> torch.Tensor:
        return (function(x.sin()) * weights).sum()

    def f(x: torch.Tensor) -> torch.Tensor:
        return tsfunc.cond(x.sum() > 0, as_it_is, of_sine, x)

    x = torch.rand(3, 5)
    program = tsfunc.specialize(tsfunc.grad(f))
    torch.testing.assert_close(program(x), torch.func.grad(as_it_is)(x))
    torch.testing.assert_close(program(-x), torch.func.grad(of_sine)(-x))
