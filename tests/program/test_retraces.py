"""Sizes and numbers that vary: numbers become inputs, and a warning names what needs programs."""

from __future__ import annotations

import ast
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

import tsfunc
from tsfunc import MetaTensorType as Meta
from tsfunc import specialize, vmap
from tsfunc.errors import RetraceWarning

X = torch.randn(3, 4)


def called(
    func: Callable[..., Any], calls: Sequence[tuple[Any, ...]], *args: Any, **kwargs: Any
) -> tuple[Any, list[warnings.WarningMessage]]:
    """Compare each call with the function; return the specialized function and its warnings."""
    s = specialize(func, *args, **kwargs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for each in calls:
            torch.testing.assert_close(s(*each), func(*each), rtol=0, atol=0, equal_nan=True)
    return s, list(caught)


INTS = [(X, k) for k in (5, -2, 7, 0, 1, 9)]
FLOATS = [(X, k) for k in (0.5, -2.0, 7.25, 0.0, 1.0)]


@pytest.mark.parametrize(
    ("func", "calls", "programs"),
    [
        (lambda x, k: x * k + k, INTS, 3),
        (lambda x, k: x * k + k, FLOATS, 3),
        (lambda x, k: (x * k, k, -k, k * 2), FLOATS, 3),
        (lambda x, k: x * k if k > 3 else x - k, INTS, None),
        (lambda x, p: x * p["lr"] * 0.9 ** p["step"],
         [(X, {"lr": 0.1 / i, "step": i}) for i in range(1, 9)], 3),
        (lambda x, y, k: x.sum(1) * y * k,
         [(torch.randn(n, 3), torch.randn(n), n) for n in range(2, 9)], 3),
    ],
)  # fmt: skip
def test_numbers_become_inputs(func: Any, calls: Any, programs: int | None) -> None:
    s, caught = called(func, calls)
    assert not caught
    assert programs is None or s.cache_info().programs == programs
    assert s.cache_info().misses < len(calls)


def _by_text(x: Tensor, k: float) -> Tensor:
    return {"7": x, "0.75": x}.get(f"{k}", x * 5)


@pytest.mark.parametrize(
    "func",
    [
        lambda x, k: x * 2 if isinstance(k, int | float) else x * 3,
        lambda x, k: x * 2 if type(k) in (int, float) else x * 3,
        lambda x, k: x * len(str(k)),
        lambda x, k: x * {0: 2}.get(k, 5),
        _by_text,
    ],
    ids=["isinstance", "type", "str", "key", "format"],
)
@pytest.mark.parametrize("values", [[1, 2, 3, 7, 12], [0.25, 0.5, 2.0, 0.75, 1.0]])
def test_values_that_a_symbol_would_change_are_never_shared(func: Any, values: list[Any]) -> None:
    s, caught = called(func, [(X, k) for k in values])
    assert s.cache_info().programs == len(values)
    assert [warning.category for warning in caught] == [RetraceWarning]


@given(st.lists(st.tuples(st.integers(-3, 8), st.sampled_from([0.5, 1.5, -0.0])), max_size=8))
def test_programs_stay_their_function(calls: list[tuple[int, float]]) -> None:
    def f(x: Tensor, k: int, scale: float) -> Any:
        y = x[:k] * scale if k > 1 else x * k
        return y, k // 2, f"{scale:.1f}" if k == 5 else scale

    called_with = [(X, k, scale) for k, scale in calls]
    s = specialize(f)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RetraceWarning)
        for each in called_with:
            (y, *rest), (want, *wanted) = s(*each), f(*each)
            torch.testing.assert_close(y, want, rtol=0, atol=0)
            assert rest == wanted


APART = [(torch.ones(n, 12 - n), 2.0) for n in range(2, 8)]


