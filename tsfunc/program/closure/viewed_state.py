"""Objects that show the contents of another: views, references, byte buffers, enum members.

Later calls are guarded on the contents, which change without the object: a view of a dict changes
with the dict.
"""

from __future__ import annotations

import array
import contextvars
import enum
import types
import weakref
from typing import Any

import torch

_DICT: dict[Any, Any] = {}
_VIEWS = (type(_DICT.keys()), type(_DICT.values()), type(_DICT.items()))
_BYTES = (bytearray, array.array, memoryview)

_OF_MEMBERS = {"_value_", "_name_", "__objclass__", "_sort_order_"}  # every enum member has these


def has_contents(value: Any) -> bool:
    """Return True if an object that is not a pytree container has elements or shows contents."""
    array_like = hasattr(type(value), "__array__") and not isinstance(value, torch.Tensor)
    return array_like or isinstance(value, set) or viewed_state(value) is not None


def viewed_state(value: Any) -> tuple[str, Any] | None:
    """Return the contents that an object shows.

    Returns:
        The Python expression for the contents, with ``{}`` for the object, and the contents now;
        None for an object that shows nothing.
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
    if isinstance(value, weakref.ref):
        # A referenced tensor is compared by identity, as the reference itself is.
        referent = value()
        return None if isinstance(referent, torch.Tensor) else ("{}()", referent)
    return None
