"""Variables that a piece of code may read from outside, and the attributes read from them.

The reads are found in the bytecode, so they cost nothing while the code runs.
``config.model.width`` is one read: a global variable and a chain of attributes.

NOTE [counters]
``calls.append(1)``, ``count += 1`` and ``seen[key] += 1`` accumulate in a variable without another
use of its value. If a function only accumulates in a variable, its results can't depend on the
variable. The variable is then not guarded, and it changes only when the function is traced, as a
``print`` prints only then. If the function also reads the variable, it is guarded, and every call
changes it (NOTE [updates] in ``updates.py``). The same holds if the function puts tensors into it,
since the tensors differ at every call, and if the variable holds an object of a user's class, whose
methods may do anything. Changes that do not accumulate (``last[key] = x``, ``names.add(x)``,
``last.update(...)``, ``last.clear()``) are assignments: every call makes them.
"""

from __future__ import annotations

import dis
import functools
import re
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

Kind = Literal["global", "free", "module"]


@dataclass(frozen=True)
class Access:
    """A use of a variable from outside in a piece of code.

    Attributes:
        kind: whether it is a global, a variable of an enclosing function, or a module that the
            code imports itself.
        name: the name of the variable or module.
        attributes: the chain of attributes that is read from it.
        line: the line of the use.
        level: for an import, the number of packages that a relative import goes up.
        only_changes: whether the code only counts the value up or adds an element to it:
            NOTE [counters].
        bare: whether it is called without arguments.
    """

    kind: Kind
    name: str
    attributes: tuple[str, ...]
    line: int
    level: int = 0
    only_changes: bool = False
    bare: bool = False

    @property
    def last(self) -> str:
        """The last name of the chain."""
        return self.attributes[-1] if self.attributes else self.name


@dataclass(frozen=True)
class CodeReads:
    """The variables and names in a function's code, the code nested in it included.

    Attributes:
        reads: the variables from outside that it reads.
        writes: the variables from outside that it assigns.
        names: the names of all attributes that it reads, of any object.
        texts: the names among its strings, if it uses a function that looks up variables or
            attributes by name (``globals``, ``getattr``).
        compared: the operands of identity comparisons (``x is y``): a variable from outside, or
            None for an operand that the code does not show.
    """

    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    names: frozenset[str]
    texts: frozenset[str]
    compared: frozenset[Access | None] = frozenset()


@functools.lru_cache(maxsize=4096)
def code_reads(code: types.CodeType) -> CodeReads:
    """Return the variables that a function's code may read and assign."""
    reads: dict[Access, None] = {}
    writes: dict[Access, None] = {}
    names: set[str] = set()
    texts: set[str] = set()
    compared: set[Access | None] = set()
    free = frozenset(code.co_freevars)
    for each in _with_nested(code):
        scan = _Scan(each, free)
        if not _BY_NAME.isdisjoint(each.co_names):
            texts.update(_names_in(each.co_consts, not _RUN.isdisjoint(each.co_names)))
        reads.update(dict.fromkeys(scan.reads))
        writes.update(dict.fromkeys(scan.writes))
        names.update(scan.names)
        compared.update(scan.compared)
    return CodeReads(
        tuple(reads), tuple(writes), frozenset(names), frozenset(texts), frozenset(compared)
    )


_BY_NAME = frozenset({
    "globals", "vars", "locals", "eval", "exec", "getattr", "hasattr", "__dict__",
})  # fmt: skip
_RUN = frozenset({"eval", "exec"})
_IDENTIFIER = re.compile(r"[^\W\d]\w*")
_LONGEST = 1000  # the maximum length of a string that is scanned as code


def _names_in(constants: Sequence[Any], are_code: bool) -> Iterator[str]:
    """Yield the constants of a code object that are names; for source code, the names in it."""
    for each in constants:
        if isinstance(each, tuple):
            yield from _names_in(each, are_code)
        elif isinstance(each, str) and are_code and len(each) <= _LONGEST:
            yield from _IDENTIFIER.findall(each)
        elif isinstance(each, str) and each.isidentifier():
            yield each


def _with_nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _with_nested(constant)


_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_ROOTS: dict[str, Kind] = {
    "LOAD_GLOBAL": "global",
    "LOAD_NAME": "global",
    "LOAD_DEREF": "free",
    "LOAD_CLASSDEREF": "free",
    "LOAD_FROM_DICT_OR_DEREF": "free",
}
_STORES: dict[str, Kind] = {
    "STORE_GLOBAL": "global",
    "DELETE_GLOBAL": "global",
    "STORE_DEREF": "free",
    "DELETE_DEREF": "free",
}
_BY_IDENTITY = frozenset({"id", "is_", "is_not"})  # functions that compare objects by identity
_CALLS = frozenset({"CALL", "CALL_FUNCTION", "CALL_METHOD"})
_NOT_COUNTED = frozenset({"EXTENDED_ARG", "CACHE", "PRECALL", "PUSH_NULL"})

