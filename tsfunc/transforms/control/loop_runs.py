"""The run of a loop: by Python, on active subsets, on all examples, or recorded in a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import torch

from tsfunc.bridge.control.attempts import Attempt, CannotUnbatch, NeedsWholeBatch
from tsfunc.bridge.control.control_flow import Body
from tsfunc.bridge.control.subsets import SubsetLevel, run_guarded
from tsfunc.bridge.grad.autograd import is_differentiable
from tsfunc.bridge.sizes.symbols import check_size
from tsfunc.bridge.trace.trace_level import current_trace
from tsfunc.bridge.tracers.batch_tracer import BatchLevel, wrap
from tsfunc.bridge.tracers.draw_keys import (
    DrawCounts,
    count_draws,
    draw_counts,
    draws_are_counted,
    merge_draw_counts,
    set_draw_counts,
)
from tsfunc.bridge.tracers.nesting import innermost_value
from tsfunc.dispatch.state import tls
from tsfunc.errors import DataDependentError
from tsfunc.program.passes.effects import is_random
from tsfunc.transforms.checkpoint import run as run_checkpointed
from tsfunc.transforms.control import physical_batches
from tsfunc.transforms.control.active import SubsetGroup, repeat
from tsfunc.transforms.control.choice import (
    BatchedChoice,
    Choice,
    DiffersAtInnerLevel,
    TracedChoice,
    choice_of,
    truth_of,
    values_at,
)
from tsfunc.transforms.control.control_operators import Checkpoint, While, run_by
from tsfunc.transforms.control.control_recording import record_while
from tsfunc.transforms.control.derived_operators import (
    DerivativeOperands,
    Pullback,
    Pushforward,
    derivative_rule,
    run_jvp,
    with_zeros,
)
from tsfunc.transforms.control.loop_values import LoopValues
from tsfunc.transforms.control.outputs import (
    as_tensor,
    check_carried,
    combine_leaves,
    is_number,
    numbers_to_tensors,
    where,
)
from tsfunc.transforms.control.scan import run_pullback_through
from tsfunc.transforms.control.skipped_bodies import check_zero_steps

ADVICE = (
    "The carry keeps its structure, types and shapes from step to step: convert the results of "
    "the body (x.to(dtype)), or start with a carry of their types."
)


class Loop:
    """A loop: a condition, a body, and the checkpoint mode of reverse mode.

    Args:
        writes: False if the body is known not to write into the carry.
    """

    def __init__(
        self,
        label: str,
        cond_fun: Callable[[Any], Any],
        body_fun: Callable[[Any], Any],
        checkpoint: Checkpoint = None,
        writes: bool | None = None,
    ) -> None:
        self.label, self.cond_fun, self.body_fun = label, cond_fun, body_fun
        self.checkpoint, self.writes = checkpoint, writes
        self.written: Callable[..., Any] = body_fun  # the user's function that body_fun calls
        self.checked = False
        self.draws = False  # True if the recorded condition draws random numbers

    def run_to_end(self, carry: Any) -> Any:
        if self.checkpoint is None or not torch.is_grad_enabled() or current_trace() is not None:
            return self.run(carry, None)[0]
        size, done = 1, False
        while not done:
            carry, done = self.block(carry, size)
            size = size + 1 if self.checkpoint == "sqrt" else 2 * size
        return carry

    def block(self, carry: Any, size: int) -> tuple[Any, bool]:
        """Run at most ``size`` steps; reverse mode keeps only the first carry."""

        def run(carry: Any) -> tuple[Any, bool]:
            if self.checkpoint == "sqrt" or size == 1:
                return self.run(carry, size)
            carry, done = self.block(carry, size // 2)
            return (carry, done) if done else self.block(carry, size // 2)

        return run_checkpointed(run, (carry,))

    def run(self, carry: Any, limit: int | None) -> tuple[Any, bool]:
        """Run the loop, or its next ``limit`` steps; return the carry, and True at its end."""
        self.values = LoopValues(self.writes)
        steps = 0
        trace = current_trace()
        traced = trace is not None
        while True:
            nodes_before = 0 if trace is None else len(trace.graph.nodes)
            value = self.cond_fun(carry)
            if trace is not None:
                self.draws = any(map(is_random, list(trace.graph.nodes)[nodes_before:]))
            choice: Choice | None = None if traced else truth_of(value)
            if choice is None:
                choice = choice_of(value, self.label)
            if isinstance(choice, BatchedChoice):
                left = None if limit is None else limit - steps
                return self.run_batched(carry, value, choice, left)
            if isinstance(choice, TracedChoice):
                return self.record(carry, choice.value), True
            if not choice:
                return self.check_end(carry), True
            if steps == limit:
                return carry, False
            if steps == 0 and traced:
                # The condition is known for this step, but may be traced later. A body that reads
                # numbers of its carry as Python values is called for each step.
                with suppress(DataDependentError):
                    return self.record(carry, False), True
            sure = self.certain_steps(carry) if limit is None and not traced else 1
            carry = self.steps(carry, sure)
            steps += sure

    def certain_steps(self, carry: Any) -> int:
        """Return a number of steps that are certain to be made if the condition holds."""
        return 1

    def run_batched(
        self, carry: Any, value: Any, choice: BatchedChoice, limit: int | None
    ) -> tuple[Any, bool]:
        """Run the loop if the condition differs from example to example."""
        self.values = LoopValues(self.writes)
        level = choice.level
        if choice.is_empty:
            return numbers_to_tensors(carry), True
        if not choice.known and current_trace() is not None:
            with suppress(CannotUnbatch):
                return self.recorded(carry, wrap(choice.values, 0, level)), True
        with Attempt(level) as attempt:
            try:
                if choice.known:
                    return self.run_on_subsets(carry, choice, limit)
                return self.run_masked(carry, value, level, guarded=True), True
            except NeedsWholeBatch as error:
                attempt.give_up(error)
                inside = None
            except DiffersAtInnerLevel as error:
                # A body that batches the carry also batches the condition from the second step on.
                if error.caller is not self:
                    raise
                attempt.undo()
                inside = BatchedChoice(error.level, values_at(value, error.level), False)
        if inside is None:
            return self.run_masked(carry, value, level, guarded=False), True
        return self.run_batched(carry, value, inside, limit)

    def steps(self, carry: Any, count: int) -> Any:
        for _ in range(count):
            carry = self.step(carry)
        return carry

    def step(self, carry: Any) -> Any:
        """Run the body once; only the first result's type is checked."""
        old, new = self.values.call(self.body_fun, carry)
        if not self.checked:
            check_carried(self.label, ("the carry", "the result of the body"), (old, new), ADVICE)
            self.checked = True
        return self.values.next_carry(old, new)

    def copy_carry(self) -> None:
        """Let the next step copy a carry of which other examples may have the same tensors."""
        if self.values.written:
            self.values = LoopValues(self.writes)

    def check_end(self, carry: Any) -> Any:
        """Return the last carry; without a step, check the body's type now."""
        if not self.checked:
            self.checked = True
            check_zero_steps(self.label, self.written, self.body_fun, carry, ADVICE)
        return carry

    def run_on_subsets(
        self, carry: Any, choice: BatchedChoice, limit: int | None
    ) -> tuple[Any, bool]:
        """Run each step on the subset of examples that are not done."""
        active = innermost_value(choice.values).bool()
        if not self.checked and not bool(active.any()):
            self.check_end(carry)
        state = carry, draw_counts(choice.level.depth)
        return repeat(SubsetGroup(self.label, choice.level), state, active, self.on_group, limit)

    def on_group(
        self, group: SubsetGroup, state: tuple[Any, DrawCounts], limit: int | None
    ) -> tuple[Any, int, Any]:
        """Make steps on a group of examples, from the state of ``repeat``."""
        carry, drawn = state
        with group.running((self.cond_fun, self.body_fun, carry)):
            set_draw_counts(drawn)
            if isinstance(group.level, SubsetLevel):
                self.copy_carry()
            carry, steps, active = self.common_steps(group.level, limit, carry)
            return (carry, draw_counts(group.level.depth)), steps, active

    def common_steps(
        self, subset: BatchLevel, limit: int | None, carry: Any
    ) -> tuple[Any, int, Any]:
        """Make steps as long as all examples of the subset continue.

        Returns:
            The carry, the number of steps, and the reason to stop: a mask of the examples that
            continue, or True if the loop is at its end.
        """
        steps = 0
        traced = current_trace() is not None
        while True:
            carry = self.step(carry)
            steps += 1
            if steps == limit:
                return carry, steps, False
            value = self.cond_fun(carry)
            choice: Choice | None = None if traced else truth_of(value, subset)
            if choice is None:
                choice = choice_of(value, self.label)
            if isinstance(choice, BatchedChoice) and choice.level is subset and choice.known:
                return carry, steps, innermost_value(choice.values).bool()
            if isinstance(choice, BatchedChoice | TracedChoice):
                carry, done = self.run(carry, None if limit is None else limit - steps)
                return carry, steps, done
            if not choice:
                return carry, steps, True

    def run_masked(self, carry: Any, value: Any, level: BatchLevel, guarded: bool) -> Any:
        """Make every step on all examples, and keep the last carry of those that are done.

        Args:
            guarded: True to run the body on guarded subsets: NOTE [unreadable choices] in ``cond``.
                False for a body that reads values of examples that are done.
        """

        def body(state: Any) -> Any:
            carry, active = state
            self.copy_carry()
            step = count_draws(self.and_condition, level.depth)
            if guarded:
                stepped, drawn = run_guarded(level, active, self.label, step, (carry,))
            else:
                stepped, drawn = step(carry)
            return self.keep_finished(level, active, stepped, drawn, carry)

        self.values = LoopValues(self.writes)
        # This loop runs as long as any example continues; its body checks the steps.
        every = Loop(self.label, lambda state: state[1].any(), body, self.checkpoint, writes=False)
        every.checked = True
        return every.run_to_end((carry, values_at(value, level)))[0]

    def keep_finished(
        self, level: BatchLevel, active: torch.Tensor, stepped: Any, drawn: DrawCounts, carry: Any
    ) -> Any:
        """Return the new state of the active examples, and the old one of the others."""

        def merge(pair: Sequence[torch.Tensor]) -> torch.Tensor:
            return where(level, active, *pair)

        new, again = stepped
        merge_draw_counts([drawn, draw_counts(level.depth)], merge)
        return combine_leaves([new, carry], merge), active & values_at(again, level, self)

    def record(self, carry: Any, value: Any) -> Any:
        """Record the loop as one node of the trace."""
        try:
            return self.recorded(carry, value)
        except CannotUnbatch:
            return self.recorded(carry, None)

    def recorded(self, carry: Any, value: Any) -> Any:
        """Record the loop; without a first condition no vmap is hidden."""

        def unhidden(carry: Any, value: Any, level: BatchLevel) -> Any:
            choice = BatchedChoice(level, values_at(value, level), False)
            return self.run_batched(carry, value, choice, None)[0]

        if self.draws or draws_are_counted():
            return self.recorded_with_draws(carry, value, unhidden)
        return record_while(
            self.label,
            self.cond_fun,
            self.body_fun,
            carry,
            value,
            unhidden,
            self.checkpoint,
            ADVICE,
        )

    def recorded_with_draws(self, carry: Any, value: Any, unhidden: Callable[..., Any]) -> Any:
        """Record the loop with its condition and the numbers of draws in the carry.

        The condition may draw too: it is evaluated once for each step, in the body.
        """

        def flag(value: Any) -> torch.Tensor:
            tensor: torch.Tensor = as_tensor(value) if is_number(value) else value
            return tensor.reshape(()) != 0

        def body(state: Any) -> Any:
            carry, drawn, _ = state
            set_draw_counts(drawn)
            new = self.body_fun(carry)
            again = flag(self.cond_fun(new))
            return new, drawn | draw_counts(), again  # those of hidden vmaps stay

        def unseen(state: Any, value: Any, level: BatchLevel) -> Any:
            carry, drawn, _ = state
            set_draw_counts(drawn)
            return unhidden(carry, value, level), draw_counts(), value

        state = carry, draw_counts(), flag(value if isinstance(value, torch.Tensor) else True)
        last, drawn, _ = record_while(
            self.label, lambda state: state[2], body, state, value, unseen, self.checkpoint,
            ADVICE, lambda state: state[0],
        )  # fmt: skip
        set_draw_counts(drawn)
        return last

    def and_condition(self, carry: Any) -> Any:
        new = self.step(carry)
        return new, self.cond_fun(new)


