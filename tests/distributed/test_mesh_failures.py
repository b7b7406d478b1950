"""Ranks that disagree raise an error with a line for each rank, and return no numbers."""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import tsfunc
from tests.distributed.checks import Check, Checks
from tsfunc import P, shard_map
from tsfunc.bridge.mesh.meshes import registered_mesh
from tsfunc.errors import MeshError, RanksDisagree
from tsfunc.testing import spawn

Body = Callable[[Tensor, int], Any]


def other_shape(x: Tensor, rank: int) -> Any:
    return tsfunc.psum(torch.ones(3 + rank), "i")


def other_type(x: Tensor, rank: int) -> Any:
    return tsfunc.psum(x.double() if rank else x, "i")


def other_kind(x: Tensor, rank: int) -> Any:
    return tsfunc.psum(x, "i") if rank else tsfunc.all_gather(x, "i").sum(0)


def swapped(x: Tensor, rank: int) -> Any:
    if rank:
        first = tsfunc.psum(x, "i")
        return first * tsfunc.psum(x.sin(), "i")
    second = tsfunc.psum(x.sin(), "i")
    return second * tsfunc.psum(x, "i")


def swapped_in_a_line(x: Tensor, rank: int) -> Any:
    return tsfunc.psum(x, "i") - tsfunc.psum(-x, "i") if rank else tsfunc.psum(-x, "i") - x


def other_lanes(x: Tensor, rank: int) -> Any:
    rows = x * torch.ones(2 + rank, 1)
    return tsfunc.vmap(lambda v: tsfunc.psum(v, "i"))(rows).sum(0)


def other_transposes(x: Tensor, rank: int) -> Any:
    leaf = x.clone().requires_grad_()
    first = tsfunc.psum(leaf.sin(), "i")
    second = tsfunc.psum(leaf.cos(), "i")
    (first if rank else second).sum().backward()
    return leaf.grad


def unused(x: Tensor, rank: int) -> Any:
    if rank:
        tsfunc.psum(x, "i")
    return x


def raising(x: Tensor, rank: int) -> Any:
    if rank:
        raise ArithmeticError("the second rank can't")
    return tsfunc.psum(x, "i")


BODIES: dict[str, tuple[Body, str]] = {
    "other shapes": (other_shape, r"(?s)rank 0: sum.*\(3,\).*rank 1: sum.*\(4,\)"),
    "other types": (other_type, "(?s)rank 0: sum.*float32.*rank 1: sum.*float64"),
    "other kinds": (other_kind, "(?s)rank 0: gather.*rank 1: sum"),
    "swapped calls": (swapped, "(?s)rank 0: sum.*rank 1: sum"),
    "other lanes": (other_lanes, r"(?s)rank 0: sum.*\(2, 2\).*rank 1: sum.*\(3, 2\)"),
    "transposes of other calls": (
        other_transposes,
        "(?s)rank 0: sum.* as the transpose of .*rank 1: sum.* as the transpose",
    ),
    "a call that others do not make": (unused, "(?s)rank 0: tile.*rank 1: sum"),
    "a rank that raises": (raising, "(?s)rank 0: sum.*rank 1: raised ArithmeticError"),
}

if sys.version_info >= (3, 11):  # older releases have no columns of calls
    BODIES["swapped calls in a line"] = swapped_in_a_line, r"(?s)rank 0: sum.*rank 1: sum"


def refused(body: Body, pattern: str) -> Check:
    def run(rank: int, size: int) -> None:
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("i",))
        f = shard_map(lambda x: body(x, rank), mesh, P("i"), P("i"), check="calls")
        started = time.monotonic()
        if body is raising and rank == 1:
            with pytest.raises(ArithmeticError):
                f(torch.ones(4))
        else:
            with pytest.raises(RanksDisagree, match=pattern):
                f(torch.ones(4))
        assert time.monotonic() - started < 20  # less than the 30 seconds of the group's timeout
        # The group still works.
        again = shard_map(lambda x: tsfunc.psum(x, "i"), mesh, P("i"), P())
        torch.testing.assert_close(again(torch.arange(2.0)), torch.tensor([1.0]))

    return run


