"""Values that a trace has read, and the guards of later calls on these values.

NOTE [attributes]
A parameter may be an object of any class. The guards check the attributes that the traced function
reads, each at its source. The single traced run is watched (``instances.py``), and each attribute
of a known object that is read becomes a guard (``closure_guards.py``) that later calls check:

- a tensor of an argument is an input of the program, read at every call; a tensor of an
  object that belongs to the function (its module, an object in its closure) must be the same
  tensor, unless the function itself replaces it (NOTE [updates] in ``results.py``);
- a number, string, dtype, enum member or other object with a value must be equal; a function, a
  class or other object that is compared by identity must be the same object;
- a list, tuple or dict must hold such values in the same places;
- any other object is watched in turn, and its class must be the same;
- a method runs watched, and must still be the same function.

A program that was traced for one instance therefore runs for every instance whose class and
attributes pass these guards. An instance that fails them gets a program of its own.

NOTE [closures]
``closure`` selects the treatment of values that are not arguments: variables, defaults, the
function's own objects. ``"guard"`` guards them as described above. ``"freeze"`` makes the values
found by the first call constants of the program, the data of tensors included, and does not guard
them. ``"error"`` raises an error when they are read.

NOTE [numbers that vary]
A number that a trace reads from outside is guarded by its value. If a later call fails because of
it, as when a scheduler changes ``optimizer.param_groups[0]["lr"]``, the next trace makes it an
input: the function computes with a symbolic number, in its place for the time of the trace, and the
program reads the current value at every call. Questions about the number (``if lr > 0``) become
guards. If the function can't be traced with the symbol (it is a key of a dict, say), or does
something else with it than with the number (``isinstance``: the two programs are compared), the
number stays guarded by its value, and each value has its own program. If the two programs differ
only because the number is 0 or 1 (``x * 1`` has no operator), that value alone stays guarded.
Variables are guarded by their values, because other threads may read them during the trace.

NOTE [contents that are shown]
An object may show the contents of another: a view of a dict, a reference, a byte buffer, an enum
member. Later calls are guarded on the contents, which change without the object.
"""

from __future__ import annotations

import argparse
import array
import contextvars
import copy
import enum
import functools
import re
import sys
import threading
import types
import weakref
from collections import ChainMap, OrderedDict, UserDict, UserList, UserString, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, NoReturn

import torch

from tsfunc.bridge.sizes.symbols import can_be_symbol
from tsfunc.errors import ClosureError, TypeCheckError
from tsfunc.program.closure.closure_guards import (
    AnyClosureNumber,
    ClosureGuards,
    EqualValue,
    KeysAre,
    LengthIs,
    SameObject,
    SameObjectAs,
    TypeOf,
)
from tsfunc.program.closure.results import PLAIN, InputRef
from tsfunc.program.guard import Source
from tsfunc.types.values import same_value
from tsfunc.user_code import user_location

# --- numbers that vary


Read = int | float | type
NumberHistory = Mapping[str, Collection[Read]]


class ClosureNumber(NamedTuple):
    """A number that is an input of a program.

    Attributes:
        name: its name in the program.
        variable: its variable in the generated guard.
        value: its value in the traced call.
        position: its index among the values that the program is called with after the arguments.
    """

    name: str
    source: Source
    variable: str
    value: int | float
    position: int


