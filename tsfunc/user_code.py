"""The user's code, and code of libraries: frames, lines and names that errors and reports show.

The module is private.

NOTE [folded tracebacks]
The traceback of an error that leaves the outermost public call is rewritten: frames of this package
and of torch are dropped, and a frame of a generated program becomes the user's line at which the
operator was traced. A note (PEP 678) names the call and describes the arguments of the user's
function. Inner calls do not rewrite the error, so a user's ``except`` inside a transform costs
nothing extra. Errors that show a defect of the library keep every frame, and
``tsfunc.config.traceback = "full"`` keeps the frames of all errors.

Transforms have a boundary, which also restores the state of the thread
(``bridge/tracers/boundaries.py``). Other public functions are decorated with :func:`folding`, and
public classes with :func:`folded_class`. The extension points, ``tsfunc.dispatch`` and
``tsfunc.ops``, keep every frame: a rule runs between them.

NOTE [code of libraries]
A trace follows the code of the user: it scans functions and classes for the names that they read,
and guards these values. Modules, functions and classes of the standard library, of torch, of NumPy
and of installed packages are guarded by identity alone. Their *instances* (an ``nn.Dropout``, a
namespace, a deque) are guarded by the attributes and elements that were read of them.

The name of the root package of the code's module decides, not the file that the code was compiled
from. A package is installed if its directory is one that installers write to. The module of a
function is that of its globals, since ``functools.wraps`` changes ``__module__``.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import itertools
import linecache
import os
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CellType, CodeType, FrameType, FunctionType, TracebackType
from typing import Any, Final, NamedTuple, TypeVar, cast

import optree
import torch
from torch.compiler import is_dynamo_compiling

from tsfunc import hooks, rage
from tsfunc.config import config

_OWN: Final = __name__.partition(".")[0]
_OURS = os.path.dirname(__file__) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
# torch's layers and their functions, in Python.
MODULES: Final = tuple(os.path.join(_TORCH, "nn", name) for name in ("modules", "functional.py"))
# torch calls its deprecated functions through a wrapper of one of these modules.
WRAPPERS = [sys.modules[name] for name in ("typing_extensions", "warnings") if name in sys.modules]
GENERATED = "<tsfunc "  # the file name of code that this package generates
LIBRARIES = (_OURS, _TORCH, GENERATED, *(str(module.__file__) for module in WRAPPERS))
# The name of a generated program's global with the user's locations of its lines.
LOCATIONS: Final = "__locations__"

_PACKAGES = frozenset({_OWN, "torch", *(module.__name__ for module in WRAPPERS)})
_LIBRARY_PACKAGES: Final = frozenset({
    *sys.stdlib_module_names, "builtins", "torch", "numpy", "tsfunc",
})  # fmt: skip
_INSTALLERS: Final = ("site-packages", "dist-packages")  # the directories of Python's schemes
_STANDARD = os.path.dirname(os.__file__) + os.sep
_INSTALLED = tuple(_STANDARD + name for name in _INSTALLERS)
_C_FUNCTIONS: Final = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
)  # fmt: skip
_HIDDEN = (*LIBRARIES, *(str(module.__path__[0]) for module in (optree,)))
# The package raises other classes for errors on purpose.
_DEFECTS = (AssertionError, AttributeError, NameError, RecursionError)
# Methods that Python calls for an attribute, which may be missing.
_ATTRIBUTE_METHODS = ("__delattr__", "__getattr__", "__getattribute__", "__setattr__")

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C")
Step = tuple[FrameType, int, int]  # a frame, its last instruction, and its line


class AbandonedRun(BaseException):
    """Internal: ends a run of the user's function, which is run again in another way.

    Not an ``Exception``, so that the user's function does not catch it.
    """


class Location(NamedTuple):
    """A line of code and the function that contains it."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}, in {self.function}"


# --- the user's line that runs now


def package_of(frame: FrameType) -> str:
    """Return the root package of a frame's module; an empty string for code without a module."""
    name = frame.f_globals.get("__name__")
    return name.partition(".")[0] if isinstance(name, str) else ""


