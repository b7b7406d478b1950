"""Small networks on a GPU, where launching the kernels takes longer than running them.

The benchmarks need a CUDA device. Each call waits for the device, so that the times are those of
the results. CUDA graphs replay all kernels of a call by one launch: as the backend ``"cudagraphs"``
of ``specialize``, and in torch.compile's mode ``"reduce-overhead"``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import optree
import torch
from torch import Tensor

import tsfunc
from benchmarks.comparison import kernel, maml, pinn
from benchmarks.eager import Layers, layers, network
from benchmarks.gradients import mlp_params, per_example
from benchmarks.timing import Call, Case
from benchmarks.variants import TORCH_FUNC, compiled, variants

CUDA_GRAPHS = "tsfunc, with CUDA graphs"
REDUCED = "torch.compile of torch.func, with CUDA graphs"


def waiting(call: Call) -> Call:
    """Return a call that ends when the device has computed its results."""

    def called() -> Any:
        results = call()
        torch.cuda.synchronize()
        return results

    return called


def on_device(value: Any) -> Any:
    return optree.tree_map(lambda leaf: leaf.cuda(), value)


def deep(transforms: ModuleType) -> Callable[..., Any]:
    """A step of descent for a deep and narrow network."""

    def error(params: Layers, x: Tensor, y: Tensor) -> Tensor:
        outputs = transforms.vmap(lambda x: network(params, x))(x)
        return (outputs - y).square().mean()

    def step(params: Layers, x: Tensor, y: Tensor) -> Layers:
        steps = transforms.grad(error)(params, x, y)
        return [
            (w - 0.01 * dw, b - 0.01 * db) for (w, b), (dw, db) in zip(params, steps, strict=True)
        ]

    return step


def cases() -> Iterator[Case]:
    if not torch.cuda.is_available():
        return
    for name, make, args in (
        ("a step for 20 layers of width 64, batch 32", deep,
         (layers(*[64] * 21), torch.randn(32, 64), torch.randn(32, 64))),
        ("per-example gradients of an MLP, batch 64", per_example,
         (mlp_params(), torch.randn(64, 128), torch.randint(10, (64,)))),
        ("gradient of a PINN, 128 points", lambda library: pinn(library, torch),
         (layers(2, 32, 32, 1), torch.randn(128, 2))),
        ("NTK of a small MLP, 16 inputs by 16", lambda library: kernel(library, torch),
         (layers(16, 32, 32, 4), torch.randn(16, 16), torch.randn(16, 16))),
        ("MAML, 8 tasks of 10 examples", lambda library: maml(library, torch),
         (layers(8, 32, 32, 2), torch.randn(8, 10, 8), torch.randn(8, 10, 2))),
    ):  # fmt: skip
        given = on_device(args)
        calls = variants(make, *given) | compiled(make(torch.func), *given)
        reduced = torch.compile(make(torch.func), mode="reduce-overhead")
        calls[REDUCED] = partial(reduced, *given)
        program = tsfunc.specialize(make(tsfunc), backend="cudagraphs")
        calls[CUDA_GRAPHS] = partial(program, *given)
        yield Case(
            f"GPU: {name}",
            {variant: waiting(call) for variant, call in calls.items()},
            base=TORCH_FUNC,
        )