class CountedLoop(Loop):
    """A loop whose carry starts with a counter and its upper bound."""

    numbered: Callable[[Any, Any], Any]

    def steps(self, carry: Any, count: int) -> Any:
        """Make steps that are certain; the counter values are made a few hundred at a time."""
        if count and not self.checked:
            carry, count = self.step(carry), count - 1
        while count > 1 and isinstance(carry[0], torch.Tensor):
            number, last, value = carry
            some = min(count, _AT_A_TIME)
            after = torch.arange(some + 1, device=number.device, dtype=number.dtype)
            *numbers, number = (number.reshape(()) + after).unbind()
            for i in numbers:
                value = self.values.next_carry(value, self.numbered(i, value))
            carry = number, last, value
            count -= some
        return super().steps(carry, count)

    def common_steps(
        self, subset: BatchLevel, limit: int | None, carry: Any
    ) -> tuple[Any, int, Any]:
        left = (
            None
            if limit is not None or current_trace() is not None
            else self.remaining_steps(carry)
        )
        if isinstance(left, BatchedChoice) and left.level is subset and left.known:
            counts = innermost_value(left.values)
            sure = int(counts.min())
            if sure > 0:
                return self.steps(carry, sure), sure, counts > sure
        elif isinstance(left, int) and left > 0:
            return self.steps(carry, left), left, True
        return super().common_steps(subset, limit, carry)

    def remaining_steps(self, carry: Any) -> Choice | None:
        """Return the number of remaining steps; None if the bounds are not integers."""
        left = carry[1] - carry[0]
        if isinstance(left, float) or (isinstance(left, torch.Tensor) and left.is_floating_point()):
            return None
        return choice_of(left, self.label)

    def certain_steps(self, carry: Any) -> int:
        left = self.remaining_steps(carry)
        return left if isinstance(left, int) else 1


