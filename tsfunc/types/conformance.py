"""``check``: every place where a value does not have its type."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from tsfunc.types.annotation import attribute_types, from_annotation
from tsfunc.types.classes import field_names, is_rref_class, primitive_of
from tsfunc.types.descriptors import children_of
from tsfunc.types.dims import Dim, DimExpr
from tsfunc.types.generated import Fits, generate
from tsfunc.types.grammar import (
    DOUBLE,
    FLOAT,
    TSAllType,
    TSBuiltinClass,
    TSCustomClass,
    TSDict,
    TSEnum,
    TSFields,
    TSFuture,
    TSList,
    TSMetaType,
    TSModuleInterface,
    TSModuleType,
    TSNamedTuple,
    TSOptional,
    TSPrimitiveType,
    TSPytree,
    TSRRef,
    TSTensor,
    TSTuple,
    TSTupleOf,
    TSUnion,
    Value,
    assert_never,
)
from tsfunc.types.inference import module_type
from tsfunc.types.interfaces import missing_methods
from tsfunc.types.meta import MetaTensorType, on_device, tensor_text
from tsfunc.types.values import describe, entry_text, same_keys, same_value


@dataclass(frozen=True)
class Mismatch:
    """One place where a value does not have its type.

    Attributes:
        path: the place in Python's notation: ``x["w"][3]``.
        expected: the expected type.
        got: a description of the value.
    """

    path: str
    expected: str
    got: str

    def __str__(self) -> str:
        return f"{self.path}: expected {self.expected}, got {self.got}"


def check(value: Any, type_: TSAllType | Any, name: str = "x") -> list[Mismatch]:
    """Return every place where a value does not have a type; an empty list if it fits.

    Sizes of one name are equal within the whole type.

    Args:
        value: any value.
        type_: a type, or an annotation (see `from_annotation`).
        name: the value's name in the paths.

    Raises:
        AnnotationError: `type_` is not a type.

    Example:
        >>> from tsfunc.types import parse
        >>> weights = parse("Dict[str, List[f32[n, 64]]]")
        >>> for mismatch in check({"w": [torch.ones(10), torch.ones(3, 64)], "b": 1}, weights):
        ...     print(mismatch)
        x["w"][0]: expected f32[n, 64], got f32[10]
        x["b"]: expected List[f32[n, 64]], got 1 (int)

    Source: the checks of parameter binding and assignment in the TorchScript type system proposal.
    """
    if not isinstance(type_, TSModuleType):
        type_ = from_annotation(type_)
    return [] if predicate(type_)(value) else mismatches([(name, value, type_)])


@functools.lru_cache(maxsize=4096)
def predicate(type_: TSAllType) -> Fits:
    """Return a function that returns True only for values of a type; it can miss some of them."""
    return generate(type_, decide)


def decide(type_: TSAllType) -> Fits:
    """Return a function that returns True exactly for the values of a type."""
    return lambda value: not mismatches([("x", value, type_)])


def mismatches(values: Iterable[tuple[str, Any, TSAllType]]) -> list[Mismatch]:
    """Return the mismatches of named values; sizes of one name are equal in all of them."""
    context = _Run()
    for name, value, type_ in values:
        context.visit(value, type_, name)
    context.settle()
    return context.found


class _Run:
    """One check: the mismatches and the sizes of names found so far."""

    def __init__(self) -> None:
        self.found: list[Mismatch] = []
        self.sizes: dict[str, tuple[int, str]] = {}
        self.pending: list[tuple[DimExpr, int, torch.Tensor, str, TSTensor]] = []
        self.entered: set[tuple[int, type]] = set()

    def fail(self, path: str, expected: object, value: object) -> None:
        self.found.append(Mismatch(path, str(expected), describe(value)))

    def visit(self, value: Any, type_: TSAllType, path: str, shown: object = None) -> None:
        """Check one value; `viewed_state` is the Optional that contains the type."""
        expected = type_ if shown is None else shown
        match type_:
            case TSMetaType():
                return
            case TSPrimitiveType():
                own = primitive_of(value)
                if own != type_ and not (own == FLOAT and type_ == DOUBLE):
                    self.fail(path, expected, value)
            case TSOptional(element):
                if value is not None:
                    self.visit(value, element, path, type_)
            case TSList(element):
                if not isinstance(value, list):
                    return self.fail(path, expected, value)
                for i, item in enumerate(value):
                    self.visit(item, element, f"{path}[{i}]")
            case TSDict(key_type, item_type):
                if not isinstance(value, dict):
                    return self.fail(path, expected, value)
                for key, item in value.items():
                    self.visit(key, key_type, f"a key of {path}")
                    self.visit(item, item_type, f"{path}[{_spell(key)}]")
            case TSTuple(elements):
                if not isinstance(value, tuple) or len(value) != len(elements):
                    return self.fail(path, expected, value)
                for i, (item, element) in enumerate(zip(value, elements, strict=True)):
                    self.visit(item, element, f"{path}[{i}]")
            case TSNamedTuple(names, elements):
                if field_names(value) != names:
                    return self.fail(path, expected, value)
                for name, item, element in zip(names, value, elements, strict=True):
                    self.visit(item, element, f"{path}.{name}")
            case TSFuture(element):
                if not isinstance(value, torch.futures.Future):
                    return self.fail(path, expected, value)
                if value.done():
                    self.visit(_outcome(value), element, f"{path}.value()")
            case TSRRef(element):
                if not is_rref_class(type(value)):
                    return self.fail(path, expected, value)
                if value.is_owner():
                    self.visit(value.local_value(), element, f"{path}.local_value()")
            case TSTensor():
                self.tensor(value, type_, path, expected)
            case TSBuiltinClass(cls) | TSEnum(cls) | TSCustomClass(cls):
                if not is_instance(value, cls):
                    return self.fail(path, expected, value)
                if dataclasses.is_dataclass(cls):
                    self.fields(value, cls, path)
            case Value(wanted):
                if not same_value(wanted, value):
                    self.fail(path, expected, value)
            case TSUnion(alternatives):
                self.union(value, alternatives, path, expected)
            case TSTupleOf(element):
                if not isinstance(value, tuple):
                    return self.fail(path, expected, value)
                for i, item in enumerate(value):
                    self.visit(item, element, f"{path}[{i}]")
            case TSPytree(kind, entries, children):
                if not isinstance(value, kind) or (
                    kind not in (list, dict) and type(value) is not kind
                ):
                    return self.fail(path, expected, value)
                own_entries, items = children_of(value)
                by_entry = dict(zip(own_entries, items, strict=True))
                if not same_keys(entries, own_entries):
                    return self.fail(path, expected, value)
                for entry, child in zip(entries, children, strict=True):
                    self.visit(by_entry[entry], child, path + entry_text(kind, entry))
            case TSFields(cls, names, children):
                if not is_instance(value, cls) or not all(hasattr(value, name) for name in names):
                    return self.fail(path, expected, value)
                for name, child in zip(names, children, strict=True):
                    self.visit(getattr(value, name), child, f"{path}.{name}")
            case TSModuleInterface(cls):
                for name, what in missing_methods(type(value), cls):
                    self.found.append(Mismatch(f"{path}.{name}", *what))
            case TSModuleType():
                self.module(value, type_, path, expected)
            case _:
                assert_never(type_)

    def union(
        self, value: Any, alternatives: Iterable[TSAllType], path: str, expected: object
    ) -> None:
        """Take the first alternative that the value fits; add a mismatch if there is none."""
        for alternative in alternatives:
            trial = _Run()
            trial.sizes, trial.pending = dict(self.sizes), list(self.pending)
            trial.visit(value, alternative, path)
            if not trial.found:
                self.sizes, self.pending = trial.sizes, trial.pending
                return
        self.fail(path, expected, value)

    def fields(self, value: Any, cls: type, path: str) -> None:
        """Check the fields of a dataclass, not its other attributes."""
        if (id(value), cls) in self.entered:  # an object that contains itself
            return
        self.entered.add((id(value), cls))
        types = attribute_types(cls)
        for field in dataclasses.fields(cls):
            if hasattr(value, field.name):
                self.visit(getattr(value, field.name), types[field.name], f"{path}.{field.name}")

    def module(self, value: Any, type_: TSModuleType, path: str, expected: object) -> None:
        if not isinstance(value, torch.nn.Module) or type(value) is not type_.cls:
            return self.fail(path, expected, value)
        own = dict(module_type(value).attributes)
        for name, attribute in type_.attributes:
            got = own.pop(name, None)
            if got != attribute:
                text = "no such attribute" if got is None else str(got)
                self.found.append(Mismatch(f"{path}.{name}", str(attribute), text))
        for name, attribute in own.items():
            self.found.append(Mismatch(f"{path}.{name}", "no such attribute", str(attribute)))

    # --- tensors

    def tensor(self, value: Any, type_: TSTensor, path: str, expected: object) -> None:
        if not isinstance(value, torch.Tensor):
            return self.fail(path, expected, value)
        if not isinstance(value, type_.cls):
            got = f"{type(value).__name__} {_text(value, type_.meta)}"
            self.found.append(Mismatch(path, str(expected), got))
        elif not self.shape(value, type_, path) or not _has(value, type_.meta):
            wanted = self.with_sizes(type_, value.shape, expected)
            self.found.append(Mismatch(path, wanted, _text(value, type_.meta)))

    def shape(self, value: torch.Tensor, type_: TSTensor, path: str) -> bool:
        """Return True if the sizes fit. A name is bound by the first dim that has it."""
        shape = value.shape
        dims = type_.meta.dims_of_rank(len(shape))
        if dims is None:
            return False
        fits = all(size == dim for size, dim in zip(shape, dims, strict=True) if type(dim) is int)
        for axis, dim in enumerate(dims):
            if isinstance(dim, Dim):
                size, _ = self.sizes.setdefault(dim.name, (shape[axis], f"{path}.shape[{axis}]"))
                fits = fits and size == shape[axis] and dim.admits(shape[axis])
            elif isinstance(dim, DimExpr) and fits:
                self.pending.append((dim, shape[axis], value, path, type_))
        if fits and type_.meta.is_laid_out(value):
            for axis, step in enumerate(type_.meta.stride_forms):
                if isinstance(step, DimExpr):
                    self.pending.append((step, value.stride(axis), value, path, type_))
        return fits

    def settle(self) -> None:
        """Check computed sizes; a name that occurs only in expressions is solved for."""
        pending, before = self.pending, None
        while pending and len(pending) != before:
            before = len(pending)
            pending = [each for each in pending if not self._is_settled(*each)]
        for each in pending:
            self._computed_mismatch(*each[2:])

    def _is_settled(
        self, expression: DimExpr, size: int, value: torch.Tensor, path: str, type_: TSTensor
    ) -> bool:
        """Check a computed size, or bind its only unknown name; False if neither is possible."""
        known = {name: bound for name, (bound, _) in self.sizes.items()}
        if any(name not in known for name in expression.names):
            found = expression.solve(size, known)
            if found is None:
                return False
            name, solution = found
            if solution is not None:
                self.sizes[name] = solution, f"{path}, by {expression}"
                return True
            # The slope is 0: every size of the name gives the same value.
            fits = expression.evaluate({**known, name: 0}) == size
        else:
            try:
                fits = expression.evaluate(known) == size
            except ZeroDivisionError:
                fits = False
        if not fits:
            self._computed_mismatch(value, path, type_)
        return True

    def _computed_mismatch(self, value: torch.Tensor, path: str, type_: TSTensor) -> None:
        wanted = self.with_sizes(type_, value.shape, type_)
        self.found.append(Mismatch(path, wanted, _text(value, type_.meta)))

    def with_sizes(self, type_: TSTensor, shape: torch.Size, expected: object) -> str:
        """Return the expected type, with the places that bound the names of mismatched dims."""
        dims = type_.meta.dims_of_rank(len(shape)) or ()
        names: list[str] = []
        for size, dim in zip(shape, dims, strict=bool(dims)):
            if isinstance(dim, DimExpr):
                names += dim.names
            elif isinstance(dim, Dim) and self.sizes.get(dim.name, (size,))[0] != size:
                names.append(dim.name)
        known = [name for name in dict.fromkeys(names) if name in self.sizes]
        notes = [f"{name} = {self.sizes[name][0]} at {self.sizes[name][1]}" for name in known]
        return f"{expected} ({', '.join(notes)})" if notes else str(expected)


def is_instance(value: object, cls: type) -> bool:
    """Return ``isinstance``, also for classes that do not support it."""
    try:
        return isinstance(value, cls)
    except TypeError:
        return cls in type(value).__mro__


def _spell(key: object) -> str:
    return json.dumps(key) if type(key) is str else repr(key)


def _outcome(future: Any) -> object:
    try:
        return future.value()
    except Exception as error:  # the future's function raised an exception of any class
        return error


def _has(value: torch.Tensor, meta: MetaTensorType) -> bool:
    return (
        (meta.dtype is None or value.dtype == meta.dtype)
        and (meta.device is None or on_device(value.device, meta.device))
        and (meta.requires_grad is None or value.requires_grad == meta.requires_grad)
        and (meta.layout is None or value.layout == meta.layout)
        and meta.is_laid_out(value)
    )


def _text(value: torch.Tensor, meta: MetaTensorType) -> str:
    """Return the text of a tensor with the properties that its expected metadata has."""
    text = tensor_text(
        value.dtype,
        value.shape,
        None if meta.device is None else value.device,
        None if meta.requires_grad is None else value.requires_grad,
        None if meta.layout is None else value.layout,
    )
    spoken_of = meta.strides is not None or meta.memory_format is not None
    has_strides = spoken_of and value.layout == torch.strided
    return f"{text} strides{list(value.stride())}" if has_strides else text
