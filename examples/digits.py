"""Private training on handwritten digits: per-example gradients, clipped, summed, made noisy.

    python examples/digits.py            twenty seconds on two cores; writes digits.png
    python examples/digits.py --quick    a few steps of everything

Differentially private SGD (https://arxiv.org/abs/1607.00133) bounds what a network can tell about
any one image that it was trained on. Each step takes the gradient of every example by itself,
scales it down to a given norm at most, adds them up, and adds Gaussian noise in proportion to that
norm. The first part is ``vmap(grad(loss))``; ``specialize`` makes one program of the whole step, in
which the noise is drawn anew at every call. Then eight networks are trained at once, without
noise: ``vmap`` over their stacked parameters.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.progress import Progress
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from sklearn.model_selection import train_test_split  # type: ignore[import-untyped]
from torch import Tensor, nn

import tsfunc

BATCH = 128  # expected size: an image is in a batch with probability BATCH / number of images
PAD = 32  # batches are filled up to a multiple of it: each size is a specialization
CLIP = 1.0  # the norm that one example's gradient has at most
NOISE = 2.0  # the noise multiplier: its standard deviation, in units of CLIP
RATE = 1.0
DELTA = 1e-4
MODELS = 8

Params = dict[str, Tensor]
PerExample = Callable[[Params, Tensor, Tensor], Params]
Step = Callable[[Params, Tensor, Tensor, Tensor], Params]


class Data(NamedTuple):
    """Images [n, 1, 8, 8] with values from 0 to 1, and their labels [n]."""

    images: Tensor
    test_images: Tensor
    labels: Tensor
    test_labels: Tensor


def load(device: torch.device) -> Data:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    parts = train_test_split(images, labels, test_size=0.25, stratify=labels, random_state=0)
    return Data(*(part.to(device) for part in parts))


def network() -> nn.Module:
    first, second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 16, 3, stride=2, padding=1)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Flatten(), nn.Linear(256, 10))


NETWORK = network().to("meta")  # its structure; each call brings the parameters


def logits(params: Params, images: Tensor) -> Tensor:
    return tsfunc.functional_call(NETWORK, params, (images,))


def loss(params: Params, image: Tensor, label: Tensor) -> Tensor:
    """The loss of one image: nothing in it knows about batches."""
    return F.cross_entropy(logits(params, image[None]), label[None])


def mapped_gradients(transforms: ModuleType = tsfunc) -> PerExample:
    """Every example's gradient, by the ``vmap`` and ``grad`` of ``tsfunc`` or ``torch.func``."""
    return transforms.vmap(transforms.grad(loss), in_dims=(None, 0, 0))


def looped_gradients(params: Params, images: Tensor, labels: Tensor) -> Params:
    """The same by a Python loop: a backward pass for each example."""
    leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
    values = list(leaves.values())
    pairs = zip(images, labels, strict=True)
    rows = [torch.autograd.grad(loss(leaves, x, y), values) for x, y in pairs]
    return {name: torch.stack([row[i] for row in rows]) for i, name in enumerate(leaves)}


def make_step(gradients: PerExample, noise: float) -> Step:
    """A step of private SGD; ``present`` is 0 for what only fills up the batch, else 1."""

    def step(params: Params, images: Tensor, labels: Tensor, present: Tensor) -> Params:
        grads = gradients(params, images, labels)
        squares = torch.stack([g.flatten(1).square().sum(1) for g in grads.values()])
        factors = present * (CLIP / (squares.sum(0).sqrt() + 1e-6)).clamp(max=1.0)
        new = {}
        for name, p in params.items():
            total = torch.tensordot(factors, grads[name], dims=1)
            noisy = total + noise * CLIP * torch.randn_like(p)
            new[name] = p - RATE / BATCH * noisy
        return new

    return step


def batches(data: Data) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """An epoch of batches as the privacy analysis wants them: a coin tossed for each image."""
    count, device = len(data.images), data.images.device
    for _ in range(round(count / BATCH)):
        index = (torch.rand(count) < BATCH / count).nonzero()[:, 0]
        size = math.ceil(max(len(index), 1) / PAD) * PAD
        present = (torch.arange(size) < len(index)).float().to(device)
        index = F.pad(index, (0, size - len(index))).to(device)
        yield data.images[index], data.labels[index], present


def epsilon(noise: float, rate: float, steps: int, delta: float) -> float:
    """Return the privacy that training spends, between data with and without any one image.

    The Renyi divergence of the subsampled Gaussian mechanism at integer orders (Mironov, Talwar
    and Zhang, https://arxiv.org/abs/1908.10530, 3.3), added up over the steps and converted by
    proposition 12 of Canonne, Kamath and Steinke, https://arxiv.org/abs/2004.00010.
    """
    found = math.inf
    for order in range(2, 129):
        k = torch.arange(order + 1, dtype=torch.float64)
        choose = [math.log(math.comb(order, i)) for i in range(order + 1)]
        terms = (order - k) * math.log1p(-rate) + k * math.log(rate) + (k * k - k) / 2 / noise**2
        moment = (terms + torch.tensor(choose, dtype=torch.float64)).logsumexp(0).item()
        spent = (steps * moment - math.log(delta * order)) / (order - 1) + math.log1p(-1 / order)
        found = min(found, spent)
    return found


