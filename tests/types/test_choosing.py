"""Several sets of descriptors for one function: the choice for a call, and ambiguities."""

from __future__ import annotations

import itertools
from typing import Any, Dict, List, Tuple  # noqa: UP035

import pytest
import torch
from hypothesis import given, settings

from tests.types.strategies import Base, Leaf, Left, Right
from tests.types.test_descriptor_lattice import described, examples, keeps
from tsfunc import Descriptors, Dim, specialize
from tsfunc import MetaTensorType as Meta
from tsfunc.errors import DescriptorError
from tsfunc.types import Value
from tsfunc.types.disjoint import are_disjoint

F32, F64 = Meta(torch.float32), Meta(torch.float64)
LISTS = (List[F32], List[F64])  # type: ignore[valid-type]  # noqa: UP006


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"x": F32}, {"x": F64}),
        ({"x": Meta(rank=1)}, {"x": Meta(rank=2)}),
        ({"x": Meta([..., 3])}, {"x": Meta([])}),
        ({"x": Meta([..., 3])}, {"x": Meta(["n", 4])}),
        ({"x": Meta([..., 3])}, {"x": Meta([..., "n", 4])}),
        ({"x": Meta([3])}, {"x": Meta([Dim("n", min=4)])}),
        ({"x": Meta([Dim("n", max=3)])}, {"x": Meta([Dim("m", min=4)])}),
        ({"x": Meta([Dim("n", one_of=[2, 4])])}, {"x": Meta([Dim("m", one_of=[3])])}),
        ({"x": Meta(["n"]), "y": Meta(["n"])}, {"x": Meta([3]), "y": Meta([4])}),
        ({"x": Meta(["n", "2*n"])}, {"x": Meta([3, 5])}),
        ({"x": Meta(["n", 2, "n"])}, {"x": Meta([3, "m", "2*m"])}),
        ({"x": Meta(device="cpu")}, {"x": Meta(device="cuda")}),
        ({"x": Meta(requires_grad=True)}, {"x": Meta(requires_grad=False)}),
        ({"x": Meta(layout=torch.strided)}, {"x": Meta(layout=torch.sparse_coo)}),
        ({"x": int}, {"x": float}),
        ({"x": int}, {"x": bool}),
        ({"x": int}, {"x": torch.Tensor}),
        ({"x": 1}, {"x": 2}),
        ({"x": 1}, {"x": True}),
        ({"x": None}, {"x": torch.Tensor}),
        ({"x": Left}, {"x": Right}),
        ({"x": [int, 1]}, {"x": [int, 2]}),
        ({"x": [int]}, {"x": [int, int]}),
        ({"x": {"a": int}}, {"x": {"b": int}}),
        ({"x": LISTS[0]}, {"x": LISTS[1]}),
        ({"x": (F32,)}, {"x": LISTS[0]}),
        ({"x": Dict[str, int]}, {"x": Dict[str, float]}),  # noqa: UP006
        ({"x": Tuple[int, ...]}, {"x": (1.5,)}),  # noqa: UP006
    ],
)
def test_sets_that_exclude_each_other(one: dict[str, Any], other: dict[str, Any]) -> None:
    specialize(lambda x, y=None, z=None: x, [one, other])
    specialize(lambda x, y=None, z=None: x, [other, one])


