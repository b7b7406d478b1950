"""Programs that call operators made with ``dispatch.Operator`` contain the kernels' operators."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tsfunc import MetaTensorType, cond, dispatch, grad, jacrev, jvp, load, scan, specialize, vmap
from tsfunc.dispatch import DispatchKey, Operator
from tsfunc.errors import DataDependentError

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's compilers, and vmap's slow loop
_NUMBERS = itertools.count()
FACTOR = 2.0


def _named() -> str:
    return f"own_operators::number_{next(_NUMBERS)}"


# The same function of one row, with an operator and without.
def parts(x: Tensor) -> Tensor:
    return x.sin() * 2 + x.sum()


by_native = Operator(_named(), native=parts)
by_cells = Operator(_named())


@dispatch.register(by_cells, DispatchKey.CPU)
def _(x: Tensor) -> Tensor:
    return parts(x)


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Any]]] = {
    "call": lambda f: f,
    "vmap": vmap,
    "vmap over the last dim": lambda f: vmap(f, -1, 1),
    "grad": lambda f: grad(lambda x: f(x).square().sum()),
    "vmap of grad": lambda f: vmap(grad(lambda x: f(x).square().sum())),
    "jvp of vmap": lambda f: lambda x: jvp(vmap(f), (x,), (x.cos(),)),
    "jacrev": lambda f: jacrev(lambda x: f(x[0])),
    "scan": lambda f: lambda x: scan(lambda c, row: (f(c + row), f(c)), x[0], x),
    "cond under vmap": lambda f: vmap(lambda x: cond(x.sum() > 0, f, torch.cos, x)),
}


@pytest.mark.parametrize("backend", ["python", "aot_eager"])
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("op", [by_native, by_cells], ids=["native", "cells"])
def test_programs_of_transforms(op: Operator, name: str, backend: str) -> None:
    transform, x = TRANSFORMS[name], torch.randn(4, 3)
    want = transform(parts)(x)
    program = specialize(transform(op), backend=backend)
    for _ in range(2):
        torch.testing.assert_close(program(x), want)
    if name == "call":
        rows = specialize(lambda x: op(x), {"x": MetaTensorType(["n", 3])}, backend=backend)
        for n in (2, 5):
            torch.testing.assert_close(rows(x[:1].expand(n, 3)), parts(x[:1].expand(n, 3)))
        torch.testing.assert_close(vmap(specialize(lambda x: op(x)))(x), vmap(parts)(x))
        torch.testing.assert_close(
            grad(lambda x: specialize(lambda x: op(x))(x).sum())(x),
            grad(lambda x: parts(x).sum())(x),
        )


@pytest.mark.skipif(shutil.which("gcc") is None, reason="Inductor needs gcc")
def test_inductor() -> None:
    x = torch.randn(3)
    program = specialize(grad(lambda x: by_native(x).sum()), backend="inductor")
    torch.testing.assert_close(program(x), grad(lambda x: parts(x).sum())(x))


def test_a_saved_program(tmp_path: Path) -> None:
    program = specialize(lambda x: by_native(x) + by_cells(x))
    x = torch.randn(3)
    program(x)
    program.save(tmp_path / "own.tsf")
    torch.testing.assert_close(load(tmp_path / "own.tsf")(x), parts(x) * 2)


def test_kernels_that_change() -> None:
    """Registering a kernel, or a new value that a kernel reads, makes a new program."""
    scaled = Operator(_named(), native=lambda x: x * FACTOR)
    holder = SimpleNamespace(op=Operator(_named(), native=lambda x: x * FACTOR))
    programs = [specialize(lambda x: scaled(x)), specialize(lambda x: holder.op(x))]
    x = torch.randn(3)
    for factor in (2.0, 5.0):
        globals()["FACTOR"] = factor
        for program in programs:
            assert program(x).equal(x * factor)
    globals()["FACTOR"] = 2.0
    dispatch.register(scaled, DispatchKey.CPU)(lambda x: x + 1)
    assert programs[0](x).equal(x + 1)


def test_writes_of_a_kernel() -> None:
    doubled = Operator(_named(), native=lambda x: x.mul_(2))

    def f(x: Tensor) -> Tensor:
        y = x + 1
        doubled(y[0])
        return y

    x = torch.randn(2, 3)
    torch.testing.assert_close(specialize(f)(x), f(x))


def test_a_kernel_that_reads_data_is_refused() -> None:
    read = Operator(_named(), native=lambda x: torch.from_numpy(x.numpy() * 2))
    with pytest.raises(DataDependentError, match=r"numpy, at .*test_own_operators"):
        specialize(lambda x: read(x))(torch.ones(2))
