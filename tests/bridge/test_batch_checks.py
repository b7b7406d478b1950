"""Checks whose outcome differs between examples: vmap raises if the loop does, and alike."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributions as D

from tests.bridge.checked_functions import (
    with_assert,
    with_async,
    with_check_of_all,
    with_check_value,
    with_covariance,
    with_distribution,
    with_item,
    with_raise,
    with_torch_check,
    with_torch_check_of_a_tensor,
    with_torch_check_of_an_item,
)
from tsfunc import MetaTensorType, cond, grad, jvp, specialize, vmap
from tsfunc.bridge.tracers.checks import FAILED_CHECKS
from tsfunc.errors import DataDependentError

Function = Callable[..., Any]


CHECKED: dict[str, tuple[Function, type[Exception]]] = {
    "assert": (with_assert, AssertionError),
    "raise": (with_raise, ValueError),
    "torch._check": (with_torch_check, RuntimeError),
    "an item": (with_item, AssertionError),
    "torch._check of an item": (with_torch_check_of_an_item, RuntimeError),
    "torch._check_value": (with_check_value, ValueError),
    "torch._check of a tensor": (with_torch_check_of_a_tensor, RuntimeError),
    "torch._check_tensor_all": (with_check_of_all, RuntimeError),
    "torch._assert_async": (with_async, RuntimeError),
    "a distribution": (with_distribution, ValueError),
    "a covariance": (with_covariance, ValueError),
}
TOWERS: dict[str, Function] = {
    "vmap": vmap,
    "vmap(grad)": lambda f: vmap(lambda x: (f(x), grad(f)(x))[0]),
    "vmap(jvp)": lambda f: vmap(lambda x: jvp(f, (x,), (x,))[0]),
    "jvp(vmap)": lambda f: lambda x: jvp(vmap(f), (x,), (x,))[0],
    "vmap(cond)": lambda f: vmap(lambda x: cond(x < 100, f, lambda x: x, x)),
    "chunks": lambda f: vmap(f, chunk_size=2),
    "specialize(vmap)": lambda f: specialize(vmap(f)),
    "named": lambda f: specialize(lambda x: vmap(f)(x), {"x": MetaTensorType(["n"])}),
    "vmap(specialize)": lambda f: vmap(specialize(f)),
}


@pytest.fixture(autouse=True)
def validation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch on the validation of arguments, which torch.compile switches off for the process."""
    monkeypatch.setattr(D.Distribution, "_validate_args", True)


def notes(error: BaseException) -> list[str]:
    return [note for note in getattr(error, "__notes__", []) if note.startswith("The check")]


