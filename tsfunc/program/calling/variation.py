"""The sizes and numbers in which a call differs from earlier calls: one program, or a warning.

NOTE [automatic dynamic sizes]
If two programs differ from a call only in the same sizes, the program of the call is made for any
such sizes: it is traced with a symbol for each. Sizes that have been equal in all of these calls
(the rows of a batch and of its labels) share one symbol. If the function relies on more than
sizes of 2 or more, bounds restrict the program to the sizes for which the same facts hold, and
other sizes have programs of their own. If no bounds express the facts (the function needs the
number, or one size to be twice another), each size keeps a program of its own.

Numbers that vary become inputs in the same way: NOTE [numbers by their types] in ``inputs``. The
symbol of a number is not an ``int``, although the user's code may expect one. The program is
therefore compared with the program for the numbers of the call, and kept only if it does the same
with them. The numbers 0 and 1 are not compared, since ``x * 1`` has no operator: the next other
number is. The ``repr`` of a symbol is that of the number, and makes the number a constant. If the
function needs one number itself, the other numbers become inputs without it.

A value that keeps a program for each of its values is reported by a ``RetraceWarning``
(``retraces``).

NOTE [retraces]
The second new program for a value that varies either serves all its values (NOTE [automatic
dynamic sizes]), or a warning names, once, the value and the remedy: descriptors that make its
programs one, or another way to pass the value. Such a value is a size, a number, another argument,
a property of a tensor, the structure of a container, or a value that the function reads besides its
arguments. The sizes and numbers 0 and 1 give no warning: the next value decides.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import optree
import torch

from tsfunc.bridge.sizes.symbols import can_be_symbol
from tsfunc.errors import ConstraintViolation, DescriptorError
from tsfunc.program.assumptions import Assumptions, Retrace
from tsfunc.program.calling.cache import Cache, CachedProgram
from tsfunc.program.calling.other_retraces import AFTER, CacheMissFacts, warning_about_others
from tsfunc.program.calling.retrace_reasons import differing_facts
from tsfunc.program.closure.guard_builder import is_watched
from tsfunc.program.guarding.call_spec import ANY
from tsfunc.program.guarding.guards import Facts
from tsfunc.program.guarding.inputs import InputSpec, NumberSpec
from tsfunc.types import Contract, Dim, MetaTensorType, as_descriptor
from tsfunc.types.grammar import Descriptor
from tsfunc.types.single import TSTensor

# --- automatic named dims and inputs for sizes and numbers that differ from call to call


_ATTEMPTS = 2  # for each dim: a bounded size may lead to facts that were not met before

Names = frozenset[str]


def varying_names(
    facts: Facts,
    history: Iterable[Facts],
    sizes: Mapping[str, int],
    numbers: Mapping[str, int | float],
    needed: Names = frozenset(),
) -> Names:
    """Return the names of values that alone distinguish a call from enough others; or none.

    Args:
        history: the facts of the calls that programs were made for.
        sizes: the sizes of the call that no descriptor names.
        numbers: the numbers of the call that can become inputs.
        needed: the names of numbers that stay constants.
    """
    often = [
        names - needed
        for names, calls in _calls_by_difference(facts, history, sizes, numbers).items()
        if not any(is_special(facts[name]) for name in names - needed)
        and len({tuple(others[name] for name in names) for others in calls}) >= AFTER
    ]
    return min(filter(None, often), key=len, default=frozenset())


def _calls_by_difference(
    facts: Facts,
    history: Iterable[Facts],
    sizes: Mapping[str, int],
    numbers: Mapping[str, int | float],
) -> dict[Names, list[Facts]]:
    """Return the calls that differ from one call only in values that may vary, by their names."""
    calls: dict[Names, list[Facts]] = {}
    for others in history:
        names = differing_facts(facts, others)
        # Two sizes, or two numbers of one type.
        if names and all(
            (name in sizes or name in numbers) and type(others.get(name)) is type(facts[name])
            for name in names
        ):
            calls.setdefault(frozenset(names), []).append(others)
    return calls


def is_special(value: int | float) -> bool:
    """True if a program for a size or number alone may be simpler: ``x * 1`` is ``x``."""
    return value in (0, 1)


def seen_values(
    facts: Facts,
    history: Iterable[Facts],
    sizes: Mapping[str, int],
    numbers: Mapping[str, int | float],
) -> dict[str, list[Any]]:
    """Return the earlier values of each size and number in which a call differs from others.

    A value counts if enough calls differ from this one in it and in the same other values. The
    arguments are those of :func:`varying_names`; the values are in the order of ``history``.
    """
    calls = _calls_by_difference(facts, history, sizes, numbers)
    seen: dict[str, list[Any]] = {}
    for group, earlier in calls.items():
        for name in (name for name in facts if name in group):
            values = list(dict.fromkeys(others[name] for others in earlier))
            if len(values) >= AFTER:
                seen.setdefault(name, values)
    return seen


def size_names(inputs: Sequence[InputSpec], names: Mapping[int, str]) -> dict[str, tuple[int, int]]:
    """Return the fixed sizes of inputs: the input and dim of each, by name.

    Args:
        names: the names of the flattened arguments.
    """
    return {
        f"{names[spec.position]}.shape[{k}]": (i, k)
        for i, spec in enumerate(inputs)
        for k, dim in enumerate(spec.dims)
        if isinstance(dim, int)
    }


def new_dims(
    names: Names, facts: Facts, history: Iterable[Facts], named_dims: Mapping[str, Dim]
) -> dict[str, Dim]:
    """Return a named dim in place of each size that has varied, by the size's name.

    Sizes that were equal in all calls have the same dim.

    Args:
        names: the names of the sizes, in the order of the dims' names.
        history: the facts of the earlier calls.
    """
    free = itertools.chain(["n"], (f"n{i}" for i in itertools.count(2)))
    unused = (name for name in free if name not in named_dims)
    earlier = [others for others in history if names <= others.keys()]
    dims: dict[tuple[Any, ...], Dim] = {}
    placed = {}
    for name in (name for name in facts if name in names):
        values = (facts[name], *(others[name] for others in earlier))
        if values not in dims:
            dims[values] = Dim(next(unused), min=2)
        placed[name] = dims[values]
    return placed


def narrow_assumptions(
    assumptions: Assumptions, sizes: Mapping[str, int], error: Exception
) -> Assumptions | None:
    """Return assumptions with narrower dims for sizes that have varied, if that is the remedy."""
    by_name = {dim.name: dim for dim in assumptions.dims.values()}
    if not isinstance(error, ConstraintViolation) or not error.suggested:
        return None
    if assumptions.narrowed >= _ATTEMPTS * len(by_name):
        return None
    for name, suggested in error.suggested.items():
        if not isinstance(suggested, Dim) or name not in by_name:
            return None
        by_name[name] = suggested.meet(Dim(name, min=2))
    dims = {name: by_name[dim.name] for name, dim in assumptions.dims.items()}
    if not all(dim.admits(sizes[name]) for name, dim in dims.items()):
        return None
    return assumptions.with_changes(dims=dims, narrowed=assumptions.narrowed + 1)


def with_named_dims(
    inputs: Sequence[InputSpec], named_dims: Mapping[str, Dim], at: Mapping[tuple[int, int], Dim]
) -> tuple[list[InputSpec], dict[str, Dim]]:
    """Return inputs with named dims in place of some sizes."""
    specs = list(inputs)
    for (i, k), dim in at.items():
        dims = list(specs[i].dims)
        dims[k] = dim
        specs[i] = dataclasses.replace(specs[i], dims=tuple(dims))
    return specs, {**named_dims, **{dim.name: dim for dim in at.values()}}


# --- descriptors that are offered to the user for values that vary, as Python code


def descriptors_text(
    flat: Sequence[Any],
    tree: optree.PyTreeSpec,
    argument_paths: Mapping[int, tuple[Any, ...]],
    signature: inspect.Signature,
    described: Mapping[str, Descriptor],
    vary: Mapping[int, Mapping[int, str]],
) -> str:
    """Return descriptors for which some values of a call may vary, as Python code.

    The descriptors guarantee nothing else besides what the function's descriptors guarantee
    already.

    Args:
        vary: the positions of the values that vary; for a tensor the dims, each with a name.

    Raises:
        DescriptorError: an argument that contains one of the values can't be described.
    """
    leaves = [
        _leaf_descriptor(value, _descriptor_at(described, argument_paths[i]), vary.get(i))
        for i, value in enumerate(flat)
    ]
    args, kwargs = optree.tree_unflatten(tree, leaves)
    arguments = signature.bind(*args, **kwargs).arguments
    concerned = {argument_paths[i][0] for i in vary}
    descriptors = dict(described)
    for name in arguments:
        if name in concerned:
            descriptors[name] = as_descriptor(arguments[name], name)
    texts = [f"{name!r}: {descriptor.as_python()}" for name, descriptor in descriptors.items()]
    return f"{{{', '.join(texts)}}}"


def _descriptor_at(described: Mapping[str, Descriptor], path: Sequence[Any]) -> Descriptor | None:
    """Return the given descriptor of an argument, if it is a part of a container's."""
    descriptor = described.get(path[0])
    for i in range(1, len(path)):
        if descriptor is None:
            return None
        descriptor = descriptor.child_at(tuple(path[i:]))
    return descriptor