@pytest.mark.parametrize(
    ("func", "calls", "options", "named", "offered"),
    [
        (lambda x, k: x * k, INTS, {"auto_widen": False}, "k varies", "{'k': int}"),
        (lambda x, k: x * k, FLOATS, {"auto_widen": False}, "k varies", "{'k': float}"),
        (lambda x, k: x * k, APART, {}, "x.shape[0] and x.shape[1] vary",
         "{'x': MetaTensorType(shape=['n', 'm'])}"),
        (lambda x, k: x * k, [(torch.ones(n, 4), n) for n in range(2, 7)],
         {"auto_widen": False}, "x.shape[0] and k vary",
         "{'x': MetaTensorType(shape=['n', None]), 'k': int}"),
        (lambda x, k: x * k, [(torch.ones(n, 4), n) for n in range(2, 7)],
         {"auto_widen": False, "descriptors": {"x": Meta([None, 4], dtype=torch.float32)}},
         "x.shape[0] and k vary",
         "{'x': MetaTensorType(dtype=torch.float32, shape=['n', 4]), 'k': int}"),
        (lambda p: p["x"] * p["lr"][0] + p["k"],
         [({"x": X, "lr": (0.1 * k,), "k": 3},) for k in range(1, 6)], {"auto_widen": False},
         "p['lr'][0] varies",
         "{'p': {'x': MetaTensorType(), 'lr': (float,), 'k': int}}"),
        (lambda x, y: x.sum(1) * y, [(torch.ones(n, 3), torch.ones(n)) for n in range(2, 7)],
         {"auto_widen": False}, "x.shape[0] and y.shape[0] vary",
         "{'x': MetaTensorType(shape=['n', None]), 'y': MetaTensorType(shape=['n'])}"),
    ],
)  # fmt: skip
def test_the_warning_offers_descriptors_that_make_one_program(
    func: Any, calls: Any, options: dict[str, Any], named: str, offered: str
) -> None:
    _, caught = called(func, calls, **options)
    (warning,) = caught
    message = str(warning.message)
    assert warning.category is RetraceWarning
    assert f"specialize(<lambda>): {named}, and each value is traced again" in message
    *_, last = message.splitlines()
    assert last.strip() == offered
    descriptors = eval(last, {"MetaTensorType": Meta, "torch": torch})
    s, again = called(func, calls, descriptors, auto_widen=False)
    assert s.cache_info().programs == 1 and not again


def test_the_warning_is_at_the_line_of_the_call() -> None:
    s = specialize(lambda x, k: x * k, auto_widen=False)
    s(X, 1), s(X, 2)
    with pytest.warns(RetraceWarning, match=r"k: 1, 2, 3") as caught:
        s(X, 3)
    lines, first = inspect.getsourcelines(test_the_warning_is_at_the_line_of_the_call)
    assert caught[0].filename == __file__
    assert lines[caught[0].lineno - first].strip() == "s(X, 3)"
    vmap(lambda x: s(x, 4))(X)  # k has been named


def test_each_argument_is_named_once() -> None:
    calls = [(X, k, 0) for k in range(4)] + [(X, 5, k) for k in range(1, 4)]
    _, caught = called(lambda x, a, b: x * a + b, calls, auto_widen=False)
    assert [str(each.message).split(",")[0] for each in caught] == [
        "specialize(<lambda>): a varies",
        "specialize(<lambda>): b varies",
    ]


def test_a_number_that_the_function_needs() -> None:
    s, caught = called(
        lambda x, lr, k: x * lr * sum(range(k)), [(X, 0.1 * k, k) for k in range(2, 9)]
    )
    (warning,) = caught
    assert "The function needs k itself" in str(warning.message)
    misses = s.cache_info().misses
    s(X, 12.0, 5)  # lr is an input all the same
    assert s.cache_info().misses == misses


def test_a_size_that_the_function_needs() -> None:
    _, caught = called(lambda x: x * int(x.shape[0]), [(torch.ones(n),) for n in range(2, 7)])
    (warning,) = caught
    assert "not known that one program can serve all values" in str(warning.message)
    assert ast.literal_eval(str(warning.message).splitlines()[-1].split("shape=")[1][:5]) == ["n"]


def test_numbers_of_compiled_programs() -> None:
    _, caught = called(lambda x, k: x * k, INTS, backend="eager")
    (warning,) = caught
    assert str(warning.message).endswith(
        "A compiled program has numbers as constants: pass k as a tensor, such as torch.tensor(k)."
    )


def test_values_of_other_kinds_are_not_named() -> None:
    calls = [(X, mode) for mode in ("a", "b", "c", True, False, None)]
    assert not called(lambda x, mode: x * 2, calls)[1]
    grads = [torch.ones(2), torch.ones(2, requires_grad=True), torch.ones(2).double()]
    assert not called(lambda x: x * 2, [(x,) for x in grads])[1]


def test_a_size_that_has_varied_once_is_not_compared_again() -> None:
    s, caught = called(
        lambda x: x * 2,
        [(torch.ones(n, 3),) for n in range(2, 9)] + [(torch.ones(20, m),) for m in range(4, 9)],
    )
    assert not caught and s.cache_info().programs == 5


def test_a_program_that_calls_another_is_not_tied_to_the_others_sizes() -> None:
    inner = specialize(lambda x: x.sin(), auto_widen=False)
    inner(torch.ones(4)), inner(torch.ones(5))
    outer = specialize(lambda x: inner(x) * 2, {"x": Meta(["n"])})
    for n in (5, 4, 7):
        torch.testing.assert_close(outer(torch.ones(n)), torch.ones(n).sin() * 2)
    assert outer.cache_info().programs == 1
    assert tsfunc.specialize(lambda x: inner(x))(torch.ones(4)).equal(torch.ones(4).sin())
