"""The guards of a program as text, for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tsfunc.bridge.sizes.symbols import Condition
from tsfunc.bridge.trace.tensor_guards import PropertyGuard
from tsfunc.bridge.tracers.settings import SETTINGS
from tsfunc.program.closure.guard_builder import is_instance
from tsfunc.program.guarding.inputs import InputSpec
from tsfunc.types import Dim, DimExpr
from tsfunc.types.checker import place_text
from tsfunc.types.tensor_text import tensor_text
from tsfunc.types.values import describe


class Guards(tuple[str, ...]):
    """Lines, each of which states a fact about every call that a program answers."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(self)


def guard_texts(
    flat: Sequence[Any],
    places: Mapping[int, tuple[Any, ...]],
    inputs: Sequence[InputSpec],
    bounds: Mapping[str, Dim],
    settings: Sequence[Any],
    arguments: Mapping[str, Any],
    read: Mapping[str, Any],
    open_numbers: Sequence[int],
    conditions: Sequence[Condition],
    property_guards: Sequence[PropertyGuard],
) -> Guards:
    """Return the guards of a program for a call.

    Args:
        flat: the flattened arguments.
        places: the path of each from a parameter.
        inputs: the tensors among them.
        bounds: the named dims.
        settings: torch's settings.
        arguments: the arguments by parameter.
        read: the values read from objects and from outside, keyed by the user's spelling.
        open_numbers: the positions of the numbers that are inputs.
        conditions: the conditions on these numbers and on sizes.
        property_guards: the facts about tensor arguments that were read, other than types and
        sizes.
    """
    specs = {spec.position: spec for spec in inputs}
    lines: list[str] = []
    for i, value in enumerate(flat):
        name = place_text(places[i], arguments)
        spec = specs.get(i)
        if spec is not None:
            lines.append(f"{name}: {_tensor(spec)}")
        elif i in open_numbers:
            lines.append(f"{name}: any {type(value).__name__}")
        elif is_instance(value):
            lines.append(f"type({name}) is {type(value).__qualname__}")
        else:
            lines.append(f"{name} is {describe(value)}")
    lines += _sizes(inputs, bounds, places, arguments)
    lines += [condition.text for condition in conditions]
    for each in property_guards:
        name = place_text(places[each.position], arguments)
        lines.append(f"{each.fact.format(name)} is {each.answer}")
    lines += [f"{name} is {describe(value)}" for name, value in read.items()]
    lines += [f"{s.name} is {value}" for s, value in zip(SETTINGS, settings, strict=True)]
    return Guards(lines)


def _tensor(spec: InputSpec) -> str:
    x = spec.example
    layout = "contiguous" if x.is_contiguous() else f"strides {tuple(x.stride())}"
    dims = [dim.name if isinstance(dim, Dim) else dim for dim in spec.dims]
    grad = None if spec.any_grad else x.requires_grad
    return f"{tensor_text(x.dtype, dims, x.device, grad)} {layout}"


def _sizes(
    inputs: Sequence[InputSpec],
    bounds: Mapping[str, Dim],
    places: Mapping[int, tuple[Any, ...]],
    arguments: Mapping[str, Any],
) -> Iterator[str]:
    for dim in bounds.values():
        least = max(2, dim.min or 0)
        yield str(Dim(dim.name, least, dim.max, dim.multiple_of, dim.one_of))
    for spec in inputs:
        for k, size in enumerate(spec.dims):
            if isinstance(size, DimExpr):
                name = place_text(places[spec.position], arguments)
                yield f"{name}.shape[{k}] == {size}"
