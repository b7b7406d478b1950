"""Guards: straight-line Python over flattened arguments that accepts the calls of a program.

A guard that holds implies that the descriptors hold: it fixes everything that they describe except
the sizes of named dims, and it checks these sizes itself.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tsfunc.bridge.sizes.symbols import Condition
from tsfunc.bridge.trace.quick_checks import quick_check
from tsfunc.bridge.trace.tensor_guards import is_tensor_of, users_class
from tsfunc.program.closure.guard_builder import has_value, is_instance
from tsfunc.program.closure.viewed_state import has_contents, viewed_state
from tsfunc.program.guarding.inputs import InputSpec, ScalarSpec, order_of_strides, solving_order
from tsfunc.types import Dim, DimExpr
from tsfunc.types.codegen import refused_sizes
from tsfunc.types.sizes import solved_for
from tsfunc.types.values import same_value

_PLAIN = (int, bool, str, type(None))


def guard_lines(
    flat: Sequence[Any],
    inputs: Sequence[InputSpec],
    bounds: Mapping[str, Dim],
    scalars: Sequence[ScalarSpec] = (),
    conditions: Sequence[Condition] = (),
) -> tuple[list[str], dict[str, Any]]:
    """Return the guard for calls that look like the one whose flattened arguments are given.

    For numbers that are inputs, the guard checks their types and the conditions, which use the
    variables that `variables_of` returns. The guard does not check objects whose attributes are
    watched (``guard_codegen.py`` does).

    Returns:
        Lines that return None if the guard fails, and the objects that they refer to by name.
    """
    scope: dict[str, Any] = {}
    specs = {spec.position: spec for spec in inputs}
    numbers = {spec.position: spec for spec in scalars}
    lines: list[str] = []
    closely: list[str] = []  # the lines for tensors without named dims
    bound: set[str] = set()
    for i, value in enumerate(flat):
        if is_instance(value):
            continue
        spec = specs.get(i)
        if i in numbers:
            held = "int" if type(value) is int else "float or not isfinite(a)"
            lines += [f"a = args[{i}]", f"if type(a) is not {held}: return None"]
        elif spec is None:
            lines += [f"a = args[{i}]", _static(i, value, scope)]
        else:
            where = closely if _is_fixed(spec) else lines
            where += [f"a = args[{i}]", *_tensor(spec, scope, bound, bounds)]
    lines += _quickly([spec for spec in inputs if _is_fixed(spec)], len(flat), closely, scope)
    # Expressions come last, after the names that are dims themselves are bound.
    for i, k, dim, unknown in solving_order(inputs, bound):
        size = f"args[{i}].shape[{k}]"
        if unknown is None:
            lines.append(f"if {size} != ({_spelled(dim.text)}): return None")
        else:
            lines.extend(_solved(size, dim, unknown, bounds[unknown]))
    lines.extend(f"if not ({condition.code}): return None" for condition in conditions)
    if scalars:
        scope["isfinite"] = math.isfinite
    if conditions:
        scope["math"] = math
    return lines, scope


def variables_of(bounds: Mapping[str, Dim], scalars: Sequence[ScalarSpec]) -> dict[str, str]:
    """Return the variables of named dims and numbers in conditions."""
    numbers = {spec.name: f"args[{spec.position}]" for spec in scalars}
    return {**{name: _size(name) for name in bounds}, **numbers}


def _spelled(text: str) -> str:
    """Return an expression in the guard's variables."""
    return re.sub(r"[^\W\d]\w*", lambda found: _size(found[0]), text)


def _solved(size: str, dim: DimExpr, name: str, limits: Dim) -> list[str]:
    """Return lines that solve an expression for a name, given the size of its dim."""
    slope, rest = map(_spelled, solved_for(dim.text, name) or ())
    return [
        f"d = {slope}",
        f"if not d or ({size} - ({rest})) % d: return None",
        f"{_size(name)} = ({size} - ({rest})) // d",
        *_bounds(_size(name), limits),
    ]


def _bounds(size: str, limits: Dim) -> list[str]:
    """Return lines that check bounds; for 0 and 1 see NOTE [sizes 0 and 1] in ``equal``."""
    return [
        f"if {refused}: return None" for refused in (f"{size} < 2", *refused_sizes(limits, size))
    ]


