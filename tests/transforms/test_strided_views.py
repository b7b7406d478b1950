"""``as_strided`` of arguments and results of all layouts, against the loop over the examples."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tsfunc import grad, specialize, vmap

REFUSALS = ("lie apart in memory", "reads memory from", "out of bounds for storage")

RESULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "argument": lambda x: x,
    "clone": lambda x: x.clone(),
    "product": lambda x: x * 2,
    "transposed clone": lambda x: x.t().clone(),
    "contiguous": lambda x: (x * 2).contiguous(),
    "contiguous clone": lambda x: x.clone(memory_format=torch.contiguous_format),
    "part of a clone": lambda x: x.clone()[:, 1:],
    "matrix product": lambda x: x @ torch.ones(3, 3, dtype=x.dtype),
    "concatenation": lambda x: torch.cat([x, x]),
    "cumulative sum": lambda x: x.cumsum(0),
    "written": lambda x: x.clone().neg_(),
}

VIEWS: dict[str, Callable[..., Tensor]] = {
    "as_strided": lambda x, *view: x.as_strided(*view),
    "torch.as_strided": torch.as_strided,
    "as_strided_": lambda x, *view: x.view_as(x).as_strided_(*view),
    "as_strided_copy": torch.as_strided_copy,
    "as_strided_copy into a tensor": lambda x, *view: torch.as_strided_copy(
        x, *view, out=x.new_empty(view[0])
    ),
    "as_strided_scatter": lambda x, *view: x.as_strided_scatter(
        torch.arange(float(torch.Size(view[0]).numel())).reshape(view[0]).to(x.dtype), *view
    ),
}


def loop(func: Callable[[Tensor], Tensor], batch: Tensor, at: int) -> Tensor | None:
    """Return the stacked results of the examples; None if torch refuses an example."""
    try:
        return torch.stack([func(x) for x in batch.unbind(at)])
    except RuntimeError:
        return None


def drawn_batch(rng: random.Random, at: int) -> Tensor:
    """Return a batch of (2, 3) matrices in a random layout."""
    shape = [2, 3]
    shape.insert(at, rng.randint(1, 4))
    order = rng.sample(range(3), 3)
    dense = torch.randn([shape[d] for d in order], dtype=torch.float64)
    return dense.permute([order.index(d) for d in range(3)])


def drawn_view(rng: random.Random) -> tuple[Sequence[int], Sequence[int]]:
    rank = rng.randint(1, 2)
    return [rng.randint(1, 3) for _ in range(rank)], [rng.randint(1, 4) for _ in range(rank)]


@pytest.mark.parametrize("name", RESULTS)
def test_strides_written_by_hand(name: str) -> None:
    """The result agrees with the loop, or the call is refused."""
    seed = random.SystemRandom().randrange(2**32)
    rng = random.Random(seed)
    equal = 0
    for _ in range(40):
        at, view, kind = rng.randrange(3), drawn_view(rng), rng.choice(sorted(VIEWS))
        batch = drawn_batch(rng, at)

        def func(x: Tensor, view: Any = view, kind: str = kind) -> Tensor:
            return VIEWS[kind](RESULTS[name](x), *view)

        transformed: Any = vmap(func, at)
        outer = rng.random() < 0.3
        if rng.random() < 0.3:
            transformed = specialize(transformed)
        if outer:
            transformed = vmap(transformed, 3)
        place = f"seed {seed}: {kind} of {name}, {view}, {batch.shape}, {batch.stride()} at {at}"
        want = loop(func, batch, at)
        try:
            got = transformed(batch.unsqueeze(-1) if outer else batch)
        except RuntimeError as error:
            assert want is None or any(text in str(error) for text in REFUSALS), place
            continue
        if want is None:  # the strides are those of the batch, as if read from the tensor
            got = got[0] if outer else got
            for x, out in zip(batch.unbind(at), got.unbind(0), strict=True):
                assert (
                    kind == "as_strided_scatter"
                    or torch.isin(out.flatten(), RESULTS[name](x).flatten()).all()
                )
            continue
        torch.testing.assert_close(got.reshape(want.shape), want, msg=lambda m: f"{place}\n{m}")  # noqa: B023
        equal += 1
    assert equal


@pytest.mark.parametrize("at", range(3))
def test_the_remedy_of_the_refusal(at: int) -> None:
    batch = torch.randn(2, 3, 4).movedim(2, at).contiguous()

    def windows(x: Tensor, contiguous: bool) -> Tensor:
        y = x * 2
        y = y.contiguous() if contiguous else y
        return y.as_strided((5, 2), (1, 1))

    want = torch.stack([windows(x.clone(), True) for x in batch.unbind(at)])
    assert vmap(lambda x: windows(x, True), at)(batch).equal(want)
    if at:
        with pytest.raises(RuntimeError, match=r"Call \.contiguous\(\) first"):
            vmap(lambda x: windows(x, False), at)(batch)


@pytest.mark.parametrize("at", [0, 1])
def test_strides_read_from_the_tensor(at: int) -> None:
    """Windows over a result of any layout; also their gradients."""
    batch = torch.randn(9, 5, dtype=torch.float64).movedim(1, at).contiguous()

    def windows(x: Tensor) -> Tensor:
        y = x * 2
        (step,) = y.stride()
        return y.as_strided((7, 3), (step, step), y.storage_offset())

    want = torch.stack([(x * 2).unfold(0, 3, 1) for x in batch.unbind(at)])
    torch.testing.assert_close(vmap(windows, at)(batch), want)

    def of_windows(x: Tensor) -> Tensor:
        return windows(x).sin().sum()

    def of_unfolded(x: Tensor) -> Tensor:
        return (x * 2).unfold(0, 3, 1).sin().sum()

    got = vmap(grad(of_windows), at)(batch)
    torch.testing.assert_close(got, vmap(grad(of_unfolded), at)(batch))