class _LoopInProgram(Loop):
    """A loop of a program, whose bodies are graphs."""

    bodies: tuple[Body, Body]
    rest: tuple[Any, ...]

    def run_on_subsets(
        self, carry: Any, choice: BatchedChoice, limit: int | None
    ) -> tuple[Any, bool]:
        if limit is None:
            operands = (*carry, *self.rest)
            carried = physical_batches.run_known_loop(*self.bodies, len(carry), operands, choice)
            if carried is not None:
                return carried, True
        return super().run_on_subsets(carry, choice, limit)


@run_by(While)
def _run_traced_loop(op: While, *operands: Any) -> Any:
    """Run a traced loop."""
    condition, body = op.bodies
    step: Any = body.function
    if not tls.state.levels:
        step, operands = body.with_own_carry(operands)
    rest = operands[op.carried :]
    loop = _LoopInProgram(
        op.name,
        lambda carry: condition(*carry, *rest)[0],
        lambda carry: tuple(step((*carry, *rest))),
        op.checkpoint,
        writes=False,
    )
    loop.bodies, loop.rest, loop.checked = (condition, body), rest, True
    return loop.run_to_end(operands[: op.carried])


@derivative_rule(Pullback, While)
def _pullback(
    op: While, count: int, wrt: Sequence[int], results: Sequence[int], *operands: Any
) -> Any:
    """Count the steps, and pull back through a scan of so many steps.

    A scan has at least one step, whose pullback is not used if the loop makes none.
    """
    parts = DerivativeOperands.of(operands, count, len(results))
    condition, body = op.bodies
    carry, outer = parts.inputs[: op.carried], parts.inputs[op.carried :]
    rest = (*outer, *parts.numbers)
    device = parts.derivatives[0].device
    none = torch.zeros((), dtype=torch.int64, device=device)
    loop = Loop(
        f"{op.name}_pullback",
        lambda state: condition(*state[1:], *rest)[0],
        lambda state: (state[0] + 1, *body(*state[1:], *rest)),
        writes=False,
    )
    steps_made = loop.run_to_end((none, *carry))[0]
    steps: Any = steps_made.clamp(min=1).item()
    check_size(steps >= 1, f"{op.name} makes at least one step")
    numbers = torch.arange(steps, device=device)
    cotangents = dict(zip(results, parts.derivatives, strict=True))

    def step(*values: Any) -> Sequence[Any]:
        return body(*values[: op.carried], *values[op.carried + 1 :])

    after = [i if i < op.carried else i + 1 for i in wrt]
    cts_in = run_pullback_through(step, (carry, [numbers], rest), after, cotangents, None, False)
    first = with_zeros(cotangents, parts.inputs, wrt)
    return tuple(torch.where(steps_made > 0, *pair) for pair in zip(cts_in, first, strict=True))


