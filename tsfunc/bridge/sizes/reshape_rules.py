"""Result shapes of reshapes, which require only that the number of elements stays the same.

A size of -1 must divide evenly. For a single dim, whose descriptor can guarantee it
(``multiple_of``), this is guarded; otherwise the operator checks it when the program runs.

torch's fake-tensor rules walk the dims of both shapes, merge and split them until they agree, and
test at each step which of two sizes is larger and whether it is a multiple. A contiguous tensor can
be viewed as every shape, whatever the results of these tests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tsfunc.bridge.sizes.shape_probe import symbols_among
from tsfunc.bridge.sizes.shape_rules import (
    are_named,
    new_like,
    shape_rule,
    view_like,
)
from tsfunc.bridge.tracers.user_queries import statically_known_true, suppress_guards
from tsfunc.ops.dims import dense_strides

# Operators with a size of -1 that must divide evenly. Other operators that need multiples of a
# number (``hsplit``, ``glu``, ``pixel_shuffle``) check them when the program runs.
OTHER_SHAPES = frozenset({
    "aten::reshape", "aten::view", "aten::_unsafe_view", "aten::view_copy", "aten::_reshape_copy",
})  # fmt: skip


@shape_rule("reshape", "view", "_unsafe_view")
def reshape_of(x: Any, shape: Sequence[Any]) -> Any:
    """Return a view of a contiguous tensor, NotImplemented for other tensors."""
    filled = _filled_in(x, shape)
    if filled is None or not _is_in_order(x):
        return NotImplemented
    return view_like(x, filled, dense_strides(filled))


@shape_rule("view_copy", "_reshape_copy")
def reshape_copy_of(x: Any, shape: Sequence[Any]) -> Any:
    filled = _filled_in(x, shape)
    return NotImplemented if filled is None else new_like(x, filled)


def _filled_in(x: Any, shape: Sequence[Any]) -> list[Any] | None:
    """Return a shape with its -1 filled in; None if torch has to report an error."""
    if not are_named(*x.shape, *shape):
        return None
    left_out = [i for i, size in enumerate(shape) if type(size) is int and size == -1]
    sizes = [size for i, size in enumerate(shape) if i not in left_out]
    if len(left_out) > 1 or not all(_holds_or_guards(size >= 0) for size in sizes):
        return None
    count, rest = math.prod(x.shape), math.prod(sizes)
    if not left_out:
        return list(shape) if _holds_or_guards(count == rest) else None
    with suppress_guards(x.fake_mode):
        if not (rest > 0 and count % rest == 0):
            return None
    if statically_known_true(rest > 0) and len(symbols_among([count % rest])) == 1:
        _holds_or_guards(count % rest == 0)
    filled = list(shape)
    filled[left_out[0]] = count // rest
    return filled


def _holds_or_guards(constraint: Any) -> bool:
    """True if a constraint holds; unless it is known to hold, this adds a guard."""
    return statically_known_true(constraint) or bool(constraint)


def _is_in_order(x: Any) -> bool:
    """True if a tensor is known to be contiguous."""
    step: Any = 1
    for size, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if not (statically_known_true(size == 1) or statically_known_true(stride == step)):
            return False
        step = step * size
    return True
