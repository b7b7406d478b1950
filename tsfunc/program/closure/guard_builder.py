"""Values that a trace has read, and the guards that later calls are held to.

NOTE [attributes]
A parameter may be an object of any class. The guards check the attributes that the traced function
reads, each at the place where it reads it. The single traced run is watched (``instances.py``), and
each attribute of a known object that is read becomes a line of generated Python
(``guard_codegen.py``) that later calls run:

- a tensor of an argument is an input of the program, read anew at every call; a tensor of an
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
"""

from __future__ import annotations

import argparse
import copy
import enum
import functools
import sys
import threading
import types
import weakref
from collections import ChainMap, UserDict, UserList, UserString, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, NoReturn

import torch

from tsfunc.dispatch.places import users_place
from tsfunc.errors import ClosureError, TypeCheckError
from tsfunc.program.closure.guard_codegen import GuardLines
from tsfunc.program.closure.numbers import Earlier, Numbers
from tsfunc.program.closure.results import OutsideRef
from tsfunc.program.closure.viewed_state import viewed_state
from tsfunc.program.closure.watching import can_watch

_VALUES = (
    int, bool, str, bytes, complex, type(None), torch.dtype, torch.layout, torch.memory_format,
    torch.device, torch.Size, range,
)  # fmt: skip
_SEQUENCES = (list, tuple, deque)
_SETS = (set, frozenset)
_MANY = 64  # the elements of longer containers of plain values are compared as one value


@dataclass(frozen=True)
class Source:
    """The place at which a value was found.

    Attributes:
        variable: the variable that holds the value in the generated code.
        text: the user's spelling of the place, from a parameter: ``model.layers[0].weight``.
        owner: the name of the place in errors, from its owner's class: ``Model.layers[0]``.
        own: whether the value belongs to the function itself, and not to an argument.
    """

    variable: str
    text: str
    owner: str
    own: bool


class Copied(NamedTuple):
    """A container that the trace has read, with a copy of its contents at that time."""

    value: Any
    before: Any
    source: Source


Closure = Literal["guard", "freeze", "error"]