def _leaf_descriptor(
    value: Any, descriptor: Descriptor | None, vary: Mapping[int, str] | None
) -> Any:
    """Return the descriptor of an argument.

    Args:
        descriptor: its descriptor so far.
        vary: the dims of a tensor that vary, by number; None: nothing varies.
    """
    if isinstance(value, torch.Tensor):
        meta = descriptor.meta if isinstance(descriptor, TSTensor) else MetaTensorType()
        shape = _open_dims(meta, value.dim())
        for k, name in (vary or {}).items():
            shape[k] = name
        return dataclasses.replace(meta, shape=tuple(shape)) if vary else descriptor or meta
    if vary is None and descriptor is not None:
        return descriptor
    if type(value) in (int, float, bool, str) or is_watched(value):
        return type(value)
    return value


def _open_dims(meta: MetaTensorType, rank: int) -> list[Any]:
    """Return the described sizes of a tensor, None for each that is open."""
    shape = list(meta.shape or [...])
    if ... in shape:
        at = shape.index(...)
        shape[at : at + 1] = [None] * (rank - len(shape) + 1)
    return shape


# --- one program, or a warning


_SHOWN = 3  # the number of values that a warning shows


class Call(CacheMissFacts, Protocol):
    """A call whose sizes and numbers may vary."""

    tree: optree.PyTreeSpec
    contract: Contract | None

    def numbers(
        self, inputs: Sequence[InputSpec], named_dims: Mapping[str, Dim]
    ) -> Sequence[NumberSpec]: ...


