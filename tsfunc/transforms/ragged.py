"""Examples of differing sizes: nested tensors as inputs of ``vmap``, and joining of results.

NOTE [examples of differing sizes]
A nested tensor is mapped over its first dim. Examples of one size are run together, as a tensor of
that size: every operator is correct for each length, since it never sees two lengths. The results
of the parts are joined in the order of the examples. Results of equal sizes become a tensor.
Results of differing sizes become a nested tensor (``ragged="nested"``): of torch's strided layout
if all nested inputs have it, else of the jagged layout, whose sizes differ in one dim. The results
become a list with one entry per example with ``ragged="list"``, and also if a nested tensor can't
hold them: if ranks or dtypes differ, if sizes differ in several dims, or if the results are values
of another transform.

A non-tensor result is per example as soon as the function has read a value of an example, or if
examples have differing sizes: numbers are then returned as a tensor, other objects as a list, and
a result with out_dim None once. Otherwise a non-tensor result is returned once, as by any
``vmap``.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from tsfunc import pytrees
from tsfunc.bridge.trace.trace_level import current_trace
from tsfunc.bridge.tracers.tracer import Tracer
from tsfunc.errors import DataDependentError
from tsfunc.transforms.argnums import is_nested
from tsfunc.transforms.chunk_sizes import ChunkSizes
from tsfunc.transforms.in_dims import mapped_dims
from tsfunc.transforms.out_dims import match_out_dims
from tsfunc.transforms.split import GroupResult, InputSource, Run, Runner, run_traced
from tsfunc.transforms.tensor_collections import returned_collections
from tsfunc.transforms.vmap_spec import Spec

_NUMBERS = (bool, int, float, complex)


@dataclass(frozen=True)
class Nested(InputSource):
    """A nested tensor that is mapped over its first dim."""

    examples: Sequence[torch.Tensor]

    def take(self, subset: torch.Tensor) -> torch.Tensor:
        """Return the given examples, which have one size, as one tensor."""
        return torch.stack([self.examples[i] for i in subset.tolist()])

    def put(self, subset: torch.Tensor, values: torch.Tensor) -> None:
        """Write new values of the given examples into the nested tensor."""
        for i, value in zip(subset.tolist(), values, strict=True):
            self.examples[i].copy_(value)


def nested_source(spec: Spec, value: torch.Tensor, dim: int) -> Nested:
    """Return the source of a nested input; its batch dim must be the first dim."""
    if dim not in (0, -value.dim()):
        raise RuntimeError(
            f"{spec.call()}: Got in_dim={dim} for an input that is a nested tensor. Its examples "
            f"are along its first dim: give in_dim=0. (torch.func says: Nested tensors can only be "
            f"vmapped over dim=0)"
        )
    return Nested(value, 0, value.unbind(0))


def match_sources(
    spec: Spec, flat: Sequence[Any], dims: Sequence[int | None], inputs: Any
) -> tuple[list[Any], Any]:
    """Return the inputs of a call with nested tensors as sources, and the number of examples."""
    sources: list[Any] = list(flat)
    size: Any = None
    rest: list[int | None] = list(dims)
    for i, (value, bdim) in enumerate(zip(flat, dims, strict=True)):
        if bdim is None or not is_nested(value):
            continue
        sources[i] = nested = nested_source(spec, value, bdim)
        rest[i] = None
        if size is None:
            size = len(nested.examples)
        elif size != len(nested.examples):
            raise ValueError(
                f"{spec.call()}: Expected all tensors to have the same size in the mapped "
                f"dimension, got nested tensors of {size} and of {len(nested.examples)} examples"
            )
    if any(bdim is not None for bdim in rest):
        bdims, other = mapped_dims(spec, flat, rest, inputs)
        if other != size:
            raise ValueError(
                f"{spec.call()}: Expected all tensors to have the same size in the mapped "
                f"dimension, got {other} beside a nested tensor of {size} examples"
            )
        for i, bdim in enumerate(bdims):
            if bdim is not None:
                sources[i] = InputSource(flat[i], bdim)
    return sources, size


def groups_by_size(sources: Sequence[Any], size: int) -> list[torch.Tensor]:
    """Return groups of examples whose nested inputs have the same sizes."""
    nested = [source for source in sources if isinstance(source, Nested)]
    if not nested or not size:
        return [torch.arange(size, device="cpu")]
    groups: dict[Any, list[int]] = {}
    for i in range(size):
        groups.setdefault(tuple(n.examples[i].shape for n in nested), []).append(i)
    return [torch.tensor(group, device="cpu") for group in groups.values()]


# Returns the chunk sizes for a group of examples; None to run the group at once.
SizesOf = Callable[[torch.Tensor], ChunkSizes | None]


def run_parts(spec: Spec, sources: Sequence[Any], size: Any, sizes_of: SizesOf, run: Run) -> Any:
    """Run a vmapped call whose examples may diverge or have different sizes."""
    if current_trace() is not None:
        return run_traced(spec, sources, size, run)
    runner = Runner(spec, sources, run)
    for group in groups_by_size(sources, size):
        sizes = sizes_of(group)
        if sizes is None:
            runner.add(group)
            continue
        for length in sizes.lengths(len(group)):
            chunk, group = group.tensor_split([length])
            with sizes.running(len(chunk)):
                runner.add(chunk)
    return join_results(spec, runner.finish(), sources)


def join_results(spec: Spec, parts: Sequence[GroupResult], sources: Sequence[Any]) -> Any:
    """Return the results of all parts, in the order of the examples."""
    nested = [source.value for source in sources if isinstance(source, Nested)]
    single = bool(nested) or any(part.reads_values for part in parts)
    if len(parts) == 1 and not single:
        return parts[0].out
    outs, dims = [part.out for part in parts], None
    for i, part in enumerate(parts):
        collections = returned_collections(spec, part.out, len(part.subset), whole=True)
        if collections is not None:
            outs[i], dims = collections
    flats = [pytrees.flatten(out) for out in outs]
    leaves, tree = flats[0]
    for _, other in flats[1:]:
        if other != tree:
            raise ValueError(
                f"vmap({spec.name}, ...): expected `{spec.name}` to return one structure for all "
                f"examples, got {pytrees.structure_text(tree)} and {pytrees.structure_text(other)}."
            )
    if dims is None:
        dims = match_out_dims(spec, parts[0].out, tree)
    joined = _Joined(spec, [part.subset for part in parts], nested, single)
    results = [joined.leaf([flat[0][i] for flat in flats], dims[i]) for i in range(len(leaves))]
    return pytrees.unflatten(tree, results)


class _Joined:
    """Joiner of the results of parts.

    Args:
        spec: the arguments of vmap.
        single: True if non-tensor results are per example.
    """

    def __init__(
        self,
        spec: Spec,
        subsets: Sequence[torch.Tensor],
        nested: Sequence[torch.Tensor],
        single: bool,
    ) -> None:
        self.spec, self.subsets, self.nested, self.single = spec, subsets, nested, single
        order = torch.cat(list(subsets))
        self.size = len(order)
        self.back = order.argsort()
        self.sorted = bool((self.back.diff() == 1).all())

    def leaf(self, values: Sequence[Any], dim: int | None) -> Any:
        """Return the joined value of one leaf, from its value in each part."""
        if all(isinstance(value, torch.Tensor) for value in values):
            return self._once(values) if dim is None else self._tensors(values, dim)
        if dim is None or all(value is None for value in values):
            return self._once(values)
        if not self.single:
            return values[0]
        if all(isinstance(value, _NUMBERS) for value in values):
            if dim not in (0, -1):
                raise IndexError(
                    f"{self.spec.call(out=True)}: Dimension out of range (expected to be in range "
                    f"of [-1, 0], but got {dim}) for a number for each example"
                )
            return torch.tensor(self._list_of_examples(values, 0))
        return self._list_of_examples(values, dim)

    def _once(self, values: Sequence[Any]) -> Any:
        """Return a result that must be the same for all examples."""
        first = values[0]
        for value in values[1:]:
            if isinstance(value, torch.Tensor) and isinstance(first, torch.Tensor):
                same = value is first or torch.equal(value, first)
            else:
                same = type(value) is type(first) and bool(value == first)
            if not same:
                raise ValueError(
                    f"vmap({self.spec.name}, ...): `{self.spec.name}` returned for an output whose "
                    f"out_dim is None a value that differs from example to example: {first!r} and "
                    f"{value!r}. Give it an out_dim."
                )
        return first

    def _list_of_examples(self, values: Sequence[Any], dim: int) -> list[Any]:
        """Return a list with an entry for each example."""
        items: list[Any] = []
        for subset, value in zip(self.subsets, values, strict=True):
            examples = (
                value.unbind(dim) if isinstance(value, torch.Tensor) else [value] * len(subset)
            )
            items.extend(examples)
        return [items[i] for i in self.back.tolist()]

    def _tensors(self, values: Sequence[torch.Tensor], dim: int) -> Any:
        sizes = [_without(value, dim) for value in values]
        if all(size == sizes[0] for size in sizes):
            joined = torch.cat(list(values), dim) if len(values) > 1 else values[0]
            return joined if self.sorted else joined.index_select(dim, self.back.to(joined.device))
        if self.spec.ragged == "error":
            raise DataDependentError(
                f"vmap({self.spec.name}, ...): an output has sizes that differ from example to "
                f"example: {_listed_sizes(sizes)}. ragged='nested' returns these as a nested "
                f"tensor, ragged='list' as a list."
            )
        differing = _ragged_dims(values, sizes)
        strided = bool(self.nested) and all(x.layout is torch.strided for x in self.nested)
        if self.spec.ragged == "list" or not differing or not (strided or len(differing) == 1):
            return self._list_of_examples(values, dim)
        if dim % values[0].dim() != 0:
            raise RuntimeError(
                f"{self.spec.call(out=True)}: an output has sizes that differ from example to "
                f"example: {_listed_sizes(sizes)}. A nested tensor has its examples along its "
                f"first dim: give out_dims=0 for this output, or ragged='list'. (torch.func says: "
                f"Nested tensors can only be vmapped over dim=0)"
            )
        if strided:
            return torch.nested.as_nested_tensor(
                self._list_of_examples(values, 0), layout=torch.strided
            )
        return self._jagged_tensor(values, differing[0])

    def _jagged_tensor(self, values: Sequence[torch.Tensor], along: int) -> torch.Tensor:
        """Return a jagged nested tensor, ragged along the dim ``along`` of the examples."""
        device = values[0].device
        lengths = torch.cat([torch.full((len(v),), v.shape[along + 1]) for v in values])
        starts = (lengths.cumsum(0) - lengths)[self.back]
        lengths = lengths[self.back]
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        rows = torch.cat([v.movedim(along + 1, 1).flatten(0, 1) for v in values])
        if not self.sorted:
            positions = torch.repeat_interleave(starts - offsets[:-1], lengths)
            rows = rows.index_select(0, (positions + torch.arange(len(positions))).to(device))
        with _without_warnings_of("torch.fx._symbolic_trace"):  # torch's call of its own function
            return torch.nested.nested_tensor_from_jagged(
                rows.movedim(0, along), self._offsets(offsets, device), jagged_dim=along + 1
            )

    def _offsets(self, offsets: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return an input's offsets if the lengths are equal, so that the two combine."""
        nested: Any  # lengths and offsets are methods of the jagged subclass
        for nested in self.nested:
            if nested.layout is torch.jagged and nested.lengths() is None:
                stored: torch.Tensor = nested.offsets()
                if stored.device == device and torch.equal(stored.cpu(), offsets):
                    return stored
        return offsets.to(device)


@contextlib.contextmanager
def _without_warnings_of(name: str) -> Iterator[None]:
    """Context manager: a logger of torch logs errors only."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _without(value: torch.Tensor, dim: int) -> list[Any]:
    """Return the sizes of one example."""
    sizes = list(value.shape)
    del sizes[dim]
    return sizes


def _listed_sizes(sizes: Sequence[Sequence[Any]]) -> str:
    different = sorted({tuple(size) for size in sizes})
    return ", ".join(map(str, different[:4])) + (", ..." if len(different) > 4 else "")


def _ragged_dims(values: Sequence[torch.Tensor], sizes: Sequence[Sequence[Any]]) -> list[int]:
    """Return the dims in which examples differ; empty if a nested tensor can't hold them."""
    first = sizes[0]
    if any(len(size) != len(first) for size in sizes):
        return []
    if any(v.dtype != values[0].dtype or v.device != values[0].device for v in values):
        return []
    if any(isinstance(v, Tracer) or forward_ad.unpack_dual(v).tangent is not None for v in values):
        return []
    return [i for i in range(len(first)) if any(size[i] != first[i] for size in sizes)]
