"""The control flow operators of programs: NOTE [control flow in programs].

An operator consists of data (its bodies and its options), so that a program can be inspected,
rewritten and saved. When the program runs, the operators behave like the user's calls.

NOTE [derivatives of torch's while_loop]
torch's derivative of a ``while_loop`` that makes no step is that of one step. The result is
therefore chosen from the loop's and the first carry, by the condition on the first carry. Carries
that do not require grad are constants in torch's derivative, so that all of them do. The
derivatives of a compiled program by ``backward()`` are of this kind. The derivatives that the
function takes are in the program: NOTE [derivatives in other control flow] in
``derived_operators``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final, Literal, TypeVar

import torch

from tsfunc.bridge.control.control_flow import Axes, Body, ReducedOperator
from tsfunc.bridge.trace.trace_level import current_trace
from tsfunc.bridge.tracers.operators import TorchOperator
from tsfunc.dispatch.state import tls
from tsfunc.program.graphs.torch_operators import Writer
from tsfunc.program.passes.simplify import live_inputs, narrowed_body
from tsfunc.transforms.abstract_eval import abstract_results
from tsfunc.transforms.control.call_forms import Batching
from tsfunc.transforms.control.derived_operators import ControlFlowOperator
from tsfunc.transforms.control.outputs import slice_like, stack_of_no_steps
from tsfunc.transforms.control.physical_batches import (
    batch_here,
    run_batched_choice,
    run_batched_loop,
)
from tsfunc.transforms.control.prefixes import prefixes
from tsfunc.transforms.vmap import vmap

Checkpoint = Literal["sqrt", "log"] | None
F = TypeVar("F", bound=Callable[..., Any])
Through = Callable[[Body, Sequence[Axes]], list[Axes]]


class Switch(ControlFlowOperator):
    """``cond`` and ``switch``; the operands are the index and the values of the branches.

    Attributes:
        batching: the ``batching=`` of the call.
    """

    run_on_subsets = True

    def __init__(self, name: str, bodies: Sequence[Body], batching: Batching) -> None:
        super().__init__(name, bodies)
        self.batching: Batching = batching

    def of_batch(
        self, operands: Sequence[Any], batched: Sequence[bool]
    ) -> Sequence[torch.Tensor] | None:
        if self.batching == "select" or not batched[0]:
            return None
        batch = batch_here(operands, batched)
        if batch is None:
            return None
        index = batch.operands[0].reshape(-1)
        index = index != 0 if self.name == "cond" else index
        return run_batched_choice(self.bodies, batch, index.long().clamp(0, len(self.bodies) - 1))

    def result_axes(self, operands: Sequence[Axes], through: Through) -> list[Axes]:
        branches = (through(body, operands) for body in self.bodies)
        return [
            operands[0].union(*axes_of_result) for axes_of_result in zip(*branches, strict=True)
        ]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(body.name for body in self.bodies)

    def without_unused(self, count: int, used: Collection[int]) -> ReducedOperator:
        live = {0}.union(*(live_inputs(body, used) for body in self.bodies))
        operands, numbers = _renumber(live)
        bodies = [narrowed_body(body, used, numbers) for body in self.bodies]
        return ReducedOperator(
            Switch(self.name, bodies, self.batching), operands, tuple(sorted(used))
        )

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        return _RUNS[Switch](self, *operands)

    def write_for_torch(self, writer: Writer, operands: Sequence[Any]) -> list[torch.fx.Node]:
        index, *rest = operands
        rest = writer.distinct(rest)
        if self.name == "cond":
            return self._write_choice(writer, writer.truth(index), (1, 0), rest)
        return self._from(writer, 0, index, rest)

    def _write_choice(
        self, writer: Writer, truth: Any, which: tuple[int, int], rest: Sequence[Any]
    ) -> list[torch.fx.Node]:
        """Write a choice between two branches."""

        def block(body: Body) -> torch.fx.Node:
            return writer.block(body.name, rest, lambda inner, xs: inner.inline(body, [None, *xs]))

        blocks = [block(self.bodies[i]) for i in which]
        node = writer.call(torch.ops.higher_order.cond, truth, *blocks, tuple(rest))
        return writer.items(node, self._count)

    def _from(
        self, writer: Writer, first: int, index: Any, rest: Sequence[Any]
    ) -> list[torch.fx.Node]:
        """Write a choice between a branch and all later ones."""
        if first == len(self.bodies) - 1:
            return writer.inline(self.bodies[first], [None, *rest])
        operands = tuple(writer.distinct((index, *rest)))
        branch = writer.block(
            self.bodies[first].name, operands,
            lambda inner, xs: inner.inline(self.bodies[first], xs),
        )  # fmt: skip
        others = writer.block(
            "others", operands, lambda inner, xs: self._from(inner, first + 1, xs[0], xs[1:])
        )
        here = writer.call(torch.ops.aten.le.Scalar, index, first)
        node = writer.call(torch.ops.higher_order.cond, here, branch, others, operands)
        return writer.items(node, self._count)

    @property
    def _count(self) -> int:
        return len(_results(self.bodies[0]))


class While(ControlFlowOperator):
    """``while_loop``; the operands are the carry and then the values that condition and body use.

    Attributes:
        carried: the number of tensors in the carry.
        checkpoint: the ``checkpoint=`` of the call.
    """

    run_on_subsets = True

    def __init__(
        self, name: str, bodies: Sequence[Body], carried: int, checkpoint: Checkpoint
    ) -> None:
        super().__init__(name, bodies)
        self.carried, self.checkpoint = carried, checkpoint

    def of_batch(
        self, operands: Sequence[Any], batched: Sequence[bool]
    ) -> Sequence[torch.Tensor] | None:
        if self.checkpoint is not None and torch.is_grad_enabled():
            return None
        batch = batch_here(operands, batched)
        condition, body = self.bodies
        return None if batch is None else run_batched_loop(condition, body, self.carried, batch)

    def result_axes(self, operands: Sequence[Axes], through: Through) -> list[Axes]:
        condition, body = self.bodies

        def step(carry: Sequence[Axes]) -> list[Axes]:
            inputs = [*carry, *operands[self.carried :]]
            (going_on,) = through(condition, inputs)
            return [axes | going_on for axes in through(body, inputs)]

        return _settled_axes(operands[: self.carried], step)

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        return _RUNS[While](self, *operands)

    def write_for_torch(self, writer: Writer, operands: Sequence[Any]) -> list[torch.fx.Node]:
        """Write torch's ``while_loop``: NOTE [derivatives of torch's while_loop]."""
        condition, body = self.bodies
        first_operands = list(operands)
        carry = writer.recorded([writer.owned(x) for x in operands[: self.carried]], operands)
        operands = writer.distinct([*carry, *operands[self.carried :]])

        def going_on(inner: Writer, xs: list[torch.fx.Node]) -> torch.fx.Node:
            return inner.truth(inner.inline(condition, xs)[0])

        blocks = (
            writer.block("condition", operands, going_on),
            writer.block("body", operands, lambda inner, xs: inner.inline(body, xs)),
        )
        begin, rest = tuple(operands[: self.carried]), tuple(operands[self.carried :])
        node = writer.call(torch.ops.higher_order.while_loop, *blocks, begin, rest)
        items = writer.items(node, self.carried)
        steps = writer.truth(writer.inline(condition, first_operands)[0])
        where = torch.ops.aten.where.self
        return [
            writer.call(where, steps, x, first)
            for x, first in zip(items, first_operands, strict=False)
        ]

    def without_unused(self, count: int, used: Collection[int]) -> ReducedOperator:
        condition, body = self.bodies
        of_condition = live_inputs(condition, {0})
        carried, live = _used_carry({*used, *of_condition}, self.carried, body, ())
        operands, numbers = _renumber(carried | live | of_condition)
        carries = sorted(carried)
        bodies = [narrowed_body(condition, {0}, numbers), narrowed_body(body, carries, numbers)]
        op = While(self.name, bodies, len(carries), self.checkpoint)
        return ReducedOperator(op, operands, tuple(carries))


_RUNS: Final[dict[type, Callable[..., Any]]] = {}


def run_by(kind: type) -> Callable[[F], F]:
    """Register the function that runs an operator, from the file of the user's call."""

    def decorator(func: F) -> F:
        _RUNS[kind] = func
        return func

    return decorator


