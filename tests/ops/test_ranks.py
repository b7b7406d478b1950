"""Functions that take dims, on examples of every small rank: vmap returns or raises what the loop
over the examples does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tsfunc import vmap

fft = torch.fft
RANGE = range(-4, 4)
SHAPES: list[tuple[int, ...]] = [(), (1,), (4,), (2, 4), (3, 1), (2, 3, 4)]

# Called with each dim of RANGE.
ONE_DIM: dict[str, Callable[[Tensor, int], Any]] = {
    "transpose": lambda x, d: x.transpose(d, 0),
    "transpose second": lambda x, d: x.transpose(-1, d),
    "swapaxes": lambda x, d: torch.swapaxes(x, 0, d),
    "movedim": lambda x, d: x.movedim(d, 0),
    "select": lambda x, d: x.select(d, 0),
    "narrow": lambda x, d: x.narrow(d, 0, 1),
    "squeeze": lambda x, d: x.squeeze(d),
    "squeeze two": lambda x, d: x.squeeze((d, 0)),
    "unsqueeze": lambda x, d: x.unsqueeze(d),
    "unflatten": lambda x, d: x.unflatten(d, (-1, 1)),
    "flatten": lambda x, d: x.flatten(d),
    "flatten to": lambda x, d: x.flatten(0, d),
    "unbind": lambda x, d: x.unbind(d),
    "chunk": lambda x, d: x.chunk(2, d),
    "split": lambda x, d: x.split(1, d),
    "unfold": lambda x, d: x.unfold(d, 1, 1),
    "diagonal": lambda x, d: x.diagonal(0, 0, d),
    "flip": lambda x, d: x.flip(d),
    "roll": lambda x, d: x.roll(1, d),
    "sum": lambda x, d: x.sum(d),
    "sum kept": lambda x, d: x.sum(d, keepdim=True),
    "mean of two": lambda x, d: x.mean((d, 0)),
    "var": lambda x, d: x.var(d, correction=0),
    "max": lambda x, d: x.max(d),
    "argmin": lambda x, d: x.argmin(d),
    "amax": lambda x, d: x.amax(d),
    "all": lambda x, d: (x > 0).all(d),
    "prod": lambda x, d: x.prod(d),
    "norm": lambda x, d: torch.linalg.vector_norm(x, 2, d),
    "logsumexp": lambda x, d: x.logsumexp(d),
    "softmax": lambda x, d: x.softmax(d),
    "log_softmax": lambda x, d: x.log_softmax(d),
    "cumsum": lambda x, d: x.cumsum(d),
    "cummax": lambda x, d: x.cummax(d),
    "logcumsumexp": lambda x, d: x.logcumsumexp(d),
    "diff": lambda x, d: x.diff(dim=d),
    "sort": lambda x, d: x.sort(d),
    "topk": lambda x, d: x.topk(1, d),
    "kthvalue": lambda x, d: x.kthvalue(1, d),
    "median": lambda x, d: x.median(d),
    "quantile": lambda x, d: x.quantile(0.3, d),
    "gather": lambda x, d: x.gather(d, torch.zeros_like(x, dtype=torch.long)),
    "index_select": lambda x, d: x.index_select(d, torch.tensor([0])),
    "scatter": lambda x, d: x.scatter(d, torch.zeros_like(x, dtype=torch.long), 1.0),
    "index_add": lambda x, d: x.index_add(d, torch.tensor([0]), x.narrow(d, 0, 1)),
    "cat": lambda x, d: torch.cat([x, x], d),
    "stack": lambda x, d: torch.stack([x, x], d),
    "repeat_interleave": lambda x, d: x.repeat_interleave(2, d),
    "renorm": lambda x, d: x.renorm(2, d, 1.0),
    "glu": lambda x, d: torch.nn.functional.glu(x, d),
    "fft": lambda x, d: fft.fft(x, dim=d),
    "rfft": lambda x, d: fft.rfft(x, dim=d),
    "irfft": lambda x, d: fft.irfft(x, dim=d),
    "fft of a size": lambda x, d: fft.fft(x, 3, d),
    "fft2": lambda x, d: fft.fft2(x, dim=(d, 0)),
    "ifft2 of sizes": lambda x, d: fft.ifft2(x, (2, 3), (0, d)),
    "fftn": lambda x, d: fft.fftn(x, dim=(d,)),
    "rfftn": lambda x, d: fft.rfftn(x, dim=(0, d)),
    "irfftn": lambda x, d: fft.irfftn(x, (3,), (d,)),
    "fftshift": lambda x, d: fft.fftshift(x, d),
    "ifftshift": lambda x, d: fft.ifftshift(x, (d, 0)),
}
DEFAULTS: dict[str, Callable[[Tensor], Any]] = {
    "t": lambda x: x.t(),
    "squeeze": lambda x: x.squeeze(),
    "ravel": lambda x: x.ravel(),
    "fliplr": torch.fliplr,
    "flipud": torch.flipud,
    "rot90": torch.rot90,
    "roll": lambda x: x.roll(2),
    "diag": torch.diag,
    "trace": torch.trace,
    "sum": lambda x: x.sum(),
    "max": lambda x: x.max(),
    "argmax": lambda x: x.argmax(),
    "argsort": lambda x: x.argsort(),
    "topk": lambda x: x.topk(1),
    "diff": lambda x: x.diff(),
    "nonzero static": lambda x: torch.nonzero_static(x > 0, size=2),
    "det": torch.linalg.det,
    "dot": lambda x: x.dot(x),
    "mv": lambda x: x.mv(torch.ones(4)),
    "matmul": lambda x: x @ torch.ones(4),
    "outer": lambda x: x.outer(x),
    "atleast_2d": torch.atleast_2d,
    "fft": fft.fft,
    "rfft": fft.rfft,
    "fft of a size": lambda x: fft.fft(x, 3),
    "fft2": fft.fft2,
    "rfft2": fft.rfft2,
    "fft2 of sizes": lambda x: fft.fft2(x, (2, 2)),
    "fftn": fft.fftn,
    "ifftn": fft.ifftn,
    "rfftn": fft.rfftn,
    "irfftn": fft.irfftn,
    "fftn of a size": lambda x: fft.fftn(x, (3,)),
    "fftn of sizes": lambda x: fft.fftn(x, (3, 2)),
    "irfftn of a size": lambda x: fft.irfftn(x, (3,)),
    "fftshift": fft.fftshift,
    "ifftshift": fft.ifftshift,
}


def outcome(call: Callable[..., Any], *args: Any) -> tuple[Any, Exception | None]:
    try:
        return call(*args), None
    except (RuntimeError, IndexError, ValueError) as error:
        return None, error


def stacked(results: list[Any]) -> Any:
    if isinstance(results[0], Tensor):
        return torch.stack(results)
    return tuple(torch.stack(parts) for parts in zip(*results, strict=True))


def _loop(f: Callable[[Tensor], Any], x: Tensor, bdim: int) -> Any:
    return stacked([f(example) for example in x.unbind(bdim)])


def _vmap(f: Callable[[Tensor], Any], x: Tensor, bdim: int) -> Any:
    return vmap(f, in_dims=bdim)(x)


def hold(f: Callable[[Tensor], Any]) -> None:
    for shape in SHAPES:
        for bdim in range(len(shape) + 1):
            size = list(shape)
            size.insert(bdim, 3)
            x = torch.randn(size)
            want, error = outcome(_loop, f, x, bdim)
            got, raised = outcome(_vmap, f, x, bdim)
            assert (raised is None) is (error is None), (shape, bdim, raised, error)
            if error is None:
                got = got if isinstance(got, Tensor) else tuple(got)
                torch.testing.assert_close(
                    got, want, msg=f"examples of shape {shape}, batch dim {bdim}"
                )


def _at_dim(name: str, dim: int, x: Tensor) -> Any:
    return ONE_DIM[name](x, dim)


@pytest.mark.parametrize("name", ONE_DIM)
def test_a_named_dim(name: str) -> None:
    for dim in RANGE:
        hold(functools.partial(_at_dim, name, dim))


@pytest.mark.parametrize("name", DEFAULTS)
def test_dims_that_are_not_named(name: str) -> None:
    hold(DEFAULTS[name])
