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
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from tsfunc.dispatch.places import users_place
from tsfunc.errors import ClosureError, TypeCheckError
from tsfunc.program.reach import Facts
from tsfunc.program.watching import can_watch

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
        self._known: dict[int, tuple[Any, Place]] = {}  # kept alive, so that ids stay theirs

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
        else:
            self.facts.require_tensor(place.variable, value)
            self.inputs.append((value, place))

    def _object(self, value: Any, place: Place) -> None:
        at, cls = place.variable, type(value)
        facts = self.facts_of(place.own)
        if isinstance(value, (*_SEQUENCES, dict, types.SimpleNamespace)):
            self._container(value, place)
        elif isinstance(value, _SETS) or hasattr(cls, "__array__"):
            facts.require_same_value(at, value)
            if isinstance(value, set):
                self._known[id(value)] = value, place
                self.containers.append(Copied(value, copy.copy(value), place))
        elif is_instance(value):
            self._known[id(value)] = value, place
            facts.require_type(at, cls)
            self._enter(value, place)
        elif hasattr(cls, "__next__"):
            raise TypeCheckError(
                f"specialize({self.name}): {place.owner} is read at {users_place()}, and is a "
                f"{cls.__name__}, which changes by being read: a program can neither compare it "
                f"nor read it anew. Read it before the call, and pass what it gives."
            )
        elif _has_value(cls):
            facts.require_equal(at, value)
        else:
            facts.require_same(at, value)
            self._met(value)

    def _container(self, value: Any, place: Place) -> None:
        at, items = place.variable, _items(value)
        facts = self.facts_of(place.own)
        facts.require_type(at, type(value))
        self._known[id(value)] = value, place
        if not isinstance(value, tuple):
            self.containers.append(Copied(value, copy.copy(value), place))
        if len(items) > _MANY and all(type(item) in (*_VALUES, float) for item in items.values()):
            facts.require_same_value(at, value)
            return
        if isinstance(value, dict | types.SimpleNamespace):
            keys = at if isinstance(value, dict) else f"vars({at})"
            facts.require_keys(keys, list(items))
        else:
            facts.require(f"len({at}) == {len(items)}")
        for key, item in items.items():
            spelled = f"[{facts.spell(key)}]", f"[{key!r}]"
            way, text = (f".{key}",) * 2 if isinstance(value, types.SimpleNamespace) else spelled
            variable = facts.bind(f"{at}{way}")
            self.take(item, Place(variable, place.text + text, place.owner + text, place.own))


def _items(value: Any) -> dict[Any, Any]:
    """The elements of a container by their keys."""
    if isinstance(value, types.SimpleNamespace):
        return vars(value)
    return value if isinstance(value, dict) else dict(enumerate(value))


def changed(copied: Copied) -> bool:
    """Whether a container has other elements than it had."""
    if isinstance(copied.value, set):
        return bool(copied.value != copied.before)
    now, before = _items(copied.value), _items(copied.before)
    return list(now) != list(before) or any(now[key] is not before[key] for key in before)


def put_back(copied: Copied) -> None:
    """Gives a container the elements again that it had."""
    value, before = copied.value, copied.before
    if isinstance(value, types.SimpleNamespace):
        value, before = vars(value), vars(before)
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
        and (root not in _OPAQUE or isinstance(value, argparse.Namespace))
        and not cls.__module__.startswith(_OPERATORS)
    )


_OTHERS = (
    torch.Tensor, torch.jit.ScriptModule, type(torch.ops.aten.sin),
    type(torch.ops.aten.sin.default), type, enum.Enum, *_SEQUENCES, *_SETS, dict,
)  # fmt: skip
_OPERATORS = ("torch._library", "torch._ops")  # where the classes of operators are
# A class that was made where there is no module says it is of the builtins.
_OPAQUE = frozenset({*sys.stdlib_module_names, "tsfunc"}) - {"builtins"}


def _has_value(cls: type) -> bool:
    """Whether objects of a class are compared by what they are: paths, dates, patterns."""
    compares: Any = cls.__eq__
    # Weak references compare what they refer to, tensors among others.
    by_value = compares is not object.__eq__ and not issubclass(cls, weakref.ref)
    return by_value and cls.__hash__ is not None
