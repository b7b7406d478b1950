"""The kinds of exchange, and their implementation by calls of a process group on plain tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor

from tsfunc.bridge.mesh.agreement import agree_on_program, await_agreement
from tsfunc.bridge.mesh.failures import wait_for, withdraw_report
from tsfunc.bridge.mesh.meshes import Mesh, mesh_named, split_check
from tsfunc.bridge.tracers.interrupts import resets
from tsfunc.dispatch.state import overriding, tls
from tsfunc.user_code import user_call_location


def exchange(x: Tensor, kind: str, ints: Sequence[int], axis: str, mesh: str) -> Tensor:
    """Return the result of an exchange along an axis, a contiguous tensor with its own memory.

    Args:
        x: a plain tensor.
        kind, ints: the exchange: NOTE [exchanges] in ``mesh_operators``.
        axis: the axis.
        mesh: the mesh's text, followed by the check of the exchange (``split_check``).
    """
    text, check = split_check(mesh)
    return exchange_over(mesh_named(text), check, x, kind, ints, axis)


def exchange_over(
    mesh: Mesh, check: str, x: Tensor, kind: str, ints: Sequence[int], axis: str
) -> Tensor:
    """Return the result of :func:`exchange` over a mesh that is known."""
    if mesh.reported is not None:
        withdraw_report(mesh)
    if check and check != "unchecked":
        _agree(check, x, kind, ints, mesh, axis)
    recorder, described = tls.state.recorder, EXCHANGES[kind]
    if recorder is not None and described.collective is not None:
        recorder.record_collective(axis, described.collective, x.numel() * x.element_size())
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    return described.run(x, ints, mesh, axis)


def _agree(check: str, x: Tensor, kind: str, ints: Sequence[int], mesh: Mesh, axis: str) -> None:
    """Return after the ranks have agreed on an exchange, if its check requires an agreement.

    Raises:
        RanksDisagree: the ranks make different exchanges, or guaranteed values differ.
    """
    if check.startswith("program:"):
        if (axis, check) not in mesh.agreed:
            agree_on_program(axis, f"{mesh.text};{check}", _call(x, kind, ints))
    elif check == "values" and EXCHANGES[kind].guaranteed is not None:
        digest = _checksum(x.resolve_conj().resolve_neg())
        of_result = EXCHANGES[kind].guaranteed == "result"
        where = "a result whose spec" if of_result else "an argument whose spec"
        await_agreement(
            mesh,
            axis,
            f"{where} guarantees equal values: {x.dtype} {tuple(x.shape)}, checksum {digest:x}",
        )
    elif check != "unchecked" and EXCHANGES[kind].collective is not None:
        await_agreement(
            mesh, axis, f"{_call(x, kind, ints)} at {user_call_location()}{_transposed.call}"
        )


class _Transposed(threading.local):
    """The call whose transpose this thread runs, as a part of an agreement's text."""

    call = ""


_transposed = resets(_Transposed())


def as_transpose_of(call: str) -> AbstractContextManager[None]:
    """Context manager: exchanges in the block are the transpose of those of a call.

    All transposes of a backward pass run from one line of user code, so agreements compare the
    lines of their calls too.
    """
    return overriding(_transposed, call=f", as the transpose of the call at {call}")


def _call(x: Tensor, kind: str, ints: Sequence[int]) -> str:
    """Return a description of an exchange, equal on all ranks that make it."""
    return f"{kind}{list(ints)} of {x.dtype} {tuple(x.shape)}"


def _checksum(x: Tensor) -> int:
    """Return a 64-bit checksum of a tensor's bytes."""
    octets = _as_sendable(x.contiguous()).reshape(-1).view(torch.uint8).long()
    weights = torch.arange(1, octets.numel() + 1, device=x.device) * 0x1E3779B97F4A7C15 | 1
    return int(((octets + 1) * weights).sum()) & 0xFFFFFFFFFFFFFFFF


