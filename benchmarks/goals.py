"""``python -m benchmarks goals``: the costs of a function before its first result.

These are traces, first calls of a process, and compilation. Each figure has a limit, a number of
seconds or a ratio, and one line of the table. Times are CPU times, which other work on the machine
disturbs less; a ratio is the median of ratios measured in turns. The rows of transformers' GPT-2
are left out without transformers, and those of Inductor without a C++ compiler.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

import tsfunc
from benchmarks import models, scaling, tracing
from benchmarks.timing import settle_memory


@dataclass(frozen=True)
class Goal:
    """A figure with a limit.

    Attributes:
        name: the measured quantity.
        unit: the unit of the figure and of the limit.
        limit: the largest figure that meets the goal.
        measure: returns the figure.
    """

    name: str
    unit: str
    limit: float
    measure: Callable[[], float]


def _cpu(call: Callable[[], Any]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def _ratio_to_make_fx(operators: int, named: bool) -> Callable[[], float]:
    def measure() -> float:
        base, ours = tracing.variants(operators, named).values()
        ours()  # the first trace of a process imports modules
        base()
        pairs = [(_cpu(ours), _cpu(base)) for _ in range(5)]
        return statistics.median(a / b for a, b in pairs)

    return measure


FIRST = """
import sys, time, torch
torch.set_num_threads(1)
start = time.process_time()
import tsfunc
def f(x):
    return (x.sin() * 2).sum()
tsfunc.specialize(f)(torch.ones(3, 4))
seconds = time.process_time() - start
loaded = {"torch._dynamo", "sympy"} & sys.modules.keys()
assert not loaded, f"expected a first specialize without {sorted(loaded)}"
print(seconds)
"""

COMPILED = """
import sys, time, torch
torch.set_num_threads(1)
import tsfunc
import torch._inductor.compile_fx
def f(x, w):
    return (torch.tanh(x @ w) ** 2).sum()
per_example = tsfunc.vmap(tsfunc.grad(f, argnums=1), in_dims=(0, None))
start = time.perf_counter()
tsfunc.specialize(per_example, backend="inductor")(torch.ones(8, 16), torch.ones(16, 4))
print(time.perf_counter() - start)
"""


def _in_fresh_process(code: str, **variables: str) -> float:
    command = [sys.executable, "-c", code]
    env = {name: v for name, v in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=env | variables)
    return float(run.stdout)


def _first_specialize() -> float:
    _in_fresh_process(FIRST)  # an installed package has its bytecode
    return min(_in_fresh_process(FIRST) for _ in range(3))


def _second_process() -> float:
    """Return the ratio of the first compiled calls of a second and of a first process."""
    with tempfile.TemporaryDirectory() as folder:
        first, second = (
            _in_fresh_process(COMPILED, TORCHINDUCTOR_CACHE_DIR=folder) for _ in range(2)
        )
    return second / first


def _gpt2() -> tuple[Callable[..., Tensor], dict[str, Tensor], Tensor]:
    """Return the loss of a GPT-2 of 12 layers of width 768, its parameters, and two texts."""
    library: Any = models.library("transformers")
    options = {
        "vocab_size": 5000, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2,
        "attn_implementation": "eager",
    }  # fmt: skip
    model = library.GPT2LMHeadModel(library.GPT2Config(**options)).eval()
    texts = torch.randint(5000, (2, 32))

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        inputs = {"input_ids": x, "use_cache": False}
        logits: Tensor = functional_call(model, params, (), inputs).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())

    return loss, {name: p.detach() for name, p in model.named_parameters()}, texts


def _trace_of_gpt2(step: bool) -> Callable[[], float]:
    def measure() -> float:
        loss, params, texts = _gpt2()

        def descent(params: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
            steps = tsfunc.grad(loss)(params, x)
            return {name: p - 0.1 * steps[name] for name, p in params.items()}

        traced = tsfunc.make_graph(descent if step else loss)
        tsfunc.make_graph(torch.sin)(torch.ones(3))  # the first trace of a process imports modules
        return _cpu(lambda: traced(params, texts))

    return measure


def _growth(name: str) -> Callable[[], float]:
    def measure() -> float:
        growth = next(each for each in scaling.growths() if each.name == name)
        [seconds] = growth.measure(3).values()
        return scaling.exponent(growth.sizes, seconds)

    return measure


def goals() -> Iterator[Goal]:
    """Yield the goals whose libraries are installed."""
    for named, limit in ((False, 0.15), (True, 0.3)):
        kind = "a named dim" if named else "fixed sizes"
        name = f"trace of 500 operators with {kind}"
        yield Goal(name, "of make_fx", limit, _ratio_to_make_fx(500, named))
    name = "import and first specialize of a process, without Dynamo and sympy"
    yield Goal(name, "s", 0.5, _first_specialize)
    if models.library("transformers") is not None:
        for step, limit in ((False, 1.0), (True, 3.0)):
            name = f"trace of GPT-2, 12 layers of width 768, {'a step' if step else 'forward'}"
            yield Goal(name, "s", limit, _trace_of_gpt2(step))
    yield Goal("trace of in-place writes", "exponent", 1.15, _growth(scaling.WRITES))
    if shutil.which("g++") is not None:
        name = "first call with Inductor in a second process"
        yield Goal(name, "of the first", 0.5, _second_process)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks goals")
    parser.add_argument("word", nargs="?", default="", help="measure what has this in its name")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    settle_memory()
    missed = False
    print("| what | figure | limit | |\n|---|--:|--:|---|")
    for goal in goals():
        if args.word in goal.name:
            figure = goal.measure()
            missed |= figure > goal.limit
            state = "met" if figure <= goal.limit else "missed"
            figures = f"{figure:.3g} {goal.unit} | {goal.limit:g}"
            print(f"| {goal.name} | {figures} | {state} |", flush=True)
    return int(missed)
