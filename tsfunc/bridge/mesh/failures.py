"""Ranks that raise: they leave a report, and ranks that wait for them raise an error too.

NOTE [reports of failures]
A rank whose body raises does not join the collectives that the other ranks wait in. The rank writes
a report into the store of each of its process groups. A rank that has waited for longer than a
second reads the reports of its group. If another rank has reported an error and has not made an
exchange since, the waiting rank raises an error that has the report. A rank withdraws its report at
its next exchange, so a rank whose error was handled in time does not disturb the others. Reports
are numbered, and a rank that has reported as many errors ignores them: all ranks may raise one
error.

Ranks wait like this for tensors on the CPU. A wait of an NCCL group returns at once, and its
watchdog ends a collective that another rank does not join.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.distributed import distributed_c10d

from tsfunc.bridge.mesh.meshes import Mesh, mesh_named
from tsfunc.errors import MeshError, RanksDisagree
from tsfunc.user_code import LIBRARIES, error_location, user_location

# The time after which a rank that waits reads the reports, and between its reads.
_PATIENCE = datetime.timedelta(seconds=1)
_LONGEST = 4000  # characters of a report
# The axes along which this process has left a collective: their groups can't be used again.
_abandoned_axes: set[str] = set()


def wait_for(work: Any, mesh: Mesh, axis: str, x: torch.Tensor) -> None:
    """Wait for a collective along an axis that has ``x`` among its arguments.

    Raises:
        RanksDisagree: another rank along the axis has raised and does not join the collective.
        RuntimeError: the process group's own error.
    """
    if not x.is_cpu:
        work.wait()
        return
    try:
        work.wait(_PATIENCE)
    except RuntimeError as error:
        try:
            _wait_and_read_reports(work, mesh, axis, error)
        except BaseException:
            _abandoned_axes.add(axis)
            raise


def _wait_and_read_reports(work: Any, mesh: Mesh, axis: str, error: RuntimeError) -> None:
    reported_before = False
    while not work.is_completed():
        reports = _reports(mesh, axis)
        if reports and reported_before:
            break
        reported_before = bool(reports)
        with suppress(RuntimeError):  # the time is over, or the loop ends
            work.wait(_PATIENCE)
            return
    else:
        try:
            work.wait()
            return
        except RuntimeError as failed:
            error, reports = failed, _reports(mesh, axis)
            if not reports:
                raise
    ranks = mesh.ranks[axis]
    lines = [f"  rank {ranks[at]}: {text}" for at, text in reports.items()]
    lines.append(f"  rank {ranks[mesh.index(axis)]}: waited for the others at {user_location()}")
    raise RanksDisagree(
        f"expected all ranks along mesh axis {axis!r} to join an exchange, got ranks that raised "
        f"before it:\n" + "\n".join(lines)
    ) from error


def has_unusable_groups() -> bool:
    """True if this process has left a collective, so that its group can't be used again."""
    return bool(_abandoned_axes)


def report(mesh: Mesh, error: BaseException, informed: Collection[str] = ()) -> None:
    """Report an error of this rank to the other ranks: NOTE [reports of failures].

    Args:
        mesh: the mesh.
        error: the error.
        informed: the axes whose ranks have the error already.
    """
    if mesh.reported == id(error):
        return
    axis_name = error.axis_name if isinstance(error, RanksDisagree) else None
    mesh.reports += 1
    mesh.reported = id(error)
    for axis in mesh.sizes:
        if axis != axis_name and axis not in informed:
            _write_report(mesh, axis, f"{mesh.reports} {error_text(error)[:_LONGEST]}")


def error_text(error: BaseException) -> str:
    """Return an error with its line, for the message of another rank."""
    location = error_location(error)
    if location.file.startswith(LIBRARIES):  # the user's frames are not in the traceback yet
        location = user_location()
    return f"raised {type(error).__name__}: {error} at {location}"


def withdraw_report(mesh: Mesh) -> None:
    """Withdraw this rank's report, because the rank goes on."""
    mesh.reported = None
    for axis in mesh.sizes:
        _write_report(mesh, axis, "")


def _write_report(mesh: Mesh, axis: str, text: str) -> None:
    # The process that has the store may have ended, and the group may have been destroyed.
    with suppress(RuntimeError, MeshError):
        store = _store_of(mesh.group(axis))
        if store is not None:
            store.set(f"tsfunc/raised/{mesh.index(axis)}", text)


def _reports(mesh: Mesh, axis: str) -> dict[int, str]:
    """Return the reports of the other ranks along an axis, by their index."""
    store, rank = _store_of(mesh.group(axis)), mesh.index(axis)
    reports: dict[int, str] = {}
    with suppress(RuntimeError):
        for index in range(mesh.sizes[axis]):
            key = f"tsfunc/raised/{index}"
            if store is not None and index != rank and store.check([key]):
                number, _, text = store.get(key).decode(errors="replace").partition(" ")
                if text and int(number) > mesh.reports:
                    reports[index] = text
    return reports


def _store_of(group: Any) -> Any:
    """Return the store of a process group, or None if torch does not know the group."""
    backend_and_store = distributed_c10d._world.pg_map.get(group)
    return None if backend_and_store is None else backend_and_store[1]


def report_failures(
    run: Callable[[Sequence[Any]], Sequence[Any]], texts: Sequence[str]
) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return the function of a program; its errors are reported over the program's meshes."""

    @functools.wraps(run)
    def reported(values: Sequence[Any]) -> Sequence[Any]:
        try:
            return run(values)
        except BaseException as error:
            for text in texts:
                with suppress(ValueError):  # the error is that there is no such mesh
                    report(mesh_named(text), error)
            raise

    return reported
