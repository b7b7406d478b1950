"""Results of a program, the assignments that it ends with, and its module's state.

NOTE [updates]
A function may assign to objects, variables and containers that outlive the call. Such an
assignment takes effect during the trace, so later reads in the trace see the new value. After the
trace all old values are restored, and the program ends with the same assignments: a value without
tensors is a constant of the program, and a tensor is one of its results. A value that is read
before it is assigned is guarded like any value that is read. A function that counts its calls in
Python is therefore retraced for each count. A tensor that each call replaces is an input, so the
guard checks its type and sizes and not its identity.

The state of a module follows the rules of ``torch.export``: buffers, and attributes without
tensors, can be assigned. A parameter, a submodule, or an attribute with a tensor that is not a
buffer can't be assigned.

NOTE [objects among results]
Containers are flattened into leaves. Tensors and symbolic numbers among the leaves are values of
the program. There are three kinds of other leaves:

- an object from outside, which is an argument or is read from one, is replaced by an
  ``InputRef``: its index in the list of values that the program is called with. Each call returns
  its own object. A list or dict from outside is such a leaf as well: the list itself is returned,
  and its elements may change;
- an object that the function has made from traced values is made at every call: an instance
  of a class gets its attributes without a call of ``__init__``, and a set or a container of a
  user's class gets its elements. ``ConstructedObject`` stands for the object while the results are
  flattened;
- any other leaf is a constant of the program.

An object that runs code after the function has returned (a generator, a function that closes over
traced values) can't be rebuilt from values, and is refused.

A program of a module reads its parameters and buffers, and may assign buffers. torch's tools use
the names of ``state_dict()`` for them. For another function the names follow the user's spelling
of the tensors: ``model.fc.weight``, ``params['w']``.
"""

from __future__ import annotations

import copy
import keyword
import re
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import optree
import torch

from tsfunc import pytrees
from tsfunc.bridge.tracers.reachable import held_by
from tsfunc.bridge.tracers.tracer import Tracer
from tsfunc.errors import TypeCheckError
from tsfunc.types.values import PLAIN_VALUES, same_value

# --- assignments of a traced function, which its program repeats at every call


@dataclass(frozen=True)
class ResultSlot:
    """Stand-in for a tensor in the value of an update: its index among the updates' tensors."""

    index: int


@dataclass(frozen=True)
class InputRef:
    """Stand-in for an object from outside in a value that a program returns or assigns.

    Each call replaces it with its own object.

    Attributes:
        index: the index of the object in the list that the program is called with.
    """

    index: int


@dataclass(frozen=True)
class Update:
    """An assignment that a program ends with.

    Attributes:
        text: the user's spelling of the target.
        owner: the owner of the target, by its index in the list that the program is called with.
        target: the Python expression of the target, with ``{}`` for the owner.
        value: lists, tuples and dicts of constants, with a ``ResultSlot`` for each tensor.
        fills: True if the owner is a container whose elements are all replaced.
        deletes: True if the target is deleted.
        buffer: the name of the assigned buffer if the owner is a module.
        keeps: True if the guards on the target's value, except on its tensors, still hold after
            the assignment.
    """

    text: str
    owner: int
    target: str
    value: Any = None
    fills: bool = False
    deletes: bool = False
    buffer: str | None = None
    keeps: bool = True

    def current(self, owner: Any) -> Any:
        """Return the current value of the target; None if the target does not exist."""
        try:
            return eval(self.target.format("owner"), {"owner": owner})
        except (AttributeError, LookupError, ValueError):
            return None

    def slots(self) -> list[ResultSlot]:
        """Return the slots of the tensors in its value."""
        return list(_slots(self.value))

    def statements(self, owner: str, spell: Callable[[Any], str]) -> list[str]:
        """Return the update as Python statements.

        Args:
            spell: returns the Python expression of a value.
        """
        target = self.target.format(owner)
        if self.deletes:
            return [f"del {target}"]
        if not self.fills:
            return [f"{target} = {spell(self.value)}"]
        filled = [f"{target}.clear()"]
        if self.value:
            adds = "extend" if isinstance(self.value, list) else "update"
            filled.append(f"{target}.{adds}({spell(self.value)})")
        return filled


def _slots(value: Any) -> Iterator[ResultSlot]:
    if isinstance(value, ResultSlot):
        yield value
    else:
        for item in _elements_of(value):
            yield from _slots(item)


