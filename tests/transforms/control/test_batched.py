"""Programs whose loops and choices differ between examples: each example runs its own part."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tsfunc
from tests.transforms.control.loops_of_examples import each_alone, in_place, inputs, slope, tangent
from tsfunc import (
    MetaTensorType,
    cond,
    fori_loop,
    grad,
    jvp,
    pmean,
    specialize,
    switch,
    vmap,
    while_loop,
)
from tsfunc.transforms.control import physical_batches

W = torch.linspace(-0.5, 1, 3, dtype=torch.float64)


def _counted(x: torch.Tensor, n: torch.Tensor) -> Any:
    return fori_loop(0, n, lambda i, y: (y * x + W).sin() + i, x)


def _until(x: torch.Tensor, n: torch.Tensor) -> Any:
    parts = [x * 2, x.sin()]

    def step(carry: Any) -> Any:
        i, y = carry
        return i + 1, (torch.stack([*parts, y]).sum(0) * W).tanh() + i * parts[0]

    return while_loop(lambda carry: carry[0] < n, step, (0, x))[1]


def _chosen(x: torch.Tensor, n: torch.Tensor) -> Any:
    return switch(n, [lambda: x.sin() * W, lambda: (x + 2).log(), lambda: x * n])


def _nested(x: torch.Tensor, n: torch.Tensor) -> Any:
    def step(i: torch.Tensor, y: torch.Tensor) -> Any:
        y = cond(y.sum() > 0, lambda: y * x - 1, lambda: y + x.cos())
        return fori_loop(0, i % 3, lambda j, z: z * W + j, y)

    return fori_loop(0, n, step, x)


def _batched_by_the_body(x: torch.Tensor, n: torch.Tensor) -> Any:
    """The condition is shared by the examples before the first step, and differs after it."""
    start = torch.zeros((), dtype=torch.float64)
    return while_loop(lambda y: y.sum() < 3, lambda y: y + x.exp().sum() / 9, start) * x


def _differentiating(x: torch.Tensor, n: torch.Tensor) -> Any:
    """Differentiate by the body's arguments, and by captured values."""

    def step(i: Any, y: torch.Tensor) -> Any:
        own = grad(lambda y: (y * x).sin().sum())(y)
        return y - own + grad(lambda x: (y * x).cos().sum())(x)

    return fori_loop(0, n, step, x)


def _pushing(x: torch.Tensor, n: torch.Tensor) -> Any:
    def step(i: Any, y: torch.Tensor) -> Any:
        return jvp(lambda y, x: (y * x).sin(), (y, x), (x, y))[1] + vmap(lambda a: a * y)(x).sum(0)

    return fori_loop(0, n, step, x)


LONGER = pytest.param(_nested, marks=pytest.mark.slow)
BODIES = [_counted, _until, in_place, _chosen, LONGER, _batched_by_the_body]
BODIES += [_differentiating, _pushing]
EACH = pytest.mark.parametrize("f", BODIES)
COUNTS = [[3, 0, 5, 1, 3], [4], [0, 0]]


@EACH
@pytest.mark.parametrize("counts", COUNTS)
def test_a_program_of_a_batch_is_each_ones_function(f: Any, counts: list[int]) -> None:
    x, n = inputs(counts)
    expected = each_alone(f, x, n)
    torch.testing.assert_close(specialize(vmap(f))(x, n), expected)
    torch.testing.assert_close(vmap(specialize(f))(x, n), expected)


@EACH
def test_its_derivatives_are_each_ones(f: Any) -> None:
    x, n = inputs([3, 0, 5, 1, 3])

    of_all = grad(lambda x, n: vmap(f)(x, n).square().sum())
    expected = each_alone(slope(f), x, n)
    torch.testing.assert_close(specialize(vmap(slope(f)))(x, n), expected)
    torch.testing.assert_close(specialize(of_all)(x, n), expected)
    program = specialize(vmap(f))
    leaf = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(program(leaf, n).square().sum(), leaf)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(specialize(vmap(tangent(f)))(x, n), each_alone(tangent(f), x, n))


