"""Bodies of loops on subsets of a vmap's examples: captured values, and the last active example."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.transforms.control.loops_of_examples import each_alone, in_place, inputs, slope, tangent
from tsfunc import (
    checkpoint,
    cond,
    custom_vjp,
    fori_loop,
    grad,
    hvp,
    jacfwd,
    jvp,
    linearize,
    psum,
    specialize,
    switch,
    vjp,
    vmap,
    while_loop,
)
from tsfunc.errors import DataDependentError

COUNTS = st.lists(st.integers(0, 6), min_size=1, max_size=6)


def _closing_over(x: torch.Tensor, n: torch.Tensor) -> Any:
    parts = [x * 2, x.sin()]  # captured in a list: of all examples

    def step(carry: Any) -> Any:
        i, y = carry
        return i + 1, (torch.stack([*parts, y]).sum(0) * x).tanh() + i * parts[0]

    return while_loop(lambda carry: carry[0] < n, step, (torch.tensor(0), x))[1]


def _loop_in_loop(x: torch.Tensor, n: torch.Tensor) -> Any:
    def step(i: Any, y: Any) -> Any:
        return fori_loop(0, i % 3, lambda j, z: z * x + j, y) + x

    return fori_loop(0, n, step, x)


def _branch_in_loop(x: torch.Tensor, n: torch.Tensor) -> Any:
    def step(i: Any, y: Any) -> Any:
        return cond(y.sum() > 0, lambda: y * x - 1, lambda: y + x.cos())

    return fori_loop(0, n, step, x)


def _derivative_in_loop(x: torch.Tensor, n: torch.Tensor) -> Any:
    def step(i: Any, y: Any) -> Any:
        inner = grad(lambda z: (z * z * x).sum())(y)
        return inner * 0.5 + jvp(torch.sin, (y,), (x,))[1]

    return fori_loop(0, n, step, x)


def _pullback_in_loop(x: torch.Tensor, n: torch.Tensor) -> Any:
    """Return a function whose cotangents, tangents and points come from outside of the loop."""

    def step(i: Any, y: Any) -> Any:
        out, pull = vjp(lambda z: z.sin() * y, x)
        _, push = linearize(torch.cos, x)
        return (pull(x)[0] + push(x) + hvp(lambda z: (z**3).sum(), (x,), (x,))).tanh() + out

    return fori_loop(0, n, step, x)


def _custom_in_loop(x: torch.Tensor, n: torch.Tensor) -> Any:
    return fori_loop(0, n, lambda i, y: _scaled(y, x) + 1, x)


@custom_vjp
def _scaled(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a * b


_scaled.defvjp(lambda a, b: (a * b, (a, b)), lambda kept, ct: (ct * kept[1], ct * kept[0]))


def _checkpoint_in_loop(x: torch.Tensor, n: torch.Tensor) -> Any:
    return fori_loop(0, n, lambda i, y: checkpoint(lambda y: (y * x).sin() * x)(y), x)


def _vmap_in_loop(x: torch.Tensor, n: torch.Tensor) -> Any:
    return fori_loop(0, n, lambda i, y: vmap(lambda a: a * x.sum() + i)(y), x)


BODIES = [
    _closing_over, in_place, _loop_in_loop, _branch_in_loop, _derivative_in_loop,
    _pullback_in_loop, _custom_in_loop, _checkpoint_in_loop, _vmap_in_loop,
]  # fmt: skip


@pytest.mark.parametrize("f", BODIES)
@given(COUNTS)
@settings(max_examples=8)
def test_a_loop_on_fewer_and_fewer_examples_is_each_ones_loop(f: Any, counts: list[int]) -> None:
    x, n = inputs(counts)
    torch.testing.assert_close(vmap(f)(x, n), each_alone(f, x, n))


@pytest.mark.parametrize("f", BODIES)
def test_its_gradients_are_each_ones(f: Any) -> None:
    x, n = inputs([3, 0, 5, 1, 3])

    expected = each_alone(slope(f), x, n)
    torch.testing.assert_close(vmap(slope(f))(x, n), expected)
    outside = grad(lambda x: vmap(f)(x, n).square().sum())(x)
    torch.testing.assert_close(outside, expected)


@pytest.mark.parametrize("f", BODIES)
def test_its_tangents_are_each_ones(f: Any) -> None:
    x, n = inputs([3, 0, 5, 1, 3])

    expected = each_alone(tangent(f), x, n)
    torch.testing.assert_close(vmap(tangent(f))(x, n), expected)
    outside = jvp(lambda x: vmap(f)(x, n), (x,), (x.cos(),))[1]
    torch.testing.assert_close(outside, expected)


@pytest.mark.parametrize("f", BODIES)
def test_it_may_differ_at_either_of_two_vmaps(f: Any) -> None:
    x, _ = inputs([0, 0, 0, 0])
    n = torch.tensor([4, 0, 1])
    expected = torch.stack([each_alone(f, x, torch.full((4,), int(k))) for k in n])
    by_rows = vmap(lambda k: vmap(lambda row: f(row, k))(x))(n)
    torch.testing.assert_close(by_rows, expected)
    by_columns = vmap(lambda row: vmap(lambda k: f(row, k))(n), out_dims=1)(x)
    torch.testing.assert_close(by_columns, expected)


def test_a_choice_in_a_loop_may_differ_at_both_of_two_vmaps() -> None:
    def f(x: torch.Tensor, n: torch.Tensor) -> Any:
        def step(i: Any, y: torch.Tensor) -> Any:
            return cond(y.sum() > 0, lambda: y * x - 1, lambda: y + x.cos())

        return fori_loop(0, n, step, x)

    x, _ = inputs([0, 0, 0, 0])
    rows, n = torch.stack([x, x + 0.5]), torch.tensor([[0, 3, 1, 2], [2, 2, 5, 0]])
    expected = torch.stack([each_alone(f, *row) for row in zip(rows, n, strict=True)])
    torch.testing.assert_close(vmap(vmap(f))(rows, n), expected)


def test_a_tensor_from_an_earlier_step_is_narrowed_to_the_active_examples() -> None:
    def f(n: torch.Tensor) -> Any:
        last = [n * 0]

        def step(c: torch.Tensor) -> torch.Tensor:
            new = c + last[0] + 1
            last[0] = c
            return new

        return while_loop(lambda c: c < n, step, n * 0)

    n = torch.tensor([1, 20, 3, 0, 20, 100])
    torch.testing.assert_close(vmap(f)(n), each_alone(f, n))


def test_the_last_example_draws_as_one_of_a_batch() -> None:
    def f(n: torch.Tensor) -> Any:
        return fori_loop(0, n, lambda i, c: torch.cat([c[1:], torch.rand(1)]), torch.zeros(3))

    n = torch.tensor([0, 1, 3])
    out = vmap(f, randomness="different")(n)
    assert (out != 0).sum(1).tolist() == [0, 1, 3]
    torch.manual_seed(0)
    split = vmap(f, randomness="split")(n)
    torch.manual_seed(0)
    torch.testing.assert_close(vmap(f, randomness="split", chunk_size=1)(n), split)
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(f)(n)


@pytest.mark.parametrize("counts", [[0, 0, 3], [5, 1], [4]])
def test_the_last_example_gets_the_refusals_of_a_batch(counts: list[int]) -> None:
    n = torch.tensor(counts)
    outside = torch.zeros(2)

    def writing(i: Any, c: torch.Tensor) -> torch.Tensor:
        outside[0] = c
        return c + 1

    def reading(i: Any, c: torch.Tensor) -> torch.Tensor:
        return c + c.item()

    with pytest.raises(RuntimeError, match="made outside"):
        vmap(lambda n: fori_loop(0, n, writing, n * 1.0))(n)
    with pytest.raises(DataDependentError):
        vmap(lambda n: fori_loop(0, n, reading, n * 1.0))(n)
    assert outside.tolist() == [0, 0]


def test_the_last_example_writes_into_its_own_part_of_a_tensor() -> None:
    def f(n: torch.Tensor) -> Any:
        kept = n * 0

        def step(i: Any, c: torch.Tensor) -> torch.Tensor:
            kept.add_(1)
            return c + kept

        return fori_loop(0, n, step, n), kept

    n = torch.tensor([1, 3])
    found = vmap(f)(n)
    assert [x.tolist() for x in found] == [[2, 9], [1, 3]]


def test_the_last_example_still_exchanges_values_with_all() -> None:
    def f(n: torch.Tensor) -> Any:
        return fori_loop(0, n, lambda i, c: c + psum(n, "i"), n)

    n = torch.tensor([1, 3, 2])
    assert vmap(f, axis_name="i")(n).tolist() == [7, 21, 14]


def test_a_loop_in_many_steps_ends_each_example_at_its_own() -> None:
    n = torch.tensor([1, 200, 3, 50, 0, 199])
    steps = vmap(lambda n: while_loop(lambda c: c < n, lambda c: c + 1, n * 0))
    torch.testing.assert_close(steps(n), n)


@pytest.mark.parametrize("randomness", ["same", "different", "split"])
@pytest.mark.parametrize("own", [False, True], ids=["the default generator", "one of its own"])
def test_an_attempt_that_is_given_up_draws_nothing(randomness: str, own: bool) -> None:
    """Branches that need all examples begin on subsets, and then run on all of them."""
    generator = torch.Generator() if own else torch.default_generator

    def draw() -> torch.Tensor:
        return torch.rand((), generator=generator if own else None)

    def chosen(x: torch.Tensor) -> Any:
        return cond(x > 0, lambda x: draw() + psum(x, "i"), lambda x: draw() - x, x)

    def of_all(x: torch.Tensor) -> Any:
        first = draw()
        second = first if randomness == "split" else draw()  # its first draw, as if alone
        return torch.where(x > 0, second + psum(x, "i"), first - x)

    def looped(x: torch.Tensor) -> Any:
        return while_loop(lambda c: c < 2, lambda c: c + 1 + draw() + 0 * psum(c, "i"), x)

    def once(x: torch.Tensor) -> Any:
        return torch.where(x < 2, x + 1 + draw(), x)

    def drawn(f: Any, x: torch.Tensor) -> Any:
        generator.manual_seed(0)
        out = vmap(f, axis_name="i", randomness=randomness)(x)
        return out, generator.get_state()

    for f, reference in ((chosen, of_all), (looped, once)):
        x = torch.tensor([1.0, -1.0, 3.0, 2.0] if f is chosen else [1.0, 1.5, 3.0, 2.0])
        (out, state), (expected, after) = drawn(f, x), drawn(reference, x)
        torch.testing.assert_close(out, expected)
        assert torch.equal(state, after)


def _halved(x: torch.Tensor) -> torch.Tensor:
    return while_loop(lambda x: x.sum() > 1, lambda x: x / 2, x)


def _sine_of_some(x: torch.Tensor) -> torch.Tensor:
    return cond(x.sum() > 0, torch.sin, lambda x: x * 2, x)


@pytest.mark.parametrize("f", [_halved, _sine_of_some])
def test_no_examples(f: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert vmap(f)(torch.ones(0, 3)).shape == (0, 3)
    assert vmap(grad(lambda x: f(x).sum()))(torch.ones(0, 3)).shape == (0, 3)
    assert vmap(vmap(f))(torch.ones(2, 0, 3)).shape == (2, 0, 3)
    assert vmap(vmap(f))(torch.ones(0, 2, 3)).shape == (0, 2, 3)


def test_no_examples_of_an_index() -> None:
    branches = [torch.sin, torch.cos, torch.tanh]
    none = torch.ones(0, dtype=torch.int64)
    out = vmap(lambda i: switch(i, branches, torch.ones(3)))(none)
    assert out.shape == (0, 3)


def test_derivatives_in_a_body_that_a_program_runs_on_subsets() -> None:
    """The vmap's level is inactive while the body is traced, so autograd records nothing at it."""

    def step(c: torch.Tensor) -> Any:
        return c - 0.1 * grad(lambda y: (y.sin() * y).sum())(c)

    def f(x: torch.Tensor) -> Any:
        counted = while_loop(
            lambda s: s[0] < (x > 0).sum(), lambda s: (s[0] + 1, step(s[1])), (torch.tensor(0), x)
        )
        return cond(x.sum() > 0, lambda: step(counted[1]), lambda: jvp(step, (x,), (x,))[1])

    def g(x: torch.Tensor) -> Any:
        return cond(x.sum() > 0, lambda: vmap(lambda e: e * x.sum())(x), lambda: step(x))

    x = torch.tensor([[0.5, -1.0], [1.0, 2.0], [-1.0, -2.0]], dtype=torch.float64)
    for h in (f, g, lambda x: cond(x.sum() > 0, lambda: x, lambda: jacfwd(torch.sin)(x)[0])):
        expected = torch.stack([h(row) for row in x])
        torch.testing.assert_close(specialize(vmap(h))(x), expected)
        torch.testing.assert_close(vmap(specialize(h))(x), expected)
    expected, twice = torch.stack([f(row) for row in x]), x.expand(2, 3, 2)
    torch.testing.assert_close(specialize(vmap(vmap(f)))(twice), expected.expand(2, 3, 2))


# A branch that calls a Python function of torch on captured tensors.
CALLS_OF_PYTHON_FUNCTIONS = """
import torch
import torch.nn.functional as F
import tsfunc

functions = [lambda x: F.mse_loss(x, x), torch.norm, lambda x: F.layer_norm(x, (2,))]
for function in functions:
    def example(x):
        return tsfunc.cond(x.sum() > 0, lambda: x + function(x), lambda: x.sin())
    for _ in range(300):
        x = torch.randn(2, 3, 2, dtype=torch.float64)
        want = torch.stack([example(x[:, i]) for i in range(3)])
        torch.testing.assert_close(tsfunc.vmap(example, in_dims=1)(x), want)
"""


def test_python_functions_of_torch_in_branches_leave_memory_intact() -> None:
    """In another process, since a double free of memory ends the process."""
    out = subprocess.run(
        [sys.executable, "-c", CALLS_OF_PYTHON_FUNCTIONS],
        cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert out.returncode == 0, out.stderr
