"""Pytrees: the containers that transforms look into, and their leaves.

Containers are the types that optree supports itself: tuples, lists, dicts, named tuples, ordered
and default dicts, deques, and torch's return types. Classes registered with optree are containers
too: in the global namespace, in "tsfunc", or in another namespace (the first one found). Two more
kinds of class are registered in "tsfunc" when one of their instances is first seen: classes
registered with torch's pytrees, and dataclasses whose instances hold tensors. Such dataclasses need
no registration by the user.

NOTE [dataclasses as containers]
The children of a dataclass container are its fields and its other attributes that hold tensors.
Other attributes are kept unchanged, except cached properties, which are computed again on the new
instance. Fields without tensors whose metadata says ``static=True``, as in JAX, are kept, too. A
new instance gets its attributes without a call of ``__init__``: every attribute already has a
value, and ``__post_init__`` can compute another value for one example than for the batch. A
dataclass is a leaf if it defines ``__new__``, or if its instances hold no tensor (settings, a
configuration).
"""

from __future__ import annotations

import dataclasses
import functools
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import optree
import torch

from tsfunc import hooks

NAMESPACE: Final = "tsfunc"  # the namespace of the classes that this module registers

# Types that are leaves permanently. A class that is not registered now can be registered later.
_LEAVES: set[type] = {
    torch.Tensor, torch.nn.Parameter, type(None), bool, int, float, complex, str, bytes,
    torch.dtype, torch.device, torch.Size,
}  # fmt: skip


def add_leaf(kind: type) -> None:
    """Treat the instances of a class as leaves permanently, without further checks."""
    _LEAVES.add(kind)


_taken_in: set[type] = set()
_lock = threading.RLock()  # reentrant: the contents of a leaf can have unregistered classes too


def flatten(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[Any], optree.PyTreeSpec]:
    """Return the leaves of a tree, ``None`` among them, and its structure.

    Args:
        is_leaf: returns True for a container that is to be treated as a leaf.
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


def structure_text(structure: optree.PyTreeSpec) -> str:
    """Return a structure as text for messages, with ``*`` for each leaf.

    Example:
        >>> from tsfunc import pytrees
        >>> pytrees.structure_text(pytrees.structure_of({"a": (1, 2), "b": 3}))
        "{'a': (*, *), 'b': *}"
    """
    text = str(structure).removeprefix("PyTreeSpec(").removesuffix(")")
    return re.sub(r"(, NoneIsLeaf|, namespace='\w*')+$", "", text)


def static_advice(structure: optree.PyTreeSpec, index: int) -> str:
    """Return advice about a leaf that is not a tensor: a sentence if a dataclass holds it."""
    accessor = structure.accessors()[index]
    if not accessor or not isinstance(accessor[-1], optree.DataclassEntry):
        return ""
    entry = accessor[-1]
    return (
        f" A field that is not a tensor can be declared as data of {entry.type.__qualname__} that "
        f'stays as it is: {entry.name}: ... = dataclasses.field(metadata={{"static": True}}).'
    )


def children_of(tree: Any) -> list[Any]:
    """Return the entries of a container, which can be containers themselves."""
    return list(optree.tree_flatten_one_level(tree, none_is_leaf=True, namespace=NAMESPACE)[0])


def refusing_class(structure: optree.PyTreeSpec) -> type | None:
    """Return a class of containers in a structure that takes only some elements; None without.

    The constructor of ``torch.nn.utils.rnn.PackedSequence``, for example, reads its tensors.
    """
    for child in structure.children():
        found = refusing_class(child)
        if found is not None:
            return found
    try:
        structure.one_level().unflatten([object()] * structure.num_children)
    except Exception:  # the class's own
        return structure.type
    return None


def tree_map(func: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Return the tree with ``func`` applied to each leaf, and to the leaves of ``rest`` there.

    Raises:
        ValueError: one of ``rest`` has another structure than the tree.
    """
    leaves, structure = flatten(tree)
    others = []
    for i, each in enumerate(rest):
        leaves_of_rest, other = flatten(each)
        if other != structure:
            raise ValueError(
                f"tree_map: rest[{i}]: expected the structure of the tree, "
                f"{structure_text(structure)}, got {structure_text(other)}."
            )
        others.append(leaves_of_rest)
    return optree.tree_unflatten(structure, list(map(func, leaves, *others)))


