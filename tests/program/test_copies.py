"""Copies of programs: of the function with its state, of the program, and by the file format."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tsfunc import MetaTensorType as Meta
from tsfunc import specialize
from tsfunc.program import Program


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((3,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


X = torch.ones(4, 3)


def test_a_deep_copy_of_a_function_has_state_of_its_own() -> None:
    model = Scaled()
    f = specialize(model, {"x": Meta(["n", 3])})
    f(X)
    g = copy.deepcopy(f)
    with torch.no_grad():
        model.weight.fill_(5.0)
    torch.testing.assert_close(f(X), X * 5)
    torch.testing.assert_close(g(X), X * 2)
    assert copy.copy(f).func is model


def test_a_deep_copy_of_a_program_has_tensors_of_its_own() -> None:
    model = Scaled()
    f = specialize(model, {"x": Meta(["n", 3])})
    f(X)
    program: Program = f.program
    deep, shallow = copy.deepcopy(program), copy.copy(program)
    with torch.no_grad():
        model.weight.fill_(5.0)
    torch.testing.assert_close([deep([X]), shallow([X]), program([X])], [X * 2, X * 5, X * 5])
    deep.verify()
    out = deep([X])
    (grad,) = torch.autograd.grad(out.sum(), list(deep.lifted.values()))
    torch.testing.assert_close(grad, torch.full((3,), 4.0))


def test_pickling_goes_by_the_file_form() -> None:
    f = specialize(Scaled(), {"x": Meta(["n", 3])})
    f(X)
    program = pickle.loads(pickle.dumps(f.program))
    assert isinstance(program, Program)
    torch.testing.assert_close(program([X]), X * 2)
    assert program.properties()["x"].shape == ("n", 3)
    torch.testing.assert_close(pickle.loads(pickle.dumps(f))(X), X * 2)


@specialize
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def tripled(x: torch.Tensor, k: int) -> torch.Tensor:
    return x * 3 * k


def test_a_function_without_programs_is_pickled_by_its_name() -> None:
    name = __name__
    sys.modules.setdefault(name, sys.modules[doubled.__module__])
    doubled.cache_clear()
    assert pickle.loads(pickle.dumps(doubled)) is doubled
    doubled(X)
    assert pickle.loads(pickle.dumps(doubled)) is not doubled  # the file with the program


def test_a_function_without_programs_and_name_is_pickled_with_its_source() -> None:
    f = specialize(tripled, {"x": Meta(["n"]), "k": int}, max_specializations=3, auto_widen=False)
    again = pickle.loads(pickle.dumps(f))
    assert type(again) is type(f) and again.func is tripled
    for n, k in ((2, 3), (5, 7)):
        torch.testing.assert_close(again(torch.ones(n), k), torch.full((n,), 3.0 * k))
    assert again.cache_info()[2:4] == (1, 3) and not again.cache.auto_widen
    with pytest.raises(Exception, match="pickle"):
        pickle.dumps(specialize(lambda x: x))


def test_spawned_processes_take_a_decorated_function(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        textwrap.dedent(
            """
            import tsfunc

            @tsfunc.specialize
            def f(x):
                return x * 2
            """
        )
    )
    (tmp_path / "main.py").write_text(
        textwrap.dedent(
            """
            import multiprocessing, torch, model

            if __name__ == "__main__":
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    (y,) = pool.map(model.f, [torch.ones(2)])
                assert y.tolist() == [2, 2]
            """
        )
    )
    root = Path(__file__).resolve().parent.parent.parent
    subprocess.run(
        [sys.executable, str(tmp_path / "main.py")], check=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
