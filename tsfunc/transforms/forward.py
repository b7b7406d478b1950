"""Forward mode: ``jvp``.

Tangents are torch's own dual numbers on the tensors of the innermost level: plain tensors, or
tracers of a vmap, whose operators are differentiated by torch's C++ formulas on tracers.
NOTE [one dual level] in ``bridge/grad/dual_level`` explains how transforms share torch's single
dual level. If the tensors of the level already carry the tangents of an enclosing jvp, the inner
jvp works on tracers of its own Grad level.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal, TypeVar, overload

import torch

from tsfunc import pytrees
from tsfunc.bridge.grad import autograd
from tsfunc.bridge.grad.dual_level import DualLevelInUse, dual_level, may_carry_outer_tangents
from tsfunc.bridge.tracers.boundaries import boundary, check_function
from tsfunc.bridge.tracers.dtensors import converts_to_dtensor, is_dtensor, refusing_distribution
from tsfunc.bridge.tracers.functorch import delegate
from tsfunc.bridge.tracers.grad_level import GradLevel, unwrap_at_level
from tsfunc.bridge.tracers.level_proxies import all_as_seen_by_current_level
from tsfunc.bridge.tracers.registrations import watching_random
from tsfunc.bridge.tracers.tracer import Tracer, TracerLevel
from tsfunc.bridge.writing.module_state import STATE_WRITES, refuse_state_writes, restore_state
from tsfunc.errors import MissingRuleError
from tsfunc.transforms.argnums import (
    flatten_matching,
    flatten_output,
    is_nested,
    level_to_record_on,
    names_of_selected,
    refuse_other_leaves,
    refuse_unrecorded,
    same_sizes,
    sizes_text,
    split_aux,
    traced_inputs,
)
from tsfunc.transforms.reverse import inner_vjp

_Result = TypeVar("_Result")
_Aux = TypeVar("_Aux")


@overload
def jvp(
    func: Callable[..., _Result],
    primals: tuple[Any, ...],
    tangents: tuple[Any, ...],
    *,
    strict: bool = False,
    has_aux: Literal[False] = False,
) -> tuple[_Result, _Result]: ...
@overload
def jvp(
    func: Callable[..., tuple[_Result, _Aux]],
    primals: tuple[Any, ...],
    tangents: tuple[Any, ...],
    *,
    strict: bool = False,
    has_aux: Literal[True],
) -> tuple[_Result, _Result, _Aux]: ...
@overload
def jvp(
    func: Callable[..., Any],
    primals: tuple[Any, ...],
    tangents: tuple[Any, ...],
    *,
    strict: bool = False,
    has_aux: bool,
) -> Any: ...
@boundary("jvp", traceable=True)
def jvp(
    func: Callable[..., Any],
    primals: tuple[Any, ...],
    tangents: tuple[Any, ...],
    *,
    strict: bool = False,
    has_aux: bool = False,
) -> Any:
    """Return the value of a function and its derivative along a direction.

    Args:
        func: takes pytrees of tensors and returns a pytree of tensors; with ``has_aux``, a tuple
            of such a pytree and an auxiliary value.
        primals: the arguments, as a tuple.
        tangents: the direction, with the same structure, shapes and dtypes.
        strict: if True, an output that does not depend on the primals is an error.
        has_aux: if True, ``func`` returns an auxiliary value, which is passed through.

    Returns:
        ``(output, tangent of the output)``; with ``has_aux`` ``(output, tangent, aux)``.

    Raises:
        RuntimeError: the primals and tangents do not match, or an output is not a tensor.

    Example:
        >>> import torch
        >>> from tsfunc import jvp
        >>> jvp(torch.sin, (torch.tensor(0.),), (torch.tensor(2.),))
        (tensor(0.), tensor(2.))

    Corresponds to ``torch.func.jvp`` and ``jax.jvp``. If an operator (or a
    ``torch.autograd.Function``) has no forward formula, or none for a dtype, the derivative is
    computed by differentiating the pullback, which runs ``func`` once more. Forward mode runs on
    one thread at a time; other threads wait.
    """
    check_function("jvp", func)
    if (other := delegate("jvp")) is not None:
        return other(func, primals, tangents, strict=strict, has_aux=has_aux)
    if torch.is_inference_mode_enabled():
        return autograd.without_inference_mode(
            jvp, func, primals, tangents, strict=strict, has_aux=has_aux
        )
    flat, directions, spec = _match(func, primals, tangents)
    # torch has no dual numbers for DTensors and nested tensors.
    if any(is_dtensor(x) or is_nested(x) for x in flat):
        return _by_double_backward(func, flat, directions, spec, has_aux)
    try:
        return _jvp(func, flat, directions, spec, strict, has_aux)
    except DualLevelInUse:
        pass
    except NotImplementedError as error:
        if not _lacks_formula(str(error)):
            raise
        if converts_to_dtensor(error):
            raise MissingRuleError(
                "jvp: expected operators with a rule for forward mode or a pullback that can be "
                "differentiated, got a conversion between plain tensors and DTensors, which has "
                "neither. Use grad or vjp, pass DTensors to jvp, or write the computation with "
                "shard_map."
            ) from error
    except RuntimeError as error:
        if "Nested forward mode AD is not supported" not in str(error):
            raise
        raise RuntimeError(
            "tsfunc.jvp: forward mode that is not tsfunc's (torch.func.jvp, torch.func.jacfwd, "
            "torch.autograd.forward_ad) was entered inside of tsfunc's, and torch has one level "
            "of it only. Use tsfunc.jvp, tsfunc.jacfwd or tsfunc.hessian inside as well."
        ) from error
    return _by_double_backward(func, flat, directions, spec, has_aux)


def _lacks_formula(said: str) -> bool:
    """True if torch's message says that an operator lacks a forward formula."""
    return (
        "forward AD" in said
        or "forward mode AD" in said
        or ("_jvp" in said and "not implemented for" in said)
    )


