"""Schedulers that step inside of a specialized training step, and the numbers that they compute.

Each scheduler is compared with itself in eager mode, in double precision, and its programs are
counted. Numbers from outside are inputs; a branch by such a number has a program for each outcome.
"""

from __future__ import annotations

import copy
import math
import random
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim import lr_scheduler as S
from torch.optim.swa_utils import SWALR

from tsfunc import load, pytrees, specialize
from tsfunc.errors import DataDependentError, DescriptorViolation, RetraceWarning

Make = Callable[[Optimizer], Any]

# The first step makes the state of the optimizer, the second one has numbers as inputs. Each other
# program is for one outcome of a branch: a warm-up that ends, a milestone, a restart.
SCHEDULERS: dict[str, tuple[Make, int]] = {
    "LambdaLR": (lambda o: S.LambdaLR(o, lambda e: 1 / (1 + e)), 2),
    "LambdaLR, exp": (lambda o: S.LambdaLR(o, lambda e: math.exp(-0.1 * e)), 2),
    "LambdaLR, warm-up": (lambda o: S.LambdaLR(o, lambda e: min(1.0, (e + 1) / 5)), 3),
    "MultiplicativeLR": (lambda o: S.MultiplicativeLR(o, lambda e: 0.95), 2),
    "StepLR": (lambda o: S.StepLR(o, 5), 5),
    "MultiStepLR": (lambda o: S.MultiStepLR(o, [4, 8, 8, 15]), 6),
    "ConstantLR": (lambda o: S.ConstantLR(o, 0.3, 5), 4),
    "LinearLR": (lambda o: S.LinearLR(o, 0.3, 1.0, 5), 3),
    "ExponentialLR": (lambda o: S.ExponentialLR(o, 0.9), 2),
    "PolynomialLR": (lambda o: S.PolynomialLR(o, 10, 2.0), 3),
    "CosineAnnealingLR": (lambda o: S.CosineAnnealingLR(o, 6, 1e-3), 3),
    "CosineAnnealingWarmRestarts": (lambda o: S.CosineAnnealingWarmRestarts(o, 3, 2), 5),
    "CyclicLR": (lambda o: S.CyclicLR(o, 0.01, 0.1, 4, mode="triangular2"), 3),
    "CyclicLR, exp_range": (lambda o: S.CyclicLR(o, 0.01, 0.1, 4, mode="exp_range", gamma=0.9), 3),
    "OneCycleLR": (lambda o: S.OneCycleLR(o, 0.1, total_steps=25), 3),
    "OneCycleLR, linear": (
        lambda o: S.OneCycleLR(
            o, 0.1, total_steps=25, anneal_strategy="linear", three_phase=True
        ),
        4,
    ),
    "SequentialLR": (
        lambda o: S.SequentialLR(
            o, [S.LinearLR(o, 0.1, total_iters=5), S.CosineAnnealingLR(o, 30)], [5]
        ),
        5,
    ),
    "ChainedScheduler": (
        lambda o: S.ChainedScheduler([S.LinearLR(o, 0.1, total_iters=5), S.ExponentialLR(o, 0.9)]),
        3,
    ),
    "SWALR": (lambda o: SWALR(o, 0.05, anneal_epochs=5), 4),
    "SWALR, linear": (lambda o: SWALR(o, 0.05, anneal_epochs=5, anneal_strategy="linear"), 4),
}  # fmt: skip
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9),
    "AdamW, two groups": lambda m: AdamW(
        [{"params": m[0].parameters()}, {"params": m[2].parameters(), "lr": 0.03}], lr=0.01
    ),
}
STEPS = 20


