"""Guards: which calls a program may answer, as straight-line Python over flattened arguments.

A guard that holds implies that the descriptors hold: it fixes all that they speak of except the
sizes of named dims, and these it checks itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tsfunc.program.holding import is_instance
from tsfunc.program.inputs import InputSpec
from tsfunc.program.reach import same_float
from tsfunc.types import Dim, DimExpr

Guard = Callable[[Sequence[Any]], bool]
_PLAIN = (int, bool, str, type(None))


def generate_guard(flat: Sequence[Any], inputs: Sequence[InputSpec], bounds: Any) -> Guard:
    """The guard for calls that look like the one whose flattened arguments are given.

    Objects whose attributes are watched are left to what was read of them (``reach.py``).
    """
    scope: dict[str, Any] = {"Tensor": torch.Tensor, "same_float": same_float}
    specs = {spec.position: spec for spec in inputs}
    lines: list[str] = []
    bound: set[str] = set()
    for i, value in enumerate(flat):
        if is_instance(value):
            continue
        lines.append(f"a = args[{i}]")
        spec = specs.get(i)
        if spec is None:
            lines.append(_static(i, value, scope))
        else:
            lines.extend(_tensor(spec, scope, bound, bounds))
    # Expressions last: by then all of their names are bound.
    for spec in inputs:
        for k, dim in enumerate(spec.dims):
            if isinstance(dim, DimExpr):
                lines.append(f"if args[{spec.position}].shape[{k}] != ({dim}): return False")
    source = "def guard(args):\n" + "".join(f"    {line}\n" for line in [*lines, "return True"])
    exec(compile(source, "<guard>", "exec"), scope)
    guard: Guard = scope["guard"]
    return guard


def _static(i: int, value: Any, scope: dict[str, Any]) -> str:
    """An argument that is burnt in: the same number or string, or the same object."""
    scope[f"v{i}"] = value
    if type(value) in _PLAIN:
        scope[f"t{i}"] = type(value)
        return f"if type(a) is not t{i} or a != v{i}: return False"
    if type(value) is float:
        return f"if not same_float(a, v{i}): return False"
    return f"if a is not v{i}: return False"


def _tensor(spec: InputSpec, scope: dict[str, Any], bound: set[str], bounds: Any) -> list[str]:
    """A tensor: type, device, layout of memory, and each size that is not a named dim's."""
    i, example = spec.position, spec.example
    scope[f"dtype{i}"], scope[f"device{i}"] = example.dtype, example.device
    lines = [
        "if not isinstance(a, Tensor): return False",
        f"if a.dtype is not dtype{i} or a.device != device{i}: return False",
        f"if a.requires_grad is not {example.requires_grad}: return False",
    ]
    if all(isinstance(dim, int) for dim in spec.dims):
        lines.append(f"if a.shape != {tuple(spec.dims)!r}: return False")
        if not example.is_contiguous():
            lines.append(f"if a.stride() != {tuple(example.stride())!r}: return False")
            return lines
    else:
        lines.append(f"s = a.shape\n    if len(s) != {len(spec.dims)}: return False")
        for k, dim in enumerate(spec.dims):
            lines.extend(_dim(k, dim, bound, bounds))
        if not example.is_contiguous():
            order = sorted(range(example.dim()), key=lambda k: (example.stride(k), -k))
            lines.append(f"t = a.stride()\n    if sorted(range(len(t)), "
                         f"key=lambda k: (t[k], -k)) != {order!r}: return False")  # fmt: skip
            return lines
    lines.append("if not a.is_contiguous(): return False")
    return lines


def _dim(k: int, dim: Any, bound: set[str], bounds: Any) -> list[str]:
    if isinstance(dim, int):
        return [f"if s[{k}] != {dim}: return False"]
    if not isinstance(dim, Dim):
        return []
    if dim.name in bound:
        return [f"if s[{k}] != {dim.name}: return False"]
    bound.add(dim.name)
    limits = bounds[dim.name]
    lines = [f"{dim.name} = s[{k}]", f"if {dim.name} < {max(2, limits.min or 0)}: return False"]
    if limits.max is not None:
        lines.append(f"if {dim.name} > {limits.max}: return False")
    return lines