class GuardBuilder:
    """Makes the guards of the values that a trace has read.

    Args:
        name: the name of the specialized function, for errors.
        enter: called with each object that is to be watched.
        met: called with each function among the values.
        opaque: called with the place and the object for objects that are compared by identity.
        closure: the treatment of values that belong to the function: NOTE [closures].
        earlier: the numbers that earlier traces have read: NOTE [numbers that vary].

    Attributes:
        guard_lines: the guards of later calls.
        numbers: the numbers in containers and objects: NOTE [numbers that vary].
        inputs: the tensors that are read anew at every call.
        containers: the containers whose elements the function may change.
        read: the guarded values, keyed by the user's spelling of their places.
    """

    def __init__(
        self,
        name: str,
        enter: Callable[[Any, Source], None],
        met: Callable[[Any], None],
        opaque: Callable[[str, Any], None],
        closure: Closure = "guard",
        earlier: Earlier = MappingProxyType({}),
    ) -> None:
        self.name = name
        self.numbers = Numbers(earlier)
        self.closure = closure
        self.guard_lines = GuardLines()
        self._own = GuardLines() if closure == "freeze" else self.guard_lines  # not checked
        self.inputs: list[tuple[torch.Tensor, Source]] = []
        self.containers: list[Copied] = []
        self.read: dict[str, Any] = {}
        self._enter = enter
        self._met = met
        self._opaque = opaque
        self._known: dict[
            int, tuple[Any, Source]
        ] = {}  # keeps the objects, and so their ids, alive
        self._given: Sequence[Any] = ()

    def lines_of(self, own: bool) -> GuardLines:
        """Return the guards for values of the function itself (`own`), or of an argument."""
        return self._own if own else self.guard_lines

    def is_known(self, value: Any) -> bool:
        """Return True if the trace has met an object from outside."""
        return id(value) in self._known

    def source_of(self, value: Any) -> Source | None:
        """Return the place at which the trace has met an object, or None."""
        known = self._known.get(id(value))
        return None if known is None else known[1]

    @property
    def own_tensors(self) -> dict[int, torch.Tensor]:
        """The tensors that belong to the function itself, by id."""
        known = self._known.items()
        return {i: x for i, (x, source) in known if source.own and isinstance(x, torch.Tensor)}

    def set_arguments(self, flat: Sequence[Any]) -> None:
        """Set the flattened arguments."""
        self._given = flat

    def placeholder_of(self, value: Any) -> Any:
        """Return the stand-in for an object from outside in a value of the program.

        The result is an ``Outside`` for an argument or a guarded object, and None for an object
        that is not from outside. A frozen object (``closure="freeze"``) is returned unchanged.
        """
        for i, given in enumerate(self._given):
            if given is value:
                return OutsideRef(i)
        source = self.source_of(value)
        if source is None:
            return None
        guard_lines = self.lines_of(source.own)
        if guard_lines is not self.guard_lines:
            return value
        return OutsideRef(len(self._given) + guard_lines.result(source.variable, value))

    def guard(self, value: Any, source: Source) -> None:
        """Guard a value: later calls must find the same or an equal value at its place."""
        known = self._known.get(id(value))
        guard_lines = self.lines_of(source.own)
        if guard_lines is self.guard_lines:
            self.read.setdefault(source.text, value)
        if known is not None:
            if guard_lines is not self.lines_of(known[1].own):
                guard_lines.require_same(source.variable, value)
            elif source.variable != known[1].variable:
                guard_lines.require(f"{source.variable} is {known[1].variable}")
        elif isinstance(value, torch.Tensor):
            self._tensor(value, source)
        elif type(value) is float:
            guard_lines.require_float(source.variable, value)
        elif isinstance(value, _VALUES) and not isinstance(value, enum.Enum):
            guard_lines.require_equal(source.variable, value)
        else:
            self._object(value, source)

    def loosen(self, value: torch.Tensor) -> None:
        """Turn a tensor of the function into an input, since the function itself replaces it."""
        known = self._known.get(id(value))
        if known is not None and known[1].own and not any(value is x for x, _ in self.inputs):
            self._own.loosen(known[1].variable, value)
            self.inputs.append((value, known[1]))

    def grad_of(self, value: torch.Tensor, source: Source) -> torch.Tensor | None:
        """Return the ``.grad`` of a tensor from outside, and guard it; a tensor is an input."""
        found = value.grad
        text = f"{source.text}.grad"
        variable = self.lines_of(source.own).bind(f"{source.variable}.grad")
        self.guard(found, replace(source, variable=variable, text=text, owner=text))
        if found is not None:
            self.loosen(found)
        return found

    def refuse_own(self, text: str, at: str) -> None:
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
        if source.own:
            self._own.require_own_tensor(source.variable, value)
            if vars(value):
                variable = self._own.bind(f"vars({source.variable})")
                self.guard(dict(vars(value)), replace(source, variable=variable))
        else:
            self.guard_lines.require_tensor(source.variable, value)
            self.inputs.append((value, source))

    def _object(self, value: Any, source: Source) -> None:
        at, cls = source.variable, type(value)
        guard_lines = self.lines_of(source.own)
        inside = viewed_state(value)
        if is_container(value):
            self._container(value, source)
        elif inside is not None:
            if isinstance(value, enum.Enum):
                guard_lines.require_same(at, value)
                self._known[id(value)] = value, source
            guard_lines.require_type(at, cls)
            expression, now = inside
            self.guard(now, replace(source, variable=guard_lines.bind(expression.format(at))))
        elif isinstance(value, _SETS) or hasattr(cls, "__array__"):
            guard_lines.require_same_value(at, value)
            if isinstance(value, set):
                self._known[id(value)] = value, source
                self.containers.append(Copied(value, copy.copy(value), source))
            if isinstance(value, _SETS):
                self._elements(value, source)
            elif str(getattr(value, "dtype", "")) == "object":
                for i, item in enumerate(value.flat):
                    variable = guard_lines.bind(f"{at}.flat[{i}]")
                    self.guard(item, replace(source, variable=variable, text=f"{source.text}[{i}]"))
        elif is_instance(value):
            self._known[id(value)] = value, source
            guard_lines.require_type(at, cls)
            self._enter(value, source)
        elif hasattr(cls, "__next__"):
            self.refuse_iterator(source.owner, f"read at {users_place()}", value)
        elif has_value(cls):
            guard_lines.require_equal(at, value)
        else:
            guard_lines.require_same(at, value)
            self._met(value)
            self._opaque(source.text, value)

    def refuse_iterator(self, text: str, how: str, value: Any) -> NoReturn:
        """Refuse an iterator, which returns a different item at each read.

        Raises:
            TypeCheckError: always.
        """
        raise TypeCheckError(
            f"specialize({self.name}): {text} is {how}, and is a {type(value).__name__}, which "
            f"changes by being read: a program can neither compare it nor read it anew. Read it "
            f"before the call, and pass what it gives."
        )

    def _elements(self, values: Iterable[Any], source: Source) -> None:
        """Guard the objects that are elements of a set or keys of a dict, by identity."""
        for each in values:
            if is_instance(each):
                guard_lines = self.lines_of(source.own)
                self.guard(each, replace(source, variable=guard_lines.bind(guard_lines.name(each))))

    def _container(self, value: Any, source: Source) -> None:
        at, items = source.variable, _items(value)
        guard_lines = self.lines_of(source.own)
        guard_lines.require_type(at, type(value))
        self._known[id(value)] = value, source
        if not isinstance(value, tuple):
            before = copy.copy(vars(value)) if is_namespace(value) else copy.copy(value)
            self.containers.append(Copied(value, before, source))
        if len(items) > _MANY and all(type(item) in (*_VALUES, float) for item in items.values()):
            guard_lines.require_same_value(at, value)
            return
        namespace = is_namespace(value)
        if isinstance(value, dict) or namespace:
            guard_lines.require_keys(f"vars({at})" if namespace else at, list(items))
            self._elements(items, source)
        else:
            guard_lines.require(f"len({at}) == {len(items)}")
            if isinstance(value, deque):
                guard_lines.require(f"{at}.maxlen == {value.maxlen}")
        if isinstance(value, defaultdict):
            variable, text = (
                guard_lines.bind(f"{at}.default_factory"),
                f"{source.text}.default_factory",
            )
            self.guard(value.default_factory, replace(source, variable=variable, text=text))
        for key, item in items.items():
            spelled = f"[{guard_lines.spell(key)}]", f"[{key!r}]"
            way, text = (f".{key}",) * 2 if namespace else spelled
            variable, owner = guard_lines.bind(f"{at}{way}"), source.owner + text
            text = source.text + text
            settable = hasattr(value, "__setitem__")
            if settable and self.numbers.is_input(item, text):
                self.numbers.add(item, text, variable, guard_lines)
                self.numbers.put_into(value, key, functools.partial(self.numbers.of, text))
            elif settable and type(item) is tuple and self.numbers.are_inputs(item, text):
                self._tuple_of_numbers(value, key, Source(variable, text, owner, source.own))
            else:
                self.guard(item, Source(variable, text, owner, source.own))

    def _tuple_of_numbers(self, container: Any, key: Any, source: Source) -> None:
        """Guard a tuple, some of whose numbers are inputs, and replace it by one of symbols."""
        guard_lines, numbers, found = self.lines_of(source.own), self.numbers, container[key]
        guard_lines.require_type(source.variable, tuple)
        guard_lines.require(f"len({source.variable}) == {len(found)}")
        texts: list[str | None] = []
        for i, item in enumerate(found):
            variable, text = guard_lines.bind(f"{source.variable}[{i}]"), f"{source.text}[{i}]"
            varies = numbers.is_input(item, text)
            texts.append(text if varies else None)
            if varies:
                numbers.add(item, text, variable, guard_lines)
            else:
                self.guard(item, Source(variable, text, f"{source.owner}[{i}]", source.own))

        def replaced() -> tuple[Any, ...]:
            pairs = zip(found, texts, strict=True)
            return tuple(item if text is None else numbers.of(text) for item, text in pairs)

        numbers.put_into(container, key, replaced)


