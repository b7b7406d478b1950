"""Runs code again with replacements for the tensors that it closes over.

NOTE [hidden operands]
An ``autograd.Function`` calls the user's rule: at levels outside of the rule's own level, in
programs, and perhaps after that level has ended. The tensors that the rule closes over must come
along: they are operands of the call besides its arguments, and the code sees their replacements.
The references in the closure itself do not change, so the arguments of each torch call and of each
transform are searched for these tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tsfunc.bridge.tracers.level_proxies import substitutions
from tsfunc.bridge.tracers.operators import map_items
from tsfunc.dispatch.state import overriding, tls


@contextmanager
def substitute_tensors(
    originals: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> Iterator[None]:
    """Replace the tensors that a block's code closes over by these values."""
    replaced = {
        id(x): (x, value) for x, value in zip(originals, values, strict=True) if x is not value
    }
    if not replaced:
        yield
        return
    with overriding(substitutions, values={**substitutions.values, **replaced}), _Substitution():
        yield


class _Substitution(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if tls.state.running is not None:
            return func(*args, **kwargs)
        args = tuple([map_items(_substitute, arg) for arg in args])
        return func(*args, **{name: map_items(_substitute, arg) for name, arg in kwargs.items()})


def _substitute(value: Any) -> Any:
    return substitutions.of(value) if isinstance(value, torch.Tensor) else value
