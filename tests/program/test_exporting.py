"""Programs handed over to torch.export: its own tools work on them, for every size."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tsfunc import Dim, cond, grad, make_graph, specialize, vmap
from tsfunc import MetaTensorType as Meta
from tsfunc.errors import ExportError

WEIGHT = torch.nn.Parameter(torch.randn(4, 2))
Exported = torch.export.ExportedProgram


def layer(x: Tensor, p: dict[str, Tensor], k: int = 3) -> dict[str, Any]:
    h = x @ WEIGHT
    with torch.no_grad():
        h = h / h.std().clamp(min=1)
    return {"a": h.relu() * torch.arange(2.0), "b": [p["u"].view(x.shape[0], 2) + k]}


def saved_and_loaded(program: Exported) -> Exported:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


WAYS: dict[str, Callable[[Exported], Exported]] = {
    "module": lambda program: program,
    "save and load": saved_and_loaded,
    "decompositions": lambda program: program.run_decompositions(),
}


# torch's own passes use a class of torch's that is deprecated.
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@pytest.mark.parametrize("way", WAYS)
def test_torchs_tools(way: str) -> None:
    f = specialize(layer, {"x": Meta([Dim("n", max=100), 4]), "p": {"u": Meta(["2*n"])}})
    f(torch.ones(3, 4), {"u": torch.ones(6)}, k=4)
    module = WAYS[way](f.to_exported_program()).module()
    for n in (2, 7):
        args = torch.randn(n, 4), {"u": torch.randn(2 * n)}
        torch.testing.assert_close(module(*args, k=4), layer(*args, k=4))


@pytest.mark.parametrize("size", ["a*b", "a+b", "a//2", "3*a", "2*a+1", "a-1"])
def test_sizes_that_are_expressions(size: str) -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return x.sum() + y * 2

    g = specialize(f, {"x": Meta([Dim("a", min=4), "b"]), "y": Meta([size])})
    length: Callable[..., int] = eval(f"lambda a, b: {size}")
    g(torch.ones(4, 6), torch.ones(length(4, 6)))
    module = g.to_exported_program().module()
    x, y = torch.randn(6, 3), torch.randn(length(6, 3))
    torch.testing.assert_close(module(x, y), f(x, y))


def test_derivatives() -> None:
    f = specialize(vmap(grad(lambda x: (x @ WEIGHT).sin().sum())), {"x": Meta(["n", 4])})
    x = torch.randn(3, 4)
    want = f(x)
    program = f.to_exported_program()
    assert [p is not None for p in program.parameters()] == [True]
    torch.testing.assert_close(program.module()(x), want)


def test_writes_into_arguments() -> None:
    def f(x: Tensor) -> Tensor:
        x.mul_(2)
        return x.sum(0)

    g = specialize(f, {"x": Meta(["n", 2])})
    g(torch.ones(3, 2))
    a, b = torch.ones(5, 2), torch.ones(5, 2)
    torch.testing.assert_close([g.to_exported_program().module()(a), a], [f(b), b])


def test_control_flow() -> None:
    f = specialize(lambda x: cond(x.sum() > 0, torch.sin, torch.cos, x))
    f(torch.ones(3))
    module = f.to_exported_program().module()
    for x in (torch.ones(3), -torch.ones(3)):
        torch.testing.assert_close(module(x), f(x))


class Model:
    def __init__(self) -> None:
        self.w = torch.ones(3)


def test_what_it_has_no_place_for() -> None:
    with_object = specialize(lambda m, x: x * m.w)
    with_object(Model(), torch.ones(3))
    with pytest.raises(ExportError, match=r"an argument of type Model.*graph_module"):
        with_object.to_exported_program()
    with pytest.raises(ExportError, match="no record"):
        make_graph(torch.sin)(torch.ones(2)).to_exported_program()
