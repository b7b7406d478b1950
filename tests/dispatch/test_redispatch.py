"""Redispatching from one kernel to the next, outwards through keys and levels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch

from tests.dispatch.helpers import Plain, Value, on_another_thread, unique
from tsfunc import Tracer, TracerLevel, dispatch, grad, specialize, vmap
from tsfunc.dispatch import DispatchKey, DispatchKeySet, Level, Operator, fallthrough, state
from tsfunc.errors import DispatchError

LOW = DispatchKey.define(unique("RedispatchLow"), above=DispatchKey.BackendSelect)
HIGH = DispatchKey.define(unique("RedispatchHigh"), above=LOW)


def operator(native: Callable[..., Any] | None = None) -> Operator:
    return Operator(unique("redispatch::op"), native=native)


def _kernel(*args: Any) -> None: ...


def test_a_backend_select_kernel_chooses_the_backend_of_a_factory() -> None:
    op = operator()
    dispatch.register(op, DispatchKey.CPU, lambda size, device: f"cpu {size}")
    dispatch.register(op, DispatchKey.Meta, lambda size, device: f"meta {size}")

    @dispatch.register(op, DispatchKey.BackendSelect)
    def choose(size: int, device: str) -> Any:
        return dispatch.redispatch(op, DispatchKeySet(DispatchKey.get(device)), size, device)

    assert op(3, "CPU") == "cpu 3"
    assert op(3, device="Meta") == "meta 3"


def chain(op: Operator, keys: Sequence[DispatchKey], log: list[str]) -> None:
    """Register for each key a kernel that logs its level, and calls the operator again."""

    def kernel(key: DispatchKey, *args: Any) -> Any:
        level = dispatch.running_level()
        log.append(f"{key.name}@{level.depth if level else 0}")
        return dispatch.redispatch(op, *args)

    for key in keys:
        dispatch.register(op, key, functools.partial(kernel, key))


def test_redispatching_goes_outwards_bit_by_bit() -> None:
    log: list[str] = []
    op = operator(lambda *args: log.append("native"))
    chain(op, (HIGH, LOW), log)
    with dispatch.include(HIGH, LOW), Level(LOW) as outer, Level(HIGH) as inner:
        op(Value(inner), Value(outer), Plain())
        assert log == [f"{HIGH.name}@2", f"{LOW.name}@1", f"{HIGH.name}@0", f"{LOW.name}@0",
                       "native"]  # fmt: skip


@pytest.mark.parametrize(("depth", "key"), list(product(range(4), (HIGH, LOW))))
def test_two_keys_at_any_depth(depth: int, key: DispatchKey) -> None:
    log: list[str] = []
    op = operator(lambda *args: log.append("native"))
    chain(op, (HIGH, LOW), log)

    def nest(levels: list[Level]) -> None:
        if len(levels) == depth:
            op(Plain(), [Value(level) for level in levels])
            return
        with Level(key) as level:
            nest([*levels, level])

    nest([])
    assert log == [f"{key.name}@{n}" for n in range(depth, 0, -1)] + ["native"]


def test_all_of_it_on_another_thread() -> None:
    log: list[str] = []
    op = operator(lambda *args: log.append("native"))
    chain(op, (LOW,), log)
    dispatch.register(op, HIGH, fallthrough)
    with dispatch.include(LOW), Level(LOW) as outer, Level(HIGH) as inner:
        # The inner level falls through; its captured state contains the outer one.
        on_another_thread(lambda: op(Plain(), Value(outer), Value(inner)))
        on_another_thread(lambda: op(Plain(), Value(outer)))
    assert log == [f"{LOW.name}@1", f"{LOW.name}@0", "native"] * 2


def test_the_state_is_put_back_when_a_kernel_fails() -> None:
    op = operator()

    @dispatch.register(op, HIGH)
    def fails(value: Value) -> None:
        raise ZeroDivisionError

    with Level(HIGH) as level, dispatch.include(LOW):
        before = state.tls.state
        with pytest.raises(ZeroDivisionError):
            op(Value(level))
        assert state.tls.state is before


def test_redispatching_to_a_key_set_computes_nothing_from_the_arguments() -> None:
    op = operator(lambda *args: "native")
    for key in (HIGH, LOW):
        dispatch.register(op, key, lambda *args, key=key: key.name)
    with dispatch.include(HIGH):
        assert dispatch.redispatch(op, DispatchKeySet(LOW), Plain()) == LOW.name
        assert dispatch.redispatch(op, LOW | DispatchKey.CPU, Plain()) == LOW.name
        assert op.redispatch(DispatchKeySet(DispatchKey.CPU), Plain()) == "native"
        assert dispatch.redispatch(op.name, Plain()) == HIGH.name
    with dispatch.exclude(LOW):
        assert dispatch.redispatch(op, DispatchKeySet(LOW), Plain()) == LOW.name


def test_redispatching_to_a_key_set_that_makes_no_sense() -> None:
    op = operator()
    dispatch.register(op, HIGH, _kernel)
    with pytest.raises(DispatchError, match=r"can't dispatch on a complement"):
        op.redispatch(~DispatchKeySet(LOW), Plain())
    with pytest.raises(
        DispatchError,
        match=rf"the key set DispatchKeySet\({HIGH.name}@2\) names level 2, but only 0 levels",
    ):
        op.redispatch(DispatchKeySet.at(2, HIGH), Plain())


def test_run_at_a_level_needs_no_value_of_it() -> None:
    op = operator()
    dispatch.register(op, HIGH, lambda *args: dispatch.running_level())
    with Level(HIGH) as level:
        assert op.run_at(level, (3,), {}) is level
        with Level(HIGH) as inner:
            assert op.run_at(level, (Value(inner),), {}) is inner


RECORDED: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "plain": lambda f: f,
    "specialize": specialize,
    "vmap of grad": lambda f: vmap(grad(lambda x: f(x).sum())),
    "vmap of grad of grad": lambda f: vmap(grad(grad(lambda x: f(x).sum()))),
    "specialize of vmap of grad": lambda f: specialize(vmap(grad(lambda x: f(x).sum()))),
}


@pytest.mark.parametrize("transform", RECORDED)
def test_the_kernel_of_a_backend_has_no_key_left(transform: str) -> None:
    """This holds also for a level that records what the kernel calls."""
    op = Operator(unique("redispatch::last"))

    @dispatch.register(op, DispatchKey.CPU)
    def last(x: torch.Tensor) -> Any:
        return dispatch.redispatch(op, x.sin())

    with pytest.raises(DispatchError, match="redispatch was called in the kernel of a backend"):
        RECORDED[transform](lambda x: op(x * 1))(torch.ones(3))


@pytest.mark.parametrize(
    "call",
    [
        torch.sin,
        lambda t: torch.add(torch.ones(2), t),
        lambda t: torch.add(t, torch.ones(2)),
        lambda t: torch.stack([torch.ones(2), t]),
        lambda t: torch.nn.functional.linear(torch.ones(2), torch.ones(2, 2), bias=t),
    ],
    ids=["alone", "second", "first", "in a list", "in a composite"],
)
def test_a_kernel_that_passes_a_tracer_on_is_refused(call: Callable[[Any], Any]) -> None:
    """This holds beside a plain tensor, too, whose backend key remains."""
    key = DispatchKey.define(unique("PassesOn"), above=DispatchKey.Batch)

    class Passed(Tracer):
        value: torch.Tensor

    @dispatch.register_fallback(key)
    def passes_on(op: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return op(*args, **kwargs)

    with TracerLevel(key) as level:
        tracer = Passed.make(level=level, value=torch.ones(2))
        with pytest.raises(DispatchError, match=f"The arguments have .*{key.name}@1.* excluded"):
            call(tracer)
