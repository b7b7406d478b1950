"""Files of functions and programs, with variants of the calls that were made.

A specialized function traces a call of a new kind when it comes. A loaded function can't, so these
calls are traced when it is saved, for common variations: named dims of size 0 and 1 (NOTE [sizes 0
and 1]), ``torch.no_grad``, and the arguments that require grad. Most variations give
the same program, which the file has once. If the function does not read ``requires_grad``, these
variations are not traced: the program serves them all.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import optree
import torch

from tsfunc.bridge.trace.trace_level import current_trace
from tsfunc.bridge.tracers.torch_settings import settings
from tsfunc.program.calling.cache import Cache, CachedProgram, Target
from tsfunc.program.calling.cache_miss import CacheMiss
from tsfunc.program.files.program_state import is_current
from tsfunc.program.files.programs import storable_spec
from tsfunc.program.files.saved_functions import SavedFunction, SavedProgram, refuse_attributes
from tsfunc.program.guarding.call_spec import CallSpec, sample_call
from tsfunc.program.guarding.inputs import InputSpec
from tsfunc.program.program import Program

# --- calls that a loaded function serves in addition to those that were made before it was saved


_FEW = 4  # the number of arguments up to which all subsets are tried


def variants_of_entry(
    target: Target, entry: CachedProgram, others: Sequence[CachedProgram]
) -> list[CachedProgram]:
    """Return entries for variations of an entry's call that no other entry serves."""
    if current_trace() is not None:
        return []
    target = dataclasses.replace(target, backend=None)  # a file has no compiled code
    entries = [] if entry.program.looks_at_grad else [_for_any_grad(entry)]
    arguments = _tensors_of_arguments(entry.call_spec)
    everything = frozenset().union(*arguments)
    for sizes, grad, requires_grad in itertools.chain(
        itertools.product(
            ({}, *_small_sizes(entry.call_spec)),
            (True, False),
            (None, everything, frozenset[int]()),
        ),
        (({}, True, some) for some in _subsets_of(arguments)),
    ):
        flat = sample_call(entry.call_spec, sizes, requires_grad)
        entries += _trace_entries(target, entry, flat, grad, [*others, *entries])
    return entries


def _tensors_of_arguments(call_spec: CallSpec) -> list[frozenset[int]]:
    """Return the positions of the differentiable tensors of each argument."""
    paths = call_spec.tree.paths()
    positions: dict[Any, set[int]] = {}
    for spec in call_spec.inputs:
        if _may_require_grad(spec):
            positions.setdefault(paths[spec.position][:2], set()).add(spec.position)
    return [frozenset(places) for places in positions.values()]


def _subsets_of(arguments: Sequence[frozenset[int]]) -> Iterator[frozenset[int]]:
    """Yield the tensors of each argument, and of all subsets of few arguments."""
    counts = range(1, len(arguments)) if len(arguments) <= _FEW else (1,)
    for count in counts:
        for chosen in itertools.combinations(arguments, count):
            yield frozenset().union(*chosen)


def _trace_entries(
    target: Target, entry: CachedProgram, flat: list[Any], grad: bool, entries: list[CachedProgram]
) -> list[CachedProgram]:
    """Return the new entries for a call."""
    cache = Cache(len(entries) + 2, auto_widen=False)
    cache.entries = tuple(entries)
    args, kwargs = optree.tree_unflatten(entry.call_spec.tree, flat)
    with torch.set_grad_enabled(grad):
        if settings()[1:] != entry.call_spec.settings[1:]:  # all settings except the grad mode
            return []
        try:
            if cache.find(args, kwargs) is None:
                CacheMiss(target, args, kwargs).make_entry(cache)
        except Exception:  # the function, or its descriptors, do not accept such calls
            return []
    return [
        new_entry if new_entry.program.looks_at_grad else _for_any_grad(new_entry)
        for new_entry in cache.entries
        if new_entry not in entries
    ]


def _for_any_grad(entry: CachedProgram) -> CachedProgram:
    """Return an entry that accepts any ``requires_grad`` of its differentiable tensors."""
    call_spec = entry.call_spec
    inputs = tuple(
        dataclasses.replace(spec, any_grad=_may_require_grad(spec)) for spec in call_spec.inputs
    )
    return CachedProgram.of_call_spec(
        entry.program, dataclasses.replace(call_spec, inputs=inputs), entry.reason
    )


def _may_require_grad(spec: InputSpec) -> bool:
    return spec.sample.is_floating_point() or spec.sample.is_complex()


def _small_sizes(call_spec: CallSpec) -> Iterator[Mapping[str, int]]:
    """Yield sizes of 0 and 1: for each named dim alone, and 1 for all."""
    dims = call_spec.named_dims.values()
    for dim, size in itertools.product(dims, (0, 1)):
        if dim.admits(size):
            yield {dim.name: size}
    if len(dims) > 1 and all(dim.admits(1) for dim in dims):
        yield {dim.name: 1 for dim in dims}


# --- the parts of a specialized function that go into a file


def function_to_save(
    target: Target, cache: Cache, programs: Sequence[Program], exact: bool
) -> SavedFunction:
    """Return the parts of a specialized function that go into a file.

    Args:
        programs: the programs to save; an empty sequence selects all.
        exact: True if the file serves only calls like those that were made.

    Raises:
        RuntimeError: there is no program.
        ValueError: one of the programs does not belong to the function, or a guard on a value from
            outside fails for all of them.
    """
    if not cache.entries:
        raise RuntimeError(
            f"save({target.name}): there is no program yet; one is made by the first call."
        )
    cached = cache.programs
    if any(program not in cached for program in programs):
        raise ValueError(
            f"save({target.name}): expected programs in .programs of the function, got another."
        )
    chosen = [entry for entry in cache.entries if not programs or entry.program in programs]
    refuse_attributes(target.name, [entry.program for entry in chosen])
    current = [entry for entry in chosen if is_current(entry.program)]
    if not current:
        raise ValueError(
            f"save({target.name}): every program is out of date: a global, attribute or other "
            f"value that the function reads has changed since the calls that made them. Call the "
            f"function again, which makes a program for the present values, and then save it."
        )
    chosen = current
    if not exact:
        for entry in tuple(chosen):
            chosen += variants_of_entry(target, entry, chosen)
    answers = tuple(
        SavedProgram(entry.program, storable_spec(entry.call_spec), entry.text) for entry in chosen
    )
    described = tuple(contract.descriptors for contract in target.contracts)
    return SavedFunction(target.name, target.signature, described, cache.limit, answers)
