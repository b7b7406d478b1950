"""Operators that no rule covers: their parts, torch's decompositions, and the per-example loop.

Private names used here (torch 2.11 to 2.13): ``OpOverload.decompose`` runs a composite
operator's parts, ``OpOverload._schema`` names its arguments;
``torch._decomp.decomposition_table`` has decompositions written in Python;
``_C._skip_one_hop_torch_function`` calls a function past its ``__torch_function__`` check, once.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import optree
import torch
from torch._C import _skip_one_hop_torch_function

from tsfunc.bridge.batch_tracer import BatchLevel, unwrap, wrap
from tsfunc.bridge.operators import TorchOperator
from tsfunc.bridge.torch_state import without_autograd
from tsfunc.dispatch import Operator
from tsfunc.dispatch.places import users_place
from tsfunc.dispatch.recording import note
from tsfunc.dispatch.state import tls
from tsfunc.errors import MissingRuleError, SlowFallbackWarning
from tsfunc.ops.dims import refuse_inplace
from tsfunc.ops.random import check_randomness

PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})


def without_rule(
    op: Operator, level: BatchLevel, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """An operator that no rule covers: its parts, a decomposition, or the loop."""
    if isinstance(op, TorchOperator):
        if op.out_names:
            return write_out(op, level, args, kwargs)
        parts = _parts_of(op)
        if parts is not None:
            note("decomposition", *_name_and_source(parts, op))
            out = _run_parts(parts, level, args, kwargs)
            if out is not NotImplemented:
                return out
    return loop(op, level, args, kwargs)


def _run_parts(
    parts: Callable[..., Any], level: BatchLevel, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Calls the parts on the tracers again, at their own level.

    If that level records, it has seen the operator itself. Unbatched arguments come along as
    tracers: they may be differentiated outside of it, and the parts may write into what they make
    of them.
    """

    def lift(value: Any) -> Any:
        return level.lift(value) if type(value) in PLAIN_TENSORS else value

    args, kwargs = optree.tree_map(lift, (tuple(args), dict(kwargs)), none_is_leaf=True)
    with level.at_own_level(), without_autograd() if level.autograd else nullcontext():
        return parts(*args, **kwargs)


