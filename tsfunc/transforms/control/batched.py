"""Batches of a program's choices and loops on physical values.

NOTE [batched bodies]
Where the choice of a program differs from example to example, its bodies run on lanes (NOTE [lanes]
in ``bridge/control/lanes``), and a step on tracers costs several times what its operators cost. But
a program's bodies are graphs. So where nothing stands between the lanes and plain tensors, ``vmap``
of a body is traced itself, once for its types, with a symbolic number of examples, and steps are
calls of that program. To gather lanes, and to put parts together, are then operators on plain
tensors, and the derivatives of all of it are torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch

from tsfunc import pytrees
from tsfunc.bridge.control.control_flow import Body
from tsfunc.bridge.tracers.batch_tracer import BatchLevel, BatchTracer, wrap
from tsfunc.bridge.tracers.dynamo import torch_records
from tsfunc.dispatch.state import tls
from tsfunc.program import capture
from tsfunc.program.calling.capture import TraceRequest
from tsfunc.program.guarding.forms import placeholder
from tsfunc.program.guarding.inputs import InputSpec
from tsfunc.program.passes.effects import is_random, writes
from tsfunc.transforms.control.choice import ByExample, read
from tsfunc.transforms.vmap import vmap
from tsfunc.types import Dim

# Takes the operands of a call, those that are batched with the examples in front; so are results.
Every = Callable[[Sequence[Any]], Sequence[Any]]

# For each body the programs that it has become, by the types of the operands; None where it can't
# be one.
_programs: Final[WeakKeyDictionary[Body, dict[Any, Every | None]]] = WeakKeyDictionary()
_MOST: Final = 32  # programs of a body; beyond it nothing more is traced
_LANES: Final = Dim("lanes", min=1)
_SOME: Final = 7  # lanes of the example that is traced
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
_NUMBERS: Final = (bool, int, float)


class Batch:
    """Physical operands of a batch of calls.

    Attributes:
        operands: the tensors, those that are batched with the examples in front; and numbers.
        batched: which are.
    """

    def __init__(self, operands: Sequence[Any], batched: Sequence[bool]) -> None:
        self.batched = tuple(batched)
        self.operands = [
            x.contiguous() if each else x for x, each in zip(operands, self.batched, strict=True)
        ]

    @property
    def size(self) -> int:
        """How many examples there are."""
        pairs = zip(self.operands, self.batched, strict=True)
        found: int = next(x.shape[0] for x, batched in pairs if batched)
        return found

    def with_batched(self, count: int) -> Batch:
        """The same, the first so many operands batched."""
        if all(self.batched[:count]):
            return self
        size = self.size
        first = [
            x if batched else x.expand(size, *x.shape)
            for x, batched in zip(self.operands[:count], self.batched, strict=False)
        ]
        return Batch([*first, *self.operands[count:]], [True] * count + [*self.batched[count:]])

    def every(self, body: Body) -> Every | None:
        """What runs a body for every example; None where it runs on tracers alone."""
        known = _programs.setdefault(body, {})
        key = tuple([self._type(i) for i in body.inputs])
        if key not in known:
            known[key] = self._traced(body) if len(known) < _MOST else None
        return known[key]

    def of(self, index: torch.Tensor) -> Batch:
        """Those examples alone."""
        taken = [
            _taken(x, index) if batched else x
            for x, batched in zip(self.operands, self.batched, strict=True)
        ]
        return Batch(taken, self.batched)

    def _type(self, i: int) -> Any:
        x = self.operands[i]
        if not isinstance(x, torch.Tensor):
            return type(x), x
        if self.batched[i]:
            return True, x.dtype, x.device, x.shape[1:]
        return False, x.dtype, x.device, x.shape, x.stride()

    def _example(self, x: torch.Tensor, batched: bool) -> torch.Tensor:
        if batched:
            return placeholder((_SOME, *x.shape[1:]), x.dtype, x.device)
        return placeholder(x.shape, x.dtype, x.device, x.stride())

    def _traced(self, body: Body) -> Every | None:
        if any(map(is_random, body.graph.nodes)) or body.function is None:
            return None
        operands, function = self.operands, body.function
        used = sorted(set(body.inputs))
        tensors = [i for i in used if isinstance(operands[i], torch.Tensor)]
        dims = tuple([0 if self.batched[i] else None for i in tensors])

        def run(*given: Any) -> Sequence[Any]:
            def one(*xs: Any) -> tuple[Any, ...]:
                filled = list(given)
                for i, x in zip(tensors, xs, strict=True):
                    filled[i] = x
                return tuple(function(filled))

            return vmap(one, in_dims=dims)(*[given[i] for i in tensors])  # type: ignore[no-any-return]

        flat: list[Any] = [x if i in used else None for i, x in enumerate(operands)]
        inputs = []
        for i in tensors:
            dims_of: list[Any] = list(operands[i].shape)
            if self.batched[i]:
                dims_of[0] = _LANES
            flat[i] = self._example(operands[i], self.batched[i])
            inputs.append(InputSpec(i, f"x{i}", flat[i], tuple(dims_of)))
        tree = pytrees.structure_of((tuple(flat), {}))
        name = f"vmap({body.name})"
        request = TraceRequest(name, body.name, run, flat, tree, inputs, {_LANES.name: _LANES})
        try:
            with torch.enable_grad():
                return capture(request).run
        except Exception:  # the user hears of it from the run on tracers, if that fails too
            return None


def loop(
    condition: Body, body: Body, carried: int, operands: Sequence[Any], choice: ByExample
) -> tuple[Any, ...] | None:
    """A loop to its end, whose first condition is known.

    Args:
        condition: of one example.
        body: of one example.
        carried: how many operands are carried.
        operands: what condition and body are called with, as a vmap's code has them.
        choice: what the condition says of the first carry.

    Returns:
        The last carry; None where this is to be done by tracers.
    """
    level = choice.level
    if not _is_outermost(level):
        return None
    with level.restored():
        batch = _physical(operands, level)
        if batch is None:
            return None
        found = loop_of(condition, body, carried, batch, read(choice.values).bool())
    return None if found is None else tuple([wrap(x, 0, level) for x in found])


def loop_of(
    condition: Body, body: Body, carried: int, batch: Batch, active: torch.Tensor | None = None
) -> Sequence[torch.Tensor] | None:
    """The same for physical operands; the condition is asked if it is not known."""
    batch = batch.with_batched(carried)
    ask, step = batch.every(condition), batch.every(body)
    if ask is None or step is None:
        return None
    if any(map(writes, body.graph.nodes)):
        batch.operands[:carried] = [x.clone() for x in batch.operands[:carried]]
    return _steps(ask, step, carried, batch, _truth(ask, batch) if active is None else active)


def _truth(ask: Every, batch: Batch) -> torch.Tensor:
    """What a condition says of each example."""
    found: torch.Tensor = ask(batch.operands)[0].reshape(-1)
    return found if found.dtype is torch.bool else found != 0


def _steps(
    ask: Every, step: Every, carried: int, batch: Batch, active: torch.Tensor
) -> Sequence[torch.Tensor]:
    parts = _Parts()
    while True:
        going = active.nonzero().squeeze(1)
        if going.shape[0] < active.shape[0]:
            done = (~active).nonzero().squeeze(1)
            parts.add(done, [_taken(x, done) for x in batch.operands[:carried]])
            if not going.shape[0]:
                return parts.together()
            parts.left(going)
            batch = batch.of(going)
        while True:
            batch.operands[:carried] = step(batch.operands)
            active = _truth(ask, batch)
            if not bool(active.all()):
                break


def choice(
    branches: Sequence[Body], operands: Sequence[Any], taken: ByExample
) -> tuple[Any, ...] | None:
    """What branches return, each on the examples that take it; None as for `loop`.

    Args:
        branches: of one example.
        operands: what the branches are called with, as a vmap's code has them.
        taken: which branch each example takes.
    """
    level = taken.level
    if not _is_outermost(level):
        return None
    with level.restored():
        batch = _physical(operands, level)
        if batch is None:
            return None
        found = choice_of(branches, batch, read(taken.values))
    return None if found is None else tuple([wrap(x, 0, level) for x in found])


def choice_of(
    branches: Sequence[Body], batch: Batch, index: torch.Tensor
) -> Sequence[torch.Tensor] | None:
    """The same for physical operands."""
    numbers = torch.unique(index).tolist()
    every = [batch.every(branches[i]) for i in numbers]
    if None in every or any(writes(node) for i in numbers for node in branches[i].graph.nodes):
        return None
    parts = _Parts()
    for i, run in zip(numbers, every, strict=True):
        assert run is not None
        if len(numbers) == 1:
            return run(batch.operands)
        which = (index == i).nonzero().squeeze(1)
        parts.add(which, run(batch.of(which).operands))
    return parts.together()


def _taken(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Some examples of a tensor, which may be on another device than what chooses them."""
    return x.index_select(0, index if index.device == x.device else index.to(x.device))


