"""Generated Python: guards, arguments to inputs, and outputs to results.

If the arguments contain only tuples, lists and dicts, as most do, the generated Python of the
guard flattens them itself, without a pytree library.

NOTE [the order of keys]
A function that iterates over a dict sees the order of its keys, which a pytree structure does not
have: optree treats dicts with the same keys as equal. The guard therefore checks the key order of
each dict among the arguments. The order of the keyword arguments matters only with ``**kwargs``.

Equal keys may differ in type (``1``, ``1.0`` and ``True``), and the function may compute with
them. The guard therefore also checks the types of keys that are not plain strings.

The generated function takes the flattened arguments and checks torch's settings. It then follows
the expressions for all values that the trace has read (``instances.py``, ``free_variables.py``). It
returns the tensors among these values that are inputs of the program, or None if a guard fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import optree

from tsfunc import pytrees

# --- conversion of a call's arguments to a program's inputs, and of its outputs to the results


# From args and kwargs to the values that the program runs on, or None.
Enter = Callable[[tuple[Any, ...], dict[str, Any]], "list[Any] | None"]
Build = Callable[[Sequence[Any]], Any]


def key_orders(tree: optree.PyTreeSpec, of_keywords: bool) -> tuple[Any, ...]:
    """Return the keys of the dicts in a structure, in order: NOTE [the order of keys].

    Args:
        tree: the structure of ``(args, kwargs)``.
        of_keywords: whether the function sees the order of ``kwargs``.
    """
    args, kwargs = optree.tree_unflatten(tree, range(tree.num_leaves))
    found: list[Any] = []

    def look(value: Any) -> bool:
        if isinstance(value, dict) and (value is not kwargs or (of_keywords and len(value) > 1)):
            found.append(tuple(map(_exact, value)))
        return False

    optree.tree_flatten((args, kwargs), look, none_is_leaf=True, namespace=pytrees.NAMESPACE)
    return tuple(found)


def _exact(key: Any) -> Any:
    """Return a stand-in for a key that equals another's only if type and value are the same."""
    kind = type(key)
    if kind is str:
        return key
    if isinstance(key, float):
        return kind, key.hex(), math.copysign(1, key)
    if isinstance(key, complex):
        return kind, _exact(key.real), _exact(key.imag)
    if isinstance(key, tuple):
        return kind, tuple(map(_exact, key))
    if isinstance(key, frozenset):
        return kind, frozenset(map(_exact, key))
    return kind, key


def other_keys(at: str, keys: Sequence[Any], name: Callable[[Any], str]) -> str:
    """Return the Python condition that a dict has other keys, or another order of the keys.

    Args:
        at: the Python expression of the dict.
        keys: the expected keys.
        name: returns a name for an object that the condition uses.
    """
    if all(type(key) in _COMPARED for key in keys):
        kinds = f"[*map(type, {at})] != {name(list(map(type, keys)))}"
        return f"[*{at}] != {name(list(keys))} or {kinds}"
    return f"{name(_exact_keys)}({at}) != {name(_exact_keys(keys))}"


def _exact_keys(keys: Iterable[Any]) -> list[Any]:
    return list(map(_exact, keys))


_COMPARED = (str, int, bool, type(None))  # two equal values of one of these types are the same


def opening_lines(
    tree: optree.PyTreeSpec, scope: dict[str, Any], of_keywords: bool
) -> list[str] | None:
    """Return Python lines that flatten ``args, kwargs`` into the list ``args``.

    The lines return None if the arguments do not have the structure.

    Args:
        tree: the structure of ``(args, kwargs)``.
        scope: receives the names that the lines use.
        of_keywords: whether the function sees the order of ``kwargs``.

    Returns:
        The lines; None if there are containers other than tuples, lists and dicts.
    """
    args, kwargs = optree.tree_unflatten(tree, range(tree.num_leaves))
    opening = _Opening(scope)
    count = f"len(kwargs) != {len(kwargs)}" if kwargs else "kwargs"
    opening.lines.append(f"if len(args) != {len(args)} or {count}: return None")
    if of_keywords and len(kwargs) > 1:
        opening.lines.append(f"if {opening.other_keys('kwargs', kwargs)}: return None")
    opening.children(args, "args")
    opening.children(kwargs, "kwargs")
    if not opening.plain:
        return None
    leaves = ", ".join(at for _, at in sorted(opening.leaves))
    return [*opening.lines, f"args = [{leaves}]"]