def fill(value: Any, tensors: Sequence[Any]) -> Any:
    """Return the value of an update with tensors, or other values, in its slots."""
    if isinstance(value, ResultSlot):
        return tensors[value.index]
    if isinstance(value, dict):
        filled = {key: fill(item, tensors) for key, item in value.items()}
        return defaultdict(value.default_factory, filled) if type(value) is defaultdict else filled
    if type(value) in (list, tuple, deque):
        return type(value)(fill(item, tensors) for item in value)
    return value


class UnrepeatableValue(Exception):
    """A value that a program can't make at every call; the message describes the value."""


class UpdateValues:
    """The values of a program's updates, and the tensors among them.

    Args:
        stand_in_of: returns the stand-in for an object from outside, or None for another object.
    """

    def __init__(self, stand_in_of: Callable[[Any], Any]) -> None:
        self.tensors: list[Any] = []
        self._stand_in_of = stand_in_of

    def stored_form(self, value: Any) -> Any:
        """Return a value in the form that an update stores.

        Raises:
            UnrepeatableValue: the traced function made the value, and its type can't be copied.
        """
        if isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat):
            self.tensors.append(value)
            return ResultSlot(len(self.tensors) - 1)
        if isinstance(value, PLAIN):
            return value
        cls = type(value)
        if cls in (list, deque):
            return cls(self.stored_form(item) for item in value)
        if cls is tuple:
            return tuple([self.stored_form(item) for item in value])
        if cls is dict:
            return {key: self.stored_form(item) for key, item in value.items()}
        if cls is defaultdict and isinstance(value.default_factory, _FACTORIES):
            items = {key: self.stored_form(item) for key, item in value.items()}
            return defaultdict(value.default_factory, items)
        if cls in (set, frozenset) and all(map(_is_plain_value, value)):
            return copy.copy(value)
        replacement = value if isinstance(value, _SHARED) else self._stand_in_of(value)
        if replacement is not None:
            return replacement
        raise UnrepeatableValue(f"a {cls.__name__} that the function has made")


def _is_plain_value(value: Any) -> bool:
    """True for a number, string or the like, and for a tuple or frozenset of these."""
    inside = type(value) in (tuple, frozenset)
    return all(map(_is_plain_value, value)) if inside else isinstance(value, PLAIN)


