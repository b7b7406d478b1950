"""Function rules (NOTE [function rules]) for functions whose arguments come in several forms.

``x.sum(0)``, ``x.sum((0, 1), keepdim=True)`` and ``torch.sum(x, dim=-1)`` all call one operator,
and torch's C++ parser normalizes their arguments. The functions below normalize the most common
forms to the arguments of the operator's rule. They return NotImplemented for any other form, which
then goes through C++.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tsfunc.bridge.sizes.sized_indexing import is_traced_here
from tsfunc.bridge.tracers.tracer import NO_KWARGS, Tracer
from tsfunc.ops.dims import batch_to_front, logical_rank
from tsfunc.ops.registry import Args, BatchDims, Kwargs, Rule, RuleLevel

_T = torch.Tensor
_ALL = slice(None)
_INT = frozenset({int})
_SEVERAL = frozenset({tuple, list, torch.Size})
_INDICES = frozenset({int, slice, type(None), type(Ellipsis)})
_STEPS = frozenset({int, type(None)})
_INTEGERS = frozenset({torch.int64, torch.int32})

CallForm = Callable[[Rule], Rule]


def _all_ints(values: Sequence[Any]) -> bool:
    return _INT.issuperset(map(type, values))


def _positional(args: Args, kwargs: Kwargs, names: Sequence[str]) -> Sequence[Any] | None:
    """Return the arguments with the named ones in their positions; None for other names."""
    if not kwargs:
        return args
    given = names[len(args) - 1 :][: len(kwargs)]
    if kwargs.keys() != set(given):
        return None
    return (*args, *(kwargs[name] for name in given))


def over_dims(rule: Rule) -> Rule:
    """Return the function rule of ``f(x, dim, keepdim)`` over one dim, several dims or all."""

    def rule_of_call(
        op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
    ) -> Any:
        arguments = _positional(args, kwargs, ("dim", "keepdim"))
        if arguments is None or len(arguments) > 3:
            return NotImplemented
        over = arguments[1] if len(arguments) > 1 else None
        keep = arguments[2] if len(arguments) > 2 else False
        if type(over) is int:
            over = (over,)
        elif over is not None and not (type(over) in _SEVERAL and _all_ints(over)):
            return NotImplemented
        if type(keep) is not bool or arguments[0].layout is not torch.strided:
            return NotImplemented
        return rule(op, level, bdims, (arguments[0], over, keep), NO_KWARGS)

    return rule_of_call


def along_dim(rule: Rule) -> Rule:
    """Return the function rule of ``f(x, dim)``."""

    def rule_of_call(
        op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
    ) -> Any:
        arguments = _positional(args, kwargs, ("dim",))
        if arguments is None or len(arguments) != 2 or type(arguments[1]) is not int:
            return NotImplemented
        return rule(op, level, bdims, arguments, NO_KWARGS)

    return rule_of_call


def with_ints(rule: Rule, least: int, most: int) -> Rule:
    """Return the rule of ``f(x, i, j)`` with ``least`` to ``most`` ints, which returns a view."""

    def rule_of_call(
        op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
    ) -> Any:
        if kwargs or not least < len(args) <= most + 1 or not _all_ints(args[1:]):
            return NotImplemented
        return rule(op, level, bdims, args, NO_KWARGS)

    return rule_of_call


def with_sizes(rule: Rule) -> Rule:
    """Return the function rule of ``f(x, 2, 3)`` and ``f(x, (2, 3))``, which may return a view."""

    def rule_of_call(
        op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
    ) -> Any:
        if kwargs or len(args) < 2:
            return NotImplemented
        sizes = args[1] if len(args) == 2 and type(args[1]) in _SEVERAL else args[1:]
        if not _all_ints(sizes):
            return NotImplemented
        return rule(op, level, bdims, (args[0], list(sizes)), NO_KWARGS)

    return rule_of_call


def reshaping(made: CallForm, as_view: Callable[..., torch.Tensor]) -> CallForm:
    """Return a form that leaves a reshape to the handler if only a copy of the batch is possible.

    ``writing/reshaped_views`` then sees the call: one example may have a view.

    Args:
        as_view: the operator that takes the same view, or raises if there is none.
    """

    def form(rule: Rule) -> Rule:
        def views_only(
            op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
        ) -> Any:
            if not (bdims[0] or getattr(args[0], "bdim", None)):
                return rule(op, level, bdims, args, kwargs)
            if isinstance(args[0], Tracer):
                return NotImplemented
            try:
                return rule(as_view, level, bdims, args, kwargs)
            except (RuntimeError, ValueError):  # fake tensors raise ValueError
                return NotImplemented

        return made(views_only)

    return form


def _flat_view(x: torch.Tensor, first: int, last: int) -> torch.Tensor:
    shape = x.shape
    return torch.ops.aten.view.default(x, [*shape[:first], -1, *shape[last + 1 :]])


def indexed(by_tensors: Rule | None) -> Rule:
    """Return the function rule of ``x[index]``.

    It serves ints, slices and None (``x[i, :, None]``), or tensors among full slices.

    Args:
        by_tensors: the rule of ``aten::index.Tensor``, or None.
    """

    def rule_of_call(
        op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
    ) -> Any:
        x, index = args
        items = (index,) if type(index) not in _SEVERAL else index
        for item in items:
            kind = type(item)
            if kind is slice:
                if not _STEPS.issuperset((type(item.start), type(item.stop), type(item.step))):
                    return NotImplemented
            elif kind not in _INDICES:
                if by_tensors is None or is_traced_here():
                    return NotImplemented
                tensors = _tensor_indices(items, logical_rank(x, bdims[0]), bdims[1])
                if tensors is None:
                    return NotImplemented
                positions = tensors[1] if any(dim is not None for dim in tensors[1]) else None
                overload = torch.ops.aten.index.Tensor
                return by_tensors(
                    overload, level, (bdims[0], positions), (x, tensors[0]), NO_KWARGS
                )
        if type(index) is list or bdims[0] is None:
            return NotImplemented
        try:
            out = op(batch_to_front(x, bdims[0]), (_ALL, *items))
        except (IndexError, ValueError):  # the error must count the dims of an example
            return NotImplemented
        return out, 0

    return rule_of_call


def _tensor_indices(
    items: Sequence[Any], rank: int, bdims: Any
) -> tuple[list[Any], list[int | None]] | None:
    """Return the indices and their batch dims for ``aten::index``; None for other forms."""
    item_bdims = list(bdims) if isinstance(bdims, list) else [bdims] * len(items)
    indices: list[Any] = []
    index_bdims: list[int | None] = []
    for item, bdim in zip(items, item_bdims, strict=True):
        if item is Ellipsis:
            count = rank - len(items) + 1
        elif type(item) is slice and item == _ALL:
            count = 1
        elif isinstance(item, torch.Tensor) and item.dtype in _INTEGERS:
            if logical_rank(item, bdim) == 0:
                return None  # acts as an int: the result is a view
            indices.append(item)
            index_bdims.append(bdim)
            continue
        else:
            return None
        indices += [None] * count
        index_bdims += [None] * count
    return (indices, index_bdims) if len(indices) <= rank else None


def transposed_matrix(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Transpose, as the function rule of ``x.T`` for matrices, and of ``x.mT``."""
    (x,) = args
    bdim = bdims[0]
    if x.dim() != 3:
        return NotImplemented
    first, second = [dim for dim in (0, 1, 2) if dim != bdim]
    out = x.transpose(first, second)
    return out, bdim


