"""The operators of control flow that programs have: NOTE [control flow in programs].

What there is to know of one is data (its bodies, and how it goes about them), so that a program can
be looked into, rewritten and saved. When the program runs they do what the user's calls do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final, Literal, TypeVar

import torch

from tsfunc.bridge.control_flow import Body, ControlFlow, Narrowed
from tsfunc.program.passes.blocks import live_inputs, narrowed_body
from tsfunc.transforms.arguments import with_places
from tsfunc.transforms.control.arguments import Batching
from tsfunc.transforms.control.outputs import none_stacked, slice_like
from tsfunc.transforms.control.prefixes import prefixes
from tsfunc.transforms.forward import jvp
from tsfunc.transforms.outlines import eval_shape
from tsfunc.transforms.reverse import vjp
from tsfunc.transforms.vmap import vmap

Checkpoint = Literal["sqrt", "log"] | None
F = TypeVar("F", bound=Callable[..., Any])


class Operator(ControlFlow):
    """Control flow of a program; its derivatives are operators of a program too."""

    def pullback(self, count: int, by: Sequence[int], of: Sequence[int]) -> ControlFlow:
        return Pullback(self, count, by, of)

    def pushforward(self, count: int, by: Sequence[int]) -> ControlFlow:
        return Pushforward(self, count, by)

    def mapped(self, batched: Sequence[bool]) -> ControlFlow:
        return Mapped(self, batched)


class Pullback(Operator):
    """The pullback of an operator: see ``ControlFlow.pullback``, whose arguments it keeps."""

    def __init__(self, of_op: Operator, count: int, by: Sequence[int], of: Sequence[int]) -> None:
        super().__init__(f"{of_op.name}_pullback", of_op.bodies)
        self.op, self.count, self.by, self.of = of_op, count, tuple(by), tuple(of)

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        inputs = operands[: self.count]
        cotangents = operands[self.count : self.count + len(self.of)]
        numbers = operands[self.count + len(self.of) :]

        def run(*chosen: Any) -> tuple[Any, ...]:
            found = self.op(*with_places(inputs, self.by, chosen), *numbers)
            return tuple(found[j] for j in self.of)

        _, pull = vjp(run, *(inputs[i] for i in self.by))
        pulled: tuple[Any, ...] = pull(cotangents)
        return pulled


class Mapped(Operator):
    """An operator for a batch of calls: see ``ControlFlow.mapped``."""

    def __init__(self, of_op: Operator, batched: Sequence[bool]) -> None:
        super().__init__(f"{of_op.name}_mapped", of_op.bodies)
        self.op, self.batched = of_op, tuple(batched)

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        dims = [0 if batched else None for batched in self.batched]
        dims += [None] * (len(operands) - len(dims))
        every = vmap(self.op, in_dims=tuple(dims), randomness="different")
        found: tuple[Any, ...] = every(*operands)
        return found


class Pushforward(Operator):
    """The pushforward of an operator: see ``ControlFlow.pushforward``."""

    def __init__(self, of_op: Operator, count: int, by: Sequence[int]) -> None:
        super().__init__(f"{of_op.name}_pushforward", of_op.bodies)
        self.op, self.count, self.by = of_op, count, tuple(by)

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        inputs = operands[: self.count]
        tangents = operands[self.count : self.count + len(self.by)]
        numbers = operands[self.count + len(self.by) :]

        def run(*chosen: Any) -> tuple[Any, ...]:
            return self.op(*with_places(inputs, self.by, chosen), *numbers)

        _, pushed = jvp(run, tuple(inputs[i] for i in self.by), tuple(tangents))
        found: tuple[Any, ...] = pushed
        return found


class Switch(Operator):
    """``cond`` and ``switch``: the index, then what the branches use.

    Attributes:
        batching: the call's.
    """

    def __init__(self, name: str, bodies: Sequence[Body], batching: Batching) -> None:
        super().__init__(name, bodies)
        self.batching: Batching = batching

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(body.name for body in self.bodies)

    def narrowed(self, count: int, used: Collection[int]) -> Narrowed:
        live = {0}.union(*(live_inputs(body, used) for body in self.bodies))
        operands, numbers = _numbered(live)
        bodies = [narrowed_body(body, used, numbers) for body in self.bodies]
        return Narrowed(Switch(self.name, bodies, self.batching), operands, tuple(sorted(used)))

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        found: tuple[Any, ...] = _RUNS[Switch](self, *operands)
        return found


class While(Operator):
    """``while_loop``: the carry, then what condition and body use.

    Attributes:
        carried: how many tensors the carry has.
        checkpoint: the call's.
    """

    def __init__(
        self, name: str, bodies: Sequence[Body], carried: int, checkpoint: Checkpoint
    ) -> None:
        super().__init__(name, bodies)
        self.carried, self.checkpoint = carried, checkpoint

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        found: tuple[Any, ...] = _RUNS[While](self, *operands)
        return found

    def narrowed(self, count: int, used: Collection[int]) -> Narrowed:
        condition, body = self.bodies
        asked = live_inputs(condition, {0})
        carried, live = _carried({*used, *asked}, self.carried, body, ())
        operands, numbers = _numbered(carried | live | asked)
        kept = sorted(carried)
        bodies = [narrowed_body(condition, {0}, numbers), narrowed_body(body, kept, numbers)]
        op = While(self.name, bodies, len(kept), self.checkpoint)
        return Narrowed(op, operands, tuple(kept))


_RUNS: Final[dict[type, Callable[..., Any]]] = {}


def run_by(kind: type) -> Callable[[F], F]:
    """Registers what a program does for an operator: what the user's call does, in its file."""

    def decorator(func: F) -> F:
        _RUNS[kind] = func
        return func

    return decorator


