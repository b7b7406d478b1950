"""A sample of the database with names for its sizes, and the same call at other sizes.

Trial calls of the operator find the sizes that may change, in one of two ways:

- *apart*: change each size of each tensor alone, then together with all equal sizes, then together
  with all sizes that can't change alone. A size that changes alone gets a name; sizes that must
  change together share one.
- *by size*: equal sizes of the sample share a name, 0 and 1 included.

A size that can't change stays a number. The names therefore do not depend on the code under test.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.ops.batches import clone
from tests.ops.database import Case, Results
from tsfunc import MetaTensorType

# Kernels that read out of bounds if sizes disagree. Their equal sizes change together only, and no
# size shrinks.
_UNCHECKED = (
    "batch_norm", "segment_reduce", "attention_forward", "embedding_bag", "ctc_loss", "lu_unpack",
    "linear_cross_entropy.chunked",
)  # fmt: skip
# Kernels that leave the memory of their result as it was if the sum is empty.
_UNWRITTEN = ("_scaled_mm",)
Place = tuple[int, int]  # a tensor, and one of its dims
Shapes = Sequence[Sequence[int]]
# Changes of a size that find out if it may change: most operators accept any other size.
CHANGES: tuple[Callable[[int], int], ...] = (
    lambda n: n + 1,
    lambda n: n + 2,
    lambda n: 2 * n,
    lambda n: 3 * n,
    lambda n: n + 4,
    lambda n: 4 * n,
)


@dataclass(frozen=True)
class Named:
    """A case with names for some of its sizes.

    Attributes:
        case: the case.
        names: the names of the sizes that may change.
        others: shapes at other sizes, if the operator accepts any.
        small: shapes with a named size of 0 or 1, if the operator accepts any.
    """

    case: Case
    names: Mapping[Place, str]
    others: Sequence[Shapes]
    small: Sequence[Shapes] = ()

    @property
    def shapes(self) -> Shapes:
        """Return the shapes of the sample."""
        return [tuple(x.shape) for x in self.case.tensors]

    def descriptors(self) -> dict[str, MetaTensorType]:
        """Return descriptors of the tensors, with names for the sizes that may change."""
        return {
            f"x{i}": MetaTensorType(
                dtype=x.dtype,
                shape=[self.names.get((i, d), size) for d, size in enumerate(x.shape)],
            )
            for i, x in enumerate(self.case.tensors)
        }


def at_shapes(tensors: Sequence[Tensor], shapes: Shapes) -> list[Tensor]:
    """Return the tensors at other shapes, with their values repeated or cut off."""
    return [_laid_out_as(x, _at_shape(x, shape)) for x, shape in zip(tensors, shapes, strict=True)]


def _laid_out_as(x: Tensor, other: Tensor) -> Tensor:
    """Return a tensor with the memory order of the dims of ``x``."""
    order = sorted(range(x.dim()), key=lambda d: (-x.stride()[d], d))
    back = sorted(range(x.dim()), key=lambda d: order[d])
    plain = x.layout is not torch.strided or x.is_contiguous()
    return other if plain else other.permute(order).contiguous().permute(back)


def _at_shape(x: Tensor, shape: Sequence[int]) -> Tensor:
    if tuple(x.shape) == tuple(shape):
        return clone(x)
    if not x.numel():
        return x.new_zeros(shape)
    found = x
    for dim, size in enumerate(shape):
        found = found.index_select(dim, torch.arange(size) % x.shape[dim])
    square = found.dim() > 1 and found.shape[-1] == found.shape[-2]
    if square and (found.is_floating_point() or found.is_complex()):
        found = found + torch.eye(found.shape[-1], dtype=x.dtype)  # equal rows have no inverse
    return found


def inputs_at(case: Case, shapes: Shapes) -> list[Tensor]:
    """Return the tensors of a case at other sizes; offsets keep their order."""
    found = at_shapes(case.tensors, shapes)
    if not case.ordered:
        return found
    return [x if x.is_floating_point() or x.dim() != 1 else x.sort().values for x in found]


def answer(case: Case, shapes: Shapes) -> Results | None:
    """Return the operator's result at other sizes, or None if it refuses them."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return case.call(*inputs_at(case, shapes))
        except Exception:
            return None


def _count(case: Case, shapes: Shapes) -> int | None:
    """Return the number of results; None if the operator refuses the sizes.

    A function with more results for larger tensors has a program for each size.
    """
    found = answer(case, shapes)
    return None if found is None else len(found)


def _changed(shapes: Shapes, places: Sequence[Place], change: Callable[[int], int]) -> Shapes:
    found = [list(shape) for shape in shapes]
    for i, d in places:
        found[i][d] = change(found[i][d])
    return found


def named(case: Case, entry: str = "", wanted: int = 3) -> Named | None:
    """Return the case of an entry with names found *apart*, or None if no size may change."""
    shapes = [tuple(x.shape) for x in case.tensors]
    if not all(size for shape in shapes for size in shape) or answer(case, shapes) is None:
        return None
    groups = list(_groups(case, shapes, not _is_unchecked(entry)))
    if not _all_together(case, shapes, groups):
        # A broadcast size of 1 may change alone, but not together with the size that it is
        # broadcast to.
        groups = [g for g in groups if any(shapes[i][d] != 1 for i, d in g)]
    return _with_names(case, shapes, groups, wanted, entry)


