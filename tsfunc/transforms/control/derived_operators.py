"""Control flow of a program under transforms: derivatives, batches, repetitions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import torch

from tsfunc.bridge.control.control_flow import (
    Axes,
    Body,
    ControlFlow,
    Narrowed,
    NoTorchOperator,
    RandomStates,
    random_state,
)
from tsfunc.bridge.control.effects import muted
from tsfunc.bridge.control.retraced import retraced
from tsfunc.bridge.trace.torch_tracing import draws, pulled_back, pushed_forward
from tsfunc.bridge.tracers.draw_keys import keeping_draw_counts, set_packed_draw_counts
from tsfunc.dispatch.undoing import undoing
from tsfunc.program.graphs.torch_operators import Writer, one_of
from tsfunc.program.passes.simplify import simplify_part
from tsfunc.transforms.arguments import with_replaced
from tsfunc.transforms.control.choice import read
from tsfunc.transforms.forward import jvp
from tsfunc.transforms.reverse import vjp
from tsfunc.transforms.vmap import vmap

_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
_ROOM: Final = 1 << 20  # the most numbers to copy in order to merge two batches into one


class ControlFlowOperator(ControlFlow):
    """Control flow of a program; its derivatives are operators of a program too."""

    # True if a batch of calls runs each body only on the examples that choose it.
    run_on_subsets = False

    def pullback(self, count: int, by: Sequence[int], of: Sequence[int]) -> ControlFlow:
        return Pullback(self, count, by, of)

    def pushforward(self, count: int, by: Sequence[int]) -> ControlFlow:
        return Pushforward(self, count, by)

    def mapped(self, batched: Sequence[bool]) -> ControlFlow:
        return MappedOperator(self, batched)

    def of_batch(
        self, operands: Sequence[Any], batched: Sequence[bool]
    ) -> Sequence[torch.Tensor] | None:
        """Return the result of :meth:`mapped` if it can be computed without tracers; else None."""
        return None

    def pushed(self, count: int, by: Sequence[int]) -> Callable[..., tuple[Any, ...]] | None:
        """Return the pushforward in other control flow; None if torch can derive it.

        The function takes the operands of :meth:`pushforward`.
        """
        return None

    def replayed(self, count: int, devices: Sequence[torch.device]) -> ControlFlow:
        return Replayed(self, count, devices)

    def retraced(
        self, writer: Writer, run: Callable[..., tuple[Any, ...]], operands: Sequence[Any]
    ) -> list[torch.fx.Node]:
        """Write a function of the operands that calls control flow: ``bridge/control/retraced``."""
        known: dict[Any, Any] = {}

        def number(value: Any) -> Any:
            expr = value.node.expr
            if expr not in known:
                known[expr] = writer.number(value, operands)
            return known[expr]

        body, numbers = retraced(self.name, run, operands, number)
        simplify_part(body.graph)
        return writer.inline(body, [*operands, *numbers])


class Pullback(ControlFlowOperator):
    """The pullback of an operator; its arguments are those of ``ControlFlow.pullback``."""

    def __init__(
        self, of_op: ControlFlowOperator, count: int, by: Sequence[int], of: Sequence[int]
    ) -> None:
        super().__init__(f"{of_op.name}_pullback", of_op.bodies)
        self.op, self.count, self.by, self.of = of_op, count, tuple(by), tuple(of)

    def steps(self, operands: Sequence[Any]) -> int:
        return self.op.steps(operands)

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        inputs = operands[: self.count]
        cotangents = operands[self.count : self.count + len(self.of)]
        numbers = operands[self.count + len(self.of) :]

        def run(*chosen: Any) -> tuple[Any, ...]:
            with muted():  # NOTE [debug effects]
                results = self.op(*with_replaced(inputs, self.by, chosen), *numbers)
            return tuple(results[j] for j in self.of)

        _, pull = vjp(run, *(inputs[i] for i in self.by))
        pulled: tuple[Any, ...] = pull(cotangents, retain_graph=False)
        return pulled

    def torch_form(self, writer: Writer, operands: Sequence[Any]) -> Callable[..., Any]:
        stop = self.count + len(self.of)
        ones = [*operands[: self.count], *operands[stop:]]
        inner = self.op.torch_form(writer.to_differentiate(), ones)

        def run(*given: Any) -> tuple[Any, ...]:
            inputs, numbers = given[: self.count], given[stop:]

            def of_chosen(*chosen: Any) -> tuple[Any, ...]:
                results = inner(*with_replaced(inputs, self.by, chosen), *numbers)
                return tuple(results[j] for j in self.of)

            cotangents = given[self.count : stop]
            return pulled_back(of_chosen, [inputs[i] for i in self.by], cotangents)

        return run


class MappedOperator(ControlFlowOperator):
    """A batch of calls of an operator: see ``ControlFlow.mapped``."""

    def __init__(self, of_op: ControlFlowOperator, batched: Sequence[bool]) -> None:
        super().__init__(f"{of_op.name}_mapped", of_op.bodies)
        self.op, self.batched = of_op, tuple(batched)
        self.run_on_subsets = of_op.run_on_subsets

    def flow(
        self, operands: Sequence[Axes], through: Callable[[Body, Sequence[Axes]], list[Axes]]
    ) -> list[Axes] | None:
        return self.op.flow(operands, through)

    def steps(self, operands: Sequence[Any]) -> int:
        return self.op.steps(self._ones(operands))

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        merged = self._merged
        if merged is not None and self._is_cheap_as_one(operands):
            return merged(*operands)
        physical = self.op.of_batch(operands, self.batched)
        return self._vmapped(*operands) if physical is None else tuple(physical)

    def _vmapped(self, *operands: Any) -> tuple[Any, ...]:
        return _mapped(self.op, self.batched, *operands)

    @property
    def _merged(self) -> Callable[..., tuple[Any, ...]] | None:
        """A batch of batches as one batch of all examples; None for a single batch.

        The choices of an inner batch can't be read.
        """
        inner = self.op
        if not self.run_on_subsets or not isinstance(inner, MappedOperator):
            return None
        either = [a or b for a, b in zip(self.batched, inner.batched, strict=True)]
        return _flattened(MappedOperator(inner.op, either), self.batched, inner.batched)

    def pushed(self, count: int, by: Sequence[int]) -> Callable[..., tuple[Any, ...]] | None:
        run = self.op.pushed(count, by)
        if run is None:
            return None
        return functools.partial(_mapped, run, [*self.batched, *(self.batched[i] for i in by)])

    def in_torch(self, writer: Writer, operands: Sequence[Any]) -> list[torch.fx.Node]:
        """Write choices and loops of the whole batch."""
        return self.retraced(writer, self._merged or self._vmapped, operands)

    def _is_cheap_as_one(self, operands: Sequence[Any]) -> bool:
        """True if merging two vmaps does not expand the operands by much."""
        assert isinstance(self.op, MappedOperator)
        pairs = list(zip(operands, self.batched, self.op.batched, strict=False))
        if not all(type(x) in _PLAIN for x, _, _ in pairs):
            return False
        rows = next(x.shape[0] for x, a, _ in pairs if a)
        columns = next(x.shape[int(a)] for x, a, b in pairs if b)
        both: int = sum(x.numel() for x, a, b in pairs if a and b)
        more: int = sum(x.numel() * (columns if a else rows) for x, a, b in pairs if a is not b)
        return more <= 4 * both + _ROOM

    def _ones(self, operands: Sequence[Any]) -> list[Any]:
        """Return nodes with the types of a single call's operands."""
        tensors = zip(operands, self.batched, strict=False)
        ones = [one_of(x, 0 if batched else None) for x, batched in tensors]
        return [*ones, *operands[len(self.batched) :]]

    def narrowed(self, count: int, used: Collection[int]) -> Narrowed | None:
        inner = self.op.narrowed(count, used)
        if inner is None:
            return None
        tensors = [i for i in inner.operands if i < len(self.batched)]
        assert isinstance(inner.op, ControlFlowOperator)
        batched = [self.batched[i] for i in tensors]
        if not any(batched):  # the number of calls would be unknown
            return None
        return Narrowed(MappedOperator(inner.op, batched), inner.operands, inner.results)


