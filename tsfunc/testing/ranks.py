"""``spawn``: run a function on several gloo processes of this machine.

One process imports torch and forks the ranks (``rank_worker``). The ranks are kept for later calls
with the same number of ranks. A failed call ends its ranks, since a rank that left a collective
can leave other ranks waiting in it; the next call forks new ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any, ClassVar

from tsfunc.errors import RanksFailed
from tsfunc.user_code import folding

# Seconds in which the other ranks must report after the first rank has failed.
_GRACE = 5.0
# Seconds in which processes must start.
_START = 120.0


class _Forker:
    """The process that has imported torch, and forks ranks."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tsfunc-ranks-"))
        self.listener = Listener(str(self.folder / "socket"), "AF_UNIX", backlog=8)
        self.calls = 0
        environment = dict(
            os.environ,
            PYTHONPATH=os.pathsep.join(entry or os.getcwd() for entry in sys.path),
            OMP_NUM_THREADS="1",
            GLOO_SOCKET_IFNAME="lo",
        )
        command = [sys.executable, "-m", "tsfunc.testing.rank_worker", str(self.folder)]
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
        self.connection, _ = self.accept()

    def accept(self) -> tuple[Connection, Any]:
        """Return the connection of a process that has started, and its first message."""
        end = time.monotonic() + _START
        waiting: Any = self.listener._listener._socket  # type: ignore[attr-defined]
        while not wait([waiting], 1.0):
            if self.process.poll() is not None or time.monotonic() > end:
                raise RanksFailed(f"spawn: the processes did not start within {_START:g} seconds.")
        connection = self.listener.accept()
        return connection, connection.recv()

    def start(self, n: int) -> _Ranks:
        """Fork ``n`` ranks of a new process group."""
        self.calls += 1
        folder = self.folder / str(self.calls)
        folder.mkdir()
        self.connection.send(("start", n, str(folder)))
        by_rank = {}
        for _ in range(n):
            connection, (rank, pid) = self.accept()
            by_rank[rank] = connection, pid
        connections, pids = zip(*(by_rank[rank] for rank in range(n)), strict=True)
        return _Ranks(self, folder, list(connections), list(pids))

    def stop(self) -> None:
        """End the process; its ranks end with it."""
        self.listener.close()
        self.connection.close()
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


class _Ranks:
    """The processes of one process group, each of which runs one function at a time.

    Attributes:
        usable: False once a rank has left a collective, of which its group still has the parts.
    """

    def __init__(
        self, forker: _Forker, folder: Path, connections: list[Connection], pids: list[int]
    ) -> None:
        self.forker, self.folder = forker, folder
        self.connections, self.pids = connections, pids
        self.usable = True

    def run(self, fn: Callable[..., Any], args: Sequence[Any], timeout: float) -> list[Any]:
        """Run the function on every rank and return each rank's result.

        Raises:
            RanksFailed: a rank raised, ended, or did not finish in time.
        """
        call = _pickle((fn, tuple(args)))
        for connection in self.connections:
            connection.send_bytes(call)
        end = time.monotonic() + timeout
        results: dict[int, Any] = {}
        failures: list[tuple[float, int, str]] = []
        pending = {connection: rank for rank, connection in enumerate(self.connections)}
        while pending and (left := end - time.monotonic()) > 0:
            for ready in wait(list(pending), left):
                assert isinstance(ready, Connection)
                rank = pending.pop(ready)
                try:
                    succeeded, reported, value, unusable = pickle.loads(ready.recv_bytes())
                    self.usable = self.usable and not unusable
                except (EOFError, OSError):
                    succeeded, reported = False, time.monotonic()
                    value = f"the process ended\n{self._last_lines(rank)}"
                if succeeded:
                    results[rank] = value
                else:
                    failures.append((reported, rank, value))
                    end = min(end, time.monotonic() + _GRACE)
        if not failures and not pending:
            return [results[rank] for rank in range(len(self.connections))]
        lines = [f"rank {rank}: {text.rstrip()}" for _, rank, text in sorted(failures)]
        for rank in pending.values():
            said = "was ended" if failures else f"did not finish within {timeout:g} seconds"
            lines.append(f"rank {rank}: {said}\n{self._stack(rank)}".rstrip())
        raise RanksFailed(
            f"spawn: {len(lines)} of {len(self.connections)} ranks failed, the first cause first.\n"
            + "\n".join(lines)
        )

    def _last_lines(self, rank: int) -> str:
        """Return the last lines that a rank wrote to stderr: a crash is said before the stacks."""
        written = (self.folder / f"stderr-{rank}").read_text(errors="replace")
        return "\n".join(written.splitlines()[-100:])

    def _stack(self, rank: int) -> str:
        """Return the stack of a rank, which the rank writes to stderr on a signal."""
        before = self._last_lines(rank)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids[rank], signal.SIGUSR1)
        end = time.monotonic() + _GRACE
        while (now := self._last_lines(rank)) == before and time.monotonic() < end:
            time.sleep(0.05)
        return now

    def stop(self) -> None:
        """End the processes."""
        for connection in self.connections:
            connection.close()
        self.forker.connection.send(("stop", 0, str(self.folder)))