class Scan(ControlFlowOperator):
    """``scan``; the operands are the carry, the scanned tensors, and the body's values.

    Attributes:
        carried: the number of tensors in the carry.
        along: the number of tensors that are scanned, in their first dim.
        length: the number of steps if it is fixed; otherwise at least one tensor is scanned.
        reverse: True if the scan begins with the last slice.
    """

    def __init__(
        self, name: str, bodies: Sequence[Body], carried: int, along: int, length: int | None,
        reverse: bool,
    ) -> None:  # fmt: skip
        super().__init__(name, bodies)
        self.carried, self.along, self.length, self.reverse = carried, along, length, reverse

    def result_axes(self, operands: Sequence[Axes], through: Through) -> list[Axes]:
        (body,) = self.bodies
        ys: list[Axes] = []

        def step(carry: Sequence[Axes]) -> list[Axes]:
            flows = through(body, [*carry, *operands[self.carried :]])
            ys[:] = flows[self.carried :]
            return flows[: self.carried]

        return [*_settled_axes(operands[: self.carried], step), *ys]

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        carried, stop = self.carried, self.carried + self.along
        carry, along, rest = operands[:carried], operands[carried:stop], operands[stop:]
        (body,) = self.bodies
        if current_trace() is not None:
            return _RUNS[Scan](self, carry, along, rest)
        if not (along[0].shape[0] if along else self.length):
            none = [slice_like(x, 0) for x in along]
            like = abstract_results("scan", body, (*carry, *none, *rest), {})[carried:]
            return (*carry, *stack_of_no_steps(tuple(like), 0))
        step: Any = body.function
        if not tls.state.levels:
            step, operands = body.with_own_carry(operands)
            carry = operands[:carried]
        results: list[Sequence[Any]] = []
        for row in self.rows(along):
            stepped = step((*carry, *row, *rest))
            carry = stepped[:carried]
            results.append(stepped[carried:])
        if self.reverse:
            results.reverse()
        return (*carry, *[torch.stack(column) for column in zip(*results, strict=True)])

    def write_for_torch(self, writer: Writer, operands: Sequence[Any]) -> list[torch.fx.Node]:
        (body,) = self.bodies
        carried, stop = self.carried, self.carried + self.along
        operands = writer.distinct([*map(writer.owned, operands[:carried]), *operands[carried:]])
        carry, along, rest = operands[:carried], operands[carried:stop], operands[stop:]
        counted = not along  # torch's scan needs a scanned tensor
        if counted:
            along = [writer.call(torch.ops.aten.arange.default, self.length)]
        aten, higher_order = torch.ops.aten, torch.ops.higher_order
        if self.reverse:
            along = [writer.call(aten.flip.default, x, [0]) for x in along]
        # Contiguous: NOTE [layouts of torch's loops] in ``program/graphs/torch_operators``.
        along = [writer.call(aten.contiguous.default, x) for x in along]

        def step(inner: Writer, xs: list[torch.fx.Node]) -> list[torch.fx.Node]:
            out = inner.inline(body, [*xs[:carried], *xs[carried + 1 :]] if counted else xs)
            if len(out) == carried:  # inductor has no scan without step results
                out.append(inner.call(aten.new_zeros.default, xs[0], [0]))
            return out

        slices = [None for x in along]
        block = writer.block(body.name, [*carry, *slices, *rest], step)
        if carried:
            node = writer.call(higher_order.scan, block, list(carry), along, tuple(rest))
        else:
            node = writer.call(higher_order.map_impl, block, tuple(along), tuple(rest))
        items = writer.items(node, len(_results(body)))
        if self.reverse:
            items[carried:] = [writer.call(aten.flip.default, y, [0]) for y in items[carried:]]
        return items

    def run_count(self, operands: Sequence[Any]) -> int:
        if self.length is not None:
            return self.length
        value = operands[self.carried].meta.get("val")
        rows = value.shape[0] if isinstance(value, torch.Tensor) else 1
        return rows if isinstance(rows, int) else 1

    def without_unused(self, count: int, used: Collection[int]) -> ReducedOperator:
        (body,) = self.bodies
        stacked = {j for j in used if j >= self.carried}
        carried, live = _used_carry(used, self.carried, body, stacked)
        along = {i for i in range(self.carried, self.carried + self.along) if i in live}
        if self.along and not along and self.length is None:
            along = {self.carried}  # it determines the number of steps
        operands, numbers = _renumber(carried | live | along)
        positions = sorted(carried | stacked)
        narrowed = narrowed_body(body, positions, numbers)
        op = Scan(self.name, [narrowed], len(carried), len(along), self.length, self.reverse)
        return ReducedOperator(op, operands, tuple(positions))

    def rows(self, columns: Sequence[torch.Tensor]) -> Iterable[Sequence[Any]]:
        """Return the slices of the scanned tensors for each step, in the order of the steps."""
        if not columns:
            assert self.length is not None
            return itertools.repeat((), self.length)
        slices = [x.unbind(0) for x in columns]
        if self.reverse:
            slices = [part[::-1] for part in slices]
        return zip(*slices, strict=True)


