"""Control flow as operators of a program: how a trace, and the levels inside of it, call one.

NOTE [control flow in programs]
The bodies of a call become graphs (NOTE [bodies] in ``bodies``), and the call one node of the
program: a :class:`ControlFlow`, which takes and returns flat tensors when the program runs, and
then does what the user's call does. So a program with a loop is vmapped and differentiated as
the loop is.

The node's tensors are physical values; the batch dims of a vmap inside of the trace are dims of
them. Which tracers belong around them, inputs and results, is kept beside (:class:`Wrapping`).
Where the trace's own level, or one inside of it, differentiates by an input, the call is an
``autograd.Function`` of that level; its backward calls another node, the pullback of this one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch
import torch.fx
from torch.autograd import Function

from tsfunc import pytrees
from tsfunc.bridge.autograd import outside_graph
from tsfunc.bridge.batch_tracer import BatchLevel
from tsfunc.bridge.bodies import (
    BodyLevel,
    Layer,
    Wrapping,
    arranged,
    in_body,
    needed_layers,
    peeled,
    wrapped_in,
)
from tsfunc.bridge.custom_function import torch_apply
from tsfunc.bridge.lanes import is_recorded
from tsfunc.bridge.mapped_function import differentiable
from tsfunc.bridge.operators import TorchOperator
from tsfunc.bridge.tracer import TracerLevel
from tsfunc.bridge.tracing import SYMBOLIC, TraceLevel, traced_as


@dataclass(eq=False)
class Body:
    """A body's graph, and what it takes.

    Attributes:
        name: what the program calls it.
        graph: its operators.
        inputs: for each of the graph's inputs, its number among the operands that it is
            called with.
        source: the graph as Python, once it has been written.
        function: what that defines; it takes a list of operands.
    """

    name: str
    graph: torch.fx.Graph
    inputs: tuple[int, ...]
    source: str = ""
    function: Callable[[Sequence[Any]], Sequence[Any]] | None = None

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        assert self.function is not None
        return tuple(self.function(operands))


class NoTorchOperator(Exception):
    """Internal: torch has no operator for some control flow."""


@dataclass(frozen=True)
class Narrowed:
    """An operator that takes and returns no more than is used of another one.

    Attributes:
        op: the operator.
        operands: which of the other's operands it is called with, in order.
        results: which of the other's results it returns.
    """

    op: ControlFlow
    operands: tuple[int, ...]
    results: tuple[int, ...]


class ControlFlow:
    """An operator of a program: a kind of control flow, and the bodies of one call.

    It is called with flat operands, first the call's own and then what its bodies use of the
    surroundings, and returns a tuple of tensors.

    Attributes:
        name: what the program calls it.
        bodies: its bodies.
    """

    # Whether nothing is known of what it does beside returning its results.
    opaque = False

    @property
    def random(self) -> bool:
        """Whether a body draws random numbers."""
        return any(_draws(node) for body in self.bodies for node in body.graph.nodes)

    def __init__(self, name: str, bodies: Sequence[Body]) -> None:
        self.name = self.__name__ = name
        self.bodies = tuple(bodies)

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        raise NotImplementedError

    def in_torch(self, writer: Any, operands: Sequence[Any]) -> list[torch.fx.Node]:
        """Writes the operator as torch's own (``program.torch_operators``); its results.

        Raises:
            NoTorchOperator: torch has none.
        """
        raise NoTorchOperator(self.name)

    def narrowed(self, count: int, used: Collection[int]) -> Narrowed | None:
        """The operator without what nobody uses; None for one of which that is not known.

        Args:
            count: how many operands a call of it has.
            used: which of its results are used.
        """
        return None

    def pullback(self, count: int, by: Sequence[int], of: Sequence[int]) -> ControlFlow:
        """The operator that takes cotangents of the results ``of`` to those of the operands ``by``.

        It is called with the ``count`` tensors that this one is called with, the cotangents, and
        this one's numbers.
        """
        raise NotImplementedError

    def replayed(self, count: int, devices: Sequence[torch.device]) -> ControlFlow:
        """The operator with the random numbers of an earlier time.

        It is called with the ``count`` tensors that this one is called with, the states that the
        devices' generators had then, and this one's numbers.
        """
        raise NotImplementedError

    def mapped(self, batched: Sequence[bool]) -> ControlFlow:
        """The operator for a batch of calls: these operands, and all results, have a dim in front.

        ``batched`` says it of each tensor that it is called with; numbers have none.
        """
        raise NotImplementedError

    def pushforward(self, count: int, by: Sequence[int]) -> ControlFlow:
        """The operator that takes tangents of the operands ``by`` to those of the results.

        It is called with the ``count`` tensors that this one is called with, the tangents, and
        this one's numbers.
        """
        raise NotImplementedError


def _draws(node: torch.fx.Node) -> bool:
    if isinstance(node.target, ControlFlow):
        return node.target.random
    op = node.meta.get("op")
    return isinstance(op, TorchOperator) and op.random


# NOTE [random numbers of derivatives]
# A pullback runs the call again, and must draw the numbers that the call has drawn. So the states
# of the generators before a call that draws are kept, as results of a node of their own.
class RandomStates(ControlFlow):
    """The states that the generators of devices have: NOTE [random numbers of derivatives]."""

    opaque = True

    def __init__(self, devices: Sequence[torch.device]) -> None:
        super().__init__("random_states", ())
        self.devices = tuple(devices)

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        return tuple(random_state(device) for device in self.devices)


def random_state(device: torch.device) -> torch.Tensor:
    """The state of a device's generator."""
    if device.type == "cpu":
        return torch.get_rng_state()
    found: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return found


