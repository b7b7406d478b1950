"""Rules that read which inputs are perturbed, and their placeholders for zeros."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tsfunc import (
    checkpoint,
    custom_jvp,
    custom_vjp,
    errors,
    grad,
    hessian,
    jvp,
    specialize,
    vjp,
    vmap,
)
from tsfunc.transforms.custom_derivatives import (
    CustomVJPPrimal,
    SymbolicZero,
    custom_vjp_primal_tree_values,
    zero_from_primal,
)

A, B = torch.tensor(2.0), torch.tensor([3.0, 4.0])


def run_plain(f: Any, *args: Any) -> Any:
    return f(*args)


def run_in_vmap(f: Any, *args: Any) -> Any:
    found = vmap(f)(*[x[None] for x in args])
    return tuple(x[0] for x in found) if isinstance(found, tuple) else found[0]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("run", [run_plain, run_in_vmap])
def test_a_jvp_rule_sees_which_tangents_are_zero(run: Any, compiled: bool) -> None:
    seen: list[Any] = []
    f = custom_jvp(lambda a, b, c: (a + c, b * c))

    def rule(primals: Any, tangents: Any) -> Any:
        seen[:] = tangents
        return f(*primals), (tangents[2], primals[1] * tangents[2])

    f.defjvp(rule, symbolic_zeros=True)

    def along(c: torch.Tensor) -> Any:
        return jvp(lambda c: run(f, A, B, c), (c,), (torch.ones(()),))[1]

    found = (specialize(along) if compiled else along)(A)
    assert found[0] == 1 and found[1].equal(B)
    assert seen[:2] == [SymbolicZero(A.shape, A.dtype), SymbolicZero(B.shape, B.dtype)]
    assert seen[1].ndim == 1 and isinstance(seen[2], torch.Tensor)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("run", [run_plain, run_in_vmap])
def test_a_vjp_rule_sees_perturbed_inputs_and_unused_results(run: Any, compiled: bool) -> None:
    seen: list[Any] = []
    f = custom_vjp(lambda a, b: (a, a * b))

    def fwd(a: Any, b: Any) -> Any:
        seen[:] = [a.perturbed, b.perturbed]
        assert isinstance(a, CustomVJPPrimal)
        return f(a.value, b.value), a.value

    def bwd(a: Any, cts: Any) -> Any:
        seen.extend(type(ct) is SymbolicZero for ct in cts)
        return None, a * cts[1]

    f.defvjp(fwd, bwd, symbolic_zeros=True)
    slope: Any = grad(lambda b: run(f, A, b)[1].sum())
    assert (specialize(slope) if compiled else slope)(B).tolist() == [2.0, 2.0]
    assert seen == [False, True, True, False]


def test_rules_may_return_symbolic_zeros() -> None:
    f = custom_jvp(lambda x, y: x * y)
    f.defjvp(lambda p, t: (f(*p), t[1]), symbolic_zeros=True)
    assert grad(f)(A, A) == 0 and grad(f, 1)(A, A) == 1
    assert vmap(grad(f))(B, B).tolist() == [0.0, 0.0]
    assert jvp(lambda x: f(x, A), (A,), (A,))[1] == 0
    g = custom_vjp(lambda x, y: x * y)
    g.defvjp(lambda x, y: (g(x, y), y), lambda y, ct: (y * ct, SymbolicZero(y.shape, y.dtype)))
    assert [float(x) for x in grad(g, (0, 1))(A, A)] == [2.0, 0.0]
    g.defvjp(lambda x, y: (g(x, y), y), lambda y, ct: (y * ct, SymbolicZero(B.shape, y.dtype)))
    with pytest.raises(errors.CustomRuleError, match=r"argument y: .* zero, return None"):
        grad(g, (0, 1))(A, A)


def test_the_rule_depends_on_the_perturbed_inputs() -> None:
    product = custom_jvp(lambda x, y: x * y)

    def rule(primals: Any, tangents: Any) -> Any:
        (x, y), (dx, dy) = primals, tangents
        out = zero_from_primal(x)
        out = out if type(dx) is SymbolicZero else out + dx * y
        return product(x, y), out if type(dy) is SymbolicZero else out + x * dy

    product.defjvp(rule, symbolic_zeros=True)
    assert grad(product)(A, 3 * A) == 6 and grad(product, 1)(A, 3 * A) == 2
    assert hessian(lambda x: product(x[0], x[1]))(B).tolist() == [[0.0, 1.0], [1.0, 0.0]]
    assert grad(checkpoint(lambda x: product(x, x)))(A) == 4


def test_numbers_and_none_among_arguments_and_results() -> None:
    f = custom_jvp(lambda x, n, nothing: (x * n, n, None))
    f.defjvp(lambda p, t: (f(*p), (t[0] * p[1] + p[0] * t[1], 0.0, t[2])))
    assert grad(lambda x: f(x, 3.0, None)[0])(A) == 3
    assert vmap(grad(lambda x: f(x, 3, None)[0]))(B).tolist() == [3.0, 3.0]
    seen: list[Any] = []
    g = custom_vjp(lambda x, n: (x * n, n))

    def bwd(n: Any, cts: Any) -> Any:
        seen.append(cts[1])
        return n * cts[0], 1

    g.defvjp(lambda x, n: (g(x, n), n), bwd)
    assert grad(lambda x: g(x, 3.0)[0])(A) == 3
    assert grad(lambda x: g(x, torch.tensor(3))[0])(A) == 3
    assert seen[0] == 0.0 and seen[1].dtype is torch.int64
    h = custom_vjp(lambda x, n, nothing: x * n)
    h.defvjp(
        lambda x, n, nothing: (x.value * n.value, (n.value, nothing)),
        lambda saved, ct: (saved[0] * ct, None, saved[1]),
        symbolic_zeros=True,
    )
    assert grad(lambda x: h(x, 3.0, None))(A) == 3


def test_none_stands_for_zeros_of_a_part() -> None:
    f = custom_vjp(lambda x: x[0])
    for zeros in (None, (None, None), (None, {"a": None})):
        f.defvjp(lambda x: (f(x), None), lambda _, ct, zeros=zeros: ((ct, zeros),))
        found = grad(f)((A, (A, {"a": B})))
        assert found[0] == 1 and found[1][0] == 0 and found[1][1]["a"].tolist() == [0.0, 0.0]
    f.defvjp(lambda x: (f(x), None), lambda _, ct: ((ct, ct),))
    with pytest.raises(errors.CustomRuleError, match="argument x: expected the structure"):
        grad(f)((A, (A, {"a": B})))


def test_values_of_primals() -> None:
    tree = {"a": CustomVJPPrimal(1, True), "b": [CustomVJPPrimal(B, False), None]}
    found = custom_vjp_primal_tree_values(tree)
    assert found["a"] == 1 and found["b"][0] is B and found["b"][1] is None
    assert zero_from_primal(2.5) == 0.0 and zero_from_primal(None) is None
    assert zero_from_primal(1.0, symbolic_zeros=True) == SymbolicZero(torch.Size(), torch.float32)


def test_results_of_other_types_than_the_functions_are_errors() -> None:
    f = custom_jvp(lambda x: x * 2)
    f.defjvp(lambda p, t: (p[0].sum(), t[0]))
    with pytest.raises(errors.CustomRuleError, match="the result of the function: exp"):
        jvp(f, (B,), (B,))
    g = custom_vjp(lambda x: x * 2)
    g.defvjp(lambda x: (torch.stack([x, x]), None), lambda _, ct: (ct[0],))
    program = specialize(lambda x: g(x))
    with pytest.raises(errors.CustomRuleError, match="and its rule return results of other"):
        vjp(program, B)
