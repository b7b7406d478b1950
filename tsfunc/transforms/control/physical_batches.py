"""Batches of a program's choices and loops, run on physical values.

NOTE [batched bodies]
If the choice of a program differs from example to example, each body runs on an active subset (NOTE
[active subsets] in ``bridge/control/subsets``). A step on tracers costs several times as much as
its operators. But the bodies of a program are graphs: if only plain tensors are involved, ``vmap``
of a body is traced once for its types, with a symbolic number of examples, and each step calls that
program. Selecting a subset and merging the results are then operators on plain tensors, and torch's
autograd differentiates all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch

from tsfunc import pytrees
from tsfunc.bridge.control.control_flow import Body, BodyFunction
from tsfunc.bridge.grad.linear_maps import value_batch_first
from tsfunc.bridge.tracers.batch_tracer import BatchLevel, BatchTracer, wrap
from tsfunc.bridge.tracers.dynamo import torch_records
from tsfunc.bridge.tracers.nesting import innermost_value
from tsfunc.bridge.tracers.operators import PLAIN_TENSORS
from tsfunc.dispatch.state import tls
from tsfunc.program import capture
from tsfunc.program.calling.capture import TraceRequest
from tsfunc.program.guarding.call_spec import placeholder
from tsfunc.program.guarding.inputs import InputSpec
from tsfunc.program.passes.effects import is_random, writes
from tsfunc.transforms.argnums import with_replaced
from tsfunc.transforms.control.active import groups_by_choice, numbers_in, repeat
from tsfunc.transforms.control.choice import BatchedChoice
from tsfunc.transforms.vmap import vmap
from tsfunc.types import Dim

# Takes the operands of a call and returns the results; batched ones have the batch dim first.
Every = Callable[[Sequence[Any]], Sequence[Any]]

# The programs of each body by the types of the operands; None if the body can't be traced.
_programs: Final[WeakKeyDictionary[Body, dict[Any, Every | None]]] = WeakKeyDictionary()
_MOST: Final = 32  # the most programs of a body; further types are not traced
_EXAMPLES: Final = Dim("examples", min=1)
_SOME: Final = 7  # the batch size of the trace
_NUMBERS: Final = (bool, int, float)


class PhysicalBatch:
    """Physical operands of a batch of calls: a group of examples as in ``active``.

    A state is a list of tensors, each with the batch dim first.

    Attributes:
        operands: the tensors, batched ones with the batch dim first; and numbers.
        batched: for each operand, True if it is batched.
        index: their positions in the group that they were selected from; None for a whole batch.
        numbers: their positions in the whole batch; None for a whole batch.
    """

    def __init__(
        self,
        operands: Sequence[Any],
        batched: Sequence[bool],
        size: int,
        index: torch.Tensor | None = None,
        numbers: torch.Tensor | None = None,
    ) -> None:
        self.batched, self.size = tuple(batched), size
        self.index, self.numbers = index, numbers
        self.operands = [
            x.contiguous() if is_batched else x
            for x, is_batched in zip(operands, self.batched, strict=True)
        ]

    @classmethod
    def of(cls, operands: Sequence[Any], batched: Sequence[bool]) -> PhysicalBatch:
        """Return the whole batch with these operands, at least one of which is batched."""
        pairs = zip(operands, batched, strict=True)
        return cls(operands, batched, next(x.shape[0] for x, is_batched in pairs if is_batched))

    def with_batched(self, count: int) -> PhysicalBatch:
        """Return the batch with the first ``count`` operands batched."""
        if all(self.batched[:count]):
            return self
        first = [
            x if batched else x.expand(self.size, *x.shape)
            for x, batched in zip(self.operands[:count], self.batched, strict=False)
        ]
        return PhysicalBatch(
            [*first, *self.operands[count:]], [True] * count + [*self.batched[count:]], self.size
        )

    def without(self, count: int) -> PhysicalBatch:
        """Return the batch without the first ``count`` operands."""
        return PhysicalBatch(self.operands[count:], self.batched[count:], self.size)

    def select(self, index: torch.Tensor, *, single: bool = False) -> PhysicalBatch:
        taken = [
            _select(x, index) if batched else x
            for x, batched in zip(self.operands, self.batched, strict=True)
        ]
        numbers = index if self.numbers is None else self.numbers.index_select(0, index)
        return PhysicalBatch(taken, self.batched, index.shape[0], index, numbers)

    def select_state(self, state: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        assert self.index is not None
        return [_select(x, self.index) for x in state]

    def merge_states(
        self, parts: Sequence[tuple[PhysicalBatch, Sequence[torch.Tensor]]]
    ) -> Sequence[torch.Tensor]:
        if len(parts) == 1:
            return parts[0][1]
        numbers = [group.numbers for group, _ in parts if group.numbers is not None]
        order = torch.cat(numbers).argsort()
        columns = zip(*[state for _, state in parts], strict=True)
        return [_select(torch.cat(column), order) for column in columns]

    def vmap_body(self, body: Body, function: BodyFunction | None = None) -> Every | None:
        """Return a function that runs a body for every example; None if it can't be traced.

        Args:
            function: a function of the body; by default the one that writes into copies.
        """
        function = body.function if function is None else function
        programs = _programs.setdefault(body, {})
        key = (function is body.in_place, *[self._type(i) for i in body.inputs])
        if key not in programs:
            programs[key] = self._traced(body, function) if len(programs) < _MOST else None
        return programs[key]

    def _type(self, i: int) -> Any:
        x = self.operands[i]
        if not isinstance(x, torch.Tensor):
            return type(x), x
        if self.batched[i]:
            return True, x.dtype, x.device, x.shape[1:]
        return False, x.dtype, x.device, x.shape, x.stride()

    def _sample(self, x: torch.Tensor, batched: bool) -> torch.Tensor:
        if batched:
            return placeholder((_SOME, *x.shape[1:]), x.dtype, x.device)
        return placeholder(x.shape, x.dtype, x.device, x.stride())

    def _traced(self, body: Body, function: BodyFunction | None) -> Every | None:
        if any(map(is_random, body.graph.nodes)) or function is None:
            return None
        operands = self.operands
        used = sorted(set(body.inputs))
        tensors = [i for i in used if isinstance(operands[i], torch.Tensor)]
        dims = tuple([0 if self.batched[i] else None for i in tensors])

        def run(*values: Any) -> Sequence[Any]:
            def one(*xs: Any) -> tuple[Any, ...]:
                return tuple(function(with_replaced(values, tensors, xs)))

            return vmap(one, in_dims=dims)(*[values[i] for i in tensors])

        flat: list[Any] = [x if i in used else None for i, x in enumerate(operands)]
        inputs = []
        for i in tensors:
            dims_of: list[Any] = list(operands[i].shape)
            if self.batched[i]:
                dims_of[0] = _EXAMPLES
            flat[i] = self._sample(operands[i], self.batched[i])
            inputs.append(InputSpec(i, f"x{i}", flat[i], tuple(dims_of)))
        tree = pytrees.structure_of((tuple(flat), {}))
        name = f"vmap({body.name})"
        request = TraceRequest(
            name, body.name, run, flat, tree, inputs, {_EXAMPLES.name: _EXAMPLES}
        )
        try:
            with torch.enable_grad():
                return capture(request).run
        except Exception:  # a run on tracers reports the error if it fails too
            return None


def run_known_loop(
    condition: Body, body: Body, carried: int, operands: Sequence[Any], choice: BatchedChoice
) -> tuple[Any, ...] | None:
    """Run a loop whose first condition is known to its end.

    Args:
        operands: the operands of condition and body, as tensors of the vmap.

    Returns:
        The last carry; None if the loop has to run on tracers.
    """

    def run(batch: PhysicalBatch) -> Sequence[Any] | None:
        return run_batched_loop(
            condition, body, carried, batch, innermost_value(choice.values).bool()
        )

    return _on_physical(run, operands, choice.level)


def _on_physical(
    run: Callable[[PhysicalBatch], Sequence[Any] | None], operands: Sequence[Any], level: BatchLevel
) -> tuple[Any, ...] | None:
    """Return the results of a function of the operands' physical values, as tensors of the vmap.

    None if the operands have to be tracers, or if the function returns None.
    """
    if not _is_outermost(level):
        return None
    with level.restored():
        batch = _physical_batch(operands, level)
        results = None if batch is None else run(batch)
    return None if results is None else tuple([wrap(x, 0, level) for x in results])


def run_batched_loop(
    condition: Body,
    body: Body,
    carried: int,
    batch: PhysicalBatch,
    active: torch.Tensor | None = None,
) -> Sequence[torch.Tensor] | None:
    """Run a loop of known length on physical operands; without ``active``, call its condition."""
    batch = batch.with_batched(carried)
    function, operands = body.with_own_carry(tuple(batch.operands))
    ask, step = batch.vmap_body(condition), batch.vmap_body(body, function)
    if ask is None or step is None:
        return None
    carry = operands[:carried]
    rest = batch.without(carried)

    def steps(group: PhysicalBatch, carry: Sequence[Any], left: int | None) -> Any:
        count = 0
        while True:
            carry = step([*carry, *group.operands])
            count += 1
            active = _truth(ask([*carry, *group.operands]))
            if not bool(active.all()):
                return carry, count, active

    active = _truth(ask([*carry, *rest.operands])) if active is None else active
    carry_out = repeat(rest, carry, active, steps)[0]
    return [x.clone() if x is first else x for x, first in zip(carry_out, carry, strict=True)]


def _truth(results: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the condition of each example, from the results of a condition's body."""
    truth = results[0].reshape(-1)
    return truth if truth.dtype is torch.bool else truth != 0


