"""A vmap whose examples may go different ways (``data_dependent="split"``): its level and tracers.

NOTE [splitting]
Where the function asks for a Python value that differs from example to example (``if``,
``.item()``, the size of a ``nonzero``), all examples are looked at. The largest group of those that
answer alike goes on: the level's batch becomes that group, within the same run of the function. The
other groups are put off; the vmapped call runs the function for each of them from its start. So

- there is one run for each sequence of answers that occurs, and each goes to its end;
- an example that is put off is in a group of half the batch at most, so that it is run
  1 + log2(batch size) times at most, however the answers fall;
- a batch whose examples keep leaving one by one is given up, and what is left of it is run example
  by example. There are never more runs that go to their end than a loop over the examples makes.

What the function made before the batch became smaller has a place for every example that it had
then. A tracer is narrowed when it is next looked at: its ``value`` is a property that selects the
examples that are left, under the state that the level captured, so that the graphs of outer levels
pass through the selection.

NOTE [memory that examples left]
Narrowing copies, so that tensors which shared memory no longer do. This matters only once one of
them is written to. Then, if another one is still there, the level's own examples start anew: up to
here their answers agree, so nothing is narrowed in that run. A write into an argument, which the
caller is to see, has the call start anew on copies (``writes_arguments``).

Public names that are little known: ``torch.multiprocessing.reductions.StorageWeakRef`` says
whether a storage is still there, without keeping it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tsfunc.bridge.tracers.batch_tracer import BatchLevel, BatchTracer
from tsfunc.bridge.tracers.generators import Generators
from tsfunc.bridge.tracers.hot_calls import KINDS, HotTracer
from tsfunc.bridge.tracers.tracer import SlottedTracer, Tracer
from tsfunc.bridge.writing.births import take_place
from tsfunc.ops.splitting import groups_of, take_examples


class StartAnew(BaseException):
    """Internal: the run of a level's examples is given up; the vmapped call begins it again.

    No ``Exception``: the user's function is not to catch it.
    """

    def __init__(self, level: BatchLevel) -> None:
        super().__init__(f"{level.name} starts anew (internal to tsfunc; it should be caught)")
        self.level = level


class SplitLevel(BatchLevel):
    """An active vmap that goes on with the examples whose answers agree (NOTE [splitting]).

    Attributes:
        lanes: which of the call's examples the batch has, in ascending order.
        put_off: groups of examples that went another way.
        generation: how often the batch became smaller.
        asked: whether any Python value was asked for.
        copying: whether its arguments are copies of the caller's.
        alone: whether its one example is given as it is, and not as a tracer.
        written: which of these copies were written into, by their places among the inputs.
        writes_arguments: whether the function was about to write into arguments that are not.
    """

    __slots__ = ("_call_size", "_moves", "_past", "_picked", "alone", "asked", "copying",
                 "generation", "lanes", "put_off", "writes_arguments", "written")  # fmt: skip

    def __init__(
        self,
        lanes: torch.Tensor,
        randomness: str,
        name: str,
        strict: bool,
        generators: Generators | None,
        copying: bool,
    ) -> None:
        super().__init__(len(lanes), randomness, name, strict, generators=generators)
        self.kind = SplitTracer
        self.lanes = lanes
        self._call_size = int(lanes.max()) + 1 if len(lanes) else 0
        self.put_off: list[torch.Tensor] = []
        self.generation = 0
        self.asked = False
        self.copying = copying
        self.written: set[int] = set()
        self.writes_arguments = False
        self.alone = False
        self._past: list[torch.Tensor] = []
        self._picked: dict[int, torch.Tensor] = {}
        outer = [level for level in self.outer.levels if isinstance(level, SplitLevel)]
        self._moves: _Moves = outer[0]._moves if outer else _Moves()

    def examples(self, device: torch.device) -> torch.Tensor:
        return self.lanes.to(device)

    @property
    def call_size(self) -> int:
        return self._call_size

    def places(self) -> torch.Tensor:
        return self.lanes

    def agree(self, answers: torch.Tensor) -> torch.Tensor | None:
        """Goes on with the largest group of examples that answer alike.

        Args:
            answers: a row for each example of the batch, compared bit by bit.

        Returns:
            The places in the batch of those that are left, or None where all are.
        """
        self.asked = True
        groups = groups_of(answers)
        if len(groups) == 1:
            return None
        kept = max(groups, key=len)
        self.put_off += [self.lanes[group] for group in groups if group is not kept]
        self._past.append(self.lanes)
        self._picked.clear()
        self.lanes = self.lanes[kept]
        self.generation += 1
        self.batch_size = len(kept)
        if self._comes_apart():
            self.put_off += self.lanes[1:].split(1)
            self.lanes = self.lanes[:1]
            raise StartAnew(self)
        return kept

    def _comes_apart(self) -> bool:
        """Whether examples have kept leaving, hardly two at a time, until a quarter was gone.

        Then the others are taken to do so too, as where a loop ends for each in its own time: all
        but the last group would be run once more. They are run by themselves now, as plain tensors
        (NOTE [one example] in ``transforms/split``), which costs what a loop over them costs.
        """
        gone = len(self._past[0]) - len(self.lanes)
        often = self.generation
        return (
            self.randomness == "error"
            and len(self.lanes) > 1
            and often >= 3
            and often * 2 >= gone
            and gone * 4 >= len(self._past[0])
        )

    def twin(self, name: str) -> BatchLevel:
        twin = super().twin(name)
        twin.splitter = _BeginningAnew(self)
        return twin

    def narrowed(self, value: torch.Tensor, at: int, generation: int) -> torch.Tensor:
        """The examples that are left, of a value from when there were more."""
        places = self._picked.get(generation)
        if places is None:
            places = torch.searchsorted(self._past[generation], self.lanes)
            self._picked[generation] = places
        with self.restored(), torch.set_grad_enabled(self.torch_state.grad_mode):
            taken = take_examples(value, at, places)
        take_place(value, taken, self)
        self._moves.moved(value, taken, self)
        return taken

    def before_write(self, target: BatchTracer) -> None:
        """Gives the run up where others would miss what is written to the tensor."""
        memory = _storage_of(target)
        if memory is None:
            return
        arguments = self._moves.arguments_at(memory, self)
        if arguments and not self.copying:
            self.writes_arguments = True
            raise StartAnew(self)
        self.written |= arguments
        level = self._moves.parted_at(memory)
        if level is not None:
            raise StartAnew(level)

    def note_argument(self, value: torch.Tensor, place: int) -> None:
        """This is the input at a place: writes into it are to be seen outside."""
        self._moves.note_argument(value, self, place)


def was_written(value: torch.Tensor) -> bool:
    """Whether a tensor that was cloned, or a view of it, may have been written into since."""
    return isinstance(value, Tracer) or value._version > 0


def before_write(level: BatchLevel, target: Any) -> None:
    """An operator writes in place into a tensor, or each of a list."""
    if isinstance(target, list | tuple):
        for item in target:
            before_write(level, item)
    elif isinstance(level, SplitLevel) and isinstance(target, SplitTracer):
        level.before_write(target)


class SplitTracer(HotTracer):
    """A batched tensor that follows its level when that goes on with fewer examples."""

    __slots__ = ()

    _generation: int
    _held: torch.Tensor

    @property
    def value(self) -> torch.Tensor:
        level: Any = self.dispatch_level
        if self._generation != level.generation and self.bdim is not None:
            self.value = level.narrowed(self._held, self.bdim, self._generation)
        return self._held

    @value.setter
    def value(self, value: torch.Tensor) -> None:
        level: Any = self.dispatch_level
        self._held = value
        self._generation = level.generation


class _BeginningAnew:
    """The splitter of a level that a rule enters for the batch of another one.

    What runs there works on values of one size: where examples differ, the other level begins
    anew with those that agree.
    """

    def __init__(self, level: SplitLevel) -> None:
        self.level = level

    def agree(self, answers: torch.Tensor) -> None:
        """Goes on where all examples agree."""
        if self.level.agree(answers) is not None:
            raise StartAnew(self.level)


class _Moves:
    """Which storages have copies of what was one memory before examples parted.

    Levels inside of one another share it: the outer one may move what the inner one looks at.
    """

    def __init__(self) -> None:
        self._families: dict[int, list[tuple[StorageWeakRef, SplitLevel]]] = {}
        self._arguments: dict[int, tuple[StorageWeakRef, set[tuple[SplitLevel, int]]]] = {}

    def moved(self, old: torch.Tensor, new: torch.Tensor, level: SplitLevel) -> None:
        """A value was copied for the examples that are left at a level."""
        before, after = _storage_of(old), _storage_of(new)
        if before is None or after is None or before.cdata == after.cdata:
            return
        family = self._families.setdefault(before.cdata, [(before, level)])
        for entry in [entry for entry in family if entry[0].expired()]:
            family.remove(entry)
            del self._families[entry[0].cdata]
        family.append((after, level))
        self._families[after.cdata] = family
        if before.cdata in self._arguments:
            self._arguments[after.cdata] = after, self._arguments[before.cdata][1]

    def parted_at(self, memory: StorageWeakRef) -> SplitLevel | None:
        """The outermost level at which a memory parted from another that is still there."""
        family = self._families.get(memory.cdata, ())
        others = [at for other, at in family if other.cdata != memory.cdata and not other.expired()]
        return min(others, key=lambda level: level.depth, default=None)

    def note_argument(self, value: torch.Tensor, level: SplitLevel, place: int) -> None:
        """A memory is that of an argument of a level's call."""
        memory = _storage_of(value)
        if memory is not None:
            self._arguments.setdefault(memory.cdata, (memory, set()))[1].add((level, place))

    def arguments_at(self, memory: StorageWeakRef, level: SplitLevel) -> set[int]:
        """Which arguments of a level's call a memory belongs to, or was copied from."""
        known = self._arguments.get(memory.cdata)
        return set() if known is None else {place for at, place in known[1] if at is level}


def _storage_of(value: torch.Tensor) -> StorageWeakRef | None:
    """The memory of what a tensor stands for in the end; None where it has none."""
    while isinstance(value, Tracer):
        inner = getattr(value, "value", None)
        if not isinstance(inner, torch.Tensor):
            return None
        value = inner
    try:
        return StorageWeakRef(value.untyped_storage())
    except (NotImplementedError, RuntimeError):
        return None  # sparse tensors, and those without data


class SlottedSplitTracer(SplitTracer, SlottedTracer):
    """What a tracer with slots becomes when it is turned into one of these (``turning``)."""

    __slots__ = ()


SplitTracer.forms = SplitTracer, SlottedSplitTracer
SplitTracer.__name__ = SlottedSplitTracer.__name__ = BatchTracer.__name__
KINDS |= {SplitTracer, SlottedSplitTracer}
