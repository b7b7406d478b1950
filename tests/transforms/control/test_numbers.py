"""Python numbers among carries and results take the dtype of their counterpart."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tsfunc
from tsfunc import cond, fori_loop, grad, scan, specialize, switch, vmap, while_loop

WRAPS = pytest.mark.parametrize("wrap", [lambda f: f, specialize], ids=["plain", "specialize"])
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]


@WRAPS
@pytest.mark.parametrize("dtype", [*INTEGERS, torch.float16, torch.float32, torch.float64])
def test_a_carry_that_is_a_number_at_first_takes_the_dtype_of_the_steps(
    dtype: torch.dtype, wrap: Any
) -> None:
    xs = torch.ones(5, dtype=dtype)
    carry, ys = wrap(lambda xs: scan(lambda c, x: (c + x, x), 0, xs))(xs)
    assert carry.dtype is dtype and carry == 5 and ys.dtype is dtype
    two = wrap(lambda one: while_loop(lambda c: c < 2, lambda c: c + one, 0))(xs[0])
    assert two.dtype is dtype and two == 2
    three = wrap(lambda one: fori_loop(0, 3, lambda i, c: c + one, 0))(xs[0])
    assert three.dtype is dtype and three == 3


@WRAPS
def test_numbers_that_pass_through_each_other_find_their_dtype(wrap: Any) -> None:
    def f(x: torch.Tensor) -> Any:
        def shift(c: Any, _: Any) -> Any:
            return (c[1], c[2], c[3], 0), None

        return scan(shift, (0, 1, 2, x), None, length=2)[0]

    for wanted in (torch.tensor(3.0), torch.tensor(3, dtype=torch.int16)):
        out = wrap(f)(wanted)
        assert [float(x) for x in out] == [2, 3, 0, 0]
        batch = wrap(vmap(f))(wanted[None].expand(4))
        assert batch[1].tolist() == [3, 3, 3, 3]


@WRAPS
def test_a_branch_may_return_a_number_where_the_other_has_a_tensor(wrap: Any) -> None:
    def f(x: torch.Tensor) -> Any:
        return cond(x < 3, lambda: 5, lambda: x)

    for dtype in (torch.int16, torch.float64):
        x = torch.tensor([0, 4], dtype=dtype)
        for one, expected in zip(x, [5, 4], strict=True):
            out = wrap(f)(one)
            assert out == expected and out.dtype is dtype
        out = wrap(vmap(f))(x)
        assert out.tolist() == [5, 4] and out.dtype is dtype


@WRAPS
def test_numbers_of_two_kinds_meet_in_the_wider(wrap: Any) -> None:
    out = wrap(vmap(lambda p: cond(p, lambda: 1, lambda: 2.5)))(torch.tensor([True, False]))
    assert out.tolist() == [1, 2.5] and out.dtype is torch.float32
    one = wrap(lambda p: cond(p, lambda: 1, lambda: 2.5))(torch.tensor(True))
    assert one.dtype is torch.float32


def test_a_number_is_not_narrowed() -> None:
    def f(x: torch.Tensor) -> Any:
        return cond(x < 3, lambda: 2.5, lambda: x)

    for run in (f, specialize(f), vmap(f)):
        x = torch.tensor([1, 4]) if run is not f else torch.tensor(1)
        x = x[0] if isinstance(run, tsfunc.transforms.specialized.Specialized) else x
        with pytest.raises(tsfunc.errors.TypeCheckError, match="to have one type"):
            run(x)


def test_the_result_of_a_tensor_choice_is_a_tensor_for_any_branch() -> None:
    def f(p: torch.Tensor) -> Any:
        return cond(p, lambda: 1.0, lambda: 0.0)

    for batch in ([True, True], [False, False], [True, False]):
        assert vmap(f)(torch.tensor(batch)).tolist() == batch
    assert isinstance(f(torch.tensor(True)), torch.Tensor)
    assert type(cond(True, lambda: 1.0, lambda: 0.0)) is float
    assert isinstance(switch(torch.tensor(0), [lambda: 1, lambda: 2]), torch.Tensor)


def test_a_branch_that_is_a_number_has_no_gradient() -> None:
    def f(x: torch.Tensor) -> Any:
        branches: Any = (None, lambda _: 2.0, x, lambda x: 2.0 * x)
        return cond(x < 3, *branches)

    x = torch.tensor([2.72, 3.14])
    expected = torch.tensor([0.0, 2.0])
    for run in (lambda x: torch.stack([grad(f)(one) for one in x]), vmap(grad(f)),
                specialize(vmap(grad(f))), vmap(grad(specialize(f)))):  # fmt: skip
        torch.testing.assert_close(run(x), expected)


@WRAPS
def test_examples_that_are_done_at_once_give_tensors_too(wrap: Any) -> None:
    def f(x: torch.Tensor) -> Any:
        return while_loop(lambda c: c[0] < x, lambda c: (c[0] + 1, c[1] * 2), (0, 1))

    for batch in ([2, 2], [0, 3], [0, 0]):
        steps, powers = wrap(vmap(f))(torch.tensor(batch))
        assert steps.tolist() == batch and powers.tolist() == [2**n for n in batch]
