"""Checks of containers and unions, composed of the checks of their parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tsfunc import pytrees
from tsfunc.types.check_context import Check, CheckContext, Path, place_text
from tsfunc.types.classes import field_names
from tsfunc.types.descriptors import children_of
from tsfunc.types.grammar import TSType, alternatives_of
from tsfunc.types.values import Attribute, describe, same_keys, same_value


def sequence_check(kind: type[list[Any]] | type[tuple[Any, ...]], element: Check | None) -> Check:
    def check(value: Any, path: Path, context: CheckContext) -> None:
        if not isinstance(value, kind):
            context.fail(path, "", f"expected a {kind.__name__}, got {describe(value)}")
        elif element is not None:
            for i, item in enumerate(value):
                element(item, (*path, i), context)

    return check


def dict_check(check_key: Check | None, check_item: Check | None) -> Check:
    def check(value: Any, path: Path, context: CheckContext) -> None:
        if not isinstance(value, dict):
            context.fail(path, "", f"expected a dict, got {describe(value)}")
            return
        for key, item in value.items():
            if check_key is not None:
                check_key(key, (f"a key of {place_text(path, context.arguments)}",), context)
            if check_item is not None:
                check_item(item, (*path, key), context)

    return check


def nested_check(kind: type[Any], checks: Mapping[Any, Check | None]) -> Check:
    if kind in (list, tuple):
        return _items_check(kind, checks)
    return _keys_check(checks) if kind is dict else _children_check(kind, checks)


def _items_check(kind: type[Any], checks: Mapping[int, Check | None]) -> Check:
    name, size = kind.__name__, len(checks)
    steps = [(i, check) for i, check in checks.items() if check is not None]

    def check(value: Any, path: Path, context: CheckContext) -> None:
        if not isinstance(value, kind):
            context.fail(path, "", f"expected a {name}, got {describe(value)}")
        elif len(value) != size:
            context.fail(path, "", f"expected a {name} of length {size}, got one of {len(value)}")
        else:
            for i, check_item in steps:
                check_item(value[i], (*path, i), context)

    return check


def _keys_check(checks: Mapping[Any, Check | None]) -> Check:
    steps = [(key, check) for key, check in checks.items() if check is not None]

    def check(value: Any, path: Path, context: CheckContext) -> None:
        if not isinstance(value, dict):
            context.fail(path, "", f"expected a dict, got {describe(value)}")
        elif not same_keys(checks, value):
            _report_keys(checks, value, path, context)
        else:
            for key, check_item in steps:
                check_item(value[key], (*path, key), context)

    return check


def _children_check(kind: type[Any], checks: Mapping[Any, Check | None]) -> Check:
    """Return the check of a named tuple, or of a container registered with optree."""

    def check(value: Any, path: Path, context: CheckContext) -> None:
        if type(value) is not kind:
            context.fail(path, "", f"expected a {kind.__name__}, got {describe(value)}")
            return
        entries, children = children_of(value)
        if entries != tuple(checks):
            context.fail(path, "", f"expected children {list(checks)}, got {list(entries)}")
            return
        for entry, check_child, child in zip(entries, checks.values(), children, strict=True):
            if check_child is not None:
                check_child(child, (*path, entry), context)

    return check


def named_check(names: tuple[str, ...], checks: Sequence[Check | None]) -> Check:
    """Return the check of a named tuple of any class."""

    def check(value: Any, path: Path, context: CheckContext) -> None:
        if field_names(value) != names:
            expected = f"a named tuple of {', '.join(names)}"
            context.fail(path, "", f"expected {expected}, got {describe(value)}")
            return
        for i, (check_child, child) in enumerate(zip(checks, value, strict=True)):
            if check_child is not None:
                check_child(child, (*path, i), context)

    return check


def fields_check(cls: type, checks: Mapping[str, Check | None]) -> Check:
    """Return the check of the attributes of an object."""
    steps = [(name, check) for name, check in checks.items() if check is not None]

    def check(value: Any, path: Path, context: CheckContext) -> None:
        entry_of = _entries(value)
        for name, check_child in steps:
            try:
                child = getattr(value, name)
            except AttributeError:
                got = f"an instance of {cls.__name__} without it"
                context.fail(path, f".{name}", f"expected this attribute, got {got}")
            else:
                check_child(child, (*path, entry_of(name, child)), context)

    return check


def _entries(value: Any) -> Callable[[str, Any], Any]:
    """Return a function from the name and value of an attribute to its entry in a path.

    An object can be a container for optree, and its attribute a child of it.
    """
    if pytrees.structure_of(value).type is None:
        return lambda name, child: Attribute(name)
    entries, children = children_of(value)
    by_value = {id(child): entry for child, entry in zip(children, entries, strict=True)}

    def entry(name: str, child: Any) -> Any:
        return name if name in entries else by_value.get(id(child), Attribute(name))

    return entry


def _report_keys(
    checks: Mapping[Any, Check | None], value: dict[Any, Any], path: Path, context: CheckContext
) -> None:
    """Report each missing and each extra key, and check the values of the others."""
    own = {key: key for key in value}
    common = {key for key in checks if key in own and same_value(key, own[key])}
    for key, check in checks.items():
        if key not in common:
            context.fail(path, f"[{key!r}]", "expected this key, got a dict without it")
        elif check is not None:
            check(value[key], (*path, key), context)
    for key in value:
        if key not in common:
            context.fail(path, f"[{key!r}]", f"expected no such key, got {describe(value[key])}")


def one_of_check(one_of: TSType, checks: Sequence[Check | None]) -> Check | None:
    """Return the check of a union; `checks` are those of the alternatives that are not None."""
    optional = len(checks) < len(alternatives_of(one_of))
    found = [check for check in checks if check is not None]
    if len(found) < len(checks):
        return None  # one alternative accepts any value
    check_rest = _only_check(one_of, found[0]) if len(found) == 1 else _first_check(one_of, found)

    def check(value: Any, path: Path, context: CheckContext) -> None:
        if value is not None:
            check_rest(value, path, context)

    return check if optional else check_rest


def _only_check(one_of: TSType, check_rest: Check) -> Check:
    """Return the check of ``Optional[X]``; a mismatch of the whole value names the whole type."""

    def check(value: Any, path: Path, context: CheckContext) -> None:
        before = len(context.failures)
        check_rest(value, path, context)
        if any(failure.depth <= (len(path), False) for failure in context.failures[before:]):
            del context.failures[before:]
            context.fail(path, "", f"expected {one_of}, got {describe(value)}")

    return check


def _first_check(one_of: TSType, checks: list[Check]) -> Check:
    """Return a check that takes the first fitting alternative, given the names bound so far."""

    def check(value: Any, path: Path, context: CheckContext) -> None:
        closest = []
        for alternative in checks:
            fork = context.fork()
            alternative(value, path, fork)
            if not fork.failures:
                context.adopt(fork)
                return
            if min(fork.failures).depth > (len(path), False):
                closest.append(fork)
        # If only one alternative fits the outside of the value, its mismatches are the most
        # specific.
        if len(closest) == 1:
            context.adopt(closest[0])
            context.failures.extend(closest[0].failures)
        else:
            context.fail(path, "", f"expected {one_of}, got {describe(value)}")

    return check
