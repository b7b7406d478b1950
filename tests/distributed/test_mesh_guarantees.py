"""Programs prove that values are equal on all ranks: guarantees of out_specs, local sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tsfunc
from tests.distributed.checks import Check, Checks, mesh_of
from tsfunc import P, VirtualMesh, shard_map
from tsfunc.bridge.mesh.mesh_operators import MAP
from tsfunc.bridge.mesh.meshes import split_check
from tsfunc.errors import MeshError
from tsfunc.program.passes.effects import every_node

close = torch.testing.assert_close
Body = Callable[[Tensor], Any]


def psum(x: Tensor) -> Tensor:
    return tsfunc.psum(x, "i")


def steps(total: Tensor, x: Tensor) -> Tensor:
    return tsfunc.fori_loop(0, 3, lambda _, c: c + psum(x.sum() * c), total)


def grown(x: Tensor) -> Any:
    """A loop that all ranks end after the same step."""
    return tsfunc.while_loop(lambda c: c.sum() < 9, lambda c: c + psum(x).abs() + 1, psum(x))


def parts_in_the_second_step(x: Tensor) -> Any:
    total = psum(x.sum())

    def step(carry: Any, _: Tensor) -> Any:
        return (psum(x.sum()) + carry[1] * 0.5, x.sum()), None

    return tsfunc.scan(step, (total, total), torch.zeros(3))[0][0]


def results_of_steps(x: Tensor) -> Any:
    return tsfunc.scan(lambda c, t: (c, c + t), psum(x.sum()), x)[1]


def ended_by_a_part(x: Tensor) -> Any:
    bound = x.sum()
    return tsfunc.while_loop(lambda c: c < bound, lambda c: c + 1, torch.zeros(()))


# Bodies whose value differs between ranks, by the kind of step that causes it.
BROKEN: dict[str, Body] = {
    "a part": lambda x: x.sum(),
    "the index of a rank": lambda x: psum(x.sum()) + tsfunc.axis_index("i"),
    "a permutation": lambda x: tsfunc.ppermute(psum(x), "i", [(0, 1)]),
    "a choice by a part": lambda x: tsfunc.cond(x.sum() > 9, torch.sin, torch.cos, psum(x)),
    "a choice of sums by a part": lambda x: tsfunc.cond(
        x.sum() > 0, psum, lambda x: psum(-x), x
    ),
    "a branch with a part": lambda x: tsfunc.cond(psum(x.sum()) > 0, torch.sin, torch.cos, x),
    "a carry that gets a part": parts_in_the_second_step,
    "results of steps": results_of_steps,
    "a loop that a part ends": ended_by_a_part,
    "prefixes": lambda x: tsfunc.associative_scan(lambda a, b: a + b, x)[-1],
    "a checkpoint": lambda x: tsfunc.checkpoint(lambda x: psum(x) + x)(x),
    "a loop in a vmap": lambda x: tsfunc.vmap(lambda v: steps(psum(v), v) + v)(x),
}  # fmt: skip

# Bodies that satisfy the guarantee.
KEPT: dict[str, Body] = {
    "a gathered value": lambda x: tsfunc.all_gather(x, "i")[0],
    "the largest": lambda x: tsfunc.pmax(x, "i"),
    "a loop": lambda x: steps(psum(x.sum()), x),
    "a loop with a condition": grown,
    "results of equal steps": lambda x: tsfunc.scan(
        lambda c, t: (c.sin() + psum(t), c * t), psum(x.sum()), psum(x)
    )[1],
    "a loop in a vmap": lambda x: tsfunc.vmap(lambda v: steps(psum(v), v))(x),
    "a choice by a sum": lambda x: tsfunc.cond(
        psum(x.sum()) > 0, psum, lambda x: psum(x.cos()), x
    ),
    "a checkpoint": lambda x: tsfunc.checkpoint(lambda x: psum(x.sin()))(x),
    "prefixes": lambda x: tsfunc.associative_scan(lambda a, b: a * b, psum(x)),
}  # fmt: skip


@tsfunc.custom_vjp
def tripled(x: Tensor) -> Tensor:
    return psum(x.sin())


tripled.defvjp(lambda x: (psum(x.sin()), x), lambda x, ct: (3 * psum(ct) * x.cos(),))
# Bodies for which programs can neither prove nor refuse the guarantee.
OFFSET = torch.ones(())
UNKNOWN: dict[str, Body] = {
    "a captured tensor": lambda x: psum(x.sum()) * OFFSET,
    "a write": lambda x: torch.zeros(2).copy_(psum(x)),
    "a function with a rule": lambda x: tripled(x),
}


def checks_of_guarantees(program: Any) -> set[str]:
    """Results that are guaranteed to be equal are checked."""
    return {
        split_check(str(node.args[4]))[1]
        for node in every_node(program.graph)
        if node.target is MAP and node.args[1] == "leave"
    }


def refused(f: Body) -> Check:
    def run(rank: int, size: int) -> None:
        mesh, x = mesh_of(("i",), (size,)), torch.arange(4.0)

        def mapped(check: Any) -> Any:
            return tsfunc.specialize(shard_map(f, mesh, P("i"), P(), check=check))

        with pytest.raises(
            MeshError, match=r"equal on all ranks along 'i'.* at \S+:\d+, in [a-z<]"
        ):
            mapped("programs")(x)
        mapped(None)(x)  # without a check, the user is responsible for the guarantee
        assert checks_of_guarantees(mapped("values").lower(x)) == {"values"}

    return run


def accepted(f: Body, check: str) -> Check:
    def run(rank: int, size: int) -> None:
        mesh, x = mesh_of(("i",), (size,)), torch.arange(4.0)

        def loss(over: Any) -> Body:
            return lambda x: shard_map(f, over, P("i"), P())(x).square().sum()

        virtual = VirtualMesh(i=size)
        want = shard_map(f, virtual, P("i"), P())(x)
        over = shard_map(f, mesh, P("i"), P())
        close(tsfunc.specialize(over)(x), want)
        close(tsfunc.specialize(tsfunc.grad(loss(mesh)))(x), tsfunc.grad(loss(virtual))(x))
        close(tsfunc.grad(lambda x: tsfunc.specialize(over)(x).square().sum())(x),
              tsfunc.grad(loss(virtual))(x))  # fmt: skip
        checked = tsfunc.specialize(shard_map(f, mesh, P("i"), P(), check="values"))
        close(checked(x), want)
        assert checks_of_guarantees(checked.lower(x)) == {check}

    return run


CHECKS = Checks()
CHECKS.update((f"refused: {name}", refused(f)) for name, f in BROKEN.items())
CHECKS.update((f"proved: {name}", accepted(f, "unchecked")) for name, f in KEPT.items())
CHECKS.update((f"compared: {name}", accepted(f, "values")) for name, f in UNKNOWN.items())


@CHECKS.check
def guarantees_of_a_body_in_a_loop(rank: int, size: int) -> None:
    """The analysis follows a loop around shard_map, as in a training script."""
    mesh, x = mesh_of(("i",), (size,)), torch.arange(4.0)

    def trained(step: Any, over: Any, check: Any = "programs") -> Body:
        mapped = shard_map(step, over, (P(), P("i")), P(), check=check)
        return lambda x: tsfunc.scan(lambda w, _: (mapped(w, x), None), x[0], torch.zeros(2))[0]

    good = lambda w, x: w - psum((w * x).sin().sum())  # noqa: E731
    bad = lambda w, x: w - (w * x).sin().sum()  # noqa: E731
    close(tsfunc.specialize(trained(good, mesh))(x), trained(good, VirtualMesh(i=size))(x))
    assert checks_of_guarantees(tsfunc.specialize(trained(good, mesh, "values")).lower(x)) == {
        "unchecked"
    }
    with pytest.raises(MeshError, match=r"equal on all ranks along 'i'.*mesh_guarantees.py:\d"):
        tsfunc.specialize(trained(bad, mesh))(x)


@CHECKS.check
def loops_over_equal_values_are_equal(rank: int, size: int) -> None:
    """A sum after a loop over equal values needs no collective."""

    def body(w: Tensor) -> Tensor:
        return psum(tsfunc.fori_loop(0, 2, lambda _, w: w.sin() + psum(w), w))

    f = shard_map(body, mesh_of(("i",), (size,)), P(), P())
    program = tsfunc.specialize(f)
    close(program(torch.ones(3)), f(torch.ones(3)))
    (use,) = program.properties().collectives
    assert use.times == 2  # the sums of the loop's steps


@CHECKS.check
def pullbacks_of_gathered_values_are_parts(rank: int, size: int) -> None:
    """In a loop's pullback each rank has its part of the cotangent; sums of parts are parts."""

    def body(w: Tensor) -> Any:
        weights = torch.arange(1.0, size + 1)

        def loss(w: Tensor) -> Any:
            def step(carry: Tensor, _: Tensor) -> Any:
                return carry * 0.5 + (tsfunc.all_gather(carry, "i") * weights).sum() * 0.1, None

            return tsfunc.scan(step, w, torch.zeros(2))[0]

        own = tsfunc.grad(loss)(w)
        return psum(own), own[None]

    w, specs = torch.tensor(2.0), (P(), P("i"))
    want = shard_map(body, VirtualMesh(i=size), P(), specs)(w)
    close(tsfunc.specialize(shard_map(body, mesh_of(("i",), (size,)), P(), specs))(w), want)


test_on_two_ranks = CHECKS.tests()
