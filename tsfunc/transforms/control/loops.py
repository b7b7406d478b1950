"""``while_loop`` and ``fori_loop``: a body runs as long as a condition holds.

If the condition is known, the loop is Python's, and reverse mode goes back through its steps. If it
differs from example to example of a vmap, finished examples leave the batch: each step runs on the
active subset alone, and a loop costs the sum of its examples' steps. See NOTE [active subsets] in
``bridge/control/subsets``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, Final, TypeVar

import optree
import torch

from tsfunc.bridge.control.attempts import Attempt, CannotUnbatch, NeedsWholeBatch
from tsfunc.bridge.control.bodies import current_trace
from tsfunc.bridge.control.control_flow import Body
from tsfunc.bridge.control.subsets import (
    Merge,
    SubsetLevel,
    guarded_subset,
    in_subset,
    relabel,
    run_in_subset,
    subset_of,
)
from tsfunc.bridge.tracers.batch_tracer import BatchLevel, wrap
from tsfunc.bridge.tracers.boundaries import boundary
from tsfunc.bridge.tracers.draw_keys import (
    DrawCounts,
    counted,
    draw_counts,
    draws_are_counted,
    merge_draw_counts,
    set_draw_counts,
)
from tsfunc.bridge.tracers.dynamo import torch_records
from tsfunc.bridge.tracers.questions import known_to_hold
from tsfunc.errors import DataDependentError
from tsfunc.program.passes.effects import is_random
from tsfunc.transforms.checkpoint import run as run_checkpointed
from tsfunc.transforms.control import batched, in_torch
from tsfunc.transforms.control.arguments import also_called, check_callable, takes_entries
from tsfunc.transforms.control.choice import (
    ByExample,
    Choice,
    DiffersInside,
    Traced,
    choice_of,
    read,
    truth_of,
    values_at,
)
from tsfunc.transforms.control.operators import Checkpoint, While, run_by
from tsfunc.transforms.control.outputs import (
    as_tensor,
    check_carried,
    in_tensors,
    is_number,
    together,
    where,
)
from tsfunc.transforms.control.programs import record_scan, record_while
from tsfunc.transforms.control.rank_agreement import agreed_loop, exchanging
from tsfunc.transforms.control.zero_steps import check_zero_steps

_Carry = TypeVar("_Carry")

_ADVICE = (
    "The carry keeps its structure, types and shapes from step to step: convert what the body "
    "returns (x.to(dtype)), or start with what it returns."
)


@boundary("while_loop", traceable=True)
@also_called(cond_fn="cond_fun", body_fn="body_fun", carried_inputs="init_val")
def while_loop(
    cond_fun: Callable[..., Any],
    body_fun: Callable[..., Any],
    init_val: _Carry,
    *,
    checkpoint: Checkpoint = None,
) -> _Carry:
    """Call a body on its own result as long as a condition holds.

    Args:
        cond_fun: takes the carry; returns a bool, or a tensor of one element.
        body_fun: takes the carry and returns the next carry: a pytree of the same structure, with
            leaves of the same dtypes and shapes.
        init_val: the first carry, any pytree.
        checkpoint: the values that reverse mode keeps. None keeps the values that autograd saves
            in each step, so that memory grows with the number of steps. "sqrt" keeps only carries,
            about the square root of ``2 n`` for ``n`` steps; the backward pass runs each step a
            second time. "log" keeps about ``log2(n)`` carries at a time, and runs a step up to
            that often.

    Returns:
        The first carry for which the condition does not hold.

    Raises:
        TypeError: the condition is not a valid predicate.
        TypeCheckError: the carry changes its type, or would do so in a first step.

    Example:
        >>> import torch
        >>> from tsfunc import vmap, while_loop
        >>> def doubled_past_100(x):
        ...     return while_loop(lambda x: x < 100, lambda x: 2 * x, x)
        >>> vmap(doubled_past_100)(torch.tensor([1., 30., 200.]))
        tensor([128., 120., 200.])

    Corresponds to ``jax.lax.while_loop``; it is also differentiable in reverse mode. torch's form,
    with functions that take the entries of a tuple or list as arguments, is accepted too, with its
    parameter names. Functions of one argument therefore get the entry of a tuple of one entry, not
    the tuple.
    """
    if checkpoint not in (None, "sqrt", "log"):
        raise ValueError(
            f'while_loop: checkpoint must be None, "sqrt" or "log", got {checkpoint!r}.'
        )
    check_callable("while_loop", cond_fun=cond_fun, body_fun=body_fun)
    if torch_records():
        last: _Carry = in_torch.while_loop(cond_fun, body_fun, init_val)
        return last
    if not takes_entries(cond_fun, init_val):
        last = _loop("while_loop", cond_fun, body_fun, checkpoint, init_val).whole(init_val)
        return last

    entries: Any = init_val

    def body(carry: Any) -> Any:
        new = body_fun(*carry)
        if len(entries) == 1 and type(new) not in (tuple, list):
            new = (new,)
        return type(entries)(new) if type(new) in (tuple, list) else new

    loop = _loop("while_loop", lambda carry: cond_fun(*carry), body, checkpoint, init_val)
    loop.written = body_fun
    last = loop.whole(init_val)
    return last


@boundary("fori_loop", traceable=True)
def fori_loop(
    lower: Any,
    upper: Any,
    body_fun: Callable[[Any, Any], Any],
    init_val: _Carry,
    *,
    checkpoint: Checkpoint = None,
) -> _Carry:
    """Call a body with each integer of a range and its own last result.

    Args:
        lower: the first integer; a number or a tensor of one element.
        upper: the end of the range, exclusive; as ``lower``.
        body_fun: takes the integer (an int if both bounds are known integers, else a tensor)
            and the carry; returns the next carry, of the same type.
        init_val: the first carry, any pytree.
        checkpoint: as for ``while_loop``.

    Returns:
        The last carry.

    Raises:
        TypeError: a bound is not a number.
        TypeCheckError: the carry changes its type, or would do so in a first step.

    Example:
        >>> import torch
        >>> from tsfunc import fori_loop
        >>> fori_loop(0, 5, lambda i, total: total + i, torch.tensor(0))
        tensor(10)

    Corresponds to ``jax.lax.fori_loop``; it is differentiable in reverse mode even if the bounds
    are tensors.
    """
    check_callable("fori_loop", body_fun=body_fun)
    if torch_records():
        last: _Carry = in_torch.fori_loop(lower, upper, body_fun, init_val)
        return last
    if isinstance(lower, torch.Tensor) or isinstance(upper, torch.Tensor):
        # The ranks of a mesh may have different bounds.
        carry = (torch.as_tensor(lower), torch.as_tensor(upper), init_val)
        step = lambda carry: (carry[0] + 1, carry[1], body_fun(carry[0], carry[2]))  # noqa: E731
        if exchanging("fori_loop", (step,), (carry,)):
            counts = lambda carry: carry[0] < carry[1]  # noqa: E731
            last = _loop("fori_loop", counts, step, checkpoint, carry).whole(carry)[2]
            return last
    bounds: list[Any] = [_bound(value) for value in (lower, upper)]
    trace = current_trace()
    if trace is not None and _numbered(*bounds):
        if all(isinstance(b, int) for b in bounds) and bounds[1] <= bounds[0]:
            step = functools.partial(body_fun, bounds[0])
            check_zero_steps("fori_loop", body_fun, step, init_val, _ADVICE)
            return init_val
        numbers = torch.arange(bounds[0], torch.sym_max(*bounds))
        last = record_scan(
            "fori_loop", lambda carry, i: (body_fun(i, carry), None), init_val, numbers, None,
            False, 0, _ADVICE,
        )[0]  # fmt: skip
        return last
    tensor = next((b for b in bounds if isinstance(b, torch.Tensor)), None)
    if tensor is not None:
        bounds = [b if isinstance(b, torch.Tensor) else as_tensor(b, device=tensor.device)
                  for b in bounds]  # fmt: skip

    def body(carry: Any) -> Any:
        i, last, value = carry
        return i + 1, last, body_fun(i, value)

    loop = _Counted("fori_loop", lambda carry: carry[0] < carry[1], body, checkpoint)
    loop.numbered = loop.written = body_fun
    last = loop.whole((*bounds, init_val))[2]
    return last


def _loop(
    what: str,
    cond_fun: Callable[[Any], Any],
    body_fun: Callable[[Any], Any],
    checkpoint: Checkpoint,
    carry: Any,
) -> Loop:
    """Return a loop; if it exchanges values along mesh axes, it ends on all ranks at once."""
    axes = exchanging(what, (cond_fun, body_fun), (carry,))
    if not axes:
        return Loop(what, cond_fun, body_fun, checkpoint)
    loop = Loop(what, *agreed_loop(axes, cond_fun, body_fun), checkpoint)
    loop.written = body_fun
    return loop


def _bound(value: Any) -> Any:
    """Return a bound of a range: an int if its value is known."""
    if isinstance(value, float) or (
        isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() == 1
    ):
        return value  # it has a gradient, and so do the counter values
    choice = choice_of(value, "fori_loop")
    if isinstance(choice, bool):
        raise TypeError("fori_loop: the bounds must be integers, got a bool.")
    return choice if isinstance(choice, int) else value


def _numbered(lower: Any, upper: Any) -> bool:
    """True if the length of a range is known, or symbolic and at least one."""
    if isinstance(lower, int) and isinstance(upper, int):
        return True
    return all(isinstance(b, int | torch.SymInt) for b in (lower, upper)) and known_to_hold(
        lower < upper
    )


class Loop:
    """A loop: a condition, a body, and the checkpoint mode of reverse mode."""

    def __init__(
        self,
        what: str,
        cond_fun: Callable[[Any], Any],
        body_fun: Callable[[Any], Any],
        checkpoint: Checkpoint = None,
    ) -> None:
        self.what, self.cond_fun, self.body_fun = what, cond_fun, body_fun
        self.checkpoint = checkpoint
        self.written: Callable[..., Any] = body_fun  # the user's function that body_fun calls
        self.checked = False
        self.draws = False  # True if the recorded condition draws random numbers

    def whole(self, carry: Any) -> Any:
        """Run the loop to its end."""
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

        found: tuple[Any, bool] = run_checkpointed(run, (carry,))
        return found

    def run(self, carry: Any, limit: int | None) -> tuple[Any, bool]:
        """Run the loop, or its next ``limit`` steps; return the carry, and True at its end."""
        steps = 0
        trace = current_trace()
        traced = trace is not None
        while True:
            known = 0 if trace is None else len(trace.graph.nodes)
            value = self.cond_fun(carry)
            if trace is not None:
                self.draws = any(map(is_random, list(trace.graph.nodes)[known:]))
            choice: Choice | None = None if traced else truth_of(value)
            if choice is None:
                choice = choice_of(value, self.what)
            if isinstance(choice, ByExample):
                left = None if limit is None else limit - steps
                return self.each_its_own(carry, value, choice, left)
            if isinstance(choice, Traced):
                return self.record(carry, choice.value), True
            if not choice:
                return self.ended(carry), True
            if steps == limit:
                return carry, False
            if steps == 0 and traced:
                # The condition is known for this step, but may be traced later. A body that reads
                # numbers of its carry as Python values is called for each step.
                with suppress(DataDependentError):
                    return self.record(carry, False), True
            sure = self.sure(carry) if limit is None and not traced else 1
            carry = self.steps(carry, sure)
            steps += sure

    def sure(self, carry: Any) -> int:
        """Return a number of steps that are certain to be made if the condition holds."""
        return 1

    def each_its_own(
        self, carry: Any, value: Any, choice: ByExample, limit: int | None
    ) -> tuple[Any, bool]:
        """Run the loop if the condition differs from example to example."""
        level = choice.level
        if choice.is_of_none:
            return in_tensors(carry), True
        if not choice.known and current_trace() is not None:
            with suppress(CannotUnbatch):
                return self.recorded(carry, wrap(choice.values, 0, level)), True
        with Attempt(level) as attempt:
            try:
                if choice.known:
                    return self.on_subsets(carry, choice, limit)
                return self.unseen(carry, value, level), True
            except NeedsWholeBatch as error:
                attempt.give_up(error)
                inside = None
            except DiffersInside as error:
                # A body that batches the carry also batches the condition from the second step on.
                if error.by is not self:
                    raise
                attempt.undo()
                inside = ByExample(error.level, values_at(value, error.level), False)
        if inside is None:
            return self.selected(carry, value, level), True
        return self.each_its_own(carry, value, inside, limit)

    def steps(self, carry: Any, count: int) -> Any:
        for _ in range(count):
            carry = self.step(carry)
        return carry

    def step(self, carry: Any) -> Any:
        """Run the body once; only the first result's type is checked."""
        new = self.body_fun(carry)
        if not self.checked:
            check_carried(self.what, ("the carry", "the result of the body"), (carry, new), _ADVICE)
            self.checked = True
        return new

    def ended(self, carry: Any) -> Any:
        """Return the last carry; without a step, check the body's type now."""
        if not self.checked:
            self.checked = True
            check_zero_steps(self.what, self.written, self.body_fun, carry, _ADVICE)
        return carry

    def on_subsets(self, carry: Any, choice: ByExample, limit: int | None) -> tuple[Any, bool]:
        """Run each step on the subset of examples that are not done."""
        subset = choice.level
        put_away = _PutAway(self.what, subset)
        drawn = draw_counts(subset.depth)
        active: Any = read(choice.values).bool()
        steps = 0
        while True:
            count = int(active.sum())
            if count < subset.batch_size:
                if not count:
                    return put_away.merged_with(subset, self.ended(carry), drawn), True
                put_away.add(subset, ~active, (carry, drawn))
                # Batched values raise the errors of a step on tracers.
                subset = _some_of(subset, active, single=count == 1 and steps > 0)
                carry, drawn = subset.of_parent(self.what, (carry, drawn))
            if steps == limit:
                return put_away.merged_with(subset, carry, drawn), False
            left = None if limit is None else limit - steps
            roots = self, carry
            with (
                in_subset(subset, self.what, roots)
                if isinstance(subset, SubsetLevel)
                else nullcontext()
            ):
                set_draw_counts(drawn)
                carry, made, active = self.together(subset, left, carry)
                drawn = draw_counts(subset.depth)
            steps += made
            if isinstance(active, bool):
                return put_away.merged_with(subset, carry, drawn), active

    def together(self, subset: BatchLevel, limit: int | None, carry: Any) -> tuple[Any, int, Any]:
        """Make steps as long as all examples of the subset continue.

        Returns:
            The carry, the number of steps, and the reason to stop: a mask of the examples that
            continue, or True if the loop is at its end.
        """
        made = 0
        traced = current_trace() is not None
        while True:
            carry = self.step(carry)
            made += 1
            if made == limit:
                return carry, made, False
            value = self.cond_fun(carry)
            choice: Choice | None = None if traced else truth_of(value, subset)
            if choice is None:
                choice = choice_of(value, self.what)
            if isinstance(choice, ByExample) and choice.level is subset and choice.known:
                return carry, made, read(choice.values).bool()
            if isinstance(choice, ByExample | Traced):
                carry, done = self.run(carry, None if limit is None else limit - made)
                return carry, made, done
            if not choice:
                return carry, made, True

    def unseen(self, carry: Any, value: Any, level: BatchLevel) -> Any:
        """Run the loop at the outer level: NOTE [unreadable choices] in ``cond``."""
        active = values_at(value, level)

        def body(state: Any) -> Any:
            carry, active = state
            subset = guarded_subset(level, active)
            step = counted(self.and_condition, level.depth)
            found = run_in_subset(subset, self.what, step, (carry,))
            found, drawn = optree.tree_map(lambda x: relabel(x, subset, level), found)
            return self.kept(level, active, found, drawn, carry)

        return self.outer(body).whole((carry, active))[0]

    def selected(self, carry: Any, value: Any, level: BatchLevel) -> Any:
        """Make every step on all examples, for a body that reads values of finished ones."""

        def body(state: Any) -> Any:
            carry, active = state
            found, drawn = counted(self.and_condition, level.depth)(carry)
            return self.kept(level, active, found, drawn, carry)

        return self.outer(body).whole((carry, values_at(value, level)))[0]

    def kept(
        self, level: BatchLevel, active: torch.Tensor, found: Any, drawn: DrawCounts, carry: Any
    ) -> Any:
        """Return the new state of the active examples, and the old one of the others."""

        def merge(pair: Sequence[torch.Tensor]) -> torch.Tensor:
            return where(level, active, *pair)

        new, again = found
        merge_draw_counts([drawn, draw_counts(level.depth)], merge)
        return together([new, carry], merge), active & values_at(again, level, self)

    def outer(self, body: Callable[[Any], Any]) -> Loop:
        """Return a loop that runs as long as any example continues."""
        loop = Loop(self.what, lambda state: state[1].any(), body, self.checkpoint)
        loop.checked = True  # its body checks the steps
        return loop

    def record(self, carry: Any, value: Any) -> Any:
        """Record the loop as one node of the trace."""
        try:
            return self.recorded(carry, value)
        except CannotUnbatch:
            return self.recorded(carry, None)

    def recorded(self, carry: Any, value: Any) -> Any:
        """Record the loop; without a first condition no vmap is hidden."""

        def masked(carry: Any, value: Any, level: BatchLevel) -> Any:
            choice = ByExample(level, values_at(value, level), False)
            return self.each_its_own(carry, value, choice, None)[0]

        if self.draws or draws_are_counted():
            return self.recorded_with_draws(carry, value, masked)
        return record_while(
            self.what, self.cond_fun, self.body_fun, carry, value, masked, self.checkpoint, _ADVICE
        )

    def recorded_with_draws(self, carry: Any, value: Any, masked: Callable[..., Any]) -> Any:
        """Record the loop with its condition and the numbers of draws in the carry.

        The condition may draw too: it is evaluated once for each step, in the body.
        """

        def flag(value: Any) -> torch.Tensor:
            found: torch.Tensor = as_tensor(value) if is_number(value) else value
            return found.reshape(()) != 0

        def body(state: Any) -> Any:
            carry, drawn, _ = state
            set_draw_counts(drawn)
            new = self.body_fun(carry)
            again = flag(self.cond_fun(new))
            return new, drawn | draw_counts(), again  # those of hidden vmaps stay

        def unseen(state: Any, value: Any, level: BatchLevel) -> Any:
            carry, drawn, _ = state
            set_draw_counts(drawn)
            return masked(carry, value, level), draw_counts(), value

        state = carry, draw_counts(), flag(value if isinstance(value, torch.Tensor) else True)
        last, drawn, _ = record_while(
            self.what, lambda state: state[2], body, state, value, unseen, self.checkpoint,
            _ADVICE, lambda state: state[0],
        )  # fmt: skip
        set_draw_counts(drawn)
        return last

    def and_condition(self, carry: Any) -> Any:
        new = self.step(carry)
        return new, self.cond_fun(new)


