"""Mutants of source files: changes that mutmut's operators make to the bodies of functions.

mutmut's own command leaves out functions with decorators, which most batching rules are; here they
are included. Changes of texts for readers, of code for type checkers, and of conditions that raise
``AssertionError`` for impossible cases are left out.
"""

from __future__ import annotations

import ast
import difflib
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import libcst as cst
from libcst import metadata
from mutmut.mutation.mutators import mutation_operators

# Calls whose arguments no test can observe; ``strict`` of zip is a check that never fails.
_UNCHANGED_CALLS = {"isinstance", "issubclass", "len", "super", "zip"}
# Functions that write texts for readers.
_TEXT_FUNCTIONS = {"__repr__", "__str__", "texts", "facts"}
_TYPES_ONLY = {"TYPE_CHECKING", "Protocol", "overload"}


@dataclass(frozen=True)
class Change:
    """A node of a file's syntax tree inside of a function, and its replacement."""

    function: str
    line: int
    node: Any
    mutated: Any


@dataclass(frozen=True)
class Mutant:
    """A changed file: the changed lines, before and after, and the file's new text."""

    file: str
    function: str
    line: int
    before: str
    after: str
    code: str

    @property
    def same(self) -> tuple[str, str, str, str]:
        """Return the parts that stay the same if other parts of the file change."""
        return self.file, self.function, self.before, self.after


class Source:
    """A file and all changes that the operators make to it."""

    def __init__(self, path: Path, root: Path) -> None:
        self.file = path.relative_to(root).as_posix()
        self.text = path.read_text()
        self._tree = ast.dump(ast.parse(self.text))
        wrapper = metadata.MetadataWrapper(cst.parse_module(self.text))
        self._module = wrapper.module
        self._positions = wrapper.resolve(metadata.PositionProvider)
        self.changes = list(self._changes(self._module, (), 1))

    def mutant(self, change: Change) -> Mutant | None:
        """Return the mutant of a change, or None if it is not valid or changes nothing."""
        code = self._module.deep_replace(change.node, change.mutated).code
        try:
            if ast.dump(ast.parse(code)) == self._tree:
                return None
            compile(code, self.file, "exec", dont_inherit=True)
        except (SyntaxError, ValueError):
            return None
        before, after = _changed_lines(self.text, code)
        return Mutant(self.file, change.function, change.line, before, after, code)

    def _changes(self, node: Any, inside: tuple[str, ...], line: int) -> Iterator[Change]:
        if _left_out(node):
            return
        position = self._positions.get(node)
        line = line if position is None else position.start.line
        if isinstance(node, cst.FunctionDef | cst.ClassDef):
            inside = (*inside, node.name.value)
        elif isinstance(node, cst.Lambda):
            inside = (*inside, "<lambda>")
        if _in_function(inside):
            for kind, operator in mutation_operators:
                if isinstance(node, kind) and not _unchanged(node):
                    for mutated in operator(node):
                        yield Change(".".join(inside), line, node, mutated)
        for child in _children(node):
            yield from self._changes(child, inside, line)


def draw(sources: Iterable[Source], number: int, rng: random.Random) -> list[Mutant]:
    """Return a random sample of all mutants of the files."""
    changes = [(source, change) for source in sources for change in source.changes]
    rng.shuffle(changes)
    drawn: dict[tuple[str, str, str, str], Mutant] = {}
    for source, change in changes:
        if len(drawn) == number:
            break
        mutant = source.mutant(change)
        if mutant is not None:
            drawn.setdefault(mutant.same, mutant)
    return list(drawn.values())


def found_again(source: Source, same: tuple[str, str, str, str]) -> Mutant | None:
    """Return the mutant of an earlier run in the present file; None if its code is gone."""
    for change in source.changes:
        if change.function == same[1]:
            mutant = source.mutant(change)
            if mutant is not None and mutant.same == same:
                return mutant
    return None


def _in_function(inside: tuple[str, ...]) -> bool:
    # Functions and lambdas have lower-case node names; a class's body is not a function's.
    return bool(inside) and not inside[-1].lstrip("_")[:1].isupper()


def _children(node: Any) -> Iterable[Any]:
    if isinstance(node, cst.FunctionDef):
        return [node.params, node.body]
    if isinstance(node, cst.ClassDef):
        return [node.body]
    return node.children


def _left_out(node: Any) -> bool:
    match node:
        case cst.Annotation() | cst.Decorator() | cst.Raise() | cst.Import() | cst.ImportFrom():
            return True
        case cst.Expr(value=cst.SimpleString() | cst.ConcatenatedString()):
            return True
        case cst.FunctionDef():
            types_only = {_name(decorator.decorator) for decorator in node.decorators}
            return node.name.value in _TEXT_FUNCTIONS or bool(types_only & _TYPES_ONLY)
        case cst.ClassDef():
            return any(_name(base.value) in _TYPES_ONLY for base in node.bases)
        case cst.If():
            return _name(node.test) in _TYPES_ONLY
        case cst.Call():
            return _name(node.func) in {"assert_never", "cast", "compile", "warn"}
        case cst.Arg(keyword=cst.Name(value="strict")):
            return True
        case _:
            return False


def _unchanged(node: Any) -> bool:
    return isinstance(node, cst.Call) and _name(node.func) in _UNCHANGED_CALLS


def _name(node: Any) -> str:
    """Return the last name of ``f``, ``module.f`` and ``f[...]``; empty for other expressions."""
    if isinstance(node, cst.Subscript):
        return _name(node.value)
    if isinstance(node, cst.Attribute):
        return str(node.attr.value)
    return str(node.value) if isinstance(node, cst.Name) else ""


def _changed_lines(before: str, after: str) -> tuple[str, str]:
    diff = list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0))
    removed = [line[1:].strip() for line in diff[2:] if line.startswith("-")]
    added = [line[1:].strip() for line in diff[2:] if line.startswith("+")]
    return " ".join(removed), " ".join(added)