class AssociativeScan(ControlFlowOperator):
    """``associative_scan``; the operands are the scanned tensors and then the values of the body.

    Attributes:
        along: the number of tensors that are scanned, in their first dim. The body takes two
            slices of each.
    """

    def __init__(self, name: str, bodies: Sequence[Body], along: int) -> None:
        super().__init__(name, bodies)
        self.along = along

    def result_axes(self, operands: Sequence[Axes], through: Through) -> list[Axes]:
        (body,) = self.bodies
        rest = operands[self.along :]
        return _settled_axes(
            operands[: self.along], lambda along: through(body, [*along, *along, *rest])
        )

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        along, rest = operands[: self.along], operands[self.along :]
        (body,) = self.bodies
        if current_trace() is not None:
            return _RUNS[AssociativeScan](self, along, rest)
        in_dims = (0,) * (2 * self.along) + (None,) * len(rest)
        every = vmap(body, in_dims=in_dims, randomness="different")

        def combine(left: Sequence[Any], right: Sequence[Any]) -> Sequence[Any]:
            return every(*left, *right, *rest)

        return tuple(prefixes(combine, along, [0] * self.along, along[0].shape[0]))

    def write_for_torch(self, writer: Writer, operands: Sequence[Any]) -> list[torch.fx.Node]:
        (body,) = self.bodies
        n = self.along
        operands = writer.distinct(operands)
        along, rest = operands[:n], operands[n:]
        higher_order, aten = torch.ops.higher_order, torch.ops.aten
        ranks = {x.meta["val"].dim() for x in along}
        if (
            len(ranks) == 1
            and not rest
            and {x.meta["val"].device.type for x in along} <= _PARALLEL
            and all(map(_is_pointwise, body.graph.nodes))
        ):
            plain = Body(body.name, _without_moves(body.graph), body.inputs)
            block = writer.block(
                body.name, [*along, *along], lambda inner, xs: inner.inline(plain, xs)
            )
            return writer.items(
                writer.call(higher_order.associative_scan, block, tuple(along), ()), n
            )
        # Otherwise the slices are combined one after the other.
        first = [writer.call(aten.slice.Tensor, x, 0, 0, 1) for x in along]
        others = [writer.call(aten.slice.Tensor, x, 0, 1) for x in along]

        def step(inner: Writer, xs: list[torch.fx.Node]) -> list[torch.fx.Node]:
            new = inner.inline(body, xs)
            return [*new, *new]

        slices = [None for x in along]
        block = writer.block(body.name, [*slices, *slices, *rest], step)
        start = [writer.owned(writer.call(aten.select.int, x, 0, 0)) for x in along]
        node = writer.call(higher_order.scan, block, start, others, tuple(rest))
        ys = writer.items(node, 2 * n)[n:]
        return [writer.call(aten.cat.default, [a, b]) for a, b in zip(first, ys, strict=True)]

    def without_unused(self, count: int, used: Collection[int]) -> ReducedOperator:
        (body,) = self.bodies
        n = self.along
        along, live = set(used), live_inputs(body, used)
        while not along >= (more := {at % n for at in live if at < 2 * n}):
            along |= more
            live = live_inputs(body, along)
        positions = sorted(along)
        rest = sorted(at for at in live if at >= 2 * n)
        order = [*positions, *(n + at for at in positions), *rest]
        narrowed = narrowed_body(body, positions, {at: i for i, at in enumerate(order)})
        op = AssociativeScan(self.name, [narrowed], len(positions))
        return ReducedOperator(op, (*positions, *(at - n for at in rest)), tuple(positions))


