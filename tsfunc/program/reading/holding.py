"""Values that a trace has read, and what later calls must have in their places.

NOTE [attributes]
Any class may be a parameter: what is checked of an object is what the traced function reaches for,
where it reaches for it. The one traced run is watched (``watching.py``), and each attribute of a
known object that is read becomes a line of generated Python (``reach.py``) for later calls:

- a tensor of an argument is an input of the program, read anew at every call; a tensor of an
  object that is the function's own (its module, one that it closes over) must be the same one,
  unless the function itself puts another in its place (NOTE [updates] in ``updates.py``);
- a number, string, dtype, enum member, and what else has a value, must be equal; a function, a
  class, and what else is compared by identity, must be the same;
- a list, tuple or dict must hold such values in the same places;
- another object is watched in turn, and its class must be the same;
- a method runs watched, and must still be the same function.

So a program that was traced for one instance runs for any other of whose class and attributes
the same is true. An instance that differs has a program of its own.

NOTE [closures]
``closure`` says what becomes of what is not an argument: variables, defaults, the function's own
objects. ``"guard"`` holds later calls to it as said above. ``"freeze"`` burns in what the first
call found, data of tensors included, and looks at nothing later. ``"error"`` refuses to read it.
"""

from __future__ import annotations

import argparse
import copy
import enum
import queue
import sys
import threading
import types
import weakref
from collections import ChainMap, UserDict, UserList, UserString, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, NoReturn

import torch

from tsfunc.dispatch.places import users_place
from tsfunc.errors import ClosureError, TypeCheckError
from tsfunc.program.reading.reach import Facts
from tsfunc.program.reading.shown import shown
from tsfunc.program.reading.updates import Outside
from tsfunc.program.reading.watching import can_watch

_VALUES = (
    int, bool, str, bytes, complex, type(None), torch.dtype, torch.layout, torch.memory_format,
    torch.device, torch.Size, range,
)  # fmt: skip
_SEQUENCES = (list, tuple, deque)
_SETS = (set, frozenset)
_MANY = 64  # elements of a container of plain values that are compared one by one


@dataclass(frozen=True)
class Place:
    """Where a value was found.

    Attributes:
        variable: what the generated code calls it.
        text: how a user would write it, from a parameter: ``model.layers[0].weight``.
        owner: how errors name it, from the class that has it: ``Model.layers[0]``.
        own: whether it belongs to the function itself, and not to an argument.
    """

    variable: str
    text: str
    owner: str
    own: bool


class Copied(NamedTuple):
    """A container that the trace has read, and what it was then."""

    value: Any
    before: Any
    place: Place


Closure = Literal["guard", "freeze", "error"]


