"""nn.Modules under vmap and grad: per-example gradients, ensembles, captured parameters."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.func
import torch.nn.functional as nnf
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import tsfunc
from tests.transforms.support import same
from tsfunc import functional_call, stack_module_state, vmap

Call = Callable[[nn.Module, Any, Tensor], Tensor]


def plainly(module: nn.Module, params: Any, x: Tensor) -> Tensor:
    return functional_call(module, params, (x,))


def first(module: nn.Module, params: Any, x: Tensor) -> Tensor:
    return functional_call(module, params, (x,))[0]


def attends(module: nn.Module, params: Any, x: Tensor) -> Tensor:
    return functional_call(module, params, (x, x, x))[0]


def without_weights(module: nn.Module, params: Any, x: Tensor) -> Tensor:
    out = functional_call(module, params, (x, x, x), {"need_weights": False})
    return out[0]


def twice(module: nn.Module, params: Any, x: Tensor) -> Tensor:
    return functional_call(module, params, (x, x))


class Convolutional(nn.Module):
    """Group and batch norm between convolutions and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.group = nn.GroupNorm(2, 4)
        self.batch = nn.BatchNorm2d(4)
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = nnf.max_pool2d(torch.relu(self.batch(self.group(self.conv(x)))), 2)
        return self.linear(x.mean((-1, -2)))


def encoder(*, train: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0 if train else 0.1, batch_first=True)
    return layer.train(train)


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Call]] = {
    "MLP": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), (3, 4), plainly
    ),
    "MLP with layer norm": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, 2)),
        (3, 2, 4),
        plainly,
    ),
    "convolutional, eval": (lambda: Convolutional().eval(), (3, 2, 1, 8, 8), plainly),
    "transposed convolution": (lambda: nn.ConvTranspose2d(1, 2, 3), (3, 1, 1, 5, 5), plainly),
    "batch norm without running statistics": (
        lambda: nn.BatchNorm1d(4, track_running_stats=False), (3, 6, 4), plainly
    ),
    "RNN cell": (lambda: nn.RNNCell(4, 5), (3, 2, 4), plainly),
    "LSTM cell": (lambda: nn.LSTMCell(4, 5), (3, 2, 4), first),
    "GRU cell": (lambda: nn.GRUCell(4, 5), (3, 2, 4), plainly),
    "RNN": (lambda: nn.RNN(4, 5), (3, 6, 2, 4), first),
    "LSTM": (lambda: nn.LSTM(4, 5), (3, 6, 2, 4), first),
    "LSTM, two layers and ways": (
        lambda: nn.LSTM(4, 5, 2, batch_first=True, bidirectional=True), (3, 2, 6, 4), first
    ),
    "GRU": (lambda: nn.GRU(4, 5), (3, 6, 2, 4), first),
    "transformer layer, train": (lambda: encoder(train=True), (3, 2, 5, 8), plainly),
    "transformer layer, one sequence": (lambda: encoder(train=True), (3, 5, 8), plainly),
    "transformer layer, eval": (lambda: encoder(train=False), (3, 2, 5, 8), plainly),
    "attention": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), (3, 2, 5, 8), attends),
    "attention without weights": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True), (3, 2, 5, 8), without_weights
    ),
    "transformer": (
        lambda: nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True), (3, 2, 5, 8), twice
    ),
    "weight norm": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)), (3, 4), plainly
    ),
}  # fmt: skip


def detached(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in module.named_parameters()}


@pytest.mark.parametrize("name", MODULES)
def test_per_example_gradients(name: str) -> None:
    """They agree with a loop of plain backward passes."""
    make, shape, call = MODULES[name]
    module = make().double()
    x = torch.randn(shape, dtype=torch.float64)

    def loss(params: Any, x: Tensor) -> Tensor:
        return call(module, params, x).cos().sum()

    got = vmap(tsfunc.grad(loss), in_dims=(None, 0))(detached(module), x)
    rows = []
    for one in x:
        leaf = {k: p.clone().requires_grad_() for k, p in detached(module).items()}
        grads = torch.autograd.grad(loss(leaf, one), list(leaf.values()))
        rows.append(dict(zip(leaf, grads, strict=True)))
    same(got, {k: torch.stack([row[k] for row in rows]) for k in rows[0]})


