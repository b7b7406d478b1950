"""Custom operators under vmap: rules for torch, rules of ours, and what a category gives."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tsfunc
from tsfunc.errors import SlowFallbackWarning

_numbers = itertools.count()
_keep: list[Any] = []  # torch forgets a custom operator that nobody holds


def name() -> str:
    """A name that no other test has: torch can't undefine an operator."""
    return f"tsfunc_tests::op{next(_numbers)}"


def custom_op(function: Callable[..., Any], **options: Any) -> Any:
    """The function as a custom operator."""
    options.setdefault("mutates_args", ())
    made = torch.library.custom_op(name(), function, **options)
    _keep.append(made)
    return made


@pytest.fixture(autouse=True)
def _no_loops() -> Iterator[None]:
    """The loop warns, and a warning is an error; what is to be looped over says so."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", SlowFallbackWarning)
        yield


def scaled(x: Tensor, factor: float) -> Tensor:
    """``x`` times a number, out of torch's sight."""
    return torch.from_numpy(x.detach().numpy() * factor)


def multiplied(x: Tensor, y: Tensor) -> Tensor:
    """A broadcast product, out of torch's sight."""
    return torch.from_numpy(x.detach().numpy() * y.detach().numpy())


def loop(f: Callable[..., Any], dims: tuple[int | None, ...], *xs: Tensor) -> Tensor:
    """The stacked loop."""
    size = next(x.shape[d] for x, d in zip(xs, dims, strict=True) if d is not None)
    rows = [
        f(*[x if d is None else x.select(d, i) for x, d in zip(xs, dims, strict=True)])
        for i in range(size)
    ]
    return torch.stack(rows)


def with_vmap_rule() -> Any:
    """An operator of two tensors with a rule that keeps what it was given."""
    op = custom_op(multiplied)
    seen: list[Any] = []

    def rule(info: Any, in_dims: Any, x: Tensor, y: Tensor) -> Any:
        seen.append((info.batch_size, info.randomness, in_dims))
        x_dim, y_dim = in_dims
        x = x.movedim(x_dim, -1) if x_dim is not None else x.unsqueeze(-1)
        y = y.movedim(y_dim, -1) if y_dim is not None else y.unsqueeze(-1)
        return op(x, y), -1 % op(x, y).dim()

    torch.library.register_vmap(op, rule)
    op.seen = seen
    return op


@pytest.mark.parametrize("dims", [(0, 0), (1, 0), (None, 1), (0, None)])
def test_a_vmap_rule_of_torchs_is_used_as_it_is(dims: Any) -> None:
    op = with_vmap_rule()
    x, y = torch.randn(3, 3), torch.randn(3, 3)
    out = tsfunc.vmap(op, in_dims=dims, randomness="same")(x, y)
    torch.testing.assert_close(out, loop(multiplied, dims, x, y))
    assert op.seen == [(3, "same", dims)]


def test_a_vmap_rule_under_nested_vmaps() -> None:
    op = with_vmap_rule()
    x, y = torch.randn(4, 2, 3), torch.randn(2, 5, 3)
    out = tsfunc.vmap(tsfunc.vmap(op, in_dims=(None, 0)), in_dims=(1, 0))(x, y)
    inner = [loop(multiplied, (None, 0), x[:, i].repeat(1, 1)[:1], y[i]) for i in range(0)]
    want = torch.stack([torch.stack([x[:, i] * 0 + x[:, i] * y[i, j] for j in range(5)])
                        for i in range(2)])  # fmt: skip
    assert inner == []
    torch.testing.assert_close(out, want)
