"""Joining of the results of a ``vmap`` that runs chunk by chunk."""

from __future__ import annotations

from typing import Any, Protocol

import optree
import torch

from tsfunc import pytrees
from tsfunc.bridge.grad.dual_level import can_carry_tangents
from tsfunc.bridge.tracers.nesting import innermost_value
from tsfunc.bridge.tracers.operators import PLAIN_TENSORS
from tsfunc.ops.compressed import concatenate, is_compressed
from tsfunc.ops.dims import memory_order, permuted_back
from tsfunc.transforms.out_dims import match_out_dims
from tsfunc.transforms.tensor_collections import returned_collections
from tsfunc.transforms.vmap_spec import Spec


class Joined:
    """The results of the chunks so far.

    A result that is not differentiated through is copied into the result chunk by chunk, which
    frees the memory of the chunk. The parts of other results are kept, and concatenated at the end.

    Args:
        spec: the arguments of vmap.
    """

    def __init__(self, spec: Spec, size: int) -> None:
        self.spec = spec
        self.size = size
        self._tree: optree.PyTreeSpec | None = None
        self._leaves: list[_LeafJoiner] = []

    @property
    def kept(self) -> int:
        """The bytes of the largest result with parts to concatenate, so far, of known size."""
        parts = [leaf.bytes for leaf in self._leaves if isinstance(leaf, _PartsJoiner)]
        return max([size for size in parts if isinstance(size, int)], default=0)

    def add(self, start: int, out: Any) -> None:
        """Add the result of the chunk that begins at the example ``start``."""
        collections = returned_collections(self.spec, out, self.size, whole=True)
        values, tree = pytrees.flatten(out if collections is None else collections[0])
        if self._tree is None:
            self._tree = tree
            dims = match_out_dims(self.spec, out, tree) if collections is None else collections[1]
            self._leaves = [
                _joiner_of(v, dim, self.size) for v, dim in zip(values, dims, strict=True)
            ]
        elif tree != self._tree:
            self._refuse(pytrees.structure_text(tree), pytrees.structure_text(self._tree))
        for leaf, value in zip(self._leaves, values, strict=True):
            kind = leaf.kind(value)
            if kind != leaf.first:
                self._refuse(kind, leaf.first)
            if leaf.data_sizes:
                _check_data_sizes(leaf, value)
            leaf.add(start, value)

    def result(self) -> Any:
        assert self._tree is not None
        return pytrees.unflatten(self._tree, [leaf.result() for leaf in self._leaves])

    def _refuse(self, now: Any, first: Any) -> None:
        raise ValueError(
            f"{self.spec.call(out=True)}: expected `{self.spec.name}` to return {first}, as for "
            f"the first chunk of the examples, got {now}. It is called once for each chunk, and "
            f"must return the same but for the examples."
        )


class _LeafJoiner(Protocol):
    """Joiner of one leaf of the results.

    Attributes:
        data_sizes: the sizes of the first chunk's value that depend on data, by dim.
    """

    data_sizes: dict[int, Any]

    @property
    def first(self) -> str:
        """The kind of the first chunk's value."""

    def kind(self, value: Any) -> str:
        """Return the properties that the values of all chunks must share, as text."""

    def add(self, start: int, value: Any) -> None:
        """Add the value of the chunk that begins at the example ``start``."""

    def result(self) -> Any:
        """Return the value for all examples."""


def _joiner_of(value: Any, dim: int | None, size: int) -> _LeafJoiner:
    if dim is None or not isinstance(value, torch.Tensor):
        return _SharedValue(value)
    dim %= value.dim()
    plain = type(value) in PLAIN_TENSORS and value.layout is torch.strided
    if plain and not value.requires_grad and not can_carry_tangents():
        return _CopyingJoiner(value, dim, size)
    return _PartsJoiner(value, dim)


class _SharedValue:
    """Joiner of a value that is the same for all examples: the first chunk's value."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.data_sizes: dict[int, Any] = {}
        self.first = self.kind(value)

    def kind(self, value: Any) -> str:
        return "a tensor" if isinstance(value, torch.Tensor) else "no tensor"

    def add(self, start: int, value: Any) -> None:
        pass

    def result(self) -> Any:
        return self.value


class _PartsJoiner:
    """Joiner that keeps the parts and concatenates them at the end."""

    def __init__(self, value: torch.Tensor, dim: int) -> None:
        self.dim = dim
        self.first = self.kind(value)
        self.data_sizes = _data_sizes(value, dim)
        self.parts: list[torch.Tensor] = []
        self.bytes = 0

    def kind(self, value: Any) -> str:
        return _part_text(value, self.dim)

    def add(self, start: int, value: torch.Tensor) -> None:
        self.parts.append(value)
        inner = innermost_value(value)
        if inner is not None:
            self.bytes += inner.numel() * inner.element_size()

    def result(self) -> torch.Tensor:
        if is_compressed(self.parts[0]):
            whole = concatenate(self.parts)
        else:
            whole = torch.cat(self.parts, self.dim)
        self.parts.clear()
        return whole


class _CopyingJoiner:
    """Joiner that copies the parts into one tensor with the memory layout of the first part."""

    def __init__(self, value: torch.Tensor, dim: int, size: int) -> None:
        self.dim = dim
        self.first = self.kind(value)
        self.data_sizes = _data_sizes(value, dim)
        shape = list(value.shape)
        shape[dim] = size
        order = memory_order(value.shape, value.stride())
        self.whole = permuted_back(value.new_empty([shape[i] for i in order]), order)

    def kind(self, value: Any) -> str:
        return _part_text(value, self.dim)

    def add(self, start: int, value: torch.Tensor) -> None:
        self.whole.narrow(self.dim, start, value.shape[self.dim]).copy_(value)

    def result(self) -> torch.Tensor:
        return self.whole


def _part_text(value: Any, dim: int) -> str:
    if not isinstance(value, torch.Tensor):
        return "no tensor"
    shape: list[Any] = list(value.shape)
    for i in _data_sizes(value, dim):
        shape[i] = "a size of data"
    if dim < len(shape):
        shape[dim] = "examples"
    return f"a tensor of shape ({', '.join(map(str, shape))}) and {value.dtype}"


def _data_sizes(value: torch.Tensor, dim: int) -> dict[int, Any]:
    """Return the sizes that a trace does not know, of the dims other than ``dim``."""
    sizes: dict[int, Any] = dict(enumerate(value.shape))
    symbolic = {i: n for i, n in sizes.items() if i != dim and isinstance(n, torch.SymInt)}
    if not symbolic:
        return {}
    from tsfunc.bridge.sizes.shape_rules import is_of_data  # the trace has imported it

    return {i: size for i, size in symbolic.items() if is_of_data(size)}


def _check_data_sizes(leaf: _LeafJoiner, value: torch.Tensor) -> None:
    """Let the program check that the sizes of a chunk's value are those of the first chunk's."""
    if not leaf.data_sizes:
        return
    from tsfunc.bridge.sizes.symbols import check_size  # the trace has imported it

    for i, size in leaf.data_sizes.items():
        text = f"vmap: expected results of one size in all chunks, and dim {i} differs"
        check_size(value.shape[i] == size, text)
