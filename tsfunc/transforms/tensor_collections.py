"""TensorDict and similar classes under ``vmap``: collections with batch dims of their own.

NOTE [tensor collections]
A TensorDict, a tensorclass or a lazy stack is mapped over one of its own batch dims, as
``torch.func.vmap`` does once ``tensordict.nn`` is imported. The function receives a collection
without that dim, and a returned collection gets one more dim. The batch size, the names and nested
collections change in the same way. ``in_dims`` and ``out_dims`` count the batch dims only: -1 is
the last batch dim.

Each collection becomes a pytree node whose leaves are its tensors. The node is rebuilt without the
mapped dim (an input), or with the dim that the results have (an output). A lazy stack that is
mapped over its stack dim is a TensorDict of stacked tensors inside of the function. If the function
returns this object, the result is a lazy stack along the dim in ``out_dims``. tsfunc does not
import tensordict: a program that has not imported it has no collections.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import optree

from tsfunc import pytrees
from tsfunc.bridge.tracers.batch_tracer import BatchTracer
from tsfunc.bridge.tracers.functorch import extend_is_batched
from tsfunc.transforms.in_dims import match_by_name, match_in_dims
from tsfunc.transforms.out_dims import match_out_dims
from tsfunc.transforms.vmap_spec import Spec


def tensordict_module() -> Any:
    """Return the module tensordict if the program has imported it; else None."""
    module = sys.modules.get("tensordict")
    if module is None or not hasattr(module, "is_tensor_collection"):
        return None
    for name in _IMPORTERS.difference(_extended):
        if (importer := sys.modules.get(name)) is not None:
            extend_is_batched(importer, lambda x: isinstance(x, BatchTracer))
            _extended.add(name)
    return module


# tensordict detaches a tensor that becomes a module's parameter, unless the tensor is batched.
# These modules call torch.func's test, which does not know the tensors of other vmaps.
_IMPORTERS = frozenset({"tensordict.base", "tensordict.nn.params"})
_extended: set[str] = set()


class _Opaque:
    """A leaf that represents a collection while dims are matched."""

    def __init__(self, collection: Any) -> None:
        self.collection = collection


class _CollectionNode:
    """A pytree node with a collection's tensors."""

    def __init__(self, collection: Any, change: _Change) -> None:
        self.collection = collection
        self.change = change


class _Change:
    """The way in which the batch size of a collection changes when it is rebuilt.

    Attributes:
        like: the collection that is rebuilt.
        kind: "drop" a dim, "insert" one, or "resize" one.
        dim: counted from the front; None if the batch size stays.
        size: the size of the dim that is inserted or resized.
        lazy: True if the dim is the stack dim of a lazy stack, which ``like`` replaces.
    """

    def __init__(
        self, like: Any, kind: str, dim: int | None, size: Any = None, *, lazy: bool = False
    ) -> None:
        self.like, self.kind, self.dim, self.size, self.lazy = like, kind, dim, size, lazy
        self._key = type(like), _keys(like), len(like.batch_size), kind, dim, lazy

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Change) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"{type(self.like).__name__} of {', '.join(map(repr, _keys(self.like)))}"

    def batch_size(self, collection: Any) -> list[Any]:
        """Return the batch size of a collection after the change."""
        return self._changed(list(collection.batch_size), self.size)

    def names(self, collection: Any) -> list[Any]:
        """Return the names of the batch dims after the change."""
        names = list(collection.names)
        resized = self.kind == "resize" and self.dim is not None
        return names if resized else self._changed(names, None)

    def _changed(self, entries: list[Any], new: Any) -> list[Any]:
        dim = self.dim
        if dim is None:
            return entries
        rest = entries[dim:] if self.kind == "insert" else entries[dim + 1 :]
        return [*entries[:dim], *([] if self.kind == "drop" else [new]), *rest]

    def in_lazy_stack(self, stack: Any) -> tuple[_Change, int]:
        """Return the change for each collection of a lazy stack, and the new stack dim."""
        dim, stack_dim = self.dim, stack.stack_dim
        if dim is not None:
            if dim > stack_dim:
                dim -= 1
            elif self.kind == "insert":
                stack_dim += 1
            elif self.kind == "drop":
                stack_dim -= 1
        return _Change(stack.tensordicts[0], self.kind, dim, self.size), stack_dim


def _keys(collection: Any) -> tuple[Any, ...]:
    return tuple(collection.keys(include_nested=True, leaves_only=True))


