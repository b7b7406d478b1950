"""Pytrees: the rules for which values are containers, and functions over their leaves.

Containers are the types that optree knows (tuples, lists, dicts, named tuples, ordered and default
dicts, deques, torch's return types) and the classes registered with optree. A class can be
registered in the global namespace, in "tsfunc" or in any other namespace; the first of several
other namespaces counts. Two more kinds are registered here when the first value of the class is
seen: classes registered for torch's pytrees, and dataclasses whose instances hold tensors.

NOTE [dataclasses as containers]
A dataclass is a container of its fields and of its other attributes that hold tensors. The
remaining attributes are kept unchanged, except cached properties, which are computed anew. A new
instance gets its attributes without a call of ``__init__``: the attributes have their values
already, and the values that ``__post_init__`` computes for one example are not the values for the
batch. A dataclass with its own ``__new__`` is a leaf, and so is a dataclass whose instances hold
no tensor (settings, a configuration).
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import optree
import torch

NAMESPACE: Final = "tsfunc"  # the optree namespace of the classes that are registered here

# Types that are always leaves. An unknown class can still be registered later.
_LEAVES: set[type] = {
    torch.Tensor, torch.nn.Parameter, type(None), bool, int, float, complex, str, bytes,
    torch.dtype, torch.device, torch.Size,
}  # fmt: skip


def add_leaf(kind: type) -> None:
    """Treat the instances of a class as leaves from now on, without a lookup."""
    _LEAVES.add(kind)


# Function that is called with the class of each unknown leaf; True if it registered the class.
Adopt = Callable[[type], bool]
_adopters: list[Adopt] = []

_taken_in: set[type] = set()
_lock = threading.RLock()  # looking into a leaf can meet other new classes


def on_unknown(adopt: Adopt) -> None:
    """Add a function that is called with an unknown class and returns True if it registered it."""
    _adopters.append(adopt)


def flatten(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[Any], optree.PyTreeSpec]:
    """Return the leaves of a tree, ``None`` among them, and its structure.

    Args:
        tree: the tree.
        is_leaf: predicate that makes a container a leaf.
    """
    leaves, structure = optree.tree_flatten(tree, is_leaf, none_is_leaf=True, namespace=NAMESPACE)
    if not _LEAVES.issuperset(map(type, leaves)):
        unknown = leaves if is_leaf is None else [x for x in leaves if not is_leaf(x)]
        if _take_in(unknown):
            return flatten(tree, is_leaf)
    return leaves, structure


def leaves_of(tree: Any) -> list[Any]:
    """Return the leaves of a tree, ``None`` among them."""
    return flatten(tree)[0]


def structure_of(tree: Any) -> optree.PyTreeSpec:
    """Return the structure of a tree."""
    return flatten(tree)[1]


# ``unflatten(structure, leaves)`` returns the tree with that structure and those leaves.
unflatten: Callable[[optree.PyTreeSpec, Sequence[Any]], Any] = optree.tree_unflatten


def children_of(tree: Any) -> list[Any]:
    """Return the direct children of a container; a child can be a container."""
    return list(optree.tree_flatten_one_level(tree, none_is_leaf=True, namespace=NAMESPACE)[0])


def tree_map(func: Callable[..., Any], tree: Any) -> Any:
    """Return the tree with each leaf replaced by ``func(leaf)``."""
    leaves, structure = flatten(tree)
    return optree.tree_unflatten(structure, [func(leaf) for leaf in leaves])


def broadcast_prefix(prefix: Any, tree: Any, is_leaf: Callable[[Any], bool]) -> list[Any]:
    """Return one entry of the prefix for each leaf of a tree.

    Raises:
        ValueError: ``prefix`` is not a prefix of the tree.
    """
    leaves = flatten(tree)[0]  # registers unknown classes
    # Fast paths (ten times faster) for the common forms: one entry for all, and a flat tuple.
    if is_leaf(prefix):
        return [prefix] * len(leaves)
    pairs = type(prefix) is tuple and type(tree) is tuple and len(prefix) == len(tree)
    if pairs and all(map(is_leaf, prefix)):
        return [
            entry
            for entry, item in zip(prefix, tree, strict=True)
            for _ in range(1 if type(item) in _LEAVES else len(leaves_of(item)))
        ]
    found: list[Any] = optree.broadcast_prefix(
        prefix, tree, is_leaf=is_leaf, none_is_leaf=True, namespace=NAMESPACE
    )
    return found


def _take_in(leaves: Sequence[Any]) -> bool:
    """Return True if at least one of the leaves is a container from now on."""
    found = False
    for leaf in leaves:
        kind = type(leaf)
        if kind in _LEAVES:
            continue
        if isinstance(leaf, torch.Tensor):
            _LEAVES.add(kind)
            continue
        with _lock:
            if kind not in _taken_in and _has_become_container(leaf):
                _taken_in.add(kind)
        found = found or kind in _taken_in
    return found


def _has_become_container(value: Any) -> bool:
    """Register a leaf's class if another registry knows it or it is a dataclass of tensors."""
    kind: Any = type(value)
    registered = _registered_elsewhere(kind, len(_registry))
    if registered is not None:
        optree.register_pytree_node(
            kind,
            registered.flatten_func,
            registered.unflatten_func,
            path_entry_type=registered.path_entry_type,
            namespace=NAMESPACE,
        )
        return True
    if any(adopt(kind) for adopt in _adopters):
        return True
    if not _can_be_container(kind) or not _holds_tensors(value, set()):
        return False
    if kind in _taken_in:  # registered while looking into the leaf
        return True
    optree.register_pytree_node(kind, _parts_of, _Rebuild(kind), namespace=NAMESPACE)
    return True


