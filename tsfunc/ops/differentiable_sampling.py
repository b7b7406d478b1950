"""The backward operators of ``grid_sample`` in operators that can be differentiated again.

torch's formulas have no tangents, and the one for volumes has no derivative. The one for images
takes sizes as plain numbers, so that a program would serve the sizes of one call alone.

A sample is a sum over *taps*, the pixels around its position: one for the mode "nearest", two in
each dim for "bilinear", and four in each dim for "bicubic". The weight of a tap is the product of
one weight for each dim, a polynomial of the position in that dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_BILINEAR, _NEAREST, _BICUBIC = range(3)  # torch's numbers of modes
_ZEROS, _BORDER, _REFLECTION = range(3)  # and of paddings
_A = -0.75  # torch's parameter of cubic interpolation
_ELSEWHERE = -100.0  # torch's position of a point that is not finite or very far away
_FARTHEST = 2.0**31 - 2


class _Taps(NamedTuple):
    """The taps of all points in one dim, along a last dim.

    Attributes:
        pixel: the pixel of each tap, inside of the image.
        inside: 0 for a tap outside of the image, else 1.
        weight: the weight of each tap.
        slope: the derivative of the weight by the coordinate of the point.
    """

    pixel: Tensor
    inside: Tensor
    weight: Tensor
    slope: Tensor


def grid_sampler_backward(
    grad: Tensor,
    x: Tensor,
    grid: Tensor,
    mode: int,
    padding: int,
    align_corners: bool,
    mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """``aten::grid_sampler_2d_backward`` and ``aten::grid_sampler_3d_backward``."""
    n, channels, *shape = x.shape
    points = grid.flatten(1, -2)  # (n, points, rank); the last dim has the last axis first
    dims = [
        _taps(points[..., -1 - axis], size, mode, padding, align_corners)
        for axis, size in enumerate(shape)
    ]
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    index = _of_all_dims(
        [taps.pixel * stride for taps, stride in zip(dims, strides, strict=True)], torch.add
    )
    inside = _of_all_dims([taps.inside for taps in dims], torch.mul)
    at = index.flatten(1).unsqueeze(1).expand(n, channels, -1)
    cotangent = grad.flatten(2).unsqueeze(-1)  # (n, channels, points, 1)
    by_x = by_grid = None
    if mask[0]:
        weight = _of_all_dims([taps.weight for taps in dims], torch.mul) * inside
        by_sample = (cotangent * weight.unsqueeze(1)).flatten(2)
        flat = x.new_zeros((n, channels, math.prod(shape)))
        by_x = flat.scatter_add(2, at, by_sample).view(x.shape)
    if mask[1]:
        pixels = x.flatten(2).gather(2, at).unflatten(2, index.shape[1:])
        along = (cotangent * pixels).sum(1) * inside  # (n, points, taps)
        slopes = []
        for by in range(len(dims)):
            factors = [taps.slope if i == by else taps.weight for i, taps in enumerate(dims)]
            slopes.append((along * _of_all_dims(factors, torch.mul)).sum(-1))
        by_grid = torch.stack(slopes[::-1], -1).view(grid.shape)
    return by_x, by_grid


def _of_all_dims(values: Sequence[Tensor], combine: Callable[..., Tensor]) -> Tensor:
    """Return the combined values of each choice of one tap in each dim, along a last dim."""
    combined = values[0]
    for value in values[1:]:
        combined = combine(combined.unsqueeze(-1), value.unsqueeze(-2)).flatten(-2)
    return combined


def _taps(point: Tensor, size: Any, mode: int, padding: int, align_corners: bool) -> _Taps:
    """Return the taps of points, which are coordinates from -1 to 1."""
    scale = (size - 1) / 2 if align_corners else size / 2
    unclipped = ((point + 1) * size - 1) / 2 if not align_corners else (point + 1) * scale
    position, inner = unclipped.detach(), torch.ones_like(point)
    if mode != _BICUBIC:  # the taps of a cubic are moved one by one
        position, inner = _move_into_image(position, size, padding, align_corners)
    near = position.isfinite() & (position.abs() <= _FARTHEST)
    position = torch.where(near, position, _ELSEWHERE)
    if mode == _NEAREST:
        start, offsets = position.round(), [0]
    else:
        start, offsets = position.floor(), [0, 1] if mode == _BILINEAR else [-1, 0, 1, 2]
    # The position with its derivative, which torch takes to be constant between pixels.
    moved = torch.where(near, point - point.detach(), 0.0) * (inner * scale)
    between = position - start + moved
    weights = _WEIGHTS[mode](between)
    pixels = [start + offset for offset in offsets]
    if mode == _BICUBIC:
        pixels = [_move_into_image(pixel, size, padding, align_corners)[0] for pixel in pixels]
    pixel = torch.stack(pixels, -1)
    return _Taps(
        pixel=pixel.clamp(0, size - 1).to(torch.int64),
        inside=((pixel >= 0) & (pixel <= size - 1)).to(point.dtype),
        weight=torch.stack([weight for weight, _ in weights], -1),
        slope=torch.stack([slope for _, slope in weights], -1) * (inner * scale).unsqueeze(-1),
    )


def _move_into_image(
    position: Tensor, size: Any, padding: int, align_corners: bool
) -> tuple[Tensor, Tensor]:
    """Return positions moved into the image, and the derivative: 1, 0 or -1."""
    derivative = torch.ones_like(position)
    if padding == _ZEROS:
        return position, derivative
    if padding == _REFLECTION:
        # An image of one pixel with aligned corners has no extent; the clamp gives its position.
        low = 0.0 if align_corners else -0.5
        span = torch.sym_max(size - 1, 1) if align_corners else size
        distance = position - low
        derivative = torch.where(distance < 0, -1.0, derivative)
        distance = distance.abs()
        extra = distance.fmod(span)
        odd = (distance / span).floor().fmod(2) != 0
        position = torch.where(odd, span - extra, extra) + low
        derivative = torch.where(odd, -derivative, derivative)
    derivative = torch.where((position <= 0) | (position >= size - 1), 0.0, derivative)
    return position.clamp(0, size - 1), derivative


# --- the weights of the taps of one dim, and their derivatives, at ``t`` pixels after the first


_Weights = list[tuple[Tensor, Tensor]]


def _nearest(t: Tensor) -> _Weights:
    return [(torch.ones_like(t), torch.zeros_like(t))]


def _bilinear(t: Tensor) -> _Weights:
    return [(1 - t, -torch.ones_like(t)), (t, torch.ones_like(t))]


def _bicubic(t: Tensor) -> _Weights:
    below, above = [_far(t + 1), _near(t)], [_near(1 - t), _far(2 - t)]
    return [*below, *((weight, -slope) for weight, slope in above)]


def _near(d: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cubic weight at a distance of 1 or less, and its derivative by the distance."""
    weight = ((_A + 2) * d - (_A + 3)) * d * d + 1
    return weight, (3 * (_A + 2) * d - 2 * (_A + 3)) * d


def _far(d: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cubic weight at a distance between 1 and 2, and its derivative."""
    weight = ((_A * d - 5 * _A) * d + 8 * _A) * d - 4 * _A
    return weight, (3 * _A * d - 10 * _A) * d + 8 * _A


_WEIGHTS: dict[int, Callable[[Tensor], _Weights]] = {
    _BILINEAR: _bilinear,
    _NEAREST: _nearest,
    _BICUBIC: _bicubic,
}

BACKWARD: dict[str, Callable[..., Any]] = {
    "aten::grid_sampler_2d_backward": grid_sampler_backward,
    "aten::grid_sampler_3d_backward": grid_sampler_backward,
}
