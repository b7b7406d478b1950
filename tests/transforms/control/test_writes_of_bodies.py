"""Bodies of control flow that write in place into tensors from outside of them.

Each example of a vmap has its own tensors, so a write changes those of the examples that run the
body, as in a loop over the examples: eagerly, in programs, and under derivatives.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tsfunc import cond, fori_loop, grad, jvp, load, psum, specialize, switch, vmap, while_loop

WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add_": lambda w, c: w.add_(c),
    "a slice": lambda w, c: w[0:2].mul_(c),
    "a number": lambda w, c: w[0].add_(c),
    "an item": lambda w, c: w.__setitem__(0, c),
    "a view of a view": lambda w, c: w.view(2, 3).T.sub_(c),
    "a copy": lambda w, c: w[1:3].copy_(w[3:5] + c),
    "a step": lambda w, c: w[::2].add_(c),
    "two writes": lambda w, c: (w.add_(c), w[1].mul_(2.0)),
    "a constant": lambda w, c: w[2:].fill_(0.5),
    "nothing": lambda w, c: None,
}
RUNS = ["cond", "switch", "while_loop", "fori_loop", "cond in cond", "cond in while_loop"]


def drawn(draw: random.Random, control: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function of x [6] and of the number k whose bodies write into a tensor."""
    writes = [WRITES[draw.choice(list(WRITES))] for _ in range(2)]
    view, operand = draw.random() < 0.3, draw.random() < 0.3

    def f(x: Tensor, k: Tensor) -> Tensor:
        w = (x * 2).view(2, 3).view(6) if view else x * k
        operands = (w,) if operand and control not in ("while_loop", "fori_loop") else ()

        def first(c: Tensor, *given: Tensor) -> Tensor:
            writes[0](given[0] if given else w, c)
            return c * 2 + w.sum() * 0.1 if not given else c * 2 + given[0].sum() * 0.1

        def second(c: Tensor, *given: Tensor) -> Tensor:
            writes[1](given[0] if given else w, c * 0.5)
            return c + 1

        c = x.sum()
        if control == "cond":
            c = cond(k > 0, first, second, c, *operands)
        elif control == "switch":
            branches = [first, second, lambda c, *given: c * 3]
            c = switch((k > 0).long() + (k > 1).long(), branches, c, *operands)
        elif control == "fori_loop":
            c = fori_loop(0, (k + 1).long(), lambda i, c: second(c), c)
        elif control == "cond in cond":

            def inner(c: Tensor, *given: Tensor) -> Any:
                return cond(k > 1, first, second, c, *given)

            c = cond(k > 0, inner, second, c, *operands)
        else:

            def step(carry: Any) -> Any:
                c, i = carry
                chosen = control == "cond in while_loop"
                return (cond(c > 1.0, first, second, c) if chosen else first(c)), i + 1

            c = while_loop(lambda carry: carry[1] < k + 1, step, (c, k * 0))[0]
        return (w * torch.arange(6.0)).sum() + c

    return f


def inputs(draw: random.Random) -> tuple[Tensor, Tensor, int]:
    size = draw.choice((2, 3, 5))
    x = torch.rand(size, 6, dtype=torch.float64)
    k = torch.tensor([float(draw.choice((0, 1, 2))) for _ in range(size)], dtype=torch.float64)
    return x, k, draw.choice((0, 1, -1))


