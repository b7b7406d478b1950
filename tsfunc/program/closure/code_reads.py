"""Names and members that the code of a function reads.

The reads are found in the bytecode, so they cost nothing while the code runs.
``config.model.width`` is one read: a global variable and a chain of attributes.

NOTE [counters]
``calls.append(1)``, ``count += 1`` and ``seen[key] += 1`` accumulate in a variable without another
use of its value. If a function only accumulates in a variable, its results can't depend on the
variable. The variable is then not guarded, and it changes only when the function is traced, as a
``print`` prints only then. If the function also reads the variable, it is guarded, and every call
changes it (NOTE [updates] in ``results.py``). The same holds if the function puts tensors into it,
since the tensors differ at every call, and if the variable holds an object of a user's class, whose
methods may do anything. Changes that do not accumulate (``last[key] = x``, ``names.add(x)``,
``last.update(...)``, ``last.clear()``) are assignments: every call makes them.

The code of libraries is not scanned. This module lists the library functions that user
code may call. A function that returns a setting of torch becomes a guard
(``is_torch_setting_getter``). A function that may give another result at the next call causes a
warning (``is_nondeterministic``).
"""

from __future__ import annotations

import builtins
import datetime
import dis
import functools
import gc
import glob
import os
import pathlib
import random
import re
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from tsfunc.bridge.tracers.torch_settings import replaced_function
from tsfunc.errors import ReadOnceWarning
from tsfunc.program.closure.closure_guards import MemberIs, ResultIs
from tsfunc.program.closure.instances import Instances
from tsfunc.program.closure.side_effects import CODE, MISSING
from tsfunc.program.guard import Source
from tsfunc.user_code import is_library

# --- variables that a piece of code may read from outside, and the attributes read from them


Kind = Literal["global", "free", "module"]


