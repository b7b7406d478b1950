"""Bytecode decides which tests of a function are checks."""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from tsfunc.dispatch.user_checks import computes_check, looked_up, raising_outcome, starts_trace


class Asked:
    """An object that notes, when it is tested, for which value the test raises."""

    def __init__(self, value: bool) -> None:
        self.value = value
        self.refused: bool | None = None
        self.computes_check = False

    def __bool__(self) -> bool:
        self.refused = raising_outcome(sys._getframe(1))
        return self.value

    def item(self) -> bool:
        self.refused = raising_outcome(sys._getframe(1))
        self.computes_check = computes_check(sys._getframe(1))
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


def is_cleaned_up(x: Asked) -> int:
    try:
        return raises(x)
    finally:
        for name in ("a", "b"):
            if name in vars(x):
                delattr(x, name)


def is_replaced(x: Asked) -> int:
    try:
        return raises(x)
    except ValueError as error:
        if len(str(error)) > 1000:
            raise
        raise TypeError(str(error)) from error


def is_dropped(x: Asked) -> int:
    try:
        return raises(x)
    finally:
        if len(str(x)) > 1000:
            return 2  # noqa: B012


def is_caught_perhaps(x: Asked) -> int:
    while True:
        try:
            return raises(x)
        except ValueError as error:
            if len(str(error)) > 1000:
                raise


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


class torch:
    @staticmethod
    def _check(condition: bool, message: Callable[[], str] | None = None) -> None:
        pass

    _check_value = _check


def raises_for_item(x: Asked) -> int:
    if not x.item():
        raise ValueError
    return 1


def raises_for_not_item(x: Asked) -> int:
    if x.item():
        raise ValueError
    return 1


def raises_for_bool(x: Asked) -> int:
    if not bool(x):
        raise ValueError
    return 1


def checks_bool(x: Asked) -> int:
    torch._check(bool(x), lambda: "a message")
    return 1


def checks_item(x: Asked) -> int:
    torch._check_value(x.item(), lambda: "a message")
    return 1


def checks_not(x: Asked) -> int:
    torch._check(not x)
    return 1


def checks_not_item(x: Asked) -> int:
    torch._check(not x.item())
    return 1


def checks_not_bool(x: Asked) -> int:
    torch._check(not bool(x))
    return 1


def checks_not_not(x: Asked) -> int:
    torch._check(not (not x))  # noqa: SIM208
    return 1


def checks_with_keyword(x: Asked) -> int:
    torch._check(bool(x), message=lambda: "a message")
    return 1


def checks_equal(x: Asked) -> int:
    torch._check(x.item() == True)  # noqa: E712
    torch._check(bool(x) == False, lambda: "a message")  # noqa: E712
    return 1


def raises_for_any(x: Asked) -> int:
    if not any([x, True]):
        raise ValueError
    return 1


def uses_item(x: Asked) -> int:
    return int(x.item())


def chooses_by_item(x: Asked) -> int:
    return 1 if x.item() else 2


def gives_item(x: Asked) -> int:
    print(x.item(), not x.item())
    return 1


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
        (is_cleaned_up, False, True),
        # Before Python 3.11 the bytecode has no table of handlers.
        (is_replaced, False, True if sys.version_info >= (3, 11) else None),
        (is_dropped, False, None),
        (is_caught_perhaps, False, None),
        (raises_for_item, True, False),
        (raises_for_not_item, False, True),
        (raises_for_bool, True, False),
        (checks_bool, True, False),
        (checks_item, True, False),
        (checks_not, False, True),
        (checks_not_item, False, True),
        (checks_not_bool, False, True),
        (checks_not_not, True, False),
        (checks_with_keyword, True, False),
        (checks_equal, True, None),
        (raises_for_any, False, None),
        (uses_item, True, None),
        (chooses_by_item, True, None),
        (gives_item, True, None),
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


def compares_item(x: Asked) -> int:
    if x.item() > 5:
        raise ValueError
    return 1


def checks_product(x: Asked) -> int:
    torch._check(3 * x.item() + 1 < 10, lambda: "a message")
    return 1


def chooses_by_product(x: Asked) -> int:
    return 1 if 3 * x.item() > 5 else 2


def prints_product(x: Asked) -> int:
    print(3 * x.item())
    torch._check(True)
    return 1


@pytest.mark.parametrize(
    ("func", "expected"),
    [
        (compares_item, True),
        (checks_product, True),
        (chooses_by_product, False),
        (prints_product, False),
        (uses_item, False),
    ],
)
def test_a_condition_that_is_computed_of_a_number(
    func: Callable[[Asked], int], expected: bool
) -> None:
    asked = Asked(True)
    run(func, asked)
    assert asked.refused is None
    assert asked.computes_check == expected


class Key:
    """A key that notes where it is looked up when its hash is taken."""

    def __init__(self) -> None:
        self.found: object = None
        self.inner = self

    def __hash__(self) -> int:
        self.found = looked_up(sys._getframe(1))
        return 1


class Holder:
    def __init__(self) -> None:
        self.table: dict[Any, int] = {}
        self.names: set[Any] = {"a"}
        self.adding: defaultdict[Any, int] = defaultdict(int)


HOLDER = Holder()
LOOKUPS: dict[str, tuple[Callable[[Key], object], object]] = {
    "in a dict": (lambda key: key in HOLDER.table, (HOLDER.table, False)),
    "not in a set": (lambda key: key not in HOLDER.names, (HOLDER.names, False)),
    "by an attribute": (lambda key: key.inner in HOLDER.table, (HOLDER.table, False)),
    "subscript": (lambda key: HOLDER.table[key], (HOLDER.table, False)),
    "subscript by an attribute": (lambda key: HOLDER.table[key.inner.inner], (HOLDER.table, False)),
    "subscript that adds": (lambda key: HOLDER.adding[key], (HOLDER.adding, True)),
    "in the result of a call": (lambda key: key in dict(HOLDER.table), None),
    "hash": (hash, None),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_a_lookup_shows_its_container(name: str) -> None:
    look, expected = LOOKUPS[name]
    HOLDER.table.clear()
    key = Key()
    with contextlib.suppress(KeyError):
        look(key)
    assert key.found == expected
    if isinstance(expected, tuple):
        assert isinstance(key.found, tuple) and key.found[0] is expected[0]
