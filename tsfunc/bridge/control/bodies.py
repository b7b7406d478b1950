"""Bodies of control flow, traced into graphs of their own.

NOTE [bodies]
While a body is traced, a :class:`BodyLevel` with a graph of its own replaces the trace's level.
Each outer tensor that the body uses, passed in or closed over, becomes one input of that graph, so
that the body is a function of tensors alone. For levels inside of the trace (a vmap in a traced
function) the inputs are wrapped in tracers of the same levels. The states that these levels have
captured have the body's level too, so that functions that they call (the rule of a ``custom_vmap``,
a backward pass) record control flow in the body.

A tensor has one layout wherever a body takes or returns it: its batch dims come first, the
outermost vmap's before the others'. ``HiddenVmaps.stack`` is the only code that defines this.

If the trace's level, or one inside of it, records autograd, the body's inputs are cut from its
graph, and the whole operator becomes one node of it: NOTE [control flow in programs] in
``control_flow``.

NOTE [hidden vmaps]
If each example of a vmap inside of the trace makes its own choice, the body is traced for one
example: a :class:`HiddenVmap` replaces the vmap's level, and a tensor that is batched there becomes
an input without the batch dim. The call is a batch of calls, whose operands have these dims in
front. When the program runs, each body runs on an active subset (NOTE [active subsets] in
``subsets``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.fx
from torch.overrides import TorchFunctionMode

from tsfunc.bridge.batch.selections import Selection
from tsfunc.bridge.control.attempts import CannotUnbatch
from tsfunc.bridge.control.subset_arguments import is_remapped
from tsfunc.bridge.grad.linear_maps import Layout, is_recorded
from tsfunc.bridge.trace.trace_level import TraceLevel, TraceTracer, traced_as
from tsfunc.bridge.tracers.batch_tracer import BatchLevel, BatchTracer
from tsfunc.bridge.tracers.draw_keys import preserve_draw_counts
from tsfunc.bridge.tracers.grad_level import GradTracer
from tsfunc.bridge.tracers.level_proxies import LevelProxy, as_seen_by_current_level
from tsfunc.bridge.tracers.nesting import is_of_active_level, nested_tracers
from tsfunc.bridge.tracers.operators import map_items
from tsfunc.bridge.tracers.torch_state import recording_from_here
from tsfunc.bridge.tracers.tracer import Tracer, TracerLevel
from tsfunc.bridge.tracers.tracer_stack import Frame, TracerStack, unwrap_all
from tsfunc.bridge.tracers.user_queries import suppress_guards
from tsfunc.dispatch.keys import DispatchKey
from tsfunc.dispatch.state import Level, replacing_captured_levels, tls, using


class HiddenVmap(Level, LevelProxy):
    """Replaces the level of a vmap that the traced body does not see: NOTE [hidden vmaps].

    The proxy keeps the depths of inner levels, and has no tracers.
    """

    __slots__ = ("parent",)

    def __init__(self, parent: BatchLevel) -> None:
        self.copy_from(parent)
        self.parent = parent
        self.key = DispatchKey.Trace  # the body records what it draws
        self._kernel_states = {}

    @property
    def alive(self) -> bool:  # type: ignore[override]
        return self.parent.alive

    @property
    def root(self) -> TracerLevel:
        return self.parent.root

    def remap(self, value: Any) -> Any:
        return value


class HiddenVmaps:
    """The vmaps that the bodies of one call do not see, and the layout of its operands."""

    def __init__(self, levels: Iterable[BatchLevel] = ()) -> None:
        self.levels = {level.depth: level for level in levels}
        self._batch_first: dict[int, tuple[Any, Any]] = {}

    def layout(self, frames: dict[int, Frame]) -> TracerStack:
        """Return the layout of a tensor with these frames: the dims of these vmaps come first."""
        stacked: list[Frame] = []
        before = 0  # dims of the hidden vmaps further in
        for depth, frame in sorted(frames.items(), reverse=True):
            is_hidden = depth in self.levels
            if frame.bdim is not None:
                frame = Frame(frame.level, 0 if is_hidden else before)
                before += is_hidden
            stacked.append(frame)
        return TracerStack(tuple(stacked))

    def result_layout(self, stack: TracerStack) -> TracerStack:
        """Return the layout of a call's result, from that of a body's result."""
        frames = {frame.level.depth: frame for frame in stack.frames}
        return self.layout(frames | {d: Frame(x, 0) for d, x in self.levels.items()})

    def batched_flags(self, stack: TracerStack) -> list[bool]:
        """Return for each hidden vmap, the outermost first, True if a tensor is batched there."""
        depths = {frame.level.depth for frame in stack.frames if frame.bdim is not None}
        return [depth in depths for depth in sorted(self.levels)]

    def input_layout(self, stack: TracerStack) -> TracerStack:
        """Return the layout of a body's input, from that of the operand."""
        return TracerStack(
            tuple(
                frame if frame.bdim is None else Frame(frame.level, 0)
                for frame in stack.frames
                if frame.level.depth not in self.levels
            )
        )

    def rewrap_as(self, value: Any, levels: Sequence[Level]) -> Any:
        """Return a tensor in the layout of an operand: every batch dim in front.

        All bodies of a call get the same object.
        """
        entry = self._batch_first.get(id(value))
        if entry is None:
            batch_first = rewrap_as(value, self.layout(needed_frames(value, levels)))
            entry = self._batch_first[id(value)] = value, batch_first
            self._batch_first.setdefault(id(batch_first), (batch_first, batch_first))
        return entry[1]


