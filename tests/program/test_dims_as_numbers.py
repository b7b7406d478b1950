"""Named dims as numbers of a function: computed with, returned, and compared."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tsfunc import Dim, load, specialize, vmap
from tsfunc import MetaTensorType as Meta
from tsfunc.errors import ConstraintViolation, DescriptorViolation

SIZES = (3, 8, 2, 1, 5)

NUMBERS: dict[str, Callable[[int], Any]] = {
    "floor of a float": lambda n: math.floor(n / 2),
    "ceil": lambda n: math.ceil(n * 0.3),
    "trunc": lambda n: math.trunc(n * 0.7),
    "sym_int": lambda n: torch.sym_int(n * 0.5),
    "round": lambda n: round(n * 0.3),
    "round to digits": lambda n: round(n * 0.37, 1),
    "// of floats": lambda n: n // 2.0,
    "is_integer": lambda n: (n / 2).is_integer(),
    "divmod": lambda n: divmod(2 * n, 3),
    "divmod by it": lambda n: divmod(7, n),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_arithmetic_is_a_part_of_the_program(name: str) -> None:
    f = specialize(lambda x: (NUMBERS[name](x.shape[0]), x), {"x": Meta(["n"])})
    for n in SIZES:
        got, want = f(torch.ones(n))[0], NUMBERS[name](n)
        assert got == want and type(got) is type(want)
    assert f.cache_info().programs <= 2  # 1 may have a program of its own
    f.program.verify()


def test_a_number_reaches_tensors() -> None:
    def f(x: Tensor) -> Any:
        every = torch.tensor(x.shape), x.new_tensor(2 * x.shape[0]), x.new_tensor([x.shape[1], 0.5])
        return every, x[: math.ceil(x.shape[0] / 2)]

    made = specialize(f, {"x": Meta(["n", "m"])})
    for n in SIZES:
        x = torch.randn(n, n + 1)
        torch.testing.assert_close(made(x), f(x))


def of_sizes(function: Any) -> Any:
    """Return a function of tensors, without annotations that exclude plain numbers."""
    return function


OF_NUMBERS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda n, m: torch.add(n, m, alpha=2),
    "sub": lambda n, m: torch.sub(n, 3),
    "subtract": lambda n, m: of_sizes(torch.subtract)(9, n),
    "mul": lambda n, m: torch.mul(n, m),
    "multiply": lambda n, m: torch.multiply(n / 2, m),
    "div": lambda n, m: torch.div(n, m),
    "div, rounded": lambda n, m: torch.div(n, 3, rounding_mode="trunc"),
    "divide": lambda n, m: torch.divide(input=n, other=4),
    "true_divide": lambda n, m: torch.true_divide(7, n),
    "floor_divide": lambda n, m: torch.floor_divide(n, 4),
    "floor_divide by another": lambda n, m: torch.floor_divide(m, n),
}


@pytest.mark.parametrize("mapped", [False, True], ids=["plain", "in vmap"])
@pytest.mark.parametrize("name", OF_NUMBERS)
def test_functions_of_tensors_take_numbers_alone(name: str, mapped: bool) -> None:
    """torch makes tensors of the numbers; tensors of symbolic numbers have arbitrary values."""

    def f(x: Tensor) -> Any:
        made = OF_NUMBERS[name](x.shape[0], x.shape[1])
        return made, (vmap(lambda row: row * made)(x) if mapped else x * made)

    program = specialize(f, {"x": Meta(["n", "m"])})
    for n in SIZES:
        x = torch.randn(n, n + 1)
        torch.testing.assert_close(program(x), f(x))
    assert len(program.programs) <= 2
    torch.testing.assert_close(specialize(f)(x), f(x))


def int_of(count: Tensor) -> Any:
    return count.item()


READS: dict[str, Callable[[Tensor], Any]] = {
    "view": lambda x: x.view(of_sizes(torch.div)(x.shape[0], 3, rounding_mode="trunc"), -1),
    "slice": lambda x: x[: torch.as_tensor(x.shape[0]) // 2],
    "slice between": lambda x: x[torch.tensor(1) : torch.tensor(x.shape[0]) - 1],
    "index": lambda x: x[torch.tensor(x.shape[0]) - 1],
    "item": lambda x: x.new_zeros(int_of(torch.tensor([x.shape[0], 2]).prod() + 1)),
    "tolist": lambda x: x.reshape(torch.tensor(x.shape).flip(0).tolist()),
    "unbind": lambda x: x.expand(torch.stack([*torch.tensor([2, *x.shape])]).tolist()),
    "remainder": lambda x: torch.arange(int_of(torch.tensor(x.shape[0]) % 5)),
    "largest": lambda x: torch.ones(int_of(torch.tensor(x.shape).max())),
    "bool": lambda x: x + 1 if torch.tensor(x.shape[0]) > 1 else x - 1,
    "of a number": lambda x: x[: int(torch.tensor(7) // 3)],
    "clone": lambda x: x[: torch.tensor([x.shape[0] - 2]).clone().squeeze()],
}


class TestNumbersInTensors:
    """Elements of tensors that follow from sizes alone are numbers of the program."""

    @pytest.mark.parametrize("sizes", ["open", "fixed"])
    @pytest.mark.parametrize("name", READS)
    def test_read(self, name: str, sizes: str) -> None:
        f = READS[name]
        dims: Any = [Dim("n", min=3, multiple_of=3), "m"] if sizes == "open" else [6, 4]
        program = specialize(f, {"x": Meta(dims)})
        for n, m in ((6, 4), (3, 4), (9, 5)) if sizes == "open" else ((6, 4),):
            x = torch.randn(n, m)
            torch.testing.assert_close(program(x), f(x))
        assert len(program.programs) == 1

    def test_int_needs_one_size(self) -> None:
        program = specialize(lambda x: x[: int(torch.tensor(x.shape[0]))], {"x": Meta(["n"])})
        with pytest.raises(ConstraintViolation, match="n == 4"):
            program(torch.ones(4))

    def test_written_tensors_have_data(self) -> None:
        def f(x: Tensor) -> Any:
            n = torch.tensor([x.shape[0], 1])
            n[0] = 2
            return x.new_zeros(int_of(n[0]))

        x = torch.ones(5)
        assert specialize(f, {"x": Meta(["n"])})(x).shape == f(x).shape

    def test_tensors_from_outside_have_data(self) -> None:
        count = torch.tensor(2)
        program = specialize(lambda x: x.new_zeros(int_of(count + x.shape[0])), {"x": Meta(["n"])})
        assert program(torch.ones(3)).shape == (5,)
        count.fill_(4)
        assert program(torch.ones(3)).shape == (7,)


def test_new_tensor() -> None:
    def f(x: Tensor) -> Any:
        return x.new_tensor([1.0, 2.0]) + x, x.new_tensor(x.sum(), dtype=torch.float64), x * 2

    x = torch.ones(2)
    with pytest.warns(UserWarning, match="copy construct"):  # torch's own warning
        want = f(x)
    torch.testing.assert_close(specialize(f)(x), want)
    assert specialize(lambda x: x.new_tensor([2]))(x).dtype == torch.float32


class TestShapesAsResults:
    @staticmethod
    def shapes(x: Tensor) -> Any:
        return x.shape, {"last": [x.shape[1:], x.shape[0]]}, x.t().size(), torch.Size([2])

    def check(self, f: Any) -> None:
        for n in SIZES:
            x = torch.ones(n, n + 2)
            got = f(x)
            assert got == self.shapes(x)
            assert all(type(got[i]) is torch.Size for i in (0, 2, 3))

    def test_they_are_those_of_the_call(self) -> None:
        f = specialize(self.shapes, {"x": Meta(["n", "m"])})
        self.check(f)
        f.program.verify()
        self.check(copy.deepcopy(f))

    def test_they_go_into_files(self, tmp_path: Path) -> None:
        f = specialize(self.shapes, {"x": Meta(["n", "m"])})
        f(torch.ones(3, 4))
        f.save(tmp_path / "f.tsf")
        self.check(load(tmp_path / "f.tsf"))
        self.check(pickle.loads(pickle.dumps(f)))

    def test_without_a_named_dim_too(self) -> None:
        assert type(specialize(lambda x: x.shape)(torch.ones(2, 3))) is torch.Size


class TestChecks:
    @staticmethod
    def checked(x: Tensor, y: Tensor) -> Tensor:
        torch._check(x.shape[0] >= y.shape[0], lambda: "y is longer")
        torch._check(x.shape[0] % 2 == 0, lambda: "x is odd")
        return x[: y.shape[0]] + y

    def made(self) -> Any:
        return specialize(self.checked, {"x": Meta(["n"]), "y": Meta(["m"])})

    def test_a_checked_property_is_a_guard(self) -> None:
        f = self.made()
        for n, m in ((4, 3), (8, 2), (6, 6)):
            f(torch.ones(n), torch.ones(m))
        assert f.cache_info().programs == 1
        assert {"n >= m", "n % 2 == 0"} <= set(f.guards)

    def test_where_it_fails_the_function_says_so(self) -> None:
        f = self.made()
        f(torch.ones(4), torch.ones(3))
        with pytest.raises(RuntimeError, match="y is longer"):
            f(torch.ones(2), torch.ones(3))
        with pytest.raises(RuntimeError, match="x is odd"):
            f(torch.ones(5), torch.ones(3))

    def test_a_check_that_is_caught_is_a_choice(self) -> None:
        def f(x: Tensor) -> Tensor:
            try:
                torch._check(x.shape[0] > 4)
            except RuntimeError:
                return x
            return 2 * x

        with pytest.raises(ConstraintViolation, match="n <= 4"):
            specialize(f, {"x": Meta(["n"])})(torch.ones(3))

    def test_a_loaded_program_is_held_to_it(self, tmp_path: Path) -> None:
        f = self.made()
        f(torch.ones(4), torch.ones(3))
        f.save(tmp_path / "f.tsf")
        loaded = load(tmp_path / "f.tsf")
        loaded.save(tmp_path / "again.tsf")
        for each in (loaded, load(tmp_path / "again.tsf")):
            assert each(torch.ones(8), torch.ones(5)).shape == (5,)
            with pytest.raises(DescriptorViolation, match=r"n % 2 == 0 does not hold"):
                each(torch.ones(7), torch.ones(5))
            with pytest.raises(DescriptorViolation, match="n >= m does not hold"):
                each(torch.ones(4), torch.ones(5))
        assert "n >= m" in loaded.guards

    def test_floats_and_steps(self, tmp_path: Path) -> None:
        def f(x: Tensor, k: int) -> Tensor:
            if math.floor(x.shape[0] / 3) <= 1 or x.shape[0] * 0.5 <= 2.5 or k > x.shape[0]:
                raise ValueError("too short")
            return x[:k]

        made = specialize(f, {"x": Meta([Dim("n", multiple_of=4)]), "k": int})
        assert made(torch.ones(8), 3).shape == (3,)
        assert made(torch.ones(12), 12).shape == (12,)
        assert made.cache_info().programs == 1
        with pytest.raises(ValueError, match="too short"):
            made(torch.ones(4), 3)
        made.save(tmp_path / "f.tsf")
        loaded = load(tmp_path / "f.tsf")
        assert loaded(torch.ones(16), 3).shape == (3,)
        with pytest.raises(DescriptorViolation, match=r"math\.floor\(4 \* \(n // 4\) / 3\) > 1"):
            loaded(torch.ones(4), 3)


def test_the_reason_of_a_program_for_size_1() -> None:
    f = specialize(lambda x: x * x.shape[0], {"x": Meta(["n"])})
    f(torch.ones(4)), f(torch.ones(1))
    assert [entry.reason for entry in f.cache_info().entries] == ["n is 1", "the first call"]


class TestMultiples:
    @pytest.mark.parametrize("sizes", [(8, 4, 0), (4, 8)], ids=str)
    def test_the_least_of_them_is_a_size_as_the_others(self, sizes: tuple[int, ...]) -> None:
        f = specialize(
            lambda x: x + 1 if x.shape[0] > 4 else x - 1, {"x": Meta([Dim("n", multiple_of=4)])}
        )
        for n in sizes:
            with pytest.raises(ConstraintViolation, match=r"(min=8|max=4), multiple_of=4"):
                f(torch.zeros(n))

    @pytest.mark.parametrize("step", [2, 3, 4])
    def test_every_multiple(self, step: int) -> None:
        def f(x: Tensor) -> Any:
            rows = x.reshape(-1, step)
            return rows.t().contiguous(), rows * rows.sum(1, keepdim=True), x[:: x.shape[0] // step]

        made = specialize(f, {"x": Meta([Dim("n", multiple_of=step)])})
        for k in (4, 1, 2, 3):
            x = torch.randn(k * step)
            torch.testing.assert_close(made(x), f(x))


def test_conditions_of_torch_on_computed_sizes_are_not_requirements() -> None:
    def f(x: Tensor) -> Any:
        return x[1:].t().contiguous(), x[: x.shape[0] - 2].contiguous()

    made = specialize(f, {"x": Meta(["n", 4])})
    for n in (8, 2, 3, 5, 4, 1):
        x = torch.randn(n, 4)
        torch.testing.assert_close(made(x), f(x), check_stride=True)
    assert made.cache_info().programs <= 4  # 1, 2 and 3 may have their own


class TestMessages:
    def test_the_error_of_a_call_of_size_1_has_its_own_size(self) -> None:
        f = specialize(lambda x: x * len(x), {"x": Meta(["n"])})
        with pytest.raises(ConstraintViolation, match=r"n == 1 .*\n.*\n.*shape=\[1\]"):
            f(torch.ones(1))
        with pytest.raises(ConstraintViolation, match=r"n == 0 .*\n.*\n.*shape=\[0\]"):
            f(torch.ones(0))

    def test_the_rewrite(self) -> None:
        f = specialize(lambda x: x[: min(x.shape[0], 3)], {"x": Meta(["n"])})
        with pytest.raises(ConstraintViolation, match=r"torch\.sym_min\(a, b\) for min\(a, b\)"):
            f(torch.ones(5))
        f = specialize(lambda x: x * len(x), {"x": Meta(["n"])})
        with pytest.raises(ConstraintViolation, match=r"x\.shape\[0\] for len\(x\)"):
            f(torch.ones(5))

    def test_a_fact_of_an_inner_function_is_required_at_the_users_line(self) -> None:
        inner = specialize(lambda x: 2 * x, {"x": Meta([Dim("a", min=4)])})

        def outer(x: Tensor) -> Any:
            return inner(x)

        with pytest.raises(ConstraintViolation, match=r"c >= 4  \(at .*, in outer; return inner"):
            specialize(outer, {"x": Meta(["c"])})(torch.ones(5))

    def test_numbers_are_spelled_as_people_do(self) -> None:
        f = specialize(lambda x: x * int(x.shape[0] * 0.5), {"x": Meta(["n"])})
        with pytest.raises(ConstraintViolation, match=r"int\(0\.5\*float\(n\)\) == 3 "):
            f(torch.ones(6))

    def test_a_call_without_an_argument_names_the_function(self) -> None:
        def scaled(x: Tensor, by: Tensor) -> Tensor:
            return x * by

        with pytest.raises(TypeError, match=r"scaled\(x.*by.*\).*: missing a required argument"):
            specialize(scaled)(torch.ones(2))  # type: ignore[call-arg]


class TestUnanswered:
    def test_it_names_the_difference_of_the_call(self, tmp_path: Path) -> None:
        f = specialize(lambda x: x.sum(0), {"x": Meta(["n", 3])})
        f(torch.ones(4, 3))
        f.save(tmp_path / "f.tsf")
        loaded = load(tmp_path / "f.tsf")
        with pytest.raises(DescriptorViolation) as caught:
            loaded(torch.ones(3, 5).t())
        text = str(caught.value)
        assert "in x.stride(): (1, 5), was contiguous. It has programs for:\n" in text
        assert text.count("x: float32[n, 3]") == 1
        with pytest.raises(DescriptorViolation, match=r"in x\.dtype: float64, was float32"):
            loaded(torch.ones(4, 3).double())

    def test_the_guards_are_known(self, tmp_path: Path) -> None:
        f = specialize(lambda x, k: x * k, {"x": Meta(["n", 3])})
        f(torch.ones(4, 3), 2)
        f.save(tmp_path / "f.tsf")
        guards = load(tmp_path / "f.tsf").guards
        assert guards[:3] == ("x: f32[n, 3] cpu no_grad contiguous", "k is 2 (int)", "n>=2")
