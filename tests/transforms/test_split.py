"""``vmap(..., data_dependent="split")``: Python decisions by values of each example."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as nnf
from hypothesis import given
from torch import Tensor, nn

import tsfunc
from tests.transforms.support import loop, same
from tsfunc import vmap
from tsfunc.errors import DataDependentError

split = functools.partial(vmap, data_dependent="split")

X = torch.tensor(
    [[1.0, -2.0, 3.0, 0.0], [-1.0, -2.0, -3.0, 4.0], [0.5, 0.0, 0.0, 2.0],
     [1.0, 5.0, 3.0, 0.0], [-4.0, 0.0, -0.5, 1.0], [2.0, 2.0, 2.0, 2.0]]
)  # fmt: skip


def test_an_example() -> None:
    def leaky(x: Tensor) -> Tensor:
        if x > 0:
            return x
        return x / 10

    same(split(leaky)(torch.tensor([1.0, -1.0, 2.0])), torch.tensor([1.0, -0.1, 2.0]))


def by_if(x: Tensor) -> Tensor:
    if x[0] > 0.7 and x[1] != -2:
        return x * 2
    elif x.sum() < -1:
        return x.exp()
    return -x


def by_while(x: Tensor) -> Tensor:
    steps = 0
    while x.abs().sum() < 100:
        x = x * 1.7
        steps += 1
    return x + steps


def by_range(x: Tensor) -> Tensor:
    total = torch.zeros(4)
    for i in range(x[3].long()):
        total = total + x**i
    return total


def by_dict(x: Tensor) -> Tensor:
    return {-1: torch.sin, 0: torch.cos, 1: torch.tan}[int(x[2].sign())](x)


def by_nested_conditions(x: Tensor) -> Tensor:
    if x.max() > 3:
        if (x == 0).any():
            return x.sort().values
        x = x + 1
    if bool((x < 0).all()):
        return x * 0
    return x.cumsum(0) if x[0] > x[1] else x.flip(0)


def by_a_slice(x: Tensor) -> Tensor:
    n = x[3].long()
    return x[:n].sum() + x[n:].prod() + x[n - 1 : n + 1].mean()


def by_filling(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for i in range(4):
        if x[i] > 0:
            out[i] = x[i]
        else:
            out[i:] += 1
    return out


def by_positions(x: Tensor) -> Tensor:
    return x[x.nonzero().squeeze(1)].sum() + x[torch.where(x > 0)].prod() + len(torch.argwhere(x))


def by_a_mask(x: Tensor) -> Tensor:
    y = x.clone()
    y[y > 1] = torch.arange(float((y > 1).sum()))
    y[y < 0] = 7.0
    return y * x[x != 0].mean() + torch.masked_select(x, x > 0).sum()


def by_counting(x: Tensor) -> Tensor:
    n = x.abs().long()
    repeated = x.repeat_interleave(n)
    return torch.stack([
        torch.bincount(n).float().std(), x.unique().sum(), repeated.mean(),
        x.unique_consecutive(return_counts=True)[1].float().prod(), nnf.one_hot(n).float().mean(),
        torch.unique(x.view(2, 2), dim=0).mean(),
    ])  # fmt: skip


def by_comparing(x: Tensor) -> Tensor:
    if torch.equal(x[:2], x[2:]) or torch.allclose(x[0], x[1], atol=2.5):
        return x.sum()
    return x.prod()


def by_numbers(x: Tensor) -> Tensor:
    first, *_, last = x.tolist()
    number: float = first + math.floor(x[1].item()) + float(x[2]) + last
    return x * number


FUNCTIONS = [
    by_if, by_while, by_range, by_dict, by_nested_conditions, by_a_slice, by_filling, by_positions,
    by_a_mask, by_counting, by_comparing, by_numbers,
]  # fmt: skip
SMOOTH = [by_if, by_while, by_range, by_dict, by_nested_conditions, by_a_slice, by_filling]


@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("func", FUNCTIONS)
def test_as_the_loop(func: Callable[[Tensor], Tensor], chunk_size: int | None) -> None:
    want = loop(func, 6)(X)
    same(split(func, chunk_size=chunk_size)(X), want, equal_nan=True)
    same(split(func, in_dims=1, out_dims=-1)(X.T), want.movedim(0, -1), equal_nan=True)


@pytest.mark.parametrize("func", SMOOTH)
def test_derivatives_of_split_batches(func: Callable[[Tensor], Tensor]) -> None:
    def scalar(x: Tensor) -> Tensor:
        return func(x).sin().sum()

    gradients = loop(torch.func.grad(scalar), 6)(X)
    same(split(tsfunc.grad(scalar))(X), gradients, equal_nan=True)
    same(tsfunc.grad(lambda x: split(scalar)(x).sum())(X), gradients, equal_nan=True)
    leaf = X.clone().requires_grad_()
    split(scalar)(leaf).sum().backward()
    assert leaf.grad is not None
    same(leaf.grad, gradients, equal_nan=True)
    pushed = loop(lambda x, t: torch.func.jvp(func, (x,), (t,))[1], 6)(X, X.cos())
    same(split(lambda x, t: tsfunc.jvp(func, (x,), (t,))[1])(X, X.cos()), pushed, equal_nan=True)
    same(tsfunc.jvp(split(func), (X,), (X.cos(),))[1], pushed, equal_nan=True)
    jacobian = loop(torch.func.jacrev(func), 6)(X)
    same(split(tsfunc.jacrev(func))(X), jacobian, equal_nan=True)
    twice = loop(torch.func.hessian(scalar), 6)(X)
    same(split(tsfunc.hessian(scalar))(X), twice, atol=1e-3, rtol=1e-3, equal_nan=True)


@pytest.mark.parametrize("func", FUNCTIONS)
def test_nested_split_batches(func: Callable[[Tensor], Tensor]) -> None:
    batch = torch.stack([X[:4], X[2:], X.flip(0)[:4]])
    want = loop(loop(func, 4), 3)(batch)
    same(split(split(func))(batch), want, equal_nan=True)
    same(split(split(func), in_dims=1)(batch.movedim(0, 1)), want, equal_nan=True)
    inner = loop(loop(func, 4), 3)(batch)
    same(torch.stack([split(func)(x) for x in batch]), inner, equal_nan=True)


def test_the_outer_vmap_may_be_the_one_that_splits() -> None:
    """The inner vmap's tensors are shared by all of its examples."""

    def outer(scale: Tensor) -> Any:
        def inner(x: Tensor) -> Tensor:
            return x * scale if scale > 0 else x - scale

        return vmap(inner)(torch.arange(3.0))

    scales = torch.tensor([1.0, -2.0, 0.5])
    same(split(outer)(scales), loop(outer, 3)(scales))