class _Counted(Loop):
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
                value = self.numbered(i, value)
            carry = number, last, value
            count -= some
        return super().steps(carry, count)

    def together(self, subset: BatchLevel, limit: int | None, carry: Any) -> tuple[Any, int, Any]:
        left = None if limit is not None or current_trace() is not None else self.left(carry)
        if isinstance(left, ByExample) and left.level is subset and left.known:
            counts = read(left.values)
            sure = int(counts.min())
            if sure > 0:
                return self.steps(carry, sure), sure, counts > sure
        elif isinstance(left, int) and left > 0:
            return self.steps(carry, left), left, True
        return super().together(subset, limit, carry)

    def left(self, carry: Any) -> Choice | None:
        """Return the number of remaining steps; None if the bounds are not integers."""
        left = carry[1] - carry[0]
        if isinstance(left, float) or (isinstance(left, torch.Tensor) and left.is_floating_point()):
            return None
        return choice_of(left, self.what)

    def sure(self, carry: Any) -> int:
        left = self.left(carry)
        return left if isinstance(left, int) else 1


class _LoopInProgram(Loop):
    """A loop of a program, whose bodies are graphs."""

    bodies: tuple[Body, Body]
    rest: tuple[Any, ...]

    def on_subsets(self, carry: Any, choice: ByExample, limit: int | None) -> tuple[Any, bool]:
        if limit is None:
            operands = (*carry, *self.rest)
            found = batched.loop(*self.bodies, len(carry), operands, choice)
            if found is not None:
                return found, True
        return super().on_subsets(carry, choice, limit)


