"""check_custom_rule passes right rules, and names wrong ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tsfunc import (
    closure_convert,
    custom_gradient,
    custom_jvp,
    custom_vjp,
    custom_vmap,
    sequential_vmap,
)
from tsfunc.testing import check_custom_rule

X = torch.tensor([0.5, -1.0, 2.0])


def with_vjp(factor: float) -> Any:
    @custom_vjp
    def f(x: Tensor, y: Tensor) -> Any:
        return {"out": x.sin() * y}

    f.defvjp(
        lambda x, y: ({"out": x.sin() * y}, (x, y)),
        lambda saved, ct: (
            factor * saved[0].cos() * saved[1] * ct["out"],
            saved[0].sin() * ct["out"],
        ),
    )
    return f


def with_jvp(factor: float) -> Any:
    @custom_jvp
    def f(x: Tensor) -> Tensor:
        return x.exp()

    f.defjvp(lambda primals, tangents: (primals[0].exp(), factor * primals[0].exp() * tangents[0]))
    return f


def with_vmap(factor: float) -> Any:
    @custom_vmap
    def f(a: Tensor, x: Tensor) -> Tensor:
        return a @ x

    def rule(axis_size: int, in_batched: Any, a: Tensor, x: Tensor) -> Any:
        if in_batched[0]:
            return (a @ x[..., None]).squeeze(-1), True
        return factor * (x @ a.T), True

    f.def_vmap(rule)
    return f


class Cubed(torch.autograd.Function):
    """Both modes and a batching rule, each of which can be made wrong."""

    wrong = ""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return (2 if Cubed.wrong == "backward" else 3) * x**2 * ct

    @staticmethod
    def jvp(ctx: Any, t: Any) -> Any:
        (x,) = ctx.saved_tensors
        return (2 if Cubed.wrong == "jvp" else 3) * x**2 * t

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        out = Cubed.apply(x)  # type: ignore[no-untyped-call]
        return (2 * out if Cubed.wrong == "vmap" else out), in_dims[0]


class Doubled(torch.autograd.Function):
    """Reverse mode alone, without a rule for vmap."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Any:
        return 2 * ct


def test_right_rules_pass() -> None:
    check_custom_rule(with_vjp(1.0), X, X.cos())
    check_custom_rule(with_jvp(1.0), X)
    check_custom_rule(with_vmap(1.0), torch.rand(2, 3), X)
    check_custom_rule(Cubed.apply, X)
    check_custom_rule(Doubled.apply, X)
    check_custom_rule(lambda tree, n: tree["x"].sin() * n, {"x": X}, 3)
    check_custom_rule(lambda x: x + 1, torch.arange(3))


def test_wrong_rules_are_named() -> None:
    differ = r"central differences differ[\s\S]*difference"
    with pytest.raises(AssertionError, match=f"reverse mode, .* and {differ}"):
        check_custom_rule(with_vjp(1.5), X, X.cos())
    with pytest.raises(AssertionError, match=f"and {differ}"):
        check_custom_rule(with_jvp(1.5), X)
    with pytest.raises(AssertionError, match=r"vmap\(f\) over tensor 1 \(dim 0\) and the stacked"):
        check_custom_rule(with_vmap(2.0), torch.rand(2, 3), X)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ("backward", "reverse mode, .* and central differences"),
        ("jvp", "forward mode, .* and central differences"),
        ("vmap", r"vmap\(f\) over tensor 0 \(dim 0\) and the stacked loop"),
    ],
)
def test_wrong_rules_of_functions_are_named(
    wrong: str, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cubed, "wrong", wrong)
    with pytest.raises(AssertionError, match=match):
        check_custom_rule(Cubed.apply, X)


def test_values_that_rules_give_are_checked() -> None:
    f = custom_jvp(lambda x: x * x)
    f.defjvp(lambda primals, tangents: (primals[0] ** 2 + 1, 2 * primals[0] * tangents[0]))
    with pytest.raises(AssertionError, match="the value that the jvp rule returns"):
        check_custom_rule(f, X)
    g = custom_vjp(lambda x: x * x)
    g.defvjp(lambda x: (x * x + 1, x), lambda x, ct: (2 * x * ct,))
    with pytest.raises(AssertionError, match="the value under reverse mode and the function"):
        check_custom_rule(g, X)


@pytest.mark.parametrize("wrong", ["first", "second", "both", "type"])
def test_a_batching_rule_that_is_wrong_for_some_arguments(wrong: str) -> None:
    f = custom_vmap(lambda a, x: a @ x)

    @f.def_vmap
    def rule(axis_size: int, in_batched: Any, a: Tensor, x: Tensor) -> Any:
        if all(in_batched):
            out, kind = (a @ x[..., None]).squeeze(-1), "both"
        elif in_batched[0]:
            out, kind = a @ x, "first"
        else:
            out, kind = x @ a.T, "second"
        out = out.float() if wrong == "type" else out
        return out + (kind == wrong), True

    over = {"first": "tensor 0 ", "second": "tensor 1 ", "both": "tensors 0 ", "type": "tensors"}
    with pytest.raises(AssertionError, match=rf"vmap\(f\) over {over[wrong]}"):
        check_custom_rule(f, torch.rand(2, 3), X)


