"""Functions that return a property of a whole tensor, or search for a number in it, in programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tsfunc import MetaTensorType as Meta
from tsfunc import load, specialize
from tsfunc.errors import ConstraintViolation, DataDependentError, FailedCheckError


def same(x: Tensor, y: Tensor) -> tuple[bool, bool, bool]:
    return torch.equal(x, y), x.allclose(y, atol=1e-3), y.equal(other=x)


PAIRS = [(torch.ones(4), torch.ones(4)), (torch.ones(7), torch.zeros(7)),
         (torch.ones(3), torch.ones(3) + 1e-4), (torch.ones(1), torch.zeros(1)),
         (torch.ones(0), torch.ones(0))]  # fmt: skip


def test_an_answer_is_a_result_of_the_program(tmp_path: Path) -> None:
    f = specialize(same, {"x": Meta(["n"]), "y": Meta(["n"])})
    for x, y in PAIRS:
        answers = f(x, y)
        assert answers == same(x, y) and all(type(each) is bool for each in answers)
    f.program.verify()
    f.save(tmp_path / "f.tsf")
    assert load(tmp_path / "f.tsf")(*PAIRS[1]) == (False, False, False)


def test_a_property_that_decides_control_flow_is_refused() -> None:
    with pytest.raises(DataDependentError, match=r"torch.equal\(x, y\) depends on data"):
        specialize(lambda x, y: x if torch.equal(x, y) else y)(*PAIRS[0])


def test_an_answer_that_is_a_check_is_one_of_the_program() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        if not torch.equal(x, y):
            raise ValueError("they differ")
        return x + y

    g = specialize(f)
    assert g(*PAIRS[0]).equal(torch.full((4,), 2.0))
    with pytest.raises(FailedCheckError, match="equal_default does not hold"):
        g(torch.ones(4), torch.zeros(4))


def _positive(x: Tensor) -> Tensor:
    positive = (x > 0).all().item()
    if not positive:
        raise ValueError("expected positive numbers")
    return x + positive


def _no_positive(x: Tensor) -> Tensor:
    if (x > 0).any().item():
        raise ValueError("expected no positive numbers")
    return x + 1


@pytest.mark.parametrize(
    ("f", "good", "error", "message"),
    [
        (_positive, 1.0, FailedCheckError, "item_default does not"),
        (_no_positive, -1.0, ValueError, "expected no positive numbers"),
    ],
)
def test_a_bool_among_the_elements_that_is_checked(
    f: Any, good: float, error: type[Exception], message: str
) -> None:
    g, x = specialize(f), torch.full((3,), good)
    assert g(x).equal(f(x))
    g.program.verify()
    with pytest.raises(error, match=message):
        g(-x)


def test_tensors_of_other_sizes_are_not_equal() -> None:
    f = specialize(lambda x, y: torch.equal(x, y), {"x": Meta(["a"]), "y": Meta(["b"])})
    assert f(torch.ones(3), torch.ones(3)) and not f(torch.ones(3), torch.ones(4))
    assert f.cache_info().programs == 1


def test_the_number_of_classes_is_found_in_data() -> None:
    f = specialize(lambda x: F.one_hot(x) * 2, {"x": Meta(["n"])})
    for x in (torch.tensor([0, 3, 1]), torch.tensor([1, 0]), torch.tensor([4]), torch.arange(9)):
        assert f(x).equal(F.one_hot(x) * 2)
    with pytest.raises(RuntimeError):
        f(torch.tensor([], dtype=torch.int64))


def test_an_item_of_a_dim_that_has_one_element() -> None:
    f = specialize(lambda x: x.item() * 2, {"x": Meta(["n"])})
    assert f(torch.tensor([3.0])) == 6.0 and f(torch.tensor([4.0])) == 8.0
    with pytest.raises(DataDependentError):
        f(torch.ones(3))


def test_a_list_of_a_named_dim_has_the_length_of_the_call() -> None:
    def f(x: Tensor, at: Tensor) -> Any:
        first, last = at.tolist()
        return x.sum() * first + last

    with pytest.raises(ConstraintViolation, match="n == 2"):
        specialize(f, {"at": Meta(["n"])})(torch.ones(3), torch.tensor([2, 3]))
    g = specialize(f, {"at": Meta([2])})
    assert g(torch.ones(3), torch.tensor([2, 3])) == 9
    assert g(torch.ones(3), torch.tensor([1, 0])) == 3


def test_where_a_tensor_is_split_by_another() -> None:
    f = specialize(lambda x, at: x.tensor_split(at), {"x": Meta(["n"]), "at": Meta([2])})
    for x, at in ((torch.arange(9), [2, 5]), (torch.arange(4), [3, 3]), (torch.arange(5), [1, 9])):
        torch.testing.assert_close(f(x, torch.tensor(at)), x.tensor_split(at))
    assert f.cache_info().programs == 1
