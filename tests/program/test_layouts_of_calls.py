"""Programs for open sizes serve tensors with gaps in memory: copies that the code relies on stay."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tsfunc import MetaTensorType, specialize

COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": lambda x: x.clone(),
    "multiplied by 1": lambda x: x * 1,
    "divided by 1": lambda x: x / 1,
    "power 1": lambda x: x**1,
    "minus 0": lambda x: x - 0,
    "copied by to": lambda x: x.to(x.dtype, copy=True),
    "contiguous": lambda x: x.contiguous(),
    "cloned twice": lambda x: x.clone()[:].clone(),
}
USES: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(-1).sin(),
    "as_strided": lambda x: torch.as_strided(x, (3, 2), (2, 1), 1).sin(),
    "a view's view": lambda x: x[1:].view(-1).sin(),
    "view_as_complex": lambda x: torch.view_as_complex(x[:, :2]).abs(),
}


def drawn_tensor(draw: random.Random) -> Tensor:
    base = torch.randn(draw.randint(5, 8), draw.randint(8, 12), dtype=torch.float64)
    kind = draw.choice(["dense", "columns", "rows", "transposed", "both"])
    if kind == "columns":
        return base[:, : draw.randint(4, 7)]
    if kind == "rows":
        return base[:: draw.randint(1, 2)]
    if kind == "both":
        return base[1:, ::2]
    return base.t() if kind == "transposed" else base


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_is_dense_in_programs_too(copy: str, use: str) -> None:
    seed = secrets.randbits(32)
    print("seed", seed)
    draw = random.Random(seed)
    torch.manual_seed(seed)

    def f(x: Tensor) -> Tensor:
        return USES[use](COPIES[copy](x))

    program = specialize(f, {"x": MetaTensorType(["a", "b"])})
    for _ in range(6):
        x = drawn_tensor(draw)
        try:
            expected = f(x)
        except RuntimeError:  # no view of this layout
            continue
        torch.testing.assert_close(program(x), expected, rtol=0, atol=0)
