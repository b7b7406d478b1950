"""Where in the user's own code something was called: what messages and reports name."""

from __future__ import annotations

import os
import sys
import warnings
from types import FrameType
from typing import NamedTuple

import torch

_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_LIBRARIES = (_OURS, _TORCH)


class Place(NamedTuple):
    """A line of code, and the function that it is in."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}, in {self.function}"


def users_frame() -> FrameType:
    """The innermost frame that runs neither this package nor torch; else the outermost."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return frame


def warn(message: str, category: type[Warning]) -> None:
    """Issues a warning at the user's line, which filters and once-a-line rules then go by."""
    frame = users_frame()
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        frame.f_globals.get("__name__"),
        frame.f_globals.setdefault("__warningregistry__", {}),
    )


def called_by_user() -> bool:
    """Whether the innermost frame that does not run torch is the user's, and not this package's."""
    frame = sys._getframe(1)
    if frame.f_code.co_filename.startswith(_OURS) and frame.f_back is not None:
        frame = frame.f_back  # who asks
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return not frame.f_code.co_filename.startswith(_OURS)


def users_place() -> Place:
    """The line of the user's code that runs now."""
    frame = users_frame()
    return Place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
