"""The Trace and Specialize keys: traced tensors, and the kernels that record a program.

A traced tensor has a fake value (shape, dtype, device, no data) and a node of a torch.fx graph.
The Specialize kernel computes the results of an operator on fake values. The Trace kernel runs the
Specialize kernel, and records the call. Both kernels see the operators as the user called them:
autograd is outside of the level, so composite operators stay whole, and a program can be
differentiated, vmapped and traced again.

Private names used here (torch 2.11 to 2.13): ``torch._subclasses.fake_tensor`` has FakeTensorMode,
which runs operators on shapes, and the errors for data-dependent results; ``DisableTorchFunction``
disables function modes in kernels; ``_functorch.maybe_get_level`` is the depth of the torch.func
transform that wrapped a tensor.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import optree
import torch
import torch.fx
from torch._C import DisableTorchFunction, _functorch
from torch._ops import OpOverloadPacket
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode

from tsfunc.bridge.sizes.fake_results import results_of
from tsfunc.bridge.sizes.kept_results import KeptResults
from tsfunc.bridge.sizes.number_nodes import shape_node, size_node
from tsfunc.bridge.sizes.plain_ints import has_symbols, past_the_parser
from tsfunc.bridge.sizes.shape_environment import asking_frame
from tsfunc.bridge.sizes.shape_rules import has_symbols_in, take_sizes
from tsfunc.bridge.sizes.symbolic_numbers import symbols_in
from tsfunc.bridge.sizes.symbols import Symbols
from tsfunc.bridge.trace.asked import (
    ANSWERS,
    VERSION,
    Questions,
    answer_of,
    asked_by_user,
    attribute,
    attributes_of,
    class_of,
    contiguous,
    hashed,
    offset,
    refuse_version,
    set_class,
    stride,
)
from tsfunc.bridge.trace.copies import Copies
from tsfunc.bridge.trace.untyped import AnyValue
from tsfunc.bridge.tracers.attributes import LOOKS
from tsfunc.bridge.tracers.dtensors import is_dtensor
from tsfunc.bridge.tracers.functorch import batch_of_another
from tsfunc.bridge.tracers.methods import refuse_storage
from tsfunc.bridge.tracers.operators import TorchOperator, operator_of
from tsfunc.bridge.tracers.questions import set_aside
from tsfunc.bridge.tracers.torch_state import without_factory_keys
from tsfunc.bridge.tracers.tracer import (
    METHODS,
    NO_KWARGS,
    Tracer,
    TracerLevel,
    door_1,
    metadata,
    written,
)
from tsfunc.bridge.tracers.watching import Lines
from tsfunc.dispatch import (
    DispatchKey,
    Operator,
    current_levels,
    register,
    register_fallback,
    running_level,
)
from tsfunc.dispatch.places import source_of, users_place
from tsfunc.dispatch.refusals import refused_value
from tsfunc.errors import DataDependentError, MissingRuleError

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
T = TypeVar("T")


class TraceLevel(TracerLevel):
    """A trace that is being recorded.

    Attributes:
        graph: the torch.fx graph so far.
        symbols: the symbolic numbers of the trace.
        fake: the mode that computes results.
        results: the cache of results.
        copies: the originals that tracers are copied from.
        sizes: records a symbolic number as a node of the graph.
        lines: finds the user's line of a call.
        lifted: the tensors from outside that the function reads, each with its tracer.
        questions: the questions of the function about tensors, other than types and sizes.
        bodies: the levels of the control-flow bodies that are being traced, outermost first.
        of_dtensors: True if inputs or tensors from outside are DTensors.
    """

    __slots__ = (
        "bodies", "copies", "fake", "graph", "lifted", "lines", "of_dtensors", "questions",
        "results", "sizes", "symbols",
    )  # fmt: skip

    def __init__(self, name: str, symbols: Symbols) -> None:
        super().__init__(DispatchKey.Trace, name)
        self.graph = torch.fx.Graph()
        self.symbols = symbols
        self.fake: FakeTensorMode = symbols.fake
        self.results = KeptResults(self.fake)
        self.copies = Copies(self.fake, self.results.looks)
        self.sizes: Callable[[Any], Any] = symbols.record
        self.lines = Lines()
        self.lifted: dict[int, tuple[torch.Tensor, TraceTracer]] = {}
        self.bodies: list[TraceLevel] = []
        self.of_dtensors = False
        self.questions = Questions(name)

    def sees_factory(self, name: str, random: bool) -> bool:
        return True

    def fake_like(
        self, example: torch.Tensor, shape: Sequence[Any], strides: Sequence[Any]
    ) -> torch.Tensor:
        """Return a fake tensor with the example's dtype, device, and lazy conj or neg bits."""
        self.of_dtensors = self.of_dtensors or is_dtensor(example)
        with DisableTorchFunction(), without_factory_keys(), self.fake:
            made = self.results.new(shape, strides, example.dtype, example.device)
            made = made.conj() if example.is_conj() else made
            return torch._neg_view(made) if example.is_neg() else made

    def record(
        self, target: Callable[..., Any], args: Sequence[Any], kwargs: Any = None
    ) -> torch.fx.Node:
        """Record a call in the graph, with the user's line."""
        node = self.graph.call_function(target, tuple(args), kwargs)
        node.meta["place"] = self.lines.here()[0]
        return node

    def input(self, name: str, value: torch.Tensor, requires_grad: bool) -> TraceTracer:
        """Add an input to the graph with the metadata of a fake value."""
        return traced_as(value, self.graph.placeholder(name), self, requires_grad)

    def lift(self, value: torch.Tensor) -> TraceTracer:
        """Lift a tensor from outside: the program reads it at every call, as an input."""
        known = self.lifted.get(id(value))
        if known is None:
            like = self.fake_like(value, value.shape, value.stride())
            wanted = f"lifted_{len(self.lifted)}"
            node = self.graph.create_node("get_attr", wanted, name=wanted)
            node.target = node.name  # another name if a parameter has this one
            known = value, traced_as(like, node, self, value.requires_grad)
            self.lifted[id(value)] = known
        return known[1]

    def lifted_here(self, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor as the traced code sees it: a tensor from outside is lifted.

        A tensor that a vmap of torch.func maps over is lifted too. As a plain tensor it would be
        used at trace time, and its results would be stale once it changes.
        """
        if is_traced(value):
            return value
        if self.is_of_functorch(value):
            return batch_of_another(value, self.lifted_here)
        return self.lift(value)

    def is_of_functorch(self, value: torch.Tensor) -> bool:
        """True if a tensor belongs to a torch.func transform inside the trace."""
        depth = _functorch.maybe_get_level(value)
        return depth == _ENDED or depth > self.functorch_depth


# Operators whose results share memory with an argument and are not views of it to autograd.
_CUT = frozenset({"aten::detach", "aten::_lazy_clone"})


class TraceTracer(Tracer):
    """A tensor with known shape, dtype and device, and without data."""

    __slots__ = ()

    value: torch.Tensor
    node: torch.fx.Node
    tracks: bool
    dispatch_level: TraceLevel

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or NO_KWARGS
        if func in ANSWERS:
            out = answer_of(func, args)
            if out is not NotImplemented:
                return out
        if has_symbols(args, kwargs) or isinstance(func, OpOverloadPacket):
            out = past_the_parser(func, args, kwargs)
            if out is not NotImplemented:
                return out
        return door_1(func, types, args, kwargs)

    def again(self) -> TraceTracer:
        return traced_as(self.value, self.node, self.dispatch_level, False)

    def cut(self) -> TraceTracer:
        level = self.dispatch_level
        detach = torch.ops.aten.detach.default
        node = level.record(detach, (self.node,))
        node.meta["op"] = operator_of(detach)
        return traced_as(self.value, node, level, False)

    __class__ = property(class_of, set_class)
    __dict__ = property(attributes_of)
    __hash__ = hashed

    def from_outside(self) -> bool:
        return self.node.op != "call_function"

    def origin(self) -> torch.fx.Node:
        """Return the node of the tensor that the graph takes views of."""
        node = self.node
        while node.args and isinstance(source := node.args[0], torch.fx.Node):
            op = node.meta.get("op")
            view = node.target is operator.getitem if op is None else op.is_view or op.inplace
            if not view or (op is not None and op.name in _CUT):
                break
            node = source
        return node

    def read(self, name: str) -> Any:
        if name == "item" and self.value.numel() == 1:
            return operator_of(torch.ops.aten.item.default).call((self,), {}, True)
        if name == "tolist":
            return [x.tolist() for x in self.unbind()] if self.value.dim() else self.item()
        if name == "__bool__" and self.value.numel() == 1:
            refused = refused_value(asking_frame())
            if refused is not None:
                return self._assume(not refused)
        raise DataDependentError(_data_dependent(name, self.dispatch_level))

    def _assume(self, answer: bool) -> bool:
        """Record an assertion that a test has this answer: NOTE [checks of arguments]."""
        place = users_place()
        holds = self.reshape(()) if answer else self.reshape(()).logical_not()
        message = f"{place}{source_of(place, ': ')}: the check fails"
        operator_of(torch.ops.aten._assert_async.msg).call((holds, message), {}, True)
        next(reversed(self.dispatch_level.graph.nodes)).meta["own_check"] = message
        return answer

    def describe(self) -> str:
        level = self.dispatch_level
        if not level.alive:
            return f"TraceTracer(of {level.name}, which has ended)"
        return f"TraceTracer(%{self.node.name} of {level.name}, {self.value!r})"


TraceTracer.__getattr__ = attribute  # type: ignore[attr-defined]
TraceTracer.stride = stride  # type: ignore[method-assign]
TraceTracer.is_contiguous = contiguous  # type: ignore[method-assign]
TraceTracer.storage_offset = offset  # type: ignore[method-assign]


def traced_as(
    value: torch.Tensor, node: torch.fx.Node, level: TraceLevel, tracks: bool
) -> TraceTracer:
    """Return the tracer of a node, given its fake value."""
    tracer: TraceTracer = level.copies.made(TraceTracer, value, level)
    tracer.value = value
    tracer.node = node
    tracer.tracks = tracks and (value.is_floating_point() or value.is_complex())
    node.meta["val"] = value
    node.meta["requires_grad"] = tracer.tracks
    return tracer


def traces_dtensors() -> bool:
    """True if the running code is traced for inputs with DTensors among them."""
    return any(isinstance(x, TraceLevel) and x.of_dtensors for x in current_levels())


def _reads_requires_grad(
    func: Callable[..., Any], types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Return whether autograd will record on the tensor when the program runs."""
    own = metadata(func, types, args, kwargs)
    if own or not isinstance(args[0], TraceTracer):
        return own
    args[0].dispatch_level.questions.of_grad = True
    return args[0].tracks


METHODS[torch.Tensor.requires_grad.__get__] = _reads_requires_grad  # type: ignore[attr-defined]


def _new_tensor(
    func: Callable[..., Any], types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Implement ``x.new_tensor(data)``; torch's own detaches its result in place."""
    if not tracing_here() or not kwargs.keys() <= {"dtype", "device", "requires_grad"}:
        return NotImplemented
    like, data = args
    options = {"dtype": like.dtype, "device": like.device, **kwargs}
    if has_symbols([data], {}):
        return past_the_parser(torch.tensor, (data,), options)
    if not isinstance(data, torch.Tensor):
        return torch.tensor(data, **options)
    requires_grad = options.pop("requires_grad", False)
    made = data.detach().clone().to(**options)
    return made.requires_grad_() if requires_grad else made


METHODS[torch.Tensor.new_tensor] = _new_tensor


@register("aten::detach", DispatchKey.Trace)
def _detach(value: TraceTracer) -> TraceTracer:
    """Implement autograd's own detach at this level; door 1 records the user's detach."""
    return value.again()


@register("aten::_has_same_storage_numel", DispatchKey.Trace)
def _same_storage(value: torch.Tensor, other: torch.Tensor) -> bool:
    """Accept a tangent in forward mode, which asks whether storages have equal sizes."""
    return True


@register_fallback(DispatchKey.Specialize)
def specialize_kernel(op: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The column of the Specialize key: compute results on fake values."""
    level = running_level()
    assert isinstance(level, TraceLevel)

    def fake(arg: Any) -> Any:
        if isinstance(arg, TraceTracer) and arg.dispatch_level is level:
            return arg.value
        return level.lift(arg).value if isinstance(arg, torch.Tensor) else arg

    values, named = optree.tree_map(fake, (tuple(args), dict(kwargs)), none_is_leaf=True)
    try:
        if isinstance(op, TorchOperator):
            return level.results.of(op, values, named)
        return results_of(level.fake, op.name, op.outward, False, values, named)
    except (DataDependentOutputException, DynamicOutputShapeException):
        if not level.symbols.allow_data():
            raise DataDependentError(_data_dependent(op.name, level)) from None
    return specialize_kernel(op, args, kwargs)


def _data_dependent(name: str, level: TraceLevel) -> str:
    place = users_place()
    return (
        f"{level.name}: a traced tensor was used as a Python number or bool ({name}, at "
        f"{place}{source_of(place, ': ')}), but a trace has no data: `if`, `while`, int() and "
        f"float() on it can't be served. {ways_out()}"
    )


def ways_out() -> str:
    """Return the advice for code that needs data in a trace."""
    return (
        "Write a choice with tsfunc.cond(pred, true_fn, false_fn, *operands) or "
        "torch.where(pred, x, y), and use x.item() for a number that goes into tensors and sizes; "
        "what is known of such a number is said with torch._check(n > 0). Or make the value an "
        "argument that is no tensor, which is burnt in."
    )


@register_fallback(DispatchKey.Trace)
def trace_kernel(op: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The column of the Trace key: compute the results, and record the call."""
    level = running_level()
    assert isinstance(level, TraceLevel)
    if not isinstance(op, TorchOperator):
        raise MissingRuleError(
            f"{level.name}: {op.name} is no torch operator, so a program can't name it. Register "
            f"a Trace kernel for it (tsfunc.dispatch.register(op, DispatchKey.Trace))."
        )
    if op.reshapes and isinstance(args[0], TraceTracer):
        with DisableTorchFunction(), level.fake:  # keep the value that the graph's node has
            args[0].value = torch.ops.aten.alias.default(args[0].value)
    if level.bodies and not any(isinstance(x, torch.Tensor) for x in optree.tree_leaves(args)):
        level = level.bodies[-1]  # the body's code is running, and calls a factory
    results = op.run_key(DispatchKey.Specialize, level, args, kwargs)
    tracks = torch.is_grad_enabled()
    any_tracks = False

    def node_of(arg: Any) -> Any:
        nonlocal any_tracks
        if isinstance(arg, torch.Tensor):
            own = isinstance(arg, TraceTracer) and arg.dispatch_level is level
            tracer: TraceTracer = arg if own else level.lift(arg)  # type: ignore[assignment]
            any_tracks = any_tracks or tracer.tracks
            return tracer.node
        return level.sizes(arg) if isinstance(arg, SYMBOLIC) else arg

    nodes, named = optree.tree_map(node_of, (tuple(args), dict(kwargs)), none_is_leaf=True)
    node = level.record(op.overload, _as_lists(nodes), named)
    node.meta["op"] = op
    if level.torch_state.grad_mode and not tracks:
        node.meta["no_grad"] = True
    fresh = level.symbols.fresh()
    recorded = _record_results(op, args, kwargs, results, node, level, tracks and any_tracks)
    if fresh:
        _record_births(recorded, node, level, fresh)
    return recorded


def _record_births(results: Any, node: torch.fx.Node, level: TraceLevel, fresh: Any) -> None:
    """Register the nodes of data-dependent numbers in results: NOTE [sizes of data]."""
    node.meta["reads_data"] = True
    found = results if isinstance(results, list | tuple) else [results]
    values = [x.value if isinstance(x, TraceTracer) else x for x in found]
    for symbol, i, dim in symbols_in(values, fresh):
        if dim is None:
            at = _item(node, i, level) if isinstance(results, list | tuple) else node
            level.symbols.born(symbol, at, at.name, values[i])
        else:
            at = found[i].node
            level.symbols.born(symbol, size_node(level.graph, at, dim), f"{at.name}.shape[{dim}]")


@register("aten::lift_fresh", DispatchKey.Trace)
def _lift_fresh(value: torch.Tensor) -> Any:
    """Return a copy of the tensor that ``torch.tensor(data)`` has just made.

    At every run of a program the function makes a new tensor, which it may write into or return.
    """
    return trace_kernel(operator_of(torch.ops.aten.lift_fresh_copy.default), (value,), {})


def _as_lists(args: Sequence[Any]) -> tuple[Any, ...]:
    """Return arguments with torch.Size and tuples as lists, as graphs store them."""
    return tuple(list(arg) if isinstance(arg, tuple) else arg for arg in args)


def _record_results(
    op: TorchOperator,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    results: Any,
    node: torch.fx.Node,
    level: TraceLevel,
    tracks: bool,
) -> Any:
    if op.inplace and isinstance(results, torch.Tensor):
        own = isinstance(args[0], TraceTracer) and args[0].dispatch_level is level
        first = args[0] if own else level.lift(args[0])
        first.tracks = first.tracks or tracks
        node.meta["val"], node.meta["requires_grad"] = first.value, first.tracks
        if op.reshapes and has_symbols_in([*first.shape, *first.value.shape]):
            take_sizes(first, TraceTracer.make(first.value, level))
            return args[0]
        return written(op, args, kwargs)
    if isinstance(results, torch.Tensor):
        return traced_as(results, node, level, tracks)
    return _items_traced(results, node, level, tracks)


def _items_traced(results: Any, node: torch.fx.Node, level: TraceLevel, tracks: bool) -> Any:
    """Return several results, including nested lists, each traced as an item of the node."""
    if not isinstance(results, list | tuple):
        return results
    found = []
    for i, item in enumerate(results):
        if isinstance(item, torch.Tensor):
            item = traced_as(item, _item(node, i, level), level, tracks)
        elif isinstance(item, list | tuple) and any(isinstance(x, torch.Tensor) for x in item):
            item = _items_traced(item, _item(node, i, level), level, tracks)
        found.append(item)
    return type(results)(found)


def _item(node: torch.fx.Node, i: int, level: TraceLevel) -> torch.fx.Node:
    return level.graph.call_function(operator.getitem, (node, i))


# Calls that read only metadata, or that concern the tensor from outside itself.
_LOOKS = frozenset({*LOOKS, _reads_requires_grad, refuse_storage})


_GRAD = vars(torch.Tensor.__base__)["grad"].__get__


class Lifting(TorchFunctionMode):
    """A function mode that also records the function's own calls on tensors from outside.

    Without the mode, results of such tensors alone would be computed at trace time, and be stale
    once the tensors change.

    Args:
        level: the level that records the calls.
        grad_of: returns the ``.grad`` of a tensor from outside.
    """

    def __init__(
        self,
        level: TraceLevel,
        grad_of: Callable[[torch.Tensor], torch.Tensor | None] = operator.attrgetter("grad"),
    ) -> None:
        super().__init__()
        self.level = level
        self.grad_of = grad_of

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs, given = kwargs or {}, args
        if AnyValue in types:
            return AnyValue.__torch_function__(func, types, args, kwargs)
        if func == _GRAD and not is_traced(args[0]):
            return self.grad_of(args[0])
        if func == VERSION and not is_traced(args[0]) and asked_by_user():
            refuse_version(self.level.questions)
        if METHODS.get(func) not in _LOOKS and func not in ANSWERS:
            args = tuple([self._lifted(arg) for arg in args])
            kwargs = {name: self._lifted(arg) for name, arg in kwargs.items()}
        if has_symbols(args, kwargs):
            out = past_the_parser(func, args, kwargs)
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs)
        # The result of an in-place write is the given tensor: `self.w += 1` assigns the module's
        # own parameter again.
        return given[0] if given and out is args[0] else out

    def _lifted(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.level.lifted_here(value)
        if type(value) in (list, tuple):
            return type(value)(self._lifted(item) for item in value)
        return value


_ENDED = -2  # the depth of wrappers of ended transforms, such as cotangents in pullbacks


def is_traced(value: Any) -> bool:
    """True if a value is a tracer of the trace, or of a transform inside it."""
    if not isinstance(value, Tracer):
        return False
    root = value.dispatch_level.root
    return any(getattr(level, "root", None) is root for level in current_levels())


def tracing_here() -> bool:
    """True if the running code is being traced."""
    return any(isinstance(level, TraceLevel) for level in current_levels())


def surely(guard: Callable[..., T | None], *args: Any) -> T | None:
    """Return the result of a guard; None if it holds only for some sizes of a running trace.

    A program that serves some sizes only would restrict the trace to them.
    """
    levels = current_levels()
    environments = [level.symbols.environment for level in levels if isinstance(level, TraceLevel)]
    with contextlib.ExitStack() as stack:
        asked = [stack.enter_context(set_aside(env)) for env in environments if env is not None]
        found = guard(*args)
    return None if any(asked) else found


def node_of_output(value: Any, level: TraceLevel) -> Any:
    """Return the node, or the constant, for a result of the traced function."""
    if isinstance(value, TraceTracer) and value.dispatch_level is level:
        return value.node
    if isinstance(value, torch.Tensor):
        return level.lift(value).node
    if isinstance(value, torch.Size):
        return shape_node(level.graph, [node_of_output(size, level) for size in value])
    return level.sizes(value) if isinstance(value, SYMBOLIC) else value