@dataclass(frozen=True)
class Result:
    """What is known of a result before the call: a fake value, and the tracers around it."""

    value: torch.Tensor
    wrapping: Wrapping


class TracedBody:
    """A body that was run once on traced tensors.

    Attributes:
        level: its level, with the graph.
        leaves: what it returned, flat; tensors are traced, numbers are numbers until `settle`.
        spec: the structure of that.
    """

    def __init__(self, trace: TraceLevel, func: Callable[..., Any], inputs: Sequence[Any]) -> None:
        self.level = BodyLevel(trace)
        arguments = [self.level.input(x) for x in inputs]
        with in_body(self.level):
            out = func(*arguments)
            leaves, self.spec = pytrees.flatten(out)
            self.leaves = [self.level.into(leaf) for leaf in leaves]

    @property
    def out(self) -> Any:
        return optree.tree_unflatten(self.spec, self.leaves)

    def settle(self, dtypes: Sequence[torch.dtype | None], kept: Collection[int] = ()) -> None:
        """Makes tensors of the numbers among the results, of these dtypes; not of those kept."""
        numbers: Any = (bool, int, float, complex, *SYMBOLIC)
        with in_body(self.level):
            for i, (leaf, dtype) in enumerate(zip(self.leaves, dtypes, strict=True)):
                if isinstance(leaf, numbers) and i not in kept:
                    self.leaves[i] = self.level.into(torch.full((), leaf, dtype=dtype))

    def batched(self) -> list[dict[int, Layer]]:
        """For each result the layers that it can't do without, by depth."""
        return [needed_layers(leaf) for leaf in self.leaves]

    def end(self, wrappings: Sequence[Wrapping | None]) -> list[Result | None]:
        """Lays the results out as they are wanted, and ends the graph with them.

        None stands for what is no tensor.
        """
        nodes = []
        results: list[Result | None] = []
        with in_body(self.level):
            for leaf, wrapping in zip(self.leaves, wrappings, strict=True):
                if wrapping is None:
                    results.append(None)
                    continue
                inner, _ = peeled(arranged(leaf, wrapping))
                inner = self.level.into(inner)
                nodes.append(inner.node)
                results.append(Result(inner.value, wrapping))
        self.level.graph.output(tuple(nodes))
        _inputs_first(self.level.graph)
        return results


