"""Tracebacks that show the user's frames and hide those of the library.

NOTE [folded tracebacks]
The traceback of an error that leaves the outermost transform is rewritten: frames of this package
and of torch are dropped, and a frame of a generated program becomes the user's line at which the
operator was traced. A note (PEP 678) names the transforms and describes the arguments of the
user's function. Inner transforms do not rewrite the error, so a user's ``except`` inside a
transform costs nothing extra. Errors that show a defect of the library keep every frame, and
``tsfunc.config.traceback = "full"`` keeps the frames of all errors.

Private names used here: ``_C.DisableTorchFunctionSubclass`` reads a tracer's own shape.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, TracebackType
from typing import Any, Final, TypeVar, cast

import optree
import torch
from torch._C import DisableTorchFunctionSubclass
from torch.compiler import is_dynamo_compiling

from tsfunc.bridge.tracers.dynamo import copy_outside_dynamo
from tsfunc.bridge.tracers.outermost import entered as outermost
from tsfunc.bridge.tracers.outermost import leave_whole
from tsfunc.config import config
from tsfunc.dispatch.places import GENERATED, LIBRARIES, Place
from tsfunc.errors import TsfuncError

F = TypeVar("F", bound=Callable[..., Any])
Step = tuple[FrameType, int, int]  # a frame, its last instruction, and its line

# The name of a generated program's global with the places of its lines.
PLACES: Final = "__places__"
_HIDDEN = (*LIBRARIES, *(str(module.__path__[0]) for module in (optree,)))
# The package raises other classes for errors on purpose.
_DEFECTS = (AssertionError, AttributeError, NameError, RecursionError)
_boundaries: set[CodeType] = set()


def boundary(transform: str, func: Any = None, traceable: bool = False) -> Callable[[F], F]:
    """Decorate a callable that users call: the traceback of an error that leaves it is folded.

    The outermost one of a thread restores the thread's state: NOTE [interrupts] in ``outermost``.

    Args:
        transform: the transform's name in the note.
        func: the user's function, if the callable is made for one.
        traceable: True if Dynamo may trace the callable, which then delegates to torch.func's
            transform; otherwise Dynamo traces neither the callable nor its callees.
    """

    def decorate(entry: F) -> F:
        def entered(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling():
                return entry(*args, **kwargs)
            try:
                if outermost.inside:
                    return entry(*args, **kwargs)
                if config.debug_nans_set:
                    return leave_whole(watched_for_nans, (entry, args, kwargs), {})
                return leave_whole(entry, args, kwargs)
            except Exception as error:
                fold(error, lambda: _label(transform, func))
                raise

        _boundaries.add(entered.__code__)
        wrapped: Any = functools.wraps(entry)(
            entered if traceable else copy_outside_dynamo(entered)
        )
        return cast(F, wrapped)

    return decorate


def folding(transform: str, func: Any = None) -> Callable[[F], F]:
    """Decorate a callable that users call, which restores no state: it folds tracebacks only.

    Args:
        transform: the callable's name in the note.
        func: the user's function, if the callable is made for one.
    """

    def decorate(entry: F) -> F:
        def entered(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling():
                return entry(*args, **kwargs)
            try:
                return entry(*args, **kwargs)
            except Exception as error:
                fold(error, lambda: _label(transform, func))
                raise

        _boundaries.add(entered.__code__)
        return cast(F, functools.wraps(entry)(entered))

    return decorate


WatchedCall = Callable[[Callable[..., Any], Any, Any], Any]
_watch: list[WatchedCall] = []


def on_debug_nans(call: WatchedCall) -> WatchedCall:
    """Register the function that makes a call and looks for NaNs."""
    _watch.append(call)
    return call


def watched_for_nans(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function and look for NaNs: ``config.debug_nans``."""
    return _watch[0](func, args, kwargs)


def inner_function(func: Any) -> Any:
    """Return the callable inside a boundary, or the callable itself if it has no boundary."""
    code = getattr(func, "__code__", None)
    if code in _boundaries and func.__closure__:
        cells = dict(zip(code.co_freevars, func.__closure__, strict=True))
        if "entry" in cells:
            return cells["entry"].cell_contents
    return func


def is_boundary(method: F) -> F:
    """Decorate a callable that calls :func:`fold` itself."""
    code: Any = getattr(method, "__code__")  # noqa: B009 - no attribute of every Callable
    _boundaries.add(code)
    return method


