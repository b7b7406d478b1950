"""A guard: its source, its code and its text, and its place in the code of all guards.

The kinds of guards are subclasses of :class:`Guard`: on values that a function reads in
``closure/closure_guards.py``, on single arguments in ``guarding/guards.py``, and on other facts
about the arguments in ``guarding/trace_guards.py``. A new kind needs no entry elsewhere: its class
has its place in the code and its key in files.
"""

from __future__ import annotations

import enum
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

from tsfunc.types import Dim
from tsfunc.types.scope import Scope

# --- the facts in which a call differs from those that have a program: the reason of a retrace


ABSENT: Any = object()
"""The value of a fact that a call does not have."""


class UnquotedText(str):
    """A text that is shown without quotes: a named dim, the name of a class."""


class OfBranch(str):
    """The text of a number with which the function took another branch."""


class Difference(NamedTuple):
    """A fact that another call violates: its name, its value in that call, the guarded value."""

    name: str
    now: Any
    before: Any


# --- sources, code and texts of guards


K = TypeVar("K", bound="Guard")

Names = Callable[[int], str]
"""From the position of a flattened argument to the user's spelling of it."""


NO_KEY: Final[Any] = object()  # of a step that is not into a container


@dataclass(frozen=True, eq=False)
class Source:
    """The path to a value: from an argument or an object, through attributes and elements.

    Attributes:
        base: the source of the value that the path goes on from; None for its beginning.
        step: the Python of the last step, with ``{}`` for the value that it starts from.
        key: the key of an element, or the object that the path begins at; it has no spelling.
        text: the user's spelling of the place, from a parameter: ``model.layers[0].weight``.
        owner: the name of the place in errors, from its owner's class: ``Model.layers[0]``.
        in_closure: True if the value belongs to the function itself, and not to an argument.
    """

    base: Source | None
    step: str
    key: Any
    text: str
    owner: str
    in_closure: bool

    @staticmethod
    def of_object(value: Any, text: str = "", owner: str = "", in_closure: bool = True) -> Source:
        """Return the source of an object that is a constant of the code."""
        return Source(None, "", value, text, owner or text, in_closure)

    @staticmethod
    def of_argument(position: int, text: str = "", owner: str = "") -> Source:
        """Return the source of a flattened argument."""
        return Source(None, f"args[{position}]", NO_KEY, text, owner or text, False)

    def at(self, step: str, text: str | None = None, owner: str | None = None) -> Source:
        """Return the source of a value one step on, such as ``{}.weight``."""
        text = self.text if text is None else text
        return Source(self, step, NO_KEY, text, text if owner is None else owner, self.in_closure)

    def attribute(self, name: str, text: str | None = None, owner: str | None = None) -> Source:
        return self.at(f"{{}}.{name}", text, owner)

    def item(self, key: Any, text: str, owner: str | None = None) -> Source:
        source = self.at("{}" if type(key) not in (int, str) else f"{{}}[{key!r}]", text, owner)
        return source if type(key) in (int, str) else replace(source, key=key)

    @cached_property
    def depth(self) -> int:
        """The number of steps of the path."""
        return 0 if self.base is None else self.base.depth + 1

    @cached_property
    def path(self) -> tuple[Any, ...]:
        """The steps of the path; equal for two sources of one value."""
        last = self.step, None if self.key is NO_KEY else id(self.key)
        return (last,) if self.base is None else (*self.base.path, last)


class Part(enum.IntEnum):
    """The parts of a guard function, in the order of their code."""

    SETTINGS = enum.auto()
    ARGUMENTS = enum.auto()
    """Single arguments; a tensor binds the sizes of its named dims."""
    SIZES = enum.auto()
    """Sizes that these determine."""
    FACTS = enum.auto()
    """Other facts about the arguments."""
    MEMBERS = enum.auto()
    """Members of modules and classes."""
    VALUES = enum.auto()
    """Values at the ends of paths: NOTE [guards by depth] in ``closure/closure_guards``."""
    TENSORS = enum.auto()
    """The tensors of the function itself."""


