"""Differentiable decompositions compute the results of their operators."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tsfunc
from tests.ops.harness import overload
from tests.ops.test_registry import seeded_calls
from tsfunc.ops.differentiable_decompositions import (
    BACKWARD_DECOMPOSED,
    DECOMPOSED,
    UNDIFFERENTIABLE_DECOMPOSED,
)
from tsfunc.testing import check_grads

ALL = {**DECOMPOSED, **BACKWARD_DECOMPOSED}


def with_true_norms(args: list[Any]) -> list[Any]:
    """Return norms that agree with the weight: the decomposition reads them from the weight."""
    cotangent, v, g, _, dim = args
    dims = [d for d in range(v.dim()) if d != dim % v.dim()]
    norms = torch.linalg.vector_norm(v, 2, dims, True) if dims else v.abs()
    return [cotangent, v, g, norms, dim]


def with_true_statistics(args: list[Any]) -> list[Any]:
    """Return statistics that agree with the input."""
    cotangent, x, weight, running_mean, running_var, _, _, training, eps, *rest = args
    dims = [0, *range(2, x.dim())]
    mean, scale = x.mean(dims), (x.var(dims, correction=0) + eps).rsqrt()
    return [cotangent, x, weight, running_mean, running_var, mean, scale, training, eps, *rest]


# Arguments that must agree with each other.
RELATED = {
    "aten::_weight_norm_differentiable_backward": with_true_norms,
    "aten::batch_norm_backward": with_true_statistics,
}


def copied(args: list[Any]) -> list[Any]:
    return [arg.detach().clone() if isinstance(arg, Tensor) else arg for arg in args]


def results(out: Any) -> list[Any]:
    return list(out) if isinstance(out, (tuple, list)) else [out]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", sorted(ALL))
def test_values_and_dtypes(name: str, dtype: torch.dtype) -> None:
    for args, kwargs in seeded_calls(name):
        args = [
            arg.to(dtype) if isinstance(arg, Tensor) and arg.is_floating_point() else arg
            for arg in args
        ]
        args = RELATED.get(name, list)(args)
        want = results(overload(name)(*copied(args), **kwargs))
        found = ALL[name](*copied(args), **kwargs)
        if found is NotImplemented:
            continue
        for mine, theirs in zip(results(found), want, strict=True):
            assert (mine is None) == (theirs is None)
            if theirs is not None and theirs.numel():
                torch.testing.assert_close(mine, theirs, equal_nan=True)


X = torch.randn(3, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
COTANGENT = X.flip(0, 1).exp()
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": lambda x: F.layer_norm(x, (4, 2), COTANGENT[0], COTANGENT[1]),
    "layer_norm of one dim": lambda x: F.layer_norm(x, (2,)),
    "batch_norm": lambda x: F.batch_norm(x, None, None, COTANGENT[0, :, 0], training=True),
    "group_norm": lambda x: F.group_norm(x, 2),
    "rms_norm": lambda x: F.rms_norm(x, (4, 2)),
    "glu": lambda x: F.glu(x, 1).repeat(1, 2, 1),
    "softmax": lambda x: x.softmax(1),
    "logsumexp": lambda x: x.logsumexp(1, keepdim=True).expand_as(x),
    "cumprod": lambda x: x.cumprod(1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_of_derivatives(name: str) -> None:
    """Second derivatives agree with central differences of the first ones, in both modes."""
    check_grads(tsfunc.grad(lambda x: (FUNCTIONS[name](x) * COTANGENT).sum()), X)


@pytest.mark.parametrize("which", [1, 2])
def test_the_statistics_of_group_norm_have_second_derivatives(which: int) -> None:
    """Second derivatives agree with the formulas of the mean and the scale."""

    def statistic(x: Tensor) -> Tensor:
        out: Tensor = torch.ops.aten.native_group_norm(x, None, None, 3, 4, 2, 2, 1e-5)[which]
        return out.sin().sum()

    def formula(x: Tensor) -> Tensor:
        grouped = x.reshape(3, 2, 4)
        mean, var = grouped.mean(-1), grouped.var(-1, correction=0)
        return (mean, (var + 1e-5).rsqrt())[which - 1].sin().sum()

    expected = torch.autograd.functional.hessian(formula, X)
    for inner in (tsfunc.jacfwd, tsfunc.jacrev):
        for outer in (tsfunc.jacfwd, tsfunc.jacrev):
            torch.testing.assert_close(outer(inner(statistic))(X), expected)


def drawn_in_layout(*sizes: int, order: Sequence[int]) -> Tensor:
    """Return a tensor with a given order of its dims in memory."""
    inverse = [order.index(dim) for dim in range(len(sizes))]
    return torch.randn([sizes[dim] for dim in order]).permute(inverse)


# The tests above cover the values. The fused kernels read rows with a stride of 1.
@pytest.mark.parametrize("order", [(*first, 3) for first in itertools.permutations(range(3))])
def test_the_formulas_of_backward_operators_have_their_layouts(order: tuple[int, ...]) -> None:
    """Programs take views of results; the trace has seen the operator's layout."""
    aten = torch.ops.aten
    formulas: dict[str, Any] = {**BACKWARD_DECOMPOSED, **UNDIFFERENTIABLE_DECOMPOSED}
    x, grad = (drawn_in_layout(3, 4, 2, 5, order=order) for _ in range(2))
    other = torch.randn(3, 4, 2, 5)
    query, key, value = (drawn_in_layout(3, 4, 2, 5, order=order) for _ in range(3))
    out, sums = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
    mean, var = x.mean(-1, keepdim=True), x.var(-1, correction=0, keepdim=True)
    of_channels = x.mean((0, 2, 3)), (x.var((0, 2, 3), correction=0) + 1e-5).rsqrt()
    packed = x.contiguous()
    grouped = aten.native_group_norm(packed, torch.ones(4), None, 3, 4, 10, 2, 1e-5)
    calls: dict[str, tuple[Any, ...]] = {
        "_scaled_dot_product_flash_attention_for_cpu_backward": (
            query, key, value, out, sums, 0.0, False,
        ),
        "native_layer_norm_backward": (
            x, [5], mean, (var + 1e-5).rsqrt(), torch.ones(5), torch.ones(5), [True] * 3,
        ),
        "native_batch_norm_backward": (
            x, torch.ones(4), None, None, *of_channels, True, 1e-5, [True] * 3,
        ),
        "native_group_norm_backward": (
            packed, *grouped[1:], torch.ones(4), 3, 4, 10, 2, [True] * 3,
        ),
    }  # fmt: skip
    for name, args in calls.items():
        for given in (grad, other):
            formula = formulas[f"aten::{name}"]
            expected = getattr(aten, name)(given, *args)
            for got, result in zip(formula(given, *args), expected, strict=True):
                assert got is None or got.stride() == result.stride(), name


def test_gradients_of_attention_modules_in_programs_with_recorded_parameters() -> None:
    layer = torch.nn.MultiheadAttention(4, 2, batch_first=True)
    norm = torch.nn.LayerNorm(4)

    def loss(x: Tensor) -> Tensor:
        y = norm(x.T)[None]
        out: Tensor = y + layer(y, y, y, need_weights=False)[0]
        return out.square().sum()

    x = torch.randn(3, 4, 5)
    loop = []
    for row in x.clone().requires_grad_():
        loop.append(torch.autograd.grad(loss(row), row)[0])
    for dims in ({}, {"x": tsfunc.MetaTensorType(["n", 4, "t"])}):
        program = tsfunc.specialize(tsfunc.vmap(tsfunc.grad(loss)), dims)
        torch.testing.assert_close(program(x), torch.stack(loop))
        torch.testing.assert_close(program(x[:2]), torch.stack(loop[:2]))