def test_parameters_get_their_gradients() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            h: Tensor = self.up(x)
            if h.sum() <= 0:
                h = h * self.down(x)
            return h.tanh()

    net = Gate()
    split(net)(X).square().sum().backward()
    got = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    loop(net, 6)(X).square().sum().backward()
    same(got, [p.grad for p in net.parameters()])
    per_example = split(
        tsfunc.grad(lambda p, x: tsfunc.functional_call(net, p, (x,)).sum()), in_dims=(None, 0)
    )(dict(net.named_parameters()), X)
    assert per_example["up.weight"].shape == (6, 3, 4)


# A program as a tree: each node compares one element, each leaf is a function.
leaves = st.sampled_from([torch.sin, torch.exp, torch.neg, lambda x: x.sum(), lambda x: x * x])
trees = st.recursive(
    leaves, lambda t: st.tuples(st.integers(0, 3), st.floats(-1.5, 1.5), t, t), max_leaves=8
)


def run(tree: Any, x: Tensor) -> Tensor:
    if callable(tree):
        return tree(x) + torch.zeros(4)
    place, threshold, below, above = tree
    if x[place] < threshold:
        return run(below, x * 1.5)
    return run(above, x - 0.5)


@given(tree=trees, size=st.integers(1, 9), chunk_size=st.sampled_from([None, 2, 5]))
def test_decision_trees(tree: Any, size: int, chunk_size: int | None) -> None:
    torch.manual_seed(size)
    batch = torch.randn(size, 4)
    func = functools.partial(run, tree)
    got = split(func, chunk_size=chunk_size)(batch)
    same(got, loop(func, size)(batch))
    total = lambda x: run(tree, x).sum()  # noqa: E731
    same(split(tsfunc.grad(total))(batch), loop(torch.func.grad(total), size)(batch))


