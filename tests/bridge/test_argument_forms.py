"""Calls with a function rule: each form of their arguments agrees with the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tsfunc import grad, vmap
from tsfunc.bridge.tracers.function_registry import Stage, registry

Function = Callable[[torch.Tensor], Any]
X = torch.linspace(-2, 2, 120, dtype=torch.float64).reshape(5, 4, 6).sin()
L1_LOSS: Any = F.l1_loss  # torch's annotation lacks the weights
WITHOUT_DIMS = torch.tensor(0.5, dtype=torch.float64)

FORMS: dict[str, Function] = {
    "sum": lambda x: x.sum(),
    "sum of one dim": lambda x: x.sum(-1),
    "sum of dims": lambda x: torch.sum(x, (0, 1)),
    "sum of no dims": lambda x: x.sum(()),
    "sum, kept": lambda x: x.sum(0, True),
    "sum by name": lambda x: x.sum(dim=1, keepdim=True),
    "sum, kept by name": lambda x: torch.sum(x, [0], keepdim=True),
    "sum in another type": lambda x: x.sum(0, dtype=torch.float32),
    "mean": lambda x: torch.mean(x),
    "mean by name": lambda x: x.mean(dim=(0, 1)),
    "amax": lambda x: x.amax(1),
    "amin of all": lambda x: x.amin(),
    "logsumexp": lambda x: x.logsumexp(0),
    "softmax": lambda x: x.softmax(0),
    "softmax by name": lambda x: torch.softmax(x, dim=-1),
    "log_softmax in another type": lambda x: x.log_softmax(1, dtype=torch.float64),
    "cumsum": lambda x: x.cumsum(0),
    "cumprod by name": lambda x: torch.cumprod(x, dim=1),
    "reshape": lambda x: x.reshape(6, 4),
    "reshape to a tuple": lambda x: torch.reshape(x, (2, -1)),
    "reshape to a size": lambda x: x.reshape(x.mT.shape),
    "view": lambda x: x.view(-1),
    "view as a type": lambda x: x.view(torch.int64),
    "expand": lambda x: x[:1].expand(3, -1, -1, 6) if x.dim() == 3 else x.expand(2, 4, 6),
    "permute": lambda x: x.permute(1, 0),
    "permute by a tuple": lambda x: torch.permute(x, (1, 0)),
    "flip": lambda x: x.flip(0, 1),
    "flip by a list": lambda x: torch.flip(x, [1]),
    "transpose": lambda x: x.transpose(0, -1),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "unsqueeze at the end": lambda x: torch.unsqueeze(x, -1),
    "squeeze": lambda x: x[:1].squeeze(0),
    "squeeze of all": lambda x: x[:1, None].squeeze(),
    "flatten": lambda x: x.flatten(),
    "flatten of some": lambda x: x[None].flatten(0, 1),
    "an index": lambda x: x[1],
    "an index from the end": lambda x: x[-1, 2:5:2],
    "an ellipsis": lambda x: x[..., 0],
    "a new dim": lambda x: x[None, :, None, 3],
    "a list of indices": lambda x: x[[0, 2]],
    "a mask": lambda x: torch.where(x > 0, x, x * 2),
    "a mask and a number": lambda x: torch.where(x > 0, x, 0.0),
    "two numbers by a mask": lambda x: torch.where(x > 0, 1.0, 0.0),
    "numbers of two types by a mask": lambda x: torch.where(x > 0, x, 2),
    "a mask by method": lambda x: x.where(x > 0, x * 2),
    "a mask by method and a number": lambda x: x.where(x > 0, 2),
    "a mask by method and a tensor without dims": lambda x: x.where(x > 0, WITHOUT_DIMS),
    "a mask by method of each row": lambda x: WITHOUT_DIMS.where(x[:1] > 0, x),
    "a mask by method and by name": lambda x: x.where(condition=x > 0, other=x * 2),
    "a number that is copied": lambda x: torch.zeros_like(x).copy_(2),  # type: ignore[arg-type]
    "a number that is copied to a view": lambda x: (x * 1)[1:].copy_(True),  # type: ignore[arg-type]
    "a loss with weights": lambda x: L1_LOSS(x, x * 2 + 1, reduction="none", weight=x.cos()),
    "a mean loss with weights": lambda x: L1_LOSS(x, x.sin() - 1, weight=x.cos() + 2),
    "indices": lambda x: x[torch.tensor([0, -1, 2])],
    "indices of the second dim": lambda x: x[:, torch.tensor([[0, 1], [3, 3]])],
    "indices after an ellipsis": lambda x: x[..., torch.tensor([1, 0])],
    "indices of each example": lambda x: x[x.sum(-1).argsort(0)],
    "indices of two dims": lambda x: x[x.sum(-1).argsort(0)[:3], torch.tensor([1, 2, 0])],
    "indices that are no neighbours": lambda x: x[None][[0, 0], :, x[:2, 0].argsort()],
    "an index that is a tensor": lambda x: x[torch.tensor(1)],
    "a mask as an index": lambda x: x[torch.tensor([True, False, True, True])],
    "a real part": lambda x: torch.complex(x, x * 2).real,
    "an imaginary part": lambda x: torch.complex(x, x * 2).conj().imag,
    "a part of a real tensor": lambda x: x.real,
    "a cast": lambda x: x.float(),
    "a cast to the same type": lambda x: x.double() * 2,
    "a cast to integers": lambda x: (x * 10).long(),
    "a narrowed one": lambda x: x.narrow(1, 2, 3),
    "selected": lambda x: x.select(1, -1),
    "softmax of torch.nn": lambda x: F.softmax(x, -1),
    "log_softmax of torch.nn by name": lambda x: F.log_softmax(x, dim=0),
    "a roll": lambda x: torch.roll(x, (1, 2), (0, 1)),
    "a list of tensors": lambda x: torch.cat([x, x * 2], -1),
    "a list of two kinds of tensors": lambda x: torch.stack([x, torch.ones_like(x).cos()]),
    "an overload by name": lambda x: torch.ops.aten.slice.Tensor(x, dim=1, start=2, end=5),
    "an overload with a keyword": lambda x: torch.ops.aten.var.correction(x, [0], correction=0),
    "an overload with all by name": lambda x: torch.ops.aten._softmax(
        self=x, dim=-1, half_to_float=False
    ),
    "a composite": lambda x: torch.kron(x, x[:2]),
    "a transpose": lambda x: x.T @ x,
    "a matrix transpose": lambda x: x.mT + 1,
    "mm": lambda x: torch.mm(x, x.t()),
    "mv": lambda x: x.mv(x[0]),
    "dot": lambda x: x[0].dot(x[1]),
    "add by name": lambda x: torch.add(x, x, alpha=3),
    "div by name": lambda x: torch.div(x, 0.3, rounding_mode="floor"),
}


def loop(f: Function, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([f(row) for row in x])


@pytest.mark.parametrize("name", FORMS)
def test_each_form_equals_the_loop(name: str) -> None:
    f = FORMS[name]
    expected = loop(f, X)
    torch.testing.assert_close(vmap(f)(X), expected)
    torch.testing.assert_close(vmap(f, in_dims=1)(X.movedim(0, 1)), expected)
    if not name.startswith("view"):
        torch.testing.assert_close(vmap(f, in_dims=2)(X.movedim(0, 2).contiguous()), expected)
    pairs = X.reshape(5, 1, 4, 6).expand(5, 2, 4, 6).contiguous()
    nested = vmap(vmap(f))(pairs)
    torch.testing.assert_close(nested, torch.stack([expected, expected], 1))


@pytest.mark.parametrize("name", [name for name in FORMS if name != "view as a type"])
def test_gradients_pass_through(name: str) -> None:
    def total(x: torch.Tensor) -> Any:
        return FORMS[name](x).double().square().sum()

    expected = torch.stack([grad(total)(row) for row in X])
    torch.testing.assert_close(vmap(grad(total))(X), expected)
    torch.testing.assert_close(vmap(grad(total), data_dependent="split")(X), expected)
    torch.testing.assert_close(grad(lambda x: vmap(total)(x).sum())(X), expected)


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "an index": lambda y: y[1].add_(1),
    "part of a view": lambda y: y.view(-1)[3:9:2].mul_(2),
    "a transpose": lambda y: y.T[0].zero_(),
    "a new dim": lambda y: y.unsqueeze(0)[0, 1:].sub_(3),
    "a view of a view": lambda y: y[1:].transpose(0, 1)[2].fill_(5),
    "reshaped": lambda y: y.reshape(2, 12)[1].neg_(),
    "flattened": lambda y: y.flatten()[5:7].exp_(),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_into_views_reach_the_tensor_of_nested_levels(name: str) -> None:
    """Views that rules of the inner level take are views of the outer level's tensors."""

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        WRITES[name](y)
        return y

    pairs = torch.stack([X, X.cos()], 1)
    expected = torch.stack([loop(f, X), loop(f, X.cos())], 1)
    torch.testing.assert_close(vmap(vmap(f))(pairs), expected)
    torch.testing.assert_close(vmap(vmap(f, 1, 1))(pairs.movedim(1, 2)), expected.movedim(1, 2))