def accuracy(scores: Tensor, labels: Tensor) -> float:
    return (scores.argmax(-1) == labels).float().mean().item()


def train(data: Data, noise: float, seed: int, epochs: Iterable[int]) -> list[float]:
    """Trains one network; returns its held-out accuracy after each epoch."""
    torch.manual_seed(seed)
    params = {name: p.detach().to(data.images.device) for name, p in network().named_parameters()}
    step = tsfunc.specialize(make_step(mapped_gradients(), noise))
    curve = []
    for _ in epochs:
        for images, labels, present in batches(data):
            params = step(params, images, labels, present)
        curve.append(accuracy(logits(params, data.test_images), data.test_labels))
    return curve


def plain_step(params: Params, images: Tensor, labels: Tensor) -> Params:
    """An ordinary step of one model: nothing in it knows that there are eight."""
    grads = tsfunc.grad(lambda p: F.cross_entropy(logits(p, images), labels))(params)
    return {name: p - RATE / 2 * grads[name] for name, p in params.items()}


def train_ensemble(data: Data, seed: int, epochs: Iterable[int]) -> list[float]:
    """Trains all models at once, each on its own batches; returns their mean vote's accuracy."""
    torch.manual_seed(seed)
    stacked, _ = tsfunc.stack_module_state([network() for _ in range(MODELS)])
    params = {name: p.detach().to(data.images.device) for name, p in stacked.items()}
    step = tsfunc.specialize(tsfunc.vmap(plain_step))
    scores = tsfunc.vmap(logits, in_dims=(0, None))
    curve, count = [], len(data.images)
    for _ in epochs:
        for _ in range(count // BATCH):
            index = torch.randint(count, (MODELS, BATCH)).to(data.images.device)
            params = step(params, data.images[index], data.labels[index])
        vote = scores(params, data.test_images).softmax(-1).mean(0)
        curve.append(accuracy(vote, data.test_labels))
    return curve


def throughput(data: Data, seed: int, repeats: int) -> dict[str, float]:
    """Images per second of one private step, its gradients got in four ways."""
    steps: dict[str, Callable[..., Any]] = {
        "tsfunc, specialized": tsfunc.specialize(make_step(mapped_gradients(), NOISE)),
        "tsfunc": make_step(mapped_gradients(), NOISE),
        "torch.func": make_step(mapped_gradients(torch.func), NOISE),
        "a loop over the examples": make_step(looped_gradients, NOISE),
    }
    params = {name: p.detach().to(data.images.device) for name, p in network().named_parameters()}
    batch = data.images[:BATCH], data.labels[:BATCH], torch.ones_like(data.images[:BATCH, 0, 0, 0])
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats + 1):
        results = []
        for name, step in steps.items():
            torch.manual_seed(seed)  # the same noise for all
            start = time.perf_counter()
            new = step(params, *batch)
            torch.stack([p.sum() for p in new.values()]).tolist()  # waits for the device
            seconds[name].append(time.perf_counter() - start)
            results.append(new)
        for result in results[1:]:  # the four are one and the same step
            torch.testing.assert_close(results[0], result, rtol=1e-3, atol=1e-4)
    return {name: BATCH / statistics.median(times[1:]) for name, times in seconds.items()}


def plot(curves: dict[str, list[float]], path: str) -> None:
    figure = Figure(figsize=(7, 4.5), layout="constrained")  # draws without a display
    axes = figure.subplots()
    for name, curve in curves.items():
        axes.plot(range(1, len(curve) + 1), curve, label=f"{name}: {curve[-1]:.3f}")
    axes.set(xlabel="epoch", ylabel="accuracy on held-out digits", ylim=(0.5, 1))
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)
    print(f"learning curves in {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Private training on handwritten digits.")
    parser.add_argument("--quick", action="store_true", help="a few steps of everything")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-plot", action="store_true", help="write no digits.png")
    args = parser.parse_args()
    data = load(torch.device(os.environ.get("TSFUNC_DEVICE") or "cpu"))
    epochs, repeats = (1, 2) if args.quick else (30, 15)
    rate = BATCH / len(data.images)
    spent = epsilon(NOISE, rate, epochs * round(1 / rate), DELTA)
    with Progress() as bar:
        rounds = functools.partial(bar.track, range(epochs))
        curves = {
            "no noise": train(data, 0.0, args.seed, rounds(description="no noise")),
            "private": train(data, NOISE, args.seed, rounds(description="private")),
            "ensemble": train_ensemble(data, args.seed, rounds(description="ensemble")),
        }
    print(f"batches of {BATCH}, {epochs} epochs, clip norm {CLIP:g}, noise multiplier {NOISE:g}")
    print(f"the private run: ({spent:.2f}, {DELTA:g})-differential privacy")
    for name, curve in curves.items():
        print(f"{name:24} held-out accuracy {curve[-1]:.3f}")
    for name, speed in throughput(data, args.seed, repeats).items():
        print(f"{name:24} {speed:10,.0f} images/s")
    if not args.no_plot:
        plot(curves, "digits.png")


if __name__ == "__main__":
    main()