def _inputs_first(graph: torch.fx.Graph) -> None:
    """Moves the inputs, which came as the body was found to use them, before all else."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    first = next(iter(graph.nodes))
    for node in inputs:
        if node is first:
            first = node.next
        else:
            first.prepend(node)


def common(columns: Iterable[dict[int, Layer]]) -> Wrapping:
    """The tracers that are needed around a result of any of several bodies."""
    layers: dict[int, Layer] = {}
    for column in columns:
        layers.update(column)
    return wrapped_in(layers)


def operands_of(
    bodies: Sequence[TracedBody], count: int
) -> tuple[list[Any], list[Any], list[tuple[int, ...]]]:
    """What several bodies take: tensors and numbers beyond the first ``count`` of each.

    Returns:
        The tensors and the numbers, each once, and for each body where its inputs stand among
        the operands: ``count`` own ones, the tensors, the numbers.
    """
    tensors: dict[int, Any] = {}
    numbers: dict[Any, Any] = {}
    for body in bodies:
        for x in body.level.inputs[count:]:
            tensors.setdefault(id(x), x)
        for number in body.level.numbers:
            numbers.setdefault(number, number)
    at = {key: count + i for i, key in enumerate(tensors)}
    number_at = {key: count + len(tensors) + i for i, key in enumerate(numbers)}
    places = []
    for body in bodies:
        own = [*range(count), *(at[id(x)] for x in body.level.inputs[count:])]
        own += [number_at[number] for number in body.level.numbers]
        places.append(_in_graph_order(body.level, own))
    return list(tensors.values()), list(numbers.values()), places


def _in_graph_order(level: BodyLevel, places: Sequence[int]) -> tuple[int, ...]:
    """Tensors' and numbers' places, in the order in which the graph has its inputs."""
    tensors = iter(places[: len(level.inputs)])
    numbers = iter(places[len(level.inputs) :])
    return tuple(
        next(numbers if node.name.startswith("n") else tensors)
        for node in level.graph.nodes
        if node.op == "placeholder"
    )


def call(
    op: ControlFlow, trace: TraceLevel, inputs: Sequence[Any], numbers: Sequence[Any],
    results: Sequence[Result],
) -> tuple[Any, ...]:  # fmt: skip
    """Calls an operator at the trace, and at each level inside of it that its inputs are of."""
    return _Call(op, trace, tuple(numbers)).at(inputs, results)


@dataclass(frozen=True)
class _Call:
    op: ControlFlow
    trace: TraceLevel
    numbers: tuple[Any, ...]

    def states(self, results: Sequence[Result]) -> tuple[tuple[torch.device, ...], Sequence[Any]]:
        """The generators that the operator may draw from, and their states before the call."""
        if not self.op.random and not self.op.opaque:
            return (), ()
        cpu = torch.device("cpu")
        devices = tuple(dict.fromkeys([cpu, *(result.value.device for result in results)]))
        with self.trace.fake:
            like = [torch.empty(random_state(d).shape, dtype=torch.uint8) for d in devices]
        kept = _Call(RandomStates(devices), self.trace, ())
        return devices, kept.record((), [Result(x, Wrapping()) for x in like])

    def at(self, inputs: Sequence[Any], results: Sequence[Result]) -> tuple[Any, ...]:
        """At the innermost level of the inputs: as a node of its graph, if it records one."""
        depth = max((x.dispatch_level.depth for x in inputs), default=self.trace.depth)
        own = [x for x in inputs if x.dispatch_level.depth == depth]
        if any(is_recorded(x) for x in own):
            # Others are lifted: their own graphs go on inside (NOTE [operands of outer levels]).
            lift = own[0].dispatch_level.lift
            lifted = [x if x.dispatch_level.depth == depth else lift(x) for x in inputs]
            found: tuple[Any, ...] = torch_apply(
                _Recorded, self, results, torch.is_grad_enabled(), *lifted
            )
            return found
        return self.inward(inputs, results)

    def inward(self, inputs: Sequence[Any], results: Sequence[Result]) -> tuple[Any, ...]:
        """On the values inside of the innermost level's tracers."""
        depth = max((x.dispatch_level.depth for x in inputs), default=self.trace.depth)
        depth = max([depth, *(r.wrapping.layers[0].level.depth for r in results
                              if r.wrapping.layers)])  # fmt: skip
        if depth <= self.trace.depth:
            return self.record(inputs, results)
        inner = [x.value if x.dispatch_level.depth == depth else x for x in inputs]
        stripped, layers = [], []
        for result in results:
            wrapped = result.wrapping.layers
            own = bool(wrapped) and wrapped[0].level.depth == depth
            layers.append(wrapped[0] if own else None)
            rest = Wrapping(wrapped[1:]) if own else result.wrapping
            stripped.append(Result(result.value, rest))
        found = self.at(inner, stripped)
        return tuple(
            value if layer is None else Wrapping((layer,)).around(value)
            for value, layer in zip(found, layers, strict=True)
        )

    def record(self, inputs: Sequence[Any], results: Sequence[Result]) -> tuple[Any, ...]:
        """As a node of the trace."""
        trace = self.trace
        nodes = [x.node for x in inputs]
        node = trace.record(self.op, (*nodes, *self.numbers))
        with trace.restored():  # the grad mode of a backward pass is not that of the program
            recorded = torch.is_grad_enabled()
        tracks = recorded and any(x.tracks for x in inputs)
        if trace.torch_state.grad_mode and not recorded:
            node.meta["no_grad"] = True
        outs = []
        for i, result in enumerate(results):
            item = trace.graph.call_function(operator.getitem, (node, i))
            like = result.value
            fake = trace.fake_like(like, like.shape, like.stride())
            outs.append(traced_as(fake, item, trace, tracks))
        return tuple(outs)