def chosen(rule: Rule) -> Rule:
    """Return the function rule of ``torch.where`` with a mask and two tensors or numbers."""

    def rule_of_call(
        op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
    ) -> Any:
        if len(args) != 3 or not isinstance(args[0], torch.Tensor):
            return NotImplemented
        return rule(op, level, bdims, args, kwargs)

    return rule_of_call


def chosen_by_method(rule: Rule) -> Rule:
    """Return the function rule of ``x.where(mask, y)``, whose mask is the second argument."""
    rule_of_function = chosen(rule)

    def rule_of_call(
        op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
    ) -> Any:
        if len(args) != 3:
            return NotImplemented
        x, mask, y = args
        ordered = (bdims[1], bdims[0], bdims[2])
        return rule_of_function(torch.where, level, ordered, (mask, x, y), kwargs)

    return rule_of_call


def part(rule: Rule) -> Rule:
    """Return the function rule of ``x.real`` and ``x.imag`` for complex tensors."""

    def rule_of_call(
        op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
    ) -> Any:
        return rule(op, level, bdims, args, NO_KWARGS) if args[0].is_complex() else NotImplemented

    return rule_of_call


def cast(dtype: torch.dtype) -> Rule:
    """Return the function rule of ``x.float()`` and similar casts to ``dtype``.

    A tensor of that dtype is left to torch, which returns it unchanged.
    """

    def rule_of_call(
        op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
    ) -> Any:
        (x, *rest) = args
        if rest or kwargs or x.dtype is dtype or x.layout is not torch.strided:
            return NotImplemented
        return op(x), bdims[0]

    return rule_of_call


