"""The argument forms of control flow: JAX's order, and torch's tuples of operands."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final, Literal, ParamSpec, TypeVar, get_args

Batching = Literal["subset", "select"]
P = ParamSpec("P")
R = TypeVar("R")


def also_called(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that lets a function take arguments by torch's names for them."""

    def decorator(func: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(func)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if kwargs:
                kwargs = {names.get(name, name): value for name, value in kwargs.items()}  # type: ignore[assignment]
            return func(*args, **kwargs)

        return call

    return decorator


def check_callable(label: str, **functions: object) -> None:
    """Raise TypeError for an argument that is not callable."""
    for name, value in functions.items():
        if not callable(value):
            raise TypeError(f"{label}: {name}: expected a callable, got {type(value).__name__}.")


def check_batching(label: str, batching: str) -> None:
    """Raise ValueError for an invalid ``batching=``."""
    if batching not in get_args(Batching):
        raise ValueError(f'{label}: batching: expected "subset" or "select", got {batching!r}.')


def takes(func: Callable[..., Any], count: int) -> bool | None:
    """True if a function takes ``count`` positional arguments; None if unknown.

    Parameters with a default do not count beside parameters without: ``lambda x, i=i: ...`` is a
    function of ``x``.
    """
    try:
        signature = inspect.signature(func)
    except ValueError:  # no signature
        return None
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return True
    needed = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.default is inspect.Parameter.empty and parameter.kind in _POSITIONAL
    ]
    return len(needed) in (0, count)


_POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def unpacked_operands(
    operands: tuple[Any, ...],
    func: Callable[..., Any],
    takes: Callable[[Callable[..., Any], int], bool | None] = takes,
) -> tuple[Any, ...]:
    """Return the operands; a single tuple or list of operands is unpacked, as in torch.

    Args:
        func: the function that takes them.
        takes: returns True if a function takes a number of arguments.
    """
    if len(operands) == 1 and type(operands[0]) in (tuple, list):
        packed = tuple(operands[0])
        fits = takes(func, len(packed))
        # The signature of a C++ function is unknown: a list may be the argument of `torch.stack`.
        if fits or (fits is None and (len(packed) == 1 or isinstance(operands[0], tuple))):
            return packed
    return operands


def takes_entries(func: Callable[..., Any], carry: Any) -> bool:
    """True if the entries of a carry are the function's arguments, as in torch."""
    return type(carry) in (tuple, list) and bool(carry) and bool(takes(func, len(carry)))
