"""Type checks of the branches that a call with a known choice does not take.

A check is made once for each set of branches and operand types. The other branches are run on
tensors without data, and their results must have the types of the taken branch's result. Two kinds
of branches are not checked: a branch that can't run without data (it reads data, or fails for
values that are not meant for it), and a branch with a result of a data-dependent size.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from types import CellType
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch

from tsfunc import pytrees
from tsfunc.dispatch import current_levels
from tsfunc.transforms.abstract_eval import without_data
from tsfunc.transforms.control.outputs import check_branches, common_dtype, is_number

_Dtypes = Sequence[torch.dtype | None]

# The checked calls, by the code of the first branch, then by the codes of the other branches and
# the types of the operands. A value has the dtypes of the results for which a branch returns a
# number.
_checked: Final[WeakKeyDictionary[Any, dict[Any, _Dtypes]]] = WeakKeyDictionary()
_EMPTY: Final = CellType()
_MOST: Final = 64  # the most operand types per branch; further calls are not checked


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
        label: the operator.
        names: the names of the branches in error messages.
        branches: all branches.
        operands: the arguments of the branches.
        taken: the index of the taken branch.
        out: the result of the taken branch.

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
    codes = [_code(branch) for branch in branches]
    flat, tree = pytrees.flatten(tuple(operands))
    try:
        seen = _checked.setdefault(codes[0], {})
        consts = [_key(value) for branch in branches for value in _closed_over(branch)]
        key = (*map(id, codes[1:]), tree, *[_key(leaf) for leaf in flat], *consts)
        known = seen.get(key)
    except TypeError:  # a callable that can't be referred to weakly
        return ()
    if known is not None or len(seen) == _MOST:
        return known or ()
    every = [pytrees.flatten(out)[0]]
    for i, branch in enumerate(branches):
        if i != taken:
            try:
                other = without_data(label, branch, operands)
            except Exception:
                continue
            if _depends_on_data(other):
                continue
            called = (f"the result of {names[taken]}", f"the result of {names[i]}")
            check_branches(label, called, (out, other))
            every.append(pytrees.flatten(other)[0])
    seen[key] = [common_dtype(column) for column in zip(*every, strict=True)]
    return seen[key]


def _depends_on_data(out: Any) -> bool:
    """True if a result has a data-dependent size."""
    tensors = [leaf for leaf in pytrees.flatten(out)[0] if isinstance(leaf, torch.Tensor)]
    return any(isinstance(size, torch.SymInt) for tensor in tensors for size in tensor.shape)


def _code(branch: Any) -> Any:
    while isinstance(branch, functools.partial):
        branch = branch.func
    return getattr(branch, "__code__", branch)


def _closed_over(branch: Any) -> list[Any]:
    cells = getattr(branch, "__closure__", None) or ()
    return [cell.cell_contents for cell in cells if cell != _EMPTY]


def _key(leaf: Any) -> Any:
    return (leaf.dtype, leaf.shape) if isinstance(leaf, torch.Tensor) else type(leaf)
