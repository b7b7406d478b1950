"""An ``autograd.Function`` that computes in NumPy, with a vmap rule, under towers of transforms.

The law: a custom function whose rules are true is the function itself. The same tower of torch.func
over the plain function is the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_leaves

import tsfunc

Function = Callable[..., Any]


class Product(torch.autograd.Function):
    """``x * y * y`` of tensors of one shape."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy() * y.numpy() * y.numpy())

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        x, y = ctx.saved_tensors
        ones = torch.ones_like(x)
        return product(cotangents[0], y), 2 * product(x, ones) * y * cotangents[0]

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return product(tangents[0], y) + 2 * x * y * tangents[1]

    @staticmethod
    def vmap(info: Any, in_dims: Any, *operands: Tensor) -> Any:
        return product(*map(_batched, operands, in_dims, [info.batch_size] * 2)), 0


def product(x: Any, y: Any) -> Any:
    apply: Any = Product.apply
    return apply(x, y)


def _batched(x: Tensor, bdim: int | None, size: int) -> Tensor:
    return x.expand(size, *x.shape) if bdim is None else x.movedim(bdim, 0)


def in_numpy(x: Tensor, y: Tensor) -> Any:
    return product(x.sin(), y) + x


def plain(x: Tensor, y: Tensor) -> Tensor:
    return x.sin() * y * y + x


def total(func: Function) -> Function:
    return lambda *args: sum(leaf.sin().sum() for leaf in tree_leaves(func(*args)))


def directions(args: Sequence[Tensor], mapped: Sequence[bool]) -> tuple[list[Tensor], Any]:
    """Return tangents, some of them two in front, and the dims of these."""
    tangents = [
        torch.stack([x.cos(), x]) if two else x.cos() for x, two in zip(args, mapped, strict=True)
    ]
    return tangents, tuple(0 if two else None for two in mapped)


def wrapped(lib: ModuleType, func: Function, transform: str, detail: Any) -> Function:
    """Return a function of two tensors, transformed."""
    if transform == "vmap":
        return lib.vmap(func, in_dims=detail)
    if transform in ("jacfwd", "jacrev"):
        return getattr(lib, transform)(func, argnums=detail)
    if transform == "grad":
        return lib.grad(total(func), argnums=detail)

    def along(*args: Tensor) -> Any:
        tangents, dims = directions(args, detail)
        return lib.vmap(lambda *tangents: lib.jvp(func, args, tangents), dims)(*tangents)

    def back(*args: Tensor) -> Any:
        out, pull = lib.vjp(total(func), *args)
        return lib.vmap(pull)(torch.stack([torch.ones_like(out), 2 * torch.ones_like(out)]))

    return along if transform == "jvp" else back


SOME = [(0, 0), (0, 1), (1, 0), (0, None), (None, 1)]
LAYERS = st.one_of(
    st.tuples(st.just("vmap"), st.sampled_from(SOME)),
    st.tuples(st.sampled_from(["jacfwd", "jacrev", "grad"]), st.sampled_from([0, 1])),
    st.tuples(st.just("jvp"), st.sampled_from([(True, True), (True, False), (False, True)])),
    st.tuples(st.just("vjp"), st.none()),
)


def arguments(layers: Sequence[tuple[str, Any]]) -> list[Tensor]:
    """Return arguments of a tower, whose innermost function takes vectors of three numbers."""
    shapes = [[3], [3]]
    for size, (transform, dims) in enumerate(reversed(layers), start=2):
        for shape, dim in zip(shapes, dims if transform == "vmap" else (), strict=False):
            if dim is not None:
                shape.insert(dim, size)
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


@given(st.lists(LAYERS, min_size=1, max_size=3))
def test_a_function_in_numpy_is_the_function(layers: list[tuple[str, Any]]) -> None:
    def of(lib: ModuleType, func: Function) -> Function:
        for layer in reversed(layers):
            func = wrapped(lib, func, *layer)
        return func

    args = arguments(layers)
    got, want = of(tsfunc, in_numpy)(*args), of(torch.func, plain)(*args)
    torch.testing.assert_close(tree_leaves(got), tree_leaves(want))
