"""Code that is run again with other tensors in the places of those that it closes over.

NOTE [hidden operands]
A rule of the user's is called by an ``autograd.Function``, at levels outside of the one that it was
written at, in programs, and perhaps when that level has ended. What it closes over has to come
along: the tensors are operands of the call beside its arguments, and the code sees what came for
them. Its own references stay as they are, so each call of torch's, and what the transforms are
given, is looked through for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tsfunc.bridge.tracers.tracer import substituted
from tsfunc.dispatch.state import tls


@contextmanager
def seen_as(originals: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> Iterator[None]:
    """The code of the block sees these values for tensors that it closes over."""
    before = substituted.values
    own = {id(x): (x, value) for x, value in zip(originals, values, strict=True) if x is not value}
    if not own:
        yield
        return
    substituted.values = {**before, **own}
    try:
        with _SeenAs():
            yield
    finally:
        substituted.values = before


class _SeenAs(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if tls.state.running is not None:
            return func(*args, **kwargs)
        args = tuple([_seen(arg) for arg in args])
        return func(*args, **{name: _seen(arg) for name, arg in kwargs.items()})


def _seen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return substituted.of(value)
    if type(value) in (list, tuple):
        return type(value)(_seen(item) for item in value)
    return value