class _Parts:
    """What is known of some examples, until it is of all."""

    def __init__(self) -> None:
        self.numbers: list[torch.Tensor] = []
        self.results: list[Sequence[torch.Tensor]] = []
        self.rest: torch.Tensor | None = None

    def add(self, index: torch.Tensor, results: Sequence[torch.Tensor]) -> None:
        """Results of examples with these numbers, among those that are left."""
        self.numbers.append(index if self.rest is None else self.rest.index_select(0, index))
        self.results.append(results)

    def left(self, index: torch.Tensor) -> None:
        """These alone are left, numbered anew."""
        self.rest = index if self.rest is None else self.rest.index_select(0, index)

    def together(self) -> Sequence[torch.Tensor]:
        if len(self.results) == 1:
            return self.results[0]
        order = torch.cat(self.numbers).argsort()
        columns = zip(*self.results, strict=True)
        return [_taken(torch.cat(column), order) for column in columns]


def _is_outermost(level: BatchLevel) -> bool:
    """Whether nothing but the level is between the code that runs and plain tensors."""
    state = tls.state
    return (
        state.levels == (level,) and state.plain and not level.autograd and not level.forward
        and not level.outer.levels and not level.functorch_depth and not torch_records()
    )  # fmt: skip


def _physical(operands: Sequence[Any], level: BatchLevel) -> Batch | None:
    """The physical values of what code at a level has; None if one of them is no plain tensor."""
    values, flags = [], []
    for operand in operands:
        x, dim = operand, None
        if isinstance(operand, BatchTracer):
            if operand.dispatch_level is not level:
                return None
            x, dim = operand.value, operand.bdim
            x = x if dim is None else x.movedim(dim, 0)
        values.append(x)
        flags.append(dim is not None)
    return Batch(values, flags) if are_plain(values) else None


def are_plain(operands: Sequence[Any]) -> bool:
    """Whether operands are tensors with strides, of no subclass, and numbers."""
    return all(
        type(x) in _NUMBERS or (type(x) in _PLAIN and x.layout is torch.strided) for x in operands
    )


def batch_here(operands: Sequence[Any], batched: Sequence[bool]) -> Batch | None:
    """What an operator is called with for a batch of calls; None where tracers are to run it.

    Args:
        operands: physical values.
        batched: which tensors have a dim in front; numbers, after these, have none.
    """
    state = tls.state
    if state.levels or not state.plain or torch_records() or not are_plain(operands):
        return None
    found = Batch(operands, [*batched, *[False] * (len(operands) - len(batched))])
    return found if found.size else None