def named_by_size(case: Case, entry: str = "", wanted: int = 3) -> Named | None:
    """Return the case of an entry with a name for each size, or None if no size may change."""
    shapes = [tuple(x.shape) for x in case.tensors]
    if answer(case, shapes) is None:
        return None
    groups = list(_equal(shapes, _places(shapes)))
    if not _all_together(case, shapes, groups):
        free = [group for group in groups if _free(case, shapes, group)]
        rest = [place for group in groups if group not in free for place in group]
        if rest and _free(case, shapes, rest):
            free += _equal(shapes, rest)
        groups = free
    groups = [group for group in groups if _keeps_count(case, shapes, group)]
    return _with_names(case, shapes, groups, wanted, entry)


def _is_unchecked(entry: str) -> bool:
    return any(word in entry for word in _UNCHECKED)


def _with_names(
    case: Case, shapes: Shapes, groups: Sequence[Sequence[Place]], wanted: int, entry: str
) -> Named | None:
    count = _count(case, shapes)
    names = {p: f"d{k}" for k, group in enumerate(groups) for p in group}
    others: list[Shapes] = []
    for changes in _mixed(len(groups)):
        other: Shapes = shapes
        for group, change in zip(groups, changes, strict=True):
            other = _changed(other, group, change)
        if other not in others and _count(case, other) == count:
            others.append(other)
            if len(others) == wanted:
                break
    small = [
        _changed(shapes, group, functools.partial(_to, size))
        for group in groups
        for size in ((1,) if any(word in entry for word in _UNWRITTEN) else (0, 1))
    ]
    if _is_unchecked(entry):
        small = []
    taken = [each for each in small if each != shapes and _count(case, each) == count]
    return Named(case, names, others, taken) if others else None


def _all_together(case: Case, shapes: Shapes, groups: Sequence[Sequence[Place]]) -> bool:
    """True if all groups can change at once, in several ways: one success may be chance."""
    return sum(_together(case, shapes, groups, change) for change in CHANGES) > 1


def _together(
    case: Case, shapes: Shapes, groups: Sequence[Sequence[Place]], change: Callable[[int], int]
) -> bool:
    """True if all groups can change at once, each to a different size."""
    count = _count(case, shapes)
    for k, group in enumerate(groups):
        shapes = _changed(shapes, group, functools.partial(_changed_apart, change, k))
    return _count(case, shapes) == count


def _changed_apart(change: Callable[[int], int], k: int, size: int) -> int:
    return change(size) + (k if size == 1 else 0)


def _mixed(groups: int) -> Iterator[tuple[Callable[[int], int], ...]]:
    """Yield ways to change all groups: each differently, then all alike, then fewer groups."""
    if not groups:
        return
    for k in range(len(CHANGES)):
        yield tuple(CHANGES[(k + g) % len(CHANGES)] for g in range(groups))
    for change in CHANGES:
        yield (change,) * groups
    for change in CHANGES:
        for g in range(groups):
            yield tuple(change if g == h else _same for h in range(groups))


def _same(size: int) -> int:
    return size


def _to(size: int, _: int) -> int:
    return size


def _groups(case: Case, shapes: Shapes, apart: bool) -> Iterator[Sequence[Place]]:
    """Return the groups of sizes that may change together."""
    left = []
    for place in _places(shapes):
        if apart and _free(case, shapes, [place]):
            yield [place]
        else:
            left.append(place)
    rest: list[Place] = []
    for group in _equal(shapes, left):
        if _free(case, shapes, group):
            yield group
        else:
            rest += group
    if rest and _free(case, shapes, rest):
        yield from _equal(shapes, rest)


def _places(shapes: Shapes) -> list[Place]:
    return [(i, d) for i, shape in enumerate(shapes) for d in range(len(shape))]


def _equal(shapes: Shapes, places: Sequence[Place]) -> Iterator[Sequence[Place]]:
    """Return the positions with the same size."""

    def size(place: Place) -> int:
        return shapes[place[0]][place[1]]

    for _, same in itertools.groupby(sorted(places, key=size), key=size):
        yield list(same)


def _free(case: Case, shapes: Shapes, group: Sequence[Place]) -> bool:
    """True if the operator accepts other sizes at these positions."""
    found = [_count(case, _changed(shapes, group, change)) for change in CHANGES[:4]]
    free = found.count(None) <= 2 and _keeps_count(case, shapes, group)
    return free and not _is_broadcast(case, shapes, group)


def _is_broadcast(case: Case, shapes: Shapes, group: Sequence[Place]) -> bool:
    """True if these sizes of 1 are broadcast: they may become the sizes of other tensors only."""
    if any(shapes[i][d] != 1 for i, d in group):
        return False
    unlike = max(size for shape in shapes for size in shape) + 1
    return _count(case, _changed(shapes, group, functools.partial(_to, unlike))) is None


def _keeps_count(case: Case, shapes: Shapes, group: Sequence[Place]) -> bool:
    """True if the number of results is the same at all other sizes that the operator accepts."""
    count = _count(case, shapes)
    found = {_count(case, _changed(shapes, group, change)) for change in CHANGES[:4]}
    return found <= {count, None}
