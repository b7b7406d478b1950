"""Replacements for torch functions whose composite kernels ask for sizes as plain ints.

A trace has such ints only for fixed sizes. If a level records autograd and a size is symbolic, the
function handler therefore calls the replacements below, which use operators that accept symbolic
sizes. Without autograd a composite operator reaches the trace whole, and needs no replacement.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tsfunc.bridge.batch.composites import instead
from tsfunc.bridge.tracers.batch_tracer import BatchLevel
from tsfunc.bridge.tracers.tracer import Tracer, innermost_level
from tsfunc.ops.refusal import require


def _for_symbolic_sizes(*functions: Callable[..., Any]) -> Callable[..., Any]:
    """Register a replacement for tracers with symbolic sizes at a level that records autograd."""

    def declare(mine: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(mine)
        def method(*args: Any, **kwargs: Any) -> Any:
            tensors = [x for x in _tensors((*args, *kwargs.values())) if isinstance(x, Tracer)]
            level = innermost_level(tensors)
            if level is None or not level.autograd:
                return NotImplemented
            return mine(*args, **kwargs) if _symbolic(tensors) else NotImplemented

        instead(*functions)(method)
        return mine

    return declare


def _symbolic(tensors: Sequence[Tensor]) -> bool:
    return any(isinstance(size, torch.SymInt) for x in tensors for size in x.shape)


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    """Return the tensors among arguments, including those in lists."""
    return [
        x
        for value in values
        for x in (value if isinstance(value, list | tuple) else (value,))
        if isinstance(x, Tensor)
    ]


@instead(torch.cov, Tensor.cov)
def _cov(
    input: Tensor,
    *,
    correction: int = 1,
    fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> Any:
    """``cov`` for symbolic sizes; and with weights, whose values torch's kernel reads."""
    level = innermost_level(_tensors((input, fweights, aweights)))
    given = [w for w in (fweights, aweights) if w is not None]
    if given:
        served = level is not None and (level.autograd or isinstance(level, BatchLevel))
    else:
        served = level is not None and level.autograd and _symbolic([input])
    if not served or input.dim() > 2 or any(w.dim() != 1 for w in given):
        return NotImplemented  # for wrong ranks torch reports the error
    columns = input.reshape(1, -1) if input.dim() < 2 else input
    if fweights is not None and fweights.is_floating_point():
        return NotImplemented
    if any(w.shape != columns.shape[1:] for w in given):
        return NotImplemented
    for name, w in (("fweights", fweights), ("aweights", aweights)):
        if w is not None:
            require(w >= 0, f"cov(): {name} cannot be negative")
    if not (columns.is_floating_point() or columns.is_complex()):
        columns = columns.to(torch.get_default_dtype())
    weights = fweights if aweights is None else aweights
    if fweights is not None and aweights is not None:
        weights = fweights * aweights
    if weights is None:
        total: Any = columns.shape[1]
        mean = columns.sum(1, keepdim=True) / total
        norm = total - correction
    else:
        total = weights.sum()
        mean = (columns * weights).sum(1, keepdim=True) / total
        if correction and aweights is not None:
            norm = total - correction * (weights * aweights).sum() / total
        else:
            norm = total - correction
    centered = columns - mean
    weighted = centered if weights is None else centered * weights
    norm = norm.clamp(min=0) if isinstance(norm, Tensor) else torch.sym_max(norm, 0)
    return (centered @ weighted.mT.conj() / norm).squeeze()


@_for_symbolic_sizes(torch.corrcoef, Tensor.corrcoef)
def _corrcoef(input: Tensor) -> Any:
    if input.dim() > 2:
        return NotImplemented
    found = torch.cov(input)
    if found.dim() == 0:
        return found / found
    deviation = found.diagonal().sqrt()
    found = found / deviation.unsqueeze(-1) / deviation.unsqueeze(0)
    if found.is_complex():
        return torch.complex(found.real.clamp(-1, 1), found.imag.clamp(-1, 1))
    return found.clamp(-1, 1)


@_for_symbolic_sizes(torch.kron, Tensor.kron)
def _kron(input: Tensor, other: Tensor) -> Any:
    rank = max(input.dim(), other.dim())
    left = input.reshape(*[1] * (rank - input.dim()), *input.shape)
    right = other.reshape(*[1] * (rank - other.dim()), *other.shape)
    sizes = [a * b for a, b in zip(left.shape, right.shape, strict=True)]
    for dim in range(rank):
        left, right = left.unsqueeze(2 * dim + 1), right.unsqueeze(2 * dim)
    return (left * right).reshape(sizes)


@_for_symbolic_sizes(torch.block_diag)
def _block_diag(*tensors: Tensor) -> Any:
    if any(x.dim() > 2 for x in tensors):
        return NotImplemented
    blocks = [x.reshape(1, -1) if x.dim() < 2 else x for x in tensors]
    width = sum(x.shape[1] for x in blocks)
    rows, before = [], 0
    for x in blocks:
        after = width - before - x.shape[1]
        rows.append(torch.nn.functional.pad(x, (before, after)))
        before = before + x.shape[1]
    return torch.cat(rows)


@_for_symbolic_sizes(torch.linalg.multi_dot, torch.chain_matmul)
def _multi_dot(*tensors: Any) -> Any:
    """Multiply from left to right; torch chooses the order by the sizes."""
    parts = tensors[0] if isinstance(tensors[0], list | tuple) else tensors
    if len(parts) < 2 or any(x.dim() != 2 for x in parts[1:-1]):
        return NotImplemented
    return functools.reduce(torch.matmul, parts)


def _scaled(function: Callable[..., Any], overload: Any) -> None:
    """Replace an upsampling function: the sizes are computed from its scale factors first."""
    corners = any(argument.name == "align_corners" for argument in overload._schema.arguments)

    @_for_symbolic_sizes(function)
    def upsampled(x: Tensor, output_size: Any, *rest: Any) -> Any:
        *options, factors = rest
        if factors is None or output_size is not None or len(options) != corners:
            return NotImplemented
        spatial = zip(x.shape[2:], factors, strict=True)
        sizes = [torch.sym_int(math.floor(size * factor)) for size, factor in spatial]
        return overload(x, sizes, *options, *factors)


for _kind in ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "trilinear3d",
              "bicubic2d"):  # fmt: skip
    _scaled(
        getattr(torch._C._nn, f"upsample_{_kind}"),
        getattr(torch.ops.aten, f"upsample_{_kind}").default,
    )