def _mapped(
    op: Callable[..., tuple[Any, ...]], batched: Sequence[bool], *operands: Any
) -> tuple[Any, ...]:
    """Call an operator, or an equivalent function, for a batch; numbers follow the operands."""
    dims = [0 if each else None for each in batched]
    dims += [None] * (len(operands) - len(dims))
    results: tuple[Any, ...] = vmap(op, in_dims=tuple(dims), randomness="same")(*operands)
    return results


def _flattened(
    form: Callable[..., tuple[Any, ...]], outer: Sequence[bool], inner: Sequence[bool]
) -> Callable[..., tuple[Any, ...]]:
    """Return a batch of batches of calls, from the form of one batch.

    Args:
        form: takes operands with one leading dim in place of the two batch dims.
        outer: for each operand, True if it has the first batch dim.
        inner: for each operand, True if it has the second batch dim.
    """

    def run(*given: Any) -> tuple[Any, ...]:
        pairs = list(zip(outer, inner, strict=True))
        tensors = given[: len(pairs)]
        rows = next(x.shape[0] for x, (a, _) in zip(tensors, pairs, strict=True) if a)
        columns = next(x.shape[int(a)] for x, (a, b) in zip(tensors, pairs, strict=True) if b)
        flat = []
        for x, (a, b) in zip(tensors, pairs, strict=True):
            if a or b:
                rest = x.shape[int(a) + int(b) :]
                x = x if a else x.unsqueeze(0)
                x = x if b else x.unsqueeze(1)
                x = x.expand(rows, columns, *rest).reshape(rows * columns, *rest)
            flat.append(x)
        results = form(*flat, *given[len(pairs) :])
        return tuple(x.reshape(rows, columns, *x.shape[1:]) for x in results)

    return run


