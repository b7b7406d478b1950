"""The body of a loop gets values of its own: its writes reach what it returns, and nothing else.

Each loop returns its result and the tensor that it began with. The reference is a Python loop whose
steps get copies of the carry and of the slices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.transforms.support import loop, same
from tsfunc import (
    associative_scan,
    fori_loop,
    grad,
    hessian,
    jacrev,
    jvp,
    pytrees,
    scan,
    specialize,
    vmap,
    while_loop,
)
from tsfunc.bridge.control.control_flow import ControlFlow

Loops = Any


class Plain:
    """Loops in Python, whose steps get copies."""

    @staticmethod
    def while_loop(going_on: Callable[..., Any], body: Callable[..., Any], carry: Any) -> Any:
        carry = _copied(carry)
        while going_on(carry):
            carry = _copied(body(_copied(carry)))
        return carry

    @staticmethod
    def fori_loop(first: int, end: Any, body: Callable[..., Any], carry: Any) -> Any:
        carry = _copied(carry)
        for i in range(first, int(end)):
            carry = _copied(body(i, _copied(carry)))
        return carry

    @staticmethod
    def scan(step: Callable[..., Any], carry: Any, xs: Tensor) -> Any:
        carry, ys = _copied(carry), []
        for x in xs:
            carry, y = _copied(step(_copied(carry), x.clone()))
            ys.append(y)
        return carry, torch.stack(ys)


class Ours:
    while_loop = staticmethod(while_loop)
    fori_loop = staticmethod(fori_loop)
    scan = staticmethod(scan)


def _copied(tree: Any) -> Any:
    """Copy the tensors of a tree, each on its own."""
    return pytrees.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, tree)


def _doubled(loops: Loops, x: Tensor, k: Tensor) -> Any:
    w = x * 1.0

    def body(carry: Any) -> Any:
        i, v = carry
        v.mul_(2.0)
        return i + 1, v

    return loops.while_loop(lambda carry: carry[0] < k, body, (k * 0, w))[1], w


def _shared(loops: Loops, x: Tensor, k: Tensor) -> Any:
    """A tensor that all examples share, of which each example fills a part of its own."""
    w = torch.zeros(5, dtype=x.dtype)

    def body(i: Any, v: Tensor) -> Tensor:
        v[i] = x[i] * k
        return v

    return loops.fori_loop(0, (k + 2).long(), body, w), w


def _of_a_number_of_steps(loops: Loops, x: Tensor, k: Tensor) -> Any:
    w = torch.zeros(5, 2, dtype=x.dtype)[:, 0]

    def body(i: Any, v: Tensor) -> Tensor:
        v[i] = x[i] * k
        return v

    return loops.fori_loop(0, 4, body, w), w


def _summed(loops: Loops, x: Tensor, k: Tensor) -> Any:
    w = x[0] * k

    def step(total: Tensor, y: Tensor) -> Any:
        total.add_(y)
        return total, total

    total, ys = loops.scan(step, w, x)
    return total, ys, w


def _slices(loops: Loops, x: Tensor, k: Tensor) -> Any:
    xs = x.sin()

    def step(total: Tensor, y: Tensor) -> Any:
        y.mul_(k + 2)
        return total + y, y

    total, ys = loops.scan(step, k * 1.0, xs)
    return total, ys, xs


def _swapped(loops: Loops, x: Tensor, k: Tensor) -> Any:
    w, u = x * 2.0, x.cos()

    def step(carry: Any, y: Tensor) -> Any:
        a, b = carry
        a.add_(y)
        return (b, a), a.sum()

    (a, b), ys = loops.scan(step, (w, u), x)
    return a, b, ys, w, u


def _twice(loops: Loops, x: Tensor, k: Tensor) -> Any:
    w = x + k

    def step(carry: Any, y: Tensor) -> Any:
        a, b = carry
        a[1:].add_(y)
        return (a, a), b.sum()

    (a, b), ys = loops.scan(step, (w, w), x)
    return a, b, ys, w


def _of_saved_values(loops: Loops, x: Tensor, k: Tensor) -> Any:
    w = x * 0.5

    def body(i: Any, v: Tensor) -> Tensor:
        u = v * k
        v.add_(u.sin())
        return v

    return loops.fori_loop(0, 3, body, w), w


def _nested(loops: Loops, x: Tensor, k: Tensor) -> Any:
    w = x * 1.0

    def body(carry: Any) -> Any:
        i, v = carry
        v = loops.fori_loop(0, 2, lambda j, u: u.add_(x * 0.1), v)
        return i + 1, v

    return loops.while_loop(lambda carry: carry[0] < k, body, (k * 0, w))[1], w


def _expanded(loops: Loops, x: Tensor, k: Tensor) -> Any:
    """Carries with expanded dims that are swapped in a nested loop."""
    w, u = x.expand(5), torch.zeros((), dtype=x.dtype).expand(5)

    def swap(carry: Any) -> Any:
        a, b = carry
        a.mul_(1.5)
        return b, a

    def body(i: Any, carry: Any) -> Any:
        return loops.fori_loop(0, 3, lambda j, inner: swap(inner), carry)

    a, b = loops.fori_loop(0, k.long() + 1, body, (w, u))
    return a, b, w, u


def _gaps(loops: Loops, x: Tensor, k: Tensor) -> Any:
    """A carry with gaps that a batched value is written into."""
    w, u = torch.zeros(5, 3, dtype=x.dtype)[:, 1], torch.ones(5, dtype=x.dtype)

    def body(i: Any, carry: Any) -> Any:
        a, b = carry
        b[:2] = x[1:3] * k
        a.mul_(0.5)
        return b, b.view(-1).clone()

    a, b = loops.fori_loop(0, 3, body, (w, u))
    return a, b, w, u


BODIES = [
    _doubled, _shared, _of_a_number_of_steps, _summed, _slices, _swapped, _twice,
    _of_saved_values, _nested, _expanded, _gaps,
]  # fmt: skip


def _with(loops: Loops, f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, k: tuple(f(loops, x, k))


def _total(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, k: sum((y.sin() * (1 + y)).sum() for y in f(x, k))


def _word(word: str, f: Callable[..., Any], dims: tuple[int, int], *, plain: bool) -> Any:
    """Apply transforms from the end of a word; V is a vmap."""
    sizes = iter((4, 3))
    for letter in reversed(word):
        if letter == "V":
            size = next(sizes)
            f = loop(f, size, dims) if plain else vmap(f, in_dims=dims)
        else:
            f = OF_LETTERS[letter](f)
    return f


def _pushed(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, k: jvp(lambda x: f(x, k), (x,), (x.cos(),))[1]


OF_LETTERS: dict[str, Callable[..., Any]] = {
    "G": lambda f: grad(_total(f)),
    "H": lambda f: hessian(_total(f)),
    "J": _pushed,
    "R": lambda f: lambda x, k: jacrev(lambda x: tuple(f(x, k)))(x),
}
WORDS = ("", "V", "VV", "G", "J", "VG", "GV", "VJ", "VH", "VR")


def _cells() -> list[Any]:
    """Return the words of each program; a backend that compiles runs the first words."""
    cells = [(word, program) for word in WORDS for program in ("eager", "python")]
    return [*cells, *[(word, "aot_eager") for word in ("", "V", "G", "VG")]]


def _inputs(word: str, dims: tuple[int, int]) -> tuple[Tensor, Tensor]:
    x = torch.randn(5, dtype=torch.float64)
    k: Any = torch.randint(0, 4, ()).double()
    for size in (4, 3)[: word.count("V")]:
        x = torch.stack([x * torch.randn((), dtype=torch.float64) for _ in range(size)], dims[0])
        k = torch.stack([torch.randint_like(k, 0, 4) for _ in range(size)], dims[1])
    return x, k


@pytest.mark.parametrize(("word", "program"), _cells())
@pytest.mark.parametrize("f", BODIES, ids=lambda f: f.__name__.strip("_"))
def test_a_loop_is_the_loop_on_copies(f: Callable[..., Any], word: str, program: str) -> None:
    dims = (int(torch.randint(-1, 1, ())), 0)
    x, k = _inputs(word, dims)
    before = x.clone()
    ours = _word(word, _with(Ours, f), dims, plain=False)
    if program != "eager":
        ours = specialize(ours, backend=program)
    same(ours(x, k), _word(word, _with(Plain, f), dims, plain=True)(x, k))
    same(x, before)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "program"])
def test_a_combination_may_write_into_its_arguments(compiled: bool) -> None:
    def sums(x: Tensor) -> Any:
        return associative_scan(lambda a, b: a.add_(b), x), x

    x = torch.randn(7, 2)
    run = specialize(sums) if compiled else sums
    same(run(x.clone()), (x.cumsum(0), x))


@pytest.mark.parametrize("checkpoint", [None, "sqrt", "log"])
def test_a_step_that_runs_again_gets_the_values_of_the_first_run(checkpoint: Any) -> None:
    def grown(x: Tensor) -> Tensor:
        def body(carry: Any) -> Any:
            i, v = carry
            v.mul_(1.5)
            return i + 1, v.sin()

        return while_loop(lambda c: c[0] < 6, body, (torch.tensor(0), x), checkpoint=checkpoint)[1]

    def plain(x: Tensor) -> Tensor:
        for _ in range(6):
            x = (x * 1.5).sin()
        return x

    x = torch.randn(5, dtype=torch.float64)
    want = grad(lambda x: plain(x).sum())(x)
    same(grad(lambda x: grown(x).sum())(x), want)
    same(specialize(grad(lambda x: grown(x).sum()))(x), want)


def test_a_program_copies_a_buffer_once_if_its_steps_own_it() -> None:
    def filled(x: Tensor) -> Tensor:
        def body(i: Any, v: Tensor) -> Tensor:
            v[i] = x * i
            return v

        return fori_loop(0, 8, body, torch.zeros(8, 3))

    def kept(x: Tensor) -> Any:
        return scan(lambda v, i: (v.add_(x), v), torch.zeros(3), torch.arange(4))

    for f, owned in ((filled, (0,)), (kept, ())):
        x = torch.randn(3)
        program = specialize(f)
        same(program(x), f(x))
        (body,) = [body for op in _control_flow(program) for body in op.bodies]
        assert body.owned == owned


def _control_flow(program: Any) -> list[Any]:
    (made,) = program.programs
    return [node.target for node in made.graph.nodes if isinstance(node.target, ControlFlow)]
