"""Derivative formulas that can't be differentiated again, and their replacements.

NOTE [derivatives of forward formulas]
torch's tangent formulas of some operators give right tangents, but can't be differentiated. The
formulas treat values as constants that are not constant (further results without derivatives of
their own, such as the factors of a determinant), or they write in place into values that autograd
has saved. torch detects such a write only by version checks, which do not cover values saved by
hooks, such as those of a checkpoint. torch itself never differentiates the tangents of plain
tensors, but a ``jvp`` of tsfunc may be inside of any transform. These operators are therefore
intercepted before autograd (NOTE [the factory keys]). If a call with tangents is differentiated by
another transform too, it is rewritten in other operators (``ops/differentiable_decompositions``),
or its tangents come from its pullback (NOTE [tangents by pullbacks] in ``pullbacks``).

The formulas of factorizations and norms also fail without tangents, if autograd records at one
level the formulas of another one, or a trace does: those of ``det``, ``slogdet`` and ``solve`` use
the saved factors unless grad mode is on, and those of norms write in place. These operators are
rewritten whenever two transforms differentiate by an argument.

torch takes the weights of losses and the statistics of normalizations for constants: its tangent
formulas ignore their tangents without an error. These operators are rewritten if a transform
differentiates by such an argument. Reverse mode alone raises torch's error.

The tangent formula of a power multiplies the tangent of the exponent by the logarithm of the base.
torch gives an exponent without a tangent a lazy zero, whose product is zero even if the base is
negative. At a level the zero has memory (NOTE [the factory keys]), and the product would be NaN;
and so would be its derivative. The tangents of such a power come from its pullback, which leaves
the exponent out.

NOTE [derivatives of backward formulas]
The backward formulas of normalizations have derivative formulas of their own, which treat the mean
and the deviation as constants: third derivatives by reverse mode are wrong. The operators of fused
attention and of distances have no derivative. If a backward pass is recorded, these formulas are
written in other operators, whose derivatives are right to any order. Fused attention with tangents
is written so too, as it has no tangent formula. A program contains such formulas as operators, so
they are also intercepted while it runs (``make_differentiable``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass
from torch.autograd import Function, forward_ad

from tsfunc.bridge.grad import autograd, pullbacks
from tsfunc.bridge.grad.apply_hook import call_torch_apply
from tsfunc.bridge.tracers.interrupts import outermost, restoring_thread_state
from tsfunc.bridge.tracers.nesting import is_differentiated, tensors_inside
from tsfunc.bridge.tracers.registrations import (
    on_first_level,
    register_replacements,
    watching_random,
)
from tsfunc.bridge.tracers.schemas import overload_of
from tsfunc.bridge.tracers.torch_state import below_autograd
from tsfunc.bridge.tracers.tracer import Tracer
from tsfunc.dispatch.state import current_levels
from tsfunc.ops.differentiable_decompositions import (
    BACKWARD_DECOMPOSED,
    DECOMPOSED,
    MASKED,
    NESTED_DECOMPOSED,
    PUSHED_DECOMPOSED,
    TRACED_DECOMPOSED,
    TWICE_DECOMPOSED,
    UNDIFFERENTIABLE_DECOMPOSED,
    WEIGHTED,
)

# Operators whose pullbacks can be differentiated any number of times.
PULLED_BACK = ("linalg_householder_product",)

_Decomposition = Callable[..., Any]
_Condition = Callable[[Sequence[Any]], bool]

# The backward formulas that a program intercepts while it runs.
BACKWARD_FORMULAS = frozenset(
    {*BACKWARD_DECOMPOSED, *UNDIFFERENTIABLE_DECOMPOSED, *MASKED, *WEIGHTED}
)


def make_differentiable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a program's function so that the backward formulas in it can be differentiated.

    Args:
        function: calls operators, and some of ``BACKWARD_FORMULAS`` among them.
    """

    @functools.wraps(function)
    def intercepted(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args)
        with watching_random():
            return function(*args)

    return intercepted


