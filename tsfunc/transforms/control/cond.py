"""``cond`` and ``switch``: call one of several functions, chosen by a value.

If the choice is known, the branch is called as Python would call it. If it differs from example to
example of a vmap, each branch runs on the active subset of examples that take it: NOTE [active
subsets] in ``bridge/control/subsets``.

NOTE [unreadable choices]
The choice of a vmap's examples may itself be a batch of an outer vmap. The choice may also be
traced while the vmap can't be hidden (NOTE [hidden vmaps] in ``bridge/control/bodies``), as for
branches that draw random numbers. Then a branch runs on a guarded subset: all examples, where those
that do not take the branch get the tensors of one that does. A branch never sees values that are
not meant for it, so that it neither fails nor puts a NaN into a gradient. The outer level decides
if a branch runs at all. The same happens if a program is written in torch's operators:
``bridge/control/retraced``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch

from tsfunc._text import count_text
from tsfunc.bridge.control.attempts import Attempt, CannotUnbatch, NeedsWholeBatch
from tsfunc.bridge.control.control_flow import Body
from tsfunc.bridge.control.subset_arguments import refuse_writes_of_all, shared_by_examples
from tsfunc.bridge.control.subsets import run_guarded
from tsfunc.bridge.trace.trace_level import current_trace
from tsfunc.bridge.tracers.batch_tracer import BatchLevel, wrap
from tsfunc.bridge.tracers.boundaries import boundary
from tsfunc.bridge.tracers.draw_keys import count_draws, draw_counts, merge_draw_counts
from tsfunc.bridge.tracers.dynamo import torch_records
from tsfunc.bridge.tracers.nesting import innermost_value
from tsfunc.transforms.control import dynamo_forms, physical_batches
from tsfunc.transforms.control.active import SubsetGroup, groups_by_choice, numbers_in
from tsfunc.transforms.control.call_forms import (
    Batching,
    also_called,
    check_batching,
    check_callable,
    unpacked_operands,
)
from tsfunc.transforms.control.choice import (
    BatchedChoice,
    Choice,
    TracedChoice,
    choice_of,
    predicate_of,
)
from tsfunc.transforms.control.control_operators import Switch, run_by
from tsfunc.transforms.control.control_recording import record_switch
from tsfunc.transforms.control.derived_operators import (
    Pullback,
    Pushforward,
    derivative_rule,
    run_pullback,
    run_pushforward,
)
from tsfunc.transforms.control.outputs import (
    check_branches,
    combine_leaves,
    numbers_to_tensors,
    where,
)
from tsfunc.transforms.control.rank_agreement import (
    agreed_index,
    agreed_predicate,
    axes_of_exchanges,
)
from tsfunc.transforms.control.skipped_bodies import check_other_branches

Branch = Callable[..., Any]
_Result = TypeVar("_Result")


@boundary("cond", traceable=True)
@also_called(true_fn="true_fun", false_fn="false_fun")
def cond(
    pred: Any,
    true_fun: Callable[..., _Result],
    false_fun: Callable[..., _Result],
    *args: Any,
    batching: Batching = "subset",
    **kwargs: Any,
) -> _Result:
    """Call one of two functions, chosen by a bool.

    Args:
        pred: a bool or a number, or a tensor of one element; nonzero values are true.
        true_fun: the function that is called with the operands if ``pred`` is true.
        false_fun: the function that is called otherwise. Both return pytrees of the same
            structure, with leaves of the same dtypes and shapes. The functions may close over
            tensors, which get their gradients.
        args: the operands, any pytrees.
        batching: the execution under vmap if the choice differs from example to example. "subset"
            runs each branch on the examples that take it, in programs too. "select" runs both
            branches on all examples and selects, which is faster for branches of one or two
            operators. Such branches must never fail and must have finite derivatives everywhere.
            Branches that exchange values with other examples, by a collective, always run this
            way.
        kwargs: ``operand=``, JAX's name for a single operand, or ``operands=``, torch's for a
            tuple of operands.

    Returns:
        The result of the called branch; its numbers become tensors if ``pred`` is a tensor.

    Raises:
        TypeError: ``pred`` is not a valid predicate.
        TypeCheckError: the branches' results differ in type. Outside of transforms the branch that
            is not taken is checked once for each set of operand types, by a run on tensors without
            data; a branch that needs data is not checked.

    Example:
        >>> import torch
        >>> from tsfunc import cond, vmap
        >>> def f(x):
        ...     return cond(x > 0, torch.log, torch.neg, x)
        >>> vmap(f)(torch.tensor([1., -2.]))
        tensor([0., 2.])

    Corresponds to ``jax.lax.cond``, including its older form ``cond(pred, true_operand, true_fun,
    false_operand, false_fun)``. The form of ``torch.cond``, with the operands in one tuple or
    list, is accepted too: a single such operand is unpacked if the branches take as many arguments
    as it has entries. torch's names ``true_fn`` and ``false_fn`` are accepted as well.
    """
    check_batching("cond", batching)
    operands = _operands_of(args, kwargs)
    if len(operands) == 2 and not callable(true_fun) and callable(operands[1]):
        (true_operand, true_fun), (false_operand, false_fun) = (true_fun, false_fun), operands
        true_fun = functools.partial(true_fun, true_operand)
        false_fun = functools.partial(false_fun, false_operand)
        operands = ()
    check_callable("cond", true_fun=true_fun, false_fun=false_fun)
    if torch_records():
        return dynamo_forms.cond(pred, true_fun, false_fun, operands)
    if not kwargs:
        operands = unpacked_operands(operands, true_fun)
    axes = axes_of_exchanges("cond", (true_fun, false_fun), operands)
    if axes and not _is_static(pred):
        index, branches = agreed_predicate(pred, axes, true_fun, false_fun)
        names = ("false_fun", "true_fun", "both branches")
        return _SwitchCall("switch", branches, names, operands, batching).by_user(index)
    return _SwitchCall(
        "cond", (false_fun, true_fun), ("false_fun", "true_fun"), operands, batching
    ).by_user(pred)


def _operands_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the operands of a call of ``cond``, from its arguments in any form."""
    if not kwargs:
        return args
    if len(kwargs) > 1 or args or not kwargs.keys() <= {"operand", "operands"}:
        names = ", ".join(f"{name}=" for name in kwargs)
        beside = f" beside {count_text(len(args), 'operand')}" if args else ""
        raise TypeError(
            f"cond: expected the operands by position, or operand=, or operands=(...), got the "
            f"keyword arguments {names}{beside}."
        )
    (operands,) = kwargs.values()
    return (operands,) if "operand" in kwargs else tuple(operands)


