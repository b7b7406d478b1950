"""Declared changes of arguments are the changes that batching rules make.

Handlers can run a rule as data (``ops/shifts``): they change the arguments as declared and call the
operator. The tests make the changes by hand, and call the operator under vmap with the handlers of
this process: the compiled ones if they are built.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import tsfunc
from tests.ops.harness import SIZE, Level, overload, vary
from tests.ops.registry_calls import calls
from tests.ops.registry_examples import Call
from tests.ops.test_registry import APART, ROWS
from tsfunc.ops import all_rows
from tsfunc.ops.shifts import Shift, shifts_of

DECLARED = sorted(
    name
    for name in ROWS - APART
    if shifts_of(all_rows()[name].rule) is not None and not overload(name)._schema.is_mutable
)


# Calls that the declaration covers; the rule serves other calls of these operators.
OTHERS: dict[str, Call] = {
    "aten::stack": ([[torch.randn(2, 3), torch.randn(2, 3)], 1], {}),
    "aten::select_backward": ([torch.randn(3), [2, 3], 0, 1], {}),
    "aten::roll": ([torch.randn(3, 4), [2, 1], [-1, 0]], {}),
    "aten::ones_like": ([torch.randn(3, 4)], {}),
    "aten::norm.ScalarOpt_dim": ([torch.randn(3, 4), 2, [0]], {}),
    "aten::norm.ScalarOpt_dim_dtype": ([torch.randn(3, 4), 1, [0], True], {"dtype": torch.float64}),
    "aten::expand": ([torch.randn(3, 1), [3, 4]], {}),
    "aten::expand_copy": ([torch.randn(3, 1), [3, 4]], {}),
    "aten::broadcast_to": ([torch.randn(3, 1), [3, 4]], {}),
    "aten::squeeze.dim": ([torch.randn(3, 1), 1], {}),
    "aten::squeeze.dims": ([torch.randn(3, 1), [1, 0]], {}),
    "aten::squeeze_copy.dim": ([torch.randn(3, 1), 1], {}),
    "aten::squeeze_copy.dims": ([torch.randn(3, 1), [1, 0]], {}),
}


def past(dim: int) -> int:
    return dim + 1 if dim >= 0 else dim


def changed(arg: Any, change: int, rank: int) -> Any:
    """Return an argument changed for a batch whose batch dim is first.

    Return None if the declaration leaves the call to the rule.
    """
    if change == Shift.FEW:
        return arg if rank <= 3 else None
    if change in (Shift.DIM, Shift.NEW_DIM):
        return past(arg)
    if change == Shift.DIMS:
        return past(arg) if isinstance(arg, int) else [past(dim) for dim in arg or ()] or None
    if change == Shift.ORDER:
        return [0, *[past(dim) for dim in arg]]
    if change == Shift.SIZES or (change == Shift.ALL_SIZES and len(arg) == rank):
        return [SIZE, *arg]
    return arg if change == Shift.SAME else None


def of_each_example(args: Sequence[Any]) -> list[list[Any]]:
    def one(arg: Any, i: int) -> Any:
        if isinstance(arg, Tensor):
            return vary(arg, i)
        return [one(x, i) for x in arg] if isinstance(arg, list | tuple) else arg

    return [[one(arg, i) for arg in args] for i in range(SIZE)]


def stacked(values: Sequence[Any]) -> Any:
    if isinstance(values[0], Tensor):
        return torch.stack(list(values))
    if isinstance(values[0], list | tuple):
        return [stacked(items) for items in zip(*values, strict=True)]
    return values[0]


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for x in value for t in tensors(x)] if isinstance(value, list | tuple) else []


def completed(name: str, args: Sequence[Any]) -> list[Any]:
    """Return the arguments with those that the declaration changes; missing dims are drawn."""
    changes = shifts_of(all_rows()[name].rule)
    assert changes is not None
    made, rank = list(args), tensors(args)[0].dim()
    for place, change in enumerate(changes):
        schema: Any = overload(name)._schema.arguments[place]
        if place >= len(made):
            made.append(schema.default_value)
        if change == Shift.DIMS and rank and made[place] in (None, [], ()):
            dim = random.randrange(-rank, rank)
            made[place] = [dim] if "List" in str(schema.type) else dim
    return made


def served(name: str, call: Call) -> list[Any] | None:
    """Return the changed arguments of a call that the declaration covers, else None."""
    args, _ = call
    changes = shifts_of(all_rows()[name].rule)
    assert changes is not None
    ranks = {x.dim() for x in tensors(args)}
    if len(changes) > len(args) or len(ranks) != 1 or 0 in ranks:
        return None
    if any(x.layout is not torch.strided for x in tensors(args)):
        return None
    physical = [stacked(column) for column in zip(*of_each_example(args), strict=True)]
    rank = ranks.pop()
    for i, change in enumerate(changes):
        physical[i] = changed(physical[i], change, rank)
        if physical[i] is None:
            return None
    return physical


@pytest.mark.parametrize("name", DECLARED)
def test_rules_change_their_arguments_as_they_declare(name: str) -> None:
    seed = random.randrange(10**9)
    print("seed", seed)
    random.seed(seed)
    torch.manual_seed(seed)
    op, rule = overload(name), all_rows()[name].rule
    assert rule is not None
    found = 0
    for given_args, kwargs in (*calls(name), *filter(None, [OTHERS.get(name)])):
        args = completed(name, given_args)
        physical = served(name, (args, kwargs))
        if physical is None:
            continue
        found += 1
        examples = of_each_example(args)
        given = [stacked(column) for column in zip(*examples, strict=True)]
        dims = [[0] * len(x) if tensors(x) and isinstance(x, list) else 0 if tensors(x) else None
                for x in given]  # fmt: skip
        out, out_dims = rule(op, Level(), dims, given, kwargs)
        assert set(out_dims if isinstance(out_dims, list | tuple) else [out_dims]) == {0}
        torch.testing.assert_close(
            tensors(op(*physical, **kwargs)), tensors(out), equal_nan=True, rtol=0, atol=0
        )
        loop = [tensors(op(*example, **kwargs)) for example in examples]
        for _ in range(2):  # the second call has a plan
            mapped = tsfunc.vmap(lambda *xs: tensors(op(*xs, **kwargs)), tuple(dims))(*given)  # noqa: B023
            torch.testing.assert_close(mapped, stacked(loop), equal_nan=True)
    assert found, f"Each call of {name} is left to its rule: add one to OTHERS."


def test_numbers_in_place_of_a_list() -> None:
    x = torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
    for _ in range(2):
        for f in (
            lambda x: x.flip(0, 2),
            lambda x: x.permute(2, 0, 1),
            lambda x: x.view(4, -1),
            lambda x: x.reshape(-1),
            lambda x: x.sum((0, -1), True),
            lambda x: x[1:, ..., None, 2],
            lambda x: x[-1, :, [0, 3]],
            lambda x: x.expand(3, 4, 5),
            lambda x: x[0, 0, :1].expand(2, 7),
            lambda x: torch.cat([x, x[:1]], 0).roll(1, -1),
            lambda x: torch.stack([x, -x], -1).transpose(0, 3),
        ):
            expected = torch.stack([f(one) for one in x])
            torch.testing.assert_close(tsfunc.vmap(f)(x), expected)


WRONG: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda x: x.sum(3),
    "transpose": lambda x: x.transpose(0, -4),
    "view": lambda x: x.view(7),
    "unsqueeze": lambda x: x.unsqueeze(5),
    "index": lambda x: x[0, 0, 0, 0],
    "flip": lambda x: x.flip(0, 3),
    "cat": lambda x: torch.cat([x, x], 3),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_are_those_of_one_example(name: str) -> None:
    f = WRONG[name]
    x = torch.ones(2, 3, 4, 5)
    with pytest.raises((RuntimeError, IndexError)) as expected:
        f(x[0])
    for _ in range(2):
        with pytest.raises(expected.type) as got:
            tsfunc.vmap(f)(x)
        assert str(got.value).partition("\n")[0] == str(expected.value).partition("\n")[0]
