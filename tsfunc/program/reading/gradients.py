"""The ``.grad`` of tensors that a function has from outside: its guards, and its assignments.

See NOTE [backward passes in programs] in ``bridge/trace/backward_passes.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from tsfunc.bridge.trace.backward_passes import BackwardPasses
from tsfunc.bridge.trace.tracing import TraceLevel
from tsfunc.dispatch.places import users_place
from tsfunc.errors import TypeCheckError
from tsfunc.program.reading.changes import Change
from tsfunc.program.reading.holding import Place
from tsfunc.program.reading.instances import Instances


class Gradients:
    """The ``.grad`` of tensors from outside, for one trace.

    Args:
        level: the trace.
        instances: the objects that it watches.
        read_at: called with the user's spelling of each ``.grad`` that is read.
    """

    def __init__(
        self, level: TraceLevel, instances: Instances, read_at: Callable[[str], None]
    ) -> None:
        self._level, self._instances, self._held = level, instances, instances.held
        self.passes = level.passes = BackwardPasses(level, self._read, self._check)
        instances.assigned_grads = self._changes
        self._checked: set[int] = set()
        self._read_at = read_at

    def _place(self, tensor: torch.Tensor) -> Place:
        """Return the place of a tensor: an argument, or a tensor that the trace has read."""
        for _, argument in self._level.questions.arguments:
            if argument.example is tensor:
                name = argument.name
                return Place(self._held.facts.bind(f"args[{argument.position}]"), name, name, False)
        known = self._held.place_of(tensor)
        return known or Place(self._held.facts_of(True).name(tensor), "a tensor", "a tensor", True)

    def _read(self, tensor: torch.Tensor) -> torch.Tensor | None:
        place = self._place(tensor)
        self._read_at(f"{place.text}.grad")
        with self._instances.paused():
            return self._held.grad_of(tensor, place)

    def _check(self, tensor: torch.Tensor) -> None:
        """Refuse a tensor that a backward pass can't add a gradient to.

        Raises:
            TypeCheckError: the tensor has a graph or hooks from outside, which a program does not
                run.
        """
        if id(tensor) in self._checked:
            return
        self._checked.add(id(tensor))
        place = self._place(tensor)
        facts = self._held.facts_of(place.own)
        problem = None
        if not tensor.is_leaf:
            problem = (
                "was computed before the call, by operations that a program does not have",
                ("Pass x.detach().requires_grad_(), or compute it inside of the function"),
            )
        elif tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
            problem = (
                "has hooks, which a program does not call",
                ("Remove them, or do in the function what they do"),
            )
        if problem is not None:
            why, mend = problem
            raise TypeCheckError(
                f"{self._level.name}: backward() at {users_place()} would add to {place.text}.grad,"
                f" but {place.text} {why}. {mend}."
            )
        at = place.variable
        facts.require(
            f"{at}.is_leaf and not {at}._backward_hooks and not {at}._post_accumulate_grad_hooks"
        )

    def _changes(self) -> Iterator[Change]:
        """Yield the ``.grad`` that the function has replaced."""
        for slot in self.passes.changed():
            place = self._place(slot.owner)
            yield Change(
                f"{place.text}.grad", place, slot.owner, "{}.grad", slot.owner.grad, slot.now,
                undo=lambda: None,
            )  # fmt: skip
