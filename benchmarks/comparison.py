"""The same computation by tsfunc, torch.func, torch.compile and, if it is installed, JAX.

JAX is not a dependency of this package (``pip install tsfunc[bench]`` brings it); without it, its
variants are left out. One thread:

    XLA_FLAGS="--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1" \
        OMP_NUM_THREADS=1 python -m benchmarks compared --cpu
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor

import tsfunc
from benchmarks.eager import Layers, layers
from benchmarks.gradients import SIZES, mlp_params, per_example, tiny, tiny_grad
from benchmarks.timing import Call, Case
from benchmarks.variants import OURS, SPECIALIZED, compiled, variants

JAX, JAX_JIT = "JAX", "JAX, jit"


def _jax_variants(make: Callable[[Any, Any], Callable[..., Any]], *args: Any) -> dict[str, Call]:
    """Return calls of the function that ``make`` builds from ``jax`` and ``jax.numpy``, on tensors.

    The conversion shares memory and takes about a microsecond for each tensor.
    """
    if importlib.util.find_spec("jax") is None:
        return {}
    jax = importlib.import_module("jax")
    arrays = optree.tree_map(lambda leaf: jax.numpy.asarray(leaf.numpy()), args)
    function = make(jax, jax.numpy)

    def call(function: Callable[..., Any]) -> Any:
        out = jax.block_until_ready(function(*arrays))
        return optree.tree_map(torch.from_dlpack, out)

    return {JAX: partial(call, function), JAX_JIT: partial(call, jax.jit(function))}


def _jax_loss(jax: Any, jnp: Any) -> Callable[..., Any]:
    def jax_loss(params: Any, x: Any, label: Any) -> Any:
        for weight, bias in params[:-1]:
            x = jnp.tanh(weight @ x + bias)
        weight, bias = params[-1]
        return -jax.nn.log_softmax(weight @ x + bias)[label]

    return jax_loss


def _elementwise(x: Tensor) -> Tensor:
    for _ in range(25):
        x = torch.sin(x) * 1.5
    return x


def _jax_elementwise(jax: Any, jnp: Any) -> Callable[..., Any]:
    def elementwise(x: Any) -> Any:
        for _ in range(25):
            x = jnp.sin(x) * 1.5
        return x

    return jax.vmap(elementwise)


def _halve(x: Tensor) -> Tensor:
    """Halve ``x`` until the largest entry is at most 1: up to 12 steps."""
    return tsfunc.while_loop(lambda x: x.abs().max() > 1, lambda x: x / 2, x)


def _jax_halve(jax: Any, jnp: Any) -> Callable[..., Any]:
    return jax.vmap(
        lambda x: jax.lax.while_loop(lambda x: jnp.abs(x).max() > 1, lambda x: x / 2, x)
    )


def _network(numerics: Any, params: Layers, x: Tensor) -> Any:
    for weight, bias in params[:-1]:
        x = numerics.tanh(weight @ x + bias)
    weight, bias = params[-1]
    return weight @ x + bias


# Each function takes the transforms and the array functions of a library: torch.func or tsfunc with
# torch, or jax with jax.numpy. Annotations name torch's tensors, since `specialize` reads them; JAX
# passes its arrays.


def pinn(transforms: Any, numerics: Any) -> Callable[..., Any]:
    """The gradient of a physics-informed network's loss: Burgers' equation at many points."""

    def field(params: Layers, point: Tensor) -> Any:
        return _network(numerics, params, point)[0]

    slope = transforms.grad(field, argnums=1)

    def residual(params: Layers, point: Tensor) -> Any:
        by_t, by_x = slope(params, point)
        second = transforms.grad(lambda point: slope(params, point)[1])(point)[1]
        return by_t + field(params, point) * by_x - 0.01 * second

    def loss(params: Layers, points: Tensor) -> Any:
        return (transforms.vmap(residual, (None, 0))(params, points) ** 2).mean()

    return transforms.grad(loss)


def kernel(transforms: Any, numerics: Any) -> Callable[..., Any]:
    """The neural tangent kernel of two batches, by the product of the Jacobians of each pair."""

    def jacobian(params: Layers, x: Tensor) -> Any:
        return transforms.jacrev(lambda params: _network(numerics, params, x))(params)

    def between(params: Layers, first: Tensor, second: Tensor) -> Any:
        total = 0
        pairs = zip(
            transforms.vmap(jacobian, (None, 0))(params, first),
            transforms.vmap(jacobian, (None, 0))(params, second),
            strict=True,
        )
        for mine, theirs in pairs:
            for a, b in zip(mine, theirs, strict=True):
                a, b = (each.reshape(each.shape[0], each.shape[1], -1) for each in (a, b))
                total = total + numerics.einsum("naf,mbf->nmab", a, b)
        return total

    return between


def maml(transforms: Any, numerics: Any) -> Callable[..., Any]:
    """The gradient through a step of descent for each task (model-agnostic meta-learning)."""

    def error(params: Layers, x: Tensor, y: Tensor) -> Any:
        return ((transforms.vmap(lambda x: _network(numerics, params, x))(x) - y) ** 2).mean()

    def after_a_step(params: Layers, x: Tensor, y: Tensor) -> Any:
        steps = transforms.grad(error)(params, x, y)
        new = [(w - 0.1 * dw, b - 0.1 * db) for (w, b), (dw, db) in zip(params, steps, strict=True)]
        return error(new, x, y)

    def total(params: Layers, x: Tensor, y: Tensor) -> Any:
        return transforms.vmap(after_a_step, (None, 0, 0))(params, x, y).sum()

    return transforms.grad(total)


def _compared(name: str, make: Callable[[Any, Any], Callable[..., Any]], *args: Any) -> Case:
    calls = variants(lambda library: make(library, torch), *args)
    calls |= compiled(make(torch.func, torch), *args) | _jax_variants(make, *args)
    return Case(f"compared: {name}", calls)


def cases() -> Iterator[Case]:
    yield _compared(
        "gradient of a PINN, 128 points",
        pinn,
        layers(2, 32, 32, 1),
        torch.randn(128, 2),
    )
    yield _compared(
        "NTK of a small MLP, 16 inputs by 16",
        kernel,
        layers(16, 32, 32, 4),
        torch.randn(16, 16),
        torch.randn(16, 16),
    )
    yield _compared(
        "MAML, 8 tasks of 10 examples",
        maml,
        layers(8, 32, 32, 2),
        torch.randn(8, 10, 8),
        torch.randn(8, 10, 2),
    )
    params = mlp_params()
    for batch in (64, 1024):
        x, labels = torch.randn(batch, SIZES[0]), torch.randint(SIZES[-1], (batch,))
        yield Case(
            f"compared: per-example gradients of an MLP, batch {batch}",
            variants(per_example, params, x, labels)
            | compiled(per_example(torch.func), params, x, labels)
            | _jax_variants(
                lambda jax, jnp: jax.vmap(jax.grad(_jax_loss(jax, jnp)), (None, 0, 0)),
                params,
                x,
                labels,
            ),
        )
    points = torch.randn(64, 16)
    yield Case(
        "compared: vmap of 50 small elementwise operators",
        variants(lambda library: library.vmap(_elementwise), points)
        | compiled(torch.func.vmap(_elementwise), points)
        | _jax_variants(_jax_elementwise, points),
    )
    point = torch.randn(12)
    yield Case(
        "compared: grad call of a tiny function",
        variants(tiny_grad, point)
        | compiled(torch.func.grad(tiny), point)
        | _jax_variants(lambda jax, jnp: jax.grad(lambda x: (jnp.sin(x) * x).sum()), point),
    )
    rows = torch.randn(256, 64) * torch.logspace(0, 3, 256)[:, None]
    halved = tsfunc.vmap(_halve)
    yield Case(
        "compared: vmap of a while_loop, 256 examples up to 12 steps",
        {OURS: partial(halved, rows), SPECIALIZED: partial(tsfunc.specialize(halved), rows)}
        | _jax_variants(_jax_halve, rows),
        base=OURS,
    )
