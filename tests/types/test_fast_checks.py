"""Generated checks of calls accept no call that the complete check refuses."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, List  # noqa: UP035

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.types.test_descriptor_lattice import described, examples
from tsfunc import Descriptors, Dim, infer_descriptors
from tsfunc import MetaTensorType as Meta
from tsfunc.errors import DescriptorViolation
from tsfunc.types import compile_descriptors


def f(x: Any, y: Any = None, *rest: Any, **more: Any) -> None: ...


def both(d: Mapping[str, object], call: dict[str, Any]) -> tuple[Any, Any]:
    """Return the sizes by the generated check, and by the complete one; None if it refuses."""
    contract = compile_descriptors(d, inspect.signature(f))
    fast_check = contract._fast_check(call) if contract._fast_check is not None else None
    try:
        return fast_check, dict(contract._check_fully(call).sizes)
    except DescriptorViolation:
        return fast_check, None


@given(described, examples)
@settings(max_examples=200)
def test_accepted_values_are_valid(d: Descriptors, call: dict[str, Any]) -> None:
    fast_check, whole = both(d, call)
    assert fast_check is None or fast_check == whole


@given(st.lists(examples, min_size=1, max_size=2))
def test_valid_values_are_accepted(several: list[dict[str, Any]]) -> None:
    d = infer_descriptors(*several)
    for call in several:
        fast_check, whole = both(d, call)
        generated = compile_descriptors(d, inspect.signature(f))._fast_check is not None
        assert whole is not None and (not generated or fast_check == whole)


ROWS = Meta(["n", Dim("m", min=2)], dtype=torch.float32)
NESTED = {"x": ROWS, "y": {"a": [Meta(["m"])]}}


@pytest.mark.parametrize(
    ("d", "call", "sizes"),
    [
        ({"x": List[ROWS]}, {"x": [torch.ones(3, 4)] * 3}, {"n": 3, "m": 4}),  # type: ignore[valid-type]  # noqa: UP006
        ({"x": List[ROWS]}, {"x": [torch.ones(3, 4), torch.ones(3, 5)]}, None),  # type: ignore[valid-type]  # noqa: UP006
        ({"x": List[ROWS]}, {"x": [torch.ones(3, 4), torch.ones(3, 4).double()]}, None),  # type: ignore[valid-type]  # noqa: UP006
        ({"x": List[ROWS]}, {"x": []}, {}),  # type: ignore[valid-type]  # noqa: UP006
        ({"x": ROWS}, {"x": torch.ones(3, 1)}, None),
        (NESTED, {"x": torch.ones(3, 4), "y": {"a": [torch.ones(4)]}}, {"n": 3, "m": 4}),
        (NESTED, {"x": torch.ones(3, 4), "y": {"b": [torch.ones(4)]}}, None),
        ({"x": int, "y": float | None}, {"x": 3}, {}),
        ({"x": int, "y": float | None}, {"x": True, "y": 1.5}, None),
        ({"x": 1}, {"x": True}, None),
        ({"x": (1, None, "a")}, {"x": (1, None, "a")}, {}),
        ({"rest": (Meta(["n"]),), "x": Meta(["n"])}, {"x": torch.ones(2), "rest": (torch.ones(2),)},
         {"n": 2}),
        ({"x": Meta([..., "n", "n"])}, {"x": torch.ones(5, 2, 2)}, {"n": 2}),
        ({"x": Meta(memory_format=torch.channels_last)}, {"x": torch.ones(2, 2, 2, 2)}, None),
        ({"x": int}, {}, None),
    ],
)  # fmt: skip
def test_fast_checks_agree_with_slow_ones(
    d: Any, call: dict[str, Any], sizes: dict[str, int] | None
) -> None:
    assert both(d, call) == (sizes, sizes)
    assert compile_descriptors(d, inspect.signature(f))._fast_check is not None


def test_the_metadata_of_each_leaf_can_be_read_later() -> None:
    contract = compile_descriptors({"x": [ROWS]}, inspect.signature(f))
    found = contract.check({"x": [torch.ones(3, 4)]})
    assert found.leaves == {("x", 0): ROWS} and found.dims(("x", 0)) == ROWS.dims
    assert found == contract.check({"x": [torch.ones(3, 4)]}) and "'n': 3" in repr(found)