class Variation:
    """The values of a call that may vary.

    Args:
        cache: the programs of the function, and the facts of the calls that they were made for.
        inputs: the tensors among the arguments.
    """

    def __init__(
        self,
        call: Call,
        cache: Cache,
        inputs: Sequence[InputSpec],
        named_dims: Mapping[str, Dim],
        facts: Facts,
    ) -> None:
        self.call, self.cache, self.facts = call, cache, facts
        self.inputs, self.named_dims = inputs, named_dims
        names = {i: call.name_of(i) for i in call.argument_paths}
        self.where = size_names(inputs, names)
        self.sizes = {name: inputs[i].sample.shape[k] for name, (i, k) in self.where.items()}
        positions = {spec.position for spec in call.numbers(inputs, named_dims)}
        self.positions = {
            name: i
            for i, name in names.items()
            if can_be_symbol(call.flat[i]) and i not in positions
        }
        self.numbers = {name: call.flat[i] for name, i in self.positions.items()}
        self._served: Names = frozenset()  # the values that may vary in the new program
        self._tried: Names = frozenset()  # the values that have varied

    def assume_varying(self, assumptions: Assumptions) -> Assumptions:
        """Return the assumptions with inputs in place of the values that have varied."""
        if not self.cache.auto_widen:
            return assumptions
        as_inputs = self.numbers if self.call.target.takes_numbers else {}
        names = varying_names(
            self.facts, self.cache.varied, self.sizes, as_inputs, self.cache.required_numbers
        )
        if not names or names in self.cache.not_widened:
            return assumptions
        self._tried = names
        placed = names.intersection(self.where)
        dims = new_dims(placed, self.facts, self.cache.varied, self.named_dims)
        return assumptions.with_changes(varying=names, dims=dims)

    def narrowed(self, assumptions: Assumptions, error: Exception) -> Assumptions | None:
        """Return assumptions with narrower dims after a trace that has failed, or None."""
        return narrow_assumptions(assumptions, self.sizes, error)

    def inputs_for(
        self, assumptions: Assumptions
    ) -> tuple[Sequence[InputSpec], Mapping[str, Dim], frozenset[int]]:
        """Return the inputs, the named dims, and the positions of the numbers that have varied."""
        names, inputs, named_dims = assumptions.varying, self.inputs, self.named_dims
        at = {self.where[name]: dim for name, dim in assumptions.dims.items()}
        if at:
            inputs, named_dims = with_named_dims(inputs, named_dims, at)
        return (
            inputs,
            named_dims,
            frozenset(self.positions[x] for x in names if x in self.positions),
        )

    def check(self, entry: CachedProgram, assumptions: Assumptions) -> None:
        """Check that the values that have varied can be inputs of a new program.

        Raises:
            Retrace: some of them can't.
        """
        names = assumptions.varying
        needed = self._needed_numbers(entry) & names
        if needed:
            raise Retrace(assumptions.with_changes(**self.without(needed, assumptions)))
        bound_to_sizes = any(condition.dims for condition in entry.call_spec.conditions)
        fails = not names.isdisjoint(self.positions) and entry.call_spec.failing_guards(
            self.call.flat, self.sizes
        )
        if names and (bound_to_sizes or fails):
            raise Retrace(assumptions.with_changes(varying=frozenset(), dims={}))

    def without(self, needed: Names, assumptions: Assumptions) -> dict[str, Any]:
        """Return the changes of assumptions after which some numbers stay constants."""
        self.cache.required_numbers |= needed
        self._tried = names = assumptions.varying - needed
        names = frozenset() if names in self.cache.not_widened else names
        return {"varying": names, "dims": assumptions.dims if names else {}}

    def _needed_numbers(self, entry: CachedProgram) -> Names:
        """Return the names of the numbers among the inputs that the function needs."""
        needed = {condition.number for condition in entry.call_spec.conditions}
        return frozenset(
            self.call.name_of(spec.position)
            for spec in entry.call_spec.numbers
            if spec.undescribed and spec.name in needed
        )

    def has_numbers(self, assumptions: Assumptions) -> bool:
        """True if numbers that have varied are inputs: a program needs a comparison."""
        return not assumptions.varying.isdisjoint(self.positions)

    def record_outcome(self, assumptions: Assumptions) -> None:
        """Note the values that vary in the new program, and those that can't."""
        self._served = assumptions.varying
        if self._tried and not self._served:
            self.cache.not_widened.add(self._tried)

    def remember(self, entry: CachedProgram, called: bool) -> str | None:
        """Add the call to the calls that have programs, and return a warning: NOTE [retraces].

        Args:
            called: False for a program that ``lower()`` makes ahead of any call, without a warning.
        """
        varied, served = self.cache.varied, self._served
        warning = self._warning(served) if called else None
        if called and warning is None and len(varied) >= AFTER:
            sized = self.sizes.keys() | self.numbers.keys()
            warning = warning_about_others(self.call, self.cache, self.facts, sized)
        open_ = dict.fromkeys(served, ANY)
        if served and not entry.call_spec.conditions and not _is_bounded(entry, self.named_dims):
            for i, others in enumerate(varied):
                if served.issuperset(differing_facts(self.facts, others)):
                    varied[i] = {**others, **open_}
            varied.appendleft({**self.facts, **open_})
        else:
            varied.appendleft(self.facts)
        return warning

    def _warning(self, served: Names) -> str | None:
        """Return a warning about values that vary, without those that the new program serves."""
        seen = seen_values(self.facts, self.cache.varied, self.sizes, self.numbers)
        constant = not self.call.target.takes_numbers
        settled = self.cache.required_numbers.union(self.numbers if constant else ())
        waits = self.cache.auto_widen
        names = [
            name
            for name in seen
            if name not in served and name not in self.cache.warned_about
            and not (waits and name not in settled and is_special(self.facts[name]))
        ]  # fmt: skip
        if not names:
            return None
        self.cache.warned_about.update(names)
        listed = "; ".join(f"{name}: {self._values(name, seen[name])}" for name in names)
        verb = "vary" if len(names) > 1 else "varies"
        return (
            f"specialize({self.call.target.name}): {' and '.join(names)} {verb}, and each value is "
            f"traced again ({listed}).{self._advice(names, seen)}"
        )

    def _values(self, name: str, earlier: Sequence[Any]) -> str:
        """Return the last values in the order of the calls."""
        values = [*reversed(earlier[: _SHOWN - 1]), self.facts[name]]
        return ", ".join(map(repr, values))

    def _described(self, names: Sequence[str], seen: Mapping[str, Sequence[Any]]) -> str:
        """Return the descriptors with which values may vary, as Python code."""
        call, named_dims = self.call, self.named_dims
        dims = itertools.chain("nmkpqrst", (f"n{i}" for i in itertools.count()))
        free = (dim for dim in dims if dim not in named_dims)
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
            call.flat, call.tree, call.argument_paths, call.target.signature, described, vary
        )

    def _advice(self, names: Sequence[str], seen: Mapping[str, Sequence[Any]]) -> str:
        """Return how the values get one program, on lines of their own."""
        compiled = self.call.target.backend is not None
        numbers = [name for name in names if name in self.numbers]
        needed = [name for name in numbers if name in self.cache.required_numbers]
        constant = needed if self.call.target.takes_numbers else numbers
        offered = [name for name in names if name not in constant]
        text = ""
        try:
            described = self._described(offered, seen) if offered else ""
        except DescriptorError:
            described = ""
        if described and any(tried.intersection(offered) for tried in self.cache.not_widened):
            text += (
                f"\nIt is not known that one program can serve all values: the function relies on "
                f"a value, or may treat a torch.SymInt or torch.SymFloat unlike a number "
                f"(isinstance). With these descriptors there is one program, or an error that "
                f"names the line:\n  {described}"
            )
        elif described:
            text += f"\nWith these descriptors one program serves all values:\n  {described}"
        if compiled and constant:
            text += (
                f"\nThis compiled program needs {' and '.join(constant)} as "
                f"{'constants' if len(constant) > 1 else 'a constant'}. A tensor can be an input, "
                f"such as torch.tensor({constant[0]})."
            )
        elif needed:
            text += (
                f"\nThe function needs {' and '.join(needed)} itself (int(), range(), a text), so "
                f"each value has a program. In arithmetic alone, a tensor serves in its place."
            )
        return text


def _is_bounded(entry: CachedProgram, named_dims: Mapping[str, Dim]) -> bool:
    """True if a program does not serve each size of 2 or more of its new named dims."""
    return any(
        name not in named_dims and dim != Dim(name, min=2)
        for name, dim in entry.call_spec.named_dims.items()
    )
