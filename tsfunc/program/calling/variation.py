"""The sizes and numbers in which a call differs from earlier calls: one program, or a warning.

NOTE [retraces]
The second new program for a value that varies either serves all its values (NOTE [automatic
dynamic sizes] in ``guarding/automatic_dynamic.py``), or the user is told once which value varies,
and which descriptors make its programs one. Nothing is said of the sizes and numbers 0 and 1, for
which the next settles it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import optree

from tsfunc.errors import DescriptorError
from tsfunc.program.assumptions import Assumptions, Retrace
from tsfunc.program.calling.cache import Cache, CachedProgram
from tsfunc.program.calling.offering import descriptors_text
from tsfunc.program.calling.target import Target
from tsfunc.program.guarding.automatic_dynamic import (
    Names,
    is_special,
    narrowed,
    new_dim,
    seen_values,
    size_names,
    varying,
    with_dim,
)
from tsfunc.program.guarding.cache_miss import ANY, Facts, differing
from tsfunc.program.guarding.inputs import InputSpec, ScalarSpec, is_tame
from tsfunc.types import CompiledDescriptors, Dim
from tsfunc.types.check_context import place_text

_SHOWN = 3  # the number of values that a warning shows


class Call(Protocol):
    """A call that has no program yet; see ``FirstCall``."""

    flat: list[Any]
    tree: optree.PyTreeSpec
    places: dict[int, tuple[Any, ...]]
    arguments: dict[str, Any]
    contract: CompiledDescriptors | None
    target: Target

    def scalars(
        self, inputs: Sequence[InputSpec], bounds: Mapping[str, Dim]
    ) -> Sequence[ScalarSpec]: ...


class Variation:
    """The values of a call that may vary.

    Args:
        call: the call.
        cache: the programs of the function, and the facts of the calls that they were made for.
        inputs: the tensors among the arguments.
        bounds: the named dims.
        facts: the facts of the call.
    """

    def __init__(
        self,
        call: Call,
        cache: Cache,
        inputs: Sequence[InputSpec],
        bounds: Mapping[str, Dim],
        facts: Facts,
    ) -> None:
        self.call, self.cache, self.facts = call, cache, facts
        self.inputs, self.bounds = inputs, bounds
        names = {i: place_text(path, call.arguments) for i, path in call.places.items()}
        self.where = size_names(inputs, names)
        self.sizes = {name: inputs[i].example.shape[k] for name, (i, k) in self.where.items()}
        taken = {spec.position for spec in call.scalars(inputs, bounds)}
        self.positions = {
            name: i for i, name in names.items() if is_tame(call.flat[i]) and i not in taken
        }
        self.numbers = {name: call.flat[i] for name, i in self.positions.items()}
        self._served: Names = frozenset()  # the values that may vary in the new program
        self._tried: Names = frozenset()  # the values that have varied

    def assumed(self, assumptions: Assumptions) -> Assumptions:
        """Return the assumptions with inputs in place of the values that have varied."""
        if not self.cache.auto_widen:
            return assumptions
        as_inputs = self.numbers if self.call.target.backend is None else {}
        names = varying(self.facts, self.cache.varied, self.sizes, as_inputs, self.cache.needed)
        if not names or names in self.cache.fixed:
            return assumptions
        self._tried = names
        dim = None if names.isdisjoint(self.where) else new_dim(self.bounds)
        return assumptions.moved(varying=names, dim=dim)

    def narrowed(self, assumptions: Assumptions, error: Exception) -> Assumptions | None:
        """Return assumptions with a narrower dim after a trace that has failed, or None."""
        sizes = [self.sizes[name] for name in assumptions.varying if name in self.sizes]
        return narrowed(assumptions, sizes[0], error) if sizes else None

    def inputs_for(
        self, assumptions: Assumptions
    ) -> tuple[Sequence[InputSpec], Mapping[str, Dim], frozenset[int]]:
        """Return the inputs, the named dims, and the positions of the numbers that have varied."""
        names, inputs, bounds = assumptions.varying, self.inputs, self.bounds
        at = [self.where[name] for name in names if name in self.where]
        if at and assumptions.dim is not None:
            inputs, bounds = with_dim(inputs, bounds, at, assumptions.dim)
        return inputs, bounds, frozenset(self.positions[x] for x in names if x in self.positions)

    def check(self, entry: CachedProgram, assumptions: Assumptions) -> None:
        """Check that the values that have varied can be inputs of a new program.

        Raises:
            Retrace: some of them can't.
        """
        names = assumptions.varying
        needed = self._needed(entry) & names
        if needed:
            self.cache.needed |= needed
            self._tried = names = names - needed
            names = frozenset() if names in self.cache.fixed else names
        elif any(condition.dims for condition in entry.program.conditions) or (
            not names.isdisjoint(self.positions) and entry.form.unmet(self.call.flat, self.sizes)
        ):
            names = frozenset()
        if names != assumptions.varying:
            dim = None if names.isdisjoint(self.where) else assumptions.dim
            raise Retrace(assumptions.moved(varying=names, dim=dim))

    def _needed(self, entry: CachedProgram) -> Names:
        """Return the names of the numbers among the inputs that the function needs."""
        needed = {condition.number for condition in entry.program.conditions}
        return frozenset(
            place_text(self.call.places[spec.position], self.call.arguments)
            for spec in entry.form.scalars
            if spec.by_itself and spec.name in needed
        )

    def has_numbers(self, assumptions: Assumptions) -> bool:
        """Return True if numbers that have varied are inputs: a program needs a comparison."""
        return not assumptions.varying.isdisjoint(self.positions)

    def conclude(self, assumptions: Assumptions) -> None:
        """Note the values that vary in the new program, and those that can't."""
        self._served = assumptions.varying
        if self._tried and not self._served:
            self.cache.fixed.add(self._tried)

    def remember(self, entry: CachedProgram, called: bool) -> str | None:
        """Add the call to the calls that have programs, and return a warning: NOTE [retraces].

        Args:
            entry: the program for the call.
            called: True if the user has called; a program made ahead gives no warning.
        """
        varied, served = self.cache.varied, self._served
        warning = self._warning(served) if called else None
        open_ = dict.fromkeys(served, ANY)
        if served and not entry.program.conditions and not _is_bounded(entry, self.bounds):
            for i, others in enumerate(varied):
                if served.issuperset(differing(self.facts, others)):
                    varied[i] = {**others, **open_}
            varied.appendleft({**self.facts, **open_})
        else:
            varied.appendleft(self.facts)
        return warning

    def _warning(self, served: Names) -> str | None:
        """Return a warning about values that vary, without those that the new program serves."""
        seen = seen_values(self.facts, self.cache.varied, self.sizes, self.numbers)
        compiled = self.call.target.backend is not None
        settled = self.cache.needed.union(self.numbers if compiled else ())
        waits = self.cache.auto_widen
        names = [
            name
            for name in seen
            if name not in served and name not in self.cache.told
            and not (waits and name not in settled and is_special(self.facts[name]))
        ]  # fmt: skip
        if not names:
            return None
        self.cache.told.update(names)
        listed = "; ".join(f"{name}: {self._values(name, seen[name])}" for name in names)
        verb = "vary" if len(names) > 1 else "varies"
        return (
            f"specialize({self.call.target.name}): {' and '.join(names)} {verb}, and each value is "
            f"traced anew ({listed}).{self._advice(names, seen)}"
        )

    def _values(self, name: str, earlier: Sequence[Any]) -> str:
        """Return the last values in the order of the calls."""
        values = [*reversed(earlier[: _SHOWN - 1]), self.facts[name]]
        return ", ".join(map(repr, values))

    def _described(self, names: Sequence[str], seen: Mapping[str, Sequence[Any]]) -> str:
        """Return the descriptors with which values may vary, as Python code."""
        call, bounds = self.call, self.bounds
        dims = itertools.chain("nmkpqrst", (f"n{i}" for i in itertools.count()))
        free = (dim for dim in dims if dim not in bounds)
        called: dict[Any, str] = {}  # sizes that were equal in all the calls have one name
        vary: dict[int, dict[int, str]] = {}
        for name in names:
            if name in self.numbers:
                vary[self.positions[name]] = {}
                continue
            i, k = self.where[name]
            history = (self.sizes[name], *seen[name])
            if history not in called:
                called[history] = next(free)
            vary.setdefault(self.inputs[i].position, {})[k] = called[history]
        described = {} if call.contract is None else call.contract.descriptors
        return descriptors_text(
            call.flat, call.tree, call.places, call.target.signature, described, vary
        )

    def _advice(self, names: Sequence[str], seen: Mapping[str, Sequence[Any]]) -> str:
        """Return how the values get one program, on lines of their own."""
        compiled = self.call.target.backend is not None
        numbers = [name for name in names if name in self.numbers]
        needed = [name for name in numbers if name in self.cache.needed]
        constant = numbers if compiled else needed
        offered = [name for name in names if name not in constant]
        text = ""
        try:
            described = self._described(offered, seen) if offered else ""
        except DescriptorError:
            described = ""
        if described and any(tried.intersection(offered) for tried in self.cache.fixed):
            text += (
                f"\nIt is not known that one program can serve all values: the function relies on "
                f"a value, or may treat a torch.SymInt or torch.SymFloat unlike a number "
                f"(isinstance). With these descriptors there is one program, or an error that "
                f"names the line:\n  {described}"
            )
        elif described:
            text += f"\nWith these descriptors one program serves all values:\n  {described}"
        if compiled and numbers:
            text += (
                f"\nA compiled program has numbers as constants: pass {' and '.join(numbers)} as a "
                f"tensor, such as torch.tensor({numbers[0]})."
            )
        elif needed:
            text += (
                f"\nThe function needs {' and '.join(needed)} itself (int(), range(), a text), so "
                f"each value has a program. In arithmetic alone, a tensor serves in its place."
            )
        return text


def _is_bounded(entry: CachedProgram, known: Mapping[str, Dim]) -> bool:
    """Return True if a program does not serve each size of 2 or more of its new named dims."""
    return any(
        name not in known and dim != Dim(name, min=2) for name, dim in entry.form.bounds.items()
    )
