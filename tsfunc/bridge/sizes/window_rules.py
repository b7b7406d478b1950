"""Result shapes for windows of symbolic sizes: pooling, and the patches of ``unfold``.

torch's own rules read the size of a window, which adds a guard on its value. The operator
checks that a window fits when the program runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tsfunc.bridge.sizes.shape_rules import channels_last_order, new_like, shape_rule
from tsfunc.bridge.tracers.user_queries import has_symbols


def _average_pool(dims: int) -> Callable[..., Any]:
    """Return the rule for averages over windows in the last dims."""

    def rule(
        x: Any, kernel_size: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False,
        count_include_pad: bool = True, divisor_override: int | None = None,
    ) -> Any:  # fmt: skip
        shape = _pooled_shape(x, dims, ceil_mode, kernel_size, stride or kernel_size, padding, 1)
        if shape is None:
            return NotImplemented
        return new_like(x, shape, order=channels_last_order(x, dims))

    return rule


def _max_pool(dims: int, *, with_indices: bool) -> Callable[..., Any]:
    """Return the rule for maxima over windows in the last dims, with or without indices."""

    def rule(
        x: Any, kernel_size: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> Any:  # fmt: skip
        shape = _pooled_shape(
            x, dims, ceil_mode, kernel_size, stride or kernel_size, padding, dilation
        )
        if shape is None:
            return NotImplemented
        order = channels_last_order(x, dims)
        values = new_like(x, shape, order=order)
        return (values, new_like(x, shape, torch.int64, order)) if with_indices else values

    return rule


for _dims in (1, 2, 3):
    shape_rule(f"avg_pool{_dims}d")(_average_pool(_dims))
    shape_rule(f"max_pool{_dims}d")(_max_pool(_dims, with_indices=False))
    shape_rule(f"max_pool{_dims}d_with_indices")(_max_pool(_dims, with_indices=True))


@shape_rule("im2col")
def _patches(x: Any, kernel_size: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    if not has_symbols((kernel_size, dilation, padding, stride)) or x.dim() not in (3, 4):
        return NotImplemented
    counts = _counts(x.shape[-2:], kernel_size, stride, padding, dilation)
    values = x.shape[-3] * math.prod(_per_dim(kernel_size, 2))
    return new_like(x, [*x.shape[:-3], values, math.prod(counts)])


def _pooled_shape(x: Any, dims: int, ceil_mode: bool, *window: Any) -> list[Any] | None:
    """Return the shape of a pooled tensor; None to use torch's rule."""
    if not has_symbols(window) or ceil_mode or x.dim() not in (dims + 1, dims + 2):
        return None
    return [*x.shape[:-dims], *_counts(x.shape[-dims:], *window)]


def _counts(
    sizes: Sequence[Any], kernel: Any, stride: Any, padding: Any, dilation: Any
) -> list[Any]:
    """Return the number of windows along each dim."""
    window = (_per_dim(extent, len(sizes)) for extent in (kernel, stride, padding, dilation))
    return [
        (size + 2 * around - apart * (length - 1) - 1) // step + 1
        for size, length, step, around, apart in zip(sizes, *window, strict=True)
    ]


def _per_dim(value: Any, dims: int) -> Sequence[Any]:
    """Return an argument for each dim; torch accepts one value for all dims."""
    numbers = [*value] if isinstance(value, list | tuple) else [value]
    return numbers * dims if len(numbers) == 1 else numbers
