"""Agreements: ranks compare their next calls before they make them.

NOTE [agreements]
If one rank calls another collective than the rest, one with another shape or dtype, or none at all,
a collective of a process group gives wrong numbers or waits until the group's timeout. An agreement
is one small collective before it: the maximum of a hash and of its negative. If the ranks' hashes
differ, all ranks detect it, exchange their texts, and raise an error with all texts. A rank whose
body raises reports the error in an agreement too, which stops the other ranks at their next one.
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
    """Return after all ranks along an axis have called this function with the same text.

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
    """Return after all ranks along an axis have agreed that they run one program.

    Each program is agreed on once: NOTE [marks of programs] in ``passes``.

    Args:
        axis: the axis.
        mesh: the names and sizes of the axes, followed by the program's mark, if it has one.
        call: a description of the next exchange.

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
    """Return every rank's text, or None if all texts are equal."""
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
    """Return a device whose tensors the group can exchange."""
    kinds = [kind.type for kind in group._device_types]
    return torch.device("cpu" if "cpu" in kinds or not kinds else kinds[0])
