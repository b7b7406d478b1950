"""Objects among the results of a program: NOTE [objects among results]."""

from __future__ import annotations

import array
import collections
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tsfunc import MetaTensorType as Meta
from tsfunc import checkpoint, specialize, vmap
from tsfunc.errors import TypeCheckError


class Box:
    def __init__(self, x: Any) -> None:
        self.x = x

    def get(self) -> Any:
        return self.x


class Slots:
    __slots__ = ("a", "b")

    a: Any
    b: Any


@dataclass(frozen=True)
class Settings:
    name: str


class Table(dict[str, Any]):
    pass


class Row(list[Any]):
    pass


class Pair(tuple[Any, ...]):
    pass


class TestFromOutside:
    """An object from outside is that of the call."""

    def test_an_argument(self) -> None:
        f = specialize(lambda box: box)
        for box in (Box(torch.ones(1)), Box(torch.zeros(1))):
            assert f(box) is box
        assert f.cache_info().programs == 1

    def test_an_argument_that_is_changed(self) -> None:
        def double(box: Box) -> Box:
            box.x = box.x * 2
            return box

        f = specialize(double)
        for n in (1, 2):
            box = Box(torch.full((1,), float(n)))
            assert f(box) is box and box.x.item() == 2 * n

    def test_tensors_reached_from_an_argument(self) -> None:
        f = specialize(lambda box: [box.x, box.x.x + 1])
        for n in (1, 2):
            inner = Box(torch.full((1,), float(n)))
            found, more = f(Box(inner))
            assert found is inner and more.item() == n + 1
        assert f.cache_info().programs == 1

    def test_an_argument_of_no_class_that_is_watched(self) -> None:
        f = specialize(lambda x, numbers: (x + 1, numbers))
        for numbers in (array.array("d", [1.0]), array.array("d", [1.0])):
            assert f(torch.ones(1), numbers)[1] is numbers

    def test_an_object_of_the_functions_own(self) -> None:
        box = Box(2.0)
        f = specialize(lambda x: (x * box.x, box))
        assert f(torch.ones(1))[1] is box
        box = Box(2.0)
        assert f(torch.ones(1))[1] is box

    def test_one_that_is_assigned(self) -> None:
        def link(one: Box, other: Box) -> Tensor:
            one.x = other
            return other.x * 2

        f = specialize(link)
        for n in (1, 2):
            one, other = Box(None), Box(torch.full((1,), float(n)))
            assert f(one, other).item() == 2 * n and one.x is other
        assert f.cache_info().programs == 1

    def test_through_a_backend(self) -> None:
        f = specialize(lambda box: (box, box.x + 1), backend="eager")
        for n in (1, 2):
            box = Box(torch.full((1,), float(n)))
            found, more = f(box)
            assert found is box and more.item() == n + 1


MADE: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Any]]] = {
    "instance": (lambda x: Box([x, {"a": x + 1}]), lambda made: made.x),
    "inside": (lambda x: [Box(Box(x))], lambda made: made[0].x.x),
    "slots": (lambda x: _slots(x), lambda made: (made.a, made.b)),
    "namespace": (lambda x: SimpleNamespace(a=x, b=2), lambda made: (made.a, made.b)),
    "set": (lambda x: {x}, lambda made: list(made)),
    "frozenset": (lambda x: frozenset([x]), lambda made: list(made)),
    "chain": (lambda x: collections.ChainMap({"a": x}), lambda made: made["a"]),
    "user dict": (lambda x: collections.UserDict(a=x), lambda made: made["a"]),
    "dict": (lambda x: Table(a=x), dict),
    "list": (lambda x: Row([x, 1]), list),
    "tuple": (lambda x: Pair([x, 1]), tuple),
    "counter": (lambda x: (x, collections.Counter("aab")), lambda made: dict(made[1])),
    "distribution": (lambda x: torch.distributions.Normal(x, 1.0), lambda made: made.loc),
    "packed": (lambda x: nn.utils.rnn.pack_sequence([x]), lambda made: made.data),
}


def _slots(x: Tensor) -> Slots:
    made = Slots()
    made.a, made.b = x, 2
    return made


@pytest.mark.parametrize("name", MADE)
def test_objects_made_of_traced_values_are_made_at_every_call(name: str) -> None:
    make, contents = MADE[name]
    f = specialize(make)
    found = [f(torch.full((2,), n)) for n in (1.0, 2.0)]
    assert f.cache_info().programs == 1 and found[0] is not found[1]
    for n, made in enumerate(found, 1):
        expected = make(torch.full((2,), float(n)))
        assert type(made) is type(expected)
        torch.testing.assert_close(contents(made), contents(expected))


