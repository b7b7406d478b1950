"""Calls bound to the schemas of their operators, by the types of their arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tsfunc import grad, vmap
from tsfunc.bridge.tracers.call_plans import FUNCTION_PLANS
from tsfunc.bridge.tracers.parsing import find_form, has_forms
from tsfunc.bridge.tracers.torch_state import without_autograd

X = torch.linspace(-2, 2, 96, dtype=torch.float64).reshape(4, 4, 6).sin()
A, B = X[:, :, :4], X[:, :, 2:]

Call = tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Call:
    return function, args, kwargs


class Arriving(TorchDispatchMode):
    """A mode with the first operator that is called in the block, and its arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, tuple(args), kwargs or {}))
        return func(*args, **(kwargs or {}))


# Calls of one form, with other values; the form is derived from the first one.
repeat = torch.Tensor.repeat

ALIKE: dict[str, list[Call]] = {
    "a number or none at the end": [call(torch.roll, A, 1, -1), call(torch.roll, A, 2, 0)],
    "lists": [
        call(torch.roll, A, (1,), (0,)),
        call(torch.roll, A, (2, 1), (0, 1)),
    ],
    "defaults": [
        call(torch.topk, A, 2, -1, False),
        call(torch.topk, A, 2, -1, True),
    ],
    "all defaults": [call(torch.argsort, A, 0, True), call(torch.argsort, A, -1, False)],
    "numbers one by one": [
        call(repeat, A, 2, 3, 1),
        call(repeat, A, 1, 1, 2),
    ],
    "numbers in a tuple": [
        call(repeat, A, (2, 1, 1)),
        call(repeat, A, (1, 1, 3)),
    ],
    "by name": [call(torch.gather, input=A, dim=0, index=(A > 0).long())],
    "by NumPy's name": [call(torch.argmax, A, axis=1), call(torch.argmax, A, axis=0)],
    "by name, the last ones alone": [call(torch.sort, A, descending=True)],
    "an int for a float": [call(F.elu, A, 2), call(F.elu, A, 1)],
    "a correction": [call(torch.var, A, -1, correction=0), call(torch.var, A, 0, correction=1)],
    "a type": [call(torch.cumsum, A, 0, dtype=torch.float32)],
    "a list of tensors": [call(torch.cat, [A, B], 1), call(torch.cat, (A, B, A), 0)],
    "a word": [call(torch.einsum, "ijk,ijk->i", A, B)],
    "a tensor left out": [call(torch.clamp, A, None, A)],
    "a number for a tensor": [call(torch.mul, A, 2.5), call(torch.mul, A, -0.5)],
    "a factory": [call(torch.zeros_like, A)],
    "another one": [call(torch.full_like, A, 3)],
    "no sizes": [call(F.max_pool2d, A, 2), call(F.max_pool2d, A, 3)],
}


@pytest.mark.parametrize("name", ALIKE)
def test_a_form_gives_the_arguments_of_the_operator(name: str) -> None:
    for function, args, kwargs in ALIKE[name]:
        form = find_form(function, *ALIKE[name][0][1:])
        if form is None:  # a function in Python has the forms of its operators
            assert type(function) is not type(torch.sin)
            break
        if [type(x) for x in args] != [type(x) for x in ALIKE[name][0][1]]:
            break
        found = form.arguments(args, kwargs)
        with without_autograd(), Arriving() as arriving:
            function(*args, **kwargs)
        overload, told, named = arriving.calls[0]
        assert form.op.overload is overload and found is not None
        assert repr(tuple(found[0])) == repr(told)
        assert {**found[1], "pin_memory": False} == {**named, "pin_memory": False}


