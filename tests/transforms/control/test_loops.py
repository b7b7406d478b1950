"""``while_loop`` and ``fori_loop``: carries, bounds, checkpoints, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tsfunc import fori_loop, grad, jvp, specialize, vmap, while_loop
from tsfunc.errors import TypeCheckError


def collatz(n: Any) -> Any:
    """Return the number of steps to 1."""

    def step(carry: Any) -> Any:
        n, steps = carry
        return torch.where(n % 2 == 0, n // 2, 3 * n + 1), steps + 1

    return while_loop(lambda carry: carry[0] != 1, step, (n, torch.tensor(0)))[1]


def _collatz(n: int) -> int:
    steps = 0
    while n != 1:
        n, steps = (n // 2 if n % 2 == 0 else 3 * n + 1), steps + 1
    return steps


@given(st.lists(st.integers(1, 60), min_size=1, max_size=9))
def test_each_example_makes_its_own_steps(numbers: list[int]) -> None:
    expected = torch.tensor([_collatz(n) for n in numbers])
    torch.testing.assert_close(vmap(collatz)(torch.tensor(numbers)), expected)


def test_examples_that_are_done_leave_the_batch() -> None:
    sizes = []

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            sizes.append(1)  # the last one continues alone
            return x + 1

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def vmap(info: Any, in_dims: Any, x: torch.Tensor) -> Any:
            sizes.append(info.batch_size)
            return x + 1, in_dims[0]

    n = torch.tensor([1.0, 3.0, 0.0, 2.0])
    out = vmap(lambda n: while_loop(lambda c: c < n, Counted.apply, n * 0))(n)
    torch.testing.assert_close(out, n)
    assert sizes == [3, 2, 1]


def test_functions_take_the_carry_as_jax_and_as_torch_have_it() -> None:
    start = (torch.tensor(0), torch.tensor(1.0))
    as_jax = while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), start)
    as_torch = while_loop(lambda i, x: i < 3, lambda i, x: [i + 1, x * 2], start)
    assert as_jax == as_torch
    assert [x.item() for x in as_jax] == [3, 8.0]


def test_python_numbers_are_a_carry() -> None:
    assert while_loop(lambda n: n < 100, lambda n: n * 3, 1) == 243
    assert fori_loop(2, 5, lambda i, total: total + i, 0) == 9
    assert fori_loop(5, 2, lambda i, total: total + i, 0) == 0


@pytest.mark.parametrize("checkpoint", [None, "sqrt", "log"])
@pytest.mark.parametrize("steps", [0, 1, 2, 7, 20])
def test_the_gradient_of_a_checkpointed_loop_is_that_of_the_loop(
    checkpoint: Any, steps: int
) -> None:
    w = torch.tensor(0.9, dtype=torch.float64, requires_grad=True)

    def f(x: torch.Tensor) -> Any:
        def step(carry: Any) -> Any:
            return carry[0] + 1, (carry[1] * w).sin() + x

        start = (torch.tensor(0), x)
        return while_loop(lambda c: c[0] < steps, step, start, checkpoint=checkpoint)[1]

    x = torch.tensor([0.5, -0.3], dtype=torch.float64, requires_grad=True)
    y = x
    for _ in range(steps):
        y = (y * w).sin() + x
    expected = torch.autograd.grad(y.sum(), (x, w), allow_unused=True)
    found = torch.autograd.grad(f(x).sum(), (x, w), allow_unused=True)
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("checkpoint", "most"), [(None, 400), ("sqrt", 120), ("log", 60)])
def test_a_checkpointed_loop_keeps_fewer_values(checkpoint: Any, most: int) -> None:
    kept: set[int] = set()
    alive = 0
    peak = 0

    class Kept:
        def __init__(self, value: torch.Tensor) -> None:
            nonlocal alive, peak
            self.value = value
            alive += 1
            peak = max(peak, alive)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    x = torch.tensor(0.5, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.value):
        out = while_loop(
            lambda c: c[0] < 200, lambda c: (c[0] + 1, c[1].sin().cos()), (0, x),
            checkpoint=checkpoint,
        )  # fmt: skip
        out[1].backward()
    assert not kept
    assert peak <= most


def test_the_bounds_of_a_fori_loop_may_differ_from_example_to_example() -> None:
    x = torch.tensor([1.1, 0.5, 2.0], dtype=torch.float64)
    n = torch.tensor([0, 4, 2])

    def f(x: torch.Tensor, n: torch.Tensor) -> Any:
        return fori_loop(0, n, lambda i, c: c * x + i, x)

    def plain(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        c = x
        for i in range(int(n)):
            c = c * x + i
        return c

    expected = torch.stack([plain(a, b) for a, b in zip(x, n, strict=True)])
    torch.testing.assert_close(vmap(f)(x, n), expected)
    gradients = torch.stack([grad(plain)(a, b) for a, b in zip(x, n, strict=True)])
    torch.testing.assert_close(vmap(grad(f))(x, n), gradients)
    torch.testing.assert_close(specialize(vmap(grad(f)))(x, n), gradients)


@pytest.mark.parametrize("run", [lambda f: f, specialize], ids=["eager", "specialize"])
@pytest.mark.parametrize("upper", [-2, 0, torch.tensor(0)])
def test_a_range_without_numbers_makes_no_step(run: Any, upper: Any) -> None:
    def f(x: torch.Tensor) -> Any:
        return fori_loop(0, upper, lambda i, c: c + x[i], x.sum())

    x = torch.ones(3)
    assert run(f)(x) == 3
    assert run(grad(f))(x).tolist() == [1, 1, 1]
    assert run(vmap(f))(x.expand(2, 3)).tolist() == [3, 3]


def test_a_program_has_one_node_for_a_loop() -> None:
    s = specialize(lambda x: while_loop(lambda c: c.sum() < 100, lambda c: c * 2, x))
    torch.testing.assert_close(s(torch.ones(2)), torch.full((2,), 64.0))
    torch.testing.assert_close(s(torch.full((2,), 30.0)), torch.full((2,), 60.0))
    assert "while_loop" in str(s.program)
    assert s.cache_info().programs == 1


@pytest.mark.parametrize("run", [lambda f: f, specialize], ids=["eager", "specialize"])
def test_a_carry_that_changes_its_type_is_refused(run: Any) -> None:
    def f(x: torch.Tensor) -> Any:
        return while_loop(lambda c: c["x"].sum() < 5, lambda c: {"x": c["x"].repeat(2)}, {"x": x})

    with pytest.raises(TypeCheckError) as error:
        run(f)(torch.ones(2))
    assert "the carry: {'x': f32[2]}" in str(error.value)
    assert "the result of the body: {'x': f32[4]}" in str(error.value)
    assert "At result['x'] f32[2] has become f32[4]" in str(error.value)


WITHOUT_STEPS: dict[str, Any] = {
    "while_loop": lambda body, x: while_loop(lambda c: c.sum() < 0, body, x),
    "while_loop of entries": lambda body, x: while_loop(
        lambda c, d: c.sum() < 0, lambda c, d: (body(c), d), (x, 2.0)
    )[0],
    "fori_loop": lambda body, x: fori_loop(2, 2, lambda i, c: body(c), x),
    "fori_loop of tensors": lambda body, x: fori_loop(
        torch.tensor(3), torch.tensor(0), lambda i, c: body(c), x
    ),
    "with a checkpoint": lambda body, x: while_loop(
        lambda c: c.sum() < 0, body, x, checkpoint="sqrt"
    ),
    "of every example": lambda body, x: vmap(lambda n: fori_loop(0, n, lambda i, c: body(c), x))(
        torch.zeros(3, dtype=torch.long)
    )[0],
}


@pytest.mark.parametrize(
    "run", [lambda f: f, specialize, grad, vmap], ids=["eager", "specialize", "grad", "vmap"]
)
@pytest.mark.parametrize("loop", WITHOUT_STEPS.values(), ids=WITHOUT_STEPS)
def test_the_body_of_a_loop_without_steps_keeps_the_type_of_its_carry(run: Any, loop: Any) -> None:
    """A program's types do not depend on the number of steps."""
    x = torch.ones(4, 2) if run is vmap else torch.ones(2)
    calls: list[Any] = []

    def scalar(y: torch.Tensor) -> torch.Tensor:
        return y.sum() if run is grad else y

    def kept(c: torch.Tensor) -> torch.Tensor:
        calls.append(type(c))
        return c.cumsum(0) * x.sum()

    for _ in range(2):
        torch.testing.assert_close(run(lambda x: scalar(loop(kept, x)))(x), torch.ones_like(x))
    with pytest.raises(TypeCheckError, match=r"f32\[2\] has become f64\[2\]"):
        run(lambda x: scalar(loop(lambda c: c.double(), x)))(x)
    assert torch.Tensor not in calls  # the body was not run


