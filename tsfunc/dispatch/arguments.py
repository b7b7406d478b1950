"""The keys that the arguments of a call contribute to its key set.

The search covers the arguments and the leaves of lists, tuples, dicts and every other pytree that
optree knows in its global namespace (``namespace=""``). A value declares its keys by one of two
attributes, of its class or of the instance: ``dispatch_level``, the :class:`Level` of the value,
or ``dispatch_keys``, a :class:`DispatchKeySet`. A plain tensor contributes the key of its backend;
other values contribute nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import optree
import torch

from tsfunc.dispatch.keys import backend_of
from tsfunc.dispatch.state import Level

_NONE, _LEVEL, _KEYS, _SEQUENCE, _MAPPING, _TREE, _TENSOR = range(7)
_kinds: dict[type, int] = {
    type(None): _NONE, int: _NONE, float: _NONE, bool: _NONE, complex: _NONE, str: _NONE,
    torch.dtype: _NONE, torch.device: _NONE, torch.layout: _NONE, torch.memory_format: _NONE,
    torch.Size: _NONE, torch.Tensor: _TENSOR, torch.nn.Parameter: _TENSOR,
    list: _SEQUENCE, tuple: _SEQUENCE, dict: _MAPPING,
}  # fmt: skip


class _BackendBits(dict[str, int]):
    """The backend's bit for each ``torch.device.type``, computed on first use."""

    def __missing__(self, device_type: str) -> int:
        bit = self[device_type] = 1 << backend_of(device_type).priority
        return bit


_backend_bits = _BackendBits()


def _kind_of(value: Any) -> int:
    t = type(value)
    kind = _kinds.get(t)
    if kind is not None:
        return kind
    if hasattr(t, "dispatch_level"):
        kind = _LEVEL
    elif hasattr(t, "dispatch_keys"):
        kind = _KEYS
    elif isinstance(value, torch.Tensor):
        kind = _TENSOR
    else:
        return _kind_of_instance(value)
    _kinds[t] = kind
    return kind


def _kind_of_instance(value: Any) -> int:
    """Return the kind of a value whose type does not decide it.

    The kind is not cached, since a type can be registered as a pytree later.
    """
    if isinstance(value, type):
        return _NONE
    if hasattr(value, "dispatch_level"):
        return _LEVEL
    if hasattr(value, "dispatch_keys"):
        return _KEYS
    return _NONE if optree.tree_is_leaf(value, none_is_leaf=True) else _TREE


def speaks_for_itself(value: Any) -> bool:
    """True if a value's own attributes declare its keys; its contents are then not searched."""
    return _kind_of(value) in (_LEVEL, _KEYS)


def keys_of_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, Level | None]:
    """Return the bits that the arguments contribute, and the innermost level found among them."""
    bits = 0
    level: Level | None = None
    for value in (*args, *kwargs.values()) if kwargs else args:
        kind = _kinds.get(type(value))
        if kind is None:
            kind = _kind_of(value)
        if kind == _NONE:
            continue
        if kind == _LEVEL:
            found = value.dispatch_level
            bits |= found.bits
            level = _innermost(level, found)
        elif kind == _TENSOR:
            bits |= _backend_bits[value.device.type]
        elif kind == _KEYS:
            bits |= value.dispatch_keys.bits
        else:
            more, found = keys_of_arguments(_items(value, kind), {})
            bits |= more
            if found is not None:
                level = _innermost(level, found)
    return bits, level


def backends_of_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return the bits of the backends of the tensors among the arguments."""
    leaves = optree.tree_leaves((tuple(args), dict(kwargs)), none_is_leaf=True)
    bits = 0
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            bits |= _backend_bits[leaf.device.type]
    return bits


def _items(value: Any, kind: int) -> Sequence[Any]:
    if kind == _SEQUENCE:
        return value  # type: ignore[no-any-return]
    if kind == _MAPPING:
        return tuple(value.values())
    leaves: Iterable[Any] = optree.tree_leaves(
        value, is_leaf=lambda v: v is not value and speaks_for_itself(v), none_is_leaf=True
    )
    return tuple(leaves)


def _innermost(a: Level | None, b: Level) -> Level:
    """Return the inner one of two levels; of two levels at the same depth, the one that has ended.

    Values of two levels at one depth meet only if one value has escaped, or if one level is within
    the other.
    """
    if a is None or a is b or b.depth > a.depth:
        return b
    return b if b.depth == a.depth and (not b.alive or b.within(a)) else a
