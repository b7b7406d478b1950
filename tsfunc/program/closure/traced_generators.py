"""Random numbers that a trace can't record: those of Python and NumPy, and of seeded generators."""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from tsfunc.bridge.tracers.torch_settings import GeneratorDraws, address_of_generator
from tsfunc.errors import TypeCheckError

_SHARED = ("random", "numpy.random")
_State = tuple[Callable[[], Any], Callable[[Any], Any]]


class TracedGenerators:
    """The generators that a traced function may draw from, and their states before the trace."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._before: dict[int, tuple[str, _State, Any]] = {}
        self._known: list[Any] = []  # keeps the objects alive, so that ids stay unique
        self._lines: dict[str, list[str]] = {}
        self._moved: list[str] = []
        self.draws: GeneratorDraws = []

    def start(self) -> None:
        """Record the states of the global generators, which any code can draw from."""
        self._watch("random", random, (random.getstate, random.setstate))
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            state = numpy.get_state, numpy.set_state
            self._watch("numpy.random", numpy, state)

    def add(self, text: str, value: Any) -> None:
        """Record the state of a value that the function reads, if it is a generator."""
        if isinstance(value, random.SystemRandom):  # it has no state
            return
        if isinstance(value, random.Random):
            self._watch(text, value, (value.getstate, value.setstate))
        elif isinstance(value, torch.Generator) and value is not torch.default_generator:
            self._watch(text, value, (value.get_state, value.set_state))
        elif type(value).__module__.startswith("numpy.random"):
            bits = getattr(value, "bit_generator", None) or getattr(value, "_bit_generator", value)
            if hasattr(bits, "state"):
                self._watch(text, value, (lambda: bits.state, lambda s: setattr(bits, "state", s)))

    def note_mention(self, value: Any, line: str) -> None:
        """Record that some code refers to a function or module of random numbers at a line."""
        owner = getattr(value, "__self__", value)
        module = owner.__name__ if isinstance(owner, types.ModuleType) else type(owner).__module__
        module = module.removesuffix(".mtrand")
        if module in _SHARED:
            self._lines.setdefault(module, []).append(line)

    def restore(self) -> None:
        """Restore the states of generators that have changed."""
        for text, (get, put), before in self._before.values():
            shared = text in _SHARED and text not in self._lines
            if not shared and not _same_state(get(), before):
                put(before)
                self._moved.append(text)

    def refuse_advanced(self) -> None:
        """Raise an error if generators had another state at the end of the trace.

        Raises:
            TypeCheckError: the function drew from a generator or seeded it.
        """
        if self._moved:
            lines = [line for text in self._moved for line in self._lines.get(text, ())]
            where = f"Random numbers are used at {'; '.join(lines)}. " if lines else ""
            raise TypeCheckError(
                f"{self._label}: the function draws from {' and '.join(self._moved)}, or seeds it, "
                f"and a program would repeat the numbers of its first call. {where}Draw numbers "
                f"before the call and pass them, draw tensors (torch.rand), or seed before the "
                f"call."
            )

    def refuse_made(self) -> None:
        """Raise an error if the function drew from a generator that it did not get from outside.

        Raises:
            TypeCheckError: the function has made the generator.
        """
        defaults = torch.default_generator, *torch.cuda.default_generators
        generators = {
            address_of_generator(each)
            for each in (*defaults, *self._known) if isinstance(each, torch.Generator)
        }  # fmt: skip
        for generator, line in self.draws:
            if address_of_generator(generator) not in generators:
                raise TypeCheckError(
                    f"{self._label}: the function draws from a torch.Generator that it makes, at "
                    f"{line}, and a program would go on with its numbers at the next call. Make "
                    f"and seed it outside of the function, or draw the numbers before the call."
                )

    def _watch(self, text: str, value: Any, state: _State) -> None:
        if id(value) not in self._before:
            self._known.append(value)
            self._before[id(value)] = text, state, state[0]()


def _same_state(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return all(_same_state(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return all(map(_same_state, a, b))
    return bool((a == b).all()) if hasattr(a, "__array__") else bool(a == b)
