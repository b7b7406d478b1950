"""Names of classes, and the lookup of a class by its name.

Types are printed and parsed, so their classes need names. The name of a class is its module and
qualified name; torch's own classes have their public names. A class that its name does not find
(because it was made inside of a function, or another class has replaced it) is remembered under
that name as long as it lives. If two classes have one name, the second name gets a number:
``module.f.<locals>.Model#2``.
"""

from __future__ import annotations

import builtins
import itertools
import re
import sys
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import torch

NAME = re.compile(r"[^\W\d]\w*(?:\.(?:[^\W\d]\w*|<\w+>))*(?:#\d+)?")
"""A dotted name, as this module makes it."""

_PUBLIC: dict[str, type] = {
    "torch.device": torch.device,
    "torch.dtype": torch.dtype,
    "torch.layout": torch.layout,
    "torch.memory_format": torch.memory_format,
    "torch.Size": torch.Size,
    "torch.Generator": torch.Generator,
    "torch.stream": torch.Stream,  # the spelling of the proposal
    "torch.Stream": torch.Stream,
    "torch.Event": torch.Event,
    "torch.cuda.Stream": torch.cuda.Stream,
    "torch.cuda.Event": torch.cuda.Event,
    "torch.nn.Module": torch.nn.Module,
    "torch.nn.ModuleList": torch.nn.ModuleList,
    "torch.nn.ModuleDict": torch.nn.ModuleDict,
    "torch.nn.Parameter": torch.nn.Parameter,
    "torch.nn.Buffer": torch.nn.Buffer,
}
_PUBLIC_NAMES = {cls: name for name, cls in _PUBLIC.items()}

_claims: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()
_claimed: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def class_name(cls: type) -> str:
    """Return the name by which `find` finds the class.

    Example:
        >>> class_name(torch.nn.Linear), class_name(complex)
        ('torch.nn.modules.linear.Linear', 'complex')
    """
    if cls in _PUBLIC_NAMES:
        return _PUBLIC_NAMES[cls]
    module = "" if cls.__module__ == "builtins" else f"{cls.__module__}."
    name = f"{module}{cls.__qualname__}"
    return name if NAME.fullmatch(name) and _imported(name) is cls else _claim(cls, name)


def _claim(cls: type, name: str) -> str:
    with _lock:
        known = _claimed.get(cls)
        if known is None:
            known = _free(name if NAME.fullmatch(name) else "_." + re.sub(r"\W", "_", name))
            _claims[known] = cls
            _claimed[cls] = known
        return known


def _free(name: str) -> str:
    """Return the name itself, or the name with the first number that is not in use."""
    names = itertools.chain([name], (f"{name}#{i}" for i in itertools.count(2)))
    return next(each for each in names if each not in _claims and _imported(each) is None)


def find(name: str, scope: Mapping[str, object]) -> Any:
    """Return the object that a dotted name refers to, or None.

    Args:
        name: a name from `class_name`, or a name as written in code that sees `scope`.
        scope: names that take precedence.

    Nothing is imported: a class in a module that is not imported is not found.
    """
    root, *rest = name.split(".")
    if root in scope:
        return _attribute(scope[root], rest)
    found = _PUBLIC.get(name) or _claims.get(name)
    return _imported(name) if found is None else found


def _imported(name: str) -> Any:
    parts = name.split(".")
    for i in range(len(parts) - 1, 0, -1):
        module = sys.modules.get(".".join(parts[:i]))
        if module is not None:
            return _attribute(module, parts[i:])
    return getattr(builtins, name, None)


def _attribute(value: Any, names: list[str]) -> Any:
    for name in names:
        # vars instead of getattr: a lookup must not run a custom __getattr__.
        value = next((vars(c)[name] for c in _homes(value) if name in vars(c)), None)
    return value


def _homes(value: Any) -> tuple[Any, ...]:
    if isinstance(value, type):
        return value.__mro__
    return (value,) if hasattr(value, "__dict__") else ()
