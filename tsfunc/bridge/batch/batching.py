"""The kernel of the Batch key, which calls batching rules and handles in-place writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tsfunc.bridge.batch.empty_batches import may_fail_on_empty_batch, run_on_made_up_example
from tsfunc.bridge.batch.fallback import without_rule, write_out
from tsfunc.bridge.batch.split_level import before_write
from tsfunc.bridge.tracers.batch_tracer import (
    BatchLevel,
    BatchTracer,
    bdims_of,
    detached_operand,
    rewrap,
    unwrap,
    unwrap_args,
    update_history,
)
from tsfunc.bridge.tracers.operators import (
    CALL_ERRORS,
    TorchOperator,
    map_items,
    needs_rule,
    tensors_in,
)
from tsfunc.bridge.tracers.torch_state import has_autocast_kernel, is_autocasting, suspend_autocast
from tsfunc.bridge.writing.writes import adopt
from tsfunc.dispatch import DispatchKey, Operator, register, register_fallback
from tsfunc.dispatch.recording import note
from tsfunc.dispatch.state import tls
from tsfunc.ops.keywords import KEYWORDS
from tsfunc.ops.registry import Args, Kwargs, Rule
from tsfunc.ops.splitting import BatchChanged


@register_fallback(DispatchKey.Batch)
def batch_kernel(op: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a call by its batching rule; registered as the fallback of the Batch key."""
    while True:
        try:
            return _run_rule(op, args, kwargs)
        except BatchChanged:
            pass  # the level has fewer examples now, and their answers agree
        except CALL_ERRORS as error:
            level = _running_level()
            if not may_fail_on_empty_batch(level, error):
                raise
            return run_on_made_up_example(op, level, args, kwargs, error)


def _run_rule(op: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Unwrap the arguments, find the batching rule of ``op`` and run it on the values."""
    level = _running_level()
    written = op.written_by_call(args) if isinstance(op, TorchOperator) else ()
    if level.splitter is not None:
        for position in written:
            before_write(level, args[position : position + 1])
    if level.detaches_operands:
        args = [map_items(detached_operand, arg) for arg in args]
        kwargs = {name: map_items(detached_operand, arg) for name, arg in kwargs.items()}
    _, values, kinds = unwrap_args(args, level)
    for position in written:
        for value in tensors_in(values[position : position + 1]):
            update_history(value)
    bdims = bdims_of(kinds, values)
    any_batched = any(bdim is not None for bdim in bdims)
    if kwargs:
        pairs = {name: unwrap(arg, level) for name, arg in kwargs.items()}
        if any(bdim is not None for _, bdim in pairs.values()):
            return _with_batched_kwargs(op, level, args, kwargs, values, bdims, pairs)
        kwargs = {name: value for name, (value, _) in pairs.items()}
    if not any_batched and not (isinstance(op, TorchOperator) and needs_rule(op, values, kwargs)):
        note("once")
        return rewrap(op, level, args, kwargs, op.outward(*values, **kwargs), None)
    if (
        is_autocasting()
        and isinstance(op, TorchOperator)
        and (not op.composite or has_autocast_kernel(op.name))
    ):
        with suspend_autocast():  # NOTE [autocast and rules]
            return _by_rule(op, level, args, kwargs, values, bdims)
    return _by_rule(op, level, args, kwargs, values, bdims)


def _by_rule(
    op: Operator, level: BatchLevel, args: Args, kwargs: Kwargs, values: list[Any], bdims: list[Any]
) -> Any:
    """Run the batching rule of the operator's row, or ``without_rule`` if no rule applies."""
    row = op.row if isinstance(op, TorchOperator) else None
    if row is not None and row.rule is not None:
        if isinstance(op, TorchOperator) and op.inplace:
            change = _reshape if op.reshapes else _write_batched
            out = change(op, row.rule, args[0], level, bdims, values, kwargs)
        else:
            out = row.rule(op.native, level, bdims, values, kwargs)
        if out is not NotImplemented:
            return rewrap(op, level, args, kwargs, out[0], out[1])
    return without_rule(op, level, args, kwargs)


def _running_level() -> BatchLevel:
    level = tls.state.running
    assert isinstance(level, BatchLevel)
    return level


def _with_batched_kwargs(
    op: Operator,
    level: BatchLevel,
    args: Args,
    kwargs: Kwargs,
    values: Sequence[Any],
    bdims: Sequence[Any],
    pairs: Mapping[str, tuple[Any, Any]],
) -> Any:
    """Run a call with batched keyword-only tensors.

    An ``out=`` call goes to ``write_out``. A rule that accepts all of the batched keywords is
    called with them (NOTE [batched keywords] in ``ops/keywords``). Any other call goes to
    ``without_rule``.
    """
    if isinstance(op, TorchOperator):
        if op.out_names:
            return write_out(op, level, args, kwargs)
        batched = {name: bdim for name, (_, bdim) in pairs.items() if bdim is not None}
        rule = op.row.rule if op.row is not None else None
        if rule is not None and batched.keys() <= KEYWORDS.get(op.name, frozenset()):
            named = {name: value for name, (value, _) in pairs.items()}
            out = rule(op.native, level, [*bdims, batched], values, named)
            if out is not NotImplemented:
                return rewrap(op, level, args, kwargs, out[0], out[1])
    return without_rule(op, level, args, kwargs)


def _write_batched(
    op: TorchOperator,
    rule: Rule,
    target: Any,
    level: BatchLevel,
    bdims: list[Any],
    values: list[Any],
    kwargs: Kwargs,
) -> Any:
    """Run the rule of an in-place operator, after making its target batched if necessary."""
    if bdims[0] is None and isinstance(target, BatchTracer) and target.dispatch_level is level:
        with level.at_own_level():
            adopt(op.name, target, level, batched=True)
        values[0], bdims[0] = target.value, target.bdim
    return rule(op.native, level, bdims, values, kwargs)


# NOTE [changes of shape in place]
# ``squeeze_`` and similar operators change a tensor's metadata, not its memory. The tracer's value
# is replaced by the view that the functional operator returns. The previous value, which may be a
# tensor of the user, and other tensors that share its memory keep their shapes.
def _reshape(
    op: TorchOperator,
    rule: Rule,
    target: Any,
    level: BatchLevel,
    bdims: list[Any],
    values: list[Any],
    kwargs: Kwargs,
) -> Any:
    """Run an in-place operator that changes its argument's shape, by the functional rule."""
    assert op.view_operator is not None
    out = rule(op.view_operator.overload, level, bdims, values, kwargs)
    if out is not NotImplemented:
        target.value, target.bdim = out
    return out


@register("aten::detach", DispatchKey.Batch)
def _detach(value: BatchTracer) -> BatchTracer:
    """Autograd's own detach at this level, which keeps the graphs of the outer levels.

    A user's call of ``detach`` does not arrive here: the function handler answers it.
    """
    return value.aliased_here()
