"""The same computation by tsfunc, torch.func, torch.compile and, if it is installed, JAX.

JAX is not a dependency of this package: without it, its ways are left out. One thread:

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
from benchmarks.gradients import SIZES, mlp_params, per_example, tiny, tiny_grad
from benchmarks.timing import Call, Case
from benchmarks.ways import OURS, SPECIALIZED, ways

COMPILED = "torch.compile of torch.func"
JAX, JAX_JIT = "JAX", "JAX, jit"


def _jax_ways(make: Callable[[Any, Any], Callable[..., Any]], *args: Any) -> dict[str, Call]:
    """Calls of what ``make`` builds from ``jax`` and ``jax.numpy``, with results as tensors.

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


def _compiled(function: Callable[..., Any], *args: Any) -> dict[str, Call]:
    return {COMPILED: partial(torch.compile(function), *args)}


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

    mapped: Callable[..., Any] = jax.vmap(elementwise)
    return mapped


def _halve(x: Tensor) -> Tensor:
    """Halve until the largest entry is at most 1: up to 12 steps."""
    found: Tensor = tsfunc.while_loop(lambda x: x.abs().max() > 1, lambda x: x / 2, x)
    return found


def _jax_halve(jax: Any, jnp: Any) -> Callable[..., Any]:
    mapped: Callable[..., Any] = jax.vmap(
        lambda x: jax.lax.while_loop(lambda x: jnp.abs(x).max() > 1, lambda x: x / 2, x)
    )
    return mapped


def cases() -> Iterator[Case]:
    params = mlp_params()
    x, labels = torch.randn(64, SIZES[0]), torch.randint(SIZES[-1], (64,))
    yield Case(
        "compared: per-example gradients of an MLP, batch 64",
        ways(per_example, params, x, labels)
        | _compiled(per_example(torch.func), params, x, labels)
        | _jax_ways(
            lambda jax, jnp: jax.vmap(jax.grad(_jax_loss(jax, jnp)), (None, 0, 0)),
            params,
            x,
            labels,
        ),
    )
    points = torch.randn(64, 16)
    yield Case(
        "compared: vmap of 50 small elementwise operators",
        ways(lambda library: library.vmap(_elementwise), points)
        | _compiled(torch.func.vmap(_elementwise), points)
        | _jax_ways(_jax_elementwise, points),
    )
    point = torch.randn(12)
    yield Case(
        "compared: grad call of a tiny function",
        ways(tiny_grad, point)
        | _compiled(torch.func.grad(tiny), point)
        | _jax_ways(lambda jax, jnp: jax.grad(lambda x: (jnp.sin(x) * x).sum()), point),
    )
    rows = torch.randn(256, 64) * torch.logspace(0, 3, 256)[:, None]
    halved = tsfunc.vmap(_halve)
    yield Case(
        "compared: vmap of a while_loop, 256 examples up to 12 steps",
        {OURS: partial(halved, rows), SPECIALIZED: partial(tsfunc.specialize(halved), rows)}
        | _jax_ways(_jax_halve, rows),
        base=OURS,
    )
