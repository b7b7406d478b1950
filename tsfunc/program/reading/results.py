"""What a traced function returns, as its program gives it anew at every call.

NOTE [objects among results]
Containers are taken apart into leaves, and of these tensors and symbolic numbers are values of the
program. Of other leaves there are three kinds:

- what comes from outside, an argument or what is reached from one, is at every call that of the
  call: an ``Outside``, by where it stands in the list that the program is called with. A list or
  dict from outside is such a leaf, too: its elements may change, and it is returned itself;
- what the function has made of traced values is made anew: an instance of a class gets its
  attributes, without a call of ``__init__``, and a set or a container of a class of its own its
  elements. ``Made`` stands for it while the results are taken apart;
- anything else is a constant of the program.

What would run only after the function has returned (a generator, a function that closes over
traced values) can't be made of values, and is refused.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import optree
import torch

from tsfunc import pytrees
from tsfunc.bridge.tracers.tracer import Tracer
from tsfunc.errors import TypeCheckError
from tsfunc.program.reading.updates import PLAIN, Outside

Known = Callable[[Any], Any]


class Made:
    """An object that a program makes: its elements, where it is a container, and attributes.

    Attributes:
        kind: its class.
        keys: those of its elements, where it has any: of a mapping its own, else numbers.
        names: of its attributes.
        children: the elements, then the attributes.
    """

    __slots__ = ("children", "keys", "kind", "names")

    def __init__(
        self, kind: type, keys: tuple[Any, ...], names: tuple[str, ...], children: Sequence[Any]
    ) -> None:
        self.kind, self.keys, self.names, self.children = kind, keys, names, children


def _parts(made: Made) -> tuple[Sequence[Any], Any]:
    return made.children, (made.kind, made.keys, made.names)


def _built(shape: tuple[type, tuple[Any, ...], tuple[str, ...]], children: Sequence[Any]) -> Any:
    """The object itself, of such children."""
    kind, keys, names = shape
    items, attributes = children[: len(keys)], children[len(keys) :]
    value: Any
    if issubclass(kind, tuple | set | frozenset):
        value = kind(items) if kind in _FROM_ITEMS else _base_of(kind).__new__(kind, items)
        if issubclass(kind, set):
            set.update(value, items)
    elif kind is types.SimpleNamespace:
        value = types.SimpleNamespace()
    else:
        value = _base_of(kind).__new__(kind)
        if isinstance(value, dict):
            assign = _base_of(kind).__setitem__
            for key, item in zip(keys, items, strict=True):
                assign(value, key, item)
        elif isinstance(value, list | deque):
            _base_of(kind).extend(value, items)
    for name, attribute in zip(names, attributes, strict=True):
        object.__setattr__(value, name, attribute)  # a frozen class's own refuses
    return value


_FROM_ITEMS = (set, frozenset)
_CHANGEABLE = (dict, list, deque)
_BASES: tuple[Any, ...] = (OrderedDict, dict, list, deque, tuple, set, frozenset)


def _base_of(kind: type) -> Any:
    """The built-in class that a class's instances are made and filled by."""
    return next((base for base in _BASES if issubclass(kind, base)), object)


optree.register_pytree_node(Made, _parts, _built, namespace=pytrees.NAMESPACE)


def with_objects_apart(what: str, out: Any, known: Known) -> Any:
    """What a function returned, with `Made` and `Outside` in the places of objects.

    Args:
        what: how an error calls the function.
        out: what it returned.
        known: what stands for an object from outside, None for what is not.

    Raises:
        TypeCheckError: there is something that would run only later.
    """
    return _Results(what, known).taken_apart(out)


