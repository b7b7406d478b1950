"""Result shapes of splits: the number of parts is guarded, their lengths are expressions.

torch's fake-tensor rules walk the parts and compare the begin and end of each with the dim. That
takes minutes, and adds more guards on a named dim than the number of parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tsfunc.bridge.sizes.shape_environment import count_of
from tsfunc.bridge.sizes.shape_rules import are_named, copying_rule, shape_rule, view_like
from tsfunc.bridge.tracers.user_queries import statically_known_true, suppress_guards
from tsfunc.ops.dims import wrap_dim


def _split_views(x: torch.Tensor, dim: int, lengths: Sequence[Any]) -> list[torch.Tensor]:
    """Return consecutive views along a dim, of the given lengths."""
    parts = []
    begin: Any = 0
    for length in lengths:
        shape = [*x.shape[:dim], length, *x.shape[dim + 1 :]]
        parts.append(view_like(x, shape, x.stride(), x.storage_offset() + begin * x.stride(dim)))
        begin = begin + length
    return parts


@shape_rule("unbind.int")
def unbind_of(x: torch.Tensor, dim: int = 0) -> Any:
    """``aten::unbind``: one part per element of the dim."""
    if not x.dim() or not are_named(*x.shape):
        return NotImplemented
    dim = wrap_dim(dim, x.dim())
    return [
        view_like(part, _without(part.shape, dim), _without(part.stride(), dim))
        for part in _split_views(x, dim, [1] * count_of(x.shape[dim]))
    ]


def _without(values: Sequence[Any], dim: int) -> list[Any]:
    return [value for d, value in enumerate(values) if d != dim]


@shape_rule("split.Tensor", "unsafe_split.Tensor")
def split_of(x: torch.Tensor, split_size: Any, dim: int = 0) -> Any:
    """``aten::split``: parts of one length, except for the last."""
    if not x.dim() or not are_named(*x.shape, split_size):
        return NotImplemented
    if type(split_size) is int and split_size < 1:
        return NotImplemented
    dim = wrap_dim(dim, x.dim())
    size = x.shape[dim]
    count = max(1, count_of((size + (split_size - 1)) // split_size))
    return _split_views(x, dim, [split_size] * (count - 1) + [size - split_size * (count - 1)])


@shape_rule("chunk", "unsafe_chunk")
def chunk_of(x: Any, chunks: int, dim: int = 0) -> Any:
    """``aten::chunk``: parts of equal length, the shortest length for at most ``chunks`` parts.

    There are exactly ``chunks`` parts if the dim divides evenly or is longer than ``(chunks - 1)
    ** 2``, which is tested first; for a smaller dim the number of parts is guarded.
    """
    if not x.dim() or not are_named(*x.shape) or type(chunks) is not int or chunks < 1:
        return NotImplemented
    dim = wrap_dim(dim, x.dim())
    size = x.shape[dim]
    if type(size) is int and size == 0:
        return NotImplemented  # torch returns that many empty parts
    goes_evenly, is_long = size % chunks == 0, size > (chunks - 1) ** 2
    with suppress_guards(x.fake_mode):
        in_call = bool(goes_evenly), bool(is_long)
    if statically_known_true(goes_evenly) or (in_call == (True, False) and goes_evenly):
        return _split_views(x, dim, [size // chunks] * chunks)
    length = (size + (chunks - 1)) // chunks
    if in_call[1] and is_long:
        return _split_views(x, dim, [length] * (chunks - 1) + [size - length * (chunks - 1)])
    return split_of(x, length, dim)


@shape_rule("tensor_split.sections")
def tensor_split_of(x: torch.Tensor, sections: Any, dim: int = 0) -> Any:
    """``aten::tensor_split``: ``sections`` parts; the first ones may be longer by one."""
    if not x.dim() or not are_named(*x.shape, sections):
        return NotImplemented
    if type(sections) is int and sections < 1:
        return NotImplemented
    dim = wrap_dim(dim, x.dim())
    size, count = x.shape[dim], count_of(sections)
    return _split_views(x, dim, [(size + (count - 1 - i)) // count for i in range(count)])


shape_rule("unbind_copy.int")(copying_rule(unbind_of))
shape_rule("split_copy.Tensor")(copying_rule(split_of))
