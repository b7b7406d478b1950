"""The time of each node of a program, measured one node after the other."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from tsfunc.program.graphs.data import ProgramData


def node_times(program: ProgramData, flat: Sequence[Any], repeats: int = 5) -> dict[str, float]:
    """Run a program node by node, and return the least time of each node in seconds.

    The sum is more than the time of the program, which runs without the measurement. Updates of
    the program are not made.

    Args:
        flat: the values that the program is called with.
    """
    best: dict[str, float] = {}
    for _ in range(repeats):
        for name, seconds in _run_program(program, flat).items():
            best[name] = min(seconds, best.get(name, seconds))
    return best


def _run_program(program: ProgramData, flat: Sequence[Any]) -> dict[str, float]:
    values: dict[torch.fx.Node, Any] = {}
    positions = iter(program.inputs)
    times: dict[str, float] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            values[node] = flat[next(positions)]
        elif node.op == "get_attr":
            values[node] = program.tensor(node)
        elif node.op == "call_function":
            args = torch.fx.map_arg(node.args, values.__getitem__)
            kwargs = torch.fx.map_arg(node.kwargs, values.__getitem__)
            quiet = torch.no_grad() if node.meta.get("no_grad") else contextlib.nullcontext()
            with quiet:
                _wait()
                start = time.perf_counter()
                values[node] = node.target(*args, **kwargs)
                _wait()
                times[node.name] = time.perf_counter() - start
    return times


def _wait() -> None:
    """Wait for the work of an accelerator."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