class Held:
    """What a trace has read.

    Args:
        name: the specialized function's, for errors.
        enter: has an object watched.
        met: is told of functions among the values.
        opaque: is told of objects that are compared by identity, and how a user would write them.
        closure: what becomes of what is the function's own.

    Attributes:
        facts: what later calls are held to.
        inputs: the tensors among it that are read anew at every call.
        containers: what the function may change the elements of.
        read: what later calls are held to, by how a user would write where it was found.
    """

    def __init__(
        self,
        name: str,
        enter: Callable[[Any, Place], None],
        met: Callable[[Any], None],
        opaque: Callable[[str, Any], None],
        closure: Closure = "guard",
    ) -> None:
        self.name = name
        self.closure = closure
        self.facts = Facts()
        self._own = Facts() if closure == "freeze" else self.facts  # which then nobody looks at
        self.inputs: list[tuple[torch.Tensor, Place]] = []
        self.containers: list[Copied] = []
        self.read: dict[str, Any] = {}
        self._enter = enter
        self._met = met
        self._opaque = opaque
        self._known: dict[int, tuple[Any, Place]] = {}  # kept alive, so that ids stay theirs
        self._given: Sequence[Any] = ()

    def facts_of(self, own: bool) -> Facts:
        """Where facts belong about what is the function's own, or an argument's."""
        return self._own if own else self.facts

    def is_known(self, value: Any) -> bool:
        """Whether the trace has met an object outside."""
        return id(value) in self._known

    def place_of(self, value: Any) -> Place | None:
        """Where the trace has met an object."""
        known = self._known.get(id(value))
        return None if known is None else known[1]

    @property
    def own_tensors(self) -> dict[int, torch.Tensor]:
        """The tensors that are the function's own, by id."""
        known = self._known.items()
        return {i: x for i, (x, place) in known if place.own and isinstance(x, torch.Tensor)}

    def give(self, flat: Sequence[Any]) -> None:
        """Says what the flattened arguments are."""
        self._given = flat

    def again(self, value: Any) -> Any:
        """What stands for an object from outside in a value of the program; None for others.

        What is burnt in stands for itself.
        """
        for i, given in enumerate(self._given):
            if given is value:
                return Outside(i)
        place = self.place_of(value)
        if place is None:
            return None
        facts = self.facts_of(place.own)
        if facts is not self.facts:
            return value
        return Outside(len(self._given) + facts.result(place.variable, value))

    def take(self, value: Any, place: Place) -> None:
        """Holds later calls to a value."""
        known = self._known.get(id(value))
        facts = self.facts_of(place.own)
        if facts is self.facts:
            self.read.setdefault(place.text, value)
        if known is not None:
            if facts is not self.facts_of(known[1].own):
                facts.require_same(place.variable, value)
            elif place.variable != known[1].variable:
                facts.require(f"{place.variable} is {known[1].variable}")
        elif isinstance(value, torch.Tensor):
            self._tensor(value, place)
        elif type(value) is float:
            facts.require_float(place.variable, value)
        elif isinstance(value, _VALUES) and not isinstance(value, enum.Enum):
            facts.require_equal(place.variable, value)
        else:
            self._object(value, place)

    def loosen(self, value: torch.Tensor) -> None:
        """The function puts another tensor in the place of one of its own: it is an input."""
        known = self._known.get(id(value))
        if known is not None and known[1].own and not any(value is x for x, _ in self.inputs):
            self._own.loosen(known[1].variable, value)
            self.inputs.append((value, known[1]))

    def grad_of(self, value: torch.Tensor) -> torch.Tensor | None:
        """The ``.grad`` of a tensor from outside, which later calls are held to."""
        facts = self.facts_of(True)
        place = self.place_of(value) or Place(facts.name(value), "a tensor", "a tensor", True)
        found = value.grad
        text = f"{place.text}.grad"
        variable = self.facts_of(place.own).bind(f"{place.variable}.grad")
        self.take(found, replace(place, variable=variable, text=text, owner=text))
        return found

    def refuse_own(self, text: str, at: str) -> None:
        """Raises where nothing may be read that is not an argument.

        Raises:
            ClosureError: so says ``closure``.
        """
        if self.closure == "error":
            raise ClosureError(
                f'specialize({self.name}, closure="error"): {text} is read at {at}, and is no '
                f'argument. Pass it as one; closure="guard" has every call look whether it has '
                f'changed, closure="freeze" burns it in.'
            )

    def _tensor(self, value: torch.Tensor, place: Place) -> None:
        self._known[id(value)] = value, place
        if place.own:
            self._own.require_own_tensor(place.variable, value)
            if vars(value):
                variable = self._own.bind(f"vars({place.variable})")
                self.take(dict(vars(value)), replace(place, variable=variable))
        else:
            self.facts.require_tensor(place.variable, value)
            self.inputs.append((value, place))

    def _object(self, value: Any, place: Place) -> None:
        at, cls = place.variable, type(value)
        facts = self.facts_of(place.own)
        inside = shown(value)
        if is_container(value):
            self._container(value, place)
        elif inside is not None:
            if isinstance(value, enum.Enum):
                facts.require_same(at, value)
                self._known[id(value)] = value, place
            facts.require_type(at, cls)
            expression, now = inside
            self.take(now, replace(place, variable=facts.bind(expression.format(at))))
        elif isinstance(value, _SETS) or hasattr(cls, "__array__"):
            facts.require_same_value(at, value)
            if isinstance(value, set):
                self._known[id(value)] = value, place
                self.containers.append(Copied(value, copy.copy(value), place))
            if isinstance(value, _SETS):
                self._elements(value, place)
            elif str(getattr(value, "dtype", "")) == "object":
                for i, item in enumerate(value.flat):
                    variable = facts.bind(f"{at}.flat[{i}]")
                    self.take(item, replace(place, variable=variable, text=f"{place.text}[{i}]"))
        elif is_instance(value):
            self._known[id(value)] = value, place
            facts.require_type(at, cls)
            self._enter(value, place)
        elif hasattr(cls, "__next__"):
            self.refuse_iterator(place.owner, f"read at {users_place()}", value)
        elif has_value(cls):
            facts.require_equal(at, value)
        else:
            facts.require_same(at, value)
            self._met(value)
            self._opaque(place.text, value)

    def refuse_iterator(self, text: str, how: str, value: Any) -> NoReturn:
        """Raises for what gives something else each time.

        Raises:
            TypeCheckError: always.
        """
        raise TypeCheckError(
            f"specialize({self.name}): {text} is {how}, and is a {type(value).__name__}, which "
            f"changes by being read: a program can neither compare it nor read it anew. Read it "
            f"before the call, and pass what it gives."
        )

    def _elements(self, values: Iterable[Any], place: Place) -> None:
        """Objects that are elements of a set, or keys of a dict, which are compared as such."""
        for each in values:
            if is_instance(each):
                facts = self.facts_of(place.own)
                self.take(each, replace(place, variable=facts.bind(facts.name(each))))

    def _container(self, value: Any, place: Place) -> None:
        at, items = place.variable, _items(value)
        facts = self.facts_of(place.own)
        facts.require_type(at, type(value))
        self._known[id(value)] = value, place
        if not isinstance(value, tuple):
            before = copy.copy(vars(value)) if is_namespace(value) else copy.copy(value)
            self.containers.append(Copied(value, before, place))
        if len(items) > _MANY and all(type(item) in (*_VALUES, float) for item in items.values()):
            facts.require_same_value(at, value)
            return
        namespace = is_namespace(value)
        if isinstance(value, dict) or namespace:
            facts.require_keys(f"vars({at})" if namespace else at, list(items))
            self._elements(items, place)
        else:
            facts.require(f"len({at}) == {len(items)}")
            if isinstance(value, deque):
                facts.require(f"{at}.maxlen == {value.maxlen}")
        if isinstance(value, defaultdict):
            variable, text = facts.bind(f"{at}.default_factory"), f"{place.text}.default_factory"
            self.take(value.default_factory, replace(place, variable=variable, text=text))
        for key, item in items.items():
            spelled = f"[{facts.spell(key)}]", f"[{key!r}]"
            way, text = (f".{key}",) * 2 if namespace else spelled
            variable = facts.bind(f"{at}{way}")
            self.take(item, Place(variable, place.text + text, place.owner + text, place.own))


