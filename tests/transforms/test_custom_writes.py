"""Users' operators that write into their arguments, and have no rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import tsfunc
from tests.transforms.support import same

pytestmark = pytest.mark.filterwarnings("ignore::tsfunc.errors.SlowFallbackWarning")

X = torch.arange(6.0).view(3, 2)
Y = X.cos()


@torch.library.custom_op("tsfunc_writes::raised", mutates_args=("x",))
def raised(x: Tensor) -> None:
    x.add_(5)


@torch.library.custom_op("tsfunc_writes::raised_and_doubled", mutates_args=("x",))
def raised_and_doubled(x: Tensor) -> Tensor:
    x.add_(5)
    return x * 2


@torch.library.custom_op("tsfunc_writes::sine_into", mutates_args=("out",))
def sine_into(x: Tensor, out: Tensor) -> None:
    out.copy_(x.sin())


@torch.library.custom_op("tsfunc_writes::sine_into_each", mutates_args=("outs",))
def sine_into_each(x: Tensor, outs: list[Tensor]) -> None:
    for out in outs:
        out.copy_(x.sin())


@torch.library.custom_op("tsfunc_writes::both", mutates_args=("x", "y"))
def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x.add_(5)
    y.add_(x)
    return x * 2, y * 2


torch.library.define(
    "tsfunc_writes::first_and_sum", "(Tensor(a!) x, Tensor y) -> (Tensor(a!), Tensor)"
)


@torch.library.impl("tsfunc_writes::first_and_sum", "CompositeExplicitAutograd")
def _first_and_sum(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x.add_(1)
    return x, x + y


OPS = torch.ops.tsfunc_writes


def _raised(x: Tensor, y: Tensor) -> Any:
    assert OPS.raised(x) is None
    return x


def _sine_into(x: Tensor, y: Tensor) -> Any:
    sine_into(x, y)
    return y


def _sine_into_by_name(x: Tensor, y: Tensor) -> Any:
    OPS.sine_into(out=y, x=x)
    return y


def _sine_into_own(x: Tensor, y: Tensor) -> Any:
    out = torch.zeros(2)
    OPS.sine_into(x, out)
    return out


def _sine_into_each(x: Tensor, y: Tensor) -> Any:
    outs = [y, torch.zeros(2)]
    OPS.sine_into_each(x, outs)
    return tuple(outs)


def _first_and_sum_of(x: Tensor, y: Tensor) -> Any:
    first, total = OPS.first_and_sum(x, y)
    first.mul_(2)
    return first, total, x


CALLS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "returns nothing": _raised,
    "returns another": lambda x, y: (OPS.raised_and_doubled(x), x),
    "writes its second": _sine_into,
    "writes what is named": _sine_into_by_name,
    "writes what is made inside": _sine_into_own,
    "writes a list": _sine_into_each,
    "writes two": lambda x, y: (OPS.both(x, y), x, y),
    "returns what it writes": _first_and_sum_of,
}


@pytest.mark.parametrize("name", CALLS)
def test_each_example_is_written(name: str) -> None:
    f = CALLS[name]
    want = [f(x.clone(), y.clone()) for x, y in zip(X, Y, strict=True)]
    got = tsfunc.vmap(f)(X.clone(), Y.clone())
    same(got, optree.tree_map(lambda *parts: torch.stack(parts), *want))


WRITES_ONE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "the second": lambda x, y: OPS.sine_into(x, y),
    "a named one": lambda x, y: OPS.sine_into(x, out=y),
    "the second of two": lambda x, y: OPS.both(x, y),
    "the first of two": lambda x, y: OPS.both(y, x),
    "one of a list": lambda x, y: OPS.sine_into_each(x, [x, y]),
}


@pytest.mark.parametrize("name", WRITES_ONE)
def test_one_tensor_for_all_examples_is_not_written(name: str) -> None:
    """The examples would overwrite each other's values."""
    y = Y[0].clone()
    with pytest.raises(RuntimeError, match="values that differ between examples into `y`"):
        tsfunc.vmap(WRITES_ONE[name], in_dims=(0, None))(X.clone(), y)
    same(y, Y[0])
