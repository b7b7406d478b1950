"""torch.export's programming model, "Control flow: static vs. dynamic": by example."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tsfunc import Dim, cond, specialize
from tsfunc import MetaTensorType as Meta
from tsfunc import map as map_over
from tsfunc.errors import ConstraintViolation, DataDependentError, FailedCheckError


class TestStatic:
    def test_an_if_over_a_static_value_leaves_one_branch(self) -> None:
        f = specialize(lambda x, up: x + 1 if up else x - 1)
        x = torch.zeros(2)
        assert f(x, True).equal(x + 1) and "sub(" not in f.program.source
        assert f(x, False).equal(x - 1) and "add(" not in f.program.source

    @pytest.mark.parametrize("kind", ["for", "while"])
    def test_loops_are_unrolled(self, kind: str) -> None:
        def f(x: Tensor, n: int) -> Tensor:
            if kind == "for":
                for i in range(n):
                    x = x * (i + 2)
                return x
            i = 0
            while i < n:
                x, i = x * (i + 2), i + 1
            return x

        g = specialize(f)
        assert g(torch.ones(1), 3).item() == 24.0
        assert g.program.source.count("mul(") == 3

    def test_static_shapes_are_static_values(self) -> None:
        f = specialize(lambda x: x + 1 if x.shape[0] > 2 else x - 1)
        for n in (2, 3):
            torch.testing.assert_close(f(torch.zeros(n)), torch.full((n,), 1.0 if n > 2 else -1.0))


class TestShapeDependent:
    def f(self, x: Tensor) -> Tensor:
        return x.sin() if x.shape[0] > 4 else x.cos()

    def test_the_branches_are_those_of_the_call_and_their_conditions_must_be_guaranteed(
        self,
    ) -> None:
        f = specialize(self.f, {"x": Meta([Dim("n", min=5)])})
        for n in (5, 9):
            torch.testing.assert_close(f(torch.ones(n)), torch.ones(n).sin())
        assert f.cache_info().programs == 1

    def test_else_the_error_suggests_descriptors(self) -> None:
        with pytest.raises(ConstraintViolation, match=r"n <= 4 .*(?s:.*)Dim\('n', max=4\)"):
            specialize(self.f, {"x": Meta(["n"])})(torch.ones(3))

    def test_shapes_of_intermediate_values_are_expressions(self) -> None:
        f = specialize(lambda x, y: torch.cat([x, y]), {"x": Meta(["n"]), "y": Meta(["m"])})
        f(torch.ones(3), torch.ones(4))
        assert "[m + n]" in str(f.program)

    def test_numbers_of_sizes_are_expressions(self) -> None:
        def f(x: Tensor) -> tuple[Any, ...]:
            n = x.shape[0]
            whole = (math.floor(n / 3), math.ceil(n / 3), math.trunc(n / 3), round(n / 3))
            return *whole, round(n / 7, 2), torch.sym_max(n, 6), n // 2, n % 3, n**2, x[: n // 2]

        g = specialize(f, {"x": Meta([Dim("n", min=3)])})
        for n in (3, 5, 7, 8):
            x = torch.randn(n)
            assert g(x)[:-1] == f(x)[:-1] and g(x)[-1].equal(f(x)[-1])
        assert g.cache_info().programs == 1

    def test_without_guards_no_guarantee_is_needed(self) -> None:
        f = specialize(lambda x: x.sin().sum(0), {"x": Meta(["n", "m"])})
        for n, m in ((2, 3), (5, 7)):
            x = torch.randn(n, m)
            torch.testing.assert_close(f(x), x.sin().sum(0))
        assert f.cache_info().programs == 1


class TestDataDependent:
    def test_an_if_over_data_is_an_error_with_its_line_and_rewrite(self) -> None:
        class Old(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                if x.sum() > 0:
                    return x.sin()
                return x.cos()

        with pytest.raises(DataDependentError) as caught:
            specialize(Old())(torch.ones(3))
        text = str(caught.value)
        line = Old.forward.__code__.co_firstlineno + 1
        assert f"{__file__}:{line}, in forward: if x.sum() > 0:" in text
        assert "tsfunc.cond(" in text and "torch.where(" in text and "torch._check(" in text

    def test_cond(self) -> None:
        class New(nn.Module):
            def forward(self, x: Tensor) -> Any:
                return cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), x)

        f = specialize(New())
        for x in (torch.ones(3), -torch.ones(3)):
            torch.testing.assert_close(f(x), x.sin() if x.sum() > 0 else x.cos())
        assert f.cache_info().programs == 1

    def test_map(self) -> None:
        f = specialize(lambda xs, y: map_over(lambda x: x * y.sum(), xs))
        xs, y = torch.randn(4, 3), torch.randn(2)
        torch.testing.assert_close(f(xs, y), xs * y.sum())


class TestDataDependentSizes:
    @staticmethod
    def old(x: Tensor) -> Tensor:
        nz = x.nonzero()
        if nz.shape[0] > 0:
            return x.sin()
        return x.cos()

    @staticmethod
    def new(x: Tensor) -> Tensor:
        nz = x.nonzero()
        torch._check(nz.shape[0] > 0)
        if nz.shape[0] > 0:
            return x.sin()
        return x.cos()

    def test_an_if_over_a_size_of_data_is_an_error(self) -> None:
        with pytest.raises(DataDependentError) as caught:
            specialize(self.old)(torch.ones(3))
        text = str(caught.value)
        assert "in old: if nz.shape[0] > 0:" in text and __file__ in text
        assert "torch._check(nz.shape[0] > 0)" in text

    def test_a_check_decides_it_and_the_program_asserts_it(self) -> None:
        f, x = specialize(self.new), torch.tensor([0.0, 1.0, 2.0])
        torch.testing.assert_close(f(x), x.sin())
        source = f.program.source
        assert source.index("nonzero(") < source.index("check_size") < source.index("sin(")
        with pytest.raises(FailedCheckError, match=rf"does not hold.*{__file__}:\d+, in new"):
            f(torch.zeros(3))

    def test_a_failed_check_raises_the_error_of_torch(self) -> None:
        with pytest.raises(RuntimeError):
            self.new(torch.zeros(3))
        assert issubclass(FailedCheckError, RuntimeError)

    @pytest.mark.parametrize("symbolic", [False, True])
    def test_sizes_are_numbers_of_the_program(self, symbolic: bool) -> None:
        def f(x: Tensor) -> tuple[Tensor, ...]:
            kept = x[x > 0]
            n = kept.shape[0]
            return kept * 2, torch.zeros(n, 2), kept.new_ones(1).expand(n), kept.sum() / n

        g = specialize(f, {"x": Meta(["m"])} if symbolic else None)
        for x in (torch.tensor([1.0, -1.0, 2.0, 3.0]), torch.ones(4), -torch.ones(4)):
            torch.testing.assert_close(g(x), f(x), equal_nan=True)
        assert g.cache_info().programs == 1

    def test_item(self) -> None:
        def f(x: Tensor, n: Tensor) -> tuple[Tensor, ...]:
            k = n.item()
            torch._check(k >= 0)
            torch._check(k <= x.shape[0])
            return x[:k], torch.arange(k), x * k, x.new_full((k, 2), 0.5)  # type: ignore[arg-type]

        g, x = specialize(f), torch.randn(5)
        for n in (3, 0, 5):
            torch.testing.assert_close(g(x, torch.tensor(n)), f(x, torch.tensor(n)))
        assert g.cache_info().programs == 1
        with pytest.raises(FailedCheckError, match="<= 5 does not hold"):
            g(x, torch.tensor(6))

    def test_numbers_go_back_into_tensors(self) -> None:
        def f(x: Tensor) -> tuple[Tensor, Tensor]:
            first, second = x[:2].tolist()
            return x * x.sum().item(), x * first + second

        g = specialize(f)
        for _ in range(2):
            x = torch.randn(4)
            torch.testing.assert_close(g(x), f(x))
        assert g.cache_info().programs == 1

    def test_unique_and_masked_select(self) -> None:
        def f(x: Tensor) -> tuple[Tensor, Tensor]:
            values, counts = torch.unique(x, return_counts=True)
            return values * counts, torch.masked_select(x, x > 1)

        g = specialize(f)
        for x in (torch.tensor([1, 2, 2, 3]), torch.tensor([1, 1, 1, 1])):
            torch.testing.assert_close(g(x), f(x))

    def test_checks_of_operators_on_sizes_of_data_name_the_users_line(self) -> None:
        def f(x: Tensor, y: Tensor) -> Tensor:
            return x[x > 0] + y[y > 0]

        g = specialize(f)
        x, y = torch.tensor([1.0, 2.0, -1.0]), torch.tensor([-1.0, 3.0, 4.0])
        torch.testing.assert_close(g(x, y), f(x, y))
        with pytest.raises(FailedCheckError, match=rf"{__file__}:\d+, in f"):
            g(x, torch.ones(3))

    def test_a_size_born_in_a_branch(self) -> None:
        def f(x: Tensor) -> Any:
            return cond(x.sum() > 0, lambda x: x[x > 0].sum(), lambda x: x.sum(), x)

        g = specialize(f)
        for x in (torch.tensor([1.0, -0.5, 2.0]), -torch.ones(3)):
            assert g(x).equal(f(x))
        assert g.cache_info().programs == 1

    def test_it_does_not_leave_the_branch(self) -> None:
        def f(x: Tensor) -> Any:
            return cond(x.sum() > 0, lambda x: x[x > 0], lambda x: x[x <= 0], x)

        with pytest.raises(DataDependentError, match="size"):
            specialize(f)(torch.ones(3))


class TestTorchsOwnOperators:
    """Programs take ``torch.cond`` and ``torch.map``, as torch.export does, like ours."""

    @pytest.mark.parametrize("described", [None, {"x": Meta(["n"])}], ids=["", "named"])
    def test_cond(self, described: Any) -> None:
        class New(nn.Module):
            def forward(self, x: Tensor) -> Any:
                return torch.cond(
                    pred=x.sum() > 0,
                    true_fn=lambda x: x.sin(),
                    false_fn=lambda x: x.cos(),
                    operands=(x,),
                )

        f = specialize(New(), described)
        for x in (torch.ones(3), -torch.ones(3)):
            torch.testing.assert_close(f(x), x.sin() if x.sum() > 0 else x.cos())
        assert f.cache_info().programs == 1

    def test_map(self) -> None:
        torch_map: Any = torch._higher_order_ops.map

        def f(xs: Tensor, y: Tensor) -> Any:
            return torch_map(lambda x, y: x * y.sum(), xs, y)

        g = specialize(f, {"xs": Meta(["n", 2])})
        for n in (3, 5):
            xs, y = torch.randn(n, 2), torch.randn(2)
            torch.testing.assert_close(g(xs, y), xs * y.sum())
        assert g.cache_info().programs == 1
