"""``cond`` and ``switch``: one of several functions is called, chosen by a value.

Where the choice is known the branch is called as Python would call it. Where it differs from
example to example of a vmap, each branch runs on the examples that take it: NOTE [lanes] in
``bridge/lanes``.

NOTE [choices that can't be looked at]
The choice of a vmap's examples may itself be a batch of an outer vmap, or be traced. Then a branch
runs on all examples, but those that do not take it are given the tensors of one that does: no
branch ever sees values that are not meant for it, so none fails, and none puts a NaN into a
gradient. Whether a branch is taken at all is a choice of the level outside, and decided there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tsfunc import pytrees
from tsfunc.bridge.batch_tracer import BatchLevel, wrap
from tsfunc.bridge.lanes import LaneLevel, merge, retag, run_in
from tsfunc.transforms.control.arguments import Batching, check_batching, operands_of
from tsfunc.transforms.control.choice import ByExample, Traced, choice_of, read
from tsfunc.transforms.control.outputs import check_branches, together
from tsfunc.transforms.control.programs import record_switch

Branch = Callable[..., Any]


def cond(
    pred: Any,
    true_fun: Branch,
    false_fun: Branch,
    *operands: Any,
    batching: Batching = "lanes",
) -> Any:
    """Calls one of two functions, chosen by a bool.

    Args:
        pred: a bool, or a tensor of one element.
        true_fun: called with the operands where ``pred`` is true.
        false_fun: called where it is false. Both return pytrees of the same structure, with
            leaves of the same types and shapes. They may use other tensors of their surroundings,
            and these get their gradients.
        operands: the arguments, any pytrees.
        batching: under vmap, where the choice differs from example to example: "lanes" runs each
            branch on the examples that take it; "select" runs both on all and selects, which is
            quicker for branches of an operator or two that never fail.

    Returns:
        What the branch that was called returns.

    Raises:
        TypeError: ``pred`` is no choice.
        TypeCheckError: the branches' results differ in type.

    Example:
        >>> import torch
        >>> from tsfunc import cond, vmap
        >>> def f(x):
        ...     return cond(x > 0, torch.log, torch.neg, x)
        >>> vmap(f)(torch.tensor([1., -2.]))
        tensor([0., 2.])

    As ``jax.lax.cond``. ``torch.cond``'s form, with the operands in one tuple or list, is taken
    too: where there is one such operand, and the branches take as many arguments as it has
    entries, it is unpacked.
    """
    check_batching("cond", batching)
    arguments = operands_of(operands, true_fun)
    choice = choice_of(pred, "cond")
    if isinstance(choice, bool | int):
        return true_fun(*arguments) if choice else false_fun(*arguments)
    if isinstance(choice, ByExample):
        choice = ByExample(choice.level, (choice.values != 0).long(), choice.known)
    call = _Call("cond", (false_fun, true_fun), ("false_fun", "true_fun"), arguments, batching)
    return call.run(choice)


def switch(
    index: Any, branches: Sequence[Branch], *operands: Any, batching: Batching = "lanes"
) -> Any:
    """Calls one of several functions, chosen by an integer.

    Args:
        index: an int, or an integer tensor of one element; what is below 0 chooses the first
            branch, and what is too large the last.
        branches: at least one; as ``cond``'s.
        operands: the arguments, any pytrees.
        batching: as for ``cond``.

    Returns:
        What the branch that was called returns.

    Raises:
        ValueError: there are no branches.
        TypeError: ``index`` is no integer.
        TypeCheckError: the branches' results differ in type.

    Example:
        >>> import torch
        >>> from tsfunc import switch
        >>> switch(torch.tensor(2), [torch.sin, torch.cos, torch.exp], torch.zeros(2))
        tensor([1., 1.])

    As ``jax.lax.switch``.
    """
    check_batching("switch", batching)
    if not branches:
        raise ValueError("switch: expected at least one branch, got none.")
    arguments = operands_of(operands, branches[0])
    choice = choice_of(index, "switch")
    if isinstance(choice, bool):
        raise TypeError("switch: the index must be an integer, got a bool. Use cond.")
    last = len(branches) - 1
    if isinstance(choice, int):
        return branches[min(max(choice, 0), last)](*arguments)
    if isinstance(choice, ByExample):
        choice = ByExample(choice.level, choice.values.clamp(0, last), choice.known)
    names = tuple(f"branch {i}" for i in range(len(branches)))
    return _Call("switch", tuple(branches), names, arguments, batching).run(choice)


class _Call:
    """A call of ``switch``, or of ``cond`` with its branches in that order."""

    def __init__(
        self,
        what: str,
        branches: tuple[Branch, ...],
        names: tuple[str, ...],
        operands: tuple[Any, ...],
        batching: Batching,
    ) -> None:
        self.what, self.branches, self.names = what, branches, names
        self.operands, self.batching = operands, batching

    def run(self, choice: ByExample | Traced) -> Any:
        if isinstance(choice, Traced):
            return record_switch(
                self.what, choice.value, self.branches, self.names, self.operands, self.later
            )
        if self.batching == "select":
            return self.select(choice)
        return self.by_lanes(choice) if choice.known else self.unseen(choice)

    def later(self, index: Any, bodies: Sequence[Branch], operands: Any) -> Any:
        """What the program does for the call."""
        call = cond if self.what == "cond" else switch
        chosen = (bodies[1], bodies[0]) if self.what == "cond" else (bodies,)
        return call(index, *chosen, *operands, batching=self.batching)

    def by_lanes(self, choice: ByExample) -> Any:
        """Each branch on the examples that take it."""
        values = read(choice.values)
        taken = torch.unique(values).tolist()
        if len(taken) == 1:
            return self.branches[taken[0]](*self.operands)
        parts, outs = [], []
        for i in taken:
            lanes = LaneLevel(choice.level, (values == i).nonzero().squeeze(1))
            parts.append(lanes)
            outs.append(run_in(lanes, self.what, self.branches[i], self.operands))
        self.check(outs, taken)
        return together(outs, lambda column: merge(column, parts, choice.level))

    def select(self, choice: ByExample) -> Any:
        """All branches on all examples."""
        outs = [branch(*self.operands) for branch in self.branches]
        self.check(outs, range(len(outs)))
        found = outs[0]
        for i in range(1, len(outs)):
            found = _where(choice.level, choice.values == i, outs[i], found)
        return found

    def unseen(self, choice: ByExample) -> Any:
        """NOTE [choices that can't be looked at]"""
        level, values = choice.level, choice.values
        first = values[0]
        found = switch(
            first,
            [functools.partial(self.guarded, i, level, values) for i in range(len(self.branches))],
        )
        for i in range(len(self.branches)):
            mask = values == i
            also = mask.any() & (first != i)
            over = functools.partial(self.over, i, level, mask, found)
            found = cond(also, over, functools.partial(_same, found))
        return found

    def guarded(self, i: int, level: BatchLevel, values: torch.Tensor) -> Any:
        """A branch on all examples; those that do not take it stand for one that does."""
        mask = values == i
        numbers = torch.arange(level.batch_size, device=values.device)
        index = torch.where(mask, numbers, mask.long().argmax())
        lanes = LaneLevel(level, index)
        out = run_in(lanes, self.what, self.branches[i], self.operands)
        return pytrees.tree_map(lambda leaf: retag(leaf, lanes, level), out)

    def over(self, i: int, level: BatchLevel, mask: torch.Tensor, found: Any) -> Any:
        """The results so far, those of a branch in the places of the examples that take it."""
        out = self.guarded(i, level, torch.where(mask, i, -1))
        self.check([found, out], (0, i))
        return _where(level, mask, out, found)

    def check(self, outs: Sequence[Any], taken: Sequence[int]) -> None:
        for i, out in zip(taken[1:], outs[1:], strict=True):
            check_branches(
                self.what,
                (f"what {self.names[taken[0]]} returns", f"what {self.names[i]} returns"),
                (outs[0], out),
            )


def _same(found: Any) -> Any:
    return found


def _where(level: BatchLevel, mask: torch.Tensor, new: Any, old: Any) -> Any:
    """The new results of the examples in the mask, the old ones of the others."""
    chosen = wrap(mask, 0, level)
    return together([new, old], lambda pair: torch.where(chosen, pair[0], pair[1]))