class ClosureNumbers:
    """The numbers of one trace.

    Args:
        earlier: the values of such numbers in earlier traces, by the user's spelling; the type of
            those that were inputs. A number that differs from one of its type is an input.

    Attributes:
        read: the value of each number that was read, by the user's spelling; the type of an input.
        inputs: the numbers that are inputs, by the user's spelling.
        symbol: returns the symbolic number for an input; None before the trace has begun.
    """

    def __init__(self, earlier: NumberHistory = MappingProxyType({})) -> None:
        self._earlier = earlier
        self.read: dict[str, Read] = {}
        self.inputs: dict[str, ClosureNumber] = {}
        self.symbol: Callable[[ClosureNumber], Any] | None = None
        self._symbols: dict[str, Any] = {}
        self._waiting: list[tuple[Any, Any, Callable[[], Any]]] = []
        self._replaced: list[tuple[Any, Any, Any, Any]] = []

    def is_input(self, value: Any, text: str) -> bool:
        """Record the read of a value; return True if it is an input of the program."""
        if type(value) not in (int, float):
            return False
        earlier = self._earlier.get(text, ())
        varies = any(
            other is type(value) or (type(other) is type(value) and not same_value(other, value))
            for other in earlier
        )
        self.read[text] = type(value) if varies and can_be_symbol(value) else value
        return self.read[text] is not value

    def are_inputs(self, values: tuple[Any, ...], text: str) -> bool:
        """True if one of the elements of a tuple is an input of the program."""
        inputs = [self.is_input(value, f"{text}[{i}]") for i, value in enumerate(values)]
        return any(inputs)

    def add(self, value: Any, source: Source, guards: ClosureGuards) -> None:
        """Make a number an input: guard its type only."""
        if source.text not in self.inputs:
            variable = f"number_{len(self.inputs)}"
            guards.add(AnyClosureNumber(source, variable, type(value), value, can_be_symbol))
            name = re.sub(r"\W+", "_", source.text).strip("_")
            position = guards.add_input(source, value)
            self.inputs[source.text] = ClosureNumber(name, source, variable, value, position)

    def symbol_of(self, text: str) -> Any:
        """Return the symbolic number of an input; its value before the trace has begun."""
        varying = self.inputs[text]
        if self.symbol is None:
            return varying.value
        if text not in self._symbols:
            self._symbols[text] = self.symbol(varying)
        return self._symbols[text]

    def replace_in(self, container: Any, key: Any, make: Callable[[], Any]) -> None:
        """Replace an element of a container from the start of the trace, by one with symbols."""
        if self.symbol is None:
            self._waiting.append((container, key, make))
            return
        before, container[key] = container[key], make()
        self._replaced.append((container, key, container[key], before))

    def start(self, symbol: Callable[[ClosureNumber], Any]) -> None:
        """Begin the trace."""
        self.symbol = symbol
        for each in self._waiting:
            self.replace_in(*each)

    def restore(self) -> None:
        """Restore the numbers in their containers, where the function has left the symbols."""
        for container, key, symbol, before in self._replaced:
            if _items(container).get(key) is symbol:
                container[key] = before
        self._replaced.clear()

    def is_same(self, now: Any, before: Any) -> bool:
        """True if an element is the one before, or the symbol in its place."""
        return now is before or any(now is x and before is y for _, _, x, y in self._replaced)


# --- objects that show contents: NOTE [contents that are shown]


_DICT: dict[Any, Any] = {}
_VIEWS = (type(_DICT.keys()), type(_DICT.values()), type(_DICT.items()))
_BYTES = (bytearray, array.array, memoryview)

_OF_MEMBERS = {"_value_", "_name_", "__objclass__", "_sort_order_"}  # every enum member has these


def has_contents(value: Any) -> bool:
    """True if an object that is not a pytree container has elements or shows contents."""
    array_like = hasattr(type(value), "__array__") and not isinstance(value, torch.Tensor)
    return array_like or isinstance(value, set) or viewed_state(value) is not None


def viewed_state(value: Any) -> tuple[str, Any] | None:
    """Return the contents that an object shows.

    Returns:
        The Python expression for the contents, with ``{}`` for the object, and the contents now;
        None for an object that shows nothing.
    """
    if isinstance(value, _VIEWS):
        return "list({})", list(value)
    if isinstance(value, types.MappingProxyType):
        return "dict({})", dict(value)
    if isinstance(value, enum.Enum):
        attributes = vars(value)
        if attributes.keys() <= _OF_MEMBERS:
            return "{}._value_", attributes["_value_"]
        return "{}.__dict__", dict(attributes)
    if isinstance(value, contextvars.ContextVar):
        return "{}.get(...)", value.get(...)
    if isinstance(value, _BYTES):
        return "memoryview({}).tobytes()", memoryview(value).tobytes()
    if isinstance(value, weakref.ref):
        # A referenced tensor is compared by identity, as the reference itself is.
        referent = value()
        return None if isinstance(referent, torch.Tensor) else ("{}()", referent)
    return None


# --- the guards of values


# The subclasses of float are not guarded by value, nor are the members of enums.
_VALUES = tuple(kind for kind in PLAIN if kind not in (float, enum.Enum))
_SEQUENCES = (list, tuple, deque)
_SETS = (set, frozenset)
_MANY = 64  # the elements of longer containers of plain values are compared as one value


class ContainerSnapshot(NamedTuple):
    """A container that the trace has read, with a copy of its contents at that time."""

    value: Any
    before: Any
    source: Source


Closure = Literal["guard", "freeze", "error"]


