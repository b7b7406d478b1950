"""``scan``, ``map`` and ``associative_scan``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tsfunc
from tests.transforms.support import leaves
from tsfunc import (
    MetaTensorType,
    associative_scan,
    grad,
    jvp,
    scan,
    sequential_vmap,
    specialize,
    vmap,
)
from tsfunc.bridge.control.control_flow import ControlFlow


@given(st.integers(1, 7), st.integers(0, 1), st.booleans())
def test_a_scan_is_its_loop(length: int, dim: int, reverse: bool) -> None:
    shape = (length, 3) if dim == 0 else (3, length)
    xs = torch.arange(length * 3.0).reshape(shape)

    def step(carry: Any, x: Any) -> Any:
        return carry * 0.5 + x, {"y": carry + x, "none": None}

    carry, ys = scan(step, torch.ones(3), xs, reverse=reverse, dim=dim)
    expected, rows = torch.ones(3), []
    slices = list(xs.unbind(dim))
    for x in reversed(slices) if reverse else slices:
        rows.append(expected + x)
        expected = expected * 0.5 + x
    if reverse:
        rows.reverse()
    torch.testing.assert_close(carry, expected)
    torch.testing.assert_close(ys["y"], torch.stack(rows, dim))
    assert ys["none"] is None


def test_a_scan_without_anything_to_go_along_has_a_length() -> None:
    carry, ys = scan(lambda c, _: (c * 2, c), torch.tensor(1), None, length=4)
    assert carry == 16
    torch.testing.assert_close(ys, torch.tensor([1, 2, 4, 8]))


@pytest.mark.parametrize("wrap", [lambda f: f, specialize], ids=["plain", "specialize"])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_a_scan_of_no_steps_has_results_of_size_0(wrap: Any, dim: int) -> None:
    def f(x: torch.Tensor) -> Any:
        def step(carry: Any, row: torch.Tensor) -> Any:
            return carry + row, (carry * row, carry.sum() > 0, 2)

        return scan(step, torch.ones(2), x, dim=dim)

    shape = {0: (0, 2), 1: (2, 0), -1: (2, 0)}[dim]
    x = torch.ones(shape)
    carry, (products, signs, numbers) = wrap(f)(x)
    assert carry.tolist() == [1, 1] and products.shape == shape and products.dtype is x.dtype
    if dim != 1:  # the results of a step have one dim, or none
        assert signs.shape == numbers.shape == (0,)
    assert (signs.dtype, numbers.dtype) == (torch.bool, torch.int64)
    batched = wrap(vmap(lambda x: f(x)[1][0]))(torch.ones(3, *shape))
    assert batched.shape == (3, *shape)
    assert wrap(vmap(grad(lambda x: f(x)[1][0].sum())))(torch.ones(3, *shape)).shape == (3, *shape)
    assert jvp(lambda x: f(x)[1][0], (x,), (x,))[1].shape == shape


def test_no_slices_are_mapped_to_no_results() -> None:
    x = torch.ones(0, 3)
    for batch_size in (None, 2):
        assert tsfunc.map(lambda row: row[:2], x, batch_size=batch_size).shape == (0, 2)
    assert scan(lambda c, _: (c, c), torch.ones(3), None, length=0)[1].shape == (0, 3)


def test_a_program_for_any_length_takes_none() -> None:
    described = {"x": MetaTensorType(["n", 2])}
    f = specialize(lambda x: scan(lambda c, row: (c + row, c * row), torch.zeros(2), x), described)
    assert f(torch.ones(4, 2))[0].tolist() == [4, 4]
    assert f(torch.ones(0, 2))[1].shape == (0, 2)


def test_no_steps_have_results_of_named_sizes() -> None:
    described = {"x": MetaTensorType(["n", "m"])}
    functions: list[Callable[[torch.Tensor], Any]] = [
        lambda x: scan(lambda c, row: (c + row, c.outer(row)), x.new_zeros(x.shape[1]), x)[1],
        lambda x: tsfunc.map(lambda row: (row[1:], row.shape[0], row.sum()), x),
    ]
    for f in functions:
        g = specialize(f, described)
        for shape in ((4, 3), (0, 3), (0, 5), (2, 5), (0, 0)):
            x = torch.ones(shape)
            torch.testing.assert_close(g(x), f(x))
        assert g.cache_info().programs == 3


def test_the_trace_of_a_scan_does_not_grow_with_its_length() -> None:
    def f(x: torch.Tensor) -> Any:
        return scan(lambda c, row: (c.sin() + row, c), x[0], x)[1]

    short, long = specialize(f), specialize(f)
    torch.testing.assert_close(short(torch.ones(3, 2)), f(torch.ones(3, 2)))
    torch.testing.assert_close(long(torch.ones(50, 2)), f(torch.ones(50, 2)))
    assert len(short.program.graph.nodes) == len(long.program.graph.nodes)


def test_one_program_scans_any_length() -> None:
    def rows(x: torch.Tensor) -> Any:
        return scan(lambda c, row: (c + row, c * row), torch.zeros(2), x)

    f = specialize(rows, {"x": tsfunc.MetaTensorType(shape=["n", 2])})
    for n in (2, 5, 9):
        x = torch.arange(2.0 * n).reshape(n, 2)
        carry, ys = f(x)
        torch.testing.assert_close(carry, x.sum(0))
        assert ys.shape == (n, 2)
    assert f.cache_info().programs == 1


def test_map_calls_with_one_slice_at_a_time() -> None:
    shapes = []

    def f(x: torch.Tensor, scale: float) -> torch.Tensor:
        shapes.append(tuple(x.shape))
        return x.sum() * scale

    torch.testing.assert_close(tsfunc.map(f, torch.ones(3, 2), 2.0), torch.full((3,), 4.0))
    assert shapes == [(2,)] * 3
    batched = tsfunc.map(f, torch.ones(5, 2), 2.0, batch_size=2)
    torch.testing.assert_close(batched, torch.full((5,), 4.0))
    assert shapes[3:] == [(2,)] * 3  # two, two, and one remaining step


@given(st.integers(1, 9), st.integers(0, 1), st.booleans())
def test_an_associative_scan_is_the_sequence_of_combinations(
    size: int, axis: int, reverse: bool
) -> None:
    shape = (size, 2) if axis == 0 else (2, size)
    x = torch.linspace(0.5, 1.5, size * 2, dtype=torch.float64).reshape(shape)
    found = associative_scan(torch.mul, x, reverse=reverse, axis=axis)
    expected = x.flip(axis).cumprod(axis).flip(axis) if reverse else x.cumprod(axis)
    torch.testing.assert_close(found, expected)


def test_torchs_form_of_an_associative_scan_combines_single_slices() -> None:
    m = torch.randn(5, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = [m[0]]
    for matrix in m[1:]:
        expected.append(expected[-1] @ matrix)
    torch.testing.assert_close(associative_scan(torch.mm, m, dim=0), torch.stack(expected))
    torch.testing.assert_close(associative_scan(torch.mm, m, 0), torch.stack(expected))


def test_gradients_through_a_scan_of_batches() -> None:
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)

    def f(x: torch.Tensor) -> Any:
        return scan(lambda c, a: (c.sin() * a, c), x.sum(), x)[1].sum()

    expected = torch.stack([grad(f)(row) for row in x])
    torch.testing.assert_close(vmap(grad(f))(x), expected)
    assert torch.autograd.gradcheck(f, x[0].clone().requires_grad_())


def test_values_that_can_not_be_scanned_are_refused() -> None:
    step = lambda c, x: (c, x)  # noqa: E731
    with pytest.raises(ValueError, match="there is no tensor to go along; give length="):
        scan(step, 0)
    with pytest.raises(ValueError, match=r"got \[2, 3\]: 2 in xs\[0\], 3 in xs\[1\]\."):
        scan(step, 0, (torch.ones(2), torch.ones(3)))
    with pytest.raises(ValueError, match=r"got \[2, 3\]: 2 in xs, 3 in length\."):
        scan(step, 0, torch.ones(2), length=3)
    with pytest.raises(ValueError, match=r"shape \(\), got 0"):
        scan(step, 0, torch.ones(()))
    with pytest.raises(TypeError, match="expected tensors to go along, got float"):
        scan(step, 0, 1.5)
    no_pairs: list[tuple[Any, str]] = [
        (lambda c, x: c, r"f32\[3\]"),
        (lambda c, x: (c, x, x), r"\(f32\[3\], f32\[\], f32\[\]\)"),
        (lambda c, x: [c], r"\[f32\[3\]\]"),
    ]
    for f, got in no_pairs:
        for run in (scan, specialize(scan)):
            with pytest.raises(TypeError, match=f"expected a pair.*got {got}"):
                run(f, torch.ones(3), torch.ones(2))
    for unroll in (0, -1, 1.5):
        with pytest.raises(
            ValueError, match=f"unroll: expected a bool or a positive int, got {unroll}"
        ):
            scan(step, 0, torch.ones(2), unroll=unroll)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"the carry that the function returns: f64\[\]"):
        scan(lambda c, x: (c.double(), x), torch.ones(()), torch.ones(2))
    with pytest.raises(ValueError, match="batch_size: expected at least 1, got 0"):
        tsfunc.map(torch.sin, torch.ones(2), batch_size=0)
    with pytest.raises(TypeError, match="They must have one type"):
        associative_scan(lambda a, b: a.double(), torch.ones(3))


@pytest.mark.parametrize(
    "f",
    [
        pytest.param(lambda x: scan(lambda c, r: (c * r.sin(), c), x.sum(), x), id="scan"),
        pytest.param(lambda x: scan(lambda c, r: (c - r, r), x[0], x, reverse=True), id="reverse"),
        pytest.param(lambda x: scan(lambda c, _: (c * x.sum(), c), x[0], length=3), id="counted"),
        pytest.param(lambda x: associative_scan(torch.mul, x), id="associative_scan"),
    ],
)
def test_a_scan_of_a_program_is_a_scan_of_the_program_that_calls_it(f: Callable[..., Any]) -> None:
    inner = specialize(f, {"x": MetaTensorType(["n"])})
    outer = specialize(lambda x: vmap(inner)(x), {"x": MetaTensorType(["m", "n"])})
    for shape in ((3, 5), (2, 9)):
        x = torch.randn(shape)
        for got, want in zip(leaves(outer(x)), leaves(vmap(f)(x)), strict=True):
            torch.testing.assert_close(got, want)
    assert outer.cache_info().programs == 1
    nodes = outer.program.graph.nodes
    assert len([node for node in nodes if isinstance(node.target, ControlFlow)]) == 1


@pytest.mark.parametrize("result", ["text", object()], ids=["text", "object"])
def test_a_result_that_cannot_be_stacked_is_an_error(result: object) -> None:
    message = "expected tensors and numbers .* got .* of type (str|object)"
    with pytest.raises(TypeError, match=message):
        tsfunc.map(lambda x: result, torch.ones(2))
    with pytest.raises(TypeError, match=message):
        scan(lambda carry, x: (carry, [x, result]), torch.zeros(()), torch.ones(2))
    with pytest.raises(TypeError, match=message):
        vmap(sequential_vmap(lambda x: result))(torch.ones(2))