@EACH
def test_it_may_differ_at_either_of_two_vmaps(f: Any) -> None:
    x, _ = inputs([0, 0, 0, 0])
    n = torch.tensor([4, 0, 1])
    expected = torch.stack([each_alone(f, x, torch.full((4,), int(k))) for k in n])
    by_rows = vmap(lambda k, x: vmap(lambda row: f(row, k))(x), in_dims=(0, None))
    torch.testing.assert_close(specialize(by_rows)(n, x), expected)
    by_columns = vmap(lambda row, n: vmap(lambda k: f(row, k))(n), (0, None), 1)
    torch.testing.assert_close(specialize(by_columns)(x, n), expected)
    # Weights of the inner examples, of the outer ones, and of both.
    wide = torch.linspace(-1, 1, 12 << 17, dtype=torch.float64).reshape(4, 3, -1)
    spread = vmap(lambda k, x, n: vmap(lambda row, m: f(row[:, 0], k + 0 * m))(x, n), (0, None, 0))
    many = torch.zeros(3, 4, dtype=torch.int64)
    strided = wide[:, :, 0]
    expected = torch.stack([each_alone(f, strided, torch.full((4,), int(k))) for k in n])
    torch.testing.assert_close(specialize(spread)(n, wide, many), expected)
    both = vmap(vmap(f))
    each = torch.stack([x, x + 0.5]), torch.tensor([[0, 3, 1, 2], [2, 2, 5, 0]])
    found = torch.stack([each_alone(f, *rows) for rows in zip(*each, strict=True)])
    torch.testing.assert_close(specialize(both)(*each), found)
    torch.testing.assert_close(vmap(specialize(vmap(f)))(*each), found)


@EACH
def test_sizes_may_have_names(f: Any) -> None:
    types = [MetaTensorType(["b", "d"], dtype=torch.float64), MetaTensorType(["b"])]
    program = specialize(vmap(lambda x, n: f(x[:3], n)), dict(zip(("x", "n"), types, strict=True)))
    for counts in ([3, 0, 5, 1, 3], [0, 0], [1, 4, 2]):
        x, n = inputs(counts)
        torch.testing.assert_close(program(torch.cat([x, x], 1), n), each_alone(f, x, n))
    assert program.cache_info().misses == 1


