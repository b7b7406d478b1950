"""Random numbers that a trace can't record: those of Python and NumPy, and seeds that are set.

NOTE [random numbers from outside]
What ``torch.rand`` draws is an operator of the program, which draws anew at every call. Numbers of
``random`` and ``numpy.random`` are Python's own: the trace would keep those that it got. And a
generator that is seeded while the function is traced is not seeded when its program runs. Both are
told by the states of the generators, before and after the trace: it does not change them itself.
Those that all threads share tell nothing by themselves: they count where the function's code has
something of their modules. The functions of ``torch.random`` that seed, or read a state, are met
where they are called (``bridge/trace/seeding.py``).
"""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from tsfunc.errors import TypeCheckError

_SHARED = ("random", "numpy.random")
_State = tuple[Callable[[], Any], Callable[[Any], Any]]


class Generators:
    """The generators that a traced function may draw from, and their states before.

    Args:
        what: how errors call the trace.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._before: dict[int, tuple[str, _State, Any]] = {}
        self._known: list[Any] = []  # kept alive, so that ids stay theirs
        self._lines: dict[str, list[str]] = {}
        self._moved: list[str] = []

    def start(self) -> None:
        """Takes the states of those that any code can draw from."""
        self._watch("random", random, (random.getstate, random.setstate))
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            state = numpy.get_state, numpy.set_state
            self._watch("numpy.random", numpy, state)

    def add(self, text: str, value: Any) -> None:
        """Looks at a value that the function reads, if it is a generator."""
        if isinstance(value, random.SystemRandom):  # which has no state
            return
        if isinstance(value, random.Random):
            self._watch(text, value, (value.getstate, value.setstate))
        elif isinstance(value, torch.Generator) and value is not torch.default_generator:
            self._watch(text, value, (value.get_state, value.set_state))
        elif type(value).__module__.startswith("numpy.random"):
            bits = getattr(value, "bit_generator", None) or getattr(value, "_bit_generator", value)
            if hasattr(bits, "state"):
                self._watch(text, value, (lambda: bits.state, lambda s: setattr(bits, "state", s)))

    def mentioned(self, value: Any, line: str) -> None:
        """Some code has a function or module of random numbers at a line."""
        owner = getattr(value, "__self__", value)
        module = owner.__name__ if isinstance(owner, types.ModuleType) else type(owner).__module__
        module = module.removesuffix(".mtrand")
        if module in _SHARED:
            self._lines.setdefault(module, []).append(line)

    def put_back(self) -> None:
        """Gives generators their states again."""
        for text, (get, put), before in self._before.values():
            shared = text in _SHARED and text not in self._lines
            if not shared and not _same(get(), before):
                put(before)
                self._moved.append(text)

    def refuse_moved(self) -> None:
        """Raises where generators had other states at the end.

        Raises:
            TypeCheckError: some had.
        """
        if self._moved:
            places = [line for text in self._moved for line in self._lines.get(text, ())]
            where = f"Random numbers are used at {'; '.join(places)}. " if places else ""
            raise TypeCheckError(
                f"{self._what}: the function draws from {' and '.join(self._moved)}, or seeds it, "
                f"and a program would keep what its first call got. {where}Draw numbers before the "
                f"call and pass them, draw tensors (torch.rand), or seed before the call."
            )

    def _watch(self, text: str, value: Any, state: _State) -> None:
        if id(value) not in self._before:
            self._known.append(value)
            self._before[id(value)] = text, state, state[0]()


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return all(_same(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return all(map(_same, a, b))
    return bool((a == b).all()) if hasattr(a, "__array__") else bool(a == b)
