"""Function rules that pack and pad sequences, and the steps of packed sequences as a mask.

NOTE [packed sequences]
C++ code reads the lengths of packed sequences as numbers, and takes each step on the sequences that
are long enough. A call takes one of three paths:

- If the lengths are a plain tensor, which all examples of a batch share, packing and padding gather
  rows at positions that are numbers, and the layers run step by step in C++.
- A trace that records neither batches nor derivatives has the operators of torch.
- Where a trace has the lengths, and records a batch or derivatives, the layers take as many steps
  as the longest sequence, on all sequences. A mask keeps the states of sequences that have ended
  (``Packing``). One program serves all lengths.

Lengths that differ between the examples of a batch have no packed form: the numbers of rows differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from tsfunc.bridge.tracers.batch_tracer import BatchLevel, BatchTracer
from tsfunc.bridge.tracers.function_registry import FunctionRules, Stage
from tsfunc.bridge.tracers.operators import PLAIN_TENSORS, operator_of
from tsfunc.bridge.tracers.tracer import call_torch, innermost_level
from tsfunc.errors import DataDependentError
from tsfunc.ops.registry import Args, Kwargs
from tsfunc.user_code import user_location

_PACK: Final = operator_of(torch.ops.aten._pack_padded_sequence.default)
_PAD: Final = operator_of(torch.ops.aten._pad_packed_sequence.default)


@dataclass(frozen=True)
class Packing:
    """The places of packed sequences in a padded tensor of steps and sequences.

    Attributes:
        active: a mask of steps and sequences: True where a sequence has the step.
        sources: for each step and sequence, the row of the packed tensor; its length if none.
        targets: for each row of the packed tensor, the place in the flattened padded tensor.
    """

    active: Tensor
    sources: Tensor
    targets: Tensor

    @classmethod
    def of(cls, batch_sizes: Tensor, data: Tensor, count: Any) -> Packing:
        """Return the places of the rows of a packed sequence.

        Args:
            batch_sizes: the number of sequences at each step.
            count: the number of sequences.
        """
        rows, steps = data.shape[0], batch_sizes.shape[0]
        sequences = torch.arange(count)
        active = sequences < batch_sizes.unsqueeze(1)
        offsets = batch_sizes.cumsum(0) - batch_sizes
        sources = torch.where(active, offsets.unsqueeze(1) + sequences, rows)
        step = torch.repeat_interleave(torch.arange(steps), batch_sizes, output_size=rows)
        targets = step * count + torch.arange(rows) - offsets[step]
        return cls(*(x.to(data.device) for x in (active, sources, targets)))

    def pad(self, rows: Tensor) -> Tensor:
        """Return the rows at their steps and sequences, and zeros elsewhere."""
        filled = torch.cat((rows, rows.new_zeros(1, *rows.shape[1:])))
        rows = filled.index_select(0, self.sources.flatten())
        return rows.unflatten(0, self.sources.shape)

    def packed(self, padded: Tensor) -> Tensor:
        """Return the rows of a padded tensor of steps and sequences."""
        return padded.flatten(0, 1).index_select(0, self.targets)


def refuse_packed(func: Callable[..., Any]) -> NoReturn:
    """Raise the error of a packed sequence whose lengths differ between examples."""
    name = func.__name__.lstrip("_")
    raise DataDependentError(
        f"vmap: {name} of a packed sequence, at {user_location()}: expected padded sequences, or "
        f"lengths that all examples share, since packed sequences of other lengths have other "
        f"numbers of rows. Pass the padded sequences to the layer and select each "
        f"result at its length (outputs.gather(...)), or call the layer outside of the vmapped "
        f"function."
    )


def batch_level_of(args: Sequence[Any]) -> BatchLevel | None:
    """Return the level of a call if it is a running vmap; else None."""
    level = innermost_level(args)
    return level if isinstance(level, BatchLevel) and level.alive else None


def is_in_trace(args: Sequence[Any], lengths: Tensor) -> bool:
    """True if a trace has the lengths, and records a batch or derivatives of a call."""
    level = innermost_level(args)
    if level is None or type(lengths) in PLAIN_TENSORS:
        return False
    return bool(level.autograd) or batch_level_of(args) is not None


def _pack_sequences(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    """Pack the sequences of a batch: NOTE [packed sequences]."""
    x, lengths, batch_first = args
    of_batch = isinstance(lengths, BatchTracer)
    if of_batch or not (batch_level_of(args) or is_in_trace(args, lengths)):
        return call_torch(func, types, args, kwargs)
    # torch checks the lengths, and returns the row of each packed element.
    count, steps = x.shape[:2] if batch_first else x.shape[1::-1]
    positions = torch.arange(count * steps).view(count, steps)
    positions, batch_sizes = _PACK.call((positions, lengths, True), {}, True)
    rows = (x if batch_first else x.transpose(0, 1)).flatten(0, 1)
    return rows.index_select(0, positions.to(x.device)), batch_sizes


def _pad_sequences(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    """Pad the packed sequences of a batch: NOTE [packed sequences]."""
    rows, batch_sizes, batch_first, value, total_length = args
    if not (batch_level_of(args) or is_in_trace(args, batch_sizes)):
        return call_torch(func, types, args, kwargs)
    if isinstance(batch_sizes, BatchTracer):
        refuse_packed(func)
    count = rows.shape[0]
    arguments = torch.arange(count), batch_sizes, batch_first, count, total_length
    positions, lengths = _PAD.call(arguments, {}, True)
    filling = rows.new_full((1, *rows.shape[1:]), value)
    padded = torch.cat((rows, filling)).index_select(0, positions.flatten().to(rows.device))
    return padded.unflatten(0, positions.shape), lengths


function_rules: Final = FunctionRules()
function_rules.add(Stage.METHOD, _pack_sequences, torch._VF._pack_padded_sequence)
function_rules.add(Stage.METHOD, _pad_sequences, torch._VF._pad_packed_sequence)
