"""Loops that make no step: their bodies are looked at without being run.

What a program means should not depend on how often a loop runs. A body of another type than its
carry is an error at the first step, so it is one where there is none, as in JAX. What the body
returns is worked out without data. Where that can't be done (it needs a number of the carry, or
raises), nothing is said.
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
from tsfunc.transforms.control.outputs import check_carried
from tsfunc.transforms.outlines import eval_shape

# What was found to be kept, by the code of the user's function: one line of a program makes a
# function anew each time that it is run, which closes over values of the same types.
_kept: WeakKeyDictionary[Any, set[Any]] = WeakKeyDictionary()
_MOST = 64  # of a function


def check_zero_steps(
    what: str, written: Any, body: Callable[[Any], Any], carry: Any, advice: str
) -> None:
    """Checks that a body that was not called would keep the type of its carry.

    Args:
        what: the operator.
        written: the user's function.
        body: calls it: takes the carry and returns the next.
        carry: the first one.
        advice: what to do about it.

    Raises:
        TypeCheckError: it would not.
    """
    code = getattr(written, "__code__", None)
    # In a trace sizes may be symbolic, which have no place in a set.
    known = None if code is None or current_trace() else _kept.setdefault(code, set())
    key = None if known is None else (_types_of(written), _types_of(carry))
    if known and key in known:
        return
    faults: list[TypeCheckError] = []

    def step(carry: Any) -> None:
        new = body(carry)
        try:
            check_carried(what, ("the carry", "what the body returns"), (carry, new), advice)
        except TypeCheckError as error:
            faults.append(error)

    with suppress(Exception):  # whatever it may be, the body is not to run
        eval_shape(step, carry)
    if faults:
        raise faults[0].with_traceback(None)
    if known is not None and len(known) < _MOST:
        known.add(key)


def _types_of(value: Any) -> Any:
    """What a result's type can depend on, of a carry or of what a function closes over."""
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
    """What a cell holds; a function that closes over itself is told by its name."""
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return None