class GuardBuilder:
    """Makes the guards of the values that a trace has read.

    Args:
        name: the name of the specialized function, for errors.
        on_object: called with each object that is to be watched.
        on_function: called with each function among the values.
        on_opaque: called with the source and each object that is compared by identity.
        closure: the treatment of values that belong to the function: NOTE [closures].
        earlier: the numbers that earlier traces have read: NOTE [numbers that vary].

    Attributes:
        closure_guards: the guards of later calls.
        numbers: the numbers in containers and objects: NOTE [numbers that vary].
        inputs: the tensors that are read at every call.
        containers: the containers whose elements the function may change.
        read: the guarded values, keyed by the user's spelling of their sources.
        arguments: the flattened arguments of the call that is traced.
    """

    def __init__(
        self,
        name: str,
        on_object: Callable[[Any, Source], None],
        on_function: Callable[[Any], None],
        on_opaque: Callable[[str, Any], None],
        closure: Closure,
        earlier: NumberHistory,
    ) -> None:
        self.name, self.closure = name, closure
        self.numbers = ClosureNumbers(earlier)
        self.closure_guards = ClosureGuards()
        self._closure_guards = (
            ClosureGuards() if closure == "freeze" else self.closure_guards
        )  # not checked
        self.inputs: list[tuple[torch.Tensor, Source]] = []
        self.containers: list[ContainerSnapshot] = []
        self.read: dict[str, Any] = {}
        self._on_object, self._on_function, self._on_opaque = on_object, on_function, on_opaque
        # Keeps the objects, and so their ids, alive.
        self._known: dict[int, tuple[Any, Source]] = {}
        self.arguments: Sequence[Any] = ()

    def guards_of(self, in_closure: bool) -> ClosureGuards:
        """Return the guards for the function's own values (``in_closure``), or for an argument."""
        return self._closure_guards if in_closure else self.closure_guards

    def source_of(self, value: Any) -> Source | None:
        """Return the source of an object that the trace has met, or None."""
        entry = self._known.get(id(value))
        return None if entry is None else entry[1]

    @property
    def closure_tensors(self) -> dict[int, torch.Tensor]:
        """The tensors that belong to the function itself, by id."""
        entries = self._known.items()
        return {
            i: x for i, (x, source) in entries if source.in_closure and isinstance(x, torch.Tensor)
        }

    def placeholder_of(self, value: Any) -> Any:
        """Return the stand-in for an object from outside in a value of the program.

        The result is an ``InputRef`` for an argument or a guarded object, and None for an object
        that is not from outside. A frozen object (``closure="freeze"``) is returned unchanged.
        """
        for i, argument in enumerate(self.arguments):
            if argument is value:
                return InputRef(i)
        source = self.source_of(value)
        if source is None:
            return None
        guards = self.guards_of(source.in_closure)
        if guards is not self.closure_guards:
            return value
        return InputRef(len(self.arguments) + guards.add_input(source, value))

    def guard(self, value: Any, source: Source) -> None:
        """Guard a value: later calls must find the same or an equal value at its source."""
        entry = self._known.get(id(value))
        guards = self.guards_of(source.in_closure)
        if guards is self.closure_guards:
            self.read.setdefault(source.text, value)
        if entry is not None:
            if guards is not self.guards_of(entry[1].in_closure):
                guards.add(SameObject(source, value))
            elif source.path != entry[1].path:
                guards.add(SameObjectAs(source, entry[1]))
        elif isinstance(value, torch.Tensor):
            self._tensor(value, source)
        elif type(value) is float or (
            isinstance(value, _VALUES) and not isinstance(value, enum.Enum)
        ):
            guards.add(EqualValue(source, value))
        else:
            self._object(value, source)

    def make_input(self, value: torch.Tensor) -> None:
        """Turn a tensor of the function into an input, since the function itself replaces it."""
        entry = self._known.get(id(value))
        if (
            entry is not None
            and entry[1].in_closure
            and not any(value is x for x, _ in self.inputs)
        ):
            self._closure_guards.make_input(entry[1], value)
            self.inputs.append((value, entry[1]))

    def grad_of(self, value: torch.Tensor, source: Source) -> torch.Tensor | None:
        """Return the ``.grad`` of a closed-over tensor, and guard it; a tensor is an input."""
        grad = value.grad
        self.guard(grad, source.attribute("grad", f"{source.text}.grad"))
        if grad is not None:
            self.make_input(grad)
        return grad

    def refuse_closure_value(self, text: str, at: str) -> None:
        """Raise an error if ``closure`` forbids values that are not arguments.

        Raises:
            ClosureError: ``closure`` is ``"error"``.
        """
        if self.closure == "error":
            raise ClosureError(
                f'specialize({self.name}, closure="error"): {text} is read at {at}, and is not '
                f'an argument. Pass it as an argument; or use closure="guard", with which every '
                f'call checks that it is unchanged, or closure="freeze", which makes it a constant.'
            )

    def _tensor(self, value: torch.Tensor, source: Source) -> None:
        self._known[id(value)] = value, source
        if source.in_closure:
            self._closure_guards.guard_identity(source, value)
            if vars(value):
                self.guard(dict(vars(value)), source.at("vars({})"))
        else:
            self.closure_guards.guard_input(source, value)
            self.inputs.append((value, source))

    def _object(self, value: Any, source: Source) -> None:
        cls, guards = type(value), self.guards_of(source.in_closure)
        inside = viewed_state(value)
        if is_container(value):
            self._container(value, source)
        elif inside is not None:
            if isinstance(value, enum.Enum):
                guards.add(SameObject(source, value))
                self._known[id(value)] = value, source
            expression, now = inside
            guards.add(TypeOf(source, cls))
            self.guard(now, source.at(expression))
        elif isinstance(value, _SETS) or hasattr(cls, "__array__"):
            guards.guard_contents(source, value)
            if isinstance(value, set):
                self._known[id(value)] = value, source
                self.containers.append(ContainerSnapshot(value, copy.copy(value), source))
            if isinstance(value, _SETS):
                self._elements(value, source)
            elif str(getattr(value, "dtype", "")) == "object":
                for i, item in enumerate(value.flat):
                    self.guard(item, source.at(f"{{}}.flat[{i}]", f"{source.text}[{i}]"))
        elif is_watched(value):
            self._known[id(value)] = value, source
            guards.add(TypeOf(source, cls))
            self._on_object(value, source)
        elif hasattr(cls, "__next__"):
            self.refuse_iterator(source.owner, f"read at {user_location()}", value)
        elif has_value(cls):
            guards.add(EqualValue(source, value))
        else:
            guards.add(SameObject(source, value))
            self._on_function(value)
            self._on_opaque(source.text, value)

    def refuse_iterator(self, text: str, how: str, value: Any) -> NoReturn:
        """Refuse an iterator, which returns a different item at each read.

        Raises:
            TypeCheckError: always.
        """
        raise TypeCheckError(
            f"specialize({self.name}): {text} is {how}, and is a {type(value).__name__}, which "
            f"changes by being read: a program can neither compare it nor read it again. Read it "
            f"before the call, and pass its items."
        )

    def _elements(self, values: Iterable[Any], source: Source) -> None:
        """Guard the objects that are elements of a set or keys of a dict, by identity."""
        for value in values:
            if is_watched(value):
                self.guard(
                    value, Source.of_object(value, source.text, source.owner, source.in_closure)
                )

    def _container(self, value: Any, source: Source) -> None:
        items, guards = _items(value), self.guards_of(source.in_closure)
        guards.add(TypeOf(source, type(value)))
        self._known[id(value)] = value, source
        if not isinstance(value, tuple):
            before = copy.copy(vars(value)) if is_namespace(value) else copy.copy(value)
            self.containers.append(ContainerSnapshot(value, before, source))
        if len(items) > _MANY and all(type(item) in (*_VALUES, float) for item in items.values()):
            guards.guard_contents(source, value)
            return
        namespace = is_namespace(value)
        if isinstance(value, dict) or namespace:
            plain = namespace or type(value) in (dict, OrderedDict, defaultdict)
            guards.add(KeysAre(source.at("vars({})") if namespace else source, list(items), plain))
            self._elements(items, source)
        elif isinstance(value, deque):
            guards.add(LengthIs(source, len(items), value.maxlen))
        else:
            guards.add(LengthIs(source, len(items)))
        if isinstance(value, defaultdict):
            text = f"{source.text}.default_factory"
            self.guard(value.default_factory, source.attribute("default_factory", text))
        for i, (key, item) in enumerate(items.items()):
            step = f".{key}" if namespace else f"[{self._key_text(key, i)}]"
            text, owner = source.text + step, source.owner + step
            if namespace:
                at = source.attribute(key, text, owner)
            else:
                at = source.item(key, text, owner)
            into = vars(value) if isinstance(value, types.SimpleNamespace) else value
            settable = hasattr(into, "__setitem__")
            if settable and self.numbers.is_input(item, text):
                self.numbers.add(item, at, guards)
                self.numbers.replace_in(into, key, functools.partial(self.numbers.symbol_of, text))
            elif settable and type(item) is tuple and self.numbers.are_inputs(item, text):
                self.numbers.replace_in(into, key, self.tuple_of_numbers(item, at))
            else:
                self.guard(item, at)

    def _key_text(self, key: Any, i: int) -> str:
        """Return the text of the i-th key of a dict: a tensor's is the place that it was read from.

        The values of a tensor, which its repr has, differ from process to process.
        """
        if not isinstance(key, torch.Tensor):
            return repr(key)
        places = (text for text, value in self.read.items() if value is key)
        return next(places, f"<{type(key).__name__} {i}>")

    def tuple_of_numbers(
        self, items: tuple[Any, ...], source: Source
    ) -> Callable[[], tuple[Any, ...]]:
        """Guard a tuple, some of whose numbers are inputs.

        Returns:
            A function that returns one tuple with symbols in place of these numbers.
        """
        guards, numbers = self.guards_of(source.in_closure), self.numbers
        guards.add(TypeOf(source, tuple), LengthIs(source, len(items)))
        texts: list[str | None] = []
        for i, item in enumerate(items):
            at = source.item(i, f"{source.text}[{i}]", f"{source.owner}[{i}]")
            varies = numbers.is_input(item, at.text)
            texts.append(at.text if varies else None)
            if varies:
                numbers.add(item, at, guards)
            else:
                self.guard(item, at)

        @functools.cache
        def replaced() -> tuple[Any, ...]:
            pairs = zip(items, texts, strict=True)
            return tuple(item if text is None else numbers.symbol_of(text) for item, text in pairs)

        return replaced


