"""A process that runs programs, and is replaced if it dies or hangs."""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
from typing import IO, Any

from tools.fuzz.running import CRASHES, HANGS, Verdict

_MOST = 400  # programs of one process, since its caches grow
_LAST_WORDS = 10.0  # seconds for the stacks of a process that hangs
_WAITING = 4  # a process may wait for a lock or for the CPU this many times the limit


def serve() -> None:
    """Run the programs from stdin, one in each line, and print the verdict of each."""
    import faulthandler
    import resource

    import torch

    from tools.fuzz import modes

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of a program is not a verdict
    faulthandler.enable()
    faulthandler.register(signal.SIGPROF, chain=True)  # print all stacks, then end the process
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
    for line in sys.stdin:
        limit, mode, program = pickle.loads(base64.b64decode(line))
        signal.setitimer(signal.ITIMER_PROF, limit)  # sends SIGPROF
        verdict = modes.MODES[mode](program)
        print(base64.b64encode(pickle.dumps(verdict)).decode(), file=out, flush=True)


class Worker:
    """Run programs in another process, so that each has a verdict even if the process dies."""

    def __init__(self, limit: float = 180.0) -> None:
        self.limit = limit  # CPU seconds, which do not depend on the load of the machine
        self._process: subprocess.Popen[str] | None = None
        self._ran = 0

    def run(self, program: Any, mode: str = "towers") -> Verdict:
        """Return the verdict on a program, or on another input of the mode."""
        if self._process is None:
            self._start()
        process = self._process
        assert process is not None
        to, back = _pipe(process.stdin), _pipe(process.stdout)
        begin = time.monotonic()
        try:
            print(
                base64.b64encode(pickle.dumps((self.limit, mode, program))).decode(),
                file=to,
                flush=True,
            )
        except BrokenPipeError:
            return self._dead()
        ready, _, _ = select.select([back], [], [], _WAITING * self.limit)
        if not ready:
            process.send_signal(signal.SIGPROF)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LAST_WORDS)
            return self._hangs(f"no end after {time.monotonic() - begin:.0f} s")
        line = back.readline()
        if not line:
            return self._dead()
        self._ran += 1
        if self._ran >= _MOST:
            self.close()
        return pickle.loads(base64.b64decode(line))

    def _dead(self) -> Verdict:
        process = self._process
        assert process is not None
        code = process.wait()
        if code == -signal.SIGPROF:
            return self._hangs(f"no end after {self.limit:.0f} s of CPU time")
        said = self._last_said()
        self.close()
        return Verdict(CRASHES, f"exit {code}", said)

    def _hangs(self, reason: str) -> Verdict:
        """Return the verdict on a program that does not end, with the stacks of its threads."""
        said = self._last_said()
        self.close()
        return Verdict(HANGS, "time", f"{reason}\n{said}")

    def _last_said(self) -> str:
        """Return the end of the process's stderr: all stacks, and the reason of its end."""
        self._said.seek(0)
        return self._said.read()[-16000:]

    def _start(self) -> None:
        # stderr goes to a file: a pipe that is not read would block the process when it is full.
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from tools.fuzz.workers import serve; serve()"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TSFUNC_RAGE": "off", "TSFUNC_VERIFY": "1"},
        )  # fmt: skip
        self._ran = 0

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout, self._said):
                try:
                    _pipe(pipe).close()
                except BrokenPipeError:  # the process died with a program in the pipe
                    pass

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe
