"""Where in the user's own code something was called: what messages and reports name."""

from __future__ import annotations

import ast
import linecache
import os
import re
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple

import torch

from tsfunc import rage

_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
# What torch has deprecated it calls through a wrapper of one of these.
_WRAPPERS = [sys.modules[name] for name in ("typing_extensions", "warnings") if name in sys.modules]
GENERATED = "<tsfunc "  # the file of code that this package has written
LIBRARIES = (_OURS, _TORCH, GENERATED, *(str(module.__file__) for module in _WRAPPERS))


class Place(NamedTuple):
    """A line of code, and the function that it is in."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}, in {self.function}"


def is_users(frame: FrameType) -> bool:
    """Whether a frame runs neither this package nor torch."""
    return not frame.f_code.co_filename.startswith(LIBRARIES)


def users_frame() -> FrameType:
    """The innermost frame that runs neither this package nor torch; else the outermost."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_users(frame):
        frame = frame.f_back
    return frame


def warn(message: str, category: type[Warning]) -> None:
    """Issues a warning at the user's line, which filters and once-a-line rules then go by."""
    frame = users_frame()
    at = Place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
    rage.record("warning", type=category.__name__, message=message, at=at)
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        frame.f_globals.get("__name__"),
        frame.f_globals.setdefault("__warningregistry__", {}),
    )


def called_by_user(passing: Callable[[FrameType], bool] = lambda frame: False) -> bool:
    """Whether the innermost frame that does not run torch is the user's, and not this package's.

    Args:
        passing: says of further frames that they only pass a call on.
    """
    frame = sys._getframe(1)
    if frame.f_code.co_filename.startswith(_OURS) and frame.f_back is not None:
        frame = frame.f_back  # who asks
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(_TORCH) or passing(frame)
    ):
        frame = frame.f_back
    return not frame.f_code.co_filename.startswith(_OURS)


def users_place() -> Place:
    """The line of the user's code that runs now."""
    frame = users_frame()
    return Place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def place_of(error: BaseException) -> Place:
    """The innermost line of the user's code that an error came through; else the outermost."""
    found = None
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if found is None or not code.co_filename.startswith(LIBRARIES):
            found = Place(code.co_filename, trace.tb_lineno, code.co_name)
        trace = trace.tb_next
    assert found is not None, "an error that was raised has a traceback"
    return found


def source_of(place: Place, before: str = "") -> str:
    """The text of a line, if there is any."""
    text = linecache.getline(place.file, place.line).strip()
    return f"{before}{text}" if text else ""


def condition_of(place: Place) -> str | None:
    """What a line asks in its one ``if``, ``while`` or ``assert``; None where there is no such."""
    _, *others = re.split(r"\b(?:if|elif|while|assert)\b", source_of(place))
    if len(others) != 1:
        return None
    rest = others[0]
    for end in [found.start() for found in re.finditer(r"[:,)\]}]|\belse\b|\bfor\b|$", rest)]:
        try:
            return ast.unparse(ast.parse(rest[:end].strip(), mode="eval").body)
        except SyntaxError:
            continue
    return None