class _RunningRanks:
    """The processes that are kept between calls."""

    forker: _Forker | None = None
    ranks: ClassVar[dict[int, _Ranks]] = {}


@folding("spawn")
def spawn(fn: Callable[..., Any], n: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    """Run a function on several processes of one gloo process group.

    Args:
        fn: called as ``fn(rank, n, *args)`` on each process, with ``torch.distributed``
            initialized over the ``n`` processes. Functions that can't be imported, such as lambdas
            and closures, are pickled by ``cloudpickle`` if it is installed.
        n: the number of processes. The processes are kept for later calls with the same ``n``.
        args: further arguments, pickled.
        timeout: seconds after which the call fails if a rank has not finished.

    Returns:
        A list of the results of ``fn``, by rank.

    Raises:
        RanksFailed: a rank raised, its process ended, or it did not finish in time. The message
            has every rank's error, the first cause first.
        TypeError: ``fn`` or an argument can't be pickled.

    Example:
        >>> import torch
        >>> from tsfunc.testing import spawn
        >>> def total(rank, n, start):
        ...     x = torch.tensor(float(start + rank))
        ...     torch.distributed.all_reduce(x)
        ...     return x.item()
        >>> spawn(total, 2, 10)
        [21.0, 21.0]
    """
    running = _RunningRanks
    if running.forker is None:
        running.forker = _Forker()
    ranks = running.ranks.get(n)
    if ranks is None:
        ranks = running.ranks[n] = running.forker.start(n)
    try:
        results = ranks.run(fn, args, timeout)
    except (RanksFailed, KeyboardInterrupt, OSError):
        stop(n)
        raise
    if not ranks.usable:
        stop(n)
    return results


def stop(n: int) -> None:
    """End the processes of a group of ``n``; the next call of ``spawn`` starts new ones."""
    _RunningRanks.ranks.pop(n).stop()


def _pickle(call: tuple[Callable[..., Any], Any]) -> bytes:
    """Pickle the call: by reference if the function can be imported, else by value."""
    fn = call[0]
    if getattr(fn, "__module__", None) != "__main__" and "<" not in getattr(
        fn, "__qualname__", "<"
    ):
        try:
            return pickle.dumps(call)
        except (pickle.PicklingError, AttributeError, TypeError):
            pass
    try:
        import cloudpickle  # type: ignore[import-untyped]
    except ImportError:
        raise TypeError(
            f"spawn: expected a function that can be imported, got {fn!r}. Define it at the top "
            f"level of a module, or install cloudpickle."
        ) from None
    return cloudpickle.dumps(call)


@atexit.register
def _stop_all() -> None:
    if _RunningRanks.forker is not None:
        _RunningRanks.ranks.clear()
        _RunningRanks.forker.stop()
        _RunningRanks.forker = None
