"""Reasons for a new program: the differences of a call from the calls that have a program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from tsfunc.bridge.tracers.settings import SETTINGS
from tsfunc.program.closure.guard_builder import is_instance
from tsfunc.program.guarding.inputs import InputSpec
from tsfunc.types import Dim
from tsfunc.types.checker import place_text
from tsfunc.types.values import describe, same_value

Facts = Mapping[str, Any]
_ABSENT = object()
ANY = object()  # stands for each value that a program serves
_ORDER, _PASSED = "the keys of dict", "the arguments"  # any other difference is a better reason


def facts_of_call(
    flat: Sequence[Any],
    places: Mapping[int, tuple[Any, ...]],
    inputs: Sequence[InputSpec],
    settings: Sequence[Any],
    arguments: Mapping[str, Any],
    orders: Sequence[Any],
    passed: str,
) -> dict[str, Any]:
    """Return the assumptions of a program for a call, by the user's names.

    Args:
        flat: the flattened arguments.
        places: the path of each from a parameter.
        inputs: the tensors among them; the fact for a size that is a named dim is the name.
        settings: torch's settings.
        arguments: the arguments by parameter.
        orders: the key orders of the dicts among the arguments.
        passed: a text that shows which arguments are positional, and which are keywords.
    """
    facts: dict[str, Any] = {}
    specs = {spec.position: spec for spec in inputs}
    for i, value in enumerate(flat):
        name = place_text(places[i], arguments)
        spec = specs.get(i)
        if spec is not None:
            facts.update(_tensor(name, spec))
        elif is_instance(value):
            facts[f"type({name})"] = _Word(type(value).__qualname__)
        else:
            facts[name] = value
    for setting, value in zip(SETTINGS, settings, strict=True):
        facts[setting.name] = value
    facts[_PASSED] = _Word(passed)
    for i, keys in enumerate(orders):
        facts[f"{_ORDER} {i}"] = _Word(", ".join(map(repr, keys)))
    return facts


def passed_text(positional: int, keywords: Iterable[str]) -> str:
    """Return a text that shows positional and keyword arguments: ``(_, y=_)``."""
    return f"({', '.join([*['_'] * positional, *(f'{name}=_' for name in keywords)])})"


def _tensor(name: str, spec: InputSpec) -> dict[str, Any]:
    x = spec.example
    facts = {f"{name}.dtype": x.dtype, f"{name}.device": x.device, f"{name}.dim()": x.dim()}
    facts[f"{name}.requires_grad"] = x.requires_grad
    for k, dim in enumerate(spec.dims):
        facts[f"{name}.shape[{k}]"] = dim if isinstance(dim, int) else _Word(_name(dim))
    contiguous = x.is_contiguous()
    facts[f"{name}.stride()"] = _Word("contiguous") if contiguous else tuple(x.stride())
    return facts


class _Word(str):
    """A text that is shown without quotes: a named dim, the name of a class."""


def _name(dim: Any) -> Any:
    return dim.name if isinstance(dim, Dim) else dim


def reason_for(facts: Facts, known: Iterable[Facts]) -> str:
    """Return the differences of a call from the nearest of the calls that have a program.

    Args:
        facts: the facts of the call.
        known: the facts of each program's call, the last used first.
    """
    nearest: list[str] | None = None
    for others in known:
        names = differing(facts, others)
        names = [name for name in names if not name.startswith((_ORDER, _PASSED))] or names
        if nearest is None or len(names) < len(nearest):
            nearest = [_difference(name, facts, others) for name in names]
    if nearest is None:
        return "the first call"
    if not nearest:
        return UNSEEN
    shown = nearest[:_SHOWN]
    if len(nearest) > _SHOWN:
        shown.append(f"and {len(nearest) - _SHOWN} more")
    return "; ".join(shown)


UNSEEN = "something has changed that the function reads beside its arguments"
_SHOWN = 4  # maximum number of differences in a reason


def differing(facts: Facts, others: Facts) -> list[str]:
    """Return the names of the facts in which two calls differ."""
    found = []
    for name in dict.fromkeys((*facts, *others)):
        now, before = facts.get(name, _ABSENT), others.get(name, _ABSENT)
        if now is not before and before is not ANY and not same_value(now, before):
            found.append(name)
    return found


def _difference(name: str, facts: Facts, others: Facts) -> str:
    now, before = facts.get(name, _ABSENT), others.get(name, _ABSENT)
    return f"{name}: {_text(now)}, was {_text(before)}"


def _text(value: Any) -> str:
    if value is _ABSENT:
        return "absent"
    if isinstance(value, torch.dtype | torch.device | torch.layout):
        return str(value).removeprefix("torch.")
    return str(value) if type(value) in (int, bool, float, tuple, _Word) else describe(value)
