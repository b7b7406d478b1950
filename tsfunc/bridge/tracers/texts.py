"""The texts of tracers: one line each, with the dtype and the shape of an example."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import torch

from tsfunc.bridge.tracers.tracer import Tracer
from tsfunc.types.values import tensor_text

_MOST = 80  # the characters of a value that a text shows


def text_of(tracer: Tracer) -> str:
    """Return the dtype and the shape of an example: ``f32[3, n]``."""
    device = None if tracer.device.type == "cpu" else tracer.device
    return tensor_text(tracer.dtype, map(_speller_of(tracer), tracer.shape), device)


def value_text(value: torch.Tensor) -> str:
    """Return the beginning of a tensor's text, in one line."""
    if isinstance(value, Tracer):
        return value.describe()
    text = " ".join(repr(value).split()).replace("[ ", "[")
    return textwrap.shorten(text, _MOST, placeholder=" ...")


def _speller_of(tensor: torch.Tensor) -> Callable[[Any], str]:
    """Return a function from sizes to texts: a trace writes named dims in the user's names."""
    inner: Any = tensor
    while isinstance(inner, Tracer):
        spell: Callable[[Any], str] | None = getattr(inner.dispatch_level, "size_text", None)
        if spell is not None:
            return spell
        inner = getattr(inner, "value", None)
    return str
