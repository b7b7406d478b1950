"""Partition specs: the mesh axes that each dim of a tensor is sharded over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tsfunc import pytrees
from tsfunc.errors import MeshError


class P(tuple[Any, ...]):
    """A partition spec: for each dim of a tensor, the mesh axes that the dim is sharded over.

    A spec raises no errors of its own. :func:`tsfunc.shard_map` checks the names and the sizes.

    Args:
        entries: for each dim the name of an axis, a tuple of names (the first varies slowest), or
            None. Dims without an entry are not sharded. ``P()`` is the same tensor on every rank.

    Example:
        >>> from tsfunc import P
        >>> P("dp", None, ("tp", "pp"))
        P('dp', None, ('tp', 'pp'))

    Corresponds to ``jax.sharding.PartitionSpec``.
    """

    __slots__ = ()

    def __new__(cls, *entries: Any) -> P:
        return tuple.__new__(cls, entries)

    def __repr__(self) -> str:
        return f"P({', '.join(map(repr, self))})"

    def dims(self) -> Iterator[tuple[int, tuple[str, ...]]]:
        """Yield each sharded dim with its axes."""
        for dim, entry in enumerate(self):
            names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
            if names:
                yield dim, names

    @property
    def names(self) -> tuple[str, ...]:
        """The axes that dims are sharded over."""
        return tuple(name for _, names in self.dims() for name in names)


def is_spec(value: Any) -> bool:
    """True if a value is a spec, or None, which stands for ``P()``."""
    return value is None or isinstance(value, P)


def match_specs(label: str, specs: Any, tree: Any, sizes: Mapping[str, int]) -> list[P]:
    """Return the spec of each leaf of a tree; ``specs`` is a prefix of the tree.

    Args:
        tree: the arguments or results.
        sizes: the sizes of the mesh axes that specs may name.

    Raises:
        MeshError: a spec names an unknown axis or an axis twice, or the trees do not match.
    """
    try:
        spread = pytrees.broadcast_prefix(specs, tree, is_spec)
    except ValueError:
        structure = pytrees.structure_text(pytrees.structure_of(tree))
        raise MeshError(
            f"{label}: expected a pytree prefix of {structure}, got {specs!r}."
        ) from None
    leaves = [P() if spec is None else spec for spec in spread]
    for spec in leaves:
        if not isinstance(spec, P):
            raise MeshError(f"{label}: expected tsfunc.P(...) for each tensor, got {spec!r}.")
        names = spec.names
        unknown = [name for name in names if name not in sizes]
        if unknown or len({*names}) != len(names):
            raise MeshError(
                f"{label}: expected axes of the mesh ({', '.join(map(repr, sizes))}), each at most "
                f"once, got {spec!r}."
            )
    return leaves


def check_divides(label: str, x: torch.Tensor, spec: P, sizes: Mapping[str, int]) -> None:
    """Raise if a dim can't be split into equal parts over its axes."""
    for dim, names in spec.dims():
        parts = 1
        for name in names:
            parts *= sizes[name]
        if dim >= x.dim() or x.shape[dim] % parts:
            raise MeshError(
                f"{label}: expected dim {dim} to be a multiple of {parts}, the size of "
                f"{' times '.join(map(repr, names))}, for the spec {spec!r}, got a tensor of shape "
                f"{tuple(x.shape)}. Pad the tensor, or shard another dim."
            )


def bound_axes(sizes: Mapping[str, int], axis_names: Sequence[str] | None) -> tuple[str, ...]:
    """Return the axes that a body sees, in the mesh's order.

    Raises:
        MeshError: a name is not an axis of the mesh.
    """
    if axis_names is None:
        return tuple(sizes)
    unknown = [name for name in axis_names if name not in sizes]
    if unknown:
        raise MeshError(
            f"shard_map: axis_names: expected axes of the mesh ({', '.join(map(repr, sizes))}), "
            f"got {unknown}."
        )
    return tuple(name for name in sizes if name in axis_names)
