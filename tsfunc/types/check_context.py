"""The state of a check of values, and the parts of checks that types share.

NOTE [one check, one report]
A check does not stop at the first mismatch. A check adds mismatches to a ``CheckContext``, so that
one error lists all of them. Most values fit, so generated code (``check_codegen``) runs first, and
this check runs only for a value that the code does not accept.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from tsfunc import pytrees
from tsfunc.types.dims import Dim, DimForm
from tsfunc.types.meta import MetaTensorType, is_in_format, on_device
from tsfunc.types.sizes import DimExpr
from tsfunc.types.values import (
    Attribute,
    Path,
    container_children,
    describe,
    is_array,
    path_text,
    same_keys,
    same_value,
    tensor_text,
)


class Checked(Protocol):
    """The part of a type that a check uses."""

    def check(self, value: Any, path: Path, context: CheckContext, /) -> None:
        """Add every mismatch between a value and this type."""


@dataclass(frozen=True)
class Mismatch:
    """A part of a value that does not have its type.

    Attributes:
        path: the path in Python's notation: ``x['w'][3].shape[0]``.
        expected: the expected type or property.
        got: a description of the value or the property.
    """

    path: str
    expected: str
    got: str

    def __str__(self) -> str:
        return f"{self.path}: expected {self.expected}, got {self.got}"


class Failure(NamedTuple):
    """A mismatch, and its depth, which selects the closest alternative of a union."""

    depth: tuple[int, bool]
    mismatch: Mismatch


class CheckContext(abc.ABC):
    """The mismatches and the named sizes that one check has found so far.

    Args:
        roots: the checked values by name.
        dims: the named dims whose bounds are known before the check; the bounds of another name
            are those at each of its paths.

    Attributes:
        sizes: the size of each named dim.
        leaves: the metadata that describes each tensor, by the tensor's path.
    """

    __slots__ = (
        "_binding_paths",
        "_dims",
        "_entered",
        "_failures",
        "_pending",
        "leaves",
        "roots",
        "sizes",
    )  # fmt: skip

    def __init__(self, roots: Mapping[str, object], dims: Mapping[str, Dim] | None = None) -> None:
        self.roots = roots
        self._dims = {} if dims is None else dims
        self.sizes: dict[str, int] = {}
        self.leaves: dict[Path, MetaTensorType] = {}
        self._binding_paths: dict[str, tuple[Path, str]] = {}
        self._pending: list[tuple[Path, str, DimExpr, int]] = []
        self._failures: list[Failure] = []
        self._entered: set[tuple[int, type]] = set()

    def finish(self) -> list[Mismatch]:
        """Check the sizes that are computed from others; return all mismatches, each once."""
        self._check_expressions()
        return list(dict.fromkeys(failure.mismatch for failure in self._failures))

    def fail(self, path: Path, part: str, expected: object, got: str) -> None:
        """Add a mismatch of the value at ``path``, in its attribute or item ``part``."""
        mismatch = Mismatch(f"{path_text(path, self.roots)}{part}", str(expected), got)
        self._failures.append(Failure((len(path), bool(part)), mismatch))

    # --- single values

    def literal(self, value: Any, expected: object, path: Path) -> None:
        if value is not expected and not same_value(expected, value):
            text, got = describe(expected), describe(value)
            self.fail(path, "", f"the value {text}", f"another {got}" if got == text else got)

    def instance(self, value: Any, cls: type, path: Path) -> bool:
        """True for an instance of a class; else add a mismatch."""
        # In Python a bool and the members of some enums are ints; in the language they are not.
        other = cls in (int, float, str) and isinstance(value, bool | enum.Enum)
        if other or not is_instance(value, cls):
            self.fail(path, "", cls.__name__, describe(value))
            return False
        return True

    # --- containers

    def elements(self, value: Any, kind: Any, element: Checked, path: Path) -> None:
        if not isinstance(value, kind):
            return self.fail(path, "", f"a {kind.__name__}", describe(value) + _advice(value))
        for i, item in enumerate(value):
            element.check(item, (*path, i), self)

    def items(self, value: Any, kind: Any, children: Sequence[Checked], path: Path) -> None:
        if not isinstance(value, kind):
            self.fail(path, "", f"a {kind.__name__}", describe(value) + _advice(value))
        elif len(value) != len(children):
            expected = f"a {kind.__name__} of length {len(children)}"
            self.fail(path, "", expected, f"one of {len(value)}")
        else:
            for i, (item, child) in enumerate(zip(value, children, strict=True)):
                child.check(item, (*path, i), self)

    def keys(self, value: Any, children: Mapping[Any, Checked], path: Path) -> None:
        """Check a dict with given keys: report each missing and each extra key."""
        if not isinstance(value, dict):
            return self.fail(path, "", "a dict", describe(value))
        keys_by_value = {key: key for key in value}
        common = {
            key for key in children if key in keys_by_value and same_value(key, keys_by_value[key])
        }
        for key, child in children.items():
            if key in common:
                child.check(value[key], (*path, key), self)
            else:
                self.fail(path, f"[{key!r}]", "this key", "a dict without it")
        for key in value:
            if key not in common:
                self.fail(path, f"[{key!r}]", "no such key", describe(value[key]))

    def children(
        self, value: Any, kind: type, entries: Sequence[Any], types: Sequence[Checked], path: Path
    ) -> None:
        """Check a named tuple of a class, or a container registered with optree."""
        if type(value) is not kind:
            return self.fail(path, "", f"a {kind.__name__}", describe(value))
        got_entries, children = container_children(value)
        if not same_keys(got_entries, entries) or got_entries != tuple(entries):
            return self.fail(path, "", f"children {list(entries)}", str(list(got_entries)))
        for entry, child, type_ in zip(got_entries, children, types, strict=True):
            type_.check(child, (*path, entry), self)

    def fields(self, value: Any, cls: type, fields: Mapping[str, Checked], path: Path) -> None:
        entry_of = _entries(value)
        for name, type_ in fields.items():
            try:
                child = getattr(value, name)
            except AttributeError:
                got = f"an instance of {cls.__name__} without it"
                self.fail(path, f".{name}", "this attribute", got)
            else:
                type_.check(child, (*path, entry_of(name, child)), self)

    def declared_fields(self, value: Any, cls: type, path: Path) -> None:
        """Check the fields of a dataclass that an instance has, not its other attributes."""
        if (id(value), cls) not in self._entered:  # else an object that contains itself
            self._entered.add((id(value), cls))
            self.fields(value, cls, self.types_of_fields(value, cls), path)

    # --- classes, whose annotations are types

    @abc.abstractmethod
    def types_of_fields(self, value: Any, cls: type) -> Mapping[str, Checked]:
        """Return the declared types of the fields of a dataclass that an instance has."""

    @abc.abstractmethod
    def methods(self, value: Any, interface: type, path: Path) -> None:
        """Report the methods of an interface that the class of a value lacks."""

    @abc.abstractmethod
    def attributes_of_module(self, module: torch.nn.Module) -> dict[str, Any]:
        """Return the types of a module's attributes."""

    # --- unions

    def first_that_fits(
        self, value: Any, alternatives: Sequence[Checked], union: object, path: Path
    ) -> None:
        """Take the first alternative that fits, given the names bound so far."""
        outside = (len(path), False)
        closest = []
        for alternative in alternatives:
            trial = self._fork()
            alternative.check(value, path, trial)
            if not trial._failures:
                return self._adopt(trial)
            if min(failure.depth for failure in trial._failures) > outside:
                closest.append(trial)
        # If only one alternative fits the outside of the value, its mismatches are the most
        # specific.
        if len(closest) == 1:
            self._adopt(closest[0])
            self._failures.extend(closest[0]._failures)
        else:
            self.fail(path, "", union, describe(value))

    def _fork(self) -> CheckContext:
        """Return a context with the same state, for an alternative that may not fit."""
        trial = type(self)(self.roots, self._dims)
        trial.sizes, trial.leaves = dict(self.sizes), dict(self.leaves)
        trial._binding_paths, trial._pending = dict(self._binding_paths), list(self._pending)
        trial._entered = set(self._entered)
        return trial

    def _adopt(self, trial: CheckContext) -> None:
        """Take over the state of a fork of this context, without its mismatches."""
        self.sizes, self.leaves, self._entered = trial.sizes, trial.leaves, trial._entered
        self._binding_paths, self._pending = trial._binding_paths, trial._pending

    # --- tensors

    def tensor(self, value: Any, meta: MetaTensorType, path: Path) -> None:
        if not isinstance(value, torch.Tensor):
            note = "; torch.from_numpy makes a tensor of it" if is_array(value) else ""
            return self.fail(path, "", f"a tensor, {meta}", describe(value) + note)
        self.leaves[path] = meta
        if meta.dtype is not None and value.dtype != meta.dtype:
            self.fail(path, ".dtype", meta.dtype, str(value.dtype))
        if meta.shape is not None:
            self._shape(value, meta, path)
        if meta.device is not None and not on_device(value.device, meta.device):
            self.fail(path, ".device", meta.device, str(value.device))
        if meta.requires_grad is not None and value.requires_grad != meta.requires_grad:
            self.fail(path, ".requires_grad", meta.requires_grad, str(value.requires_grad))
        if meta.layout is not None and value.layout != meta.layout:
            self.fail(path, ".layout", meta.layout, str(value.layout))
        elif meta.strides is not None or meta.memory_format is not None:
            self._memory(value, meta, path)

    def _shape(self, value: torch.Tensor, meta: MetaTensorType, path: Path) -> None:
        shape = value.shape
        forms = meta.dims_of_rank(len(shape))
        if forms is None:
            expected = meta.dims if meta.dims is not None else (..., *meta.trailing)
            return self.fail(path, ".shape", _brackets(expected), _brackets(shape))
        for axis, (form, size) in enumerate(zip(forms, shape, strict=True)):
            self._size(form, size, f".shape[{axis}]", path)

    def _size(self, form: DimForm, size: int, part: str, path: Path) -> None:
        if isinstance(form, Dim):
            self._named_size(form, size, part, path)
        elif isinstance(form, DimExpr):
            self._pending.append((path, part, form, size))
        elif form is not None and form != size:
            self.fail(path, part, form, str(size))

    def _named_size(self, dim: Dim, size: int, part: str, path: Path) -> None:
        """Bind a named dim at its first path; check it at the others."""
        bound = self.sizes.get(dim.name)
        if bound is not None and bound != size:
            return self.fail(path, part, f"{bound} ({self._bound_at(dim.name)})", str(size))
        if bound is None:
            self.sizes[dim.name] = size
            self._binding_paths[dim.name] = (path, part)
            dim = self._dims.get(dim.name, dim)
        elif dim.name in self._dims:  # all of its bounds were checked at its first path
            return
        if not dim.admits(size):
            self.fail(path, part, dim, str(size))

    def _memory(self, value: torch.Tensor, meta: MetaTensorType, path: Path) -> None:
        """Check the strides and the memory format of a tensor. A sparse tensor has neither."""
        if value.layout != torch.strided:
            expected = meta.memory_format or f"strides {list(meta.strides or ())}"
            return self.fail(path, ".layout", expected, str(value.layout))
        strides, forms = value.stride(), meta.stride_forms
        if forms and len(strides) != len(forms):
            self.fail(path, ".stride()", _brackets(forms), _brackets(strides))
        for axis, (form, step) in enumerate(zip(forms, strides, strict=False)):
            self._size(form, step, f".stride()[{axis}]", path)
        memory_format = meta.memory_format
        if memory_format is not None and not is_in_format(value, memory_format):
            self.fail(path, "", memory_format, f"strides {_brackets(strides)}")

    # --- sizes that are computed from others

    def _bound_at(self, name: str) -> str:
        """Return a text with the path that bound a named dim."""
        path, part = self._binding_paths[name]
        return f"{name} is {self.sizes[name]} at {path_text(path, self.roots)}{part}"

    def _check_expressions(self) -> None:
        """Check the computed sizes; a name that no shape has as a dim is solved for."""
        pending, before = self._pending, None
        while pending and len(pending) != before:
            before = len(pending)
            pending = [each for each in pending if not self._is_settled(*each)]
        for path, part, expression, size in pending:
            missing = ", ".join(name for name in expression.names if name not in self.sizes)
            self.fail(path, part, expression, f"{size}: the call has no {missing}")

    def _is_settled(self, path: Path, part: str, expression: DimExpr, size: int) -> bool:
        """Check a computed size, or bind its only unknown name; False if neither is possible."""
        places = [self._bound_at(name) for name in expression.names if name in self.sizes]
        because = ", ".join(places)
        if len(places) < len(expression.names):
            solved = expression.solve(size, self.sizes)
            if solved is None:
                return False
            name, solution = solved
            if solution is not None:
                self.sizes[name] = solution
                self._binding_paths[name] = (path, f"{part} = {expression}")
                return True
            if {expression.evaluate({**self.sizes, name: each}) for each in (0, 1)} == {size}:
                got = f"{size}: {expression} is {size} for every {name} ({because}), so {name} "
                self.fail(path, part, expression, f"{got}can't be determined")
            else:
                self.fail(path, part, expression, f"{size}: no size {name} gives it")
            return True
        try:
            expected = expression.evaluate(self.sizes)
        except ZeroDivisionError:
            what = f"{expression}, which divides by zero ({because})"
            self.fail(path, part, what, str(size))
            return True
        if expected != size:
            self.fail(path, part, f"{expression} = {expected} ({because})", str(size))
        return True


# --- the paths of values


def _entries(value: Any) -> Callable[[str, Any], Any]:
    """Return a function from the name and value of an attribute to its entry in a path.

    An object can be a container for optree, and its attribute a child of it.
    """
    try:
        is_leaf = pytrees.structure_of(value).type is None
    except RecursionError:  # it contains itself, so it has no leaves
        is_leaf = True
    if is_leaf:
        return lambda name, child: Attribute(name)
    entries, children = container_children(value)
    by_value = {id(child): entry for child, entry in zip(children, entries, strict=True)}

    def entry(name: str, child: Any) -> Any:
        return name if name in entries else by_value.get(id(child), Attribute(name))

    return entry


def is_instance(value: object, cls: type) -> bool:
    """Return ``isinstance``, even for classes that do not support it."""
    try:
        return isinstance(value, cls)
    except TypeError:
        return cls in type(value).__mro__


def _brackets(dims: Iterable[object]) -> str:
    return tensor_text(None, dims).removeprefix("tensor")


def _advice(value: Any) -> str:
    """Return the descriptor of a tensor in the place of a list or a tuple."""
    if not isinstance(value, torch.Tensor) or value.is_nested:
        return ""
    return f"; a tensor of this shape is MetaTensorType({list(value.shape)})"