def _can_be_container(kind: type) -> bool:
    """True if the class meets the conditions of NOTE [dataclasses as containers]."""
    return (
        dataclasses.is_dataclass(kind)
        and kind.__new__ is object.__new__
        and not issubclass(kind, torch.nn.Module)
    )


def parts_of_dataclass(value: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return the children and the kept attributes of a dataclass container, else None."""
    if type(value) not in _taken_in or not isinstance(_entry_of(type(value)), _Rebuild):
        return None
    children, shape, names = _parts_of(value)
    return dict(zip(names, children, strict=True)), shape.kept


def dataclass_of_parts(kind: type, children: dict[str, Any], kept: dict[str, Any]) -> Any:
    """Return the dataclass instance with these parts; None if the class is not a container."""
    with _lock:
        if kind not in _taken_in and _can_be_container(kind) and _entry_of(kind) is None:
            optree.register_pytree_node(kind, _parts_of, _Rebuild(kind), namespace=NAMESPACE)
            _taken_in.add(kind)
    rebuild = _entry_of(kind)
    if not isinstance(rebuild, _Rebuild):
        return None
    return rebuild(_Shape(tuple(children), kept), tuple(children.values()))


def _entry_of(kind: type) -> Any:
    """Return the function that rebuilds instances of a class; None for unknown classes."""
    entry = _registered_elsewhere(kind, len(_registry))
    return None if entry is None else entry.unflatten_func


@functools.lru_cache(maxsize=256)
def _registered_elsewhere(kind: type, registered: int) -> Any:
    """Return optree's registry entry for a class, from any namespace; None if there is none.

    ``registered`` is the number of classes that optree knows; a new number invalidates the cache.
    """
    return next((entry for entry in _registry.values() if entry.type is kind), None)


# optree has no public function that searches all namespaces.
_registry: Any = optree.registry._NODETYPE_REGISTRY


def _holds_tensors(value: Any, seen: set[int]) -> bool:
    if id(value) in seen:
        return False
    seen.add(id(value))
    for part in _attributes(value).values():
        leaves = optree.tree_leaves(part, none_is_leaf=True, namespace=NAMESPACE)
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                return True
            if dataclasses.is_dataclass(leaf) and _holds_tensors(leaf, seen):
                return True
    return False


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of a dataclass instance by name, its fields first."""
    found = {
        field.name: getattr(value, field.name)
        for field in dataclasses.fields(value)
        if hasattr(value, field.name)  # a field without a default can be unset
    }
    for name, attribute in getattr(value, "__dict__", {}).items():
        cached = isinstance(getattr(type(value), name, None), functools.cached_property)
        if name not in found and not cached:
            found[name] = attribute
    return found


def _parts_of(value: Any) -> tuple[tuple[Any, ...], Any, tuple[str, ...]]:
    """Return the children of a dataclass, the data to rebuild it, and the children's names."""
    fields = {field.name for field in dataclasses.fields(value)}
    attributes = _attributes(value)
    kept = {
        name: attribute
        for name, attribute in attributes.items()
        if name not in fields and not any(map(_is_tensor, leaves_of(attribute)))
    }
    names = tuple(name for name in attributes if name not in kept)
    return tuple(attributes[name] for name in names), _Shape(names, kept), names


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


class _Shape:
    """Metadata of a dataclass instance: equal metadata means equal structure."""

    __slots__ = ("kept", "names")

    def __init__(self, names: tuple[str, ...], kept: dict[str, Any]) -> None:
        self.names = names
        self.kept = kept

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Shape) or self.names != other.names:
            return False
        mine, theirs = self.kept, other.kept
        return mine.keys() == theirs.keys() and all(
            value is theirs[name] or (type(value) in _LEAVES and value == theirs[name])
            for name, value in mine.items()
        )

    def __hash__(self) -> int:
        return hash(self.names)

    def __repr__(self) -> str:
        return ", ".join(self.names)


class _Rebuild:
    """Function that makes instances of a dataclass from their attributes."""

    __slots__ = ("kind",)

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def __call__(self, shape: _Shape, children: Sequence[Any]) -> Any:
        made: Any = object.__new__(self.kind)
        for name, value in self._all(shape, children):
            object.__setattr__(made, name, value)  # a frozen dataclass's own __setattr__ raises
        return made

    def _all(self, shape: _Shape, children: Sequence[Any]) -> Iterator[tuple[str, Any]]:
        yield from zip(shape.names, children, strict=True)
        yield from shape.kept.items()
