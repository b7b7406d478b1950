"""Result shapes for symbolic sizes that replace torch's fake-tensor rules.

NOTE [slices of named dims]
``x[:5]`` has the length of ``x`` if ``x`` is shorter. torch's rule guards on the case that applies,
and the guard would violate a descriptor that guarantees neither case. Here the size is the smaller
one, ``min(5, n)``, as an expression. Only the sign of a bound is guarded if it is not known,
because a negative bound counts from the end.

NOTE [parts at data]
The size of ``x[:k]`` and the storage offset of ``x[k]`` are new symbols if ``k`` is found in data.
A derivative slices a value and its tangent at the same bounds, and torch requires equal sizes and
offsets of them. Equal bounds of dims of equal size therefore give the same symbols, within one
graph.

NOTE [reshapes]
A reshape requires only that the number of elements stays the same. A size of -1 must divide evenly.
For a single dim, whose descriptor can guarantee it (``multiple_of``), this is guarded; otherwise
the operator checks it when the program runs. torch's fake-tensor rules walk the dims of both
shapes, merge and split them until they agree, and test at each step which of two sizes is larger
and whether it is a multiple. A contiguous tensor can be viewed as every shape, whatever the results
of these tests.

NOTE [splits]
The number of parts is guarded, and the lengths of the parts are expressions. torch's fake-tensor
rules walk the parts and compare the begin and end of each with the dim, which takes minutes and
adds more guards on a named dim than the number of parts.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass, _DisableTorchDispatch

from tsfunc.bridge.sizes.shape_environment import count_of
from tsfunc.bridge.sizes.shape_probe import symbols_among
from tsfunc.bridge.tracers.user_queries import has_symbols, statically_known_true, suppress_guards
from tsfunc.ops.dims import dense_strides, memory_span, wrap_dim

# By the operator's name; each rule takes the operator's arguments, with fake tensors, and returns
# fake results, or NotImplemented to use torch's own rule.
SHAPE_RULES: dict[str, Callable[..., Any]] = {}

# The operators whose rules also come before torch's kernels for calls without symbolic sizes.
RULES_OF_FIXED_SIZES: set[str] = set()


def shape_rule(
    *names: str, fixed: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that registers a rule for some aten operators.

    Args:
        fixed: True if the rule comes before torch's kernel for fixed sizes too.
    """

    def registered(rule: Callable[..., Any]) -> Callable[..., Any]:
        rules = {f"aten::{name}": rule for name in names}
        SHAPE_RULES.update(rules)
        if fixed:
            RULES_OF_FIXED_SIZES.update(rules)
        return rule

    return registered


def view_like(x: Any, shape: Sequence[Any], strides: Sequence[Any], offset: Any = None) -> Any:
    """Return a view of a fake tensor with given shape and strides."""
    offset = x.storage_offset() if offset is None else offset
    with suppress_guards(x.fake_mode):
        return torch.as_strided(x, shape, strides, offset)


def new_like(
    x: Any, shape: Sequence[Any], dtype: torch.dtype | None = None, order: Sequence[int] = ()
) -> Any:
    """Return a new fake tensor on the device of ``x``; ``order`` has its dims, outermost first."""
    with suppress_guards(x.fake_mode):
        return torch.empty_strided(
            shape, dense_strides(shape, order), dtype=dtype or x.dtype, device=x.device
        )


def channels_last_order(x: Any, dims: int) -> Sequence[int]:
    """Return the memory order of a result with ``dims`` dims after the channels.

    The result is channels last if the input is; otherwise it has no order of its own.
    """
    if dims == 1 or x.dim() != dims + 2 or not statically_known_true(x.stride(1) == 1):
        return ()
    return () if statically_known_true(x.shape[1] == 1) else [0, *range(2, x.dim()), 1]


@shape_rule("_new_zeros_with_same_feature_meta")
def zeros_for_tangent(
    tangent: torch.Tensor, primal: torch.Tensor, *, self_num_batch_dims: int = 0
) -> Any:
    """Zeros of the tangent's batch dims and of the shape, strides and offset of the primal."""
    batch, offset = tangent.shape[:self_num_batch_dims], primal.storage_offset()
    numel: Any = offset + memory_span(primal.shape, primal.stride())
    strides = list(primal.stride())
    for size in reversed(batch):
        strides.insert(0, numel)
        numel = numel * size
    memory = new_like(primal, [numel], tangent.dtype)
    return view_like(memory, [*batch, *primal.shape], strides, offset)


