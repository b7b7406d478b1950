"""Arguments that are constants of a program, and the guards of later calls on them."""

from __future__ import annotations

import array
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tsfunc import MetaTensorType as Meta
from tsfunc import specialize
from tsfunc.errors import TypeCheckError

X = torch.ones(1)
TABLE = {"a": 2}

CHANGED: dict[str, tuple[Callable[[Any], float], Any, Callable[[Any], Any]]] = {
    "numpy": (lambda a: float(a[0]), np.full(2, 2.0), lambda a: a.__setitem__(0, 5.0)),
    "bytearray": (lambda a: a[0], bytearray(b"\2"), lambda a: a.__setitem__(0, 5)),
    "array": (lambda a: a[0], array.array("i", [2]), lambda a: a.__setitem__(0, 5)),
    "set": (len, {1, 2}, lambda a: a.add(3)),
    "view": (sum, TABLE.values(), lambda a: TABLE.update(b=3)),
}


@pytest.mark.parametrize("described", [None, {"x": Meta(["n"])}], ids=["", "named"])
@pytest.mark.parametrize("name", CHANGED)
def test_values_that_change_in_place(name: str, described: Any) -> None:
    read, value, change = CHANGED[name]
    f = specialize(lambda x, value: x * read(value), described)
    assert f(X, value).item() == read(value)
    f(X, value)
    assert f.cache_info().hits == 1
    change(value)
    assert f(X, value).item() == read(value)


EQUAL: dict[str, tuple[Callable[[Any], float], list[Any], int]] = {
    "path": (lambda p: len(p.name), [Path("ab"), Path("ab"), Path("abc")], 2),
    "fraction": (float, [Fraction(1, 2), Fraction(1, 2), Fraction(1, 3)], 2),
    "numpy's numbers": (float, [np.float32(2), np.float32(2), np.float32(3)], 2),
    "frozenset": (len, [frozenset([1]), frozenset([1]), frozenset([True])], 2),
    "complex": (lambda c: c.imag, [complex(1, 0.0), complex(1, 0.0), complex(1, -0.0)], 2),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_values_have_one_program(name: str) -> None:
    read, values, programs = EQUAL[name]
    f = specialize(lambda x, value: x * read(value))
    for value in values:
        assert f(X, value).equal(X * read(value))
    assert f.cache_info().programs == programs


@pytest.mark.parametrize(
    "make",
    [lambda: iter([2.0, 3.0]), lambda: (i for i in (2.0, 3.0))],
    ids=["iterator", "generator"],
)
def test_iterators_are_refused(make: Callable[[], Any]) -> None:
    def f(x: Tensor, numbers: Any) -> Any:
        return x * next(numbers)

    with pytest.raises(
        TypeCheckError,
        match=r"numbers is an argument, and is a (list_iterator|generator), which changes",
    ):
        specialize(f)(X, make())


def test_a_descriptor_of_the_users_is_an_object_too() -> None:
    class Rate:
        value = 2.0

        def __get__(self, owner: Any, kind: Any) -> float:
            return self.value

    class Typed(Rate):
        def __set__(self, owner: Any, value: float) -> None:
            self.value = value

    class Model:
        rate, typed = Rate(), Typed()

    model = Model()
    f = specialize(lambda x: x * model.rate * model.typed)
    assert f(X).item() == 4.0
    vars(Model)["rate"].value = 3.0
    assert f(X).item() == 6.0
    model.typed = 5.0
    assert f(X).item() == 15.0
    f(X)
    assert f.cache_info().hits == 1