def _leaves(collection: Any, change: _Change) -> Iterator[tuple[Any, int | None]]:
    """Yield the tensors of a collection, each with the dim of the change.

    The tensors of nested collections are included; the order is that of ``_rebuilt``.
    """
    module = tensordict_module()
    collection = _inner(collection)
    if isinstance(collection, module.LazyStackedTensorDict):
        part_change, _ = change.in_lazy_stack(collection)
        for part in collection.tensordicts:
            yield from _leaves(part, part_change)
        return
    if module.is_non_tensor(collection):
        return
    for value in _values(collection):
        if module.is_tensor_collection(value):
            yield from _leaves(value, change)
        elif not _is_unbatched(value):
            yield value, change.dim


def _inner(collection: Any) -> Any:
    """Return the collection that a tensorclass wraps; return any other collection itself."""
    module = tensordict_module()
    if module.is_tensorclass(collection) and not module.is_non_tensor(collection):
        return collection._tensordict
    return collection


def _values(collection: Any) -> list[Any]:
    """Return the entries of a collection in the order in which ``apply`` visits them."""
    values: list[Any] = []
    collection.apply(values.append, call_on_nested=True, filter_empty=True)
    return values


def _is_unbatched(value: Any) -> bool:
    """True for a tensor that has no batch dims."""
    kind = getattr(tensordict_module(), "UnbatchedTensor", None)
    return kind is not None and isinstance(value, kind)


def _rebuilt(collection: Any, change: _Change, leaves: Iterator[Any]) -> Any:
    module = tensordict_module()
    inner = _inner(collection)
    if inner is not collection:
        rebuilt = _rebuilt(inner, change, leaves)
        return type(collection).from_tensordict(rebuilt, dict(collection._non_tensordict))
    if isinstance(collection, module.LazyStackedTensorDict):
        part_change, stack_dim = change.in_lazy_stack(collection)
        parts = [_rebuilt(part, part_change, leaves) for part in collection.tensordicts]
        return type(collection)(*parts, stack_dim=stack_dim)
    if module.is_non_tensor(collection):
        clone = collection.clone(False)
        clone.names = None
        clone.batch_size = change.batch_size(collection)
        clone.names = change.names(collection)
        return clone

    def replaced(value: Any) -> Any:
        if module.is_tensor_collection(value):
            return _rebuilt(value, change, leaves)
        return value if _is_unbatched(value) else next(leaves)

    return collection.apply(
        replaced, batch_size=change.batch_size(collection), names=change.names(collection),
        call_on_nested=True, filter_empty=False, propagate_lock=True,
    )  # fmt: skip


def _is_lazy_at(collection: Any, dim: int | None) -> bool:
    """True for a lazy stack along a dim."""
    inner = _inner(collection)
    kind = tensordict_module().LazyStackedTensorDict
    return isinstance(inner, kind) and inner.stack_dim == dim


def _with_tensors(stack: Any) -> Any:
    """Return a lazy stack with the tensors of its parts stacked."""
    if not tensordict_module().is_non_tensor(stack):
        dense = stack.contiguous()
        return dense.lock_() if stack.is_locked else dense
    raise ValueError(
        f"vmap: the values {stack.tolist()} of a tensordict differ along the mapped dim "
        f"and are not tensors. Exclude them: tensordict.exclude(key)."
    )


def _stacked_lazily(collection: Any, dim: int) -> Any:
    """Return a collection as a lazy stack along a dim."""
    inner = _inner(collection)
    if inner is not collection:
        stack = _stacked_lazily(inner, dim)
        return type(collection).from_tensordict(stack, dict(collection._non_tensordict))
    stack = tensordict_module().LazyStackedTensorDict(*collection.unbind(dim), stack_dim=dim)
    return stack.lock_() if collection.is_locked else stack


# The collections that functions received for lazy stacks mapped over their stack dim, by id.
_mapped_stacks: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def _flatten(node: _CollectionNode) -> tuple[Sequence[Any], _Change]:
    return tuple(leaf for leaf, _ in _leaves(node.collection, node.change)), node.change


def _unflatten(change: _Change, leaves: Sequence[Any]) -> Any:
    rebuilt = _rebuilt(change.like, change, iter(leaves))
    if not change.lazy or change.dim is None:
        return rebuilt
    if change.kind == "drop":
        _mapped_stacks[id(rebuilt)] = rebuilt
        return rebuilt
    return _stacked_lazily(rebuilt, change.dim)


optree.register_pytree_node(_CollectionNode, _flatten, _unflatten, namespace=pytrees.NAMESPACE)