class _Opening:
    def __init__(self, scope: dict[str, Any]) -> None:
        self.scope = scope
        self.lines: list[str] = []
        self.leaves: list[tuple[int, str]] = []
        self.plain = True

    def value(self, value: Any, at: str) -> None:
        """Add the lines for a leaf (its number) or a container at a Python expression."""
        kind = type(value)
        if kind is int:
            self.leaves.append((value, at))
        elif kind in (tuple, list, dict):
            name = f"c{len(self.lines)}"
            wrong = f"len({name}) != {len(value)}"
            if kind is dict and value:
                wrong = self.other_keys(name, value)
            self.lines += [
                f"{name} = {at}",
                f"if type({name}) is not {kind.__name__} or {wrong}: return None",
            ]
            self.children(value, name)
        else:
            self.plain = False

    def other_keys(self, at: str, value: dict[Any, Any]) -> str:
        """Return the Python condition that a dict has other keys than this one."""
        return other_keys(at, list(value), self.name)

    def name(self, value: Any) -> str:
        """Return a name for an object."""
        name = f"keys_{len(self.scope)}"
        self.scope[name] = value
        return name

    def children(self, container: Any, name: str) -> None:
        """Add the lines for the elements of a container."""
        if isinstance(container, dict):
            for key, item in container.items():
                self.value(item, f"{name}[{_spelled(key, self.scope)}]")
        elif container and all(type(item) is int for item in container):
            self.leaves.append((container[0], f"*{name}"))
        else:
            for i, item in enumerate(container):
                self.value(item, f"{name}[{i}]")


def _spelled(key: Any, scope: dict[str, Any]) -> str:
    if type(key) in (int, str):
        return repr(key)
    name = f"key_{len(scope)}"
    scope[name] = key
    return name


def builder(tree: optree.PyTreeSpec) -> Build:
    """Return a function from flattened results to the nested results."""
    scope: dict[str, Any] = {}
    try:
        text = _built(optree.tree_unflatten(tree, range(tree.num_leaves)), scope)
    except Exception:  # a user's class that does not accept these elements
        text = None
    if text is None:
        return partial(optree.tree_unflatten, tree)
    build: Build = eval(f"lambda results: {text}", scope)
    return build


def _built(value: Any, scope: dict[str, Any]) -> str | None:
    """Return the Python for results with numbers in their places; None for other containers."""
    kind = type(value)
    if kind is int:
        return f"results[{value}]"
    if kind is dict:
        parts = [(_spelled(key, scope), _built(item, scope)) for key, item in value.items()]
        known = all(item is not None for _, item in parts)
        return f"{{{', '.join(f'{key}: {item}' for key, item in parts)}}}" if known else None
    if kind not in (tuple, list):
        return None
    items = [_built(item, scope) for item in value]
    if any(item is None for item in items):
        return None
    inside = "".join(f"{item}, " for item in items)
    return f"({inside})" if kind is tuple else f"[{inside}]"


# --- guards of a program as straight-line Python that every call runs


ClosureGuard = Callable[[Sequence[Any]], "tuple[Any, ...] | None"]

# The exceptions of an expression for a value that does not exist any more.
_GONE = "(AttributeError, LookupError, TypeError, ValueError)"


def compiled(
    parameters: str, lines: Sequence[str], results: str, scope: dict[str, Any], late: bool = False
) -> Any:
    """Return the guard function with these lines.

    Args:
        parameters: its parameters.
        lines: its body; a line returns None if a guard fails.
        results: the expression that it returns.
        scope: the objects that the lines refer to by name.
        late: whether it is compiled at its first call.
    """
    body = "".join(f"        {line}\n" for line in (*lines, f"return {results}"))
    ending = f"    except {_GONE}:\n        return None\n"
    source = f"def closure_guard({parameters}):\n    try:\n{body}{ending}"

    def make() -> Any:
        exec(compile(source, "<tsfunc guard>", "exec"), scope)
        return scope["closure_guard"]

    if not late:
        return make()
    made: list[Any] = []

    def closure_guard(*args: Any) -> Any:
        if not made:
            made.append(make())
        return made[0](*args)

    return closure_guard
