"""The checks of tensors: their attributes, and the sizes that names and expressions stand for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tsfunc.types.dims import Dim, DimExpr, DimForm
from tsfunc.types.meta import MetaTensorType, on_device, tensor_text
from tsfunc.types.runs import Check, Failure, Path, Run, place_text
from tsfunc.types.values import describe


def tensor_check(meta: MetaTensorType, dims: Mapping[str, Dim]) -> Check:
    dtype, device, grad, layout = meta.dtype, meta.device, meta.requires_grad, meta.layout
    check_shape = None if meta.dims is None else _shape_check(meta.dims, dims)

    def check(value: Any, path: Path, run: Run) -> None:
        if not isinstance(value, torch.Tensor):
            run.fail(path, "", f"promised a tensor, {meta}, came {describe(value)}")
            return
        run.leaves[path] = meta
        if dtype is not None and value.dtype != dtype:
            run.fail(path, ".dtype", f"promised {dtype}, came {value.dtype}")
        if check_shape is not None:
            check_shape(value, path, run)
        if device is not None and not on_device(value.device, device):
            run.fail(path, ".device", f"promised {device}, came {value.device}")
        if grad is not None and value.requires_grad != grad:
            run.fail(path, ".requires_grad", f"promised {grad}, came {value.requires_grad}")
        if layout is not None and value.layout != layout:
            run.fail(path, ".layout", f"promised {layout}, came {value.layout}")

    return check


def _shape_check(forms: tuple[DimForm, ...], dims: Mapping[str, Dim]) -> Check:
    rank = len(forms)
    fixed = [(axis, form) for axis, form in enumerate(forms) if isinstance(form, int)]
    named = [(axis, dims[form.name]) for axis, form in enumerate(forms) if isinstance(form, Dim)]
    computed = [(axis, form) for axis, form in enumerate(forms) if isinstance(form, DimExpr)]

    def check(value: Any, path: Path, run: Run) -> None:
        shape = value.shape
        if len(shape) != rank:
            promised, came = tensor_text(None, forms)[6:], tensor_text(None, shape)[6:]
            run.fail(path, ".shape", f"promised {promised}, came {came}")
            return
        for axis, size in fixed:
            if shape[axis] != size:
                run.fail(path, f".shape[{axis}]", f"promised {size}, came {shape[axis]}")
        for axis, dim in named:
            if run.sizes.get(dim.name) != shape[axis]:  # nearly always it has this size already
                _bind(dim, shape[axis], axis, path, run)
        for axis, expression in computed:
            run.pending.append((path, axis, expression, shape[axis]))

    return check


def _bind(dim: Dim, size: int, axis: int, path: Path, run: Run) -> None:
    """The first occurrence of a named dim gives its size; the others must agree."""
    known = run.sizes.get(dim.name)
    if known is None:
        run.sizes[dim.name] = size
        run.places[dim.name] = (path, axis)
        if not dim.admits(size):
            run.fail(path, f".shape[{axis}]", f"promised {dim}, came {size}")
    elif known != size:
        here = f"{place_text(path, run.arguments)}.shape[{axis}]"
        line = f"{run.bound_at(dim.name)} but {size} at {here}"
        run.failures.append(Failure((len(path), True), line))


def check_expressions(run: Run) -> None:
    """Check the computed dims, once the call has bound all the names that it binds."""
    for path, axis, expression, size in run.pending:
        known = [name for name in expression.names if name in run.sizes]
        because = ", ".join(map(run.bound_at, known))
        if len(known) < len(expression.names):
            missing = ", ".join(name for name in expression.names if name not in run.sizes)
            what = f"promised {expression}, which can't be computed: the call has no {missing}"
            run.fail(path, f".shape[{axis}]", what)
            continue
        try:
            expected = expression.evaluate(run.sizes)
        except ZeroDivisionError:
            what = f"promised {expression}, which divides by zero ({because}), came {size}"
            run.fail(path, f".shape[{axis}]", what)
            continue
        if expected != size:
            what = f"promised {expression} = {expected} ({because}), came {size}"
            run.fail(path, f".shape[{axis}]", what)
