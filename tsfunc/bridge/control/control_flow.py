"""Control flow as operators of a program.

NOTE [control flow in programs]
The bodies of a call become graphs (NOTE [bodies] in ``bodies``), and the call becomes one node of
the program: a :class:`ControlFlow`. When the program runs, the node takes and returns flat tensors
and does the same as the user's call. A program with a loop is therefore vmapped and differentiated
like the loop itself.

The node's tensors are physical values, which include the batch dims of a vmap inside of the trace.
The tracers around inputs and results are stored separately (``bodies.TracerStack``). If the trace's
own level, or one inside of it, differentiates by an input, the call is an ``autograd.Function`` of
that level (``control_flow_calls``). The backward of the Function calls another node, the pullback
of the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from tsfunc.bridge.tracers.draw_keys import packed_draw_counts
from tsfunc.bridge.tracers.operators import TorchOperator, may_draw

# Takes the operands of a call and returns the results of a body.
BodyFunction = Callable[[Sequence[Any]], Sequence[Any]]


@dataclass(eq=False)
class Body:
    """The graph of a body, and the operands that it takes.

    Attributes:
        name: the body's name in the program.
        graph: the graph of its operators.
        inputs: for each input of the graph, the position of its operand in the call.
        source: the graph as Python source; empty until it is written.
        function: the function that the source defines, from a list of operands to the results.
        owned: the operands of a loop's carry that ``in_place`` writes into.
        in_place: the same function without copies of these operands: NOTE [owned carries] in
            ``program/passes/owned_carries``; None if it would copy nothing less.
    """

    name: str
    graph: torch.fx.Graph
    inputs: tuple[int, ...]
    source: str = ""
    function: BodyFunction | None = None
    owned: tuple[int, ...] = ()
    in_place: BodyFunction | None = None

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        assert self.function is not None
        return tuple(self.function(operands))

    def with_own_carry(self, operands: tuple[Any, ...]) -> tuple[BodyFunction, tuple[Any, ...]]:
        """Return the function of a loop's steps, and the operands of the first step.

        Autograd saves values of each step, which no later step may write into.
        """
        assert self.function is not None
        if self.in_place is None or _records(operands):
            return self.function, operands
        copied = [x.clone() if i in self.owned else x for i, x in enumerate(operands)]
        return self.in_place, tuple(copied)


def _records(operands: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(
        isinstance(x, torch.Tensor) and x.requires_grad for x in operands
    )


# The mesh axes along which a value differs between ranks (``program.passes.equal_values``).
Axes = frozenset[str]


class NoTorchOperator(Exception):
    """Internal: torch has no operator for this control flow."""


@dataclass(frozen=True)
class ReducedOperator:
    """An operator without the operands and results of another one that are not used.

    Attributes:
        operands: the positions of its operands among the other operator's.
        results: the positions of its results among the other operator's.
    """

    op: ControlFlow
    operands: tuple[int, ...]
    results: tuple[int, ...]


class ControlFlow:
    """An operator of a program: one kind of control flow, with the bodies of one call.

    The operands are flat: first the operands of the call, then the outer tensors and numbers that
    its bodies use. The call returns a tuple of tensors.

    Attributes:
        name: the operator's name in the program.
        bodies: the bodies of the call.
    """

    # True if the operator may have effects beside its results.
    opaque = False
    # The number of tensors in the carry of a loop.
    carried = 0

    @property
    def random(self) -> bool:
        """True if a body draws random numbers."""
        return any(_draws(node) for body in self.bodies for node in body.graph.nodes)

    def __init__(self, name: str, bodies: Sequence[Body]) -> None:
        self.name = self.__name__ = name
        self.bodies = tuple(bodies)

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        raise NotImplementedError

    def run_count(self, operands: Sequence[Any]) -> int:
        """Return the number of times that a call runs its bodies; 1 if it depends on data.

        Args:
            operands: the nodes of the call's operands.
        """
        return 1

    def result_axes(
        self, operands: Sequence[Axes], through: Callable[[Body, Sequence[Axes]], list[Axes]]
    ) -> list[Axes] | None:
        """Return the mesh axes along which each result differs, or None if that is not known.

        A result has the axes of all values that it depends on.

        Args:
            through: returns the axes of a body's results, given those of the operands that
                ``Body.inputs`` counts.
        """
        return None

    def write_for_torch(self, writer: Any, operands: Sequence[Any]) -> list[torch.fx.Node]:
        """Return the results of torch's own operator (``program/graphs/torch_operators``).

        Raises:
            NoTorchOperator: torch has no such operator.
        """
        raise NoTorchOperator(self.name)

    def without_unused(self, count: int, used: Collection[int]) -> ReducedOperator | None:
        """Return the operator without unused operands and results; None if it can't be reduced."""
        return None

    def pullback(self, count: int, wrt: Sequence[int], results: Sequence[int]) -> ControlFlow:
        """Return the operator from cotangents of ``results`` to those of operands ``wrt``.

        The returned operator takes the ``count`` tensor operands of this one, the cotangents, and
        the numbers of this operator.
        """
        raise NotImplementedError

    def replayed(self, count: int, devices: Sequence[torch.device]) -> ControlFlow:
        """Return the operator that draws the random numbers of an earlier call.

        The returned operator takes the ``count`` tensor operands of this one, the results of
        :class:`RandomStates` before that call, and the numbers of this operator.
        """
        raise NotImplementedError

    def mapped(self, batched: Sequence[bool]) -> ControlFlow:
        """Return the operator for a batch of calls.

        Args:
            batched: for each tensor operand, True if its first dim is a batch dim; the first dim of
                each result is one. Numbers are not batched.
        """
        raise NotImplementedError

    def pushforward(self, count: int, wrt: Sequence[int]) -> ControlFlow:
        """Return the operator from tangents of the operands ``wrt`` to those of the results.

        The returned operator takes the ``count`` tensor operands of this one, the tangents, and the
        numbers of this operator.
        """
        raise NotImplementedError


def _draws(node: torch.fx.Node) -> bool:
    if isinstance(node.target, ControlFlow):
        return node.target.random
    op = node.meta.get("op")
    return isinstance(op, TorchOperator) and may_draw(op, node.args, node.kwargs)


# NOTE [random numbers of derivatives]
# A pullback runs the call again, and must draw the same random numbers. The states of the
# generators before a call that draws are therefore saved, as the results of a separate node, and so
# are the numbers of draws of the vmaps that the program runs in (NOTE [draws by example]).
class RandomStates(ControlFlow):
    """The operator that reads random states: NOTE [random numbers of derivatives]."""

    opaque = True

    def __init__(self, devices: Sequence[torch.device]) -> None:
        super().__init__("random_states", ())
        self.devices = tuple(devices)

    @staticmethod
    def count(devices: Sequence[torch.device]) -> int:
        """Return the number of results: the state of each device, and the numbers of draws."""
        return len(devices) + 1

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        return (*[random_state(device) for device in self.devices], packed_draw_counts())


def random_state(device: torch.device) -> torch.Tensor:
    """Return the state of a device's generator."""
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)
