"""Packed sequences: recurrent layers with lengths that all examples of a batch share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import rnn

import tsfunc


def run_packed(layer: Callable[[Any], Any], lengths: Tensor, batch_first: bool, x: Tensor) -> Any:
    x = x if batch_first else x.transpose(0, 1)
    packed = rnn.pack_padded_sequence(x, lengths, batch_first, enforce_sorted=False)
    out, states = layer(packed)
    padded, counts = rnn.pad_packed_sequence(out, batch_first, padding_value=-2.0, total_length=6)
    return padded, states, counts


def stacked(examples: list[Any]) -> Any:
    return optree.tree_map(lambda *leaves: torch.stack(leaves), *examples)


@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("lengths", [[5, 4, 1], [2, 5, 1]])
def test_against_the_loop(name: str, batch_first: bool, lengths: list[int]) -> None:
    options: Any = {"num_layers": 2, "bidirectional": True, "batch_first": batch_first}
    layer = getattr(nn, name)(3, 4, dtype=torch.float64, **options)
    f = functools.partial(run_packed, layer, torch.tensor(lengths), batch_first)
    batch = torch.randn(4, 3, 5, 3, dtype=torch.float64)
    expected = stacked([f(x) for x in batch])
    for dim in range(3):
        torch.testing.assert_close(tsfunc.vmap(f, in_dims=dim)(batch.movedim(0, dim)), expected)
    # Autograd differentiates through the layer by its captured weights.
    tsfunc.vmap(lambda x: f(x)[0].sin().sum())(batch).sum().backward()
    grads = torch.autograd.grad(sum(f(x)[0].sin().sum() for x in batch), list(layer.parameters()))
    torch.testing.assert_close([p.grad for p in layer.parameters()], list(grads))


@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_derivatives(name: str, batch_first: bool) -> None:
    layer = getattr(nn, name)(3, 4, dtype=torch.float64, batch_first=batch_first)
    weights = {key: value.detach() for key, value in layer.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        def run(packed: Any) -> Any:
            return tsfunc.functional_call(layer, weights, (packed,))

        padded, states, _ = run_packed(run, torch.tensor([2, 5, 1]), batch_first, x)
        first = states if isinstance(states, Tensor) else states[0]
        return padded.sin().sum() + first.square().sum()

    def by_autograd(weights: dict[str, Tensor], x: Tensor) -> Any:
        leaves = {k: w.clone().requires_grad_() for k, w in weights.items()}
        x = x.clone().requires_grad_()
        *grads, of_x = torch.autograd.grad(loss(leaves, x), [*leaves.values(), x])
        return dict(zip(leaves, grads, strict=True)), of_x

    batch = torch.randn(4, 3, 5, 3, dtype=torch.float64)
    expected = stacked([by_autograd(weights, x) for x in batch])
    slopes = tsfunc.vmap(tsfunc.grad(loss, argnums=(0, 1)), in_dims=(None, 0))(weights, batch)
    torch.testing.assert_close(slopes, expected)
    forward = tsfunc.vmap(tsfunc.jacfwd(loss, argnums=1), in_dims=(None, 0))(weights, batch)
    torch.testing.assert_close(forward, expected[1])
    many = {key: torch.stack([value, value / 2, -value]) for key, value in weights.items()}
    each = tsfunc.vmap(tsfunc.grad(loss), in_dims=(0, None))(many, batch[0])
    alone = [by_autograd({k: v[i] for k, v in many.items()}, batch[0])[0] for i in range(3)]
    torch.testing.assert_close(each, stacked(alone))


CALLS = [
    (torch.randn(2, 3, 5, 3, dtype=torch.float64), torch.tensor(lengths))
    for lengths in ((5, 4, 1), (2, 5, 1), (1, 1, 2))
]
LAYERS: dict[str, Callable[..., nn.Module]] = {
    "LSTM": lambda **options: nn.LSTM(3, 4, proj_size=2, **options),
    "GRU": lambda **options: nn.GRU(3, 4, num_layers=2, bidirectional=True, **options),
    "RNN": lambda **options: nn.RNN(3, 4, bias=False, **options),
}


@pytest.mark.parametrize("name", LAYERS)
def test_one_program_for_all_lengths(name: str) -> None:
    """The lengths are an input of the program, under derivatives and vmap, too."""
    layer = LAYERS[name](dtype=torch.float64, batch_first=True)
    weights = {key: value.detach() for key, value in layer.named_parameters()}

    def run(weights: dict[str, Tensor], x: Tensor, lengths: Tensor) -> Any:
        packed = rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
        out, states = tsfunc.functional_call(layer, weights, (packed,))
        padded, _ = rnn.pad_packed_sequence(out, True, padding_value=-2.0)
        return padded, states, out.data.square()

    def loss(weights: dict[str, Tensor], x: Tensor, lengths: Tensor) -> Tensor:
        parts = optree.tree_leaves(run(weights, x, lengths))
        return torch.stack([part.sin().sum() for part in parts]).sum()

    def slopes(weights: dict[str, Tensor], x: Tensor, lengths: Tensor) -> Any:
        leaves = {key: w.clone().requires_grad_() for key, w in weights.items()}
        x = x.clone().requires_grad_()
        *grads, of_x = torch.autograd.grad(loss(leaves, x, lengths), [*leaves.values(), x])
        return dict(zip(leaves, grads, strict=True)), of_x

    def tangent(weights: dict[str, Tensor], x: Tensor, lengths: Tensor) -> Tensor:
        f = functools.partial(loss, weights, lengths=lengths)
        return tsfunc.jvp(f, (x,), (torch.ones_like(x),))[1]

    grad = tsfunc.grad(loss, argnums=(0, 1))
    for f, expected in (
        (grad, slopes),
        (tangent, lambda *args: slopes(*args)[1].sum()),
        (tsfunc.vmap(run, in_dims=(None, 0, None)), over_examples(run)),
        (tsfunc.vmap(grad, in_dims=(None, 0, None)), over_examples(slopes)),
    ):
        program = tsfunc.specialize(f)
        for x, lengths in CALLS:
            x = x if expected.__name__ == "over" else x[0]
            torch.testing.assert_close(program(weights, x, lengths), expected(weights, x, lengths))
        assert program.cache_info().programs == 1


def over_examples(f: Callable[..., Any]) -> Callable[..., Any]:
    def over(weights: Any, batch: Tensor, lengths: Tensor) -> Any:
        return stacked([f(weights, x, lengths) for x in batch])

    return over


@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN"])
def test_a_training_step(name: str) -> None:
    layer = getattr(nn, name)(3, 4, dtype=torch.float64, batch_first=True)

    def step(x: Tensor, lengths: Tensor) -> Tensor:
        layer.zero_grad()
        out, _ = layer(rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False))
        loss = rnn.pad_packed_sequence(out, True)[0].square().sum()
        loss.backward()
        return loss

    program = tsfunc.specialize(step)
    for batch, lengths in CALLS:
        results = []
        for f in (step, program):
            loss = f(batch[0], lengths)
            results.append([loss, *(p.grad for p in layer.parameters())])
            layer.zero_grad()
        torch.testing.assert_close(*results)
