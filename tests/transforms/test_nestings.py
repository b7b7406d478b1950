"""Functions with rules, checkpoints and control flow inside of each other, under nested transforms.

A nesting is a word, whose letters are applied from its end to a function of a vector. Each wrapper
leaves the function's derivatives as they are (or is plain Python's ``if`` or ``for`` instead), so
that the word is also one of torch.func's transforms of plain code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.func
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from tests.transforms.support import same
from tsfunc import (
    checkpoint,
    cond,
    custom_jvp,
    custom_vjp,
    grad,
    jvp,
    scan,
    specialize,
    vjp,
    vmap,
)

Map = Callable[[Tensor], Tensor]
Wrap = Callable[[Map], Map]

X = torch.tensor([0.3, -0.5, 0.9], dtype=torch.float64)
STEPS = torch.tensor([0.5, 0.75], dtype=torch.float64)


def smooth(x: Tensor) -> Tensor:
    return x.sin() * x + 0.3 * x.flip(0)


def with_vjp(f: Map) -> Map:
    wrapped = custom_vjp(lambda x: f(x))
    wrapped.defvjp(lambda x: (f(x), x), lambda x, ct: vjp(f, x)[1](ct))
    return wrapped


def with_jvp(f: Map) -> Map:
    wrapped = custom_jvp(lambda x: f(x))
    wrapped.defjvp(lambda primals, tangents: jvp(f, primals, tangents))
    return wrapped


def chosen(f: Map) -> Map:
    return lambda x: cond(x.sum() > 0.3, f, lambda y: f(y) * 0.5 - y, x)


def chosen_by_python(f: Map) -> Map:
    return lambda x: f(x) if bool(x.sum() > 0.3) else f(x) * 0.5 - x


def repeated(f: Map) -> Map:
    return lambda x: scan(lambda c, a: (f(c) * a, c), x, STEPS)[0]


def repeated_by_python(f: Map) -> Map:
    return lambda x: f(f(x) * 0.5) * 0.75


def batched(f: Map) -> Map:
    return lambda x: vmap(f)(torch.stack([x, 2 * x, -x])).sum(0)


def one_by_one(f: Map) -> Map:
    return lambda x: f(x) + f(2 * x) + f(-x)


def pushed(by: Any) -> Wrap:
    return lambda f: lambda x: by(f, (x,), (x.cos(),))[1]


def pulled(by: Any) -> Wrap:
    return lambda f: lambda x: by(lambda y: f(y).sin().sum())(x)


def itself(f: Map) -> Map:
    return f


# For each letter, the wrapper with tsfunc and the plain one.
LETTERS: dict[str, tuple[Wrap, Wrap]] = {
    "v": (with_vjp, itself),
    "j": (with_jvp, itself),
    "k": (checkpoint, itself),
    "c": (chosen, chosen_by_python),
    "s": (repeated, repeated_by_python),
    "V": (batched, one_by_one),
    "J": (pushed(jvp), pushed(torch.func.jvp)),
    "G": (pulled(grad), pulled(torch.func.grad)),
    "S": (specialize, itself),
}


def agrees(word: str) -> None:
    """Check that a word has the same result with tsfunc's wrappers and with plain ones."""
    ours: Map = smooth
    plain: Map = smooth
    for letter in reversed(word):
        ours, plain = LETTERS[letter][0](ours), LETTERS[letter][1](plain)
    same(ours(X), plain(X), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "word",
    [
        "Jj",  # a jvp in the rule of a function under jvp
        "JJj",
        "VJj",
        "GJj",
        "JvJ",  # a jvp in the function itself
        "JVvJ",
        "VJvJ",
        "JvkV",  # a checkpoint in the forward of a rule
        "JGvk",
        "Jjkv",
        "kJv",  # a checkpoint whose rerun is inside of its own jvp
        "kJG",
        "kJvV",
        "GkJvc",
        "GJkj",  # a rerun after its jvp has ended
        "GJJk",
        "GVjG",  # a gradient in a rule that is transposed
        "GVjGk",
        "JkvS",  # a trace in a checkpoint that checks for tangents
        "JSJk",
    ],
)
def test_nestings_that_meet_one_another_s_tangents(word: str) -> None:
    agrees(word)


@pytest.mark.parametrize("over", [lambda f: f, vmap, specialize], ids=["", "vmap", "specialize"])
def test_a_product_with_a_hessian_is_differentiated_by_its_direction(over: Any) -> None:
    """The tangent of the gradient depends on the direction, and the gradient does not."""

    def product(t: Tensor) -> Tensor:
        pushed: Tensor = jvp(grad(lambda x: smooth(x).sum()), (X,), (t,))[1]
        return (pushed * X).sum()

    want = torch.func.hessian(lambda x: smooth(x).sum())(X) @ X
    directions = torch.stack([X, X.cos()])
    if over is vmap:
        same(vmap(grad(product))(directions), torch.stack([want, want]))
    else:
        torch.testing.assert_close(over(grad(product))(directions[1]), want)


@given(
    st.tuples(st.text("VJGS", min_size=1, max_size=2), st.sampled_from("vjkcs"))
    | st.tuples(st.sampled_from("VJGS"), st.text("vjkcs", min_size=1, max_size=2))
)
@example(("G", "vk"))
def test_any_nesting(parts: tuple[str, str]) -> None:
    transforms, wrappers = parts
    agrees(transforms + wrappers)
