"""Optimizers as functions: the same steps as torch's own, under every transform."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tsfunc import functional_optimizer, grad, scan, specialize, vmap
from tsfunc.bridge.tracers import optimizer_state as bridge

O = torch.optim  # noqa: E741
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (O.SGD, {"lr": 0.1}),
    "SGD with momentum": (O.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adam": (O.Adam, {"lr": 0.1}),
    "Adam with amsgrad": (O.Adam, {"lr": 0.1, "amsgrad": True, "weight_decay": 0.1}),
    "Adam, foreach": (O.Adam, {"lr": 0.1, "foreach": True}),
    "AdamW": (O.AdamW, {"lr": 0.1}),
    "RMSprop": (O.RMSprop, {"momentum": 0.9, "centered": True}),
    "Adagrad": (O.Adagrad, {"lr_decay": 0.1}),
    "Adadelta": (O.Adadelta, {}),
    "Adamax": (O.Adamax, {}),
    "NAdam": (O.NAdam, {}),
    "Rprop": (O.Rprop, {}),
    "RAdam": (O.RAdam, {}),
    "ASGD": (O.ASGD, {"t0": 1}),
    "Muon": (O.Muon, {}),
}
STEPS = 7


DRAW = torch.Generator().manual_seed(0)
START = {"w": torch.randn(3, 2, generator=DRAW), "v": torch.randn(2, 2, generator=DRAW)}


def start() -> dict[str, Tensor]:
    return {name: value.clone() for name, value in START.items()}


def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return ((x @ params["w"]).tanh() @ params["v"]).square().mean()


def by_torch(name: str, x: Tensor) -> dict[str, Tensor]:
    cls, options = OPTIMIZERS[name]
    params = {key: value.requires_grad_() for key, value in start().items()}
    optimizer = cls(list(params.values()), **options)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(params, x).backward()
        optimizer.step()
    return {key: value.detach() for key, value in params.items()}


def looped(name: str, x: Tensor) -> Any:
    cls, options = OPTIMIZERS[name]
    optimizer = functional_optimizer(cls, **options)
    params: Any = start()
    state = optimizer.init(params)
    for _ in range(STEPS):
        params, state = optimizer.step(params, grad(loss)(params, x), state)
    return params


def scanned(name: str, x: Tensor) -> Any:
    cls, options = OPTIMIZERS[name]
    optimizer = functional_optimizer(cls, **options)

    def body(carry: Any, _: Any) -> Any:
        params, state = carry
        return optimizer.step(params, grad(loss)(params, x), state), None

    params = start()
    (params, _), _ = scan(body, (params, optimizer.init(params)), None, length=STEPS)
    return params


XS = torch.randn(3, 5, 3, generator=torch.Generator().manual_seed(1))
FORMS: dict[str, Any] = {
    "loop": lambda name, xs: [looped(name, x) for x in xs],
    "scan": lambda name, xs: [scanned(name, x) for x in xs],
    "vmap": lambda name, xs: vmap(lambda x: looped(name, x))(xs),
    "vmap of scan": lambda name, xs: vmap(lambda x: scanned(name, x))(xs),
    "specialized vmap": lambda name, xs: specialize(vmap(lambda x: looped(name, x)))(xs),
    "specialized scan": lambda name, xs: [specialize(lambda x: scanned(name, x))(xs[0])],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_torch(name: str, form: str) -> None:
    found = FORMS[form](name, XS)
    if isinstance(found, dict):
        found = [{key: value[i] for key, value in found.items()} for i in range(len(XS))]
    for params, x in zip(found, XS, strict=False):
        torch.testing.assert_close(params, by_torch(name, x), rtol=1e-4, atol=1e-5)


# torch's differentiable RAdam returns NaN before its sixth step, ASGD raises an error, and Muon and
# foreach steps are not differentiable.
NOT_DIFFERENTIABLE = ("RAdam", "ASGD", "Muon", "Adam, foreach")


@pytest.mark.parametrize("name", [x for x in OPTIMIZERS if x not in NOT_DIFFERENTIABLE])
def test_derivatives_go_through_differentiable_steps(name: str) -> None:
    cls, options = OPTIMIZERS[name]
    optimizer = functional_optimizer(cls, **{**options, "lr": 0.01}, differentiable=True)
    x = XS[0].double()
    params = {key: value.double() for key, value in start().items()}

    def outer(params: dict[str, Tensor]) -> Tensor:
        state = optimizer.init(params)
        for _ in range(3):
            params, state = optimizer.step(params, grad(loss)(params, x), state)
        return loss(params, x)

    draw = torch.Generator().manual_seed(2)
    along = {
        key: torch.randn(value.shape, generator=draw, dtype=torch.float64)
        for key, value in params.items()
    }
    ahead, behind = (
        outer({key: value + h * along[key] for key, value in params.items()}) for h in (1e-6, -1e-6)
    )
    exact = grad(outer)(params)
    slope = torch.stack([(exact[key] * along[key]).sum() for key in exact]).sum()
    torch.testing.assert_close(slope, (ahead - behind) / 2e-6, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(specialize(grad(outer))(params), exact)
    batch = {key: torch.stack([value, value]) for key, value in params.items()}
    torch.testing.assert_close(vmap(grad(outer))(batch)["w"][1], exact["w"])


def test_a_step_of_maml_by_hand() -> None:
    w = torch.tensor([1.0, 2.0], dtype=torch.float64)
    for differentiable, wanted in (
        (True, 3 * (w - 0.3 * w**2) ** 2 * (1 - 0.6 * w)),
        (False, 0 * w),
    ):
        sgd = functional_optimizer(O.SGD, lr=0.1, differentiable=differentiable)

        def outer(w: Tensor, sgd: Any = sgd) -> Any:
            return (sgd.step(w, 3 * w**2, sgd.init(w))[0] ** 3).sum()

        torch.testing.assert_close(grad(outer)(w), wanted)


def test_learning_rates_by_example() -> None:
    optimizer = functional_optimizer(O.Adam)
    params, rates = start(), torch.tensor([0.1, 0.01])

    def step(lr: Tensor) -> Any:
        return optimizer.step(params, grad(loss)(params, XS[0]), optimizer.init(params), lr=lr)[0]

    found = vmap(step)(rates)
    for i, rate in enumerate(rates):
        torch.testing.assert_close(found["w"][i], step(rate)["w"])


def test_the_arguments_stay_unchanged() -> None:
    optimizer = functional_optimizer(O.Adam)
    params = start()
    grads = grad(loss)(params, XS[0])
    state = optimizer.init(params)
    after, _ = optimizer.step(params, grads, state)
    torch.testing.assert_close(params, start(), rtol=0, atol=0)
    assert state["w"]["step"] == 0
    assert not state["w"]["exp_avg"].any()
    assert not after["w"].equal(params["w"])


def test_a_gradient_that_is_none_leaves_the_parameter() -> None:
    optimizer = functional_optimizer(O.SGD, lr=0.1)
    params = start()
    after, _ = optimizer.step(params, {"w": None, "v": params["v"]}, optimizer.init(params))
    assert after["w"].equal(params["w"])
    torch.testing.assert_close(after["v"], params["v"] * 0.9)


def test_state_that_the_first_gradient_makes() -> None:
    """With dampening, the first momentum is the whole gradient."""
    optimizer = functional_optimizer(O.SGD, lr=0.1, momentum=0.9, dampening=0.5)
    params = start()
    state = optimizer.init(params)
    assert state == {"w": {"momentum_buffer": None}, "v": {"momentum_buffer": None}} or state == {
        "w": {}, "v": {},
    }  # fmt: skip
    _, state = optimizer.step(params, params, state)
    torch.testing.assert_close(state["w"]["momentum_buffer"], params["w"])


def test_an_optimizer_without_a_function_for_its_state() -> None:
    class Plain(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float = 0.5) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["count"] = self.state[p].get("count", 0) + 1
                    p.add_(p.grad, alpha=-group["lr"])

    optimizer = functional_optimizer(Plain)
    params = torch.ones(2)
    state = optimizer.init(params)
    assert state == {}
    for i in range(2):
        params, state = optimizer.step(params, params, state)
        assert state == {"count": i + 1}
    assert params.tolist() == [0.25, 0.25]


def test_errors() -> None:
    with pytest.raises(TypeError, match="expected a class of optimizers"):
        functional_optimizer(O.Adam([torch.ones(1, requires_grad=True)]))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"LBFGS\.step needs a closure"):
        functional_optimizer(O.LBFGS)
    optimizer = functional_optimizer(O.SGD, lr=0.1)
    text = r"grads must have the structure of params: expected .*, got \{'w': \*\}\.$"
    with pytest.raises(ValueError, match=text):
        optimizer.step(start(), {"w": torch.ones(3, 2)}, optimizer.init(start()))
    with pytest.raises(TypeError, match=r"functional_optimizer\(SGD, lr=0.1\).*got rate"):
        optimizer.step(start(), start(), optimizer.init(start()), rate=0.1)
    momentum = functional_optimizer(O.SGD, lr=0.1, momentum=0.9)
    params = {"w": torch.ones(3)}
    with pytest.raises(TypeError, match=r"None for grads\['w'\], got dict.*params, grads, state"):
        momentum.step(params, momentum.init(params), params)
    with pytest.raises(TypeError, match=r"for state\['w'\], got Tensor"):
        momentum.step(params, params, params)
    with pytest.raises(ValueError, match=r"grads\['w'\] of shape \(3,\).*got \(2,\)"):
        momentum.step(params, {"w": torch.ones(2)}, momentum.init(params))


def test_the_bridge_finds_the_states_of_all_optimizers() -> None:
    for cls, _ in OPTIMIZERS.values():
        param = torch.ones(2, 2, requires_grad=True)
        param.grad = torch.ones(2, 2)
        optimizer = cls([param], lr=0.1)
        with torch.no_grad():
            bridge.make_state(optimizer)
        before = set(optimizer.state[param])
        optimizer.step()
        assert before == set(optimizer.state[param]) or cls is O.SGD
