"""Unused results of the bodies of control flow are removed from programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tsfunc import (
    MetaTensorType,
    associative_scan,
    cond,
    fori_loop,
    grad,
    make_graph,
    scan,
    specialize,
    switch,
    vmap,
    while_loop,
)
from tsfunc.bridge.control.control_flow import ControlFlow

X = torch.tensor([0.5, -1.5, 2.0])


def _calls(f: Callable[..., Any], *args: Any) -> list[tuple[ControlFlow, int]]:
    """Return the operators of control flow in a function's program, with operand counts."""
    graph = make_graph(f)(*args).graph
    return [(node.target, len(node.args)) for node in graph.nodes
            if isinstance(node.target, ControlFlow)]  # fmt: skip


def _sizes(op: ControlFlow) -> list[tuple[int, int]]:
    """Return the number of arguments and results of each body."""
    return [(len(body.inputs), len(next(iter(reversed(body.graph.nodes))).args[0]))
            for body in op.bodies]  # fmt: skip


def _unused_of_branches(p: torch.Tensor, x: torch.Tensor) -> Any:
    unused = x.exp()
    out = cond(p, lambda y, z: (y.sin(), z, y + 1), lambda y, z: (y.cos(), z * 2, y), x, unused)
    return out[0]


def _unused_of_switch(p: torch.Tensor, x: torch.Tensor) -> Any:
    y = x + 1
    return switch(p.long(), [lambda: (x, y), lambda: (-x, y), lambda: (x * 2, y)])[0]


def _unused_of_loop(p: torch.Tensor, x: torch.Tensor) -> Any:
    # Nothing but the second itself uses it; the condition uses the third.
    def body(carry: Any) -> Any:
        a, b, n = carry
        return a * 2, b.sin() + a, n + 1

    return while_loop(lambda c: c[2] < 3, body, (x, x.exp(), torch.tensor(0)))[0]


def _unused_of_scan(p: torch.Tensor, x: torch.Tensor) -> Any:
    def step(carry: Any, row: Any) -> Any:
        total, count, spare = carry
        return (total + row[0], count + 1, spare * row[1]), (count, total * 2, row[1])

    return scan(step, (torch.zeros(()), torch.tensor(0), torch.ones(())), (x, x.exp()))[0][0]


def _unused_of_associative_scan(p: torch.Tensor, x: torch.Tensor) -> Any:
    def combine(a: Any, b: Any) -> Any:
        return {"s": a["s"] + b["s"], "p": a["p"] * b["p"], "m": a["m"] + a["s"] * b["m"]}

    return associative_scan(combine, {"s": x, "p": x + 1, "m": x * 2})["s"]


@pytest.mark.parametrize(
    ("f", "operands", "sizes"),
    [
        (_unused_of_branches, 2, [(1, 1), (1, 1)]),
        (_unused_of_switch, 2, [(1, 1), (1, 1), (1, 1)]),
        (_unused_of_loop, 2, [(1, 1), (2, 2)]),
        (_unused_of_scan, 2, [(2, 1)]),
        (_unused_of_associative_scan, 1, [(2, 1)]),
    ],
)
def test_unused_nodes_are_removed(f: Any, operands: int, sizes: list[tuple[int, int]]) -> None:
    p = torch.tensor(True)
    ((op, count),) = _calls(f, p, X)
    assert count == operands
    assert _sizes(op) == sizes
    program = make_graph(f)(p, X)
    assert not any("exp" in node.name for node in program.graph.nodes)  # nothing else used it
    torch.testing.assert_close(specialize(f)(p, X), f(p, X))
    torch.testing.assert_close(
        specialize(vmap(f, in_dims=(None, 0)))(p, X.expand(2, 3)), f(p, X).expand(2, *f(p, X).shape)
    )
    gradient = grad(lambda x: f(p, x).sum())
    torch.testing.assert_close(specialize(gradient)(X), gradient(X))


def test_carries_that_a_result_needs_stay() -> None:
    def f(x: torch.Tensor) -> Any:
        return fori_loop(0, 3, lambda i, c: (c[0] + c[1], c[1] + c[2], c[2] * 2, c[3]), (x,) * 4)[0]

    ((op, count),) = _calls(f, X)
    assert (count, _sizes(op)) == (3, [(3, 3)])
    torch.testing.assert_close(specialize(f)(X), f(X))


def test_a_scan_of_fixed_length_goes_along_nothing_that_it_does_not_use() -> None:
    def f(x: torch.Tensor) -> Any:
        return scan(lambda c, row: (c * 2, row), x, X.exp())[0]

    ((op, count),) = _calls(f, X)
    assert (count, _sizes(op)) == (1, [(1, 1)])
    torch.testing.assert_close(specialize(f)(X), X * 8)


def test_the_only_input_with_the_number_of_steps_stays() -> None:
    def f(x: torch.Tensor, rows: torch.Tensor) -> Any:
        return scan(lambda c, row: (c * 2, row), x, rows.exp())[0]

    program = specialize(f, {"rows": MetaTensorType(["n"])})
    for n in 3, 5:
        torch.testing.assert_close(program(X, torch.ones(n)), X * 2**n)
    assert program.cache_info().programs == 1


def test_effects_are_kept_with_their_operands() -> None:
    def f(x: torch.Tensor, seen: torch.Tensor) -> Any:
        def step(carry: Any, row: Any) -> Any:
            seen.add_(row)
            return carry * 2, torch.rand(()) + carry

        return scan(step, x[0], x)[0]

    seen = torch.zeros(())
    ((op, _),) = _calls(f, X, seen)
    names = [node.name for node in op.bodies[0].graph.nodes]
    assert any("add_" in name for name in names) and any("rand" in name for name in names)
    assert _sizes(op) == [(3, 2)]  # the tensor that the body writes into is a part of the carry
    torch.manual_seed(0)
    specialize(f)(X, seen)
    after = torch.rand(())
    assert seen == X.sum()
    torch.manual_seed(0)
    f(X, seen)
    assert torch.rand(()) == after


def test_bodies_inside_of_bodies_are_looked_into_first() -> None:
    def f(p: torch.Tensor, x: torch.Tensor) -> Any:
        def inner(y: Any, z: Any) -> Any:
            return cond(y.sum() > 0, lambda: (y.sin(), z), lambda: (y.cos(), z))

        return cond(p, lambda: inner(x, x.exp())[0], lambda: inner(x, x.tan())[0])

    ((op, count),) = _calls(f, torch.tensor(True), X)
    assert (count, _sizes(op)) == (2, [(1, 1), (1, 1)])
    names = [node.name for body in op.bodies for node in body.graph.nodes]
    assert not any("exp" in name or "tan" in name for name in names)
    assert torch.equal(specialize(f)(torch.tensor(True), X), X.sin())


def _checked_branch(x: torch.Tensor) -> Any:
    def checked() -> Any:
        torch._assert_async(x.sum() < 3)
        return x

    return cond(x.sum() > 0, checked, lambda: x)


def _checked_steps(x: torch.Tensor) -> Any:
    def step(carry: Any, row: torch.Tensor) -> Any:
        torch._assert_async(row < 3)
        return carry, None

    return scan(step, x, x)[0]


@pytest.mark.parametrize("f", [_checked_branch, _checked_steps])
@pytest.mark.parametrize("wrap", [lambda f: f, grad], ids=["plain", "grad"])
def test_assertions_of_bodies_are_used(f: Any, wrap: Any) -> None:
    run = specialize(wrap(lambda x: f(x).sum()))
    run(X)
    with pytest.raises(RuntimeError, match="Expected Tensor with single nonzero value"):
        run(2 * X + 1)
