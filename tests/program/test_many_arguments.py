"""The work of a first call grows in proportion to the number of its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import optree
import pytest
import torch

from tsfunc import pytrees, specialize


class Counted:
    """A registered container that counts its flattened children."""

    handed_over = 0

    def __init__(self, *children: Any) -> None:
        self.children = children


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    def flatten(counted: Counted) -> tuple[tuple[Any, ...], None]:
        Counted.handed_over += len(counted.children)
        return counted.children, None

    optree.register_pytree_node(
        Counted, flatten, lambda _, children: Counted(*children), namespace=pytrees.NAMESPACE
    )
    yield
    optree.unregister_pytree_node(Counted, namespace=pytrees.NAMESPACE)


def children_handed_over(argument: Counted) -> int:
    """Return the number of children that the first call of a specialized function flattens."""

    def first_sine(argument: Counted) -> torch.Tensor:
        first: torch.Tensor = pytrees.leaves_of(argument)[0]
        return first.sin()

    before = Counted.handed_over
    specialize(first_sine)(argument)
    return Counted.handed_over - before


def tensors(count: int) -> list[torch.Tensor]:
    return [torch.ones(3) for _ in range(count)]


@pytest.mark.parametrize("count", [32, 128])
def test_containers_of_many_tensors(count: int) -> None:
    few = children_handed_over(Counted(*tensors(count)))
    many = children_handed_over(Counted(*tensors(2 * count)))
    assert few < many <= 2.3 * few


@pytest.mark.parametrize("count", [32, 128])
def test_containers_of_many_containers(count: int) -> None:
    few = children_handed_over(Counted(*(tensors(2) for _ in range(count))))
    many = children_handed_over(Counted(*(tensors(2) for _ in range(2 * count))))
    assert few < many <= 2.3 * few


@pytest.mark.parametrize("count", [32, 128])
def test_a_container_around_many_tensors(count: int) -> None:
    few = children_handed_over(Counted({"a": tensors(count)}))
    many = children_handed_over(Counted({"a": tensors(2 * count)}))
    assert few == many
