"""State that modules write during a call: running statistics, power iterations, dropout."""

from __future__ import annotations

import copy
import re
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.func
import torch.nn.functional as nnf
from torch import Tensor, nn

import tsfunc
from tests.transforms.support import loop, same
from tsfunc import functional_call, stack_module_state, vmap
from tsfunc.errors import EscapedTracerError, TypeCheckError

State = dict[str, Tensor]
SIZE = 3


def examples(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SIZE, *shape, generator=generator, dtype=torch.float64)


def state(model: nn.Module) -> tuple[State, State]:
    params = {name: value.detach() for name, value in model.named_parameters()}
    return params, dict(model.named_buffers())


def normed(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), norm, nn.Tanh()).double()


def called(model: nn.Module) -> Callable[[State, State, Tensor], tuple[Tensor, State]]:
    """Return the model as a function that returns its updated buffers."""

    def call(params: State, buffers: State, x: Tensor) -> tuple[Tensor, State]:
        buffers = {name: value.clone() for name, value in buffers.items()}
        return functional_call(model, (params, buffers), (x,)), buffers

    return call


def test_running_statistics_come_back_for_each_example() -> None:
    """The plain case: buffers are arguments, and updated buffers are results."""
    model = normed(nn.BatchNorm1d(4))
    params, buffers = state(model)
    call, x = called(model), examples(6, 4)
    out, updated = vmap(call, in_dims=(None, None, 0))(params, buffers, x)
    assert out.shape == (3, 6, 4)
    assert updated["1.running_mean"].shape == (3, 4)
    assert updated["1.num_batches_tracked"].tolist() == [1, 1, 1]
    for i in range(3):
        alone = copy.deepcopy(model)
        same(out[i], alone(x[i]).detach())
        same({name: value[i] for name, value in updated.items()}, dict(alone.named_buffers()))


NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "batch": (lambda: nn.BatchNorm1d(4), (6, 4)),
    "batch, averaged": (lambda: nn.BatchNorm1d(4, momentum=None), (6, 4)),
    "batch, without weights": (lambda: nn.BatchNorm1d(4, affine=False), (6, 4)),
    "batch, without statistics": (lambda: nn.BatchNorm1d(4, track_running_stats=False), (6, 4)),
    "batch, sequences": (lambda: nn.BatchNorm1d(5), (2, 5, 4)),
    "images": (lambda: nn.BatchNorm2d(3), (2, 3, 2, 4)),
    "volumes": (lambda: nn.BatchNorm3d(2), (2, 2, 3, 2, 4)),
    "instance": (lambda: nn.InstanceNorm1d(5), (2, 5, 4)),
    "instance, with statistics": (
        lambda: nn.InstanceNorm1d(5, affine=True, track_running_stats=True),
        (2, 5, 4),
    ),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NORMS)
def test_running_statistics_of_a_batch_of_modules(name: str, training: bool) -> None:
    make, shape = NORMS[name]
    model = normed(make()).train(training)
    params, buffers = state(model)
    call, x = called(model), examples(*shape)
    same(
        vmap(call, (None, None, 0))(params, buffers, x),
        loop(call, 3, (None, None, 0))(params, buffers, x),
    )

    def loss(params: State, buffers: State, x: Tensor) -> tuple[Tensor, State]:
        out, updated = call(params, buffers, x)
        return (out.square() * x.sin()).sum(), updated

    expected = loop(torch.func.grad(loss, has_aux=True), 3, (None, None, 0))(params, buffers, x)
    got = vmap(tsfunc.grad(loss, has_aux=True), in_dims=(None, None, 0))(params, buffers, x)
    same(got, expected)

    def total(params: State, x: Tensor) -> tuple[Tensor, State]:
        values, updated = vmap(loss, in_dims=(None, None, 0))(params, buffers, x)
        return values.sum(), updated

    got = tsfunc.grad(total, has_aux=True)(params, x)
    same(got, ({name: value.sum(0) for name, value in expected[0].items()}, expected[1]))


@pytest.mark.parametrize("name", ["batch", "images", "instance, with statistics"])
def test_each_model_has_its_own(name: str) -> None:
    """Stacked state is written in place, like a module's own state."""
    make, shape = NORMS[name]
    models = [normed(make()) for _ in range(SIZE)]
    params, buffers = stack_module_state(models)
    x = examples(*shape)

    def call(params: State, buffers: State, x: Tensor) -> Tensor:
        return functional_call(models[0], (params, buffers), (x,))

    out = vmap(call)(params, buffers, x)
    same(out.detach(), torch.stack([m(one) for m, one in zip(models, x, strict=True)]).detach())
    for key, value in buffers.items():
        same(value, torch.stack([dict(m.named_buffers())[key] for m in models]))


