"""The traced bodies of one control flow call: their common operands, and their results.

NOTE [layouts of results]
A trace takes views of the results of control flow, so their strides must be those that it knows,
whichever branch is taken and however many steps there are. If branches return a result with
different strides, or a step returns a carry with other strides than it took, the bodies copy it
into one order of its dims in memory: that of the first branch, or of the carry. A carry with gaps
or expanded dims has no such order, and is copied before the loop. An expanded result is copied,
because torch gives its strides to its tangent, whose elements it then writes. The results of a
batch of calls are contiguous.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, cast

import optree
import torch
import torch.fx

from tsfunc import pytrees
from tsfunc.bridge.control.bodies import BodyLevel, HiddenVmaps, in_body, needed_frames, rewrap_as
from tsfunc.bridge.control.node_writes import memory_key, written_bases
from tsfunc.bridge.sizes.symbolic_numbers import size_text
from tsfunc.bridge.trace.trace_level import TraceLevel, TraceTracer
from tsfunc.bridge.tracers.operators import operator_of
from tsfunc.bridge.tracers.tracer_stack import Frame, TracerStack, stack_of, unwrap_all
from tsfunc.bridge.tracers.user_queries import SYMBOLIC, statically_known_true
from tsfunc.errors import DataDependentError
from tsfunc.ops.dims import (
    InplaceRefused,
    dense_strides,
    in_memory_order,
    is_expanded,
    memory_order,
)


@dataclass(frozen=True)
class TracedResult:
    """The type of a result: a fake value, and the tracers around it."""

    value: torch.Tensor
    stack: TracerStack


class TracedBody:
    """A body that was run once on traced tensors.

    Args:
        inputs: the tensors of the call that the body's arguments are.
        hidden: the vmaps that the body does not see.
        by_value: True to copy arguments that the body writes into: NOTE [bodies without writes].

    Attributes:
        level: its level, with the graph.
        arguments: the tensors that it was run on; writes may have made them tracers of a vmap.
        given: the values in them before the run, without data.
        leaves: the flat results: traced tensors, and Python numbers until ``convert_results``.
        spec: the structure of the results.
    """

    level: BodyLevel
    arguments: list[Any]
    given: list[torch.Tensor]
    leaves: list[Any]
    spec: Any

    def __init__(
        self, trace: TraceLevel, func: Callable[..., Any], inputs: Sequence[Any],
        hidden: HiddenVmaps | None = None, *, by_value: bool = False,
    ) -> None:  # fmt: skip
        self._unwrapped: list[Any] = []
        hidden = hidden or HiddenVmaps()
        written = self._run(BodyLevel(trace, hidden), func, inputs, by_value, ())
        if written:
            self._run(BodyLevel(trace, hidden), func, inputs, by_value, written)
        for leaf in self.leaves:
            if isinstance(leaf, torch.Tensor):
                self._refuse_own_sizes(leaf)

    def _run(
        self,
        level: BodyLevel,
        func: Callable[..., Any],
        inputs: Sequence[Any],
        by_value: bool,
        copied: Container[int],
    ) -> list[int]:
        """Trace the body, and return the positions of arguments for a call to copy.

        Args:
            copied: the positions of arguments that a call copies.
        """
        self.level = level
        self.arguments = [level.argument(x) for x in inputs]
        physical = [unwrap_all(x)[0] for x in self.arguments]
        self.given = [x.value if isinstance(x, TraceTracer) else x for x in physical]
        copies: dict[torch.fx.Node, TraceTracer] = {}
        others: dict[torch.fx.Node, int] = {}
        for i, inner in enumerate(physical if by_value else ()):
            if i in copied or not isinstance(inner, TraceTracer) or inner.node.op != "placeholder":
                continue
            if _keeps_strides(inner.value):
                copies[_use_copy(inner, level)] = inner
            else:
                others[inner.node] = i
        try:
            with in_body(level):
                arguments = [
                    x.clone(memory_format=torch.contiguous_format) if i in copied else x
                    for i, x in enumerate(self.arguments)
                ]
                leaves, self.spec = pytrees.flatten(func(*arguments))
                self.leaves = [level.remap(leaf) for leaf in leaves]
        except InplaceRefused:
            if not others:
                raise
            return [*others.values()]
        written = written_bases(level.graph)
        for node, tracer in copies.items():
            if node not in written:
                _use_itself(tracer, node)
        return [i for node, i in others.items() if node in written]

    @property
    def out(self) -> Any:
        return optree.tree_unflatten(self.spec, self.leaves)

    def convert_results(
        self, dtypes: Sequence[torch.dtype | None], unchanged: Collection[int] = ()
    ) -> None:
        """Convert the numbers among the results to tensors of these dtypes, except ``kept``."""
        numbers: Any = (bool, int, float, complex, *SYMBOLIC)
        with in_body(self.level):
            for i, (leaf, dtype) in enumerate(zip(self.leaves, dtypes, strict=True)):
                if isinstance(leaf, numbers) and i not in unchanged:
                    self.leaves[i] = self.level.remap(torch.full((), leaf, dtype=dtype))

    def batched(self) -> list[dict[int, Frame]]:
        """Return for each result the tracers that it needs, by depth."""
        hidden = self.level.hidden.levels
        return [
            {depth: frame for depth, frame in needed_frames(leaf).items() if depth not in hidden}
            for leaf in self.leaves
        ]

    def unwrapped_values(self, stacks: Sequence[TracerStack | None]) -> list[Any]:
        """Return the values of the results inside of the tracers ``stacks``; None for no tensor."""
        if not self._unwrapped:
            with in_body(self.level):
                for leaf, stack in zip(self.leaves, stacks, strict=True):
                    inner = None if stack is None else unwrap_all(rewrap_as(leaf, stack))[0]
                    self._unwrapped.append(inner if inner is None else self.level.remap(inner))
        return self._unwrapped

    def end(
        self, stacks: Sequence[TracerStack | None], orders: Sequence[Order | None] = ()
    ) -> list[TracedResult | None]:
        """Give the results the tracers ``stacks``, and end the graph with them.

        The stack, and the returned result, of a leaf that is not a tensor is None.

        Args:
            orders: for each result the order of its dims in memory that it is copied into, or None.
        """
        nodes = []
        results: list[TracedResult | None] = []
        layouts = zip_longest(self.unwrapped_values(stacks), stacks, orders)
        with in_body(self.level):
            for inner, stack, order in layouts:
                if stack is None:
                    results.append(None)
                    continue
                if order is None and is_expanded(inner):
                    order = [*range(inner.dim())]
                if order is not None:
                    inner = in_memory_order(inner, order)
                nodes.append(inner.node)
                results.append(TracedResult(inner.value, stack))
        self.level.graph.output(tuple(nodes))
        inputs_first(self.level.graph)
        return results

    def _refuse_own_sizes(self, leaf: torch.Tensor) -> None:
        """Raise if a result's size is unknown before the call."""
        own_sizes = [size for size in leaf.shape if self.level.is_own_size(size)]
        if own_sizes:
            shape = ", ".join(map(size_text, leaf.shape))
            raise DataDependentError(
                f"{self.level.name}: a body of control flow returns a tensor of shape [{shape}], "
                f"of which {', '.join(map(size_text, own_sizes))} is found in data inside of it. "
                f"The result of a body must have a size that is known without running it: reduce "
                f"it in the body, or write it into a tensor of the largest size."
            )


