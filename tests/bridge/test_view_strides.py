"""Programs view tensors exactly if torch's kernels do."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.bridge.test_iterator_strides import _laid_out
from tsfunc import specialize, vmap
from tsfunc.bridge.sizes.strides import has_view


def _sizes_of(count: int, rng: random.Random) -> list[int]:
    """Return random sizes of a tensor with this number of elements."""
    sizes = []
    while count > 1 and rng.random() < 0.7:
        sizes.append(rng.choice([n for n in range(2, count + 1) if count % n == 0]))
        count //= sizes[-1]
    sizes += [count] if count > 1 else []
    for _ in range(rng.randint(0, 2)):
        sizes.insert(rng.randint(0, len(sizes)), 1)
    return sizes


def test_views_are_those_of_torch(request: pytest.FixtureRequest) -> None:
    rng = random.Random(f"{request.config.option.hypothesis_seed}")
    for _ in range(2000):
        x = _laid_out([rng.choice((1, 1, 2, 3)) for _ in range(rng.randint(0, 5))], rng)
        if rng.random() < 0.3:
            x = x.expand([rng.choice((1, 2)) if n == 1 else n for n in x.shape])
        sizes = _sizes_of(x.numel(), rng)
        try:
            x.view(sizes)
            taken = True
        except RuntimeError:
            taken = False
        assert has_view(x.shape, x.stride(), sizes) is taken, (x.shape, x.stride(), sizes)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.clone().view(-1) * 2,
    "reshape": lambda x: x.clone().reshape(-1) * 2,
    "view of a sum": lambda x: (x + 1).view(3, -1).sum(1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_a_batch_dim_between_dims_of_size_1(name: str, dim: int) -> None:
    x = torch.randn(2, 1, 3).unsqueeze(dim).repeat_interleave(4, dim)
    f = vmap(FUNCTIONS[name], in_dims=dim)
    want = torch.stack([FUNCTIONS[name](each.contiguous()) for each in x.unbind(dim)])
    torch.testing.assert_close(specialize(f)(x), want)
    torch.testing.assert_close(f(x), want)
