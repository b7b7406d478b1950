"""Number arguments of saved functions: open if their descriptor is their type."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tsfunc
from tests.program.damage import edited, entries_of
from tests.program.saved_functions import numbered
from tsfunc import MetaTensorType as Meta
from tsfunc import load, specialize
from tsfunc.errors import DescriptorViolation, FileFormatError

X = torch.arange(8.0).reshape(4, 2)
KEPT = Path(__file__).parent / "files"


def saved(f: Any, dims: Any, folder: Path, *args: Any) -> Any:
    made = specialize(f, {"x": Meta(["n", 2]), **dims})
    made(*args)
    made.save(folder / "f.tsf")
    return load(folder / "f.tsf")


INTS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "a size": (lambda x, k: torch.zeros(k) + x.sum(), (0, 1, 5)),
    "of a size": (lambda x, k: torch.ones(x.shape[0] * k), (0, 1, 5)),
    "an index": (lambda x, k: x[k], (0, 2, -1)),
    "a slice": (lambda x, k: x[:k] * k, (0, 1, 9)),
    "a bound": (lambda x, k: tsfunc.fori_loop(0, k, lambda i, c: c * 1.5 + i, x), (0, 2, 7)),
    "arithmetic": (lambda x, k: (x * (2 * k + 1), k // 2, k % 3, k**2, -k), (0, -7, 2**40)),
    "a shape": (lambda x, k: x.reshape(k, -1), (1, 8)),
}


@pytest.mark.parametrize("name", INTS)
def test_ints(name: str, tmp_path: Path) -> None:
    f, others = INTS[name]
    loaded = saved(f, {"k": int}, tmp_path, X, 3 if name != "a shape" else 2)
    for k in others:
        torch.testing.assert_close(loaded(X, k), f(X, k))
    loaded.program.verify()
    loaded.save(tmp_path / "again.tsf")
    torch.testing.assert_close(load(tmp_path / "again.tsf")(X, others[0]), f(X, others[0]))


def test_floats(tmp_path: Path) -> None:
    loaded = saved(lambda x, s: (x * s, s * 2), {"s": float}, tmp_path, X, 0.5)
    for s in (3.0, -0.0, 1e30):
        torch.testing.assert_close(loaded(X, s), (X * s, s * 2))
    for s in (math.inf, math.nan):  # these are constants
        with pytest.raises(DescriptorViolation, match="there is no program for this call"):
            loaded(X, s)
    with pytest.raises(DescriptorViolation, match=r"s: expected float, got 2 \(int\)"):
        loaded(X, 2)


def test_a_number_that_takes_another_path_has_no_program(tmp_path: Path) -> None:
    """The saved program covers one path of the function only."""
    loaded = saved(lambda x, k: x * 2 if k > 3 else x - k, {"k": int}, tmp_path, X, 1)
    for k in (3, -2):
        torch.testing.assert_close(loaded(X, k), X - k)
    with pytest.raises(DescriptorViolation, match="k <= 3 does not hold"):
        loaded(X, 4)
    assert "k: any int" in str(loaded.program.guards)
    both = specialize(lambda x, k: x * 2 if k > 3 else x - k, {"k": int})
    both(X, 1), both(X, 9)
    both.save(tmp_path / "f.tsf")
    for k in (2, 3, 4, 100):
        torch.testing.assert_close(load(tmp_path / "f.tsf")(X, k), X * 2 if k > 3 else X - k)


def test_bools_have_a_program_each(tmp_path: Path) -> None:
    loaded = saved(lambda x, b: x * 2 if b else x, {"b": bool}, tmp_path, X, True)
    torch.testing.assert_close(loaded(X, True), X * 2)
    with pytest.raises(DescriptorViolation, match="b: False, was True"):
        loaded(X, False)


def test_values_not_described_by_a_number_type_are_constants(tmp_path: Path) -> None:
    loaded = saved(lambda x, k: x * k, {}, tmp_path, X, 3)
    with pytest.raises(DescriptorViolation, match="k: 4, was 3"):
        loaded(X, 4)


DAMAGE: dict[str, tuple[Any, str]] = {
    "a keyword": ({"number": "class"}, "expected another name"),
    "a dim's name": ({"number": "n"}, "expected another name"),
    "no name": ({"number": "a b"}, "expected the name of a number"),
    "a bool": ({"value": True}, "only a number that is finite"),
    "no number": ({"value": {"float": "nan"}}, "only a number that is finite"),
    "a large number": ({"value": 1 << 63}, "only a number that is finite"),
    "a text": ({"value": "k"}, "only a number that is finite"),
    "more": ({"more": 1}, "there is no 'more' in such an object"),
    "another name": ({"number": "other"}, "is not made of sizes"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_numbers_are_refused(name: str, tmp_path: Path) -> None:
    new, match = DAMAGE[name]
    data = (KEPT / "numbers.tsf").read_bytes()

    def changed(function: Any) -> None:
        leaves = function["calls"][0]["form"]["leaves"]
        next(leaf for leaf in leaves if leaf.get("number") == "k").update(new)

    (tmp_path / "f.tsf").write_bytes(edited(data, "function.json", changed))
    with pytest.raises(FileFormatError, match=match):
        load(tmp_path / "f.tsf")


def test_a_kept_file() -> None:
    loaded = load(KEPT / "numbers.tsf")
    x = torch.randn(5, 2)
    for k, s in ((3, 0.5), (2, 8.0), (9, -1.5)):
        torch.testing.assert_close(loaded(x, k, s), numbered(x, k, s))
    with pytest.raises(DescriptorViolation, match="k >= 2 does not hold"):
        loaded(x, 1, 0.5)
    loaded.program.verify()
    assert b'"numbers":{"k":3' in entries_of((KEPT / "numbers.tsf").read_bytes())["programs/0.json"]


def folded(kind: str, leaf: Callable[[int], Any], count: int) -> Any:
    form = leaf(0)
    for i in range(1, count):
        form = [kind, form, leaf(i)]
    return form


ENDLESS: dict[str, Any] = {
    "quotients": folded("//", lambda i: ["+", "n", i + 2], 40),
    "quotients by numbers": folded("//", lambda i: "n" if i == 0 else 3, 60),
    "a product of sums": ["*", *(["+", "n", "k", i] for i in range(60))],
    "choices": folded("min", lambda i: ["max", ["*", "n", i + 1], ["+", "k", i]], 60),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_sizes_that_would_take_minutes(name: str, tmp_path: Path) -> None:
    data = (KEPT / "numbers.tsf").read_bytes()

    def changed(program: Any) -> None:
        node = next(x for x in program["graph"]["nodes"] if x.get("type", {}).get("shape"))
        node["type"]["shape"][0] = ENDLESS[name]

    (tmp_path / "f.tsf").write_bytes(edited(data, "programs/0.json", changed))
    with pytest.raises(FileFormatError, match=r"shape\[0\]: the size is too long"):
        load(tmp_path / "f.tsf")


def test_a_number_that_is_none(tmp_path: Path) -> None:
    data = (KEPT / "numbers.tsf").read_bytes()

    def changed(program: Any) -> None:
        program["numbers"]["k"] = None

    (tmp_path / "f.tsf").write_bytes(edited(data, "programs/0.json", changed))
    with pytest.raises(FileFormatError, match="only a number that is finite"):
        load(tmp_path / "f.tsf")