def _items(value: Any) -> dict[Any, Any]:
    """The elements of a container by their keys."""
    found: dict[Any, Any] = vars(value) if is_namespace(value) else value
    return found if isinstance(found, dict) else dict(enumerate(found))


def is_container(value: Any) -> bool:
    """Whether an object is held to its elements, each in its place."""
    return isinstance(value, (*_SEQUENCES, dict)) or is_namespace(value)


def is_namespace(value: Any) -> bool:
    """Whether an object is but its attributes; a thread has some of its own of a local one."""
    return isinstance(value, types.SimpleNamespace) or type(value) is threading.local


def changed(copied: Copied) -> bool:
    """Whether a container has other elements than it had."""
    if isinstance(copied.value, set):
        return bool(copied.value != copied.before)
    now, before = _items(copied.value), _items(copied.before)
    return list(now) != list(before) or any(now[key] is not before[key] for key in before)


def put_back(copied: Copied) -> None:
    """Gives a container the elements again that it had."""
    value, before = copied.value, copied.before
    if is_namespace(value):
        value = vars(value)
    value.clear()
    value.update(before) if hasattr(value, "update") else value.extend(before)


def is_instance(value: Any) -> bool:
    """Whether an object is one whose attributes are watched."""
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
)  # fmt: skip
_WATCHED = (  # of the standard library
    argparse.Namespace, ChainMap, UserDict, UserList, UserString, queue.Queue, threading.Event,
    threading.Semaphore,
)  # fmt: skip
_OPERATORS = ("torch._library", "torch._ops")  # where the classes of operators are
# A class that was made where there is no module says it is of the builtins.
_OPAQUE = frozenset({*sys.stdlib_module_names, "tsfunc"}) - {"builtins"}


def has_value(cls: type) -> bool:
    """Whether objects of a class are compared by what they are: paths, dates, patterns."""
    compares: Any = cls.__eq__
    # Weak references compare what they refer to, tensors among others.
    by_value = compares is not object.__eq__ and not issubclass(cls, weakref.ref)
    return by_value and cls.__hash__ is not None