class Scan(Operator):
    """``scan``: the carry, what it goes along, then what the body uses.

    Attributes:
        carried: how many tensors the carry has.
        along: how many tensors it goes along, in their first dim.
        length: how many steps there are, where there is nothing to go along.
        reverse: whether it begins with the last slice.
    """

    def __init__(
        self, name: str, bodies: Sequence[Body], carried: int, along: int, length: int | None,
        reverse: bool,
    ) -> None:  # fmt: skip
        super().__init__(name, bodies)
        self.carried, self.along, self.length, self.reverse = carried, along, length, reverse

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        carried, stop = self.carried, self.carried + self.along
        carry, along, rest = operands[:carried], operands[carried:stop], operands[stop:]
        (body,) = self.bodies
        if not (along[0].shape[0] if along else self.length):
            none = [slice_like(x, 0) for x in along]
            types = eval_shape(body, *carry, *none, *rest)[carried:]
            return (*carry, *none_stacked(tuple(types), 0))
        step: Any = body.function
        results: list[Sequence[Any]] = []
        for row in self.rows(along):
            found = step((*carry, *row, *rest))
            carry = found[:carried]
            results.append(found[carried:])
        if self.reverse:
            results.reverse()
        return (*carry, *[torch.stack(column) for column in zip(*results, strict=True)])

    def narrowed(self, count: int, used: Collection[int]) -> Narrowed:
        (body,) = self.bodies
        stacked = {j for j in used if j >= self.carried}
        carried, live = _carried(used, self.carried, body, stacked)
        along = {i for i in range(self.carried, self.carried + self.along) if i in live}
        if self.along and not along:
            along = {self.carried}  # which says how many steps there are
        operands, numbers = _numbered(carried | live | along)
        kept = sorted(carried | stacked)
        made = narrowed_body(body, kept, numbers)
        op = Scan(self.name, [made], len(carried), len(along), self.length, self.reverse)
        return Narrowed(op, operands, tuple(kept))

    def rows(self, columns: Sequence[torch.Tensor]) -> Iterable[Sequence[Any]]:
        """What each step gets of what the scan goes along, in their order."""
        if not columns:
            assert self.length is not None
            return itertools.repeat((), self.length)
        slices = [x.unbind(0) for x in columns]
        if self.reverse:
            slices = [part[::-1] for part in slices]
        return zip(*slices, strict=True)


class AssociativeScan(Operator):
    """``associative_scan``: what it goes along in its first dim, then what the body uses.

    Attributes:
        along: how many tensors it goes along. The body takes a slice of each twice.
    """

    def __init__(self, name: str, bodies: Sequence[Body], along: int) -> None:
        super().__init__(name, bodies)
        self.along = along

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        along, rest = operands[: self.along], operands[self.along :]
        (body,) = self.bodies
        in_dims = (0,) * (2 * self.along) + (None,) * len(rest)
        every = vmap(body, in_dims=in_dims, randomness="different")

        def combine(left: Sequence[Any], right: Sequence[Any]) -> Sequence[Any]:
            found: Sequence[Any] = every(*left, *right, *rest)
            return found

        return tuple(prefixes(combine, along, [0] * self.along, along[0].shape[0]))

    def narrowed(self, count: int, used: Collection[int]) -> Narrowed:
        (body,) = self.bodies
        n = self.along
        along, live = set(used), live_inputs(body, used)
        while not along >= (more := {at % n for at in live if at < 2 * n}):
            along |= more
            live = live_inputs(body, along)
        kept = sorted(along)
        rest = sorted(at for at in live if at >= 2 * n)
        order = [*kept, *(n + at for at in kept), *rest]
        made = narrowed_body(body, kept, {at: i for i, at in enumerate(order)})
        op = AssociativeScan(self.name, [made], len(kept))
        return Narrowed(op, (*kept, *(at - n for at in rest)), tuple(kept))


def _numbered(operands: Iterable[int]) -> tuple[tuple[int, ...], dict[int, int]]:
    """Operands that are kept, in order, and the new number of each."""
    kept = tuple(sorted(operands))
    return kept, {at: i for i, at in enumerate(kept)}


def _carried(
    wanted: Collection[int], count: int, body: Body, results: Collection[int]
) -> tuple[set[int], set[int]]:
    """What of a loop's carry is used, by more than itself, and all operands that its body uses.

    Args:
        wanted: what is used of it outside of the body, among others.
        count: how many tensors the carry has.
        body: its first results are the next carry.
        results: what else of its results is used.
    """
    carried = {i for i in wanted if i < count}
    while True:
        live = live_inputs(body, {*carried, *results})
        more = {i for i in live if i < count}
        if more <= carried:
            return carried, live
        carried |= more
