"""What a function reads beside its arguments: globals and closed-over variables.

A program is made for the values that these had. Numbers and strings are compared by value, and
tensors and everything else by identity (the program reads a tensor's data anew at every call, so
writing into it is seen). Of objects, what was reached for of them is compared: see NOTE
[attributes]. Looked through are the function's own code and the functions that it refers to,
outside of installed packages.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tsfunc.program.holding import is_instance

_BY_VALUE = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device)
Read = tuple[Callable[[], Any], Any]


def reads_of(func: Callable[..., Any]) -> tuple[list[Read], dict[str, Any]]:
    """What a function reads from outside.

    Returns:
        Pairs of a function that reads a variable anew, and what it gives now; and the objects
        among it whose attributes are watched (``holding.py``), by the names that they go by.
    """
    found: list[Read] = []
    objects: dict[str, Any] = {}
    seen: set[int] = set()
    pending: list[tuple[str, Any]] = [("self", func)]
    while pending:
        name, current = pending.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        if is_instance(current):
            objects[name if name not in objects else f"{name}_{len(objects)}"] = current
        pending.extend(_parts(current))
        for variable, read, value in _variables(current):
            if isinstance(value, types.FunctionType) or is_instance(value):
                pending.append((variable, value))
            found.append((read, value))
    return found, objects


def unchanged(reads: list[Read]) -> bool:
    """Whether every variable still has the value that it had."""
    for read, value in reads:
        try:
            now = read()
        except (KeyError, ValueError):
            return False
        if now is not value and not (
            type(now) is type(value) and isinstance(value, _BY_VALUE) and now == value
        ):
            return False
    return True


def _parts(func: Any) -> Iterator[tuple[str, Any]]:
    """What a callable is made of: the function behind a wrapper or bound method, its object."""
    if isinstance(func, types.MethodType):
        yield "self", func.__self__
        yield "self", func.__func__
    elif isinstance(func, functools.partial):
        yield "self", func.func
        yield from ((f"arg_{i}", value) for i, value in enumerate(func.args) if is_instance(value))
        yield from ((name, value) for name, value in func.keywords.items() if is_instance(value))
    elif isinstance(func, torch.nn.Module):
        yield "self", type(func).forward
    elif is_instance(func):
        yield "self", inspect.getattr_static(type(func), "__call__", None)
    else:
        for name in ("__wrapped__", "func", "__func__"):
            inner = getattr(func, name, None)
            if callable(inner):
                yield "self", inner


def _variables(func: Any) -> Iterator[tuple[str, Callable[[], Any], Any]]:
    """The names, readers and values of the variables from outside that a function's code has."""
    if not isinstance(func, types.FunctionType) or _is_installed(func):
        return
    for name, cell in zip(func.__code__.co_freevars, func.__closure__ or (), strict=True):
        try:
            yield name, _cell(cell), cell.cell_contents
        except ValueError:
            continue
    scope = func.__globals__
    for name in _global_names(func.__code__):
        if name in scope and not isinstance(scope[name], types.ModuleType | type):
            yield name, _global(scope, name), scope[name]


def _is_installed(func: types.FunctionType) -> bool:
    filename = func.__code__.co_filename
    return "site-packages" in filename or filename.startswith(_PACKAGE)


_PACKAGE = __file__.rsplit("program", 1)[0]


def _global_names(code: types.CodeType) -> Iterator[str]:
    """Names that the code, or code nested in it, may look up among the globals."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _cell(cell: Any) -> Callable[[], Any]:
    return lambda: cell.cell_contents


def _global(scope: dict[str, Any], name: str) -> Callable[[], Any]:
    return lambda: scope[name]
