"""Bodies of control flow, traced into graphs of their own.

NOTE [bodies]
While a body is traced a :class:`BodyLevel` stands in the place of the trace's level, with a graph
of its own. What the body uses of the surroundings' tensors, passed in or closed over, becomes an
input of that graph, once for each tensor; so a body is a function of tensors alone. Levels inside
of the trace (a vmap in a specialized function) need nothing more: their tracers are made anew
around the inputs.

Where such a level, or the trace's own, records autograd, the body's inputs are cut from its graph:
the whole operator becomes one node of it: NOTE [control flow in programs] in ``control_flow``.

NOTE [levels set apart]
Where the examples of a vmap inside of the trace choose each for itself, the body is traced for one
example: the vmap's level is *set apart*, a :class:`SetApart` in its place, and a tensor that is
batched there becomes an input without that dim. The call is one for a batch of calls then, whose
operands have these dims in front, and runs lanes when the program runs (NOTE [lanes] in ``lanes``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.overrides import TorchFunctionMode

from tsfunc.bridge.control.attempts import NotApart
from tsfunc.bridge.control.taking_over import takes_over
from tsfunc.bridge.grad.linear_maps import Layout, is_recorded
from tsfunc.bridge.trace.tracing import TraceLevel, TraceTracer, is_traced, traced_as
from tsfunc.bridge.tracers.batch_tracer import BatchLevel, BatchTracer, wrap
from tsfunc.bridge.tracers.grad_level import GradTracer
from tsfunc.bridge.tracers.questions import unasked
from tsfunc.bridge.tracers.tracer import StandIn, Tracer, TracerLevel, seen_here
from tsfunc.dispatch.keys import DispatchKey
from tsfunc.dispatch.state import Level, capturing, tls, using


@dataclass(frozen=True)
class Layer:
    """One of the tracers that a value is wrapped in: its level, and its batch dim."""

    level: TracerLevel
    bdim: int | None


@dataclass(frozen=True)
class Wrapping:
    """The tracers around a traced value, the innermost level's first."""

    layers: tuple[Layer, ...] = ()

    def around(self, value: torch.Tensor) -> torch.Tensor:
        """A value wrapped so."""
        for layer in reversed(self.layers):
            if isinstance(layer.level, BatchLevel):
                value = wrap(value, layer.bdim, layer.level)
            else:
                value = layer.level.lift(value)
        return value


def peeled(value: Any) -> tuple[Any, Wrapping]:
    """The traced value inside of tracers, and the tracers around it."""
    layers = []
    while isinstance(value, BatchTracer | GradTracer):
        layers.append(Layer(value.dispatch_level, getattr(value, "bdim", None)))
        value = value.value
    return value, Wrapping(tuple(layers))


class SetApart(Level, StandIn):
    """What is active in the place of a vmap that the code which runs knows nothing of.

    NOTE [levels set apart]. It keeps the depths of the levels inside, and has no tensors.
    """

    __slots__ = ("parent",)

    def __init__(self, parent: BatchLevel) -> None:
        self.stand_in_for(parent)
        self.parent = parent
        self.key = DispatchKey.Trace  # what is drawn is drawn by the body
        self._kernel_states = {}

    @property
    def alive(self) -> bool:  # type: ignore[override]
        return self.parent.alive

    @property
    def root(self) -> TracerLevel:
        return self.parent.root

    def into(self, value: Any) -> Any:
        return value


