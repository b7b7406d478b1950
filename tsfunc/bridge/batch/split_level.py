"""The level and the tracers of a vmap that splits its batch (``data_dependent="split"``).

NOTE [splitting]
When the function reads a Python value that differs between examples (``if``, ``.item()``, the size
of a ``nonzero``), the level groups all examples by their answers. The largest group continues: the
level's batch becomes that group, within the same run of the function. The other groups are put off;
the vmapped call runs the function for each of them from its start. As a result:

- there is one complete run for each sequence of answers that occurs;
- an example that is put off is in a group of at most half the batch, so it is run at most
  1 + log2(batch size) times, however the answers fall;
- a batch whose examples keep leaving one by one is given up, and the rest of it is run example by
  example. The number of complete runs is never more than a loop over the examples makes.

A value made before the batch became smaller has an entry for each example of the earlier batch. A
tracer is narrowed at the next access: its ``value`` is a property that selects the remaining
examples, under the state that the level captured, so that the graphs of outer levels include the
selection.

NOTE [memory of finished examples]
Narrowing copies, so tensors that shared memory no longer share it. The difference shows only when
one of the tensors is written to. If another one is still alive at that time, the level's own
examples start over: their answers agree up to here, so the new run narrows nothing. If the function
writes into an argument, which the caller must see, the call starts over on copies
(``writes_arguments``).

Public names that are little known: ``torch.multiprocessing.reductions.StorageWeakRef`` tells
whether a storage is still alive, without keeping it alive.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tsfunc.bridge.tracers.batch_handlers import FastBatchTracer
from tsfunc.bridge.tracers.batch_tracer import TRACERS, BatchLevel, BatchTracer, unwrap
from tsfunc.bridge.tracers.draw_keys import CallKeys
from tsfunc.bridge.tracers.generators import GeneratorStates
from tsfunc.bridge.tracers.tracer import SlottedTracer, Tracer
from tsfunc.bridge.writing.storages import tensor_with_memory
from tsfunc.ops.splitting import groups_of, take_examples
from tsfunc.user_code import AbandonedRun


class RestartRun(AbandonedRun):
    """Internal: aborts the run of a level's examples, which the vmapped call then repeats."""

    def __init__(self, level: BatchLevel) -> None:
        super().__init__(f"{level.name} starts over (internal to tsfunc; it should be caught)")
        self.level = level


class SplitLevel(BatchLevel):
    """An active vmap that continues with the examples whose answers agree (NOTE [splitting]).

    Attributes:
        subset: the indices of the call's examples that are in the batch, in ascending order.
        put_off: the groups of examples that gave other answers.
        generation: the number of times that the batch became smaller.
        reads_values: True if the function has read a Python value.
        copying: True if the level's arguments are copies of the caller's.
        single: True if the only example is passed as a plain value, not as a tracer.
        written: the input positions of the copies that were written into.
        writes_arguments: True if the function was about to write into an argument that is not
            a copy.
    """

    __slots__ = (
        "_moves",
        "_past",
        "_picked",
        "copying",
        "generation",
        "put_off",
        "reads_values",
        "single",
        "subset",
        "writes_arguments",
        "written",
    )  # fmt: skip

    def __init__(
        self,
        subset: torch.Tensor,
        randomness: str,
        name: str,
        strict: bool,
        generators: GeneratorStates | None,
        keys: CallKeys | None,
        copying: bool,
    ) -> None:
        super().__init__(len(subset), randomness, name, strict, 0, generators, keys)
        self.kind = SplitTracer
        self.subset = subset
        self.put_off: list[torch.Tensor] = []
        self.generation = 0
        self.reads_values = False
        self.copying = copying
        self.written: set[int] = set()
        self.writes_arguments = False
        self.single = False
        self._past: list[torch.Tensor] = []
        self._picked: dict[int, torch.Tensor] = {}
        outer = [level for level in self.outer.levels if isinstance(level, SplitLevel)]
        self._moves: _NarrowedStorages = outer[0]._moves if outer else _NarrowedStorages()

    def example_indices(self, device: torch.device) -> torch.Tensor:
        return self.subset.to(device)

    def wrap_factory_result(self, result: Any) -> Any:
        """Return a plain value to a function that has its only example as one.

        No random numbers are drawn there, but a dropout that is switched off comes here as well.
        """
        if not self.single:
            return result
        if isinstance(result, tuple):
            return tuple([self.wrap_factory_result(part) for part in result])
        value, dim = unwrap(result, self)
        return value if dim is None else value.select(dim, 0)

    def agree(self, answers: torch.Tensor) -> torch.Tensor | None:
        """Continue with the largest group of examples that give the same answer.

        Args:
            answers: a row for each example of the batch, compared bit by bit.

        Returns:
            The positions of the remaining examples in the batch, or None if all examples agree.

        Raises:
            RestartRun: the batch is split; its first example runs by itself, and the others later.
        """
        self.reads_values = True
        groups = groups_of(answers)
        if len(groups) == 1:
            return None
        largest = max(groups, key=len)
        self.put_off += [self.subset[group] for group in groups if group is not largest]
        self._past.append(self.subset)
        self._picked.clear()
        self.subset = self.subset[largest]
        self.generation += 1
        self.batch_size = len(largest)
        if self._keeps_splitting():
            self.put_off += self.subset[1:].split(1)
            self.subset = self.subset[:1]
            raise RestartRun(self)
        return largest

    def _keeps_splitting(self) -> bool:
        """True if examples kept leaving in small groups until a quarter was gone.

        The condition is at least three splits with at most two examples per split on average. The
        remaining examples are then expected to part as well, as in a loop that ends at a different
        step for each example, and each split would rerun all that leave. The examples run one by
        one instead, as plain tensors (NOTE [single examples] in ``transforms/split``), as a loop
        would.
        """
        left = len(self._past[0]) - len(self.subset)
        often = self.generation
        return (
            self.randomness == "error"
            and len(self.subset) > 1
            and often >= 3
            and often * 2 >= left
            and left * 4 >= len(self._past[0])
        )

    def duplicate(self, name: str) -> BatchLevel:
        duplicate = super().duplicate(name)
        duplicate.splitter = _RestartSplitter(self)
        return duplicate

    def narrowed(self, value: torch.Tensor, bdim: int, generation: int) -> torch.Tensor:
        """Select the remaining examples of a value from an earlier generation."""
        positions = self._picked.get(generation)
        if positions is None:
            positions = torch.searchsorted(self._past[generation], self.subset)
            self._picked[generation] = positions
        with self.restored(), torch.set_grad_enabled(self.torch_state.grad_mode):
            narrowed_value = take_examples(value, bdim, positions)
        self._moves.moved(value, narrowed_value, self)
        return narrowed_value

    def before_write(self, target: BatchTracer) -> None:
        """Abort the run if a write to the tensor would not reach tensors that shared its memory."""
        memory = _storage_of(target)
        if memory is None:
            return
        arguments = self._moves.arguments_at(memory, self)
        if arguments and not self.copying:
            self.writes_arguments = True
            raise RestartRun(self)
        self.written |= arguments
        level = self._moves.diverged_at(memory)
        if level is not None:
            raise RestartRun(level)

    def note_argument(self, value: torch.Tensor, position: int) -> None:
        """Record that ``value`` is the input at ``position``.

        The caller must see writes into it.
        """
        self._moves.note_argument(value, self, position)