def collections_of(spec: Spec, inputs: Any) -> tuple[Any, Sequence[int | None]] | None:
    """Return the inputs with collections as nodes, and a dim for each leaf; None without any.

    Args:
        inputs: the positional arguments; with ``in_dims`` by name, these and the keyword arguments.

    Raises:
        ValueError: a collection does not have the dim that ``in_dims`` names.
    """
    if (opened := _opaque_leaves(inputs)) is None:
        return None
    leaves, tree = opened
    opaque = pytrees.unflatten(tree, leaves)
    dims = match_by_name(spec, *opaque) if spec.by_name else match_in_dims(spec, opaque)
    nodes, flat_dims = [], []
    for leaf, dim in zip(leaves, dims, strict=True):
        if not isinstance(leaf, _Opaque):
            nodes.append(leaf)
            flat_dims.append(dim)
        elif dim is None:
            nodes.append(_Unmapped(leaf.collection))
        else:
            dim = _dim_of(spec, leaf.collection, dim)
            lazy = _is_lazy_at(leaf.collection, dim)
            collection = _with_tensors(leaf.collection) if lazy else leaf.collection
            change = _Change(collection, "drop", dim, lazy=lazy)
            nodes.append(_CollectionNode(collection, change))
            flat_dims += [dim for _, dim in _leaves(collection, change)]
    return pytrees.unflatten(tree, nodes), flat_dims


class _Unmapped:
    """An empty pytree node that is rebuilt as a shallow copy of a collection."""

    def __init__(self, collection: Any) -> None:
        self.collection = collection


class _Same:
    """Metadata of a node: a collection that is equal to every other."""

    def __init__(self, collection: Any) -> None:
        self.collection = collection

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same)

    def __hash__(self) -> int:
        return 0


optree.register_pytree_node(
    _Unmapped,
    lambda node: ((), _Same(node.collection)),
    lambda same, _: same.collection.clone(False),
    namespace=pytrees.NAMESPACE,
)


def _dim_of(spec: Spec, collection: Any, dim: int) -> int:
    rank = len(collection.batch_size)
    if not -rank <= dim < rank:
        raise ValueError(
            f"{spec.call()}: Got in_dim={dim} for some input, but that input is a "
            f"{type(collection).__name__} with {rank} batch dims, so expected in_dim to satisfy "
            f"-{rank} <= in_dim < {rank}. Its batch size is {list(collection.batch_size)}."
        )
    return dim % rank


def _opaque_leaves(tree: Any) -> tuple[list[Any], optree.PyTreeSpec] | None:
    """Return the leaves of a tree, opaque for collections, and the structure; None without any."""
    module = tensordict_module()
    if module is None:
        return None
    leaves, structure = pytrees.flatten(tree, module.is_tensor_collection)
    are_collections = [module.is_tensor_collection(leaf) for leaf in leaves]
    if not any(are_collections):
        return None
    pairs = zip(leaves, are_collections, strict=True)
    return [_Opaque(leaf) if is_one else leaf for leaf, is_one in pairs], structure


def returned_collections(
    spec: Spec, out: Any, size: Any, *, whole: bool = False
) -> tuple[Any, Sequence[int | None]] | None:
    """Return the results with collections as nodes, and a dim for each leaf; None without any.

    Args:
        whole: True if the collections have the mapped dim already.
    """
    if (opened := _opaque_leaves(out)) is None:
        return None
    leaves, tree = opened
    kind = "resize" if whole else "insert"
    opaque = pytrees.unflatten(tree, leaves)
    nodes, flat_dims = [], []
    for leaf, dim in zip(leaves, match_out_dims(spec, opaque, tree), strict=True):
        if not isinstance(leaf, _Opaque):
            nodes.append(leaf)
            flat_dims.append(dim)
            continue
        collection = leaf.collection
        if dim is not None:
            rank = len(collection.batch_size) + (not whole)
            if not -rank <= dim < rank:
                raise IndexError(
                    f"{spec.call(out=True)}: Dimension out of range (expected to be in range of "
                    f"[{-rank}, {rank - 1}], but got {dim})"
                )
            dim %= rank
        if whole:
            lazy = _is_lazy_at(collection, dim)
            collection = _with_tensors(collection) if lazy else collection
        else:
            lazy = _mapped_stacks.get(id(collection)) is collection
        change = _Change(collection, kind, dim, size, lazy=lazy)
        nodes.append(_CollectionNode(collection, change))
        flat_dims += [dim for _, dim in _leaves(collection, change)]
    return pytrees.unflatten(tree, nodes), flat_dims
