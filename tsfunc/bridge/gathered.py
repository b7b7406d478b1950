"""Views at places that differ from example to example: ``y[i]`` where ``i`` is a tracer.

NOTE [gathered views]
For one example ``y[i]`` is a view: what is written to it is written to ``y``, and the other way
round. For a batch there is no view of it, each example having another place, so the places are
copied into a tensor of their own, the *whole*, and what the user gets is a view of that. Such a
view is of a class of its own, which only says that its calls come by here first:

- Before a call reads it, the whole is copied anew if the base has been written to since: torch
  counts the writes to every memory, also those that no tracer sees.
- After a call has written to it, the whole is copied back to its places in the base.
- What is a view of it (``y[i].T[1:]``) is one more view of the same whole.

All this is done by calls at the user's own level, as if they stood in the program. So derivatives
of every kind, outer levels and traces see a program without views at places that differ. Where the
base is not the function's own to write into, the write is refused as it is for the base itself.

Private names used here (torch 2.11 to 2.13): ``Tensor._version`` counts the writes to a memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tsfunc.bridge.batch_tracer import HOT, hot_call
from tsfunc.bridge.marked import Record, mark, record_of
from tsfunc.bridge.tracer import MARKED, METHODS, Tracer, door_1, metadata, settle
from tsfunc.bridge.turning import memory_of, physical
from tsfunc.bridge.writes import prepare_write, tensors_in, written_by

State = tuple[torch.Tensor, int]


@dataclass
class Gathered(Record):
    """Some places of a tensor, and the copy that stands for them.

    Attributes:
        base: the tensor that the user indexed.
        dim: along which dim of it.
        places: the places there: a tensor of one dim, or the place alone.
        whole: the copy.
        shape, stride: of the base, which may be given other ones (``t_()``).
        recorded: whether grad mode was on.
        seen: the state of the base that the copy is of; None where that can't be told.
    """

    base: torch.Tensor
    dim: int
    places: torch.Tensor
    whole: torch.Tensor
    shape: torch.Size
    stride: tuple[int, ...]
    recorded: bool
    seen: State | None

    def settle(self) -> None:
        """Copies the places anew if the base has been written to."""
        settle(self.base)
        now = _state(self.base)
        if now is not None and self.seen is not None:
            memory, count = self.seen
            if now[0] is memory and now[1] == count:
                return
        with torch.set_grad_enabled(self.recorded):
            self.whole.copy_(_picked(self.indexed(), self.dim, self.places))
        self.seen = now

    def indexed(self) -> torch.Tensor:
        """The base as it lay when it was indexed."""
        base = self.base
        if base.shape == self.shape and base.stride() == self.stride:
            return base
        return base.as_strided(self.shape, self.stride)

    def prepare(self, name: str, values: Sequence[Any]) -> None:
        """Before ``name`` writes the values: what is written in the end becomes the level's."""
        base = self.base
        while (further := record_of(base)) is not None:
            base = further.base
        prepare_write(name, [base], [base, self.whole, *values])

    def write_back(self, by: torch.Tensor) -> None:
        """A view of the whole was written to."""
        # Autograd does not see what is written through ``detach()``.
        recorded = torch.is_grad_enabled() and by.requires_grad >= self.whole.requires_grad
        with torch.set_grad_enabled(recorded):
            places = [*[None] * self.dim, self.places]
            torch.ops.aten.index_put_.default(self.indexed(), places, self.whole)
        self.seen = _state(self.base)

    @staticmethod
    def serve(
        func: Callable[..., Any], types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Door 1 for calls with gathered views among their arguments."""
        others = tuple(kind for kind in types if kind not in MARKED)
        if METHODS.get(func) is metadata:
            return door_1(func, others, args, kwargs)
        held = _views_in((args, kwargs))
        written = _views_in(written_by(func, args, kwargs))
        for _, record in written:
            record.prepare(func.__name__, (*args, *kwargs.values()))
        for view, _ in held:
            settle(view)
        rule = None if kwargs or written else HOT.get(func)
        if rule is not None:
            out = hot_call(rule, func, args)
            if out is not NotImplemented and not any(out.value is view.value for view, _ in held):
                return out
        out = door_1(func, others, args, kwargs)
        for view, record in {id(record): (view, record) for view, record in written}.values():
            record.write_back(view)
        _mark_views(out, held)
        return out


def _state(base: torch.Tensor) -> State | None:
    """What changes with every write to a tensor: its memory's count, or the memory itself."""
    memory = physical(base)
    if memory is None or memory.is_inference():
        return None
    return memory, memory._version


def gather(base: torch.Tensor, dim: int, places: torch.Tensor) -> torch.Tensor:
    """``base`` at places along a dim, as a view: without the dim where there is one place.

    ``places`` has a dim or none.
    """
    if not places.dim():
        places = places.clone()  # it is the user's own, who may write to it
    whole = _picked(base, dim, places)
    view = torch.transpose(whole, 0, 0)  # unlike an alias it has a tangent of its own
    laid_out = base.shape, base.stride()
    record = Gathered(base, dim, places, whole, *laid_out, torch.is_grad_enabled(), _state(base))
    mark(view, record)
    return view


def _picked(base: torch.Tensor, dim: int, places: torch.Tensor) -> torch.Tensor:
    """A copy of the places. Of the calls that make one, its backward formula saves no values."""
    out: torch.Tensor = torch.ops.aten.index.Tensor(base, [*[None] * dim, places])
    return out


def _views_in(values: Any) -> list[tuple[Any, Gathered]]:
    """The gathered views among values, and their records."""
    return [(x, record_of(x)) for x in tensors_in(values) if type(x) in MARKED]


def _mark_views(out: Any, held: Sequence[tuple[Any, Gathered]]) -> None:
    """Results that have the memory of gathered views are such views too."""
    results = [x for x in tensors_in(out) if isinstance(x, Tracer) and type(x) not in MARKED]
    if not results:
        return
    records = {_memory(view): record for view, record in held}
    for result in results:
        memory = _memory(result)
        if memory is not None and memory in records:
            mark(result, records[memory])


def _memory(value: torch.Tensor) -> int | None:
    plain = physical(value)
    return None if plain is None else memory_of(plain)
