"""Checks of tensors: their metadata, and the sizes of names and expressions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tsfunc.types.check_context import Check, CheckContext, Failure, Path, place_text
from tsfunc.types.dims import Dim, DimExpr, DimForm
from tsfunc.types.meta import MetaTensorType, is_in_format, on_device, tensor_text
from tsfunc.types.values import describe


def tensor_check(meta: MetaTensorType, dims: Mapping[str, Dim]) -> Check:
    dtype, device, grad, layout = meta.dtype, meta.device, meta.requires_grad, meta.layout
    check_shape = None if meta.shape is None else _shape_check(meta, dims)
    has_layout = meta.strides is not None or meta.memory_format is not None

    def check(value: Any, path: Path, context: CheckContext) -> None:
        if not isinstance(value, torch.Tensor):
            context.fail(path, "", f"expected a tensor, {meta}, got {describe(value)}")
            return
        context.leaves[path] = meta
        if dtype is not None and value.dtype != dtype:
            context.fail(path, ".dtype", f"expected {dtype}, got {value.dtype}")
        if check_shape is not None:
            check_shape(value, path, context)
        if device is not None and not on_device(value.device, device):
            context.fail(path, ".device", f"expected {device}, got {value.device}")
        if grad is not None and value.requires_grad != grad:
            context.fail(path, ".requires_grad", f"expected {grad}, got {value.requires_grad}")
        if layout is not None and value.layout != layout:
            context.fail(path, ".layout", f"expected {layout}, got {value.layout}")
        elif has_layout:
            _check_memory(meta, value, path, context)

    return check


def _shape_check(meta: MetaTensorType, dims: Mapping[str, Dim]) -> Check:
    if meta.dims is not None:
        return _sizes_check(meta.dims, 0, dims)
    count = len(meta.trailing)
    of_rank: dict[int, Check] = {}

    def check(value: Any, path: Path, context: CheckContext) -> None:
        rank = value.dim()
        if rank < count:
            expected, got = _brackets((..., *meta.trailing)), _brackets(value.shape)
            context.fail(path, ".shape", f"expected {expected}, got {got}")
            return
        if rank not in of_rank:
            of_rank[rank] = _sizes_check(meta.trailing, rank - count, dims)
        of_rank[rank](value, path, context)

    return check


def _brackets(dims: Iterable[object]) -> str:
    return tensor_text(None, dims)[6:]


def _sizes_check(forms: tuple[DimForm, ...], first: int, dims: Mapping[str, Dim]) -> Check:
    """Return the check of the last dims, starting at dim `first`."""
    rank, numbered = first + len(forms), list(enumerate(forms, first))
    fixed = [(axis, form) for axis, form in numbered if isinstance(form, int)]
    named = [(axis, dims[form.name]) for axis, form in numbered if isinstance(form, Dim)]
    computed = [(f".shape[{i}]", i, form) for i, form in numbered if isinstance(form, DimExpr)]

    def check(value: Any, path: Path, context: CheckContext) -> None:
        shape = value.shape
        if len(shape) != rank:
            context.fail(path, ".shape", f"expected {_brackets(forms)}, got {_brackets(shape)}")
            return
        for axis, size in fixed:
            if shape[axis] != size:
                context.fail(path, f".shape[{axis}]", f"expected {size}, got {shape[axis]}")
        for axis, dim in named:
            if context.sizes.get(dim.name) != shape[axis]:  # usually the size is bound already
                _bind(dim, shape[axis], f".shape[{axis}]", path, context)
        for part, axis, expression in computed:
            context.pending.append((path, part, expression, shape[axis]))

    return check


def _check_memory(
    meta: MetaTensorType, value: torch.Tensor, path: Path, context: CheckContext
) -> None:
    """Check the strides and the memory format of a tensor. A sparse tensor has neither."""
    if value.layout != torch.strided:
        expected = meta.memory_format or f"strides {list(meta.strides or ())}"
        context.fail(path, ".layout", f"expected {expected}, got {value.layout}")
        return
    strides, forms = value.stride(), meta.stride_forms
    if forms and len(strides) != len(forms):
        context.fail(path, ".stride()", f"expected {_brackets(forms)}, got {_brackets(strides)}")
    for axis, (form, step) in enumerate(zip(forms, strides, strict=False)):
        if isinstance(form, DimExpr):
            context.pending.append((path, f".stride()[{axis}]", form, step))
        elif form is not None and form != step:
            context.fail(path, f".stride()[{axis}]", f"expected {form}, got {step}")
    wanted = meta.memory_format
    if wanted is not None and not is_in_format(value, wanted):
        context.fail(path, "", f"expected {wanted}, got strides {_brackets(strides)}")


def _bind(dim: Dim, size: int, part: str, path: Path, context: CheckContext) -> None:
    """Bind a named dim at its first occurrence; check it at the others."""
    known = context.sizes.get(dim.name)
    if known is None:
        context.sizes[dim.name] = size
        context.places[dim.name] = (path, part)
        if not dim.admits(size):
            context.fail(path, part, f"expected {dim}, got {size}")
    elif known != size:
        here = f"{place_text(path, context.arguments)}{part}"
        line = f"{context.bound_at(dim.name)} but {size} at {here}"
        context.failures.append(Failure((len(path), True), line))


def check_expressions(context: CheckContext) -> None:
    """Check the computed dims, after all named dims are bound.

    A name that no shape has as a dim is solved for.
    """
    pending, before = context.pending, None
    while pending and len(pending) != before:
        before = len(pending)
        pending = [each for each in pending if not _is_settled(*each, context)]
    for path, part, expression, size in pending:
        missing = ", ".join(name for name in expression.names if name not in context.sizes)
        context.fail(path, part, f"expected {expression}, got {size}: the call has no {missing}")


def _is_settled(
    path: Path, part: str, expression: DimExpr, size: int, context: CheckContext
) -> bool:
    """Check a computed dim, or bind its only unknown name; False if neither is possible."""
    because = ", ".join(
        context.bound_at(name) for name in expression.names if name in context.sizes
    )
    if any(name not in context.sizes for name in expression.names):
        found = expression.solve(size, context.sizes)
        if found is None:
            return False
        name, solution = found
        if solution is not None:
            context.sizes[name] = solution
            context.places[name] = (path, f"{part} = {expression}")
        elif {expression.evaluate({**context.sizes, name: each}) for each in (0, 1)} == {size}:
            what = f"{expression} is {size} for every {name} ({because})"
            what += f", so {name} can't be determined"
            context.fail(path, part, f"expected {expression}, got {size}: {what}")
        else:
            context.fail(path, part, f"expected {expression}, got {size}: no size {name} gives it")
        return True
    try:
        expected = expression.evaluate(context.sizes)
    except ZeroDivisionError:
        what = f"expected {expression}, which divides by zero ({because}), got {size}"
        context.fail(path, part, what)
        return True
    if expected != size:
        context.fail(path, part, f"expected {expression} = {expected} ({because}), got {size}")
    return True