def test_a_body_without_steps_may_refer_to_itself() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if callable(body) else x

    for _ in range(2):
        out = while_loop(lambda x: x < 0, body, torch.tensor(1.0))
        assert out.item() == 1.0


def test_a_loop_without_steps_does_not_check_a_body_that_reads_numbers() -> None:
    def fails(c: torch.Tensor) -> torch.Tensor:
        raise IndexError

    x = torch.ones(2)
    assert while_loop(lambda c: c.sum() < 0, lambda c: c.double() if c.sum() > 0 else c, x) is x
    assert while_loop(lambda c: c.sum() < 0, fails, x) is x


def test_invalid_bounds_and_policies_are_refused() -> None:
    with pytest.raises(TypeError, match="the bounds: expected integers, got a bool"):
        fori_loop(0, True, lambda i, c: c, 0)
    with pytest.raises(ValueError, match="checkpoint: expected None"):
        while_loop(lambda c: False, lambda c: c, 0, checkpoint="all")  # type: ignore[arg-type]


def test_a_mapped_loop_of_a_program_reads_tensors_from_outside() -> None:
    """An example's bound is not an argument of the program, which reads it anew."""
    bounds = torch.tensor([0, 2, 5])

    def f(n: torch.Tensor, x: torch.Tensor) -> Any:
        return fori_loop(0, n, lambda i, y: y.sin() * x, x)

    x = torch.randn(3)
    program = specialize(lambda x: vmap(f)(bounds, x))
    torch.testing.assert_close(program(x), vmap(f)(bounds, x))
    bounds[0] = 3
    torch.testing.assert_close(program(x), vmap(f)(bounds, x))
    tangent = specialize(lambda x: jvp(lambda x: vmap(f)(bounds, x), (x,), (x.cos(),)))(x)
    torch.testing.assert_close(tangent, jvp(lambda x: vmap(f)(bounds, x), (x,), (x.cos(),)))
