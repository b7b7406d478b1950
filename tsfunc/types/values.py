"""Python values in descriptors: when two are the same, and how one is shown."""

from __future__ import annotations

from typing import Any

import torch

from tsfunc.types.meta import tensor_text

_LONGEST_REPR = 80


def same_value(promised: object, came: object) -> bool:
    """Whether a program that has `promised` burnt in holds for `came`.

    Stricter than ``==``: the types must agree too (``1``, ``1.0`` and ``True`` make different
    dtypes), ``0.0`` is not ``-0.0``, and NaN is NaN. Tensors are the same if they are one
    object, or if neither requires grad and all of their attributes and elements agree. Values
    that can't be compared are the same only as one object.

    Example:
        >>> same_value(1, 1), same_value(1, True), same_value(float("nan"), float("nan"))
        (True, False, True)
    """
    if promised is came:
        return True
    try:
        if isinstance(promised, torch.Tensor):
            return isinstance(came, torch.Tensor) and _same_tensor(promised, came)
        return type(promised) is type(came) and _same_of_one_type(promised, came)
    except Exception:  # a class's own __eq__ may raise anything: then nothing shows them the same
        return False


def _same_of_one_type(promised: Any, came: Any) -> bool:
    if isinstance(promised, float):
        return bool(promised.hex() == came.hex())
    if isinstance(promised, complex):
        return same_value(promised.real, came.real) and same_value(promised.imag, came.imag)
    if isinstance(promised, list | tuple):
        return len(promised) == len(came) and all(map(same_value, promised, came))
    if isinstance(promised, dict):
        return promised.keys() == came.keys() and all(
            same_value(promised[key], came[key]) for key in promised
        )
    if isinstance(promised, set | frozenset):
        return {(type(v), v) for v in promised} == {(type(v), v) for v in came}
    if hasattr(promised, "__array__"):
        return _same_array(promised, came)
    return bool(promised == came)


def _same_array(promised: Any, came: Any) -> bool:
    """NumPy's ``==`` gives an answer per element; this gives one."""
    same_kind = promised.dtype == came.dtype and promised.shape == came.shape
    return bool(same_kind and promised.tobytes() == came.tobytes())


def _same_tensor(promised: torch.Tensor, came: torch.Tensor) -> bool:
    # A gradient must reach the argument, not the constant that stands for it: hence no_grad.
    return (
        not promised.requires_grad
        and not came.requires_grad
        and promised.dtype == came.dtype
        and promised.device == came.device
        and promised.layout == came.layout
        and promised.shape == came.shape
        and torch.equal(promised, came)
    )


def describe(value: object) -> str:
    """A value as error messages show it: what it is, with its type.

    Example:
        >>> describe(3), describe(torch.zeros(2, 3)), describe(None)
        ('3 (int)', 'f32[2, 3] cpu', 'None')
    """
    if value is None:
        return "None"
    if isinstance(value, torch.Tensor):
        return tensor_text(value.dtype, value.shape, value.device)
    text = repr(value)
    if len(text) > _LONGEST_REPR:
        text = f"{text[: _LONGEST_REPR - 3]}..."
    return f"{text} ({type(value).__name__})"
