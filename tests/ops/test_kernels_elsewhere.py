"""Rules of operators whose kernels need a GPU or several processes, on stand-ins for the kernels.

A stand-in has the dims and the conditions of the kernel, and numbers of its own: a sample of its
results depends on the same sample of its arguments. ``test_recurrent.py`` (on a GPU) and
``tests/distributed`` run the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.harness import Level, check, normal, overload
from tsfunc.ops.registry import find

Rows = dict[str, Callable[..., Any]]


class StandIn:
    """An operator with the name and schema of another, and a function for its kernel."""

    def __init__(self, name: str, kernel: Callable[..., Any]) -> None:
        self._name = name
        self._kernel = kernel
        self._schema = overload(name)._schema

    def name(self) -> str:
        return self._name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._kernel(*args, **kwargs)


# --- fused cells


def are_samples(*tensors: Tensor | None) -> None:
    for x in tensors:
        assert x is None or (x.dim() == 2 and x.is_contiguous())


def gates_of(x: Tensor, y: Tensor, b: Tensor | None, d: Tensor | None) -> Tensor:
    are_samples(x, y)
    assert (b is None) == (d is None)
    if b is None or d is None:
        return x + 2 * y
    assert b.dim() == d.dim() == 1
    return x + b + 2 * (y + d)


def lstm_cell(x: Tensor, y: Tensor, c: Tensor, b: Any = None, d: Any = None) -> Any:
    are_samples(c)
    gates = gates_of(x, y, b, d)
    i, f, g, o = gates.chunk(4, 1)
    c = f * c + i * g
    return o * c, c, gates


def lstm_cell_backward(
    grad: Tensor | None, grad_c: Tensor | None, c: Tensor, after: Tensor, gates: Tensor, bias: bool
) -> Any:
    are_samples(grad, grad_c, c, after, gates)
    one = 0 if grad is None else grad
    other = 0 if grad_c is None else 2 * grad_c
    out = gates * (one + other + after + 3 * c).repeat(1, 4)
    return out, c * other, out.sum(0) if bias else None


def gru_cell(x: Tensor, y: Tensor, h: Tensor, b: Any = None, d: Any = None) -> Any:
    are_samples(h)
    r, z, n = gates_of(x, y, b, d).chunk(3, 1)
    return z * h + n * r, torch.cat([r, z, n, h, r * n], 1)


def gru_cell_backward(grad: Tensor, workspace: Tensor, bias: bool) -> Any:
    are_samples(grad, workspace)
    parts = [grad * part for part in workspace.chunk(5, 1)]
    x, y = torch.cat(parts[:3], 1), torch.cat(parts[2:], 1)
    return x, y, parts[0], *((x.sum(0), y.sum(0)) if bias else (None, None))


def test_fused_cells_are_the_loop_over_their_examples() -> None:
    for name, kernel, gates in (("lstm", lstm_cell, 4), ("gru", gru_cell, 3)):
        cell = StandIn(f"aten::_thnn_fused_{name}_cell", kernel)
        x, y, h = normal(2, gates * 4), normal(2, gates * 4) * 2, normal(2, 4)
        assert check(cell, x, y, h)
        assert check(cell, x, y, h, normal(gates * 4), normal(gates * 4) + 1)


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_of_fused_cells_are_the_loop_over_their_examples(bias: bool) -> None:
    lstm = StandIn("aten::_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward)
    grads, states = (normal(2, 4), normal(2, 4) + 1), (normal(2, 4) + 2, normal(2, 4) + 3)
    for given in (grads, (grads[0], None), (None, grads[1])):
        assert check(lstm, *given, *states, normal(2, 16), bias)
    gru = StandIn("aten::_thnn_fused_gru_cell_backward", gru_cell_backward)
    assert check(gru, normal(2, 4), normal(2, 20), bias)


# --- collectives

RANKS = 3


def is_sent(x: Tensor) -> Tensor:
    assert x.is_contiguous()
    return x


def has_dims(x: Tensor) -> Tensor:
    if not x.dim():
        raise RuntimeError("a scalar has no first dim")
    return is_sent(x)


def gather(x: Tensor, *_: Any) -> Tensor:
    return torch.cat([has_dims(x) * (r + 1) for r in range(RANKS)])


def reduce_scatter(x: Tensor, *_: Any) -> Tensor:
    return has_dims(x).chunk(RANKS)[1] * 6


def all_to_all(x: Tensor, sizes: Sequence[int], *_: Any) -> Tensor:
    return torch.cat([has_dims(x)[:size] * (r + 1) for r, size in enumerate(sizes)])


def change_shard(x: Tensor, gather_dim: int, shard_dim: int, *_: Any) -> Tensor:
    assert gather_dim >= 0 and shard_dim >= 0
    return torch.cat(is_sent(x).chunk(RANKS, shard_dim), gather_dim)


OF_ONE: Rows = {
    "all_reduce": lambda x, *_: is_sent(x) * 6,
    "broadcast": lambda x, *_: is_sent(x) * 2,
    "wait_tensor": is_sent,
    "isend": lambda x, *_: is_sent(x) + 1,
    "all_reduce_": lambda x, *_: is_sent(x).mul_(6),
    "broadcast_": lambda x, *_: is_sent(x).mul_(2),
    "all_gather_into_tensor": gather,
    "reduce_scatter_tensor": reduce_scatter,
    "all_to_all_single": all_to_all,
}
OF_MANY: Rows = {
    "all_reduce_coalesced": lambda xs, *_: [is_sent(x) * 6 for x in xs],
    "all_gather_into_tensor_coalesced": lambda xs, *_: [gather(x) for x in xs],
    "reduce_scatter_tensor_coalesced": lambda xs, *_: [reduce_scatter(x) for x in xs],
}
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "wait_tensor": (),
    "broadcast": (0, "group"),
    "broadcast_": (0, "group"),
    "isend": (1, 0, "group"),
    "all_gather_into_tensor": (RANKS, "group"),
    "all_gather_into_tensor_coalesced": (RANKS, "group"),
    "all_to_all_single": ([2, 0, 1], [1, 1, 1], "group"),
    "reduce_scatter_tensor": ("sum", RANKS, "group"),
    "reduce_scatter_tensor_coalesced": ("sum", RANKS, "group"),
}
SHAPES: list[tuple[int, ...]] = [(6,), (6, 2), (6, 2, 4)]
NAMES = [f"_c10d_functional::{name}" for name in (*OF_ONE, *OF_MANY)]
NAMES += [
    f"_c10d_functional_autograd::{name}"
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
]


def collective(name: str) -> tuple[StandIn, tuple[Any, ...], bool]:
    """Return the stand-in of a collective, its other arguments, and True if it takes a list."""
    short = name.rpartition("::")[2]
    kernel = {**OF_ONE, **OF_MANY}[short]
    return StandIn(name, kernel), ARGUMENTS.get(short, ("sum", "group")), short in OF_MANY


@pytest.mark.parametrize("name", NAMES)
def test_collectives_are_the_loop_over_their_examples(name: str) -> None:
    op, rest, listed = collective(name)
    for shape in SHAPES:
        if listed:
            assert check(op, [normal(*shape), normal(*shape, 3)], *rest)
        else:
            assert check(op, normal(*shape), *rest)


@pytest.mark.parametrize("name", [name for name in NAMES if "gather" in name or "scatter" in name])
def test_collectives_along_the_first_dim_refuse_scalars(name: str) -> None:
    op, rest, listed = collective(name)
    row, x = find(name), normal(4)
    assert row is not None and row.rule is not None
    with pytest.raises(RuntimeError, match="a scalar has no first dim\nInside of vmap"):
        row.rule(op, Level(4), [[0] if listed else 0], ([x] if listed else x, *rest), {})


@pytest.mark.parametrize("dims", [(0, 1), (1, 0), (-1, 0), (0, -2), (-3, -1)])
def test_the_shard_of_each_example_changes_its_dim(dims: tuple[int, int]) -> None:
    name = "_dtensor::shard_dim_alltoall"

    def kernel(x: Tensor, gather_dim: int, shard_dim: int, *rest: Any) -> Tensor:
        return change_shard(x, gather_dim % x.dim(), shard_dim % x.dim(), *rest)

    assert check(StandIn(name, kernel), normal(3, 6, 9), *dims, "group")
