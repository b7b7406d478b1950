"""Values of a JSON document, each checked against the expected type, with its path."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from tsfunc.errors import FileFormatError

LONGEST_INT = 1 << 63
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,199}")
DEEPEST = 200  # the maximum depth of nested containers; Python's own limit is near 1000


class Field:
    """A value, and its path in the document.

    Args:
        parent: the container of the value, or the name of the document in errors.
        key: the key or index in that container.
    """

    __slots__ = ("depth", "key", "parent", "value")

    depth: int

    def __init__(self, value: Any, parent: Field | str, key: Any = None) -> None:
        self.value = value
        self.parent = parent
        self.key = key
        self.depth = parent.depth + 1 if isinstance(parent, Field) else 0
        if self.depth > DEEPEST:
            self.fail("nested too deeply")

    @classmethod
    def parse(cls, data: bytes, where: str) -> Field:
        """Parse a JSON document."""
        try:
            value = json.loads(
                data.decode(), object_pairs_hook=_unique, parse_constant=_no_constant
            )
        except RecursionError:
            raise FileFormatError(f"{where}: nested too deeply.") from None
        except ValueError as error:  # includes JSONDecodeError and UnicodeDecodeError
            raise FileFormatError(
                f"{where}: expected the JSON of a program, got other data: {error}"
            ) from None
        return cls(value, where)

    @property
    def where(self) -> str:
        """The path of the value in its document."""
        steps: list[str] = []
        field: Field | str = self
        while isinstance(field, Field):
            if isinstance(field.key, int):
                steps.append(f"[{field.key}]")
            elif field.key is not None:
                steps.append(f".{field.key[:40]}")
            field = field.parent
        path = "".join(reversed(steps)).removeprefix(".")
        return f"{field}: {path}" if path else field

    def fail(self, problem: str) -> NoReturn:
        """Raise a ``FileFormatError`` about the value."""
        raise FileFormatError(f"{self.where}: {problem}.")

    def fail_expected(self, description: str) -> NoReturn:
        """Raise a ``FileFormatError`` that names the expected value and the value found."""
        text = repr(self.value)
        shown = text if len(text) <= 60 else f"{text[:57]}..."
        self.fail(f"expected {description}, got {shown}")

    def integer(self, least: int = -LONGEST_INT, most: int = LONGEST_INT - 1) -> int:
        """Return an int in a range; a bool is refused."""
        if type(self.value) is not int or not least <= self.value <= most:
            limits = "" if (least, most) == (-LONGEST_INT, LONGEST_INT - 1) else f" from {least}"
            self.fail_expected(f"an integer{limits}")
        return int(self.value)

    def flag(self) -> bool:
        if type(self.value) is not bool:
            self.fail_expected("true or false")
        return bool(self.value)

    def text(self, pattern: re.Pattern[str] | None = None, description: str = "a text") -> str:
        if type(self.value) is not str or (pattern and not pattern.fullmatch(self.value)):
            self.fail_expected(description)
        return str(self.value)

    def line(self) -> str:
        """Return a text for people: a single line of printable characters."""
        if type(self.value) is not str or not self.value.isprintable():
            self.fail_expected("a line of text")
        return str(self.value)

    def one_of(self, choices: Mapping[str, Any], description: str) -> Any:
        """Return the value of a text among some choices."""
        if type(self.value) is not str or self.value not in choices:
            self.fail_expected(description)
        return choices[self.value]

    def items(self, count: int | None = None) -> list[Field]:
        if type(self.value) is not list or (count is not None and len(self.value) != count):
            self.fail_expected("a list" if count is None else f"a list of {count}")
        return [Field(item, self, i) for i, item in enumerate(self.value)]

    def mapping(self) -> dict[str, Field]:
        """Return the fields of an object with any keys."""
        if type(self.value) is not dict:
            self.fail_expected("an object")
        return {key: Field(item, self, key) for key, item in self.value.items()}

    def record(self, *keys: str) -> Sequence[Field]:
        """Return the values of an object that has exactly these keys."""
        self.require_keys(keys)
        return [Field(self.value[key], self, key) for key in keys]

    def at(self, key: str) -> Field:
        """Return the value of a required key of an object."""
        field = self.get(key)
        return self.fail(f"{key} is missing") if field is None else field

    def get(self, key: str) -> Field | None:
        """Return the value of a key of an object; None if the key is missing."""
        if type(self.value) is not dict:
            self.fail_expected("an object")
        return Field(self.value[key], self, key) if key in self.value else None

    def require_keys(self, required: Sequence[str], optional: Sequence[str] = ()) -> None:
        """Check that an object has the required keys, and no others except the optional ones."""
        if type(self.value) is not dict:
            self.fail_expected(f"an object with {', '.join(required)}")
        for key in required:
            if key not in self.value:
                self.fail(f"{key} is missing")
        for key in self.value:
            if key not in required and key not in optional:
                self.fail(f"there is no {key[:40]!r} in such an object")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("an object has a key twice")
    return entries


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a number of JSON")
