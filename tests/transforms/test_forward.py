"""jvp agrees with torch.func's; its refusals."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwd
import torch.func
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tsfunc
from tests.transforms.support import Api, as_torch_func, messages_of_mistakes, same
from tsfunc import jvp, linearize, scan, specialize, vmap

X = torch.arange(12.0).view(3, 4).sin()
Y = X.cos()
W = torch.arange(4.0).cos()

CALLS: dict[str, Callable[[Api], Any]] = {
    "one": lambda T: T.jvp(torch.sin, (X,), (Y,)),
    "several": lambda T: T.jvp(lambda a, b: (a * b, a.sum()), (X, Y), (Y, X)),
    "dicts": lambda T: T.jvp(
        lambda d: {"o": d["a"] * d["b"]}, ({"a": X, "b": Y},), ({"a": Y, "b": X},)
    ),
    "the identity": lambda T: T.jvp(lambda a: a, (X,), (Y,)),
    "a constant": lambda T: T.jvp(lambda a: W, (X,), (Y,)),
    "partly a constant": lambda T: T.jvp(lambda a: (a * 2, W), (X,), (Y,)),
    "detach": lambda T: T.jvp(lambda a: a.detach() * a, (X,), (Y,)),
    "in place": lambda T: T.jvp(lambda a: a.clone().mul_(a), (X,), (Y,)),
    "in place into zeros": lambda T: T.jvp(lambda a: torch.zeros(3, 4).copy_(a * a), (X,), (Y,)),
    "has_aux": lambda T: T.jvp(lambda a: (a.sin(), {"k": a}), (X,), (Y,), has_aux=True),
    "strict": lambda T: T.jvp(torch.sin, (X,), (Y,), strict=True),
    "complex": lambda T: T.jvp(torch.exp, (torch.complex(X, Y),), (torch.complex(Y, X),)),
}


@pytest.mark.parametrize("name", CALLS)
def test_as_torch_func(name: str) -> None:
    as_torch_func(CALLS[name])


@settings(max_examples=30)
@given(shape=st.lists(st.integers(1, 3), max_size=3))
def test_it_is_the_jacobian_times_the_direction(shape: list[int]) -> None:
    x, t = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)

    def func(x: Tensor) -> Tensor:
        return torch.tanh(x) * x.sum()

    jacobian = torch.autograd.functional.jacobian(func, x)
    rank = len(shape)
    want = torch.tensordot(jacobian, t, dims=rank)
    same(tsfunc.jvp(func, (x,), (t,)), (func(x), want))


def test_without_a_forward_formula() -> None:
    """Double backward serves it."""

    def func(x: Tensor) -> Tensor:
        return torch.igamma(torch.ones_like(x), x)  # 1 - exp(-x)

    x, t = X.double().abs() + 0.1, Y.double()
    out, tangent, aux = tsfunc.jvp(lambda x: (func(x), "aux"), (x,), (t,), has_aux=True)
    same((out, tangent, aux), (1 - torch.exp(-x), torch.exp(-x) * t, "aux"))
    same(tsfunc.vmap(lambda x, t: tsfunc.jvp(func, (x,), (t,))[1])(x, t), torch.exp(-x) * t)


_POWERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "pow": torch.pow,
    "in place": lambda x, k: x.clone().pow_(k),
    "float_power": torch.float_power,
}


@pytest.mark.parametrize("name", _POWERS)
@settings(max_examples=10)
@given(numbers=st.lists(st.sampled_from([-1.5, -0.5, 0.0, 0.25, 2.0]), min_size=1, max_size=4))
def test_a_constant_exponent_has_no_part_in_the_derivatives(
    name: str, numbers: list[float]
) -> None:
    """torch's formula multiplies the exponent's tangent, zero, by the logarithm of the base."""
    x = torch.tensor(numbers, dtype=torch.float64)
    first = torch.tensor([k * x ** max(k - 1, 0) for k, x in enumerate(numbers)]).double()
    seconds = [k * (k - 1) * x ** max(k - 2, 0) for k, x in enumerate(numbers)]
    second = torch.tensor(seconds).double()
    exponents, ones = torch.arange(len(numbers)), torch.ones_like(x)

    def f(x: Tensor) -> Tensor:
        return _POWERS[name](x, exponents)

    def pushed(x: Tensor) -> Tensor:
        return jvp(f, (x,), (ones,))[1]

    same(pushed(x), first)
    same(vmap(pushed)(x[None])[0], first)
    same(specialize(pushed)(x), first)
    same(tsfunc.jacfwd(f)(x), first.diag())
    same(jvp(pushed, (x,), (ones,))[1], second)
    same(tsfunc.grad(lambda x: pushed(x).sum())(x), second)
    same(vmap(tsfunc.grad(lambda x: pushed(x).sum()))(x[None])[0], second)
    if all(numbers[:1]):  # torch's second derivative of 0**0 is NaN in reverse mode
        same(jvp(tsfunc.grad(lambda x: f(x).sum()), (x,), (ones,))[1], second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128])
def test_tangents_of_a_power_have_gradients_by_the_exponent(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.rand(3, dtype=torch.float64, generator=generator) + 0.5
    k = torch.randn(2, 3, dtype=dtype, generator=generator)

    def by_forward(x: Tensor, k: Tensor) -> Tensor:
        return jvp(lambda x: (x**k).real.sum(), (x,), (torch.ones_like(x),))[1]

    for argnum in (0, 1):
        want = torch.func.grad(
            lambda x, k: torch.func.grad(lambda x: (x**k).real.sum())(x).sum(), argnum
        )(x, k)
        same(tsfunc.grad(by_forward, argnum)(x, k), want)
        same(vmap(tsfunc.grad(by_forward, argnum))(x[None], k[None])[0], want)
        same(specialize(tsfunc.grad(by_forward, argnum))(x, k), want)


@pytest.mark.parametrize("argnum", [0, 1])
def test_a_power_with_tangents_is_recorded_by_a_gradient_outside_of_vmap(argnum: int) -> None:
    x, k = torch.rand(3, 2, dtype=torch.float64) + 0.5, torch.randn(3, 2, dtype=torch.float64)
    weights = torch.arange(12.0, dtype=torch.float64).view(2, 3, 2)

    def pushed(x: Tensor, k: Tensor) -> Any:
        return jvp(lambda x: x**k, (x,), (torch.ones_like(x),))

    def loss(x: Tensor, k: Tensor) -> Tensor:
        return (weights * torch.stack(vmap(pushed)(x, k))).sum()

    def formula(x: Tensor, k: Tensor) -> Tensor:
        return (weights * torch.stack([x**k, k * x ** (k - 1)])).sum()

    same(tsfunc.grad(loss, argnum)(x, k), torch.func.grad(formula, argnum)(x, k))
    same(tsfunc.jacrev(tsfunc.grad(loss, argnum), argnum)(x, k),
         torch.func.jacrev(torch.func.grad(formula, argnum), argnum)(x, k))  # fmt: skip


def test_the_tangent_of_glu_has_derivatives_by_the_direction() -> None:
    x, t = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)

    def pushed(t: Tensor) -> Tensor:
        return jvp(torch.nn.functional.glu, (x,), (t,))[1]

    want = torch.autograd.functional.vjp(torch.nn.functional.glu, x, torch.ones(3, 2).double())[1]
    same(tsfunc.grad(lambda t: pushed(t).sum())(t), want)
    same(vmap(tsfunc.grad(lambda t: pushed(t).sum()))(t[None])[0], want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_without_a_forward_formula_for_the_type(dtype: torch.dtype) -> None:
    """glu's formula has a kernel of its own, for float and double."""
    x, t = torch.randn(3, 4).to(dtype), torch.randn(3, 4).to(dtype)
    glu = torch.nn.functional.glu

    def push(x: Tensor, t: Tensor) -> Any:
        return tsfunc.jvp(glu, (x,), (t,))

    for out, tangent in (push(x, t), tsfunc.vmap(push)(x, t)):
        assert torch.equal(out, glu(x)) and tangent.dtype is dtype
        _, want = push(x.double(), t.double())
        torch.testing.assert_close(tangent.double(), want, rtol=0.05, atol=0.05)