def _settled_axes(
    first: Sequence[Axes], step: Callable[[Sequence[Axes]], list[Axes]]
) -> list[Axes]:
    """Return the axes of a carry after any number of steps."""
    carry = list(first)
    while True:
        more = [old | new for old, new in zip(carry, step(carry), strict=True)]
        if more == carry:
            return carry
        carry = more


def _results(body: Body) -> Sequence[torch.fx.Node]:
    return next(iter(reversed(body.graph.nodes))).args[0]


# Device types with torch's associative_scan for pointwise functions; inductor has no code for it
# on other devices.
_PARALLEL = {"cuda", "xpu"}

# Operators that turn a slice into a batch of one for JAX's form, and back.
_MOVES = frozenset({"aten::unsqueeze", "aten::squeeze.dim"})


def _is_pointwise(node: torch.fx.Node) -> bool:
    """True if a node of a body combines slices pointwise."""
    op = node.meta.get("op")
    return node.op != "call_function" or (
        isinstance(op, TorchOperator)
        and (torch.Tag.pointwise in op.overload.tags or op.name in _MOVES)
    )


def _without_moves(graph: torch.fx.Graph) -> torch.fx.Graph:
    """Return the graph of a pointwise body without the moves to and from a batch."""
    copy = torch.fx.Graph()
    values: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in graph.nodes:
        op = node.meta.get("op")
        if isinstance(op, TorchOperator) and op.name in _MOVES:
            values[node] = values[node.args[0]]
        elif node.op == "output":
            copy.output(tuple(values[item] for item in node.args[0]))
        else:
            values[node] = copy.node_copy(node, values.__getitem__)
    return copy


def _renumber(operands: Iterable[int]) -> tuple[tuple[int, ...], dict[int, int]]:
    """Return the kept operands in order, and the new index of each."""
    positions = tuple(sorted(operands))
    return positions, {at: i for i, at in enumerate(positions)}


def _used_carry(
    wanted: Collection[int], count: int, body: Body, results: Collection[int]
) -> tuple[set[int], set[int]]:
    """Return the used part of a loop's carry, and all operands that its body uses.

    An entry of the carry that only computes itself does not count as used.

    Args:
        wanted: the results that are used outside of the body; others are ignored.
        body: the body; its first results are the next carry.
    """
    carried = {i for i in wanted if i < count}
    while True:
        live = live_inputs(body, {*carried, *results})
        more = {i for i in live if i < count}
        if more <= carried:
            return carried, live
        carried |= more