@run_by(While)
def _run(op: While, *operands: Any) -> Any:
    """Run a traced loop."""
    condition, body = op.bodies
    rest = operands[op.carried :]
    loop = _LoopInProgram(
        op.name,
        lambda carry: condition(*carry, *rest)[0],
        lambda carry: body(*carry, *rest),
        op.checkpoint,
    )
    loop.bodies, loop.rest, loop.checked = (condition, body), rest, True
    return loop.whole(operands[: op.carried])


# The most counter values that one operator call makes.
_AT_A_TIME: Final = 256


def _some_of(subset: BatchLevel, which: torch.Tensor, single: bool = False) -> SubsetLevel:
    return subset_of(subset, which.nonzero().squeeze(1), single)


class _PutAway:
    """Collects the carries of finished examples, each with their numbers of draws."""

    def __init__(self, what: str, whole: BatchLevel) -> None:
        self.what, self.whole = what, whole
        self.parts: list[SubsetLevel] = []
        self.carries: list[tuple[Any, DrawCounts]] = []

    def add(self, subset: BatchLevel, which: torch.Tensor, carry: tuple[Any, DrawCounts]) -> None:
        part = _some_of(subset, which)
        self.parts.append(part)
        self.carries.append(part.of_parent(self.what, carry))

    def merged_with(self, subset: BatchLevel, carry: Any, drawn: DrawCounts) -> Any:
        """Return the carries of all examples, given those of the remaining ones."""
        if not isinstance(subset, SubsetLevel) or subset is self.whole:
            set_draw_counts(drawn)
            return in_tensors(carry)
        merge = Merge([*self.parts, subset], self.whole).of
        carries, counts = zip(*self.carries, (carry, drawn), strict=True)
        merge_draw_counts(counts, merge)
        return together(carries, merge)
