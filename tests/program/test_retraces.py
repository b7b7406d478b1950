"""Sizes and numbers that vary: numbers become inputs, and a warning explains new programs."""

from __future__ import annotations

import ast
import inspect
import math
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
        (lambda x, k: x * k, APART, {"auto_widen": False}, "x.shape[0] and x.shape[1] vary",
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
    s(X, 12.0, 5)  # lr is an input, too
    assert s.cache_info().misses == misses


def test_a_size_that_the_function_needs() -> None:
    _, caught = called(lambda x: x * int(x.shape[0]), [(torch.ones(n),) for n in range(2, 7)])
    (warning,) = caught
    assert "not known that one program can serve all values" in str(warning.message)
    assert ast.literal_eval(str(warning.message).splitlines()[-1].split("shape=")[1][:5]) == ["n"]


def test_numbers_of_compiled_programs() -> None:
    s, caught = called(lambda x, k: x * k, INTS, backend="eager")
    assert not caught
    assert s.cache_info().programs == 3


def test_numbers_that_compiled_programs_need() -> None:
    _, caught = called(lambda x, k: x * k, INTS, backend="eager", hoist=True)
    (warning,) = caught
    assert str(warning.message).endswith(
        "This compiled program needs k as a constant. A tensor can be an input, such as "
        "torch.tensor(k)."
    )


SCALE: Any = 1.0  # a variable that the functions below read


class Config:
    """An object whose attributes the functions below read."""

    scale: float = 1.0


CONFIG = Config()
OTHERS: dict[str, tuple[Callable[..., Any], Sequence[tuple[Any, ...]], str, str]] = {
    "text": (
        lambda x, mode: x * len(mode), [(X, "a" * n) for n in (1, 2, 3)], "mode", "as a tensor",
    ),
    "dtype as a value": (
        lambda x, to: x.to(to), [(X, each) for each in (torch.half, torch.double, torch.int)],
        "to", "leave out",
    ),
    "complex": (lambda x, k: x * k, [(X, n + 1j) for n in range(3)], "k", "as a tensor"),
    "function": (
        lambda x, f: f(x), [(X, lambda x, n=n: x * n) for n in range(3)], "f", "Define it once",
    ),
    "list": (
        lambda xs: sum(xs), [([X] * n,) for n in (1, 2, 3, 4)], "the structure of xs", "stack",
    ),
    "positional": (
        lambda *xs: sum(xs), [(X,) * n for n in (1, 2, 3, 4)], "the structure of xs", "stack",
    ),
    "dict": (
        lambda d: sum(d.values()), [({key: X},) for key in "abcd"], "the structure of d", "stack",
    ),
    "dtype": (
        lambda x: x * 2, [(X.to(each),) for each in (torch.float, torch.double, torch.half)],
        "x.dtype", "x.to(torch.float32)",
    ),
    "rank": (lambda x: x * 2, [(torch.ones([2] * n),) for n in (1, 2, 3)], "x.dim()", "flatten"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_a_value_that_needs_programs_is_named_with_a_remedy(name: str) -> None:
    func, calls, named, remedy = OTHERS[name]
    _, caught = called(func, calls)
    (warning,) = caught
    assert warning.category is RetraceWarning
    message = str(warning.message)
    assert message.startswith(f"specialize(<lambda>): {named} varies, and each value is traced")
    assert remedy in message


def _read_scale(x: Tensor) -> Any:
    return x * SCALE


def _read_length(x: Tensor) -> Any:
    return sum((x * each for each in SCALE), x)


def _read_text(x: Tensor) -> Tensor:
    return x * len(SCALE)


@pytest.mark.parametrize(
    ("func", "values", "named", "remedy"),
    [
        (_read_scale, [1.5, 2.5, 3.5], "SCALE: 1.5, 2.5, 3.5", "Pass it as an argument"),
        (_read_length, [[1.5], [1.5, 2.0], [1.5] * 3], "len(SCALE): 1, 2, 3", "as a tensor"),
        (_read_text, ["a", "b", "c"], "SCALE: 'a' (str), 'b' (str), 'c' (str)", "as a tensor"),
        (_read_scale, [torch.ones(n, 4) for n in (1, 3)], "", ""),
    ],
)  # fmt: skip
def test_a_variable_that_varies_is_named(
    func: Any, values: Any, named: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = specialize(func)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for value in values:
            monkeypatch.setitem(globals(), "SCALE", value)
            torch.testing.assert_close(s(X), func(X))
    messages = [str(each.message) for each in caught]
    assert len(messages) == bool(named)
    assert all(f"({named})" in message and remedy in message for message in messages)
    if named:
        reason = s.cache_info().entries[0].reason
        assert reason.startswith(named.split(":")[0]) and ", was " in reason


def test_a_closed_over_number_is_named() -> None:
    scale = 1.5

    def f(x: Tensor) -> Tensor:
        return x * scale

    s = specialize(f)
    with pytest.warns(RetraceWarning, match=r"scale varies.*\(scale: 1.5, 2.5, 3.5\)"):
        for scale in (1.5, 2.5, 3.5):  # noqa: B007 - the function reads it
            assert s(X).equal(f(X))


@pytest.mark.parametrize("backend", ["python", "eager"])
def test_the_reason_for_a_program_names_the_value_from_outside(backend: str) -> None:
    config = Config()
    s = specialize(lambda x: x * config.scale, backend=backend)
    for config.scale in (2.5, 3.5):
        s(X)
    assert s.cache_info().entries[0].reason == "config.scale: 3.5, was 2.5"


@pytest.mark.parametrize(
    "func",
    [
        lambda x: x * 2 if isinstance(CONFIG.scale, int | float) else x * 3,
        lambda x: x * 2 if type(CONFIG.scale) in (int, float) else x * 3,
        lambda x: x * len(str(CONFIG.scale)),
        lambda x: x * {2.5: 2}.get(CONFIG.scale, 5),
    ],
    ids=["isinstance", "type", "str", "key"],
)
@pytest.mark.filterwarnings("ignore::tsfunc.errors.RetraceWarning")  # each value has its program
def test_numbers_from_outside_that_a_symbol_would_change_are_never_shared(func: Any) -> None:
    s = specialize(func)
    for value in (1.5, 2.5, 30.25, 7.0, 12.5, 30.0):
        CONFIG.scale = value
        assert s(X).equal(func(X))


def test_a_number_from_outside_that_needs_one_value_is_named() -> None:
    config = Config()
    s = specialize(lambda x: x * math.gamma(config.scale))
    with pytest.warns(RetraceWarning, match=r"config.scale varies.*: 0.25, 0.5, 0.75\)"):
        for config.scale in (0.25, 0.5, 0.75, 2.5):
            assert s(X).equal(X * math.gamma(config.scale))
    assert s.cache_info().entries[0].reason == "config.scale: 2.5, was 0.75"


def test_numbers_from_outside_become_inputs_in_arithmetic() -> None:
    s = specialize(lambda x: x * (1 - CONFIG.scale * 0.1) + CONFIG.scale)
    for value in (0.1, 0.7, 0.3, 1.0, 2.25):
        CONFIG.scale = value
        torch.testing.assert_close(s(X), X * (1 - value * 0.1) + value)
    assert s.cache_info().programs == 2


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
