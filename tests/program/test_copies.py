"""Copies of programs: of the function with its state, of the program, and by the file form."""

from __future__ import annotations

import copy
import pickle

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