def _size(name: str) -> str:
    """Return the variable for a named dim; the prefix avoids clashes with other variables."""
    return f"size_{name}"


def _is_fixed(spec: InputSpec) -> bool:
    return all(isinstance(dim, int) for dim in spec.dims)


def _quickly(
    inputs: Sequence[InputSpec], count: int, closely: Sequence[str], scope: dict[str, Any]
) -> Sequence[str]:
    """Return a check of all inputs of fixed sizes at once, followed by one of each if it fails."""
    check = quick_check([spec.example for spec in inputs])
    if check is None:
        return closely
    scope["quick"] = check
    every = ", ".join(f"args[{spec.position}]" for spec in inputs)
    given = "*args" if len(inputs) == count else every
    return [f"if not quick({given}):", *(f"    {line}" for line in closely)]


def _static(i: int, value: Any, scope: dict[str, Any]) -> str:
    """Return the guard of a constant argument: the same number or string, or the same object.

    The guard of an object with elements or other contents checks the contents as well.
    """
    scope[f"value_{i}"] = value
    if isinstance(value, complex | frozenset):  # `==` may hold for different values
        scope["same_value"] = same_value
        return f"if not same_value(value_{i}, a): return None"
    if has_contents(value):
        inside = viewed_state(value)
        expression, now = inside or ("{}", copy.copy(value))
        scope[f"inside_{i}"], scope["same_value"] = now, same_value
        own = f"same_value(inside_{i}, {expression.format('a')})"
        alone = hasattr(type(value), "__setitem__") or inside is not None
        return f"if {f'a is not value_{i} or ' if alone else ''}not {own}: return None"
    if type(value) is float:
        return f"if not same_float(a, value_{i}): return None"
    if type(value) in _PLAIN or has_value(type(value)):
        scope[f"type_{i}"] = type(value)
        return f"if type(a) is not type_{i} or a != value_{i}: return None"
    return f"if a is not value_{i}: return None"


def _tensor(
    spec: InputSpec, scope: dict[str, Any], bound: set[str], bounds: Mapping[str, Dim]
) -> list[str]:
    """Return the guard of a tensor: type, device, memory layout and fixed sizes."""
    i, example = spec.position, spec.example
    scope[f"dtype_{i}"], scope[f"device_{i}"] = example.dtype, example.device
    scope[f"layout_{i}"] = example.layout
    scope[f"class_{i}"], scope["is_tensor_of"] = users_class(type(example)), is_tensor_of
    plain = "Tensor" if scope[f"class_{i}"] is torch.Tensor else f"class_{i}"
    grad = "" if spec.any_grad else f" or a.requires_grad is not {example.requires_grad}"
    lines = [
        f"if type(a) is not {plain} and not is_tensor_of(a, class_{i}): return None",
        f"if a.dtype is not dtype_{i} or a.device != device_{i}{grad}: return None",
        f"if a.layout is not layout_{i}: return None",  # some have no strides
    ]
    if _is_fixed(spec):
        lines.append(f"if a.shape != {tuple(spec.dims)!r}: return None")
        if not example.is_contiguous():
            lines.append(f"if a.stride() != {tuple(example.stride())!r}: return None")
            return lines
    else:
        lines += ["s = a.shape", f"if len(s) != {len(spec.dims)}: return None"]
        for k, dim in enumerate(spec.dims):
            lines.extend(_dim(k, dim, bound, bounds))
        if not example.is_contiguous():
            lines += ["t = a.stride()",
                      f"if sorted(range(len(t)), key=lambda k: (t[k], -k)) != "
                      f"{order_of_strides(example)!r}: "
                      f"return None"]  # fmt: skip
            return lines
    lines.append("if not a.is_contiguous(): return None")
    return lines


def _dim(k: int, dim: Any, bound: set[str], bounds: Mapping[str, Dim]) -> list[str]:
    if isinstance(dim, int):
        return [f"if s[{k}] != {dim}: return None"]
    if not isinstance(dim, Dim):
        return []
    size = _size(dim.name)
    if dim.name in bound:
        return [f"if s[{k}] != {size}: return None"]
    bound.add(dim.name)
    return [f"{size} = s[{k}]", *_bounds(size, bounds[dim.name])]