class Apart:
    """The vmaps that the bodies of one call are traced without: NOTE [levels set apart].

    Attributes:
        levels: the vmaps, by depth.
    """

    def __init__(self, levels: Iterable[BatchLevel] = ()) -> None:
        self.levels = {level.depth: level for level in levels}
        self._arranged: dict[int, tuple[Any, Any]] = {}

    def wrapping(self, layers: dict[int, Layer]) -> Wrapping:
        """Return the layout of a tensor with these layers: the dims of these vmaps come first."""
        found: list[Layer] = []
        before = 0  # dims of vmaps that are set apart, of levels further in
        for depth, layer in sorted(layers.items(), reverse=True):
            own = depth in self.levels
            if layer.bdim is not None:
                layer = Layer(layer.level, 0 if own else before)
                before += own
            found.append(layer)
        return Wrapping(tuple(found))

    def around_result(self, wrapping: Wrapping) -> Wrapping:
        """The layout of a call's result, of which a body returns one without the vmaps' dims."""
        layers = {layer.level.depth: layer for layer in wrapping.layers}
        return self.wrapping(layers | {d: Layer(x, 0) for d, x in self.levels.items()})

    def flags(self, wrapping: Wrapping) -> list[bool]:
        """For each of the vmaps, the outermost first, whether a tensor is batched there."""
        depths = {layer.level.depth for layer in wrapping.layers if layer.bdim is not None}
        return [depth in depths for depth in sorted(self.levels)]

    def without(self, wrapping: Wrapping) -> Wrapping:
        """Return the layout of a body's input, from that of the operand."""
        return Wrapping(
            tuple(
                layer if layer.bdim is None else Layer(layer.level, 0)
                for layer in wrapping.layers
                if layer.level.depth not in self.levels
            )
        )

    def arranged(self, value: Any, levels: Sequence[Level]) -> Any:
        """Return a tensor in the layout of an operand: every batch dim in front.

        All bodies of a call get the same object.
        """
        known = self._arranged.get(id(value))
        if known is None:
            made = arranged(value, self.wrapping(needed_layers(value, levels)))
            known = self._arranged[id(value)] = value, made
            self._arranged.setdefault(id(made), (made, made))
        return known[1]


