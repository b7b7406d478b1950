"""Tensors that a function made, and tensors from outside, are told apart during collections."""

from __future__ import annotations

import contextvars
import copy
import functools
import gc
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.transforms.support import loop, same
from tsfunc import vmap
from tsfunc.bridge.tracers.reachable import Reachable
from tsfunc.bridge.tracers.tracer import TracerLevel
from tsfunc.bridge.writing import outside
from tsfunc.bridge.writing.outside import OutsideTensors, live_tensors, recent_tensors
from tsfunc.dispatch.state import active_levels, innermost_of

X = torch.zeros(2)


def is_recent(tensor: Tensor) -> bool:
    return recent_tensors().get(id(tensor)) is tensor


def is_outside(tensor: Tensor) -> bool:
    level = innermost_of(TracerLevel)
    assert level is not None
    return tensor in OutsideTensors(level)


def nothing() -> None:
    pass


def fill_the_youngest() -> None:
    """Make more objects than a generation holds, so that Python itself collects."""
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
def test_tensors_made_inside_are_recent_and_not_from_outside(when: str) -> None:
    collect = COLLECTIONS[when]
    captured = torch.zeros(3)

    def func(x: Tensor) -> Tensor:
        early = torch.zeros(3)
        collect()
        late, view = torch.zeros(3), captured[1:]
        for _ in range(2):
            assert is_recent(early) and is_recent(late) and is_recent(view)
            assert not is_outside(early) and not is_outside(late)
            assert is_outside(captured) and is_outside(view)
            collect()
        return x

    vmap(func)(X)


@pytest.mark.parametrize("when", COLLECTIONS)
def test_each_level_has_its_own(when: str) -> None:
    collect = COLLECTIONS[when]

    def func(x: Tensor) -> Tensor:
        mine = torch.zeros(3)
        collect()

        def inner(y: Tensor) -> Tensor:
            collect()
            its = torch.zeros(3)
            collect()
            assert not is_outside(its) and is_outside(mine)
            assert is_recent(its)
            return y

        assert not is_outside(mine)
        return torch.add(vmap(inner)(X), x)

    vmap(func)(X)


class CollectedWhenRead(dict[int, Any]):
    """Records a collection; each read of the record triggers another collection."""

    def values(self) -> Any:
        notes = list(super().values())
        gc.collect(0)
        return notes


def test_a_collection_during_the_search_loses_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside, "_noted", CollectedWhenRead())

    def func(x: Tensor) -> Tensor:
        return torch.zeros(3).masked_fill_(x > 0, 0.5)

    x = torch.randn(4, 3)
    same(vmap(func)(x), torch.stack([func(row) for row in x]))


def test_threads_make_tensors_while_another_one_collects() -> None:
    """A change of threads between the note of a collection and the collection loses no tensor."""
    made: list[Tensor] = []
    done = threading.Event()

    def make() -> None:
        while not done.is_set():
            made.append(torch.zeros(1))

    def collect() -> None:
        for _ in range(300):
            fill_the_youngest()

    def func(x: Tensor) -> Tensor:
        makers = [threading.Thread(target=make) for _ in range(3)]
        for thread in makers:
            thread.start()
        collect()
        done.set()
        for thread in makers:
            thread.join()
        recent = recent_tensors()
        assert made and all(id(tensor) in recent for tensor in made)
        return x

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        vmap(func)(X)
    finally:
        sys.setswitchinterval(interval)


def test_tensors_older_than_the_levels_are_not_recent() -> None:
    old = torch.zeros(3)
    gc.collect()

    def func(x: Tensor, find: Any) -> Tensor:
        assert not is_recent(find())
        return x

    reference = weakref.ref(old)
    vmap(func, in_dims=(0, None))(X, reference)


def test_a_collection_without_levels_forgets() -> None:
    vmap(lambda x: (gc.collect(), x)[1])(X)
    assert not active_levels
    gc.collect()
    assert not outside._noted


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


# --- the search, by the paths on which a function may reach a tensor


BUFFER = torch.zeros(4)
VARIABLE: contextvars.ContextVar[Tensor] = contextvars.ContextVar("VARIABLE")
LOCAL = threading.local()


def read_by_a_function() -> Tensor:
    return BUFFER


class Slotted:
    __slots__ = ("tensor",)
    tensor: Tensor


class WithClassAttribute:
    tensor: Any = None

    def method(self) -> Tensor:
        return BUFFER


def in_slot(tensor: Tensor) -> Callable[[], Tensor]:
    holder = Slotted()
    holder.tensor = tensor
    return lambda: holder.tensor


def in_class(tensor: Tensor) -> Callable[[], Tensor]:
    WithClassAttribute.tensor = tensor
    return lambda: WithClassAttribute.tensor


def in_context(tensor: Tensor) -> Callable[[], Tensor]:
    VARIABLE.set(tensor)
    return lambda: VARIABLE.get()


def in_thread(tensor: Tensor) -> Callable[[], Tensor]:
    LOCAL.tensor = tensor
    return lambda: LOCAL.tensor


