"""torch.export's programming model, "Values: static vs. dynamic" and "Input types": by example."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as torch_pytree

from tsfunc import MetaTensorType as Meta
from tsfunc import specialize
from tsfunc.errors import DescriptorViolation


class AddSeven(nn.Module):
    def forward(self, x: Tensor, y):  # type: ignore[no-untyped-def]
        z = y + 7
        return x + z


class TestStaticValues:
    def test_a_static_value_is_a_constant_and_its_uses_are_folded(self) -> None:
        f = specialize(AddSeven(), {"x": Meta([1]), "y": 3})
        x = torch.randn(1)
        torch.testing.assert_close(f(x, 3), x + 10)
        assert "add(x, 10)" in f.program.source and "7" not in f.program.source

    def test_another_value_at_run_time_is_an_error(self) -> None:
        f = specialize(AddSeven(), {"y": 3})
        f(torch.randn(1), 3)
        with pytest.raises(DescriptorViolation, match="y: expected the value 3"):
            f(torch.randn(1), 4)

    def test_without_a_guarantee_another_value_is_another_program(self) -> None:
        f = specialize(AddSeven())
        for y in (3, 4, 3, 3.0, True):
            torch.testing.assert_close(f(torch.ones(1), y), torch.ones(1) + y + 7)
        assert f.cache_info().programs == 4

    @pytest.mark.parametrize("value", [1, 2.5, True, "s", None])
    def test_primitives_are_static(self, value: Any) -> None:
        f = specialize(lambda x, value: (x + 1, value, type(value)))
        assert f(torch.ones(1), value)[1:] == (value, type(value))
        assert len(f.program.inputs) == 1


class TestDynamicValues:
    def test_a_tensors_data_can_change_from_run_to_run(self) -> None:
        f = specialize(AddSeven())
        for _ in range(3):
            x, y = torch.randn(3), torch.randn(3)
            torch.testing.assert_close(f(x, y), x + y + 7)
        assert f.cache_info().programs == 1

    def test_shapes_are_static_unless_they_are_described(self) -> None:
        f, g = specialize(AddSeven()), specialize(AddSeven(), {"x": Meta(["n"])})
        for n in (3, 5):
            f(torch.ones(n), 1)
            g(torch.ones(n), 1)
        assert f.cache_info().programs == 2 and g.cache_info().programs == 1

    def test_other_metadata_is_static(self) -> None:
        f = specialize(lambda x: (x, str(x.dtype), x.device.type))
        assert f(torch.ones(2))[1] == "torch.float32"
        assert f(torch.ones(2, dtype=torch.float64))[1] == "torch.float64"
        assert f(torch.ones(2, device="meta"))[2] == "meta"

    def test_an_integer_can_be_described_as_dynamic(self) -> None:
        f = specialize(lambda x, n: x.new_ones(n) * n, {"n": int})
        for n in (2, 3, 4):
            torch.testing.assert_close(f(torch.ones(9), n), torch.ones(n) * n)
        assert f.cache_info().programs == 1


Point = namedtuple("Point", ["a", "b"])


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


@dataclass
class Input:
    f: Tensor
    p: Tensor


class Registered:
    def __init__(self, x: Tensor, scale: float) -> None:
        self.x, self.scale = x, scale


torch_pytree.register_dataclass(Input)
torch_pytree.register_pytree_node(
    Registered,
    lambda r: ([r.x], r.scale),
    lambda leaves, scale: Registered(next(iter(leaves)), scale),
)


class TestContainers:
    @pytest.mark.parametrize(
        "value",
        [
            [torch.ones(2), 3], (torch.ones(2), [torch.zeros(2), "s"]),
            {"a": torch.ones(2), "b": {"c": torch.zeros(2)}}, Point(torch.ones(2), 1.0),
            Pair(torch.ones(2), torch.zeros(2)), Input(torch.ones(2), torch.zeros(2)),
            Registered(torch.ones(2), 2.0),
        ],
        ids=lambda value: type(value).__name__,
    )  # fmt: skip
    def test_elements_follow_the_rules_and_structures_come_back(self, value: Any) -> None:
        f = specialize(lambda value, x: (value, x + 1))
        for _ in range(2):
            got, _ = f(value, torch.ones(1))
            assert type(got) is type(value)
        assert f.cache_info().programs == 1

    def test_the_structure_is_static(self) -> None:
        f: Any = specialize(lambda xs: sum(xs.values()) if isinstance(xs, dict) else sum(xs))
        x = torch.ones(2)
        for xs, total in (([x, x], 2), ([x, x, x], 3), ((x, x), 2), ({"a": x, "b": x}, 2)):
            assert f(xs).equal(total * x)
        assert f.cache_info().programs == 4

    def test_the_keys_of_a_dict_are_static(self) -> None:
        f = specialize(lambda d: (d["a"] * 2, sorted(d)))
        x = torch.ones(1)
        assert f({"a": x, "b": x})[1] == ["a", "b"] and f({"a": x})[1] == ["a"]
        assert f({"a": x, "c": x})[1] == ["a", "c"] and f.cache_info().programs == 3

    def test_a_registered_dataclass_as_an_input(self) -> None:
        class M(nn.Module):
            def forward(self, x: Input) -> Tensor:
                return x.f + 1

        f = specialize(M())
        for _ in range(2):
            x = Input(f=torch.randn(10, 4), p=torch.zeros(10, 4))
            torch.testing.assert_close(f(x), x.f + 1)
        assert f.cache_info().programs == 1

    def test_its_fields_are_called_by_their_names(self) -> None:
        n: Any = Meta(["n"])
        f = specialize(lambda x: x.f + x.p, {"x": Input(n, n)})
        with pytest.raises(
            DescriptorViolation,
            match=r"x\.p\.shape\[0\]: expected 3 \(n is 3 at x\.f\.shape\[0\]\), got 2",
        ):
            f(Input(f=torch.ones(3), p=torch.ones(2)))

    def test_a_static_part_of_a_registered_class(self) -> None:
        f = specialize(lambda r: r.x * r.scale)
        for scale in (2.0, 3.0):
            assert f(Registered(torch.ones(2), scale)).equal(torch.full((2,), scale))


class TestOptionalInputs:
    class M(nn.Module):
        def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
            if y is not None:
                return y * x
            return x + x

    def test_passed_in(self) -> None:
        f, x, y = specialize(self.M()), torch.randn(3, 3), torch.randn(3, 3)
        torch.testing.assert_close(f(x, y), y * x)
        assert "mul(" in f.program.source and "add(" not in f.program.source

    def test_not_passed_in(self) -> None:
        f, x = specialize(self.M()), torch.randn(3, 3)
        torch.testing.assert_close(f(x), x + x)
        assert "add(" in f.program.source and "mul(" not in f.program.source

    def test_the_defaults_are_kept(self) -> None:
        """torch.export loses them: a call must pass all arguments."""
        f, x = specialize(self.M()), torch.randn(3)
        for _ in range(2):
            torch.testing.assert_close(f(x), x + x)
            torch.testing.assert_close(f(x, y=x), x * x)
            torch.testing.assert_close(f(x, None), x + x)