@pytest.mark.parametrize(
    ("narrow", "wide"),
    [
        ({"x": F32}, {"x": torch.Tensor}),
        ({"x": F32}, {}),
        ({"x": F32, "y": 1}, {"x": F32}),
        ({"x": Meta([3, 3])}, {"x": Meta(["n", "n"])}),
        ({"x": Meta(["n", "n"])}, {"x": Meta(["n", "m"])}),
        ({"x": Meta([3, 3])}, {"x": Meta([..., 3])}),
        ({"x": Meta([Dim("n", min=4)])}, {"x": Meta(["n"])}),
        ({"x": 1}, {"x": int}),
        ({"x": int}, {"x": int | None}),
        ({"x": Leaf}, {"x": Base}),
        ({"x": [F32, F32]}, {"x": LISTS[0]}),
    ],
)
def test_the_narrower_set_comes_first(narrow: dict[str, Any], wide: dict[str, Any]) -> None:
    for sets in ([narrow, wide], [wide, narrow]):
        s = specialize(lambda x, y=None: x, sets)
        first, second = s.target.contracts
        assert Descriptors(first.descriptors) == Descriptors(narrow)
        assert Descriptors(second.descriptors) == Descriptors(wide)


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ({"x": F32}, {"x": F32}, "are equivalent"),
        ({"x": Meta(["n"])}, {"x": Meta(["m"])}, "are equivalent"),
        ({}, {}, "are equivalent"),
        ({"x": Meta(["n", 3])}, {"x": Meta([3, "m"])}, "can both fit one call"),
        ({"x": F32}, {"x": Meta(rank=1)}, "can both fit one call"),
        ({"x": F32}, {"y": F32}, "can both fit one call"),
        ({"x": Meta([Dim("n", max=5)])}, {"x": Meta([Dim("n", min=3)])}, "can both fit"),
        ({"x": Meta(["n", "n"])}, {"x": Meta([3, None])}, "can both fit one call"),
        ({"x": int | None}, {"x": float | None}, "can both fit one call"),
        ({"x": Meta([Dim("n", multiple_of=4)])}, {"x": Meta([Dim("n", multiple_of=6)])}, "both"),
    ],
)
def test_ambiguous_sets_are_refused(one: dict[str, Any], other: dict[str, Any], words: str) -> None:
    with pytest.raises(DescriptorError, match=words) as error:
        specialize(lambda x, y=None: x, [one, {"x": Value("else")}, other])
    text = str(error.value)
    assert text.startswith("specialize(<lambda>): its descriptors 1 and 3 ")
    assert f"  1: {str(Descriptors(one)) or 'nothing'}\n" in text
    assert f"  3: {str(Descriptors(other)) or 'nothing'}\n" in text


def test_a_call_takes_the_narrowest_set_that_it_keeps() -> None:
    s = specialize(
        lambda x: x * 2,
        [{"x": Meta(["n", "m"])}, {"x": Meta([4, 4])}, {"x": Meta(["n", "n"])}],
    )
    for shape in ((4, 4), (5, 5), (2, 3), (6, 6), (7, 8)):
        assert s(torch.ones(shape)).equal(torch.full(shape, 2.0))
    assert s.cache_info().programs == 3


@pytest.mark.parametrize("order", list(itertools.permutations([(2, 3), (5, 5), (4, 4)])))
def test_whichever_program_was_there_before(order: tuple[tuple[int, int], ...]) -> None:
    s = specialize(
        lambda x: x * 2,
        [{"x": Meta(["n", "m"])}, {"x": Meta([4, 4])}, {"x": Meta(["n", "n"])}],
    )
    wanted: dict[tuple[int, int], Any] = {(2, 3): ("n", "m"), (5, 5): ("n", "n"), (4, 4): (4, 4)}
    for shape in (*order, *order):
        assert s(torch.ones(shape)).equal(torch.full(shape, 2.0))
        assert s.cache_info().entries[0].descriptors["x"].shape == wanted[shape]
    assert s.cache_info().programs == 3 and s.cache_info().hits == 3


def test_bounds_distinguish_programs() -> None:
    s = specialize(
        lambda x, k: x * k,
        [
            {"x": Meta(["n"])},
            {"x": Meta([Dim("n", min=6)])},
            {"x": Meta([Dim("n", min=6)]), "k": 2},
        ],
    )
    for _ in range(2):
        for n, k in ((3, 2), (7, 3), (8, 2), (4, 3), (9, 3)):
            assert s(torch.ones(n), k=k).equal(torch.full((n,), float(k)))
    assert s.cache_info().programs == 4 and s.cache_info().misses == 4


@given(described, described, examples)
@settings(max_examples=150)
def test_no_call_keeps_sets_that_exclude_each_other(
    one: Descriptors, other: Descriptors, example: dict[str, Any]
) -> None:
    empty = any(
        len(each) == 0 for each in example.values() if isinstance(each, list | dict | tuple)
    )
    if are_disjoint(one, other) and not empty and "[]" not in str(example):
        assert not (keeps(one, example) and keeps(other, example))