@pytest.mark.parametrize("inner", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_an_error_in_a_hook_is_raised_at_once(error: type[Exception], inner: bool) -> None:
    """A call that raises is not tried on another path, which would run its hooks again."""
    calls = []

    def pack(x: torch.Tensor) -> Any:
        calls.append(x)
        raise error("no more")

    def hooked(f: Function) -> Function:
        def run(x: torch.Tensor) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                return f(x)

        return run

    sines = vmap(hooked(torch.sin)) if inner else hooked(vmap(torch.sin))
    with pytest.raises(error, match="no more"):
        sines(X.clone().requires_grad_())
    assert len(calls) == 1
    with pytest.raises(error, match="no more"):
        vmap(grad(hooked(lambda x: (x * x).sum())))(X)


def test_calls_of_wrong_shapes_are_refused_by_torch() -> None:
    for f in (lambda x, y: x + y, torch.mul, lambda x, y: torch.sub(x, y, alpha=2)):
        with pytest.raises(RuntimeError, match="must match the size of tensor"):
            vmap(f)(torch.ones(2, 3), torch.ones(2, 4))
        with pytest.raises(RuntimeError, match="must match the size of tensor"):
            vmap(grad(lambda x, y, f=f: f(x, y).sum()))(torch.ones(2, 3), torch.ones(2, 4))


@pytest.mark.parametrize("name", WRITES)
def test_writes_into_views_reach_the_tensor(name: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        WRITES[name](y)
        return y

    torch.testing.assert_close(vmap(f)(X), loop(f, X))
    torch.testing.assert_close(vmap(f, in_dims=2)(X.movedim(0, 2).contiguous()), loop(f, X))


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (lambda x: x[4], "index 4 is out of bounds for dimension 0 with size 4"),
        (lambda x: x[0, 0, 0], "too many indices for tensor of dimension 2"),
        (lambda x: x.sum(2), r"expected to be in range of \[-2, 1\], but got 2"),
        (lambda x: x.unsqueeze(4), r"expected to be in range of \[-3, 2\], but got 4"),
    ],
)
def test_errors_count_the_dims_of_an_example(f: Function, message: str) -> None:
    with pytest.raises(IndexError, match=message):
        vmap(f)(X)


def may_view(function: Any) -> bool:
    rule = registry.find(Stage.BATCHING, function)
    assert rule is not None
    return rule.view


def test_operators_that_return_views_are_marked() -> None:
    assert may_view(torch.Tensor.__getitem__) and may_view(torch.Tensor.view)
    assert not may_view(torch.sin)