def other_programs(rank: int, size: int) -> None:
    """Ranks that run different programs detect it at the first exchange of the program."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("i",))
    bodies = [lambda x: tsfunc.psum(x.sin(), "i"), lambda x: tsfunc.psum(x.cos(), "i")]
    shapes = [lambda x: x * tsfunc.psum(torch.ones(2), "i"), lambda x: tsfunc.psum(x[:1], "i")]
    lanes = [functools.partial(other_lanes, rank=each) for each in range(2)]
    pairs: tuple[Sequence[Callable[..., Any]], ...] = (bodies, shapes, lanes)
    for both, backend in itertools.product(pairs, ("python", "aot_eager")):
        mapped = shard_map(both[rank], mesh, P("i"), P("i"))
        program = tsfunc.specialize(mapped, backend=backend)
        with pytest.raises(RanksDisagree, match=r"(?s)rank 0: program .*rank 1: program "):
            program(torch.ones(4))


def other_values(rank: int, size: int) -> None:
    """Arguments and results that specs guarantee to be equal are compared."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("i",))
    x = torch.arange(4.0)
    own = shard_map(lambda x: x.sum(), mesh, P("i"), P(), check="values")
    for f in (own, tsfunc.specialize(own)):
        with pytest.raises(RanksDisagree, match=r"(?s)rank 0: a result whose spec guarantees"):
            f(x)
    total = shard_map(lambda x: tsfunc.psum(x.sum(), "i"), mesh, P("i"), P(), check="values")
    for f in (total, tsfunc.specialize(total)):
        torch.testing.assert_close(f(x), x.sum())
        for kind in (x.bool(), x + 1j * x, x.to(torch.int8), x[:0]):
            torch.testing.assert_close(f(kind), kind.sum())
        with pytest.raises(RanksDisagree, match=r"(?s)rank 0: an argument whose spec guarantees"):
            f(x + rank)


def equal_errors(rank: int, size: int) -> None:
    """An error that all ranks raise is raised unchanged."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("i",))

    def body(x: Tensor) -> Tensor:
        raise ArithmeticError("none can")

    with pytest.raises(ArithmeticError, match="none can"):
        shard_map(body, mesh, P("i"), P("i"))(torch.ones(4))


def waiting_in_a_program(rank: int, size: int) -> None:
    """A rank that raises ends ranks that wait in a program whose start was agreed on."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("i",))
    total = tsfunc.specialize(lambda x: tsfunc.psum(x.sin(), "i"))

    def body(x: Tensor, fails: bool) -> Tensor:
        if fails:
            raise ArithmeticError(f"rank {rank} can't")
        return total(x)

    f = shard_map(body, mesh, (P("i"), P()), P())
    x = torch.arange(4.0)
    torch.testing.assert_close(f(x, False), x.sin().view(size, -1).sum(0))
    if rank == 1:
        with pytest.raises(ArithmeticError, match="rank 1 can't"):
            f(x, True)
    else:
        told = "rank 1: raised ArithmeticError: rank 1 can't at .*test_mesh_failures"
        with pytest.raises(RanksDisagree, match=rf"(?s){told}.*rank 0: waited for the others at"):
            f(x, False)


def waiting_unchecked(rank: int, size: int) -> None:
    """A program that raises on one rank ends the others, and so does a body without checks."""
    x, good = torch.arange(4.0), torch.zeros(1, dtype=torch.long)

    def over(axis: str, check: Any) -> Callable[..., Any]:
        def body(x: Tensor, at: Tensor) -> Any:
            # An index out of range raises when the operator runs.
            return tsfunc.psum(x.index_select(0, at).sum(), axis)

        # The collectives of the first case do not end: each case has its own group.
        return shard_map(body, {axis: dist.new_group()}, (P(axis), P()), P(), check=check)

    for f in (over("j", None), tsfunc.specialize(over("k", "programs"))):
        if rank == 1:
            with pytest.raises((IndexError, RuntimeError), match="out of range"):
                f(x, good + 100)
        else:
            with pytest.raises(RanksDisagree, match=r"(?s)rank 1: raised .*out of range"):
                f(x, good)


