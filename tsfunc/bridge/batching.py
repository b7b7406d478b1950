"""The Batch key: batched tensors, and the kernel that gives operators to their rules.

For an operator the kernel tries, in this order: its row's rule; for a composite, its parts;
torch's reference decomposition; the per-example loop, with one ``SlowFallbackWarning``.

Private names used here (torch 2.11 to 2.13): ``OpOverload.decompose`` runs a composite
operator's parts; ``torch._decomp.decomposition_table`` has decompositions written in Python.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._C import _functorch, _skip_one_hop_torch_function

from tsfunc.bridge.operators import TorchOperator, overload_of
from tsfunc.bridge.tracer import (
    NO_KWARGS,
    Tracer,
    TracerLevel,
    door_1,
    refuse_escaped,
    written,
)
from tsfunc.dispatch import DispatchKey, Operator, register, register_fallback
from tsfunc.dispatch.state import tls
from tsfunc.errors import DataDependentError, MissingRuleError, SlowFallbackWarning
from tsfunc.ops.registry import Rule

maybe_functorch_level = _functorch.maybe_current_level
_make_wrapper = torch.Tensor._make_wrapper_subclass


class BatchLevel(TracerLevel):
    """An active vmap."""

    __slots__ = ("batch_size", "randomness")

    def __init__(self, batch_size: int, randomness: str, name: str) -> None:
        super().__init__(DispatchKey.Batch, name)
        self.batch_size = batch_size
        self.randomness = randomness

    def lift(self, value: torch.Tensor) -> torch.Tensor:
        return wrap(value, None, self)

    def sees_factories(self, random: bool) -> bool:
        return random


class BatchTracer(Tracer):
    """A tensor of which there is one for each example, in a physical ``value``.

    ``bdim`` is the dim of ``value`` that holds the examples, or None where all are the same.
    """

    __slots__ = ("bdim", "value")

    value: torch.Tensor
    bdim: int | None
    dispatch_level: BatchLevel

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if not kwargs:
            rule = HOT.get(func)
            if rule is not None:
                out = _hot_call(rule, func, args)
                if out is not NotImplemented:
                    return out
            return door_1(func, types, args, NO_KWARGS)
        return door_1(func, types, args, kwargs)

    def cut(self) -> BatchTracer:
        return wrap(self.value.detach(), self.bdim, self.dispatch_level)

    def read(self, name: str) -> Any:
        if self.bdim is None:
            return getattr(self.value, name)()
        level = self.dispatch_level.name
        ways = (
            "Write the choice with torch.where, or other tensor operations, or take the value "
            "out of the function."
        )
        if name in ("__bool__", "is_nonzero"):
            raise DataDependentError(
                f"{level}: It looks like you're attempting to use a Tensor in some data-dependent "
                f"control flow. The value differs from example to example, so `if`, `while` and "
                f"`and` can't go one way for all. {ways}"
            )
        called = ".item()" if name in ("__int__", "__float__", "__index__") else f".{name}()"
        raise DataDependentError(
            f"vmap: It looks like you're calling {called} on a Tensor inside of {level}. We don't "
            f"support vmap over calling {called} on a Tensor: its value differs from example to "
            f"example. {ways}"
        )

    def describe(self) -> str:
        level = self.dispatch_level
        if not level.alive:
            return f"BatchTracer(of {level.name}, which has ended)"
        what = "the same for each example" if self.bdim is None else f"batch dim {self.bdim}"
        return f"BatchTracer(level {level.depth} of {level.name}, {what}, value=\n{self.value!r})"


# Callables that a rule takes as they are, with values in place of tracers (``bridge/hot.py``).
HOT: dict[Any, Rule] = {}


def wrap(value: torch.Tensor, bdim: int | None, level: BatchLevel) -> BatchTracer:
    """The tracer for a physical value."""
    if bdim is None:
        shape: Any = value.shape
        strides = None if value.is_contiguous() else value.stride()
    else:
        shape = value.shape
        # With the batch outermost in a contiguous value, the examples are contiguous too.
        if bdim == 0 and value.is_contiguous():
            shape, strides = shape[1:], None
        else:
            shape = shape[:bdim] + shape[bdim + 1 :]
            steps = value.stride()
            strides = steps[:bdim] + steps[bdim + 1 :]
    # By position, which is parsed in less time: no storage offset and no memory format.
    tracer: Any = _make_wrapper(
        BatchTracer, shape, strides, None, None, value.dtype, torch.strided, value.device
    )
    tracer.value = value
    tracer.bdim = bdim
    tracer.dispatch_level = level
    return tracer  # type: ignore[no-any-return]


# What a hot call may have beside batched tensors; anything else takes the way through C++.
_PLAIN = frozenset({int, float, bool, complex, type(None), torch.Tensor, torch.nn.Parameter})


def _hot_call(rule: Rule, func: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Door 1 without C++: NotImplemented where the call is not of the plain kind."""
    level: Any = None
    batched = False
    values = []
    dims = []
    for arg in args:
        kind = type(arg)
        if kind is BatchTracer:
            if level is None:
                level = arg.dispatch_level
            elif arg.dispatch_level is not level:
                return NotImplemented
            bdim = arg.bdim
            if bdim is not None:
                batched = True
            values.append(arg.value)
            dims.append(bdim)
        elif kind in _PLAIN:
            values.append(arg)
            dims.append(None)
        else:
            return NotImplemented
    if not batched or level.autograd or not level.alive:
        return NotImplemented
    state = tls.state
    if state.include or state.excluded or maybe_functorch_level() is not None:
        return NotImplemented
    tls.state = level.outer
    try:
        out = rule(func, level, dims, values, NO_KWARGS)
    finally:
        tls.state = state
    if out is NotImplemented:
        return out
    return wrap(out[0], out[1], level)


