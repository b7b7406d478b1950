"""Segment reductions refuse segments as they do for one example."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tsfunc import vmap


@pytest.mark.parametrize("in_dims", [(0, None), (0, 0), (1, 1)])
@pytest.mark.parametrize("lengths", [[2, 3], [-2, 8], [6, 1]])
def test_segments_that_do_not_fit(lengths: list[int], in_dims: tuple[int, int | None]) -> None:
    def reduced(x: Tensor, lengths: Tensor, **options: Any) -> Tensor:
        return torch.segment_reduce(x, "sum", lengths=lengths, **options)

    examples, given = torch.rand(3, 6), torch.tensor(lengths)
    x = examples.movedim(0, in_dims[0])
    of_all = given if in_dims[1] is None else torch.stack([given] * 3, in_dims[1])
    with pytest.raises(RuntimeError) as one:
        reduced(examples[0], given)
    with pytest.raises(RuntimeError) as all_of_them:
        vmap(reduced, in_dims)(x, of_all)
    assert str(one.value).partition("\n")[0] in str(all_of_them.value)


@pytest.mark.parametrize("in_dims", [(0, None), (0, 0), (1, 1)])
def test_lengths_that_are_not_checked(in_dims: tuple[int, int | None]) -> None:
    def reduced(x: Tensor, lengths: Tensor) -> Tensor:
        return torch.segment_reduce(x, "sum", lengths=lengths, unsafe=True)

    examples, given = torch.rand(3, 6), torch.tensor([2, 3])
    of_all = given if in_dims[1] is None else torch.stack([given] * 3, in_dims[1])
    found = vmap(reduced, in_dims)(examples.movedim(0, in_dims[0]), of_all)
    torch.testing.assert_close(found, torch.stack([reduced(x, given) for x in examples]))
