"""Numbers and sizes that bodies of control flow read from data, in programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tsfunc import MetaTensorType as Meta
from tsfunc import cond, fori_loop, grad, scan, specialize, while_loop
from tsfunc.errors import DataDependentError, FailedCheckError

Calls = list[tuple[Any, ...]]


def number(value: int) -> Tensor:
    return torch.tensor(value)


def some_of(p: Tensor, x: Tensor, n: Tensor) -> Any:
    def some(x: Tensor, n: Tensor) -> Tensor:
        k = n.item()
        torch._check(k >= 0)
        torch._check(k <= x.shape[0])
        return x[:k].sum() * k

    return cond(p, some, lambda x, n: x.sum(), x, n)


def positive(x: Tensor) -> Any:
    return cond(x.sum() > 0, lambda x: x[x > 0].sum() * x.shape[0], lambda x: x.sum(), x)


def counted(x: Tensor) -> Any:
    return scan(lambda c, row: (c + row.nonzero().shape[0], c), number(0), x)


def grown(x: Tensor, n: Tensor) -> Any:
    return fori_loop(0, 3, lambda i, c: c + torch.arange(n.item()).sum(), x)


def added(x: Tensor) -> Any:
    """Add a number that torch knows at the first step, and that changes in later steps."""

    def step(carry: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        at, total = carry
        i: Any = at.item()
        return at + 1, total + x[i]

    return while_loop(lambda c: c[0].item() < x.shape[0], step, (number(0), torch.zeros(2)))[1]


def nested(p: Tensor, x: Tensor, n: Tensor) -> Any:
    def outer(x: Tensor) -> Any:
        k = n.item()
        return cond(x.sum() > 0, lambda x: x * k, lambda x: x[x < 0].sum() + k + x, x)

    return cond(p, outer, lambda x: x, x)


def slope(x: Tensor, n: Tensor) -> Any:
    def f(x: Tensor) -> Any:
        return cond(x.sum() > 0, lambda x: (x[: n.item()] ** 2).sum(), lambda x: x.sum(), x)

    return grad(f)(x)


yes, no = torch.tensor(True), torch.tensor(False)
up, down = torch.arange(1.0, 6), -torch.arange(1.0, 6)
CASES: dict[str, tuple[Callable[..., Any], dict[str, Any], Calls]] = {
    "slice": (some_of, {}, [(yes, up, number(3)), (yes, up, number(0)), (no, up, number(9))]),
    "mask": (positive, {"x": Meta(["n"])}, [(up - 2,), (up[:3] - 1,), (down,)]),
    "scan": (counted, {"x": Meta(["n", 3])}, [(torch.eye(3),), (torch.ones(2, 3),)]),
    "fori": (grown, {}, [(number(1), number(3)), (number(2), number(5))]),
    "while": (added, {"x": Meta(["n", 2])}, [(torch.rand(4, 2),), (torch.rand(3, 2),)]),
    "nested": (nested, {}, [(yes, up, number(4)), (yes, down, number(2)), (no, up, number(1))]),
    "grad": (slope, {}, [(up, number(2)), (down, number(2))]),
}


@pytest.mark.parametrize(("f", "described", "calls"), CASES.values(), ids=CASES)
def test_a_program_returns_the_results_of_the_function(
    f: Callable[..., Any], described: dict[str, Any], calls: Calls
) -> None:
    program = specialize(f, described)
    for args in calls:
        torch.testing.assert_close(program(*args), f(*args))
    assert program.cache_info().programs == 1
    program.program.verify()
    assert "[u" not in str(program.program)


def test_a_check_is_one_of_its_branch() -> None:
    f = specialize(some_of)
    f(yes, up, number(3))
    f(no, up, number(9))
    with pytest.raises(FailedCheckError, match=r"item_default <= 5 does not hold, .*in some"):
        f(yes, up, number(9))


def test_facts_checked_in_a_branch_do_not_hold_outside() -> None:
    def f(p: Tensor, x: Tensor, n: Tensor) -> Any:
        k = n.item()

        def large(x: Tensor) -> Tensor:
            torch._check(k > 5)
            return x * k

        y = cond(p, large, lambda x: x, x)
        return y + 1 if k > 3 else y

    with pytest.raises(DataDependentError, match=r"\bk > 3 depends on data"):
        specialize(f)(no, up, number(2))


def test_the_requirements_of_a_branch_are_checked() -> None:
    def log(x: Tensor) -> Tensor:
        if not (x > 0).all():
            raise ValueError("no logarithm")
        return x.log()

    f = specialize(lambda p, x: cond(p, log, lambda x: x, x))
    torch.testing.assert_close(f(yes, up), up.log())
    torch.testing.assert_close(f(no, down), down)
    with pytest.raises(RuntimeError, match="the check fails"):
        f(yes, down)


def test_a_size_that_leaves_its_body() -> None:
    def f(p: Tensor, x: Tensor) -> Any:
        return cond(p, lambda x: x[x > 0], lambda x: x[x < 0], x)

    torch.testing.assert_close(f(yes, up), up)  # in eager Python there is no symbolic size
    with pytest.raises(DataDependentError, match=r"returns a tensor of shape \[.*\.shape\[0\]\]"):
        specialize(f)(yes, up)
