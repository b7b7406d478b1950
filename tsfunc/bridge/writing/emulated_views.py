"""Copies that replace views which a batch cannot express, kept in step with their base.

An example may have a view of a tensor where the batch has none. The user then gets a copy that
behaves like a view. The copy is given a hook, and the hook sees each call that takes the
copy: the hook updates the copy before a read, writes the copy back after a write, and attaches
itself to each view of the copy. There are two kinds: views at indices that differ between examples,
and views in another shape (``reshaped_views``).

NOTE [gathered views]
For one example ``y[i]`` is a view: a write to the view is a write to ``y``, and the reverse. A
batch has no such view, because each example has another index. The indexed elements are therefore
copied into a tensor of their own, the *whole*, and the user gets a view of the whole. The view is
an emulated view, so its hook sees each call first:

- Before a call reads the view, the whole is copied again if the base has been written to since.
  torch counts the writes to every storage, including writes that no tracer sees.
- After a call has written to the view, the whole is copied back to its positions in the base.
- A view of the view (``y[i].T[1:]``) is one more view of the same whole.

The steps in this list are calls at the user's own level, as if the program contained them. All
derivatives, outer levels and traces therefore see a program without views at differing indices. If
the function does not own the base, the write is refused like a write to the base itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tsfunc.bridge.sizes.fake_versions import version_of
from tsfunc.bridge.tracers.batch_handlers import call_by_plan
from tsfunc.bridge.tracers.function_registry import METHODS, Stage, registry
from tsfunc.bridge.tracers.operators import tensors_in
from tsfunc.bridge.tracers.tracer import HOOKED, Tracer, function_handler, metadata, sync
from tsfunc.bridge.writing.storages import memory_under, tensor_with_memory
from tsfunc.bridge.writing.tracer_hooks import TracerHook, attach_hook, hook_of
from tsfunc.bridge.writing.writes import prepare_write, written_by
from tsfunc.ops.registry import Args, Kwargs

State = tuple[torch.Tensor, tuple[int, int]]


@dataclass
class EmulatedView(TracerHook):
    """A copy that replaces a view of a tensor.

    Attributes:
        base: the tensor that the copy replaces a view of.
        whole: the copy; the user holds a view of it.
        take: copies the viewed elements from the base.
        put: writes such a copy to the base.
        shape, stride: those of the base at the start; in-place ops such as ``t_()`` may change
            them.
        recorded: True if grad mode was on.
        seen: the state of the base at the time of the copy; None if the state is not known.
    """

    base: torch.Tensor
    whole: torch.Tensor
    take: Callable[[torch.Tensor], torch.Tensor]
    put: Callable[[torch.Tensor, torch.Tensor], Any]
    shape: torch.Size = field(init=False)
    stride: tuple[int, ...] = field(init=False)
    recorded: bool = field(init=False)
    seen: State | None = field(init=False)

    def __post_init__(self) -> None:
        self.shape, self.stride = self.base.shape, self.base.stride()
        self.recorded = torch.is_grad_enabled()
        self.seen = storage_state(self.base)

    def view(self) -> torch.Tensor:
        """Return the view of the whole that the user gets."""
        view = torch.transpose(self.whole, 0, 0)  # unlike an alias it has a tangent of its own
        attach_hook(view, self)
        return view

    def sync(self) -> None:
        """Copy again if the base has been written to."""
        sync(self.base)
        now = storage_state(self.base)
        if now is not None and self.seen is not None:
            memory, count = self.seen
            if now[0] is memory and now[1] == count:
                return
        with torch.set_grad_enabled(self.recorded):
            self.whole.copy_(self.take(self.original_base()))
        self.seen = now

    def original_base(self) -> torch.Tensor:
        """Return the base with the shape and strides it had when the view was taken."""
        base = self.base
        if base.shape == self.shape and base.stride() == self.stride:
            return base
        return torch.ops.aten.as_strided.default(base, self.shape, self.stride)

    def prepare(self, name: str, values: Sequence[Any]) -> None:
        """Make the innermost base a tracer of the level, before ``name`` writes to a view."""
        base = self.base
        while (further := hook_of(base)) is not None:
            base = further.base
        prepare_write(name, [base], [base, self.whole, *values])

    def write_back(self, by: torch.Tensor) -> None:
        """Write the whole to the base, after a write to a view of the whole."""
        # Autograd does not record writes through ``detach()``.
        recorded = torch.is_grad_enabled() and by.requires_grad >= self.whole.requires_grad
        with torch.set_grad_enabled(recorded):
            self.put(self.original_base(), self.whole)
        self.seen = storage_state(self.base)

    @staticmethod
    def serve(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
        """Handle a call with emulated views among its arguments."""
        others = tuple(kind for kind in types if HOOKED.get(kind) is not EmulatedView.serve)
        if METHODS.get(func) is metadata:
            return function_handler(func, others, args, kwargs)
        emulated = _views_in((args, kwargs))
        written = _views_in(written_by(func, args, kwargs))
        for _, hook in written:
            hook.prepare(func.__name__, (*args, *kwargs.values()))
        for view, _ in emulated:
            sync(view)
        rule = None if kwargs or written else registry.find(Stage.BATCHING, func)
        if rule is not None and not rule.view:
            out = call_by_plan(func, types, args, kwargs)
            if out is not NotImplemented and not any(
                out.value is view.value for view, _ in emulated
            ):
                return out
        out = function_handler(func, others, args, kwargs)
        for view, hook in {id(hook): (view, hook) for view, hook in written}.values():
            hook.write_back(view)
        _attach_to_views(out, emulated)
        return out


def storage_state(base: torch.Tensor) -> State | None:
    """Return a tensor's storage and its count of writes, or None if not known."""
    memory = tensor_with_memory(base)
    if memory is None or memory.is_inference():
        return None
    return memory, version_of(memory)


def _views_in(values: Any) -> list[tuple[Any, EmulatedView]]:
    """Return the emulated views among the values, with their hooks."""
    hooks = [(x, hook_of(x)) for x in tensors_in(values) if type(x) in HOOKED]
    return [(x, hook) for x, hook in hooks if isinstance(hook, EmulatedView)]


def _attach_to_views(out: Any, emulated: Sequence[tuple[Any, EmulatedView]]) -> None:
    """Mark the results that share memory with emulated views as emulated views too."""
    results = [x for x in tensors_in(out) if isinstance(x, Tracer) and type(x) not in HOOKED]
    if not results:
        return
    hooks = {memory_under(view): hook for view, hook in emulated}
    for result in results:
        memory = memory_under(result)
        if memory is not None and memory in hooks:
            attach_hook(result, hooks[memory])


def gather(base: torch.Tensor, dim: int, positions: torch.Tensor) -> torch.Tensor:
    """Return ``base`` indexed along a dim, as an emulated view: NOTE [gathered views].

    Args:
        positions: the indices. A 0-dim tensor removes the dim; a 1-dim tensor keeps it.
    """
    if not positions.dim():
        positions = positions.clone()  # the user owns positions, and may write to it
    index = [*[None] * dim, positions]

    def take(base: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.index.Tensor(base, index)  # saves no values of base

    def put(base: torch.Tensor, whole: torch.Tensor) -> None:
        torch.ops.aten.index_put_.default(base, index, whole)

    return EmulatedView(base, take(base), take, put).view()
