"""Checks of the tensors that a trace takes: their classes, their layouts, and a quick comparison.

Private names used here (torch 2.13 and 2.14): ``_C._dynamo.guards.TensorGuards`` compares tensors
with examples in one call into C++.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch._C._dynamo.guards import TensorGuards as TensorChecks

from tsfunc.bridge.tracers import torch_state
from tsfunc.errors import ClosureError, TypeCheckError

USERS_CLASS: Final = "_users_class"  # of a tracer class with the members of a user's class


@functools.cache
def users_class(cls: type) -> type:
    """Return a tensor class if it is the user's, else ``torch.Tensor``.

    The user's class may redefine operators, so its instances have programs of their own.
    """
    return torch.Tensor if cls.__module__.partition(".")[0] in ("torch", "tsfunc") else cls


_COMPRESSED: Final = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def check_layout(value: torch.Tensor, name: str | None = None) -> None:
    """Refuse a tensor whose layout a trace can't follow.

    Args:
        value: the tensor.
        name: the argument that it belongs to; None for a tensor from elsewhere.

    Raises:
        TypeCheckError: an argument has such a layout.
        ClosureError: another tensor has such a layout.
    """
    # Python answers a TypeError of an operator such as `*` by an error of its own.
    error = ClosureError if name is None else TypeCheckError
    place = name or "a tensor that the function captures or makes"
    if value.layout in _COMPRESSED:
        raise error(
            f"specialize: expected strided or COO tensors, got {value.layout} for {place}. A trace "
            f"can't follow compressed tensors. Pass x.to_dense() or x.to_sparse()."
        )
    if value.is_nested:
        raise error(
            f"specialize: expected strided or COO tensors, got a nested tensor for {place}. A "
            f"trace has no sizes for its examples. Pass x.to_padded_tensor(0.0), or specialize the "
            f"function of one example and call vmap of it with the nested tensor."
        )


def is_tensor_of(value: Any, cls: type) -> bool:
    """True if a value is a tensor and ``users_class`` maps its class to ``cls``."""
    return isinstance(value, torch.Tensor) and users_class(type(value)) is cls


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def quick_check(examples: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """Return a function that is True only for tensors with the same properties as the examples.

    The function may be False for tensors that do match: tensors of another class, or one tensor in
    two places. Such tensors need a full check.

    Args:
        examples: tensors with their sizes and strides.

    Returns:
        The function, which takes as many tensors as there are examples; None without examples, or
        if an example is not a plain strided tensor.
    """
    if not examples or any(type(x) not in _PLAIN or x.layout != torch.strided for x in examples):
        return None
    # torch's annotation is one list for all tensors; the function takes a list of lists.
    sizes: Any = [list(x.shape) for x in examples]
    strides: Any = [list(x.stride()) for x in examples]
    with torch_state.outside_all_levels():
        guards = TensorChecks(*examples, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    check: Callable[..., bool] = guards.check
    return check
