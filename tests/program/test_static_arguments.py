"""Arguments that are constants of a program, and their guards in later calls."""

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
from tsfunc import fori_loop, grad, jacrev, jvp, scan, specialize, vmap
from tsfunc.errors import DataDependentError, DescriptorViolation, TypeCheckError

X = torch.ones(1)
TABLE = {"a": 2}

CHANGED: dict[str, tuple[Callable[[Any], float], Any, Callable[[Any], Any]]] = {
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


@pytest.mark.parametrize(
    "array",
    [np.ones(3), np.arange(2), np.ones(2, bool), np.ones(1, "F")],
    ids=lambda a: str(a.dtype),
)
def test_an_array_of_numbers_is_refused_with_the_remedy(array: Any) -> None:
    with pytest.raises(TypeCheckError, match=r"a NumPy array for b\['a'\]\[0\]. Pass torch.from_n"):
        specialize(lambda b: b["x"] * 2)({"x": X, "a": [array]})
    with pytest.raises(
        DescriptorViolation, match=r"a: expected a tensor.*from_numpy makes a tensor"
    ):
        specialize(lambda a: a * 2, {"a": Meta(["n"])})(array)
    texts = np.array(["a", "b"])
    assert specialize(lambda x, a: x * len(a[0]))(X, texts).equal(X)


def test_an_array_that_is_described_is_compared_by_its_elements() -> None:
    f = specialize(lambda x, a: x * float(a[0]), {"a": np.ndarray})
    value = np.full(2, 2.0)
    assert f(X, value).item() == f(X, value).item() == 2.0
    assert f.cache_info().hits == 1
    value[0] = 5.0
    assert f(X, value).item() == 5.0


@pytest.mark.parametrize("transform", [vmap, specialize])
@pytest.mark.parametrize("read", [np.sin, lambda x: x.numpy()], ids=["sin", "numpy"])
def test_a_read_by_numpy_is_refused_with_the_remedy(transform: Any, read: Any) -> None:
    with pytest.raises(DataDependentError, match=r"use torch's functions, and torch.from_numpy"):
        transform(read)(torch.ones(3, 2))


@pytest.mark.parametrize(
    "call",
    [
        vmap(torch.sin),
        grad(torch.sum),
        jacrev(torch.sin),
        lambda a: jvp(torch.sin, (a,), (a,)),
        lambda a: scan(lambda c, x: (c, x), torch.zeros(()), a),
        lambda a: fori_loop(0, 3, lambda i, a: a * 2, a),
    ],
    ids=["vmap", "grad", "jacrev", "jvp", "scan", "fori_loop"],
)
def test_an_array_in_place_of_a_tensor_is_refused_with_the_remedy(call: Any) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError), match=r"onvert it: torch.from_numpy"):
        call(np.ones(3))


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