class Replayed(ControlFlowOperator):
    """A repetition of an operator with earlier random numbers: see ``ControlFlow.replayed``."""

    def __init__(
        self, of_op: ControlFlowOperator, count: int, devices: Sequence[torch.device]
    ) -> None:
        super().__init__(of_op.name, of_op.bodies)
        self.op, self.count, self.devices = of_op, count, tuple(devices)

    def steps(self, operands: Sequence[Any]) -> int:
        return self.op.steps(operands)

    @property
    def random(self) -> bool:
        return False  # it repeats earlier draws

    @property
    def _stop(self) -> int:
        """The position after the random states, the last of which has the numbers of draws."""
        return self.count + RandomStates.count(self.devices)

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        *states, drawn = operands[self.count : self._stop]
        now = [random_state(device) for device in self.devices]
        with undoing(functools.partial(self._set, now)):
            self._set(states)
            with keeping_draw_counts():
                set_packed_draw_counts(drawn)
                return self.op(*operands[: self.count], *operands[self._stop :])

    def torch_form(self, writer: Writer, operands: Sequence[Any]) -> Callable[..., Any]:
        """Return the form of the operator itself if the operator draws no numbers."""
        rest = [*operands[: self.count], *operands[self._stop :]]
        form = self.op.torch_form(writer, rest)
        if draws(writer.trace_of(self.name, form, rest)):
            raise NoTorchOperator(self.name)
        return lambda *given: form(*given[: self.count], *given[self._stop :])

    def _set(self, states: Sequence[Any]) -> None:
        for device, state in zip(self.devices, states, strict=True):
            if device.type == "cpu":
                torch.set_rng_state(read(state))
            else:
                torch.get_device_module(device).set_rng_state(read(state), device)


class Pushforward(ControlFlowOperator):
    """The pushforward of an operator: see ``ControlFlow.pushforward``."""

    def __init__(self, of_op: ControlFlowOperator, count: int, by: Sequence[int]) -> None:
        super().__init__(f"{of_op.name}_pushforward", of_op.bodies)
        self.op, self.count, self.by = of_op, count, tuple(by)

    def steps(self, operands: Sequence[Any]) -> int:
        return self.op.steps(operands)

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        inputs = operands[: self.count]
        tangents = operands[self.count : self.count + len(self.by)]
        numbers = operands[self.count + len(self.by) :]

        def run(*chosen: Any) -> tuple[Any, ...]:
            with muted():
                return self.op(*with_replaced(inputs, self.by, chosen), *numbers)

        _, pushed = jvp(run, tuple(inputs[i] for i in self.by), tuple(tangents))
        results: tuple[Any, ...] = pushed
        return results

    def in_torch(self, writer: Writer, operands: Sequence[Any]) -> list[torch.fx.Node]:
        run = self.op.pushed(self.count, self.by)
        if run is None:
            return super().in_torch(writer, operands)
        return self.retraced(writer, run, operands)

    def torch_form(self, writer: Writer, operands: Sequence[Any]) -> Callable[..., Any]:
        if self.op.pushed(self.count, self.by) is not None:
            module: Callable[..., Any] = writer.module(self, operands)
            return module
        stop = self.count + len(self.by)
        ones = [*operands[: self.count], *operands[stop:]]
        # A pushforward is the derivative of the pullback.
        inner = self.op.torch_form(writer.to_differentiate(2), ones)

        def run(*given: Any) -> tuple[Any, ...]:
            inputs, numbers = given[: self.count], given[stop:]

            def of_chosen(*chosen: Any) -> tuple[Any, ...]:
                return tuple(inner(*with_replaced(inputs, self.by, chosen), *numbers))

            tangents = given[self.count : stop]
            return pushed_forward(of_chosen, [inputs[i] for i in self.by], tangents)

        return run
