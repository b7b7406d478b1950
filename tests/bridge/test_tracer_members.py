"""Tracers have the methods, attributes and operators of torch's tensors.

Compiled handlers add members to the class of tracers; the same laws hold without them.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tsfunc import grad, vmap
from tsfunc.bridge.tracers.attributes import METADATA
from tsfunc.bridge.tracers.batch_handlers import SlottedBatchTracer
from tsfunc.bridge.tracers.tracer import Tracer

BINARY = [
    operator.add, operator.sub, operator.mul, operator.truediv, operator.matmul, operator.pow,
    operator.lt, operator.le, operator.eq, operator.ne, operator.gt, operator.ge,
    operator.floordiv, operator.mod,
]  # fmt: skip
INPLACE = [operator.iadd, operator.isub, operator.imul, operator.itruediv]


def outcome(f: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a call, or the class of its error."""
    try:
        return f(*args)
    except (TypeError, RuntimeError, IndexError) as error:
        return type(error)


def mapped(f: Callable[..., Any], in_dims: Any, *args: Any) -> Any:
    """Call a function under vmap until its calls have plans and recipes."""
    for _ in range(4):
        out = outcome(vmap(f, in_dims), *args)
    return out


def looped(f: Callable[..., Any], in_dims: Any, *args: Any) -> Any:
    sizes = [x.shape[d] for x, d in zip(args, in_dims, strict=True) if d is not None]
    results = []
    for i in range(sizes[0]):
        one = [x if d is None else x.select(d, i) for x, d in zip(args, in_dims, strict=True)]
        results.append(outcome(f, *one))
    return results[0] if isinstance(results[0], type) else torch.stack(results)


def check(f: Callable[..., Any], in_dims: Any, *args: Any) -> None:
    found, expected = mapped(f, in_dims, *args), looped(f, in_dims, *args)
    if isinstance(expected, type):
        assert found is expected
    else:
        torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("op", BINARY, ids=lambda op: op.__name__)
@pytest.mark.parametrize("drawn", range(6))
def test_operators_are_those_of_each_example(op: Callable[..., Any], drawn: int) -> None:
    rng = random.Random(torch.initial_seed() + drawn)
    size, n = rng.choice([2, 3, 5]), rng.choice([1, 2, 4])

    def tensor() -> tuple[Tensor, Any]:
        place = rng.choice([0, 1, 2, None])
        shape = [n, n] if op is operator.matmul else rng.choice([[n, n], [1, n], [n, 1]])
        if place is not None:
            shape = [*shape[:place], size, *shape[place:]]
        return torch.randn(shape, dtype=torch.float64) + 3, place

    x, x_dim = tensor()
    y, y_dim = tensor()
    if x_dim is None and y_dim is None:
        x, x_dim = torch.randn(size, n, n, dtype=torch.float64), 0
    equality = op in (operator.eq, operator.ne)  # True or False for other objects
    number = rng.choice([2, -3, 0.5, True] + [None, object()] * (not equality))
    check(op, (x_dim, y_dim), x, y)
    mine = (x, x_dim) if x_dim is not None else (y, y_dim)
    check(lambda a: op(a, number), (mine[1],), mine[0])
    check(lambda a: op(number, a), (mine[1],), mine[0])
    check(lambda a: op(a, torch.nn.Parameter(torch.ones(n, n).double())), (mine[1],), mine[0])
    check(lambda a: op(torch.nn.Parameter(torch.ones(n, n).double()), a), (mine[1],), mine[0])


@pytest.mark.parametrize("op", INPLACE, ids=lambda op: op.__name__)
def test_operators_in_place(op: Callable[..., Any]) -> None:
    x, y = torch.randn(4, 3), torch.randn(3, 4)

    def f(a: Tensor, b: Tensor) -> Tensor:
        made = a.sin()
        kept = made
        made = op(made, b)
        assert made is kept
        return op(made, 2.0)

    check(f, (0, 1), x, y)


def test_an_object_on_the_right_gets_the_call_that_torch_does_not_take() -> None:
    class Scale:
        def __radd__(self, other: Tensor) -> Tensor:
            return other.sin()

        __rmul__ = __rmatmul__ = __rpow__ = __rtruediv__ = __rsub__ = __radd__

    x = torch.randn(3, 2)
    for op in (operator.add, operator.sub, operator.mul, operator.truediv, operator.matmul):
        check(lambda a, op=op: op(a, Scale()), (0,), x)
    with pytest.raises(TypeError, match="unsupported operand"):
        vmap(lambda a: a + object())(x)
    with pytest.raises(TypeError, match="unsupported operand"):
        vmap(lambda a: object() - a)(x)


