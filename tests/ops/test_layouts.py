"""Results of a batch have the memory layout of the result for one example."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor
from torch._prims_common import suggest_memory_format

import tsfunc
from tsfunc.ops.channels_last import channels_last

IMAGES = torch.randn(3, 2, 8, 4, 5)
VOLUMES = torch.randn(3, 2, 4, 3, 2, 5)

CALLS: dict[str, Callable[[Tensor], Any]] = {
    "cat": lambda x: torch.cat([x, x]),
    "cat channels": lambda x: torch.cat([x, x + 1], 1),
    "cat columns": lambda x: torch.cat([x, x], -1),
    "cat with one of another layout": lambda x: torch.cat([x, x.contiguous()], 1),
    "stack": lambda x: torch.stack([x, x]),
    "stack inside": lambda x: torch.stack([x, x], 2),
    "stack last": lambda x: torch.stack([x, x], -1),
    "pad": lambda x: nnf.pad(x, (1, 2)),
    "pad channels": lambda x: nnf.pad(
        x, (0, 1, -1, 2) + (0, 0) * (x.dim() - 4) + (3, 1), value=2.0
    ),
    "pad all": lambda x: nnf.pad(x, (1, 0) * x.dim()),
    "roll": lambda x: x.roll(1, 2),
    "roll two dims": lambda x: x.roll((1, 2), (1, -1)),
    "group_norm": lambda x: nnf.group_norm(x, 2),
    "rrelu": nnf.rrelu,
    "pixel_shuffle": lambda x: nnf.pixel_shuffle(x, 2) if x.dim() == 4 else x,
    "pixel_unshuffle": lambda x: nnf.pixel_unshuffle(x[..., :4], 2) if x.dim() == 4 else x,
    "unsqueeze": lambda x: x[0].unsqueeze(0),
}


def with_channels_last(x: Tensor) -> Tensor:
    return x.movedim(2, -1).contiguous().movedim(-1, 2)


@pytest.mark.parametrize("batch", [IMAGES, VOLUMES], ids=["images", "volumes"])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_as_one_example(name: str, last: bool, batch: Tensor) -> None:
    f = CALLS[name]
    batch = with_channels_last(batch) if last else batch
    strides: list[tuple[int, ...]] = []

    def seen(x: Tensor) -> Any:
        out = f(x)
        strides.append(out.stride())
        return out

    out = tsfunc.vmap(seen)(batch)
    one = f(batch[0])
    assert strides == [one.stride()]
    torch.testing.assert_close(out, torch.stack([f(x) for x in batch]))


@pytest.mark.parametrize("number", range(40))
def test_channels_last_is_decided_as_torch_does(number: int) -> None:
    draw = random.Random(torch.initial_seed() + number)
    rank = draw.choice([3, 4, 5])
    shape = [draw.choice([1, 1, 2, 3]) for _ in range(rank)]
    order = draw.sample(range(rank), rank)
    if draw.random() < 0.6 and rank > 3:
        order = [0, *range(2, rank), 1]
    x = torch.zeros([shape[d] for d in order]).permute([order.index(d) for d in range(rank)])
    if draw.random() < 0.3:
        x = x.expand(*shape[:-1], draw.choice([shape[-1], 2])) if shape[-1] == 1 else x[..., :1]
    expected = suggest_memory_format(x) is not torch.contiguous_format
    assert channels_last(x, None) == expected, (x.shape, x.stride())


def test_channels_last_results() -> None:
    x = IMAGES.contiguous()
    assert not channels_last(x, 0) and not channels_last(x[0], None)
    x = with_channels_last(x)
    assert channels_last(x, 0) and channels_last(x[0], None) and channels_last(x.movedim(0, 3), 3)
    assert not channels_last(x[:, 0], 0), "an example of three dims has no channels"
    assert not channels_last(x[:, :0], 0), "nor has one without elements"
    usual = torch.zeros(3, 1, 1, 4, 4)
    assert not channels_last(usual, 0), "one channel lies both ways"
