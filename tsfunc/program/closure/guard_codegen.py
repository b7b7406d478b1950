"""The generated Python of guards, from arguments to inputs, and of results.

If the arguments contain only tuples, lists and dicts, as most do, the generated Python of the
guard flattens them itself, without a pytree library.

NOTE [the order of keys]
A function that iterates over a dict sees the order of its keys, which a pytree structure does not
have: optree treats dicts with the same keys as equal. The guard therefore checks the key order of
each dict among the arguments. The order of the keyword arguments matters only with ``**kwargs``.

Equal keys may differ in type (``1``, ``1.0`` and ``True``), and the function may compute with
them. The guard therefore also checks the types of keys that are not plain strings.

The generated function takes the flattened arguments and checks torch's settings. Then the function
follows the expressions for all values that the trace has read (``instances.py``,
``free_variables.py``). The result is the tensors among these values that are inputs of the program,
or None if a guard fails.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import optree
import torch

from tsfunc import pytrees
from tsfunc.bridge.trace.tensor_guards import is_tensor_of, quick_check, users_class
from tsfunc.bridge.tracers.torch_settings import SETTINGS, settings_condition
from tsfunc.errors import DescriptorViolation
from tsfunc.program.guard import Guard, GuardCode, Names, Part
from tsfunc.types.scope import Scope
from tsfunc.types.values import same_float, same_value

# --- conversion of a call's arguments to a program's inputs, and of its outputs to the results


# From args and kwargs to the values that the program runs on, or None.
Enter = Callable[[tuple[Any, ...], dict[str, Any]], "list[Any] | None"]
Build = Callable[[Sequence[Any]], Any]


def key_orders(tree: optree.PyTreeSpec, keyword_order: bool) -> tuple[Any, ...]:
    """Return the keys of the dicts in a structure, in order: NOTE [the order of keys].

    Args:
        tree: the structure of ``(args, kwargs)``.
        keyword_order: True if the function sees the order of ``kwargs``.
    """
    try:
        args, kwargs = optree.tree_unflatten(tree, range(tree.num_leaves))
    except Exception:
        raise DescriptorViolation(_refusal_code(tree)) from None
    orders: list[Any] = []

    def is_leaf(value: Any) -> bool:
        if isinstance(value, dict) and (value is not kwargs or (keyword_order and len(value) > 1)):
            orders.append(tuple(map(_exact, value)))
        return False

    optree.tree_flatten((args, kwargs), is_leaf, none_is_leaf=True, namespace=pytrees.NAMESPACE)
    return tuple(orders)


def _refusal_code(tree: optree.PyTreeSpec) -> str:
    kind = pytrees.refusing_class(tree)
    name = "a container" if kind is None else f"a {kind.__name__}"
    return (
        f"expected arguments in containers of any elements, got {name}, whose constructor refuses "
        f"stand-ins for its elements. Pass its elements as arguments, and make the container in "
        f"the function."
    )


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


def differs(at: str, value: Any, code: GuardCode) -> str:
    """Return the condition that an expression has another value than a constant, or another type.

    The condition is the negation of ``same_value``, without the call for the commonest types.
    """
    if value is None or type(value) is bool:
        return f"{at} is not {value}"
    name = code.name(value)
    if isinstance(value, float):
        return f"not {code.name(same_float)}({at}, {name})"
    if type(value) in (int, str, torch.device):
        return f"type({at}) is not {code.name(type(value))} or {at} != {name}"
    return f"not {code.name(same_value)}({name}, {at})"  # `==` may hold for different values


def keys_condition(
    dicts: Sequence[str], keys: Sequence[Iterable[Any]], name: Callable[[Any], str]
) -> str:
    """Return the Python condition that some dicts have other keys, or another order of the keys.

    Args:
        name: returns a name for an object that the condition uses.
    """
    compared: list[tuple[str, list[Any]]] = []
    others: list[str] = []
    for at, each in zip(dicts, keys, strict=True):
        if all(type(key) in _EXACT_TYPES for key in each):
            compared.append((at, list(each)))
        else:
            others.append(f"{name(_exact_keys)}({at}) != {name(_exact_keys(each))}")
    if len(compared) == 1:
        [(at, expected)] = compared
        kinds = f"[*map(type, {at})] != {name(list(map(type, expected)))}"
        return " or ".join([f"[*{at}] != {name(expected)}", kinds, *others])
    if compared:
        found = f"({', '.join(at for at, _ in compared)})"
        joined = itertools.chain.from_iterable
        every = [expected for _, expected in compared]
        kinds = f"[*map(type, {name(joined)}({found}))] != {name(list(map(type, joined(every))))}"
        return " or ".join([f"[*map(list, {found})] != {name(every)}", kinds, *others])
    return " or ".join(others)


def _exact_keys(keys: Iterable[Any]) -> list[Any]:
    return list(map(_exact, keys))


_EXACT_TYPES = (str, int, bool, type(None))  # two equal values of one of these types are the same


def flatten_lines(tree: optree.PyTreeSpec, scope: Scope, keyword_order: bool) -> list[str] | None:
    """Return Python lines that flatten ``args, kwargs`` into the list ``args``.

    The lines return None if the arguments do not have the structure.

    Args:
        scope: receives the objects that the lines use.
        keyword_order: True if the function sees the order of ``kwargs``.

    Returns:
        The lines; None if there are containers other than tuples, lists and dicts.
    """
    args, kwargs = optree.tree_unflatten(tree, range(tree.num_leaves))
    opening = _FlattenCode(scope)
    count = f"len(kwargs) != {len(kwargs)}" if kwargs else "kwargs"
    opening.lines.append(f"if len(args) != {len(args)} or {count}: return None")
    if keyword_order and len(kwargs) > 1:
        opening.lines.append(f"if {opening.keys_condition('kwargs', kwargs)}: return None")
    opening.children(args, "args")
    opening.children(kwargs, "kwargs")
    if not opening.plain:
        return None
    leaves = ", ".join(at for _, at in sorted(opening.leaves))
    return [*opening.lines, f"args = [{leaves}]"]


class _FlattenCode:
    def __init__(self, scope: Scope) -> None:
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
            name = self.scope.unused("container")
            wrong = f"len({name}) != {len(value)}"
            if kind is dict and value:
                wrong = self.keys_condition(name, value)
            self.lines += [
                f"{name} = {at}",
                f"if type({name}) is not {kind.__name__} or {wrong}: return None",
            ]
            self.children(value, name)
        else:
            self.plain = False

    def keys_condition(self, at: str, value: dict[Any, Any]) -> str:
        """Return the Python condition that a dict has other keys than this one."""
        return keys_condition([at], [list(value)], self.scope.name)

    def children(self, container: Any, name: str) -> None:
        """Add the lines for the elements of a container."""
        if isinstance(container, dict):
            for key, item in container.items():
                self.value(item, f"{name}[{_key_text(key, self.scope)}]")
        elif container and all(type(item) is int for item in container):
            self.leaves.append((container[0], f"*{name}"))
        else:
            for i, item in enumerate(container):
                self.value(item, f"{name}[{i}]")


def _key_text(key: Any, scope: Scope) -> str:
    return repr(key) if type(key) in (int, str) else scope.name(key)


def unflatten_function(tree: optree.PyTreeSpec) -> Build:
    """Return a function from flattened results to the nested results."""
    scope = Scope()
    try:
        text = _built(optree.tree_unflatten(tree, range(tree.num_leaves)), scope)
    except Exception:  # a user's class that does not accept these elements
        text = None
    if text is None:
        return partial(optree.tree_unflatten, tree)
    return eval(f"lambda results: {text}", scope.objects)


def _built(value: Any, scope: Scope) -> str | None:
    """Return the Python for results with numbers as leaves; None for other containers."""
    kind = type(value)
    if kind is int:
        return f"results[{value}]"
    if kind is dict:
        parts = [(_key_text(key, scope), _built(item, scope)) for key, item in value.items()]
        is_spelled = all(item is not None for _, item in parts)
        return f"{{{', '.join(f'{key}: {item}' for key, item in parts)}}}" if is_spelled else None
    if kind not in (tuple, list):
        return None
    items = [_built(item, scope) for item in value]
    if any(item is None for item in items):
        return None
    inside = "".join(f"{item}, " for item in items)
    return f"({inside})" if kind is tuple else f"[{inside}]"


# --- guards of a program as straight-line Python that every call runs


GuardFunction = Callable[[Sequence[Any]], "tuple[Any, ...] | None"]

# The exceptions of an expression for a value that does not exist any more.
_GONE = "(AttributeError, LookupError, TypeError, ValueError)"


def compile_guard(
    parameters: str, lines: Sequence[str], results: str, scope: Scope, lazy: bool = False
) -> Any:
    """Return the guard function with these lines.

    Args:
        lines: its body; a line returns None if a guard fails.
        scope: the objects that the lines refer to.
        lazy: True if it is compiled at its first call.
    """
    body = "".join(f"        {line}\n" for line in (*lines, f"return {results}"))
    ending = f"    except {_GONE}:\n        return None\n"
    source = f"def closure_guard({parameters}):\n    try:\n{body}{ending}"

    def make() -> Any:
        exec(compile(source, "<tsfunc guard>", "exec"), scope.objects)
        return scope.objects["closure_guard"]

    if not lazy:
        return make()
    compiled: list[Any] = []

    def closure_guard(*args: Any) -> Any:
        if not compiled:
            compiled.append(make())
        return compiled[0](*args)

    return closure_guard


# --- guards on tensors


def tensor_lines(
    at: str,
    sample: torch.Tensor,
    code: GuardCode,
    size_lines: Sequence[str] | None = None,
    any_grad: bool = False,
) -> list[str]:
    """Return the lines of the guard on a tensor: its class, dtype, device, layout and sizes.

    Args:
        sample: the tensor of the traced call.
        code: receives the objects that the lines use.
        size_lines: lines that check sizes and strides; None if both are the sample's.
        any_grad: True if ``requires_grad`` is not checked.
    """
    users = users_class(type(sample))
    usual = torch.nn.Parameter if type(sample) is torch.nn.Parameter else users
    dtype, device, layout = map(code.name, (sample.dtype, sample.device, sample.layout))
    grad = "" if any_grad else f" or {at}.requires_grad is not {sample.requires_grad}"
    lines = [
        f"if type({at}) is not {code.name(usual)} "
        f"and not {code.name(is_tensor_of)}({at}, {code.name(users)}): return None",
        f"if {at}.dtype is not {dtype} or {at}.device != {device}{grad}: return None",
        f"if {at}.layout is not {layout}: return None",  # some have no strides
    ]
    if size_lines is not None:
        return [*lines, *size_lines]
    lines.append(f"if {at}.shape != {tuple(sample.shape)!r}: return None")
    if sample.layout is torch.strided and not sample.is_nested:
        lines.append(f"if {strides_condition(at, sample)}: return None")
    return lines


def strides_condition(at: str, sample: torch.Tensor) -> str:
    """Return the condition that a tensor of the sample's sizes has other strides."""
    if sample.is_contiguous():
        return f"not {at}.is_contiguous()"
    return f"{at}.stride() != {tuple(sample.stride())!r}"


def lines_of_tensors(
    tensors: str, samples: Sequence[torch.Tensor], one_by_one: Iterable[str], code: GuardCode
) -> Iterator[str]:
    """Check tensors of fixed sizes at once in C++, and by other lines if that fails.

    Args:
        tensors: the Python expression of a list or tuple of the tensors.
        samples: the tensors of the traced call.
        code: receives the objects that the lines use.
    """
    check = quick_check(samples)
    if check is None:
        yield from one_by_one
        return
    yield f"if not {code.name(check)}({tensors}):"
    yield from (f"    {line}" for line in one_by_one)


@dataclass(frozen=True, eq=False)
class SettingsAre(Guard):
    """torch's settings."""

    part = Part.SETTINGS
    values: Sequence[Any]

    def lines(self, code: GuardCode) -> Iterable[str]:
        return (f"if {settings_condition(tuple(self.values), code.name)}: return None",)

    def texts(self, name: Names) -> Iterable[str]:
        return [f"{s.name} is {x}" for s, x in zip(SETTINGS, self.values, strict=True)]
