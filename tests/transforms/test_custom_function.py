"""autograd.Function: every level goes through its backward, whatever its forward's own is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.func
from torch import Tensor

import tsfunc
from tests.transforms.support import Api, as_torch_func, same

X = torch.arange(12.0).view(3, 4).sin()
W = torch.arange(4.0).cos()
S = torch.tensor(0.7)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    # Not the derivative, to tell who was asked.
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * 4.5 * x**2  # type: ignore[no-any-return]

    @staticmethod
    def jvp(ctx: Any, t: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return t * 7 * x  # type: ignore[no-any-return]

    generate_vmap_rule = True


class WithVmap(Cube):
    generate_vmap_rule = False

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return Cube.apply(x) * info.batch_size, in_dims[0]  # type: ignore[no-untyped-call]


class Clipped(torch.autograd.Function):
    """Two inputs, one of them no tensor; two outputs, one without a derivative."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, limit: float) -> tuple[Tensor, Tensor]:
        return (x * w).clamp(max=limit), x > limit

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, w, ctx.limit = inputs
        ctx.save_for_backward(x, w)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Any) -> Any:
        x, w = ctx.saved_tensors
        return g * w * ctx.limit, (g * x).sum() if w.dim() == 0 else g * x, None

    generate_vmap_rule = True


class OldStyle(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = 4.5
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * ctx.factor * x**2  # type: ignore[no-any-return]


def total(func: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: func(*args).sum()


FUNCTIONS: dict[str, Callable[[Api, Any], Any]] = {
    "vmap": lambda T, f: T.vmap(f)(X),
    "vmap(vmap)": lambda T, f: T.vmap(T.vmap(f))(X),
    "grad": lambda T, f: T.grad(total(f))(W),
    "vmap(grad)": lambda T, f: T.vmap(T.grad(total(f)))(X),
    "grad(vmap)": lambda T, f: T.grad(total(T.vmap(f)))(X),
    "grad(vmap(vmap))": lambda T, f: T.grad(total(T.vmap(T.vmap(f))))(X),
    "grad(grad)": lambda T, f: T.grad(total(T.grad(total(f))))(W),
    "grad(vmap(grad))": lambda T, f: T.grad(total(T.vmap(T.grad(total(f)))))(X),
    "vmap(grad(vmap))": lambda T, f: T.vmap(T.grad(total(T.vmap(f))))(X),
    "grad(vmap(grad(vmap)))": lambda T, f: T.grad(total(T.vmap(T.grad(total(T.vmap(f))))))(X),
    "vmap(grad(grad))": lambda T, f: T.vmap(T.grad(total(T.grad(total(f)))))(X),
    "jacrev": lambda T, f: T.jacrev(f)(W),
    "jacrev(jacrev)": lambda T, f: T.jacrev(T.jacrev(f))(W),
    "jvp": lambda T, f: T.jvp(f, (W,), (W,)),
    "vmap(jvp)": lambda T, f: T.vmap(lambda x: T.jvp(f, (x,), (x,)))(X),
    "jvp(vmap)": lambda T, f: T.jvp(T.vmap(f), (X,), (X,)),
    "jacfwd": lambda T, f: T.jacfwd(f)(W),
    "grad(jvp)": lambda T, f: T.grad(lambda x: T.jvp(f, (x,), (x,))[1].sum())(W),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("cls", [Cube, WithVmap])
def test_custom_function(cls: Any, name: str) -> None:
    as_torch_func(lambda T: FUNCTIONS[name](T, cls.apply))


@pytest.mark.parametrize("at", [0, None])
def test_custom_function_of_several(at: int | None) -> None:
    w = W[:3] if at == 0 else S

    def build(T: Api) -> Any:
        mapped = T.vmap(lambda x, w: Clipped.apply(x, w, 0.4), in_dims=(0, at))  # type: ignore[no-untyped-call]
        value = mapped(X[:, :3], w)
        grads = T.grad(lambda x, w: mapped(x, w)[0].sum(), argnums=(0, 1))(X[:, :3], w)
        inner = T.grad(lambda x, w: Clipped.apply(x, w, 0.4)[0].sum(), argnums=(0, 1))  # type: ignore[no-untyped-call]
        return value, grads, T.vmap(inner, in_dims=(0, at))(X[:, :3], w)

    as_torch_func(build)


def test_custom_function_and_backward() -> None:
    for cls in (Cube, OldStyle):
        leaf = X.clone().requires_grad_()
        tsfunc.vmap(cls.apply)(leaf).sum().backward()
        same(leaf.grad, 4.5 * X**2)


def test_old_style_custom_function() -> None:
    f = OldStyle.apply
    same(tsfunc.vmap(f)(X), X**3)
    same(tsfunc.vmap(tsfunc.grad(total(f)))(X), 4.5 * X**2)
    same(tsfunc.grad(total(tsfunc.vmap(f)))(X), 4.5 * X**2)
    same(tsfunc.grad(total(tsfunc.vmap(tsfunc.vmap(f))))(X), 4.5 * X**2)
    with pytest.raises(RuntimeError, match=r"OldStyle.apply: .* must override the setup_context"):
        tsfunc.grad(total(tsfunc.vmap(tsfunc.grad(total(f)))))(X)


def test_custom_function_marks_dirty() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.mark_dirty(x)
            return x.mul_(2)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * 2

    with pytest.raises(RuntimeError, match="mark_dirty under vmap"):
        tsfunc.grad(total(tsfunc.vmap(lambda x: Doubled.apply(x.clone()))))(X)  # type: ignore[no-untyped-call]