def _index_of(value: Any, label: str, last: int) -> Choice:
    """Return the branch that a predicate (True: the second) or an index chooses."""
    choice: Choice
    if label == "cond":
        choice = predicate_of(value, label)
    else:
        choice = choice_of(value, label)
        if isinstance(choice, bool):
            raise TypeError(f"{label}: the index: expected an integer, got a bool. Use cond.")
    if isinstance(choice, int):
        return min(max(int(choice), 0), last)
    if isinstance(choice, BatchedChoice):
        return BatchedChoice(choice.level, choice.values.long().clamp(0, last), choice.known)
    return choice


@boundary("switch", traceable=True)
def switch(
    index: Any,
    branches: Sequence[Callable[..., _Result]],
    *operands: Any,
    batching: Batching = "subset",
) -> _Result:
    """Call one of several functions, chosen by an integer.

    Args:
        index: an int, or an integer tensor of one element; the index is clamped to the branches.
        branches: at least one function, as for ``cond``.
        operands: the arguments, any pytrees.
        batching: as for ``cond``.

    Returns:
        The result of the called branch; its numbers become tensors if ``index`` is a tensor.

    Raises:
        ValueError: there are no branches.
        TypeError: ``index`` is not an integer.
        TypeCheckError: the branches' results differ in type; see ``cond``.

    Example:
        >>> import torch
        >>> from tsfunc import switch
        >>> switch(torch.tensor(2), [torch.sin, torch.cos, torch.exp], torch.zeros(2))
        tensor([1., 1.])

    Corresponds to ``jax.lax.switch``.
    """
    check_batching("switch", batching)
    if not isinstance(branches, Sequence):
        raise TypeError(
            f"switch: branches: expected a list of callables, got {type(branches).__name__}."
        )
    if not branches:
        raise ValueError("switch: expected at least one branch, got none.")
    check_callable("switch", **{f"branches[{i}]": branch for i, branch in enumerate(branches)})
    if torch_records():
        return dynamo_forms.switch(index, branches, operands)
    operands = unpacked_operands(operands, branches[0])
    axes = axes_of_exchanges("switch", branches, operands)
    if axes and not _is_static(index):
        index, branches = agreed_index(index, axes, branches)
    names = tuple(f"branch {i}" for i in range(len(branches)))
    return _SwitchCall("switch", tuple(branches), names, operands, batching).by_user(index)


