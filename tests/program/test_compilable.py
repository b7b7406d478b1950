"""Operators that torch's compilers refuse, or compute with less precision, in programs."""

from __future__ import annotations

import copy
import functools
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tsfunc

pytestmark = pytest.mark.filterwarnings(  # inductor's import
    "ignore:`torch.jit.script_method` is deprecated"
)
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="Inductor needs gcc")
BACKENDS = ["aot_eager", pytest.param("inductor", marks=[needs_gcc, pytest.mark.slow])]

O = torch.optim  # noqa: E741
FUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (O.SGD, {"lr": 0.1}),
    "SGD with momentum": (O.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "maximize": True}),
    "SGD with Nesterov's": (
        O.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    "Adam": (O.Adam, {}),
    "Adam with amsgrad": (O.Adam, {"amsgrad": True, "weight_decay": 0.1, "maximize": True}),
    "Adam with a rate in a tensor": (O.Adam, {"lr": torch.tensor(0.01), "weight_decay": 0.1}),
    "AdamW": (O.AdamW, {"amsgrad": True}),
    "Adagrad": (O.Adagrad, {"lr_decay": 0.1, "weight_decay": 0.1, "maximize": True}),
}


class Training:
    """A linear model in float64 with a fused optimizer, and everything that a step changes."""

    def __init__(self, cls: Any, options: dict[str, Any], scaled: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 2).double()
        self.optimizer = cls(self.model.parameters(), fused=True, **options)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.scaled = scaled

    def step(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss: Tensor = self.model(x).square().mean()
        if self.scaled:
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call, unused-ignore]
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            loss.backward()
            self.optimizer.step()
        return loss

    def state(self) -> Any:
        grads = [p.grad for p in self.model.parameters()]
        parts = self.model.state_dict(), grads, self.optimizer.state_dict()["state"]
        return copy.deepcopy((*parts, self.scaler.state_dict()))


def check_steps(name: str, backend: str, scaled: bool, inputs: list[Tensor]) -> None:
    ours, plain = (Training(*FUSED[name], scaled) for _ in range(2))
    program = tsfunc.specialize(lambda x: ours.step(x), backend=backend)
    for x in inputs:
        same = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12, equal_nan=True)
        same(program(x), plain.step(x))
        same(ours.state(), plain.state())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FUSED)
def test_a_fused_optimizer(name: str, backend: str) -> None:
    check_steps(name, backend, False, [torch.randn(6, 4).double() for _ in range(3)])


@pytest.mark.parametrize("name", ["SGD with momentum", "Adam with amsgrad", "Adagrad"])
def test_a_fused_optimizer_that_scales_gradients(name: str) -> None:
    """A step whose gradients are not finite changes no parameter and no state."""
    inputs = [torch.randn(6, 4).double() for _ in range(4)]
    inputs[2][0] = torch.inf
    check_steps(name, "aot_eager", True, inputs)


OPERATORS: dict[str, Callable[..., Tensor]] = {
    "addcmul": lambda x, a, b, n: torch.addcmul(x, a, b, value=n),
    "addcdiv": lambda x, a, b, n: torch.addcdiv(x, a, b, value=n),
    "addcmul_": lambda x, a, b, n: x.clone().addcmul_(a, b, value=n),
    "addcdiv_": lambda x, a, b, n: x.clone().addcdiv_(a, b, value=n),
    "add": lambda x, a, b, n: torch.add(x, a, alpha=n),
    "add_": lambda x, a, b, n: x.clone().add_(b, alpha=n),
    "sub": lambda x, a, b, n: torch.sub(x, a, alpha=n),
    "sub_": lambda x, a, b, n: x.clone().sub_(b, alpha=n),
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_factor_that_was_read_from_a_tensor_has_its_precision(backend: str) -> None:
    def f(x: Tensor, a: Tensor, b: Tensor, t: Tensor) -> list[Tensor]:
        factor = t.clone()
        number = factor.sum().item()
        other = factor.item()
        factor.zero_()  # the number stays
        results = [operator(x, a, b, number) for operator in OPERATORS.values()]
        return results + [operator(x, a, b, other) for operator in OPERATORS.values()]

    x, a, b, t = (torch.rand(shape).double() + 1 for shape in (4, 4, 4, ()))
    t = t / 3
    program = tsfunc.specialize(f, backend=backend)
    torch.testing.assert_close(program(x, a, b, t), f(x, a, b, t), rtol=1e-14, atol=1e-14)


SIZED: dict[str, Callable[[Tensor], Tensor]] = {
    "a mask": lambda x: x[x > 0].sin(),
    "nonzero": lambda x: torch.zeros(x.nonzero().shape[0]) + 1,
    "unique": torch.unique,
    "repeat_interleave": lambda x: x.repeat_interleave(torch.tensor([1, 2, 0, 1, 1, 3])),
    "an item": lambda x: torch.full((3,), x.abs().sum().item()),
}


@pytest.mark.parametrize("name", SIZED)
def test_sizes_of_data_with_a_backend(name: str) -> None:
    """A program without named dims has symbols for sizes of data, too."""
    program = tsfunc.specialize(SIZED[name], backend="aot_eager")
    for _ in range(3):
        x = torch.randn(6)
        torch.testing.assert_close(program(x), SIZED[name](x))
    assert len(program.programs) == 1
