"""Bytecode decides which tests of a function are checks."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from tsfunc.dispatch.user_checks import raising_outcome, starts_trace


class Asked:
    """An object that notes, when it is tested, for which value the test raises."""

    def __init__(self, value: bool) -> None:
        self.value = value
        self.refused: bool | None = None

    def __bool__(self) -> bool:
        self.refused = raising_outcome(sys._getframe(1))
        return self.value


@starts_trace
def run(func: Callable[[Asked], int], x: Asked) -> int:
    """Run a function like a trace: the frames around it (pytest's) do not count as handlers."""
    return func(x)


def raises(x: Asked) -> int:
    if x:
        raise ValueError("a message")
    return 1


def raises_unless(x: Asked) -> int:
    if not x:
        message = f"{x!r} is wrong"
        raise ValueError(message)
    return 1


def raises_else(x: Asked) -> int:
    if x:
        found = 1
    else:
        raise ValueError
    return found


def one_of_several(x: Asked) -> int:
    if x or len(str(x)) > 1000:
        raise ValueError
    return 1


def chooses(x: Asked) -> int:
    return 1 if x else 2


def changes_something_first(x: Asked) -> int:
    if x:
        x.seen = True  # type: ignore[attr-defined]
        raise ValueError
    return 1


def raises_perhaps(x: Asked) -> int:
    if x:
        if len(str(x)) > 1000:
            raise ValueError
        return 3
    return 1


def raises_both_ways(x: Asked) -> int:
    if x:
        raise ValueError
    raise TypeError


def is_caught(x: Asked) -> int:
    try:
        if x:
            raise ValueError
    except ValueError:
        return 2
    return 1


def is_caught_outside(x: Asked) -> int:
    try:
        return raises(x)
    except ValueError:
        return 2


def passed_on_by(module: str, func: Callable[[Asked], int]) -> Callable[[Asked], int]:
    """A function of a module that catches errors of another module."""
    scope = {"__name__": module, "func": func}
    lines = "def passes_on(x):", "    try:", "        return func(x)", "    except KeyError:"
    exec("\n".join((*lines, "        return 2")), scope)
    return scope["passes_on"]  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("module", "refused"),
    [("torch.nn", True), ("tsfunc.ops", True), ("mine", None), ("torchmine", None)],
)
def test_handlers_of_torch_and_of_this_package_pass_errors_on(
    module: str, refused: bool | None
) -> None:
    asked = Asked(False)
    run(passed_on_by(module, raises), asked)
    assert asked.refused == refused


@pytest.mark.parametrize(
    ("func", "value", "refused"),
    [
        (raises, False, True),
        (raises_unless, True, False),
        (raises_else, True, False),
        (one_of_several, False, True),
        (chooses, True, None),
        (changes_something_first, False, None),
        (raises_perhaps, False, None),
        (is_caught, False, None),
        (is_caught_outside, False, None),
    ],
)
def test_the_value_that_raises(
    func: Callable[[Asked], int], value: bool, refused: bool | None
) -> None:
    asked = Asked(value)
    run(func, asked)
    assert asked.refused == refused


def test_where_both_sides_raise_it_is_a_choice() -> None:
    asked = Asked(True)
    with pytest.raises(ValueError):
        run(raises_both_ways, asked)
    assert asked.refused is None