def result_dtype(kind: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a result: sums of integers are int64, as in ``torch.sum``."""
    if EXCHANGES[kind].sums and not (dtype.is_floating_point or dtype.is_complex):
        return torch.int64
    return dtype


def _as_real(x: Tensor) -> Tensor:
    """Return a tensor in a dtype that every backend can sum."""
    if x.is_floating_point():
        return x
    return torch.view_as_real(x) if x.is_complex() else x.to(result_dtype("sum", x.dtype))


def _restore_dtype(x: Tensor, like: Tensor) -> Tensor:
    return torch.view_as_complex(x) if like.is_complex() else x


def _as_sendable(x: Tensor) -> Tensor:
    """Return a tensor in a dtype that every backend can send, for exchanges without sums."""
    if x.is_complex():
        return torch.view_as_real(x)
    return x.view(torch.uint8) if x.dtype is torch.bool else x


def _from_received(x: Tensor, like: Tensor) -> Tensor:
    """Undo :func:`_as_sendable` for a tensor like ``like``, in its dtype."""
    if like.is_complex():
        return torch.view_as_complex(x)
    return x.view(torch.bool) if like.dtype is torch.bool else x


def _sum_ranks(x: Tensor, ints: Sequence[int], mesh: Mesh, axis: str) -> Tensor:
    out = _as_real(x).clone(memory_format=torch.contiguous_format)
    wait_for(mesh.group(axis).allreduce([out]), mesh, axis, out)
    return _restore_dtype(out, x)


def _gather_ranks(x: Tensor, mesh: Mesh, axis: str) -> Tensor:
    """Return the values of all ranks, stacked along a new first dim."""
    sent = _as_sendable(x.contiguous())
    size = mesh.sizes[axis]
    out = sent.new_empty(size * sent.numel())
    wait_for(mesh.group(axis)._allgather_base(out, sent.view(-1)), mesh, axis, out)
    return _from_received(out.view(size, *sent.shape), x)


def _gather(x: Tensor, ints: Sequence[int], mesh: Mesh, axis: str) -> Tensor:
    return _gather_ranks(x, mesh, axis).movedim(0, ints[0]).contiguous()


def _tile(x: Tensor, ints: Sequence[int], mesh: Mesh, axis: str) -> Tensor:
    dim = ints[0]
    return _gather_ranks(x, mesh, axis).movedim(0, dim).flatten(dim, dim + 1).contiguous()


def _scatter(x: Tensor, ints: Sequence[int], mesh: Mesh, axis: str) -> Tensor:
    sent = _as_real(x.movedim(ints[0], 0)).contiguous()
    out = sent.new_empty(sent.shape[1:])
    work = mesh.group(axis)._reduce_scatter_base(out.view(-1), sent.view(-1))
    wait_for(work, mesh, axis, out)
    return _restore_dtype(out, x)


def _all_to_all(x: Tensor, ints: Sequence[int], mesh: Mesh, axis: str) -> Tensor:
    sent = _as_sendable(x.movedim(ints[0], 0).contiguous())
    out = torch.empty_like(sent)
    wait_for(mesh.group(axis).alltoall_base(out, sent, [], []), mesh, axis, out)
    return _from_received(out, x).movedim(0, ints[1]).contiguous()


def permuted_counts(
    ints: Sequence[int], elements: int, size: int, me: int
) -> tuple[list[int], list[int]]:
    """Return how many elements a rank sends to each rank of a permutation, and receives from each.

    Args:
        ints: the sources of the permutation, then their destinations.
    """
    half = len(ints) // 2
    sends, receives = [0] * size, [0] * size
    for source, destination in zip(ints[:half], ints[half:], strict=True):
        if source == me:
            sends[destination] = elements
        if destination == me:
            receives[source] = elements
    return sends, receives


def _permute(x: Tensor, ints: Sequence[int], mesh: Mesh, axis: str) -> Tensor:
    """Send values between ranks; each rank sends and receives at most one value."""
    size, me = mesh.sizes[axis], mesh.index(axis)
    sent = _as_sendable(x.contiguous()).reshape(-1)
    sends, receives = permuted_counts(ints, sent.numel(), size, me)
    out = sent.new_zeros(sum(receives))
    work = mesh.group(axis).alltoall_base(out, sent[: sum(sends)], receives, sends)
    wait_for(work, mesh, axis, out)
    if not any(receives):
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    shape = torch.view_as_real(x).shape if x.is_complex() else x.shape
    return _from_received(out.view(shape), x)


def _slice(x: Tensor, ints: Sequence[int], mesh: Mesh, axis: str) -> Tensor:
    length = x.shape[ints[0]] // mesh.sizes[axis]
    part = x.narrow(ints[0], mesh.index(axis) * length, length)
    return own_copy(part)


def own_copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _copy_input(x: Tensor, ints: Sequence[int], mesh: Mesh, axis: str) -> Tensor:
    return own_copy(x)


def _share(x: Tensor, ints: Sequence[int], mesh: Mesh, axis: str) -> Tensor:
    shared: Tensor = x / mesh.sizes[axis]
    return shared.contiguous()


# --- the kinds of exchange


def _same_shape(shape: list[Any], ints: Sequence[int], size: int) -> list[Any]:
    return shape


def _with_dim(shape: list[Any], ints: Sequence[int], size: int) -> list[Any]:
    return [*shape[: ints[0]], size, *shape[ints[0] :]]


def _without_dim(shape: list[Any], ints: Sequence[int], size: int) -> list[Any]:
    return [*shape[: ints[0]], *shape[ints[0] + 1 :]]


def _dim_moved(shape: list[Any], ints: Sequence[int], size: int) -> list[Any]:
    return _with_dim(_without_dim(shape, ints, size), ints[1:], size)


def _dim_divided(shape: list[Any], ints: Sequence[int], size: int) -> list[Any]:
    return [n // size if dim == ints[0] else n for dim, n in enumerate(shape)]


def _dim_multiplied(shape: list[Any], ints: Sequence[int], size: int) -> list[Any]:
    return [n * size if dim == ints[0] else n for dim, n in enumerate(shape)]


def _reverse(ints: list[int]) -> list[int]:
    return ints[::-1]


def _halves_swapped(ints: list[int]) -> list[int]:
    half = len(ints) // 2
    return ints[half:] + ints[:half]


@dataclass(frozen=True)
class Exchange:
    """A kind of exchange: NOTE [exchanges] in ``mesh_operators``.

    Attributes:
        run: computes it on a plain tensor, its ints, the mesh and the axis.
        transpose: the kind of the transpose.
        shape: the shape of the result, from that of the argument, the ints and the ranks' count.
        transposed_ints: the ints of the transpose.
        collective: the collective that it needs; None if it is local to a rank.
        sums: True if it adds up values: sums of integers are int64, as in ``torch.sum``.
        guaranteed: the value of a call of ``shard_map`` that must be equal on all ranks, by the
            caller's guarantee.
        makes: "equal" if all ranks have the same result, "parts" if each has a result of its own;
            None if the argument decides.
    """

    run: Callable[[Any, Sequence[int], Mesh, str], Tensor]
    transpose: str
    shape: Callable[[list[Any], Sequence[int], int], list[Any]] = _same_shape
    transposed_ints: Callable[[list[int]], list[int]] = list
    collective: str | None = None
    sums: bool = False
    guaranteed: Literal["argument", "result"] | None = None
    makes: Literal["equal", "parts"] | None = None


EXCHANGES: Final = {
    "sum": Exchange(_sum_ranks, "sum", collective="psum", sums=True, makes="equal"),
    "gather": Exchange(_gather, "scatter", _with_dim, collective="all_gather", makes="equal"),
    "scatter": Exchange(
        _scatter, "gather", _without_dim, collective="psum_scatter", sums=True, makes="parts"
    ),
    "all_to_all": Exchange(
        _all_to_all, "all_to_all", _dim_moved, _reverse, collective="all_to_all", makes="parts"
    ),
    "permute": Exchange(
        _permute, "permute", transposed_ints=_halves_swapped, collective="ppermute", makes="parts"
    ),
    "slice": Exchange(_slice, "tile", _dim_divided, guaranteed="argument", makes="parts"),
    "tile": Exchange(_tile, "slice", _dim_multiplied, collective="all_gather"),
    "enter": Exchange(_copy_input, "total", guaranteed="argument", makes="equal"),
    "total": Exchange(_sum_ranks, "enter", collective="psum", sums=True),
    "leave": Exchange(_copy_input, "share", guaranteed="result"),
    "share": Exchange(_share, "join", guaranteed="result"),
    "join": Exchange(_copy_input, "share", guaranteed="result"),
}