@derivative_rule(Pushforward, While)
def _pushforward(op: While, count: int, wrt: Sequence[int], *operands: Any) -> tuple[Any, ...]:
    """Run a loop over the carry and its tangents."""
    condition, body = op.bodies
    parts = DerivativeOperands.of(operands, count, len(wrt))
    tangents = dict(zip(wrt, parts.derivatives, strict=True))
    carry, rest = parts.inputs[: op.carried], (*parts.inputs[op.carried :], *parts.numbers)
    moved = [i for i, x in enumerate(carry) if is_differentiable(x)]
    outer = [i for i in wrt if i >= op.carried]
    chosen, outside = [*moved, *outer], [tangents[i] for i in outer]

    def step(state: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        values = (*state[: op.carried], *rest)
        new, tangents_out = run_jvp(body, values, chosen, (*state[op.carried :], *outside), ())
        return (*new, *(tangents_out[i] for i in moved))

    loop = Loop(
        f"{op.name}_pushforward",
        lambda state: condition(*state[: op.carried], *rest)[0],
        step,
        op.checkpoint,
        writes=False,
    )
    last = loop.run_to_end((*carry, *with_zeros(tangents, carry, moved)))
    return with_zeros(dict(zip(moved, last[op.carried :], strict=True)), carry, range(op.carried))


# The most counter values that one operator call makes.
_AT_A_TIME: Final = 256
