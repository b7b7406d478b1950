"""The description of a program's calls: its assumptions about the arguments."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch

from tsfunc import pytrees
from tsfunc._text import count_text
from tsfunc.bridge.sizes.fake_mode import LazyFakeMode, new_fake_input
from tsfunc.bridge.sizes.symbols import Condition, Symbols
from tsfunc.bridge.tracers import torch_state
from tsfunc.bridge.tracers.torch_settings import SETTINGS
from tsfunc.ops.dims import dense_strides, memory_order
from tsfunc.program.closure.guard_builder import is_watched
from tsfunc.program.closure.guard_codegen import SettingsAre, key_orders
from tsfunc.program.guard import Guard, GuardCode, Guards, Names, UnquotedText
from tsfunc.program.guarding.guards import (
    AnyNumber,
    ArgumentGuard,
    DimIs,
    SizesAre,
    TensorMeta,
    TypeIs,
    ValueIs,
    WatchedPlaceholder,
)
from tsfunc.program.guarding.inputs import InputSpec, NumberSpec, sizes_of_call
from tsfunc.program.guarding.trace_guards import ArgumentCondition, TraceGuard
from tsfunc.types import Dim, MetaTensorType
from tsfunc.types.scope import Scope
from tsfunc.types.values import PathTexts

GuardLines = tuple[list[str], Scope]


@dataclass(frozen=True, eq=False)
class CallSpec:
    """The common part of all calls that pass one guard; it holds no tensors of a call.

    Attributes:
        tree: the structure of the arguments, a tuple of (args, kwargs).
        leaves: the flattened arguments, with None in place of a tensor, and ``WatchedPlaceholder``
            in place of an object whose attributes the program's ``closure_guard`` checks.
        inputs: the tensors among them; their samples have no data.
        settings: torch's settings.
        keyword_order: True if the function sees the order of the keyword arguments.
        numbers: the numbers among the arguments that are inputs, and may vary.
        trace_guards: the guards on other facts that the trace relied on.
    """

    tree: optree.PyTreeSpec
    leaves: tuple[Any, ...]
    inputs: tuple[InputSpec, ...]
    named_dims: Mapping[str, Dim]
    settings: tuple[Any, ...]
    keyword_order: bool = False
    numbers: tuple[NumberSpec, ...] = ()
    trace_guards: tuple[TraceGuard, ...] = ()

    @functools.cached_property
    def key_orders(self) -> tuple[Any, ...]:
        """The orders of the keys among the arguments: NOTE [the order of keys]."""
        return key_orders(self.tree, self.keyword_order)

    def guards(self, on_arguments: Sequence[ArgumentGuard] | None = None) -> tuple[Guard, ...]:
        """Return the guards on the arguments of such calls.

        Args:
            on_arguments: the guards on single arguments of a call, with the classes of its
                tensors; None makes them from this description, which has no classes.
        """
        if on_arguments is None:
            on_arguments = guards_on_arguments(self.leaves, self.inputs, self.numbers)
        dims = map(DimIs, self.named_dims.values())
        return (*on_arguments, *dims, SizesAre(self.inputs), *self.trace_guards)

    def guard_lines(self, guards: Sequence[Guard] | None = None) -> GuardLines:
        """Return the lines of the guards on the arguments, by default of this description's."""
        guards = self.guards() if guards is None else guards
        return guard_lines(guards, self.named_dims, len(self.leaves))

    @property
    def conditions(self) -> list[Condition]:
        """The conditions on the named dims, and on the numbers that are inputs."""
        return conditions_among(self.trace_guards)

    def failing_guards(self, flat: Sequence[Any], sizes: Mapping[str, int]) -> list[TraceGuard]:
        """Return the guards of the trace that fail for some arguments and sizes of named dims."""
        named = {name: size for name, size in sizes.items() if name in self.named_dims}
        return [guard for guard in self.trace_guards if not guard.holds(flat, named)]


def call_spec_of(
    flat: Sequence[Any],
    tree: optree.PyTreeSpec,
    inputs: Sequence[InputSpec],
    named_dims: Mapping[str, Dim],
    settings: tuple[Any, ...],
    keyword_order: bool,
    numbers: Sequence[NumberSpec],
    trace_guards: Sequence[TraceGuard],
) -> CallSpec:
    """Return the description of a call that is being traced."""
    leaves = tuple(_leaf(x) for x in flat)
    fake = Symbols({}).fake
    specs = tuple(dataclasses.replace(s, sample=without_memory(s.sample, fake)) for s in inputs)
    return CallSpec(
        tree, leaves, specs, dict(named_dims), settings, keyword_order, tuple(numbers),
        tuple(trace_guards),
    )  # fmt: skip