def was_written(value: torch.Tensor) -> bool:
    """True if a cloned tensor, or a view of it, may have been written into since."""
    return isinstance(value, Tracer) or value._version > 0


def before_write(level: BatchLevel, target: Any) -> None:
    """Prepare an in-place write into a tensor, or into each tensor of a list."""
    if isinstance(target, list | tuple):
        for item in target:
            before_write(level, item)
    elif isinstance(level, SplitLevel) and isinstance(target, SplitTracer):
        level.before_write(target)


class SplitTracer(FastBatchTracer):
    """A batched tensor that follows its level when the level's batch becomes smaller."""

    __slots__ = ()

    _generation: int
    _value: torch.Tensor

    @property
    def value(self) -> torch.Tensor:
        level: Any = self.dispatch_level
        if self._generation != level.generation and self.bdim is not None:
            self.value = level.narrowed(self._value, self.bdim, self._generation)
        return self._value

    @value.setter
    def value(self, value: torch.Tensor) -> None:
        level: Any = self.dispatch_level
        self._value = value
        self._generation = level.generation


class _RestartSplitter:
    """The splitter of a level that a rule enters for the batch of another level.

    A rule's values have one batch size, so they can't be narrowed within the rule. If examples
    differ, the other level starts over with those that agree.
    """

    def __init__(self, level: SplitLevel) -> None:
        self.level = level

    def agree(self, answers: torch.Tensor) -> None:
        """Return None if all examples agree, and raise RestartRun otherwise."""
        if self.level.agree(answers) is not None:
            raise RestartRun(self.level)


class _NarrowedStorages:
    """The storages that were one memory before examples parted.

    Nested levels share one record, because an outer level may move memory that an inner level
    uses.
    """

    def __init__(self) -> None:
        self._families: dict[int, list[tuple[StorageWeakRef, SplitLevel]]] = {}
        self._arguments: dict[int, tuple[StorageWeakRef, set[tuple[SplitLevel, int]]]] = {}

    def moved(self, old: torch.Tensor, new: torch.Tensor, level: SplitLevel) -> None:
        """Record that a value was copied for the remaining examples of a level."""
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

    def diverged_at(self, memory: StorageWeakRef) -> SplitLevel | None:
        """Return the outermost level at which a memory parted from another one that is alive."""
        family = self._families.get(memory.cdata, ())
        others = [at for other, at in family if other.cdata != memory.cdata and not other.expired()]
        return min(others, key=lambda level: level.depth, default=None)

    def note_argument(self, value: torch.Tensor, level: SplitLevel, position: int) -> None:
        """Record that a memory belongs to an argument of a level's call."""
        memory = _storage_of(value)
        if memory is not None:
            self._arguments.setdefault(memory.cdata, (memory, set()))[1].add((level, position))

    def arguments_at(self, memory: StorageWeakRef, level: SplitLevel) -> set[int]:
        """Return the arguments of a level's call that a memory belongs to, or was copied from."""
        entry = self._arguments.get(memory.cdata)
        return set() if entry is None else {position for at, position in entry[1] if at is level}


def _storage_of(value: torch.Tensor) -> StorageWeakRef | None:
    """Return the storage of a tensor's innermost value; None if it has none."""
    plain = tensor_with_memory(value)
    try:
        return None if plain is None else StorageWeakRef(plain.untyped_storage())
    except (NotImplementedError, RuntimeError):
        return None  # sparse tensors and tensors without data


class SlottedSplitTracer(SplitTracer, SlottedTracer):
    """The class of a slotted tracer that was promoted to a split tracer (``promotion``)."""

    __slots__ = ()


SplitTracer.layouts = SplitTracer, SlottedSplitTracer
SplitTracer.__name__ = SlottedSplitTracer.__name__ = BatchTracer.__name__
TRACERS.update((SplitTracer, SlottedSplitTracer))
