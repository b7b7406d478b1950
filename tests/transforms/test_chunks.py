"""Chunks of a given size, and of a size that fits into memory: equal results, less memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.func
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.transforms.support import same
from tsfunc import Dim, MetaTensorType, grad, jacrev, jvp, specialize, vmap
from tsfunc.bridge.tracers import memory_meter
from tsfunc.errors import ConstraintViolation, FailedCheckError, MemoryBudgetWarning
from tsfunc.transforms import chunk_sizes

MIB = 2**20
X = torch.arange(40.0).view(10, 4).sin()
W = torch.arange(4.0).cos()


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operators make and that are alive, independently of the library.

    It does not see calls on the values inside of tracers, unless the function handler makes them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        given = {s._cdata for s in self.storages([*args, *(kwargs or {}).values()])}
        out = func(*args, **(kwargs or {}))
        for storage in self.storages(out if isinstance(out, list | tuple) else [out]):
            if storage._cdata not in given:
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.alive = {k: v for k, v in self.alive.items() if not v[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return out

    def storages(self, values: Sequence[Any]) -> list[Any]:
        """Return the storages of plain tensors; tracers have none."""
        return [v.untyped_storage() for v in values if type(v) in (Tensor, nn.Parameter)]


def outer_products(x: Tensor) -> Tensor:
    """An example of 256 floats uses about a megabyte temporarily, and leaves one kilobyte."""
    square = x[:, None] * x[None, :]
    return ((square.sin() * square).cos() + 1).sum(0)


BATCH = torch.randn(100, 256)


@pytest.mark.parametrize("budget", [2 * MIB, 8 * MIB, 40 * MIB])
def test_memory_stays_within_the_budget(budget: int) -> None:
    mapped = vmap(outer_products, chunk_size="auto", memory_budget=budget)
    want = vmap(outer_products)(BATCH)
    peaks = []
    for batch in (BATCH, BATCH[:77]):
        with LiveBytes() as counted:
            got = mapped(batch)
        torch.testing.assert_close(got, want[: len(batch)])
        peaks.append(counted.peak)
    assert max(peaks) <= budget
    assert max(peaks) >= budget / 3  # and most of it is used


def test_results_are_part_of_the_budget() -> None:
    def wide(x: Tensor) -> Tensor:
        return x.repeat(100) + 1

    budget = 13 * MIB  # the results alone are 100 * 256 * 100 * 4 bytes, 9.8 MiB
    with LiveBytes() as counted:
        got = vmap(wide, memory_budget=budget)(BATCH)
    torch.testing.assert_close(got, BATCH.repeat(1, 100) + 1)
    assert counted.peak <= budget


def test_the_memory_of_a_backward_pass_is_part_of_the_budget() -> None:
    weight = torch.ones(256, requires_grad=True)
    with LiveBytes() as counted, warnings.catch_warnings():
        warnings.simplefilter("error")
        out = vmap(lambda x: (x * weight).sin().sum(), memory_budget=4 * MIB)(BATCH)
    assert counted.peak <= 4 * MIB
    (got,) = torch.autograd.grad(out.sum(), weight)
    torch.testing.assert_close(got, ((BATCH * weight).cos() * BATCH).sum(0))


def test_too_small_a_budget_warns_and_the_results_are_right() -> None:
    mapped = vmap(outer_products, chunk_size="auto", memory_budget=MIB / 2)
    with pytest.warns(
        MemoryBudgetWarning, match=re.escape("vmap(outer_products, chunk_size='auto'):")
    ):
        got = mapped(BATCH[:5])
    torch.testing.assert_close(got, vmap(outer_products)(BATCH[:5]))


def test_it_is_measured_once_for_a_kind_of_call(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def meter(device: torch.device) -> Any:
        made.append(device)
        return memory_meter.Meter(device)

    monkeypatch.setattr(chunk_sizes, "Meter", meter)
    mapped = vmap(lambda x, n, *, y: x * n + y, (0, None), memory_budget=1000)

    def measures(*args: Any, **kwargs: Any) -> bool:
        made.clear()
        same(mapped(*args, **kwargs), args[0] * args[1] + kwargs["y"])
        return bool(made)

    assert measures(X, 2, y=1)
    assert not measures(X, 2, y=1)
    assert not measures(X[:7], 2, y=1)  # another batch size
    assert measures(X, 3, y=1)
    assert measures(X, 2, y=torch.ones(4))
    assert measures(X[:, :2], 2, y=1)
    assert measures(X.double(), 2, y=1)
    with torch.no_grad():
        assert measures(X, 2, y=1)
    assert not measures(X, 2, y=1)


def test_a_batch_that_fits_is_run_at_once() -> None:
    sizes = []

    def f(x: Tensor) -> Tensor:
        sizes.append(x.value.shape[0])  # type: ignore[attr-defined]
        return x * 2

    mapped = vmap(f, chunk_size="auto", memory_budget=10 * MIB)
    same(mapped(X), X * 2)
    same(mapped(X), X * 2)
    same(mapped(X[:1]), X[:1] * 2)
    assert sizes == [1, 8, 1, 10, 1]
    same(vmap(f, chunk_size="auto")(X), X * 2)  # the default is a share of the free memory


CALLS: dict[str, Callable[..., Any]] = {
    "trees and dims": lambda **c: vmap(
        lambda d, y: {"sum": d["x"].sum() + y, "x": [d["x"], "once", None]},
        ({"x": 1}, None),
        {"sum": 0, "x": 1},
        **c,
    )({"x": X.T}, W),
    "by name": lambda **c: vmap(lambda x, *, y: x * y, {"x": 0, "y": 0}, **c)(X, y=X),
    "keywords": lambda **c: vmap(lambda x, *, y: x * y, **c)(X, y=W),
    "axis_size": lambda **c: vmap(lambda: W, axis_size=7, **c)(),
    "a result of no example": lambda **c: vmap(lambda x: (x, W), out_dims=(0, None), **c)(X),
    "nested": lambda **c: vmap(lambda a: vmap(lambda b: a * b, **c)(X), **c)(X),
    "outside of grad": lambda **c: grad(lambda x: vmap(torch.sin, **c)(x).sum())(X),
    "inside of vmap": lambda **c: vmap(lambda x: vmap(torch.sin, **c)(x))(X[None]),
    "per-example gradients": lambda **c: vmap(grad(lambda x: x.sin().sum()), **c)(X),
    "jvp": lambda **c: jvp(lambda x: vmap(torch.sin, **c)(x), (X,), (X,)),
    "jacrev": lambda **c: jacrev(lambda x: x.sin() * x.sum(), **c)(X),
    "jacrev of two results": lambda **c: jacrev(lambda x: {"a": x.sin(), "b": [x.sum()]}, **c)(W),
    "second derivatives": lambda **c: jacrev(jacrev(lambda x: x.sin().prod(), **c), **c)(W),
    "one random number for all": lambda **c: vmap(
        lambda x: x * torch.rand(4) + torch.randn(()), randomness="same", **c
    )(X),
    "specialized": lambda **c: specialize(vmap(lambda x: x.sin(), **c))(X),
    "bools and integers": lambda **c: vmap(lambda x: (x > 0, x.long()), **c)(X),
    "complex numbers": lambda **c: vmap(lambda x: torch.fft.fft(x), **c)(X),
    "an empty batch": lambda **c: vmap(torch.sin, **c)(X[:0]),
}
CHUNKS: list[Mapping[str, Any]] = [
    {"chunk_size": 3},
    {"chunk_size": 1},
    {"chunk_size": 100},
    {"chunk_size": "auto"},
    {"memory_budget": 2000},
]


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_without_chunks(name: str, chunks: Mapping[str, Any]) -> None:
    torch.manual_seed(3)
    want = CALLS[name]()
    state = torch.get_rng_state()
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MemoryBudgetWarning)
        same(CALLS[name](**chunks), want)
    assert torch.equal(torch.get_rng_state(), state)


@settings(max_examples=30)
@given(st.integers(1, 9), st.permutations([0, 1, 2]), st.integers(0, 2), st.integers(0, 2))
def test_results_lie_in_memory_as_a_chunks_do(
    chunk: int, order: list[int], at: int, to: int
) -> None:
    x = torch.randn(3, 4, 6).permute(order)
    mapped = vmap(torch.sin, at, to, chunk_size=chunk)
    want = vmap(torch.sin, at, to)(x)
    got = mapped(x)
    same(got, want)
    if x.shape[at] > chunk > 1:
        by_stride = sorted(range(3), key=lambda i: want.stride(i))
        assert by_stride == sorted(range(3), key=lambda i: got.stride(i))


def test_random_numbers_differ_between_chunks() -> None:
    for chunks in CHUNKS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MemoryBudgetWarning)
            got = vmap(lambda x: torch.rand(()), randomness="different", **chunks)(X)
        assert got.unique().numel() == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"chunk_size": "half"}, "chunk_size should be None or greater than 0. (got half)"),
        ({"chunk_size": -1}, "chunk_size should be None or greater than 0. (got -1)"),
        ({"memory_budget": 0}, "memory_budget: expected None or a number of bytes greater than 0"),
        ({"memory_budget": "8G"}, "got '8G'"),
        ({"memory_budget": True}, "got True"),
        (
            {"memory_budget": 10, "chunk_size": 3},
            "memory_budget: expected chunk_size='auto' beside it, got 3",
        ),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    for transform in (vmap, jacrev):
        with pytest.raises(ValueError, match=f"^{transform.__name__}: .*{re.escape(message)}"):
            transform(torch.sin, **arguments)


def test_chunks_that_differ_are_refused() -> None:
    first_chunk = "as for the first chunk of the examples"
    for first, other, message in [
        (lambda x: x, lambda x: x.double(), "a tensor of shape (examples, 4) and torch.float64"),
        (lambda x: x, lambda x: x[:2], "a tensor of shape (examples, 2)"),
        (lambda x: x, lambda x: (x, x), f"to return *, {first_chunk}, got (*, *)"),
        (lambda x: 3, lambda x: x, f"to return no tensor, {first_chunk}, got a tensor"),
        (lambda x: x, lambda x: 3, f"and torch.float32, {first_chunk}, got no tensor"),
    ]:
        calls: list[Any] = [first, other]
        with pytest.raises(ValueError, match=re.escape(message)):
            vmap(lambda x, calls=calls: calls.pop(0)(x), chunk_size=5)(X)


def test_inside_of_torch_func_it_is_refused() -> None:
    with pytest.raises(RuntimeError, match="chunk_size='auto' can't be served inside of"):
        torch.func.grad(lambda x: vmap(torch.sin, memory_budget=1000)(x).sum())(X)


def test_jacrev_makes_its_basis_chunk_by_chunk() -> None:
    x = torch.randn(512)
    basis = 512 * 512 * 4
    with memory_meter.Meter(x.device) as whole:
        want = jacrev(torch.sin)(x)
    with memory_meter.Meter(x.device) as chunked:
        got = jacrev(torch.sin, chunk_size=16)(x)
    same(got, want)
    assert whole.peak >= 2 * basis
    assert chunked.peak < 1.2 * basis  # the result has this size, too


PEAK = """
import torch
from tsfunc import vmap
from tests.transforms.test_chunks import outer_products