class GuardCode:
    """The Python of some guards, while it is generated.

    Args:
        objects: objects by the names that lines from elsewhere use.

    Attributes:
        count: the number of flattened arguments.
        scope: the objects that the code refers to.
        name: returns the name of an object of the scope.
        bound: the named dims that have a variable.
        lines: the lines, those that bind the values on paths to variables included.
    """

    def __init__(
        self,
        named_dims: Mapping[str, Dim] = MappingProxyType({}),
        count: int = 0,
        objects: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.named_dims, self.count = named_dims, count
        self.scope = Scope({**objects, "math": math})  # conditions refer to `math`
        self.name: Callable[[Any], str] = self.scope.name
        self.bound: set[str] = set()
        self.lines: list[str] = []
        self._variables: dict[tuple[Any, ...], str] = {}

    def variable(self, source: Source) -> str:
        """Return the variable of a value; its binding is added to the lines."""
        variable = self._variables.get(source.path)
        if variable is None and source.base is None and source.key is not NO_KEY:
            variable = self._variables[source.path] = self.name(source.key)
        elif variable is None:
            base = "" if source.base is None else self.variable(source.base)
            item = "" if source.key is NO_KEY else f"[{self.name(source.key)}]"
            variable = self._variables[source.path] = self.scope.unused("value")
            self.lines.append(f"{variable} = {source.step.replace('{}', base, 1)}{item}")
        return variable

    def add(self, guards: Iterable[Guard]) -> None:
        """Add the lines of guards, in the order of their places, and of a class together."""
        in_order = sorted(guards, key=operator.attrgetter("place"))
        for _, group in itertools.groupby(in_order, type):
            of_class = [*group]
            for line in type(of_class[0]).lines_of_many(of_class, self):
                self.lines.append(line)  # making the next line may add one that it needs


class Guard:
    """A fact that holds for every call that a program serves.

    Attributes:
        part: the part of the guard function in which the class has its code.
        order: the place of the class in that part, lower ones first.
        json_key: the key that tells the class from others in files; empty if it is in no file.
    """

    part: ClassVar[Part]
    order: ClassVar[int] = 0
    json_key: ClassVar[str] = ""

    @property
    def place(self) -> tuple[Part, float, int]:
        """The place of the guard's code, before that of guards with a higher one."""
        depth = 0.0
        if self.part is Part.VALUES:
            depth = max((source.depth for source in self.value_sources()), default=math.inf)
        return self.part, depth, self.order

    def value_sources(self) -> tuple[Source, ...]:
        """Return the sources of the values that the guard is on, if it is on values of paths."""
        return ()

    def lines(self, code: GuardCode) -> Iterable[str]:
        """Return lines of Python over the list ``args`` that return None if the guard fails."""
        raise NotImplementedError

    def texts(self, name: Names) -> Iterable[str]:
        """Return the fact in the user's names."""
        return ()

    def differences(self, *values: Any) -> Iterable[Difference]:
        """Yield the named facts in which other values of ``value_sources`` differ."""
        return ()

    @classmethod
    def lines_of_many(cls, guards: Sequence[Any], code: GuardCode) -> Iterable[str]:
        """Return the lines of all guards of the class."""
        return (line for guard in guards for line in guard.lines(code))


class GuardTexts(tuple[str, ...]):
    """Lines, each of which states a fact about every call that a program serves."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(self)


class Guards(tuple[Guard, ...]):
    """The guards of a program; printed, one line for each fact in the user's names."""

    texts: GuardTexts = GuardTexts()

    @classmethod
    def of(cls, guards: Iterable[Guard], name: Names) -> Guards:
        """Return guards with their texts.

        Args:
            guards: the guards.
            name: returns the user's spelling of an argument.
        """
        with_texts = cls(guards)
        with_texts.texts = GuardTexts(
            dict.fromkeys(line for guard in with_texts for line in guard.texts(name))
        )
        return with_texts

    def __str__(self) -> str:
        return str(self.texts)

    def __repr__(self) -> str:
        return f"<{len(self)} guards: {'; '.join(self.texts)}>"


def kinds_in_files(base: type[K]) -> dict[str, type[K]]:
    """Return the subclasses of a base that files have, by their keys, in the order of their code.

    A guard in a file is of the first class whose key it has: a number has the key of a value, too.
    """
    kinds = sorted(base.__subclasses__(), key=lambda kind: kind.order)
    return {kind.json_key: kind for kind in kinds if kind.json_key}