def test_several_steps_and_nested() -> None:
    model = normed(nn.BatchNorm1d(4))
    params, buffers = state(model)
    x = torch.stack([examples(6, 4) + i for i in range(2)])

    def steps(buffers: State, xs: Tensor) -> State:
        buffers = {name: value.clone() for name, value in buffers.items()}
        for x in xs:
            functional_call(model, (params, buffers), (x,))
        return buffers

    same(vmap(steps, (None, 0))(buffers, x), loop(steps, 2, (None, 0))(buffers, x))
    call = called(model)
    mapped = vmap(vmap(call, (None, None, 0)), (None, None, 0))(params, buffers, x)
    inner = loop(call, 3, (None, None, 0))
    same(mapped, loop(inner, 2, (None, None, 0))(params, buffers, x))
    program = tsfunc.specialize(vmap(call, (None, None, 0)))
    same(program(params, buffers, x[0]), inner(params, buffers, x[0]))


def test_statistics_of_unbatched_inputs_stay_unbatched() -> None:
    """If only later parameters are mapped over, all examples share the norm's state."""
    norm = nn.BatchNorm1d(4).double()
    x, weights = examples(6, 4)[0], examples(4)
    alone = copy.deepcopy(norm)
    same(vmap(lambda w: norm(x) * w)(weights).detach(), (alone(x) * weights[:, None]).detach())
    same(dict(norm.named_buffers()), dict(alone.named_buffers()))


def test_a_captured_modules_update_is_refused_with_the_rewrite() -> None:
    model = normed(nn.BatchNorm1d(4))
    params, buffers = state(model)
    before = copy.deepcopy(buffers["1.running_mean"])
    x = examples(6, 4)

    def predict(x: Tensor) -> Tensor:
        return model(x)

    def loss(params: State, x: Tensor) -> Tensor:
        return functional_call(model, params, (x,)).sum()

    with pytest.raises(RuntimeError, match=r"into `model\.1\.running_mean`") as caught:
        vmap(predict)(x)
    with pytest.raises(RuntimeError, match=r"into `model\.1\.running_mean`"):
        vmap(tsfunc.grad(loss), in_dims=(None, 0))(params, x)
    with pytest.raises(RuntimeError, match=r"into `b\['1\.running_mean'\]`"):
        vmap(lambda b, x: functional_call(model, (params, b), (x,)), (None, 0))(buffers, x)
    same(model[1].running_mean, before)  # type: ignore[index]

    # The code in the message runs.
    message = str(caught.value)
    assert "model.eval()" in message and "GroupNorm" in message
    shown = re.search(r"\n\n(    def call.*?)\n\nOr have", message, re.S)
    assert shown is not None
    lines = [line[4:] for line in shown[1].splitlines()]
    scope: dict[str, Any] = {"tsfunc": tsfunc, "model": model, "x": x}
    exec("\n".join(lines), scope)
    same(scope["out"].detach(), loop(lambda x: copy.deepcopy(model)(x).detach(), 3)(x))
    assert scope["buffers"]["1.running_mean"].shape == (3, 4)


