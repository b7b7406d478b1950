"""Guards on the arguments of a program: their code, their texts, and the form of a call.

NOTE [tensor aliasing]
A trace makes a tracer for each tensor among the arguments, so ``x is y`` is False in the trace, as
it is in most calls. If the function's code has an identity comparison of objects that may be
tensors (``code_reads`` detects it), equal arguments share one tracer, and an argument that the
function has from elsewhere (a parameter of its module) is passed as that tensor. Later calls are
then guarded on the same identities. Other functions have one program for both kinds of calls.

A guard that holds implies that the descriptors hold: it fixes everything that they describe except
the sizes of named dims, and it checks these sizes itself.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import optree
import torch

from tsfunc.bridge.sizes.symbols import Condition, Symbols
from tsfunc.bridge.trace.quick_checks import quick_check
from tsfunc.bridge.trace.tensor_guards import PropertyGuard, is_tensor_of, users_class
from tsfunc.bridge.tracers import torch_state
from tsfunc.bridge.tracers.settings import SETTINGS
from tsfunc.dispatch import state
from tsfunc.program.closure.guard_builder import has_value, is_instance
from tsfunc.program.closure.guard_codegen import GuardLines, key_orders
from tsfunc.program.closure.viewed_state import has_contents, viewed_state
from tsfunc.program.guarding.inputs import (
    InputSpec,
    ScalarSpec,
    order_of_strides,
    sizes_of_call,
    solving_order,
)
from tsfunc.types import Dim, DimExpr
from tsfunc.types.checker import place_text
from tsfunc.types.codegen import refused_sizes
from tsfunc.types.sizes import solved_for
from tsfunc.types.tensor_text import tensor_text
from tsfunc.types.values import describe, same_value

# --- arguments that are the same tensor, or a tensor that the function also has from elsewhere


Groups = tuple[tuple[int, ...], ...]


def as_one(
    inputs: Sequence[InputSpec], tracers: Sequence[Any], own: Mapping[int, torch.Tensor]
) -> list[Any]:
    """Return the values that the function gets for its tensors: one object for each tensor.

    Args:
        inputs: the tensors among the arguments.
        tracers: their tracers.
        own: tensors that the function has from elsewhere, by id.
    """
    first: dict[int, Any] = dict(own)
    return [
        first.setdefault(id(spec.example), tracer)
        for spec, tracer in zip(inputs, tracers, strict=True)
    ]


def groups_of(inputs: Sequence[InputSpec]) -> Groups:
    """Return the positions of the tensors among the arguments, grouped by identity."""
    found: dict[int, list[int]] = {}
    for spec in inputs:
        found.setdefault(id(spec.example), []).append(spec.position)
    return tuple(tuple(group) for group in found.values())


def condition(groups: Groups) -> str | None:
    """Return the Python condition that the flattened arguments have exactly these identities."""
    parts = [f"args[{one}] is args[{other}]" for one, *others in groups for other in others]
    if len(groups) > 1:
        ids = ", ".join(f"id(args[{group[0]}])" for group in groups)
        parts.append(f"len({{{ids}}}) == {len(groups)}")
    return " and ".join(parts) or None


def hold(
    guard_lines: GuardLines, inputs: Sequence[InputSpec], own: Mapping[int, torch.Tensor]
) -> None:
    """Guard the arguments that are, or are not, tensors that the function has from elsewhere."""
    elsewhere = guard_lines.name(frozenset(own)) if own else None
    for spec in inputs:
        tensor = own.get(id(spec.example))
        if tensor is not None:
            guard_lines.require(f"args[{spec.position}] is {guard_lines.name(tensor)}")
        elif elsewhere is not None:
            guard_lines.require(f"id(args[{spec.position}]) not in {elsewhere}")


# --- guards: straight-line Python over flattened arguments that accepts the calls of a program


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
    """Return lines that check bounds; for 0 and 1 see NOTE [sizes 0 and 1]."""
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


# --- the guards of a program as text, for people


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
            lines.append(f"{name}: {_tensor_text(spec)}")
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


def _tensor_text(spec: InputSpec) -> str:
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


# --- the form of a call: the assumptions of a program about the arguments it was made for


@dataclass(frozen=True, eq=False)
class CallSpec:
    """The common part of all calls that pass one guard; it holds no tensors of a call.

    Attributes:
        tree: the structure of the arguments, a tuple of (args, kwargs).
        leaves: the flattened arguments, with None in place of a tensor, and `Watched` in place of
            an object whose attributes the program's ``closure_guard`` checks.
        inputs: the tensors among them; their examples have no data.
        bounds: the named dims.
        ambient: torch's settings.
        of_keywords: whether the function sees the order of the keyword arguments.
        conditions: the conditions on the named dims, and on the numbers that are inputs.
        property_guards: the facts about tensor arguments that were read, other than types and
        sizes.
        groups: the positions of the tensors, grouped by identity; empty if it does not matter.
        scalars: the numbers among the arguments that are inputs, and may vary.
    """

    tree: optree.PyTreeSpec
    leaves: tuple[Any, ...]
    inputs: tuple[InputSpec, ...]
    bounds: Mapping[str, Dim]
    ambient: tuple[Any, ...]
    of_keywords: bool = False
    conditions: tuple[Condition, ...] = ()
    property_guards: tuple[PropertyGuard, ...] = ()
    groups: Groups = ()
    scalars: tuple[ScalarSpec, ...] = ()

    @functools.cached_property
    def orders(self) -> tuple[Any, ...]:
        """The orders of the keys among the arguments: NOTE [the order of keys]."""
        return key_orders(self.tree, self.of_keywords)

    def guard(self) -> tuple[list[str], dict[str, Any]]:
        """Return the guard for such calls; see ``guard_lines``."""
        flat = list(self.leaves)
        for spec in self.inputs:
            flat[spec.position] = spec.example
        lines, scope = guard_lines(flat, self.inputs, self.bounds, self.scalars, self.conditions)
        return [*lines, *self.more(scope)], scope

    def more(self, scope: dict[str, Any]) -> list[str]:
        """Return the guard lines for facts about tensors other than types and sizes.

        Args:
            scope: receives the objects that the lines refer to by name.
        """
        lines = []
        for i, each in enumerate(self.property_guards):
            scope[f"asked_{i}"] = each.holds
            lines.append(f"if not asked_{i}(args[{each.position}]): return None")
        if self.groups:
            lines.append(f"if not ({condition(self.groups)}): return None")
        return lines

    def unmet(self, flat: Sequence[Any], sizes: Mapping[str, int]) -> list[str]:
        """Return the conditions that fail for some arguments and sizes of named dims."""
        named = variables_of(self.bounds, ())
        known = {variable: sizes[name] for name, variable in named.items() if name in sizes}
        return [
            condition.text
            for condition in self.conditions
            if not eval(condition.code, {"math": math, "args": flat}, known)
        ]


def form_of_call(
    flat: Sequence[Any],
    tree: optree.PyTreeSpec,
    inputs: Sequence[InputSpec],
    bounds: Mapping[str, Dim],
    ambient: tuple[Any, ...],
    of_keywords: bool,
    conditions: tuple[Condition, ...],
    property_guards: tuple[PropertyGuard, ...] = (),
    groups: Groups = (),
    scalars: Sequence[ScalarSpec] = (),
) -> CallSpec:
    """Return the form of a call that is being traced."""
    leaves = tuple(_leaf(x) for x in flat)
    fake = Symbols({}).fake
    specs = tuple(dataclasses.replace(s, example=without_data(s.example, fake)) for s in inputs)
    return CallSpec(
        tree, leaves, specs, dict(bounds), ambient, of_keywords, conditions, property_guards,
        groups, tuple(scalars),
    )  # fmt: skip


def example_call(
    form: CallSpec, sizes: Mapping[str, int], requires_grad: Collection[int] | None = None
) -> list[Any]:
    """Return the flattened arguments of a call similar to those of a form, without data.

    Args:
        form: the form.
        sizes: sizes for some of the named dims; the others keep their sizes in the form's call.
        requires_grad: the positions of the tensors that require grad; None: as in the form's call.
    """
    flat = list(form.leaves)
    named = {**sizes_of_call(form.inputs), **sizes}
    fake = Symbols({}).fake
    for spec in form.inputs:
        shape = spec.shape(named)
        own = spec.example.requires_grad
        wanted = own if requires_grad is None else spec.position in requires_grad
        flat[spec.position] = _at_shape(spec.example, shape, wanted, fake)
    return flat


def _at_shape(
    example: torch.Tensor,
    shape: Sequence[Any],
    requires_grad: bool,
    fake: AbstractContextManager[Any],
) -> torch.Tensor:
    """Return a tensor like the example, with another shape and the same order of strides."""
    order = sorted(range(len(shape)), key=lambda d: (example.stride(d), -d))
    strides, step = [0] * len(shape), 1
    for d in order:
        strides[d] = step
        step *= max(1, shape[d])
    with torch_state.outside_all_levels(), state.outside_all_levels(), fake:
        made = torch.empty_strided(shape, strides, dtype=example.dtype, device=example.device)
        can = made.is_floating_point() or made.is_complex()
        return made.requires_grad_() if requires_grad and can else made


@dataclass(frozen=True)
class Watched:
    """Stand-in for an object whose attributes are watched."""

    cls: type


def _leaf(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return None
    return Watched(type(value)) if is_instance(value) else value


def without_data(example: torch.Tensor, fake: AbstractContextManager[Any]) -> torch.Tensor:
    """Return a tensor of the same dtype, sizes, strides and device without memory."""
    with torch_state.outside_all_levels(), state.outside_all_levels(), fake:
        made = torch.empty_strided(
            example.shape, example.stride(), dtype=example.dtype, device=example.device
        )
        return made.requires_grad_() if example.requires_grad else made


def placeholder(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    strides: Sequence[int] | None = None,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> torch.Tensor:
    """Return an example without data for an input with a known type."""
    with torch_state.outside_all_levels(), state.outside_all_levels(), Symbols({}).fake:
        if strides is not None:
            return torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device=device)
        return torch.empty(tuple(shape), dtype=dtype, device=device, memory_format=memory_format)