class NumberNodes:
    """The symbolic numbers of a graph that is a part of another one, as nodes.

    Numbers from outside are inputs, whose names start with ``n``.

    Args:
        outside: returns the node of a number in the other graph, or its value if it is known.

    Attributes:
        nodes: the nodes of the outer numbers, in the order of their inputs.
    """

    def __init__(self, level: TraceLevel, outside: Callable[[Any], Any]) -> None:
        self.nodes: list[torch.fx.Node] = []
        self._level, self._outside = level, outside
        self._inputs: dict[torch.fx.Node, torch.fx.Node] = {}
        self._computed: dict[Any, torch.fx.Node] = {}

    def __call__(self, value: Any) -> Any:
        """Return the node of a number: an input, a constant, or read from data."""
        defined = self._level.symbols.nodes_in(self._level.graph, value.node.expr)
        if defined:
            return self._from_data(value, defined)
        outer = self._outside(value)
        if not isinstance(outer, torch.fx.Node):
            return outer
        node = self._inputs.get(outer)
        if node is None:
            node = self._inputs[outer] = self._level.graph.placeholder(f"n{len(self.nodes)}")
            for key in ("expr", "number", "value"):
                if key in outer.meta:
                    node.meta[key] = outer.meta[key]
            self.nodes.append(outer)
        return node

    def _from_data(self, value: Any, defined: dict[Any, torch.fx.Node]) -> torch.fx.Node:
        """Return the node of a number that depends on symbols which the graph reads from data."""
        expr, symbols = value.node.expr, self._level.symbols
        if expr not in self._computed:
            rest = {s: self(symbols.number_of(s)) for s in expr.free_symbols - defined.keys()}
            self._computed[expr] = symbols.write(self._level.graph, expr, {**rest, **defined})
            self._computed[expr].meta["number"] = value
        return self._computed[expr]