def gradient(f: Callable[..., Tensor], x: Tensor, k: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(f(x, k), x)[0]


@pytest.mark.parametrize("program", [False, True], ids=["eager", "program"])
@pytest.mark.parametrize("control", RUNS)
def test_an_example_writes_into_its_own_tensors(control: str, program: bool) -> None:
    draw = random.Random(seed := random.randrange(10**9))
    print("seed", seed)
    torch.manual_seed(seed)
    for _ in range(2 if program else 6):
        f = drawn(draw, control)
        x, k, axis = inputs(draw)
        mapped = vmap(f, in_dims=(axis, 0))
        if program:
            mapped = specialize(mapped)
        expected = torch.stack([f(one, n) for one, n in zip(x, k, strict=True)])
        torch.testing.assert_close(mapped(x.movedim(0, axis), k), expected)


@pytest.mark.parametrize("program", [False, True], ids=["eager", "program"])
@pytest.mark.parametrize("tower", ["vmap of grad", "grad of vmap", "vmap of jvp", "grad", "jvp"])
def test_writes_are_differentiated(tower: str, program: bool) -> None:
    draw = random.Random(seed := random.randrange(10**9))
    print("seed", seed)
    torch.manual_seed(seed)
    f = drawn(draw, draw.choice(RUNS))
    x, k, axis = inputs(draw)
    v = torch.rand_like(x)
    moved = x.movedim(0, axis)
    gradients = torch.stack([gradient(f, one, n) for one, n in zip(x, k, strict=True)])

    def pushed(x: Tensor, k: Tensor, v: Tensor) -> Any:
        return jvp(lambda x: f(x, k), (x,), (v,))[1]

    expected: Any = gradients
    call: Callable[..., Any] = grad(f)
    args: tuple[Tensor, ...]
    if tower == "vmap of grad":
        call, args = vmap(grad(f), (axis, 0)), (moved, k)
    elif tower == "grad of vmap":
        call, args = grad(lambda x, k: vmap(f, (axis, 0))(x, k).sum()), (moved, k)
        expected = gradients.movedim(0, axis)
    elif tower == "vmap of jvp":
        call, args = vmap(pushed, (axis, 0, 0)), (moved, k, v)
        expected = (gradients * v).sum(1)
    elif tower == "grad":
        args, expected = (x[0], k[0]), gradients[0]
    else:
        call, args = pushed, (x[0], k[0], v[0])
        expected = (gradients[0] * v[0]).sum()
    torch.testing.assert_close((specialize(call) if program else call)(*args), expected)


def test_a_tensor_that_all_examples_share_is_not_written_by_some() -> None:
    def f(x: Tensor) -> Any:
        kept = torch.zeros(3)

        def write(x: Tensor) -> Tensor:
            kept[0:2].add_(1.0)
            return x

        return cond(x > 0, write, torch.neg, x) + kept.sum()

    x = torch.tensor([1.0, -1.0])
    with pytest.raises(RuntimeError, match=r"of shape \(3,\) that all examples share"):
        vmap(f)(x)
    with pytest.raises(RuntimeError, match=r"made outside|all examples share"):
        specialize(vmap(f))(x)
    torch.testing.assert_close(vmap(f)(x.abs()), torch.stack([f(one) for one in x.abs()]))


def test_examples_of_an_outer_vmap_share_the_tensors_of_an_inner_one() -> None:
    def f(x: Tensor, k: Tensor) -> Any:
        kept = x * 1.0
        return cond(k > 0, lambda: kept[0:2].add_(1.0), lambda: kept[0:2] * 2.0) + kept.sum()

    x, k = torch.rand(3, 4), torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    both = vmap(vmap(f), in_dims=(None, 0))
    expected = torch.stack(
        [torch.stack([f(a, n) for a, n in zip(x, row, strict=True)]) for row in k]
    )
    with pytest.raises(RuntimeError, match="all examples share"):
        both(x, k)
    torch.testing.assert_close(specialize(both)(x, k), expected)


@pytest.mark.parametrize("exchanged", [False, True], ids=["select", "a collective"])
@pytest.mark.parametrize("program", [False, True], ids=["eager", "program"])
def test_branches_that_all_examples_run_do_not_write(exchanged: bool, program: bool) -> None:
    def f(x: Tensor) -> Any:
        kept = x * 1.0

        def write(c: Tensor) -> Tensor:
            kept[0].add_(1.0)
            return c + psum(c, "i") if exchanged else c

        batching: Any = "subset" if exchanged else "select"
        return cond(x.sum() > 0, write, torch.neg, x.sum(), batching=batching) + kept.sum()

    mapped = vmap(f, axis_name="i")
    with pytest.raises(RuntimeError, match="run every branch"):
        (specialize(mapped) if program else mapped)(torch.tensor([[1.0, 2.0], [-1.0, -2.0]]))


def test_a_tensor_from_outside_is_one_for_all_examples() -> None:
    runs = torch.zeros(())

    def write(x: Tensor) -> Tensor:
        runs.add_(1.0)
        return x

    vmap(lambda x: cond(x > 0, write, torch.neg, x))(torch.tensor([1.0, -1.0, 2.0]))
    assert runs == 1


def test_two_views_of_the_whole_batch_have_parts_of_their_own() -> None:
    def f(x: Tensor) -> Any:
        kept = x * 1.0
        part = kept[0:2]

        def write(c: Tensor) -> Tensor:
            kept.add_(1.0)
            return c + part.sum()

        return cond(x.sum() > 0, write, torch.neg, x.sum()) + kept.sum()

    x = torch.tensor([[1.0, 2.0, 3.0], [-1.0, -2.0, -3.0]])
    with pytest.raises(RuntimeError, match="uses by another view"):
        vmap(f)(x)


@pytest.mark.parametrize("read", [Tensor.detach, lambda kept: kept.detach()[0], Tensor.t])
@pytest.mark.parametrize("control", ["cond", "fori_loop", "while_loop"])
def test_a_program_reads_a_write_by_another_tensor_of_that_memory(
    control: str, read: Callable[[Tensor], Tensor]
) -> None:
    def f(x: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        kept = x * 2.0
        other = read(kept)

        def write(total: Tensor) -> Tensor:
            kept.add_(1.0)
            return total + other.sum()

        total = x.new_zeros(())
        if control == "cond":
            return cond(n > 0, write, torch.neg, total), kept
        if control == "fori_loop":
            return fori_loop(0, n, lambda i, carry: write(carry), total), kept
        state = while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, write(s[1])), (n - 2, total))
        return state[1], kept

    x, n = torch.randn(2, 3), torch.tensor(2)
    torch.testing.assert_close(specialize(f)(x, n), f(x, n))


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("view", [torch.positive, Tensor.detach, lambda kept: kept[0]])
def test_a_program_reads_a_write_by_a_tensor_from_outside_of_that_memory(
    view: Callable[[Tensor], Tensor], given: bool
) -> None:
    def by_arguments(x: Tensor, kept: Tensor, other: Tensor) -> Tensor:
        def write() -> Tensor:
            kept.add_(1.0)
            return cond(x.sum() > 0, lambda: other.sum() + kept.sum(), lambda: other.sum())

        return cond(x.max() > 0, write, lambda: other.sum() * 3.0)

    def run(x: Tensor, program: bool) -> tuple[Tensor, Tensor]:
        kept = torch.ones(2, 3)
        other = view(kept)
        f = by_arguments if given else lambda x: by_arguments(x, kept, other)
        tensors = (x, kept, other) if given else (x,)
        return (specialize(f) if program else f)(*tensors), kept

    for x in (torch.ones(2), torch.tensor([1.0, -2.0]), -torch.ones(2)):
        torch.testing.assert_close(run(x, program=True), run(x, program=False))


@pytest.mark.parametrize("control", ["cond", "fori_loop"])
def test_arguments_that_begin_to_share_memory_get_a_program_of_their_own(
    control: str, tmp_path: Path
) -> None:
    def f(x: Tensor, y: Tensor, n: Tensor) -> Tensor:
        def write(total: Tensor) -> Tensor:
            x.add_(1.0)
            return total + y

        if control == "cond":
            return cond(n > 0, write, torch.neg, torch.zeros(3))
        return fori_loop(0, n, lambda i, total: write(total), torch.zeros(3))

    def calls(g: Callable[..., Tensor]) -> list[Tensor]:
        x, n = torch.arange(3.0), torch.tensor(2)
        k, both = x.clone(), torch.arange(6.0)
        out = [g(x, x.clone(), n), g(k, k, n), g(both[:3], both[3:], n), x, k, both]
        return [*out, *vmap(g, in_dims=(0, 0, None))(torch.ones(2, 3), torch.ones(2, 3), n)]

    program = specialize(f)
    torch.testing.assert_close(calls(program), calls(f))
    assert "x, y, n do not share memory" in program.guards
    program.save(tmp_path / "f.tsf", exact=True)
    torch.testing.assert_close(calls(load(tmp_path / "f.tsf")), calls(f))