def replaced_tensors(before: Any, after: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that an assignment replaces by other tensors."""
    if isinstance(before, torch.Tensor):
        if isinstance(after, torch.Tensor) and after is not before:
            yield before
    elif isinstance(before, dict) and isinstance(after, dict):
        for key in before.keys() & after.keys():
            yield from replaced_tensors(before[key], after[key])
    elif isinstance(before, list | tuple | deque) and isinstance(after, list | tuple | deque):
        for some, other in zip(before, after, strict=False):
            yield from replaced_tensors(some, other)


def same_except_tensors(before: Any, after: Any) -> bool:
    """True if two values differ at most in their tensors."""
    if isinstance(before, torch.Tensor) or isinstance(after, torch.Tensor):
        return isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor)
    if isinstance(before, dict) and isinstance(after, dict):
        return list(before) == list(after) and all(
            same_except_tensors(before[k], after[k]) for k in before
        )
    if isinstance(before, list | tuple | deque) and isinstance(after, list | tuple | deque):
        return len(before) == len(after) and all(map(same_except_tensors, before, after))
    return same_value(before, after)


PLAIN = (*PLAIN_VALUES, torch.Size, range)
_FACTORIES = (type, types.FunctionType, types.BuiltinFunctionType, type(None))
_SHARED = (type, types.ModuleType, types.BuiltinFunctionType)


def has_tensor(value: Any) -> bool:
    """True if a value is a tensor or a container with a tensor in it."""
    if isinstance(value, torch.Tensor):
        return True
    return any(has_tensor(item) for item in _elements_of(value))


def _elements_of(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple | deque | set | frozenset):
        yield from value


class Updates(NamedTuple):
    """The updates of a program, and the tensors (and symbolic numbers) among their values."""

    updates: tuple[Update, ...] = ()
    tensors: tuple[Any, ...] = ()


# --- the results of a traced function, which its program makes at every call


StandInOf = Callable[[Any], Any]


class ConstructedObject:
    """An object that a program makes from its elements (for a container) and attributes.

    Attributes:
        keys: the keys of its elements: the keys of a mapping, the indices of another container.
        names: the names of its attributes.
        children: the elements, then the attributes.
    """

    __slots__ = ("children", "keys", "kind", "names")

    def __init__(
        self, kind: type, keys: tuple[Any, ...], names: tuple[str, ...], children: Sequence[Any]
    ) -> None:
        self.kind, self.keys, self.names, self.children = kind, keys, names, children


def _container_parts(constructed: ConstructedObject) -> tuple[Sequence[Any], Any]:
    return constructed.children, (constructed.kind, constructed.keys, constructed.names)


def _build(shape: tuple[type, tuple[Any, ...], tuple[str, ...]], children: Sequence[Any]) -> Any:
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


optree.register_pytree_node(
    ConstructedObject, _container_parts, _build, namespace=pytrees.NAMESPACE
)


def with_placeholders(label: str, out: Any, placeholder_of: StandInOf) -> Any:
    """Return the results of a function with stand-ins in place of objects.

    Args:
        out: the value that the function returned.
        placeholder_of: returns the stand-in for an object from outside, or None for another object.

    Raises:
        TypeCheckError: a result runs code after the function has returned.
    """
    return _Results(label, placeholder_of).replace_objects(out)


class _Results:
    def __init__(self, label: str, stand_in_of: StandInOf) -> None:
        self.label = label
        self.stand_in_of = stand_in_of
        self._above: list[int] = []  # the ids of the objects that contain the value

    def replace_objects(self, value: Any) -> Any:
        """Return a value in which stand-ins replace the objects that a program has to make."""
        leaves, structure = pytrees.flatten(value, self._is_from_outside)
        replaced = [leaf if _is_simple(leaf) else self._leaf(leaf) for leaf in leaves]
        if all(a is b for a, b in zip(replaced, leaves, strict=True)):
            return value
        return pytrees.unflatten(structure, replaced)

    def _is_from_outside(self, value: Any) -> bool:
        """True if a list or dict from outside is a result itself."""
        return isinstance(value, _CHANGEABLE) and isinstance(self.stand_in_of(value), InputRef)

    def _leaf(self, value: Any) -> Any:
        outside = self.stand_in_of(value)
        if outside is not None:
            return outside
        kind = type(value)
        if kind.__module__ in _ITERATORS and hasattr(kind, "__next__"):
            self._refuse(
                f"a {kind.__name__}, which computes its items only after the function has returned",
                "Return the items: list(...)",
            )
        if not _is_container(value) and not _reaches(value):
            return value
        if id(value) in self._above:
            self._refuse(f"a {kind.__qualname__} that refers to itself", "Return its parts")
        if not _can_be_constructed(value):
            self._refuse(
                f"a {kind.__qualname__} that refers to traced values",
                "Return these values, and make it of them after the call",
            )
        self._above.append(id(value))
        items, attributes = _items(value), _attributes(value)
        children = [self.replace_objects(item) for item in (*items.values(), *attributes.values())]
        self._above.pop()
        return ConstructedObject(kind, tuple(items), tuple(attributes), children)

    def _refuse(self, result: str, instead: str) -> None:
        raise TypeCheckError(
            f"{self.label}: the function returns {result}. A program returns only values. "
            f"{instead}."
        )


_ITERATORS = ("builtins", "itertools")


def _is_simple(value: Any) -> bool:
    """True if a leaf is a value of the program or has the type of a constant."""
    return isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, *PLAIN))


def _is_container(value: Any) -> bool:
    """True for a container; as a leaf it is of a class that is not a registered pytree."""
    return isinstance(value, _BASES)


def _can_be_constructed(value: Any) -> bool:
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
    attributes = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        for name, slot in vars(cls).items():
            is_slot = isinstance(slot, types.MemberDescriptorType) and not name.startswith("__")
            if is_slot and hasattr(value, name):
                attributes.setdefault(name, slot.__get__(value))
    return attributes


def _reaches(value: Any) -> bool:
    """True if an object is traced or refers to a traced value, directly or indirectly."""
    pending, met = [value], set[int]()
    while pending:
        each = pending.pop()
        if isinstance(each, Tracer | torch.SymInt | torch.SymFloat | torch.SymBool):
            return True
        if not isinstance(each, _NOT_SEARCHED) and id(each) not in met:
            met.add(id(each))
            pending += held_by(each)
    return False


_NOT_SEARCHED = (*PLAIN, torch.Tensor, type, types.ModuleType, types.CodeType)


# --- names of the tensors that a program reads from outside, as a module names them


@dataclass(frozen=True)
class ModuleState:
    """The names of the tensors that a program reads from outside.

    Attributes:
        module: the module that was traced; None for another function.
        names: the names of the lifted tensors, keyed by their names in the program.
        inputs: the names of the tensors that each call replaces, keyed by their index in the list
            that the program is called with.
        assigned: the names of the buffers that updates assign, keyed by the updates' indices.
        attributes: the names of lifted tensors that are attributes of the module or a submodule,
            but not parameters or buffers.
    """

    module: torch.nn.Module | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    inputs: Mapping[int, str] = field(default_factory=dict)
    assigned: Mapping[int, str] = field(default_factory=dict)
    attributes: Mapping[str, str] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleState:
        module = copy.deepcopy(self.module, memo)
        return replace(self, module=module)


def state_names(
    func: Callable[..., Any],
    lifted: Mapping[str, torch.Tensor],
    updates: Sequence[Update],
    first: int,
    values: Sequence[Any],
    read: Mapping[str, Any],
) -> ModuleState:
    """Return the names of the tensors that a program reads.

    Args:
        func: the traced function or module.
        lifted: the closed-over tensors that the program reads, keyed by their names in it.
        first: the number of flattened arguments.
        values: the values that the program is called with after the arguments.
        read: the values that the trace has read, keyed by the user's spelling.
    """
    module = func if isinstance(func, torch.nn.Module) else getattr(func, "__self__", None)
    if not isinstance(module, torch.nn.Module):
        names_of_tensors = {
            id(x): _dotted_name(text) for text, x in read.items() if isinstance(x, torch.Tensor)
        }
        return ModuleState(None, _names_of_lifted(lifted, names_of_tensors))
    tensors = dict(_state(module))
    inputs = {first + i: tensors[id(x)] for i, x in enumerate(values) if id(x) in tensors}
    prefixes: dict[int, str] = {}
    for name, submodule in module.named_modules():
        prefixes[id(submodule)] = f"{name}." if name else ""
    assigned = {}
    for i, update in enumerate(updates):
        owner = values[update.owner - first]
        if update.buffer is not None and id(owner) in prefixes:
            assigned[i] = prefixes[id(owner)] + update.buffer
    names = {
        id(value): prefixes[id(submodule)] + name
        for submodule in module.modules()
        for name, value in vars(submodule).items()
        if isinstance(value, torch.Tensor) and id(value) not in tensors
    }
    return ModuleState(
        module, _names_of_lifted(lifted, tensors), inputs, assigned, _names_of_lifted(lifted, names)
    )


def names_in_source(
    func: Callable[..., Any],
    lifted: Mapping[str, torch.Tensor],
    read: Mapping[str, Any],
    used_names: Collection[str],
) -> dict[str, str]:
    """Return for each lifted tensor that the user has named an identifier made of that name.

    Args:
        used_names: other names in the program.
    """
    state = state_names(func, lifted, (), 0, (), read)
    used = {*used_names, *lifted, *keyword.kwlist}
    names = {}
    for name, text in {**state.attributes, **state.names}.items():
        plain = re.sub(r"\._(modules|parameters|buffers)\b", "", text)
        base = re.sub(r"\W+", "_", plain)
        base = chosen = base if base.isidentifier() else f"_{base}"
        i = 1
        while chosen in used:
            i += 1
            chosen = f"{base}_{i}"
        used.add(chosen)
        names[name] = chosen
    return names


def _state(module: torch.nn.Module) -> Iterator[tuple[int, str]]:
    """Return each parameter and buffer by its id; the first name of several counts."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return ((id(tensor), name) for name, tensor in named)


def _names_of_lifted(
    lifted: Mapping[str, torch.Tensor], names_of_tensors: Mapping[int, str]
) -> dict[str, str]:
    return {
        name: names_of_tensors[id(x)] for name, x in lifted.items() if id(x) in names_of_tensors
    }


def _dotted_name(text: str) -> str:
    """Return the dotted name of a spelling: ``params['w'][0]`` becomes ``params.w.0``."""
    name = re.sub(r"\[(['\"]?)(.*?)\1\]", r".\2", text)
    return re.sub(r"[^\w.]+|(?<=\.)\.+", "_", name).strip(".")