@shape_rule("slice.Tensor")
def slice_of(
    x: torch.Tensor, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> Any:
    """``aten::slice`` of a fake tensor; NotImplemented if torch's own rule adds no guard."""
    dim = wrap_dim(dim, x.dim())
    size = x.shape[dim]
    symbolic = [value for value in (size, start, end) if isinstance(value, torch.SymInt)]
    if not symbolic or type(step) is not int or step < 1:
        return NotImplemented
    if any(map(is_of_data, symbolic)):
        return _part_at_data(torch.ops.aten.slice.Tensor, x, dim, start, end, step)
    first = _slice_position(0 if start is None else start, size)
    last = _slice_position(sys.maxsize if end is None else end, size)
    count = _at_least_0(last - first)
    shape, strides = list(x.shape), list(x.stride())
    offset = x.storage_offset() + first * strides[dim]
    shape[dim] = count if step == 1 else (count + (step - 1)) // step
    strides[dim] = strides[dim] * step
    return view_like(x, shape, strides, offset)


@shape_rule("select.int")
def select_of(x: torch.Tensor, dim: int, index: Any) -> Any:
    """``aten::select`` of a fake tensor at an index that is found in data."""
    if not isinstance(index, torch.SymInt) or not is_of_data(index) or not x.dim():
        return NotImplemented
    return _part_at_data(torch.ops.aten.select.int, x, wrap_dim(dim, x.dim()), index)


def _part_at_data(select: Callable[..., Any], x: Any, dim: int, *bounds: Any) -> Any:
    """Return a part of a fake tensor at bounds that are found in data: NOTE [parts at data]."""
    part = select(x, dim, *bounds)
    env = x.fake_mode.shape_env
    call = (select, env.symbols.innermost_graph, *map(_expression_of, (x.shape[dim], *bounds)))
    at = tuple(map(_expression_of, (x.storage_offset(), x.stride(dim))))
    shape, offset = list(part.shape), part.storage_offset()
    if select is torch.ops.aten.slice.Tensor:
        shape[dim] = _same_symbol(env, call, shape[dim])
    offset = _same_symbol(env, (*call, at), offset)
    return view_like(x, shape, part.stride(), offset)


def _same_symbol(env: Any, key: tuple[Any, ...], size: Any) -> Any:
    """Return the size that was found for this key first; its symbol counts as fresh again."""
    if not isinstance(size, torch.SymInt) or not is_of_data(size):
        return size
    earlier = env.parts.setdefault(key, size)
    if earlier is not size and earlier.node.expr.is_symbol:
        env.pending_fresh_unbacked_symbols.append(earlier.node.expr)
    return earlier


def _expression_of(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


@shape_rule("diagonal")
def diagonal_of(x: torch.Tensor, offset: Any = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """``aten::diagonal``: its length is limited by both dims."""
    dim1, dim2 = wrap_dim(dim1, x.dim()), wrap_dim(dim2, x.dim())
    rows, columns = x.shape[dim1], x.shape[dim2]
    if dim1 == dim2 or not are_named(rows, columns, offset):
        return NotImplemented
    below = _is_negative(offset)
    count = _at_least_0(_least(rows + offset, columns) if below else _least(rows, columns - offset))
    strides = x.stride()
    start = -offset * strides[dim1] if below else offset * strides[dim2]
    rest = [d for d in range(x.dim()) if d not in (dim1, dim2)]
    return view_like(
        x,
        [*(x.shape[d] for d in rest), count],
        [*(strides[d] for d in rest), strides[dim1] + strides[dim2]],
        x.storage_offset() + start,
    )


@shape_rule("unfold")
def unfold_of(x: torch.Tensor, dimension: int, size: Any, step: Any) -> Any:
    """``aten::unfold``: as many windows as fit."""
    if not x.dim():
        return NotImplemented
    dim = wrap_dim(dimension, x.dim())
    if not are_named(x.shape[dim], size, step):
        return NotImplemented
    shape, strides = list(x.shape), list(x.stride())
    shape[dim] = (shape[dim] - size) // step + 1
    return view_like(
        x, [*shape, size], [*strides[:dim], strides[dim] * step, *strides[dim + 1 :], strides[dim]]
    )


def copying_rule(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule of the operator that copies views, given the rule of the views."""

    def copy(*args: Any, **kwargs: Any) -> Any:
        views = rule(*args, **kwargs)
        if isinstance(views, list):
            return [new_like(view, view.shape) for view in views]
        return views if views is NotImplemented else new_like(views, views.shape)

    return copy


shape_rule("slice_copy.Tensor")(copying_rule(slice_of))
shape_rule("diagonal_copy")(copying_rule(diagonal_of))
shape_rule("unfold_copy")(copying_rule(unfold_of))


@shape_rule("resize_")
def resize(x: Any, size: Sequence[Any], memory_format: Any = None) -> Any:
    """Resize a tensor in place to symbolic sizes, which C++ supports only for plain sizes."""
    if memory_format is not None or not has_symbols([*x.shape, *size]):
        return NotImplemented
    take_sizes(x, new_like(x, size))
    return x


@shape_rule("resize_as_")
def resize_as(x: Any, the_template: Any, memory_format: Any = None) -> Any:
    return resize(x, the_template.shape, memory_format)


def take_sizes(x: torch.Tensor, other: torch.Tensor) -> None:
    """Give a tensor without storage the metadata of another tensor."""
    with DisableTorchFunctionSubclass(), _DisableTorchDispatch():
        x.data = other


def are_named(*sizes: Any) -> bool:
    """True if some sizes are symbolic, and none depends on data."""
    symbolic = [size for size in sizes if isinstance(size, torch.SymInt)]
    return bool(symbolic) and not any(map(is_of_data, symbolic))


def is_of_data(size: torch.SymInt) -> bool:
    env = size.node.shape_env
    return any(env.is_unbacked_symint(symbol) for symbol in size.node.expr.free_symbols)


def _slice_position(bound: Any, size: Any) -> Any:
    """Return the position of a slice bound, counted from the front."""
    if type(bound) is int and bound >= sys.maxsize:
        return size
    return _at_least_0(bound + size) if _is_negative(bound) else _least(bound, size)


def _is_negative(number: Any) -> bool:
    """True if a number is negative; adds a guard unless this is known."""
    if statically_known_true(number < 0):
        return True
    return not statically_known_true(number >= 0) and bool(number < 0)


def _least(one: Any, other: Any) -> Any:
    if statically_known_true(one <= other):
        return one
    return other if statically_known_true(other <= one) else torch.sym_min(one, other)


def _at_least_0(value: Any) -> Any:
    return value if statically_known_true(value >= 0) else torch.sym_max(value, 0)


# --- reshapes


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


# --- splits


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
