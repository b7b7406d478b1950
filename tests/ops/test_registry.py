"""The law of every row of the registry: its rule is the loop over the operator.

Declaring a row is enough to test it here. If the operator's schema does not determine valid
arguments, the test fails and names ``registry_examples.py`` as the place for a call.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tsfunc
import tsfunc.bridge.mesh.mesh_operators  # defines the operators of mesh axes, which have rows
from tests.ops.harness import SIZE, Level, check, overload, plan, vary
from tests.ops.registry_calls import calls
from tests.ops.registry_examples import (
    ELSEWHERE,
    FIRST_RESULTS,
    RUN_BY_HAND,
    UNTRIED,
    Call,
)
from tsfunc.bridge.tracers.schemas import registered_overloads
from tsfunc.errors import DataDependentError
from tsfunc.ops import Category, all_rows, lookup

# The values of these results are undefined; their shapes are compared.
UNDEFINED = {"aten::empty_like", "aten::new_empty", "aten::new_empty_strided"}
# These operators change the shape of their argument and not its data, which only a caller can see.
RESHAPING = {
    "aten::t_", "aten::squeeze_", "aten::squeeze_.dim", "aten::squeeze_.dims", "aten::detach_",
}  # fmt: skip
# The distribution depends on the arguments, so the examples can't share one draw.
OF_ITS_ARGUMENTS = {
    "aten::_sample_dirichlet", "aten::_standard_gamma", "aten::bernoulli",
    "aten::bernoulli.Tensor", "aten::bernoulli_.Tensor", "aten::binomial",
    "aten::multinomial", "aten::normal.Tensor_Tensor", "aten::normal.Tensor_float",
    "aten::normal.float_Tensor", "aten::poisson", "aten::randint_like.Tensor",
    "aten::randint_like.Tensor_generator",
}  # fmt: skip
# This operator returns nothing; tests/transforms/test_debug.py compares the functions that it
# calls.
EFFECTS = {"tsfunc_debug::call"}

AVAILABLE = set(registered_overloads("aten"))
# Some releases of torch lack some operators.
ROWS = {
    name
    for name, row in all_rows().items()
    if row.rule is not None and (not name.startswith("aten::") or name in AVAILABLE)
}
RANDOM = {name for name in ROWS if lookup(name).facts.random} | UNDEFINED
DATA_DEPENDENT = {name for name in ROWS if lookup(name).facts.data_dependent}
APART = {*RANDOM, *DATA_DEPENDENT, *RESHAPING, *ELSEWHERE, *UNTRIED, *RUN_BY_HAND, *EFFECTS}
each = pytest.mark.parametrize


def seeded_calls(name: str) -> list[Call]:
    torch.manual_seed(0)
    found = list(calls(name))
    assert found, f"No call of {name} is known: add one to tests/ops/registry_examples.py."
    return found


@pytest.mark.filterwarnings("ignore:cov.*degrees of freedom")
@each("name", sorted(ROWS - APART))
def test_a_rule_is_the_loop_over_its_operator(name: str) -> None:
    assert sum(check(overload(name), *args, **kwargs) for args, kwargs in seeded_calls(name))


def examples_of(args: list[Any]) -> Iterator[list[Any]]:
    """Return the arguments of each example: all tensors differ, and have the same shapes."""
    for i in range(SIZE):
        yield [vary(arg, i) if isinstance(arg, Tensor) else arg for arg in args]


def mapped(name: str, args: list[Any], kwargs: dict[str, Any], **options: Any) -> Any:
    """Return the operator under vmap, on fresh tensors; with ``axis_size`` if none is batched."""
    op = overload(name)
    tensors = [i for i, arg in enumerate(args) if isinstance(arg, Tensor)]
    columns = list(zip(*examples_of(args), strict=True))
    stacked = [torch.stack(columns[i]) for i in tensors]

    def one(*batched: Tensor) -> Any:
        given = list(args)
        for i, x in zip(tensors, batched, strict=True):
            given[i] = x.clone()
        out = op(*given, **kwargs)
        return tuple(out) if isinstance(out, list) else out

    return tsfunc.vmap(one, axis_size=None if stacked else SIZE, **options)(*stacked)


def outlines(out: Any) -> list[tuple[tuple[int, ...], torch.dtype]]:
    outs = out if isinstance(out, (tuple, list)) else [out]
    return [(tuple(x.shape), x.dtype) for x in outs if isinstance(x, Tensor)]


@each("randomness", ["same", "different", "split"])
@each("name", sorted(RANDOM - {*ELSEWHERE, *UNTRIED, *RUN_BY_HAND, *EFFECTS}))
def test_a_draw_has_the_shapes_of_the_loop(name: str, randomness: str) -> None:
    for args, kwargs in seeded_calls(name):
        if randomness == "same" and name in OF_ITS_ARGUMENTS:
            with pytest.raises(RuntimeError, match="same randomness with a batched tensor"):
                mapped(name, args, kwargs, randomness=randomness)
            continue
        out = mapped(name, args, kwargs, randomness=randomness)
        one = overload(name)(*next(examples_of(args)), **kwargs)
        batched = [((SIZE, *shape), dtype) for shape, dtype in outlines(one)]
        assert outlines(out) == batched, name


@each("name", sorted(DATA_DEPENDENT - {*RANDOM, *UNTRIED, *RUN_BY_HAND, *EFFECTS}))
def test_data_dependent_calls_run_or_split_the_batch(name: str) -> None:
    for args, kwargs in seeded_calls(name):
        try:
            out = mapped(name, args, kwargs)
        except DataDependentError:
            out = mapped(name, args, kwargs, data_dependent="split", ragged="list")
        loop = [overload(name)(*example, **kwargs) for example in examples_of(args)]
        for i, one in enumerate(loop):
            same(out, one, i, FIRST_RESULTS.get(name))


def same(out: Any, one: Any, i: int, first: int | None) -> None:
    """Compare the results of a batch with those of an example: the first few, or all."""
    if isinstance(one, (tuple, list)):
        for mine, theirs in list(zip(out, one, strict=True))[:first]:
            same(mine, theirs, i, None)
    elif one is not None:
        torch.testing.assert_close(out[i], torch.as_tensor(one), equal_nan=True)


@each("name", sorted(n for n in DATA_DEPENDENT if lookup(n).category is Category.DYNAMIC))
def test_results_of_differing_sizes_are_refused(name: str) -> None:
    args, kwargs = seeded_calls(name)[0]
    with pytest.raises(DataDependentError):
        mapped(name, args, kwargs)


@each("name", sorted(RESHAPING))
def test_operators_that_change_a_shape_in_place(name: str) -> None:
    for args, kwargs in seeded_calls(name):
        loop = [overload(name)(x.clone(), *rest, **kwargs) for x, *rest in examples_of(args)]
        torch.testing.assert_close(mapped(name, args, kwargs), torch.stack(loop))


@each("name", sorted(ELSEWHERE))
def test_shapes_of_kernels_of_other_devices(name: str) -> None:
    op, row = overload(name), all_rows()[name]
    assert row.rule is not None
    for args, kwargs in ELSEWHERE[name]():
        tensors = [i for i, arg in enumerate(args) if isinstance(arg, Tensor) and arg.numel()]
        made = plan(args, dict.fromkeys(((i, None) for i in tensors), 0), SIZE)
        out, dims = row.rule(op, Level(randomness="different"), made.dims, made.args, kwargs)
        one = op(*args, **kwargs)
        outs, ones = (x if isinstance(x, (tuple, list)) else [x] for x in (out, one))
        spread = dims if isinstance(dims, (tuple, list)) else [dims] * len(outs)
        for mine, bdim, theirs in list(zip(outs, spread, ones, strict=True))[
            : FIRST_RESULTS.get(name)
        ]:
            assert isinstance(mine, Tensor) == isinstance(theirs, Tensor), name
            if isinstance(mine, Tensor):
                shape = tuple(n for d, n in enumerate(mine.shape) if d != bdim)
                assert (shape, mine.dtype) == (tuple(theirs.shape), theirs.dtype), name


def test_each_exception_is_a_row() -> None:
    assert {*UNDEFINED, *RESHAPING, *ELSEWHERE, *UNTRIED, *RUN_BY_HAND, *FIRST_RESULTS} <= ROWS
    for where in RUN_BY_HAND.values():
        file, _, test = where.partition("::")
        defined = rf"^(def {test}\(|{test} = )"
        assert re.search(defined, Path(file).read_text("utf-8"), re.MULTILINE), where


def test_statistics_are_updated() -> None:
    update = torch.ops.aten._batch_norm_with_update.default
    x, mean, var = torch.randn(SIZE, 4, 2, 3), torch.zeros(SIZE, 2), torch.ones(SIZE, 2)
    loop = [mean.clone(), var.clone()]
    outs = [update(x[i], None, None, loop[0][i], loop[1][i], 0.1, 1e-5)[0] for i in range(SIZE)]

    def one(x: Tensor, mean: Tensor, var: Tensor) -> Any:
        return update(x, None, None, mean, var, 0.1, 1e-5)[0]

    torch.testing.assert_close(tsfunc.vmap(one)(x, mean, var), torch.stack(outs))
    torch.testing.assert_close([mean, var], loop)


def test_assertions_are_for_all_examples() -> None:
    ask = torch.ops.aten

    def one(x: Tensor) -> Tensor:
        ask._assert_async(x)
        ask._assert_async.msg(x, "so it is")
        assert ask._is_all_true(x)
        return x.clone()

    assert tsfunc.vmap(one)(torch.tensor([True, True])).all()
    with pytest.raises((RuntimeError, AssertionError)):
        tsfunc.vmap(one)(torch.tensor([True, False]))
    some = tsfunc.vmap(lambda x: ask._is_any_true(x).clone())(torch.tensor([True, False]))
    assert some.all()