def _replacements() -> Iterator[tuple[str, _Decomposition | None, _Condition, bool]]:
    """Yield operators, their replacements (None: NOTE [tangents by pullbacks]), and conditions.

    The last item is True if one derivative without forward mode never meets the condition.
    """
    tables: list[tuple[Mapping[str, _Decomposition | None], _Condition, bool]] = [
        (
            dict.fromkeys(f"aten::{name}" for name in PULLED_BACK),
            _has_tangent_and_is_differentiated,
            True,
        ),
        (DECOMPOSED, _has_tangent_and_is_differentiated, True),
        (TRACED_DECOMPOSED, _has_tangent_and_may_be_differentiated, True),
        (TWICE_DECOMPOSED, _differentiated_twice, True),
        (NESTED_DECOMPOSED, lambda x: _differentiated_twice(x) or _is_recorded_again(x), False),
        (PUSHED_DECOMPOSED, _has_tangent, True),
        (MASKED, lambda x: _has_tangent(x) or _differentiates_after(3, x), False),
        *[
            ({name: form}, functools.partial(_differentiates_after, count), False)
            for name, (form, count) in WEIGHTED.items()
        ],
        (_POWERS, _has_constant_exponent, True),
        (
            BACKWARD_DECOMPOSED,
            lambda x: _is_recorded(x) or _has_tangent_and_is_differentiated(x),
            False,
        ),
        (
            UNDIFFERENTIABLE_DECOMPOSED,
            lambda x: _is_recorded(x) or _has_tangent(x) or _perturbed_inside(x),
            False,
        ),
    ]
    for name, (decomposition, conditions, skipped) in _join_tables(tables).items():
        applies = conditions[0] if len(conditions) == 1 else functools.partial(_any, conditions)
        yield name, decomposition, applies, skipped
        inplace = _inplace_name(name)
        if decomposition is not None and overload_of(inplace) is not None:
            yield inplace, functools.partial(_write_decomposed, decomposition), applies, skipped


def _join_tables(
    tables: Sequence[tuple[Mapping[str, _Decomposition | None], _Condition, bool]],
) -> dict[str, tuple[_Decomposition | None, list[_Condition], bool]]:
    """Return the replacement of each operator of the tables, and all conditions for it."""
    joined: dict[str, tuple[_Decomposition | None, list[_Condition], bool]] = {}
    for table, applies, skipped in tables:
        for name, decomposition in table.items():
            first, conditions, also_skipped = joined.get(name, (decomposition, [], True))
            assert first is decomposition, f"two replacements of {name}"
            joined[name] = (first, [*conditions, applies], skipped and also_skipped)
    return joined


def _any(conditions: Sequence[_Condition], values: Sequence[Any]) -> bool:
    return any(applies(values) for applies in conditions)


def _has_constant_exponent(values: Sequence[Any]) -> bool:
    """True if the base of a power has a tangent and the exponent has none, beside a transform."""
    base, exponent = values[:2]
    if not _has_tangent([base]) or _has_tangent([exponent]):
        return False
    return bool(current_levels()) or _is_recorded([base])


def _inplace_name(name: str) -> str:
    """Return the name that an operator's in-place form has: ``aten::sgn_`` for ``aten::sgn``."""
    base, dot, overload = name.partition(".")
    return f"{base}_{dot}{overload}"