def as_global(tensor: Tensor) -> Callable[[], Tensor]:
    global BUFFER
    BUFFER = tensor
    return read_by_a_function


def by_method(tensor: Tensor) -> Callable[[], Tensor]:
    global BUFFER
    BUFFER = tensor
    holder = WithClassAttribute()
    return lambda: holder.method()


def by_import(tensor: Tensor) -> Callable[[], Tensor]:
    global BUFFER
    BUFFER = tensor

    def find() -> Tensor:
        from tests.bridge import test_outside

        return test_outside.BUFFER

    return find


def as_default(tensor: Tensor) -> Callable[[], Tensor]:
    def find(*, tensor: Tensor = tensor) -> Tensor:
        return tensor

    return find


def in_generator(tensor: Tensor) -> Callable[[], Tensor]:
    def endless() -> Iterator[Tensor]:
        kept = tensor
        while True:
            yield kept

    generator = endless()
    next(generator)
    return lambda: next(generator)


def in_array(tensor: Tensor) -> Callable[[], Tensor]:
    array = np.empty(1, dtype=object)
    array[0] = tensor
    return lambda: array[0]


def in_cache(tensor: Tensor) -> Callable[[], Tensor]:
    kept = [tensor]

    @functools.lru_cache
    def find() -> Tensor:
        return kept.pop()

    find()
    return lambda: find()


def as_gradient(tensor: Tensor) -> Callable[[], Tensor]:
    leaf = torch.zeros(4, requires_grad=True)
    leaf.grad = tensor
    return lambda: leaf.grad  # type: ignore[return-value]


def in_script(tensor: Tensor) -> Callable[[], Tensor]:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("tensor", tensor)

        def forward(self, x: Tensor) -> Tensor:
            return x

    with pytest.warns((DeprecationWarning, FutureWarning)):
        script = torch.jit.script(Holder())
    return lambda: script.tensor


PATHS: dict[str, Callable[[Tensor], Callable[[], Tensor]]] = {
    "variable": lambda tensor: lambda: tensor,
    "list": lambda tensor: [tensor].__iter__().__next__,
    "nested containers": lambda tensor: functools.partial(
        lambda kept: kept[0]["a"][1], ({"a": [0, tensor]},)
    ),
    "attribute": lambda tensor: functools.partial(getattr, SimpleNamespace(a=tensor), "a"),
    "bound method": lambda tensor: tensor.view_as,  # type: ignore[dict-item,return-value]
    "weak reference": lambda tensor: weakref.ref(tensor),  # type: ignore[dict-item,return-value]
    "slot": in_slot,
    "class": in_class,
    "context variable": in_context,
    "thread": in_thread,
    "global of another function": as_global,
    "global of a method": by_method,
    "import": by_import,
    "default": as_default,
    "generator": in_generator,
    "array of objects": in_array,
    "cache": in_cache,
    "gradient": as_gradient,
    "attribute of a tensor": lambda tensor: functools.partial(getattr, _with(tensor), "kept"),
}


def _with(tensor: Tensor) -> Tensor:
    holder = torch.zeros(1)
    holder.kept = tensor  # type: ignore[attr-defined]
    return holder


@pytest.mark.parametrize("path", PATHS)
def test_tensors_that_a_function_reaches(path: str) -> None:
    tensor = torch.zeros(4)
    find = PATHS[path](tensor)
    assert any(found is tensor for found in Reachable([find]).tensors)
    assert not any(found is tensor for found in Reachable([lambda x: x]).tensors)


@pytest.mark.parametrize("path", PATHS)
def test_a_write_to_a_tensor_that_the_function_reaches_is_refused(path: str) -> None:
    tensor = torch.zeros(4)
    find = PATHS[path](tensor)

    def func(x: Tensor) -> Tensor:
        target: Tensor = find.__self__ if path == "bound method" else find()  # type: ignore[attr-defined]
        return target.add_(x)

    with pytest.raises(RuntimeError, match="made outside of the function"):
        vmap(func)(torch.ones(3, 4))
    assert type(tensor) is Tensor and not tensor.any()


def test_tensors_in_a_script_module_are_reached() -> None:
    tensor = torch.zeros(4)
    find = in_script(tensor)
    memory = find().untyped_storage().data_ptr()
    found = Reachable([find]).tensors
    assert any(t.untyped_storage().data_ptr() == memory for t in found)


# --- random programs that make, keep, alias and write tensors