# NOTE [bodies without writes]
# A vmap or a derivative of a call sees its operands and results alone. The body of a loop therefore
# writes into copies of its arguments. A copy keeps the strides of a tensor without gaps, so that it
# needs no operator in the trace: its node stands for the argument, and is removed if nothing is
# written into it. A body also writes into copies of the tensors that it closes over. Their values
# are results, which are copied into the tensors after the call. If a body uses two tensors of one
# memory, it writes into the tensors themselves.
def _keeps_strides(value: torch.Tensor) -> bool:
    """True if a copy of a tensor has its strides."""
    plain = value.layout is torch.strided and not (value.is_conj() or value.is_neg())
    return plain and order_of(value) is not None


def _use_copy(argument: TraceTracer, level: BodyLevel) -> torch.fx.Node:
    """Let a body use a copy of an argument, and return the copy's node."""
    clone = torch.ops.aten.clone.default
    node = level.record(clone, (argument.node,))
    node.meta |= {
        "op": operator_of(clone), "val": argument.value, "requires_grad": argument.tracks,
    }  # fmt: skip
    argument.node = node
    return node


def _use_itself(argument: TraceTracer, copy: torch.fx.Node) -> None:
    """Let a body use an argument itself in place of its copy."""
    (node,) = copy.all_input_nodes
    copy.replace_all_uses_with(node)
    copy.graph.erase_node(copy)
    if isinstance(argument, TraceTracer):  # a write makes it a tracer of another level
        argument.node = node