class _Results:
    def __init__(self, what: str, known: Known) -> None:
        self.what = what
        self.known = known
        self._above: list[int] = []  # the objects that hold what is looked at

    def taken_apart(self, value: Any) -> Any:
        """A value in which nothing is an object that a program has to make."""
        leaves, structure = pytrees.flatten(value, self._is_from_outside)
        apart = [leaf if _is_simple(leaf) else self._leaf(leaf) for leaf in leaves]
        if all(a is b for a, b in zip(apart, leaves, strict=True)):
            return value
        return pytrees.unflatten(structure, apart)

    def _is_from_outside(self, value: Any) -> bool:
        """Whether a list or dict is itself to be returned, and not one with such elements."""
        return isinstance(value, _CHANGEABLE) and isinstance(self.known(value), Outside)

    def _leaf(self, value: Any) -> Any:
        outside = self.known(value)
        if outside is not None:
            return outside
        kind = type(value)
        if kind.__module__ in _ITERATORS and hasattr(kind, "__next__"):
            self._refuse(
                f"a {kind.__name__}, which gives its items only after the function has returned",
                "Return the items: list(...)",
            )
        if not _is_container(value) and not _reaches(value, set()):
            return value
        if id(value) in self._above:
            self._refuse(f"a {kind.__qualname__} that refers to itself", "Return its parts")
        if not _can_be_made(value):
            self._refuse(
                f"a {kind.__qualname__} that refers to traced values",
                "Return these values, and make it of them after the call",
            )
        self._above.append(id(value))
        items, attributes = _items(value), _attributes(value)
        children = [self.taken_apart(each) for each in (*items.values(), *attributes.values())]
        self._above.pop()
        return Made(kind, tuple(items), tuple(attributes), children)

    def _refuse(self, found: str, instead: str) -> None:
        raise TypeCheckError(
            f"{self.what}: the function returns {found}. A program gives values alone. {instead}."
        )


_ITERATORS = ("builtins", "itertools")


def _is_simple(value: Any) -> bool:
    """Whether a leaf is a value of the program, or its type is that of a constant."""
    return isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, *PLAIN))


def _is_container(value: Any) -> bool:
    """Whether an object is a container of a class that is no pytree's, which graphs do not keep."""
    return isinstance(value, _BASES)


def _can_be_made(value: Any) -> bool:
    kind = type(value)
    if kind in (types.SimpleNamespace, *_FROM_ITEMS):
        return True
    return (
        kind.__new__ is _base_of(kind).__new__
        and bool(kind.__flags__ & _HEAP_TYPE)
        and not isinstance(value, torch.nn.Module)
    )


_HEAP_TYPE = 1 << 9  # the class is one of Python's, not of C's


def _items(value: Any) -> dict[Any, Any]:
    """The elements of a container, by their keys."""
    if isinstance(value, dict):
        return dict(dict.items(value))
    return dict(enumerate(value)) if _is_container(value) else {}


def _attributes(value: Any) -> dict[str, Any]:
    """What an object has in its ``__dict__`` and slots."""
    found = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        for name, slot in vars(cls).items():
            is_slot = isinstance(slot, types.MemberDescriptorType) and not name.startswith("__")
            if is_slot and hasattr(value, name):
                found.setdefault(name, slot.__get__(value))
    return found


def _reaches(value: Any, seen: set[int]) -> bool:
    """Whether something traced is found in an object, or in what it refers to."""
    if isinstance(value, Tracer | torch.SymInt | torch.SymFloat | torch.SymBool):
        return True
    if isinstance(value, _NOT_LOOKED_INTO) or id(value) in seen:
        return False
    seen.add(id(value))
    return any(_reaches(each, seen) for each in _references(value))


_NOT_LOOKED_INTO = (*PLAIN, torch.Tensor, type, types.ModuleType, types.CodeType)


def _references(value: Any) -> Iterator[Any]:
    """What an object refers to: elements, attributes, what a function closes over."""
    leaves = pytrees.leaves_of(value)
    if len(leaves) != 1 or leaves[0] is not value:
        yield from leaves
        return
    if isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # not assigned
                continue
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
    elif isinstance(value, types.MethodType):
        yield value.__self__
        yield value.__func__
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, _VIEWS):
        yield from value.mapping.values()
    else:
        yield from _items(value).values()
        yield from _attributes(value).values()


_VIEWS: Any = (type({}.values()), type({}.items()))
