"""Type checks of loops that make no step, without a run of their bodies.

The meaning of a program must not depend on the number of steps. A body with another result type
than its carry is an error in the first step, and therefore also an error without a step, as in
JAX. The result type is computed without data. If that fails (the body reads a number of the carry,
or raises), the loop is not checked.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import CellType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch

from tsfunc import pytrees
from tsfunc.bridge.control.bodies import current_trace
from tsfunc.errors import TypeCheckError
from tsfunc.transforms.abstract_eval import eval_shape
from tsfunc.transforms.control.outputs import check_carried

# The types that passed the check, by the code of the user's function: one line of a program makes
# a new function at each run, which closes over values of the same types.
_checked_types: WeakKeyDictionary[Any, set[Any]] = WeakKeyDictionary()
_MOST = 64  # the most types per function


def check_zero_steps(
    label: str, written: Any, body: Callable[[Any], Any], carry: Any, advice: str
) -> None:
    """Check that a body that was not called keeps the type of its carry.

    Args:
        label: the operator.
        written: the user's function.
        body: calls ``written``: takes the carry and returns the next carry.
        carry: the first carry.
        advice: the advice in the error message.

    Raises:
        TypeCheckError: the body changes the type of the carry.
    """
    code = getattr(written, "__code__", None)
    # In a trace sizes may be symbolic, and symbolic sizes are not hashable.
    known = None if code is None or current_trace() else _checked_types.setdefault(code, set())
    key = None if known is None else (_types_of(written), _types_of(carry))
    if known and key in known:
        return
    faults: list[TypeCheckError] = []

    def step(carry: Any) -> None:
        new = body(carry)
        try:
            check_carried(label, ("the carry", "the result of the body"), (carry, new), advice)
        except TypeCheckError as error:
            faults.append(error)

    with suppress(Exception):  # any error of the body: it must not run here
        eval_shape(step, carry)
    if faults:
        raise faults[0].with_traceback(None)
    if known is not None and len(known) < _MOST:
        known.add(key)


def _types_of(value: Any) -> Any:
    """Return the properties of a carry or closure that a result's type can depend on."""
    leaves, tree = pytrees.flatten(value)
    return tree, tuple(map(_type_of, leaves))


def _type_of(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, leaf.shape, leaf.device
    if not isinstance(leaf, FunctionType):
        return type(leaf)
    cells = leaf.__closure__ or ()
    return leaf.__code__, tuple(_type_of(_content(cell)) for cell in cells)


def _content(cell: CellType) -> Any:
    """Return the content of a cell; None if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None
