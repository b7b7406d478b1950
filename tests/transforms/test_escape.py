"""Values that are used after their transform has ended: the error names transform and line."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tsfunc
from tests.transforms.support import same
from tsfunc import Tracer
from tsfunc.errors import EscapedTracerError

X = torch.arange(12.0).view(3, 4).sin()


def leaked() -> Any:
    kept = []

    def keeps(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    tsfunc.vmap(keeps)(X)  # the line that the error names
    return kept[0]


LINE = leaked.__code__.co_firstlineno + 7

USES: dict[str, Callable[[Any], Any]] = {
    "an operator": lambda x: x + 1,
    "a function": torch.sin,
    "a method": lambda x: x.sum(),
    "a composite": lambda x: torch.nn.functional.softmax(x, 0),
    "an operator in place": lambda x: x.mul_(2),
    "a view": lambda x: x.view(2, 2),
    "an index": lambda x: x[0],
    "an index written": lambda x: x.__setitem__(0, 1.0),
    "iteration": list,
    "as an index": lambda x: X[x.long()],
    "in a list": lambda x: torch.stack([torch.ones(4), x]),
    "as a second operand": lambda x: torch.ones(4) * x,
    "by keyword": lambda x: torch.add(torch.ones(4), other=x),
    "detach": lambda x: x.detach(),
    "clone": lambda x: x.clone(),
    "deepcopy": copy.deepcopy,
    "item": lambda x: x.item(),
    "bool": bool,
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "to": lambda x: x.to(torch.float64),
    "an ATen overload": torch.ops.aten.sin.default,
    "an autograd.Function": lambda x: Identity.apply(x),  # type: ignore[no-untyped-call]
    "another vmap": lambda x: tsfunc.vmap(torch.sin)(x),
    "inside of another vmap": lambda x: tsfunc.vmap(lambda y: x + y)(torch.ones(2, 4)),
    "inside of grad": lambda x: tsfunc.grad(lambda y: (x * y).sum())(torch.ones(4)),
    "differentiated": lambda x: tsfunc.grad(lambda y: y.sum())(x),
    "jvp": lambda x: tsfunc.jvp(torch.sin, (x,), (x,)),
    "a random operator": torch.rand_like,
    "a module": lambda x: torch.nn.Linear(4, 2)(x),
}


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


@pytest.mark.parametrize("name", USES)
def test_each_use_is_an_error(name: str) -> None:
    x = leaked()
    with pytest.raises(EscapedTracerError) as caught:
        USES[name](x)
    message = str(caught.value)
    assert "vmap(keeps)" in message
    assert f"test_escape.py:{LINE}" in message
    assert "after that transform had ended" in message
    assert "your tensor may have escaped from inside a function being vmapped" in message
    assert "Return the value from the transformed function" in message
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    own = Path(tsfunc.__file__).parent
    assert __file__ in files
    assert not [file for file in files if own in Path(file).parents]


@pytest.mark.parametrize("name", USES)
def test_a_value_that_all_examples_share_outlives_the_vmap(name: str) -> None:
    """torch.func's vmap allows it, and modules keep such values in a dict or an attribute."""
    kept: list[Any] = []

    def keeps(shared: Tensor, x: Tensor) -> Tensor:
        kept.append(shared * 2)
        return (shared * x).sum()

    tsfunc.vmap(tsfunc.grad(keeps), (None, 0))(X[0] + 2, X)
    plain = (X[0] + 2) * 2

    def outcome(x: Tensor) -> Any:
        torch.manual_seed(0)
        try:
            return USES[name](x)
        except Exception as error:
            return type(error)

    expected, got = outcome(plain), outcome(kept[0])
    same(kept[0] + 0, plain)
    assert not isinstance(got, Tracer)
    assert type(got) is type(expected)
    if isinstance(expected, type):
        assert got is expected
    elif expected is not None:
        as_tensors = torch.as_tensor if name == "numpy" else lambda x: x
        same(as_tensors(got), as_tensors(expected))


def test_a_shared_value_and_a_batched_one_are_an_error() -> None:
    kept: list[Any] = []

    def keeps(shared: Tensor, x: Tensor) -> Tensor:
        kept.extend([shared, x])
        return (shared * x).sum()

    tsfunc.vmap(tsfunc.grad(keeps), (None, 0))(X[0], X)
    for use in (torch.add, lambda *both: torch.stack(both)):
        with pytest.raises(EscapedTracerError, match=r"vmap\(keeps\)"):
            use(*kept)
    assert repr(kept[0]).startswith("BatchTracer(of vmap(keeps), which has ended: tensor([")
    assert "\n" not in repr(kept[0])


def test_it_can_still_be_looked_at() -> None:
    x = leaked()
    assert repr(x) == "BatchTracer(of vmap(keeps), which has ended)"
    assert x.shape == (4,)
    assert x.dtype is torch.float32


def test_out_of_an_inner_vmap() -> None:
    kept = []

    def outer(x: Tensor) -> Tensor:
        tsfunc.vmap(lambda y: kept.append(y) or y)(x)  # type: ignore[func-returns-value]
        return x + kept[-1]

    with pytest.raises(EscapedTracerError, match=r"vmap\(<lambda>\)"):
        tsfunc.vmap(outer)(X)


def test_each_call_is_its_own() -> None:
    """A value of an earlier call is not mistaken for one of this call."""
    kept: list[Tensor] = []

    def func(x: Tensor) -> Tensor:
        kept.append(x)
        return x + kept[0]

    mapped = tsfunc.vmap(func)
    mapped(X)
    with pytest.raises(EscapedTracerError, match=r"vmap\(func\)"):
        mapped(X)


def test_out_of_a_jvp_in_a_jvp() -> None:
    kept = []

    def inner(x: Tensor) -> Tensor:
        kept.append(x)
        return x.sin()

    tsfunc.jvp(lambda x: tsfunc.jvp(inner, (x,), (x,)), (X,), (X,))
    with pytest.raises(EscapedTracerError, match="jvp"):
        kept[0] + 1


def test_values_that_escape_in_an_exception() -> None:
    kept = []

    def fails(x: Tensor) -> Tensor:
        kept.append(x)
        raise KeyError

    with pytest.raises(KeyError):
        tsfunc.vmap(fails)(X)
    with pytest.raises(EscapedTracerError, match=r"vmap\(fails\)"):
        kept[0] + 1


def test_the_result_of_grad_is_a_tensor() -> None:
    """The outermost grad has no tracers: a value that is kept is an ordinary tensor."""
    kept = []
    tsfunc.grad(lambda x: kept.append(x * 2) or (x * 2).sum())(X)  # type: ignore[func-returns-value]
    assert torch.equal(kept[0].detach(), X * 2)
