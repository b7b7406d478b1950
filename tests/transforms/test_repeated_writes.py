"""Several writes into one view have the derivatives of the loop.

torch takes a view that another view has changed for a leaf until its history is read, and refuses
to write into it. A batching rule may write through a view of its own, where the function has one.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tsfunc import grad, jvp, specialize, vmap

DOUBLE = torch.float64
WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "add_": lambda v, q: v.add_(q),
    "mul_": lambda v, q: v.mul_(q),
    "fill_": lambda v, q: v.fill_(q),
    "copy_": lambda v, q: v.copy_(q),
    "lerp_": lambda v, q: v.lerp_(v.clone(), q),
    "clamp_": lambda v, q: v.clamp_(min=q),
    "setitem": lambda v, q: v.__setitem__(0, q),
    "column": lambda v, q: v[..., 0].fill_(q),
    "masked_fill_": lambda v, q: v.masked_fill_(v > 0.5, q),
    "index_fill_": lambda v, q: v.index_fill_(0, torch.tensor([0]), q),
    "index_put_": lambda v, q: v.index_put_((torch.tensor([0]),), q),
    "index_add_": lambda v, q: v.index_add_(0, torch.tensor([0]), q.expand(v[:1].shape)),
    "scatter_": lambda v, q: v.scatter_(
        0, torch.zeros((1,) * v.dim(), dtype=torch.long), q.expand((1,) * v.dim())
    ),
}
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda x: x.clone(),
    "transpose": lambda x: x.clone().mT,
    "slice": lambda x: x.clone()[:, 1:],
    "flat": lambda x: x.clone().flatten(),
    "row": lambda x: x.clone()[0],
    "diagonal": lambda x: x.clone().diagonal(),
    "made inside": lambda x: torch.zeros(3, 3, dtype=DOUBLE).t(),
}
Loss = Callable[[Tensor, Tensor], Tensor]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("drawn", range(8))
def test_writes_into_one_view(view: str, drawn: int) -> None:
    rng = random.Random(f"{torch.initial_seed()}{view}{drawn}")
    # After a write through another view, torch refuses writes into the first one.
    through_views = ["setitem", "column"]
    names = [rng.choice(list(WRITES)) for _ in range(rng.choice([2, 3]))]
    writes = [WRITES[name] for name in sorted(names, key=through_views.__contains__)]
    place = rng.choice([0, 1, 2])
    x, q = torch.randn(4, 3, 3, dtype=DOUBLE), torch.tensor(0.3, dtype=DOUBLE)
    batch = x.movedim(0, place)

    def loss(q: Tensor, x: Tensor) -> Tensor:
        written = VIEWS[view](x)
        for i, write in enumerate(writes):
            write(written, (q * (i + 1)).sin())
        return (written**2).sum()

    def of_batch(q: Tensor) -> Tensor:
        return vmap(loss, (None, place))(q, batch).sum()

    def by_example(q: Tensor) -> Tensor:
        return torch.stack([loss(q, one) for one in x]).sum()

    leaf = q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(by_example(leaf), leaf, materialize_grads=True)
    for _ in range(3):
        torch.testing.assert_close(grad(of_batch)(q), expected)
        each = vmap(grad(loss), (None, place))(q, batch)
        torch.testing.assert_close(each.sum(), expected)
        nested = vmap(vmap(grad(loss), (None, place)), (None, 0))(q, batch[None])
        torch.testing.assert_close(nested.sum(), expected)
        tangent = jvp(of_batch, (q,), (torch.ones_like(q),))[1]
        torch.testing.assert_close(tangent, expected)


@pytest.mark.parametrize("program", [False, True])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize(
    "view",
    [lambda z: z.T, lambda z: z[0], lambda z: z.view(-1)],
    ids=["transpose", "row", "flat"],
)
def test_a_tensor_is_written_after_a_view_of_it(
    view: Callable[[Tensor], Tensor], place: int, program: bool
) -> None:
    def loss(x: Tensor) -> Tensor:
        whole = torch.zeros(3, 4, dtype=DOUBLE)
        view(whole).add_(view(x).sin())
        whole.add_(x * x)
        return (whole**2).sum()

    x = torch.randn(2, 3, 4, dtype=DOUBLE)
    mapped = vmap(grad(loss), place)
    found = (specialize(mapped) if program else mapped)(x.movedim(0, place).contiguous())
    torch.testing.assert_close(found, torch.stack([grad(loss)(one) for one in x]))