@given(counts=st.lists(st.integers(0, 12), min_size=1, max_size=16))
def test_one_run_for_each_path(counts: list[int]) -> None:
    """Each path of several examples runs once; groups are split no more than needed."""
    counts = counts * 3
    runs: list[int] = []
    steps = 0

    def func(n: Tensor) -> Tensor:
        nonlocal steps
        runs.append(0)
        done = torch.zeros(())
        while n > 0:
            steps += 1
            n = n - 1
            done = done + 1
        return done

    got = split(func)(torch.tensor(counts))
    assert got.tolist() == counts
    assert len(runs) == len(set(counts))
    assert steps == sum(set(counts))


def test_the_largest_group_goes_on() -> None:
    sizes: list[int] = []

    def func(x: Tensor) -> Tensor:
        size = torch.zeros(())
        if x > 2:
            size = size + x
        return size

    def watched(x: Tensor) -> Tensor:
        out = func(x)
        sizes.append(x.dispatch_level.batch_size)  # type: ignore[attr-defined]
        return out

    split(watched)(torch.tensor([0.0, 3.0, 4.0, 5.0, 1.0]))
    assert sizes == [3, 2]


def test_equal_values_do_not_split_a_batch() -> None:
    calls = []

    def func(x: Tensor) -> Tensor:
        calls.append(1)
        return x * 2 if (x < 100).all() else x

    same(split(func)(X), X * 2)
    assert len(calls) == 1


