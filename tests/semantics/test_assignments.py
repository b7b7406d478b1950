"""Assignments to attributes, variables and elements of containers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.semantics.transform_tables import (
    Function,
    X,
)
from tsfunc import (
    specialize,
)
from tsfunc.errors import TypeCheckError

# --- assignments

FLAG: Any = None


class Assigned:
    """A place that a function assigns, the assignment, and the text of its value."""

    value: Any = None

    def __init__(self) -> None:
        self.owner = self
        self.table: dict[str, Any] = {"other": 0}
        self.items = [0, 0]
        self.names: set[Any] = set()
        self.kept: Any = None


def _attribute(places: Assigned, value: Any) -> None:
    places.kept = value


def _item_of_a_dict(places: Assigned, value: Any) -> None:
    places.table["last"] = value


def _item_of_a_list(places: Assigned, value: Any) -> None:
    places.items[0] = value


def _class_attribute(places: Assigned, value: Any) -> None:
    Assigned.value = value


def _global(places: Assigned, value: Any) -> None:
    global FLAG
    FLAG = value


def _update(places: Assigned, value: Any) -> None:
    places.table.update(last=value)


def _set(places: Assigned, value: Any) -> None:
    places.names.clear()
    places.names.add(value)


ASSIGNMENTS = [
    _attribute, _item_of_a_dict, _item_of_a_list, _class_attribute, _global, _update, _set,
]  # fmt: skip


def _shown(places: Assigned) -> list[Any]:
    return [places.kept, places.table, places.items, places.names, Assigned.value, FLAG]


@pytest.mark.parametrize("captured", [False, True], ids=["argument", "captured"])
@pytest.mark.parametrize("value", [5, "word", (1, 2.5), None], ids=repr)
@pytest.mark.parametrize("assign", ASSIGNMENTS)
def test_assignments_happen_at_every_call(
    assign: Callable[[Assigned, Any], None],
    value: Any,
    captured: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This holds if the place has the value when the program is made, too."""
    monkeypatch.setitem(globals(), "FLAG", None)
    monkeypatch.setattr(Assigned, "value", None)
    places, plain = Assigned(), Assigned()

    def f(places: Assigned, x: Tensor) -> Tensor:
        assign(places, value)
        return x * 2

    g: Function = specialize(f)
    if captured:
        inner = specialize(lambda x: f(places, x))
        g = lambda places, x: inner(x)  # noqa: E731
    for before in (value, "else", value, "other", "else"):
        seen = []
        for each, call in ((plain, f), (places, g)):
            for other in ASSIGNMENTS:
                other(each, before)
            call(each, X)
            seen.append(copy.deepcopy(_shown(each)))
        assert seen[0] == seen[1]


def test_items_of_captured_containers_are_set_at_every_call() -> None:
    table: dict[Any, Any] = {}
    items = [0, 0]

    def f(x: Tensor) -> Tensor:
        table["rows"] = x.shape[0]
        table[x.shape[0]] = True
        items[1] = x.shape[0]
        return x * 2

    g = specialize(f)
    for n in (2, 3, 2, 2, 3, 2):
        table.clear()
        items[1] = -1
        g(torch.ones(n))
        assert table == {"rows": n, n: True} and items == [0, n]


@pytest.mark.parametrize("name", ["update", "append", "add", "extend", "insert"])
def test_methods_of_a_users_object_are_its_own(name: str) -> None:
    """This holds if they are called as methods of lists and sets, too."""

    class Meter:
        def __init__(self) -> None:
            self.total: Any = torch.zeros(())
            self.last: Any = None

        def note(self, x: Tensor) -> None:
            self.total = self.total + x
            self.last = 3

    setattr(Meter, name, Meter.note)
    meter: Any = Meter()
    scope: dict[str, Any] = {"meter": meter}
    exec(f"def f(x):\n    meter.{name}(x.sum())\n    return x * 2\n", scope)
    g = specialize(scope["f"])
    for n in (1, 2, 3):
        meter.last = None
        assert g(torch.ones(2)).equal(torch.full((2,), 2.0))
        assert meter.total.item() == 2 * n and meter.last == 3


@pytest.mark.parametrize("use", ["dict", "list"])
def test_a_program_refuses_to_change_the_callers_containers(use: str) -> None:
    given: Any = {"x": X} if use == "dict" else [X]

    def of_dict(given: dict[str, Tensor]) -> Tensor:
        given["y"] = given["x"]
        return given["x"] * 2

    def of_list(given: list[Tensor]) -> Tensor:
        given.append(given[0])
        return given[0] * 2

    with pytest.raises(TypeCheckError, match=f"changes the {use}"):
        specialize(of_dict if use == "dict" else of_list)(given)
    assert len(given) == 1
