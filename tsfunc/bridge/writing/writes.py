"""The function handler of calls that write: the written tensor first becomes a tracer of the level.

NOTE [promotion of tensors] in ``promotion`` describes how. This module defines which
callables write to which arguments, when the written tensor must change, and the error messages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import torch
from torch._C import DisableTorchFunctionSubclass, _functorch
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd import forward_ad

from tsfunc import hooks
from tsfunc.bridge.tracers.batch_tracer import BatchLevel, BatchTracer
from tsfunc.bridge.tracers.function_registry import WRITERS, FunctionRules, Stage
from tsfunc.bridge.tracers.grad_level import GradLevel
from tsfunc.bridge.tracers.operators import (
    PLAIN_TENSORS,
    STATISTICS,
    TorchOperator,
    operator_of,
    tensors_in,
)
from tsfunc.bridge.tracers.tracer import Tracer, TracerLevel, innermost_level
from tsfunc.bridge.writing.module_state import note_write
from tsfunc.bridge.writing.naming import DescribedTensor
from tsfunc.bridge.writing.promotion import (
    CreatedOutside,
    NoCommonBase,
    aliases_of,
    demote,
    promote,
)
from tsfunc.ops.dims import InplaceRefused
from tsfunc.ops.random import refuse_in_error_mode, require_one_distribution, shared_draw_error

_IN_TORCH_FUNC = (
    "vmap: inplace arithmetic(self, *extra_args) is not possible because there exists a Tensor "
    "`other` in extra_args that has more elements than `self`."
)
_STATISTICS_IN_TORCH_FUNC = (
    "Batch norm got a batched tensor as input while the running_mean or running_var, which will "
    "be updated in place, were not batched."
)


def prepare_write(
    name: str,
    written: Any,
    values: Sequence[Any],
    *,
    recorded: bool = True,
    words: str = _IN_TORCH_FUNC,
) -> None:
    """Turn the plain tensors and outer tracers that a call writes to into the level's tracers.

    The call needs tracers if the written values differ between examples, or if autograd or forward
    AD is recorded on them at the level.

    Args:
        name: the name of the called function.
        values: the tensors that determine the written values, including ``written``.
        recorded: True if autograd records the write.
        words: the message of torch.func for the same error.

    Raises:
        InplaceRefused: a written tensor was not made inside the level.
    """
    level = innermost_level(values)
    if not isinstance(level, BatchLevel | GradLevel) or not level.alive:
        return
    if (_functorch.maybe_current_level() or 0) > level.functorch_depth:
        return
    targets = [t for t in tensors_in(written) if not _is_of(t, level)]
    if not targets:
        return
    of_level = [t for t in tensors_in(values) if _is_of(t, level)]
    batched = any(getattr(t, "bdim", None) is not None for t in of_level)
    if not batched and not (recorded and any(has_derivative(t, level) for t in of_level)):
        return
    for target in targets:
        if not _is_of(target, level):  # it may have been promoted together with an earlier target
            adopt(name, target, level, batched=batched, words=words)


def _is_of(tensor: torch.Tensor, level: TracerLevel) -> bool:
    return isinstance(tensor, Tracer) and tensor.dispatch_level is level


def has_derivative(tracer: torch.Tensor, level: TracerLevel) -> bool:
    """True if autograd records on the tracer, or the tracer has a tangent."""
    with DisableTorchFunctionSubclass():
        if level.forward and forward_ad.unpack_dual(tracer).tangent is not None:
            return True
        return tracer.requires_grad and torch.is_grad_enabled()


def adopt(
    name: str,
    target: torch.Tensor,
    level: TracerLevel,
    *,
    batched: bool,
    words: str = _IN_TORCH_FUNC,
    refusal: Exception | None = None,
) -> None:
    """Turn a tensor, and the tensors that share its memory, into tracers of the level.

    If the tensor is in a module from outside, the call decides when it ends: NOTE [state of
    modules] in ``module_state``.

    Args:
        level: the level of the written values.
        batched: True if each example gets its own copy.
        words: the message of torch.func for the same error.
        refusal: the error if the call ends with the tensor in a module; by default that of an
            immediate refusal.

    Raises:
        InplaceRefused: the tensor was not made inside the level.
    """
    lifted = isinstance(target, BatchTracer) and target.dispatch_level is level
    subject = target.value if isinstance(target, BatchTracer) and lifted else target
    if not isinstance(subject, Tracer):
        if type(subject) not in PLAIN_TENSORS and not hasattr(subject, "fake_mode"):
            return  # a tensor class of another library
        _refuse_leaf(subject)
    try:
        aliases = aliases_of(subject, level)
        if not aliases.entries:
            promote(aliases, level, batched=batched)
            return
        error = refusal or InplaceRefused(_outside(name, subject, level, batched, words))
        values = None if batched else subject.detach().clone()
        replaced = promote(aliases, level, batched=batched)
    except CreatedOutside:
        raise InplaceRefused(_outside(name, subject, level, batched, words)) from None
    except NoCommonBase:
        raise InplaceRefused(_scattered_message(name, subject, level)) from None

    def undo() -> None:
        demote(replaced)
        if values is not None:
            subject.detach().copy_(values)

    note_write(aliases.entries, level, undo, error)


@hooks.before_drawing.add
def _own_to_draw(op: Any, target: Any, level: TracerLevel) -> None:
    """Turn a tensor that gets random numbers into a batched one, if each example draws its own.

    If this is impossible, the batching rule refuses the draw.
    """
    if not isinstance(level, BatchLevel) or _is_of(target, level):
        return
    if level.randomness in ("different", "split"):
        with suppress(InplaceRefused):
            refusal = shared_draw_error(op)
            adopt("a random operator", target, level, batched=True, refusal=refusal)


def _refuse_leaf(target: torch.Tensor) -> None:
    """Raise torch's error for a write to a leaf; torch itself would not see the write."""
    base = target if target._base is None else target._base
    if torch.is_grad_enabled() and target.requires_grad and base.is_leaf:
        kind = "a leaf" if base is target else "a view of a leaf"
        raise RuntimeError(
            f"{kind} Variable that requires grad is being used in an in-place operation."
        )


