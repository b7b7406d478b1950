"""Results with symbolic sizes: size comparisons by operators, and fake rules without symbols."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import fake_tensor

from tsfunc import MetaTensorType as Meta
from tsfunc import specialize
from tsfunc.errors import ConstraintViolation

r = torch.randn
Calls = tuple[tuple[Tensor, ...], ...]


def check(
    func: Callable[..., Any], shapes: dict[str, list[Any]], *calls: tuple[Tensor, ...]
) -> str:
    """Check that one program serves all calls as the function does; return the program."""
    f = specialize(func, {name: Meta(shape) for name, shape in shapes.items()})
    for args in calls:
        torch.testing.assert_close(f(*args), func(*args), rtol=1e-4, atol=1e-4)
    assert f.cache_info().programs == 1
    return str(f.program)


def test_kernels_that_tell_a_shape_run_on_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has no rule for the shape of a histogram: its kernel counts zeros at some sizes."""
    run, counted = fake_tensor.run_fallback_kernel, []

    def counting(mode: Any, func: Any, flat: Any, *rest: Any) -> Any:
        counted.append(math.prod(x.numel() for x in flat if isinstance(x, Tensor)))
        return run(mode, func, flat, *rest)

    def f(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return torch.histogramdd(x, [a, b, c, d])[0]

    monkeypatch.setattr(fake_tensor, "run_fallback_kernel", counting)
    edges = [torch.linspace(-1, 1, n) for n in (4, 5, 6, 7)]
    shapes: dict[str, list[Any]] = {name: [f"n_{name}"] for name in "abcd"}
    check(f, {"x": ["n", 4], **shapes}, (r(9, 4), *edges), (r(3, 4), *reversed(edges)))
    shapes = {name: ["m"] for name in "abcd"}
    check(f, {"x": ["n", 4], **shapes}, (r(9, 4), *edges[:1] * 4), (r(3, 4), *edges[1:2] * 4))
    assert len(counted) > 4 and max(counted) <= 2**22


class TestQuestionsOfOperators:
    """Size comparisons by operators are checks of arguments, or do not affect results."""

    def test_order_of_strides(self) -> None:
        def f(x: Tensor) -> Tensor:
            return x.transpose(0, 1).reshape(x.shape)

        check(f, {"x": ["n", 64]}, (r(16, 64),), (r(100, 64),), (r(2, 64),))

    def test_the_same_call_twice(self) -> None:
        """The second call equals the first, and does not use a cache entry of its first attempt."""

        def f(x: Tensor, y: Tensor) -> tuple[Tensor, int]:
            z = y.transpose(0, 1).reshape(y.shape)
            return x.transpose(0, 1).reshape(x.shape) + z, z.shape[1]

        check(f, {"x": ["n", 64], "y": ["n", 64]}, (r(16, 64), r(16, 64)), (r(9, 64), r(9, 64)))

    def test_chunks_of_named_sizes(self) -> None:
        def f(x: Tensor) -> Tensor:
            return x.chunk(2)[1]

        check(f, {"x": ["n"]}, (r(16),), (r(7),), (r(3),))

    def test_kernels_that_are_not_longer_than_their_input(self) -> None:
        def f(x: Tensor) -> Tensor:
            return F.max_pool2d(x, 3, stride=2)

        check(f, {"x": ["n", "h", "w"]}, (r(2, 7, 8),), (r(3, 11, 5),))

    def test_an_operator_that_refuses_a_size_does_so_when_the_program_runs(self) -> None:
        f = specialize(lambda x: x.narrow(0, 2, 3), {"x": Meta(["n"])})
        x = r(9)
        torch.testing.assert_close(f(x), x[2:5])
        with pytest.raises(RuntimeError, match="exceeds dimension size"):
            f(r(4))


class TestRulesWithoutSymbols:
    def test_transforms_of_named_sizes(self) -> None:
        check(lambda x: torch.fft.fft(x), {"x": ["n"]}, (r(8),), (r(5),))
        assert "2*n - 2" in check(lambda x: torch.fft.irfft(x), {"x": ["n"]}, (r(8),), (r(5),))

    def test_the_smaller_of_two_sizes(self) -> None:
        def f(x: Tensor) -> tuple[Tensor, int]:
            y = torch.diag(x)
            return y, y.shape[0] + 1

        check(f, {"x": ["n", "m"]}, (r(5, 3),), (r(4, 9),), (r(6, 6),))

    def test_solving(self) -> None:
        def f(a: Tensor, b: Tensor) -> Any:
            return torch.linalg.solve(a + torch.eye(a.shape[0]) * 9, b)

        check(f, {"a": ["n", "n"], "b": ["n", "m"]}, (r(5, 5), r(5, 3)), (r(3, 3), r(3, 7)))


class TestQuestionsThatDecide:
    def test_those_of_the_function_are_its_own(self) -> None:
        f = specialize(lambda x: x + 1 if x.shape[0] > 5 else x, {"x": Meta(["n"])})
        with pytest.raises(ConstraintViolation, match="n > 5"):
            f(r(9))

    def test_how_many_results_there_are(self) -> None:
        """``chunk`` returns fewer parts than requested if the dim is too short."""
        f = specialize(lambda x: len(x.chunk(5)) + x, {"x": Meta(["n"])})
        with pytest.raises(ConstraintViolation):
            f(r(6))


class TestShapesThatAreWrittenDown:
    """Shapes from ``shape_rules`` and ``result_rules``; the operator database has the rest."""

    @pytest.mark.parametrize(
        "index",
        [slice(5), slice(-5, None), slice(None, -5), slice(1, -1), slice(2, None, 3), slice(3, 1)],
        ids=str,
    )
    def test_slices_are_as_long_as_there_is_room(self, index: slice) -> None:
        calls = [(r(n, 2),) for n in (5, 8, 2, 3, 20)]
        check(lambda x: (x[index], x[index].shape[0]), {"x": ["n", 2]}, *calls)

    def test_slices_by_sizes(self) -> None:
        def halves(x: Tensor) -> Tensor:
            half = x.shape[0] // 2
            return torch.cat([x[half:], x[:half]])

        program = check(halves, {"x": ["n"]}, (r(8),), (r(5),), (r(2),))
        assert "float32[n]" in program

    def test_numbers_in_indices(self) -> None:
        check(lambda x: x[2] + x[-1, 0], {"x": ["n", 4]}, (r(3, 4),), (r(9, 4),))

    def test_written_tensors(self) -> None:
        def f(x: Tensor) -> Tensor:
            y = x.clone()
            y[:3] = 1.0
            y[-1] = 2.0
            return y

        check(f, {"x": ["n", 2]}, (r(5, 2),), (r(2, 2),), (r(9, 2),))

    @pytest.mark.parametrize("offset", [0, 2, -1])
    def test_diagonals(self, offset: int) -> None:
        check(lambda x: x.diagonal(offset), {"x": ["n", "m"]}, (r(4, 6),), (r(6, 4),), (r(2, 9),))

    def test_windows(self) -> None:
        check(lambda x: x.unfold(0, 3, 2), {"x": ["n"]}, (r(9),), (r(4),), (r(3),))

    def test_plain_ints_of_schemas(self) -> None:
        def f(x: Tensor) -> Tensor:
            return x * torch.linspace(0, 1, x.shape[0]) + torch.tensor(x.shape[0])

        check(f, {"x": ["n"]}, (r(5),), (r(2),), (r(9),))

    @pytest.mark.parametrize("mode", ["nearest", "linear"])
    def test_interpolation_by_factors(self, mode: str) -> None:
        def f(x: Tensor) -> Tensor:
            return F.interpolate(x, scale_factor=1.7, mode=mode)

        check(f, {"x": ["n", "c", "l"]}, (r(2, 3, 4),), (r(3, 2, 7),))

    def test_least_squares(self) -> None:
        def f(a: Tensor, b: Tensor) -> Tensor:
            return torch.linalg.lstsq(a, b).solution

        check(f, {"a": ["n", "m"], "b": ["n", "k"]}, (r(7, 3), r(7, 2)), (r(9, 4), r(9, 3)))

    def test_resized_tensors(self) -> None:
        def f(x: Tensor) -> tuple[Tensor, int]:
            y = x.clone().resize_(x.shape[1], 2).fill_(1.0)
            return y, y.shape[0]

        check(f, {"x": ["n", "m"]}, (r(4, 3),), (r(6, 5),))


@pytest.mark.parametrize("indices", [torch.tril_indices, torch.triu_indices])
@pytest.mark.parametrize("offset", [-2, -1, 0, 1, 3])
def test_triangles(indices: Callable[..., Tensor], offset: int) -> None:
    """The sizes determine the number of elements in a triangle, which may be none."""

    def square(x: Tensor) -> Tensor:
        return x[tuple(indices(x.shape[0], x.shape[0], offset))]

    def oblong(x: Tensor) -> Tensor:
        return indices(x.shape[0], x.shape[1], offset, dtype=torch.int32)

    check(square, {"x": ["n", "n"]}, *((r(n, n),) for n in (5, 7, 4)))
    check(oblong, {"x": ["n", "m"]}, *((r(*size),) for size in [(4, 6), (7, 3), (9, 4)]))
    small = specialize(oblong, {"x": Meta(["n", "m"])})
    for size in [(4, 6), (1, 5), (5, 1), (0, 4), (3, 0), (2, 2), (3, 2)]:
        assert torch.equal(small(r(*size)), oblong(r(*size)))


def test_pairs_are_as_many_as_their_triangle() -> None:
    def f(x: Tensor) -> Tensor:
        rows, columns = torch.triu_indices(x.shape[0], x.shape[0], 1)
        pairs = (x[rows] - x[columns]).square().sum(-1)
        return pairs * torch.arange(x.shape[0] * (x.shape[0] - 1) // 2)

    check(f, {"x": ["n", 3]}, (r(6, 3),), (r(4, 3),), (r(9, 3),))