class Doubled(Tensor):
    """A class whose handler doubles each result."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [x.as_subclass(Tensor) if isinstance(x, Doubled) else x for x in args]
        return func(*plain, **(kwargs or {})) * 2


@pytest.mark.parametrize(
    "op", [operator.add, operator.sub, operator.mul], ids=lambda op: op.__name__
)
def test_a_class_with_a_handler_gets_the_call_on_either_side(op: Callable[..., Any]) -> None:
    x, plain = torch.randn(3, 2), torch.randn(2)
    other = plain.as_subclass(Doubled)
    torch.testing.assert_close(mapped(lambda a: op(a, other), 0, x), op(x, plain) * 2)
    torch.testing.assert_close(mapped(lambda a: op(other, a), 0, x), op(plain, x) * 2)


CALLS: list[Callable[[Tensor], Any]] = [
    lambda x: x.sin(), lambda x: x.add(1, alpha=2), lambda x: x + x, lambda x: 2 * x,
    lambda x: 1 - x, lambda x: x**2, lambda x: -x, lambda x: x > 0, lambda x: x == x,
    lambda x: x[0], lambda x: x[None, ..., 1:], lambda x: x.clone().__setitem__(0, 1.0),
    lambda x: x.T, lambda x: x.mT, lambda x: x.shape, lambda x: x.dtype, lambda x: x.size(0),
    lambda x: x.is_contiguous(), lambda x: x.sum(-1, keepdim=True), lambda x: x.detach(),
    lambda x: x.unflatten(1, (2, -1)), lambda x: x.view(-1), lambda x: x.to(torch.float64),
    lambda x: x @ x.T, lambda x: x.sort().values,
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(CALLS)))
def test_a_function_mode_sees_the_functions_of_plain_tensors(index: int) -> None:
    call = CALLS[index]

    class Seen(TorchFunctionMode):
        def __init__(self) -> None:
            self.functions: list[Any] = []

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.functions.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.randn(2, 3, 4)
    with Seen() as expected:
        call(x[0])

    def f(row: Tensor) -> Tensor:
        call(row), call(row)
        with Seen() as seen:
            call(row)
        names = [getattr(func, "__name__", func) for func in seen.functions]
        assert names == [getattr(func, "__name__", func) for func in expected.functions[1:]]
        return row

    vmap(f)(x)


@pytest.mark.parametrize("index", range(len(CALLS)))
@pytest.mark.parametrize("place", [0, 1, 2])
def test_calls_without_the_handlers_of_functions(index: int, place: int) -> None:
    call = CALLS[index]

    def f(row: Tensor) -> Any:
        out = call(row)
        return out if isinstance(out, Tensor) else row

    def without(row: Tensor) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return f(row)

    x = torch.randn(3, 4, 5).transpose(0, 2)[:, :4, :4].contiguous().movedim(0, place)
    check(f, (place,), x)
    check(without, (place,), x)


@pytest.mark.parametrize("rank", range(5))
@pytest.mark.filterwarnings("ignore:The use of `x.T`", "ignore:Tensor.m?T is deprecated")
def test_transposes_of_all_ranks(rank: int) -> None:
    x = torch.randn([3, *range(2, 2 + rank)])
    for place in range(rank + 1):
        moved = x.movedim(0, place)
        for read in (lambda a: a.T, lambda a: a.mT, lambda a: a.T.mul(2).T):
            check(read, (place,), moved)


def test_transposes_in_derivatives() -> None:
    x = torch.randn(3, 2, 4, dtype=torch.float64)
    f = grad(lambda a: ((a.T @ a).sin() * (a.mT @ a)).sum())
    for _ in range(3):
        out = vmap(f)(x)
    torch.testing.assert_close(out, torch.stack([f(one) for one in x]))


def test_detached_examples_have_no_derivative() -> None:
    x, w = torch.randn(3, 2), torch.randn(2)

    def total(w: Tensor) -> Tensor:
        return vmap(lambda row: (row * w).detach() * w)(x).sum()

    for _ in range(3):
        torch.testing.assert_close(grad(total)(w), (x * w).sum(0))


def test_members_have_the_texts_of_torch() -> None:
    def f(row: Tensor) -> Tensor:
        assert row.sin.__name__ == "sin" and row.sin.__doc__ == Tensor.sin.__doc__
        assert type(row).add.__doc__ == Tensor.add.__doc__
        bound = row.add
        return bound(1) + type(row).sin(row)

    x = torch.randn(2, 3)
    torch.testing.assert_close(mapped(f, 0, x), x + 1 + x.sin())


def test_arguments_that_torch_refuses() -> None:
    x = torch.randn(3, 2)
    for call in (
        lambda a: a.sin(1), lambda a: a.sum(dims=1), lambda a: a.add(), lambda a: a.view("x"),
    ):  # fmt: skip
        check(call, (0,), x)
        with pytest.raises(TypeError):
            vmap(call)(x)
    with pytest.raises(TypeError, match="deleting"):
        vmap(lambda a: a.__delitem__(0))(x)
    with pytest.raises(TypeError):
        vmap(lambda a: pow(a, 2, 3))(x)
    with pytest.raises(AttributeError):
        vmap(lambda a: setattr(a, "shape", (2,)))(x)


def test_members_that_are_written_in_python_are_kept() -> None:
    """Tracers have all their members before the compiled ones are installed."""
    kinds = [kind for kind in SlottedBatchTracer.__mro__ if issubclass(kind, Tracer)]
    defined = {name for kind in kinds[1:] for name in vars(kind)}
    assert {"set_", "as_subclass", "layout", *METADATA} <= defined
    own = {name for name in vars(SlottedBatchTracer) if not name.startswith("_")}
    assert (own & defined) - {"value"} <= set(METADATA)
