"""``spawn`` runs functions on processes, and names the rank that failed first."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tsfunc.errors import RanksFailed
from tsfunc.testing import spawn


def total(rank: int, size: int, start: int) -> float:
    x = torch.tensor(float(start + rank))
    dist.all_reduce(x)
    return x.item()


def process(rank: int, size: int) -> int:
    return os.getpid()


def second_raises(rank: int, size: int) -> None:
    if rank == 1:
        raise ValueError("the second rank can't")
    dist.barrier()


def second_exits(rank: int, size: int) -> None:
    if rank == 1:
        os._exit(3)
    dist.barrier()


def first_sleeps(rank: int, size: int) -> None:
    if rank == 0:
        time.sleep(60)


def test_results_come_by_rank() -> None:
    assert spawn(total, 2, 10) == [21.0, 21.0]
    assert spawn(lambda rank, size: rank * 10, 2) == [0, 10]


def test_processes_are_kept_until_a_call_fails() -> None:
    kept = spawn(process, 2)
    assert spawn(process, 2) == kept
    with pytest.raises(RanksFailed, match=r"(?s)rank 1: .*the second rank can't.*rank 0: "):
        spawn(second_raises, 2)
    new = spawn(process, 2)
    assert not {*new} & {*kept}
    assert spawn(total, 2, 0) == [1.0, 1.0]


def test_a_rank_that_ends_or_hangs_is_named() -> None:
    with pytest.raises(RanksFailed, match="rank 1: the process ended"):
        spawn(second_exits, 2)
    with pytest.raises(RanksFailed, match=r"(?s)rank 0: did not finish.*first_sleeps"):
        spawn(first_sleeps, 2, timeout=2.0)
