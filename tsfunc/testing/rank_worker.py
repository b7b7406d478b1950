"""The processes of ``spawn``: ``python -m tsfunc.testing.rank_worker FOLDER``.

The first process imports torch and forks ranks on orders that arrive at the socket in ``FOLDER``.
A rank joins the process group and runs the functions that arrive on its own connection.
"""

from __future__ import annotations

import datetime
import faulthandler
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Client, Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

import tsfunc.transforms.vmap  # noqa: F401  (imported once, before the ranks are forked)
from tsfunc.bridge.mesh.failures import has_unusable_groups

# Seconds after which gloo gives up a collective that another rank does not join.
_COLLECTIVE_TIMEOUT = 30


def fork_ranks(folder: Path) -> None:
    """Serve the parent: start and end ranks until the connection closes."""
    torch.set_num_threads(1)
    connection = Client(str(folder / "socket"), "AF_UNIX")
    connection.send("forker")
    started: dict[str, list[int]] = {}
    while True:
        try:
            order, n, of = connection.recv()
        except (EOFError, OSError):
            return
        if order == "stop":
            for pid in started.pop(of):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            continue
        started[of] = []
        for rank in range(n):
            pid = os.fork()
            if pid == 0:
                connection.close()
                run_rank(folder / "socket", Path(of), rank, n)
            started[of].append(pid)


def run_rank(socket: Path, folder: Path, rank: int, size: int) -> None:
    """Join the process group and serve calls; never returns."""
    try:
        _end_with(os.getppid())
        stderr = os.open(folder / f"stderr-{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(stderr, 2)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
        connection = Client(str(socket), "AF_UNIX")
        faulthandler.enable()  # the lines of a crash are in the report of the rank
        faulthandler.register(signal.SIGUSR1, all_threads=False)
        connection.send((rank, os.getpid()))
        dist.init_process_group(
            "gloo",
            store=FileStore(str(folder / "store"), size),
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=_COLLECTIVE_TIMEOUT),
        )
        while True:
            _serve(connection, rank, size)
    except (EOFError, OSError):
        pass  # the parent has closed the connection
    except BaseException:
        traceback.print_exc()
    finally:
        # The other ranks may have ended, so the process group is not shut down.
        os._exit(0)


def _serve(connection: Connection, rank: int, size: int) -> None:
    """Run one call and report its result, or its traceback with the time."""
    call = connection.recv_bytes()
    failed = False
    try:
        fn, args = pickle.loads(call)
        value = fn(rank, size, *args)
        reply = pickle.dumps((True, time.monotonic(), value, has_unusable_groups()))
    except BaseException:
        failed = True
        reply = pickle.dumps((False, time.monotonic(), traceback.format_exc(), True))
    connection.send_bytes(reply)
    if failed and dist.is_initialized():
        dist.destroy_process_group()  # other ranks that wait for this rank fail at once


def _end_with(parent: int) -> None:
    """End this process when its parent has ended, also from inside of a collective."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    fork_ranks(Path(sys.argv[1]))
