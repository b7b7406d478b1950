"""Types as descriptors of specialized functions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Dict, List, NamedTuple, Optional, Union  # noqa: UP035

import pytest
import torch
from torch import Tensor

from tsfunc import MetaTensorType as Meta
from tsfunc import specialize
from tsfunc.errors import DescriptorViolation
from tsfunc.types import parse

ROWS = Meta(["n", 4], dtype=torch.float32)


@dataclass
class Batch:
    x: ROWS  # type: ignore[valid-type]
    scale: float = 2.0


class Pair(NamedTuple):
    x: ROWS  # type: ignore[valid-type]
    y: Optional[ROWS] = None  # type: ignore[valid-type]  # noqa: UP045


def total(xs: Any) -> Any:
    """Return the sum of all rows, for each of the containers here."""
    if isinstance(xs, Batch):
        return xs.x.sum(0) * xs.scale  # type: ignore[attr-defined]
    if isinstance(xs, dict):
        xs = list(xs.values())
    return sum(x.sum(0) for x in xs if x is not None)


@pytest.mark.parametrize(
    ("descriptor", "make"),
    [
        (List[ROWS], lambda x: [x, x]),  # type: ignore[valid-type]  # noqa: UP006
        (Dict[str, ROWS], lambda x: {"a": x, "b": x}),  # type: ignore[valid-type]  # noqa: UP006
        (List[Optional[ROWS]], lambda x: [x, None]),  # type: ignore[valid-type]  # noqa: UP006, UP045
        (List[Union[ROWS, int]], lambda x: [x]),  # type: ignore[valid-type]  # noqa: UP006, UP007
        (Pair, Pair),
        (Batch, Batch),
        (Batch(ROWS, 2.0), Batch),
        (parse("List[f32[n, 4]]"), lambda x: [x, x]),
        (parse("namedtuple(x: f32[n, 4], y: Optional[Tensor])"), Pair),
        (parse("Tuple[f32[n, 4], f32[n, 4]]"), lambda x: (x, x)),
    ],
    ids=[
        "List",
        "Dict",
        "Optional",
        "Union",
        "NamedTuple",
        "dataclass",
        "an instance",
        "TSList",
        "TSNamedTuple",
        "TSTuple",
    ],
)
def test_one_program_for_every_size_of_a_named_dim_at_any_leaf(descriptor: Any, make: Any) -> None:
    f = specialize(total, {"xs": descriptor})
    for n in (3, 5, 2):
        xs = make(torch.randn(n, 4))
        torch.testing.assert_close(f(xs), total(xs))
    assert f.cache_info().programs == 1
    with pytest.raises(DescriptorViolation, match="expected 4, got 3"):
        f(make(torch.randn(2, 3)))


def test_the_length_of_a_list_is_part_of_the_key() -> None:
    f = specialize(total, {"xs": List[ROWS]})  # type: ignore[valid-type]  # noqa: UP006
    for length, n in ((1, 3), (2, 3), (1, 4), (2, 5)):
        xs = [torch.randn(n, 4) for _ in range(length)]
        torch.testing.assert_close(f(xs), total(xs))
    assert f.cache_info().programs == 2


def test_the_keys_of_a_dict_are_part_of_the_key() -> None:
    f = specialize(total, {"xs": Dict[str, ROWS]})  # type: ignore[valid-type]  # noqa: UP006
    f({"a": torch.ones(2, 4)})
    f({"b": torch.ones(3, 4)})
    assert f.cache_info().programs == 2


WRAPPED: dict[str, Callable[..., Any]] = {
    "dict": dict,
    "in a deque": lambda **xs: deque([xs]),
    "in a tuple": lambda **xs: {"of": (xs,)},
}


@pytest.mark.parametrize("wrapped", WRAPPED.values(), ids=WRAPPED)
def test_the_order_of_keys_is_part_of_the_key(wrapped: Any) -> None:
    def weighted(xs: Any) -> Tensor:
        (values,) = xs if isinstance(xs, deque) else xs.get("of", [xs])
        terms = [(i + 1) * values[key] for i, key in enumerate(values)]
        return sum(terms, torch.zeros(()))

    f = specialize(weighted)
    x, y = torch.randn(2), torch.randn(2)
    for given in (wrapped(a=x, b=y), wrapped(b=y, a=x), wrapped(a=y, b=x), wrapped(b=x, a=y)):
        torch.testing.assert_close(f(given), weighted(given))
    assert f.cache_info().programs == 2


def test_optional_arguments_have_a_program_for_each_case() -> None:
    def shift(x: Tensor, by: Any) -> Tensor:
        return x if by is None else x + by

    f = specialize(shift, {"x": ROWS, "by": Optional[ROWS]})  # noqa: UP045
    x = torch.ones(3, 4)
    assert f(x, None).equal(x) and f(x, x).equal(2 * x) and f(x[:2], None).equal(x[:2])
    assert f.cache_info().programs == 2


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [(int, 3, True), (float, 2.0, 2), (bool, True, 1), (str, "sum", b"sum")],
)
def test_types_of_single_values_are_checked(kind: type, good: Any, bad: Any) -> None:
    f = specialize(lambda x, option: (x, option), {"option": kind})
    assert f(torch.ones(1), good)[1] == good
    with pytest.raises(DescriptorViolation, match=f"option: expected {kind.__name__}, got"):
        f(torch.ones(1), bad)
    g = specialize(lambda x, option: (x, option), {"option": parse(kind.__name__)})
    assert g(torch.ones(1), good)[1] == good