def is_user_frame(frame: FrameType) -> bool:
    """True if a frame runs code of neither this package nor torch."""
    name = frame.f_globals.get("__name__")
    of_library = _of_library.get(name) if type(name) is str else None
    if of_library is not None:
        return not of_library
    package = package_of(frame)
    if package == "":
        return not frame.f_code.co_filename.startswith(GENERATED)
    _of_library[name] = package in _PACKAGES
    return not _of_library[name]


_of_library: dict[Any, bool] = {}  # by names of modules, as they are found


def user_frame(skip: int = 0) -> FrameType:
    """Return the innermost frame outside this package and torch; else the outermost frame.

    Args:
        skip: the number of innermost frames, beginning with the caller's, that are not looked at
            because they are this package's.
    """
    frame, of_library = sys._getframe(1 + skip), _of_library
    while (back := frame.f_back) is not None:
        # A trace comes here for every operator, below ten frames of libraries.
        if not of_library.get(frame.f_globals.get("__name__")) and is_user_frame(frame):
            break
        frame = back
    return frame


def warn(message: str, category: type[Warning]) -> None:
    """Issue a warning at the user's line, so that filters and once-per-line rules apply to it."""
    frame = user_frame()
    at = Location(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
    rage.record("warning", type=category.__name__, message=message, at=at)
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        frame.f_globals.get("__name__", "<string>"),  # None would suppress the warning
        frame.f_globals.setdefault("__warningregistry__", {}),
    )


def called_by_user(passing: Callable[[FrameType], bool] = lambda frame: False) -> bool:
    """True if the innermost frame outside torch is the user's and not this package's.

    Args:
        passing: predicate for further frames that only pass a call on and are skipped.
    """
    frame = sys._getframe(1)
    if package_of(frame) == _OWN and frame.f_back is not None:
        frame = frame.f_back  # the caller of this function
    while frame.f_back is not None and (package_of(frame) == "torch" or passing(frame)):
        frame = frame.f_back
    return package_of(frame) != _OWN


