"""A sample of the database with names for its sizes, and the same call at other sizes.

Which sizes of a sample an operator lets change is found by asking it: each size of each tensor by
itself, then with all that are equal to it, then with all that do not go alone. What changes by
itself gets a name of its own, what changes together a common one, and what can't change stays a
number. So the names are found without a look at what is tested.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.ops.batches import clone
from tests.ops.database import Case, Results
from tests.ops.sweep import compare, shapes_differ
from tsfunc import MetaTensorType, specialize
from tsfunc.program.passes.effects import is_random

# Kernels that read beyond a tensor whose length is not that of the others: there, equal sizes are
# changed together only.
_UNCHECKED = ("batch_norm", "segment_reduce", "attention_forward", "embedding_bag")
Place = tuple[int, int]  # a tensor, and one of its dims
Shapes = Sequence[Sequence[int]]
# What is done to a size to see whether it may change: most operators take any other.
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
        names: the names of those sizes that may change.
        others: shapes of its tensors at other sizes, where the operator takes them.
    """

    case: Case
    names: Mapping[Place, str]
    others: Sequence[Shapes]

    def descriptors(self) -> dict[str, MetaTensorType]:
        """What the tensors are, with names for the sizes that may change."""
        return {
            f"x{i}": MetaTensorType(
                dtype=x.dtype,
                shape=[self.names.get((i, d), size) for d, size in enumerate(x.shape)],
            )
            for i, x in enumerate(self.case.tensors)
        }


def at_shapes(tensors: Sequence[Tensor], shapes: Shapes) -> list[Tensor]:
    """The tensors made longer or shorter: their values again from the start."""
    return [_at_shape(x, shape) for x, shape in zip(tensors, shapes, strict=True)]


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


def answer(case: Case, shapes: Shapes) -> Results | None:
    """What the operator gives at other sizes; None where it refuses them."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return case.call(*at_shapes(case.tensors, shapes))
        except Exception:
            return None


def _changed(shapes: Shapes, places: Sequence[Place], change: Callable[[int], int]) -> Shapes:
    found = [list(shape) for shape in shapes]
    for i, d in places:
        found[i][d] = change(found[i][d])
    return found


def named(case: Case, entry: str = "", wanted: int = 3) -> Named | None:
    """The case of an entry with names, or None where none of its sizes may change."""
    shapes = [tuple(x.shape) for x in case.tensors]
    known = answer(case, shapes)
    if known is None or not all(size for shape in shapes for size in shape):
        return None
    apart = not any(word in entry for word in _UNCHECKED)
    groups = list(_groups(case, shapes, apart))
    if not any(_together(case, shapes, groups, change) for change in CHANGES):
        # Sizes of 1 that are broadcast change by themselves, but not with what they meet.
        groups = [g for g in groups if any(shapes[i][d] != 1 for i, d in g)]
    names = {p: f"d{k}" for k, group in enumerate(groups) for p in group}
    others: list[Shapes] = []
    for changes in _mixed(len(groups)):
        other: Shapes = shapes
        for group, change in zip(groups, changes, strict=True):
            other = _changed(other, group, change)
        if other not in others and answer(case, other) is not None:
            others.append(other)
            if len(others) == wanted:
                break
    return Named(case, names, others) if others else None


def _together(
    case: Case, shapes: Shapes, groups: Sequence[Sequence[Place]], change: Callable[[int], int]
) -> bool:
    """Whether all groups can change at once, each to a size of its own."""
    for k, group in enumerate(groups):
        shapes = _changed(shapes, group, functools.partial(_changed_apart, change, k))
    return answer(case, shapes) is not None


def _changed_apart(change: Callable[[int], int], k: int, size: int) -> int:
    return change(size) + (k if size == 1 else 0)


def _mixed(groups: int) -> Iterator[tuple[Callable[[int], int], ...]]:
    """Ways to change all groups at once: each in its own way, then all alike, then fewer."""
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


def _groups(case: Case, shapes: Shapes, apart: bool) -> Iterator[Sequence[Place]]:
    """The sizes that may change, those together that change together."""
    places = [(i, d) for i, shape in enumerate(shapes) for d in range(len(shape))]
    left = []
    for place in places:
        if apart and _free(case, shapes, [place]):
            yield [place]
        else:
            left.append(place)
    rest: list[Place] = []
    for _, same in itertools.groupby(sorted(left, key=_size(shapes)), key=_size(shapes)):
        group = list(same)
        if _free(case, shapes, group):
            yield group
        else:
            rest += group
    if rest and _free(case, shapes, rest):
        for _, same in itertools.groupby(sorted(rest, key=_size(shapes)), key=_size(shapes)):
            yield list(same)


def _size(shapes: Shapes) -> Callable[[Place], int]:
    return lambda place: shapes[place[0]][place[1]]


def _free(case: Case, shapes: Shapes, group: Sequence[Place]) -> bool:
    """Whether the operator takes other sizes in these places."""
    found = [answer(case, _changed(shapes, group, change)) for change in CHANGES[:4]]
    taken = [results for results in found if results is not None]
    # A function that returns more tensors for a larger one has a program for each size.
    return len(taken) >= 2 and len({len(results) for results in taken}) == 1


def check(case: Case, entry: str) -> str:
    """Specializes a case with every size named that may change; what is wrong, or nothing."""
    found = named(case, entry)
    if found is None:
        return ""
    names = [f"x{i}" for i in range(len(case.tensors))]
    scope: dict[str, Any] = {"call": case.call}
    exec(f"def f({', '.join(names)}): return call({', '.join(names)})", scope)
    func = specialize(scope["f"], found.descriptors())
    for shapes in ([tuple(x.shape) for x in case.tensors], *found.others):
        want = answer(case, shapes)
        assert want is not None
        inputs = at_shapes(case.tensors, shapes)
        torch.manual_seed(0)
        try:
            got = func(*inputs)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            return f"{_spelled(found)} at {list(map(tuple, shapes))}: {text}"
        # A seed that is set inside of a function is not set by its program.
        drawn = any(is_random(node) for node in func.program.graph.nodes)
        difference = (shapes_differ if drawn or "empty" in entry else compare)(got, want)
        if difference:
            return f"{_spelled(found)} at {list(map(tuple, shapes))}: {difference}"
    return ""


def _spelled(found: Named) -> str:
    return ", ".join(str(d) for d in found.descriptors().values())
