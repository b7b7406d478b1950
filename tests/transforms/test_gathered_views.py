"""Views at positions that differ between examples: writes through them reach the tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.func
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tsfunc
from tests.transforms.support import loop, same
from tsfunc import vmap
from tsfunc.bridge.writing.tracer_hooks import hook_of

Y = torch.arange(1.0, 37.0, dtype=torch.float64).view(4, 3, 3).sin()
I = torch.tensor([0, 2, 1, 2])  # noqa: E741
P = torch.tensor([1, 0, -3, 1])
W = torch.arange(3.0, dtype=torch.float64).cos()

Change = Callable[[Tensor, Tensor, Tensor], Any]


def test_the_plain_case() -> None:
    def func(y: Tensor, i: Tensor) -> Tensor:
        y = y.clone()
        y[i].add_(1)  # a row of each example's own
        return y

    want = Y.clone()
    for k, i in enumerate(I):
        want[k, i] += 1
    same(vmap(func)(Y, I), want)


def _rows(y: Tensor, i: Tensor) -> None:
    for row in y[i]:
        row.mul_(2)


def _read_after_a_write_to_the_tensor(y: Tensor, i: Tensor) -> None:
    view = y[i]
    y.add_(1)
    y[0].copy_(view)


def _two_that_overlap(y: Tensor, i: Tensor, p: Tensor) -> None:
    one, other = y[i], y[:, p]
    one.add_(other.clone())
    other.mul_(one.clone())
    one[p].neg_()


def _transpose_and_write(y: Tensor, view: Tensor) -> None:
    y.t_().add_(1)
    view.mul_(2)


def _index_and_change(y: Tensor, index: Tensor) -> None:
    view = y[index]
    index.add_(1)
    view.add_(1)


CHANGES: dict[str, Change] = {
    "add_": lambda y, i, p: y[i].add_(1),
    "+=": lambda y, i, p: y.__setitem__(i, y[i].__iadd__(1)),
    "copy_": lambda y, i, p: y[i].copy_(W),
    "item": lambda y, i, p: y[i].__setitem__(0, 5.0),
    "slice": lambda y, i, p: y[i].__setitem__(slice(1, 3), W[:2]),
    "mask": lambda y, i, p: y[i].__setitem__(y[i] > 0, 0.0),
    "in a tuple": lambda y, i, p: y[(i,)].add_(1),
    "with a slice": lambda y, i, p: y[i, 1:3].zero_(),
    "of columns": lambda y, i, p: y[:, i].add_(1),
    "after an ellipsis": lambda y, i, p: y[..., i].mul_(2),
    "with a new dim": lambda y, i, p: y[None, i].mul_(2),
    "of both": lambda y, i, p: y[i, p].add_(1),
    "of one, then the other": lambda y, i, p: y[i][p].add_(1),
    "a slice of its own": lambda y, i, p: y[i % 2 : i % 2 + 2].add_(1),
    "select": lambda y, i, p: y.select(0, i).add_(1),  # type: ignore[arg-type]
    "select by name": lambda y, i, p: torch.select(y, dim=-1, index=p).add_(1),  # type: ignore[arg-type]
    "narrow": lambda y, i, p: y.narrow(0, i % 2, 2).mul_(2),
    "narrow by name": lambda y, i, p: torch.narrow(y, dim=1, start=i % 2, length=2).mul_(2),
    "transposed": lambda y, i, p: y[i % 2 : i % 2 + 2].t().add_(1),
    "of a view": lambda y, i, p: y.t()[i].add_(1),
    "of a reshaped view": lambda y, i, p: y.view(-1)[i].add_(1),
    "of a diagonal": lambda y, i, p: y.diagonal()[i].add_(1),
    "reshaped": lambda y, i, p: y[i].view(1, 3).add_(W),
    "one of several": lambda y, i, p: y[i].unbind(0)[1].add_(1),
    "each of several": lambda y, i, p: _rows(y, i),
    "data": lambda y, i, p: y[i].data.add_(1),
    "out=": lambda y, i, p: torch.add(y[i], 1, out=y[i]),
    "an overload": lambda y, i, p: torch.ops.aten.add_.Tensor(y[i], W),
    "an overload packet": lambda y, i, p: torch.ops.aten.add_(y[i], W),
    "a list of them": lambda y, i, p: torch._foreach_add_([y[i], y[:, p]], 1.0),
    "a changed shape": lambda y, i, p: y[i].unsqueeze_(0).add_(1),
    "a base of another shape": lambda y, i, p: _transpose_and_write(y, y[i]),
    "read afterwards": lambda y, i, p: _read_after_a_write_to_the_tensor(y, i),
    "two that overlap": _two_that_overlap,
    "the index changes": lambda y, i, p: _index_and_change(y, i.clone()),
}


# Python reads these from a plain tensor before any handler runs.
ASKED_BY_PYTHON = ("a slice of its own", "select", "select by name", "transposed")


def written(change: Change) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def func(y: Tensor, i: Tensor, p: Tensor) -> Tensor:
        y = y.clone()
        change(y, i, p)
        return y

    return func


@pytest.mark.parametrize("name", CHANGES)
def test_written_in_place(name: str) -> None:
    func = written(CHANGES[name])
    want = loop(func, 4)(Y, I, P)
    same(vmap(func)(Y, I, P), want)
    same(vmap(func, in_dims=(2, 0, 0))(Y.movedim(0, 2), I, P), want)
    alone = vmap(func, in_dims=(None, 0, 0))
    if name in ASKED_BY_PYTHON:
        with pytest.raises(tsfunc.errors.DataDependentError):
            alone(Y[0], I, P)
    else:
        same(alone(Y[0], I, P), loop(lambda i, p: func(Y[0], i, p), 4)(I, P))
    both = vmap(alone, in_dims=(0, None, None))(Y, I, P)
    same(both, loop(lambda y: loop(lambda i, p: func(y, i, p), 4)(I, P), 4)(Y))
    both = vmap(vmap(func, in_dims=(0, None, None)), in_dims=(None, 0, 0))(Y, I, P)
    same(both, loop(lambda i, p: loop(lambda y: func(y, i, p), 4)(Y), 4)(I, P))


# torch's autograd refuses these, too.
NOT_DIFFERENTIABLE = ("one of several", "each of several", "out=", "two that overlap", "data")


@pytest.mark.parametrize("name", [n for n in CHANGES if n not in NOT_DIFFERENTIABLE])
def test_derivatives_of_writes_to_gathered_views(name: str) -> None:
    func = written(CHANGES[name])
    weights = torch.arange(9.0, dtype=torch.float64).view(3, 3).cos()

    def scalar(y: Tensor, i: Tensor, p: Tensor) -> Tensor:
        return (func(y * 1.5, i, p) ** 2 * weights).sum()

    want = torch.stack([tsfunc.grad(scalar)(y, i, p) for y, i, p in zip(Y, I, P, strict=True)])
    same(vmap(tsfunc.grad(scalar))(Y, I, P), want)
    same(tsfunc.grad(lambda y: vmap(scalar)(y, I, P).sum())(Y), want)

    def pushed(y: Tensor, i: Tensor, p: Tensor) -> Any:
        return tsfunc.jvp(lambda y: scalar(y, i, p), (y,), (y.cos(),))

    values = vmap(scalar)(Y, I, P)
    same(vmap(pushed)(Y, I, P), (values, (want * Y.cos()).flatten(1).sum(1)))


@pytest.mark.parametrize("name", CHANGES)
def test_programs_of_writes_to_gathered_views(name: str) -> None:
    """One index that all examples share, and the indices of a batch, in one program."""
    func = written(CHANGES[name])
    if "slice of its own" not in name and name != "transposed":  # sizes unknown in a trace
        program = tsfunc.specialize(func)
        same(torch.stack([program(*given) for given in zip(Y, I, P, strict=True)]),
             loop(func, 4)(Y, I, P))  # fmt: skip
        same(tsfunc.specialize(vmap(func))(Y, I, P), loop(func, 4)(Y, I, P))


class Program:
    """Views of views and writes through them, from random numbers; torch defines the results."""

    VIEWS: tuple[Callable[[Tensor, Tensor, Tensor], Tensor], ...] = (
        lambda v, i, p: v[i % v.shape[0]],
        lambda v, i, p: v[..., p % v.shape[-1]],
        lambda v, i, p: v.select(0, p % v.shape[0]),  # type: ignore[arg-type]
        lambda v, i, p: v.narrow(0, i % (v.shape[0] - 1), 2),
        lambda v, i, p: v[(q := p % (v.shape[0] - 1)) : q + 2],
        lambda v, i, p: v[1:],
        lambda v, i, p: v[..., -1],
        lambda v, i, p: v.transpose(0, -1),
        lambda v, i, p: v.diagonal(),
        lambda v, i, p: v.view(-1),
        lambda v, i, p: v.unsqueeze(0),
        lambda v, i, p: v.detach(),
    )
    WRITES: tuple[Callable[[Tensor, Tensor], Any], ...] = (
        lambda v, other: v.add_(1),
        lambda v, other: v.mul_(other.sum()),
        lambda v, other: v.copy_(other.clone()),
        lambda v, other: v.neg_(),
        lambda v, other: v.__setitem__(0, 0.5),
        lambda v, other: v.__setitem__(v > 0.5, 0.25),
        lambda v, other: v.t_().add_(other.mean()),
        lambda v, other: torch.add(v.clone(), 2, out=v),
    )

    def __init__(self, steps: list[tuple[int, int, int, int]]) -> None:
        self.steps = steps

    def __call__(self, y: Tensor, i: Tensor, p: Tensor) -> tuple[Tensor, ...]:
        views = [y.clone()]
        for writes, kind, which, other in self.steps:
            chosen, another = views[which % len(views)], views[other % len(views)]
            if writes:
                self.WRITES[kind % len(self.WRITES)](chosen, another)
            else:
                views.append(self.VIEWS[kind % len(self.VIEWS)](chosen, i, p))
        return (*views[1:], views[0])


STEP = st.tuples(st.integers(0, 1), *[st.integers(0, 11)] * 3)


@settings(max_examples=120, deadline=None)
@given(steps=st.lists(STEP, min_size=2, max_size=7), nested=st.booleans())
def test_any_program_of_views_and_writes(
    steps: list[tuple[int, int, int, int]], nested: bool
) -> None:
    program = Program(steps)  # the mean of an empty view is NaN
    try:
        want = loop(program, 4)(Y, I, P)
    except (RuntimeError, IndexError, ValueError):
        return  # torch refuses it
    try:
        same(vmap(program)(Y, I, P), want, equal_nan=True)
    except RuntimeError as error:  # for a batch, some of these views do not exist
        assert "view size is not compatible" in str(error)
        return
    if nested:
        both = vmap(vmap(program, in_dims=(0, None, None)), in_dims=(None, 0, 0))
        rows = loop(lambda i, p: loop(lambda y: program(y, i, p), 4)(Y), 4)(I, P)
        same(both(Y, I, P), rows, equal_nan=True)


@settings(max_examples=80, deadline=None)
@given(steps=st.lists(STEP, min_size=2, max_size=6))
def test_derivatives_of_drawn_programs(steps: list[tuple[int, int, int, int]]) -> None:
    program = Program(steps)

    def scalar(y: Tensor, i: Tensor, p: Tensor) -> Tensor:
        outs = program(y * 1.5, i, p)
        return torch.stack([(out.sin() ** 2).sum() for out in outs]).sum()

    def gradient(y: Tensor, i: Tensor, p: Tensor) -> Tensor:
        y = y.detach().clone().requires_grad_()
        return torch.autograd.grad(scalar(y, i, p), y)[0]

    try:
        want = loop(gradient, 4)(Y, I, P)
    except (RuntimeError, IndexError, ValueError):
        return  # torch refuses it
    same(vmap(tsfunc.grad(scalar))(Y, I, P), want)
    same(tsfunc.grad(lambda y: vmap(scalar)(y, I, P).sum())(Y), want)


def test_one_from_outside_is_refused() -> None:
    table = Y[0].clone()
    with pytest.raises(RuntimeError, match=r"add_ writes values .* into `table`.*not batched"):
        vmap(lambda i: table[i].add_(1))(I)
    same(table, Y[0])
    same(vmap(lambda i: table[i] + 1)(I), Y[0][I] + 1)


def test_a_view_is_returned_as_the_tensor_was_left() -> None:
    def func(y: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
        y = y.clone()
        view = y[i]
        part = view[1:]
        y.mul_(3)
        return view, part

    same(vmap(func)(Y, I), loop(func, 4)(Y, I))
    same(vmap(lambda i: func(Y[0], i))(I), loop(lambda i: func(Y[0], i), 4)(I))


def test_viewed_where_the_batch_lies_between_its_dims() -> None:
    """The view changes its memory layout, and so does its base."""

    def func(i: Tensor) -> tuple[Tensor, Tensor]:
        y = Y.clone()
        view = y[:, i].view(2, 2, 3)
        view.add_(1)
        return view, y

    same(vmap(func)(I), loop(func, 4)(I))


def test_an_index_that_is_the_same_for_all_is_a_number() -> None:
    """The result is torch's own view, without a copy."""

    def func(y: Tensor, i: Tensor) -> Tensor:
        y = y.clone()
        view = y[i]
        assert not hook_of(view)
        return view.add_(1) + y[i] + y[i : i + 2].sum()

    want = loop(lambda y: func(y, I[2]), 4)(Y)
    same(vmap(vmap(func, in_dims=(0, None)), in_dims=(0, None))(Y[None], I[2])[0], want)


