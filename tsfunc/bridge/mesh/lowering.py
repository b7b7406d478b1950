"""Decompositions of exchanges into torch's functional collectives.

Inductor compiles, overlaps and buckets these collectives. A decomposition is applied while a
process compiles a program for itself, after autograd. The decomposition may therefore name process
groups and use the rank, which a program must not do. Exchanges with checked calls are not
decomposed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tsfunc.bridge.mesh.exchanges import EXCHANGES, own_copy, permuted_counts, result_dtype
from tsfunc.bridge.mesh.mesh_operators import INDEX, MAP
from tsfunc.bridge.mesh.meshes import mesh_named, split_check


def _exchange(x: Tensor, kind: str, ints: Sequence[int], axis: str, mesh: str) -> Any:
    text, check = split_check(mesh)
    if check in ("calls", "values"):
        return NotImplemented
    named_mesh = mesh_named(text)
    group, size, me = (
        named_mesh.group(axis).group_name,
        named_mesh.sizes[axis],
        named_mesh.index(axis),
    )
    reals = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    if EXCHANGES[kind].sums:
        reals = reals.to(result_dtype(kind, reals.dtype))
    elif reals.dtype is torch.bool:
        reals = reals.to(torch.uint8)
    out = _exchange_reals(reals, kind, list(ints), group, size, me)
    if x.is_complex():
        return torch.view_as_complex(out)
    return out.to(result_dtype(kind, x.dtype))


def _exchange_reals(
    x: Tensor, kind: str, ints: list[int], group: str, size: int, me: int
) -> Tensor:
    if kind in ("sum", "total"):
        return _call_and_wait("all_reduce", own_copy(x), "sum", group)
    if kind == "scatter":
        sent = x.movedim(ints[0], 0)
        flat = _call_and_wait("reduce_scatter_tensor", own_copy(sent).view(-1), "sum", size, group)
        return flat.view(sent.shape[1:])
    if kind in ("gather", "tile"):
        flat = _call_and_wait("all_gather_into_tensor", own_copy(x).view(-1), size, group)
        parts = flat.view(size, *x.shape).movedim(0, ints[0])
        return own_copy(parts.flatten(ints[0], ints[0] + 1) if kind == "tile" else parts)
    if kind == "all_to_all":
        sent = x.movedim(ints[0], 0)
        lengths = [sent.numel() // size] * size
        flat = _call_and_wait("all_to_all_single", own_copy(sent).view(-1), lengths, lengths, group)
        return own_copy(flat.view(sent.shape).movedim(0, ints[1]))
    if kind == "permute":
        return _permute(x, ints, group, size, me)
    if kind == "slice":
        length = x.shape[ints[0]] // size
        return own_copy(x.narrow(ints[0], me * length, length))
    if kind == "share":
        return own_copy(x / size)
    return own_copy(x)  # enter, leave, join


def _permute(x: Tensor, ints: list[int], group: str, size: int, me: int) -> Tensor:
    sends, receives = permuted_counts(ints, x.numel(), size, me)
    sent = own_copy(x).view(-1) if any(sends) else x.new_empty(0)
    flat = _call_and_wait("all_to_all_single", sent, receives, sends, group)
    return flat.view(x.shape) if any(receives) else torch.zeros_like(x)


def _call_and_wait(name: str, x: Tensor, *args: Any) -> Tensor:
    functional = torch.ops._c10d_functional
    return functional.wait_tensor(getattr(functional, name)(x, *args))


def _index(axis: str, mesh: str, *, device: torch.device) -> Tensor:
    return torch.full((), mesh_named(mesh).index(axis), dtype=torch.int64, device=device)


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {MAP: _exchange, INDEX: _index}