def _outside(name: str, target: torch.Tensor, level: TracerLevel, batched: bool, words: str) -> str:
    tensor = DescribedTensor(target)
    copy = f"{tensor.name or 'tensor'}.clone()"
    if not batched:
        return (
            f"{level.name}: {name} writes a value that is differentiated into {tensor}, which was "
            f"made outside of it, so that its derivative would be lost. Write into one that is "
            f"made inside ({copy}), and return it."
        )
    ways = (
        f"Write into one that is made inside ({copy}) and return it, or give each example its "
        f"own: map over it with in_dims."
    )
    if tensor.module is not None:
        ways = _MODULE_STATE.format(model=tensor.module)
    return (
        f"{level.name}: {name} writes values that differ between examples into {tensor}, which was "
        f"made outside of the function and is not batched: there is one of it for all examples. "
        f"{ways} (In torch.func's words: {words})"
    )


_MODULE_STATE = """
It is state of the module `{model}`. Give the state as an argument and return what it becomes:

    def call(buffers, x):
        buffers = {{name: value.clone() for name, value in buffers.items()}}
        out = tsfunc.functional_call({model}, (params, buffers), x)
        return out, buffers

    params, buffers = dict({model}.named_parameters()), dict({model}.named_buffers())
    out, buffers = tsfunc.vmap(call, in_dims=(None, 0))(buffers, x)

Or have it left as it is: with {model}.eval(), or with a layer that keeps no such state
(track_running_stats=False, GroupNorm).
"""


def _scattered_message(name: str, target: torch.Tensor, level: TracerLevel) -> str:
    return (
        f"{level.name}: {name} writes into {DescribedTensor(target)}, which is not batched and "
        f"shares memory with other views of a tensor that is gone. They can't all become batched: "
        f"keep the tensor that they are views of in a variable, or write into a copy (.clone())."
    )


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
    """Return the arguments that a call writes to: tensors and lists of tensors."""
    if isinstance(func, OpOverloadPacket):
        func = only_overload(func) or func
    if isinstance(func, OpOverload):
        op = operator_of(func)
        if op.name in STATISTICS:
            return _running_statistics(op, args, kwargs)[1]
        written = [args[i] for i in op.written if i < len(args)]
        arguments = op.signature.arguments
        named = [arguments[i].name for i in op.written if i >= len(args)]
        return written + [kwargs[name] for name in (*named, *op.out_names) if name in kwargs]
    if "out" in kwargs:
        return [kwargs["out"]]
    prepare = WRITERS.get(func)
    if prepare is _statistics:
        return _running_statistics(_operator_with_statistics(func), args, kwargs)[1]
    writes_first = prepare is _first or (
        isinstance(func, OpOverloadPacket) and func.__name__.endswith("_")
    )
    return (*args, *kwargs.values())[:1] if writes_first else ()


