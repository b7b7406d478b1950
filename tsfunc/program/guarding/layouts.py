"""The memory layout of a tensor with symbolic sizes: the part that decisions of torch depend on.

NOTE [layouts of open sizes]
A program for named dims serves tensors whose strides differ from those of its sample. torch's code
decides by strides: ``reshape`` is a view or a copy, ``contiguous`` returns its argument or a copy,
the result of a pointwise operator has the order of its arguments. A :class:`MemoryLayout` has what
these decisions depend on. A program is traced with strides that have the layout of the sample for
all sizes, and a guard compares the layouts of other tensors with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple


class MemoryLayout(NamedTuple):
    """A tensor's layout.

    Attributes:
        order: the dims of more than one element and with a stride, from the smallest stride on.
        unit: True if the first of them has stride 1.
        adjacent: for each of the others, True if it and the dim before it have no gap between.
        expanded: the dims with stride 0.
    """

    order: tuple[int, ...]
    unit: bool
    adjacent: tuple[bool, ...]
    expanded: tuple[int, ...]


def layout_of(shape: Sequence[int], strides: Sequence[int]) -> MemoryLayout:
    """Return the layout of a tensor with these sizes and strides."""
    dims = [k for k, size in enumerate(shape) if size != 1]
    order = sorted((k for k in dims if strides[k]), key=lambda k: (strides[k], -k))
    adjacent = tuple(strides[b] == strides[a] * shape[a] for a, b in itertools.pairwise(order))
    unit = not order or strides[order[0]] == 1
    return MemoryLayout(tuple(order), unit, adjacent, tuple(k for k in dims if not strides[k]))


def strides_with(layout: MemoryLayout, shape: Sequence[Any]) -> list[Any]:
    """Return strides that have the layout for all sizes; the sizes may be symbolic."""
    strides: list[Any] = [0 if k in layout.expanded else 1 for k in range(len(shape))]
    step: Any = 1 if layout.unit else 2
    for k, adjacent in zip(layout.order, (*layout.adjacent, True), strict=False):
        strides[k] = step
        step = step * shape[k] * (1 if adjacent else 2)
    return strides