def write_out(
    op: TorchOperator, level: BatchLevel, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """``out=``: the functional form, then copies into what was given."""
    functional = _functional_form(op)
    note("decomposition", f"{functional} and copy_")
    rest = {name: arg for name, arg in kwargs.items() if name not in op.out_names}
    outs = [kwargs[name] for name in op.out_names]
    with level.at_own_level():
        results = functional(*args, **rest)
        for out, result in zip(outs, (results,) if len(outs) == 1 else results, strict=True):
            if out.shape != result.shape:
                out.resize_(result.shape)
            out.copy_(result)
    return outs[0] if len(outs) == 1 else tuple(outs)


def _functional_form(op: TorchOperator) -> Any:
    """The overload with the same arguments that returns its result."""
    packet = op.overload.overloadpacket
    wanted = [a.name for a in op.overload._schema.arguments if not a.is_out]
    for name in packet.overloads():
        found = getattr(packet, name)
        names = [a.name for a in found._schema.arguments]
        if names[: len(wanted)] == wanted and not any(
            a.is_out or a.alias_info for a in found._schema.arguments
        ):
            return found
    raise MissingRuleError(
        f"vmap: {op.name}: there is no form of this operator that returns its result, so out= "
        f"can't be served. Call it without out=."
    )


def _composite_parts(overload: Any) -> Callable[..., Any]:
    """Runs a composite's parts; the call as such is not to meet door 1 again."""
    return lambda *args, **kwargs: _skip_one_hop_torch_function(
        overload.decompose, (), args, kwargs
    )


def _parts_of(op: TorchOperator) -> Callable[..., Any] | None:
    if op.composite:
        return _composite_parts(op.overload)
    if op.writes or op.random or op.is_view:
        return None
    from torch._decomp import decomposition_table

    found: Callable[..., Any] | None = decomposition_table.get(op.overload)
    # Those written in terms of torch's reference primitives, which have no rules, are no help.
    return found if getattr(found, "__module__", "") == _DECOMPOSITIONS else None


def _name_and_source(parts: Callable[..., Any], op: TorchOperator) -> tuple[str, str]:
    """What reports say of an operator's parts: their name and ``file:line``."""
    if op.composite:
        return "torch's own composite", ""
    code = inspect.unwrap(parts).__code__
    return f"{parts.__module__}.{parts.__name__}", f"{code.co_filename}:{code.co_firstlineno}"


_DECOMPOSITIONS = "torch._decomp.decompositions"


_warned: set[str] = set()


def loop(op: Operator, level: BatchLevel, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs the operator once for each example and stacks the results."""
    _check_loop(op, level)
    strict = _strict_level(level)
    if strict is not None:
        raise MissingRuleError(
            f"{strict.name}: {op.name} has no batching rule for this call, at {users_place()}. It "
            f"would run once for each of {level.batch_size} examples, which strict=True does not "
            f"allow. Give it a rule (tsfunc.ops.row, or torch.library.register_vmap for an "
            f"operator of your own), call another operator there, or leave out strict=True."
        )
    note("loop", f"one call for each of {level.batch_size} examples")
    if op.name not in _warned and tls.state.recorder is None:
        _warned.add(op.name)
        warnings.warn(
            f"There is a performance drop because we have not yet implemented the batching rule "
            f"for {op.name}: vmap runs it once for each of {level.batch_size} examples. "
            f"Give it a rule with tsfunc.ops.row.",
            SlowFallbackWarning,
            stacklevel=2,
        )
    leaves, tree = optree.tree_flatten((tuple(args), dict(kwargs)), none_is_leaf=True)
    pairs = [unwrap(leaf, level) for leaf in leaves]
    inplace = isinstance(op, TorchOperator) and op.inplace
    if inplace and pairs[0][1] is None:
        refuse_inplace(op)
    assert op.native is not None
    results = []
    for i in range(level.batch_size):
        sliced = [v if dim is None else v.select(dim, i) for v, dim in pairs]
        one_args, one_kwargs = optree.tree_unflatten(tree, sliced)
        results.append(op.native(*one_args, **one_kwargs))
    if inplace:
        return args[0]
    return _stack(op, level, results)


def _strict_level(level: BatchLevel) -> BatchLevel | None:
    """The level, or the nearest one around it, that allows no loop."""
    for one in (level, *reversed(level.outer.levels)):
        if isinstance(one, BatchLevel) and one.strict:
            return one
    return None


def _check_loop(op: Operator, level: BatchLevel) -> None:
    if not isinstance(op, TorchOperator):
        return
    if op.out_names or op.is_view:
        raise MissingRuleError(
            f"Batching rule not implemented for {op.name}; the fallback path doesn't work on "
            f"out= or view ops."
        )
    if level.batch_size == 0:
        raise MissingRuleError(
            f"Batching rule not implemented for {op.name}, and a loop over a batch of size 0 "
            f"can't tell the shape of its results (torch.func says: The fallback path does not "
            f"support vmap over dims of size 0)."
        )
    if op.random:
        check_randomness(op, level)


def _stack(op: Operator, level: BatchLevel, results: Sequence[Any]) -> Any:
    first = results[0]
    if isinstance(first, torch.Tensor):
        shapes = {tuple(r.shape) for r in results}
        if len(shapes) > 1:
            raise MissingRuleError(
                f"vmap: {op.name} gave results of different shapes for different examples: "
                f"{sorted(shapes)}. Results under vmap must have one shape."
            )
        return wrap(torch.stack(list(results)), 0, level)
    if isinstance(first, list | tuple):
        parts = [_stack(op, level, part) for part in zip(*results, strict=True)]
        return parts if isinstance(first, list) else tuple(parts)
    if any(r != first for r in results):
        raise MissingRuleError(
            f"vmap: {op.name} gave different Python values for different examples. Use a tensor "
            f"operation instead."
        )
    return first
