"""The training step in its usual form, inside of a specialized function.

Each test runs a step several times, plain and specialized, from the same start, and compares
results, parameters, buffers, gradients and the optimizer's state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

import tsfunc
from tsfunc.errors import DataDependentError, TypeCheckError

Step = Callable[[Tensor, Tensor], Any]
Make = Callable[[nn.Module], torch.optim.Optimizer]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1, fused=True)


class Trial:
    """A model with its optimizer, and everything that a training step changes.

    Args:
        make: makes the optimizer.
        model: the model; the default is a small network with batch normalization.
    """

    def __init__(self, make: Make = sgd, model: nn.Module | None = None) -> None:
        torch.manual_seed(0)
        self.model = model or nn.Sequential(
            nn.Linear(4, 5), nn.Tanh(), nn.BatchNorm1d(5), nn.Linear(5, 2)
        )
        self.optimizer = make(self.model)
        self.more: dict[str, Any] = {}

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.model(x) - y).square().mean()

    def state(self) -> Any:
        return {
            "model": copy.deepcopy(self.model.state_dict()),
            "grads": [None if p.grad is None else p.grad.clone() for p in self.model.parameters()],
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            **{name: copy.deepcopy(each.state_dict()) for name, each in self.more.items()},
        }


def run(
    make_step: Callable[[Trial], Step], trial: Trial, specialized: bool, between: Any, steps: int
) -> tuple[list[Any], list[Any], list[int]]:
    """Return the results and states after each step, and the number of programs so far."""
    step: Any = make_step(trial)
    f = tsfunc.specialize(step) if specialized else step
    draw = torch.Generator().manual_seed(1)
    results, states, programs = [], [], []
    for i in range(steps):
        x, y = torch.randn(6, 4, generator=draw), torch.randn(6, 2, generator=draw)
        out = f(x, y)
        results.append([leaf.detach().clone() for leaf in tsfunc.pytrees.leaves_of(out)])
        states.append(trial.state())
        if specialized:
            programs.append(f.cache_info().misses)
        if between is not None:
            between(trial, i)
    return results, states, programs


def check(
    make_step: Callable[[Trial], Step],
    trial: Callable[[], Trial] = Trial,
    between: Any = None,
    traces: Sequence[int] = (1, 2, 2, 2, 2),
    steps: int = 5,
) -> None:
    """Compare a plain step with its programs, and count the programs after each step."""
    wanted, states, _ = run(make_step, trial(), False, between, steps)
    found, same, programs = run(make_step, trial(), True, between, steps)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)
    assert_same(same, states)
    assert programs == list(traces)


def assert_same(found: Any, wanted: Any) -> None:
    """Compare states, which may contain more than tensors and numbers."""
    leaves, tree = tsfunc.pytrees.flatten(found)
    others, other_tree = tsfunc.pytrees.flatten(wanted)
    assert tree == other_tree
    for one, other in zip(leaves, others, strict=True):
        if isinstance(other, Tensor | float):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
        else:
            assert one == other


def plain(trial: Trial, set_to_none: bool = True) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        trial.optimizer.zero_grad(set_to_none=set_to_none)
        loss = trial.loss(x, y)
        loss.backward()
        trial.optimizer.step()
        return loss

    return step


# --- optimizers

O = torch.optim  # noqa: E741
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (O.SGD, {"lr": 0.1}),
    "SGD with momentum": (O.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "maximize": True}),
    "SGD with Nesterov's": (
        O.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    "Adam": (O.Adam, {"lr": 0.01}),
    "Adam with amsgrad": (O.Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    "AdamW": (O.AdamW, {"lr": 0.01}),
    "RMSprop": (O.RMSprop, {"momentum": 0.9, "centered": True}),
    "Adagrad": (O.Adagrad, {"lr_decay": 0.1}),
    "Adadelta": (O.Adadelta, {}),
    "Adamax": (O.Adamax, {}),
    "NAdam": (O.NAdam, {}),
    "Rprop": (O.Rprop, {}),
    "ASGD": (O.ASGD, {"t0": 2}),
    "RAdam": (O.RAdam, {}),
    "Adafactor": (O.Adafactor, {"lr": 0.1, "weight_decay": 0.1}),
}
# ASGD takes other branches from its third step on, by the number of steps in its state.
BRANCHES = {("ASGD", False): (1, 2, 2, 3, 4), ("ASGD", True): (1, 2, 2, 3, 3)}


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer(name: str, foreach: bool, set_to_none: bool) -> None:
    cls, options = OPTIMIZERS[name]
    check(
        lambda trial: plain(trial, set_to_none),
        lambda: Trial(lambda model: cls(model.parameters(), foreach=foreach, **options)),
        traces=BRANCHES.get((name, foreach), (1, 2, 2, 2, 2)),
    )


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "ASGD"])
def test_an_optimizer_with_a_backend(name: str) -> None:
    """The numbers that Adam and others compute of tensors are inputs of compiled code."""
    cls, options = OPTIMIZERS[name]
    trials = [Trial(lambda model: cls(model.parameters(), **options)) for _ in range(2)]
    compiled: Step = tsfunc.specialize(plain(trials[1]), backend="aot_eager")
    steps = [plain(trials[0]), compiled]
    for _ in range(3):
        x, y = torch.randn(6, 4), torch.randn(6, 2)
        wanted, found = [step(x, y).detach() for step in steps]
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)
    assert_same(trials[1].state(), trials[0].state())


def test_a_branch_by_a_count_of_steps() -> None:
    """Adaptive steps begin with the sixth."""
    check(plain, lambda: Trial(lambda model: O.RAdam(model.parameters())), steps=8,
          traces=(1, 2, 2, 2, 2, 3, 3, 3))  # fmt: skip


def test_a_branch_by_a_count_of_steps_beside_parameters_of_one_element() -> None:
    """The moments of the bias are tensors of one number, too, and depend on the gradient."""

    def trial() -> Trial:
        return Trial(lambda model: O.RAdam(model.parameters()), nn.Linear(4, 1))

    check(plain, trial, steps=8, traces=(1, 2, 2, 2, 2, 3, 3, 3))


@pytest.mark.parametrize("cls", [O.SGD, O.Adam, O.AdamW, O.Adagrad])
def test_a_fused_optimizer(cls: Any) -> None:
    check(plain, lambda: Trial(lambda model: cls(model.parameters(), lr=0.01, fused=True)))


def test_a_learning_rate_that_is_a_tensor() -> None:
    def trial() -> Trial:
        return Trial(lambda model: O.AdamW(model.parameters(), lr=torch.tensor(0.01)))

    def slower(trial: Trial, i: int) -> None:
        trial.optimizer.param_groups[0]["lr"].mul_(0.5)

    check(plain, trial, slower)


def test_groups_of_parameters() -> None:
    def grouped(model: Any) -> O.Optimizer:
        weights = {"params": [model[0].weight, model[3].weight], "weight_decay": 0.1}
        return O.Adam([weights, {"params": [model[0].bias, model[3].bias], "lr": 0.1}])

    check(plain, lambda: Trial(grouped))


def test_a_closure() -> None:
    def closed(trial: Trial) -> Step:
        def step(x: Tensor, y: Tensor) -> Any:
            def closure() -> Any:
                trial.optimizer.zero_grad()
                loss = trial.loss(x, y)
                loss.backward()
                return loss

            return trial.optimizer.step(closure)

        return step

    check(closed)


def test_an_optimizer_that_looks_at_the_loss_is_refused() -> None:
    trial = Trial(lambda model: O.LBFGS(model.parameters()))

    def step(x: Tensor, y: Tensor) -> Any:
        def closure() -> Any:
            trial.optimizer.zero_grad()
            loss = trial.loss(x, y)
            loss.backward()
            return loss

        return trial.optimizer.step(closure)

    before = trial.state()
    with pytest.raises(DataDependentError, match="a trace has no data"):
        tsfunc.specialize(step)(torch.randn(6, 4), torch.randn(6, 2))
    torch.testing.assert_close(trial.state(), before, rtol=0, atol=0)


# --- learning rates that change

SCHEDULERS: dict[str, Callable[[O.Optimizer], Any]] = {
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=10),
}


@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_outside(name: str, make: Make) -> None:
    def trial() -> Trial:
        made = Trial(make)
        made.more["scheduler"] = SCHEDULERS[name](made.optimizer)
        return made

    check(plain, trial, lambda trial, i: trial.more["scheduler"].step())


def test_a_learning_rate_that_decides_is_guarded() -> None:
    def decided(trial: Trial) -> Step:
        inner = plain(trial)

        def step(x: Tensor, y: Tensor) -> Any:
            large = trial.optimizer.param_groups[0]["lr"] > 0.05
            return inner(x, y) * (2 if large else 1)

        return step

    def slower(trial: Trial, i: int) -> None:
        trial.optimizer.param_groups[0]["lr"] *= 0.8

    check(decided, between=slower, traces=(1, 2, 2, 2, 3))


# --- gradients


def clipped(clip: Callable[[Any], Any]) -> Callable[[Trial], Step]:
    def of(trial: Trial) -> Step:
        def step(x: Tensor, y: Tensor) -> Any:
            trial.optimizer.zero_grad()
            loss = trial.loss(x, y)
            loss.backward()
            norm = clip(list(trial.model.parameters()))
            trial.optimizer.step()
            return [loss] if norm is None else [loss, norm]

        return step

    return of


CLIPS = {
    "norm": lambda p: nn.utils.clip_grad_norm_(p, 0.1),
    "norm, foreach": lambda p: nn.utils.clip_grad_norm_(p, 0.1, foreach=True),
    "norm that is checked": lambda p: nn.utils.clip_grad_norm_(p, 0.1, error_if_nonfinite=True),
    "largest": lambda p: nn.utils.clip_grad_norm_(p, 0.1, norm_type=float("inf")),
    "value": lambda p: nn.utils.clip_grad_value_(p, 0.01),
}


@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
def test_clipping(clip: Any) -> None:
    check(clipped(clip))


def test_accumulation_over_calls() -> None:
    def accumulated(trial: Trial) -> Step:
        def step(x: Tensor, y: Tensor) -> Any:
            loss = trial.loss(x, y)
            loss.backward()
            return loss

        return step

    def stepped(trial: Trial, i: int) -> None:
        if i % 2:
            trial.optimizer.step()
            trial.optimizer.zero_grad()

    check(accumulated)
    check(accumulated, between=stepped)


def test_several_passes_in_a_step() -> None:
    def twice(trial: Trial) -> Step:
        def step(x: Tensor, y: Tensor) -> Any:
            trial.optimizer.zero_grad()
            loss = trial.loss(x, y)
            loss.backward(retain_graph=True)
            (loss * 0.5).backward()
            other = trial.loss(x * 2, y)
            torch.autograd.backward([other, loss.detach().requires_grad_() * 2])
            trial.optimizer.step()
            return loss + other

        return step

    check(twice)


def test_gradients_that_are_assigned() -> None:
    def assigned(trial: Trial) -> Step:
        names = [name for name, _ in trial.model.named_parameters()]

        def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
            out: Tensor = tsfunc.functional_call(trial.model, params, (x,))
            return (out - y).square().mean()

        def step(x: Tensor, y: Tensor) -> Any:
            params = dict(trial.model.named_parameters())
            grads = tsfunc.grad(loss)(params, x, y)
            for name in names:
                params[name].grad = grads[name]
            trial.optimizer.step()
            return grads

        return step

    check(assigned)


def test_autograd_grad() -> None:
    def by_hand(trial: Trial) -> Step:
        def step(x: Tensor, y: Tensor) -> Any:
            params = dict(trial.model.named_parameters())
            loss = trial.loss(x, y)
            grads = torch.autograd.grad(loss, list(params.values()))
            with torch.no_grad():
                for p, g in zip(params.values(), grads, strict=True):
                    p.sub_(g, alpha=0.1)
            return loss, grads

        return step

    check(by_hand, traces=(1, 1, 1, 1, 1))


def test_gradients_of_gradients() -> None:
    def penalized(trial: Trial) -> Step:
        def step(x: Tensor, y: Tensor) -> Any:
            trial.optimizer.zero_grad()
            x = x.clone().requires_grad_()
            loss = trial.loss(x, y)
            (g,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + g.square().sum()).backward()
            trial.optimizer.step()
            return g

        return step

    check(penalized)


def test_grad_of_an_argument() -> None:
    def step(w: Tensor, x: Tensor) -> Tensor:
        loss = (w * x).square().sum()
        loss.backward()
        return loss

    f = tsfunc.specialize(step)
    w = torch.ones(3, requires_grad=True)
    x = torch.arange(3.0)
    for i in range(1, 4):
        f(w, x)
        assert w.grad is not None
        torch.testing.assert_close(w.grad, i * 2 * x * x)
    assert f.cache_info().misses == 2
    w.grad = None
    f(w, x)
    torch.testing.assert_close(w.grad, 2 * x * x)
    assert f.cache_info().misses == 2


def test_grads_keep_their_identity_where_they_are_written_in_place() -> None:
    trial = Trial()
    f = tsfunc.specialize(plain(trial, set_to_none=False))
    x, y = torch.randn(6, 4), torch.randn(6, 2)
    f(x, y)
    before = [p.grad for p in trial.model.parameters()]
    f(x, y)
    after = [p.grad for p in trial.model.parameters()]
    assert all(a is b for a, b in zip(before, after, strict=True))


# --- derivatives that remain possible by a result


def test_a_loss_whose_graph_is_freed_needs_no_gradient() -> None:
    trial = Trial()
    f = tsfunc.specialize(plain(trial))
    assert not f(torch.randn(6, 4), torch.randn(6, 2)).requires_grad


def test_a_result_that_no_pass_frees_is_differentiated() -> None:
    trial = Trial()

    def step(x: Tensor, y: Tensor) -> Any:
        trial.optimizer.zero_grad()
        trial.loss(x, y).backward()
        trial.optimizer.step()
        return trial.model(x).sum()

    x, y = torch.randn(6, 4), torch.randn(6, 2)
    out = tsfunc.specialize(step)(x, y)
    params = list(trial.model.parameters())
    buffers = copy.deepcopy(trial.model.state_dict())
    found = torch.autograd.grad(out, params)
    trial.model.load_state_dict(buffers)
    torch.testing.assert_close(found, torch.autograd.grad(trial.model(x).sum(), params))


def test_retained_gradients_and_hooks_inside() -> None:
    def hooked(trial: Trial) -> Step:
        first, *rest = trial.model.children()

        def step(x: Tensor, y: Tensor) -> Any:
            trial.optimizer.zero_grad()
            h = first(x)
            h.retain_grad()
            h.register_hook(lambda g: g * 2)
            out = h
            for each in rest:
                out = each(out)
            (out - y).square().mean().backward()
            trial.optimizer.step()
            return h.grad

        return step

    check(hooked)


# --- parameters


def test_tied_parameters() -> None:
    def tied() -> Trial:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
        model[2].weight = model[0].weight
        return Trial(model=model)

    check(plain, tied)


def test_frozen_parameters() -> None:
    def frozen() -> Trial:
        trial = Trial()
        next(trial.model.parameters()).requires_grad_(False)
        return trial

    check(plain, frozen)


def test_parameters_that_thaw() -> None:
    def frozen() -> Trial:
        trial = Trial()
        next(trial.model.parameters()).requires_grad_(False)
        return trial

    def thaw(trial: Trial, i: int) -> None:
        if i == 1:
            next(trial.model.parameters()).requires_grad_(True)

    check(plain, frozen, thaw, traces=(1, 2, 3, 4, 4))


def test_checkpoints() -> None:
    def checkpointed(trial: Trial) -> Step:
        def step(x: Tensor, y: Tensor) -> Any:
            trial.optimizer.zero_grad()
            loss = (checkpoint(trial.model, x, use_reentrant=False) - y).square().mean()
            loss.backward()
            trial.optimizer.step()
            return loss

        return step

    torch.manual_seed(0)
    check(checkpointed, lambda: Trial(model=nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))))


# --- mixed precision


def test_autocast() -> None:
    def cast(trial: Trial) -> Step:
        def step(x: Tensor, y: Tensor) -> Any:
            trial.optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = trial.loss(x, y)
            loss.backward()
            trial.optimizer.step()
            return loss

        return step

    check(cast)


def scaled(trial: Trial) -> Step:
    scaler = trial.more["scaler"]

    def step(x: Tensor, y: Tensor) -> Any:
        trial.optimizer.zero_grad()
        loss = trial.loss(x, y)
        scaler.scale(100 * loss).backward()
        scaler.unscale_(trial.optimizer)
        nn.utils.clip_grad_norm_(list(trial.model.parameters()), 0.1)
        scaler.step(trial.optimizer)
        scaler.update()
        return loss

    return step


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("make", [sgd, adamw, fused])
def test_a_scaler(make: Make, enabled: bool) -> None:
    def trial() -> Trial:
        made = Trial(make)
        made.more["scaler"] = torch.amp.GradScaler("cpu", enabled=enabled, init_scale=2.0**10)
        return made

    check(scaled, trial)


@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("first", [True, False])
def test_steps_that_a_scaler_skips(make: Make, first: bool) -> None:
    """A scale so large that gradients overflow until it has shrunk enough."""

    def trial() -> Trial:
        made = Trial(make)
        largest = 2.0 ** (127 if first else 100)
        made.more["scaler"] = torch.amp.GradScaler("cpu", init_scale=largest, backoff_factor=0.01)
        return made

    def overflow(trial: Trial, i: int) -> None:
        if i == 2 and not first:
            trial.more["scaler"].update(2.0**127)

    torch.testing.assert_close(
        *(run(scaled, trial(), is_program, overflow, 5)[0] for is_program in (True, False))
    )
    found, wanted = (
        run(scaled, trial(), is_program, overflow, 5)[1] for is_program in (True, False)
    )
    assert_same([each["model"] for each in found], [each["model"] for each in wanted])
    assert_same([each["scaler"] for each in found], [each["scaler"] for each in wanted])
    assert wanted[-1]["scaler"]["scale"] < 2.0**127  # it has skipped a step


# --- anomaly mode

ANOMALY = pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")


@ANOMALY
@pytest.mark.filterwarnings("ignore:Error detected in")
@pytest.mark.parametrize("outside", [True, False])
def test_anomaly_mode(outside: bool) -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = O.SGD([weight], lr=0.1)

    def step(x: Tensor) -> Tensor:
        with torch.autograd.set_detect_anomaly(torch.is_anomaly_enabled() or not outside):
            optimizer.zero_grad()
            loss = (weight * x).sqrt().sum()
            loss.backward()
            optimizer.step()
        return loss

    f = tsfunc.specialize(step)
    with torch.autograd.set_detect_anomaly(outside):
        f(torch.ones(2))
        f(torch.ones(2))
        before = weight.detach().clone()
        with pytest.raises(RuntimeError, match=r"'SqrtBackward0' returned nan.*in step\)"):
            f(torch.tensor([1.0, -1.0]))
    assert weight.equal(before)
    assert f.cache_info().misses == 2


@ANOMALY
def test_programs_of_both_modes() -> None:
    f = tsfunc.specialize(tsfunc.vmap(tsfunc.grad(lambda x: x.sqrt())))
    x = torch.tensor([1.0, -1.0])
    assert f(x).isnan().tolist() == [False, True]
    with torch.autograd.detect_anomaly():
        with pytest.raises(RuntimeError, match="'SqrtBackward0' returned nan"):
            f(x)
        torch.testing.assert_close(f(x.abs()), torch.full((2,), 0.5))
    with torch.autograd.detect_anomaly(check_nan=False):
        assert f(x).isnan().tolist() == [False, True]
    assert f(x).isnan().tolist() == [False, True]
    assert f.cache_info().misses == 3


# --- errors


def test_a_leaf_that_was_computed_before_is_refused() -> None:
    w = torch.ones(3, requires_grad=True)
    f = tsfunc.specialize(lambda x: x.square().sum().backward())
    with pytest.raises(TypeCheckError, match="x was computed before the call"):
        f(w * 2)
    assert w.grad is None


def test_the_function_s_own_error() -> None:
    trial = Trial()

    def step(x: Tensor) -> None:
        with torch.no_grad():
            loss = trial.model(x).sum()
        loss.backward()

    with pytest.raises(RuntimeError, match="does not require grad"):
        tsfunc.specialize(step)(torch.ones(6, 4))


def test_an_optimizer_that_decides_by_data_is_refused_in_plain_words() -> None:
    def clip(optimizer: Any, *_: Any) -> None:
        for p in optimizer.param_groups[0]["params"]:
            p.grad.mul_(sorted([1.0, 0.5 / p.grad.norm().item()])[0])

    trial = Trial()
    trial.optimizer.register_step_pre_hook(clip)
    step: Step = tsfunc.specialize(plain(trial))
    with pytest.raises(DataDependentError) as caught:
        step(torch.randn(6, 4), torch.randn(6, 2))
    message = str(caught.value)
    assert "<number of data>" in message and "_default" not in message
