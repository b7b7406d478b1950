"""Functions of libraries whose results no variable shows: settings, clocks, files.

The code of installed packages is not scanned. This module lists the library functions that user
code may call. A function whose answer can be asked for again at every call becomes a guard
(``is_question``). A function that gives another answer each time causes a warning
(``changes_by_itself``).
"""

from __future__ import annotations

import builtins
import datetime
import functools
import gc
import glob
import os
import pathlib
import random
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

_MODULES = (types.ModuleType, type)


def reached(owner: Any, attributes: Sequence[str]) -> Any:
    """Return the object that attributes of modules and classes lead to, or None."""
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
        threading.get_ident, threading.current_thread, threading.active_count,
        *_of_numpy("geterr", "get_printoptions"),
    })  # fmt: skip


def _of_numpy(*names: str) -> list[Any]:
    """Return functions of NumPy; an empty list if NumPy has not been imported."""
    numpy = sys.modules.get("numpy")
    return [] if numpy is None else [getattr(numpy, name) for name in names]


_CODE = (type, types.FunctionType, types.BuiltinFunctionType)


def settings_of(value: Any) -> tuple[Callable[[], Any], ...]:
    """Return the questions whose answers a function, class or number of a library depends on."""
    if (value if isinstance(value, _CODE) else type(value)).__module__ == "decimal":
        return (_decimal_context,)
    return _SETTINGS.get(value, ()) if isinstance(value, types.FunctionType) else ()


def _decimal_context() -> str:
    """Return the context of ``decimal`` as a text: precision, rounding, traps."""
    return repr(sys.modules["decimal"].getcontext())


_SETTINGS: dict[Any, tuple[Callable[[], Any], ...]] = {
    os.path.abspath: (os.getcwd,), os.path.realpath: (os.getcwd,), os.path.relpath: (os.getcwd,),
}  # fmt: skip
_OF_ENVIRONMENT = (
    os.getenv, getattr(os, "getenvb", None), os.path.expandvars, os.path.expanduser,
)  # fmt: skip


def asks_environment(owner: Any, name: str | None, value: Any) -> bool:
    """Return True if a value or attribute reads the environment variables of the process."""
    by_name = owner is os and name in ("environ", "environb")
    return by_name or (isinstance(value, types.FunctionType) and value in _OF_ENVIRONMENT)


def is_library(owner: Any) -> bool:
    """Return True if a module, class or function is of the standard library, torch or NumPy."""
    if isinstance(owner, types.BuiltinFunctionType | types.BuiltinMethodType):
        return True
    if not isinstance(owner, (*_MODULES, types.FunctionType)):
        return False
    module = owner.__name__ if isinstance(owner, types.ModuleType) else owner.__module__
    return (module or "").partition(".")[0] in _NAMES


_NAMES = frozenset({*sys.stdlib_module_names, "builtins", "torch", "numpy"})


def is_question(value: Any) -> bool:
    """Return True if a value is a function without arguments that returns a setting."""
    return isinstance(value, types.FunctionType | types.BuiltinFunctionType) and (
        value in _questions()
    )


def is_setting(root: Any, attributes: Sequence[str]) -> bool:
    """Return True for a flag of torch (``torch.backends.cudnn.enabled``) and for ``sys.argv``."""
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
            "gmtime", "ctime", "asctime", "strftime",
        )
    ]  # fmt: skip
    path, numpy = os.path, _of_numpy("load", "loadtxt", "genfromtxt", "fromfile", "memmap")
    files = [path.exists, path.isfile, path.isdir, path.getsize, path.getmtime, os.listdir,
             os.scandir, os.stat, os.walk, glob.glob, glob.iglob]  # fmt: skip
    return frozenset([*found, *files, *numpy, os.urandom, builtins.open, builtins.input])


_OF_PATHS = frozenset({
    "open", "read_text", "read_bytes", "exists", "is_file", "is_dir", "stat", "iterdir", "glob",
    "rglob", "cwd", "home",
})  # fmt: skip
_UNSEEDED = frozenset({
    ("random", "Random"), ("random", "SystemRandom"), ("numpy.random", "default_rng"),
    ("numpy.random", "RandomState"), ("numpy.random", "SeedSequence"),
})  # fmt: skip


_NOISE = frozenset({
    ("uuid", "uuid1"), ("uuid", "uuid4"), ("secrets", "randbits"), ("secrets", "randbelow"),
    ("secrets", "token_bytes"), ("secrets", "token_hex"), ("secrets", "token_urlsafe"),
})  # fmt: skip


def _module_of(value: Any) -> str:
    """Return the public module of a value; NumPy's random functions name a private one."""
    module = getattr(value, "__module__", None) or ""
    return "numpy.random" if module.startswith("numpy.random") else module


def changes_of_object(value: Any, name: str) -> bool:
    """Return True if a method of an object reads a file or the random source of the system."""
    if isinstance(value, pathlib.PurePath):
        return name in _OF_PATHS
    return isinstance(value, random.SystemRandom)


_OF_DATES = frozenset({"now", "utcnow", "today"})


def changes_by_itself(owner: Any, name: str | None, value: Any, bare: bool = False) -> bool:
    """Return True if a function may give another result each time: a clock, a file, random bytes.

    Args:
        owner: the object that has the function as an attribute, if any.
        name: the name of the attribute.
        value: the function.
        bare: whether it is called without arguments.
    """
    if isinstance(owner, type) and issubclass(owner, datetime.date):
        return name in _OF_DATES
    if isinstance(owner, type) and issubclass(owner, pathlib.PurePath):
        return name in _OF_PATHS
    if bare and (_module_of(value), getattr(value, "__name__", "")) in _UNSEEDED:
        return True
    if not isinstance(value, types.FunctionType | types.BuiltinFunctionType):
        return False
    return value in _changing() or (value.__module__, value.__name__) in _NOISE
