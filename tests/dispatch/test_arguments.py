"""Arguments add their keys to the key set of a call."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import optree
import pytest
import torch

from tests.dispatch.helpers import Value, unique
from tsfunc import dispatch
from tsfunc.dispatch import DispatchKey, DispatchKeySet, Level, Operator
from tsfunc.errors import DispatchError

HIGH = DispatchKey.define(unique("ArgumentsHigh"), above=DispatchKey.BackendSelect)

Point = namedtuple("Point", ["x", "y"])


@optree.dataclasses.dataclass(namespace="")
class Pair:
    first: Any
    second: Any

    def __init__(self, first: Any, second: Any) -> None:  # the decorator keeps it
        self.first, self.second = first, second


def operator(native: Callable[..., Any] | None = None) -> Operator:
    return Operator(unique("arguments::op"), native=native)


@pytest.mark.parametrize(
    "hide",
    [
        lambda v: [v],
        lambda v: (1, [2.0, (v,)]),
        lambda v: {"a": {"b": v}},
        lambda v: Point(1, v),
        lambda v: OrderedDict(a=v),
        lambda v: Pair(1, [v]),
        lambda v: [None, Pair(None, {"a": Point(v, "x")})],
    ],
    ids=["list", "tuple", "dict", "namedtuple", "OrderedDict", "dataclass", "all"],
)
def test_keys_are_found_in_pytrees(hide: Callable[[Any], Any]) -> None:
    op = operator(lambda *args, **kwargs: "native")
    dispatch.register(op, HIGH, lambda *args, **kwargs: dispatch.running_level())
    assert op(1, hide(torch.ones(2))) == "native"
    with Level(HIGH) as level:
        assert op(1, hide(Value(level))) is level
        assert op(x=hide(Value(level))) is level


@pytest.mark.parametrize("value", [1, "a", None, [], int, torch.float32, Value, object()])
def test_other_values_have_no_keys(value: object) -> None:
    with pytest.raises(DispatchError, match=r"no key is left .*\(BackendSelect@0\)"):
        operator(lambda value: value)(value)


def test_values_speak_for_themselves_by_attributes_of_their_own_or_their_class() -> None:
    op = operator(lambda value: "native")
    dispatch.register(op, HIGH, lambda value: "kernel")
    assert op(SimpleNamespace(dispatch_keys=DispatchKeySet(HIGH))) == "kernel"
    assert op(type("Keyed", (), {"dispatch_keys": DispatchKeySet(HIGH)})()) == "kernel"
    assert op(torch.nn.Parameter(torch.ones(1))) == "native"
    assert op(type("Mine", (torch.Tensor,), {})(torch.ones(1))) == "native"
    with Level(HIGH) as level:
        assert op(SimpleNamespace(dispatch_level=level)) == "kernel"
        assert op(type("Levelled", (), {"dispatch_level": level})()) == "kernel"


def test_a_class_can_become_a_pytree_after_it_was_met() -> None:
    class Late:
        value: Any

    late = Late()
    late.value = torch.ones(1)
    op = operator(lambda value: "native")
    with pytest.raises(DispatchError, match="no key is left"):
        op(late)
    optree.dataclasses.dataclass(Late, namespace="")
    assert op(late) == "native"


def test_a_value_that_is_a_pytree_too_speaks_for_itself() -> None:
    op = operator()
    dispatch.register(op, HIGH, lambda value: "kernel")
    with Level(HIGH) as level:
        pair = Pair(torch.ones(1), None)
        object.__setattr__(pair, "dispatch_level", level)
        assert op(pair) == "kernel"
        assert op([pair]) == "kernel"
        assert op(Pair(pair, None)) == "kernel"


def test_the_backend_is_that_of_the_tensors() -> None:
    op = operator()
    dispatch.register(op, DispatchKey.Meta, lambda *args: "meta")
    dispatch.register(op, DispatchKey.CPU, lambda *args: "cpu")
    assert op(torch.ones(1, device="meta")) == "meta"
    assert op(torch.ones(1, device="cpu")) == "cpu"
    assert op(torch.ones(1, device="meta"), torch.ones(1, device="cpu")) == "cpu"