class BodyLevel(TraceLevel, LevelProxy):
    """Replaces a trace's level while a body of control flow is traced.

    Attributes:
        parent: the level that it replaces.
        taken: for each outer tensor (by id) that tensor, and its input in the body.
        inputs: the outer tensors, in the order of the graph's inputs.
        around: the active levels where the body is called.
        outer_state: the dispatch state there.
        number_nodes: records symbolic numbers; its outer numbers are inputs after the tensors.
        hidden: the vmaps that the body does not see.
        pulls_back: True if the body has called a pullback that was made outside of it.
    """

    number_nodes: NumberNodes
    __slots__ = ("around", "hidden", "inputs", "outer_state", "parent", "pulls_back", "taken")

    def __init__(self, parent: TraceLevel, hidden: HiddenVmaps) -> None:
        self.copy_from(parent)
        self.parent = parent
        self.hidden = hidden
        self.pulls_back = False
        self.outer_state = tls.state
        self.around = tls.state.levels
        self.graph = torch.fx.Graph()
        self.lifted = {}
        old = parent.inner
        self.inner = old.replace(levels=(*old.levels[:-1], self))
        self._kernel_states = {}
        self.taken: dict[int, tuple[Any, Any]] = {}
        self.inputs: list[torch.Tensor] = []
        self.number_nodes = NumberNodes(self, parent.number_nodes)

    @property
    def alive(self) -> bool:  # type: ignore[override]
        """True as long as the trace is active."""
        return self.parent.alive

    @property
    def root(self) -> TracerLevel:
        return self.parent.root

    def within(self, other: Level) -> bool:
        level: Level = self
        while isinstance(level, BodyLevel) and level is not other:
            level = level.parent
        return level is other

    def lift(self, value: torch.Tensor) -> Any:
        return self.remap(value)

    def is_outside(self, value: torch.Tensor) -> bool:
        """True if a tensor is one of the trace that was made outside of the body."""
        level = _traced_level(value)
        return level is not None and not (isinstance(level, BodyLevel) and level.within(self))

    def outermost_without(self, values: Sequence[torch.Tensor]) -> BodyLevel | None:
        """Return the outermost body around this one, or this one, that all tensors are outside of.

        None if a tensor was made in this body.
        """
        if not values or not all(map(self.is_outside, values)):
            return None
        outer = (
            self.parent.outermost_without(values) if isinstance(self.parent, BodyLevel) else None
        )
        return outer or self

    def tensors_outside(self) -> dict[torch.fx.Node, torch.Tensor]:
        return {
            tracer.node: tensor
            for tensor, tracer in self.taken.values()
            if isinstance(tracer, TraceTracer) and not isinstance(tensor, Tracer)
        }

    def tensor_of_input(self, node: torch.fx.Node) -> torch.Tensor | None:
        for tensor, seen in self.taken.values():
            inner, _ = unwrap_all(seen)
            if isinstance(inner, TraceTracer) and inner.node is node:
                return cast("torch.Tensor", tensor)
        return None

    def remap(self, value: Any) -> Any:
        """Return the body's input for a tensor; values that are not tensors are unchanged.

        A nested body calls kernels of levels that were entered in this body; values that belong to
        the nested body are unchanged too.
        """
        if not isinstance(value, torch.Tensor):
            return value
        level = _traced_level(value)
        if level is self or (isinstance(level, BodyLevel) and level.within(self)):
            return value
        if level is None and self.is_of_functorch(value):
            return value  # a tensor of torch.func; the body's inputs are its parts
        entry = self.taken.get(id(value))
        if entry is None:
            outer = self.outside(value)
            entry = self.taken.get(id(outer)) or (outer, self.input(value))
            self.taken[id(outer)] = entry
            self.taken[id(value)] = value, entry[1]
        return entry[1]

    def input(  # type: ignore[override]
        self, value: torch.Tensor, like: torch.Tensor | None = None
    ) -> Any:
        """Return a new input of the body's graph for a tensor from outside.

        Args:
            value: the tensor; the call passes it as an operand, with its batch dims in front.
            like: a fake tensor that the input looks like, instead of the operand.
        """
        outer = self._operand(value)
        inner, stack = unwrap_all(outer)
        if not isinstance(inner, TraceTracer):
            return outer  # a constant of an inner level
        node = self.graph.placeholder(f"x{len(self.inputs)}")
        self.inputs.append(outer)
        like = inner.value if like is None else like
        if any(self.hidden.batched_flags(stack)):
            like = self._one_of(like, sum(self.hidden.batched_flags(stack)))
        return self.hidden.input_layout(stack).wrap(traced_as(like, node, self, inner.tracks))

    def _one_of(self, value: torch.Tensor, dims: int) -> torch.Tensor:
        """Return a fake tensor like one example of a value that hidden vmaps batch."""
        if value.layout is not torch.strided:
            raise CannotUnbatch(next(iter(self.hidden.levels.values())).original.root)
        with suppress_guards(self.fake):
            return self.fake_like(value, value.shape[dims:], value.stride()[dims:])

    @contextmanager
    def around_the_call(self) -> Iterator[None]:
        """Context manager: the active levels are those where the body is called.

        These levels are neither bodies nor subsets.
        """
        outside = {level.depth: level for level in self.around}

        def seen(levels: Sequence[Level]) -> tuple[Level, ...]:
            return tuple([outside.get(level.depth, level) for level in levels])

        if seen(tls.state.levels) == tls.state.levels:
            yield
            return
        with replacing_captured_levels(self.around, seen), using(self.outer_state):
            yield

    def argument(self, value: torch.Tensor) -> Any:
        """Return an input for an argument of the body, with only the type of the argument.

        A fake tensor may know its data, if the function made it from numbers, and the symbol that
        it was read as. Both hold for the first call of a loop's body only.
        """
        outer = self._operand(value)
        inner, _ = unwrap_all(outer)
        if not isinstance(inner, TraceTracer) or inner.value.is_conj() or inner.value.is_neg():
            return self.input(value)
        fake = inner.value
        with suppress_guards(self.fake):
            return self.input(outer, self.fake_like(fake, fake.shape, fake.stride()))

    def _operand(self, value: torch.Tensor) -> torch.Tensor:
        """Return the operand of the call for a tensor from outside: its batch dims come first."""
        outer = self.outside(value)
        with self.around_the_call():
            operand: torch.Tensor = self.hidden.rewrap_as(outer, self.around)
        return operand

    def outside(self, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor as the code around the body sees it."""
        remap_args = self.outer_state.remap_args
        if remap_args is not None and isinstance(value, Tracer):
            with self.around_the_call():
                value = remap_args.remapped(value)
        if isinstance(self.parent, BodyLevel):
            value = self.parent.remap(value)
        inner, stack = unwrap_all(value)
        # While a kernel runs, only levels outside of its own are active.
        is_of_trace = isinstance(inner, TraceTracer) and inner.dispatch_level.root is self.root
        if isinstance(value, Tracer) and not is_of_trace and not is_of_active_level(value):
            return self.parent.lift(value)  # the tracer belongs to a level outside of the trace
        traced = isinstance(inner, TraceTracer)
        if not traced and (self.hidden.levels or not stack.frames or _any_recorded(value)):
            return stack.wrap(self.parent.lift(inner))
        return value

    def is_own_size(self, size: Any) -> bool:
        """True if a size depends on data that the body has read."""
        is_fixed = isinstance(size, int)
        return not is_fixed and bool(self.symbols.nodes_in(self.graph, size.node.expr))


def _traced_level(value: Any) -> Any:
    inner, _ = unwrap_all(value)
    return inner.dispatch_level if isinstance(inner, TraceTracer) else None


def needed_frames(value: Any, levels: Sequence[Level] | None = None) -> dict[int, Frame]:
    """Return the tracers that a tensor needs, by depth, each with its batch dim in front.

    A tensor that a level differentiates by has the batch dims of all vmaps outside of that level:
    its gradient differs from example to example. ``levels`` are the active levels; by default the
    current ones.
    """
    if not isinstance(value, Tracer):
        return {}
    _, stack = unwrap_all(value)
    needed = {
        frame.level.depth: Frame(frame.level, None if frame.bdim is None else 0)
        for frame in stack.frames
        if frame.bdim is not None or not isinstance(frame.level, BatchLevel)
    }
    recording = [x.dispatch_level.depth for x in nested_tracers(value) if is_recorded(x)]
    if recording:
        levels_of_stack = {frame.level.depth: frame.level for frame in stack.frames}
        for level in tls.state.levels if levels is None else levels:
            if isinstance(level, BatchLevel) and level.depth <= max(recording):
                needed[level.depth] = Frame(levels_of_stack.get(level.depth, level), 0)
    return needed


def rewrap_as(value: Any, stack: TracerStack) -> Any:
    """Return a tensor with these tracers and batch dims (NOTE [layouts] in ``linear_maps``).

    The tensor must not be batched at a level that is not among them.
    """
    frames = []
    inner = value
    while isinstance(inner, BatchTracer | GradTracer):
        frames.append(inner)
        inner = inner.value
    depths = {frame.level.depth for frame in stack.frames}
    if any(tracer.dispatch_level.depth not in depths for tracer in frames):
        for tracer in reversed(frames):
            if tracer.dispatch_level.depth in depths:
                frame = Frame(tracer.dispatch_level, getattr(tracer, "bdim", None))
                inner = TracerStack((frame,)).wrap(inner)
        value = inner
    return Layout([(frame.level, frame.bdim) for frame in stack.frames]).of(value)


def _any_recorded(value: Any) -> bool:
    return any(map(is_recorded, nested_tracers(value)))


class _BodyMode(TorchFunctionMode):
    """Makes the outer tensors among the arguments of every call inputs of the body."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_remapped(func):
            return func(*args, **kwargs)
        args = tuple([map_items(_as_seen_in_body, arg) for arg in args])
        return func(
            *args, **{name: map_items(_as_seen_in_body, arg) for name, arg in kwargs.items()}
        )


def _as_seen_in_body(value: Any) -> Any:
    """Return a tensor as the body sees it; another value unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    if type(value) is Selection:
        return value.remapped(_as_seen_in_body)
    remap_args = tls.state.remap_args
    if remap_args is None or not isinstance(value, Tracer):
        return as_seen_by_current_level(value)
    return remap_args.remapped(value)  # a subset in the body: NOTE [writes in subsets]


@contextmanager
def in_body(level: BodyLevel) -> Iterator[None]:
    """Context manager: calls are recorded in the body's graph."""
    state = tls.state
    places: dict[int, Level] = {id(x): HiddenVmap(x) for x in level.hidden.levels.values()}
    places[id(level.parent)] = level

    def seen(levels: Sequence[Level]) -> tuple[Level, ...]:
        return tuple([places.get(id(other), other) for other in levels])

    inside = [other for other in state.levels if other.depth > level.depth]
    inner = state.replace(levels=seen(state.levels), remap_args=None)
    recording = [x for x in state.levels if isinstance(x, TracerLevel) and x.depth >= level.depth]
    level.bodies.append(level)
    # A mask keeps the name of the number of its elements, which has no value in another graph.
    epoch, level.fake.epoch = level.fake.epoch, next(_epochs)
    try:
        with (
            replacing_captured_levels(inside, seen),
            using(inner),
            preserve_draw_counts(),
            recording_from_here([x.torch_state for x in recording]),
            _BodyMode(),
            level.symbols.in_body(level.graph, level.number_nodes),
        ):
            yield
    finally:
        level.fake.epoch = epoch
        level.bodies.pop()


_epochs = itertools.count(1)
