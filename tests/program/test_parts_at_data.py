"""Slices and rows at positions that depend on data, and the texts of their errors."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import functional as autograd
from torch.nn import functional as F

import tsfunc
from tsfunc import MetaTensorType as Meta
from tsfunc.errors import DataDependentError, FailedCheckError


def at(x: Tensor, position: int = 2) -> Any:
    """Return a number that a trace reads from data."""
    return (x.sum() * 0 + position).long().item()


def data(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64) + 0.5


CUTS, COUNT = torch.tensor([1, 3]), torch.tensor(2)
PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "row": lambda x: x[at(x)],
    "row from the end": lambda x: x[at(x, -1)],
    "column": lambda x: x.select(1, at(x)).sin(),
    "head": lambda x: x[: at(x)] ** 2,
    "tail": lambda x: x[at(x) :].exp(),
    "middle": lambda x: x[at(x, 1) : at(x, 3)].sin(),
    "two parts": lambda x: x[: at(x)].sum(0) * x[at(x) :].sum(0),
    "split": lambda x: torch.tensor_split(x, CUTS)[1].cos(),
    "split by a number": lambda x: torch.tensor_split(x, COUNT)[1].cos(),
    "narrow": lambda x: x.narrow(0, at(x, 1), 2).sin(),
    "resized": lambda x: F.interpolate(x[None], at(x, 3)),
}


@pytest.mark.parametrize("name", PARTS)
def test_derivatives_of_parts_are_those_of_the_function(name: str) -> None:
    f, x, direction = PARTS[name], data(4, 3), data(4, 3)

    def derivatives(x: Tensor, direction: Tensor) -> Any:
        return (
            tsfunc.jvp(f, (x,), (direction,)),
            tsfunc.grad(lambda x: f(x).sin().sum())(x),
            tsfunc.jvp(lambda x: tsfunc.grad(lambda x: f(x).sin().sum())(x), (x,), (direction,)),
        )

    gradient = autograd.jacobian(lambda x: f(x).sin().sum(), x)
    expected = (
        autograd.jvp(f, x, direction),
        gradient,
        (gradient, autograd.hvp(lambda x: f(x).sin().sum(), x, direction)[1]),
    )
    program = tsfunc.specialize(derivatives)
    for _ in range(2):
        torch.testing.assert_close(program(x, direction), expected)
    assert program.cache_info().programs == 1


def test_a_part_that_has_to_be_whole_is_checked() -> None:
    """The sum needs as many rows as ``x`` has; a single row would be broadcast."""

    def f(x: Tensor, k: Tensor) -> Tensor:
        return x[: k.item()] + x

    for g in (f, tsfunc.grad(lambda x, k: f(x, k).sum())):
        program = tsfunc.specialize(g)
        x = data(3, 2)
        torch.testing.assert_close(program(x, torch.tensor(3)), g(x, torch.tensor(3)))
        for k in (1, 2):
            with pytest.raises(FailedCheckError, match=r"shape\[0\] == 3 does not hold"):
                program(x, torch.tensor(k))


FLOATS: list[Callable[[Tensor], Tensor]] = [
    lambda x: torch.arange(x.sum().item()),
    lambda x: torch.arange(1, x.sum().item()) * 2,
    lambda x: torch.arange(0, x.sum().item(), 0.7, dtype=torch.float64).sum(),
    lambda x: torch.arange(0, 1, 0.05 + x[0].item() / 9).exp(),
    lambda x: tsfunc.grad(lambda y: (torch.arange(0, x.sum().item(), 1.5) * y.sum()).sum())(x),
]


@pytest.mark.parametrize("f", FLOATS, ids=range(len(FLOATS)))
def test_ranges_between_floats_of_data(f: Callable[[Tensor], Tensor]) -> None:
    program = tsfunc.specialize(f)
    for x in (data(5), data(5), torch.ones(5, dtype=torch.float64)):
        torch.testing.assert_close(program(x), f(x))
    assert program.cache_info().programs == 1


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "text": lambda x: f"{at(x)}",
    "float": lambda x: x * int(x.sum().item() + 0.5),
    "least": lambda x: max(x.sum().item(), 3.0) * x,
    "probability": lambda x: F.dropout(x, x.sum().item() / 99),
    "deviation": lambda x: torch.normal(0.0, x.sum().item(), (2,)),
    "complex": lambda x: x if (x + 1j).sum().item().real > 0 else x * 2,
    "count": lambda x: x.chunk(at(x)),
    "sections": lambda x: torch.tensor_split(x, x.sum().long()),
    "exponent": tsfunc.grad(lambda x: x.norm(x.sum().item())),
    "correction": tsfunc.grad(lambda x: x.var(correction=at(x))),
    "factor": lambda x: tsfunc.jvp(lambda x: torch.add(x, x, alpha=x.sum().item()), (x,), (x,)),
    "branch": lambda x: tsfunc.cond(x.sum() > 0, lambda x: x[: at(x)], lambda x: x[x > 1], x),
    "body": lambda x: tsfunc.checkpoint(lambda x: x[: at(x)] * 2)(x),
    "rotation": lambda x: x.rot90(at(x)),
    "whole": lambda x: x[: at(x)].view(3, -1) if x[x > 9].shape[0] > 1 else x,
    "offset": lambda x: x * x[at(x)].storage_offset() if x[at(x)].storage_offset() > 3 else x,
}
# Names of symbols, and of torch's classes and functions for traces.
INTERNAL = re.compile(
    r"\b(?:zuf|zu|u|s|zf)\d+\b|FakeTensor|[Uu]nbacked|Sym(?:Int|Float|Bool|Node)|GuardOn|ShapeEnv"
    r"|_subclasses|sympy|FloorDiv|\b(?:Eq|Ne|Mod|Max|Min)\(|guard_|local_scalar_dense|_C\."
)


@pytest.mark.parametrize("described", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_nothing_of_torchs_traces(name: str, described: bool) -> None:
    descriptors = {"x": Meta(["n", "m"])} if described else {}
    f = REFUSED[name]
    program = tsfunc.specialize(lambda x: f(x), descriptors)
    with pytest.raises(DataDependentError) as caught:
        program(data(4, 3))
    text = str(caught.value)
    assert not INTERNAL.search(text.replace(__file__, "")), text  # a folder may be named so
    assert __file__ in text or "the function returns" in text or "a body" in text, text
