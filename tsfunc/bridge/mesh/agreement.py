"""Agreements: ranks compare their next calls before they make them.

NOTE [agreements]
One rank may call another collective than the rest, one with another shape or dtype, or none at all.
A collective of a process group then gives wrong numbers, or waits until the group's timeout. An
agreement is one small collective before it: the maximum of a hash and of its negative. If the
ranks' hashes differ, all ranks detect it, exchange their texts, and raise an error with all texts.
A rank whose body raises reports the error in an agreement too, which stops the other ranks at their
next one.
"""

from __future__ import annotations

import functools
import hashlib

import torch
import torch.distributed as dist

from tsfunc.bridge.mesh.failures import wait_for, withdraw_report
from tsfunc.bridge.mesh.meshes import Mesh, mesh_named, split_check
from tsfunc.errors import RanksDisagree
from tsfunc.user_code import user_location

_LENGTH = 400  # bytes of a rank's text
_LARGEST = dist.AllreduceOptions()
_LARGEST.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]


def await_agreement(mesh: Mesh, axis: str, text: str, note: str = "") -> None:
    """Return after all ranks along an axis have called this function with the same text.

    Args:
        note: an addition to this rank's text in the message, which is not compared.

    Raises:
        RanksDisagree: the texts differ; the message has a line for each rank.
    """
    if mesh.reported is not None:
        withdraw_report(mesh)
    texts = exchanged_texts(mesh, axis, text, note)
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

    Each program is agreed on once: NOTE [marks of programs] in ``program/passes/mesh``.

    Args:
        mesh: the names and sizes of the axes, followed by the program's mark, if it has one.
        call: a description of the next exchange.

    Raises:
        RanksDisagree: other ranks run other programs.
        MeshError: this process has no such mesh.
    """
    text, mark = split_check(mesh)
    named_mesh = mesh_named(text)
    if mark.startswith("program:") and (axis, mark) not in named_mesh.agreed:
        text = f"{mark.replace(':', ' ')}, {call or 'compiled'}"
        await_agreement(named_mesh, axis, text, f" at {user_location()}")
        named_mesh.agreed.add((axis, mark))


def exchanged_texts(mesh: Mesh, axis: str, text: str, note: str = "") -> list[str] | None:
    """Return every rank's text with its note, or None if all texts are equal.

    Raises:
        RanksDisagree: another rank has raised: NOTE [reports of failures] in ``failures``.
    """
    group, device = mesh.group(axis), mesh.devices[axis]
    number = _number_of(text)
    both = torch.tensor([number, -number], device=device)
    wait_for(group.allreduce([both], _LARGEST), mesh, axis, both)
    most, least = both.tolist()
    if most == -least:
        return None
    encoded_text = torch.zeros(_LENGTH, dtype=torch.uint8)
    encoded = f"{text}{note}".encode()[:_LENGTH]
    encoded_text[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    every = torch.zeros(group.size() * _LENGTH, dtype=torch.uint8, device=device)
    wait_for(group._allgather_base(every, encoded_text.to(device)), mesh, axis, every)
    rows = every.cpu().view(group.size(), _LENGTH)
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]


@functools.lru_cache(maxsize=1024)
def _number_of(text: str) -> int:
    """Return a hash of a text, which fits an int64 with either sign."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
