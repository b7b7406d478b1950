"""The check of values against types: every mismatch, with its place.

NOTE [one check, one report]
A check does not stop at the first mismatch. It adds mismatches to a `CheckContext`, so that one
error lists all of them. Most values fit, so generated code (``codegen``) runs first, and this check
runs only for a value that the code does not accept.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tsfunc import pytrees
from tsfunc.errors import AnnotationError
from tsfunc.tracebacks import folding
from tsfunc.types.annotation import attribute_types, class_scope, from_annotation
from tsfunc.types.classes import field_names, interface_methods, is_rref_class, primitive_of
from tsfunc.types.codegen import Fits, generate
from tsfunc.types.dims import Dim, DimForm
from tsfunc.types.grammar import (
    DOUBLE,
    FLOAT,
    NONE,
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
    TSType,
    TSUnion,
    Value,
    alternatives_of,
    assert_never,
)
from tsfunc.types.inference import module_type
from tsfunc.types.lattice import is_subtype
from tsfunc.types.meta import MetaTensorType, is_in_format, on_device
from tsfunc.types.sizes import DimExpr
from tsfunc.types.values import (
    Attribute,
    Path,
    children_of,
    describe,
    path_text,
    same_keys,
    same_value,
    tensor_text,
)

"""The path of a value: the name of the root, then optree's entries down to the leaf."""


@dataclass(frozen=True)
class Mismatch:
    """One place where a value does not have its type.

    Attributes:
        path: the place in Python's notation: ``x['w'][3].shape[0]``.
        expected: the expected type or property.
        got: a description of the value or the property.
    """

    path: str
    expected: str
    got: str

    def __str__(self) -> str:
        return f"{self.path}: expected {self.expected}, got {self.got}"


@folding()
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
        x['w'][0].shape: expected [n, 64], got [10]
        x['b']: expected a list, got 1 (int)

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
    roots = list(values)
    context = CheckContext({name: value for name, value, _ in roots})
    for name, value, type_ in roots:
        context.check(value, type_, (name,))
    return context.finish()


class Failure(NamedTuple):
    """A mismatch, and its depth, which selects the closest alternative of a union."""

    depth: tuple[int, bool]
    mismatch: Mismatch


