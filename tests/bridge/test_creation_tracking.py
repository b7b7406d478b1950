"""Which tensors were created inside of a level, whatever the collector does meanwhile."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from tsfunc import vmap
from tsfunc.bridge.tracers.tracer import TracerLevel, current_tracer_level
from tsfunc.bridge.writing.creation_tracking import created_in, take_place
from tsfunc.dispatch.state import active_levels

X = torch.zeros(2)


def here() -> TracerLevel:
    level = current_tracer_level()
    assert level is not None
    return level


def inside(tensor: Tensor, level: TracerLevel) -> bool:
    return created_in(level).get(id(tensor)) is tensor


def nothing() -> None:
    pass


def fill_the_youngest() -> None:
    """More objects than a generation holds, so that Python itself collects."""
    kept: list[list[int]] = [[] for _ in range(5 * gc.get_threshold()[0])]
    del kept


COLLECTIONS = {
    "none": nothing,
    "of the youngest": lambda: gc.collect(0),
    "of all": gc.collect,
    "several": lambda: [gc.collect(i) for i in (0, 1, 0, 2, 0)],
    "by itself": fill_the_youngest,
}


@pytest.mark.parametrize("when", COLLECTIONS)
def test_born_before_and_inside(when: str) -> None:
    collect = COLLECTIONS[when]
    outside = torch.zeros(3)

    def func(x: Tensor) -> Tensor:
        early = torch.zeros(3)
        collect()
        late = outside[1:]
        assert inside(early, here()) and inside(late, here()) and not inside(outside, here())
        collect()
        assert inside(early, here()) and inside(late, here()) and not inside(outside, here())
        return x

    vmap(func)(X)


@pytest.mark.parametrize("when", COLLECTIONS)
def test_each_level_has_its_own(when: str) -> None:
    collect = COLLECTIONS[when]

    def func(x: Tensor) -> Tensor:
        outer, mine = here(), torch.zeros(3)
        collect()

        def inner(y: Tensor) -> Tensor:
            collect()
            its = torch.zeros(3)
            collect()
            assert inside(its, here()) and not inside(mine, here())
            assert inside(its, outer) and inside(mine, outer)
            return y

        return torch.add(vmap(inner)(X), x)

    vmap(func)(X)


def test_what_takes_the_place_of_an_older_one() -> None:
    def func(x: Tensor) -> Tensor:
        outer, mine = here(), torch.zeros(3)

        def inner(y: Tensor) -> Tensor:
            its = torch.zeros(3)
            for old, young in ((mine, torch.zeros(3)), (its, torch.ones(3))):
                take_place(old, young, outer)
                assert inside(young, outer)
                assert inside(young, here()) is inside(old, here())
            assert inside(its, here()) and not inside(mine, here())
            return y

        return torch.add(vmap(inner)(X), x)

    vmap(func)(X)


def test_a_collection_without_levels_forgets() -> None:
    from tsfunc.bridge.writing import creation_tracking

    vmap(lambda x: (gc.collect(), x)[1])(X)
    assert not active_levels
    gc.collect()
    assert not creation_tracking._creations.noted and not creation_tracking._creations.older


def test_the_collector_keeps_objects_in_the_order_of_their_creation() -> None:
    """The assumption of ``creation_tracking``, without which it can tell no write to be inside."""
    gc.collect()
    kept = [torch.zeros(1) for _ in range(50)]
    places = {id(item): i for i, item in enumerate(gc.get_objects(generation=0))}
    order = [places[id(tensor)] for tensor in kept]
    assert order == sorted(order)
    gc.collect(0)
    young = {id(item) for item in gc.get_objects(generation=0)}
    assert not young & {id(tensor) for tensor in kept}


def test_a_collection_in_the_first_call_of_a_process() -> None:
    program = """
import gc, torch, tsfunc
def func(x):
    z = torch.zeros(3, 2)
    z[..., 1].fill_(x[1])
    return z.sum()
gc.set_threshold(1, 1, 1)
x = torch.ones(3, 2)
assert tsfunc.vmap(tsfunc.grad(func), in_dims=1)(x).tolist() == [[0, 3, 0], [0, 3, 0]]
"""
    subprocess.run([sys.executable, "-c", program], check=True)
