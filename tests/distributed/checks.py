"""Checks that run on every rank of a group: one spawn serves a file of tests."""

from __future__ import annotations

import faulthandler
import functools
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tsfunc.testing import spawn
from tsfunc.testing.ranks import stop

Check = Callable[[int, int], None]


@functools.cache
def mesh_of(names: tuple[str, ...], shape: tuple[int, ...]) -> DeviceMesh:
    """Return a mesh of the CPU, made once in a process, since each of its groups has threads."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


@contextmanager
def watched(seconds: float) -> Iterator[None]:
    """Context manager: end the process, with the stacks of its threads, if the block hangs."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def failures(
    checks: Mapping[str, Check], ranks: int = 2, timeout: float = 300.0
) -> dict[str, list[str]]:
    """Run the checks on a number of ranks; return, for each check, the errors of the ranks."""
    by_rank = spawn(run_all, ranks, checks, timeout=timeout)
    if any(any(found.values()) for found in by_rank):
        stop(ranks)
    return {name: [found[name] for found in by_rank if found[name]] for name in checks}


def run_all(rank: int, size: int, checks: Mapping[str, Check]) -> dict[str, str]:
    """Run the checks one after the other; return an empty text or the traceback for each.

    After the first failure of a rank its collectives no longer match those of the others: it leaves
    the group, which ends their waits, and runs no further check.
    """
    found = dict.fromkeys(checks, f"rank {rank}: not run after a failure")
    for name, check in checks.items():
        try:
            check(rank, size)
            found[name] = ""
        except Exception:
            found[name] = f"rank {rank}: {traceback.format_exc()}"
            dist.destroy_process_group()
            break
    return found


class Checks(dict[str, Check]):
    """The checks of a file, by their names; ``tests`` makes tests of them."""

    _tested = False

    def check(self, function: Check) -> Check:
        """Decorator: add a function under its own name."""
        self[function.__name__] = function
        return function

    def __setitem__(self, name: str, check: Check) -> None:
        assert not self._tested, f"{name} is added after the tests were made, and would not run"
        super().__setitem__(name, check)

    def tests(self) -> Callable[[str], None]:
        """Return a test with a parameter for each check; the first runs them all, on two ranks."""
        self._tested = True
        return on_two_ranks(self)


def on_two_ranks(checks: Mapping[str, Check]) -> Callable[[str], None]:
    """Return the test of ``Checks.tests`` for some of the checks of a file."""

    @functools.cache
    def outcome() -> Any:
        try:
            return failures(dict(checks))
        except Exception as error:  # raised by each test: the checks do not run again
            return error

    @pytest.mark.parametrize("name", list(checks))
    def test_on_two_ranks(name: str) -> None:
        errors = outcome()
        if isinstance(errors, Exception):
            raise errors
        assert not errors[name], "\n".join(errors[name])

    return test_on_two_ranks
