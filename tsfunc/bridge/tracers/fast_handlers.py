"""The fast paths of the handlers of batched tensors, from plain calls directly to batching rules.

Private names used here (torch 2.11 to 2.13): ``_ForceDispatchKeyGuard``, ``_set_grad_enabled`` and
``_current_graph_task_id`` as in ``torch_state``, whose context manager the dispatch handler
inlines; ``_functorch.maybe_current_level`` tells whether torch.func is active.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._C import (
    DisableTorchFunctionSubclass,
    _current_graph_task_id,
    _ForceDispatchKeyGuard,
    _functorch,
    _set_grad_enabled,
)
from torch._ops import OpOverload

from tsfunc.bridge import compiled
from tsfunc.bridge.tracers.batch_tracer import BatchLevel, BatchTracer, rewrap, wrap
from tsfunc.bridge.tracers.decompositions import (
    is_outside,
    lifting_factories,
    required_decomposition,
)
from tsfunc.bridge.tracers.function_registry import (
    BATCHING,
    METHODS,
    WRITERS,
    Stage,
    registry,
)
from tsfunc.bridge.tracers.operators import (
    TorchOperator,
    add_rule_listener,
    operator_of,
    operators_by_id,
)
from tsfunc.bridge.tracers.parsing import Form, find_form, has_forms
from tsfunc.bridge.tracers.torch_state import (
    TorchState,
    any_autocast,
    below_autograd,
    in_dispatch_modes,
    is_casting,
)
from tsfunc.bridge.tracers.tracer import (
    NO_KWARGS,
    SlottedTracer,
    call_below_function,
    function_handler,
)
from tsfunc.dispatch.state import State, tls
from tsfunc.ops.registry import Rule
from tsfunc.ops.splitting import BatchChanged
from tsfunc.ops.tensor_iterator import pointwise

maybe_functorch_level = _functorch.maybe_current_level
is_grad_enabled = torch.is_grad_enabled
is_inference_mode_enabled = torch.is_inference_mode_enabled
_Tensor = torch.Tensor
_strided = torch.strided
_shape_of = torch.Tensor.shape.__get__  # type: ignore[attr-defined]
_INT = frozenset({int})

_OPTIONS = frozenset({int, float, bool, str, type(None), tuple, list})
_NO_TENSORS = _OPTIONS | {complex, torch.dtype, torch.device, torch.layout, torch.memory_format}

# Classes of tracers other than SlottedBatchTracer.
KINDS: set[type] = set()

# Types of other arguments of a call on a fast path; a call with any other type goes through C++.
_PLAIN = frozenset({
    int, float, bool, complex, str, type(None), slice, type(Ellipsis), torch.Tensor,
    torch.nn.Parameter, torch.dtype, torch.memory_format,
})  # fmt: skip
_ITEMS = frozenset({int, slice, type(None), type(Ellipsis)})
_SEQUENCES = frozenset({list, tuple, torch.Size})


def unwrap_args(args: Sequence[Any]) -> tuple[Any, list[Any], list[Any], bool] | None:
    """Return level, values, batch dims and whether any is batched, for a plain call; else None."""
    level: Any = None
    batched = False
    values = []
    dims = []
    for arg in args:
        kind = type(arg)
        if kind is SlottedBatchTracer or kind in KINDS:
            if level is None:
                level = arg.dispatch_level
            elif arg.dispatch_level is not level:
                return _unwrap_for_innermost(args)
            bdim = arg.bdim
            if bdim is not None:
                batched = True
            values.append(arg.value)
            dims.append(bdim)
        elif kind in _PLAIN or (kind in _SEQUENCES and _ITEMS.issuperset(map(type, arg))):
            values.append(arg)
            dims.append(None)
        elif kind in _SEQUENCES:
            inner = unwrap_args(arg)
            if inner is None:
                return None  # plain tensors only
            if level is not None and inner[0] is not level:
                return _unwrap_for_innermost(args)
            level = inner[0]
            batched = batched or inner[3]
            values.append(inner[1])
            dims.append(inner[2] if inner[3] else None)
        else:
            return None
    return None if level is None else (level, values, dims, batched)


def _unwrap_for_innermost(args: Sequence[Any]) -> tuple[Any, list[Any], list[Any], bool] | None:
    """Do the same with several vmaps: for the innermost, tracers of the others are values."""
    level: Any = None
    for arg in args:
        kind = type(arg)
        if kind is SlottedBatchTracer or kind in KINDS:
            own = arg.dispatch_level
            if level is None or own.depth > level.depth:
                level = own
            elif own.depth == level.depth and own is not level:
                return None  # one level replaces the other
        elif kind not in _PLAIN and (
            kind not in _SEQUENCES or not _ITEMS.issuperset(map(type, arg))
        ):
            return None
    values, dims = [], []
    for arg in args:
        kind = type(arg)
        own = (kind is SlottedBatchTracer or kind in KINDS) and arg.dispatch_level is level
        values.append(arg.value if own else arg)
        dims.append(arg.bdim if own else None)
    return level, values, dims, any(dim is not None for dim in dims)


def _is_users_error(level: BatchLevel, values: Sequence[Any]) -> bool:
    """Return True if an error is the user's, and must be raised at once.

    A second attempt would call hooks again. Empty batches (NOTE [no examples]) and sparse batches
    have their own rules, and are tried again.
    """
    return level.batch_size != 0 and not any(
        isinstance(value, torch.Tensor) and value.layout is not _strided for value in values
    )


# NOTE [direct calls]
# Most calls are elementwise, with one tracer, with two tracers of one batch dim, or with a tracer
# and a number. Such a call runs on the values directly, without a batching rule.
def same_batching(args: Sequence[Any]) -> tuple[BatchLevel, int, tuple[Any, ...]] | None:
    """Return the level, batch dim and values of a direct call, or None."""
    x = args[0]
    if type(x) is not SlottedBatchTracer:
        return None
    level, at = x.dispatch_level, x.bdim
    if at is None:
        return None
    count = len(args)
    if count == 1:
        return level, at, (x.value,)
    if count != 2:
        return None
    y = args[1]
    kind = type(y)
    if kind is SlottedBatchTracer:
        value, other = x.value, y.value
        if y.dispatch_level is not level or y.bdim != at or value.dim() != other.dim():
            return None
        return level, at, (value, other)
    return (level, at, (x.value, y)) if kind is float or kind is int else None


def direct_call(func: Callable[..., Any], types: Any, args: Sequence[Any]) -> Any:
    """Handle a pointwise function; NotImplemented leaves the call to ``call_rule``."""
    alike = same_batching(args)
    if alike is None:
        return NotImplemented
    level, at, values = alike
    state = tls.state
    if not level.alive or state.remap_args is not None or maybe_functorch_level() is not None:
        return NotImplemented
    if level.autograd:
        # C++ records; no operand is from an outer level, which would need a lift.
        if func in METHODS or is_inference_mode_enabled():
            return NotImplemented
        return call_below_function(func, types, args, NO_KWARGS)
    if level._restores or not state.plain:
        return NotImplemented
    tls.state = level.outer
    try:
        out = func(*values)
    except BatchChanged:
        return NotImplemented
    except Exception:
        if _is_users_error(level, values):
            raise
        return NotImplemented
    finally:
        tls.state = state
    return wrap(out, at, level)


def _is_tracer(value: Any) -> bool:
    kind = type(value)
    return kind is SlottedBatchTracer or kind in KINDS


def _recorded(
    func: Callable[..., Any],
    level: BatchLevel,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    values: Sequence[Any],
) -> Any:
    """Make a call that C++ records at the level; NotImplemented if operands need a lift."""
    if tls.state.remap_args is not None or maybe_functorch_level() is not None:
        return NotImplemented
    if func in METHODS or is_inference_mode_enabled():
        return NotImplemented
    for arg, value in zip(args, values, strict=True):
        if arg is value and isinstance(value, torch.Tensor):
            if level.forward or type(value) not in _PLAIN or value.requires_grad:
                return NotImplemented  # NOTE [operands of outer levels]
        elif arg is not value and type(value) is list and not all(map(_is_tracer, arg)):
            return NotImplemented
    return call_below_function(func, (), tuple(args), kwargs)  # hop accepts no list


def call_rule(
    rule: Rule, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] = NO_KWARGS
) -> Any:
    """Handle a call without C++; NotImplemented if the call is not plain."""
    taken = unwrap_args(args)
    if taken is None or not taken[3]:
        return NotImplemented
    level, values, dims, _ = taken
    if level._restores or not level.alive:
        return NotImplemented
    if level.autograd:
        return _recorded(func, level, args, kwargs, values)
    if any_autocast():
        return NotImplemented  # autocast kernels come first: NOTE [autocast and rules]
    state = tls.state
    if state.remap_args is not None:
        found = state.remap_args(func, args, kwargs)
        if found is not None:
            args, kwargs = found
            taken = unwrap_args(args)
            if taken is None or not taken[3] or taken[0].autograd:
                return func(*args, **kwargs)
            level, values, dims, _ = taken
    if not state.plain or maybe_functorch_level() is not None:
        return NotImplemented
    tls.state = level.outer
    try:
        out = rule(func, level, dims, values, kwargs)
    except BatchChanged:
        return NotImplemented  # C++ brings the tracers here again
    except Exception:
        if _is_users_error(level, values):
            raise
        return NotImplemented
    finally:
        tls.state = state
    if out is NotImplemented:
        return out
    if type(func) is OpOverload:
        found, dims = out
        if type(found) is _Tensor:  # no fast path writes
            return wrap(found, dims, level, found.storage_offset())
        return rewrap(operator_of(func), level, args, kwargs, found, dims)
    return wrap(out[0], out[1], level, out[2] if len(out) == 3 else None)


# The forms of calls of functions without a rule of their own, by the argument types and keyword
# names; None for a function whose calls have no forms.
FORMS: dict[Any, dict[Any, Form | None] | None] = {}
_UNKNOWN: Any = object()


def _forms_of(func: Any) -> dict[Any, Form | None] | None:
    """Return the known forms of a function's calls; None if the function has none."""
    forms = FORMS.get(func, _UNKNOWN)
    if forms is _UNKNOWN:
        apart = func in WRITERS or (func in METHODS and not _for_numbers(func))
        forms = FORMS[func] = {} if has_forms(func) and not apart else None
    return forms  # type: ignore[no-any-return]


