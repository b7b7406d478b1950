"""Agreements: ranks tell one another what they are about to do, before they do it.

NOTE [agreements]
A collective of a process group gives wrong numbers, or waits until the group's timeout, where one
rank calls another collective than the rest, with another shape or type, or none at all. An
agreement is one small collective before it: the greatest of a hash and of its negative. Where the
ranks' hashes differ all of them see it, exchange the texts, and raise an error that has all. A rank
whose body raises says that in an agreement too, which ends the others at their next one.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from tsfunc.bridge.mesh.meshes import Mesh, mesh_named
from tsfunc.dispatch.places import users_place
from tsfunc.errors import RanksDisagree

_LENGTH = 400  # bytes of a rank's text


def agree(mesh: Mesh, axis: str, text: str) -> None:
    """Return when all ranks along an axis have called this with the same text.

    Raises:
        RanksDisagree: the texts differ; the message has a line for each rank.
    """
    texts = exchanged_texts(mesh, axis, text)
    if texts is None:
        return
    lines = [f"  rank {rank}: {said}" for rank, said in zip(mesh.ranks[axis], texts, strict=True)]
    raise RanksDisagree(
        f"expected all ranks along mesh axis {axis!r} to make the same call, got:\n"
        + "\n".join(lines),
        axis,
    )


def agree_on_program(axis: str, mesh: str, call: str = "") -> None:
    """Return when all ranks along an axis run one program: NOTE [marks of programs] in ``passes``.

    A program is agreed on once.

    Args:
        axis: the axis.
        mesh: the names and sizes of the axes, and behind them the program's mark, if it has one.
        call: the exchange that is about to be run.

    Raises:
        RanksDisagree: other ranks run other programs.
        MeshError: this process has no such mesh.
    """
    text, _, mark = mesh.partition(";")
    known = mesh_named(text)
    if mark.startswith("program:") and (axis, mark) not in known.agreed:
        agree(known, axis, f"{mark.replace(':', ' ')}, {call or 'compiled'} at {users_place()}")
        known.agreed.add((axis, mark))


def exchanged_texts(mesh: Mesh, axis: str, text: str) -> list[str] | None:
    """Return every rank's text, or None where all are equal."""
    group = mesh.groups[axis]
    device = _device_of(group)
    digest = hashlib.blake2b(text.encode(), digest_size=7).digest()
    number = int.from_bytes(digest, "big")
    both = torch.tensor([number, -number], device=device)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
    group.allreduce([both], options).wait()
    most, least = both.tolist()
    if most == -least:
        return None
    own = torch.zeros(_LENGTH, dtype=torch.uint8)
    encoded = text.encode()[:_LENGTH]
    own[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    every = torch.zeros(group.size() * _LENGTH, dtype=torch.uint8, device=device)
    group._allgather_base(every, own.to(device)).wait()
    rows = every.cpu().view(group.size(), _LENGTH)
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]


def _device_of(group: Any) -> torch.device:
    """Return a device that the group exchanges tensors of."""
    kinds = [kind.type for kind in group._device_types]
    return torch.device("cpu" if "cpu" in kinds or not kinds else kinds[0])