def written_outside(bodies: Sequence[TracedBody]) -> list[torch.Tensor]:
    """Return the tensors that bodies close over and write into, as the code around sees them."""
    written: dict[int, torch.Tensor] = {}
    for body in bodies:
        bases = written_bases(body.level.graph)
        for tensor, seen in body.level.taken.values() if bases else ():
            if _is_input(seen) and unwrap_all(seen)[0].node in bases:
                outer = body.level.outside(tensor)
                written[id(outer)] = outer
    if not written:
        return []
    if not all(isinstance(memory_key(x), torch.fx.Node) for x in written.values()):
        bodies[0].level.tensor_guards.of_memory = True
    used = [body.level.outside(x) for body in bodies for x, _ in body.level.taken.values()]
    memories = Counter(map(memory_key, {id(x): x for x in used}.values()))
    shared = any(memories[memory_key(x)] > 1 for x in written.values())
    return [] if shared else list(written.values())


def _is_input(value: Any) -> bool:
    """True for a tensor that is an input of a body."""
    inner, _ = unwrap_all(value)
    return isinstance(inner, TraceTracer) and inner.node.op == "placeholder"


def use_copies(
    trace: TraceLevel, tensors: Sequence[torch.Tensor], values: Sequence[Any] | None = None
) -> list[Any]:
    """Let the body that is traced use copies of tensors from outside, and return the copies.

    Args:
        values: the values of the copies; by default those of the tensors.
    """
    level = cast(BodyLevel, trace.bodies[-1])
    copies = [x.clone() for x in (map(level.remap, tensors) if values is None else values)]
    for tensor, copy in zip(tensors, copies, strict=True):
        level.taken[id(tensor)] = tensor, copy
    return copies


def inputs_first(graph: torch.fx.Graph) -> None:
    """Move the inputs, which were made as the body used them, to the start of the graph."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    first = next(iter(graph.nodes))
    for node in inputs:
        if node is first:
            first = node.next
        else:
            first.prepend(node)


Order = list[int]
"""The dims of a tensor without gaps, from the outermost in memory inwards."""


def common_order(values: Sequence[Any]) -> Order | None:
    """Return the order that results of several bodies are copied into; None if none is needed."""
    first, *others = values
    if first is None or all(have_same_strides(first, other) for other in others):
        return None
    return order_of(first) or [*range(first.dim())]


def have_same_strides(x: torch.Tensor, y: torch.Tensor) -> bool:
    """True if two traced tensors of one shape have the same strides, whatever their sizes are.

    The strides of dims of one element do not count, and neither do those of other layouts.
    """
    return x.layout is not torch.strided or _same_strides(x.shape, x.stride(), y.stride())


def order_of(x: torch.Tensor) -> Order | None:
    """Return the order of the dims in memory; None with gaps, expanded dims or unknown strides."""
    order = [*range(x.dim())]
    if all(type(step) is int for step in x.stride()):
        order = memory_order(x.shape, x.stride())
    return order if _same_strides(x.shape, x.stride(), dense_strides(x.shape, order)) else None


def _same_strides(shape: Sequence[Any], steps: Sequence[Any], others: Sequence[Any]) -> bool:
    return all(
        statically_known_true(size == 1) or statically_known_true(step == other)
        for size, step, other in zip(shape, steps, others, strict=True)
    )


def union_of_frames(columns: Iterable[dict[int, Frame]]) -> TracerStack:
    """Return the tracers that a result of any of several bodies needs."""
    frames: dict[int, Frame] = {}
    for column in columns:
        frames.update(column)
    return stack_of(frames)


def operands_of(
    bodies: Sequence[TracedBody], count: int
) -> tuple[list[Any], list[Any], list[tuple[int, ...]]]:
    """Return the operands of several bodies beyond the first ``count`` of each.

    Returns:
        The tensors and the numbers, each once, and for each body the positions of its inputs among
        the operands: ``count`` own ones, the tensors, the numbers.
    """
    tensors: dict[int, Any] = {}
    numbers: dict[Any, Any] = {}
    for body in bodies:
        for x in body.level.inputs[count:]:
            tensors.setdefault(id(x), x)
        for number in body.level.number_nodes.nodes:
            numbers.setdefault(number, number)
    at = {key: count + i for i, key in enumerate(tensors)}
    number_at = {key: count + len(tensors) + i for i, key in enumerate(numbers)}
    places = []
    for body in bodies:
        body_places = [*range(count), *(at[id(x)] for x in body.level.inputs[count:])]
        own_numbers = [number_at[number] for number in body.level.number_nodes.nodes]
        places.append(in_graph_order(body.level.graph, body_places, own_numbers))
    return list(tensors.values()), list(numbers.values()), places


def in_graph_order(
    graph: torch.fx.Graph, tensors: Sequence[int], numbers: Sequence[int]
) -> tuple[int, ...]:
    """Return the positions of tensors and numbers in the order of a graph's inputs."""
    tensor, number = iter(tensors), iter(numbers)
    return tuple(
        next(number if node.name.startswith("n") else tensor)
        for node in graph.nodes
        if node.op == "placeholder"
    )
