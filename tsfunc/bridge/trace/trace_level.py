"""A trace that is being recorded: its level, its tracers, and the kernels that record its calls.

A traced tensor has a fake value (shape, dtype, device, no data) and a node of a torch.fx graph.
The Specialize kernel computes the results of an operator on fake values. The Trace kernel runs the
Specialize kernel, and records the call. Both kernels see the operators as the user called them:
autograd is outside of the level, so composite operators stay whole, and a program can be
differentiated, vmapped and traced again.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
import torch.fx
from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass, _functorch
from torch._ops import OpOverloadPacket
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from tsfunc import pytrees
from tsfunc.bridge.sizes.fake_mode import new_fake
from tsfunc.bridge.sizes.fake_results import FakeCache, MetadataKey, fixed_metadata, results_of
from tsfunc.bridge.sizes.shape_rules import take_sizes
from tsfunc.bridge.sizes.symbolic_numbers import call_past_parser, shape_node, size_node, symbols_in
from tsfunc.bridge.sizes.symbols import Symbols
from tsfunc.bridge.trace.data_dependence import data_dependent_message
from tsfunc.bridge.trace.graph_nodes import base_node, name_of, named_graph
from tsfunc.bridge.trace.property_reads import PROPERTY_READERS, read_guarded_property
from tsfunc.bridge.trace.repeated_calls import RecordedCall, RepeatedCalls
from tsfunc.bridge.trace.repeated_draws import draw_once
from tsfunc.bridge.trace.tensor_guards import (
    TensorGuards,
    attribute,
    check_layout,
    class_of,
    contiguous,
    dict_of,
    forwards_query,
    has_plain_inputs,
    hash_of,
    offset,
    set_class,
    stride,
)
from tsfunc.bridge.trace.tracer_copies import tracer_copy
from tsfunc.bridge.tracers.checks import refused_outcome
from tsfunc.bridge.tracers.dtensors import is_dtensor
from tsfunc.bridge.tracers.functorch import map_inner_tensor
from tsfunc.bridge.tracers.nesting import is_of_active_level, tracer_of
from tsfunc.bridge.tracers.operators import TorchOperator, map_items, operator_of
from tsfunc.bridge.tracers.registrations import register_dispatch_handlers
from tsfunc.bridge.tracers.torch_state import without_factory_keys
from tsfunc.bridge.tracers.tracer import (
    NO_KWARGS,
    BackwardPass,
    Tracer,
    TracerLevel,
    function_handler,
)
from tsfunc.bridge.tracers.user_queries import SYMBOLIC, UserLines, has_symbols, suppress_guards
from tsfunc.dispatch import DispatchKey, Operator, register_fallback, running_level
from tsfunc.dispatch.state import innermost_of
from tsfunc.errors import DataDependentError
from tsfunc.ops.registry import Args, Kwargs
from tsfunc.user_code import source_line, user_location


class BackwardHandler(Protocol):
    """The backward passes of a traced function, and the ``.grad`` of tensors from outside."""

    def serve(self, call: BackwardPass) -> bool:
        """See ``TracerLevel.allows_backward_outside``."""

    def get(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the ``.grad`` of a tensor from outside as the function sees it."""

    def set(self, tensor: torch.Tensor, value: torch.Tensor | None) -> None:
        """Assign the ``.grad`` of a tensor from outside, for the rest of the trace."""


