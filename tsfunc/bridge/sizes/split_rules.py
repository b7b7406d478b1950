"""Parts of a tensor along a dim: how many there are is asked, how long each is, is an expression.

torch's rules for fake tensors go through the parts one by one and ask, where each begins and ends,
whether it lies within the dim. That takes minutes, and ties a named dim to more than the number of
parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tsfunc.bridge.sizes.shape_environment import count_of
from tsfunc.bridge.sizes.shape_rules import is_of_data, known, new_like, shape_rule, view_like
from tsfunc.bridge.tracers.questions import unasked
from tsfunc.ops.dims import wrap as wrap_dim


def _is_served(x: torch.Tensor, *numbers: Any) -> bool:
    """Whether there are symbols, and none that data give."""
    given = [size for size in (*x.shape, *numbers) if isinstance(size, torch.SymInt)]
    return bool(given) and x.dim() > 0 and not any(map(is_of_data, given))


def _parts(x: torch.Tensor, dim: int, lengths: Sequence[Any]) -> list[torch.Tensor]:
    """The views of so many elements of a dim, one after the other."""
    found = []
    begin: Any = 0
    for length in lengths:
        shape = [*x.shape[:dim], length, *x.shape[dim + 1 :]]
        found.append(view_like(x, shape, x.stride(), x.storage_offset() + begin * x.stride(dim)))
        begin = begin + length
    return found


@shape_rule("unbind.int")
def unbind_of(x: torch.Tensor, dim: int = 0) -> Any:
    """``aten::unbind``: as many as the dim is long."""
    if not _is_served(x):
        return NotImplemented
    dim = wrap_dim(dim, x.dim())
    return [
        view_like(part, _without(part.shape, dim), _without(part.stride(), dim))
        for part in _parts(x, dim, [1] * count_of(x.shape[dim]))
    ]


def _without(values: Sequence[Any], dim: int) -> list[Any]:
    return [value for d, value in enumerate(values) if d != dim]


@shape_rule("split.Tensor", "unsafe_split.Tensor")
def split_of(x: torch.Tensor, split_size: Any, dim: int = 0) -> Any:
    """``aten::split``: all of one length but for the last."""
    if not _is_served(x, split_size) or (type(split_size) is int and split_size < 1):
        return NotImplemented
    dim = wrap_dim(dim, x.dim())
    size = x.shape[dim]
    count = max(1, count_of((size + (split_size - 1)) // split_size))
    return _parts(x, dim, [split_size] * (count - 1) + [size - split_size * (count - 1)])


@shape_rule("chunk", "unsafe_chunk")
def chunk_of(x: Any, chunks: int, dim: int = 0) -> Any:
    """``aten::chunk``: parts of the length for which there are no more than so many.

    There are just so many where the dim goes evenly, or is longer than ``(chunks - 1) ** 2``, which
    is what is asked; of smaller ones how many there are.
    """
    if not _is_served(x) or type(chunks) is not int or chunks < 1:
        return NotImplemented
    dim = wrap_dim(dim, x.dim())
    size = x.shape[dim]
    if type(size) is int and size == 0:
        return NotImplemented  # as many empty ones
    goes_evenly, is_long = size % chunks == 0, size > (chunks - 1) ** 2
    with unasked(x.fake_mode):
        in_call = bool(goes_evenly), bool(is_long)
    if known(goes_evenly) or (in_call == (True, False) and goes_evenly):
        return _parts(x, dim, [size // chunks] * chunks)
    length = (size + (chunks - 1)) // chunks
    if in_call[1] and is_long:
        return _parts(x, dim, [length] * (chunks - 1) + [size - length * (chunks - 1)])
    return split_of(x, length, dim)


@shape_rule("tensor_split.sections")
def tensor_split_of(x: torch.Tensor, sections: Any, dim: int = 0) -> Any:
    """``aten::tensor_split``: so many, the first ones longer by one where it does not go evenly."""
    if not _is_served(x, sections) or (type(sections) is int and sections < 1):
        return NotImplemented
    dim = wrap_dim(dim, x.dim())
    size, count = x.shape[dim], count_of(sections)
    return _parts(x, dim, [(size + (count - 1 - i)) // count for i in range(count)])


def _copies(rule: Any) -> Any:
    """The rule of an operator that copies what the views are."""

    def copy(*args: Any, **kwargs: Any) -> Any:
        found = rule(*args, **kwargs)
        return found if found is NotImplemented else [new_like(x, x.shape) for x in found]

    return copy


shape_rule("unbind_copy.int")(_copies(unbind_of))
shape_rule("split_copy.Tensor")(_copies(split_of))
