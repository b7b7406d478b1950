"""The results of a traced function, which its program makes anew at every call.

NOTE [objects among results]
Containers are flattened into leaves. Tensors and symbolic numbers among the leaves are values of
the program. There are three kinds of other leaves:

- an object from outside, which is an argument or was reached from one, is replaced by an
  ``Outside``: its index in the list of values that the program is called with. Each call returns
  its own object. A list or dict from outside is such a leaf as well: the list itself is returned,
  and its elements may change;
- an object that the function has made from traced values is made anew at every call: an instance
  of a class gets its attributes without a call of ``__init__``, and a set or a container of a
  user's class gets its elements. ``Made`` stands for the object while the results are flattened;
- any other leaf is a constant of the program.

An object that runs code after the function has returned (a generator, a function that closes over
traced values) can't be rebuilt from values, and is refused.
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
from tsfunc.program.closure.updates import PLAIN, OutsideRef

Known = Callable[[Any], Any]


class Made:
    """An object that a program makes from its elements (for a container) and attributes.

    Attributes:
        kind: its class.
        keys: the keys of its elements: the keys of a mapping, the indices of another container.
        names: the names of its attributes.
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
    """Make the object with the given children."""
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
        object.__setattr__(value, name, attribute)  # a frozen class's own __setattr__ refuses
    return value


_FROM_ITEMS = (set, frozenset)
_CHANGEABLE = (dict, list, deque)
_BASES: tuple[Any, ...] = (OrderedDict, dict, list, deque, tuple, set, frozenset)


def _base_of(kind: type) -> Any:
    """Return the built-in class whose methods make and fill instances of a class."""
    return next((base for base in _BASES if issubclass(kind, base)), object)


optree.register_pytree_node(Made, _parts, _built, namespace=pytrees.NAMESPACE)


def with_objects_apart(what: str, out: Any, known: Known) -> Any:
    """Return the results of a function with `Made` and `Outside` in the places of objects.

    Args:
        what: the name of the function in errors.
        out: the value that the function returned.
        known: returns the stand-in for an object from outside, or None for another object.

    Raises:
        TypeCheckError: a result runs code after the function has returned.
    """
    return _Results(what, known).taken_apart(out)


class _Results:
    def __init__(self, what: str, known: Known) -> None:
        self.what = what
        self.known = known
        self._above: list[int] = []  # the ids of the objects that contain the value

    def taken_apart(self, value: Any) -> Any:
        """Return a value in which stand-ins replace the objects that a program has to make."""
        leaves, structure = pytrees.flatten(value, self._is_from_outside)
        apart = [leaf if _is_simple(leaf) else self._leaf(leaf) for leaf in leaves]
        if all(a is b for a, b in zip(apart, leaves, strict=True)):
            return value
        return pytrees.unflatten(structure, apart)

    def _is_from_outside(self, value: Any) -> bool:
        """Return True if a list or dict from outside is a result itself."""
        return isinstance(value, _CHANGEABLE) and isinstance(self.known(value), OutsideRef)

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
    """Return True if a leaf is a value of the program or has the type of a constant."""
    return isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, *PLAIN))


def _is_container(value: Any) -> bool:
    """Return True for a container; as a leaf it is of a class that is not a registered pytree."""
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


_HEAP_TYPE = 1 << 9  # of CPython's type flags: the class is not a static type of a C extension


def _items(value: Any) -> dict[Any, Any]:
    """Return the elements of a container by their keys."""
    if isinstance(value, dict):
        return dict(dict.items(value))
    return dict(enumerate(value)) if _is_container(value) else {}


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes in the ``__dict__`` and the slots of an object."""
    found = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        for name, slot in vars(cls).items():
            is_slot = isinstance(slot, types.MemberDescriptorType) and not name.startswith("__")
            if is_slot and hasattr(value, name):
                found.setdefault(name, slot.__get__(value))
    return found


def _reaches(value: Any, seen: set[int]) -> bool:
    """Return True if an object is traced or refers to a traced value, directly or indirectly."""
    if isinstance(value, Tracer | torch.SymInt | torch.SymFloat | torch.SymBool):
        return True
    if isinstance(value, _NOT_LOOKED_INTO) or id(value) in seen:
        return False
    seen.add(id(value))
    return any(_reaches(each, seen) for each in _references(value))


_NOT_LOOKED_INTO = (*PLAIN, torch.Tensor, type, types.ModuleType, types.CodeType)


def _references(value: Any) -> Iterator[Any]:
    """Yield the objects that an object refers to: elements, attributes, closure variables."""
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
