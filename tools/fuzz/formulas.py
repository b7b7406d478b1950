"""Formulas for operators whose higher derivatives are wrong in torch.

The reference runs under this mode, so that it differentiates plain arithmetic. torch's formulas of
second order for normalizations, for example, assume that the statistics are those of the forward
pass and lose terms of the third derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


def _standardized(x: Tensor, dims: Sequence[int], eps: float) -> Tensor:
    centered = x - x.mean(list(dims), keepdim=True)
    return centered / (centered.square().mean(list(dims), keepdim=True) + eps).sqrt()


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Scale and shift channels, which are in dim 1."""
    shape = [1, -1, *[1] * (x.dim() - 2)]
    if weight is not None:
        x = x * weight.reshape(shape)
    return x if bias is None else x + bias.reshape(shape)


def _layer_norm(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    out = _standardized(x, range(-len(shape), 0), eps)
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


def _batch_norm(
    x: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    assert training
    return _affine(_standardized(x, [0, *range(2, x.dim())], eps), weight, bias)


def _group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    split = x.reshape(x.shape[0], groups, -1)
    return _affine(_standardized(split, [2], eps).reshape(x.shape), weight, bias)


def _instance_norm(
    x: Tensor,
    mean: Tensor | None = None,
    var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    return _affine(_standardized(x, range(2, x.dim()), eps), weight, bias)


_FORMULAS: dict[Any, Callable[..., Any]] = {
    F.layer_norm: _layer_norm,
    F.batch_norm: _batch_norm,
    F.group_norm: _group_norm,
    F.instance_norm: _instance_norm,
}


class Formulas(TorchFunctionMode):
    """Run these operators as arithmetic; also call each operator once itself, for its errors."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        formula = _FORMULAS.get(func)
        if formula is not None and found.requires_grad:
            found = formula(*args, **(kwargs or {}))
        return found