def batch() -> tuple[Tensor, list[int]]:
    """Return positive numbers, and the indices of the examples to negate."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    drawn = random.Random(seed)
    size = drawn.randint(2, 6)
    x = torch.tensor([drawn.uniform(0.5, 3) for _ in range(size)])
    return x, sorted(drawn.sample(range(size), drawn.randint(1, size)))


@pytest.mark.parametrize("tower", TOWERS)
@pytest.mark.parametrize("name", CHECKED)
def test_the_call_raises_if_the_loop_does(name: str, tower: str) -> None:
    f, expected = CHECKED[name]
    if (name, tower) == ("torch._check of a tensor", "vmap(specialize)"):
        return  # the trace has an unbatched tensor, which torch refuses
    x, failing = batch()
    loop = torch.stack([f(each) for each in x])
    call = TOWERS[tower](f)
    torch.testing.assert_close(call(x), loop)
    y = x.clone()
    y[failing] *= -1
    with pytest.raises(expected) as first:
        for each in y:
            f(each)
    with pytest.raises(expected) as caught:
        call(y)
    if name not in ("a distribution", "a covariance"):  # whose messages show values
        assert str(caught.value) == str(first.value)
    if sys.version_info >= (3, 11) and tower != "chunks":
        count = f"The check failed for {len(failing)} of {len(x)} examples"
        assert notes(caught.value) == [f"{count}: {', '.join(map(str, failing))}"]
    torch.testing.assert_close(call(x), loop)
    assert not FAILED_CHECKS


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes of exceptions are Python 3.11's")
def test_the_note_has_an_index_for_each_vmap() -> None:
    x = torch.ones(2, 3, 4)
    x[0, 2, 3] = x[1, 0, 3] = -1
    nested = vmap(vmap(vmap(with_assert), in_dims=1, out_dims=1), in_dims=1)
    for call in (nested, specialize(nested)):
        with pytest.raises(AssertionError) as caught:
            call(x)
        assert notes(caught.value) == [
            "The check failed for 2 of 24 examples: (0, 3, 1), (2, 3, 0)"
        ]


def test_chunks_count_the_examples_of_the_call() -> None:
    x = torch.tensor([1.0, 1, 1, -1, 1])
    with pytest.raises(AssertionError) as caught:
        vmap(with_assert, chunk_size=2)(x)
    if sys.version_info >= (3, 11):
        assert notes(caught.value) == ["The check failed for 1 of 2 examples: 3"]


def test_a_check_of_a_number_that_is_read_names_the_way_to_write_it() -> None:
    def f(x: Tensor) -> Tensor:
        torch._check(x.sum().item() > 2, lambda: "expected a positive number")
        return x

    with pytest.raises(DataDependentError, match=r"In a check, leave out \.item\(\)"):
        vmap(f)(torch.ones(2, 3))
    with pytest.raises(DataDependentError) as caught:
        vmap(lambda x: x * x.sum().item())(torch.ones(2, 3))
    assert "In a check" not in str(caught.value)


def test_an_error_that_the_function_catches_must_be_every_examples() -> None:
    def careful(x: Tensor) -> Tensor:
        try:
            return with_raise(x)
        except ValueError:
            return x * 0

    def suppressed(x: Tensor) -> Tensor:
        with contextlib.suppress(ValueError):
            return with_raise(x)
        return x * 0

    for f in (careful, suppressed):
        assert vmap(f)(torch.tensor([4.0, 9.0])).tolist() == [2, 3]
        assert vmap(f)(torch.tensor([-4.0, -9.0])).tolist() == [0, 0]
        with pytest.raises(DataDependentError, match=r"1 of 2 examples fail: 1\. Choose by"):
            vmap(f)(torch.tensor([4.0, -9.0]))
        x = torch.tensor([4.0, -9.0])
        assert vmap(f, data_dependent="split")(x).tolist() == [2, 0]
    assert not FAILED_CHECKS


def test_an_outer_function_may_catch_the_error_of_an_inner_vmap() -> None:
    def careful(x: Tensor, y: Tensor) -> Tensor:
        try:
            return vmap(with_raise)(y) * x
        except ValueError:
            return -x

    assert vmap(careful, (0, None))(torch.ones(2), torch.tensor([1.0, -1.0])).tolist() == [-1, -1]
    with pytest.raises(DataDependentError, match="1 of 4 examples fail"):
        vmap(careful)(torch.ones(2), torch.tensor([[1.0, -1.0], [1.0, 1.0]]))
    assert not FAILED_CHECKS


def test_a_choice_is_refused() -> None:
    def chosen(x: Tensor) -> Tensor:
        return x if x > 0 else -x

    with pytest.raises(DataDependentError, match="can't go one way for all"):
        vmap(chosen)(torch.ones(2))


def test_the_answer_of_a_constraint_is_a_choice() -> None:
    def valid(x: Tensor) -> Tensor:
        return D.constraints.positive_definite.check(torch.eye(2) * x)

    for call in (vmap(valid), specialize(valid)):
        with pytest.raises(DataDependentError):
            call(torch.ones(2) if call is not valid else torch.ones(()))


def test_plain_tensors_are_refused_as_by_torch() -> None:
    for call in (lambda f: f, grad, specialize):
        with pytest.raises(TypeError, match="cond must be a bool, but got a Tensor"):
            call(lambda x: torch._check(x > 0) or x)(torch.ones(()))
    with pytest.raises(TypeError, match=r"must have dtype torch\.bool"):
        vmap(lambda x: torch._check_tensor_all(x) or x)(torch.ones(2))