def _is_static(choice: Any) -> bool:
    """True for a Python value in a trace, which is a constant of the program."""
    return current_trace() is not None and not isinstance(choice, torch.Tensor)


@run_by(Switch)
def _run_branch(op: Switch, index: Any, *operands: Any) -> Any:
    call = _SwitchInProgram(op.name, op.bodies, op.names, (index, *operands), op.batching)
    return call.of(_index_of(index, op.name, len(op.bodies) - 1))


@derivative_rule(Pullback, Switch)
def _pullback(
    op: Switch, count: int, wrt: Sequence[int], results: Sequence[int], *operands: Any
) -> Any:
    """Choose between the pullbacks of the branches."""
    return _choose_between(
        op,
        [functools.partial(run_pullback, body, count, wrt, results) for body in op.bodies],
        operands,
    )


@derivative_rule(Pushforward, Switch)
def _pushforward(op: Switch, count: int, wrt: Sequence[int], *operands: Any) -> Any:
    """Choose between the pushforwards of the branches."""
    return _choose_between(
        op, [functools.partial(run_pushforward, body, count, wrt) for body in op.bodies], operands
    )


def _choose_between(op: Switch, branches: Sequence[Branch], operands: Sequence[Any]) -> Any:
    """Choose as a traced call does, between other branches of the same operands and more."""
    call = _SwitchCall(op.name, tuple(branches), op.names, tuple(operands), op.batching)
    return call.of(_index_of(operands[0], op.name, len(branches) - 1))


