"""Derivatives in programs of open sizes, for composite kernels of torch that read sizes as ints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tsfunc
from tsfunc import MetaTensorType as Meta
from tsfunc.errors import ConstraintViolation

UPSAMPLING: dict[str, tuple[int, dict[str, Any]]] = {
    "nearest, 1 dim": (1, {"scale_factor": 2.0, "mode": "nearest"}),
    "nearest, 2 dims": (2, {"scale_factor": 1.7, "mode": "nearest"}),
    "nearest, 3 dims": (3, {"scale_factor": (1.0, 2.0, 1.5), "mode": "nearest"}),
    "nearest, to sizes": (2, {"size": (7, 9), "mode": "nearest"}),
    "exact": (2, {"scale_factor": 2.5, "mode": "nearest-exact"}),
    "linear": (1, {"scale_factor": 3.0, "mode": "linear"}),
    "bilinear": (2, {"scale_factor": (2.0, 1.5), "mode": "bilinear"}),
    "bilinear, corners": (2, {"size": (5, 8), "mode": "bilinear", "align_corners": True}),
    "bilinear, antialias": (2, {"scale_factor": 0.7, "mode": "bilinear", "antialias": True}),
    "bicubic": (2, {"scale_factor": 2.0, "mode": "bicubic", "recompute_scale_factor": True}),
    "trilinear": (3, {"scale_factor": 1.5, "mode": "trilinear"}),
    "area": (2, {"scale_factor": 2.0, "mode": "area"}),
}


def gradient(f: Callable[..., torch.Tensor], w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    w = w.detach().requires_grad_()
    (out,) = torch.autograd.grad(f(w, x), w)
    return out


# Each test traces two functions, which takes seconds.
QUICK = {"nearest, 2 dims", "bilinear", "nearest, to sizes"}


@pytest.mark.parametrize(
    "open_dims", ["all dims", pytest.param("the batch", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "kind",
    [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in UPSAMPLING],
)
def test_gradients_of_upsampling(kind: str, open_dims: str) -> None:
    spatial, options = UPSAMPLING[kind]
    w = torch.randn(3, *[1] * spatial, dtype=torch.float64)

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x * w, **options).sin().sum()

    def each(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        of_an_example = tsfunc.grad(lambda w, e: loss(w, e[None]))
        return tsfunc.vmap(of_an_example, (None, 0))(w, x)

    sizes = [6, 5, 4][:spatial]
    names = ["h", "v", "d"][:spatial]
    shape = ["n", 3, *(names if open_dims == "all dims" else sizes)]
    whole = tsfunc.specialize(tsfunc.grad(loss), {"x": Meta(shape=shape)})
    rows = tsfunc.specialize(each, {"x": Meta(shape=shape)})
    for n in (2, 3):
        given = sizes if open_dims == "the batch" else [size + n for size in sizes]
        x = torch.randn(n, 3, *given, dtype=torch.float64)
        torch.testing.assert_close(whole(w, x), gradient(loss, w, x))
        expected = torch.stack([gradient(loss, w, e[None]) for e in x])
        torch.testing.assert_close(rows(w, x), expected)
    assert len(whole.programs) == len(rows.programs) == 1


@pytest.mark.parametrize("in_dim", [0, 1, -1])
def test_upsampling_of_a_batch(in_dim: int) -> None:
    x = torch.randn(3, 2, 4, 5, dtype=torch.float64).movedim(0, in_dim)
    operator = torch.ops.aten.upsample_bilinear2d.vec
    got = tsfunc.vmap(lambda e: operator(e[None], None, False, [2.0, 1.5])[0], in_dim)(x)
    expected = [operator(e[None], None, False, [2.0, 1.5])[0] for e in x.unbind(in_dim)]
    torch.testing.assert_close(got, torch.stack(expected))


READ_IN_CPP: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gradient": lambda x: torch.stack(torch.gradient(x, dim=0)),
    "matrix_norm": lambda x: torch.linalg.matrix_norm(x @ x.mT, 2),
}


@pytest.mark.parametrize("name", READ_IN_CPP)
def test_a_kernel_that_reads_sizes_guards_the_size(name: str) -> None:
    """The descriptor has to state the size of the call."""
    f = tsfunc.grad(lambda x: READ_IN_CPP[name](x).sin().sum())
    x = torch.randn(3, 4, dtype=torch.float64)
    with pytest.raises(ConstraintViolation, match=r"n == 3"):
        tsfunc.specialize(f, {"x": Meta(["n", 4])})(x)
    program = tsfunc.specialize(f, {"x": Meta([3, 4])})
    torch.testing.assert_close(program(x), f(x))


@pytest.mark.filterwarnings("ignore::tsfunc.errors.RetraceWarning")  # the error under test
def test_sizes_that_vary_have_programs_of_their_own() -> None:
    f = tsfunc.grad(lambda x: torch.gradient(x, dim=0)[0].sin().sum())
    program = tsfunc.specialize(f)
    for n in (3, 4, 5, 3):
        x = torch.randn(n, 4, dtype=torch.float64)
        torch.testing.assert_close(program(x), f(x))
    assert len(program.programs) == 3