def _items(value: Any) -> dict[Any, Any]:
    """Return the elements of a container by their keys."""
    found: dict[Any, Any] = vars(value) if is_namespace(value) else value
    return found if isinstance(found, dict) else dict(enumerate(found))


def is_container(value: Any) -> bool:
    """Return True if an object is guarded element by element."""
    return isinstance(value, (*_SEQUENCES, dict)) or is_namespace(value)


def is_namespace(value: Any) -> bool:
    """Return True for a namespace object: a ``SimpleNamespace`` or a plain ``threading.local``."""
    return isinstance(value, types.SimpleNamespace) or type(value) is threading.local


def changed(copied: Copied, numbers: Numbers) -> bool:
    """Return True if the elements of a container differ from those at its first read."""
    if isinstance(copied.value, set):
        return bool(copied.value != copied.before)
    now, before = _items(copied.value), _items(copied.before)
    same = numbers.is_same
    return list(now) != list(before) or not all(same(now[key], before[key]) for key in before)


def put_back(copied: Copied) -> None:
    """Restore the elements that a container had at its first read."""
    value, before = copied.value, copied.before
    if is_namespace(value):
        value = vars(value)
    value.clear()
    value.update(before) if hasattr(value, "update") else value.extend(before)


def is_instance(value: Any) -> bool:
    """Return True if the attributes of an object are watched."""
    cls = type(value)
    root = cls.__module__.partition(".")[0]
    return (
        can_watch(cls)
        and not isinstance(value, _OTHERS)
        and not hasattr(cls, "__next__")
        and (root not in _OPAQUE or isinstance(value, _WATCHED))
        and not cls.__module__.startswith(_OPERATORS)
    )


_OTHERS = (
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
    """Return True if the objects of a class are compared by value: paths, dates, patterns."""
    compares: Any = cls.__eq__
    # Weak references compare their referents, which may be tensors.
    by_value = compares is not object.__eq__ and not issubclass(cls, weakref.ref)
    return by_value and cls.__hash__ is not None
