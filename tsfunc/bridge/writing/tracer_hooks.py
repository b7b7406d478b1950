"""Tracers with a hook, whose calls go to the hook's ``serve`` first.

A tracer with a hook has a class of its own: an empty subclass of its previous class. Calls without
such tracers therefore pay nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tsfunc.bridge.tracers.batch_handlers import PromotedBatchTracer, SlottedBatchTracer
from tsfunc.bridge.tracers.batch_tracer import TRACERS
from tsfunc.bridge.tracers.tracer import HOOKED, NO_KWARGS, function_handler
from tsfunc.ops.registry import Args, Kwargs


class TracerHook:
    """The hook of a tracer, with the data that it needs.

    Attributes:
        base: the tensor that a write to the tracer writes to.
        stride: the strides of the base, as the hook knows them.
    """

    base: torch.Tensor
    stride: tuple[int, ...]

    @staticmethod
    def serve(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
        """Handle a call of a torch function with such tracers among its arguments."""
        raise NotImplementedError

    def sync(self) -> None:
        """Update the tracer before its values are read."""
        raise NotImplementedError


# The class of tracers with a hook, by the class of those without.
_classes: dict[type, type] = {}


def attach_hook(tracer: Any, hook: TracerHook) -> None:
    kind = type(tracer)
    hooked = _classes.get(kind)
    if hooked is None:
        hooked = _classes[kind] = _class_for(kind)
        HOOKED[hooked] = hook.serve
    tracer.__class__ = hooked
    tracer.hook = hook


def detach_hook(tracer: Any) -> TracerHook | None:
    """Detach and return the hook of a tracer, if any."""
    hook: TracerHook | None = hook_of(tracer)
    if hook is not None:
        tracer.__class__ = type(tracer).__mro__[1]
        del tracer.hook
    return hook


def hook_of(value: Any) -> Any:
    return value.hook if type(value) in HOOKED else None


def _class_for(kind: type) -> type:
    if kind is not SlottedBatchTracer:
        return type(kind.__name__, (kind,), {"__slots__": ()})

    def without_function_rules(
        cls: type,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return function_handler(func, types, args, kwargs or NO_KWARGS)

    # Call plans take a SlottedBatchTracer. As a subclass of all tracer classes of its level,
    # the class with a hook has its ``__torch_function__`` called before theirs.
    members = {"__slots__": (), "__torch_function__": classmethod(without_function_rules)}
    hooked = type(kind.__name__, (SlottedBatchTracer, PromotedBatchTracer), members)
    TRACERS.add(hooked)
    return hooked