class CheckContext:
    """The mismatches and the named sizes that one check has found so far.

    Args:
        roots: the checked values by name.
        dims: the named dims whose bounds are known before the check; the bounds of another name
            are those at each of its places.

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
        "_roots",
        "leaves",
        "sizes",
    )  # fmt: skip

    def __init__(self, roots: Mapping[str, object], dims: Mapping[str, Dim] | None = None) -> None:
        self._roots = roots
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
        """Add a mismatch of the value at `path`, in its attribute or item `part`."""
        mismatch = Mismatch(f"{path_text(path, self._roots)}{part}", str(expected), got)
        self._failures.append(Failure((len(path), bool(part)), mismatch))

    # --- types

    def check(self, value: Any, type_: TSAllType, path: Path) -> None:
        """Check one value; `path` leads to it."""
        match type_:
            # The types that descriptors are made of come first.
            case TSTensor(cls, meta):
                if cls is torch.Tensor or self._instance(value, cls, path):
                    self._tensor(value, meta, path)
            case TSPytree(kind, entries, children):
                if kind in (list, tuple):
                    self._items(value, kind, children, path)
                elif kind is dict:
                    self._keys(value, dict(zip(entries, children, strict=True)), path)
                else:
                    self._children(value, type_, path)
            case TSOptional() | TSUnion():
                self._union(value, type_, path)
            case Value(expected):
                self._literal(value, expected, path)
            case TSMetaType():
                return
            case TSPrimitiveType("None"):
                self._literal(value, None, path)
            case TSPrimitiveType():
                own = primitive_of(value)
                if own != type_ and not (own == FLOAT and type_ == DOUBLE):
                    self.fail(path, "", type_, describe(value))
            case TSBuiltinClass(cls) | TSEnum(cls) | TSCustomClass(cls):
                if self._instance(value, cls, path) and dataclasses.is_dataclass(cls):
                    self._declared_fields(value, cls, path)
            case TSFields(cls, names, children):
                if self._instance(value, cls, path):
                    self._fields(value, cls, dict(zip(names, children, strict=True)), path)
            case TSList(element):
                self._elements(value, list, element, path)
            case TSTupleOf(element):
                self._elements(value, tuple, element, path)
            case TSDict(key_type, item_type):
                if not isinstance(value, dict):
                    return self.fail(path, "", "a dict", describe(value))
                for key, item in value.items():
                    self.check(key, key_type, (f"a key of {path_text(path, self._roots)}",))
                    self.check(item, item_type, (*path, key))
            case TSTuple(elements):
                self._items(value, tuple, elements, path)
            case TSNamedTuple(names, elements):
                if field_names(value) != names:
                    expected = f"a named tuple of {', '.join(names)}"
                    return self.fail(path, "", expected, describe(value))
                for i, (item, element) in enumerate(zip(value, elements, strict=True)):
                    self.check(item, element, (*path, i))
            case TSFuture(element):
                if not isinstance(value, torch.futures.Future):
                    return self.fail(path, "", type_, describe(value))
                if value.done():
                    self.check(_outcome(value), element, (*path, Attribute("value()")))
            case TSRRef(element):
                if not is_rref_class(type(value)):
                    return self.fail(path, "", type_, describe(value))
                if value.is_owner():
                    held = value.local_value()
                    self.check(held, element, (*path, Attribute("local_value()")))
            case TSModuleInterface(cls):
                for name, (expected, got) in missing_methods(type(value), cls):
                    self.fail(path, f".{name}", expected, got)
            case TSModuleType():
                self._module(value, type_, path)
            case _:
                assert_never(type_)

    def _literal(self, value: Any, expected: object, path: Path) -> None:
        if value is not expected and not same_value(expected, value):
            text, got = describe(expected), describe(value)
            self.fail(path, "", f"the value {text}", f"another {got}" if got == text else got)

    def _instance(self, value: Any, cls: type, path: Path) -> bool:
        """Return True for an instance of a class; else add a mismatch."""
        # In Python a bool and the members of some enums are ints; in the language they are not.
        derived = cls in (int, float, str) and type(value) is not cls
        fits = is_instance(value, cls)
        if not fits or (derived and str(primitive_of(value)) != cls.__name__):
            self.fail(path, "", cls.__name__, describe(value))
            return False
        return True

    # --- containers

    def _elements(self, value: Any, kind: Any, element: TSType, path: Path) -> None:
        if not isinstance(value, kind):
            return self.fail(path, "", f"a {kind.__name__}", describe(value))
        for i, item in enumerate(value):
            self.check(item, element, (*path, i))

    def _items(self, value: Any, kind: Any, children: Sequence[TSType], path: Path) -> None:
        if not isinstance(value, kind):
            self.fail(path, "", f"a {kind.__name__}", describe(value))
        elif len(value) != len(children):
            expected = f"a {kind.__name__} of length {len(children)}"
            self.fail(path, "", expected, f"one of {len(value)}")
        else:
            for i, (item, child) in enumerate(zip(value, children, strict=True)):
                self.check(item, child, (*path, i))

    def _keys(self, value: Any, children: Mapping[Any, TSType], path: Path) -> None:
        """Check a dict with given keys: report each missing and each extra key."""
        if not isinstance(value, dict):
            return self.fail(path, "", "a dict", describe(value))
        own = {key: key for key in value}
        common = {key for key in children if key in own and same_value(key, own[key])}
        for key, child in children.items():
            if key in common:
                self.check(value[key], child, (*path, key))
            else:
                self.fail(path, f"[{key!r}]", "this key", "a dict without it")
        for key in value:
            if key not in common:
                self.fail(path, f"[{key!r}]", "no such key", describe(value[key]))

    def _children(self, value: Any, type_: TSPytree, path: Path) -> None:
        """Check a named tuple of a class, or a container registered with optree."""
        if type(value) is not type_.kind:
            return self.fail(path, "", f"a {type_.kind.__name__}", describe(value))
        entries, children = children_of(value)
        if not same_keys(entries, type_.entries) or entries != tuple(type_.entries):
            return self.fail(path, "", f"children {list(type_.entries)}", str(list(entries)))
        for entry, child, child_type in zip(entries, children, type_.children, strict=True):
            self.check(child, child_type, (*path, entry))

    def _fields(self, value: Any, cls: type, fields: Mapping[str, TSType], path: Path) -> None:
        entry_of = _entries(value)
        for name, type_ in fields.items():
            try:
                child = getattr(value, name)
            except AttributeError:
                got = f"an instance of {cls.__name__} without it"
                self.fail(path, f".{name}", "this attribute", got)
            else:
                self.check(child, type_, (*path, entry_of(name, child)))

    def _declared_fields(self, value: Any, cls: type, path: Path) -> None:
        """Check the fields of a dataclass that an instance has, not its other attributes."""
        if (id(value), cls) in self._entered:  # an object that contains itself
            return
        self._entered.add((id(value), cls))
        types = attribute_types(cls)
        names = [each.name for each in dataclasses.fields(cls) if hasattr(value, each.name)]
        self._fields(value, cls, {name: types[name] for name in names}, path)

    def _module(self, value: Any, type_: TSModuleType, path: Path) -> None:
        if not isinstance(value, torch.nn.Module) or type(value) is not type_.cls:
            return self.fail(path, "", type_, describe(value))
        own = dict(module_type(value).attributes)
        for name, attribute in type_.attributes:
            got = own.pop(name, None)
            if got != attribute:
                self.fail(path, f".{name}", attribute, str(got or "no such attribute"))
        for name, attribute in own.items():
            self.fail(path, f".{name}", "no such attribute", str(attribute))

    # --- unions

    def _union(self, value: Any, union: TSUnion | TSOptional, path: Path) -> None:
        """Take the first alternative that fits, given the names bound so far."""
        alternatives = alternatives_of(union)
        if value is None and NONE in alternatives:
            return
        outside = (len(path), False)
        closest = []
        for alternative in alternatives:
            if alternative == NONE:
                continue
            trial = self._fork()
            trial.check(value, alternative, path)
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
        trial = CheckContext(self._roots, self._dims)
        trial.sizes, trial.leaves = dict(self.sizes), dict(self.leaves)
        trial._binding_paths, trial._pending = dict(self._binding_paths), list(self._pending)
        trial._entered = set(self._entered)
        return trial

    def _adopt(self, trial: CheckContext) -> None:
        """Take over the state of a fork of this context, without its mismatches."""
        self.sizes, self.leaves, self._entered = trial.sizes, trial.leaves, trial._entered
        self._binding_paths, self._pending = trial._binding_paths, trial._pending

    # --- tensors

    def _tensor(self, value: Any, meta: MetaTensorType, path: Path) -> None:
        if not isinstance(value, torch.Tensor):
            return self.fail(path, "", f"a tensor, {meta}", describe(value))
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
        """Bind a named dim at its first place; check it at the others."""
        known = self.sizes.get(dim.name)
        if known is not None and known != size:
            return self.fail(path, part, f"{known} ({self._bound_at(dim.name)})", str(size))
        if known is None:
            self.sizes[dim.name] = size
            self._binding_paths[dim.name] = (path, part)
            dim = self._dims.get(dim.name, dim)
        elif dim.name in self._dims:  # all of its bounds were checked at its first place
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
        wanted = meta.memory_format
        if wanted is not None and not is_in_format(value, wanted):
            self.fail(path, "", wanted, f"strides {_brackets(strides)}")

    # --- sizes that are computed from others

    def _bound_at(self, name: str) -> str:
        """Return a text with the place that bound a named dim."""
        path, part = self._binding_paths[name]
        return f"{name} is {self.sizes[name]} at {path_text(path, self._roots)}{part}"

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
        known = [self._bound_at(name) for name in expression.names if name in self.sizes]
        because = ", ".join(known)
        if len(known) < len(expression.names):
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


# --- the places of values


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
    entries, children = children_of(value)
    by_value = {id(child): entry for child, entry in zip(children, entries, strict=True)}

    def entry(name: str, child: Any) -> Any:
        return name if name in entries else by_value.get(id(child), Attribute(name))

    return entry


def is_instance(value: object, cls: type) -> bool:
    """Return ``isinstance``, also for classes that do not support it."""
    try:
        return isinstance(value, cls)
    except TypeError:
        return cls in type(value).__mro__


def _outcome(future: Any) -> object:
    try:
        return future.value()
    except Exception as error:  # the future's function raised an exception of any class
        return error


def _brackets(dims: Iterable[object]) -> str:
    return tensor_text(None, dims)[6:]


# --- interfaces


def missing_methods(cls: type, interface: type) -> list[tuple[str, tuple[str, str]]]:
    """Return the methods of an interface that a class lacks or has with other types.

    A class that is derived from the interface has its methods. Another class must have each method
    under its name, accept the arguments of the interface, and return a subtype of its result.
    """
    differences = []
    for name, wanted in interface_methods(interface).items():
        own = inspect.getattr_static(cls, name, None)
        expected = f"a method {name}{inspect.signature(wanted)}"
        if not callable(own) or own is wanted:
            differences.append((name, (expected, f"none in {cls.__name__}")))
        elif not _accepts(cls, own, interface, wanted):
            got = f"{name}{inspect.signature(own)} of {cls.__name__}"
            differences.append((name, (expected, got)))
    return differences


def _accepts(cls: type, own: Any, interface: type, wanted: Any) -> bool:
    ours, theirs = inspect.signature(own), inspect.signature(wanted)
    arguments = list(theirs.parameters.values())[1:]
    positional = [p for p in arguments if p.kind is not p.KEYWORD_ONLY]
    named = {p.name: p for p in arguments if p.kind is p.KEYWORD_ONLY}
    try:
        bound = ours.bind(None, *positional, **named).arguments
    except TypeError:
        return False
    pairs = [
        (parameter.annotation, ours.parameters[name].annotation)
        for name, parameter in list(bound.items())[1:]
        if isinstance(parameter, inspect.Parameter)
    ]
    returns = (ours.return_annotation, theirs.return_annotation)
    scopes = class_scope(interface), class_scope(cls)
    return all(_is_below(one, other, *scopes) for one, other in pairs) and _is_below(
        *returns, *reversed(scopes)
    )


def _is_below(one: Any, other: Any, one_scope: Any, other_scope: Any) -> bool:
    """Return True if an annotation is a subtype of another, or one of them is missing."""
    if inspect.Parameter.empty in (one, other):
        return True
    try:
        return is_subtype(from_annotation(one, one_scope), from_annotation(other, other_scope))
    except AnnotationError:
        return True