class Halved(torch.autograd.Function):
    """A function that reads a value in its forward, and in its backward."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x / 2 if x.sum() > 1 else x * 3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad / 2 if x.sum() > 1 else grad * 3


def test_autograd_functions() -> None:
    def scalar(x: Tensor) -> Tensor:
        out: Tensor = Halved.apply(x)  # type: ignore[no-untyped-call]
        return out.exp().sum()

    want = loop(torch.func.grad(scalar), 6)(X)
    same(split(tsfunc.grad(scalar))(X), want)
    same(tsfunc.grad(lambda x: split(scalar)(x).sum())(X), want)


def test_no_grad_after_examples_parted_cuts_nothing_off() -> None:
    def func(x: Tensor, w: Tensor) -> Tensor:
        h = x * w
        if x.sum() > 1:
            with torch.no_grad():
                h.sum()
            return h * 2
        return h

    w = torch.ones(4, requires_grad=True)
    split(func, in_dims=(0, None))(X, w).sum().backward()
    want = w.grad.clone()  # type: ignore[union-attr]
    w.grad = None
    loop(lambda x: func(x, w), 6)(X).sum().backward()
    same(want, w.grad)


# Writes.


def test_views_follow_a_write_after_examples_parted() -> None:
    calls = []

    def func(x: Tensor) -> Tensor:
        calls.append(1)
        y = x * 1
        tail = y[2:]
        if x[0] > 0:
            tail += 10
        y[0] += 1
        return torch.cat([y, tail])

    same(split(func)(X), loop(func, 6)(X))


def test_writes_into_arguments_reach_the_caller_once() -> None:
    def func(x: Tensor, y: Tensor) -> Tensor:
        x += 1
        if x.sum() > 2:
            x[0] *= 2
            y[1:].neg_()
        return x.sum() + y.sum()

    for arguments in ([X.clone(), X.cos()], [X.T.clone().T, X.repeat(1, 2)[:, ::2]]):
        want = [x.clone() for x in arguments]
        expected = loop(func, 6)(*want)
        same(split(func)(*arguments), expected)
        same(arguments, want)
    batch, want_batch = X.view(2, 3, 4).clone(), X.view(2, 3, 4).clone()
    expected = loop(loop(lambda x: func(x, x.clone()), 3), 2)(want_batch)
    same(split(split(lambda x: func(x, x.clone())))(batch), expected)
    same(batch, want_batch)


def test_an_example_by_itself_writes_into_its_argument() -> None:
    """An example that runs alone has a plain tensor instead of a tracer."""
    seen = []

    def func(x: Tensor) -> Tensor:
        n = int(x.sum())
        x[1:] += n
        seen.append(isinstance(x, tsfunc.Tracer))
        return x * n

    for shape in ((4, 4), (2, 2, 4)):
        argument, want = X[:4].clone().view(shape), X[:4].clone()
        expected = loop(func, 4)(want)
        mapped = split(func) if argument.dim() == 2 else split(split(func))
        seen.clear()
        same(mapped(argument).reshape(4, 4), expected)
        same(argument.reshape(4, 4), want)
        assert argument.dim() == 3 or False in seen


def test_a_failed_call_writes_nothing_into_arguments() -> None:
    def func(x: Tensor) -> Tensor:
        x += 1
        if x.sum() > 2:
            raise KeyError("mine")
        return x

    x = X.clone()
    with pytest.raises(KeyError, match="mine"):
        split(func)(x)
    same(x, X)
    same(vmap(torch.sin)(X), X.sin())


def test_the_functions_own_except_does_not_see_a_new_start() -> None:
    def func(x: Tensor) -> Tensor:
        try:
            y = x * 1
            view = y[1:]
            if x[0] > 0:
                view += 1
            return y
        except Exception:
            return x * 0

    same(split(func)(X), loop(func, 6)(X))


# Results.


def test_results_that_are_no_tensors() -> None:
    def func(x: Tensor) -> Any:
        big = bool(x.sum() > 1)
        return {"count": int(x[3]), "big": big, "name": "big" if big else "small",
                "none": None, "total": x.sum().item(), "x": x}  # fmt: skip

    out = split(func)(X)
    each = [func(x) for x in X]
    same(out["count"], torch.tensor([e["count"] for e in each]))
    same(out["big"], torch.tensor([e["big"] for e in each]))
    same(out["total"], torch.tensor([e["total"] for e in each]))
    assert out["name"] == [e["name"] for e in each]
    assert out["none"] is None
    same(out["x"], X)
    # No value was read: the results are those of any vmap.
    assert split(lambda x: (x, 3, "name"))(X)[1:] == (3, "name")


def test_a_result_that_is_a_tensor_for_some_only() -> None:
    out: Any = split(lambda x: x if x[0] > 0 else None)(X)
    assert [item is None for item in out] == [bool(x[0] <= 0) for x in X]
    same(out[3], X[3])


def test_results_once_for_all() -> None:
    def func(x: Tensor) -> Any:
        return (x * 2 if x.sum() > 1 else x), 5, torch.ones(2)

    out, five, ones = split(func, out_dims=(1, None, None))(X)
    same(out, loop(lambda x: func(x)[0], 6, out_dims=1)(X))
    assert five == 5 and ones.shape == (2,)
    with pytest.raises(ValueError, match="whose out_dim is None a value that differs"):
        split(lambda x: 1 if x.sum() > 1 else 2, out_dims=None)(X)
    with pytest.raises(ValueError, match="whose out_dim is None a value that differs"):
        split(lambda x: torch.ones(()) if x.sum() > 1 else torch.zeros(()), out_dims=None)(X)
    with pytest.raises(IndexError, match=re.escape("expected to be in range of [-1, 0], but got")):
        split(lambda x: int(x[3]), out_dims=1)(X)


def test_structures_must_agree() -> None:
    with pytest.raises(ValueError, match="to return one structure for all examples"):
        split(lambda x: x if x.sum() > 1 else (x, x))(X)


# Random numbers.


@pytest.mark.parametrize("randomness", ["different", "split"])
def test_decided_by_chance(randomness: str) -> None:
    """An example keeps its numbers, so that its decision is the same in each run."""

    def func(x: Tensor) -> tuple[Tensor, Tensor]:
        u = torch.rand(())
        if u < 0.5:
            return u, x + torch.rand(())
        return u, x - torch.rand(())

    x = torch.zeros(4000)
    u, y = split(func, randomness=randomness)(x)
    assert bool(((y > 0) == (u < 0.5)).all())
    assert abs(float((u < 0.5).float().mean()) - 0.5) < 0.04
    assert len(u.unique()) > 3950 and len(y.abs().unique()) > 3950


def test_the_same_draws_for_all_parts() -> None:
    def func(x: Tensor) -> Tensor:
        a = torch.rand(3)
        b = torch.rand(3) if x.sum() > 1 else torch.rand(3) * 2
        return torch.cat([a, b])

    torch.manual_seed(1)
    out = split(func, randomness="same")(X)
    torch.manual_seed(1)
    a, b = torch.rand(3), torch.rand(3)
    after = torch.get_rng_state()
    want = torch.stack([torch.cat([a, b if x.sum() > 1 else 2 * b]) for x in X])
    same(out, want)
    torch.manual_seed(1)
    split(func, randomness="same")(X)
    assert torch.equal(torch.get_rng_state(), after)
    with pytest.raises(RuntimeError, match="randomness error mode"):
        split(func)(X)


# Refusals.


def here(needle: str) -> str:
    """Return ``file:line`` of this file's only line with the text, as in messages."""
    with open(__file__) as file:
        lines = [i for i, line in enumerate(file, 1) if needle in line and "here(" not in line]
    assert len(lines) == 1
    return re.escape(f"{__file__}:{lines[0]}")