@dataclass(frozen=True)
class Access:
    """A use of a variable from outside in a piece of code.

    Attributes:
        kind: the kind of the variable: a global, a variable of an enclosing function, or a module
            that the code imports itself.
        name: the name of the variable or module.
        attributes: the chain of attributes that is read from it.
        line: the line of the use.
        level: for an import, the number of packages that a relative import goes up.
        only_changes: True if the code only counts the value up or adds an element to it:
            NOTE [counters].
        bare: True if it is called without arguments.
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
    for nested in _with_nested(code):
        scan = _Scan(nested, free)
        if not _BY_NAME.isdisjoint(nested.co_names):
            texts.update(_names_in(nested.co_consts, not _RUN.isdisjoint(nested.co_names)))
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
    for constant in constants:
        if isinstance(constant, tuple):
            yield from _names_in(constant, are_code)
        elif isinstance(constant, str) and are_code and len(constant) <= _LONGEST:
            yield from _IDENTIFIER.findall(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            yield constant


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


def _instruction_name(step: dis.Instruction) -> str:
    """Return the name of an instruction; "INPLACE" for an in-place operator."""
    if step.opname == "BINARY_OP" and step.argrepr.endswith("="):
        return "INPLACE"
    return step.opname


def _follows(steps: Sequence[dis.Instruction], pattern: Sequence[str]) -> bool:
    """True if the instructions begin with a pattern."""
    return len(steps) >= len(pattern) and all(
        _instruction_name(step).startswith(wanted)
        for step, wanted in zip(steps, pattern, strict=False)
    )


def _is_statement(steps: Sequence[dis.Instruction]) -> bool:
    """True if a method that was just loaded is called and its result is dropped."""
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
        for i, step in enumerate(steps):
            line = lines.get(step.offset) or line
            name, value = step.opname, step.argval
            if name in _NOT_COUNTED:
                continue
            if name in _ATTRIBUTES:
                self.names.add(value)
                if chain is not None:
                    chain = replace(chain, attributes=(*chain.attributes, value), line=line)
                continue
            if name in ("STORE_ATTR", "DELETE_ATTR") and chain is not None:
                self.writes.append(replace(chain, attributes=(*chain.attributes, value), line=line))
            if chain is not None:
                self._end(chain, steps[i : i + 64], counted)
            if name == "IS_OP" and before != "LOAD_CONST":
                self.compared.add(chain)
            elif chain is not None and chain.last in _BY_IDENTITY:
                self.compared.add(None)
            chain = None
            if name in _ROOTS and (_ROOTS[name] == "global" or value in free):
                chain = Access(_ROOTS[name], value, (), line)
            elif name in _STORES and (_STORES[name] == "global" or value in free):
                counts = step.offset in counted
                self.writes.append(Access(_STORES[name], value, (), line, only_changes=counts))
            elif name == "LOAD_CONST":
                # The last number before an import.
                level = value if isinstance(value, int) else level
                names = value  # the last constant before it: a tuple in `from a import b`, or None
            elif name == "IMPORT_NAME":
                module = Access("module", value, (), line, level)
                if names or level:
                    imported = module
                else:  # ``import a.b`` binds ``a``
                    imported = replace(module, name=value.partition(".")[0])
            elif name == "IMPORT_FROM" and module is not None:
                whole = module if names else imported
                imported = replace(whole, attributes=(*whole.attributes, value))
                self.reads.append(imported)
            elif name == "STORE_FAST" and before in ("IMPORT_NAME", "IMPORT_FROM"):
                imports[value] = imported
            elif name.startswith("LOAD_FAST") and value in imports:
                chain = replace(imports[value], line=line)
            before = name

    def _end(self, chain: Access, rest: Sequence[dis.Instruction], counted: set[int]) -> None:
        """Add the read of a complete chain; ``rest`` has the instructions after it."""
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


# --- functions of libraries whose results no variable shows: settings, clocks, files


_MODULES = (types.ModuleType, type)


def resolve_attributes(owner: Any, attributes: Sequence[str]) -> Any:
    """Return the object that attributes of modules and classes lead to, or None."""
    for name in attributes:
        if not isinstance(owner, _MODULES):
            return None
        owner = getattr(owner, name, None)
    return owner


@functools.cache
def _setting_getters() -> frozenset[Callable[[], Any]]:
    cuda = torch.backends.cuda
    return frozenset({
        torch.get_num_threads, torch.get_num_interop_threads, torch.is_anomaly_enabled,
        torch.is_anomaly_check_nan_enabled, torch.is_warn_always_enabled,
        cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.math_sdp_enabled,
        cuda.cudnn_sdp_enabled,
    })  # fmt: skip


def is_torch_setting_getter(value: Any) -> bool:
    return isinstance(value, types.FunctionType | types.BuiltinFunctionType) and (
        value in _setting_getters()
    )


_OF_ENVIRONMENT = (os.getenv, getattr(os, "getenvb", None))


def reads_environment(owner: Any, name: str | None, value: Any) -> bool:
    """True if a value or attribute reads the environment variables of the process."""
    by_name = owner is os and name in ("environ", "environb")
    return by_name or (isinstance(value, types.FunctionType) and value in _OF_ENVIRONMENT)


def _of_numpy(*names: str) -> list[Any]:
    """Return functions of NumPy; an empty list if NumPy has not been imported."""
    numpy = sys.modules.get("numpy")
    return [] if numpy is None else [getattr(numpy, name) for name in names]


@functools.cache
def _changing_functions() -> frozenset[Any]:
    functions = [
        getattr(time, name)
        for name in (
            "time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns",
            "process_time", "process_time_ns", "thread_time", "thread_time_ns", "localtime",
            "gmtime", "ctime", "asctime", "strftime",
        )
    ]  # fmt: skip
    path, numpy = os.path, _of_numpy("load", "loadtxt", "genfromtxt", "fromfile", "memmap")
    files = [path.exists, path.isfile, path.isdir, path.getsize, path.getmtime, os.listdir,
             os.scandir, os.stat, os.walk, glob.glob, glob.iglob]  # fmt: skip
    process = [path.abspath, path.realpath, path.relpath, path.expandvars, path.expanduser,
               os.getcwd, os.getpid, sys.getrecursionlimit, gc.isenabled, threading.get_ident,
               threading.current_thread, threading.active_count,
               *_of_numpy("geterr", "get_printoptions")]  # fmt: skip
    return frozenset([
        *functions, *files, *process, *numpy, os.urandom, builtins.open, builtins.input,
    ])  # fmt: skip


_OF_PATHS = frozenset({
    "open", "read_text", "read_bytes", "exists", "is_file", "is_dir", "stat", "iterdir", "glob",
    "rglob", "cwd", "home",
})  # fmt: skip
_UNSEEDED = frozenset({
    ("random", "Random"), ("random", "SystemRandom"), ("numpy.random", "default_rng"),
    ("numpy.random", "RandomState"), ("numpy.random", "SeedSequence"),
})  # fmt: skip


_RANDOM_SOURCES = frozenset({
    ("uuid", "uuid1"), ("uuid", "uuid4"), ("secrets", "randbits"), ("secrets", "randbelow"),
    ("secrets", "token_bytes"), ("secrets", "token_hex"), ("secrets", "token_urlsafe"),
    ("decimal", "getcontext"),
})  # fmt: skip


def _module_of(value: Any) -> str:
    """Return the public module of a value; NumPy's random functions name a private one."""
    module = getattr(value, "__module__", None) or ""
    return "numpy.random" if module.startswith("numpy.random") else module


def is_nondeterministic_method(value: Any, name: str) -> bool:
    """True if a method of an object reads a file or the random source of the system."""
    if isinstance(value, pathlib.PurePath):
        return name in _OF_PATHS
    return isinstance(value, random.SystemRandom)


