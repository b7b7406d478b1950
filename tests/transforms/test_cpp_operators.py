"""Operators that a C++ extension registers, under every transform."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import cpp_extension

import tsfunc
from tsfunc import cond, grad, jvp, scan, specialize, vmap

# ``curve`` calls torch's operators; ``cubes`` reads memory, and has no derivative.
SOURCE = """
#include <ATen/ATen.h>
#include <torch/library.h>

at::Tensor curve(const at::Tensor& x, double scale) { return (x * scale).sin(); }

at::Tensor cubes(const at::Tensor& x) {
  auto in = x.contiguous();
  auto out = at::empty_like(in);
  for (int64_t i = 0; i < in.numel(); i++) {
    const float value = in.data_ptr<float>()[i];
    out.data_ptr<float>()[i] = value * value * value;
  }
  return out;
}

TORCH_LIBRARY(tsfunc_test_cpp, m) {
  m.def("curve(Tensor x, float scale) -> Tensor", &curve);
  m.def("cubes(Tensor x) -> Tensor");
}
TORCH_LIBRARY_IMPL(tsfunc_test_cpp, CPU, m) { m.impl("cubes", &cubes); }
"""
pytestmark = [
    pytest.mark.slow,  # compiles C++
    pytest.mark.skipif(shutil.which("g++") is None, reason="a C++ compiler is not installed"),
    pytest.mark.filterwarnings("ignore::tsfunc.errors.SlowFallbackWarning"),
]
X = torch.arange(6.0).reshape(2, 3) / 6


@pytest.fixture(scope="module")
def operators(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("cpp")
    source, library = folder / "operators.cpp", folder / "operators.so"
    source.write_text(SOURCE)
    torch_lib = Path(torch.__file__).parent / "lib"
    subprocess.run(
        ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", str(source), "-o", str(library),
         *(f"-I{path}" for path in cpp_extension.include_paths()), f"-L{torch_lib}",
         "-ltorch", "-ltorch_cpu", "-lc10",
         f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"],
        check=True,
    )  # fmt: skip
    torch.ops.load_library(str(library))
    torch.library.register_fake("tsfunc_test_cpp::cubes", torch.empty_like)
    return torch.ops.tsfunc_test_cpp


VALUES: dict[str, Callable[[Any], Callable[[Tensor], Tensor]]] = {
    "vmap": vmap,
    "vmap(vmap)": lambda f: vmap(vmap(f)),
    "specialize": specialize,
    "named": lambda f: specialize(lambda x: f(x), {"x": tsfunc.MetaTensorType(["n", "m"])}),
    "specialize(vmap)": lambda f: specialize(vmap(f)),
    "checkpoint": tsfunc.checkpoint,
    "cond": lambda f: lambda x: cond(torch.tensor(True), f, torch.cos, x),
    "scan": lambda f: lambda x: scan(lambda c, row: (c, f(row)), torch.zeros(()), x)[1],
}
DERIVATIVES: dict[str, Callable[[Any], Callable[[Tensor], Tensor]]] = {
    "grad": lambda f: grad(lambda x: f(x).sum()),
    "vmap(grad)": lambda f: vmap(grad(lambda x: f(x).sum())),
    "jvp": lambda f: lambda x: jvp(f, (x,), (torch.ones_like(x),))[1],
    "specialize(vmap(grad))": lambda f: specialize(vmap(grad(lambda x: f(x).sum()))),
}


@pytest.mark.parametrize("transform", VALUES)
@pytest.mark.parametrize("name", ["curve", "cubes"])
def test_values_of_operators_in_cpp(operators: Any, name: str, transform: str) -> None:
    def f(x: Tensor) -> Tensor:
        return operators.curve(x, 2.0) if name == "curve" else operators.cubes(x)

    expected = (2 * X).sin() if name == "curve" else X**3
    torch.testing.assert_close(VALUES[transform](f)(X), expected)


@pytest.mark.parametrize("transform", DERIVATIVES)
def test_derivatives_of_operators_in_cpp(operators: Any, transform: str) -> None:
    def f(x: Tensor) -> Tensor:
        return operators.curve(x, 2.0)

    torch.testing.assert_close(DERIVATIVES[transform](f)(X), 2 * (2 * X).cos())


@pytest.mark.parametrize("transform", DERIVATIVES)
def test_a_missing_derivative_is_not_silent(operators: Any, transform: str) -> None:
    """Reverse mode gives torch's warning about the missing kernel, forward mode an error."""
    with pytest.raises((RuntimeError, NotImplementedError, UserWarning)):
        DERIVATIVES[transform](operators.cubes)(X)