def waiting_for_a_trace(rank: int, size: int) -> None:
    """A rank that raises while it traces its program ends ranks that have theirs."""

    def body(x: Tensor) -> Any:
        if rank == 1:
            raise ArithmeticError("rank 1 can't")
        return tsfunc.scan(lambda c, t: (c + tsfunc.psum(t, "t"), None), x[0], x)[0]

    for backend in ("python", "aot_eager"):
        mapped = shard_map(body, {"t": dist.new_group()}, P(), P())
        started = time.monotonic()
        if rank == 1:
            with pytest.raises(ArithmeticError, match="rank 1 can't"):
                tsfunc.specialize(mapped, backend=backend)(torch.arange(4.0))
        else:
            with pytest.raises(RanksDisagree, match="rank 1: raised ArithmeticError: rank 1 can't"):
                tsfunc.specialize(mapped, backend=backend)(torch.arange(4.0))
        assert time.monotonic() - started < 20


def a_rank_that_recovers(rank: int, size: int) -> None:
    """A rank that handles its error, and then joins the others, does not disturb them."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("i",))

    def body(x: Tensor) -> Tensor:
        if rank == 1 and x.dim() == 2:
            raise ArithmeticError("try again")
        return tsfunc.psum(x.sum(), "i")

    f = shard_map(body, mesh, P("i"), P(), check=None)
    x = torch.arange(4.0)
    if rank == 1:
        with pytest.raises(ArithmeticError):
            f(x[:, None])
        torch.testing.assert_close(f(x), x.sum())
    else:
        torch.testing.assert_close(f(x), x.sum())
    if rank == 0:
        time.sleep(2.5)  # longer than a rank waits before it reads reports
    torch.testing.assert_close(f(x), x.sum())


def a_destroyed_group(rank: int, size: int) -> None:
    """A destroyed group is freed, with its threads, and its mesh refuses to exchange values."""
    group = dist.new_group()
    reference, mesh = weakref.ref(group), registered_mesh({"mine": group})
    summed = shard_map(lambda x: tsfunc.psum(x, "mine"), {"mine": group}, P("mine"), P())
    assert summed(torch.ones(size)).tolist() == [size]
    dist.destroy_process_group(group)
    del group, summed
    gc.collect()
    assert reference() is None
    with pytest.raises(MeshError, match="'mine' whose group has been destroyed"):
        mesh.group("mine")


CHECKS = Checks((name, refused(*case)) for name, case in BODIES.items())
CHECKS["an error on all ranks"] = equal_errors
CHECKS["other programs"] = other_programs
CHECKS["a rank that recovers"] = a_rank_that_recovers
CHECKS["other values"] = other_values
CHECKS["a destroyed group"] = a_destroyed_group


# Ranks left in a wait make their process group unusable, so these checks are the last.
CHECKS["waiting without checks"] = waiting_unchecked
CHECKS["waiting for a trace"] = waiting_for_a_trace
CHECKS["waiting in a program"] = waiting_in_a_program


def summed(rank: int, size: int) -> float:
    x = torch.tensor(float(rank), dtype=torch.float64)
    dist.all_reduce(x)
    return x.item()


def test_spawn_starts_new_processes_after_a_rank_has_left_a_collective() -> None:
    """The group still has parts of that collective, which would disturb the next one."""
    spawn(waiting_in_a_program, 2)
    assert spawn(summed, 2) == [1.0, 1.0]


test_on_two_ranks = CHECKS.tests()
