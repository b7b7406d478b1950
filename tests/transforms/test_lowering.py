"""Programs made before any call, and the arguments that a program was made for."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tsfunc import Dim, MetaTensorType, specialize
from tsfunc import MetaTensorType as Meta
from tsfunc.errors import ConstraintViolation, DescriptorError, DescriptorViolation
from tsfunc.program import Program

F32 = torch.float32


class Layer(NamedTuple):
    weight: Tensor
    bias: list[Tensor]


def apply(layer: Layer, x: Tensor, scale: float = 2.0) -> Tensor:
    return (x @ layer.weight + layer.bias[0]) * scale


make_layer: Any = Layer
DESCRIBED = {
    "layer": make_layer(Meta([3, "m"], dtype=F32, requires_grad=True), [Meta(["m"], dtype=F32)]),
    "x": Meta(["n", 3], dtype=F32),
}


def arguments(n: int, m: int) -> tuple[Layer, Tensor]:
    weight = torch.randn(3, m, requires_grad=True)
    return Layer(weight, [torch.randn(m)]), torch.randn(n, 3)


class TestLower:
    def test_calls_that_fit_are_not_traced(self) -> None:
        f = specialize(apply)
        program = f.lower(DESCRIBED)
        assert isinstance(program, Program) and f.program is program
        for n, m in ((2, 5), (4, 4)):
            args = arguments(n, m)
            torch.testing.assert_close(f(*args), apply(*args))
        assert f.cache_info()[:3] == (2, 0, 1)

    def test_arguments_by_position(self) -> None:
        f = specialize(torch.nn.Linear(3, 2))
        f.lower(Meta(["n", 3], dtype=F32))
        x = torch.randn(4, 3)
        torch.testing.assert_close(f(x), f.func(x))
        assert f.cache_info().misses == 0
        with pytest.raises(
            DescriptorError, match=r"Linear\): lower: expected at most 1 .*, for input, got 2"
        ):
            f.lower(Meta([3]), Meta([3]))

    def test_the_descriptors_that_it_was_specialized_with(self) -> None:
        f = specialize(apply, [DESCRIBED, {**DESCRIBED, "scale": 3.0}])
        first, second = f.lower()
        assert "mul(add_tensor, 2.0)" in first.source and "mul(add_tensor, 3.0)" in second.source
        args = arguments(3, 2)
        torch.testing.assert_close(f(*args, 3.0), apply(*args, 3.0))
        assert f.cache_info().misses == 0

    def test_no_data_is_made(self) -> None:
        size = 1 << 20
        f = specialize(lambda x: x @ x.t())
        program = f.lower({"x": Meta([size, size], dtype=F32)})  # four terabytes
        assert program.properties()["matmul_default"].shape == (size, size)

    def test_bounds_hold_for_the_sizes_that_are_tried(self) -> None:
        def f(x: Tensor, y: Tensor) -> Tensor:
            assert 7 <= x.shape[0] <= 8 and y.shape[0] == x.shape[0] - 5
            return x[:2] + y[:2]

        g = specialize(f)
        g.lower({"x": Meta([Dim("n", min=7, max=8)], dtype=F32), "y": Meta(["n - 5"], dtype=F32)})
        g(torch.ones(8), torch.ones(3))
        assert g.cache_info().misses == 0

    @pytest.mark.parametrize(
        "described, message",
        [
            ({"x": Meta(["n"])}, r"x, tensor\[n\], leaves the dtype open"),
            ({"x": Meta(dtype=F32)}, r"leaves the shape open"),
            ({"x": Meta([3, None], dtype=F32)}, r"dim 1 of the shape open.*\['n', 3\]"),
            ({"x": list[Meta(["n"], dtype=F32)]}, r"x is described as List\["),  # type: ignore[misc]
            ({}, "the parameter x has neither a descriptor nor a default"),
            ({"x": Meta(["n-9"], dtype=F32), "y": Meta(["n"], dtype=F32)}, "negative"),
        ],
    )
    def test_open_dims(self, described: Any, message: str) -> None:
        with pytest.raises(DescriptorError, match=message):
            specialize(lambda x, y=None: x).lower(described)

    def test_wrong_uses(self) -> None:
        with pytest.raises(DescriptorError, match=r"lower\(\) expected descriptors"):
            specialize(apply).lower()
        with pytest.raises(DescriptorError, match="has descriptors already"):
            specialize(apply, DESCRIBED).lower(DESCRIBED)
        with pytest.raises(ConstraintViolation, match="n <= 5"):
            specialize(lambda x: x if x.shape[0] > 5 else x + 1).lower(
                {"x": Meta(["n"], dtype=F32)}
            )


class TestDescriptors:
    def test_they_describe_the_call_of_the_program(self) -> None:
        f = specialize(apply, {"x": Meta([Dim("n", min=2, max=9), 3])})
        args = arguments(4, 2)
        f(*args, scale=3.0)
        described = f.descriptors
        assert list(described) == ["layer", "x", "scale"] and described["scale"] == 3.0
        assert described["x"] == Meta(
            [Dim("n", min=2, max=9), 3], dtype=F32, device="cpu", requires_grad=False,
            layout=torch.strided,
        )  # fmt: skip
        assert described["layer"].weight.shape == (3, 2) and described["layer"].weight.requires_grad

    def test_they_paste_back(self) -> None:
        f = specialize(apply, {"x": Meta(["n", 3])})
        args = arguments(4, 2)
        f(*args)
        scope = {"MetaTensorType": MetaTensorType, "Dim": Dim, "torch": torch, "Layer": Layer}
        pasted = eval(repr(f.descriptors), scope)
        assert pasted == f.descriptors
        g = specialize(apply, pasted)
        g.lower()
        torch.testing.assert_close(g(*args), apply(*args))
        assert g.cache_info().misses == 0
        with pytest.raises(DescriptorViolation, match=r"layer\.weight"):
            g(*arguments(4, 3))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.scale = 2.0

    def forward(self, x: Tensor, state: State) -> Tensor:
        return x * self.weight * self.scale + state.step


class State:
    def __init__(self) -> None:
        self.step = 4


class TestGuards:
    def test_guards_state_the_assumptions_of_a_program(self) -> None:
        f = specialize(Model(), {"x": Meta([Dim("n", max=9), 3])})
        f(torch.ones(4, 3), State())
        guards = f.guards
        assert guards[0] == "x: f32[n, 3] cpu no_grad contiguous"
        for line in ("type(state) is State", "2<=n<=9", "state.step is 4 (int)",
                     "self.scale is 2.0 (float)", "grad mode is True"):  # fmt: skip
            assert line in guards, line
        assert any(line.startswith("self.weight is f32[3]") for line in guards)
        assert str(guards).splitlines() == list(guards)

    def test_layouts_expressions_and_values(self) -> None:
        f = specialize(
            lambda x, y, mode: x + y[:1].sum(), {"y": Meta(["2*n"]), "x": Meta(["n", 2])}
        )
        f(torch.ones(2, 4).t(), torch.ones(8), "fast")
        assert f.guards[0] == "x: f32[n, 2] cpu no_grad strides (1, 4)"
        assert "y.shape[0] == 2 * n" in f.guards and "mode is 'fast' (str)" in f.guards
