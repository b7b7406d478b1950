"""Derivative formulas that can't be differentiated again, and their replacements.

NOTE [derivatives of forward formulas]
torch's tangent formulas of some operators give right tangents, but can't be differentiated. They
treat values as constants that are not constant (further results without derivatives of their own,
such as the factors of a determinant), or they write in place into values that autograd has saved.
torch detects such a write only by version checks, which do not cover values saved by hooks, such as
those of a checkpoint. torch itself never differentiates the tangents of plain tensors, but a
``jvp`` of tsfunc may be inside of any transform. These operators are therefore intercepted before
autograd (NOTE [the factory keys]). If a call with tangents is differentiated by another transform
too, it is rewritten in other operators (``ops/differentiable_decompositions``), or its tangent is
computed by differentiating its pullback, which torch keeps differentiable.

NOTE [derivatives of backward formulas]
The backward formulas of normalizations have derivative formulas of their own, which treat the mean
and the deviation as constants: third derivatives by reverse mode are wrong. Those of fused
attention have none. If a backward pass is recorded, these formulas are written in other operators,
whose derivatives are right to any order. Fused attention with tangents is written so too, as it has
no tangent formula.

Private names used here (torch 2.11 to 2.13): ``DisableTorchFunctionSubclass`` reaches a tracer's
own methods; ``forward_ad._current_level`` tells whether a dual level is entered.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass
from torch.autograd import forward_ad

from tsfunc.bridge.grad import autograd
from tsfunc.bridge.tracers.operators import overload_of
from tsfunc.bridge.tracers.torch_state import RANDOM_KEY_NAME, after, below_autograd
from tsfunc.bridge.tracers.tracer import Tracer, TracerLevel, innermost_level
from tsfunc.ops.differentiable_decompositions import (
    BACKWARD_DECOMPOSED,
    DECOMPOSED,
    PUSHED_DECOMPOSED,
    UNDIFFERENTIABLE_DECOMPOSED,
)

# Operators whose pullbacks can be differentiated any number of times.
PULLED_BACK = (
    "_linalg_det _linalg_slogdet _linalg_eigh linalg_eig "
    "linalg_householder_product cholesky_inverse "
    # The tangent formulas of these write in place into values that autograd has saved.
    "linalg_vector_norm renorm "
    "norm.Scalar norm.ScalarOpt_dim norm.ScalarOpt_dtype norm.ScalarOpt_dim_dtype"
).split()

_libraries: list[torch.library.Library] = []


def install() -> None:
    """Register the kernels; a second call has no effect."""
    if _libraries:
        return
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*[Ww]arning only once")
        twice = dict.fromkeys(f"aten::{name}" for name in PULLED_BACK) | DECOMPOSED
        replaced = [(name, part, _differentiated_twice) for name, part in twice.items()]
        replaced += [(name, part, _pushed_forward) for name, part in PUSHED_DECOMPOSED.items()]
        for name, part, met in replaced:
            overload = overload_of(name)
            if overload is not None:
                kernel = _kernel(overload, part, met)
                library.impl(name.removeprefix("aten::"), kernel, RANDOM_KEY_NAME, with_keyset=True)
        formulas = [(*item, _differentiated_twice) for item in BACKWARD_DECOMPOSED.items()]
        formulas += [(*item, _pushed_forward) for item in UNDIFFERENTIABLE_DECOMPOSED.items()]
        for name, decomposition, met in formulas:
            overload = overload_of(name)
            if overload is not None:
                kernel = _backward_kernel(overload, decomposition, met)
                library.impl(name.removeprefix("aten::"), kernel, RANDOM_KEY_NAME, with_keyset=True)


def _kernel(
    overload: Any,
    decomposition: Callable[..., Any] | None,
    met: Callable[[Sequence[Any]], bool],
) -> Callable[..., Any]:
    """Return the kernel of an operator for use while a level or a jvp is active.

    Args:
        decomposition: the operator in other operators. None: its tangents come from its pullback.
        met: True for arguments with which torch's own tangents are not used.
    """
    rest = after(RANDOM_KEY_NAME)

    def operator(keys: Any, *args: Any, **kwargs: Any) -> Any:
        # Below autograd, in the kernel of another operator, no tangents are visible.
        pushing = forward_ad._current_level >= 0 and not below_autograd()
        replaced = pushing and met((*args, *kwargs.values()))
        if replaced and decomposition is not None:
            out = decomposition(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = overload.redispatch(keys & rest, *args, **kwargs)
        if replaced and decomposition is None:
            return _with_tangents(out, overload, args, kwargs)
        return out

    return operator


def _backward_kernel(
    overload: Any, decomposition: Callable[..., Any], met: Callable[[Sequence[Any]], bool]
) -> Callable[..., Any]:
    """Return the kernel of a backward formula (NOTE [derivatives of backward formulas])."""
    rest = after(RANDOM_KEY_NAME)

    def operator(keys: Any, *args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        if not below_autograd() and (_recorded(values) or met(values)):
            out = decomposition(*args, **kwargs)
            if out is not NotImplemented:
                return out
        return overload.redispatch(keys & rest, *args, **kwargs)

    return operator


def _recorded(values: Sequence[Any]) -> bool:
    """True if autograd records a call of these values at their level."""
    if not torch.is_grad_enabled():
        return False
    with DisableTorchFunctionSubclass():
        return any(isinstance(x, torch.Tensor) and x.requires_grad for x in values)


def _pushed_forward(values: Sequence[Any]) -> bool:
    """Return True if one of the tensors has a tangent."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    with DisableTorchFunctionSubclass():
        return any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def _differentiated_twice(values: Sequence[Any]) -> bool:
    """Return True if an argument has a tangent and another transform differentiates by one."""
    if not _pushed_forward(values):
        return False
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    with DisableTorchFunctionSubclass():
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            return True
        return any(_differentiated(value) for x in tensors for value in _inside(x))