def _is_of(wrapping: Wrapping, level: TracerLevel) -> bool:
    """Whether a result can depend on what a vmap's level differentiates by: it is batched then."""
    if not isinstance(level, BatchLevel):
        return True
    return any(layer.level.depth == level.depth for layer in wrapping.layers)


class _Recorded(Function):
    """A call, as one node of the graph of a level that differentiates by some of its inputs."""

    @staticmethod
    def forward(
        ctx: Any, call: _Call, results: Sequence[Result], grad_mode: bool, *inputs: Any
    ) -> Any:
        ctx.call, ctx.results = call, results
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)
        ctx.set_materialize_grads(False)
        # What is inside belongs to other levels, whose graphs go on.
        with outside_graph(grad_mode):
            ctx.devices, ctx.states = call.states(results)
            outs = call.inward(inputs, results)
        ctx.mark_non_differentiable(*[out for out in outs if not differentiable(out)])
        return outs

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        inputs, results = ctx.saved_tensors, ctx.results
        by = [i for i, x in enumerate(inputs) if ctx.needs_input_grad[3 + i] and differentiable(x)]
        level = inputs[0].dispatch_level
        of = [
            j
            for j, ct in enumerate(cotangents)
            if ct is not None and _is_of(results[j].wrapping, level)
        ]
        pulled: list[Any] = [None] * len(inputs)
        if by and of:
            # Of cotangents that are batched further in than what they are pulled through.
            inside = _layers_inside([cotangents[j] for j in of], level)
            given = [arranged(cotangents[j], _batched(results[j].wrapping, inside)) for j in of]
            op = _replayed(ctx, ctx.call.op.pullback(len(inputs), by, of), len(inputs) + len(of))
            for _ in inside:
                batched = [False] * len(inputs) + [True] * len(of) + [False] * len(ctx.states)
                op = op.mapped(batched)
            wanted = [_mapped(_like(inputs[i]), inside, ctx.call.trace) for i in by]
            operands = [*inputs, *given, *ctx.states]
            found = call(op, ctx.call.trace, operands, ctx.call.numbers, wanted)
            for i, value in zip(by, found, strict=True):
                pulled[i] = value
        return (None, None, None, *pulled)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        inputs, results = ctx.saved_tensors, ctx.results
        by = [i for i, t in enumerate(tangents[3:]) if t is not None]
        given = [arranged(tangents[3 + i], peeled(inputs[i])[1]) for i in by]
        op = _replayed(ctx, ctx.call.op.pushforward(len(inputs), by), len(inputs) + len(by))
        operands = [*inputs, *given, *ctx.states]
        pushed = call(op, ctx.call.trace, operands, ctx.call.numbers, results)
        return tuple(
            t if differentiable(result.value) else None
            for t, result in zip(pushed, results, strict=True)
        )


def _replayed(ctx: Any, op: ControlFlow, count: int) -> ControlFlow:
    """A derivative of a call, with the random numbers that the call has drawn."""
    return op.replayed(count, ctx.devices) if ctx.states else op


def _layers_inside(values: Sequence[Any], level: TracerLevel) -> list[Layer]:
    """The vmaps inside of a level that values are batched by, the innermost first."""
    found: dict[int, Layer] = {}
    for value in values:
        for depth, layer in needed_layers(value).items():
            if depth > level.depth and layer.bdim is not None:
                found[depth] = layer
    return [layer for _, layer in sorted(found.items(), reverse=True)]


def _batched(wrapping: Wrapping, inside: Sequence[Layer]) -> Wrapping:
    """The layout of physical values with the batch dims of vmaps further in before all others."""
    rest = [
        Layer(layer.level, None if layer.bdim is None else layer.bdim + len(inside))
        for layer in wrapping.layers
    ]
    return Wrapping((*inside, *rest))


def _mapped(result: Result, inside: Sequence[Layer], trace: TraceLevel) -> Result:
    """What is known of a result for a batch of calls."""
    if not inside:
        return result
    value = result.value
    for layer in inside:
        assert isinstance(layer.level, BatchLevel)
        shape = (layer.level.batch_size, *value.shape)
        value = trace.fake_like(value, shape, contiguous_strides(shape))
    return Result(value, _batched(result.wrapping, inside))


def contiguous_strides(shape: Sequence[Any]) -> list[Any]:
    strides: list[Any] = [1] * len(shape)
    for i in reversed(range(len(shape) - 1)):
        strides[i] = strides[i + 1] * shape[i + 1]
    return strides


def _like(value: Any) -> Result:
    inner, wrapping = peeled(value)
    return Result(inner.value, wrapping)