class BodyLevel(TraceLevel, StandIn):
    """A trace's level while a body of control flow is traced.

    Attributes:
        parent: the level that it stands in for.
        taken: for each tensor from outside of the body (by id) that tensor, and what stands for
            it inside.
        inputs: the tensors from outside, in the order of the graph's inputs.
        around: the levels that are active where the body is called.
        surroundings: the dispatch state there.
        numbers: the symbolic numbers from outside, whose inputs come after these.
        apart: the vmaps that are set apart.
    """

    __slots__ = (
        "_numbers",
        "_own_numbers",
        "apart",
        "around",
        "inputs",
        "numbers",
        "parent",
        "surroundings",
        "taken",
    )

    def __init__(self, parent: TraceLevel, apart: Apart) -> None:
        self.stand_in_for(parent)
        self.parent = parent
        self.apart = apart
        self.surroundings = tls.state
        self.around = tls.state.levels
        self.graph = torch.fx.Graph()
        self.lifted = {}
        old = parent.inner
        self.inner = old.with_levels((*old.levels[:-1], self))
        self._kernel_states = {}
        self.taken: dict[int, tuple[Any, Any]] = {}
        self.inputs: list[torch.Tensor] = []
        self.numbers: list[Any] = []
        self._numbers: dict[Any, torch.fx.Node] = {}
        self._own_numbers: dict[Any, torch.fx.Node] = {}
        self.sizes = self._number

    @property
    def alive(self) -> bool:  # type: ignore[override]
        """As long as the trace."""
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
        return self.into(value)

    def into(self, value: Any) -> Any:
        """What stands inside of the body for a tensor; others than tensors are as they are.

        Of a body that is traced inside of this one, whose code calls kernels of levels that were
        entered in this one, values come that are of that body alone.
        """
        if not isinstance(value, torch.Tensor):
            return value
        level = _traced_level(value)
        if level is self or (isinstance(level, BodyLevel) and level.within(self)):
            return value
        if level is None and self.is_of_functorch(value):
            return value  # what it is made of has been taken in
        known = self.taken.get(id(value))
        if known is None:
            known = value, self.input(value)
            self.taken[id(value)] = known
        return known[1]

    def input(  # type: ignore[override]
        self, value: torch.Tensor, like: torch.Tensor | None = None
    ) -> Any:
        """Return a new input of the body's graph for a tensor from outside.

        Args:
            value: the tensor; the call passes it as an operand, with its batch dims in front.
            like: a fake tensor that the input looks like, instead of the operand.
        """
        outer = self.outside(value)
        with self._surroundings():
            outer = self.apart.arranged(outer, self.around)
        inner, wrapping = peeled(outer)
        if not isinstance(inner, TraceTracer):
            return outer  # nothing of it is traced: a constant of a level inside
        node = self.graph.placeholder(f"x{len(self.inputs)}")
        self.inputs.append(outer)
        like = inner.value if like is None else like
        if any(self.apart.flags(wrapping)):
            like = self._one_of(like, sum(self.apart.flags(wrapping)))
        return self.apart.without(wrapping).around(traced_as(like, node, self, inner.tracks))

    def _one_of(self, value: torch.Tensor, dims: int) -> torch.Tensor:
        """What looks as a value does at one example of the vmaps that are set apart."""
        if value.layout is not torch.strided:
            raise NotApart(next(iter(self.apart.levels.values())).origin.whole)
        with unasked(self.fake):
            return self.fake_like(value, value.shape[dims:], value.stride()[dims:])

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        """The levels are those where the body is called, and not lanes that the body runs on."""
        outside = {level.depth: level for level in self.around}
        lanes = [
            level for level in tls.state.levels if level is not outside.get(level.depth, level)
        ]
        if not any(isinstance(level, BatchLevel | SetApart) for level in lanes):
            yield
            return

        def seen(levels: Sequence[Level]) -> tuple[Level, ...]:
            return tuple(
                [
                    outside.get(level.depth, level)
                    if isinstance(level, BatchLevel | SetApart)
                    else level
                    for level in levels
                ]
            )

        with capturing(self.around, seen), using(self.surroundings):
            yield

    def argument(self, value: torch.Tensor) -> Any:
        """An input for what the body is called with, of which nothing but the type is known.

        A fake tensor may know its data, where the function has made it of numbers, and remembers
        which symbol it was read as. A loop calls its body with other tensors than the first ones.
        """
        inner, _ = peeled(self.outside(value))
        if not isinstance(inner, TraceTracer) or inner.value.is_conj() or inner.value.is_neg():
            return self.input(value)
        known = inner.value
        with unasked(self.fake):
            return self.input(value, self.fake_like(known, known.shape, known.stride()))

    def outside(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor as the surroundings of the body see it."""
        if isinstance(self.parent, BodyLevel):
            value = self.parent.into(value)
        inner, wrapping = peeled(value)
        # While a kernel runs, the levels that are active are those outside of its own.
        own = isinstance(inner, TraceTracer) and inner.dispatch_level.root is self.root
        if isinstance(value, Tracer) and not own and not is_traced(value):
            return self.parent.lift(value)  # of a level outside of the trace
        traced = isinstance(inner, TraceTracer)
        if not traced and (self.apart.levels or not wrapping.layers or _any_recorded(value)):
            return wrapping.around(self.parent.lift(inner))
        return value

    def _number(self, value: Any) -> Any:
        """A symbolic number as a node: an input of the graph, a constant, or of its own data."""
        born = self.symbols.born_in(self.graph, value.node.expr)
        if born:
            return self._own_number(value, born)
        outer = self.parent.sizes(value)
        if not isinstance(outer, torch.fx.Node):
            return outer
        node = self._numbers.get(outer)
        if node is None:
            node = self._numbers[outer] = self.graph.placeholder(f"n{len(self.numbers)}")
            for key in ("expr", "number", "value"):
                if key in outer.meta:
                    node.meta[key] = outer.meta[key]
            self.numbers.append(outer)
        return node

    def _own_number(self, value: Any, born: dict[Any, torch.fx.Node]) -> torch.fx.Node:
        """A number that is worked out of what the body has found in data (these symbols)."""
        expr, symbols = value.node.expr, self.symbols
        if expr not in self._own_numbers:
            rest = {s: self._number(symbols.number_of(s)) for s in expr.free_symbols - born.keys()}
            self._own_numbers[expr] = symbols.write(self.graph, expr, {**rest, **born})
            self._own_numbers[expr].meta["number"] = value
        return self._own_numbers[expr]

    def is_own_size(self, size: Any) -> bool:
        """Whether a size depends on what the body has found in data."""
        known = isinstance(size, int)
        return not known and bool(self.symbols.born_in(self.graph, size.node.expr))


def _traced_level(value: Any) -> Any:
    inner, _ = peeled(value)
    return inner.dispatch_level if isinstance(inner, TraceTracer) else None


def needed_layers(value: Any, levels: Sequence[Level] | None = None) -> dict[int, Layer]:
    """The tracers that a tensor can't do without, by depth, each with its batch dim first.

    One that a level differentiates by has the batch dims of all vmaps outside of it: its gradient
    is another one for each of their examples. ``levels`` are those that are active, if not those
    of the code that runs.
    """
    if not isinstance(value, Tracer):
        return {}
    _, wrapping = peeled(value)
    needed = {
        layer.level.depth: Layer(layer.level, None if layer.bdim is None else 0)
        for layer in wrapping.layers
        if layer.bdim is not None or not isinstance(layer.level, BatchLevel)
    }
    if _any_recorded(value):
        own = {layer.level.depth: layer.level for layer in wrapping.layers}
        for level in tls.state.levels if levels is None else levels:
            if isinstance(level, BatchLevel) and level.depth <= value.dispatch_level.depth:
                needed[level.depth] = Layer(own.get(level.depth, level), 0)
    return needed


def wrapped_in(layers: dict[int, Layer]) -> Wrapping:
    """Tracers of these levels, the innermost first."""
    return Wrapping(tuple(layer for _, layer in sorted(layers.items(), reverse=True)))


def arranged(value: Any, wrapping: Wrapping) -> Any:
    """A tensor with the tracers, and the batch dims, that are wanted (NOTE [layouts]).

    It must not be batched at a level that is not among them.
    """
    layers = []
    inner = value
    while isinstance(inner, BatchTracer | GradTracer):
        layers.append(inner)
        inner = inner.value
    depths = {layer.level.depth for layer in wrapping.layers}
    if any(tracer.dispatch_level.depth not in depths for tracer in layers):
        for tracer in reversed(layers):
            if tracer.dispatch_level.depth in depths:
                layer = Layer(tracer.dispatch_level, getattr(tracer, "bdim", None))
                inner = Wrapping((layer,)).around(inner)
        value = inner
    return Layout([(layer.level, layer.bdim) for layer in wrapping.layers]).of(value)


def _any_recorded(value: Any) -> bool:
    while isinstance(value, Tracer):
        if is_recorded(value):
            return True
        value = getattr(value, "value", None)
    return False


class _InBody(TorchFunctionMode):
    """The arguments of every call of the body are taken in."""

    def __init__(self, level: BodyLevel) -> None:
        super().__init__()
        self.level = level

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not takes_over(func):
            return func(*args, **kwargs)
        args = tuple([self._taken(arg) for arg in args])
        return func(*args, **{name: self._taken(arg) for name, arg in kwargs.items()})

    def _taken(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return seen_here(value)
        if type(value) in (list, tuple):
            return type(value)(self._taken(item) for item in value)
        return value


@contextmanager
def in_body(level: BodyLevel) -> Iterator[None]:
    """What the block calls is recorded in the body's graph."""
    state = tls.state
    places = {id(other): SetApart(other) for other in level.apart.levels.values()}

    def seen(levels: Sequence[Level]) -> tuple[Level, ...]:
        return tuple([places.get(id(other), other) for other in levels])

    first = min(level.apart.levels, default=0)
    inside = [other for other in state.levels if places and other.depth > first]
    levels = tuple(level if other is level.parent else other for other in seen(state.levels))
    inner = state.with_levels(levels)
    level.bodies.append(level)
    try:
        with (
            capturing(inside, seen),
            using(inner),
            _InBody(level),
            level.symbols.in_body(level.graph, level.sizes),
        ):
            yield
    finally:
        level.bodies.pop()


def current_trace() -> TraceLevel | None:
    """The trace, or the body of one, that the code that runs is recorded in."""
    for level in reversed(tls.state.levels):
        if isinstance(level, TraceLevel):
            return level
    return None