def _match(
    func: Callable[..., Any], primals: Any, tangents: Any
) -> tuple[Sequence[torch.Tensor], Sequence[Any], Any]:
    """Return the flattened primals and tangents; raise if they do not match."""
    api = "jvp(f, primals, tangents)"
    if not isinstance(primals, tuple):
        raise RuntimeError(
            f"{api}: Expected primals to be a tuple. E.g. it should be valid to call f(*primals)."
        )
    flat, spec = pytrees.flatten(primals)
    if not flat:
        raise RuntimeError(f"{api}: Expected primals to contain at least one Tensor.")
    refuse_other_leaves(api, flat, spec, "primals to only contain Tensors")
    directions = flatten_matching(
        api, tangents, spec,
        "Expected primals and tangents to have the same python structure. For example, if primals "
        "is a tuple of 3 tensors, tangents also must be. Got primals with structure {expected} and "
        "tangents with structure {got}",
        "tangents to only contain Tensors",
    )  # fmt: skip
    names = names_of_selected(func, primals, tuple(range(len(primals))))
    for i, (x, t) in enumerate(zip(flat, directions, strict=True)):
        autograd.check_differentiable(x, names, i)
        if not same_sizes(x, t) or x.dtype != t.dtype:
            raise RuntimeError(
                f"{api}: the tangent of {names()[i]}: expected {x.dtype} of shape "
                f"{sizes_text(x)}, as its primal, got {t.dtype} of shape {sizes_text(t)}."
            )
    return all_as_seen_by_current_level(flat), all_as_seen_by_current_level(directions), spec


def _jvp(
    func: Callable[..., Any],
    flat: Sequence[torch.Tensor],
    directions: Sequence[torch.Tensor],
    spec: Any,
    strict: bool,
    has_aux: bool,
) -> Any:
    level = level_to_record_on((flat, directions))
    if not may_carry_outer_tangents(level):
        # The level's key is active already if the tensors belong to a level.
        with watching_random() if level is None else nullcontext():
            results = _pushforward(func, flat, directions, spec, level, strict, has_aux)
        return results if level is not None else pytrees.tree_map(_released, results)
    grad_level = GradLevel("jvp")
    grad_level.outside_roots = func, flat, directions
    try:
        with grad_level, watching_random():
            results = _pushforward(func, flat, directions, spec, grad_level, strict, has_aux)
    except BaseException:
        if STATE_WRITES:
            restore_state(grad_level)
        raise
    if STATE_WRITES:
        refuse_state_writes(grad_level)
    return pytrees.tree_map(
        lambda x: unwrap_at_level(x, grad_level) if isinstance(x, torch.Tensor) else x, results
    )


