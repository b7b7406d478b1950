"""Values that a trace has read, and what later calls must have in their places.

NOTE [attributes]
Any class may be a parameter: what is checked of an object is what the traced function reaches for,
where it reaches for it. The one traced run is watched (``watching.py``), and each attribute of a
known object that is read becomes a line of generated Python (``reach.py``) for later calls:

- a tensor of an argument is an input of the program, read anew at every call; a tensor of an
  object that is the function's own (its module, one that it closes over) must be the same one;
- a number, string, dtype, enum member, and what else has a value, must be equal; a function, a
  class, and what else is compared by identity, must be the same;
- a list, tuple or dict must hold such values in the same places;
- another object is watched in turn, and its class must be the same;
- a method runs watched, and must still be the same function.

So a program that was traced for one instance runs for any other of whose class and attributes
the same is true. An instance that differs has a program of its own.
"""

from __future__ import annotations

import argparse
import copy
import enum
import sys
import types
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tsfunc.dispatch.places import users_place
from tsfunc.errors import TypeCheckError
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


class Held:
    """What a trace has read.

    Args:
        name: the specialized function's, for errors.
        enter: has an object watched.
    """

    def __init__(self, name: str, enter: Callable[[Any, Place], None]) -> None:
        self.name = name
        self.facts = Facts()
        self.inputs: list[tuple[torch.Tensor, Place]] = []
        self.containers: list[Copied] = []
        self._enter = enter
        self._known: dict[int, tuple[Any, Place]] = {}  # kept alive, so that ids stay theirs

    def take(self, value: Any, place: Place) -> None:
        """Holds later calls to a value."""
        known = self._known.get(id(value))
        if known is not None:
            if place.variable != known[1].variable:
                self.facts.require(f"{place.variable} is {known[1].variable}")
        elif isinstance(value, torch.Tensor):
            self._tensor(value, place)
        elif type(value) is float:
            self.facts.require_float(place.variable, value)
        elif isinstance(value, _VALUES) and not isinstance(value, enum.Enum):
            self.facts.require_equal(place.variable, value)
        else:
            self._object(value, place)

    def _tensor(self, value: torch.Tensor, place: Place) -> None:
        self._known[id(value)] = value, place
        if place.own:
            self.facts.require_same(place.variable, value)
        else:
            self.facts.require_tensor(place.variable, value)
            self.inputs.append((value, place))

    def _object(self, value: Any, place: Place) -> None:
        at, cls = place.variable, type(value)
        if isinstance(value, (*_SEQUENCES, dict, types.SimpleNamespace)):
            self._container(value, place)
        elif isinstance(value, _SETS) or hasattr(cls, "__array__"):
            self.facts.require_same_value(at, value)
        elif is_instance(value):
            self._known[id(value)] = value, place
            self.facts.require_type(at, cls)
            self._enter(value, place)
        elif hasattr(cls, "__next__"):
            raise TypeCheckError(
                f"specialize({self.name}): {place.owner} is read at {users_place()}, and is a "
                f"{cls.__name__}, which changes by being read: a program can neither compare it "
                f"nor read it anew. Read it before the call, and pass what it gives."
            )
        elif _has_value(cls):
            self.facts.require_equal(at, value)
        else:
            self.facts.require_same(at, value)

    def _container(self, value: Any, place: Place) -> None:
        at, facts, items = place.variable, self.facts, _items(value)
        facts.require_type(at, type(value))
        if len(items) > _MANY and all(type(item) in (*_VALUES, float) for item in items.values()):
            facts.require_same_value(at, value)
            return
        self._known[id(value)] = value, place
        if not isinstance(value, tuple):
            self.containers.append(Copied(value, copy.copy(value), place))
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


def put_back(copied: Copied) -> bool:
    """Gives a container the elements again that it had; whether it had others."""
    now, before = _items(copied.value), _items(copied.before)
    if list(now) == list(before) and all(now[key] is before[key] for key in before):
        return False
    value = vars(copied.value) if isinstance(now, types.SimpleNamespace) else copied.value
    value.clear()
    if isinstance(value, dict):
        value.update(before)
    else:
        value.extend(copied.before)
    return True


def is_instance(value: Any) -> bool:
    """Whether an object is one whose attributes are watched."""
    cls = type(value)
    root = cls.__module__.partition(".")[0]
    return (
        can_watch(cls)
        and not isinstance(value, _OTHERS)
        and not hasattr(cls, "__next__")
        and (root not in _OPAQUE or isinstance(value, argparse.Namespace))
    )


_OTHERS = (
    torch.Tensor, torch.jit.ScriptModule, type, enum.Enum, *_SEQUENCES, *_SETS, dict,
)  # fmt: skip
_OPAQUE = frozenset({*sys.stdlib_module_names, "builtins", "tsfunc"})


def _has_value(cls: type) -> bool:
    """Whether objects of a class are compared by what they are: paths, dates, patterns."""
    compares: Any = cls.__eq__
    return compares is not object.__eq__ and cls.__hash__ is not None