def _write_decomposed(
    decomposition: _Decomposition, x: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Write the result of an operator's decomposition into its first argument."""
    # Autograd saves the argument of the decomposition, which the write must not change.
    out = decomposition(x.clone(), *args, **kwargs)
    return out if out is NotImplemented else x.copy_(out)


def _power(base: torch.Tensor, exponent: torch.Tensor) -> Any:
    dtype = torch.result_type(base, exponent)
    base = base.to(dtype)
    if exponent.is_floating_point():  # else its gradient would be of another type
        exponent = exponent.to(dtype)
    return pullbacks.call_with_tangents(
        _recorded_power, torch.broadcast_tensors(base, exponent), {}
    )


def _recorded_power(base: torch.Tensor, exponent: torch.Tensor) -> Any:
    return call_torch_apply(_Power, torch.is_grad_enabled(), base, exponent)


class _Power(Function):
    """A power of two tensors of one shape, by pullbacks that can be transposed.

    torch replaces the derivative of a zeroth power by zero, but the pullback of this pullback
    multiplies zero by the infinite number that was replaced.
    """

    @staticmethod
    def forward(
        ctx: Any, grad_mode: bool, base: torch.Tensor, exponent: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(base, exponent)
        with autograd.outside_graph(grad_mode):
            return torch.pow(autograd.detach_at_level(base), autograd.detach_at_level(exponent))

    @staticmethod
    @restoring_thread_state
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        base, exponent = ctx.saved_tensors
        cts_in: list[torch.Tensor | None] = [None, None]
        if ctx.needs_input_grad[1]:
            constant = exponent == 0
            lower = torch.where(constant, exponent, exponent - 1)
            power = _recorded_power(torch.where(constant, 1, base), lower)
            cts_in[0] = cotangent * (exponent * power).conj()
        if ctx.needs_input_grad[2]:
            constant = (base == 0) & (exponent.real >= 0)
            power = _recorded_power(base, exponent)
            cts_in[1] = cotangent * (power * torch.where(constant, 1, base).log()).conj()
        return None, *cts_in


_POWERS: dict[str, _Decomposition | None] = {
    "aten::pow.Tensor_Tensor": _power,
    "aten::pow_.Tensor": functools.partial(_write_decomposed, _power),
}


def _call_replacement(
    decomposition: _Decomposition | None,
    applies: _Condition,
    overload: Any,
    rest: Any,
    keys: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call an operator while a level or a jvp is active.

    Args:
        decomposition: the operator in other operators. None: its tangents come from its pullback.
        applies: True for arguments with which torch's own formulas are not used.
        rest: the keys after the one that this is a kernel of.
    """
    # Below autograd, in the kernel of another operator, no derivatives are taken.
    wanted = not below_autograd() and applies((*args, *kwargs.values()))
    if wanted or _is_of_number(overload, args):
        if decomposition is None:
            return pullbacks.call_with_tangents(overload, args, kwargs)
        out = decomposition(*args, **kwargs)
        if out is not NotImplemented:
            return out
    return overload.redispatch(keys & rest, *args, **kwargs)


def _is_of_number(overload: Any, args: Sequence[Any]) -> bool:
    """True if C++ made a tensor argument of a number.

    The kernel gets the number, with which the operator can't be called again.
    """
    return any(
        type(arg) in _NUMBERS and isinstance(argument.type, torch.TensorType)
        for arg, argument in zip(args, overload._schema.arguments, strict=False)
    )


_NUMBERS = frozenset({bool, int, float, complex})


def _is_recorded(values: Sequence[Any]) -> bool:
    """True if autograd records a call of these values at their level."""
    if not torch.is_grad_enabled():
        return False
    with DisableTorchFunctionSubclass():
        return any(isinstance(x, torch.Tensor) and x.requires_grad for x in values)


def _has_tangent(values: Sequence[Any]) -> bool:
    return bool(_tangents(values))


def _tangents(values: Sequence[Any]) -> list[torch.Tensor]:
    if forward_ad._current_level < 0:
        return []
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    with DisableTorchFunctionSubclass():
        tangents = [forward_ad.unpack_dual(x).tangent for x in tensors]
    return [tangent for tangent in tangents if tangent is not None]


def _has_tangent_and_is_differentiated(values: Sequence[Any]) -> bool:
    """True if an argument has a tangent and another transform differentiates by one."""
    return _has_tangent(values) and (_is_recorded(values) or _differentiated_inside(values))


def _has_tangent_and_may_be_differentiated(values: Sequence[Any]) -> bool:
    """True if an argument has a tangent and is, or may be in a program, differentiated by again.

    A derivative by the tangent counts: the operators in torch's formulas may have none.
    """
    tangents = _tangents(values)
    if not tangents:
        return False
    values = [*values, *tangents]
    return _is_recorded(values) or _is_traced(values) or _differentiated_inside(values)


def _is_traced(values: Sequence[Any]) -> bool:
    """True if one of the values is traced: the program may later be differentiated."""
    return any(hasattr(x, "node") for x in values if isinstance(x, Tracer))


def _differentiated_twice(values: Sequence[Any]) -> bool:
    """True if two transforms differentiate by the arguments, or one does in a trace."""
    recorded, has_tangent = _is_recorded(values), _has_tangent(values)
    if not (recorded or has_tangent):
        return False
    return (recorded and has_tangent) or _is_traced(values) or _differentiated_inside(values)


def _is_recorded_again(values: Sequence[Any]) -> bool:
    """True if autograd records a call inside of several derivatives."""
    return outermost.recording > 1 and _is_recorded(values)


def _differentiated_inside(values: Sequence[Any]) -> bool:
    """True if a value inside of a tracer is differentiated by."""
    with DisableTorchFunctionSubclass():
        return any(_differentiated(inner) for x in values for inner in tensors_inside(x))


def _differentiates_after(count: int, values: Sequence[Any]) -> bool:
    """True if a transform at any level differentiates by an argument after the first ones."""
    rest = [value for value in values[count:] if isinstance(value, torch.Tensor)]
    return bool(rest) and (_is_recorded(rest) or _has_tangent(rest) or _perturbed_inside(rest))


def _perturbed_inside(values: Sequence[Any]) -> bool:
    """True if a value inside of a tracer requires grad or has a tangent."""
    return any(
        is_differentiated(getattr(x, "value", None)) for x in values if isinstance(x, Tracer)
    )


def _differentiated(value: torch.Tensor) -> bool:
    # A program may later be differentiated by any value that it traces.
    traced = hasattr(value, "node")
    return traced or value.requires_grad or forward_ad.unpack_dual(value).tangent is not None


on_first_level(
    register_replacements,
    {
        name: (
            functools.partial(_call_replacement, decomposition, applies),
            skipped_by_one_derivative,
        )
        for name, decomposition, applies, skipped_by_one_derivative in _replacements()
    },
)