@pytest.mark.parametrize("name", MODULES)
def test_mapped_over_inputs_alone(name: str) -> None:
    make, shape, call = MODULES[name]
    module = make().double()
    x = torch.randn(shape, dtype=torch.float64)

    def run(x: Tensor) -> Tensor:
        return call(module, {}, x)

    want = torch.stack([run(one) for one in x])
    same(vmap(run)(x), want)
    with torch.no_grad():
        same(vmap(run)(x), want.detach())


# stack_module_state rejects parametrised modules as modules of different classes.
@pytest.mark.parametrize("name", [n for n in MODULES if n != "weight norm"])
def test_ensemble(name: str) -> None:
    make, shape, call = MODULES[name]
    modules = [make().double() for _ in range(2)]
    params, buffers = stack_module_state(modules)
    x = torch.randn(shape[1:], dtype=torch.float64)

    def run(params: Any, buffers: Any, x: Tensor) -> Tensor:
        return call(modules[0], {**params, **buffers}, x)

    want = torch.stack([call(m, {}, x) for m in modules])
    same(vmap(run, in_dims=(0, 0, None))(params, buffers, x), want)
    each = torch.stack([x, x + 1])
    want = torch.stack([call(m, {}, one) for m, one in zip(modules, each, strict=True)])
    out = vmap(run)(params, buffers, each)
    same(out, want)
    out.sum().backward()
    assert all(p.grad is not None for p in params.values() if p.dtype.is_floating_point)


def test_batch_norm_updates_the_statistics_of_each() -> None:
    modules = [Convolutional().double() for _ in range(2)]
    params, buffers = stack_module_state(modules)
    x = torch.randn(6, 1, 8, 8, dtype=torch.float64)
    out = vmap(lambda p, b: functional_call(modules[0], (p, b), (x,)))(params, buffers)
    same(out, torch.stack([m(x) for m in modules]))
    for name, stacked in buffers.items():
        same(stacked, torch.stack([dict(m.named_buffers())[name] for m in modules]))


def test_batch_norm_that_would_mix_examples_is_refused() -> None:
    with pytest.raises(RuntimeError, match="Batch norm got a batched tensor as input while the r"):
        vmap(nn.BatchNorm1d(4))(torch.randn(3, 2, 4))


@pytest.mark.parametrize("shape", [(6, 3), (6, 2, 3)])
def test_embedding_and_cross_entropy(shape: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(-2), nn.Linear(12, 5))
    words, labels = torch.randint(10, shape), torch.randint(5, shape[:-1])

    def loss(params: Any, words: Tensor, label: Tensor) -> Tensor:
        return nnf.cross_entropy(functional_call(model, params, (words,)), label)

    params = detached(model)
    got = vmap(tsfunc.grad(loss), in_dims=(None, 0, 0))(params, words, labels)
    rows = [torch.func.grad(loss)(params, w, t) for w, t in zip(words, labels, strict=True)]
    same(got, {k: torch.stack([row[k] for row in rows]) for k in rows[0]}, rtol=1e-4, atol=1e-6)


def test_gradients_of_closed_over_parameters() -> None:
    x = torch.randn(5, 4)
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    params = list(net.parameters())

    want = torch.autograd.grad(net(x).pow(2).sum(), params)
    vmap(lambda x: net(x).pow(2).sum())(x).sum().backward()
    same([p.grad for p in params], list(want))

    one = torch.stack([torch.autograd.functional.jacobian(lambda z: net(z).sum(), v) for v in x])
    same(vmap(tsfunc.grad(lambda v: net(v).sum()))(x).detach(), one)
    out = vmap(tsfunc.grad(lambda v: net(v).sum()))(x)
    got = torch.autograd.grad(out.pow(2).sum(), params, allow_unused=True)
    leaf = x.clone().requires_grad_()
    (plain,) = torch.autograd.grad(net(leaf).sum(), leaf, create_graph=True)
    wanted = torch.autograd.grad(plain.pow(2).sum(), params, allow_unused=True)
    for g, w in zip(got, wanted, strict=True):
        same(torch.zeros(()) if g is None else g, torch.zeros(()) if w is None else w)