def test_the_default_names_the_line_and_the_way_out() -> None:
    def func(x: Tensor) -> Tensor:
        if x.sum() > 0:  # the line that reads
            return x
        return -x

    with pytest.raises(DataDependentError, match=here("# the line that reads")) as caught:
        vmap(func)(X)
    assert 'vmap(..., data_dependent="split")' in str(caught.value)

    def positions(x: Tensor) -> Tensor:
        return x.nonzero()  # the line that finds

    with pytest.raises(DataDependentError, match=here("# the line that finds")) as caught:
        vmap(positions)(X)
    assert 'vmap(..., data_dependent="split")' in str(caught.value)


@pytest.mark.parametrize(
    "func",
    [
        lambda x: x.item(), lambda x: x.tolist(), lambda x: x.nonzero(), lambda x: x[x > 0],
        lambda x: x.unique(), lambda x: torch.equal(x, x + 1), lambda x: torch.allclose(x, x),
        lambda x: x.long().abs().bincount(), lambda x: x.repeat_interleave(x.long().abs()),
        lambda x: torch.masked_select(x, x > 0), lambda x: torch.zeros(int(x[0])),
        lambda x: x[: x[0].long()], lambda x: nnf.one_hot(x.long().abs()),
    ],
    ids=range(13),
)  # fmt: skip
def test_every_refusal_offers_it(func: Callable[[Tensor], Any]) -> None:
    with pytest.raises(DataDependentError, match=re.escape('vmap(..., data_dependent="split")')):
        vmap(func)(X)


def test_an_outer_vmap_that_does_not_split_is_named() -> None:
    def choose(x: Tensor) -> Tensor:
        return x if x.sum() > 1 else -x

    def outer_one(x: Tensor) -> Any:
        return split(choose)(x)

    with pytest.raises(DataDependentError, match=re.escape("inside of vmap(outer_one)")):
        vmap(outer_one)(X.view(2, 3, 4))


def test_an_empty_batch_has_nothing_to_ask() -> None:
    with pytest.raises(DataDependentError, match="batch has size 0"):
        split(lambda x: x if x > 0 else -x)(torch.zeros(0))
    with pytest.raises(DataDependentError, match="batch of size 0"):
        split(lambda x: x.nonzero())(torch.zeros(0, 3))
    assert split(torch.sin)(torch.zeros(0, 3)).shape == (0, 3)


def test_errors_of_single_examples_are_torchs() -> None:
    with pytest.raises(RuntimeError, match="Boolean value of Tensor with more than one value"):
        split(lambda x: x if x > 0 else -x)(X)
    with pytest.raises(ValueError, match="cannot convert float NaN to integer"):
        split(lambda x: x * int(x))(torch.tensor([1.0, math.nan]))
    assert split(lambda x: x * int(x))(torch.tensor([1.5, -0.5, 0.5])).tolist() == [1.5, 0, 0]