def trained(make: Make, optimizer_of: Any, specialized: bool, steps: int) -> tuple[Any, int]:
    """Return the loss and all states after each step, and the number of programs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    optimizer = optimizer_of(model)
    scheduler = make(optimizer)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss

    f: Any = specialize(step) if specialized else step
    draw = torch.Generator().manual_seed(1)
    states = []
    for _ in range(steps):
        loss = f(torch.randn(6, 4, generator=draw, dtype=torch.float64))
        states.append((
            loss.detach().clone(),
            copy.deepcopy(model.state_dict()),
            copy.deepcopy(optimizer.state_dict()),
            copy.deepcopy(scheduler.state_dict()),
            scheduler.get_last_lr(),
        ))  # fmt: skip
    return states, f.cache_info().misses if specialized else 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_inside_of_the_step(name: str, optimizer: str) -> None:
    make, programs = SCHEDULERS[name]
    wanted, _ = trained(make, OPTIMIZERS[optimizer], False, STEPS)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RetraceWarning)
        found, made = trained(make, OPTIMIZERS[optimizer], True, STEPS)
    for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert_same(one, other, i)
    assert made == programs


@pytest.mark.parametrize("name", ["OneCycleLR", "LinearLR", "CosineAnnealingLR"])
def test_a_step_after_several_backward_passes(name: str) -> None:
    """A flag says when to step. The order of the gradients is that of earlier programs."""
    make, programs = SCHEDULERS[name]

    def run(specialized: bool) -> tuple[dict[str, Tensor], int]:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(3)]).double()
        optimizer = AdamW(model.parameters(), lr=0.01)
        scheduler = make(optimizer)

        def step(x: Tensor, last: bool) -> None:
            (model(x).square().mean() / 2).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()

        f = specialize(step) if specialized else step
        for i in range(30):
            f(torch.randn(4, 3, dtype=torch.float64), i % 2 == 1)
        return model.state_dict(), f.cache_info().programs if specialized else 0  # type: ignore[attr-defined]

    with warnings.catch_warnings():
        warnings.simplefilter("error", RetraceWarning)
        found, made = run(True)
    torch.testing.assert_close(found, run(False)[0])
    # One more is for the pass without a step.
    assert made == programs + 1


def assert_same(found: Any, wanted: Any, i: int) -> None:
    leaves, tree = pytrees.flatten(found)
    others, other_tree = pytrees.flatten(wanted)
    assert tree == other_tree, i
    for one, other in zip(leaves, others, strict=True):
        if isinstance(other, torch.Tensor | float):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
        elif not callable(other):
            assert one == other and type(one) is type(other), i


def test_a_scheduler_that_looks_at_the_loss_is_refused() -> None:
    param = nn.Parameter(torch.ones(2))
    scheduler = S.ReduceLROnPlateau(SGD([param], lr=0.1))

    def step(x: torch.Tensor) -> None:
        scheduler.step((param * x).sum().detach())

    with pytest.raises(DataDependentError, match="a trace has no data"):
        specialize(step)(torch.ones(2))


# --- functions of math of a number that varies

UNARY = ["sqrt", "cos", "cosh", "sin", "sinh", "tan", "tanh", "acos", "asin", "atan", "exp", "log",
         "log2"]  # fmt: skip


@pytest.mark.parametrize("name", UNARY)
def test_a_function_of_math_of_a_number_from_outside(name: str) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    draw = random.Random(seed)
    own = getattr(math, name)
    config = SimpleNamespace(rate=0.5)
    f = specialize(lambda x: x * getattr(math, name)(config.rate * 0.5) + math.log(config.rate, 3))
    x = torch.ones(2, dtype=torch.float64)
    for _ in range(5):
        config.rate = draw.uniform(0.1, 0.9)
        wanted = own(config.rate * 0.5) + math.log(config.rate, 3)
        torch.testing.assert_close(f(x), x * wanted, rtol=1e-12, atol=0)
    assert f.cache_info().programs == 2
    assert getattr(math, name) is own


def test_a_function_of_math_decides_a_branch() -> None:
    config = SimpleNamespace(angle=0)

    def f(x: torch.Tensor) -> torch.Tensor:
        return x if math.sin(config.angle) > 0.5 else -x

    s = specialize(f)
    x = torch.ones(2)
    for config.angle in range(2, 40):
        assert s(x).equal(f(x))
    assert s.cache_info().programs == 3


def test_members_of_math_are_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(rate=0.5)
    f = specialize(lambda x: x * math.cos(config.rate))
    x = torch.ones(2, dtype=torch.float64)
    for config.rate in (0.5, 0.6, 0.7):
        f(x)
    assert f.cache_info().misses == 2
    monkeypatch.setattr(math, "cos", lambda value: 2.0)
    assert f(x).equal(x * 2)


def test_a_number_outside_of_the_domain_raises_the_function_s_error() -> None:
    config = SimpleNamespace(rate=0.5)
    f = specialize(lambda x: x * math.log(config.rate))
    for config.rate in (0.5, 0.6, 0.7):
        f(torch.ones(2))
    config.rate = -1.0
    with pytest.raises(ValueError, match="math domain error"):
        f(torch.ones(2))


def test_a_guard_that_can_not_be_computed_does_not_hold() -> None:
    config = SimpleNamespace(count=0)

    def f(x: torch.Tensor) -> torch.Tensor:
        if config.count > 6:
            return x
        return x * 2 if 10 / (7 - config.count) < 3 else x * 3

    s = specialize(f)
    x = torch.ones(2)
    for config.count in (2, 3, 4, 5, 6, 7, 8, 9, 3, 7):
        assert s(x).equal(f(x))


# --- lookups of a number that varies

TABLE: dict[Any, float] = {3: 0.5, 6: 0.25, "final": 1.0}


def by_global_table(x: torch.Tensor, at: Any) -> torch.Tensor:
    if at.step not in TABLE:
        return x
    return torch.mul(x, TABLE[at.step])


def by_literal(x: torch.Tensor, at: Any) -> torch.Tensor:
    return -x if at.step in {3, 6} else x


def by_counter(x: torch.Tensor, at: Any) -> torch.Tensor:
    return torch.mul(x, at.counted[at.step])


def by_table_of_function(x: torch.Tensor, at: Any) -> torch.Tensor:
    table = {k: k * 2 for k in range(5)}
    return x * table[at.step] if at.step in table else x


def by_default(x: torch.Tensor, at: Any) -> torch.Tensor:
    return torch.mul(x, at.default[at.step])


def by_get(x: torch.Tensor, at: Any) -> torch.Tensor:
    return x * TABLE.get(at.step, 1)


LOOKUPS = {
    "a global dict": (by_global_table, 4),
    "a literal": (by_literal, 4),
    "a dict of the function": (by_table_of_function, 6),
    "dict.get": (by_get, None),
    "a Counter": (by_counter, None),
    "a defaultdict": (by_default, None),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_a_number_is_looked_up(name: str) -> None:
    f, programs = LOOKUPS[name]
    at, plain = (
        SimpleNamespace(step=0, counted=Counter([3, 3, 6]), default=defaultdict(int, {3: 2}))
        for _ in range(2)
    )
    s = specialize(lambda x: f(x, at))
    x = torch.ones(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RetraceWarning)
        for step in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 6, 3, 0):
            at.step = plain.step = step
            assert s(x).equal(f(x, plain))
            assert at.default == plain.default and at.counted == plain.counted
            assert all(type(key) is int for key in at.default)
    if programs is not None:
        assert s.cache_info().misses == programs


def test_numbers_that_vary_together_give_one_warning() -> None:
    at = SimpleNamespace(step=0, rate=0.1, seen={})

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.mul(x, TABLE.get(at.step, 1) * at.rate)

    s = specialize(f)
    with pytest.warns(RetraceWarning, match=r"at\.(step|rate) varies") as caught:
        for step in range(8):
            at.step, at.rate = step, 0.1 * step
            s(torch.ones(2))
    assert len(caught) == 1


def test_a_program_with_functions_of_math_is_saved(tmp_path: Path) -> None:
    def f(x: torch.Tensor, rate: float) -> torch.Tensor:
        return x * math.cos(rate) if math.exp(rate) > 1.2 else x

    s = specialize(f, {"rate": float})
    x = torch.ones(2, dtype=torch.float64)
    s(x, 0.3)
    s.save(tmp_path / "f.tsf")
    loaded = load(tmp_path / "f.tsf")
    torch.testing.assert_close(loaded(x, 0.7), x * math.cos(0.7))
    with pytest.raises(DescriptorViolation):
        loaded(x, 0.1)
