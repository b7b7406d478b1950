"""Precision: functions in float64, and tolerances for values of narrower dtypes.

NOTE [laws in narrow dtypes]
Differences in float32 have a few correct digits, and an ill-conditioned function has fewer. A law
about inputs of a narrow dtype is therefore checked twice: closely in float64, and in the dtype of
the inputs with tolerances for the dtype and for the condition of the function. The condition is
measured: a result is as uncertain as it changes if the inputs change by rounding.

For the check in float64 a mode converts the arguments of each torch call, also the parameters that
the function closes over. A function that fails then is checked in its own dtype alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tsfunc import pytrees

_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
_FACTOR = 32  # of measured errors


class _InWideTypes(TorchFunctionMode):
    """Calls torch with tensors and dtypes of double precision in place of narrower ones."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*wide(args), **wide(kwargs or {}))


def wide(tree: Any) -> Any:
    """Return a tree with tensors and dtypes of double precision in place of narrower ones."""
    return pytrees.tree_map(_wide, tree)


def _wide(leaf: Any) -> Any:
    if isinstance(leaf, torch.dtype):
        return _WIDE.get(leaf, leaf)
    if isinstance(leaf, torch.Tensor):
        return leaf.to(_WIDE[leaf.dtype]) if leaf.dtype in _WIDE else leaf
    return leaf


def is_narrow(tree: Any) -> bool:
    """True if a tree has a tensor of less than double precision."""
    return any(
        isinstance(leaf, torch.Tensor) and leaf.dtype in _WIDE for leaf in pytrees.leaves_of(tree)
    )


def in_float64(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with its calculations in double precision."""

    def widely(*args: Any) -> Any:
        with _InWideTypes():
            return wide(func(*args))

    return widely


def epsilon(tree: Any) -> float:
    """Return the rounding error of the narrowest dtype in a tree."""
    dtypes = {leaf.dtype for leaf in pytrees.leaves_of(tree) if isinstance(leaf, torch.Tensor)}
    return max(torch.finfo(dtype).eps for dtype in dtypes if dtype in _WIDE)


def relative_tolerance(tree: Any) -> float:
    """Return a relative tolerance for results at the tensors of a tree."""
    return min(0.1, 1e4 * epsilon(tree))


def largest(tree: Any) -> float:
    """Return the largest absolute value in a tree."""
    return max((float(leaf.detach().abs().max()) for leaf in pytrees.leaves_of(tree)
                if isinstance(leaf, torch.Tensor) and leaf.numel()), default=0.0)  # fmt: skip


def rounded_otherwise(args: Any, eps: float) -> Any:
    """Return arguments that differ by rounding errors."""
    return pytrees.tree_map(lambda x: x + eps * x.abs() * torch.randn_like(x).sgn(), args)


def uncertainty(some: Any, others: Any, eps: float) -> float:
    """Return an absolute tolerance: several times the difference of two results, and rounding."""
    pairs = zip(pytrees.leaves_of(some), pytrees.leaves_of(others), strict=True)
    differences = [(a - b).detach().abs().max() for a, b in pairs
                   if isinstance(a, torch.Tensor) and a.numel()]  # fmt: skip
    most = max(map(float, differences), default=0.0)
    return _FACTOR * most + min(0.1, 1e3 * eps) * (1 + largest(others))
