"""Objects that show what something else has: views, references, buffers of bytes, enum members.

Later calls are held to what they show, which changes without them: a view of a dict with the dict.
"""

from __future__ import annotations

import array
import contextvars
import enum
import logging
import queue
import threading
import types
import weakref
from typing import Any

import torch

_DICT: dict[Any, Any] = {}
_VIEWS = (type(_DICT.keys()), type(_DICT.values()), type(_DICT.items()))
_BYTES = (bytearray, array.array, memoryview)

# Objects with a state, and the Python for that part of it which others can ask for.
_TELL: dict[type, str] = {
    type(threading.Lock()): "{}.locked()",
    threading.Thread: "{}.name",
    queue.SimpleQueue: "{}.qsize()",
    logging.Logger: "[{0}.getEffectiveLevel(), {0}.disabled]",
}

_OF_MEMBERS = {"_value_", "_name_", "__objclass__", "_sort_order_"}  # which every enum member has


def has_contents(value: Any) -> bool:
    """Whether an object that is no pytree's container has elements, or shows something."""
    array_like = hasattr(type(value), "__array__") and not isinstance(value, torch.Tensor)
    return array_like or isinstance(value, set) or shown(value) is not None


def shown(value: Any) -> tuple[str, Any] | None:
    """What an object shows.

    Returns:
        The Python for it, with ``{}`` for the object, and what it is now; None for other objects.
    """
    if isinstance(value, _VIEWS):
        return "list({})", list(value)
    if isinstance(value, types.MappingProxyType):
        return "dict({})", dict(value)
    if isinstance(value, enum.Enum):
        own = vars(value)
        if own.keys() <= _OF_MEMBERS:
            return "{}._value_", own["_value_"]
        return "{}.__dict__", dict(own)
    if isinstance(value, contextvars.ContextVar):
        return "{}.get(...)", value.get(...)
    if isinstance(value, _BYTES):
        return "memoryview({}).tobytes()", memoryview(value).tobytes()
    for cls, expression in _TELL.items():
        if isinstance(value, cls):
            return expression, eval(expression.format("value"), {"value": value})
    if isinstance(value, weakref.ref):
        # A tensor that is referred to is the same for as long as it is there.
        referent = value()
        return None if isinstance(referent, torch.Tensor) else ("{}()", referent)
    return None
