"""Detects the seeds that a traced function sets, in the functions of ``torch.random``.

Private names used here (torch 2.11 to 2.13): ``torch.random.default_generator`` is the generator
that its functions seed; ``torch._compile`` and ``torch._dynamo.eval_frame`` wrap these functions,
so their frames are between the functions and the caller.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Iterator
from typing import Any

import torch

from tsfunc.dispatch.places import is_users, users_place
from tsfunc.errors import TypeCheckError


class _WatchedGenerator:
    """A replacement of the default generator while some thread traces."""

    def __init__(self) -> None:
        self.traces: list[tuple[int, str]] = []  # thread id and name of each trace
        self.lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        thread = threading.get_ident()
        what = next((what for of, what in reversed(self.traces) if of == thread), None)
        if what is not None and _asked_by_user():
            raise TypeCheckError(
                f"{what}: the seed or the state of torch's random numbers is set or read at "
                f"{users_place()} (.{name} of the default generator), which a program does not do "
                f"again. Do it before the call, or use a torch.Generator that is seeded before."
            )
        return getattr(torch.default_generator, name)


_watched = _WatchedGenerator()


@contextlib.contextmanager
def no_seeding(what: str) -> Iterator[None]:
    """Context manager that stops the user's code from seeding or reading the default generator.

    Args:
        what: the name of the trace in errors.
    """
    module: Any = torch.random
    trace = threading.get_ident(), what
    with _watched.lock:
        _watched.traces.append(trace)
        module.default_generator = _watched
    try:
        yield
    finally:
        with _watched.lock:
            _watched.traces.remove(trace)
            if not _watched.traces:
                module.default_generator = torch.default_generator


# The modules that call the generator for the caller of a function of ``torch.random``.
_BETWEEN = ("torch.random", "torch._compile", "torch._dynamo.", "contextlib")


def _asked_by_user() -> bool:
    """True if code outside of torch and this package calls a function of ``torch.random``."""
    frame = inspect.currentframe()
    frame = frame and frame.f_back and frame.f_back.f_back
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_BETWEEN):
        frame = frame.f_back
    return frame is not None and is_users(frame)
