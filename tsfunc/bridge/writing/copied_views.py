"""Tensors that stand in for views of which a batch has none: copies, looked after.

Where an example has a view of a tensor and the batch has not, what the user gets is a copy that
goes on as a view does. It is marked with a record, which sees each call that it is given to: a view
that is about to be read is brought up to date, one that was written to is written back, and what is
a view of it has the same record. What that takes is a matter of each kind of copy: ``gathered``,
``relayout``.

Private names used here (torch 2.11 to 2.13): ``Tensor._version`` counts the writes to a memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tsfunc.bridge.tracers.hot_calls import HOT, VIEWS, hot_call
from tsfunc.bridge.tracers.tracer import MARKED, METHODS, Tracer, door_1, metadata, settle
from tsfunc.bridge.writing.marked import Record, mark, record_of
from tsfunc.bridge.writing.turning import memory_of, physical
from tsfunc.bridge.writing.writes import prepare_write, tensors_in, written_by

State = tuple[torch.Tensor, int]


@dataclass
class CopiedView(Record):
    """A copy that stands for a view of a tensor.

    Attributes:
        base: the tensor.
        whole: the copy, of which the user has a view.
        shape, stride: of the base, which may be given other ones (``t_()``).
        recorded: whether grad mode was on.
        seen: the state of the base that the copy is of; None where that can't be told.
    """

    base: torch.Tensor
    whole: torch.Tensor
    shape: torch.Size = field(init=False)
    stride: tuple[int, ...] = field(init=False)
    recorded: bool = field(init=False)
    seen: State | None = field(init=False)

    def __post_init__(self) -> None:
        self.shape, self.stride = self.base.shape, self.base.stride()
        self.recorded = torch.is_grad_enabled()
        self.seen = state_of(self.base)

    def copied(self) -> torch.Tensor:
        """What the whole is to be, as the base is now."""
        raise NotImplementedError

    def put_back(self) -> None:
        """Writes the whole to the base."""
        raise NotImplementedError

    def view(self) -> torch.Tensor:
        """What the user gets."""
        view = torch.transpose(self.whole, 0, 0)  # unlike an alias it has a tangent of its own
        mark(view, self)
        return view

    def settle(self) -> None:
        """Copies anew if the base has been written to."""
        settle(self.base)
        now = state_of(self.base)
        if now is not None and self.seen is not None:
            memory, count = self.seen
            if now[0] is memory and now[1] == count:
                return
        with torch.set_grad_enabled(self.recorded):
            self.whole.copy_(self.copied())
        self.seen = now

    def as_it_lay(self) -> torch.Tensor:
        """The base as it was when the view of it was taken."""
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
            self.put_back()
        self.seen = state_of(self.base)

    @staticmethod
    def serve(
        func: Callable[..., Any], types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Door 1 for calls with such views among their arguments."""
        others = tuple(kind for kind in types if MARKED.get(kind) is not CopiedView.serve)
        if METHODS.get(func) is metadata:
            return door_1(func, others, args, kwargs)
        held = _views_in((args, kwargs))
        written = _views_in(written_by(func, args, kwargs))
        for _, record in written:
            record.prepare(func.__name__, (*args, *kwargs.values()))
        for view, _ in held:
            settle(view)
        rule = None if kwargs or written or func in VIEWS else HOT.get(func)
        if rule is not None:
            out = hot_call(rule, func, args)
            if out is not NotImplemented and not any(out.value is view.value for view, _ in held):
                return out
        out = door_1(func, others, args, kwargs)
        for view, record in {id(record): (view, record) for view, record in written}.values():
            record.write_back(view)
        _mark_views(out, held)
        return out


def state_of(base: torch.Tensor) -> State | None:
    """What changes with every write to a tensor: its memory's count, or the memory itself."""
    memory = physical(base)
    if memory is None or memory.is_inference():
        return None
    return memory, memory._version


def _views_in(values: Any) -> list[tuple[Any, CopiedView]]:
    """The copied views among values, and their records."""
    records = [(x, record_of(x)) for x in tensors_in(values) if type(x) in MARKED]
    return [(x, record) for x, record in records if isinstance(record, CopiedView)]


def _mark_views(out: Any, held: Sequence[tuple[Any, CopiedView]]) -> None:
    """Results that have the memory of such views are such views too."""
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
