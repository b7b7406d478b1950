"""Bodies of one call of control flow, traced: what they take together, and what they return."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch
import torch.fx

from tsfunc import pytrees
from tsfunc.bridge.control.bodies import (
    Apart,
    BodyLevel,
    Layer,
    Wrapping,
    arranged,
    in_body,
    needed_layers,
    peeled,
    wrapped_in,
)
from tsfunc.bridge.sizes.symbolic_numbers import size_text
from tsfunc.bridge.trace.tracing import SYMBOLIC, TraceLevel
from tsfunc.errors import DataDependentError


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

    def __init__(
        self, trace: TraceLevel, func: Callable[..., Any], inputs: Sequence[Any],
        apart: Apart | None = None,
    ) -> None:  # fmt: skip
        self.level = BodyLevel(trace, apart or Apart())
        arguments = [self.level.argument(x) for x in inputs]
        with in_body(self.level):
            out = func(*arguments)
            leaves, self.spec = pytrees.flatten(out)
            self.leaves = [self.level.into(leaf) for leaf in leaves]
        for leaf in self.leaves:
            if isinstance(leaf, torch.Tensor):
                self._refuse_own_sizes(leaf)

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
        apart = self.level.apart.levels
        return [
            {depth: layer for depth, layer in needed_layers(leaf).items() if depth not in apart}
            for leaf in self.leaves
        ]

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

    def _refuse_own_sizes(self, leaf: torch.Tensor) -> None:
        """Raises where a result is of a size that nobody outside can know before the call."""
        own = [size for size in leaf.shape if self.level.is_own_size(size)]
        if own:
            shape = ", ".join(map(size_text, leaf.shape))
            raise DataDependentError(
                f"{self.level.name}: a body of control flow returns a tensor of shape [{shape}], "
                f"of which {', '.join(map(size_text, own))} is found in data inside of it. What a "
                f"body returns must have a size that is known without running it: reduce it in "
                f"the body, or write it into a tensor of the largest size."
            )


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
