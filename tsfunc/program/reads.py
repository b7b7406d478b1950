"""What a function reads beside its arguments: globals and closed-over variables.

A program is made for the values that these had. Numbers and strings are compared by value, and
tensors, modules and everything else by identity (the program reads a tensor's data anew at every
call, so writing into it is seen). A module's ``training`` flag is compared too. Looked through are
the function's own code and the functions that it refers to, outside of installed packages.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

_BY_VALUE = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device)
Read = tuple[Callable[[], Any], Any]


def reads_of(func: Callable[..., Any]) -> list[Read]:
    """Pairs of a function that reads a variable anew, and what it gave when the trace was made."""
    found: list[Read] = []
    seen: set[int] = set()
    pending: list[Any] = [func]
    while pending:
        current = pending.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        if isinstance(current, torch.nn.Module):
            for module in current.modules():
                found.append((_training(module), module.training))
            current = type(current).forward
        pending.extend(_inner_functions(current))
        for read, value in _variables(current):
            if isinstance(value, types.FunctionType | torch.nn.Module):
                pending.append(value)
            found.append((read, value))
    return found


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


def _inner_functions(func: Any) -> Iterator[Any]:
    """The function behind a wrapper, a partial or a bound method."""
    for name in ("__wrapped__", "func", "__func__"):
        inner = getattr(func, name, None)
        if callable(inner):
            yield inner


def _variables(func: Any) -> Iterator[Read]:
    if not isinstance(func, types.FunctionType) or _is_installed(func):
        return
    for cell in func.__closure__ or ():
        try:
            yield _cell(cell), cell.cell_contents
        except ValueError:
            continue
    scope = func.__globals__
    for name in _global_names(func.__code__):
        if name in scope and not isinstance(scope[name], types.ModuleType | type):
            yield _global(scope, name), scope[name]


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


def _training(module: torch.nn.Module) -> Callable[[], Any]:
    return lambda: module.training
