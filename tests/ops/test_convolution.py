"""Convolutions and their gradients against the loop, with the batch in any of the tensors."""

from __future__ import annotations

import pytest
import torch

import tsfunc
from tests.ops.harness import check

aten = torch.ops.aten


def rand(*shape: int) -> torch.Tensor:
    seeded = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, dtype=torch.float64, generator=seeded)


CASES = [
    # spatial dims, transposed, groups, stride, padding, dilation
    (1, False, 1, 1, 0, 1),
    (1, False, 2, 2, 1, 1),
    (2, False, 1, 2, 1, 2),
    (2, False, 2, 1, 1, 1),
    (3, False, 1, 1, 0, 1),
    (1, True, 1, 2, 1, 1),
    (2, True, 2, 2, 1, 1),
    (2, True, 1, 1, 0, 2),
]


@pytest.mark.parametrize("case", CASES)
def test_convolution(case: tuple[int, bool, int, int, int, int]) -> None:
    n, transposed, groups, stride, padding, dilation = case
    inner, outer = 2 * groups, 4 * groups
    x = rand(2, inner, *[6] * n)
    w = rand(inner, 4, *[3] * n) if transposed else rand(outer, 2, *[3] * n)
    rest = ([stride] * n, [padding] * n, [dilation] * n, transposed, [0] * n, groups)
    for bias in (None, rand(outer)):
        assert check(aten.convolution.default, x, w, bias, *rest)
    out = aten.convolution(x, w, None, *rest)
    for mask in ([True] * 3, [True, False, False], [False, True, False], [False, True, True]):
        assert check(
            aten.convolution_backward.default, rand(*out.shape), x, w, [outer], *rest, mask
        )


def test_output_padding() -> None:
    x, w = rand(2, 3, 5), rand(3, 4, 3)
    rest = ([2], [1], [1], True, [1], 1)
    assert check(aten.convolution.default, x, w, rand(4), *rest)
    grad = rand(*aten.convolution(x, w, None, *rest).shape)
    assert check(aten.convolution_backward.default, grad, x, w, [4], *rest, [True] * 3)


@pytest.mark.parametrize("dims", [(None, 0), (0, 0), (1, -1)])
def test_complex_weights_of_each_example(dims: tuple[int | None, int]) -> None:
    """torch's kernels refuse complex numbers; its functions combine real convolutions."""
    for spatial, conv in ((1, torch.conv1d), (2, torch.conv2d), (3, torch.conv3d)):
        x = torch.complex(rand(2, 4, *[5] * spatial), rand(2, 4, *[5] * spatial))
        w = torch.complex(rand(3, 6, 4, *[3] * spatial), rand(3, 6, 4, *[3] * spatial))
        xs = [x] * 3 if dims[0] is None else [x, x.flip(0), x * 1j]

        def f(x: torch.Tensor, w: torch.Tensor, conv: object = conv) -> torch.Tensor:
            return conv(x, w, None, 2, 1)  # type: ignore[operator]

        batch = x if dims[0] is None else torch.stack(xs, dims[0])
        mine = tsfunc.vmap(f, dims)(batch, w.movedim(0, dims[1]))
        torch.testing.assert_close(mine, torch.stack([f(a, b) for a, b in zip(xs, w, strict=True)]))