def _items(value: Any) -> dict[Any, Any]:
    """Return the elements of a container by their keys."""
    items: dict[Any, Any] = vars(value) if is_namespace(value) else value
    return items if isinstance(items, dict) else dict(enumerate(items))


def is_container(value: Any) -> bool:
    """True if an object is guarded element by element."""
    return isinstance(value, (*_SEQUENCES, dict)) or is_namespace(value)


def is_namespace(value: Any) -> bool:
    """True for a namespace object: a ``SimpleNamespace`` or a plain ``threading.local``."""
    return isinstance(value, types.SimpleNamespace) or type(value) is threading.local


def has_changed(copied: ContainerSnapshot, numbers: ClosureNumbers) -> bool:
    """True if the elements of a container differ from those at its first read."""
    if isinstance(copied.value, set):
        return bool(copied.value != copied.before)
    now, before = _items(copied.value), _items(copied.before)
    same = numbers.is_same
    return list(now) != list(before) or not all(same(now[key], before[key]) for key in before)


def restore(copied: ContainerSnapshot) -> None:
    """Restore the elements that a container had at its first read."""
    value, before = copied.value, copied.before
    if is_namespace(value):
        value = vars(value)
    value.clear()
    value.update(before) if hasattr(value, "update") else value.extend(before)


