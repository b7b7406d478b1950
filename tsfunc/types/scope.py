"""The names in generated code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any


class Scope:
    """The objects that generated code refers to by name.

    Args:
        objects: objects that have names already.
        taken: other names that the code uses.

    Attributes:
        objects: the objects by name: the globals of the code.
    """

    def __init__(
        self, objects: Mapping[str, Any] = MappingProxyType({}), taken: Iterable[str] = ()
    ) -> None:
        self.objects: dict[str, Any] = dict(objects)
        self._names = {id(value): name for name, value in objects.items()}
        self._taken = {*objects, *taken}
        self._counts: dict[str, int] = {}

    def name(self, value: Any, stem: str = "obj") -> str:
        """Return the name of an object; a new one is ``stem``, ``stem_2`` and so on."""
        name = self._names.get(id(value))
        if name is None:
            name = self._names[id(value)] = self.unused(stem)
            self.objects[name] = value
        return name

    def unused(self, stem: str) -> str:
        """Return the first name of a stem that is not taken, and take it."""
        count = self._counts.get(stem, 0) + 1
        name = stem if count == 1 else f"{stem}_{count}"
        while name in self._taken:
            count += 1
            name = f"{stem}_{count}"
        self._counts[stem] = count
        self._taken.add(name)
        return name
