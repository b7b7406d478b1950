"""``python -m benchmarks scaling``: how costs grow with sizes, with fitted exponents and plots.

Each cost is measured at several sizes, as the least CPU time of a few repeats. A cost ``c * n**p``
is a line on logarithmic axes, whose slope ``p`` is fitted by least squares. The fit is over the
larger half of the sizes, since fixed costs dominate the smaller ones. matplotlib draws the plots;
without it, the command prints the table alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import tsfunc
from benchmarks import tracing
from benchmarks.gradients import SIZES, mlp_params, per_example
from benchmarks.timing import Call, block, calls_per_block, settle_memory

WRITES = "trace of writes to views of one tensor"
PLOTS = Path(__file__).resolve().parent.parent / "docs" / "plots"


@dataclass(frozen=True)
class Growth:
    """A cost at several sizes.

    Attributes:
        name: the timed call.
        size: the quantity that grows.
        sizes: the sizes.
        variants: for each variant, a function from a size to the timed call.
        plot: the name of its file.
        once: True if a repeat times one call, without a warm-up.
    """

    name: str
    size: str
    sizes: Sequence[int]
    variants: dict[str, Callable[[int], Call]]
    plot: str
    once: bool = False

    def measure(self, repeats: int) -> dict[str, list[float]]:
        """Return the seconds of each variant at each size."""
        return {
            variant: [self._seconds(make(size), repeats) for size in self.sizes]
            for variant, make in self.variants.items()
        }

    def _seconds(self, call: Call, repeats: int) -> float:
        if not self.once:
            count = calls_per_block(call, 0.01)
            return min(block(call, count, cpu=True) for _ in range(repeats))
        times = []
        for _ in range(min(repeats, 3)):
            start = time.process_time()
            call()
            times.append(time.process_time() - start)
        return min(times)


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the slope of the larger half of the points on logarithmic axes."""
    half = len(sizes) // 2
    xs, ys = [math.log(n) for n in sizes[half:]], [math.log(t) for t in seconds[half:]]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    covariance = sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True))
    return covariance / sum((a - x) ** 2 for a in xs)


def _traced(named: bool) -> Callable[[int], Call]:
    return lambda operators: lambda: tracing.traced(operators, named)


def _two_of(tensors: list[Tensor]) -> Tensor:
    return tensors[0] + tensors[1]


def _all_of(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors)


def _program_of(function: Callable[[list[Tensor]], Tensor]) -> Callable[[int], Call]:
    def make(leaves: int) -> Call:
        program = tsfunc.specialize(function)
        tensors = [torch.ones(4) for _ in range(leaves)]
        return lambda: program(tensors)

    return make


def _on_cache_miss(leaves: int) -> Call:
    tensors = [torch.ones(4) for _ in range(leaves)]
    return lambda: tsfunc.specialize(_two_of)(tensors)


def _writes(count: int) -> Call:
    """A first call of a function that writes ``count`` times into views of a tensor."""

    def function(x: Tensor) -> Tensor:
        y = x * 2
        for i in range(count):
            y[i % 4] += 1
        return y

    return lambda: tsfunc.specialize(function)(torch.ones(4, 3))


def _read_globals(count: int) -> Call:
    """A call of a program that reads numbers from outside, each with a guard."""
    numbers = [float(i) for i in range(count)]

    def function(x: Tensor) -> Tensor:
        return x * sum(numbers)

    program, x = tsfunc.specialize(function), torch.ones(4)
    return lambda: program(x)


def _nested_vmap(depth: int) -> Call:
    function = torch.sin
    for _ in range(depth):
        function = tsfunc.vmap(function)
    x = torch.ones([1] * depth + [4])
    return lambda: function(x)


def _nested_grad(depth: int) -> Call:
    function: Callable[[Tensor], Tensor] = torch.sin
    for _ in range(depth):
        function = tsfunc.grad(function)
    x = torch.ones(())
    return lambda: function(x)


def _per_example(specialized: bool) -> Callable[[int], Call]:
    params, function = mlp_params(), per_example(tsfunc)
    function = tsfunc.specialize(function) if specialized else function

    def make(batch: int) -> Call:
        x, labels = torch.randn(batch, SIZES[0]), torch.randint(SIZES[-1], (batch,))
        return lambda: function(params, x, labels)

    return make


def growths() -> Iterator[Growth]:
    """Yield the costs that are measured."""
    yield Growth(
        "first call of a specialized function",
        "operators",
        (64, 128, 256, 512, 1024, 2048),
        {"static sizes": _traced(False), "a named dim": _traced(True)},
        plot="traces",
        once=True,
    )
    yield Growth(
        WRITES,
        "writes",
        (125, 250, 500, 1000, 2000),
        {"tsfunc, specialized": _writes},
        plot="writes",
        once=True,
    )
    yield Growth(
        "call of a program that reads a list of numbers from outside",
        "guards",
        (16, 64, 256, 1024, 4096),
        {"tsfunc, specialized": _read_globals},
        plot="guards",
    )
    yield Growth(
        "call of a program with a list of tensors",
        "leaves",
        (16, 64, 256, 1024, 4096),
        {"all are stacked": _program_of(_all_of), "two are added": _program_of(_two_of)},
        plot="leaves",
    )
    yield Growth(
        "first call with a list of tensors, two of which are used",
        "leaves",
        (16, 64, 256, 1024, 4096),
        {"tsfunc, specialized": _on_cache_miss},
        plot="first-leaves",
        once=True,
    )
    yield Growth(
        "sin below nested vmaps",
        "levels",
        (1, 2, 4, 8, 16),
        {"tsfunc": _nested_vmap},
        plot="nested-vmaps",
    )
    yield Growth(
        "nested derivatives of sin",
        "levels",
        (1, 2, 3, 4, 5, 6),
        {"tsfunc": _nested_grad},
        plot="nested-derivatives",
    )
    yield Growth(
        "per-example gradients of an MLP",
        "examples",
        (8, 16, 32, 64, 128, 256, 512),
        {"tsfunc": _per_example(False), "tsfunc, specialized": _per_example(True)},
        plot="batch",
    )


def draw(growth: Growth, seconds: dict[str, list[float]], folder: Path) -> None:
    """Write the plot of one cost as an SVG file."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = growth.plot  # the same file for the same figures
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 3.2), layout="constrained")
    for variant, times in seconds.items():
        label = f"{variant} (n^{exponent(growth.sizes, times):.2f})"
        axes.loglog(growth.sizes, times, marker="o", label=label)
    axes.set(xlabel=growth.size, ylabel="seconds of CPU time", title=growth.name)
    axes.title.set_fontsize("medium")
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize="small")
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{growth.plot}.svg", metadata={"Date": None})
    pyplot.close(figure)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks scaling")
    parser.add_argument("word", nargs="?", default="", help="measure what has this in its name")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--plots", type=Path, default=PLOTS, help="the folder of the SVG files")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    settle_memory()
    plots = importlib.util.find_spec("matplotlib") is not None
    print("| cost | variant | sizes | least and largest | exponent |\n|---|---|---|--:|--:|")
    for growth in growths():
        if args.word not in growth.name:
            continue
        seconds = growth.measure(args.repeats)
        for variant, times in seconds.items():
            sizes = f"{growth.sizes[0]} to {growth.sizes[-1]} {growth.size}"
            ends = f"{1e3 * times[0]:.3g} ms, {1e3 * times[-1]:.3g} ms"
            power = exponent(growth.sizes, times)
            print(f"| {growth.name} | {variant} | {sizes} | {ends} | {power:.2f} |", flush=True)
        if plots:
            draw(growth, seconds, args.plots)
    return 0
