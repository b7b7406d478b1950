"""Batch norm over all of a batch that is cut in parts, by collectives over a named axis.

Each part is normalised by the mean and variance of the whole batch, as batch norm synchronised over
several devices is; the gradients are those of the whole too.

    python examples/synchronised_norm.py
"""

from __future__ import annotations

import torch

import tsfunc


def normalised(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """A part of the batch, ``[rows, features]``, by the statistics of all parts."""
    mean: torch.Tensor = tsfunc.pmean(x.mean(0), "parts")
    variance: torch.Tensor = tsfunc.pmean((x - mean).square().mean(0), "parts")
    return (x - mean) / (variance + 1e-5).sqrt() * weight + bias


def loss(
    x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    return (normalised(x, weight, bias) - target).square().sum()


def main() -> None:
    torch.manual_seed(0)
    x, target = torch.randn(4, 8, 3), torch.randn(4, 8, 3)
    weight, bias = torch.rand(3), torch.rand(3)

    parts = tsfunc.vmap(normalised, in_dims=(0, None, None), axis_name="parts")
    whole = torch.nn.functional.batch_norm(x.flatten(0, 1), None, None, weight, bias, training=True)
    torch.testing.assert_close(parts(x, weight, bias).flatten(0, 1), whole)

    gradient = tsfunc.vmap(tsfunc.grad(loss), in_dims=(0, 0, None, None), axis_name="parts")
    rows = x.flatten(0, 1).requires_grad_()
    out = torch.nn.functional.batch_norm(rows, None, None, weight, bias, training=True)
    (out - target.flatten(0, 1)).square().sum().backward()
    torch.testing.assert_close(gradient(x, target, weight, bias).flatten(0, 1), rows.grad)
    print("parts of a batch, normalised together: the values and gradients of the whole batch")


if __name__ == "__main__":
    main()
