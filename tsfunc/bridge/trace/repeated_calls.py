"""Calls of a trace that repeat an earlier call, recorded without C++ and without the table.

NOTE [repeated calls]
A model calls the same functions on tensors of the same metadata again and again. The path of such a
call through torch's parser, torch's dispatcher, this package's table and the cache of results takes
several times as long as the recording itself. The first call takes that path and is recorded. If it
has recorded one node whose tensors are the call's own, the trace keeps a :class:`RepeatedCall`: the
operator, its arguments in terms of the call's, and the metadata of the results. An equal call then
makes the results and the node from it.

The key of a call is the callable, the metadata of its tensors, which of them are the same tensor,
the other arguments, and the settings that results depend on. The callable is a function of torch
in the function handler, and an operator in the dispatch handler, which autograd calls. A function
in Python (``F.layer_norm``) checks the arguments and calls a C function, which takes as long as the
rest of the call.

Not kept are calls

- that write, draw random numbers, check, or look at data;
- of functions with a function rule, and of operators with a kernel of their own for a trace;
- of functions in Python that may warn, which they do at every call;
- on tensors of other levels, of users' classes, or from outside of the trace;
- of functions, where autograd records at the level or autocast is on;
- while bodies of control flow are traced, ``explain`` watches, or modes or transforms of torch are
  active.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any, Final, NamedTuple

import torch
from torch._C import DisableTorchFunction, _functorch
from torch._ops import OpOverload

from tsfunc.bridge.sizes.fake_results import (
    PLAIN,
    CachedResults,
    FakeCache,
    IncompleteMetadataError,
)
from tsfunc.bridge.tracers.function_registry import METHODS, WRITERS
from tsfunc.bridge.tracers.operators import C_FUNCTIONS, TorchOperator, objects_in, operator_of
from tsfunc.bridge.tracers.torch_state import any_autocast, in_dispatch_modes
from tsfunc.bridge.tracers.tracer import Tracer, TracerLevel
from tsfunc.dispatch import DispatchKey
from tsfunc.dispatch.state import tls

# The types of C functions of torch that call operators.
# The names that functions in Python use to warn.
_WARNING: Final = frozenset({
    "warnings", "_get_softmax_dim", "legacy_get_enum", "legacy_get_string",
})  # fmt: skip
_PLAIN_META: Final = frozenset({"location", "op", "no_grad", "val", "requires_grad"})


class _Operand(NamedTuple):
    """A tensor of a call, by its position among the call's tensors."""

    position: int


class RecordedCall(NamedTuple):
    """A call of an operator that has recorded a node.

    Attributes:
        results: the results, as the kernel returns them.
    """

    op: TorchOperator
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    node: torch.fx.Node
    results: Any


class RepeatedCall(NamedTuple):
    """How an equal call is recorded.

    Attributes:
        args, kwargs: its arguments, with an ``_Operand`` for each tensor.
        filled: the indices of the arguments in ``args`` that have tensors.
        positions: the positions of all these tensors among the call's.
        results: the metadata of its results.
        container: makes the function's results of the operator's; None for a single tensor.
    """

    op: TorchOperator
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    filled: Sequence[int]
    positions: Sequence[int]
    results: CachedResults
    container: Callable[[Any], Any] | None


