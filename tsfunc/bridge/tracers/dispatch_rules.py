"""Dispatch handlers of tracers, registered per operator.

C++ brings a call on a tracer to ``__torch_dispatch__``. Before that it asks whether the tracer is
a DTensor, and the first such question of a process imports ``torch.distributed.tensor`` and
sympy, which takes half a second. A handler that ``torch.library.register_torch_dispatch`` has
registered for the operator and the class is called first, without that question. The handlers
registered here are those of the classes themselves.

The registration is for the operators that have a batching rule. Any other operator is brought to
``__torch_dispatch__`` as usual.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch

from tsfunc.bridge.tracers.tracer import Tracer
from tsfunc.ops.registry import all_rows

_DTENSOR = "torch.distributed.tensor"


@functools.cache
def register_dispatch_handlers() -> torch.library.Library | None:
    """Register the dispatch handler of each class of tracers, once.

    Returns:
        The library that keeps the registrations; None if DTensor is imported already.
    """
    if _DTENSOR in sys.modules:
        return None
    library = torch.library.Library("aten", "FRAGMENT")
    handlers = {cls: _handler(cls) for cls in _subclasses(Tracer)}
    for name in all_rows():
        if name.startswith("aten::"):
            for cls, handler in handlers.items():
                torch.library.register_torch_dispatch(name, cls, handler, lib=library)
    return library


def _subclasses(cls: type[Tracer]) -> Iterator[type[Tracer]]:
    for each in cls.__subclasses__():
        yield each
        yield from _subclasses(each)


def _handler(cls: type[Tracer]) -> Callable[..., Any]:
    """Return the dispatch handler of a class as a function of the class and the call."""
    own = getattr(cls.__torch_dispatch__, "__func__", None)
    return own if isinstance(own, FunctionType) else _compiled_handler


def _compiled_handler(cls: type[Tracer], *call: Any) -> Any:
    return cls.__torch_dispatch__(*call)