def peak():
    (line,) = [x for x in open("/proc/self/status") if x.startswith("VmHWM")]
    return int(line.split()[1]) * 1024

torch.set_num_threads(1)
batch = torch.randn(1200, 256)
vmap(outer_products)(batch[:2])
before = peak()
vmap(outer_products, chunk_size="auto", memory_budget=200 * 2**20)(batch)
print(peak() - before)
"""


@pytest.mark.slow  # in another process
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_the_process_stays_within_the_budget() -> None:
    """Measured by the system: without chunks these examples use most of a gigabyte."""
    run = subprocess.run(
        [sys.executable, "-c", PEAK],
        cwd=Path(__file__).parents[2],
        # glibc would otherwise keep freed memory, in pieces of sizes that no longer fit.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(run.stdout) <= 200 * MIB


class TestNamedSizes:
    """In a program with a named size, the number of chunks is the constraint on the size."""

    def test_a_descriptor_that_fixes_the_number_of_chunks_serves_its_sizes(self) -> None:
        mapped = vmap(lambda x: x.sin().sum(), chunk_size=4)
        program = specialize(mapped, {"x": MetaTensorType([Dim("n", min=5, max=8), 4])})
        for n in (5, 7, 8):
            same(program(X[:n]), mapped(X[:n]))
        assert program.cache_info().misses == 1

    def test_another_descriptor_is_refused_with_the_one_that_suffices(self) -> None:
        program = specialize(
            vmap(lambda x: x.sin().sum(), chunk_size=4), {"x": MetaTensorType(["n", 4])}
        )
        with pytest.raises(ConstraintViolation, match=r"Dim\('n', min=5, max=8\)"):
            program(X[:6])

    def test_the_rows_of_a_jacobian_run_once(self) -> None:
        calls: list[int] = []

        def function(x: Tensor) -> Tensor:
            calls.append(1)
            return jacrev(lambda x: (x * x).reshape(-1), chunk_size=2)(x).sum()

        program = specialize(function, {"x": MetaTensorType(["a", "b", "c"])})
        with pytest.raises(ConstraintViolation, match="== 6"):
            program(torch.rand(3, 2, 2))
        assert len(calls) == 1


class TestSizesOfData:
    """The chunks of a program have results whose sizes depend on data, but not on the example."""

    @pytest.mark.parametrize("chunk", [1, 3, 4])
    def test_a_program_joins_them(self, chunk: int) -> None:
        mapped = vmap(lambda x: x[:, None] * W[W > 0], chunk_size=chunk)
        same(specialize(mapped)(X), mapped(X))
        total = grad(lambda x: (mapped(x) ** 2).sum())
        same(specialize(total)(X), total(X))

    def test_a_program_checks_that_they_are_equal(self) -> None:
        mask = torch.tensor([True, False, True, True, False])

        def masked(x: Tensor) -> Tensor:
            chosen = mask[:4].clone()
            mask.copy_(mask.roll(1))
            return x[:, None] * W[chosen]

        with pytest.raises(FailedCheckError, match="does not hold"):
            specialize(vmap(masked, chunk_size=5))(X)
