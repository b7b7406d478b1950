"""Call plans: a planned call agrees with the first call, and with the loop.

The handlers of this process run the plans: the compiled ones if they are built.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tsfunc import grad, jvp, vmap
from tsfunc.bridge.tracers import call_plans
from tsfunc.bridge.tracers.call_plans import FUNCTION_PLANS, CallPlanTable, PlanStep

Function = Callable[..., Any]

# Functions of x [3, 4], y [3, 4], v [4] and of a number.
CALLS: dict[str, Function] = {
    "one tracer": lambda x, y, v, n: torch.sin(x),
    "equal ranks": lambda x, y, v, n: x * y,
    "other ranks": lambda x, y, v, n: x - v,
    "other ranks, turned": lambda x, y, v, n: torch.atan2(v, y),
    "a number": lambda x, y, v, n: x.add(n),
    "a number first": lambda x, y, v, n: n - x,
    "an option": lambda x, y, v, n: torch.add(x, y, alpha=n),
    "three tracers": lambda x, y, v, n: torch.addcmul(x, y, x, value=n),
    "a dim": lambda x, y, v, n: x.sum(int(n) % 2),
    "dims by name": lambda x, y, v, n: x.mean(dim=(0, int(n) % 2)) if n % 2 else x.mean(dim=0),
    "an index": lambda x, y, v, n: x[int(n) % 3],
    "a slice": lambda x, y, v, n: x[1:, None, : int(n) % 4],
    "packed numbers": lambda x, y, v, n: v.repeat(2, int(n) % 3 + 1),
    "a form": lambda x, y, v, n: x.roll(int(n), -1),
    "named results": lambda x, y, v, n: x.topk(2, dim=int(n) % 2).values,
    "a list": lambda x, y, v, n: torch.cat([x, y][: int(n) % 2 + 1] * 2),
    "a list with others": lambda x, y, v, n: torch.stack([x, torch.ones_like(x), y], int(n) % 3),
    "a decomposition": lambda x, y, v, n: F.cosine_similarity(x, y, int(n) % 2),
    "a matrix": lambda x, y, v, n: torch.outer(v, v) @ x.T @ F.linear(y, x),
    "an overload": lambda x, y, v, n: torch.ops.aten.mul.Tensor(x, y),
    "a tensor by name": lambda x, y, v, n: torch.sub(alpha=n, other=y, input=x),
    "options by name": lambda x, y, v, n: x.sum(keepdim=bool(n % 2), dim=int(n) % 2),
    "packed numbers of views": lambda x, y, v, n: x.reshape(2, 6).permute(1, 0).flatten(),
    "lists of numbers": lambda x, y, v, n: x.roll((1, int(n)), (0, -1)) + y.flip([0, 1]),
    "an optional tensor": lambda x, y, v, n: (
        torch.clamp(x, None, y) + F.linear(x, y[:, :], None) @ y
    ),
    "a dtype": lambda x, y, v, n: torch.cumsum(x, int(n) % 2, dtype=torch.float32).double(),
    "several results": lambda x, y, v, n: torch.var_mean(x, int(n) % 2)[1] * x.max(int(n) % 2)[0],
    "a list of results": lambda x, y, v, n: torch.stack([*x.split(2, -1), *(y.chunk(2, 1))]),
}


def written(*steps: Callable[[Any, Any, Any, Any, float], Any]) -> Function:
    """Return a function that makes a tensor z [3, 4], writes into it, and returns it."""

    def function(x: Any, y: Any, v: Any, n: float) -> Any:
        z = x.clone() if n % 2 else torch.zeros(3, 4, dtype=torch.float64)
        for step in steps:
            step(z, x, y, v, n)
        return z

    return function


def setting(index: Any) -> Callable[[Any, Any, Any, Any, float], Any]:
    def write(z: Any, x: Any, y: Any, v: Any, n: float) -> None:
        z[index] = y[index] + z[index]
        z[index] = n

    return write


def adding(z: Any, x: Any, y: Any, v: Any, n: float) -> None:
    z += y
    z[:, 1:] *= n
    z[0] -= v


ROWS, MASK = torch.tensor([2, 0]), torch.tensor([[True, False, True, True]] * 3)

CALLS |= {
    "a write": written(
        lambda z, x, y, v, n: z.add_(x).mul_(n),
        lambda z, x, y, v, n: z.sub_(y, alpha=n),
        lambda z, x, y, v, n: z.sin_().clamp_(-0.5, n),
    ),
    "a write of other ranks": written(
        lambda z, x, y, v, n: z.add_(v), lambda z, x, y, v, n: z.addcmul_(x, v, value=n)
    ),
    "operators of Python that write": written(adding),
    "an assigned row": written(setting(1), setting((0, slice(None)))),
    "an assigned part": written(setting((slice(1, None), 2)), setting((..., -1))),
    "assigned positions": written(setting(ROWS), setting([0, 2]), setting((slice(None), ROWS))),
    "an assigned mask": written(setting(MASK)),
    "index_put_": written(
        lambda z, x, y, v, n: z.index_put_((ROWS,), y[:2]),
        lambda z, x, y, v, n: z.T.index_put_((ROWS,), y.T[1:3], accumulate=True),
    ),
    "scatter_": written(
        lambda z, x, y, v, n: z.scatter_(0, ROWS[None].expand(2, 2), y),
        lambda z, x, y, v, n: z.index_add_(0, ROWS, x[1:], alpha=int(n)),
    ),
    "a fill": written(
        lambda z, x, y, v, n: z.copy_(v),
        lambda z, x, y, v, n: z.masked_fill_(MASK, n),
        lambda z, x, y, v, n: z[0].fill_(n),
        lambda z, x, y, v, n: z.T[1].zero_(),
        lambda z, x, y, v, n: z.masked_fill_(x > 0, n),
    ),
    "a view": written(
        lambda z, x, y, v, n: z[1].add_(v),
        lambda z, x, y, v, n: z.T[2:].mul_(n),
        lambda z, x, y, v, n: z.view(-1)[3:].cos_(),
    ),
    "a read by positions": lambda x, y, v, n: x[ROWS] + y[[0, 2]] * x[:, None, ROWS[:1]].sum(),
}


def batches(draw: random.Random) -> tuple[list[torch.Tensor], list[int | None]]:
    """Draw batches of x, y and v of five examples, and their in_dims."""
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    shapes, tensors, dims = ((3, 4), (3, 4), (4,)), [], []
    for place, shape in enumerate(shapes):
        dim = draw.choice([None, *range(len(shape) + 1)]) if place else 0
        size = list(shape)
        if dim is not None:
            size.insert(dim, 5)
        tensors.append(torch.randn(size, dtype=torch.float64, generator=generator))
        dims.append(dim)
    return tensors, dims


def loop(f: Function, tensors: Sequence[torch.Tensor], dims: Sequence[int | None]) -> Any:
    examples = [
        f(*[x if dim is None else x.select(dim, i) for x, dim in zip(tensors, dims, strict=True)])
        for i in range(5)
    ]
    return torch.stack(examples)


@pytest.mark.parametrize("name", CALLS)
def test_calls_with_a_plan_equal_the_loop(name: str) -> None:
    seed = random.randrange(10**9)
    print("seed", seed)
    draw = random.Random(seed)
    for _ in range(8):
        tensors, dims = batches(draw)
        n = float(draw.randrange(1, 7))

        def f(x: Any, y: Any, v: Any, n: float = n) -> Any:
            return CALLS[name](x, y, v, n)

        def pushed(x: Any, y: Any, v: Any) -> Any:
            return jvp(lambda x: f(x, y, v), (x,), (y,))[1]

        def pulled(x: Any, y: Any, v: Any) -> Any:
            return grad(lambda x: f(x, y, v).square().sum())(x)

        def nested(x: Any, y: Any, v: Any) -> Any:
            return vmap(lambda x: f(x, y, v))(torch.stack([x, y, -x]))

        for function in (f, pushed, pulled, nested):
            expected = loop(function, tensors, dims)
            torch.testing.assert_close(vmap(function, tuple(dims))(*tensors), expected)


@pytest.mark.parametrize(
    "name",
    [
        "sort",
        "topk",
        "max",
        "min",
        "median",
        "mode",
        "kthvalue",
        "cummax",
        "unbind",
        "split",
        "chunk",
    ],
)
def test_several_results_are_in_the_class_that_torch_returns(name: str) -> None:
    draw = random.Random(seed := random.randrange(10**9))
    print("seed", seed)
    rank = draw.randint(1, 3)
    dim, axis = draw.randrange(-rank, rank), draw.randrange(-rank - 1, rank + 1)
    given = (2, dim) if name in ("topk", "kthvalue", "split", "chunk") else (dim,)
    batch = torch.randn(draw.choice((1, 3)), *[draw.randint(2, 4) for _ in range(rank)])
    expected = [getattr(x, name)(*given) for x in batch]
    classes = []

    def function(x: torch.Tensor) -> Any:
        out: Any = getattr(x, name)(*given)
        classes.append(type(out))
        return tuple(out)

    for _ in range(3):
        found = vmap(function, in_dims=axis)(batch.movedim(0, axis))
        torch.testing.assert_close(found, tuple(map(torch.stack, zip(*expected, strict=True))))
    assert set(classes) == {type(expected[0])}


def plans(function: Any) -> CallPlanTable:
    found = FUNCTION_PLANS[function]
    assert found is not None
    return found


def test_numbers_and_lengths_of_lists_have_one_plan() -> None:
    FUNCTION_PLANS.clear()
    x = torch.arange(12.0).reshape(3, 4)
    for n in range(1, 6):
        assert vmap(lambda x, n=n: x.roll(n))(x).equal(x.roll(n, 1))
        assert vmap(lambda x, n=n: torch.cat([x] * n))(x).equal(torch.cat([x] * n, 1))
        assert vmap(lambda x, n=n: x * float(n))(x).equal(x * n)
    assert [plan.step for plan in plans(torch.Tensor.roll).plans.values()] == [PlanStep.RULE]
    assert [plan.step for plan in plans(torch.cat).plans.values()] == [PlanStep.RULE]
    assert [plan.step for plan in plans(torch.Tensor.mul).plans.values()] == [PlanStep.DIRECT]


def test_each_batch_dim_and_class_of_argument_has_a_plan_of_its_own() -> None:
    FUNCTION_PLANS.clear()
    x = torch.arange(12.0).reshape(3, 4)
    for dim in (0, 1):
        for other in (2, 2.0, x.select(dim, 0)):
            torch.testing.assert_close(
                vmap(lambda x, other=other: torch.add(x, other), dim)(x),
                (x.movedim(dim, 0) + other),
            )
    made = plans(torch.add).plans
    assert set(made) == {(dim, kind) for dim in (0, 1) for kind in (int, float, torch.Tensor)}


@pytest.mark.parametrize(
    ("function", "call", "step"),
    [
        (torch.Tensor.add_, lambda z, x: z.add_(x), PlanStep.SAME_RANK),
        (torch.Tensor.mul_, lambda z, x: z.mul_(2.0), PlanStep.DIRECT),
        (torch.Tensor.copy_, lambda z, x: z.copy_(x), PlanStep.BELOW_AUTOGRAD),
        (torch.Tensor.__setitem__, lambda z, x: z.__setitem__(0, x[1]), PlanStep.BELOW_AUTOGRAD),
        (
            torch.Tensor.index_put_,
            lambda z, x: z.index_put_((ROWS,), x[:2]),
            PlanStep.BELOW_AUTOGRAD,
        ),
        (torch.Tensor.squeeze_, lambda z, x: z.squeeze_(0), PlanStep.TABLE),
        (torch.Tensor.bernoulli_, lambda z, x: z.copy_(x).bernoulli_(), PlanStep.TABLE),
    ],
    ids=["tensors", "a number", "copy", "item", "positions", "shape", "random"],
)
def test_plans_of_writes(function: Any, call: Any, step: PlanStep) -> None:
    """A write into a batched tensor has a plan; the first write into a plain tensor does not."""
    batch = torch.rand(4, 3, 4, dtype=torch.float64).round()
    for made in (torch.clone, lambda x: torch.zeros(3, 4, dtype=torch.float64)):
        FUNCTION_PLANS.clear()

        def f(x: Any, made: Any = made) -> Any:
            z = made(x)
            z[:] = x
            call(z, x)
            return z

        for _ in range(3):
            found = vmap(f, randomness="different")(batch)
        if function is not torch.Tensor.bernoulli_:
            assert found.equal(torch.stack([f(x) for x in batch]))
        steps = {plan.step for key, plan in plans(function).plans.items() if key[0] == 0}
        assert steps == {step}


@pytest.mark.parametrize("level_grad", [False, True])
def test_a_write_that_torch_refuses_is_refused_by_each_call(level_grad: bool) -> None:
    """The written tensor keeps its rank, and its value if the write is refused."""
    x, rows = torch.randn(2, 5, 3, dtype=torch.float64), torch.randn(5, 1, 3, dtype=torch.float64)
    refused: list[tuple[Function, Any]] = [
        (lambda z, y: z.add_(y), rows),
        (lambda z, y: z.copy_(y), rows[0].expand(2, 3)),
        (lambda z, y: z.mul_(y), torch.randn(5, 2, 3)),
        (lambda z, y: z[:2].add_(y), rows),
        (lambda z, y: z.expand(2, 3).add_(1), rows),
    ]
    for write, y in refused:
        for _ in range(4):

            def f(x: Any, y: Any, write: Any = write) -> Any:
                z = x * 1
                with pytest.raises(RuntimeError):
                    write(z, y)
                return z.sum() if level_grad else z

            out = vmap(grad(f) if level_grad else f, (0, 0 if y.dim() == 3 else None))(x[0], y)
            assert out.equal(torch.ones_like(x[0]) if level_grad else x[0])


def test_a_cast_has_a_direct_plan_and_may_return_its_argument() -> None:
    FUNCTION_PLANS.clear()
    batch = torch.rand(4, 2, 3, 3, 3, dtype=torch.float64)

    def f(x: Any) -> Any:
        x = x * 1
        same, other = x.double(), x.float()
        assert same is x
        same += 1
        return x, other, other.half(memory_format=torch.channels_last)

    for _ in range(3):
        for found, wanted in zip(vmap(f)(batch), zip(*map(f, batch), strict=True), strict=True):
            assert found.dtype is wanted[0].dtype and found.equal(torch.stack(wanted))
            assert found[0].stride() == wanted[0].stride()
    for cast in (torch.Tensor.double, torch.Tensor.float):
        assert [plan.step for plan in plans(cast).plans.values()] == [PlanStep.DIRECT]


def test_the_number_of_plans_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_plans, "_MOST_PLANS", 3)
    FUNCTION_PLANS.clear()
    x = torch.arange(48.0).reshape(2, 2, 2, 2, 3)
    for dim in range(5):
        assert vmap(torch.sin, dim, dim)(x).equal(x.sin())
        assert len(plans(torch.sin).plans) <= 3


def test_autograd_at_the_level_has_a_table_of_its_own() -> None:
    FUNCTION_PLANS.clear()
    x = torch.linspace(-1, 1, 6).reshape(2, 3)
    assert vmap(grad(lambda x: torch.sin(x).sum()))(x).allclose(x.cos())
    assert [plan.step for plan in plans(torch.sin).recorded.values()] == [PlanStep.RECORDED]
    assert not plans(torch.sin).plans


@pytest.mark.parametrize(
    ("function", "call", "in_dim", "step"),
    [
        (F.layer_norm, lambda x: F.layer_norm(x, (3,)), 0, PlanStep.COMPOSITE),
        (torch.Tensor.view, lambda x: x.view(3, 2), 0, PlanStep.RECORDED),
        (torch.Tensor.view, lambda x: x.view(2, 3), 1, PlanStep.TABLE),
        (torch.Tensor.reshape, lambda x: x.reshape(3, 2), 0, PlanStep.RECORDED),
        (torch.Tensor.__getitem__, lambda x: x[0, 1:], 0, PlanStep.RECORDED),
        (torch.Tensor.__getitem__, lambda x: x[x.argmax() // 6], 0, PlanStep.RECORDED),
        (torch.Tensor.select, lambda x: x.select(0, 1), 0, PlanStep.RECORDED),
    ],
    ids=["parts", "view", "moved view", "reshape", "index", "index by number", "select"],
)
def test_plans_of_calls_that_autograd_records(
    function: Any, call: Any, in_dim: int, step: PlanStep
) -> None:
    """A function rule that leaves a call to torch does not prevent a plan."""
    batch = torch.randn(4, 2, 3, dtype=torch.float64)
    plans = FUNCTION_PLANS.get(function)
    if plans is not None:
        plans.recorded.clear()

    def loss(x: torch.Tensor) -> torch.Tensor:
        return call(x.sin()).square().sum()

    for _ in range(2):
        found = vmap(grad(loss), in_dim)(batch.movedim(0, in_dim))
    assert torch.allclose(found, torch.stack([torch.func.grad(loss)(x) for x in batch]))
    plans = FUNCTION_PLANS[function]
    assert plans is not None
    assert {plan.step for plan in plans.recorded.values()} == {step}
