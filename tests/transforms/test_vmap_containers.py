"""Containers beside plain tuples, lists and dicts, as arguments and results of transforms."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as torch_pytree

from tests.transforms.support import same
from tsfunc import grad, jacrev, jvp, specialize, vjp, vmap
from tsfunc.errors import EscapedTracerError

X = torch.arange(12.0).view(3, 4).sin()

Pair = namedtuple("Pair", ["a", "b"])


@dataclasses.dataclass
class State:
    x: Any
    step: Any = None


class OfOptree:
    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b


optree.register_pytree_node(
    OfOptree, lambda n: ((n.a, n.b), None), lambda _, ab: OfOptree(*ab), namespace="tests"
)


class OfTorch:
    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b


torch_pytree.register_pytree_node(
    OfTorch, lambda n: ([n.a, n.b], ["unhashable"]), lambda ab, _: OfTorch(*ab)
)

PAIRS: list[Callable[[Any, Any], Any]] = [
    lambda a, b: (a, b),
    lambda a, b: [a, b],
    lambda a, b: {"b": b, "a": a},
    lambda a, b: OrderedDict([("b", b), ("a", a)]),
    lambda a, b: defaultdict(list, a=a, b=b),
    lambda a, b: deque([a, b], maxlen=2),
    Pair,
    State,
    OfOptree,
    OfTorch,
    lambda a, b: State(State(a), Pair(b, None)),
]


def parts(pair: Any) -> list[Any]:
    """Return the two values of one of these containers."""
    if isinstance(pair, dict):
        return [pair["a"], pair["b"]]
    if isinstance(pair, State):
        return [pair.x.x, pair.step.a] if isinstance(pair.x, State) else [pair.x, pair.step]
    return [pair.a, pair.b] if hasattr(pair, "a") else list(pair)


@pytest.mark.parametrize("make", PAIRS, ids=range(len(PAIRS)))
def test_a_container_goes_in_and_comes_out(make: Callable[[Any, Any], Any]) -> None:
    def f(pair: Any) -> Any:
        a, b = parts(pair)
        return make(a * 2, b.sum())

    for chunk_size in (None, 2):
        got = vmap(f, chunk_size=chunk_size)(make(X, X + 1))
        assert type(got) is type(make(X, X))
        same(parts(got), [X * 2, (X + 1).sum(1)])


@pytest.mark.parametrize("make", PAIRS[:-1], ids=range(len(PAIRS) - 1))
def test_dims_inside_of_a_container(make: Callable[[Any, Any], Any]) -> None:
    got = vmap(lambda pair: make(*[x + 1 for x in parts(pair)]), (make(0, None),), make(1, 0))(
        make(X, X[0])
    )
    same(parts(got), [X.T + 1, (X[0] + 1).expand(3, 4)])


# A None inside is a leaf, and can't be differentiated by.
@pytest.mark.parametrize("make", PAIRS[:-1], ids=range(len(PAIRS) - 1))
def test_derivatives_by_a_container(make: Callable[[Any, Any], Any]) -> None:
    def loss(pair: Any) -> Any:
        a, b = parts(pair)
        return (a.sin() * b).sum()

    value, want = make(X, X + 1), (X.cos() * (X + 1), X.sin())
    same(tuple(parts(grad(loss)(value))), want)
    same(tuple(parts(vmap(grad(loss))(value))), want)
    same(tuple(parts(jacrev(loss)(value))), want)
    same(tuple(parts(vjp(loss, value)[1](torch.ones(()))[0])), want)
    tangent = jvp(loss, (value,), (make(torch.ones(3, 4), torch.zeros(3, 4)),))[1]
    torch.testing.assert_close(tangent, want[0].sum())


def test_torchs_return_types() -> None:
    got = vmap(lambda x: x.max(0))(X)
    assert isinstance(got, torch.return_types.max)
    same(got, X.max(1))
    same(vmap(lambda m: m.values * 2)(X.max(1)), X.max(1).values * 2)


def test_an_output_of_a_dataclass_is_that_of_each_example() -> None:
    @dataclasses.dataclass(frozen=True)
    class Summary:
        x: Tensor
        total: Any = dataclasses.field(init=False, default=None)

        def __post_init__(self) -> None:
            object.__setattr__(self, "total", self.x.sum())

    got = vmap(Summary)(X)
    same(got.total, X.sum(1))
    same(vmap(lambda s: s.total + s.x[0])(got), X.sum(1) + X[:, 0])


def test_an_object_that_is_no_container_says_how_it_becomes_one() -> None:
    with pytest.raises(ValueError, match=re.escape("optree.register_pytree_node(Holder, flatten")):
        vmap(lambda h: h.x)(Holder(X))
    same(vmap(lambda h, x: h.x + x, (None, 0))(Holder(X[0]), X), X[0] + X)


def test_none_is_an_input_that_is_left_out() -> None:
    got = vmap(lambda s: s.x if s.step is None else s.x * s.step)(State(X))
    same(got, X)


# Outputs that are not tensors.


def test_non_tensors_are_returned_once() -> None:
    settings = object()
    got = vmap(lambda x: (x, 3, 2.5, None, "a", True, x.shape, x.dtype, settings, len))(X)
    same(got[0], X)
    assert got[1:] == (3, 2.5, None, "a", True, (4,), torch.float32, settings, len)
    assert got[8] is settings
    assert vmap(lambda x: 3)(X) == 3
    assert vmap(lambda x: None)(X) is None
    assert vmap(vmap(lambda x: {"n": x.dim()}))(X) == {"n": 0}


def test_an_out_dim_says_nothing_of_it() -> None:
    for out_dims in (0, 1, None, (0, 0), (0, None), (0, 5)):
        got = vmap(lambda x: (X, 3), out_dims=out_dims)(X)
        assert got[1] == 3
    same(vmap(lambda x: {"a": x, "n": 4}, out_dims={"a": 1, "n": 0})(X)["a"], X.T)


@pytest.mark.parametrize("chunk_size", [1, 2, 3])
def test_it_is_that_of_the_first_chunk(chunk_size: int) -> None:
    got = vmap(lambda x: (x, "once", [None]), chunk_size=chunk_size)(X)
    same(got, (X, "once", [None]))


def test_grad_of_a_function_that_returns_it() -> None:
    value, name = vmap(grad(lambda x: (x.sin().sum(), "aux"), has_aux=True))(X)
    torch.testing.assert_close(value, X.cos())
    assert name == "aux"


class Holder:
    def __init__(self, x: Any) -> None:
        self.x = x


class SlottedHolder:
    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x


@pytest.mark.parametrize(
    ("func", "message"),
    [
        (Holder, "returned a value of type Holder that holds a batched tensor (Holder.x)"),
        (lambda x: [Holder({"k": [x]})], "(Holder.x['k'][0])"),
        (SlottedHolder, "(SlottedHolder.x)"),
        (Holder, 'optree.register_pytree_node(Holder, flatten, unflatten, namespace="tsfunc")'),
        (lambda x: lambda: x, "returned function <lambda> with 'x' from around it"),
        (lambda x: functools.partial(torch.add, x), "returned partial functools.partial(add, ...)"),
        (lambda x: vjp(torch.sin, x)[1], "which has no meaning once the vmap has ended"),
    ],
)
def test_an_object_may_not_carry_batched_tensors_out(func: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        vmap(func)(X)


def test_an_object_may_carry_other_tensors_out() -> None:
    weight = torch.ones(4)
    holder = Holder(weight)
    assert vmap(lambda x: (x * holder.x, holder))(X)[1] is holder
    # A tracer of an outer vmap, which is still active.
    got = vmap(lambda y: vmap(lambda x: (x, Holder(y)))(X)[1].x + 1)(X)
    same(got, X + 1)


def test_deeper_ones_say_so_when_they_are_used() -> None:
    out = vmap(lambda x: Holder(Holder(x)))(X)
    with pytest.raises(EscapedTracerError, match="after that transform had ended"):
        out.x.x + 1


# Programs.


def test_specialized_functions_take_and_return_dataclasses() -> None:
    @dataclasses.dataclass
    class Fresh:
        x: Tensor
        name: str = "a"

    def f(s: Fresh) -> Fresh:
        return Fresh(s.x.sum(0), s.name * 2)

    fast = specialize(f)
    for value in (X, X + 1):
        got = fast(Fresh(value))
        same((got.x, got.name), (value.sum(0), "aa"))
    assert fast.cache_info().programs == 1
    assert fast(Fresh(X, "b")).name == "bb"
    assert fast.cache_info().programs == 2
    got = specialize(vmap(f, (Fresh(0, None),)))(Fresh(X))  # type: ignore[arg-type]
    same(got.x, X.sum(1))
