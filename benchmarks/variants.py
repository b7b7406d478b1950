"""The same function by tsfunc, by torch.func, and specialized."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch

import tsfunc
from benchmarks.timing import Call

OURS = "tsfunc"
SPECIALIZED = "tsfunc, specialized"
INDUCTOR = "tsfunc, with inductor"
TORCH_FUNC = "torch.func"
COMPILED = "torch.compile of torch.func"


def variants(
    make: Callable[[ModuleType], Callable[..., Any]], *args: Any, specialized: bool = True
) -> dict[str, Call]:
    """Return calls of the function that ``make`` builds from each library's transforms.

    Specialized functions are timed with Inductor too, if there is a compiler for it.
    """
    ours = make(tsfunc)
    calls: dict[str, Call] = {TORCH_FUNC: partial(make(torch.func), *args)}
    calls[OURS] = partial(ours, *args)
    if specialized:
        calls[SPECIALIZED] = partial(tsfunc.specialize(ours), *args)
    if specialized and shutil.which("gcc") is not None:
        calls[INDUCTOR] = partial(tsfunc.specialize(ours, backend="inductor"), *args)
    return calls


def compiled(function: Callable[..., Any], *args: Any, **options: Any) -> dict[str, Call]:
    """Return a call of ``function`` by torch.compile, if there is a compiler for it."""
    if shutil.which("gcc") is None:
        return {}
    return {COMPILED: partial(torch.compile(function, **options), *args)}