def _unwrap(arg: Any, level: BatchLevel) -> tuple[Any, Any]:
    """The value and the batch dim of an argument; lists are looked through."""
    if isinstance(arg, BatchTracer):
        if arg.dispatch_level is level:
            return arg.value, arg.bdim
        if arg.dispatch_level.depth >= level.depth:
            refuse_escaped("an operator", arg.dispatch_level)
    elif isinstance(arg, list | tuple):
        pairs = [_unwrap(item, level) for item in arg]
        if any(isinstance(item, Tracer) for item in arg):
            dims = [dim for _, dim in pairs]
            values = [value for value, _ in pairs]
            return values, dims if any(dim is not None for dim in dims) else None
    return arg, None


@register_fallback(DispatchKey.Batch)
def batch_kernel(op: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The column of the Batch key: finds a rule and runs it on values."""
    level = _running_level()
    values: list[Any] = []
    dims: list[Any] = []
    any_batched = False
    for arg in args:
        if type(arg) is BatchTracer and arg.dispatch_level is level:
            values.append(arg.value)
            dims.append(arg.bdim)
            if arg.bdim is not None:
                any_batched = True
        elif isinstance(arg, BatchTracer | list | tuple):
            value, dim = _unwrap(arg, level)
            values.append(value)
            dims.append(dim)
            if dim is not None:
                any_batched = True
        else:
            values.append(arg)
            dims.append(None)
    if kwargs:
        pairs = {name: _unwrap(arg, level) for name, arg in kwargs.items()}
        if any(dim is not None for _, dim in pairs.values()):
            return _with_batched_kwargs(op, level, args, kwargs)
        kwargs = {name: value for name, (value, _) in pairs.items()}
    if not any_batched and not (isinstance(op, TorchOperator) and op.random):
        return _rewrap(op, level, args, kwargs, op.native(*values, **kwargs), None)  # type: ignore[misc]
    row = op.row if isinstance(op, TorchOperator) else None
    if row is not None and row.rule is not None:
        out = row.rule(op.native, level, dims, values, kwargs)
        if out is not NotImplemented:
            return _rewrap(op, level, args, kwargs, out[0], out[1])
    return without_rule(op, level, args, values, dims, kwargs)


@register("aten::detach", DispatchKey.Batch)
def _detach(value: BatchTracer) -> BatchTracer:
    """Autograd's own detach at this level: the graph of the levels outside is not cut.

    The user's is answered by door 1.
    """
    return wrap(value.value, value.bdim, _running_level())


def _running_level() -> BatchLevel:
    level = tls.state.running
    assert isinstance(level, BatchLevel)
    return level


def _rewrap(
    op: Operator,
    level: BatchLevel,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    out: Any,
    out_dims: Any,
) -> Any:
    """Tracers for a rule's results; what an in-place operator returns is its argument itself."""
    if isinstance(out, torch.Tensor):
        if isinstance(op, TorchOperator) and op.inplace:
            args[0].bdim = out_dims
            return written(op, args, kwargs)
        return wrap(out, out_dims, level)
    if isinstance(out, list | tuple):
        every = not isinstance(out_dims, list | tuple)
        wrapped = [
            _rewrap_one(item, out_dims if every else out_dims[i], level)
            for i, item in enumerate(out)
        ]
        return wrapped if isinstance(out, list) else tuple(wrapped)
    return out


def _rewrap_one(item: Any, dim: Any, level: BatchLevel) -> Any:
    if isinstance(item, torch.Tensor):
        return wrap(item, dim, level)
    if isinstance(item, list | tuple):
        return [_rewrap_one(part, dim, level) for part in item]
    return item


def _with_batched_kwargs(
    op: Operator, level: BatchLevel, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Keyword-only tensors that are batched: ``out=`` is written to, others are looped over."""
    if isinstance(op, TorchOperator) and op.out_names:
        return _write_out(op, args, kwargs)
    return loop(op, level, args, kwargs)


def _write_out(op: TorchOperator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``out=``: the functional form, then copies into what was given."""
    functional = _functional_form(op)
    rest = {name: arg for name, arg in kwargs.items() if name not in op.out_names}
    results = functional(*args, **rest)
    outs = [kwargs[name] for name in op.out_names]
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


def without_rule(
    op: Operator,
    level: BatchLevel,
    args: Sequence[Any],
    values: Sequence[Any],
    dims: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """An operator that no rule covers: its parts, a decomposition, or the loop."""
    if isinstance(op, TorchOperator):
        if op.out_names:
            return _write_out(op, args, kwargs)
        # The parts are called on the tracers again, at their own level.
        parts = _parts_of(op)
        if parts is not None:
            with level.at_own_level():
                out = parts(*args, **kwargs)
            if out is not NotImplemented:
                return out
    return loop(op, level, args, kwargs)


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


_DECOMPOSITIONS = "torch._decomp.decompositions"


_warned: set[str] = set()


def loop(
    op: Operator, level: BatchLevel, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Runs the operator once for each example and stacks the results."""
    _check_loop(op, level)
    if op.name not in _warned:
        _warned.add(op.name)
        warnings.warn(
            f"There is a performance drop because we have not yet implemented the batching rule "
            f"for {op.name}: vmap runs it once for each of {level.batch_size} examples. "
            f"Give it a rule with tsfunc.ops.row.",
            SlowFallbackWarning,
            stacklevel=2,
        )
    import optree

    leaves, tree = optree.tree_flatten((tuple(args), dict(kwargs)), none_is_leaf=True)  # type: ignore[arg-type]
    pairs = [_unwrap(leaf, level) for leaf in leaves]
    inplace = isinstance(op, TorchOperator) and op.inplace
    if inplace and pairs[0][1] is None:
        from tsfunc.ops.dims import refuse_inplace

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
            f"can't tell the shape of its results."
        )
    if op.random:
        from tsfunc.ops.random import check_randomness

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


def functional_name(op: TorchOperator) -> str:
    """The name of an in-place operator's functional form."""
    return op.name.replace("_.", ".").rstrip("_")


__all__ = ["HOT", "BatchLevel", "BatchTracer", "loop", "overload_of", "wrap"]