def _released(value: Any) -> Any:
    """Return a result without a graph that only reaches leaves of derivatives that have ended.

    Derivatives inside of the jvp keep such graphs, for the tangents of what they have saved.
    """
    if not isinstance(value, torch.Tensor) or isinstance(value, Tracer) or not value.requires_grad:
        return value
    return value if autograd.reaches_active_leaves(value) else autograd.detach_at_level(value)


def _pushforward(
    func: Callable[..., Any],
    flat: Sequence[torch.Tensor],
    directions: Sequence[torch.Tensor],
    spec: Any,
    level: TracerLevel | None,
    strict: bool,
    has_aux: bool,
) -> Any:
    """Run the function on dual numbers of the level."""
    api = "jvp(f, primals, tangents)"
    with dual_level(level), refusing_distribution():
        pairs = zip(traced_inputs(flat, level), traced_inputs(directions, level), strict=True)
        duals = [autograd.make_dual(x, t, level) for x, t in pairs]
        out, aux = split_aux(api, func(*pytrees.unflatten(spec, duals)), has_aux)
        leaves, out_spec = flatten_output(api, out)
        refuse_unrecorded(leaves, level)
        values, tangents_out = [], []
        for leaf in leaves:
            value, tangent = _primal_and_tangent(leaf, level)
            if tangent is None:
                if strict:
                    raise RuntimeError(
                        f"{api}: got an output which is independent of the inputs, and "
                        f"strict=True. This is not allowed."
                    )
                tangent = torch.zeros_like(value)
            values.append(value)
            tangents_out.append(tangent)
        if has_aux:
            aux = pytrees.tree_map(
                lambda x: _primal_and_tangent(x, level)[0] if isinstance(x, torch.Tensor) else x,
                aux,
            )
    results = pytrees.unflatten(out_spec, values), pytrees.unflatten(out_spec, tangents_out)
    return (*results, aux) if has_aux else results


def _primal_and_tangent(
    value: torch.Tensor, level: TracerLevel | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a primal and its tangent at a level; the tangent is None if there is none.

    A value of an outer level does not depend on this level. Its tangent, if it has one, belongs to
    a jvp around this one.
    """
    if level is not None and not (
        isinstance(value, Tracer) and value.dispatch_level.depth >= level.depth
    ):
        return value, None
    return autograd.unpack_dual(value)


def _by_double_backward(
    func: Callable[..., Any],
    flat: Sequence[torch.Tensor],
    directions: Sequence[torch.Tensor],
    spec: Any,
    has_aux: bool,
) -> Any:
    """Compute the pushforward as the pullback of the pullback, which is linear in the cotangent.

    Both pullbacks are recorded on fresh inputs, which no other transform differentiates by.
    """
    fresh_inputs: list[torch.Tensor] = []

    def noted(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            fresh_inputs.extend(x for x in pytrees.leaves_of(inputs) if isinstance(x, torch.Tensor))
            return call(*inputs)

        return run

    out, pullback, *rest = inner_vjp(
        noted(func), *pytrees.unflatten(spec, list(flat)), has_aux=has_aux
    )
    zeros = pytrees.tree_map(torch.zeros_like, out)
    _, pushforward = inner_vjp(noted(pullback), zeros)
    (tangent,) = pushforward(pytrees.unflatten(spec, list(directions)))
    level = level_to_record_on((flat, directions))
    tangents_out = [x for x in pytrees.leaves_of(tangent) if isinstance(x, torch.Tensor)]
    if not autograd.reaches_other_leaves(tangents_out, fresh_inputs, level):
        tangent = pytrees.tree_map(autograd.detach_at_level, tangent)
    return (out, tangent, *rest)