class Squared(torch.autograd.Function):
    """A function without a forward formula."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * g


def test_a_tangent_by_the_pullback_has_only_the_outer_graph() -> None:
    def f(x: Tensor) -> Tensor:
        return Squared.apply(x)  # type: ignore[no-untyped-call]

    def tangent(f: Callable[[Tensor], Tensor], x: Tensor, t: Tensor) -> Tensor:
        return tsfunc.jvp(f, (x,), (t,))[1]

    def times(x: Tensor) -> Tensor:
        return f(x) * w

    x, t, w = torch.tensor(2.0), torch.tensor(1.0), torch.tensor(3.0, requires_grad=True)
    assert not tangent(f, x, t).requires_grad
    batch = tsfunc.vmap(lambda x: tangent(times, x, t))(x[None])
    for found, want in (
        (tangent(times, x, t), 4.0),
        (batch.sum(), 4.0),
        (tangent(f, w, t), 2.0),
        (tangent(f, x, w), 4.0),
    ):
        assert float(torch.autograd.grad(found, w)[0]) == want


def test_an_operator_that_another_ones_kernel_calls() -> None:
    """The inverse of a hermitian matrix calls its eigenvectors below autograd."""
    x, t = torch.randn(2, 3, 3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)

    def f(x: Tensor) -> Tensor:
        return torch.linalg.pinv(x + x.mT, hermitian=True).sin().sum()

    want = torch.stack([torch.autograd.functional.hvp(f, one, t)[1] for one in x])
    same(torch.stack([tsfunc.hvp(f, (one,), (t,)) for one in x]), want)
    same(tsfunc.vmap(lambda x: tsfunc.hvp(f, (x,), (t,)))(x), want)


@torch.library.custom_op("tsfunc_tests::cubed", mutates_args=())
def cubed(x: Tensor) -> Tensor:
    return x**3


cubed.register_autograd(
    lambda ctx, g: g * 3 * ctx.saved_tensors[0] ** 2,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
cubed.register_vmap(lambda info, in_dims, x: (cubed(x), in_dims[0]))


def test_custom_operators_have_a_pullback_alone() -> None:
    """torch itself drops their tangents."""
    x, t = torch.tensor([1.0, 2.0, -3.0]), torch.tensor([1.0, 0.5, 2.0])
    assert not torch.func.jvp(cubed, (x,), (t,))[1].any()
    want = x**3, 3 * x**2 * t
    same(tsfunc.jvp(cubed, (x,), (t,)), want)
    same(tsfunc.vmap(lambda x, t: tsfunc.jvp(cubed, (x,), (t,)))(x, t), want)
    same(tsfunc.jvp(tsfunc.vmap(cubed), (x,), (t,)), want)
    for twice in (tsfunc.jacrev(tsfunc.jacfwd(cubed)), tsfunc.jacfwd(tsfunc.jacfwd(cubed))):
        same(tsfunc.vmap(twice)(x), 6 * x)


def test_the_auxiliary_part_is_anything() -> None:
    assert tsfunc.jvp(lambda a: (a, "aux"), (X,), (Y,), has_aux=True)[2] == "aux"


def test_results_carry_no_tangent() -> None:
    out, tangent = tsfunc.jvp(torch.sin, (X,), (Y,))

    with fwd.dual_level():
        assert fwd.unpack_dual(out).tangent is None
        assert fwd.unpack_dual(tangent).tangent is None


def test_inside_of_ordinary_forward_mode() -> None:
    with fwd.dual_level():
        dual = fwd.make_dual(X, Y)
        out, tangent = tsfunc.jvp(torch.sin, (dual,), (torch.ones_like(X),))
        same(fwd.unpack_dual(tangent).primal, X.cos())
        same(fwd.unpack_dual(tangent).tangent, -X.sin() * Y)
        same(fwd.unpack_dual(out).tangent, X.cos() * Y)


def test_where_forward_mode_was_switched_off() -> None:
    """jvp ignores a switch outside of the function, and respects one inside."""
    with fwd._set_fwd_grad_enabled(False):
        same(tsfunc.jvp(torch.sin, (X,), (Y,))[1], X.cos() * Y)
        same(tsfunc.vmap(lambda x, t: tsfunc.jvp(torch.sin, (x,), (t,))[1])(X, Y), X.cos() * Y)
        assert not fwd._is_fwd_grad_enabled()

    def constant_part(x: Tensor) -> Tensor:
        with fwd._set_fwd_grad_enabled(False):
            shift = x.exp()
        return x * 3 + shift

    same(tsfunc.jvp(constant_part, (X,), (Y,))[1], 3 * Y)


def test_in_the_forward_of_an_autograd_function() -> None:
    """torch switches forward mode off there."""

    class Tangent(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return tsfunc.jvp(torch.sin, (x,), (torch.ones_like(x),))[1]

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            tangent: Tensor = tsfunc.jvp(torch.cos, (x,), (torch.ones_like(x),))[1]
            return grad * tangent

    x = X.clone().requires_grad_()
    out = Tangent.apply(x)  # type: ignore[no-untyped-call]
    same(out, X.cos())
    same(torch.autograd.grad(out.sum(), x)[0], -X.sin())


MESSAGES: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: tsfunc.jvp(torch.sin, [X], (Y,)),  # type: ignore[call-overload]
        "jvp(f, primals, tangents): Expected primals to be a tuple. E.g. it should be valid to "
        "call f(*primals).",
    ),
    (
        lambda: tsfunc.jvp(torch.sin, (X,), (Y, Y)),
        "Expected primals and tangents to have the same python structure. For example, if primals "
        "is a tuple of 3 tensors, tangents also must be.",
    ),
    (
        lambda: tsfunc.jvp(torch.sin, (1.0,), (1.0,)),
        "jvp(f, primals, tangents): Expected primals to only contain Tensors, got <class 'float'>",
    ),
    (
        lambda: tsfunc.jvp(torch.sin, (X,), (1.0,)),
        "jvp(f, primals, tangents): Expected tangents to only contain Tensors, got <class 'float'",
    ),
    (lambda: tsfunc.jvp(lambda: X, (), ()), "Expected primals to contain at least one Tensor."),
    (
        lambda: tsfunc.jvp(lambda x, n: x, (X, 2 * X.long()), (X, X)),
        "n of torch.int64 can't be differentiated by: only Tensors of floating point",
    ),
    (
        lambda: tsfunc.jvp(lambda p: p["x"], ({"x": X},), ({"x": W},)),
        "the tangent of p['x']: expected torch.float32 of shape (3, 4), as its "
        "primal, got torch.float32 of shape (4,).",
    ),
    (
        lambda: tsfunc.jvp(torch.sin, (X,), (Y.double(),)),
        "as its primal, got torch.float64",
    ),
    (
        lambda: tsfunc.jvp(lambda x: (x, W), (X,), (Y,), strict=True),
        "got an output which is independent of the inputs, and strict=True. This is not allowed.",
    ),
    (
        lambda: tsfunc.jvp(torch.sin, (X,), (Y,), has_aux=True),
        "jvp(f, primals, tangents): output of function f should be a tuple: (output, aux)",
    ),
    (
        lambda: tsfunc.jvp(lambda x: None, (X,), (Y,)),
        "jvp(f, primals, tangents): Expected f to be a function that has non-empty output",
    ),
    (
        lambda: tsfunc.jvp(lambda x: (), (X,), (Y,)),
        "jvp(f, primals, tangents): Expected f to be a function that has non-empty output",
    ),
    (
        lambda: tsfunc.jvp(lambda x: 3, (X,), (Y,)),
        "jvp(f, primals, tangents): expected f(*primals) to return only tensors, got unsupported "
        "type <class 'int'>",
    ),
    (
        lambda: tsfunc.jvp(lambda x: torch.func.jvp(torch.sin, (x,), (x,))[1], (X,), (Y,)),
        "tsfunc.jvp: forward mode that is not tsfunc's (torch.func.jvp, ",
    ),
]


test_mistakes_in_calls_of_jvp_have_messages = messages_of_mistakes(
    [(call, RuntimeError, message) for call, message in MESSAGES]
)


def test_a_failed_call_leaves_no_level_behind() -> None:
    def fails(x: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError):
        tsfunc.jvp(lambda x: tsfunc.jvp(fails, (x,), (x,)), (X,), (Y,))
    assert fwd._current_level == -1
    same(tsfunc.jvp(torch.sin, (X,), (Y,))[1], X.cos() * Y)


def test_an_expanded_primal_takes_any_tangent() -> None:
    x = torch.tensor([1.0, 2.0]).expand(3, 2)
    t = torch.arange(6.0).reshape(3, 2)

    def pushed(t: Tensor) -> Any:
        return tsfunc.jvp(torch.sin, (x,), (t,))[1]

    torch.testing.assert_close(pushed(t), x.cos() * t)
    torch.testing.assert_close(tsfunc.specialize(pushed)(t), x.cos() * t)


FACTOR = torch.tensor(1.5)
# C++ multiplies the tangent of a number, or of a tensor without dims, by an integer.
WITH_NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "mul": lambda x: x * 2,
    "add": lambda x: 1 + x,
    "div": lambda x: x * 0.5 - 3 / x,
    "add of a multiple": lambda x: torch.add(x, 2.5, alpha=3),
    "sub of a multiple": lambda x: torch.sub(x, FACTOR, alpha=3),
    "rsub of a multiple": lambda x: torch.rsub(x, FACTOR, alpha=2),
    "addcmul": lambda x: torch.addcmul(x, FACTOR, FACTOR, value=2),
    "index_add": lambda x: x.sum().index_add(0, torch.tensor(0), FACTOR, alpha=2),
}


@pytest.mark.parametrize("f", WITH_NUMBERS.values(), ids=WITH_NUMBERS)
def test_python_numbers_in_a_program_with_forward_mode(f: Callable[[Tensor], Tensor]) -> None:
    def pushed(x: Tensor) -> Any:
        return tsfunc.jvp(f, (x,), (x,))[1]

    x = torch.tensor([1.0, 2.0])
    torch.testing.assert_close(tsfunc.specialize(pushed)(x), pushed(x))


def test_views_of_tangents_in_programs_one_after_the_other() -> None:
    xs = torch.arange(6.0).reshape(3, 2)

    def f(xs: Tensor) -> Any:
        def one(x: Tensor) -> Any:
            return tsfunc.jvp(lambda x: x.expand(3, 2).sum(0), (x,), (x.cos(),))[1]

        return torch.stack([one(x) for x in xs])

    for _ in range(2):
        torch.testing.assert_close(tsfunc.specialize(f)(xs), 3 * xs.cos())


def _along_ones(f: Any, part: int = 1) -> Any:
    return lambda x: jvp(f, (x,), (torch.ones_like(x),))[part]


_APART: dict[str, tuple[Any, Any]] = {
    "nothing of the inner": (
        _along_ones(lambda x: _along_ones(lambda z: x.sin())(x)), torch.zeros_like,
    ),
    "its own value": (_along_ones(lambda x: _along_ones(lambda z: x.sin(), 0)(x)), torch.cos),
    "a product": (_along_ones(lambda x: x * _along_ones(lambda z: x * z)(x)), lambda x: 2 * x),
    "the auxiliary result": (
        _along_ones(lambda x: jvp(lambda z: (z, x.sin()), (x,), (x,), has_aux=True)[2]), torch.cos,
    ),
    "three": (
        _along_ones(
            lambda x: _along_ones(lambda y: y * _along_ones(lambda z: x.sin() + y)(y))(x)
        ),
        torch.zeros_like,
    ),
    "a loop": (
        _along_ones(
            lambda x: _along_ones(lambda z: scan(lambda c, _: (c * x, None), x, length=2)[0])(x)
        ),
        torch.zeros_like,
    ),
    "linearize": (
        lambda x: linearize(lambda x: x * _along_ones(lambda z: x * z)(x), x)[1](torch.ones(3)),
        lambda x: 2 * x,
    ),
    "in a vmap": (
        vmap(_along_ones(lambda x: x * _along_ones(lambda z: x.sin() + z)(x))),
        torch.ones_like,
    ),
    "around a vmap": (
        _along_ones(vmap(lambda x: _along_ones(lambda z: x.sin() * z, 0)(x))),
        lambda x: x.cos() * x + x.sin(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", _APART)
@pytest.mark.parametrize("run", [lambda f: f, specialize], ids=["eager", "specialize"])
def test_a_jvp_takes_no_tangent_of_one_around_it_for_its_own(name: str, run: Any) -> None:
    """Perturbation confusion: Siskind and Pearlmutter, "Nesting forward-mode AD" (2008)."""
    f, expected = _APART[name]
    x = torch.tensor([0.3, -1.0, 2.0])
    torch.testing.assert_close(run(f)(x), expected(x))


@pytest.mark.parametrize("through", [lambda f: f, tsfunc.checkpoint], ids=["plain", "checkpoint"])
@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.softmax(-1),
        lambda x: x.softmax(0, dtype=torch.float64),
        lambda x: x.log_softmax(1),
        lambda x: torch.ops.aten._safe_softmax(x, -1),
        lambda x: x.logsumexp((0, 1)),
        lambda x: x.norm(dim=0),
        lambda x: torch.linalg.vector_norm(x, 3, -1),
        lambda x: x.norm(1.5),
        lambda x: torch.nn.functional.normalize(x, dim=0),
        lambda x: x.renorm(2, 0, 0.5),
        lambda x: torch.nn.functional.cross_entropy(x, torch.tensor([1, 0, 1])),
        lambda x: torch.cholesky_inverse(x.mT @ x),
    ],
    ids=itertools.count(),
)
def test_a_gradient_of_a_tangent_is_that_of_double_backward(
    f: Callable[[Tensor], Tensor], through: Any
) -> None:
    """Formulas of tangents that write into saved values, or that treat read values as constants.

    A checkpoint saves by hooks, for which autograd does not notice writes to a saved value.
    """
    x = torch.tensor([[0.4, 0.9], [0.3, -1.0], [1.2, 0.1]], dtype=torch.float64)
    t = torch.tensor([[1.0, -0.5], [0.25, 2.0], [0.7, 0.3]], dtype=torch.float64)

    def pushed(x: Tensor) -> Tensor:
        return jvp(f, (x,), (t,))[1].square().sum()

    def by_double_backward(x: Tensor) -> Tensor:
        out = f(x)
        u = torch.ones_like(out).requires_grad_()
        (pulled,) = torch.autograd.grad(out, x, u, create_graph=True)
        (tangent,) = torch.autograd.grad(pulled, u, t, create_graph=True)
        return tangent.square().sum()

    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(by_double_backward(leaf), leaf)
    same(through(tsfunc.grad(pushed))(x), expected)
    same(through(lambda x: jvp(tsfunc.grad(pushed), (x,), (t,))[0])(x), expected)


LAZY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mul": lambda y, c: y.sin() * c.sum(),
    "div": lambda y, c: c.sum() / (2 + y.sin()),
    "add": lambda y, c: (c.sum() + y.sin()) * y,
    "sub": lambda y, c: (c.sum() - y.sin()) * y,
    "cross": lambda y, c: torch.linalg.cross(y.sin().expand(3) * c, c.cos()).sum() * y,
    "mm": lambda y, c: (y.sin().expand(2, 3) @ c).prod() * y,
}
ORDERS: dict[str, Callable[[Api, Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]] = {
    "grad(jacrev)": lambda T, f: T.grad(lambda x: T.jacrev(f)(x).sum()),
    "jacrev(jacrev)": lambda T, f: T.jacrev(T.jacrev(f)),
    "vmap(grad(jacrev))": lambda T, f: (
        lambda x: T.vmap(T.grad(lambda x: T.jacrev(f)(x).sum()))(torch.stack([x, x + 1]))
    ),
    "grad(vmap(vjp))": lambda T, f: T.grad(
        lambda x: T.vmap(lambda ct: T.vjp(f, x)[1](ct)[0])(torch.linspace(1, 2, 3).double()).sum()
    ),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", LAZY)
def test_zero_tangents_of_captured_tensors_in_a_mapped_pullback(name: str, order: str) -> None:
    c = torch.randn(3, dtype=torch.float64)

    def run(T: Api) -> Tensor:
        def f(x: Tensor) -> Tensor:
            return T.jvp(lambda y: LAZY[name](y, c), (x,), (x.cos(),))[1] ** 3

        return ORDERS[order](T, f)(torch.tensor(0.3, dtype=torch.float64))

    same(run(tsfunc), run(torch.func))


MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"is_causal": True},
    "a mask": {"attn_mask": torch.ones(4, 4, dtype=torch.bool).tril(1)},
    "a bias": {"attn_mask": torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4)},
    "a scale": {"scale": 0.7},
}
SECOND: dict[str, Callable[[Any, Callable[[Tensor], Tensor]], Callable[[Tensor], Any]]] = {
    "jvp": lambda T, f: lambda x: T.jvp(f, (x,), (x.cos(),)),
    "jacfwd": lambda T, f: T.jacfwd(f),
    "vmap(jacfwd)": lambda T, f: lambda x: T.vmap(T.jacfwd(f))(torch.stack([x, x.sin()])),
    "hessian": lambda T, f: T.hessian(lambda x: f(x).sin().sum()),
    "jacrev(jacrev)": lambda T, f: T.jacrev(T.jacrev(lambda x: f(x).sin().sum())),
    "jacfwd(jacfwd)": lambda T, f: T.jacfwd(T.jacfwd(lambda x: f(x).sin().sum())),
    "grad(grad)": lambda T, f: T.grad(lambda x: T.grad(lambda x: f(x).sin().sum())(x).sum()),
}


@pytest.mark.parametrize("order", SECOND)
@pytest.mark.parametrize("mask", MASKS)
def test_tangents_and_second_derivatives_of_attention(mask: str, order: str) -> None:
    attend = torch.nn.functional.scaled_dot_product_attention

    def f(x: Tensor) -> Tensor:
        return attend(x, x.cos(), x.flip(-1), **MASKS[mask])

    x = torch.randn(1, 2, 4, 3, dtype=torch.float64)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        want = SECOND[order](torch.func, f)(x)
    same(SECOND[order](tsfunc, f)(x), want)
    same(tsfunc.specialize(SECOND[order](tsfunc, f))(x), want)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_tangents_of_nested_tensors_are_those_of_their_examples(layout: torch.layout) -> None:
    rows, directions = ([torch.randn(n, 3) for n in (2, 4)] for _ in range(2))
    primal, tangent = (
        torch.nested.as_nested_tensor(each, layout=layout) for each in (rows, directions)
    )
    if layout is torch.jagged:  # torch compares their offsets
        nested: Any = primal  # torch declares the methods of this class for no tensor
        tangent = torch.nested.nested_tensor_from_jagged(torch.cat(directions), nested.offsets())
    out, pushed = tsfunc.jvp(lambda x: x.sin() * x, (primal,), (tangent,))
    for i, (x, v) in enumerate(zip(rows, directions, strict=True)):
        expected = torch.autograd.functional.jvp(lambda x: x.sin() * x, x, v)
        torch.testing.assert_close((out.unbind()[i], pushed.unbind()[i]), expected)
    _, push = tsfunc.linearize(lambda x: x.sin() * x, primal)
    torch.testing.assert_close(push(tangent).unbind(), pushed.unbind())
    swapped = torch.nested.as_nested_tensor(directions[::-1], layout=layout)
    with pytest.raises(RuntimeError, match="as its primal, got"):
        tsfunc.jvp(torch.sin, (primal,), (swapped,))
    with pytest.raises(RuntimeError, match="match the shape of its primal"):
        push(swapped)


def test_a_copied_view_takes_tangents_that_have_no_such_view() -> None:
    def f(x: Tensor) -> Tensor:
        return torch.view_copy(x.sin().t(), (12,))

    same(jvp(f, (X,), (Y,))[1], (X.cos() * Y).t().reshape(12))
    batch = vmap(lambda x: jvp(f, (x,), (x.cos(),))[1])(torch.stack([X, Y]))
    same(batch[0], (X.cos() * X.cos()).t().reshape(12))
