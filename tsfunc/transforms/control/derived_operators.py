"""Control flow of a program under transforms: derivatives, batches, repetitions.

NOTE [derivatives in other control flow]
When a program runs as Python, a derivative of control flow is ``vjp`` or ``jvp`` of the operator.
torch's operators have to contain it: the pullback of a choice is a choice between pullbacks, and
the pullback of a scan is a scan that saves the carries and a reverse scan of one step's pullback. A
loop is counted first, and is then a scan of so many steps. Such rules (:func:`derivative_rule`)
call control flow again, in a trace (``bridge/control/retraced``). The derivative of a derivative is
``vjp`` or ``jvp`` of its rule, and a derivative of a batch is one of the loop of the whole batch.
Each trace has operators of a lower order, so that derivatives of any order end in the operators
that torch has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import torch

from tsfunc.bridge.control.control_flow import (
    Axes,
    Body,
    ControlFlow,
    NoTorchOperator,
    RandomStates,
    ReducedOperator,
    random_state,
)
from tsfunc.bridge.control.effect_operator import mute_effects
from tsfunc.bridge.control.retraced import retrace
from tsfunc.bridge.sizes.strides import derivative_strides
from tsfunc.bridge.trace.trace_level import current_trace
from tsfunc.bridge.tracers.draw_keys import preserve_draw_counts, set_packed_draw_counts
from tsfunc.bridge.tracers.interrupts import undoing
from tsfunc.bridge.tracers.nesting import innermost_value
from tsfunc.bridge.tracers.operators import PLAIN_TENSORS
from tsfunc.ops.dims import in_memory_order, memory_order
from tsfunc.program.graphs.codegen import write_bodies
from tsfunc.program.graphs.torch_operators import Writer, one_of
from tsfunc.program.passes.effects import every_node, is_random
from tsfunc.program.passes.simplify import simplify_part
from tsfunc.transforms.argnums import with_replaced
from tsfunc.transforms.forward import jvp
from tsfunc.transforms.reverse import vjp
from tsfunc.transforms.vmap import vmap

Derivative = Callable[..., tuple[Any, ...]]
Rule = TypeVar("Rule", bound=Derivative)

# The derivatives of an operator in other control flow, by the kind of derivative and of operator.
_RULES: Final[dict[tuple[type, type], Derivative]] = {}

_ROOM: Final = 1 << 20  # the most numbers to copy in order to merge two batches into one


def derivative_rule(derivative: type, kind: type) -> Callable[[Rule], Rule]:
    """Register a derivative of an operator in other control flow.

    A pullback takes the operator, the arguments of ``ControlFlow.pullback`` and its operands; a
    pushforward likewise.
    """

    def decorator(rule: Rule) -> Rule:
        _RULES[derivative, kind] = rule
        return rule

    return decorator


class DerivativeOperands(NamedTuple):
    """The operands of a derivative of an operator.

    Attributes:
        inputs: the tensor operands of the operator.
        derivatives: the cotangents of its results, or the tangents of its operands.
        numbers: the numbers of the operator.
    """

    inputs: Sequence[Any]
    derivatives: Sequence[Any]
    numbers: Sequence[Any]

    @classmethod
    def of(cls, operands: Sequence[Any], count: int, derivatives: int) -> DerivativeOperands:
        """Return the operands of a derivative of an operator with ``count`` tensor operands."""
        stop = count + derivatives
        return cls(operands[:count], operands[count:stop], operands[stop:])


def run_pullback(
    run: Callable[..., Sequence[Any]], count: int, wrt: Sequence[int], results: Sequence[int],
    *operands: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the cotangents of a function's operands ``wrt``.

    Args:
        run: takes ``count`` tensors and then numbers.
        wrt: the positions of the tensors that it is differentiated by.
        results: the positions of the results that have cotangents.
        operands: the tensors, the cotangents, and the numbers.
    """
    inputs, cotangents, numbers = DerivativeOperands.of(operands, count, len(results))

    def chosen(*values: Any) -> tuple[Any, ...]:
        with mute_effects():  # NOTE [debug effects]
            outputs = run(*with_replaced(inputs, wrt, values), *numbers)
        return tuple(outputs[j] for j in results)

    _, pullback = vjp(chosen, *(inputs[i] for i in wrt))
    cts_in: tuple[Any, ...] = pullback(cotangents, retain_graph=False)
    return tuple(laid_out_like(inputs[i], value) for i, value in zip(wrt, cts_in, strict=True))