class TraceLevel(TracerLevel):
    """A trace that is being recorded.

    Attributes:
        graph: the torch.fx graph so far.
        symbols: the symbolic numbers of the trace.
        fake: the mode that computes results.
        repeated: the calls that may be repeated.
        number_nodes: records a symbolic number as a node of the graph, and returns it.
        lines: finds the user's line of a call.
        lifted: the tensors from outside that the function reads, each with its tracer.
        on_lift: is called with each such tracer and tensor.
        effects_from_now: returns a function that returns the function's assignments from now on.
        originals: the tensors that tracers of symbolic sizes are copies of, by their metadata.
        tensor_guards: the guards on properties of tensors other than types and sizes.
        bodies: the levels of the control-flow bodies that are being traced, outermost first.
        of_dtensors: True if inputs or tensors from outside are DTensors.
        records: True if autograd records on inputs and tensors from outside: NOTE [backward passes
            in programs] in ``lifted_tensors``.
        backward_passes: the backward passes of the function that reach these tensors.
        failing: functions that are called with the error if no program is made.
        for_torch: True if the graph is written in torch's operators, which make one choice for a
            whole batch (NOTE [unreadable choices] in ``transforms/control/cond``) and have no
            derivatives of the user's.
    """

    __slots__ = (
        "backward_passes", "bodies", "effects_from_now", "failing", "fake", "for_torch", "graph",
        "lifted", "lines", "number_nodes", "of_dtensors", "on_lift", "originals", "records",
        "repeated", "results", "symbols", "tensor_guards",
    )  # fmt: skip

    def __init__(self, name: str, symbols: Symbols, records: bool = False) -> None:
        super().__init__(DispatchKey.Trace, name)
        register_dispatch_handlers()
        self.records = records
        self.autograd += records
        self.backward_passes: BackwardHandler | None = None
        self.failing: list[Callable[[BaseException], None]] = []
        self.for_torch = False
        self.graph = named_graph()
        self.symbols = symbols
        self.fake: FakeTensorMode = symbols.fake
        self.results = FakeCache(self.fake)
        self.originals: dict[MetadataKey, torch.Tensor] = {}
        self.number_nodes: Callable[[Any], Any] = symbols.record
        self.lines = UserLines()
        self.lifted: dict[int, tuple[torch.Tensor, TraceTracer]] = {}
        self.on_lift: Callable[[TraceTracer, torch.Tensor], None] = lambda tracer, tensor: None
        self.effects_from_now: Callable[[], Callable[[], Sequence[Any]]] = lambda: tuple
        self.bodies: list[TraceLevel] = []
        self.repeated = RepeatedCalls(self, self.bodies, self.results, TraceTracer, record_on_nodes)
        self.of_dtensors = False
        self.tensor_guards = TensorGuards(name)

    def handles_factory(self, name: str, random: bool) -> bool:
        return True

    def size_text(self, size: Any) -> str:
        """Return a size in the user's names."""
        return self.symbols.spell_size(size)

    def fake_like(
        self, sample: torch.Tensor, shape: Sequence[Any], strides: Sequence[Any]
    ) -> torch.Tensor:
        """Return a fake tensor with the sample's dtype, device, and lazy conj or neg bits."""
        if type(sample) is not torch.Tensor and is_dtensor(sample):
            self.of_dtensors = True
        with DisableTorchFunction(), without_factory_keys():
            tensor = new_fake(self.fake, shape, strides, sample.dtype, sample.device)
            if not (sample.is_conj() or sample.is_neg()):
                return tensor
            with self.fake:
                tensor = tensor.conj() if sample.is_conj() else tensor
                return torch._neg_view(tensor) if sample.is_neg() else tensor

    def record(
        self, target: Callable[..., Any], args: Sequence[Any], kwargs: Any = None, callers: int = 1
    ) -> torch.fx.Node:
        """Record a call in the graph, with the user's line.

        Args:
            callers: the number of the callers, beginning with the direct one, that are this
                package's.
        """
        # Graph.call_function derives the name from the target, and both functions look for symbolic
        # numbers in the arguments. Node's setters of arguments look up the node by its target.
        node = self.graph.create_node("call_function", target, name=name_of(target))
        node._update_args_kwargs(tuple(args), kwargs or {})
        node.meta["location"] = self.lines.here(1 + callers)[0]
        return node

    def input(self, name: str, value: torch.Tensor, requires_grad: bool) -> TraceTracer:
        """Add an input to the graph with the metadata of a fake value."""
        return self._leaf(traced_as(value, self.graph.placeholder(name), self, requires_grad))

    def _leaf(self, tracer: TraceTracer) -> TraceTracer:
        """Return the tracer of a tensor from outside; a leaf if autograd records at the level."""
        if self.records and tracer.tracks:
            with DisableTorchFunctionSubclass():
                tracer.requires_grad_()
        return tracer

    def on_backward_pass(self) -> None:
        self.tensor_guards.of_backward = True

    def allows_backward_outside(self, call: BackwardPass) -> bool:
        self.on_backward_pass()
        return self.backward_passes is not None and self.backward_passes.serve(call)

    def lift(self, value: torch.Tensor) -> TraceTracer:
        """Lift a tensor from outside: the program reads it at every call, as an input."""
        entry = self.lifted.get(id(value))
        if entry is None:
            check_layout(value)
            like = self.fake_like(value, value.shape, value.stride())
            wanted = f"lifted_{len(self.lifted)}"
            node = self.graph.create_node("get_attr", wanted, name=wanted)
            node.target = node.name  # another name if a parameter has this one
            entry = value, self._leaf(traced_as(like, node, self, value.requires_grad))
            self.lifted[id(value)] = entry
            self.on_lift(entry[1], value)
        return entry[1]

    def tensors_outside(self) -> dict[torch.fx.Node, torch.Tensor]:
        """Return the plain tensors from outside, by their nodes."""
        return {tracer.node: tensor for tensor, tracer in self.lifted.values()}

    def tensor_of_input(self, node: torch.fx.Node) -> torch.Tensor | None:
        """Return the tensor that an input of the graph stands for; None for another node."""
        samples = {tracer.node: x.sample for tracer, x in self.tensor_guards.arguments}
        return {**samples, **self.tensors_outside()}.get(node)

    def wrap_for_inner_levels(self, value: torch.Tensor) -> torch.Tensor:
        return self.lifted_here(value)

    def lifted_here(self, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor as the traced code sees it: a tensor from outside is lifted.

        A tensor that a vmap of torch.func maps over is lifted too. As a plain tensor it would be
        used at trace time, and its results would be stale once it changes.
        """
        if is_of_active_level(value):
            return value
        if self.is_of_functorch(value):
            return map_inner_tensor(value, self.lifted_here)
        return self.lift(value)

    def is_of_functorch(self, value: torch.Tensor) -> bool:
        """True if a tensor belongs to a torch.func transform inside the trace."""
        depth = _functorch.maybe_get_level(value)
        return depth == _ENDED or depth > self.functorch_depth


def current_trace() -> TraceLevel | None:
    """Return the trace, or the body, that records the current code; None outside of traces."""
    return innermost_of(TraceLevel)


# The types of the numbers that methods read.
_READS = {
    "__bool__": bool, "__complex__": complex, "__float__": float, "__index__": int,
    "__int__": int, "is_nonzero": bool,
}  # fmt: skip

# Operators whose results share memory with an argument and are not views of it to autograd.
_CUT = frozenset({"aten::detach", "aten::_lazy_clone"})


class TraceTracer(Tracer):
    """A tensor with known shape, dtype and device, and without data."""

    __slots__ = ()

    value: torch.Tensor
    node: torch.fx.Node
    tracks: bool
    dispatch_level: TraceLevel

    if not TYPE_CHECKING:  # a type checker would take every attribute for one of the tracer

        @forwards_query
        def __getattr__(self, name: str) -> Any:
            return attribute(self, name)

    @classmethod
    def of_metadata(cls, metadata: MetadataKey, offset: Any, level: TraceLevel) -> TraceTracer:
        """Return a tracer with the metadata of a tensor without symbolic sizes."""
        tracer: TraceTracer = torch.Tensor._make_wrapper_subclass(
            cls, metadata.shape, metadata.strides, offset,
            dtype=metadata.dtype, device=metadata.device,
        )  # fmt: skip
        tracer.dispatch_level = level
        return tracer

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or NO_KWARGS
        read = PROPERTY_READERS.get(func)
        if read is not None:
            out = read_guarded_property(read, args)
            if out is not NotImplemented:
                return out
        if has_symbols(args, kwargs) or isinstance(func, OpOverloadPacket):
            out = call_past_parser(func, args, kwargs)
            if out is not NotImplemented:
                return out
        calls = innermost_calls(args)
        if calls is None:
            return function_handler(func, types, args, kwargs)
        handle = functools.partial(function_handler, func, types, args, kwargs)
        return calls.record_or_repeat(func, args, kwargs, handle, False)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or NO_KWARGS
        calls = innermost_calls(args)
        call = functools.partial(operator_of(func).call, args, kwargs, True)
        return call() if calls is None else calls.record_or_repeat(func, args, kwargs, call, True)

    def aliased_here(self) -> TraceTracer:
        return traced_as(self.value, self.node, self.dispatch_level, False)

    def detached_here(self) -> TraceTracer:
        level = self.dispatch_level
        detach = torch.ops.aten.detach.default
        node = level.record(detach, (self.node,))
        node.meta["op"] = operator_of(detach)
        return traced_as(self.value, node, level, False)

    __class__ = property(class_of, set_class)
    __dict__ = property(dict_of)
    __hash__ = hash_of

    def is_from_outside(self) -> bool:
        return self.node.op != "call_function"

    def base_identity(self) -> torch.fx.Node:
        """Return the node of the tensor that the graph takes views of."""
        return base_node(self.node, _CUT)

    def base_here(self) -> TraceTracer | None:
        node = self.base_identity()
        if node is self.node:
            return None
        return traced_as(node.meta["val"], node, self.dispatch_level, False)

    def is_lazily_conjugated(self) -> bool:
        self.dispatch_level.tensor_guards.guard_all("{}.is_conj()")
        return self.value.is_conj()

    def known_number(self) -> Any:
        """Return the element of a tensor that is computed from sizes and plain numbers alone.

        A number, or a symbolic number; None for any other tensor.
        """
        one = all(type(size) is int and size == 1 for size in self.value.shape)
        if not one or self.value.device.type != "cpu":
            return None
        from tsfunc.bridge.trace.numbers_in_tensors import known_number

        return known_number(self.node, self.dispatch_level.tensors_outside())

    def read(self, name: str) -> Any:
        single = name in ("__bool__", "item") and self.value.numel() == 1
        is_test = single and (name == "__bool__" or self.value.dtype is torch.bool)
        guards = self.dispatch_level.tensor_guards
        if is_test and (refused := refused_outcome(catchable=False)) is not None:
            return self._assume(not refused)
        if name == "item" and single and not self.value.is_complex():
            return operator_of(torch.ops.aten.item.default).call((self,), {}, True)
        if name == "tolist":
            return [x.tolist() for x in self.unbind()] if self.value.dim() else self.item()
        if name in _READS and (number := self.known_number()) is not None:
            return _READS[name](number)
        if name == "__bool__" and single and (answer := guards.answer(self.node)) is not None:
            return bool(answer)
        raise DataDependentError(data_dependent_message(name, self.dispatch_level.name))

    def _assume(self, answer: bool) -> bool:
        """Record an assertion that a test has this outcome: NOTE [checks of arguments]."""
        location = user_location()
        holds = self.reshape(()) if answer else self.reshape(()).logical_not()
        message = f"{location}{source_line(location, ': ')}: the check fails"
        operator_of(torch.ops.aten._assert_async.msg).call((holds, message), {}, True)
        return answer

    def describe(self) -> str:
        level = self.dispatch_level
        if not level.alive:
            return f"TraceTracer(of {level.name}, which has ended)"
        from tsfunc.bridge.tracers.texts import text_of

        return f"TraceTracer({text_of(self)} of {level.name}: {self.node.name})"


TraceTracer.stride = stride  # type: ignore[method-assign]
TraceTracer.is_contiguous = contiguous  # type: ignore[method-assign]
TraceTracer.storage_offset = offset  # type: ignore[method-assign]


def traced_as(
    value: torch.Tensor, node: torch.fx.Node, level: TraceLevel, tracks: bool
) -> TraceTracer:
    """Return the tracer of a node, given its fake value."""
    tracer: TraceTracer | None = None
    with DisableTorchFunction():
        metadata = fixed_metadata(value)
        if metadata is not None:
            tracer = TraceTracer.of_metadata(metadata, value.storage_offset(), level)
        elif has_symbols(value.shape):
            tracer = tracer_copy(TraceTracer, value, level, level.results.metadata, level.originals)
        if tracer is None:
            with suppress_guards(level.fake):  # strides and offsets may be symbolic
                tracer = TraceTracer.make(value, level)
    dtype = value.dtype
    tracer.value = value
    tracer.node = node
    tracer.tracks = tracks and (dtype.is_floating_point or dtype.is_complex)
    node.meta["val"] = value
    node.meta.setdefault("requires_grad", tracer.tracks)  # tracers without derivatives share nodes
    return tracer


def innermost_calls(args: Sequence[Any]) -> RepeatedCalls | None:
    """Return the calls of the trace that a call's first tensor belongs to; None without one."""
    first = args[0] if args else None
    if type(first) is list and first:
        first = first[0]
    return first.dispatch_level.repeated if type(first) is TraceTracer else None


def record_call(
    op: TorchOperator, args: Args, kwargs: Kwargs, results: Any, level: TraceLevel
) -> Any:
    """Record a call of an operator at a level, given its results on fake values."""
    itself = None if op.writes else tracer_of(results, args, level)
    if itself is not None and has_plain_inputs(level.root):
        return itself
    tracks = torch.is_grad_enabled()
    any_tracks = False

    def node_of(arg: Any) -> Any:
        nonlocal any_tracks
        if isinstance(arg, torch.Tensor):
            is_of_level = isinstance(arg, TraceTracer) and arg.dispatch_level is level
            tracer: TraceTracer = arg if is_of_level else level.lift(arg)  # type: ignore[assignment]
            any_tracks = any_tracks or tracer.tracks
            return tracer.node
        return level.number_nodes(arg) if isinstance(arg, SYMBOLIC) else arg

    nodes = [map_items(node_of, arg) for arg in args]
    named = {name: map_items(node_of, arg) for name, arg in kwargs.items()}
    node = _record_node(op, _as_lists(nodes), named, tracks, level)
    fresh = level.symbols.fresh()
    if op.inplace and isinstance(results, torch.Tensor):
        recorded = _record_write(op, args, kwargs, node, level, tracks and any_tracks)
    else:
        recorded = _wrap_results(results, node, level, tracks and any_tracks, args)
    if fresh:
        _register_symbols(recorded, node, level, fresh)
    level.repeated.note(RecordedCall(op, args, kwargs, node, recorded))
    return recorded


def record_on_nodes(
    op: TorchOperator, args: Args, kwargs: Kwargs, results: Any, any_tracks: bool, level: TraceLevel
) -> tuple[torch.fx.Node, Any]:
    """Record a call of an operator that writes nothing; return its node and its results.

    Args:
        args, kwargs: its arguments, with nodes for tensors, and lists for tuples.
        results: its results on fake values.
        any_tracks: True if autograd tracks one of its tensors.
    """
    tracks = torch.is_grad_enabled()
    node = _record_node(op, args, kwargs, tracks, level)
    return node, _wrap_results(results, node, level, tracks and any_tracks)


_CALLERS: Final = 5  # the functions of this package between a call of torch and `level.record`


def _record_node(
    op: TorchOperator, args: Args, kwargs: Kwargs, tracks: bool, level: TraceLevel
) -> torch.fx.Node:
    node = level.record(op.overload, args, kwargs, _CALLERS)
    node.meta["op"] = op
    if not tracks and (level.torch_state.grad_mode or level.torch_state.paused):
        node.meta["no_grad"] = True
    return node


def _register_symbols(results: Any, node: torch.fx.Node, level: TraceLevel, fresh: Any) -> None:
    """Register the nodes of data-dependent numbers in results: NOTE [sizes of data]."""
    node.meta["reads_data"] = True
    items = results if isinstance(results, list | tuple) else [results]
    values = [x.value if isinstance(x, TraceTracer) else x for x in items]
    for symbol, i, dim in symbols_in(values, fresh):
        if dim is None:
            at = _item(node, i, level) if isinstance(results, list | tuple) else node
            level.symbols.register(symbol, at, at.name, values[i])
        else:
            at, size = items[i].node, size_node(level.graph, items[i].node, dim)
            level.symbols.register(symbol, size, f"{at.name}.shape[{dim}]")


def _as_lists(args: Sequence[Any]) -> tuple[Any, ...]:
    """Return arguments with torch.Size and tuples as lists, as graphs store them."""
    return tuple([list(arg) if isinstance(arg, tuple) else arg for arg in args])


def _record_write(
    op: TorchOperator, args: Args, kwargs: Kwargs, node: torch.fx.Node, level: TraceLevel,
    tracks: bool,
) -> Any:  # fmt: skip
    """Record that an operator has written its first argument, and return the argument."""
    is_of_level = isinstance(args[0], TraceTracer) and args[0].dispatch_level is level
    first = args[0] if is_of_level else level.lift(args[0])
    first.tracks = first.tracks or tracks
    node.meta["val"], node.meta["requires_grad"] = first.value, first.tracks
    if op.reshapes and has_symbols((*first.shape, *first.value.shape)):
        take_sizes(first, TraceTracer.make(first.value, level))
        return args[0]
    return op.written_argument(args, kwargs)


def _wrap_results(
    results: Any, node: torch.fx.Node, level: TraceLevel, tracks: bool, args: Args = ()
) -> Any:
    """Return results as tracers, also in nested lists; several results are items of the node."""
    if isinstance(results, torch.Tensor):
        return traced_as(results, node, level, tracks)
    if not isinstance(results, list | tuple):
        return results
    recorded = []
    for i, item in enumerate(results):
        nested = isinstance(item, list | tuple) and any(isinstance(x, torch.Tensor) for x in item)
        itself = tracer_of(item, args, level)
        if itself is not None and has_plain_inputs(level.root):
            item = itself
        elif nested or isinstance(item, torch.Tensor):
            item = _wrap_results(item, _item(node, i, level), level, tracks)
        recorded.append(item)
    return type(results)(recorded)


def _item(node: torch.fx.Node, i: int, level: TraceLevel) -> torch.fx.Node:
    return level.graph.call_function(operator.getitem, (node, i))


_ENDED = -2  # the depth of wrappers of ended transforms, such as cotangents in pullbacks


# --- the kernels of the two keys


@register_fallback(DispatchKey.Specialize)
def specialize_kernel(op: Operator, args: Args, kwargs: Kwargs) -> Any:
    """The column of the Specialize key: compute results on fake values."""
    level = running_level()
    assert isinstance(level, TraceLevel)

    def fake(arg: Any) -> Any:
        if isinstance(arg, TraceTracer) and arg.dispatch_level is level:
            return arg.value
        return level.lift(arg).value if isinstance(arg, torch.Tensor) else arg

    values = tuple([map_items(fake, arg) for arg in args])
    named = {name: map_items(fake, arg) for name, arg in kwargs.items()}
    try:
        if isinstance(op, TorchOperator):
            return level.results.of(op, values, named)
        return results_of(level.fake, op.name, op.outward, False, values, named)
    except (DataDependentOutputException, DynamicOutputShapeException):
        if not level.symbols.allow_data():
            raise DataDependentError(data_dependent_message(op.name, level.name)) from None
    return specialize_kernel(op, args, kwargs)


@register_fallback(DispatchKey.Trace)
def trace_kernel(op: Operator, args: Args, kwargs: Kwargs) -> Any:
    """The column of the Trace key: compute the results, and record the call."""
    level = running_level()
    assert isinstance(level, TraceLevel)
    if not isinstance(op, TorchOperator):  # a program can't name it: it has the operator's parts
        with level.at_own_level():
            return op.run_on_backend(args, kwargs)
    if op.reshapes and isinstance(args[0], TraceTracer):
        with DisableTorchFunction(), level.fake:  # keep the value that the graph's node has
            args[0].value = torch.ops.aten.alias.default(args[0].value)
    if level.bodies and not any(isinstance(x, torch.Tensor) for x in pytrees.leaves_of(args)):
        level = level.bodies[-1]  # the body's code is running, and calls a factory
    if op.random:
        return draw_once(op, args, kwargs, level, _run_and_record)
    return _run_and_record(op, args, kwargs, level)


def _run_and_record(op: TorchOperator, args: Args, kwargs: Kwargs, level: TraceLevel) -> Any:
    out = op.run_key(DispatchKey.Specialize, level, args, kwargs)
    return record_call(op, args, kwargs, out, level)


def node_of_output(value: Any, level: TraceLevel) -> Any:
    """Return the node, or the constant, for a result of the traced function."""
    if isinstance(value, TraceTracer) and value.dispatch_level is level:
        return value.node
    if isinstance(value, torch.Tensor):
        return level.lift(value).node
    if isinstance(value, torch.Size):
        return shape_node(level.graph, [node_of_output(size, level) for size in value])
    return level.number_nodes(value) if isinstance(value, SYMBOLIC) else value
