"""Checks: a descriptor compiled to a function that finds what a value breaks.

NOTE [one check, one report]
A check never stops at the first mismatch: it adds to the `Run` that it is given, so that one
error lists all. Text is made only for what failed; a call that fits pays for comparisons alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch

from tsfunc.types.descriptors import (
    Anything,
    Descriptor,
    DictOf,
    InstanceOf,
    ListOf,
    Nested,
    OneOf,
    TupleOf,
    Value,
    children_of,
    entry_text,
)
from tsfunc.types.dims import Dim, DimExpr, DimForm
from tsfunc.types.grammar import assert_never
from tsfunc.types.meta import MetaTensorType, on_device, tensor_text
from tsfunc.types.values import describe, same_value

Path: TypeAlias = tuple[Any, ...]
"""The parameter's name, then optree's entries down to the leaf."""


class Failure(NamedTuple):
    """One mismatch: how deep it lies (to tell which alternative came closest), and its line."""

    depth: tuple[int, bool]
    line: str


class Run:
    """What one check of one call has found so far."""

    __slots__ = ("arguments", "failures", "leaves", "pending", "places", "sizes")

    def __init__(self, arguments: Mapping[str, object]) -> None:
        self.arguments = arguments
        self.sizes: dict[str, int] = {}
        self.places: dict[str, tuple[Path, int]] = {}
        self.leaves: dict[Path, MetaTensorType] = {}
        self.pending: list[tuple[Path, int, DimExpr, int]] = []
        self.failures: list[Failure] = []

    def fail(self, path: Path, part: str, what: str) -> None:
        """Add a mismatch of what lies at `path`, in its attribute or item `part`."""
        line = f"{place_text(path, self.arguments)}{part}: {what}"
        self.failures.append(Failure((len(path), bool(part)), line))

    def bound_at(self, name: str) -> str:
        """Where a named dim got its size."""
        path, axis = self.places[name]
        return f"{name} is {self.sizes[name]} at {place_text(path, self.arguments)}.shape[{axis}]"

    def fork(self) -> Run:
        """A run that starts from what this one knows, for an alternative that may not fit."""
        run = Run(self.arguments)
        run.sizes.update(self.sizes)
        run.places.update(self.places)
        run.leaves.update(self.leaves)
        run.pending.extend(self.pending)
        return run

    def adopt(self, other: Run) -> None:
        """Go on from what a fork of this run has found; its failures are not taken over."""
        self.sizes, self.places = other.sizes, other.places
        self.leaves, self.pending = other.leaves, other.pending


Check: TypeAlias = Callable[[Any, Path, Run], None]


def place_text(path: Path, arguments: Mapping[str, object]) -> str:
    """A path as Python would write it: ``params['w'][0]``, ``state.step``."""
    text, value = str(path[0]), arguments.get(path[0])
    for entry in path[1:]:
        text += entry_text(type(value), entry)
        try:
            entries, children = children_of(value)
            value = children[entries.index(entry)]
        except ValueError:  # the value has no such child: the rest is shown by its entries alone
            value = None
    return text


def compile_check(descriptor: Descriptor, dims: Mapping[str, Dim]) -> Check | None:
    """The check of one descriptor; None if it promises nothing. `dims` has all the bounds."""
    match descriptor:
        case MetaTensorType():
            return _tensor_check(descriptor, dims)
        case Anything():
            return None
        case InstanceOf(cls):
            return _class_check(cls)
        case Value(value):
            return _value_check(value)
        case ListOf(element):
            return _sequence_check(list, compile_check(element, dims))
        case TupleOf(element):
            return _sequence_check(tuple, compile_check(element, dims))
        case DictOf(key, item):
            return _dict_check(compile_check(key, dims), compile_check(item, dims))
        case OneOf():
            return _one_of_check(descriptor, dims)
        case Nested(kind, entries, children):
            checks = [compile_check(child, dims) for child in children]
            return _nested_check(kind, dict(zip(entries, checks, strict=True)))
        case _:
            assert_never(descriptor)


# --- tensors


def _tensor_check(meta: MetaTensorType, dims: Mapping[str, Dim]) -> Check:
    dtype, device, grad, layout = meta.dtype, meta.device, meta.requires_grad, meta.layout
    check_shape = None if meta.dims is None else _shape_check(meta.dims, dims)

    def check(value: Any, path: Path, run: Run) -> None:
        if not isinstance(value, torch.Tensor):
            run.fail(path, "", f"promised a tensor, {meta}, came {describe(value)}")
            return
        run.leaves[path] = meta
        if dtype is not None and value.dtype != dtype:
            run.fail(path, ".dtype", f"promised {dtype}, came {value.dtype}")
        if check_shape is not None:
            check_shape(value, path, run)
        if device is not None and not on_device(value.device, device):
            run.fail(path, ".device", f"promised {device}, came {value.device}")
        if grad is not None and value.requires_grad != grad:
            run.fail(path, ".requires_grad", f"promised {grad}, came {value.requires_grad}")
        if layout is not None and value.layout != layout:
            run.fail(path, ".layout", f"promised {layout}, came {value.layout}")

    return check


def _shape_check(forms: tuple[DimForm, ...], dims: Mapping[str, Dim]) -> Check:
    rank = len(forms)
    fixed = [(axis, form) for axis, form in enumerate(forms) if isinstance(form, int)]
    named = [(axis, dims[form.name]) for axis, form in enumerate(forms) if isinstance(form, Dim)]
    computed = [(axis, form) for axis, form in enumerate(forms) if isinstance(form, DimExpr)]

    def check(value: Any, path: Path, run: Run) -> None:
        shape = value.shape
        if len(shape) != rank:
            promised, came = tensor_text(None, forms)[6:], tensor_text(None, shape)[6:]
            run.fail(path, ".shape", f"promised {promised}, came {came}")
            return
        for axis, size in fixed:
            if shape[axis] != size:
                run.fail(path, f".shape[{axis}]", f"promised {size}, came {shape[axis]}")
        for axis, dim in named:
            _bind(dim, shape[axis], axis, path, run)
        for axis, expression in computed:
            run.pending.append((path, axis, expression, shape[axis]))

    return check


def _bind(dim: Dim, size: int, axis: int, path: Path, run: Run) -> None:
    """The first occurrence of a named dim gives its size; the others must agree."""
    known = run.sizes.get(dim.name)
    if known is None:
        run.sizes[dim.name] = size
        run.places[dim.name] = (path, axis)
        if not dim.admits(size):
            run.fail(path, f".shape[{axis}]", f"promised {dim}, came {size}")
    elif known != size:
        here = f"{place_text(path, run.arguments)}.shape[{axis}]"
        line = f"{run.bound_at(dim.name)} but {size} at {here}"
        run.failures.append(Failure((len(path), True), line))


def check_expressions(run: Run) -> None:
    """Check the computed dims, once the call has bound all the names that it binds."""
    for path, axis, expression, size in run.pending:
        known = [name for name in expression.names if name in run.sizes]
        because = ", ".join(map(run.bound_at, known))
        if len(known) < len(expression.names):
            missing = ", ".join(name for name in expression.names if name not in run.sizes)
            what = f"promised {expression}, which can't be computed: the call has no {missing}"
            run.fail(path, f".shape[{axis}]", what)
            continue
        try:
            expected = expression.evaluate(run.sizes)
        except ZeroDivisionError:
            what = f"promised {expression}, which divides by zero ({because}), came {size}"
            run.fail(path, f".shape[{axis}]", what)
            continue
        if expected != size:
            what = f"promised {expression} = {expected} ({because}), came {size}"
            run.fail(path, f".shape[{axis}]", what)


# --- classes and values


def _class_check(cls: type) -> Check:
    def check(value: Any, path: Path, run: Run) -> None:
        # In Python a bool is an int; to a program that computes with it, it is none.
        if not isinstance(value, cls) or (cls is int and isinstance(value, bool)):
            run.fail(path, "", f"promised {cls.__name__}, came {describe(value)}")

    return check


def _value_check(promised: object) -> Check:
    def check(value: Any, path: Path, run: Run) -> None:
        if value is not promised and not same_value(promised, value):
            run.fail(path, "", f"promised the value {describe(promised)}, came {_other(value)}")

    def _other(value: object) -> str:
        same_text = describe(value) == describe(promised)
        return f"another {describe(value)}" if same_text else describe(value)

    return check


# --- containers and alternatives


def _sequence_check(kind: type[list[Any]] | type[tuple[Any, ...]], element: Check | None) -> Check:
    def check(value: Any, path: Path, run: Run) -> None:
        if not isinstance(value, kind):
            run.fail(path, "", f"promised a {kind.__name__}, came {describe(value)}")
        elif element is not None:
            for i, item in enumerate(value):
                element(item, (*path, i), run)

    return check


def _dict_check(check_key: Check | None, check_item: Check | None) -> Check:
    def check(value: Any, path: Path, run: Run) -> None:
        if not isinstance(value, dict):
            run.fail(path, "", f"promised a dict, came {describe(value)}")
            return
        for key, item in value.items():
            if check_key is not None:
                check_key(key, (f"a key of {place_text(path, run.arguments)}",), run)
            if check_item is not None:
                check_item(item, (*path, key), run)

    return check


def _nested_check(kind: type[Any], checks: Mapping[Any, Check | None]) -> Check:
    if kind in (list, tuple):
        return _items_check(kind, checks)
    return _keys_check(checks) if kind is dict else _children_check(kind, checks)


def _items_check(kind: type[Any], checks: Mapping[int, Check | None]) -> Check:
    name, size = kind.__name__, len(checks)
    steps = [(i, check) for i, check in checks.items() if check is not None]

    def check(value: Any, path: Path, run: Run) -> None:
        if not isinstance(value, kind):
            run.fail(path, "", f"promised a {name}, came {describe(value)}")
        elif len(value) != size:
            run.fail(path, "", f"promised a {name} of length {size}, came one of {len(value)}")
        else:
            for i, check_item in steps:
                check_item(value[i], (*path, i), run)

    return check


def _keys_check(checks: Mapping[Any, Check | None]) -> Check:
    steps = [(key, check) for key, check in checks.items() if check is not None]

    def check(value: Any, path: Path, run: Run) -> None:
        if not isinstance(value, dict):
            run.fail(path, "", f"promised a dict, came {describe(value)}")
        elif value.keys() != checks.keys():
            _report_keys(checks, value, path, run)
        else:
            for key, check_item in steps:
                check_item(value[key], (*path, key), run)

    return check


def _children_check(kind: type[Any], checks: Mapping[Any, Check | None]) -> Check:
    """For named tuples, and for containers that optree was taught."""

    def check(value: Any, path: Path, run: Run) -> None:
        if type(value) is not kind:
            run.fail(path, "", f"promised a {kind.__name__}, came {describe(value)}")
            return
        entries, children = children_of(value)
        if entries != tuple(checks):
            run.fail(path, "", f"promised children {list(checks)}, came {list(entries)}")
            return
        for entry, check_child, child in zip(entries, checks.values(), children, strict=True):
            if check_child is not None:
                check_child(child, (*path, entry), run)

    return check


def _report_keys(
    checks: Mapping[Any, Check | None], value: dict[Any, Any], path: Path, run: Run
) -> None:
    """Name each key that lacks or is too many, and check those that are right."""
    for key, check in checks.items():
        if key not in value:
            run.fail(path, f"[{key!r}]", "promised, but the dict that came has no such key")
        elif check is not None:
            check(value[key], (*path, key), run)
    for key in value:
        if key not in checks:
            run.fail(path, f"[{key!r}]", f"not promised, came {describe(value[key])}")


def _one_of_check(one_of: OneOf, dims: Mapping[str, Dim]) -> Check | None:
    rest = [each for each in one_of.alternatives if each != Value(None)]
    optional = len(rest) < len(one_of.alternatives)
    checks = [compile_check(each, dims) for each in rest]
    found = [check for check in checks if check is not None]
    if len(found) < len(checks):
        return None  # one of them promises nothing
    check_rest = _only_check(one_of, found[0]) if len(found) == 1 else _first_check(one_of, found)

    def check(value: Any, path: Path, run: Run) -> None:
        if value is not None:
            check_rest(value, path, run)

    return check if optional else check_rest


def _only_check(one_of: OneOf, check_rest: Check) -> Check:
    """For ``Optional[X]``: X, but what fails as a whole is compared to the whole."""

    def check(value: Any, path: Path, run: Run) -> None:
        before = len(run.failures)
        check_rest(value, path, run)
        if any(failure.depth <= (len(path), False) for failure in run.failures[before:]):
            del run.failures[before:]
            run.fail(path, "", f"promised {one_of}, came {describe(value)}")

    return check


def _first_check(one_of: OneOf, checks: list[Check]) -> Check:
    """The first alternative that fits what the call has bound so far; it is not revised."""

    def check(value: Any, path: Path, run: Run) -> None:
        closest = []
        for alternative in checks:
            fork = run.fork()
            alternative(value, path, fork)
            if not fork.failures:
                run.adopt(fork)
                return
            if min(fork.failures).depth > (len(path), False):
                closest.append(fork)
        # The one alternative that fits the outside of the value, if there is one, says most.
        if len(closest) == 1:
            run.adopt(closest[0])
            run.failures.extend(closest[0].failures)
        else:
            run.fail(path, "", f"promised {one_of}, came {describe(value)}")

    return check