def sample_call(
    call_spec: CallSpec, sizes: Mapping[str, int], requires_grad: Collection[int] | None = None
) -> list[Any]:
    """Return the flattened arguments of a call like the described one, without data.

    Args:
        sizes: sizes for some of the named dims; the others keep their sizes in the described call.
        requires_grad: the positions of the tensors that require grad; None: as in that call.
    """
    flat = list(call_spec.leaves)
    named = {**sizes_of_call(call_spec.inputs), **sizes}
    fake = Symbols({}).fake
    for spec in call_spec.inputs:
        shape = spec.shape(named)
        sample_requires_grad = spec.sample.requires_grad
        wanted = sample_requires_grad if requires_grad is None else spec.position in requires_grad
        order = memory_order(spec.sample.shape, spec.sample.stride())
        strides = dense_strides(shape, order)
        flat[spec.position] = new_fake_input(
            fake, shape, strides, spec.sample.dtype, spec.sample.device, wanted
        )
    return flat


def _leaf(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return None
    return WatchedPlaceholder(type(value)) if is_watched(value) else value


def without_memory(sample: torch.Tensor, fake: LazyFakeMode) -> torch.Tensor:
    """Return a tensor of the same dtype, sizes, strides, device and layout without memory."""
    return new_fake_input(
        fake, sample.shape, sample.stride(), sample.dtype, sample.device,
        sample.requires_grad, sample.layout,
    )  # fmt: skip


def placeholder(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    strides: Sequence[int] | None = None,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> torch.Tensor:
    """Return a sample without data for an input with a known type."""
    if strides is None:
        with torch_state.outside_all_transforms():
            strides = torch.empty(shape, device="meta", memory_format=memory_format).stride()
    return new_fake_input(Symbols({}).fake, shape, strides, dtype, device)


# --- the paths of the flattened arguments of a call from its parameters, and their descriptors


def descriptors_of(call_spec: CallSpec, signature: inspect.Signature) -> dict[str, Any]:
    """Return descriptors, by parameter, of exactly the calls that a description is true of."""
    flat = [leaf.cls if isinstance(leaf, WatchedPlaceholder) else leaf for leaf in call_spec.leaves]
    for number in call_spec.numbers:
        flat[number.position] = type(number.value)
    for spec in call_spec.inputs:
        flat[spec.position] = MetaTensorType(
            list(spec.dims),
            dtype=spec.sample.dtype,
            device=spec.sample.device,
            requires_grad=None if spec.any_grad else spec.sample.requires_grad,
            layout=spec.sample.layout,
        )
    args, kwargs = optree.tree_unflatten(call_spec.tree, flat)
    return dict(signature.bind(*args, **kwargs).arguments)


def argument_paths_of(
    signature: inspect.Signature, count: int, tree: optree.PyTreeSpec
) -> dict[int, tuple[Any, ...]]:
    """Return the path of each flattened argument from a parameter."""
    numbers = [_Place(i) for i in range(count)]
    args, kwargs = optree.tree_unflatten(tree, numbers)
    argument_paths: dict[int, tuple[Any, ...]] = {}
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        paths, leaves, _ = optree.tree_flatten_with_path(
            value, none_is_leaf=True, namespace=pytrees.NAMESPACE
        )
        for path, leaf in zip(paths, leaves, strict=True):
            argument_paths[leaf.index] = (name, *path)
    return argument_paths


def path_expression(path: Sequence[Any]) -> str:
    """Return the path of an argument in the user's spelling."""
    return str(path[0]) + "".join(f"[{entry!r}]" for entry in path[1:])


@dataclass(frozen=True)
class _Place:
    """Stand-in for a flattened argument whose path is looked up."""

    index: int


def guards_of_call_spec(call_spec: CallSpec, signature: inspect.Signature) -> Guards:
    """Return the guards of a program that was read from a file, for people."""
    return Guards.of(
        [*call_spec.guards(), SettingsAre(call_spec.settings)], names_in_call(call_spec, signature)
    )


def names_in_call(call_spec: CallSpec, signature: inspect.Signature) -> Names:
    """Return a function from the positions of flattened arguments to the user's spelling."""
    args, kwargs = optree.tree_unflatten(call_spec.tree, call_spec.leaves)
    argument_paths = argument_paths_of(signature, len(call_spec.leaves), call_spec.tree)
    texts = PathTexts(signature.bind(*args, **kwargs).arguments)
    return lambda position: texts(argument_paths[position])


# --- the guards of a call, and arguments that are the same tensor


def guards_on_arguments(
    flat: Sequence[Any], inputs: Sequence[InputSpec], numbers: Sequence[NumberSpec] = ()
) -> list[ArgumentGuard]:
    """Return a guard for each flattened argument.

    Args:
        flat: the flattened arguments, or the leaves of a ``CallSpec``.
        numbers: the numbers among them that are inputs.
    """
    specs = {spec.position: spec for spec in inputs}
    by_position = {spec.position: spec for spec in numbers}
    guards: list[ArgumentGuard] = []
    for i, value in enumerate(flat):
        if i in specs:
            guards.append(TensorMeta(i, specs[i]))
        elif i in by_position:
            guards.append(AnyNumber(i, by_position[i], value))
        elif isinstance(value, WatchedPlaceholder) or is_watched(value):
            guards.append(
                TypeIs(i, value.cls if isinstance(value, WatchedPlaceholder) else type(value))
            )
        else:
            guards.append(ValueIs(i, value))
    return guards


def conditions_among(guards: Iterable[Guard]) -> list[Condition]:
    return [guard.condition for guard in guards if isinstance(guard, ArgumentCondition)]


def guard_lines(guards: Sequence[Guard], named_dims: Mapping[str, Dim], count: int) -> GuardLines:
    """Return lines that return None if a guard fails, and the objects that they refer to.

    Args:
        count: the number of flattened arguments.
    """
    code = GuardCode(named_dims, count)
    code.add(guards)
    return code.lines, code.scope


def alias_tensors(
    inputs: Sequence[InputSpec], tracers: Sequence[Any], closure_tensors: Mapping[int, torch.Tensor]
) -> list[Any]:
    """Return the values that the function gets for its tensors: one object for each tensor.

    Args:
        closure_tensors: tensors that the function has from elsewhere, by id.
    """
    first: dict[int, Any] = dict(closure_tensors)
    return [
        first.setdefault(id(spec.sample), tracer)
        for spec, tracer in zip(inputs, tracers, strict=True)
    ]


# --- the facts of a call, by which a miss is explained


ANY = object()  # stands for each value that a program serves
STRUCTURE_PREFIX = "the structure of "
_ORDER, _PASSED = "the keys of dict", "the arguments"
FORM_PREFIXES = (_ORDER, _PASSED)  # any other difference is a better reason


def facts_of_call(
    guards: Iterable[ArgumentGuard],
    name: Names,
    settings: Sequence[Any],
    orders: Sequence[Any],
    passed: str,
    arguments: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the assumptions of a program for a call, by the user's names.

    Args:
        name: returns the user's spelling of an argument.
        orders: the key orders of the dicts among the arguments.
        passed: a text that shows which arguments are positional, and which are keywords.
    """
    facts: dict[str, Any] = {}
    for parameter, value in arguments.items():
        structure = _structure_text(value)
        if structure != _LEAF:
            facts[STRUCTURE_PREFIX + parameter] = UnquotedText(structure)
    for guard in guards:
        facts.update(guard.facts(name))
    for setting, value in zip(SETTINGS, settings, strict=True):
        facts[setting.name] = value
    facts[_PASSED] = UnquotedText(passed)
    for i, keys in enumerate(orders):
        facts[f"{_ORDER} {i}"] = UnquotedText(", ".join(map(repr, keys)))
    return facts


_LEAF = "_"
_MANY = 4  # the elements of a longer container are counted


def _structure_text(value: Any) -> str:
    """Return a text that shows the containers of an argument: ``[_, {'a': _}]``."""
    kind = type(value)
    if kind is dict and len(value) <= _MANY:
        parts = sorted(f"{key!r}: {_structure_text(x)}" for key, x in value.items())
        return f"{{{', '.join(parts)}}}"
    parts = [*map(_structure_text, value)] if kind in (list, tuple) else []
    if 0 < len(parts) <= _MANY and any(part != _LEAF for part in parts):
        inside = ", ".join(parts)
        return f"[{inside}]" if kind is list else f"({inside}{',' * (len(value) == 1)})"
    if kind in (list, tuple, dict):
        return f"a {kind.__name__} of {len(value)}"
    leaves, tree = pytrees.flatten(value)
    return _LEAF if tree.is_leaf() else f"a {kind.__name__} with {count_text(len(leaves), 'value')}"


def arguments_text(positional: int, keywords: Iterable[str]) -> str:
    """Return a text that shows positional and keyword arguments: ``(_, y=_)``."""
    return f"({', '.join([*['_'] * positional, *(f'{name}=_' for name in keywords)])})"