@pytest.mark.parametrize("name", ALIKE)
def test_each_call_of_a_form_equals_the_loop(name: str) -> None:
    for function, args, kwargs in ALIKE[name]:

        def run(x: Any, y: Any) -> Any:
            one = {id(A): x, id(B): y}

            def taken(value: Any) -> Any:
                if isinstance(value, list | tuple):
                    return type(value)(map(taken, value))
                if isinstance(value, torch.Tensor) and id(value) not in one:
                    return (x > 0).long()
                return one.get(id(value), value)

            return function(*map(taken, args), **{n: taken(v) for n, v in kwargs.items()})  # noqa: B023

        batched = vmap(run)(torch.stack([A, -A]), torch.stack([B, B * 2]))
        each = [run(A, B), run(-A, B * 2)]
        assert type(batched) is type(each[0])
        if isinstance(batched, torch.Tensor):
            batched, each = [batched], [[x] for x in each]
        for got, *expected in zip(batched, *each, strict=True):
            torch.testing.assert_close(got, torch.stack(expected))


def test_calls_not_determined_by_types_have_no_form() -> None:
    assert find_form(torch.add, (A, 2, B), {}) is None  # a deprecated order of arguments
    assert find_form(torch.Tensor.contiguous, (A,), {}) is None  # may return the tensor itself
    assert find_form(torch.result_type, (A, B), {}) is None
    assert find_form(torch.roll, (A, "one"), {}) is None  # refused by torch
    assert find_form(torch.Tensor.size, (A,), {}) is None
    assert not has_forms(torch.Tensor.__eq__)


def test_several_results_have_the_class_that_torch_gives_them() -> None:
    seen: list[Any] = []

    def f(x: torch.Tensor) -> Any:
        for results in (x.max(0), x.sort(), torch.linalg.eigh(x @ x.T), x.unbind(), x.split(1)):
            seen.append(type(results))
        return torch.var_mean(x, 0)

    assert type(vmap(f)(A)) is tuple
    assert seen == [
        torch.return_types.max,
        torch.return_types.sort,
        torch.return_types.linalg_eigh,  # type: ignore[attr-defined]
        tuple,
        tuple,
    ]


UNDER_AUTOCAST: dict[str, Callable[..., Any]] = {
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "tensordot": lambda x: torch.tensordot(x, x, dims=([1], [1])),
    "bmm": lambda x: torch.bmm(x[None], x[None].mT),
    "conv1d": lambda x: F.conv1d(x[None], torch.ones(2, 4, 3)),
    "cumsum": lambda x: torch.cumsum(x.bfloat16(), 0),
    "norm": lambda x: torch.linalg.norm(x.bfloat16()),
    "cosine_similarity": lambda x: F.cosine_similarity(x.bfloat16(), x.bfloat16()),
}


@pytest.mark.parametrize("name", UNDER_AUTOCAST)
@pytest.mark.parametrize("known", [False, True], ids=["a new form", "a known form"])
def test_autocast_is_heeded(name: str, known: bool) -> None:
    function = UNDER_AUTOCAST[name]

    def f(x: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return function(x)

    x = X.float()
    FUNCTION_PLANS.clear()
    if known:
        vmap(function)(x)
    batched, expected = vmap(f)(x), torch.stack([f(row) for row in x])
    torch.testing.assert_close(batched, expected, rtol=2e-2, atol=2e-2)


def test_errors_are_torchs_and_at_the_users_line() -> None:
    with pytest.raises(RuntimeError, match="selected index k out of range"):
        vmap(lambda x: x.topk(9))(X)
    with pytest.raises(TypeError, match="topk"):
        vmap(lambda x: x.topk("two"))(X)
    vmap(lambda x: x.topk(2))(X)
    assert torch.Tensor.topk in FUNCTION_PLANS


@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
@pytest.mark.parametrize("spelling", ["{}", "__{}__"])
def test_comparisons(name: str, spelling: str) -> None:
    """Each Python object has methods with the operators' names: ``__eq__``."""
    function = getattr(torch.Tensor, spelling.format(name))
    FUNCTION_PLANS.clear()
    limit = X[1, 1, 1].item()
    if has_forms(function):
        with without_autograd():
            find_form(function, (X, limit), {})
    expected = function(X, limit)
    assert vmap(lambda x: function(x, limit))(X).equal(expected)
    slopes = vmap(grad(lambda x: (function(x, limit) * x).sum()))(X)
    torch.testing.assert_close(slopes, expected.to(X.dtype))
