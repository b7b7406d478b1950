"""Checks of arguments: tests whose other side raises choose no path of the program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tsfunc import MetaTensorType as Meta
from tsfunc import grad, load, specialize, vmap
from tsfunc.errors import ConstraintViolation, DataDependentError


class TestOfSizes:
    def test_the_function_raises_its_own_error(self) -> None:
        def f(x: Tensor) -> Tensor:
            if x.shape[0] > 4:
                raise ValueError(f"{x.shape[0]} is too long")
            assert x.shape[1] % 2 == 0, "odd"
            return x * 2

        s = specialize(f, {"x": Meta(["n", "m"])})
        for shape in ((3, 4), (4, 6), (2, 2)):
            assert s(torch.ones(shape)).equal(torch.full(shape, 2.0))
        assert s.cache_info().programs == 1
        assert "n <= 4" in s.guards and "m % 2 == 0" in s.guards
        with pytest.raises(ValueError, match="is too long"):
            s(torch.ones(5, 4))
        with pytest.raises(AssertionError, match="odd"):
            s(torch.ones(3, 3))
        # A placeholder for sizes of 0 and 1 is refused, and these sizes are not.
        for shape in ((1, 4), (0, 2)):
            assert s(torch.ones(shape)).equal(torch.full(shape, 2.0))

    def test_of_torch_itself(self) -> None:
        s = specialize(lambda x: F.group_norm(x, 2), {"x": Meta(["n", "m"])})
        for m in (6, 8, 4):
            x = torch.randn(1, m)
            torch.testing.assert_close(s(x), F.group_norm(x, 2))
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            s(torch.randn(1, 2))

    def test_one_random_stream_stays_one(self) -> None:
        def f(x: Tensor) -> Tensor:
            if x.shape[0] > 4:
                x = x + 1
            return x

        with pytest.raises(ConstraintViolation, match="n > 4"):
            specialize(f, {"x": Meta(["n"])})(torch.ones(9))

    def test_a_caught_error_is_a_path(self) -> None:
        def short(x: Tensor) -> Tensor:
            if x.shape[0] > 4:
                raise ValueError
            return x

        def f(x: Tensor) -> Tensor:
            try:
                return short(x)
            except ValueError:
                return -x

        with pytest.raises(ConstraintViolation, match="n <= 4"):
            specialize(f, {"x": Meta(["n"])})(torch.ones(3))

    def test_a_file_has_them(self, tmp_path: Path) -> None:
        def f(x: Tensor) -> Tensor:
            assert x.shape[0] < 9
            return x

        s = specialize(f, {"x": Meta(["n"])})
        s(torch.ones(3))
        s.save(tmp_path / "f.tsf")
        loaded = load(tmp_path / "f.tsf")
        assert loaded(torch.ones(8)).shape == (8,)
        with pytest.raises(ValueError, match="n < 9"):
            loaded(torch.ones(9))


class TestOfData:
    @staticmethod
    def logarithm(x: Tensor) -> Tensor:
        if (x <= 0).any():
            raise ArithmeticError("not positive")
        if not torch.isfinite(x).all():
            raise OverflowError("too large")
        return x.log()

    def test_the_program_checks_it(self) -> None:
        s = specialize(self.logarithm, {"x": Meta(["n"])})
        x = torch.rand(4) + 1
        for n in (4, 3):
            torch.testing.assert_close(s(x[:n]), x[:n].log())
        assert s.cache_info().programs == 1
        for bad, error in ((-1.0, ArithmeticError), (torch.inf, OverflowError)):
            with pytest.raises(error, match=r"not positive|too large"):
                s(torch.tensor([1.0, bad]))
        assert s.cache_info().programs == 1

    def test_the_first_call_raises_the_functions_own_error(self) -> None:
        s = specialize(self.logarithm)
        with pytest.raises(ArithmeticError, match="not positive") as caught:
            s(torch.tensor([1.0, -1.0]))
        assert caught.value.__cause__ is None and caught.value.__suppress_context__
        torch.testing.assert_close(s(torch.ones(2)), torch.zeros(2))
        assert s.cache_info().misses == 1

    def test_nothing_is_written_twice(self) -> None:
        """A call's writes stay: the function is not called again."""

        def f(x: Tensor) -> Tensor:
            x.add_(1)
            if (x <= 0).any():
                raise ArithmeticError("not positive")
            return x

        s = specialize(f)
        x = torch.tensor([-3.0])
        with pytest.raises(RuntimeError, match=r"test_checks.py:\d+, in f: .*the check fails"):
            s(x)
        assert x.item() == -2

    def test_a_function_that_writes_into_its_own_tensors_raises_its_error(self) -> None:
        def f(x: Tensor) -> Tensor:
            fine = x > 0
            fine &= x < 10
            if not fine.all():
                raise ArithmeticError("out of range")
            return x.log()

        s = specialize(f)
        torch.testing.assert_close(s(torch.ones(2)), torch.zeros(2))
        with pytest.raises(ArithmeticError, match="out of range"):
            s(-torch.ones(2))

    def test_a_file_does_not_have_the_function(self, tmp_path: Path) -> None:
        s = specialize(self.logarithm)
        s(torch.ones(2))
        s.save(tmp_path / "f.tsf")
        with pytest.raises(RuntimeError, match=r"in logarithm: .*the check fails"):
            load(tmp_path / "f.tsf")(-torch.ones(2))

    def test_under_transforms(self) -> None:
        s = specialize(self.logarithm)
        x = torch.rand(3, 4) + 1
        torch.testing.assert_close(vmap(s)(x), x.log())
        torch.testing.assert_close(grad(lambda x: s(x).sum())(x), 1 / x)
        with pytest.raises(ArithmeticError, match="not positive"):
            vmap(s)(torch.tensor([[1.0], [-1.0]]))

    def test_losses(self) -> None:
        loss = torch.nn.GaussianNLLLoss()
        s = specialize(loss, {name: Meta(["n", 3]) for name in ("input", "target", "var")})
        for n in (2, 5):
            args = torch.randn(n, 3), torch.randn(n, 3), torch.rand(n, 3) + 0.1
            torch.testing.assert_close(s(*args), loss(*args))
        with pytest.raises(ValueError, match="var has negative entry"):
            s(args[0], args[1], -args[2])

    def test_a_choice_is_refused(self) -> None:
        def f(x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

        with pytest.raises(DataDependentError, match="used as a Python number or bool"):
            specialize(f)(torch.ones(3))

    def test_a_choice_in_torchs_own_code_is_named(self) -> None:
        layer = torch.nn.Linear(2, 1)
        optimizer = torch.optim.LBFGS(layer.parameters())

        def loss() -> Tensor:
            optimizer.zero_grad()
            out: Tensor = layer(torch.ones(3, 2)).square().mean()
            out.backward()
            return out

        with pytest.raises(DataDependentError, match=r"by .*lbfgs\.py:\d+, in step"):
            specialize(lambda: optimizer.step(loss))()

    def test_averages_of_weights_choose_by_their_count(self) -> None:
        layer = torch.nn.Linear(2, 1)
        average, wanted = (torch.optim.swa_utils.AveragedModel(layer) for _ in range(2))
        update = specialize(average.update_parameters)
        for _ in range(4):
            torch.nn.init.normal_(layer.weight)
            update(layer)
            wanted.update_parameters(layer)
            torch.testing.assert_close(dict(average.state_dict()), dict(wanted.state_dict()))

    def test_a_caught_check_is_a_choice(self) -> None:
        def f(x: Tensor) -> Tensor:
            try:
                return self.logarithm(x)
            except ArithmeticError:
                return x

        with pytest.raises(DataDependentError, match="used as a Python number or bool"):
            specialize(f)(torch.ones(3))

    def test_a_clause_that_always_raises_catches_nothing(self) -> None:
        """Wrappers of libraries clean up after a call in such clauses."""
        calls: list[int] = []

        def f(x: Tensor) -> Tensor:
            try:
                return torch.distributions.StudentT(x.exp(), validate_args=True).mean
            except KeyError as error:
                raise ValueError("no such key") from error
            finally:
                calls.append(len(calls))

        s = specialize(lambda x: f(x.log()))
        x = torch.tensor([2.0, 3.0])
        assert s(x).equal(f(x.log()))
        with pytest.raises(ValueError, match="Expected parameter df"):
            s(torch.tensor([-1.0, 2.0]))

    def test_a_clause_elsewhere_catches_nothing(self) -> None:
        def f(x: Tensor) -> Tensor:
            with torch.enable_grad():
                y = self.logarithm(x)
            try:
                return y + 1
            except ArithmeticError:
                return x

        s = specialize(f)
        torch.testing.assert_close(s(torch.ones(3)), torch.ones(3))
        with pytest.raises(ArithmeticError, match="not positive"):
            s(-torch.ones(3))

    def test_distributions(self) -> None:
        """torch checks the parameters of distributions."""

        def f(x: Tensor, scale: Tensor) -> Any:
            return torch.distributions.Normal(x, scale, validate_args=True).log_prob(x + 1)

        s, x = specialize(f), torch.randn(3)
        torch.testing.assert_close(s(x, torch.full((3,), 2.0)), f(x, torch.full((3,), 2.0)))
        with pytest.raises(ValueError, match="found invalid values"):
            s(x, -torch.ones(3))


def test_lengths_of_ctc_are_values() -> None:
    loss = torch.nn.CTCLoss(reduction="none")
    s = specialize(loss, {"log_probs": Meta(["t", "n", 7])})
    for t, n in ((9, 2), (12, 2)):
        args = (
            torch.randn(t, n, 7).log_softmax(2), torch.randint(1, 7, (n, 4)),
            torch.full((n,), t), torch.randint(1, 4, (n,)),
        )  # fmt: skip
        torch.testing.assert_close(s(*args), loss(*args))
    assert s.cache_info().programs == 1
