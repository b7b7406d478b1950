"""What a program reaches for of objects, at every call, as straight-line Python.

The generated function takes the flattened arguments, goes the ways to all that the trace has read
(``instances.py``), and gives the tensors among it, or None where something is not as it was.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tsfunc.types.values import same_value

Reach = Callable[[Sequence[Any]], "tuple[Any, ...] | None"]

# What the way to something may raise where it is not there any more.
_GONE = "(AttributeError, LookupError, TypeError)"


def same_float(a: Any, b: float) -> bool:
    """Whether a value is this float: equal and of one sign, or both not a number."""
    if type(a) is not float:
        return False
    return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)


class Facts:
    """The lines of the function, and the objects that they name."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._scope: dict[str, Any] = {
            "Tensor": torch.Tensor,
            "same_value": same_value,
            "same_float": same_float,
        }
        self._variables: dict[str, str] = {}
        self._results: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._lines)

    def function(self) -> Reach:
        """The function that the lines make."""
        body = [*self._lines, f"return ({''.join(f'{name}, ' for name in self._results)})"]
        lines = "".join(f"        {line}\n" for line in body)
        source = f"def reach(args):\n    try:\n{lines}    except {_GONE}:\n        return None\n"
        scope = dict(self._scope)
        exec(compile(source, "<reach>", "exec"), scope)
        reach: Reach = scope["reach"]
        return reach

    # --- ways

    def name(self, value: Any) -> str:
        """A name for an object."""
        name = f"v{len(self._scope)}"
        self._scope[name] = value
        return name

    def bind(self, expression: str) -> str:
        """A variable for what an expression gives; the same for the same expression."""
        known = self._variables.get(expression)
        if known is None:
            known = self._variables[expression] = f"p{len(self._variables)}"
            self._lines.append(f"{known} = {expression}")
        return known

    def spell(self, key: Any) -> str:
        """The key of a container."""
        return repr(key) if type(key) in (int, str) else self.name(key)

    # --- what must hold there

    def require(self, condition: str) -> None:
        self._lines.append(f"if not ({condition}): return None")

    def require_type(self, at: str, cls: type) -> None:
        self._lines.append(f"if type({at}) is not {self.name(cls)}: return None")

    def require_distinct(self, variables: Sequence[str]) -> None:
        if len(variables) > 1:
            ids = ", ".join(f"id({each})" for each in variables)
            self.require(f"len({{{ids}}}) == {len(variables)}")

    def require_same(self, at: str, value: Any) -> None:
        self._lines.append(f"if {at} is not {self.name(value)}: return None")

    def require_equal(self, at: str, value: Any) -> None:
        """For values that are equal only if they are of one type, which is compared too."""
        if value is None or type(value) is bool:
            self._lines.append(f"if {at} is not {value}: return None")
            return
        wanted = self.name(value)
        kind = self.name(type(value))
        self._lines.append(f"if {at} != {wanted} or type({at}) is not {kind}: return None")

    def require_float(self, at: str, value: float) -> None:
        self.require(f"same_float({at}, {self.name(value)})")

    def require_same_value(self, at: str, value: Any) -> None:
        """For a container whose elements are plain values, compared as a whole."""
        self.require(f"same_value({at}, {self.name(copy.copy(value))})")

    def require_keys(self, at: str, keys: Sequence[Any]) -> None:
        self._lines.append(f"if list({at}) != {self.name(list(keys))}: return None")

    def require_tensor(self, at: str, example: torch.Tensor) -> None:
        """A tensor like the example, which becomes one of the results."""
        dtype, device = self.name(example.dtype), self.name(example.device)
        strides = (
            f"not {at}.is_contiguous()"
            if example.is_contiguous()
            else f"{at}.stride() != {tuple(example.stride())!r}"
        )
        self._lines += [
            f"if not isinstance({at}, Tensor): return None",
            f"if {at}.dtype is not {dtype} or {at}.device != {device}: return None",
            f"if {at}.requires_grad is not {example.requires_grad}: return None",
            f"if {at}.shape != {tuple(example.shape)!r} or {strides}: return None",
        ]
        self._results.append(at)
