"""Masks with a data-dependent number of elements: programs agree with untraced code."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tsfunc
from tsfunc import cond, grad, hessian, jacfwd, jvp, specialize, vjp, vmap

SIZE = 5
masks = st.lists(st.booleans(), min_size=SIZE, max_size=SIZE).map(torch.tensor)


def selected(x: Tensor, m: Tensor) -> Tensor:
    return x.masked_select(m).sin()


def indexed(x: Tensor, m: Tensor) -> Tensor:
    return x[m].exp() * x.masked_select(m)


def of_own_mask(x: Tensor, m: Tensor) -> Tensor:
    return torch.masked_select(x.sin(), (x > 0) & m)


def combined(x: Tensor, m: Tensor) -> Tensor:
    pairs = torch.combinations(x, 2)
    return pairs[:, 0] * pairs[:, 1] * m.sum()


def written(x: Tensor, m: Tensor) -> Tensor:
    z = x * 1
    z[m] = z[m].sin() * 3
    z[m] += 1
    z[~m] = z[~m].square()
    return z


def scattered(x: Tensor, m: Tensor) -> Tensor:
    return x.masked_scatter(m, x.masked_select(m).square())


def values(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


FUNCTIONS = [selected, indexed, of_own_mask, combined, written, scattered]
SAME_SIZE = [combined, written, scattered]


def check(f: Callable[..., Any], program: Callable[..., Any], *args: Tensor) -> None:
    torch.testing.assert_close(program(*args), f(*args), rtol=1e-10, atol=1e-10)


def pushed(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, m, v: jvp(lambda x: f(x, m), (x,), (v,))


def total(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, m: f(x, m).square().sum()


@pytest.mark.parametrize("f", FUNCTIONS)
class TestOneProgramForEveryMask:
    @settings(max_examples=3)
    @given(found=st.lists(masks, min_size=2, max_size=4))
    def test_of_the_function(self, f: Any, found: list[Tensor]) -> None:
        program = specialize(f)
        for m in found:
            check(f, program, values((SIZE,)), m)
        assert program.cache_info().programs == 1

    @settings(max_examples=3)
    @given(found=st.lists(masks, min_size=2, max_size=4))
    def test_of_jvp(self, f: Any, found: list[Tensor]) -> None:
        program = specialize(pushed(f))
        for m in found:
            x, v = values((SIZE,)), values((SIZE,))
            out, tangent = program(x, m, v)
            expected = torch.autograd.functional.jvp(lambda x, m=m: f(x, m), x, v)
            torch.testing.assert_close((out, tangent), expected, rtol=1e-10, atol=1e-10)

    @settings(max_examples=2)
    @given(m=masks)
    def test_of_derivatives(self, f: Any, m: Tensor) -> None:
        x = values((SIZE,))
        leaf = x.clone().requires_grad_()
        (expected,) = torch.autograd.grad(total(f)(leaf, m), leaf, allow_unused=True)
        for transform in (grad, jacfwd):
            torch.testing.assert_close(specialize(transform(total(f)))(x, m), expected)
        if f in (written, scattered):  # second derivatives compare counts of masks made twice
            return
        second = torch.autograd.functional.hessian(lambda x: total(f)(x, m), x)
        torch.testing.assert_close(specialize(hessian(total(f)))(x, m), second)


@settings(max_examples=3)
@given(found=st.lists(masks, min_size=1, max_size=3), at=st.integers(0, 1), out=st.integers(0, 1))
@pytest.mark.parametrize("f", SAME_SIZE)
def test_one_mask_for_all_examples(f: Any, found: list[Tensor], at: int, out: int) -> None:
    mapped = specialize(vmap(f, in_dims=(at, None), out_dims=out))
    slopes = specialize(vmap(grad(total(f)), in_dims=(at, None), out_dims=at))
    for m in found:
        x = values((3, SIZE))
        given_x = x.movedim(0, at)
        expected = torch.stack([f(each, m) for each in x], out)
        torch.testing.assert_close(mapped(given_x, m), expected)
        each_slope = [grad(total(f))(each, m) for each in x]
        torch.testing.assert_close(slopes(given_x, m), torch.stack(each_slope, at))


@settings(max_examples=5)
@given(found=st.lists(masks, min_size=2, max_size=3))
def test_a_mask_in_a_branch_and_outside_of_it(found: list[Tensor]) -> None:
    def f(x: Tensor, m: Tensor) -> Any:
        before = x.masked_select(m).sum()
        inside = cond(
            x.sum() > 0, lambda x: x[m].sin().sum(), lambda x: m.nonzero().sum() * x[0], x
        )
        return before * inside + x[m].prod() + m.nonzero().shape[0]

    program = specialize(f)
    for m in found:
        check(f, program, values((SIZE,)), m)


@settings(max_examples=5)
@given(m=masks, other=masks)
def test_a_mask_that_is_written_has_other_places(m: Tensor, other: Tensor) -> None:
    def f(x: Tensor, m: Tensor, other: Tensor) -> Any:
        m = m.clone()
        first = x[m]
        m |= other
        second = x[m]
        m.fill_(True)
        return first, second, x.masked_select(m), m.nonzero()

    program = specialize(f)
    for some, others in ((m, other), (other, m), (~m, m)):
        check(f, program, values((SIZE,)), some, others)


def test_indices_that_are_written_are_those_of_one_call() -> None:
    def f(m: Tensor) -> Any:
        first = m.nonzero()
        first += 10
        return first, m.nonzero()

    check(f, specialize(f), torch.tensor([True, False, True]))


class TestChecksOfValues:
    """A check inside of a transform that raises is a check of the program."""

    @pytest.mark.parametrize(
        "transform",
        [grad, jacfwd, hessian, lambda f: vmap(f), lambda f: vmap(grad(f))],
        ids=["grad", "jacfwd", "hessian", "vmap", "vmap(grad)"],
    )
    def test_gaussian_nll_loss(self, transform: Any) -> None:
        def loss(x: Tensor, target: Tensor, var: Tensor) -> Tensor:
            return torch.nn.functional.gaussian_nll_loss(x, target, var)

        f = transform(loss)
        program = specialize(f)
        args = [values((3, 4)), values((3, 4)), values((3, 4)).square() + 0.1]
        check(f, program, *args)
        with pytest.raises((ValueError, RuntimeError), match=r"negative|check"):
            program(*args[:2], -args[2])

    def test_a_check_of_the_users(self) -> None:
        def f(x: Tensor, flags: Tensor) -> Tensor:
            if not flags.all():
                raise ValueError("a flag is not set")
            return x.sin().sum()

        program = specialize(jacfwd(f))
        x = values((3,))
        torch.testing.assert_close(program(x, torch.ones(2)), x.cos())
        with pytest.raises((ValueError, RuntimeError), match=r"a flag is not set|flags\.all"):
            program(x, torch.zeros(2))


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("with_grad", [False, True])
def test_batch_norm_without_a_momentum(rank: int, with_grad: bool) -> None:
    kind = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d)[rank - 1]
    traced = kind(3, momentum=None).double()
    plain = copy.deepcopy(traced)

    def call(module: Any) -> Any:
        return grad(lambda x: module(x).sin().sum()) if with_grad else lambda x: module(x)

    program = specialize(call(traced))
    for step in range(4):
        x = values((5, 3, *[2] * (2 * rank - 2))) + step
        torch.testing.assert_close(program(x), call(plain)(x))
        for own, expected in zip(traced.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(own, expected)
    assert program.cache_info().programs == 1


def test_a_pullback_of_selected_values() -> None:
    def f(x: Tensor, m: Tensor) -> Any:
        out, pull = vjp(lambda x: x[m].sin(), x)
        return out, pull(out)

    program = specialize(f)
    for m in (torch.tensor([True, False, True]), torch.tensor([False] * 3)):
        check(f, program, values((3,)), m)


def test_values_for_each_place_of_a_shared_mask() -> None:
    x, v = values((4, 3)), values((4, 2))
    m = torch.tensor([True, False, True])

    def f(x: Tensor, v: Tensor) -> Tensor:
        return x.index_put((m,), v)

    expected = torch.stack([f(a, b) for a, b in zip(x, v, strict=True)])
    assert vmap(f)(x, v).equal(expected)
    with pytest.raises(Exception, match="shape mismatch"):
        vmap(f)(x, values((4, 3)))
    assert tsfunc.specialize(vmap(f))(x, v).equal(expected)


def _scaled(x: Tensor, flag: Tensor) -> Tensor:
    x = x.clone()
    x[flag] *= 2.0
    x[~flag] += x[~flag].sin()
    return x


def _assigned(x: Tensor, flag: Tensor) -> Tensor:
    y = torch.stack([x, x.cos()])
    y[:, flag] = x[flag].square()
    y[0, flag] *= 3.0
    y[1][~flag] = x[~flag].exp()
    return y


def _not_selected(x: Tensor, flag: Tensor) -> Tensor:
    x = x * 1
    x[flag & ~flag] = x.new_zeros((0, *x.shape))
    x[flag | ~flag] = x.new_ones((1, *x.shape)) * x
    return x


@pytest.mark.parametrize("f", [_scaled, _assigned, _not_selected])
@settings(max_examples=4)
@given(flag=st.booleans().map(torch.tensor), shape=st.sampled_from([(), (2,), (2, 3)]))
def test_a_mask_without_dims_selects_all_or_nothing(
    f: Callable[..., Any], flag: Tensor, shape: tuple[int, ...]
) -> None:
    x, v = values(shape), values(shape)

    def of_values(x: Tensor) -> Tensor:  # the mask is a tracer of each transform
        return f(x, flag & (x.sum() * 0 == 0))

    out, tangent = torch.autograd.functional.jvp(of_values, x, v)
    jacobian = torch.autograd.functional.jacobian(of_values, x)
    for g in (of_values, specialize(of_values)):
        torch.testing.assert_close(g(x), out)
        torch.testing.assert_close(jvp(g, (x,), (v,))[1], tangent)
        torch.testing.assert_close(jacfwd(g)(x), jacobian)
        torch.testing.assert_close(jacfwd(jacfwd(g))(x), jacfwd(tsfunc.jacrev(g))(x))
    each = vmap(lambda x, v: jvp(of_values, (x,), (v,)))
    torch.testing.assert_close(each(x[None], v[None]), (out[None], tangent[None]))


def test_one_value_is_written_by_a_mask_without_dims_for_each_example() -> None:
    def f(x: Tensor) -> Tensor:
        y = torch.stack([x, x.cos()])
        y[:, x.sum() > 0] = 2.0
        y[0, x.sum() < 0] = x.new_ones(1, 1) * 3
        return y

    x = torch.tensor([[1.0, 2.0], [-1.0, -2.0], [0.0, 0.0]])
    want = torch.stack([f(row) for row in x])
    torch.testing.assert_close(vmap(f)(x), want)
    torch.testing.assert_close(vmap(specialize(f))(x), want)
    torch.testing.assert_close(specialize(vmap(f))(x), want)