class _SwitchCall:
    """A call of ``switch``, or of ``cond`` with the branches (false_fun, true_fun)."""

    def __init__(
        self,
        label: str,
        branches: tuple[Branch, ...],
        names: tuple[str, ...],
        operands: tuple[Any, ...],
        batching: Batching,
    ) -> None:
        self.label, self.branches, self.names = label, branches, names
        self.operands, self.batching = operands, batching

    def of(self, choice: Choice) -> Any:
        """Return the result of the chosen branches."""
        if isinstance(choice, int):
            return self.branches[choice](*self.operands)
        if isinstance(choice, TracedChoice):
            return self.record(choice.value)
        if self.batching == "select":
            return self.select(choice)
        if choice.is_empty:  # any branch gives the types of the results
            return numbers_to_tensors(self.branches[0](*self.operands))
        if not choice.known and current_trace() is not None:
            with suppress(CannotUnbatch):
                return self.record(wrap(choice.values, 0, choice.level))
        with Attempt(choice.level) as attempt:
            try:
                return self.run_on_subsets(choice) if choice.known else self.run_unreadable(choice)
            except NeedsWholeBatch as error:
                attempt.give_up(error)
        return self.select(choice)

    def record(self, index: torch.Tensor) -> Any:
        """Record the call as one node of the trace."""
        return record_switch(
            self.label, index, self.branches, self.names, self.operands, self.batching
        )

    def by_user(self, value: Any) -> Any:
        """Return the result for a predicate or an index, and check the other branches."""
        choice = _index_of(value, self.label, len(self.branches) - 1)
        out = self.of(choice)
        if not isinstance(choice, int):
            return out
        checked = check_other_branches(
            self.label, self.names, self.branches, self.operands, choice, out
        )
        return checked if isinstance(value, torch.Tensor) else out

    def run_on_subsets(self, choice: BatchedChoice) -> Any:
        """Run each branch on the examples that take it."""
        values = innermost_value(choice.values)
        taken = numbers_in(values)
        if len(taken) == 1:
            return numbers_to_tensors(self.branches[taken[0]](*self.operands))
        whole = SubsetGroup(self.label, choice.level)
        parts = []
        for i, group in groups_by_choice(whole, values, taken):
            branch = count_draws(self.branches[i], choice.level.depth)
            parts.append((group, group.run(branch, self.operands)))
        self.check([out for _, (out, _) in parts], taken)
        return whole.merge_states(parts)

    def select(self, choice: BatchedChoice) -> Any:
        """Run all branches on all examples, and select."""
        level = choice.level
        before = shared_by_examples((*self.branches, *self.operands), tracers=True)
        each = [count_draws(branch, level.depth)(*self.operands) for branch in self.branches]
        refuse_writes_of_all(self.label, before, level)
        outs = [out for out, _ in each]
        self.check(outs, range(len(outs)))
        masks = [choice.values == i for i in range(1, len(outs))]

        def chosen(column: Sequence[torch.Tensor]) -> torch.Tensor:
            selected = column[0]
            for mask, other in zip(masks, column[1:], strict=True):
                selected = where(level, mask, other, selected)
            return selected

        merge_draw_counts([drawn for _, drawn in each], chosen)
        return combine_leaves(outs, chosen)

    def run_unreadable(self, choice: BatchedChoice) -> Any:
        """Run the branches on guarded subsets: NOTE [unreadable choices]."""
        level, values = choice.level, choice.values
        first = values[0]
        result = switch(
            first,
            [
                functools.partial(self.run_guarded_branch, i, level, values)
                for i in range(len(self.branches))
            ],
        )
        for i in range(len(self.branches)):
            mask = values == i
            also = mask.any() & (first != i)
            over = functools.partial(self.over, i, level, mask, result)
            result = cond(also, over, lambda result=result: result)
        return result

    def run_guarded_branch(self, i: int, level: BatchLevel, values: torch.Tensor) -> Any:
        """Run a branch on a guarded subset: NOTE [unreadable choices]."""
        mask = values == i
        branch = count_draws(self.branches[i], level.depth)
        out, drawn = run_guarded(level, mask, self.label, branch, self.operands)
        before = draw_counts(level.depth)
        merge_draw_counts([drawn, before], lambda pair: where(level, mask, *pair))
        return out

    def over(self, i: int, level: BatchLevel, mask: torch.Tensor, result: Any) -> Any:
        """Return the results with those of a branch for the examples that take it."""
        out = self.run_guarded_branch(i, level, torch.where(mask, i, -1))
        self.check([result, out], (0, i))
        return combine_leaves([out, result], lambda pair: where(level, mask, *pair))

    def check(self, outs: Sequence[Any], taken: Sequence[int]) -> None:
        for i, out in zip(taken[1:], outs[1:], strict=True):
            check_branches(
                self.label,
                (f"the result of {self.names[taken[0]]}", f"the result of {self.names[i]}"),
                (outs[0], out),
            )


class _SwitchInProgram(_SwitchCall):
    """A call of a program, whose branches are graphs."""

    branches: tuple[Body, ...]

    def run_on_subsets(self, choice: BatchedChoice) -> Any:
        results = physical_batches.choice(self.branches, self.operands, choice)
        return super().run_on_subsets(choice) if results is None else results