W = torch.arange(4.0).cos()
MAKERS: list[Callable[[], Tensor]] = [
    lambda: torch.zeros(4),
    lambda: W.to(torch.float64),
    lambda: W * 1,
    lambda: torch.cat([W[:2], W[2:]]),
    lambda: torch.stack([W[0], W[1], W[2], W[3]]),
    lambda: torch.tensor(np.arange(4.0)),
    lambda: torch.from_numpy(np.arange(4.0)) + 1,
    lambda: W.clone(),
    lambda: W.expand(2, 4).contiguous()[1],
    lambda: torch.empty_like(W).fill_(2),
    lambda: copy.deepcopy(W),
    lambda: nn.Parameter(W.clone(), requires_grad=False),
    lambda: nn.LayerNorm(4).bias.data.fill_(1),
]
ALIASES: list[Callable[[Tensor], Tensor]] = [
    lambda t: t,
    lambda t: t[1:],
    lambda t: t[::2],
    lambda t: t.detach(),
    lambda t: t.data,
    lambda t: t.view(2, 2)[1],
    lambda t: t.view(2, 2).T[0],
    lambda t: t.unbind(0)[2],
    lambda t: t.chunk(2)[1],
    lambda t: t.expand(1, 4)[0],
]


def kept_in_list(tensor: Tensor) -> Callable[[], Tensor]:
    kept = [{"a": (tensor,)}]
    return lambda: kept[0]["a"][0]


def kept_in_generator(tensor: Tensor) -> Callable[[], Tensor]:
    return in_generator(tensor)


def kept_in_module(tensor: Tensor) -> Callable[[], Tensor]:
    module = nn.Module()
    module.register_buffer("kept", tensor)
    return lambda: module.kept  # type: ignore[return-value]


def kept_by_a_thread(tensor: Tensor) -> Callable[[], Tensor]:
    results: list[Tensor] = []
    thread = threading.Thread(target=lambda: results.append(tensor.view_as(tensor)))
    thread.start()
    thread.join()
    return lambda: results[0]


HOLDERS: list[Callable[[Tensor], Callable[[], Tensor]]] = [
    lambda tensor: lambda: tensor,
    lambda tensor: functools.partial(getattr, SimpleNamespace(a=tensor), "a"),
    kept_in_list,
    kept_in_generator,
    kept_in_module,
    kept_by_a_thread,
    in_slot,
    as_default,
]
WRITES: list[Callable[[Tensor, Tensor], Any]] = [
    lambda t, x: t.add_(x[0]),
    lambda t, x: t.copy_(x[: t.numel()].view(t.shape)),
    lambda t, x: t.mul_(x.sum()).add_(1),
    lambda t, x: t.__setitem__(..., x[1]),
    lambda t, x: torch.add(t, x[2].to(t.dtype), out=t),
    lambda t, x: t.masked_fill_(x[3] > 0, 7),
]


def run(numbers: random.Random, x: Tensor) -> list[Tensor]:
    """Make tensors, keep and alias them, and write to them, as the numbers say."""
    made = [numbers.choice(MAKERS)() for _ in range(numbers.randint(1, 3))]
    holders = [numbers.choice(HOLDERS)(numbers.choice(made)) for _ in range(3)]
    results = list(made)
    for _ in range(numbers.randint(1, 4)):
        holder = numbers.choice(holders)
        tensor = holder() if numbers.random() < 0.5 else numbers.choice(made)
        if tensor.dim() == 1 and tensor.numel() == 4:
            alias = numbers.choice(ALIASES)(tensor)
            results.append(alias)
            if numbers.random() < 0.2:
                gc.collect(numbers.choice([0, 0, 1]))
            numbers.choice(WRITES)(numbers.choice([alias, tensor]), x)
            results += [alias * 2, tensor.sum()]
    return results


def test_programs_that_make_and_write_equal_the_loop() -> None:
    x = torch.arange(1.0, 13.0, dtype=torch.float64).view(3, 4).sin()
    for _ in range(40):
        seed = random.randrange(10**9)
        print("seed", seed)

        def func(x: Tensor, seed: int = seed) -> tuple[Tensor, ...]:
            return tuple(run(random.Random(seed), x))

        want = loop(func, 3)(x)
        same(vmap(func)(x), want)
        same(tuple(part[0] for part in vmap(vmap(func))(x[None])), want)


# --- live tensors


def test_the_collector_stays_as_it_is() -> None:
    for switch in (gc.disable, gc.enable):
        switch()
        live_tensors()
        assert gc.isenabled() == (switch is gc.enable)


@pytest.mark.parametrize("generation", [0, None])
def test_live_tensors_are_those_that_the_collector_tracks(generation: int | None) -> None:
    kept = [torch.zeros(1) for _ in range(5)]
    tracked = gc.get_objects(generation)
    want = [id(each) for each in tracked if issubclass(type(each), Tensor)]
    del tracked
    found = [id(tensor) for tensor in live_tensors(generation)]
    assert sorted(found) == sorted(want) and {id(tensor) for tensor in kept} <= {*found}


@pytest.mark.parametrize("generation", [0, None])
def test_a_tuple_that_is_being_made_is_left_alone(generation: int | None) -> None:
    """CPython extends the tuple in place, and raises a SystemError if another reference exists."""

    def elements() -> Iterator[list[int]]:
        for i in range(40):
            live_tensors(generation)
            yield [i]

    assert tuple(elements()) == tuple([i] for i in range(40))
