"""Hot rules for functions whose arguments come in several forms.

``x.sum(0)``, ``x.sum((0, 1), keepdim=True)`` and ``torch.sum(x, dim=-1)`` are one operator's calls,
and C++ tells them apart where a call goes that way. Here the forms that most calls have are put as
the operator's rule takes its arguments; any other is NotImplemented, and goes through C++.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from tsfunc.bridge.tracer import NO_KWARGS
from tsfunc.ops.dims import front
from tsfunc.ops.registry import BatchLevel, Dims, Rule

_T = torch.Tensor
_ALL = slice(None)
_INT = frozenset({int})
_SEVERAL = frozenset({tuple, list, torch.Size})
_INDICES = frozenset({int, slice, type(None), type(Ellipsis)})
_STEPS = frozenset({int, type(None)})


def _all_ints(values: Sequence[Any]) -> bool:
    return _INT.issuperset(map(type, values))


def _positional(
    args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str]
) -> Sequence[Any] | None:
    """The arguments, with those that are given by name in their places; None for other names."""
    if not kwargs:
        return args
    given = names[len(args) - 1 :][: len(kwargs)]
    if kwargs.keys() != set(given):
        return None
    return (*args, *(kwargs[name] for name in given))


def over_dims(rule: Rule) -> Rule:
    """``f(x, dim, keepdim)`` over one dim, several, or all."""

    def hot(
        op: Any, level: BatchLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        found = _positional(args, kwargs, ("dim", "keepdim"))
        if found is None or len(found) > 3:
            return NotImplemented
        over = found[1] if len(found) > 1 else None
        keep = found[2] if len(found) > 2 else False
        if type(over) is int:
            over = (over,)
        elif over is not None and not (type(over) in _SEVERAL and _all_ints(over)):
            return NotImplemented
        if type(keep) is not bool or found[0].layout is not torch.strided:
            return NotImplemented
        return rule(op, level, dims, (found[0], over, keep), NO_KWARGS)

    return hot


def along_dim(rule: Rule) -> Rule:
    """``f(x, dim)``."""

    def hot(
        op: Any, level: BatchLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        found = _positional(args, kwargs, ("dim",))
        if found is None or len(found) != 2 or type(found[1]) is not int:
            return NotImplemented
        return rule(op, level, dims, found, NO_KWARGS)

    return hot


def with_ints(rule: Rule, least: int, most: int) -> Rule:
    """``f(x, i, j)``: so many numbers, each an argument. The result is a view."""

    def hot(
        op: Any, level: BatchLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if kwargs or not least < len(args) <= most + 1 or not _all_ints(args[1:]):
            return NotImplemented
        return _view(rule(op, level, dims, args, NO_KWARGS))

    return hot


def with_sizes(rule: Rule) -> Rule:
    """``f(x, 2, 3)`` and ``f(x, (2, 3))``. The result is a view, if it can be one."""

    def hot(
        op: Any, level: BatchLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if kwargs or len(args) < 2:
            return NotImplemented
        sizes = args[1] if len(args) == 2 and type(args[1]) in _SEVERAL else args[1:]
        if not _all_ints(sizes):
            return NotImplemented
        return _view(rule(op, level, dims, (args[0], list(sizes)), NO_KWARGS))

    return hot


def _view(found: Any) -> Any:
    """A rule's result, and where it begins in memory."""
    return found if found is NotImplemented else (*found, found[0].storage_offset())


def indexed(
    op: Any, level: BatchLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """``x[i, :, None]``: numbers, slices of numbers, new dims."""
    x, index = args
    items = index if type(index) is tuple else (index,)
    for item in items:
        kind = type(item)
        if kind is slice:
            if not _STEPS.issuperset((type(item.start), type(item.stop), type(item.step))):
                return NotImplemented
        elif kind not in _INDICES:
            return NotImplemented
    try:
        out = op(front(x, dims[0]), (_ALL, *items))
    except (IndexError, ValueError):  # whose messages count the dims of an example
        return NotImplemented
    return out, 0, out.storage_offset()


def transposed_matrix(
    op: Any, level: BatchLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """``x.T`` of matrices, and ``x.mT``."""
    (x,) = args
    at = dims[0]
    if x.dim() != 3:
        return NotImplemented
    first, second = [dim for dim in (0, 1, 2) if dim != at]
    out = x.transpose(first, second)
    return out, at, out.storage_offset()


def chosen(rule: Rule) -> Rule:
    """``torch.where`` of a mask and tensors or numbers."""

    def hot(
        op: Any, level: BatchLevel, dims: Dims, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if len(args) != 3 or not isinstance(args[0], torch.Tensor):
            return NotImplemented
        return rule(op, level, dims, args, kwargs)

    return hot


Made = Callable[[Rule], Rule]

# Functions and methods of a name, the operator whose rule serves them, and how they are called.
_NAMED: tuple[tuple[str, str, Made], ...] = (
    ("sum", "aten::sum.dim_IntList", over_dims),
    ("mean", "aten::mean.dim", over_dims),
    ("amax", "aten::amax", over_dims),
    ("amin", "aten::amin", over_dims),
    ("logsumexp", "aten::logsumexp", over_dims),
    ("softmax", "aten::softmax.int", along_dim),
    ("log_softmax", "aten::log_softmax.int", along_dim),
    ("cumsum", "aten::cumsum", along_dim),
    ("cumprod", "aten::cumprod", along_dim),
    ("flip", "aten::flip", with_sizes),
    ("where", "aten::where.self", chosen),
)

# And those of which the result is a view, where it can be one.
_VIEWS: tuple[tuple[str, str, Made], ...] = (
    ("reshape", "aten::reshape", with_sizes),
    ("view", "aten::view", with_sizes),
    ("expand", "aten::expand", with_sizes),
    ("permute", "aten::permute", with_sizes),
    ("transpose", "aten::transpose.int", lambda rule: with_ints(rule, 2, 2)),
    ("unsqueeze", "aten::unsqueeze", lambda rule: with_ints(rule, 1, 1)),
    ("squeeze", "aten::squeeze.dim", lambda rule: with_ints(rule, 1, 1)),
    ("flatten", "aten::flatten.using_ints", lambda rule: with_ints(rule, 0, 2)),
)


def forms(rule_of: Callable[[str], Rule | None]) -> Iterator[tuple[Any, Rule, bool]]:
    """Callables, each with its hot rule, and whether it gives views.

    Args:
        rule_of: the rule of an operator, if there is one that is to be used here.
    """
    for name, operator, made in (*_NAMED, *_VIEWS):
        rule = rule_of(operator)
        if rule is None:
            continue
        hot = made(rule)
        for owner in (torch, _T):
            if hasattr(owner, name):
                yield getattr(owner, name), hot, made not in (over_dims, along_dim, chosen)
    if rule_of("aten::select.int") and rule_of("aten::slice.Tensor"):
        yield _T.__getitem__, indexed, True
    if rule_of("aten::t"):
        yield _T.T.__get__, transposed_matrix, True  # type: ignore[attr-defined]
    if rule_of("aten::transpose.int"):
        yield _T.mT.__get__, transposed_matrix, True  # type: ignore[attr-defined]