def test_a_trace_has_no_values() -> None:
    def func(x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x

    with pytest.raises(DataDependentError, match="but a trace has none"):
        tsfunc.specialize(split(func))(X)
    program = tsfunc.specialize(split(lambda x: x.sin() * len(x)))
    same(program(X), X.sin() * 4)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match=r"data_dependent: expected 'error' or 'split', got 'x"):
        vmap(torch.sin, data_dependent="x")
    with pytest.raises(ValueError, match=r"ragged: expected 'nested', 'list' or 'error', got 3"):
        vmap(torch.sin, ragged=3)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="data_dependent='split' can't be served inside of a"):
        torch.func.vmap(split(torch.sin))(X)


# Together with control flow.


def by_branches(x: Tensor) -> Tensor:
    def high(x: Tensor) -> Tensor:
        return x * 3 if x[1] > 1 else x.exp()

    def low(x: Tensor) -> Tensor:
        return x[x < 0].sum() - x

    return tsfunc.cond(x.sum() > 1, high, low, x)


def by_loops(x: Tensor) -> Tensor:
    def body(x: Tensor) -> Tensor:
        return x * 1.5 + 1 if x[0] > 0 else x * 2 - 1

    return tsfunc.while_loop(lambda x: x.abs().sum() < 60, body, x)


@pytest.mark.parametrize("func", [by_branches, by_loops])
def test_values_read_in_branches_and_loops(func: Callable[[Tensor], Tensor]) -> None:
    want = loop(func, 6)(X)
    same(split(func)(X), want)
    same(split(split(func))(X.view(2, 3, 4)), want.view(2, 3, 4))
    total = lambda x: func(x).sum()  # noqa: E731
    same(split(tsfunc.grad(total))(X), loop(torch.func.grad(total), 6)(X))
    with pytest.raises(DataDependentError, match='data_dependent="split"'):
        vmap(func)(X)


def test_large_batches() -> None:
    """Operators compare the values, NaN and the signs of zeros included."""
    numbers = torch.randn(1000).round()
    numbers[::7], numbers[::11] = math.nan, -0.0

    def signed(x: Tensor) -> Tensor:
        value = x.item()
        return x if math.isnan(value) else x + math.copysign(2.0, value)

    def filled(x: Tensor) -> Tensor:
        out = torch.zeros(3)
        view = out[1:]
        if x > 0:
            out[0] = x
        else:
            view += x
        return torch.cat([out * 2, view])

    for func in (signed, filled):
        same(split(func)(numbers), loop(func, 1000)(numbers), equal_nan=True)
    rows = torch.randint(0, 2, (700, 3))
    read = lambda row: row.sum() * int("".join(map(str, row.tolist())), 2)  # noqa: E731
    same(split(read)(rows), loop(read, 700)(rows))


@pytest.mark.parametrize("outer", [False, True])
def test_a_batch_that_keeps_splitting_continues_example_by_example(outer: bool) -> None:
    """The examples' many paths do not cause additional runs of an example."""
    steps: list[int] = []

    def func(x: Tensor, n: Tensor) -> Tensor:
        i = torch.zeros((), dtype=torch.int64)
        while i < n:
            steps.append(0)
            i, x = i + 1, x.sin()
        return x

    counts = torch.tensor([2**k for k in range(8)])
    x = torch.linspace(-1, 1, 8, dtype=torch.float64)
    split = vmap(func, data_dependent="split")
    if outer:
        split = vmap(split, in_dims=(0, None))
        got = split(torch.stack([x, -x]), counts)[0]
    else:
        got = split(x, counts)
    assert len(steps) <= int(counts.sum()) + 8
    same(got, torch.stack([func(*row) for row in zip(x, counts, strict=True)]))


def test_rare_branches_do_not_split_a_batch() -> None:
    runs: list[int] = []

    def func(x: Tensor) -> Tensor:
        runs.append(0)
        for k in range(5):
            if x == k:
                x = x + 100
        return x.sin()

    x = torch.arange(40.0)
    same(vmap(func, data_dependent="split")(x), torch.stack([func(row) for row in x]))
    assert len(runs) == 6 + 40


def _slope_of_slope(f: Any) -> Any:
    return tsfunc.grad(lambda x, n: tsfunc.grad(f)(x, n).square().sum())


