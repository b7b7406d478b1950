"""The function rules of the stage BATCHING: callables that are passed straight to a batching rule.

A rule that only passes its operator on (pointwise) serves the Python callable as well:
``torch.add`` parses its arguments on values as it would on tracers. Indexing, reshapes and casts
have rules of their own, which take the arguments of the Python function. Calls of all other
functions are converted to their operator's arguments (``tracers/parsing``). A Batch kernel that a
user registers for an operator removes the rules of the operator's callables, so that they are
dispatched like any other call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import torch

from tsfunc import hooks
from tsfunc.bridge.sizes.sized_indexing import is_traced_here
from tsfunc.bridge.tracers.call_plans import FUNCTION_PLANS
from tsfunc.bridge.tracers.function_registry import PYTHON_OPERATORS, FunctionRules, Stage, registry
from tsfunc.bridge.tracers.operators import TorchOperator
from tsfunc.bridge.tracers.tracer import NO_KWARGS, Tracer
from tsfunc.dispatch import DispatchKey, Operator
from tsfunc.ops import all_rows, find
from tsfunc.ops.dims import batch_to_front, logical_rank
from tsfunc.ops.registry import Args, BatchDims, Kwargs, Row, Rule, RuleLevel
from tsfunc.ops.tensor_iterator import pointwise, pointwise_inplace

_T = torch.Tensor
_ALL = slice(None)
_INT = frozenset({int})
_SEVERAL = frozenset({tuple, list, torch.Size})
_INDICES = frozenset({int, slice, type(None), type(Ellipsis)})
_STEPS = frozenset({int, type(None)})
_INTEGERS = frozenset({torch.int64, torch.int32})
_CASTS = [
    getattr(torch.Tensor, name) for name in "double float half bfloat16 long int short bool".split()
]

# Names whose operator depends on the arguments (where(condition) is nonzero).
_AMBIGUOUS = frozenset({"where", "max", "min", "to", "copy_", "fill_"})


def _pointwise() -> Iterator[tuple[Any, Rule]]:
    """Yield each callable whose overloads all have the pointwise rule, with that rule."""
    names: dict[str, Rule | None] = {}
    for name, row in all_rows().items():
        base = _base(name)
        names[base] = row.rule if names.get(base, row.rule) is row.rule else None
    for base, rule in names.items():
        if base in _AMBIGUOUS or base.endswith("__"):
            continue
        if rule is pointwise or rule is pointwise_inplace:
            for function in _callables(base):
                yield function, rule


def _callables(base: str) -> Iterator[Any]:
    """Yield the callables of torch that are named like an operator."""
    functions = set()
    for name in (base, *PYTHON_OPERATORS.get(base, ())):
        for owner in (torch, torch.Tensor, torch.nn.functional, torch.special):
            function = getattr(owner, name, None)
            if function is not None and function not in functions:
                functions.add(function)
                yield function


def _all_ints(values: Sequence[Any]) -> bool:
    return _INT.issuperset(map(type, values))


def _with_sizes(rule: Rule) -> Rule:
    """Return the function rule of ``f(x, 2, 3)`` and ``f(x, (2, 3))``."""

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


def _with_range(rule: Rule) -> Rule:
    """Return the function rule of ``f(x)``, ``f(x, first)`` and ``f(x, first, last)``."""

    def rule_of_call(
        op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
    ) -> Any:
        if kwargs or len(args) > 3 or not _all_ints(args[1:]):
            return NotImplemented
        return rule(op, level, bdims, args, NO_KWARGS)

    return rule_of_call


def _as_view(rule: Rule, view: Callable[..., torch.Tensor]) -> Rule:
    """Return the rule of a reshape that leaves it to the handler if the batch has to be copied.

    ``writing/reshaped_views`` then sees the call: one example may have a view.

    Args:
        view: the function that takes the same view, or raises if there is none.
    """

    def rule_of_call(
        op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
    ) -> Any:
        if not (bdims[0] or getattr(args[0], "bdim", None)):
            return rule(op, level, bdims, args, kwargs)
        if isinstance(args[0], Tracer):
            return NotImplemented
        try:
            return rule(view, level, bdims, args, kwargs)
        except (RuntimeError, ValueError):  # fake tensors raise ValueError
            return NotImplemented

    return rule_of_call


def _flat_view(x: torch.Tensor, first: int, last: int) -> torch.Tensor:
    shape = x.shape
    return torch.ops.aten.view.default(x, [*shape[:first], -1, *shape[last + 1 :]])


def _rule_of_indexing(by_tensors: Rule) -> Rule:
    """Return the function rule of ``x[index]``.

    The rule serves ints, slices and None (``x[i, :, None]``), or tensors among full slices.

    Args:
        by_tensors: the rule of ``aten::index.Tensor``.
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
                if is_traced_here():
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


