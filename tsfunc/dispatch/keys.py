"""Dispatch keys and sets of them.

A key names a kind of work (batching, tracing, a backend). A set holds pairs (level, key) as the
bits of one int: inner levels have the higher bits, and within a level the key of higher priority
has the higher bit. The highest bit of a set therefore selects the kernel.
"""

from __future__ import annotations

import operator
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar, Final

import optree
import torch

from tsfunc.errors import DispatchError

# Number of bits of one level, and the most keys that can exist. The priorities of the keys below
# are spread out, so that a user's key fits between any two of them.
WIDTH: Final = 1024
# The distance of a new key without bounds from the highest key.
_STEP: Final = 8
_PACKAGE_PREFIX: Final = __name__.rpartition(".")[0] + "."


def caller_site() -> str:
    """Return the ``file:line`` of the nearest code outside this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
        _PACKAGE_PREFIX
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class DispatchKey:
    """A kind of work that the dispatcher has kernels for; made by :meth:`define`."""

    __slots__ = ("name", "priority", "site")

    name: str
    priority: int
    site: str

    Batch: ClassVar[DispatchKey]
    Grad: ClassVar[DispatchKey]
    Trace: ClassVar[DispatchKey]
    Specialize: ClassVar[DispatchKey]
    BackendSelect: ClassVar[DispatchKey]
    CPU: ClassVar[DispatchKey]
    CUDA: ClassVar[DispatchKey]
    MPS: ClassVar[DispatchKey]
    XPU: ClassVar[DispatchKey]
    Meta: ClassVar[DispatchKey]
    OtherBackend: ClassVar[DispatchKey]

    _by_name: ClassVar[dict[str, DispatchKey]] = {}
    _by_priority: ClassVar[dict[int, DispatchKey]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        raise DispatchError(
            "DispatchKey() does not define a key. "
            "Write DispatchKey.define(name, above=..., below=...)."
        )

    @classmethod
    def define(
        cls, name: str, *, above: DispatchKey | None = None, below: DispatchKey | None = None
    ) -> DispatchKey:
        """Define a new key.

        Args:
            name: the name of the key, which no other key has.
            above: the new key's kernels run before this key's kernels of the same level.
            below: the new key's kernels run after this key's kernels of the same level. With
                neither bound, the new key goes above all others.

        Raises:
            DispatchError: the name is taken, the two bounds leave no room, or cross.

        Example:
            >>> from tsfunc.dispatch import DispatchKey
            >>> Log = DispatchKey.define("Log", above=DispatchKey.Batch)
            >>> Log.priority > DispatchKey.Batch.priority
            True
        """
        site = caller_site()
        with cls._lock:
            old = cls._by_name.get(name)
            if old is not None:
                raise DispatchError(
                    f"DispatchKey.define({name!r}): the name is taken, by the definition at "
                    f"{old.site}; this one is at {site}. Choose another name."
                )
            return cls._add(name, cls._priority_between(name, above, below), site)

    @classmethod
    def _add(cls, name: str, priority: int, site: str) -> DispatchKey:
        key = object.__new__(cls)
        key.name, key.priority, key.site = name, priority, site
        cls._by_name[name] = key
        cls._by_priority[priority] = key
        return key

    @classmethod
    def _priority_between(
        cls, name: str, above: DispatchKey | None, below: DispatchKey | None
    ) -> int:
        """Return a free priority in the middle of the gap next to the bound.

        Above all keys the priority is only a small step higher: halving would leave room for ten
        keys.
        """
        call = f"DispatchKey.define({name!r}, above={above}, below={below})"
        if above is None and below is None:
            top = max(cls._by_priority)
            if top + 1 < WIDTH:
                return min(top + _STEP, (top + WIDTH) // 2)
            raise DispatchError(f"{call}: no key fits above all others; give a bound.")
        low = above.priority if above is not None else -1
        high = below.priority if below is not None else WIDTH
        if low >= high:
            raise DispatchError(
                f"{call}: no key is above {above} and below {below}, for {above} is not below "
                f"{below}; swap the two bounds, or leave one out."
            )
        # The gaps between neighbouring keys inside the bounds, the gap next to the bound first.
        edges = [low, *(p for p in sorted(cls._by_priority) if low < p < high), high]
        gaps = list(pairwise(edges))
        if above is None:
            gaps.reverse()
        for left, right in gaps:
            if right - left > 1:
                if right == WIDTH:
                    return min(left + _STEP, (left + right) // 2)
                return (left + right) // 2
        raise DispatchError(
            f"{call}: the {high - low - 1} priorities inside the bounds are taken, and no more "
            f"keys fit. Leave out a bound."
        )

    @classmethod
    def get(cls, name: str) -> DispatchKey:
        """Return the key with a name; raise DispatchError if there is none."""
        key = cls._by_name.get(name)
        if key is None:
            raise DispatchError(
                f"DispatchKey.get: expected the name of a key, one of "
                f"{', '.join(k.name for k in cls.all())}, got {name!r}."
            )
        return key

    @classmethod
    def all(cls) -> list[DispatchKey]:
        """Return all keys in order of falling priority."""
        return [cls._by_priority[p] for p in sorted(cls._by_priority, reverse=True)]

    def __repr__(self) -> str:
        return f"DispatchKey.{self.name}"

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return DispatchKey.get, (self.name,)

    def __or__(self, other: DispatchKey | DispatchKeySet) -> DispatchKeySet:
        return DispatchKeySet(self) | other


_BACKENDS = ("OtherBackend", "Meta", "XPU", "MPS", "CUDA", "CPU")
_BUILT_IN = (*_BACKENDS, "BackendSelect", "Specialize", "Trace", "Grad", "Batch")
for _i, _name in enumerate(_BUILT_IN):
    setattr(DispatchKey, _name, DispatchKey._add(_name, 8 + 40 * _i, __name__))

BACKENDS: Final = tuple(DispatchKey.get(name) for name in _BACKENDS)
# The backends' bits at level 0.
BACKEND_BITS: Final = sum(1 << key.priority for key in BACKENDS)
_BACKEND_OF_DEVICE = {
    "cpu": DispatchKey.CPU,
    "cuda": DispatchKey.CUDA,
    "mps": DispatchKey.MPS,
    "xpu": DispatchKey.XPU,
    "meta": DispatchKey.Meta,
}


def backend_of(device_type: str) -> DispatchKey:
    """Return the key of the backend for a ``torch.device.type``."""
    return _BACKEND_OF_DEVICE.get(device_type, DispatchKey.OtherBackend)


class DispatchKeySet:
    """An immutable set of pairs (level, key).

    ``DispatchKeySet(key, ...)`` holds the keys at level 0, the level of keys that belong to no
    transform: backends, BackendSelect, keys that a user includes. :meth:`at` makes a set for
    another level. ``|`` is union, ``&`` intersection, ``~`` complement, for masking:
    ``keys & ~masked``.

    Example:
        >>> from tsfunc.dispatch import DispatchKey, DispatchKeySet
        >>> inner = DispatchKeySet.at(1, DispatchKey.CPU)
        >>> (DispatchKeySet(DispatchKey.Batch, DispatchKey.CPU) | inner).highest()
        (1, DispatchKey.CPU)
    """

    __slots__ = ("bits",)

    bits: int

    def __init__(self, *keys: DispatchKey | DispatchKeySet | Iterable[DispatchKey]) -> None:
        bits = 0
        for key in keys:
            for k in (key,) if isinstance(key, DispatchKey | DispatchKeySet) else key:
                bits |= bits_of(k)
        object.__setattr__(self, "bits", bits)

    @classmethod
    def at(cls, level: int, *keys: DispatchKey) -> DispatchKeySet:
        """Return the set of the keys at a level (0 is the outermost)."""
        if level < 0:
            raise DispatchError(f"DispatchKeySet.at({level}, ...): levels count from 0.")
        return cls.from_bits(cls(*keys).bits << (level * WIDTH))

    @classmethod
    def from_bits(cls, bits: int) -> DispatchKeySet:
        key_set = object.__new__(cls)
        object.__setattr__(key_set, "bits", bits)
        return key_set

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a DispatchKeySet does not change: make another with | and &.")

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        # Pairs, since another process may have given the keys other priorities.
        if self.bits < 0:
            return operator.invert, (~self,)
        return _of_pairs, tuple(self)

    def __or__(self, other: DispatchKey | DispatchKeySet) -> DispatchKeySet:
        return DispatchKeySet.from_bits(self.bits | bits_of(other))

    def __and__(self, other: DispatchKey | DispatchKeySet) -> DispatchKeySet:
        return DispatchKeySet.from_bits(self.bits & bits_of(other))

    def __sub__(self, other: DispatchKey | DispatchKeySet) -> DispatchKeySet:
        return DispatchKeySet.from_bits(self.bits & ~bits_of(other))

    def __invert__(self) -> DispatchKeySet:
        return DispatchKeySet.from_bits(~self.bits)

    def __contains__(self, item: DispatchKey | tuple[int, DispatchKey]) -> bool:
        """True if the set has a pair (level, key), or a key at any level."""
        if isinstance(item, tuple):
            level, key = item
            return bool(self.bits >> (level * WIDTH + key.priority) & 1)
        return any(key is item for _, key in self) if self.bits >= 0 else True

    def __iter__(self) -> Iterator[tuple[int, DispatchKey]]:
        """Iterate over the pairs, highest first."""
        bits = self._finite("iterate over")
        while bits:
            bit = bits.bit_length() - 1
            yield split_bit(bit)
            bits ^= 1 << bit

    def __len__(self) -> int:
        return self._finite("count").bit_count()

    def __bool__(self) -> bool:
        return self.bits != 0

    def __int__(self) -> int:
        return self.bits

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DispatchKeySet) and self.bits == other.bits

    def __hash__(self) -> int:
        return hash(self.bits)

    def highest(self) -> tuple[int, DispatchKey]:
        """Return the pair of the highest bit, which is dispatched to; DispatchError if empty."""
        if not self.bits:
            raise DispatchError("DispatchKeySet().highest(): the set is empty.")
        return split_bit(self._finite("take the highest of").bit_length() - 1)

    def _finite(self, verb: str) -> int:
        if self.bits < 0:
            raise DispatchError(f"can't {verb} a complement: intersect it with a set first.")
        return self.bits

    def __repr__(self) -> str:
        if self.bits < 0:
            return f"~{DispatchKeySet.from_bits(~self.bits)!r}"
        return "DispatchKeySet({})".format(", ".join(f"{key.name}@{level}" for level, key in self))


def bits_of(item: DispatchKey | DispatchKeySet) -> int:
    """Return the bits of a set, or of a key at level 0."""
    if isinstance(item, DispatchKeySet):
        return item.bits
    if isinstance(item, DispatchKey):
        return 1 << item.priority
    raise TypeError(f"expected a DispatchKey or a DispatchKeySet, got {item!r}.")


def _of_pairs(*pairs: tuple[int, DispatchKey]) -> DispatchKeySet:
    bits = 0
    for level, key in pairs:
        bits |= 1 << (level * WIDTH + key.priority)
    return DispatchKeySet.from_bits(bits)


def split_bit(bit: int) -> tuple[int, DispatchKey]:
    """Return the level and the key that a bit stands for."""
    level, priority = divmod(bit, WIDTH)
    key = DispatchKey._by_priority.get(priority)
    if key is None:
        raise DispatchError(f"bit {bit} (level {level}, priority {priority}) stands for no key.")
    return level, key


# --- the keys that the arguments of a call contribute to its key set


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


def declares_its_keys(value: Any) -> bool:
    """True if a value's own attributes declare its keys; its contents are then not searched."""
    return _kind_of(value) in (_LEVEL, _KEYS)