@pytest.mark.parametrize(
    "derivative",
    [
        tsfunc.grad,
        _slope_of_slope,
        tsfunc.hessian,
        tsfunc.jacrev,
        lambda f: lambda x, n: tsfunc.jvp(lambda x: f(x, n), (x,), (x.cos(),))[1],
        lambda f: lambda x, n: tsfunc.jvp(lambda x: tsfunc.grad(f)(x, n), (x,), (x.cos(),))[1],
        lambda f: lambda x, n: tsfunc.vjp(lambda x: f(x, n), x)[1](n.to(x.dtype))[0],
        lambda f: lambda x, n: tsfunc.grad(lambda x: tsfunc.hvp(lambda y: f(y, n), (x,), (x,))
                                           .sum())(x),
    ],
    ids=["grad", "grad(grad)", "hessian", "jacrev", "jvp", "jvp(grad)", "vjp", "grad(hvp)"],
)  # fmt: skip
def test_derivatives_of_examples_by_themselves(derivative: Any) -> None:
    """They are differentiated as outside of the vmap; so are parameters, and the vmap itself."""
    weight = torch.tensor([0.5, -0.3, 0.8], dtype=torch.float64, requires_grad=True)

    def func(x: Tensor, n: Tensor) -> Tensor:
        while n > 0:
            n, x = n - 1, (x * weight).sin() + x
        return x.prod()

    f = derivative(func)
    counts = torch.arange(5)
    x = torch.linspace(-1, 1, 15, dtype=torch.float64).view(5, 3).requires_grad_()
    split, each = vmap(f, data_dependent="split"), [f(*row) for row in zip(x, counts, strict=True)]
    got, expected = split(x, counts), torch.stack(each)
    same(got, expected)
    for leaf in (x, weight):
        (slope,) = torch.autograd.grad(got.sum(), leaf, retain_graph=True)
        (wanted,) = torch.autograd.grad(expected.sum(), leaf, retain_graph=True)
        same(slope, wanted)
    same(tsfunc.grad(lambda x: split(x, counts).sum())(x), slope_by(x, expected))


def slope_by(x: Tensor, y: Tensor) -> Tensor:
    return torch.autograd.grad(y.sum(), x)[0]


@pytest.mark.parametrize(
    "off",
    [
        lambda x: nnf.dropout(x, 0.5, training=False),
        lambda x: nnf.dropout(x, 0.0),
        lambda x: nnf.alpha_dropout(x, 0.5, training=False),
        lambda x: nnf.rrelu(x, training=False),
        lambda x: torch.ops.aten.native_dropout(x, 0.5, False)[0],
    ],
    ids=["eval", "p=0", "alpha", "rrelu", "native"],
)
def test_derivatives_through_a_dropout_that_is_off(off: Callable[[Tensor], Tensor]) -> None:
    """Random operators reach the level of an example that runs alone, even if none draws."""

    def loss(weight: Tensor, x: Tensor) -> Tensor:
        y = off(weight * x)
        if x[0] > 1.5:  # one example
            return y.sin().sum()
        return y.cos().sum() if x[0] < -2 else y.exp().sum()

    weight = torch.randn(4)
    expected = [torch.func.grad(loss)(weight, x) for x in X]
    same(split(tsfunc.grad(loss), in_dims=(None, 0))(weight, X), torch.stack(expected))
    same(split(loss, in_dims=(None, 0))(weight, X), torch.stack([loss(weight, x) for x in X]))


@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN", "pad"])
@pytest.mark.parametrize("derived", [False, True])
@pytest.mark.filterwarnings("ignore::tsfunc.errors.SlowFallbackWarning")
def test_packed_sequences_are_refused_with_the_remedy(name: str, derived: bool) -> None:
    layer = nn.utils.rnn.pad_packed_sequence if name == "pad" else getattr(nn, name)(4, 5)

    def f(x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        out = layer(packed)[0]
        return (out if name == "pad" else out.data).sum()

    batch, lengths = torch.rand(3, 3, 2, 4), torch.tensor([[3, 1], [2, 1], [3, 1]])
    g = tsfunc.grad(f) if derived else f
    with pytest.raises(DataDependentError, match=r"packed sequence, at .*Pass the padded seq"):
        split(g)(batch, lengths)
