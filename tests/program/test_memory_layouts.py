"""The layout of a tensor in memory, and strides that have it for other sizes."""

from __future__ import annotations

import random

import pytest
import torch

from tsfunc.program.guarding.layouts import layout_of, strides_with


def drawn_strides(draw: random.Random, shape: list[int]) -> list[int]:
    """Return strides in a drawn order, with gaps and expanded dims."""
    strides, step = [0] * len(shape), draw.choice([1, 1, 2, 3])
    for dim in draw.sample(range(len(shape)), len(shape)):
        if draw.random() < 0.2:
            continue  # expanded
        strides[dim] = step
        step = step * shape[dim] * draw.choice([1, 1, 2])
    return strides


@pytest.mark.parametrize("number", range(100))
def test_strides_with_a_layout_have_it_for_all_sizes(number: int) -> None:
    draw = random.Random(torch.initial_seed() + number)
    shape = [draw.randint(1, 4) for _ in range(draw.randint(0, 4))]
    layout = layout_of(shape, drawn_strides(draw, shape))
    assert layout_of(shape, strides_with(layout, shape)) == layout
    # A dim of size 1 has no place in the layout: it keeps its size.
    other = [size if size == 1 else draw.randint(2, 7) for size in shape]
    assert layout_of(other, strides_with(layout, other)) == layout


@pytest.mark.parametrize("number", range(20))
def test_tensors_with_one_layout_have_views_alike(number: int) -> None:
    """The layout decides whether dims can be viewed as one."""
    draw = random.Random(torch.initial_seed() + number)
    shape = [draw.randint(2, 4) for _ in range(3)]
    strides = drawn_strides(draw, shape)
    other = [draw.randint(2, 5) for _ in shape]
    x = torch.empty_strided(shape, strides)
    y = torch.empty_strided(other, strides_with(layout_of(shape, strides), other))
    for view in (lambda x: x.view(-1), lambda x: x.flatten(1).data_ptr() == x.data_ptr()):
        assert _accepted(view, x) == _accepted(view, y)


def _accepted(view: object, x: torch.Tensor) -> object:
    try:
        out = view(x)  # type: ignore[operator]
    except RuntimeError:
        return None
    return out if isinstance(out, bool) else True
