"""Replacements for torch functions whose composite kernels read sizes as plain ints.

A trace has such ints only for fixed sizes. If a level records autograd and a size is symbolic, the
function handler therefore calls the replacements below, which use operators that accept symbolic
sizes. Without autograd a composite operator reaches the trace whole, and needs no replacement.
``corrcoef`` is replaced in every trace, because its kernel reads a tensor.
The replacement of ``take_along_dim`` without a dim serves batches, too.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from tsfunc.bridge.tracers.batch_tracer import BatchTracer
from tsfunc.bridge.tracers.function_registry import FunctionRules
from tsfunc.bridge.tracers.tracer import Tracer, innermost_level

function_rules: Final = FunctionRules()


def needs_plain_sizes(*values: Any) -> bool:
    """True if C++ would run a composite kernel, and a size is symbolic."""
    tensors = [
        x
        for value in values
        for x in (value if isinstance(value, list | tuple) else (value,))
        if isinstance(x, Tracer)
    ]
    level = innermost_level(tensors)
    if level is None or not level.autograd:
        return False
    return any(isinstance(size, torch.SymInt) for x in tensors for size in x.shape)


def reads_in_trace(x: Tensor) -> bool:
    """True for a tracer on which a composite kernel must not run that reads a tensor of its own.

    The derivative of a body of control flow runs the kernel on tracers without data.
    """
    return not isinstance(x, BatchTracer) or needs_plain_sizes(x)


@function_rules.replace(torch.corrcoef, Tensor.corrcoef, serves=reads_in_trace, symbolic=True)
def _corrcoef(input: Tensor) -> Any:
    if input.dim() > 2:
        return NotImplemented
    matrix = torch.cov(input)
    if matrix.dim() == 0:
        return matrix / matrix
    deviation = matrix.diagonal().sqrt()
    matrix = matrix / deviation.unsqueeze(-1) / deviation.unsqueeze(0)
    if matrix.is_complex():
        return torch.complex(matrix.real.clamp(-1, 1), matrix.imag.clamp(-1, 1))
    return matrix.clamp(-1, 1)


@function_rules.replace(torch.kron, Tensor.kron, serves=needs_plain_sizes, symbolic=True)
def _kron(input: Tensor, other: Tensor) -> Any:
    rank = max(input.dim(), other.dim())
    left = input.reshape(*[1] * (rank - input.dim()), *input.shape)
    right = other.reshape(*[1] * (rank - other.dim()), *other.shape)
    sizes = [a * b for a, b in zip(left.shape, right.shape, strict=True)]
    for dim in range(rank):
        left, right = left.unsqueeze(2 * dim + 1), right.unsqueeze(2 * dim)
    return (left * right).reshape(sizes)


@function_rules.replace(torch.block_diag, serves=needs_plain_sizes, symbolic=True)
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


def _has_dim(kinds: Sequence[Any]) -> bool:
    return len(kinds) > 2 and kinds[2] is int


@function_rules.replace(
    torch.take_along_dim, Tensor.take_along_dim, left_to_torch=_has_dim, symbolic=True
)
def _take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None, **out: Any) -> Any:
    if dim is None:  # torch takes views of both, which a batch may not have
        if not any(isinstance(x, Tracer) for x in (input, indices)):
            return NotImplemented
        return torch.take_along_dim(input.reshape(-1), indices.reshape(-1), 0, **out)
    rank = input.dim()
    checked = indices.dtype == torch.long and indices.dim() == rank and -rank <= dim < rank
    if not checked or out or not needs_plain_sizes(input, indices):
        return NotImplemented
    sizes = torch.broadcast_shapes(_without(input.shape, dim), _without(indices.shape, dim))
    position = dim % rank
    input = input.expand(*sizes[:position], input.shape[position], *sizes[position:])
    indices = indices.expand(*sizes[:position], indices.shape[position], *sizes[position:])
    return input.gather(position, indices)


def _without(shape: Sequence[int], dim: int) -> list[int]:
    return [size for i, size in enumerate(shape) if i != dim % len(shape)]


@function_rules.replace(
    torch.linalg.multi_dot, torch.chain_matmul, serves=needs_plain_sizes, symbolic=True
)
def _multi_dot(*tensors: Any) -> Any:
    """Multiply from left to right; torch chooses the order by the sizes."""
    parts = tensors[0] if isinstance(tensors[0], list | tuple) else tensors
    if len(parts) < 2 or any(x.dim() != 2 for x in parts[1:-1]):
        return NotImplemented
    return functools.reduce(torch.matmul, parts)
