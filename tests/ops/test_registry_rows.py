"""Declarations of rows: each knows its rule, the rule's line, and its family."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from tsfunc import hooks
from tsfunc.errors import DispatchError
from tsfunc.ops import registry
from tsfunc.ops.registry import Category, Family, declare, find, row, rows


@pytest.fixture(autouse=True)
def declared(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """An empty registry, and the names of the rows that its listeners hear of."""
    heard: list[str] = []
    monkeypatch.setattr(registry, "_rows", {})
    monkeypatch.setattr(hooks.row_declared, "functions", [lambda row: heard.append(row.name)])
    yield heard


def rule(op: Any, level: Any, bdims: Any, args: Any, kwargs: Any) -> Any:
    return NotImplemented


HERE = f"{__file__}:{inspect.getsourcelines(rule)[1]}"


def test_a_decorated_rule_is_the_rule_of_its_rows(declared: list[str]) -> None:
    assert row("test::one", "test::other")(rule) is rule
    for name in ("test::one", "test::other"):
        found = find(name)
        assert found is not None
        assert (found.name, found.rule, found.source, found.family) == (name, rule, HERE, None)
    assert declared == ["test::one", "test::other"]


def test_rows_of_a_shared_rule_have_the_line_of_the_call() -> None:
    frame = inspect.currentframe()
    assert frame is not None
    rows(rule, "test::shared")
    line = frame.f_lineno - 1
    found = find("test::shared")
    assert found is not None and (found.rule, found.source) == (rule, f"{__file__}:{line}")


def test_rows_of_a_family_know_it() -> None:
    family, other = Family(), Family()
    family.row("test::decorated")(rule)
    other.rows(rule, "test::listed")
    declare(None, ["test::alone"], HERE, Category.OTHER)
    families = {name: found.family for name, found in registry.all_rows().items()}
    assert families == {"test::decorated": family, "test::listed": other, "test::alone": None}
    assert registry.all_rows()["test::alone"].category is Category.OTHER


def test_a_second_row_names_both_places(declared: list[str]) -> None:
    declare(rule, ["test::twice"], "first.py:1")
    with pytest.raises(DispatchError, match=r"test::twice has .* first\.py:1; .* second\.py:2"):
        declare(rule, ["test::twice"], "second.py:2")
    assert declared == ["test::twice"]
    names: Any = [Category.OTHER]
    with pytest.raises(DispatchError, match=r"a row at here\.py:3: expected an operator's name"):
        declare(rule, names, "here.py:3")
