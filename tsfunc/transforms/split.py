"""A ``vmap`` that runs part by part: ``data_dependent="split"``, and inputs of differing sizes.

NOTE [repeated runs]
For each group of examples that is put off (NOTE [splitting] in ``bridge/batch/split_level``), the
function runs again from its start. Side effects happen in every run: the function prints again,
and appends to an outer list again. Random draws are the same numbers for an example in all runs
that contain it: under ``randomness="different"`` examples draw as under ``"split"``. Writes into
arguments reach the caller once, after all parts have run. Decisions that do not come from tensors
(Python's ``random``, the time) may differ from run to run, as they may from call to call.

NOTE [single examples]
An example that is put off by itself is passed to the function as a plain tensor: torch's own calls
take a fifth of the time of a tracer's. A batch in which every example takes its own path therefore
costs little more than a loop. The level is still active, for operators without a tensor argument.
Random operators raise at such a level; if the randomness mode allows them, single examples are
passed as tracers too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tsfunc.bridge.batch.split_level import RestartRun, SplitLevel, was_written
from tsfunc.bridge.tracers.batch_tracer import BatchLevel, BatchTracer, wrap
from tsfunc.bridge.tracers.draw_keys import CallKeys
from tsfunc.bridge.tracers.generators import generator_states_for
from tsfunc.errors import DataDependentError
from tsfunc.ops.splitting import take_examples
from tsfunc.transforms.vmap_spec import Spec
from tsfunc.user_code import user_location


@dataclass(frozen=True)
class InputSource:
    """An input of the vmapped call, from which some examples can be taken at a time.

    Attributes:
        dim: the dim of the examples in the result of ``take``.
    """

    value: torch.Tensor
    dim: int

    def take(self, subset: torch.Tensor) -> torch.Tensor:
        """Return the given examples as one tensor."""
        if len(subset) == self.value.shape[self.dim]:
            return self.value
        return take_examples(self.value, self.dim, subset)

    def put(self, subset: torch.Tensor, values: torch.Tensor) -> None:
        """Write new values of the given examples into the input."""
        if len(subset) == self.value.shape[self.dim]:
            self.value.copy_(values)
        else:
            self.value.index_copy_(self.dim, subset.to(values.device), values)


@dataclass(frozen=True)
class GroupResult:
    """The result of one run of the function.

    Attributes:
        subset: the examples of the run.
        reads_values: True if the function read values of examples as Python values.
    """

    subset: torch.Tensor
    out: Any
    reads_values: bool


# Runs the function at a level on the flattened inputs, and unwraps the results from the level.
Run = Callable[[BatchLevel, Sequence[Any]], Any]


def dense_sources(flat: Sequence[Any], bdims: Sequence[int | None]) -> list[Any]:
    """Return the inputs, with a source for each mapped input."""
    return [
        value if bdim is None else InputSource(value, bdim)
        for value, bdim in zip(flat, bdims, strict=True)
    ]


class Runner:
    """Runner of the function for groups of examples, including groups that are put off.

    Args:
        spec: the arguments of vmap.
        sources: the flattened inputs; a mapped input is a ``Source``.
    """

    def __init__(self, spec: Spec, sources: Sequence[Any], run: Run) -> None:
        self.spec, self.sources, self.run = spec, sources, run
        self.randomness = spec.randomness
        if spec.splits and spec.randomness == "different":
            self.randomness = "split"
        self.generators = generator_states_for(self.randomness)
        self.keys = CallKeys() if self.randomness == "split" else None
        self._runs = 0
        self._copying = False
        self._parts: list[GroupResult] = []
        self._written: list[_WrittenArgument] = []

    def add(self, group: torch.Tensor) -> None:
        """Run the function for a group of examples, and for the groups that split off from it."""
        pending = deque([group])
        single = False
        while pending:
            subset = pending.popleft()
            if self.generators is not None and self._runs:
                self.generators.rewind()
            self._runs += 1
            pending.extendleft(reversed(self._attempt(subset, single and len(subset) == 1)))
            single = self.randomness == "error"

    def _attempt(self, subset: torch.Tensor, single: bool) -> list[torch.Tensor]:
        """Run the function once, and return the groups that are still to be run.

        See NOTE [single examples] for ``single``.
        """
        spec = self.spec
        level = SplitLevel(
            subset, self.randomness, spec.label, spec.strict, self.generators, self.keys,
            self._copying,
        )  # fmt: skip
        level.splitter = level if spec.splits else None
        level.single = single
        inputs = _inputs(self.sources, level, single)
        try:
            out = self.run(level, inputs)
        except RestartRun as anew:
            if anew.level is not level:
                raise
            self._copying = self._copying or level.writes_arguments
            return [level.subset, *level.put_off]
        self._parts.append(GroupResult(level.subset, out, level.reads_values))
        for i, source in enumerate(self.sources):
            if i in level.written or (single and level.copying and was_written(inputs[i])):
                self._written.append(_WrittenArgument(source, level, level.subset, inputs[i]))
        return level.put_off

    def finish(self) -> list[GroupResult]:
        """Return the results of all runs, after copying the writes into the arguments."""
        if self.generators is not None:
            self.generators.finish()
        for one in self._written:
            one.put()
        return self._parts


class _NoSplitter:
    """Splitter in a trace, where the values of examples are unknown."""

    def __init__(self, level: BatchLevel) -> None:
        self.level = level

    def agree(self, answers: torch.Tensor) -> None:
        """Raise: a trace has no values to split by."""
        raise DataDependentError(
            f"{self.level.name}, at {user_location()}: the function branches on a value that "
            f"differs between examples. data_dependent='split' looks at the values, but a trace "
            f"has none. Write the choice with torch.where, or keep the vmap outside of specialize."
        )


def run_traced(spec: Spec, sources: Sequence[Any], size: Any, run: Run) -> Any:
    """Run the call in a trace: all examples at once, without decisions by their values."""
    level = BatchLevel(size, spec.randomness, spec.label, spec.strict)
    level.splitter = _NoSplitter(level) if spec.splits else None
    inputs = [
        wrap(source.value, source.dim, level) if isinstance(source, InputSource) else source
        for source in sources
    ]
    return run(level, inputs)


def _inputs(sources: Sequence[Any], level: SplitLevel, single: bool) -> list[Any]:
    """Return the level's examples as its tracers; plain tensors if ``single``."""
    inputs: list[Any] = []
    narrowed: dict[tuple[int, int], torch.Tensor] = {}  # an input that is passed twice stays one
    for i, source in enumerate(sources):
        if not isinstance(source, InputSource):
            inputs.append(source)
            continue
        key = id(source.value), source.dim
        if key not in narrowed:
            value = source.take(level.subset)
            narrowed[key] = value.clone() if level.copying else value
        if single:
            inputs.append(narrowed[key].select(source.dim, 0))
            continue
        level.note_argument(narrowed[key], i)
        inputs.append(wrap(narrowed[key], source.dim, level))
    return inputs


@dataclass(frozen=True)
class _WrittenArgument:
    """An argument that the function wrote into."""

    source: InputSource
    level: SplitLevel
    subset: torch.Tensor
    became: torch.Tensor

    def put(self) -> None:
        became, dim = self.became, self.source.dim
        if isinstance(became, BatchTracer) and became.dispatch_level is self.level:
            assert became.bdim is not None
            self.source.put(self.subset, became.value.movedim(became.bdim, dim))
        else:
            self.source.put(self.subset, became.unsqueeze(dim))
