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

import copy
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import optree
import torch

from tsfunc import pytrees
from tsfunc.bridge.trace.quick_checks import quick_check
from tsfunc.bridge.trace.tensor_guards import is_tensor_of, users_class
from tsfunc.bridge.tracers import settings
from tsfunc.types.values import same_value

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


def same_float(a: Any, b: float) -> bool:
    """Return True if a value is this float: of its class, equal or both NaN, of the same sign."""
    if type(a) is not type(b):
        return False
    return (a == b or (a != a and b != b)) and math.copysign(1, a) == math.copysign(1, b)


def _compiled(source: str, scope: dict[str, Any]) -> Any:
    exec(compile(source, "<tsfunc guard>", "exec"), scope)
    return scope["closure_guard"]


def _compiled_late(source: str, scope: dict[str, Any]) -> ClosureGuard:
    """Return the function of a source, which is compiled at its first call."""
    made: list[ClosureGuard] = []

    def closure_guard(flat: Sequence[Any]) -> tuple[Any, ...] | None:
        if not made:
            made.append(_compiled(source, scope))
        return made[0](flat)

    return closure_guard


class GuardLines:
    """The lines of the guard function, and the objects that they refer to by name."""

    def __init__(self) -> None:
        self._lines: list[str | list[str]] = []
        self._scope: dict[str, Any] = {
            "Tensor": torch.Tensor,
            "is_tensor_of": is_tensor_of,
            "same_value": same_value,
            "same_float": same_float,
        }
        self._variables: dict[str, str] = {}
        self._results: list[tuple[str, Any]] = []
        self._same: dict[int, list[str]] = {}
        self._own: dict[int, tuple[str, torch.Tensor]] = {}
        self._members: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._not_members: dict[int, tuple[Any, set[str]]] = {}

    def function(
        self,
        now: tuple[Any, ...],
        guard: Sequence[str] = (),
        scope: dict[str, Any] | None = None,
        late: bool = False,
    ) -> ClosureGuard:
        """Return the guard function.

        Args:
            now: torch's settings.
            guard: lines about the arguments, which come first.
            scope: the names that these lines use.
            late: whether the function is compiled at its first call, which may never happen.
        """
        results = "".join(f"{name}, " for name, _ in self._results)
        written = self._written("args", now, guard, scope, f"({results})")
        closure_guard: ClosureGuard = (_compiled_late if late else _compiled)(*written)
        return closure_guard

    def entry_code(
        self,
        now: tuple[Any, ...],
        opening: Sequence[str],
        guard: Sequence[str],
        scope: dict[str, Any],
    ) -> Enter:
        """Return the guard function for unflattened arguments; it returns all program inputs.

        Args:
            opening: lines that flatten ``args, kwargs`` to ``args``.
            now, guard, scope: as for ``function``.
        """
        results = ", ".join(["*args", *(name for name, _ in self._results)])
        given = f"[{results}]" if self._results else "args"
        written = self._written("args, kwargs", now, [*opening, *guard], scope, given)
        enter: Enter = _compiled(*written)
        return enter

    def _written(
        self,
        parameters: str,
        now: tuple[Any, ...],
        guard: Sequence[str],
        scope: dict[str, Any] | None,
        results: str,
    ) -> tuple[str, dict[str, Any]]:
        alike, check = self._still_alike()
        names = {**self._scope, **(scope or {}), "quick_own": check}
        lines = [f"if {settings.condition(now, names)}: return None", *guard]
        lines += self._still_there(names)
        for line in self._lines:
            lines.extend([line] if isinstance(line, str) else line)
        lines += alike
        lines.append(f"return {results}")
        body = "".join(f"        {line}\n" for line in lines)
        ending = f"    except {_GONE}:\n        return None\n"
        return f"def closure_guard({parameters}):\n    try:\n{body}{ending}", names

    def _still_there(self, scope: dict[str, Any]) -> Iterator[str]:
        """Yield lines that check members of library modules and classes, one for each owner."""
        for i, (owner, members) in enumerate(self._members.values()):
            found = operator.itemgetter(*members)
            scope[f"get_{i}"], scope[f"of_{i}"] = found, vars(owner)
            scope[f"had_{i}"] = found(members)
            # Tuples compare their items by identity first, and NaN does not equal itself.
            differs = "is not" if len(members) == 1 else "!="
            yield f"if get_{i}(of_{i}) {differs} had_{i}: return None"
        for i, (owner, names) in enumerate(self._not_members.values()):
            scope[f"not_in_{i}"], scope[f"absent_{i}"] = vars(owner), frozenset(names)
            yield f"if not not_in_{i}.keys().isdisjoint(absent_{i}): return None"

    def _still_alike(self) -> tuple[list[str], Any]:
        """Return lines that check the own tensors, all at once first and one by one next."""
        own = list(self._own.values())
        closely = [
            line
            for at, value in own
            for line in (f"if type({at}) is not {self.name(type(value))}: return None",
                         *self._type_of(at, value))
        ]  # fmt: skip
        check = quick_check([value for _, value in own])
        if check is None:
            return closely, None
        given = ", ".join(at for at, _ in own)
        return [f"if not quick_own({given}):", *(f"    {line}" for line in closely)], check

    # --- the results of the function

    def result(self, at: str, value: Any) -> int:
        """Add a variable to the results of the guard function; return its index among them."""
        for i, (known, _) in enumerate(self._results):
            if known == at:
                return i
        self._results.append((at, value))
        return len(self._results) - 1

    @property
    def values(self) -> tuple[Any, ...]:
        """The current values of the results."""
        return tuple(value for _, value in self._results)

    # --- expressions

    def name(self, value: Any) -> str:
        """Return a name for an object."""
        name = f"v{len(self._scope)}"
        self._scope[name] = value
        return name

    def bind(self, expression: str) -> str:
        """Return a variable for the value of an expression, one for each expression."""
        known = self._variables.get(expression)
        if known is None:
            known = self._variables[expression] = f"p{len(self._variables)}"
            self._lines.append(f"{known} = {expression}")
        return known

    def spell(self, key: Any) -> str:
        """Return the Python expression of a container's key."""
        return repr(key) if type(key) in (int, str) else self.name(key)

    # --- the guards

    def require(self, condition: str) -> None:
        self._lines.append(f"if not ({condition}): return None")

    def require_member(self, owner: Any, name: str, value: Any) -> None:
        """Guard a member of a library's module or class, by identity or equality."""
        self._members.setdefault(id(owner), (owner, {}))[1][name] = value

    def require_no_member(self, owner: Any, name: str) -> None:
        """Guard that a class itself has no attribute of this name."""
        self._not_members.setdefault(id(owner), (owner, set()))[1].add(name)

    def require_type(self, at: str, cls: type) -> None:
        self._lines.append(f"if type({at}) is not {self.name(cls)}: return None")

    def require_distinct(self, variables: Sequence[str]) -> None:
        if len(variables) > 1:
            ids = ", ".join(f"id({each})" for each in variables)
            self.require(f"len({{{ids}}}) == {len(variables)}")

    def require_same(self, at: str, value: Any) -> None:
        self._lines.append(f"if {at} is not {self.name(value)}: return None")

    def require_equal(self, at: str, value: Any) -> None:
        """Guard a value by equality and type."""
        if value is None or type(value) is bool:
            self._lines.append(f"if {at} is not {value}: return None")
            return
        wanted = self.name(value)
        kind = self.name(type(value))
        self._lines.append(f"if {at} != {wanted} or type({at}) is not {kind}: return None")

    def require_float(self, at: str, value: float) -> None:
        self.require(f"same_float({at}, {self.name(value)})")

    def require_same_value(self, at: str, value: Any) -> None:
        """Guard a container of plain values by the equality of the whole."""
        self.require(f"same_value({at}, {self.name(copy.copy(value))})")

    def require_keys(self, at: str, keys: Sequence[Any]) -> None:
        """Guard the keys and their order; 1 and 1.0 are equal but different keys."""
        self._lines.append(f"if {other_keys(at, keys, self.name)}: return None")

    def require_own_tensor(self, at: str, value: torch.Tensor) -> None:
        """Guard a tensor by identity, type and sizes: an assignment of ``.data`` changes these."""
        lines = [f"if {at} is not {self.name(value)}: return None"]
        self._lines.append(lines)
        self._same[id(value)] = lines
        self._own[id(value)] = at, value

    def require_tensor(self, at: str, example: torch.Tensor) -> None:
        """Guard a tensor by its type and sizes, and add it to the results."""
        self._lines.append(self._like(at, example))
        self._results.append((at, example))

    def loosen(self, at: str, value: torch.Tensor) -> None:
        """Relax a tensor's guard from identity to type and sizes, and add it to the results."""
        self._same[id(value)][:] = self._like(at, value)
        del self._own[id(value)]
        self._results.append((at, value))

    def _like(self, at: str, example: torch.Tensor) -> list[str]:
        cls = self.name(users_class(type(example)))
        return [f"if not is_tensor_of({at}, {cls}): return None", *self._type_of(at, example)]

    def _type_of(self, at: str, example: torch.Tensor) -> list[str]:
        dtype, device = self.name(example.dtype), self.name(example.device)
        shape = f"{at}.shape != {tuple(example.shape)!r}"
        if example.layout is torch.strided and not example.is_nested:
            contiguous = example.is_contiguous()
            shape += (
                f" or not {at}.is_contiguous()"
                if contiguous
                else (f" or {at}.stride() != {tuple(example.stride())!r}")
            )
        return [
            f"if {at}.dtype is not {dtype} or {at}.device != {device}: return None",
            f"if {at}.requires_grad is not {example.requires_grad}: return None",
            f"if {shape}: return None",
        ]