class _Rows(TorchDispatchMode):
    """A mode that counts the examples whose sine is computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.sin.default:
            self.count += args[0].numel()
        return func(*args, **(kwargs or {}))


def test_only_those_that_need_a_step_make_it() -> None:
    n = torch.tensor([1, 20, 3, 0, 7])
    x = torch.ones(5)
    program = specialize(vmap(lambda x, n: fori_loop(0, n, lambda i, y: y.sin(), x)))
    expected = program(x, n)
    with _Rows() as rows:
        torch.testing.assert_close(program(x, n), expected)
    assert rows.count == int(n.sum())
    choice = specialize(vmap(lambda x, n: cond(n > 2, torch.sin, torch.cos, x)))
    choice(x, n)
    with _Rows() as rows:
        choice(x, n)
    assert rows.count == 3


@pytest.mark.parametrize("f", [_until, _chosen])
def test_tracers_run_bodies_that_no_program_can(f: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(physical_batches.PhysicalBatch, "vmap_body", lambda self, *_: None)
    x, n = inputs([3, 0, 5, 1, 3])
    torch.testing.assert_close(specialize(vmap(f))(x, n), each_alone(f, x, n))
    torch.testing.assert_close(vmap(specialize(f))(x, n), each_alone(f, x, n))


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # from torch's first jvp
def test_torchs_own_forward_mode_goes_through_it() -> None:
    x, n = inputs([3, 0, 5, 1, 3])
    program = specialize(vmap(_until))
    program(x, n)
    found = torch.func.jvp(lambda x: program(x, n), (x,), (x.cos(),))[1]
    expected = each_alone(lambda x, n: jvp(lambda x: _until(x, n), (x,), (x.cos(),))[1], x, n)
    torch.testing.assert_close(found, expected)


def test_a_branch_that_would_fail_or_give_nan_does_not_run() -> None:
    def f(x: torch.Tensor) -> Any:
        def checked(x: torch.Tensor) -> torch.Tensor:
            torch._assert_async(x > 0)
            return x.sqrt()

        return cond(x > 0, checked, lambda x: x * 2, x)

    x = torch.tensor([4.0, -1.0, 0.0])
    torch.testing.assert_close(specialize(vmap(f))(x), torch.tensor([2.0, -2.0, 0.0]))
    torch.testing.assert_close(specialize(vmap(grad(f)))(x), torch.tensor([0.25, 2.0, 2.0]))


def test_select_runs_both_on_all() -> None:
    f = specialize(vmap(lambda x: cond(x > 0, torch.sin, torch.cos, x, batching="select")))
    x = torch.tensor([1.0, -1.0])
    torch.testing.assert_close(f(x), torch.where(x > 0, x.sin(), x.cos()))
    assert not [node for node in f.program.graph.nodes if "cond" in node.name]


def test_a_body_may_exchange_values_or_draw() -> None:
    def drawn(x: torch.Tensor, n: torch.Tensor) -> Any:
        return fori_loop(0, n, lambda i, y: y + torch.rand(3).clamp(1, 1), x)

    def exchanged(x: torch.Tensor, n: torch.Tensor) -> Any:
        return fori_loop(0, n, lambda i, y: y + pmean(x, "i"), x)

    x, n = inputs([2, 0, 3])
    program = specialize(vmap(drawn, randomness="different"))
    torch.testing.assert_close(program(x, n), x + n[:, None])
    torch.testing.assert_close(
        specialize(vmap(exchanged, axis_name="i"))(x, n), x + n[:, None] * x.mean(0)
    )


def test_an_example_writes_into_its_own_part_of_a_tensor() -> None:
    def f(n: torch.Tensor) -> Any:
        kept = n * 0

        def step(i: Any, c: torch.Tensor) -> torch.Tensor:
            kept.add_(1)
            return c + kept

        return fori_loop(0, n, step, n), kept

    found = specialize(vmap(f))(torch.tensor([1, 3]))
    assert [x.tolist() for x in found] == [[2, 9], [1, 3]]


@EACH
def test_files_keep_it(f: Any, tmp_path: Path) -> None:
    x, n = inputs([3, 0, 5, 1, 3])
    program = specialize(vmap(f))
    expected = program(x, n)
    program.save(tmp_path / "f.tsf")
    torch.testing.assert_close(tsfunc.load(tmp_path / "f.tsf")(x, n), expected)


@pytest.mark.parametrize("f", [_until, _chosen, LONGER, in_place])
def test_torch_has_the_whole_batch(f: Callable[..., Any]) -> None:
    """torch's operators are for one choice: NOTE [unreadable choices] in ``cond``."""
    program = specialize(vmap(f))
    expected = program(*inputs([3, 0, 2, 1, 3]))
    found = program.graph_module(*inputs([3, 0, 2, 1, 3]))
    torch.testing.assert_close(found[0], expected)


@pytest.mark.parametrize("f", [_until, _chosen])
def test_torch_has_the_whole_batch_of_two_vmaps(f: Callable[..., Any]) -> None:
    """One program serves all sizes; the choice differs at the inner vmap, the outer, or both."""
    both = vmap(vmap(f, in_dims=(None, 0)), in_dims=(0, 0))
    sizes = {
        "x": MetaTensorType(["a", 3], dtype=torch.float64),
        "n": MetaTensorType(["a", "b"], dtype=torch.int64),
    }
    program = specialize(both, sizes)
    for counts in ([[3, 0, 1], [2, 2, 5]], [[1, 1], [4, 4], [0, 0], [2, 2]]):
        n = torch.tensor(counts)
        x, _ = inputs(counts[0] + counts[1])
        x = x[: len(counts)]
        expected = each_alone(lambda x, row: torch.stack([f(x, k) for k in row]), x, n)
        torch.testing.assert_close(program(x, n), expected)
        torch.testing.assert_close(program.graph_module(x, n)[0], expected)
    assert program.cache_info().programs == 1