# The instructions after a variable in `v += 1`, and in `v[key] += 1` (in later versions of CPython
# and in CPython 3.10).
_COUNTS = ("LOAD", "INPLACE", "STORE")
_COUNTS_ITEM = (
    ("LOAD", "COPY", "COPY", "BINARY_SUBSCR", "LOAD", "INPLACE", "SWAP", "SWAP", "STORE_SUBSCR"),
    ("LOAD", "DUP_TOP_TWO", "BINARY_SUBSCR", "LOAD", "INPLACE", "ROT_THREE", "STORE_SUBSCR"),
)
_ADDING = frozenset({"append", "appendleft", "extend", "extendleft", "insert"})


def _outermost(module: Access) -> Access:
    """Return the module that ``import a.b`` binds: ``a``."""
    return module if module.level else replace(module, name=module.name.partition(".")[0])


def _kind(step: dis.Instruction) -> str:
    """Return the name of an instruction; "INPLACE" for an in-place operator."""
    if step.opname == "BINARY_OP" and step.argrepr.endswith("="):
        return "INPLACE"
    return step.opname


def _follows(steps: Sequence[dis.Instruction], pattern: Sequence[str]) -> bool:
    """Return True if the instructions begin with a pattern."""
    return len(steps) >= len(pattern) and all(
        _kind(step).startswith(wanted) for step, wanted in zip(steps, pattern, strict=False)
    )


def _is_statement(steps: Sequence[dis.Instruction]) -> bool:
    """Return True if a method that was just loaded is called and its result is dropped."""
    depth = 2  # the method and its object, or the stack entries that replace them
    for i, step in enumerate(steps):
        if step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
            return False
        depth += dis.stack_effect(step.opcode, step.arg)
        if depth < 2:
            return step.opname.startswith("CALL") and steps[i + 1].opname == "POP_TOP"
    return False


class _Scan:
    """One pass over the instructions of a code object, without nested code objects."""

    def __init__(self, code: types.CodeType, free: frozenset[str]) -> None:
        self.reads: list[Access] = []
        self.writes: list[Access] = []
        self.names: set[str] = set()
        self.compared: set[Access | None] = set()
        lines = dict(dis.findlinestarts(code))
        line = code.co_firstlineno
        imports: dict[str, Access] = {}  # local variables that hold imported modules
        level, names = 0, None
        module: Access | None = None  # the last imported module
        imported: Any = None  # the value of the last import
        chain: Access | None = None  # the value that the last instruction has put on the stack
        before = ""
        counted: set[int] = set()  # offsets of the stores of variables that are only counted up
        steps = list(dis.get_instructions(code))
        for i, each in enumerate(steps):
            line = lines.get(each.offset) or line
            name, what = each.opname, each.argval
            if name in _NOT_COUNTED:
                continue
            if name in _ATTRIBUTES:
                self.names.add(what)
                if chain is not None:
                    chain = replace(chain, attributes=(*chain.attributes, what), line=line)
                continue
            if name in ("STORE_ATTR", "DELETE_ATTR") and chain is not None:
                self.writes.append(replace(chain, attributes=(*chain.attributes, what), line=line))
            if chain is not None:
                self._end(chain, steps[i : i + 64], counted)
            if name == "IS_OP" and before != "LOAD_CONST":
                self.compared.add(chain)
            elif chain is not None and chain.last in _BY_IDENTITY:
                self.compared.add(None)
            chain = None
            if name in _ROOTS and (_ROOTS[name] == "global" or what in free):
                chain = Access(_ROOTS[name], what, (), line)
            elif name in _STORES and (_STORES[name] == "global" or what in free):
                counts = each.offset in counted
                self.writes.append(Access(_STORES[name], what, (), line, only_changes=counts))
            elif name == "LOAD_CONST":
                level = what if isinstance(what, int) else level  # the last number before an import
                names = what  # the last constant before it: a tuple in `from a import b`, or None
            elif name == "IMPORT_NAME":
                module = Access("module", what, (), line, level)
                imported = module if names else _outermost(module)
            elif name == "IMPORT_FROM" and module is not None:
                whole = module if names else imported
                imported = replace(whole, attributes=(*whole.attributes, what))
                self.reads.append(imported)
            elif name == "STORE_FAST" and before in ("IMPORT_NAME", "IMPORT_FROM"):
                imports[what] = imported
            elif name.startswith("LOAD_FAST") and what in imports:
                chain = replace(imports[what], line=line)
            before = name

    def _end(self, chain: Access, rest: Sequence[dis.Instruction], counted: set[int]) -> None:
        """Add the read of a complete chain; `rest` has the instructions after it."""
        if chain.kind == "module" and not chain.attributes:
            return
        only_changes = False
        steps = [each for each in rest if each.opname not in _NOT_COUNTED]
        bare = bool(steps) and steps[0].opname in _CALLS and steps[0].arg == 0
        if chain.attributes and chain.attributes[-1] in _ADDING:
            only_changes = _is_statement(rest)
            chain = replace(chain, attributes=chain.attributes[:-1])
        elif not chain.attributes:
            if _follows(steps, _COUNTS) and steps[2].argval == chain.name:
                only_changes = steps[2].opname in _STORES
                counted.add(steps[2].offset)
            only_changes = only_changes or any(_follows(steps, each) for each in _COUNTS_ITEM)
        self.reads.append(replace(chain, only_changes=only_changes, bare=bare))