def test_complex_rules() -> None:
    z = torch.tensor([0.5 + 1j, 2 - 1j])

    def squared(conjugated: bool) -> Any:
        f = custom_vjp(lambda x: x * x)
        f.defvjp(lambda x: (x * x, x), lambda x, ct: (2 * (x.conj() if conjugated else x) * ct,))
        return f

    check_custom_rule(squared(True), z)
    with pytest.raises(AssertionError, match="reverse mode"):
        check_custom_rule(squared(False), z)
    size = custom_jvp(torch.abs)
    size.defjvp(lambda p, t: (p[0].abs(), (p[0].conj() * t[0]).real / p[0].abs()))
    check_custom_rule(size, z)


def test_a_derivative_that_can_not_be_differentiated_again() -> None:
    f = custom_vjp(lambda x: x**3)
    f.defvjp(lambda x: (x**3, (3 * x**2).detach()), lambda slope, ct: (slope * ct,))
    check_custom_rule(f, X)
    with pytest.raises(AssertionError, match="of the second order: "):
        check_custom_rule(f, X, order=2)
    check_custom_rule(with_vjp(1.0), X, X.cos(), order=2)


Y = torch.tensor([1.5, 0.3, -0.7])


def product(bwd: Any) -> Any:
    f = custom_vjp(lambda x, y: x * y)
    f.defvjp(lambda x, y: (x * y, (x, y)), bwd)
    return f


def sine(rule: Any) -> Any:
    f = custom_jvp(lambda x: x.sin())
    f.defjvp(rule)
    return f


def twice(rule: Any) -> Any:
    f = custom_vmap(lambda x: 2 * x)
    f.def_vmap(rule)
    return f


REVERSE = "reverse mode, <vjp.*and central differences differ.*Expected .* but got"
WRONG: dict[str, tuple[Any, tuple[Tensor, ...], str]] = {
    "a sign": (product(lambda r, ct: (ct * r[1], -ct * r[0])), (X, Y), REVERSE),
    "no sum": (product(lambda r, ct: ((ct * r[1])[0], ct * r[0])), (X[0], Y), REVERSE),
    "None for what is not zero": (product(lambda r, ct: (ct * r[1], None)), (X, Y), REVERSE),
    "exchanged": (product(lambda r, ct: (ct * r[0], ct * r[1])), (X, Y), REVERSE),
    "another shape": (
        product(lambda r, ct: (ct * r[1], ct * r[0])), (X[0], Y),
        r"A rule does not return .* argument x: expected .*shape \(\), got .* shape \(3,\)",
    ),
    "another type": (
        product(lambda r, ct: (ct * r[1].double(), ct * r[0])), (X, Y),
        r"A rule does not return .* argument x: expected torch.float32 .* got torch.float64",
    ),
    "a term too much": (
        sine(lambda p, t: (p[0].sin(), p[0].cos() * t[0] + 1)), (X,),
        "forward mode, jvp.* and central differences differ.*difference",
    ),
    "not linear": (
        sine(lambda p, t: (p[0].sin(), p[0].cos() * t[0].abs())), (X,), "and central differences",
    ),
    "right for three examples": (
        twice(lambda size, batched, x: ((2 if size == 3 else 3) * x, True)), (X[:2],),
        r"for a batch of 1, vmap\(f\) over tensor 0 .* the stacked loop differ",
    ),
    "a dim that is as long as the batch": (
        twice(lambda size, batched, x: (2 * x if x.shape[1] == size else 3 * x, True)), (X,),
        "vmap.f. over tensor 0 .* the stacked loop differ",
    ),
    "examples mixed up": (
        twice(lambda size, batched, x: (2 * x.flip(0), True)), (X,), "the stacked loop differ",
    ),
    "said not to be batched": (
        twice(lambda size, batched, x: (2 * x[0], False)), (X,), "the stacked loop differ",
    ),
    "an error": (
        twice(lambda size, batched, x: (2 * x.view(3, 3), True)), (X,),
        "the stacked loop: of 4 examples the loop runs, and vmap raises RuntimeError: shape",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_kinds_of_wrong_rules(kind: str) -> None:
    rule, args, match = WRONG[kind]
    with pytest.raises(AssertionError, match=f"(?s){match}"):
        check_custom_rule(rule, *args)


def test_kinds_of_right_rules() -> None:
    check_custom_rule(product(lambda r, ct: (ct * r[1], ct * r[0])), X, Y, order=2)
    check_custom_rule(product(lambda r, ct: ((ct * r[1]).sum(), ct * r[0])), X[0], Y, order=2)
    check_custom_rule(sine(lambda p, t: (p[0].sin(), p[0].cos() * t[0])), X, order=2)
    check_custom_rule(twice(lambda size, batched, x: (2 * x, batched[0])), X, order=2)
    check_custom_rule(custom_gradient(lambda x: (x**2, lambda ct: 2 * ct * x)), X, order=2)
    check_custom_rule(sequential_vmap(lambda x, y: (x * y).sum()), X, Y, order=2)
    converted, closed = closure_convert(lambda x: x * Y, X)
    check_custom_rule(converted, X, *closed)
    same = custom_vjp(lambda x: x)
    same.defvjp(lambda x: (x, None), lambda _, ct: (ct,))
    check_custom_rule(same, X, order=2)
