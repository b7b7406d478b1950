"""Composite kernels in C++ that read the sizes of a tensor as plain ints.

NOTE [sizes for C++]
A level that records autograd runs composite operators in C++ (``torch.cov``, ``torch.gradient``).
Some of their kernels read ``tensor.sizes()``, which C++ has as plain ints. If a size is symbolic,
C++ calls ``aten::size`` or ``aten::stride`` on the tensor's class. The result is that of the call.
The query adds the guard that a size is equal to its number, like ``int(x.shape[0])`` in the user's
code.

The kernels of ``upsample_*.vec`` only work out the sizes of the result, and call the operator that
takes those. The same is done here with symbolic sizes, so that no guard is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from tsfunc.bridge.tracers.decompositions import DECOMPOSITIONS
from tsfunc.bridge.tracers.function_registry import FunctionRules, Stage
from tsfunc.bridge.tracers.operators import TorchOperator, operators_by_id
from tsfunc.ops.registry import Args, Kwargs


class _PlainSizes(TorchOperator):
    """``aten::size``, by which C++ reads sizes: NOTE [sizes for C++]."""

    __slots__ = ()

    def call(self, args: Args, kwargs: Kwargs, restore: bool = False) -> Any:
        return [int(size) for size in args[0].shape]


class _PlainStrides(TorchOperator):
    """``aten::stride``, by which C++ reads strides: NOTE [sizes for C++]."""

    __slots__ = ()

    def call(self, args: Args, kwargs: Kwargs, restore: bool = False) -> Any:
        return [int(step) for step in args[0].stride()]


_SIZE, _STRIDE = torch.ops.aten.size.default, torch.ops.aten.stride.default
operators_by_id[id(_SIZE)] = _PlainSizes(_SIZE)
operators_by_id[id(_STRIDE)] = _PlainStrides(_STRIDE)

_NAMES = (
    *(f"upsample_{kind}" for kind in (
        "nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "trilinear3d", "bicubic2d",
    )),
    *(f"_upsample_nearest_exact{rank}d" for rank in (1, 2, 3)),
    *(f"_upsample_{kind}2d_aa" for kind in ("bilinear", "bicubic", "lanczos")),
)  # fmt: skip


def upsampled_sizes(x: Any, output_size: Any, factors: Any) -> list[Any]:
    """Return the spatial sizes of the result, which are given or follow from factors."""
    if output_size is not None:
        return list(output_size)
    return [torch.sym_int(n * factor) for n, factor in zip(x.shape[2:], factors, strict=True)]


def _decomposition(name: str) -> Callable[..., Any]:
    overload = getattr(torch.ops.aten, name).default

    def decomposition(input: Any, output_size: Any, *rest: Any, **kwargs: Any) -> Any:
        *align, factors = (*rest, *(kwargs[k] for k in ("align_corners", "scale_factors")
                                    if k in kwargs))  # fmt: skip
        sizes = upsampled_sizes(input, output_size, factors)
        return overload(input, sizes, *align, *(factors or [None] * len(sizes)))

    return decomposition


def _method(vec: Any, decomposition: Callable[..., Any]) -> Callable[..., Any]:
    count = len(vec._schema.arguments)

    def method(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
        # The function has a second signature, with a number for each factor.
        factors = kwargs.get("scale_factors", args[-1])
        if len(args) + len(kwargs) != count or not isinstance(factors, list | tuple | None):
            return NotImplemented
        x = kwargs.get("input", args[0] if args else None)
        if not isinstance(x, torch.Tensor):
            return NotImplemented
        output_size = kwargs.get("output_size", args[1] if len(args) > 1 else None)
        if all(type(size) is int for size in (*x.shape, *(output_size or ()))):
            return NotImplemented
        return decomposition(*args, **kwargs)

    return method


function_rules: Final = FunctionRules()
for _name in _NAMES:
    _packet = getattr(torch.ops.aten, _name, None)
    if _packet is not None:
        _run = _decomposition(_name)
        DECOMPOSITIONS[f"aten::{_name}.vec"] = _run
        function_rules.add(
            Stage.METHOD,
            _method(_packet.vec, _run),
            _packet,
            _packet.vec,
            getattr(torch._C._nn, _name),
            symbolic=True,
        )