def _inside(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the values inside of a tracer, the outermost value first."""
    value = getattr(x, "value", None) if isinstance(x, Tracer) else None
    while isinstance(value, torch.Tensor):
        yield value
        value = getattr(value, "value", None) if isinstance(value, Tracer) else None


def _differentiated(value: torch.Tensor) -> bool:
    # A program may later be differentiated by any value that it traces.
    traced = hasattr(value, "node")
    return traced or value.requires_grad or forward_ad.unpack_dual(value).tangent is not None


def _with_tangents(out: Any, overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the operator's results with tangents computed by its pullback.

    The pullback is linear in the cotangents, so the pullback of the pullback is the pushforward.
    The result primals are kept: the tensors that autograd saved for them have tangents too.
    """
    level = innermost_level(args)
    results = [out] if isinstance(out, torch.Tensor) else list(out)
    for i, tangent in _pushed(overload, args, kwargs, level).items():
        results[i] = autograd.make_dual(autograd.unpack_dual(results[i])[0], tangent, level)
    return results[0] if isinstance(out, torch.Tensor) else tuple(results)


def _pushed(
    overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any], level: TracerLevel | None
) -> dict[int, torch.Tensor]:
    """Return the tangent of each result that has one, by the result's index.

    Autograd records at the level, because the level's tensors carry tangents.
    """
    filled, inputs, tangents = list(args), [], []
    with torch.enable_grad():
        for place, arg in enumerate(args):
            if isinstance(arg, torch.Tensor):
                filled[place], tangent = autograd.unpack_dual(arg)
                if tangent is not None:
                    filled[place] = autograd.fresh_input(filled[place], level)
                    inputs.append(filled[place])
                    tangents.append(tangent)
        outs = overload(*filled, **kwargs)
        outs = [outs] if isinstance(outs, torch.Tensor) else outs
        with DisableTorchFunctionSubclass():
            kept = {i: out for i, out in enumerate(outs) if out.requires_grad}
        cotangents = [autograd.fresh_input(torch.zeros_like(x), level) for x in kept.values()]
        pulled = _backward(list(kept.values()), cotangents, inputs)
        pairs = [(g, t) for g, t in zip(pulled, tangents, strict=True) if g is not None]
        pushed = _backward([g for g, _ in pairs], [t for _, t in pairs], cotangents)
    connected = any(autograd.requires_grad(x, level) for x in (*args, *tangents))
    return {
        i: tangent if connected else autograd.detached(tangent)
        for i, tangent in zip(kept, pushed, strict=True)
        if tangent is not None
    }


def _backward(outputs: Any, cotangents: Any, inputs: Any) -> list[torch.Tensor | None]:
    return autograd.backward(outputs, cotangents, inputs, create_graph=True, retain_graph=True)