def _first(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Prepare a write to the first argument, which may be a keyword (``input=``, ``self=``)."""
    values = (*args, *kwargs.values())
    prepare_write(func.__name__, values[:1], values)


def _prepare_draw(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Prepare a random draw, with probabilities in the second argument."""
    values = (*args, *kwargs.values())
    level = innermost_level(values)
    if isinstance(level, BatchLevel) and level.alive:
        refuse_in_error_mode(func, level)
        require_one_distribution(func, level, [getattr(x, "bdim", None) for x in values[1:2]])
    _first(func, args, kwargs)


def _prepare_out(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Prepare a call that writes to ``out=``."""
    prepare_write(func.__name__, kwargs["out"], (*args, *kwargs.values()))


def _operator(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Prepare an operator that writes to the arguments its schema names."""
    op = operator_of(func)
    if op.name in STATISTICS:
        _statistics(func, args, kwargs)
    else:
        prepare_write(op.name, written_by(func, args, kwargs), (*args, *kwargs.values()))


def _packet(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Prepare an operator packet; with several overloads, a trailing ``_`` marks a write."""
    overload = only_overload(func)
    if overload is not None:
        if operator_of(overload).written:
            _operator(overload, args, kwargs)
    elif func.__name__.endswith("_"):
        _first(func, args, kwargs)


@functools.cache
def only_overload(packet: OpOverloadPacket) -> OpOverload | None:
    """Return an operator's only overload, or None; ``torch.library.custom_op`` makes only one."""
    names = packet.overloads()
    return getattr(packet, names[0]) if len(names) == 1 else None


def _statistics(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Prepare ``f(x, weight, bias, running_mean, running_var, training, momentum, ...)``.

    The new value of each running statistic depends on ``x`` and on its old value.
    """
    op = operator_of(func) if isinstance(func, OpOverload) else _operator_with_statistics(func)
    x, written = _running_statistics(op, args, kwargs)
    for running in written:
        words = _STATISTICS_IN_TORCH_FUNC
        prepare_write(func.__name__, running, (x, running), recorded=False, words=words)


def _operator_with_statistics(func: Callable[..., Any]) -> TorchOperator:
    """Return the operator of ``torch.batch_norm`` or ``torch.instance_norm``."""
    return operator_of(getattr(torch.ops.aten, func.__name__).default)


def _running_statistics(
    op: TorchOperator, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, list[torch.Tensor]]:
    """Return the input of a call, and the running statistics that it writes.

    Empty statistics are not written, and none are with a momentum of 0.
    """
    ordered = op.signature.in_order(args, kwargs)
    running = [ordered[i] for i in op.written_by_call(ordered)]
    return ordered[0], [x for x in running if isinstance(x, torch.Tensor) and x.numel() > 0]


def _writers() -> set[Callable[..., Any]]:
    """Return the C functions and methods that write to their first argument."""
    functions = set()
    for owner in (torch.Tensor, torch, torch._C._nn):
        for name in dir(owner):
            inplace = name.endswith("_") and not name.endswith("__") and name != "set_"
            if inplace and hasattr(torch.ops.aten, name):
                functions.add(getattr(owner, name))
    for name in "add sub mul div truediv floordiv mod pow and or xor lshift rshift".split():
        functions.add(getattr(torch.Tensor, f"__i{name}__"))
    return functions


def _is_of_the_level(kinds: Sequence[Any]) -> bool:
    """True if the written tensor is a tracer of the level."""
    return kinds[0] is None or type(kinds[0]) is int


def _has_no_statistics(kinds: Sequence[Any]) -> bool:
    """True if the running statistics are None."""
    return len(kinds) > 4 and kinds[3] is kinds[4] is type(None)


function_rules: Final = FunctionRules()
function_rules.add(
    Stage.WRITE, _first, torch.Tensor.__setitem__, *(_writers() - {torch.Tensor.bernoulli_}),
    left_to_torch=_is_of_the_level,
)  # fmt: skip
function_rules.add(Stage.WRITE, _prepare_draw, torch.Tensor.bernoulli_)
function_rules.add(
    Stage.WRITE, _statistics, torch.batch_norm, torch.instance_norm,
    left_to_torch=_has_no_statistics, training=5,
)  # fmt: skip
function_rules.add(Stage.WRITE, _prepare_out, "out")
function_rules.add(Stage.WRITE, _operator, OpOverload)
function_rules.add(Stage.WRITE, _packet, OpOverloadPacket)
