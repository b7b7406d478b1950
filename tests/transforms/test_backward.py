"""``backward()`` inside of transforms: leaves of the function get gradients, others do not."""

from __future__ import annotations

import traceback
from typing import Any

import optree
import pytest
import torch

import tsfunc
from tsfunc import specialize, vmap

Tensor = torch.Tensor

X, Y = torch.randn(20, 3), torch.randn(20, 1)
WEIGHTS = torch.randn(4, 3, 1)
OPTIMIZERS = [
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad,
]  # fmt: skip
TRANSFORMED = {
    "vmap": lambda f: vmap(f),
    "vmap in chunks": lambda f: vmap(f, chunk_size=3),
    "split": lambda f: vmap(f, data_dependent="split"),
    "specialize(vmap)": lambda f: specialize(vmap(f)),
    "vmap(specialize)": lambda f: vmap(specialize(f)),
    "vmap(vmap)": lambda f: lambda x: optree.tree_map(lambda y: y[0], vmap(vmap(f))(x[None])),
}


def by_loop(f: Any, x: Tensor) -> Any:
    return optree.tree_map(lambda *each: torch.stack(each), *[f(row) for row in x])


@pytest.mark.parametrize("transformed", TRANSFORMED.values(), ids=TRANSFORMED)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_with_an_optimizer_is_mapped_over(optimizer: Any, transformed: Any) -> None:
    def train(weight: Tensor) -> Any:
        weight = weight.detach().clone().requires_grad_()
        steps = optimizer([weight], lr=0.1)
        for _ in range(3):
            steps.zero_grad()
            loss = (X @ weight - Y).square().mean()
            loss.backward()
            steps.step()
        return weight.detach(), loss.detach(), weight.grad

    torch.testing.assert_close(transformed(train)(WEIGHTS), by_loop(train, WEIGHTS))


@pytest.mark.parametrize("transformed", TRANSFORMED.values(), ids=TRANSFORMED)
def test_it_accumulates_calls_hooks_and_takes_its_arguments(transformed: Any) -> None:
    def f(x: Tensor) -> Any:
        def leaf() -> Tensor:
            return x.detach().clone().requires_grad_()

        a, b, c = leaf(), leaf(), leaf()
        a.register_hook(lambda g: 2 * g)
        loss = (a**3).sum()
        loss.backward(retain_graph=True)
        first = a.grad.clone()  # type: ignore[union-attr]
        loss.backward(inputs=[a])
        torch.autograd.backward([b.sum(), b * b], [torch.tensor(2.0), torch.ones_like(b)])
        (again,) = torch.autograd.grad((c**3).sum(), c, create_graph=True)
        again.sum().backward()
        return first, a.grad, b.grad, c.grad

    torch.testing.assert_close(transformed(f)(WEIGHTS), by_loop(f, WEIGHTS))


PARAMETER = torch.ones(3, 1, requires_grad=True)
REFUSED = {
    "an argument": lambda x: x.sum().backward(),
    "a parameter": lambda x: (x * PARAMETER).sum().backward(),
    "one beside a leaf": lambda x: (
        (x.detach().clone().requires_grad_() * PARAMETER).sum().backward()
    ),
    "one by name": lambda x: (x.requires_grad_() * PARAMETER).sum().backward(inputs=[PARAMETER]),
}


@pytest.mark.parametrize("transform", [vmap, lambda f: specialize(vmap(f))], ids=["", "traced"])
@pytest.mark.parametrize("f", REFUSED.values(), ids=REFUSED)
def test_tensors_that_outlive_the_function_get_no_gradient(f: Any, transform: Any) -> None:
    with pytest.raises(RuntimeError, match=r"backward\(\) was called inside of .*outlive it"):
        transform(f)(WEIGHTS)
    assert PARAMETER.grad is None


def test_nor_does_an_argument_that_is_recorded_outside() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        leaf = w.detach().clone().requires_grad_()
        (leaf * x).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    x = WEIGHTS.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="of nothing else that requires gradients"):
        vmap(f)(x, WEIGHTS)
    torch.testing.assert_close(vmap(f)(x.detach(), WEIGHTS), x.detach())


def test_the_error_for_a_factory_leaf_shows_how_to_make_it() -> None:
    def trained(y: Tensor, made: Any) -> Any:
        weight = made(y)
        ((weight - y) ** 2).sum().backward()
        return weight.grad

    with pytest.raises(RuntimeError, match=r"write x.new_zeros\(3\).requires_grad_\(\)"):
        vmap(lambda y: trained(y, lambda y: torch.zeros(3, requires_grad=True)))(torch.ones(2, 3))
    found = vmap(lambda y: trained(y, lambda y: y.new_zeros(3).requires_grad_()))(torch.ones(2, 3))
    torch.testing.assert_close(found, torch.full((2, 3), -2.0))


DERIVATIVES: dict[str, Any] = {
    "grad": lambda f: tsfunc.grad(f),
    "vjp": lambda f: lambda x: tsfunc.vjp(f, x),
    "jacrev": lambda f: tsfunc.jacrev(f),
    "grad(grad)": lambda f: tsfunc.grad(lambda x: tsfunc.grad(f)(x).sum()),
    "specialize(grad)": lambda f: specialize(tsfunc.grad(f)),
}


@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
def test_it_is_refused_for_a_tensor_that_a_transform_differentiates(derivative: Any) -> None:
    layer = torch.nn.Linear(3, 1)

    def f(x: Tensor) -> Tensor:
        loss: Tensor = layer(x).sin().sum()
        loss.backward(retain_graph=True)
        return loss

    with pytest.raises(RuntimeError, match=r"called inside a functorch transform") as refused:
        derivative(f)(torch.randn(3))
    assert any(frame.name == "f" for frame in traceback.extract_tb(refused.value.__traceback__))


def test_leaves_of_a_differentiated_function_get_gradients() -> None:
    def f(x: Tensor) -> Tensor:
        weight = torch.ones(3, requires_grad=True)
        (weight.sin() * 2).sum().backward()
        assert weight.grad is not None
        return (x * weight.grad).sum()

    same = tsfunc.grad(f)(torch.randn(3))
    torch.testing.assert_close(same, 2 * torch.ones(3).cos())
