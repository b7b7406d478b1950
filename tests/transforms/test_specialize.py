"""specialize: a program agrees with its function, and enforces its descriptors."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch import Tensor

import tsfunc
from tsfunc import Dim, grad, jacfwd, jvp, specialize, vmap
from tsfunc import MetaTensorType as Meta
from tsfunc.errors import (
    ConstraintViolation,
    DataDependentError,
    DescriptorError,
    DescriptorViolation,
    EscapedTracerError,
)

WEIGHT = torch.randn(8, 4, device="cpu")


def layer(x: Tensor) -> Tensor:
    return F.softmax(F.linear(x, WEIGHT.to(x.device)).relu(), dim=-1)


class Scale:
    def __init__(self, by: float) -> None:
        self.by = by

    @specialize
    def apply(self, x: Tensor) -> Tensor:
        return x * self.by


def loss(x: Tensor) -> Tensor:
    return layer(x).square().sum()


def counted(func: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    """Return the function, and a list with an entry for each time that Python ran it."""
    calls: list[int] = []

    def run(*args: Any) -> Any:
        calls.append(1)
        return func(*args)

    return run, calls


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


def test_a_function_may_be_called_as_an_operator_is() -> None:
    def add(x: Tensor) -> Tensor:
        return x + x

    s = specialize(add)
    torch.testing.assert_close(s(torch.ones(2)), torch.full((2,), 2.0))


def test_functions_written_in_c_have_no_signature() -> None:
    x = torch.randn(3)
    torch.testing.assert_close(specialize(torch.sin)(x), x.sin())
    torch.testing.assert_close(specialize(torch.add)(x, 1, alpha=3), x + 3)
    with pytest.raises(DescriptorError, match="there is no parameter 'x'"):
        specialize(torch.sin, {"x": Meta(shape=["n"])})


class TestProgramsAreFunctions:
    def test_plain_case(self) -> None:
        x = torch.randn(3, 4)
        f = specialize(layer)
        torch.testing.assert_close(f(x), layer(x))

    def test_one_trace_for_calls_that_look_alike(self) -> None:
        run, calls = counted(layer)
        f = specialize(run)
        for _ in range(3):
            f(torch.randn(3, 4))
        assert len(calls) == 1
        f(torch.randn(2, 4))
        assert len(calls) == 2
        assert f.cache_info()[:3] == (2, 2, 2)

    @given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6))
    def test_one_program_for_every_size_of_a_named_dim(self, sizes: list[int]) -> None:
        f = specialize(layer, {"x": Meta(shape=["n", 4])})
        for n in sizes:
            x = torch.randn(n, 4)
            torch.testing.assert_close(f(x), layer(x))
        assert f.cache_info().programs == 1

    def test_a_size_with_another_control_flow_has_its_own_program(self) -> None:
        def course(x: Tensor) -> Tensor:
            return x + 1 if x.shape[0] == 1 else x - 1

        f = specialize(course, {"x": Meta(shape=["n"])})
        for n in (4, 1, 7, 1):
            torch.testing.assert_close(f(torch.zeros(n)), course(torch.zeros(n)))
        assert f.cache_info().programs == 2

    def test_sizes_are_numbers_of_the_program(self) -> None:
        def mean(x: Tensor) -> Tensor:
            return x.sum() / (x.shape[0] * 2) + torch.ones(x.shape[0] + 1).sum()

        f = specialize(mean, {"x": Meta(shape=["n"])})
        for n in (2, 5, 9):
            x = torch.randn(n)
            torch.testing.assert_close(f(x), mean(x))
        assert f.cache_info().programs == 1

    def test_expressions_of_named_dims(self) -> None:
        def pair(x: Tensor, y: Tensor) -> Tensor:
            return torch.cat([x, x]) * y

        f = specialize(pair, {"x": Meta(shape=["n"]), "y": Meta(shape=["2*n"])})
        for n in (3, 5):
            x, y = torch.randn(n), torch.randn(2 * n)
            torch.testing.assert_close(f(x, y), pair(x, y))
        assert f.cache_info().programs == 1
        with pytest.raises(DescriptorViolation, match=r"y\.shape\[0\]"):
            f(torch.ones(3), torch.ones(5))

    def test_containers_keywords_and_defaults(self) -> None:
        def f(p: Pair, *more: Tensor, scale: float = 2.0, **named: Tensor) -> dict[str, Any]:
            return {"out": Pair(p.a * scale, p.b + more[0] + named["z"]), "n": 3, "none": None}

        x = torch.randn(3)
        g = specialize(f)
        for scale in (2.0, 3.0):
            got, want = g(Pair(x, x), x, scale=scale, z=x), f(Pair(x, x), x, scale=scale, z=x)
            assert type(got["out"]) is Pair and got["n"] == 3 and got["none"] is None
            torch.testing.assert_close(got["out"], want["out"])
        assert g.cache_info().programs == 2

    def test_signed_zero_and_nan_are_arguments_of_their_own(self) -> None:
        f = specialize(lambda x, s: x * s)
        assert torch.signbit(f(torch.ones(1), -0.0)) and not torch.signbit(f(torch.ones(1), 0.0))
        for _ in range(2):
            assert f(torch.ones(1), float("nan")).isnan()
        assert f.cache_info().programs == 3

    def test_views_and_writes_have_eagers_effect(self) -> None:
        def f(x: Tensor) -> Tensor:
            x[0].mul_(2)
            y = x.t()
            y.add_(1)
            return y

        a, b = torch.ones(2, 3), torch.ones(2, 3)
        torch.testing.assert_close(specialize(f)(a), f(b))
        torch.testing.assert_close(a, b)

    def test_equal_reads_around_a_write_are_not_merged(self) -> None:
        def f(x: Tensor) -> Tensor:
            before = x.sin()
            x.add_(1)
            return before + x.sin()

        a, b = torch.ones(3), torch.ones(3)
        torch.testing.assert_close(specialize(f)(a), f(b))

    def test_random_numbers_are_drawn_at_every_call(self) -> None:
        def noisy(x: Tensor) -> Tensor:
            torch.rand(3)
            return x + torch.randn(4) + torch.randn_like(x) + F.dropout(x)

        f, x = specialize(noisy), torch.zeros(4)
        f(x)
        torch.manual_seed(7)
        first, second = f(x), f(x)
        torch.manual_seed(7)
        torch.testing.assert_close([first, second], [noisy(x), noisy(x)])
        assert not torch.equal(first, second)

    def test_no_grad_inside_holds_in_the_program(self) -> None:
        def f(x: Tensor) -> Tensor:
            with torch.no_grad():
                c = x**2
            return x**3 - c

        x = torch.tensor(3.0)
        torch.testing.assert_close(grad(specialize(f))(x), torch.tensor(27.0))

    def test_detach_inside_holds_in_the_program(self) -> None:
        x = torch.tensor(3.0)
        torch.testing.assert_close(grad(specialize(lambda x: x * x.detach()))(x), x)

    def test_parameters_are_updated_in_place(self) -> None:
        w = torch.ones(3, requires_grad=True)

        def step(x: Tensor) -> Tensor:
            with torch.no_grad():
                w.sub_(x)
            return w * 2

        out = specialize(step)(torch.ones(3))
        assert out.requires_grad and w.equal(torch.zeros(3))


class TestWhatItReads:
    def test_tensors_from_outside_are_read_at_every_call(self) -> None:
        w = torch.ones(3)
        f = specialize(lambda x: x * (w * 2))
        assert f(torch.ones(3)).equal(torch.full((3,), 2.0))
        w.fill_(5.0)
        assert f(torch.ones(3)).equal(torch.full((3,), 10.0))

    def test_gradients_reach_closed_over_parameters(self) -> None:
        model = torch.nn.Linear(4, 2)
        specialize(lambda x: model(x).sum())(torch.ones(3, 4)).backward()
        assert model.weight.grad is not None
        assert model.weight.grad.equal(torch.full((2, 4), 3.0))

    @pytest.mark.parametrize("change", [2.5, 7, True, None, "s"])
    def test_closed_over_values_are_guarded(self, change: object) -> None:
        value: Any = 1.5

        def read(x: Tensor) -> tuple[Tensor, Any]:
            return x, value

        f = specialize(read)
        assert f(torch.ones(1))[1] == 1.5
        value = change
        assert f(torch.ones(1))[1] == change
        assert f.cache_info().programs == 2

    def test_modules_follow_their_training_flag(self) -> None:
        model = torch.nn.Sequential(torch.nn.Dropout(1.0))
        f, x = specialize(model), torch.ones(3)
        assert f(x).equal(torch.zeros(3))
        model.eval()
        assert f(x).equal(x)

    def test_batch_norm_statistics_move_at_every_call(self) -> None:
        a, b = torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)
        f = specialize(a)
        for _ in range(3):
            x = torch.randn(5, 3)
            torch.testing.assert_close(f(x), b(x))
        torch.testing.assert_close(a.state_dict(), b.state_dict())

    def test_grad_mode_and_default_dtype_are_guarded(self) -> None:
        f = specialize(lambda x: x + torch.ones(2))
        f(torch.ones(2))
        with torch.no_grad():
            f(torch.ones(2))
        x = torch.ones(2)
        try:
            torch.set_default_dtype(torch.float64)
            assert f(x).dtype is torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        assert f.cache_info().programs == 3


class TestComposition:
    def test_around_other_transforms(self) -> None:
        x = torch.randn(5, 4)
        makes: list[Callable[..., Any]] = [
            lambda f: vmap(grad(f)),
            lambda f: vmap(jacfwd(f)),
            lambda f: grad(lambda x: vmap(f)(x).sum()),
        ]
        for make in makes:
            torch.testing.assert_close(specialize(make(loss))(x), make(loss)(x))

    def test_inside_of_other_transforms(self) -> None:
        f, x = specialize(loss), torch.randn(5, 4)
        torch.testing.assert_close(vmap(f)(x), vmap(loss)(x))
        torch.testing.assert_close(grad(f)(x), grad(loss)(x))
        torch.testing.assert_close(vmap(grad(f))(x), vmap(grad(loss))(x))
        torch.testing.assert_close(jvp(f, (x,), (x,)), jvp(loss, (x,), (x,)))

    def test_inside_of_itself(self) -> None:
        inner, x = specialize(loss), torch.randn(5, 4)
        torch.testing.assert_close(specialize(vmap(grad(inner)))(x), vmap(grad(loss))(x))

    def test_symbolic_batch_of_per_example_gradients(self) -> None:
        f = specialize(vmap(grad(loss)), {"x": Meta(shape=["n", 4])})
        for n in (2, 3, 8):
            x = torch.randn(n, 4)
            torch.testing.assert_close(f(x), vmap(grad(loss))(x))
        assert f.cache_info().programs == 1

    def test_closing_over_a_batched_value(self) -> None:
        xs = torch.randn(5, 4)

        def f(x: Tensor) -> Tensor:
            return specialize(lambda y: x * y)(torch.ones(4))

        torch.testing.assert_close(vmap(f)(xs), xs)

    def test_a_traced_value_that_escapes(self) -> None:
        kept: list[Callable[[], Tensor]] = []

        def keep(x: Tensor) -> Tensor:
            kept.append(lambda: x)  # a tensor itself would be appended in every call
            return x

        specialize(keep)(torch.ones(2))
        with pytest.raises(EscapedTracerError, match=r"specialize\(keep\)"):
            kept[0]() + 1


class TestContracts:
    @given(
        attribute=st.sampled_from(["dtype", "shape", "rank", "requires_grad"]),
        n=st.integers(2, 5),
    )
    def test_a_call_that_breaks_one_guarantee_is_refused(self, attribute: str, n: int) -> None:
        guaranteed: dict[str, Any] = {
            "dtype": torch.float32,
            "shape": [n, 4],
            "rank": 2,
            "requires_grad": False,
        }
        broken = {
            "dtype": torch.randn(n, 4, dtype=torch.float64),
            "shape": torch.randn(n + 1, 4),
            "rank": torch.randn(4),
            "requires_grad": torch.randn(n, 4, requires_grad=True),
        }
        f = specialize(lambda x: x * 2, {"x": Meta(**{attribute: guaranteed[attribute]})})
        f(torch.randn(n, 4))
        with pytest.raises(DescriptorViolation, match="x"):
            f(broken[attribute])
        f(torch.randn(n, 4))

    def test_values_are_constants_and_checked(self) -> None:
        f = specialize(lambda x, train: x + 1 if train else x, {"train": False})
        assert f(torch.zeros(1), False).equal(torch.zeros(1))
        with pytest.raises(DescriptorViolation, match="train"):
            f(torch.zeros(1), True)

    def test_nested_containers(self) -> None:
        contract = {"params": {"w": Meta(shape=["n", 3]), "b": Meta(shape=["n"])}}
        f = specialize(lambda params: params["w"].sum(1) + params["b"], contract)
        f({"w": torch.ones(4, 3), "b": torch.ones(4)})
        with pytest.raises(DescriptorViolation, match=r"n is"):
            f({"w": torch.ones(4, 3), "b": torch.ones(5)})

    def test_equal_names_are_equal_sizes_also_after_the_first_call(self) -> None:
        f = specialize(lambda x, y: (x, y), {"x": Meta(shape=["n"]), "y": Meta(shape=["n"])})
        f(torch.ones(3), torch.ones(3))
        with pytest.raises(DescriptorViolation, match="n is 3"):
            f(torch.ones(3), torch.ones(4))

    def test_bounds_hold_at_every_call(self) -> None:
        f = specialize(lambda x: x, {"x": Meta(shape=[Dim("n", min=3, max=5)])})
        f(torch.ones(4))
        for n in (2, 6):
            with pytest.raises(DescriptorViolation, match="n"):
                f(torch.ones(n))

    def test_several_contracts(self) -> None:
        f = specialize(lambda x: x * 2, [{"x": Meta(rank=1)}, {"x": Meta(rank=2)}])
        f(torch.ones(2))
        f(torch.ones(2, 2))
        with pytest.raises(DescriptorViolation, match="each of its 2 sets"):
            f(torch.ones(2, 2, 2))

    def test_control_flow_that_depends_on_a_named_size(self) -> None:
        def f(x: Tensor) -> Tensor:
            return x * 2 if x.shape[0] > 3 else x

        with pytest.raises(ConstraintViolation, match=r"n > 3 .*test_specialize\.py"):
            specialize(f, {"x": Meta(shape=["n"])})(torch.ones(9))
        g = specialize(f, {"x": Meta(shape=[Dim("n", min=4)])})
        assert g(torch.ones(9)).equal(torch.full((9,), 2.0))

    @pytest.mark.parametrize(
        ("use", "remedy"),
        [(bool, r"torch\.where"), (float, r"torch\.where"), (int, r"torch\.where"),
         (Tensor.numpy, "use torch's functions")],
    )  # fmt: skip
    def test_data_in_python_control_flow(self, use: Callable[[Tensor], Any], remedy: str) -> None:
        with pytest.raises(DataDependentError, match=remedy):
            specialize(lambda x: use(x.sum()))(torch.ones(3))

    def test_unknown_parameters_and_wrong_uses(self) -> None:
        with pytest.raises(DescriptorError, match="y"):
            specialize(lambda x: x, {"y": Meta()})
        with pytest.raises(DescriptorError, match="twice"):
            specialize({"x": Meta()}, {"x": Meta()})
        with pytest.raises(TypeError, match="expected a function"):
            specialize(3)  # type: ignore[call-overload]
        with pytest.raises(RuntimeError, match="no program yet"):
            _ = specialize(lambda x: x).program

    def test_state_is_restored_after_an_exception(self) -> None:
        def fail(x: Tensor) -> Tensor:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            specialize(fail)(torch.ones(2))
        assert tsfunc.dispatch.current_levels() == ()
        assert type(torch.zeros(2)) is Tensor and vmap(torch.sin)(torch.ones(2)).shape == (2,)


def test_sizes_that_do_not_fit_are_an_error_and_no_noise(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RuntimeError, match="must have same reduction dim"):
        specialize(lambda x: x @ x)(torch.ones(2, 3))
    assert not caplog.records


class TestForms:
    def test_decorators(self) -> None:
        @specialize
        def f(x: Tensor) -> Tensor:
            """Doubles."""
            return 2 * x

        @specialize({"x": Meta(shape=["n"])})
        def g(x: Tensor) -> Tensor:
            return 2 * x

        assert f.__name__ == "f" and f.__doc__ == "Doubles."
        assert f(torch.ones(2)).equal(g(torch.ones(2)))

    def test_methods(self) -> None:
        scale = Scale(3.0)
        assert scale.apply(torch.ones(2)).equal(torch.full((2,), 3.0))
        assert scale.apply.__name__ == "apply" and scale.apply == scale.apply
        assert scale.apply.cache_info() == Scale.apply.cache_info()  # all instances share it
        assert "mul(" in str(scale.apply.program)

    def test_methods_in_a_pickle(self) -> None:
        scale = pickle.loads(pickle.dumps(Scale(0.5).apply))
        assert scale(torch.ones(2)).equal(torch.full((2,), 0.5))

    def test_least_recently_used_programs_go(self) -> None:
        f = specialize(lambda x: x, max_specializations=2)
        for n in (1, 2, 1, 3, 1):
            f(torch.ones(n))
        assert f.cache_info()[:4] == (2, 3, 2, 2)
        f.cache_clear()
        assert f.cache_info()[:3] == (0, 0, 0)

    def test_source_is_the_program(self) -> None:
        f = specialize(lambda x: (x + 1).sin())
        f(torch.ones(2))
        assert "sin(" in str(f.program) and "float32[2]" in str(f.program)


def test_tensors_made_of_data_inside_are_constants_of_the_program() -> None:
    @specialize
    def f(x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor([1.0, 2.0, 3.0]) + torch.as_tensor(2.0) - torch.tensor(1)

    x = torch.arange(3.0)
    for _ in range(2):
        torch.testing.assert_close(f(x), x * torch.tensor([1.0, 2.0, 3.0]) + 1)
