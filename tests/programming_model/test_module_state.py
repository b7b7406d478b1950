"""torch.export's programming model, "Module state: reads vs. updates": by example."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tsfunc import MetaTensorType as Meta
from tsfunc import grad, specialize
from tsfunc.errors import TypeCheckError


class Counting(nn.Module):
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(2))
        self.weight = nn.Parameter(torch.ones(2))
        self.scale = 2.0
        self.steps = 0
        self.history: list[int] = []


class TestReads:
    def test_parameters_and_buffers_are_lifted(self) -> None:
        class M(Counting):
            def forward(self, x: Tensor) -> Tensor:
                return x * self.weight + self.total

        module, x = M(), torch.ones(2)
        f = specialize(module)
        torch.testing.assert_close(f(x), module(x))
        with torch.no_grad():
            module.weight.fill_(5.0)
            module.total.fill_(1.0)
        torch.testing.assert_close(f(x), module(x))
        assert f.cache_info().programs == 1 and len(f.program.lifted) == 2
        f(x).sum().backward()
        assert module.weight.grad is not None

    def test_static_attributes_are_constants_and_held_to(self) -> None:
        class M(Counting):
            def forward(self, x: Tensor) -> Tensor:
                return x * self.scale if self.training else x

        module, x = M(), torch.ones(2)
        f = specialize(module)
        assert f(x).equal(x * 2) and "mul(x, 2.0)" in f.program.source
        module.scale = 3.0
        assert f(x).equal(x * 3)
        module.eval()
        assert f(x).equal(x)

    def test_uninitialized_values(self) -> None:
        class M(nn.Module):
            def forward(self, x: Tensor) -> Any:
                return x * self.missing  # type: ignore[operator]

        with pytest.raises(AttributeError, match="missing"):
            specialize(M())(torch.ones(2))


class TestStaticUpdates:
    def test_reads_see_the_latest_update(self) -> None:
        class M(Counting):
            def forward(self, x: Tensor) -> Tensor:
                self.scale = 5.0
                y = x * self.scale
                self.scale = 7.0
                return y + self.scale

        module, x = M(), torch.ones(2)
        f = specialize(module)
        for _ in range(2):
            assert f(x).equal(x * 12) and module.scale == 7.0
        assert f.cache_info().programs == 1
        source = f.program.source
        assert "5.0" in source and "add(" in source and "scale = " not in source.split("add(")[0]

    def test_an_update_of_a_read_value_takes_effect_after_each_call(self) -> None:
        class M(Counting):
            def forward(self, x: Tensor) -> Tensor:
                self.steps += 1
                self.history.append(self.steps)
                return x * self.steps

        module, x = M(), torch.ones(2)
        f = specialize(module)
        for n in (1, 2, 3):
            assert f(x).equal(x * n) and module.steps == n
        assert module.history == [1, 2, 3]

    def test_a_flag_that_is_set_once(self) -> None:
        class M(Counting):
            ready = False

            def forward(self, x: Tensor) -> Tensor:
                if not self.ready:
                    self.ready = True
                    return x - 1
                return x + 1

        module, eager, x = M(), M(), torch.ones(2)
        f = specialize(module)
        for _ in range(3):
            assert f(x).equal(eager(x))
        assert f.cache_info().programs == 2


class TestBuffers:
    def test_in_place(self) -> None:
        class M(Counting):
            def forward(self, x: Tensor) -> Tensor:
                self.total[:] = self.total + x
                self.total.mul_(2)
                return self.total + 1

        self.follows(M)

    def test_by_assignment(self) -> None:
        class M(Counting):
            def forward(self, x: Tensor) -> Tensor:
                self.total = self.total + x
                return self.total * 2

        f = self.follows(M)
        assert f.cache_info().programs == 1 and "_buffers['total'] = " in f.program.source

    def test_beside_a_static_attribute(self) -> None:
        class M(Counting):
            def forward(self, x: Tensor) -> Tensor:
                self.total = self.total + x
                self.steps = 1
                return self.total * 2

        assert self.follows(M).cache_info().programs == 1

    def test_both_in_turns(self) -> None:
        class M(Counting):
            def forward(self, x: Tensor) -> Tensor:
                self.total = self.total + x
                self.total += 1
                view = self.total[:1]
                view.mul_(3)
                self.total = self.total * 2
                return self.total.clone()

        self.follows(M)

    def test_a_module_inside(self) -> None:
        class M(Counting):
            def forward(self, x: Tensor) -> Tensor:
                self.total = self.total + x
                return self.total

        class Outer(nn.Module):
            total: Tensor

            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.ModuleList([M(), M()])
                self.register_buffer("total", torch.zeros(2))

            def forward(self, x: Tensor) -> Tensor:
                for each in self.inner:
                    x = each(x)
                self.total.add_(x)
                return x

        self.follows(Outer)

    def test_a_module_that_is_an_argument(self) -> None:
        class M(Counting):
            def forward(self, x: Tensor) -> Tensor:
                self.total = self.total + x
                return self.total

        f = specialize(lambda module, x: module(x))
        one, other, x = M(), M(), torch.ones(2)
        for module, n in ((one, 1), (one, 2), (other, 1), (one, 3)):
            assert f(module, x).equal(n * x) and module.total.equal(n * x)
        assert f.cache_info().programs == 1

    def test_added_to(self) -> None:
        class M(Counting):
            def forward(self, x: Tensor) -> Tensor:
                self.total += x
                return self.total * 2

        one = M()
        total, f = one.total, specialize(one)
        for n in (1, 2):
            assert f(torch.ones(2)).equal(torch.full((2,), 2.0 * n)) and one.total is total

    def test_batch_norm(self) -> None:
        one, other = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
        f = specialize(one)
        for _ in range(3):
            x = torch.randn(4, 3)
            torch.testing.assert_close(f(x), other(x))
        torch.testing.assert_close(one.state_dict(), other.state_dict())

    def test_under_grad(self) -> None:
        class M(Counting):
            def forward(self, x: Tensor) -> Tensor:
                self.total = self.total + x.detach()
                return (x * self.weight).sum()

        module, x = M(), torch.ones(2)
        torch.testing.assert_close(grad(specialize(module))(x), torch.ones(2))
        assert module.total.equal(x)

    def follows(self, cls: type[nn.Module]) -> Any:
        one, other = cls(), cls()
        f = specialize(one)
        for i in range(3):
            x = torch.full((2,), i + 1.0)
            torch.testing.assert_close(f(x), other(x))
            torch.testing.assert_close(one.state_dict(), other.state_dict())
        return f


class TestWhatCanNotBeUpdated:
    def refused(self, module: nn.Module, problem: str) -> None:
        before = {name: x.clone() for name, x in module.state_dict().items()}
        with pytest.raises(TypeCheckError, match=problem) as caught:
            specialize(module)(torch.ones(2))
        assert f" at {__file__}:" in str(caught.value)
        torch.testing.assert_close(dict(module.state_dict()), before)

    def test_a_parameter(self) -> None:
        class M(Counting):
            def forward(self, x: Tensor) -> Tensor:
                self.weight = nn.Parameter(self.weight + x)
                return x

        self.refused(M(), r"self\.weight at .*: it is a parameter; write into it in place")

    def test_a_parameter_is_written_in_place(self) -> None:
        class M(Counting):
            def forward(self, x: Tensor) -> Tensor:
                with torch.no_grad():
                    self.weight.sub_(x)
                return self.weight * 2

        module = M()
        f = specialize(module)
        for n in (0.0, -1.0):
            f(torch.ones(2))
            assert module.weight.equal(torch.full((2,), n))

    def test_a_parameter_that_is_added_to(self) -> None:
        class M(Counting):
            def forward(self, x: Tensor) -> Tensor:
                self.weight += x  # type: ignore[misc]
                return self.weight * 2

        module = M()
        f = specialize(module)
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            f(torch.ones(2))
        with torch.no_grad():
            for n in (2.0, 3.0):
                assert f(torch.ones(2)).equal(torch.full((2,), 2 * n))
                assert module.weight.equal(torch.full((2,), n))
        assert isinstance(module.weight, nn.Parameter)

    def test_an_attribute_with_a_tensor_that_is_no_buffer(self) -> None:
        class M(Counting):
            def forward(self, x: Tensor) -> Tensor:
                self.cache = x * 2
                return x

        self.refused(M(), r"self\.cache at .*register it as a buffer")

    def test_a_new_submodule(self) -> None:
        class M(Counting):
            def forward(self, x: Tensor) -> Tensor:
                self.inner = nn.Identity()
                return x

        self.refused(M(), r"self\.inner at .*it is a submodule")


class TestInputs:
    """In-place operators on inputs and views have eager's effect on the caller's tensors."""

    @pytest.mark.parametrize("how", ["itself", "view", "index", "out"])
    def test_writes(self, how: str) -> None:
        def f(x: Tensor) -> Tensor:
            if how == "itself":
                x.add_(1)
            elif how == "view":
                x.t()[0].mul_(3)
            elif how == "index":
                x[1, :] = x[0] * 2
            else:
                torch.mul(x, 2, out=x)
            return x.sum()

        g = specialize(f)
        for _ in range(2):
            one = torch.arange(6.0).view(2, 3)
            other = one.clone()
            torch.testing.assert_close(g(one), f(other))
            torch.testing.assert_close(one, other)
        assert g.cache_info().programs == 1


class TestFunctionalization:
    class M(Counting):
        def forward(self, x: Tensor) -> Tensor:
            self.total = self.total + x
            return x * self.weight * self.shift

        def __init__(self) -> None:
            super().__init__()
            self.shift = torch.full((2,), 3.0)

    def test_shapes_of_state_are_static(self) -> None:
        module, x = self.M(), torch.ones(1)
        f = specialize(module, {"x": Meta(["n"])})
        f(x)
        assert f.properties()["shift"].shape == (2,)
        module.weight = nn.Parameter(torch.ones(1))
        module.total, module.shift = torch.zeros(1), torch.ones(1)
        assert f(x).equal(x) and f.properties()["shift"].shape == (1,)

    def test_state_is_stored_with_the_program(self) -> None:
        module = self.M()
        f = specialize(module)
        f(torch.ones(2))
        exported = f.to_exported_program()
        assert set(exported.state_dict) == {"weight", "total"}
        (constant,) = exported.constants.values()
        assert constant.equal(module.shift)

    def test_reads_and_updates_are_inputs_and_outputs(self) -> None:
        f = specialize(self.M())
        f(torch.ones(2))
        (update,) = f.program.updates
        assert update.buffer == "total"
        assert len(f.program.inputs) == 2  # x, and the buffer
        results: Any = f.program.graph.output_node().args[0]
        assert len(results) == 2
