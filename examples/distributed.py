"""One file for one process and for several: named axes over a mesh.

    python examples/distributed.py                             # a VirtualMesh in this process
    torchrun --nproc-per-node 4 examples/distributed.py        # a mesh of four processes

The number of processes is a power of two. Each function computes on shards and is compared with the
same computation on whole tensors: private data-parallel training of handwritten digits, a
tensor-parallel network, parameters that are gathered inside of ``grad`` (ZeRO-3), and ring
attention by ``ppermute`` in a ``scan``. The digits come with scikit-learn.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tsfunc import (
    P,
    VirtualMesh,
    all_gather,
    axis_size,
    grad,
    ppermute,
    psum,
    scan,
    shard_map,
    specialize,
    vmap,
)

Params = dict[str, Tensor]
BATCH, STEPS = 240, 60
NOISE = 0.5  # the standard deviation of the noise, in units of the largest norm of a gradient


class Digits(NamedTuple):
    """Images [n, 64] with values from 0 to 1, and their labels [n]."""

    images: Tensor
    labels: Tensor


def load() -> tuple[Digits, Digits]:
    """The images to train on, and those held out."""
    found = load_digits()
    images, labels = torch.tensor(found.data).float() / 16, torch.tensor(found.target)
    return Digits(images[:1400], labels[:1400]), Digits(images[1400:], labels[1400:])


def loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
    """The loss of a network of two layers."""
    hidden = torch.tanh(x @ params["w1"])
    return (hidden @ params["w2"] - y).square().sum()


def digit_loss(params: Params, image: Tensor, label: Tensor) -> Tensor:
    """The loss of a network of two layers for one image and its label."""
    return F.cross_entropy(torch.tanh(image @ params["w1"]) @ params["w2"], label)


def clipped(params: Params, image: Tensor, label: Tensor) -> Params:
    """One example's gradient, of norm 1 at most."""
    found: Params = grad(digit_loss)(params, image, label)
    norm = sum((g.square().sum() for g in found.values()), torch.zeros(())).sqrt()
    return {name: g / norm.clamp(min=1.0) for name, g in found.items()}


def summed(params: Params, images: Tensor, labels: Tensor) -> Params:
    """The sum of the clipped gradients of a batch."""
    each = vmap(clipped, in_dims=(None, 0, 0))(params, images, labels)
    return {name: g.sum(0) for name, g in each.items()}


def private_gradient(mesh: Any) -> Callable[..., Any]:
    """The sum of clipped gradients, of examples that are spread over both axes."""

    def local(params: Params, images: Tensor, labels: Tensor) -> Params:
        return psum(summed(params, images, labels), ("dp", "tp"))

    both = P(("dp", "tp"))
    return shard_map(local, mesh, (P(), both, both), P())


def train(gradient: Callable[..., Any], data: Digits, batch: int, steps: int) -> Params:
    """Train with noise on the summed gradients, which every rank draws from the same seed."""
    torch.manual_seed(1)
    params = {"w1": torch.randn(64, 32) / 8, "w2": torch.randn(32, 10) / 6}
    for _ in range(steps):
        chosen = torch.randint(len(data.images), (batch,))
        total = gradient(params, data.images[chosen], data.labels[chosen])
        params = {
            name: p - (total[name] + NOISE * torch.randn_like(p)) / batch
            for name, p in params.items()
        }
    return params


def accuracy(params: Params, data: Digits) -> float:
    """The part of the images that the network classifies correctly."""
    scores = torch.tanh(data.images @ params["w1"]) @ params["w2"]
    return (scores.argmax(1) == data.labels).float().mean().item()


def tensor_parallel(mesh: Any) -> Callable[..., Any]:
    """The loss of a batch over ``dp``, by a network whose hidden layer is spread over ``tp``."""

    def local(params: Params, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(x @ params["w1"])
        out = psum(hidden @ params["w2"], "tp")
        return psum((out - y).square().sum(), "dp")

    specs = {"w1": P(None, "tp"), "w2": P("tp")}
    return shard_map(local, mesh, (specs, P("dp"), P("dp")), P())


def gathered_parameters(mesh: Any) -> Callable[..., Any]:
    """Gradients of parameters of which each rank has a shard: they come as shards, summed."""

    def local(params: Params, x: Tensor, y: Tensor) -> Params:
        def whole(shards: Params) -> Tensor:
            gathered = all_gather(shards, ("dp", "tp"), tiled=True)
            return loss(gathered, x, y)

        return grad(whole)(params)

    both = P(("dp", "tp"))
    return shard_map(local, mesh, (both, both, both), both)


def ring_attention(mesh: Any) -> Callable[..., Any]:
    """Attention over a sequence that is spread over ``dp``; keys and values go round."""

    def local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = axis_size("dp")
        around = [(i, (i + 1) % n) for i in range(n)]

        def step(carry: Any, _: Tensor) -> Any:
            top, weights, out, k, v = carry
            scores = q @ k.T / q.shape[-1] ** 0.5
            new = torch.maximum(top, scores.amax(-1, keepdim=True))
            now = (scores - new).exp()
            before = (top - new).exp()
            weights = weights * before + now.sum(-1, keepdim=True)
            out = out * before + now @ v
            k, v = ppermute((k, v), "dp", around)
            return (new, weights, out, k, v), None

        first = q[:, :1] * 0
        carry = (first - 1e30, first, torch.zeros_like(v), k, v)
        (_, weights, out, _, _), _ = scan(step, carry, torch.zeros(n))
        return out / weights

    return shard_map(local, mesh, P("dp"), P("dp"))


def main(mesh: Any) -> None:
    """Run each function on shards and compare it with whole tensors."""
    torch.manual_seed(0)  # every rank makes the same tensors
    params = {"w1": torch.randn(8, 16) / 3, "w2": torch.randn(16, 4) / 4}
    x, y = torch.randn(16, 8), torch.randn(16, 4)
    close = torch.testing.assert_close

    digits, held_out = load()
    gradient = specialize(private_gradient(mesh))
    trained = train(gradient, digits, BATCH, STEPS)
    close(trained, train(summed, digits, BATCH, STEPS), atol=1e-3, rtol=1e-3)
    print(f"private training: {accuracy(trained, held_out):.3f} of the held-out digits are right")

    whole = grad(loss)(params, x, y)
    close(grad(tensor_parallel(mesh))(params, x, y), whole, atol=1e-4, rtol=1e-4)
    close(gathered_parameters(mesh)(params, x, y), whole, atol=1e-4, rtol=1e-4)

    q, k, v = torch.randn(3, 8, 4)
    attention = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    close(ring_attention(mesh)(q, k, v), attention, atol=1e-4, rtol=1e-4)
    print(f"equal to whole tensors over {mesh}")


if __name__ == "__main__":
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
        size = dist.get_world_size()
        half = 2 if size % 2 == 0 else 1
        main(init_device_mesh("cpu", (size // half, half), mesh_dim_names=("dp", "tp")))
        dist.barrier()  # no rank ends while another one works
        dist.destroy_process_group()
    else:
        main(VirtualMesh(dp=2, tp=2))