_OF_DATES = frozenset({"now", "utcnow", "today"})


def is_nondeterministic(owner: Any, name: str | None, value: Any, bare: bool = False) -> bool:
    """True if a function may give another result at another call.

    A function of this kind reads a clock, a file, random bytes or a state of the process.

    Args:
        owner: the object that has the function as an attribute, if any.
        bare: True if it is called without arguments.
    """
    if isinstance(owner, type) and issubclass(owner, datetime.date):
        return name in _OF_DATES
    if isinstance(owner, type) and issubclass(owner, pathlib.PurePath):
        return name in _OF_PATHS
    if bare and (_module_of(value), getattr(value, "__name__", "")) in _UNSEEDED:
        return True
    if not isinstance(value, types.FunctionType | types.BuiltinFunctionType):
        return False
    return value in _changing_functions() or (value.__module__, value.__name__) in _RANDOM_SOURCES


# --- reads of libraries in the user's code, which become guards or warnings


_PLAIN = (int, float, bool, str)
_HAVE_MEMBERS = (types.ModuleType, type)


class LibraryReads:
    """Adds the reads of libraries in a function's code to the guards of a trace.

    Args:
        instances: the watched objects of the trace.
        met: called with each class that is read.
    """

    def __init__(self, instances: Instances, met: Callable[[type], None]) -> None:
        self.instances = instances
        self.builder = instances.builder
        self.guards = instances.builder.guards_of(in_closure=True)
        self._met = met
        self._holds_environment = False

    def visit(
        self, owner: Any, name: str | None, value: Any, attributes: Sequence[str], line: str,
        bare: bool,
    ) -> None:  # fmt: skip
        """Look at a variable and the attributes that the code reads from it.

        Args:
            owner: the object that has the variable.
            bare: True if the last attribute is called without arguments.
        """
        if value is MISSING and isinstance(owner, dict):
            value = vars(builtins).get(str(name), MISSING)
        path = tuple(attributes)
        above = last = value
        self._guard_environment_read(None, None, value)
        for attribute in path:
            above, last = last, resolve_attributes(last, (attribute,))
            self._guard_environment_read(above, attribute, last)
        if path and is_nondeterministic_method(value, path[0]):
            self._warn(f"{type(value).__name__}.{path[0]}", line)
        if is_library(above):
            self.guard_member(value, path)
            self.instances.generators.note_mention(last, line)
            if is_torch_setting_getter(last):
                self._guard_result(last)
            if is_nondeterministic(above, path[-1] if path else None, last, bare):
                self._warn(getattr(last, "__qualname__", str(last)), line)

    def guard_member(self, owner: Any, path: Sequence[str]) -> None:
        """Guard an attribute that is read from a library, since it may be replaced."""
        above = resolve_attributes(owner, path[:-1])
        if not path or not is_library(above) or not isinstance(above, _HAVE_MEMBERS):
            return
        member = replaced_function(vars(above).get(path[-1], MISSING))
        if isinstance(member, (*CODE, *_PLAIN, types.NoneType)):
            self.guards.add(MemberIs(above, path[-1], member))
            if isinstance(member, type):
                self._met(member)
        elif isinstance(member, list) or (
            member is MISSING and isinstance(above, types.ModuleType)
        ):
            # A list may be filled; a module's __getattr__ may make a flag at each read.
            value = resolve_attributes(above, path[-1:])
            if isinstance(value, (list, *_PLAIN, types.NoneType)) and hasattr(above, path[-1]):
                text = f"{above.__name__}.{path[-1]}"
                self.builder.guard(value, Source.of_object(above, text).attribute(path[-1]))

    def guard_environment(self) -> None:
        """Guard all environment variables of the process: the ones that are read are not known."""
        if not self._holds_environment:
            self._holds_environment = True
            source = Source.of_object(os.environ)
            self.guards.add(ResultIs(dict, (source,), dict(os.environ), "os.environ"))

    def _guard_environment_read(self, owner: Any, name: str | None, value: Any) -> None:
        if reads_environment(owner, name, value):
            self.guard_environment()

    def _guard_result(self, setting: Callable[[], Any]) -> None:
        """Guard the result of a function without arguments."""
        source = Source.of_object(setting, f"{setting.__name__}()").at("{}()")
        self.builder.guard(setting(), source)

    def _warn(self, function: str, line: str) -> None:
        """Warn of a function that may give another result at another call."""
        if self.builder.closure != "freeze":
            place, _, _ = line.rpartition(", in ")
            filename, _, number = place.rpartition(":")
            warnings.warn_explicit(
                f"specialize({self.instances.name}): {function} may give something else at another "
                f"call, and a program keeps what the first call got. If results depend on it, read "
                f"it before the call and pass it.",
                ReadOnceWarning, filename, int(number),
            )  # fmt: skip