def fold(error: Exception, label: Callable[[], str]) -> None:
    """Rewrite the traceback of an error that leaves a transform: NOTE [folded tracebacks].

    Args:
        error: the error that is about to be raised again.
        label: returns the spelling of the transform that the error leaves.
    """
    frame = inspect.currentframe()
    caller = frame and frame.f_back and frame.f_back.f_back  # the caller of the transform
    while caller is not None:
        if caller.f_code in _boundaries:
            return
        caller = caller.f_back
    if config.traceback == "full" or _is_defect(error):
        return
    _add_note(error, label())
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        each = pending.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            each.__traceback__ = _folded(each.__traceback__)
            pending += (each.__cause__, each.__context__)


def _steps(trace: TracebackType | None) -> Iterator[Step]:
    while trace is not None:
        yield trace.tb_frame, trace.tb_lasti, trace.tb_lineno
        trace = trace.tb_next


def _is_hidden(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_HIDDEN)


def _is_defect(error: BaseException) -> bool:
    """True if the library itself raised an error that it never raises on purpose."""
    if not isinstance(error, _DEFECTS) or isinstance(error, TsfuncError):
        return False
    *_, (frame, _, _) = _steps(error.__traceback__)
    return _is_hidden(frame)


def _folded(trace: TracebackType | None) -> TracebackType | None:
    kept: list[Step] = []
    for frame, last, line in _steps(trace):
        if not _is_hidden(frame):
            kept.append((frame, last, line))
        elif frame.f_code.co_filename.startswith(GENERATED):
            places = frame.f_globals.get(PLACES, {})
            place = places.get(line)
            # A program that was loaded from a file has its lines as strings.
            shown = isinstance(place, Place) and bool(place.file)
            if shown and not place.file.startswith(_HIDDEN):
                kept.append(_frame_at(place))
    folded: TracebackType | None = None
    for frame, last, line in reversed(kept):
        folded = TracebackType(folded, frame, last, line)
    return folded


def _frame_at(place: Place) -> Step:
    """Return a frame that a traceback shows as a given line of the user's code."""
    text = linecache.getline(place.file, place.line).rstrip()
    tree = ast.parse("raise ValueError")
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt | ast.expr):
            node.lineno = node.end_lineno = place.line
            # The whole line, which a traceback does not underline.
            node.col_offset, node.end_col_offset = len(text) - len(text.lstrip()), len(text)
    code = compile(tree, place.file, "exec").replace(co_name=place.function)
    if sys.version_info >= (3, 11):
        code = code.replace(co_qualname=place.function)
    try:
        exec(code, {})
    except ValueError as raised:
        *_, step = _steps(raised.__traceback__)
        return step
    raise AssertionError("the code raises")


def _add_note(error: Exception, label: str) -> None:
    """Note the transform that the error came through, and the arguments of the user's function."""
    if sys.version_info < (3, 11):
        return
    function: FrameType | None = None
    hidden = 0
    after_library = False
    for frame, _, _ in _steps(error.__traceback__):
        if _is_hidden(frame):
            hidden += 1
            after_library = True
        elif after_library:
            function, after_library = frame, False
    given = "" if function is None else _arguments(function)
    where = f", where {function.f_code.co_name} had {given}" if function and given else ""
    error.add_note(
        f"raised in {label}{where}\n"
        f"{hidden} frames of libraries are hidden: tsfunc.config.traceback = 'full' shows them."
    )


def _label(transform: str, func: Any) -> str:
    return transform if func is None else f"{transform}({spelled(func)})"


def spelled(func: Any) -> str:
    """Return the expression by which the user built a function: ``vmap(grad(loss))``."""
    if isinstance(func, functools.partial):
        return spelled(func.func)
    code = getattr(func, "__code__", None)
    if code in _boundaries and func.__closure__:
        cells = dict(zip(code.co_freevars, func.__closure__, strict=True))
        if "transform" in cells:
            return _label(cells["transform"].cell_contents, cells["func"].cell_contents)
    if isinstance(func, torch.nn.Module):
        return type(func).__name__
    return str(getattr(func, "__name__", type(func).__name__))


def _arguments(frame: FrameType) -> str:
    """Return the tensors among the arguments of a function, by name, as text."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    shown = []
    for name in code.co_varnames[:count]:
        value: Any = frame.f_locals.get(name)
        # isinstance would fail for a stand-in of a value of type Any.
        if issubclass(type(value), torch.Tensor):
            with DisableTorchFunctionSubclass():
                shape = ", ".join(map(_size, value.shape))
                shown.append(f"{name}: {str(value.dtype).removeprefix('torch.')}[{shape}]")
    return ", ".join(shown)


def _size(size: Any) -> str:
    """Return a size as text: an int, or an expression of named dims."""
    symbols = getattr(size.node.shape_env, "symbols", None) if type(size) is torch.SymInt else None
    return str(size) if symbols is None else str(symbols.spell_size(size))