def test_a_training_loop() -> None:
    x, y = torch.randn(16, 4), torch.randn(16, 1)

    def train(batch_loss: Callable[[nn.Module], Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            batch_loss(net).backward()
            optimizer.step()
        return [p.detach() for p in net.parameters()]

    got = train(lambda net: vmap(lambda a, b: (net(a) - b).pow(2).sum())(x, y).mean())
    same(got, train(lambda net: (net(x) - y).pow(2).sum(1).mean()), rtol=1e-3, atol=1e-5)


def test_the_module_itself_is_mapped() -> None:
    net = nn.Linear(4, 2)
    x = torch.randn(3, 5, 4)
    same(vmap(net, in_dims=1, out_dims=1)(x), net(x))
    same(vmap(net.forward)(x), net(x))
    same(vmap(net)(x, **{}), net(x))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
class TestRecurrentModulesCalledAsFunctions:
    """After torch's own ``functional_call`` they keep the weights of the call."""

    def test_the_module_is_as_it_was(self, kind: Any) -> None:
        module, x = kind(3, 4), torch.randn(5, 3)
        before = module(x)[0]
        weights, lists = list(module._flat_weights), module._flat_weight_refs
        functional_call(module, {n: 2 * p for n, p in module.named_parameters()}, (x,))
        assert all(a is b for a, b in zip(weights, module._flat_weights, strict=True))
        assert module._flat_weight_refs is lists
        assert torch.equal(module(x)[0], before)

    def test_also_after_an_exception(self, kind: Any) -> None:
        module, x = kind(3, 4), torch.randn(5, 3)
        before = module(x)[0]
        state = {n: 2 * p for n, p in module.named_parameters()}
        with pytest.raises((RuntimeError, ValueError), match="input"):
            functional_call(module, state, (torch.randn(5, 9),))
        assert torch.equal(module(x)[0], before)

    def test_programs_of_per_example_gradients(self, kind: Any) -> None:
        module, x = kind(3, 4), torch.randn(2, 5, 3)
        state = dict(module.named_parameters())

        def loss(state: dict[str, Tensor], x: Tensor) -> Tensor:
            return functional_call(module, state, (x,))[0].sum()

        gradients = vmap(tsfunc.grad(loss), (None, 0))
        found = tsfunc.specialize(gradients)(state, x)
        for i in range(2):
            same(
                [g[i] for g in found.values()],
                list(torch.autograd.grad(module(x[i])[0].sum(), list(module.parameters()))),
            )


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (
            lambda: nn.Sequential(nn.Linear(2, 3)), lambda: nn.Sequential(nn.Linear(2, 4)),
            "parameters .* got '0.weight' of shape (3, 2) in models[0] and of shape (4, 2) in ",
        ),
        (
            lambda: nn.Linear(2, 3), lambda: nn.Linear(2, 3, bias=False),
            "parameters .* got 'bias' of shape (3,) in models[0] and missing in ",
        ),
        (
            lambda: nn.Linear(2, 3, bias=False), lambda: nn.Linear(2, 3),
            "parameters .* got 'bias' missing in models[0] and of shape (3,) in ",
        ),
        (
            lambda: nn.BatchNorm1d(3, affine=False), lambda: nn.BatchNorm1d(5, affine=False),
            "buffers .* got 'running_mean' of shape (3,) in models[0] and of shape (5,) in ",
        ),
    ],
)  # fmt: skip
def test_a_parameter_that_differs_between_models_is_named(
    one: Any, other: Any, message: str
) -> None:
    pattern = re.escape(f"{message}models[2]").replace(re.escape(".*"), ".*")
    with pytest.raises(RuntimeError, match=pattern):
        stack_module_state([one(), one(), other()])