def test_constants_are_unchanged() -> None:
    settings = Settings("s")
    f = specialize(lambda x: (x, settings, Settings("made"), {1, 2}, range(3), Box))
    for _ in range(2):
        _, own, made, some, numbers, cls = f(torch.ones(1))
        assert own is settings and made == Settings("made") and cls is Box
        assert some == {1, 2} and numbers == range(3)


@pytest.mark.parametrize("n", [2, 5])
def test_a_shape_is_that_of_the_call(n: int) -> None:
    f = specialize(lambda x: (x.shape, x.size(), x[0].shape), {"x": Meta(["n", 3])})
    f(torch.ones(7, 3))
    found = f(torch.ones(n, 3))
    assert found == (torch.Size([n, 3]), torch.Size([n, 3]), torch.Size([3]))
    assert all(type(each) is torch.Size for each in found) and f.cache_info().programs == 1


def _generator(x: Tensor) -> Any:
    yield x


def _cycle(x: Tensor) -> Box:
    made = Box(x)
    made.me = made  # type: ignore[attr-defined]
    return made


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "generator": (_generator, r"a generator, which computes.*list\("),
    "map": (lambda x: map(torch.neg, [x]), r"a map, which computes"),
    "inside": (lambda x: {"a": [iter([x])]}, "a list_iterator, which computes"),
    "attribute": (lambda x: SimpleNamespace(items=_generator(x)), "a generator, which computes"),
    "closure": (lambda x: lambda y: x + y, "a function that refers to traced values"),
    "partial": (lambda x: functools.partial(torch.add, x), "a partial that refers to traced"),
    "method": (lambda x: Box(x).get, "a method.* that refers to traced"),
    "view": (lambda x: {"a": x}.values(), "a dict_values that refers to traced"),
    "cycle": (_cycle, "a Box that refers to itself"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_results_that_would_run_later_are_refused(name: str) -> None:
    make, problem = REFUSED[name]
    with pytest.raises(TypeCheckError, match=problem):
        specialize(make)(torch.ones(1))


def test_a_file_has_no_place_for_them(tmp_path: Path) -> None:
    for f in (lambda x: Box(x), lambda x: {x}):
        g = specialize(f)
        g(torch.ones(1))
        with pytest.raises(ValueError, match="a container of class"):
            g.save(tmp_path / "f.tsf")


def shapes_of(results: Any) -> list[Tensor]:
    return [torch.empty_like(x) for x in results]


SEVERAL: dict[str, Callable[..., Any]] = {
    "max": lambda x, **out: torch.max(x, 1, **out),
    "min": lambda x, **out: torch.min(x, 1, **out),
    "aminmax": lambda x, **out: torch.aminmax(x, dim=1, **out),
    "cummax": lambda x, **out: torch.cummax(x, 1, **out),
    "cummin": lambda x, **out: torch.cummin(x, 0, **out),
    "frexp": lambda x, **out: torch.frexp(x, **out),
    "geqrf": lambda x, **out: torch.geqrf(x, **out),
    "kthvalue": lambda x, **out: torch.kthvalue(x, 2, **out),
    "median": lambda x, **out: torch.median(x, 1, **out),
    "mode": lambda x, **out: torch.mode(x, 1, **out),
    "nanmedian": lambda x, **out: torch.nanmedian(x, 1, **out),
    "slogdet": lambda x, **out: torch.linalg.slogdet(x @ x.mT + torch.eye(4), **out),
    "sort": lambda x, **out: torch.sort(x, 1, **out),
    "topk": lambda x, **out: torch.topk(x, 2, **out),
    "add": lambda x, **out: (torch.add(x, 1, **out),),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_results_in_given_tensors(name: str) -> None:
    """torch's functions pass one `out=` argument to an operator with several results."""
    f, x = SEVERAL[name], torch.arange(20.0).sin().reshape(4, 5)

    def written(x: Tensor) -> Any:
        outs = shapes_of(f(x))
        f(x, out=tuple(outs) if len(outs) > 1 else outs[0])
        return outs

    batch = torch.stack([x, x.cos(), x + 1])
    each = [torch.stack(rows) for rows in zip(*(f(row) for row in batch), strict=True)]
    run = specialize(written)
    for _ in range(2):
        torch.testing.assert_close(run(x), list(f(x)))
        torch.testing.assert_close(vmap(run)(batch), each)
        torch.testing.assert_close(specialize(checkpoint(written))(x), list(f(x)))
