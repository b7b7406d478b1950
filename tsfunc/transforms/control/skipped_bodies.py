"""Type checks of branches and bodies that a call does not run.

The meaning of a program must not depend on the branch that is taken, or on the number of steps. The
other branches of a call with a known choice must have the types of the taken branch's result, and a
body with another result type than its carry is an error without a step too, as in JAX. The types
are computed on tensors without data, once for each set of functions and types of operands. A
function is not checked if it can't run without data (it reads data, or fails for values that are
not meant for it), nor a branch with a result of a data-dependent size.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import CellType, FunctionType, MethodType
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch

from tsfunc import pytrees
from tsfunc.bridge.trace.trace_level import current_trace
from tsfunc.dispatch import current_levels
from tsfunc.errors import TypeCheckError
from tsfunc.transforms.abstract_eval import eval_shape, results_without_data
from tsfunc.transforms.control.outputs import (
    check_branches,
    check_carried,
    common_dtype,
    is_number,
)

_Dtypes = Sequence[torch.dtype | None]

# The checked calls, by the code of the first function, then by the codes of the other functions and
# the types of operands and closures: one line of a program makes a new function at each run. A
# value has the dtypes of the results for which a branch returns a number.
_checked: Final[WeakKeyDictionary[Any, dict[Any, _Dtypes]]] = WeakKeyDictionary()
_EMPTY: Final = CellType()
_MOST: Final = 64  # the most types for a function


def check_other_branches(
    label: str,
    names: Sequence[str],
    branches: Sequence[Callable[..., Any]],
    operands: Sequence[Any],
    taken: int,
    out: Any,
) -> Any:
    """Check that the other branches return the types of the taken branch, and return its result.

    Inside of transforms the branches are not checked: they may close over values of a transform.

    Args:
        names: the names of the branches in error messages.

    Returns:
        The result, with its numbers as tensors: NOTE [numbers among results] in ``outputs``.

    Raises:
        TypeCheckError: a branch returns another type; the message has both.
    """
    dtypes = () if current_levels() else _result_types(label, names, branches, operands, taken, out)
    leaves, spec = pytrees.flatten(out)
    if not any(map(is_number, leaves)):
        return out
    checked = [
        torch.full((), leaf, dtype=dtype) if is_number(leaf) else leaf
        for leaf, dtype in itertools.zip_longest(leaves, dtypes)
    ]
    return pytrees.unflatten(spec, checked)


def _result_types(
    label: str,
    names: Sequence[str],
    branches: Sequence[Callable[..., Any]],
    operands: Sequence[Any],
    taken: int,
    out: Any,
) -> _Dtypes:
    checks = _checks_of(branches, tuple(operands))
    if checks is None:
        return ()
    checked, key, dtypes = checks
    if dtypes is not None or len(checked) == _MOST:
        return dtypes or ()
    every = [pytrees.flatten(out)[0]]
    for i, branch in enumerate(branches):
        if i != taken:
            try:
                other = results_without_data(label, branch, operands)
            except Exception:
                continue
            if _depends_on_data(other):
                continue
            called = (f"the result of {names[taken]}", f"the result of {names[i]}")
            check_branches(label, called, (out, other))
            every.append(pytrees.flatten(other)[0])
    checked[key] = [common_dtype(column) for column in zip(*every, strict=True)]
    return checked[key]


def _depends_on_data(out: Any) -> bool:
    """True if a result has a data-dependent size."""
    tensors = [leaf for leaf in pytrees.flatten(out)[0] if isinstance(leaf, torch.Tensor)]
    return any(isinstance(size, torch.SymInt) for tensor in tensors for size in tensor.shape)


def check_zero_steps(
    label: str, written: Any, body: Callable[[Any], Any], carry: Any, advice: str
) -> None:
    """Check that a body that was not called keeps the type of its carry.

    Args:
        body: calls ``written``: takes the carry and returns the next carry.

    Raises:
        TypeCheckError: the body changes the type of the carry.
    """
    # In a trace sizes may be symbolic, and symbolic sizes are not hashable.
    checks = None if current_trace() else _checks_of((written,), carry)
    checked, key, dtypes = checks or ({}, None, None)
    if dtypes is not None:
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
    if len(checked) < _MOST:
        checked[key] = ()


def _checks_of(
    functions: Sequence[Callable[..., Any]], operands: Any
) -> tuple[dict[Any, _Dtypes], Any, _Dtypes | None] | None:
    """Return the earlier checks of functions, the key of a call among them, and its own check.

    None if checks of the first function can't be kept.
    """
    codes = [_code(function) for function in functions]
    leaves, tree = pytrees.flatten(operands)
    consts = [value for function in functions for value in _closed_over(function)]
    key = (*map(id, codes[1:]), tree, *_types_of([*leaves, *consts]))
    try:
        checked = _checked.setdefault(codes[0], {})
        return checked, key, checked.get(key)
    except TypeError:  # a callable that can't be referred to weakly
        return None


def _code(function: Any) -> Any:
    while isinstance(function, functools.partial | MethodType):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    return getattr(function, "__code__", function)


def _closed_over(function: Any) -> list[Any]:
    cells = getattr(function, "__closure__", None) or ()
    return [cell.cell_contents for cell in cells if cell != _EMPTY]


def _types_of(values: list[Any]) -> list[Any]:
    """Return the properties of values, and of captured values, that types depend on."""
    types: list[Any] = []
    followed: list[FunctionType] = []
    for value in values:  # the list grows by the closures of functions
        if isinstance(value, torch.Tensor):
            types.append((value.dtype, value.shape, value.device))
        elif type(value) is not FunctionType:
            types.append(type(value))
        else:
            types.append(value.__code__)
            if value not in followed:
                followed.append(value)
                values += _closed_over(value)
    return types