def test_stack_module_state_in_place_of_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.func, "stack_module_state", tsfunc.stack_module_state)
    models = [torch.nn.Linear(2, 3) for _ in range(2)]
    params, buffers = torch.func.stack_module_state(models)
    assert not buffers
    torch.testing.assert_close(params["weight"], torch.stack([m.weight for m in models]))


class Checkpointed(nn.Module):
    """A module whose layers run again in the backward pass."""

    def __init__(self, kept: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(4).eval()
        self.kept = kept

    def layers(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x).sin())).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.kept(self.layers, x).square().sum()


KEPT: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "tsfunc": lambda f, x: tsfunc.checkpoint(f)(x),
    "torch": lambda f, x: checkpoint(f, x, use_reentrant=False),
    "reentrant": lambda f, x: checkpoint(f, x, use_reentrant=True),
    "nested": lambda f, x: tsfunc.checkpoint(lambda x: checkpoint(f, x, use_reentrant=False))(x),
}
GRADIENTS: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Any]]] = {
    "grad": tsfunc.grad,
    "vmap": lambda f: tsfunc.vmap(tsfunc.grad(f), (None, 0)),
    "models": lambda f: tsfunc.vmap(tsfunc.grad(f), (0, None)),
    "program": lambda f: tsfunc.specialize(tsfunc.vmap(tsfunc.grad(f), (None, 0))),
    "second": lambda f: tsfunc.grad(
        lambda params, x: sum(g.square().sum() for g in tsfunc.grad(f)(params, x).values())
    ),
    "backward": lambda f: (
        lambda params, x: torch.autograd.grad(
            f(params, x), list(params.values()), materialize_grads=True
        )
    ),
}


@pytest.mark.parametrize(
    "call", [tsfunc.functional_call, torch.func.functional_call], ids=["ours", "torch"]
)
@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("kept", KEPT)
def test_a_checkpoint_runs_again_with_the_tensors_of_the_call(
    kept: str, gradient: str, call: Any
) -> None:
    if kept == "reentrant" and gradient == "backward":
        pytest.skip("torch.autograd.grad refuses the reentrant form")
    torch.manual_seed(0)
    module, plain = (Checkpointed(keep).double() for keep in (KEPT[kept], lambda f, x: f(x)))
    shape = (3,) if gradient == "models" else ()
    params = {
        name: torch.randn(*shape, *p.shape, dtype=p.dtype, requires_grad=gradient == "backward")
        for name, p in module.named_parameters()
    }
    buffers = {"norm.running_mean": torch.randn(4, dtype=torch.float64)}
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    x = x[0] if gradient in ("grad", "second", "backward") else x
    x = x[0] if gradient == "models" else x
    found, expected = (
        GRADIENTS[gradient](lambda params, x, m=m: call(m, (params, buffers), (x,)))(params, x)
        for m in (module, plain)
    )
    torch.testing.assert_close(found, expected)
    assert all(p.is_leaf for p in module.parameters())


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


def parametrized() -> nn.Module:
    layer = nn.Linear(3, 3)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


@pytest.mark.parametrize("filled", [False, True])
def test_a_program_in_cached_parametrizations_computes_the_weights(filled: bool) -> None:
    layer, x = parametrized(), torch.randn(2, 3)
    program = tsfunc.specialize(lambda x: layer(x))
    with parametrize.cached():
        if filled:
            layer(x)
        same(program(x), layer(x))
        same(layer(2 * x), program(2 * x))
    with torch.no_grad():
        next(layer.parametrizations.parameters()).add_(1.0)  # type: ignore[union-attr]
    same(program(x), layer(x))


@pytest.mark.parametrize(
    "call", [tsfunc.functional_call, torch.func.functional_call], ids=["ours", "torch"]
)
def test_cached_parametrizations_are_those_of_the_call(call: Any) -> None:
    layer, x = parametrized(), torch.randn(4, 3)
    (name,) = (name for name, _ in layer.named_parameters() if name != "bias")
    weights = torch.randn(4, 3, 3)
    run = vmap(lambda weight, x: call(layer, {name: weight}, (x,)))
    expected = run(weights, x)
    with parametrize.cached():
        before = layer(x)
        same(run(weights, x), expected)
        same(layer(x), before)