def broadcast_prefix(prefix: Any, tree: Any, is_leaf: Callable[[Any], bool]) -> list[Any]:
    """Return, for each leaf of the tree, the corresponding leaf of the prefix.

    Raises:
        ValueError: ``prefix`` is not a prefix of ``tree``.
    """
    leaves = flatten(tree)[0]  # registers unknown classes
    # Fast paths for the common forms, in a tenth of the time: a single leaf, and a tuple of
    # leaves.
    if is_leaf(prefix):
        return [prefix] * len(leaves)
    pairs = type(prefix) is tuple and type(tree) is tuple and len(prefix) == len(tree)
    if pairs and all(map(is_leaf, prefix)):
        return [
            entry
            for entry, item in zip(prefix, tree, strict=True)
            for _ in range(1 if type(item) in _LEAVES else len(leaves_of(item)))
        ]
    return optree.broadcast_prefix(
        prefix, tree, is_leaf=is_leaf, none_is_leaf=True, namespace=NAMESPACE
    )


def _take_in(leaves: Sequence[Any]) -> bool:
    """Register the classes of unknown leaves.

    Returns:
        True if one of the leaves is a container now.
    """
    is_known = False
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
        is_known = is_known or kind in _taken_in
    return is_known


def _has_become_container(value: Any) -> bool:
    """Register the class of a leaf if it is a container elsewhere or a dataclass of tensors.

    Returns:
        True if the class is a container now.
    """
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
    if any(adopt(kind) for adopt in hooks.unknown_class.functions):
        return True
    if not _can_be_container(kind) or not _holds_tensors(value, set()):
        return False
    if kind in _taken_in:  # registered while the leaf's own attributes were searched
        return True
    optree.register_pytree_node(kind, _parts_of, _Rebuild(kind), namespace=NAMESPACE)
    return True


def _can_be_container(kind: type) -> bool:
    """True if instances of a class can be containers: NOTE [dataclasses as containers]."""
    return (
        dataclasses.is_dataclass(kind)
        and kind.__new__ is object.__new__
        and not issubclass(kind, torch.nn.Module)
    )


def parts_of_dataclass(value: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return the children and the kept attributes of a dataclass container.

    The result is None for other values.
    """
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
    """Return the unflatten function that optree has for a class, or None."""
    entry = _registered_elsewhere(kind, len(_registry))
    return None if entry is None else entry.unflatten_func


@functools.lru_cache(maxsize=256)
def _registered_elsewhere(kind: type, registered: int) -> Any:
    """Return optree's registration of a class in any namespace, or None.

    ``registered`` is the number of classes that optree has registered. The number is part of the
    cache key, so that a new registration causes a new lookup.
    """
    return next((entry for entry in _registry.values() if entry.type is kind), None)


# optree has no public function that searches all namespaces at once.
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
    attributes = {
        field.name: getattr(value, field.name)
        for field in dataclasses.fields(value)
        if hasattr(value, field.name)  # a field without a default can be unset
    }
    for name, attribute in getattr(value, "__dict__", {}).items():
        cached = isinstance(getattr(type(value), name, None), functools.cached_property)
        if name not in attributes and not cached:
            attributes[name] = attribute
    return attributes


def _parts_of(value: Any) -> tuple[tuple[Any, ...], Any, tuple[str, ...]]:
    """Return the children of a dataclass, the data to rebuild it, and the children's names."""
    fields = {f.name for f in dataclasses.fields(value) if not f.metadata.get("static")}
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
    """The structure of a dataclass container: its children's names and its kept attributes."""

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
    """A function that makes instances of a dataclass from their attributes."""

    __slots__ = ("kind",)

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def __call__(self, shape: _Shape, children: Sequence[Any]) -> Any:
        instance: Any = object.__new__(self.kind)
        for name, value in self._all(shape, children):
            object.__setattr__(
                instance, name, value
            )  # bypasses the __setattr__ of a frozen dataclass
        return instance

    def _all(self, shape: _Shape, children: Sequence[Any]) -> Iterator[tuple[str, Any]]:
        yield from zip(shape.names, children, strict=True)
        yield from shape.kept.items()