_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8  # of CPython's type flags


def can_watch(cls: type) -> bool:
    """True if attributes of the class can be set."""
    # Metaclasses of C extensions (pybind11's) refuse `type.__setattr__` on their classes.
    plain: Any = type(cls).__setattr__
    mutable = cls.__flags__ & _HEAP_TYPE and not cls.__flags__ & _IMMUTABLE_TYPE
    return bool(mutable) and plain is type.__setattr__


def is_watched(value: Any) -> bool:
    """True if the attributes of an object are watched."""
    cls = type(value)
    root = cls.__module__.partition(".")[0]
    return (
        can_watch(cls)
        and not isinstance(value, _UNWATCHED)
        and not hasattr(cls, "__next__")
        and (root not in _OPAQUE or isinstance(value, _WATCHED))
        and not cls.__module__.startswith(_OPERATORS)
    )


_UNWATCHED = (
    torch.Tensor, torch.jit.ScriptModule, type(torch.ops.aten.sin),
    type(torch.ops.aten.sin.default), type, enum.Enum, *_SEQUENCES, *_SETS, dict,
    int, float, complex, str, bytes,  # the value of a subclass is not an attribute
)  # fmt: skip
# Classes of the standard library whose attributes are a user's data.
_WATCHED = (argparse.Namespace, ChainMap, UserDict, UserList, UserString)
_OPERATORS = ("torch._library", "torch._ops")  # the modules of the classes of operators
# A class that was created outside of a module has "builtins" as its module.
_OPAQUE = frozenset({*sys.stdlib_module_names, "tsfunc"}) - {"builtins"}


def has_value(cls: type) -> bool:
    """True if the objects of a class are compared by value: paths, dates, patterns."""
    compares: Any = cls.__eq__
    # Weak references compare their referents, which may be tensors.
    by_value = compares is not object.__eq__ and not issubclass(cls, weakref.ref)
    return by_value and cls.__hash__ is not None