class RepeatedCalls:
    """The calls of one trace: NOTE [repeated calls].

    Args:
        bodies: the levels of the bodies of control flow that are being traced.
        results: the cache of the level's results.
        record: records a call of an operator on nodes (``record_on_nodes``), under the level's
            guard.
    """

    def __init__(
        self,
        level: TracerLevel,
        bodies: Sequence[TracerLevel],
        results: FakeCache,
        tracer: type[Tracer],
        record: Callable[..., Any],
    ) -> None:
        self._level, self._bodies, self._results = level, bodies, results
        self._tracer, self._record = tracer, record
        self._known: dict[Any, RepeatedCall | None] = {}
        self._watched: list[RecordedCall] | None = None

    def note(self, call: RecordedCall) -> None:
        """Note a recorded call, for the call of a function that is watched."""
        if self._watched is not None:
            self._watched.append(call)

    def repeat(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the results of a function call that repeats an earlier one, or NotImplemented."""
        keyed = self._key(func, args, kwargs, False)
        recorded = None if keyed is None else self._known.get(keyed[0])
        if keyed is None or recorded is None:
            return NotImplemented
        return self._repeat(recorded, keyed[1], False)

    def record_or_repeat(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], call: Callable[[], Any],
        dispatched: bool,
    ) -> Any:  # fmt: skip
        """Return the results of a call.

        Args:
            call: makes it, if it repeats no earlier one.
            dispatched: True in the dispatch handler, which is below autograd and autocast.
        """
        keyed = self._key(func, args, kwargs, dispatched)
        if keyed is None:
            return call()
        key, operands = keyed
        if key in self._known:
            recorded = self._known[key]
            return call() if recorded is None else self._repeat(recorded, operands, dispatched)
        outer, self._watched = self._watched, []
        try:
            out = call()
        finally:
            watched, self._watched = self._watched, outer
            if outer is not None:
                outer += watched
        self._known[key] = self._described(operands, watched, out)
        return out

    # --- the keys

    def _key(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], dispatched: bool
    ) -> tuple[Any, list[Any]] | None:
        """Return the key of a call, and its tensors; None for a call that is not kept."""
        level, state = self._level, tls.state
        if (
            not state.plain
            or state.remap_args is not None
            or self._bodies
            or level.restores
            or level.torch_state.in_modes
            or not level.alive
            or not state.mask & level.key_bit
            or _functorch.maybe_current_level() is not None
            or in_dispatch_modes()
            or torch.is_inference_mode_enabled()
        ):
            return None
        if not dispatched and (level.autograd or level.forward or any_autocast()):
            return None
        if type(func) is OpOverload:
            func = operator_of(func)
        elif func in METHODS or func in WRITERS or not _is_silent(func):
            return None
        parts: list[Any] = [func, dispatched, self._results.settings()]
        operands: list[Any] = []
        if not self._add_key(args, parts, operands):
            return None
        if kwargs:
            parts += kwargs
            if not self._add_key(kwargs.values(), parts, operands):
                return None
        return (tuple(parts), operands) if operands else None

    def _add_key(self, values: Any, parts: list[Any], operands: list[Any]) -> bool:
        """Append the key of arguments, and their tensors; False if they have none."""
        for value in values:
            kind = type(value)
            if kind is self._tracer:
                if value.dispatch_level is not self._level:
                    return False
                try:
                    parts.append(self._results.metadata.known(value.value))
                except IncompleteMetadataError:
                    return False
                if operands:
                    parts.append(next((i for i, x in enumerate(operands) if x is value), -1))
                operands.append(value)
            elif kind is float:
                parts += (value, math.copysign(1.0, value))  # 0.0 and -0.0 are equal
            elif kind in PLAIN and kind is not complex:
                parts += (kind, value)  # 1, 1.0 and True compare equal
            elif kind is list or kind is tuple or kind is torch.Size:
                parts += (kind, len(value))
                if not self._add_key(value, parts, operands):
                    return False
            else:
                return False
        return True

    # --- what is kept

    def _described(
        self, operands: Sequence[Any], watched: Sequence[RecordedCall], out: Any
    ) -> RepeatedCall | None:
        """Return how a call is repeated; None if it can't be."""
        if len(watched) != 1:
            return None
        op, args, kwargs, node, results = watched[0]
        if (
            op.overload.namespace != "aten"
            or op.writes
            or op.random
            or op.asserts
            or not self._results.keeps(op)
            or not _has_no_own_kernel(op)
            or not node.meta.keys() <= _PLAIN_META
        ):
            return None
        container: Callable[[Any], Any] | None = None
        if not isinstance(out, torch.Tensor):
            if not isinstance(out, list | tuple) or not isinstance(results, list | tuple):
                return None
            if not all(type(x) is self._tracer for x in out):
                return None
            if list(map(id, out)) != list(map(id, results)):
                return None
            container = type(out)
        elif out is not results or type(out) is not self._tracer:
            return None
        positions = {id(operand): _Operand(i) for i, operand in reversed([*enumerate(operands)])}
        try:
            arguments = [_with_operands(list(arg) if type(arg) is tuple else arg, positions)
                     for arg in args]  # fmt: skip
            named = {name: _with_operands(arg, positions) for name, arg in kwargs.items()}
            values = [x.value for x in results] if container else results.value
            with DisableTorchFunction():
                described = self._results.described(values, [x.value for x in operands])
        except IncompleteMetadataError:
            return None
        filled = [i for i, arg in enumerate(arguments) if any(objects_in(_Operand, arg))]
        used = sorted(
            {item.position for item in objects_in(_Operand, (*arguments, *named.values()))}
        )
        return RepeatedCall(op, arguments, named, filled, used, described, container)

    def _repeat(self, recorded: RepeatedCall, operands: Sequence[Any], dispatched: bool) -> Any:
        """Record a call that repeats an earlier one, and return its results.

        The dispatch handler restores the grad mode of the level, as it restores the rest of
        torch's state. The function handler is in that mode, since levels inside have restored it,
        and it is outside of autocast and inference mode.
        """
        level = self._level
        op, args, kwargs, filled, positions, described, container = recorded
        nodes = [x.node for x in operands]
        arguments = [*args]
        for i in filled:
            arguments[i] = _fill_operands(args[i], nodes)
        named = (
            {name: _fill_operands(arg, nodes) for name, arg in kwargs.items()} if kwargs else kwargs
        )
        tracks = True in [operands[i].tracks for i in positions]
        guard = level.guard() if dispatched else level.torch_state.keys()
        with guard, DisableTorchFunction():
            values = self._results.make_results(described, [x.value for x in operands])
            node, out = self._record(op, arguments, named, values, tracks, level)
        if self._watched is not None:
            args = [_fill_operands(arg, operands) for arg in args]
            kwargs = {name: _fill_operands(arg, operands) for name, arg in kwargs.items()}
            self._watched.append(RecordedCall(op, args, kwargs, node, out))
        return out if container is None else container(out)


def _is_silent(func: Any) -> bool:
    """True for a function of torch in C++, or in Python without warnings."""
    if type(func) in C_FUNCTIONS:
        return True
    python = type(func) is FunctionType and func.__module__ == "torch.nn.functional"
    return python and not _may_warn(func)


@functools.lru_cache(maxsize=1024)
def _may_warn(func: FunctionType) -> bool:
    return bool(_WARNING.intersection(func.__code__.co_names))


def _has_no_own_kernel(op: TorchOperator) -> bool:
    """True if the columns of the keys serve an operator in a trace."""
    entries = [op.entry(key) for key in (DispatchKey.Trace, DispatchKey.Specialize)]
    return all(entry is not None and entry.kind == "column" for entry in entries)


def _with_operands(arg: Any, positions: Mapping[int, _Operand]) -> Any:
    """Return an argument of an operator with the call's tensors replaced by their positions.

    Raises:
        IncompleteMetadataError: it is a tensor that the call does not have, or a symbolic number.
    """
    if isinstance(arg, torch.Tensor):
        position = positions.get(id(arg))
        if position is None:
            raise IncompleteMetadataError
        return position
    if type(arg) is list or type(arg) is tuple:
        return type(arg)([_with_operands(item, positions) for item in arg])
    if type(arg) not in PLAIN:
        raise IncompleteMetadataError
    return arg


def _fill_operands(arg: Any, operands: Sequence[Any]) -> Any:
    """Return an argument of an operator with the tensors of a call, or their nodes, filled in."""
    kind = type(arg)
    if kind is _Operand:
        return operands[arg.position]
    if kind is list or kind is tuple:
        return kind([_fill_operands(item, operands) for item in arg])
    return arg