_CASTS = "double float half bfloat16 long int short bool".split()


# The name of functions and methods, the operator whose rule serves them, and their form of call.
_NAMED: tuple[tuple[str, str, CallForm], ...] = (
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
)

# The same for functions that return a view if they can.
_VIEWS: tuple[tuple[str, str, CallForm], ...] = (
    ("reshape", "aten::reshape", reshaping(with_sizes, torch.ops.aten.view.default)),
    ("view", "aten::view", with_sizes),
    ("expand", "aten::expand", with_sizes),
    ("permute", "aten::permute", with_sizes),
    ("transpose", "aten::transpose.int", lambda rule: with_ints(rule, 2, 2)),
    ("unsqueeze", "aten::unsqueeze", lambda rule: with_ints(rule, 1, 1)),
    ("squeeze", "aten::squeeze.dim", lambda rule: with_ints(rule, 1, 1)),
    (
        "flatten",
        "aten::flatten.using_ints",
        reshaping(lambda rule: with_ints(rule, 0, 2), _flat_view),
    ),
)


def forms(rule_of: Callable[[str], Rule | None]) -> Iterator[tuple[str, Any, Rule, bool]]:
    """Yield function rules: the operators' names, the callable, the rule, True if it may view.

    Args:
        rule_of: returns the batching rule of an operator, or None if it has none.
    """
    for name, operator, made in (*_NAMED, *_VIEWS):
        rule = rule_of(operator)
        if rule is None:
            continue
        rule_of_call = made(rule)
        may_view = made not in (over_dims, along_dim)
        for function in {getattr(owner, name, None) for owner in (torch, _T)} - {None}:
            yield operator, function, rule_of_call, may_view
    where = rule_of("aten::where.self")
    if where is not None:
        yield "aten::where.self", torch.where, chosen(where), False
        yield "aten::where.self", _T.where, chosen_by_method(where), False
    indices = "aten::select.int aten::slice.Tensor aten::index.Tensor"
    yield indices, _T.__getitem__, indexed(rule_of("aten::index.Tensor")), True
    yield "aten::t", _T.T.__get__, transposed_matrix, True  # type: ignore[attr-defined]
    yield "aten::transpose.int", _T.mT.__get__, transposed_matrix, True  # type: ignore[attr-defined]
    for name in ("real", "imag"):
        rule = rule_of(f"aten::{name}")
        if rule is not None:
            yield f"aten::{name}", getattr(_T, name).__get__, part(rule), True
    for name in _CASTS:
        yield "aten::to.dtype", getattr(_T, name), cast(getattr(torch, name)), False