def user_location(skip: int = 0) -> Location:
    """Return the line of the user's code that runs now.

    Args:
        skip: the number of the callers, beginning with the direct one, that are this package's.
    """
    frame = user_frame(skip + 1)
    return Location(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def user_call_location() -> str:
    """Return the location of the user's call that runs now, with its column.

    Two calls on one line have different locations, from Python 3.11 on.
    """
    frame = user_frame()
    code, line = frame.f_code, frame.f_lineno
    column = None
    if hasattr(code, "co_positions"):
        *_, column, _ = next(itertools.islice(code.co_positions(), frame.f_lasti // 2, None))
    at = f"{line}" if column is None else f"{line}:{column + 1}"
    return f"{code.co_filename}:{at}, in {code.co_name}"


def error_location(error: BaseException) -> Location:
    """Return the innermost line of user code in an error's traceback, else the one that runs now.

    The traceback has no such line if the user's code is outside of the caller of this function.
    """
    location = None
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not code.co_filename.startswith(LIBRARIES):
            location = Location(code.co_filename, trace.tb_lineno, code.co_name)
        trace = trace.tb_next
    return location or user_location()


def source_line(location: Location, before: str = "") -> str:
    """Return the text of a line after the prefix ``before``; an empty string without a source."""
    text = linecache.getline(location.file, location.line).strip()
    return f"{before}{text}" if text else ""


def condition_text(location: Location) -> str | None:
    """Return the condition of a line's only ``if``, ``while`` or ``assert``; None otherwise."""
    _, *others = re.split(r"\b(?:if|elif|while|assert)\b", source_line(location))
    if len(others) != 1:
        return None
    rest = others[0]
    for end in [match.start() for match in re.finditer(r"[:,)\]}]|\belse\b|\bfor\b|$", rest)]:
        try:
            return ast.unparse(ast.parse(rest[:end].strip(), mode="eval").body)
        except SyntaxError:
            continue
    return None


def code_location(func: Any) -> tuple[str, int]:
    """Return the file and the first line of a function; ("", 0) for one that is not in Python.

    A decorator that keeps the function it wraps (``functools.wraps``) is skipped.
    """
    code = getattr(inspect.unwrap(func), "__code__", None)
    return (code.co_filename, code.co_firstlineno) if code is not None else ("", 0)


def code_location_text(func: Any) -> str:
    """Return the ``file:line`` of a function; an empty string for one that is not in Python."""
    file, line = code_location(func)
    return f"{file}:{line}" if file else ""


# --- code of libraries


def root_package(code: Any) -> str:
    """Return the root package of the module of a module, class or function; "" if it has none."""
    name: Any
    if isinstance(code, types.ModuleType):
        name = code.__name__
    elif isinstance(code, types.FunctionType):
        name = code.__globals__.get("__name__")
    else:
        name = getattr(code, "__module__", None)
    return name.partition(".")[0] if isinstance(name, str) else ""


def is_library(code: Any) -> bool:
    """True for a module, class or function of Python, torch, NumPy or this package."""
    return isinstance(code, _C_FUNCTIONS) or root_package(code) in _LIBRARY_PACKAGES


def is_installed(code: Any) -> bool:
    """True for a module, class or function of a library or of an installed package."""
    if isinstance(code, _C_FUNCTIONS):
        return True
    package = root_package(code)
    return package in _LIBRARY_PACKAGES or _is_installed_package(sys.modules.get(package))


@functools.lru_cache(maxsize=1024)
def _is_installed_package(package: types.ModuleType | None) -> bool:
    """True if the directory around a package or module is one that installers write to."""
    folders = getattr(package, "__path__", None)
    paths = [getattr(package, "__file__", None) or ""] if folders is None else list(folders)
    return any(os.path.basename(os.path.dirname(path)) in _INSTALLERS for path in paths)


def is_installed_file(path: str) -> bool:
    """True if a file is in a directory that installers write to."""
    return not set(_INSTALLERS).isdisjoint(path.split(os.sep))


# --- the calls at which tracebacks are folded

_boundaries: set[CodeType] = set()


def folding(name: str = "", func: Any = None) -> Callable[[F], F]:
    """Decorate a callable that users call: the traceback of an error that leaves it is folded.

    Args:
        name: the callable's name in the note; without one the error gets no note.
        func: the user's function, if the callable is made for one.
    """

    def decorate(entry: F) -> F:
        def entered(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling():
                return entry(*args, **kwargs)
            try:
                return entry(*args, **kwargs)
            except Exception as error:
                fold_traceback(error, lambda: label(name, func))
                raise

        _boundaries.add(entered.__code__)
        return cast(F, functools.wraps(entry)(entered))

    return decorate


def folded_class(cls: type[C]) -> type[C]:
    """Decorate a class that users call: the errors of its public members are folded."""
    for name, member in {"__init__": vars(cls).get("__init__", cls.__init__), **vars(cls)}.items():
        if name.startswith("_") and name != "__init__":
            continue
        if isinstance(member, FunctionType):
            setattr(cls, name, folding()(member))
        elif isinstance(member, classmethod | staticmethod):
            setattr(cls, name, type(member)(folding()(member.__func__)))
        elif isinstance(member, property) and member.fget is not None:
            setattr(cls, name, member.getter(folding()(member.fget)))
    return cls


def is_boundary(method: F) -> F:
    """Decorate a callable that calls :func:`fold_traceback` itself."""
    code: Any = getattr(method, "__code__")  # noqa: B009 - no attribute of every Callable
    _boundaries.add(code)
    return method


def inner_function(func: Any) -> Any:
    """Return the callable inside a boundary, or the callable itself if it has no boundary."""
    cells = _cells_of_boundary(func)
    return cells["entry"].cell_contents if "entry" in cells else func


def _cells_of_boundary(func: Any) -> dict[str, CellType]:
    """Return the captured variables of a boundary by name; none for another callable."""
    code = getattr(func, "__code__", None)
    if code not in _boundaries or not func.__closure__:
        return {}
    return dict(zip(code.co_freevars, func.__closure__, strict=True))


# --- folding


def fold_traceback(
    error: Exception, spelling: Callable[[], str], arguments: Callable[[], Mapping[str, Any]] = dict
) -> None:
    """Rewrite the traceback of an error that leaves a public call: NOTE [folded tracebacks].

    Args:
        error: the error that is about to be raised again.
        spelling: returns the spelling of the call that the error leaves; empty for no note.
        arguments: returns the arguments of the call by name, for an error without a frame of the
            user's function, as that of a program is.
    """
    frame = inspect.currentframe()
    public = frame and frame.f_back
    if _is_below_boundary(public and public.f_back):
        return
    call, message = vars(error).get(_REFUSED_CALL, ("", None))
    if message is not None:
        setattr(error, _REFUSED_CALL, (call, None))  # the values of the call end
        alone = message()
        error.args = error.args if alone is None else (alone,)
    if config.traceback == "full" or _is_defect(error):
        return
    if type(error) in (AttributeError, TypeError) and error.args:
        # Python's messages have the class of a value, which is a tensor for the user.
        error.args = (re.sub(r"'\w+Tracer'", "'Tensor'", str(error.args[0])), *error.args[1:])
    text = spelling()
    if text:
        _add_note(error, text, arguments)
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        linked = pending.pop()
        if linked is not None and id(linked) not in seen:
            seen.add(id(linked))
            linked.__traceback__ = _fold(linked.__traceback__)
            pending += (linked.__cause__, linked.__context__)


def in_public_call() -> bool:
    """True if a public function that folds tracebacks is running in this thread."""
    return _is_below_boundary(inspect.currentframe())


def _is_below_boundary(frame: FrameType | None) -> bool:
    while frame is not None:
        if _is_boundary(frame.f_code):
            return True
        frame = frame.f_back
    return False


def _is_boundary(code: CodeType) -> bool:
    try:
        return code in _boundaries
    except TypeError:  # code that Dynamo has made, with constants that are not hashable
        return False


def _steps_of(trace: TracebackType | None) -> Iterator[Step]:
    while trace is not None:
        yield trace.tb_frame, trace.tb_lasti, trace.tb_lineno
        trace = trace.tb_next


def _mark_kept(steps: Iterable[Step]) -> Iterator[tuple[Step, bool]]:
    """Return the steps, and for each True if a traceback keeps its frame.

    Frames of the standard library are dropped where a library called them.
    """
    in_library = False
    for step in steps:
        file = step[0].f_code.co_filename
        if _is_hidden(step[0]):
            in_library = True
        elif not file.startswith(_STANDARD) or file.startswith(_INSTALLED):
            in_library = False
        yield step, not in_library


def _is_hidden(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    if file == "<string>":  # a method that a dataclass or a named tuple makes
        return str(frame.f_globals.get("__name__")).partition(".")[0] == _OWN
    return file.startswith(_HIDDEN)


def _is_defect(error: BaseException) -> bool:
    """True if the library itself raised an error that it never raises on purpose."""
    if not isinstance(error, _DEFECTS) or type(error).__module__.partition(".")[0] == _OWN:
        return False
    frames = [frame for frame, _, _ in _steps_of(error.__traceback__)]
    if isinstance(error, AssertionError):  # torch's modules check their arguments by assertions
        return frames[-1].f_code.co_filename.startswith((_OURS, GENERATED))
    called = list(itertools.takewhile(_is_hidden, reversed(frames)))
    if called and called[-1].f_code.co_name in _ATTRIBUTE_METHODS:
        return False  # the user's code looked up the attribute
    return bool(called)


def _fold(trace: TracebackType | None) -> TracebackType | None:
    shown_steps: list[Step] = []
    for (frame, last, line), keep in _mark_kept(_steps_of(trace)):
        if keep:
            shown_steps.append((frame, last, line))
        elif frame.f_code.co_filename.startswith(GENERATED):
            locations = frame.f_globals.get(LOCATIONS, {})
            location = locations.get(line)
            # The lines of a program that was loaded from a file are in the note.
            shown = isinstance(location, Location) and bool(location.file)
            if shown and not location.file.startswith(_HIDDEN):
                shown_steps.append(_frame_at(location))
    folded: TracebackType | None = None
    for frame, last, line in reversed(shown_steps):
        folded = TracebackType(folded, frame, last, line)
    return folded


def _frame_at(location: Location) -> Step:
    """Return a frame that a traceback shows as a given line of the user's code."""
    text = linecache.getline(location.file, location.line).rstrip()
    tree = ast.parse("raise ValueError")
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt | ast.expr):
            node.lineno = node.end_lineno = location.line
            # The whole line, which a traceback does not underline.
            node.col_offset, node.end_col_offset = len(text) - len(text.lstrip()), len(text)
    code = compile(tree, location.file, "exec").replace(co_name=location.function)
    if sys.version_info >= (3, 11):
        code = code.replace(co_qualname=location.function)
    try:
        exec(code, {})
    except ValueError as raised:
        *_, step = _steps_of(raised.__traceback__)
        return step
    raise AssertionError("the code raises")


# --- the note

_RAISE = dis.opmap["RAISE_VARARGS"]
_REFUSED_CALL = "_refused_call"  # an attribute of errors


def keep_refused_call(
    error: Exception, call: Callable[[], str], message: Callable[[], str | None]
) -> None:
    """Keep the text of a call that torch refused, for the note: ``dot was called on ...``.

    The call is the last one that is given, which the user's line makes. An error of the user's code
    is not a refusal, and an error of this package may have the sizes of an example itself.
    """
    if type(error).__module__ != "builtins" or "inside of vmap" in str(error).lower():
        return
    steps = [*_steps_of(error.__traceback__)]
    if not any(is_user_frame(frame) for frame, _, _ in steps):
        setattr(error, _REFUSED_CALL, (call(), None if _raises_here(steps[-1:]) else message))


def _raises_here(last: Sequence[Step]) -> bool:
    """True if the last step of a traceback is a ``raise`` of this package."""
    return any(
        frame.f_code.co_filename.startswith(_OURS) and frame.f_code.co_code[at] == _RAISE
        for frame, at, _ in last
    )


def _add_note(error: Exception, spelling: str, arguments: Callable[[], Mapping[str, Any]]) -> None:
    """Note the call that the error came through, and the arguments of the function.

    The function is the user's innermost one that a library called. A call without one, such as
    ``vmap(nn.Sequential(...))``, has the innermost one of ``torch.nn``.
    """
    if sys.version_info < (3, 11):
        return
    where = recorded = ""
    hidden = 0
    after_library = is_users = False
    for (frame, _, line), keep in _mark_kept(_steps_of(error.__traceback__)):
        if frame.f_code.co_filename.startswith(GENERATED):
            location = frame.f_globals.get(LOCATIONS, {}).get(line)
            # A program that was loaded from a file has its lines as strings.
            recorded = location if isinstance(location, str) else recorded
        if not keep:
            hidden += 1
            after_library = True
            if not is_users and frame.f_code.co_filename.startswith(MODULES):
                where = _where(frame) or where
        elif after_library:
            where, is_users, after_library = _where(frame), True, False
    if not where and (arguments_text := hooks.describe_arguments.provided(arguments().items())):
        where = f", called with {arguments_text}"
    at = f"the operator was traced at {recorded}\n" if recorded else ""
    call, _ = vars(error).get(_REFUSED_CALL, ("", None))
    refused = f"for each example, {call}\n" if call else ""
    error.add_note(
        f"raised in {spelling}{where}\n{refused}{at}"
        f"{hidden} frames of libraries are hidden: tsfunc.config.traceback = 'full' shows them."
    )


def _where(frame: FrameType) -> str:
    """Return the part of a note about the arguments of a function; empty without tensors."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    arguments_text = hooks.describe_arguments.provided(
        (name, frame.f_locals.get(name)) for name in names
    )
    name, module = code.co_name, frame.f_locals.get("self")
    if isinstance(module, torch.nn.Module) and frame.f_code.co_filename.startswith(MODULES):
        name = f"{type(module).__name__}.{name}"
    return f", where {name} had {arguments_text}" if arguments_text else ""


def label(name: str, func: Any) -> str:
    """Return the text of a public call in a note: ``vmap(loss)``."""
    return name if func is None else f"{name}({function_text(func)})"


def function_text(func: Any) -> str:
    """Return the expression by which the user built a function: ``vmap(grad(loss))``."""
    if isinstance(func, functools.partial):
        return function_text(func.func)
    cells = _cells_of_boundary(func)
    if "name" in cells:
        return label(cells["name"].cell_contents, cells["func"].cell_contents)
    if isinstance(func, torch.nn.Module):
        return type(func).__name__
    return str(getattr(func, "__name__", type(func).__name__))


def name_of(func: Callable[..., Any]) -> str:
    """Return the name of a function in messages."""
    if isinstance(func, functools.partial):
        return f"functools.partial({name_of(func.func)}, ...)"
    if isinstance(func, torch.nn.Module):
        return type(func).__name__  # the repr can have a line for each submodule
    return getattr(func, "__name__", None) or repr(func)
