"""Cost of a trace for each operator: the first call of a specialized function, beside make_fx."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import tsfunc
from benchmarks.timing import Case, Timing, least, medians
from tsfunc import MetaTensorType as Meta

MAKE_FX = "make_fx"
STATIC, NAMED = "tsfunc, static sizes", "tsfunc, a named dim"
IN_A_ROUND = 8  # operators
WEIGHT = torch.ones(4, 4) / 4


def function(operators: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a function of this many operators, of several kinds."""

    def body(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        for _ in range(operators // IN_A_ROUND):
            x = torch.sin(x) * 2 + x.relu()
            x = F.layer_norm(x @ weight, (4,)) + x.sum(1, keepdim=True)
        return x

    return body


def traced(operators: int, named: bool) -> int:
    """Trace with tsfunc; return the number of operators."""
    descriptors = {"x": Meta(["n", 4])} if named else None
    f = tsfunc.specialize(function(operators), descriptors)
    f(torch.ones(5, 4), WEIGHT)
    return _count(f.program.graph, operators)


def recorded(operators: int, named: bool) -> int:
    """Trace with make_fx; return the number of operators."""
    mode = "symbolic" if named else "fake"
    return _count(
        make_fx(function(operators), tracing_mode=mode)(torch.ones(5, 4), WEIGHT).graph, operators
    )


def _count(graph: Any, operators: int) -> int:
    """Return the operators of the function, whose parts make_fx records."""
    called = operators // IN_A_ROUND * IN_A_ROUND
    assert sum(node.op == "call_function" for node in graph.nodes) >= called
    return called


@dataclass(frozen=True)
class Long(Case):
    """A case whose call takes seconds: it is timed a few times, without a warm-up."""

    def measure(
        self, repeats: int, block_seconds: float = 0.01, cpu: bool = False
    ) -> dict[str, Timing | str]:
        clock = time.process_time if cpu else time.perf_counter
        seconds: dict[str, list[float]] = {name: [] for name in self.calls}
        for _ in range(min(repeats, 3)):
            for name, call in self.calls.items():
                start = clock()
                operators = call()
                seconds[name].append((clock() - start) / operators)
        return {**(least if cpu else medians)(seconds, self.base)}


def variants(operators: int, named: bool) -> Mapping[str, Callable[[], int]]:
    """Return both variants, for sizes of one kind."""
    return {
        MAKE_FX: lambda: recorded(operators, named),
        NAMED if named else STATIC: lambda: traced(operators, named),
    }


def cases() -> Iterator[Case]:
    for operators in (500, 2000):
        for named in (False, True):
            kind = "symbolic sizes" if named else "static sizes"
            name = f"trace of {operators} operators with {kind}, for one"
            goals = {NAMED: 0.3} if named else {STATIC: 0.15}
            yield Long(name, variants(operators, named), base=MAKE_FX, goals=goals)
    lengths = {
        f"{variant}, {operators} operators": (lambda o=operators, n=named: traced(o, n))
        for variant, named in ((STATIC, False), (NAMED, True))
        for operators in (500, 10_000)
    }
    yield Long("trace of 10,000 operators, for one", lengths, base=f"{STATIC}, 500 operators")
