"""Errors of torch for single examples, raised for a batch.

NOTE [calls that torch refuses]
A batching rule calls a kernel on tensors with one more dim, and that kernel can accept arguments
that the operator rejects: ``matmul`` in place of ``mm`` accepts vectors, and a decomposition
accepts a stack of vectors as a matrix. A rule whose kernel is less strict than the operator
therefore checks the logical ranks. If they are wrong, the rule runs the operator on one example,
which raises torch's error.

If ranks are not enough (dtypes, sizes that must be equal, dims out of range), the rule is declared
with :func:`refuse_like_torch`. The first call with certain shapes, dtypes and other arguments then
runs the operator once on zeros in the shape of one example. Later calls like it cost a lookup.
Calls with symbolic sizes are not checked in this way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tsfunc.ops.dims import function_name, logical_rank, logical_shape
from tsfunc.ops.keywords import keyword_bdim
from tsfunc.ops.registry import Args, BatchDims, Kwargs, Rule, RuleLevel

_MOST = 1000  # the maximum number of calls that are known to be accepted, for each rule


def raise_as_one_example(op: Any, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Raise torch's error for one example; return NotImplemented if torch accepts the call.

    The error has the type of torch's error. The shapes of the examples are appended to its
    message.
    """
    padded = [*bdims, *[None] * (len(args) - len(bdims))][: len(args)]
    examples = [_example(arg, bdim) for arg, bdim in zip(args, padded, strict=True)]
    named = {name: _example(v, keyword_bdim(bdims, args, name)) for name, v in kwargs.items()}
    try:
        op(*examples, **named)
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        items = (x if isinstance(x, list | tuple) else [x] for x in examples)
        tensors = [x for item in items for x in item if isinstance(x, Tensor)]
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
        call = f"{function_name(op)} was called on examples of shape {shapes}"
        if len({x.dtype for x in tensors}) > 1:
            call += f" and dtype {', '.join(str(x.dtype) for x in tensors)}"
        shown = f"\nInside of vmap, {call}."
        # An outer vmap, of which the examples are tracers, has appended the same line.
        raise type(error)(f"{error}".removesuffix(shown) + shown) from None
    return NotImplemented


def _example(value: Any, bdim: Any) -> Any:
    """Return the tensor of one example, which can be written to without a change of the batch."""
    if isinstance(value, list | tuple):
        return _map_items(_example, value, bdim)
    if not isinstance(value, Tensor) or bdim is None:
        return value
    if value.shape[bdim] == 0:
        return value.new_zeros(logical_shape(value, bdim))
    return value.select(bdim, 0).clone()


def _map_items(function: Callable[[Any, Any], Any], values: Sequence[Any], bdim: Any) -> list[Any]:
    """Apply a function to each item of a list and its batch dim; ``bdim`` is one dim, or a list."""
    dims = bdim if isinstance(bdim, list | tuple) else [bdim] * len(values)
    return [function(value, dim) for value, dim in zip(values, dims, strict=True)]


def refuse_like_torch(rule: Rule) -> Rule:
    """Return a rule that raises torch's error for calls that torch refuses for one example.

    See NOTE [calls that torch refuses]. The operator must not draw random numbers.
    """
    accepted: set[Any] = set()

    @functools.wraps(rule)
    def run(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
        try:
            named = (
                _argument_key(v, keyword_bdim(bdims, args, name)) for name, v in kwargs.items()
            )
            key = (op, *map(_argument_key, args, bdims), *kwargs, *named)
            is_accepted = key in accepted
        except TypeError:  # a size is symbolic
            is_accepted = True
        if not is_accepted:
            _check_one_example(op, level, bdims, args, kwargs)
            if len(accepted) >= _MOST:
                accepted.clear()
            accepted.add(key)
        return rule(op, level, bdims, args, kwargs)

    return run


def _check_one_example(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> None:
    """Raise torch's error if torch refuses the call for one example."""
    named = {name: _zeros(v, keyword_bdim(bdims, args, name)) for name, v in kwargs.items()}
    with level.outside():
        try:
            op(*map(_zeros, args, bdims), **named)
            return
        except Exception:
            pass  # the values may be the reason
    raise_as_one_example(op, bdims, args, kwargs)


def _argument_key(value: Any, bdim: Any) -> Any:
    """Return the part of an argument that decides if torch accepts a call.

    Raises:
        TypeError: a size or number is symbolic.
    """
    if isinstance(value, Tensor):
        shape = tuple(value.shape)
        if any(type(size) is not int for size in shape):
            raise TypeError
        if bdim is not None:
            shape = shape[:bdim] + shape[bdim + 1 :]
        return shape, value.dtype, value.device
    if isinstance(value, list | tuple):
        return tuple(_map_items(_argument_key, value, bdim))
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        raise TypeError
    return value


def _zeros(value: Any, bdim: Any) -> Any:
    """Return zeros in the shape of one example for a tensor; other values are unchanged."""
    if isinstance(value, Tensor):
        shape = logical_shape(value, bdim)
        return torch.zeros(shape, dtype=value.dtype, device=value.device)
    if isinstance(value, list | tuple):
        return _map_items(_zeros, value, bdim)
    return value


def ranks_at_least(bdims: BatchDims, args: Sequence[Any], *ranks: int) -> bool:
    """True if each of the first arguments, tensors, has at least the given logical rank."""
    return all(
        logical_rank(x, bdim) >= rank for x, bdim, rank in zip(args, bdims, ranks, strict=False)
    )


def ranks_are(bdims: BatchDims, args: Sequence[Any], *ranks: int) -> bool:
    """True if each of the first arguments, tensors, has exactly the given logical rank."""
    return all(
        logical_rank(x, bdim) == rank for x, bdim, rank in zip(args, bdims, ranks, strict=False)
    )


def require(condition: Tensor, message: str) -> None:
    """Raise if a condition on values is false for any example, without a synchronization."""
    torch.ops.aten._assert_async.msg(condition.all(), message)