def keys_of_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, Any]:
    """Return the bits that the arguments contribute, and the innermost level found among them."""
    bits = 0
    level: Any = None
    for value in (*args, *kwargs.values()) if kwargs else args:
        kind = _kinds.get(type(value))
        if kind is None:
            kind = _kind_of(value)
        if kind == _NONE:
            continue
        if kind == _LEVEL:
            other = value.dispatch_level
            bits |= other.key_bit
            level = _innermost(level, other)
        elif kind == _TENSOR:
            bits |= _backend_bits[value.device.type]
        elif kind == _KEYS:
            bits |= value.dispatch_keys.bits
        else:
            more, other = keys_of_arguments(_container_items(value, kind), {})
            bits |= more
            if other is not None:
                level = _innermost(level, other)
    return bits, level


def backends_of_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return the bits of the backends of the tensors among the arguments."""
    leaves = optree.tree_leaves((tuple(args), dict(kwargs)), none_is_leaf=True)
    bits = 0
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            bits |= _backend_bits[leaf.device.type]
    return bits


def _container_items(value: Any, kind: int) -> Sequence[Any]:
    if kind == _SEQUENCE:
        return value
    if kind == _MAPPING:
        return tuple(value.values())
    leaves: Iterable[Any] = optree.tree_leaves(
        value, is_leaf=lambda v: v is not value and declares_its_keys(v), none_is_leaf=True
    )
    return tuple(leaves)


def _innermost(a: Any, b: Any) -> Any:
    """Return the inner one of two levels; of two levels at the same depth, the one that has ended.

    Values of two levels at one depth meet only if one value has escaped, or if one level is within
    the other.
    """
    if a is None or a is b or b.depth > a.depth:
        return b
    return b if b.depth == a.depth and (not b.alive or b.within(a)) else a