def run_pushforward(
    run: Callable[..., Sequence[Any]], count: int, wrt: Sequence[int], *operands: Any
) -> tuple[Any, ...]:
    """Return the tangents of a function's results; the operands have tangents for ``wrt``."""
    inputs, tangents, numbers = DerivativeOperands.of(operands, count, len(wrt))
    return run_jvp(run, inputs, wrt, tangents, numbers)[1]


def run_jvp(
    run: Callable[..., Sequence[Any]], values: Sequence[Any], wrt: Sequence[int],
    tangents: Sequence[Any], numbers: Sequence[Any],
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:  # fmt: skip
    """Return a function's results and their tangents.

    Args:
        run: takes the values and then the numbers.
        wrt: the positions of the values that have tangents.
    """

    def chosen(*primals: Any) -> tuple[Any, ...]:
        with mute_effects():  # NOTE [debug effects]
            return tuple(run(*with_replaced(values, wrt, primals), *numbers))

    results, tangents_out = jvp(chosen, tuple(values[i] for i in wrt), tuple(tangents))
    pairs = zip(results, tangents_out, strict=True)
    return results, tuple(laid_out_like(result, tangent) for result, tangent in pairs)


def laid_out_like(tensor: torch.Tensor, derivative: torch.Tensor) -> torch.Tensor:
    """Return a derivative with the strides of NOTE [layouts of derivatives]."""
    wanted = derivative_strides(tensor)
    if wanted is None or derivative.layout is not torch.strided:
        return derivative
    if [*derivative.stride()] == wanted:
        return derivative
    return in_memory_order(derivative, memory_order(tensor.shape, tensor.stride()))


def with_zeros(
    derivatives: Mapping[int, Any], values: Sequence[Any], at: Iterable[int]
) -> tuple[Any, ...]:
    """Return the derivatives of the values ``at`` some positions, zeros for those without one."""
    return tuple(derivatives[i] if i in derivatives else torch.zeros_like(values[i]) for i in at)


class ControlFlowOperator(ControlFlow):
    """Control flow of a program; its derivatives are operators of a program too."""

    # True if a batch of calls runs each body only on the examples that choose it.
    run_on_subsets = False

    def pullback(self, count: int, wrt: Sequence[int], results: Sequence[int]) -> ControlFlow:
        return Pullback(self, count, wrt, results)

    def pushforward(self, count: int, wrt: Sequence[int]) -> ControlFlow:
        return Pushforward(self, count, wrt)

    def mapped(self, batched: Sequence[bool]) -> ControlFlow:
        return MappedOperator(self, batched)

    def of_batch(
        self, operands: Sequence[Any], batched: Sequence[bool]
    ) -> Sequence[torch.Tensor] | None:
        """Return the result of :meth:`mapped` if it can be computed without tracers; else None."""
        return None

    def expanded(self) -> Callable[..., Sequence[Any]] | None:
        """Return a function of the operands that computes the same with other control flow.

        A trace of it has no node of this operator. None if the operator can't be expanded.
        """
        return None

    def expanded_pullback(
        self, count: int, wrt: Sequence[int], results: Sequence[int]
    ) -> Derivative | None:
        """Return the pullback in other control flow: NOTE [derivatives in other control flow].

        The function takes the operands of :meth:`pullback`. None if only torch can derive it.
        """
        return self._expanded_derivative(Pullback, run_pullback, count, wrt, results)

    def expanded_pushforward(self, count: int, wrt: Sequence[int]) -> Derivative | None:
        """Return the pushforward in other control flow, as :meth:`expanded_pullback` does.

        The function takes the operands of :meth:`pushforward`.
        """
        return self._expanded_derivative(Pushforward, run_pushforward, count, wrt)

    def _expanded_derivative(
        self, kind: type, derive: Callable[..., Any], *parameters: Any
    ) -> Derivative | None:
        rule = _RULES.get((kind, type(self)))
        if rule is not None:
            return functools.partial(rule, self, *parameters)
        run = self.expanded()
        return None if run is None else functools.partial(derive, run, *parameters)

    def replayed(self, count: int, devices: Sequence[torch.device]) -> ControlFlow:
        return Replayed(self, count, devices)

    def write_retraced(
        self, writer: Writer, run: Callable[..., Sequence[Any]], operands: Sequence[Any]
    ) -> list[torch.fx.Node]:
        """Write a function of the operands that calls control flow: ``bridge/control/retraced``."""
        write_bodies(self)
        numbers_by_expr: dict[Any, Any] = {}

        def number(value: Any) -> Any:
            expr = value.node.expr
            if expr not in numbers_by_expr:
                numbers_by_expr[expr] = writer.number(value, operands)
            return numbers_by_expr[expr]

        body, numbers, constants = retrace(self.name, run, operands, number)
        simplify_part(body.graph)
        return writer.inline(body, [*operands, *numbers], constants)


class ExpandedOperator(ControlFlowOperator):
    """An operator that is written as other control flow if it can be."""

    def write_for_torch(self, writer: Writer, operands: Sequence[Any]) -> list[torch.fx.Node]:
        run = self.expanded()
        return (
            super().write_for_torch(writer, operands)
            if run is None
            else self.write_retraced(writer, run, operands)
        )


class Pullback(ExpandedOperator):
    """The pullback of an operator; its arguments are those of ``ControlFlow.pullback``."""

    def __init__(
        self, operator: ControlFlowOperator, count: int, wrt: Sequence[int], results: Sequence[int]
    ) -> None:
        super().__init__(f"{operator.name}_pullback", operator.bodies)
        self.op, self.count, self.wrt, self.results = operator, count, tuple(wrt), tuple(results)

    def run_count(self, operands: Sequence[Any]) -> int:
        return self.op.run_count(operands)

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        return run_pullback(self.op, self.count, self.wrt, self.results, *operands)

    def expanded(self) -> Derivative | None:
        return self.op.expanded_pullback(self.count, self.wrt, self.results)


class MappedOperator(ExpandedOperator):
    """A batch of calls of an operator: see ``ControlFlow.mapped``."""

    def __init__(self, operator: ControlFlowOperator, batched: Sequence[bool]) -> None:
        super().__init__(f"{operator.name}_mapped", operator.bodies)
        self.op, self.batched = operator, tuple(batched)
        self.run_on_subsets = operator.run_on_subsets

    def result_axes(
        self, operands: Sequence[Axes], through: Callable[[Body, Sequence[Axes]], list[Axes]]
    ) -> list[Axes] | None:
        return self.op.result_axes(operands, through)

    def run_count(self, operands: Sequence[Any]) -> int:
        return self.op.run_count(self._ones(operands))

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        merged = self._merged
        if merged is not None and self._is_cheap_as_one(operands):
            return merged(*operands)
        physical = self.op.of_batch(operands, self.batched)
        return self._call_vmapped(*operands) if physical is None else _make_contiguous(physical)

    def _call_vmapped(self, *operands: Any) -> tuple[Any, ...]:
        return _call_batched(self.op, self.batched, *operands)

    @property
    def _merged(self) -> Callable[..., tuple[Any, ...]] | None:
        """A batch of batches as one batch of all examples; None for a single batch.

        The choices of an inner batch can't be read.
        """
        inner = self.op
        if not self.run_on_subsets or not isinstance(inner, MappedOperator):
            return None
        either = [a or b for a, b in zip(self.batched, inner.batched, strict=True)]
        return _flatten_batches(MappedOperator(inner.op, either), self.batched, inner.batched)

    def expanded(self) -> Callable[..., tuple[Any, ...]]:
        """Return the choices and loops of the whole batch."""
        return self._merged or self._call_vmapped

    def _is_cheap_as_one(self, operands: Sequence[Any]) -> bool:
        """True if merging two vmaps does not expand the operands by much."""
        assert isinstance(self.op, MappedOperator)
        pairs = list(zip(operands, self.batched, self.op.batched, strict=False))
        if not all(type(x) in PLAIN_TENSORS for x, _, _ in pairs):
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

    def without_unused(self, count: int, used: Collection[int]) -> ReducedOperator | None:
        inner = self.op.without_unused(count, used)
        if inner is None:
            return None
        tensors = [i for i in inner.operands if i < len(self.batched)]
        assert isinstance(inner.op, ControlFlowOperator)
        batched = [self.batched[i] for i in tensors]
        if not any(batched):  # the number of calls would be unknown
            return None
        return ReducedOperator(MappedOperator(inner.op, batched), inner.operands, inner.results)


def _call_batched(
    op: Callable[..., tuple[Any, ...]], batched: Sequence[bool], *operands: Any
) -> tuple[Any, ...]:
    """Call an operator, or an equivalent function, for a batch; numbers follow the operands."""
    dims = [0 if each else None for each in batched]
    dims += [None] * (len(operands) - len(dims))
    results: tuple[Any, ...] = vmap(op, in_dims=tuple(dims), randomness="same")(*operands)
    return _make_contiguous(results)


def _make_contiguous(results: Iterable[Any]) -> tuple[Any, ...]:
    """Return results with the strides of NOTE [layouts of results] in ``traced_bodies``."""
    return tuple(x.contiguous() for x in results)


def _flatten_batches(
    form: Callable[..., tuple[Any, ...]], outer: Sequence[bool], inner: Sequence[bool]
) -> Callable[..., tuple[Any, ...]]:
    """Return a batch of batches of calls, from the form of one batch.

    Args:
        form: takes operands with one leading dim in place of the two batch dims.
        outer: for each operand, True if it has the first batch dim.
        inner: for each operand, True if it has the second batch dim.
    """

    def run(*operands: Any) -> tuple[Any, ...]:
        pairs = list(zip(outer, inner, strict=True))
        tensors = operands[: len(pairs)]
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
        results = form(*flat, *operands[len(pairs) :])
        return tuple(x.reshape(rows, columns, *x.shape[1:]) for x in results)

    return run


class Replayed(ExpandedOperator):
    """A repetition of an operator with earlier random numbers: see ``ControlFlow.replayed``."""

    def __init__(
        self, operator: ControlFlowOperator, count: int, devices: Sequence[torch.device]
    ) -> None:
        super().__init__(operator.name, operator.bodies)
        self.op, self.count, self.devices = operator, count, tuple(devices)

    def run_count(self, operands: Sequence[Any]) -> int:
        return self.op.run_count(operands)

    @property
    def random(self) -> bool:
        return False  # it repeats earlier draws

    @property
    def _stop(self) -> int:
        """The position after the random states, the last of which has the numbers of draws."""
        return self.count + RandomStates.count(self.devices)

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        trace = current_trace()
        if trace is not None and trace.for_torch:
            return self.expanded()(*operands)
        *states, drawn = operands[self.count : self._stop]
        now = [random_state(device) for device in self.devices]
        with undoing(functools.partial(self._set, now)):
            self._set(states)
            with preserve_draw_counts():
                set_packed_draw_counts(drawn)
                return self.op(*operands[: self.count], *operands[self._stop :])

    def expanded(self) -> Callable[..., tuple[Any, ...]]:
        """Return the operator itself, which must not draw numbers.

        A call whose effects are unknown may turn out to draw none.
        """

        def run(*operands: Any) -> tuple[Any, ...]:
            form = self.op.expanded() or self.op
            results = form(*operands[: self.count], *operands[self._stop :])
            trace = current_trace()
            assert trace is not None
            if any(map(is_random, every_node(trace.graph))):
                raise NoTorchOperator("it draws the random numbers of another call again")
            return tuple(results)

        return run

    def _set(self, states: Sequence[Any]) -> None:
        for device, state in zip(self.devices, states, strict=True):
            if device.type == "cpu":
                torch.set_rng_state(innermost_value(state))
            else:
                torch.get_device_module(device).set_rng_state(innermost_value(state), device)


class Pushforward(ExpandedOperator):
    """The pushforward of an operator: see ``ControlFlow.pushforward``."""

    def __init__(self, operator: ControlFlowOperator, count: int, wrt: Sequence[int]) -> None:
        super().__init__(f"{operator.name}_pushforward", operator.bodies)
        self.op, self.count, self.wrt = operator, count, tuple(wrt)

    def run_count(self, operands: Sequence[Any]) -> int:
        return self.op.run_count(operands)

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        return run_pushforward(self.op, self.count, self.wrt, *operands)

    def expanded(self) -> Derivative | None:
        return self.op.expanded_pushforward(self.count, self.wrt)
