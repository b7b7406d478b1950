"""Functions of libraries that give what no variable shows: settings, clocks, files.

Code of installed packages is not looked through. What the user's code calls of it by name is known
here: a question whose answer can be asked for again at every call is a guard, ``same_answer``; what
answers otherwise each time can only be told of, ``changes_by_itself``.
"""

from __future__ import annotations

import builtins
import datetime
import functools
import gc
import os
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

_MODULES = (types.ModuleType, type)


def reached(owner: Any, attributes: Sequence[str]) -> Any:
    """What a way through modules and classes leads to; None where it leads elsewhere."""
    for name in attributes:
        if not isinstance(owner, _MODULES):
            return None
        owner = getattr(owner, name, None)
    return owner


@functools.cache
def _questions() -> frozenset[Callable[[], Any]]:
    cuda = torch.backends.cuda
    return frozenset({
        torch.get_num_threads, torch.get_num_interop_threads, torch.is_anomaly_enabled,
        torch.is_anomaly_check_nan_enabled, torch.is_warn_always_enabled,
        cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.math_sdp_enabled,
        cuda.cudnn_sdp_enabled, os.getcwd, os.getpid, sys.getrecursionlimit, gc.isenabled,
        threading.get_ident, threading.current_thread,
    })  # fmt: skip


def is_library(owner: Any) -> bool:
    """Whether a module, class or function is none of the user's."""
    if isinstance(owner, types.BuiltinFunctionType | types.BuiltinMethodType):
        return True
    if not isinstance(owner, (*_MODULES, types.FunctionType)):
        return False
    module = owner.__name__ if isinstance(owner, types.ModuleType) else owner.__module__
    return (module or "").partition(".")[0] in _NAMES


_NAMES = frozenset({*sys.stdlib_module_names, "builtins", "torch", "numpy"})


def is_question(value: Any) -> bool:
    """Whether a function without arguments tells of a setting."""
    return isinstance(value, types.FunctionType | types.BuiltinFunctionType) and (
        value in _questions()
    )


def is_setting(root: Any, attributes: Sequence[str]) -> bool:
    """Whether a way leads to one of torch's flags (``torch.backends.cudnn.enabled``)."""
    if root is not torch or attributes[:1] != ("backends",):
        return root is sys and tuple(attributes) == ("argv",)
    return isinstance(reached(root, attributes), bool | int | str | types.NoneType)


@functools.cache
def _changing() -> frozenset[Any]:
    found = [
        getattr(time, name)
        for name in (
            "time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns",
            "process_time", "process_time_ns", "thread_time", "thread_time_ns", "localtime",
            "gmtime", "ctime", "asctime",
        )
    ]  # fmt: skip
    return frozenset([*found, os.urandom, builtins.open, builtins.input])


_NOISE = frozenset({
    ("uuid", "uuid1"), ("uuid", "uuid4"), ("secrets", "randbits"), ("secrets", "randbelow"),
    ("secrets", "token_bytes"), ("secrets", "token_hex"), ("secrets", "token_urlsafe"),
})  # fmt: skip


_OF_DATES = frozenset({"now", "utcnow", "today"})


def changes_by_itself(owner: Any, name: str | None, value: Any) -> bool:
    """Whether a function gives something else each time: a clock, a file, the system's noise.

    Args:
        owner: what it is an attribute of, if anything.
        name: which.
        value: the function.
    """
    if isinstance(owner, type) and issubclass(owner, datetime.date):
        return name in _OF_DATES
    if not isinstance(value, types.FunctionType | types.BuiltinFunctionType):
        return False
    return value in _changing() or (value.__module__, value.__name__) in _NOISE
