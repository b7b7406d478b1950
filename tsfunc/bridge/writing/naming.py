"""Finds the user's name for a tensor, for error messages, in the frames of the user's code.

A module without a variable in those frames is called ``model``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from tsfunc.bridge.writing.storages import memory_under

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]), "<tsfunc ")


class DescribedTensor:
    """A tensor as an error message describes it.

    Attributes:
        name: an expression by which the user's code reaches the tensor, or None.
        module: the name of the module that owns the tensor as a parameter or buffer, or None.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.name: str | None = None
        self.module: str | None = None
        self._shape = f"shape {tuple(tensor.shape)}, {tensor.dtype}"
        memory = memory_under(tensor)

        def itself(value: Any) -> bool:
            return value is tensor

        def its_base(value: Any) -> bool:
            return isinstance(value, torch.Tensor) and memory_under(value) == memory

        for same in (itself, its_base) if memory is not None else (itself,):
            for frame in _frames():
                if not frame.f_code.co_filename.startswith(_LIBRARIES):
                    for name, value in _variables(frame):
                        if self._is_in(name, value, same):
                            return
        for frame in _frames():
            module = frame.f_locals.get("self")
            if isinstance(module, torch.nn.Module) and self._is_in("model", module, itself):
                return

    def _is_in(self, name: str, value: Any, same: Callable[[Any], bool]) -> bool:
        """Return True, and set the names, if a variable is the tensor or directly contains it."""
        if same(value):
            self.name = name
            return True
        for key, part in _contents(value):
            if same(part):
                self.name = name + key
                self.module = name if isinstance(value, torch.nn.Module) else None
                return True
        return False

    def __str__(self) -> str:
        return f"`{self.name}` ({self._shape})" if self.name else f"a tensor ({self._shape})"


def _frames() -> Iterator[FrameType]:
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _variables(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """Yield the frame's own and enclosing variables, then the globals that the frame reads."""
    yield from list(frame.f_locals.items())
    for name in frame.f_code.co_names:
        if name in frame.f_globals and name not in frame.f_locals:
            yield name, frame.f_globals[name]


def _contents(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the direct contents of a variable, each with the suffix of its expression."""
    if isinstance(value, torch.nn.Module):
        for named in (value.named_parameters(), value.named_buffers()):
            yield from ((f".{path}", part) for path, part in named)
    elif isinstance(value, list | tuple):
        yield from ((f"[{i}]", part) for i, part in enumerate(value))
    elif isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, torch.Tensor):
        yield from ((f".{name}", part) for name, part in vars(value).items())
