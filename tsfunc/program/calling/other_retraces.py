"""Warnings about values that vary, and are neither sizes nor numbers among the arguments.

The warnings are the second half of NOTE [retraces] in ``variation``: such a value can't become an
input of a program, so a warning says how to pass it, once it has had a new program twice.
"""

from __future__ import annotations

import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from tsfunc.program.calling.cache import Cache, Target
from tsfunc.program.calling.retrace_reasons import fact_text, primary_differences
from tsfunc.program.guard import ABSENT, OfBranch
from tsfunc.program.guarding.call_spec import FORM_PREFIXES, STRUCTURE_PREFIX
from tsfunc.program.guarding.guards import Facts
from tsfunc.types.values import same_value

AFTER = 2  # the number of programs that differ in one value from a call
_BRANCHES = 6  # the same for a value by which the function branches
_SHOWN = 3  # the number of values that a warning shows


class CacheMissFacts(Protocol):
    """A call that has no program yet; see ``CacheMiss``."""

    flat: list[Any]
    argument_paths: dict[int, tuple[Any, ...]]
    target: Target
    closure_differences: Sequence[Mapping[str, tuple[Any, Any]]]

    def name_of(self, position: int) -> str: ...


def warning_about_others(
    call: CacheMissFacts, cache: Cache, facts: Facts, sized: Collection[str]
) -> str | None:
    """Return a warning about one value that varies, with the remedy; None if none does.

    Args:
        call: a call that got a new program.
        cache: the programs of the function; the value is noted as one that a warning has named.
        sized: the names of sizes and numbers, about which ``Variation`` warns.
    """
    found: dict[str, tuple[Any, list[Any]]] = {
        name: (facts.get(name, ABSENT), values)
        for name, values in _earlier_values(facts, cache.varied).items()
        if name not in sized and not name.startswith(FORM_PREFIXES)
    }
    remedies = {name: _remedy(call, name) for name in found}
    takes_numbers = call.target.takes_numbers
    for name, (now, values) in _seen_in_closure(call.closure_differences).items():
        found[name] = now, values
        remedies[name] = _outside_remedy(name, now, takes_numbers and name not in cache.constants)
    for name, (now, earlier) in found.items():
        if name in cache.warned_about:
            continue
        cache.warned_about.add(name)
        listed = ", ".join(map(fact_text, [*reversed(earlier[: _SHOWN - 1]), now]))
        verb = "vary" if name.startswith("the keys") else "varies"
        branches = any(isinstance(value, OfBranch) for value in earlier)
        traced = "the function takes another branch" if branches else "each value is traced again"
        return (
            f"specialize({call.target.name}): {name} {verb}, and {traced} ({name}: {listed}).\n"
            f"{remedies[name]}"
        )
    return None


def _earlier_values(facts: Facts, history: Iterable[Facts]) -> dict[str, list[Any]]:
    """Return the earlier values of each fact that alone distinguishes a call from enough others."""
    seen: dict[str, list[Any]] = {}
    for others in history:
        names = primary_differences(facts, others)
        if len(names) == 1:
            _add_value(seen, names[0], others.get(names[0], ABSENT))
    return {name: values for name, values in seen.items() if len(values) >= AFTER}


def _seen_in_closure(
    differences: Iterable[Mapping[str, tuple[Any, Any]]],
) -> dict[str, tuple[Any, list[Any]]]:
    """Return the closed-over values that alone distinguish a call from enough programs.

    Numbers that always vary together count as one, and the first of them is returned.

    Args:
        differences: for each program the values that differ, in the call and in the program.

    Returns:
        The value in the call and the values of the programs, by the user's spelling.
    """
    listed = list(differences)
    branching = {
        name
        for differing in listed
        for name, (_, x) in differing.items()
        if isinstance(x, OfBranch)
    }
    now: dict[str, Any] = {}
    seen: dict[frozenset[str], dict[str, list[Any]]] = {}
    for differing in listed:
        numbers = all(type(value) in (int, float) for value, _ in differing.values())
        if len(differing) == 1 or (numbers and branching.isdisjoint(differing)):
            values = seen.setdefault(frozenset(differing), {})
            for name, (now[name], before) in differing.items():
                _add_value(values, name, before)
    firsts = [max(values.items(), key=lambda item: len(item[1])) for values in seen.values()]
    return {
        name: (now[name], values)
        for name, values in firsts
        if len(values) >= (_BRANCHES if name in branching else AFTER)
    }


def _add_value(seen: dict[str, list[Any]], name: str, value: Any) -> None:
    values = seen.setdefault(name, [])
    if not any(same_value(value, seen_value) for seen_value in values):
        values.append(value)


# --- remedies


_REMEDIES = {
    "dtype": "A program is for one dtype. Convert before the call, such as {0}.to(torch.float32).",
    "device": "A program is for one device. Move {0} before the call.",
    "dim()": "A program is for one number of dims. Give {0} one number of dims before the call "
    "(reshape, flatten, unsqueeze).",
    "stride()": "A program is for one layout in memory. Call it with {0}.contiguous().",
}
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)


def _remedy(call: CacheMissFacts, name: str) -> str:
    """Return how calls that differ in a fact about an argument get fewer programs."""
    if name.startswith(STRUCTURE_PREFIX):
        return (
            f"A program is for one structure of {name.removeprefix(STRUCTURE_PREFIX)}. Stack "
            f"tensors of one shape into a tensor (torch.stack) whose size has a name, or pad them "
            f"to one number."
        )
    at, _, last = name.rpartition(".")
    if last in _REMEDIES:
        return _REMEDIES[last].format(at)
    position = next((i for i in call.argument_paths if call.name_of(i) == name), None)
    value = None if position is None else call.flat[position]
    if isinstance(value, _FUNCTIONS):
        return "A program is for one function. Define it once, and pass the same one at each call."
    return (
        "A program has the value as a constant. Pass data that varies as a tensor, and leave out "
        "arguments that the function does not need."
    )


def _outside_remedy(name: str, value: Any, takes_number: bool) -> str:
    """Return how calls that differ in a closed-over value get fewer programs.

    Args:
        name: the user's spelling of the value.
        takes_number: True if a number among the arguments may be an input of a program.
    """
    read = f"The function reads {name} besides its arguments"
    if isinstance(value, torch.Tensor):
        return (
            f"{read}, and a program is for one shape and dtype of it. Pass it as an argument with "
            f"a descriptor that names its sizes."
        )
    if type(value) in (int, float) and not name.startswith("len("):
        passed = "an argument" if takes_number else f"a tensor (torch.tensor({name}))"
        return (
            f"{read}, so that a program has it as a constant. Pass it as {passed}, for one program "
            f"if the function computes with it."
        )
    return (
        f"{read}, so that a program has it as a constant. Pass data that varies as a tensor among "
        f"the arguments."
    )