def test_gathered_in_the_bodies_of_loops_of_a_program() -> None:
    """Function modes of the bodies are active when the version of the tensor is read."""
    x = Y[:, :, 0]

    def row(y: Tensor) -> Tensor:
        def step(carry: Tensor, each: Tensor) -> tuple[Tensor, Tensor]:
            first = y[torch.tensor(1)]
            return carry.sin() + first, first * each

        return torch.cat([v.reshape(-1) for v in tsfunc.scan(step, y, y)])

    def every(x: Tensor) -> Tensor:
        mapped = tsfunc.map(row, x)
        assert isinstance(mapped, Tensor)
        return mapped

    same(tsfunc.specialize(every)(x), torch.stack([row(each) for each in x]))


@pytest.mark.parametrize(
    "index",
    [lambda i: i, lambda i: (..., i), lambda i: slice(i, i + 2)],
    ids=["int", "last", "slice"],
)
def test_an_index_that_a_trace_knows_writes_through_a_view(index: Any) -> None:
    """The written value may be the same view: ``v[i] += 1`` reads and writes one."""

    def f(x: Tensor) -> Tensor:
        v, i = x.expand(4, 4).clone(), torch.arange(1).reshape(())
        part = v[index(i)]
        part += 1
        v[index(i)] = part
        v[index(i)] *= 3
        v[index(i + 1)] = v[index(i)].clone()
        return v

    x = torch.randn(4)
    expected = f(x)
    for transformed in (tsfunc.specialize(f), tsfunc.specialize(lambda x: tsfunc.vmap(f)(x[None]))):
        torch.testing.assert_close(transformed(x).reshape(4, 4), expected)
