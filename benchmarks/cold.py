"""Costs that a process pays once: the import and the first result, each in a fresh process.

An installed package has its bytecode, so each body first runs once untimed and writes it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from benchmarks.timing import Timing, medians
from benchmarks.variants import OURS, TORCH_FUNC

IMPORT_TORCH = "import torch"
TIMED = """
import time
{before}
start = time.perf_counter()
{body}
print(time.perf_counter() - start)
"""
FIRST = """
from {library} import grad, vmap
def loss(weight, x):
    return (weight @ x).tanh().square().sum()
vmap(grad(loss), in_dims=(None, 0))(torch.randn(8, 8), torch.randn(16, 8))
"""


def fresh_process(before: str, body: str) -> float:
    """Return the seconds that ``body`` takes after ``before``."""
    command = [sys.executable, "-c", TIMED.format(before=before, body=body)]
    env = {name: v for name, v in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    return float(run.stdout)


@dataclass(frozen=True)
class Cold:
    """A task of a fresh process, by several variants: (untimed setup, timed code)."""

    name: str
    bodies: Mapping[str, tuple[str, str]]
    base: str = TORCH_FUNC
    goals: Mapping[str, float] = field(default_factory=dict)

    def measure(self, repeats: int) -> dict[str, Timing]:
        """Time the variants in turns."""
        seconds: dict[str, list[float]] = {name: [] for name in self.bodies}
        for before, body in self.bodies.values():
            fresh_process(before, body)
        for _ in range(repeats):
            for name, (before, body) in self.bodies.items():
                seconds[name].append(fresh_process(before, body))
        return medians(seconds, self.base)


def cases() -> Iterator[Cold]:
    imports = {IMPORT_TORCH: ("", "import torch"), OURS: ("import torch", "import tsfunc")}
    yield Cold("import of tsfunc, after torch's", imports, base=IMPORT_TORCH)
    one_thread = "import torch; torch.set_num_threads(1)"
    libraries = {TORCH_FUNC: "torch.func", OURS: "tsfunc"}
    bodies = {k: (one_thread, FIRST.format(library=v)) for k, v in libraries.items()}
    yield Cold("import and a first vmap of grad", bodies)