def _transposed_matrix(
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


def _part(rule: Rule) -> Rule:
    """Return the function rule of ``x.real`` and ``x.imag`` for complex tensors."""

    def rule_of_call(
        op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
    ) -> Any:
        return rule(op, level, bdims, args, NO_KWARGS) if args[0].is_complex() else NotImplemented

    return rule_of_call


def _with_own_arguments() -> Iterator[tuple[str, Iterable[Any], Rule, bool]]:
    """Yield rules: the operators, the callables, the rule, True if the result may be a view."""
    view = torch.ops.aten.view.default
    reshape = _with_sizes(_as_view(_rule_of("aten::reshape"), view))
    flatten = _with_range(_as_view(_rule_of("aten::flatten.using_ints"), _flat_view))
    yield "aten::reshape", (torch.reshape, _T.reshape), reshape, True
    yield "aten::view", (_T.view,), _with_sizes(_rule_of("aten::view")), True
    yield "aten::flatten.using_ints", (torch.flatten, _T.flatten), flatten, True
    indices = "aten::select.int aten::slice.Tensor aten::index.Tensor"
    yield indices, (_T.__getitem__,), _rule_of_indexing(_rule_of("aten::index.Tensor")), True
    transposes = _getters("T", "mT")
    yield "aten::t aten::transpose.int", transposes, _transposed_matrix, True
    for name in ("real", "imag"):
        yield f"aten::{name}", _getters(name), _part(_rule_of(f"aten::{name}")), True
    yield "aten::detach", (_T.detach, torch.detach), pointwise, True


def _getters(*names: str) -> list[Any]:
    return [getattr(_T, name).__get__ for name in names]


@hooks.kernel_registered.add
def _remove_rules(op: Operator, key: DispatchKey | None) -> None:
    """Remove what is cached of an operator, so that a user's Batch kernel or row is called."""
    if isinstance(op, TorchOperator) and key in (None, DispatchKey.Batch):
        base = _base(op.name)
        registry.remove(Stage.BATCHING, [*_callables(base), *_by_operator.get(base, ())])
        FUNCTION_PLANS.clear()
        op.direct_rule = op.function = op.by_tracers = op.plans = None


@hooks.row_declared.add
def _forget_operator(row: Row) -> None:
    """Clear the plans, which may hold calls of an operator that had no row before."""
    FUNCTION_PLANS.clear()


def _base(name: str) -> str:
    return name.partition("::")[2].partition(".")[0]


def _rule_of(name: str) -> Rule:
    row = find(name)
    assert row is not None and row.rule is not None, name
    return row.rule


# The callables of rules that call an operator of another name, by that name.
_by_operator: dict[str, list[Any]] = {}
function_rules: Final = FunctionRules()


def _declare() -> None:
    for function, rule in _pointwise():
        function_rules.add(Stage.BATCHING, rule, function, options=True)
    for operators, functions, rule, view in _with_own_arguments():
        function_rules.add(Stage.BATCHING, rule, *functions, view=view, options=True)
        for operator in operators.split():
            _by_operator.setdefault(_base(operator), []).extend(functions)
    # A cast takes a memory format, which is that of an example.
    function_rules.add(Stage.BATCHING, pointwise, *_CASTS)
    for base in ("to", "_to_copy"):
        _by_operator.setdefault(base, []).extend(_CASTS)


_declare()