class Counting(nn.Module):
    """A layer that assigns a buffer; other layers write into one."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + x.sum()
        return x * self.weight


class TestAssignedBuffers:
    """NOTE [state of modules]."""

    @pytest.mark.parametrize(
        "wrap",
        [
            lambda model: model,
            lambda model: lambda x: model(x),
            lambda model: tsfunc.grad(lambda x: model(x).sum()),
            lambda model: tsfunc.specialize(model),
            lambda model: lambda x: vmap(model, in_dims=None, axis_size=2)(x)[0],
        ],
        ids=["module", "closure", "grad", "program", "inner vmap"],
    )  # fmt: skip
    def test_those_of_a_captured_module_are_refused(self, wrap: Callable[..., Any]) -> None:
        model = Counting()
        before = model.count
        with pytest.raises(EscapedTracerError, match=r"`\w+\.count` .*\n.*one buffer for all"):
            vmap(wrap(model))(torch.ones(3, 2))
        assert model.count is before
        assert model(torch.ones(2)).equal(torch.ones(2)) and model.count == 2

    def test_the_message_has_the_line_and_a_rewrite_that_runs(self) -> None:
        model, x = Counting(), examples(2).float()
        with pytest.raises(EscapedTracerError, match=r"self\.count = self\.count \+ x") as caught:
            vmap(model)(x)
        _, _, rewrite = str(caught.value).partition("new state:\n")
        scope: dict[str, Any] = {"tsfunc": tsfunc, "model": model, "x": x}
        exec(textwrap.dedent(rewrite), scope)
        same(scope["out"].detach(), x)
        same(scope["buffers"]["count"], x.sum(1))

    def test_an_error_in_the_function_leaves_the_module_as_it_was(self) -> None:
        model = Counting()

        def fails(x: Tensor) -> Tensor:
            model(x)
            raise ValueError("it is what it is")

        with pytest.raises(ValueError, match="it is what it is"):
            vmap(fails)(torch.ones(3, 2))
        assert model.count.equal(torch.zeros(()))

    def test_modules_made_inside_may_hold_assigned_tensors(self) -> None:
        def own(x: Tensor) -> Tensor:
            model = Counting()
            model(x)
            return model.count

        x = examples(2).float()
        same(vmap(own)(x), x.sum(1))

    def test_restored_values_are_not_updates(self) -> None:
        model, x = Counting(), examples(2).float()

        def borrowed(x: Tensor) -> Tensor:
            before = model.count
            model(x)
            count, model.count = model.count, before
            return count

        same(vmap(borrowed)(x), x.sum(1))
        assert model.count.equal(torch.zeros(()))

    def test_values_that_are_the_same_for_all_examples(self) -> None:
        model = Counting()
        vmap(lambda x, y: x + model(y), in_dims=(0, None))(torch.ones(3, 2), torch.ones(2))
        assert model.count == 2


NORMALIZED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "parametrization": nn.utils.parametrizations.spectral_norm,
    "hook": nn.utils.spectral_norm,
}


@pytest.mark.filterwarnings("ignore:.*is deprecated")
@pytest.mark.parametrize("name", NORMALIZED)
def test_spectral_norm(name: str) -> None:
    """In training, each call makes a step of the power iteration and keeps its vectors."""
    torch.manual_seed(0)
    model = NORMALIZED[name](nn.Linear(4, 5).double())
    params, buffers = state(model)
    weights = {
        key: torch.stack([value * (i + 1) + i for i in range(3)]) for key, value in params.items()
    }
    call, x = called(model), examples(2, 4)
    same(
        vmap(call, (0, None, 0))(weights, buffers, x),
        loop(call, 3, (0, None, 0))(weights, buffers, x),
    )

    def loss(params: State, buffers: State, x: Tensor) -> tuple[Tensor, State]:
        out, updated = call(params, buffers, x)
        return out.sin().sum(), updated

    got = vmap(tsfunc.grad(loss, has_aux=True), in_dims=(0, None, 0))(weights, buffers, x)
    same(got, loop(torch.func.grad(loss, has_aux=True), 3, (0, None, 0))(weights, buffers, x))
    with pytest.raises(RuntimeError, match=r"state of the module `model`"):
        vmap(lambda p: functional_call(model, p, (x[0],)))(weights)


DROPOUTS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "elements": (lambda: nn.Dropout(0.5), (50,)),
    "channels": (lambda: nn.Dropout2d(0.5), (2, 40, 2, 2)),
    "alpha": (lambda: nn.AlphaDropout(0.5), (50,)),
    "alpha, channels": (lambda: nn.FeatureAlphaDropout(0.5), (2, 40, 2)),
}


@pytest.mark.parametrize("name", DROPOUTS)
def test_dropout_by_randomness(name: str) -> None:
    make, shape = DROPOUTS[name]
    layer, x = make(), torch.ones(6, *shape)
    with pytest.raises(RuntimeError, match="randomness error mode"):
        vmap(layer)(x)
    one = vmap(layer, randomness="same")(x)
    assert all(torch.equal(one[0], other) for other in one)
    each = vmap(layer, randomness="different")(x)
    assert not any(torch.equal(each[i], each[j]) for i in range(6) for j in range(i))

    def split(x: Tensor, **options: Any) -> Tensor:
        torch.manual_seed(0)
        return vmap(layer, randomness="split", **options)(x)

    # The numbers of an active subset do not depend on its size, or on chunks.
    same(split(x)[:4], split(x[:4]))
    same(split(x), split(x, chunk_size=4))
    same(vmap(make().eval())(x), x)


def test_dropout_beside_running_statistics() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)).double()
    params, buffers = state(model)
    x = examples(6, 4)
    call = vmap(called(model), in_dims=(None, None, 0), randomness="different")
    out, updated = call(params, buffers, x)
    hidden = nnf.linear(x, params["0.weight"], params["0.bias"])
    assert out.shape == hidden.shape and updated["2.running_mean"].shape == (3, 4)
    assert not torch.equal(updated["2.running_mean"][0], updated["2.running_mean"][1])


class Watched(nn.Module):
    """Installs a hook at its first call, as models of transformers do to collect hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.seen: list[Tensor] = []
        self.installed = False

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        if not self.installed:

            def note(module: nn.Module, args: Any, output: Tensor) -> None:
                self.seen.append(output)

            self.inner.register_forward_hook(note)
            self.installed = True
        out = self.inner(self.inner(x))
        seen = tuple(self.seen)
        self.seen.clear()
        return (out, *seen)


def test_a_hook_that_the_first_call_installs() -> None:
    model, x = Watched(), torch.randn(2, 4)
    with pytest.raises(TypeCheckError) as caught:
        tsfunc.specialize(model)(x)
    message = str(caught.value)
    assert "_forward_hooks: it gets a function that the function has made" in message
    assert "call the function once before it is specialized" in message
    assert not model.installed and not model.inner._forward_hooks

    want = model(x)
    program = tsfunc.specialize(model)
    for got in (program(x), program(x)):
        assert len(got) == 3
        same(got, want)
    assert program.cache_info().programs == 1
