"""What rules share: logical dims and where they lie physically, and lining tensors up.

A *logical* dim is one that the user sees; the *physical* value has the batch dim besides,
at ``at`` (None: not batched).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NoReturn

import torch
from torch import Tensor


def filled(given: Sequence[Any], *defaults: Any) -> list[Any]:
    """Positional arguments, and the defaults of those that were not given."""
    return [*given, *defaults[len(given) :]]


def logical_rank(x: Tensor, at: int | None) -> int:
    """How many dims the user sees."""
    return x.dim() if at is None else x.dim() - 1


def logical_shape(x: Tensor, at: int | None) -> list[Any]:
    """The sizes that the user sees."""
    return [size for dim, size in enumerate(x.shape) if dim != at]


def wrap(dim: int, rank: int) -> int:
    """A dim counted from the front. A tensor without dims answers to 0 and -1, as in torch."""
    span = rank or 1
    if not -span <= dim < span:
        raise IndexError(
            "Dimension out of range (expected to be in range of "
            f"[{-span}, {span - 1}], but got {dim})"
        )
    return dim + span if dim < 0 else dim


def physical_dim(dim: int, rank: int, at: int) -> int:
    """Where a logical dim of a tensor of logical rank ``rank`` lies, the batch being at ``at``."""
    dim = wrap(dim, rank)
    return dim if dim < at else dim + 1


def physical_dims(dims: Sequence[int], rank: int, at: int) -> list[int]:
    """``physical_dim`` for each of several dims."""
    return [physical_dim(dim, rank, at) for dim in dims]


def check_dims_of_scalar(dims: Sequence[int]) -> None:
    """Raise torch's error if the dims name none of a tensor without dims, or one of them twice."""
    for dim in dims:
        wrap(dim, 0)
    if len(dims) > 1:
        raise RuntimeError("dim 0 appears multiple times in the list of dims")


def every_dim(rank: int, at: int) -> list[int]:
    """All dims but the batch dim: what a reduction without dims reduces."""
    return [dim for dim in range(rank + 1) if dim != at]


def front(x: Tensor, at: int | None) -> Tensor:
    """The value with its batch dim first, or as it is where it has none."""
    return x.movedim(at, 0) if at else x


def batched_front(x: Tensor, at: int | None, size: int) -> Tensor:
    """The value with a batch dim first in any case: a view with stride 0 where it had none."""
    return x.expand(size, *x.shape) if at is None else front(x, at)


def lines(x: Tensor) -> Tensor:
    """All elements of each example in one dim; the batch dim is first."""
    return x.flatten(1) if x.dim() > 1 else x.unsqueeze(1)


def batched_at(x: Tensor, at: int | None, size: int, to: int) -> Tensor:
    """The value with its batch dim at ``to``, expanded where it had none."""
    if at is None:
        shape = list(x.shape)
        shape.insert(to, size)
        return x.unsqueeze(to).expand(shape)
    return x if at == to else x.movedim(at, to)


def unit_dims(x: Tensor, dim: int, count: int) -> Tensor:
    """Inserts ``count`` dims of size 1 at ``dim``."""
    for _ in range(count):
        x = x.unsqueeze(dim)
    return x


def place(x: Tensor, at: int | None, right: int) -> Tensor:
    """Moves the batch dim to where ``right`` logical dims follow it.

    Of a value that is not batched, those dims that would fall on the batch dim or before it
    in broadcasting are kept apart from it by a dim of size 1.
    """
    if at is None:
        return x.unsqueeze(-right - 1) if x.dim() > right else x
    rank = x.dim() - 1
    if rank - at == right:
        return x
    if rank >= right:
        return x.movedim(at, rank - right)
    return unit_dims(front(x, at), 1, right - rank)


def align(
    args: Sequence[Any], dims: Sequence[int | None], right: int | None = None
) -> tuple[list[Any], int]:
    """Lines tensors up so that they broadcast as their logical values do.

    Returns them and where the batch dim of the result will be. What is no tensor stays.
    ``right`` is how many dims are to follow the batch dim; by default as many as follow it
    in the largest of the batched tensors, which then is not moved. Where one that is not batched
    is larger yet, all dims do, so that an example of the result is laid out as it would be.
    """
    top, lead, found = 0, -1, 0
    for arg, at in zip(args, dims, strict=False):
        if isinstance(arg, Tensor):
            rank = arg.dim()
            if at is not None:
                rank -= 1
                if rank > lead:
                    lead, found = rank, rank - at
            if rank > top:
                top = rank
    if right is None:
        right = found if lead == top else top
    placed = [
        place(arg, at, right) if isinstance(arg, Tensor) else arg
        for arg, at in zip(args, dims, strict=False)
    ]
    return placed, max(top, right) - right


@lru_cache(maxsize=1024)
def promote_below(high: torch.dtype, low: torch.dtype) -> torch.dtype:
    """The type of a value with dims combined with one without: only a higher kind prevails."""
    if high.is_complex:
        return high
    if high.is_floating_point:
        return high.to_complex() if low.is_complex else high
    if high is torch.bool or low.is_complex or low.is_floating_point:
        return torch.promote_types(high, low)
    return high


def _join(known: torch.dtype | None, dtype: torch.dtype) -> torch.dtype:
    return dtype if known is None or known is dtype else torch.promote_types(known, dtype)


def promote_scalars(args: Sequence[Any], dims: Sequence[int | None]) -> Sequence[Any]:
    """Casts batched values without logical dims where torch would promote them wrongly.

    torch lets a tensor without dims decide the result type only by its kind. Its physical
    value has a dim, and would count as much as any other tensor.
    """
    wide: torch.dtype | None = None
    narrow: torch.dtype | None = None
    device: torch.device | None = None
    scalars = False
    for arg, at in zip(args, dims, strict=False):
        if isinstance(arg, Tensor):
            if arg.dim() > (0 if at is None else 1):
                wide, device = _join(wide, arg.dtype), arg.device
            else:
                narrow = _join(narrow, arg.dtype)
                scalars = scalars or at is not None
    if not scalars or narrow is None:
        return args
    target = narrow if wide is None else promote_below(wide, narrow)
    return [
        arg.to(device=arg.device if device is None else device, dtype=target)
        if at is not None and arg.dim() == 1
        else arg
        for arg, at in zip(args, dims, strict=False)
    ]


def op_name(op: Any) -> str:
    """An operator's name as the catalogue has it, or a plain callable's own."""
    name = getattr(op, "name", None)
    return str(name()) if callable(name) else str(getattr(op, "__name__", op))


class NoExamples(Exception):
    """What a rule raises where a batch of no examples does not tell what the results look like."""


class InplaceRefused(RuntimeError):
    """Batched values were to be written into a tensor that is not batched."""


def refuse_inplace(op: Any) -> NoReturn:
    """Raises the error for writing batched values into a tensor that is not batched."""
    name = op_name(op)
    base = name.removeprefix("aten::").partition(".")[0]
    raise InplaceRefused(
        f"vmap: {name} writes batched values in place into a tensor that is not batched over "
        "this vmap (it was made outside, or without a batched input). Use the out-of-place "
        f"{base.rstrip('_')} instead, or make the tensor from a batched one (for instance "
        "x.new_zeros). In torch.func's words: vmap: inplace arithmetic(self, *extra_args) is "
        "not possible because there exists a Tensor `other` in extra_args that has more "
        "elements than `self`."
    )
