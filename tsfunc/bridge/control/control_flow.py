"""Control flow as operators of a program.

NOTE [control flow in programs]
The bodies of a call become graphs (NOTE [bodies] in ``bodies``), and the call one node of the
program: a :class:`ControlFlow`, which takes and returns flat tensors when the program runs, and
then does what the user's call does. So a program with a loop is vmapped and differentiated as
the loop is.

The node's tensors are physical values; the batch dims of a vmap inside of the trace are dims of
them. Which tracers belong around them, inputs and results, is kept beside (``bodies.TracerStack``).
Where the trace's own level, or one inside of it, differentiates by an input, the call is an
``autograd.Function`` of that level (``control_flow_calls``); its backward calls another node, the
pullback of this one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from tsfunc.bridge.tracers.operators import TorchOperator


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

    def steps(self, operands: Sequence[Any]) -> int:
        """Return how often a call runs its bodies; 1 where data decide that.

        Args:
            operands: the nodes that it is called with.
        """
        return 1

    def in_torch(self, writer: Any, operands: Sequence[Any]) -> list[torch.fx.Node]:
        """Writes the operator as torch's own (``program.torch_operators``); its results.

        By default what torch traces of :meth:`torch_form`.

        Raises:
            NoTorchOperator: torch has none.
        """
        found: list[torch.fx.Node] = writer.traced(self, operands)
        return found

    def torch_form(self, writer: Any, operands: Sequence[Any]) -> Callable[..., Any]:
        """A function that does the same by torch's own operators.

        By default a module of what :meth:`in_torch` writes.

        Args:
            writer: makes the module.
            operands: nodes like what it is called with.

        Raises:
            NoTorchOperator: torch has none.
        """
        if type(self).in_torch is ControlFlow.in_torch:
            raise NoTorchOperator(self.name)
        found: Callable[..., Any] = writer.module(self, operands)
        return found

    def torch_form_of_batch(
        self, writer: Any, ones: Sequence[Any], batched: Sequence[bool]
    ) -> Callable[..., Any]:
        """As :meth:`torch_form`, for a batch of calls: see :meth:`mapped`.

        Args:
            writer: makes modules.
            ones: nodes like what a single call is called with.
            batched: which operands have a dim in front; all results have one.

        Raises:
            NoTorchOperator: torch has none.
        """
        dims = [0 if each else None for each in batched]
        dims += [None] * (len(ones) - len(dims))
        return torch.vmap(self.torch_form(writer, ones), tuple(dims), randomness="same")

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


def every_node(graph: torch.fx.Graph) -> Iterator[torch.fx.Node]:
    """The nodes of a graph, and those of the bodies in it."""
    for node in graph.nodes:
        yield node
        if isinstance(node.target, ControlFlow):
            for body in node.target.bodies:
                yield from every_node(body.graph)


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