def choice(
    branches: Sequence[Body], operands: Sequence[Any], taken: BatchedChoice
) -> tuple[Any, ...] | None:
    """Run each branch on the examples that take it; None as for ``run_known_loop``.

    Args:
        operands: the operands of the branches, as tensors of the vmap.
    """

    def run(batch: PhysicalBatch) -> Sequence[Any] | None:
        return run_batched_choice(branches, batch, innermost_value(taken.values))

    return _on_physical(run, operands, taken.level)


def run_batched_choice(
    branches: Sequence[Body], batch: PhysicalBatch, index: torch.Tensor
) -> Sequence[torch.Tensor] | None:
    """Run the branches that the examples choose on physical operands, and join the results."""
    numbers = numbers_in(index)
    every = [batch.vmap_body(branches[i]) for i in numbers]
    if any(writes(node) for i in numbers for node in branches[i].graph.nodes):
        return None
    runs = [run for run in every if run is not None]
    if len(runs) < len(numbers):
        return None
    groups = groups_by_choice(batch, index, numbers)
    parts = [(group, run(group.operands)) for run, (_, group) in zip(runs, groups, strict=True)]
    return batch.merge_states(parts)


def _select(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Select examples of a tensor, which may be on another device than the index."""
    return x.index_select(0, index if index.device == x.device else index.to(x.device))


def _is_outermost(level: BatchLevel) -> bool:
    """True if only this level is between the current code and plain tensors."""
    state = tls.state
    return (
        state.levels == (level,) and state.plain and not level.autograd and not level.forward
        and not level.outer.levels and not level.functorch_depth and not torch_records()
    )  # fmt: skip


def _physical_batch(operands: Sequence[Any], level: BatchLevel) -> PhysicalBatch | None:
    """Return the physical values of a level's operands; None if one is not a plain tensor."""
    values, flags = [], []
    for operand in operands:
        is_tracer = isinstance(operand, BatchTracer)
        if is_tracer and operand.dispatch_level is not level:
            return None
        flags.append(is_tracer and operand.bdim is not None)
        values.append(
            value_batch_first(operand, level)
            if flags[-1]
            else operand.value
            if is_tracer
            else operand
        )
    return PhysicalBatch.of(values, flags) if are_plain(values) else None


def are_plain(operands: Sequence[Any]) -> bool:
    """True if all operands are strided tensors without a subclass, or numbers."""
    return all(
        type(x) in _NUMBERS or (type(x) in PLAIN_TENSORS and x.layout is torch.strided)
        for x in operands
    )


def batch_here(operands: Sequence[Any], batched: Sequence[bool]) -> PhysicalBatch | None:
    """Return the operands of a batch of calls; None if it has to run on tracers.

    Args:
        operands: physical values.
        batched: True for each tensor with a batch dim in front; numbers follow the tensors.
    """
    state = tls.state
    if state.levels or not state.plain or torch_records() or not are_plain(operands):
        return None
    here = PhysicalBatch.of(operands, [*batched, *[False] * (len(operands) - len(batched))])
    return here if here.size else None
