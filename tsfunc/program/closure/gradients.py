"""The ``.grad`` of tensors that a function has from outside: its guards, and its assignments.

See NOTE [backward passes in programs] in ``bridge/trace/backward_passes.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NoReturn

import torch

from tsfunc.bridge.trace.backward_passes import BackwardPasses
from tsfunc.bridge.trace.tracing import TraceLevel
from tsfunc.dispatch.places import users_place
from tsfunc.errors import TypeCheckError
from tsfunc.program.closure.guard_builder import Source
from tsfunc.program.closure.instances import Instances
from tsfunc.program.closure.side_effects import SideEffect


class Gradients:
    """The ``.grad`` of tensors from outside, for one trace.

    Args:
        level: the trace.
        instances: the objects that it watches.
        read_at: called with the user's spelling of each ``.grad`` that is read.
        record: has the function traced again, with autograd recording.
    """

    def __init__(
        self,
        level: TraceLevel,
        instances: Instances,
        read_at: Callable[[str], None],
        record: Callable[[], NoReturn],
    ) -> None:
        self._level, self._instances, self._builder = level, instances, instances.builder
        self.passes = level.passes = BackwardPasses(level, self._read, self._check, record)
        instances.assigned_grads = self._changes
        self._checked: set[int] = set()
        self._read_at = read_at

    def _source(self, tensor: torch.Tensor) -> Source:
        """Return the source of a tensor: an argument, or a tensor that the trace has read."""
        for _, argument in self._level.tensor_guards.arguments:
            if argument.example is tensor:
                name = argument.name
                return Source(
                    self._builder.guard_lines.bind(f"args[{argument.position}]"), name, name, False
                )
        known = self._builder.source_of(tensor)
        return known or Source(
            self._builder.lines_of(True).name(tensor), "a tensor", "a tensor", True
        )

    def _read(self, tensor: torch.Tensor) -> torch.Tensor | None:
        source = self._source(tensor)
        self._read_at(f"{source.text}.grad")
        with self._instances.paused():
            return self._builder.grad_of(tensor, source)

    def _check(self, tensor: torch.Tensor) -> None:
        """Refuse a tensor that a backward pass can't add a gradient to.

        Raises:
            TypeCheckError: the tensor has a graph or hooks from outside, which a program does not
                run.
        """
        if id(tensor) in self._checked:
            return
        self._checked.add(id(tensor))
        source = self._source(tensor)
        guard_lines = self._builder.lines_of(source.own)
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
                f"{self._level.name}: backward() at {users_place()} would add to "
                f"{source.text}.grad, but {source.text} {why}. {mend}."
            )
        at = source.variable
        guard_lines.require(
            f"{at}.is_leaf and not {at}._backward_hooks and not {at}._post_accumulate_grad_hooks"
        )

    def _changes(self) -> Iterator[SideEffect]:
        """Yield the ``.grad`` that the function has replaced."""
        for slot in self.passes.changed():
            source = self._source(slot.owner)
            yield SideEffect(
                f"{source.text}.grad", source, slot.owner, "{}.grad", slot.owner.grad, slot.now,
                undo=lambda: None,
            )  # fmt: skip