def _for_numbers(func: Any) -> bool:
    """True if the function's method serves only calls in which a tensor stands for a number."""
    rule = registry.find(Stage.METHOD, func)
    return rule is not None and rule.numbers


def _new_form(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Form | None:
    """Return the form of a call, as torch's parsers determine it."""
    others = (*args[1:], *kwargs.values())
    if _for_numbers(func) and any(isinstance(value, torch.Tensor) for value in others):
        return None
    form = find_form(func, args, kwargs)
    if form is not None:
        form.decomposition = required_decomposition(form.op)
    return form


def _parsed_call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Handle a call of any operator: NOTE [forms of calls] in ``parsing``."""
    forms = _forms_of(func)
    if forms is None:
        return NotImplemented
    for arg in args:
        if type(arg) in _SEQUENCES and arg:
            arg = arg[0]
        if _is_tracer(arg):
            if arg.dispatch_level.autograd:
                return _recorded_call(func, args, kwargs)
            break
    kinds: Any = tuple(map(type, args))
    if kwargs:
        kinds = (*kinds, *kwargs, *map(type, kwargs.values()))
    form = forms.get(kinds, _UNKNOWN)
    if form is _UNKNOWN:
        if in_dispatch_modes() or maybe_functorch_level() is not None:
            return NotImplemented
        form = forms[kinds] = _new_form(func, args, kwargs)
    if form is None or any_autocast():  # autocast kernels come first: NOTE [autocast and rules]
        return NotImplemented
    op = form.op
    found = form.arguments(args, kwargs)
    if found is None:
        return NotImplemented
    if op.direct_rule is not None:
        out = call_rule(op.direct_rule, op.overload, *found)
    elif form.decomposition is not None:
        out = _call_decomposition(form.decomposition, *found)
    else:
        return NotImplemented
    if type(out) is SlottedBatchTracer or out is NotImplemented:
        return out
    if form.result is not None:
        return form.result(out)
    return tuple(out) if type(out) is list else out


def _recorded_call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Do the same if autograd is recorded at the level."""
    taken = unwrap_args(args)
    if taken is None or not _NO_TENSORS.issuperset(map(type, kwargs.values())):
        return NotImplemented
    level = taken[0]
    if level._restores or not level.alive or not level.autograd:
        return NotImplemented
    return _recorded(func, level, args, kwargs, taken[1])


def _call_decomposition(
    decomposition: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Run a decomposition on the tracers of a level, with other tensors lifted to the level."""
    taken = unwrap_args(args)
    if taken is None or not taken[3]:
        return NotImplemented
    level, state = taken[0], tls.state
    if level.autograd or level._restores or not level.alive or not level.batch_size:
        return NotImplemented
    if not state.plain or state.remap_args is not None or maybe_functorch_level() is not None:
        return NotImplemented
    lifted = [_lifted(arg, level) for arg in args]
    try:
        with level.at_own_level(), lifting_factories(level):
            return decomposition(*lifted, **kwargs)
    except BatchChanged:
        return NotImplemented


def _lifted(value: Any, level: BatchLevel) -> Any:
    if type(value) is list:
        return [_lifted(item, level) for item in value]
    return level.lift(value) if is_outside(value, level) else value


def _call_overload(op: TorchOperator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Handle a call by a rule of an inner level or by a mode below autograd."""
    if op.direct_rule is None or op.written or below_autograd():
        return NotImplemented  # a written tensor becomes a tracer first (``writes``)
    if kwargs and not (
        op.keywords.issuperset(kwargs) and _NO_TENSORS.issuperset(map(type, kwargs.values()))
    ):
        return NotImplemented
    for arg in args:
        if type(arg) is SlottedBatchTracer:
            if not tls.state.mask & arg.dispatch_level.bits:
                return NotImplemented  # the level's own kernel calls outwards
            break
    if op.function is not None and not kwargs:
        out = direct_call(op.overload, (), args)
        if out is not NotImplemented:
            return out
    return call_rule(op.direct_rule, op.overload, args, kwargs)


# NOTE [fast paths]
# ``Operator.call`` finds the kernel of the highest bit of the key set. If all tracers of a call
# belong to one vmap's level, no key is included or excluded by hand, and no kernel is registered
# for the operator, then this is the kernel of the Batch column, which runs a batching rule. These
# two functions run the rule without the steps between.
def _dispatch_to_rule(
    op: TorchOperator, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Run the rule of an operator without the table; NotImplemented if the call is not plain."""
    alike = same_batching(args) if op.function is not None and not kwargs else None
    if alike is None:
        taken = unwrap_args(args)
        if taken is None or (op.ruled and not taken[3]):
            return NotImplemented
        level, values, dims, batched = taken
    else:
        level = alike[0]
    if not level.alive or level._restores:
        return NotImplemented
    if op.composite and is_casting():
        return NotImplemented  # the guard of the level handles it: NOTE [autocast and rules]
    state = tls.state
    if not state.plain or not state.mask & level.bits:
        return NotImplemented
    grad = is_grad_enabled()
    if not grad and is_inference_mode_enabled():
        return NotImplemented  # the guard of the level handles it
    captured = level.torch_state
    if captured.in_modes:
        return NotImplemented  # the guard of the level handles modes
    guards = captured.guards  # free guards; other threads may pop them meanwhile
    try:
        guard = guards.pop()
    except IndexError:
        guard = _ForceDispatchKeyGuard(captured.include, captured.exclude)
    guard.__enter__()
    want = captured.grad_mode and (grad or (not captured.quiet and _current_graph_task_id() != -1))
    if want is not grad:
        _set_grad_enabled(want)
    tls.state = level.kernel_state(level.bit)
    try:
        if alike is not None:
            out = op.function(*alike[2])
        elif batched:
            out = rule(op.overload, level, dims, values, kwargs)
        else:
            out = op.overload(*values, **kwargs), None
    except BatchChanged:
        return NotImplemented  # the table brings the tracers to the same rule again
    except Exception:
        if _is_users_error(level, () if alike is None else alike[2]):
            raise
        return NotImplemented
    finally:
        tls.state = state
        if want is not grad:
            _set_grad_enabled(grad)
        guard.__exit__(None, None, None)
        guards.append(guard)
    if alike is not None:
        return wrap(out, alike[1], level)
    if out is NotImplemented:
        return out
    found, dims = out
    if type(found) is _Tensor:
        return wrap(found, dims, level, found.storage_offset())
    return rewrap(op, level, args, kwargs, found, dims)


# NOTE [queries of autograd]
# Each step of forward mode asks whether tangents have the sizes of their primals, and makes
# aliases of both. Tracers answer these calls directly: the sizes are in the tracer, and an alias
# at a level is another tracer of the same value.
def _sizes(x: Any) -> Any:
    shape = _shape_of(x)
    return shape if _INT.issuperset(map(type, shape)) else None


def _is_same_size(args: Sequence[Any]) -> Any:
    if not tls.state.plain:
        return NotImplemented
    with DisableTorchFunctionSubclass():
        mine, other = _sizes(args[0]), _sizes(args[1])
    return NotImplemented if mine is None or other is None else mine == other


def _has_same_storage_numel(args: Sequence[Any]) -> Any:
    return True if tls.state.plain else NotImplemented


def _alias(args: Sequence[Any]) -> Any:
    x, state = args[0], tls.state
    if type(x) is not SlottedBatchTracer or not state.plain:
        return NotImplemented
    level = x.dispatch_level
    if not level.alive or level._restores or not state.mask & level.bits:
        return NotImplemented
    return x.aliased_here()


for _name, _answer in (
    ("is_same_size", _is_same_size),
    ("_has_same_storage_numel", _has_same_storage_numel),
    ("alias", _alias),
    ("detach", _alias),
):
    operator_of(getattr(torch.ops.aten, _name).default).by_tracers = _answer


def _takes_options(func: Any) -> bool:
    rule = registry.find(Stage.BATCHING, func)
    return rule is not None and rule.options


class FastBatchTracer(BatchTracer):
    """A batched tensor whose handlers have fast paths."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if not kwargs:
            kwargs = NO_KWARGS
            if type(func) is OpOverload:
                out = _call_overload(operator_of(func), args, kwargs)
            elif (rule := BATCHING.get(func)) is not None:
                out = direct_call(func, types, args) if rule is pointwise else NotImplemented
                if out is NotImplemented:
                    out = call_rule(rule, func, args)
            else:
                out = _parsed_call(func, args, kwargs)
        elif type(func) is OpOverload:
            out = _call_overload(operator_of(func), args, kwargs)
        elif (rule := BATCHING.get(func)) is None or not _takes_options(func):
            out = _parsed_call(func, args, kwargs)
        elif _OPTIONS.issuperset(map(type, kwargs.values())):
            out = call_rule(rule, func, args, kwargs)
        else:
            out = NotImplemented
        return function_handler(func, types, args, kwargs) if out is NotImplemented else out

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        op = operator_of(func)
        if op.by_tracers is not None:
            out = op.by_tracers(args)
            if out is not NotImplemented:
                return out
        if not kwargs:
            kwargs = NO_KWARGS
        if op.direct_rule is not None and (
            not kwargs or _NO_TENSORS.issuperset(map(type, kwargs.values()))
        ):
            out = _dispatch_to_rule(op, op.direct_rule, args, kwargs)
            if out is not NotImplemented:
                return out
        return op.call(args, kwargs, True)


class SlottedBatchTracer(SlottedTracer, FastBatchTracer):
    """The tracer class that :func:`wrap` makes."""

    __slots__ = ()


class PromotedBatchTracer(FastBatchTracer):
    """A user's tensor that became a tracer (``writes``), with the layout of a plain tensor."""

    __slots__ = ()


BatchTracer.layouts = PromotedBatchTracer, SlottedBatchTracer
# Messages show one name for all of these classes.
SlottedBatchTracer.__name__ = PromotedBatchTracer.__name__ = BatchTracer.__name__
KINDS.add(PromotedBatchTracer)


def _use_compiled() -> None:
    """Let the compiled handlers, if they are built, take calls before the Python ones."""
    handlers = compiled.load()
    if handlers is None:
        return
    # C class methods that replace those SlottedBatchTracer inherits.
    functions, dispatch = handlers.setup({
        "tracer": SlottedBatchTracer, "level": BatchLevel, "state": State,
        "torch_state": TorchState, "operator": TorchOperator, "tls": tls, "size": torch.Size,
        "function_handler": FastBatchTracer.__dict__["__torch_function__"].__func__,
        "dispatch_handler": FastBatchTracer.__dict__["__torch_dispatch__"].__func__,
        "overload_type": OpOverload, "operators": operators_by_id,
        "rules": BATCHING, "forms": FORMS, "methods": METHODS, "pointwise": pointwise,
        "call_below": call_below_function, "plain_types": _PLAIN, "item_types": _ITEMS,
        "wrap": wrap, "alias": _alias, "same_size": _is_same_size,
        "same_numel": _has_same_storage_numel, "batch_changed": BatchChanged,
    })  # fmt: skip
    SlottedBatchTracer.__torch_function__ = functions  # type: ignore[method-assign]
    SlottedBatchTracer.__torch_dispatch__ = dispatch  # type: ignore[method-assign]
    add_rule_listener(lambda op: handlers.install(op.name, op))


_use_compiled()
