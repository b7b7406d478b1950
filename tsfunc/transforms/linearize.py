"""The derivative of a function at one point, as a linear function: ``linearize``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch

from tsfunc import pytrees
from tsfunc.bridge.grad import autograd
from tsfunc.bridge.tracers.boundaries import boundary, check_function
from tsfunc.bridge.tracers.functorch import delegate
from tsfunc.transforms.argnums import (
    flatten_matching,
    flatten_output,
    flatten_tensors,
    names_of_selected,
    same_sizes,
    sizes_text,
    split_aux,
    with_replaced,
)
from tsfunc.transforms.reverse import run_recorded, vjp

if TYPE_CHECKING:
    from typing_extensions import TypeVarTuple, Unpack

    _Primals = TypeVarTuple("_Primals")

API = "linearize(f, *primals)"
_Result = TypeVar("_Result")
_Aux = TypeVar("_Aux")


@overload
def linearize(
    func: Callable[[Unpack[_Primals]], _Result],
    *primals: Unpack[_Primals],
    has_aux: Literal[False] = False,
) -> tuple[_Result, Callable[[Unpack[_Primals]], _Result]]: ...
@overload
def linearize(
    func: Callable[..., _Result], *primals: Any, has_aux: Literal[False] = False
) -> tuple[_Result, Callable[..., _Result]]: ...
@overload
def linearize(
    func: Callable[[Unpack[_Primals]], tuple[_Result, _Aux]],
    *primals: Unpack[_Primals],
    has_aux: Literal[True],
) -> tuple[_Result, Callable[[Unpack[_Primals]], _Result], _Aux]: ...
@overload
def linearize(
    func: Callable[..., tuple[_Result, _Aux]], *primals: Any, has_aux: Literal[True]
) -> tuple[_Result, Callable[..., _Result], _Aux]: ...
@overload
def linearize(func: Callable[..., Any], *primals: Any, has_aux: bool) -> Any: ...
@boundary("linearize", traceable=True)  # type: ignore[misc]  # mypy misreads the Unpacks
def linearize(func: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """Return the value of a function, and its derivative at that point as a linear function.

    ``jvp`` runs the function for each direction. ``linearize`` runs it once; each direction then
    costs as much as a backward pass.

    Args:
        func: takes pytrees of tensors and returns a pytree of tensors; with ``has_aux``, returns a
            tuple of such a pytree and an auxiliary value.
        primals: the point of linearization.
        has_aux: if True, ``func`` returns an auxiliary value, which is passed through.

    Returns:
        ``(output, jvp_fn)``, with ``has_aux`` ``(output, jvp_fn, aux)``. ``jvp_fn(*tangents)``
        takes tangents with the structure, shapes and dtypes of the primals and returns a tangent
        like the output.

    Raises:
        RuntimeError: an output is not a tensor, or the tangents do not match the primals.
        ValueError: a primal is not a tensor.

    Example:
        >>> import torch
        >>> from tsfunc import linearize
        >>> out, jvp_fn = linearize(torch.sin, torch.zeros(2))
        >>> jvp_fn(torch.tensor([1., 2.]))
        tensor([1., 2.])

    Corresponds to ``torch.func.linearize``, and ``jax.linearize`` with its ``has_aux``. The
    pullback is linear in the cotangent, and the pullback of the pullback is the derivative. An
    operator whose backward formula can't be differentiated can't be linearized. Inside of
    torch.func's transforms and of ``torch.compile``, each direction runs the function, by
    ``torch.func.jvp``.
    """
    check_function("linearize", func)
    if (other_jvp := delegate("jvp")) is not None:
        out, aux_parts = _split_aux(func(*primals), has_aux)

        def by_jvp(*tangents: Any) -> Any:
            return other_jvp(lambda *xs: _split_aux(func(*xs), has_aux)[0], primals, tangents)[1]

        return (out, by_jvp, *aux_parts)
    if torch.is_inference_mode_enabled():
        return autograd.without_inference_mode(linearize, func, *primals, has_aux=has_aux)
    names = names_of_selected(func, primals, tuple(range(len(primals))))
    flat, spec = flatten_tensors(API, "primals", primals, names)

    def run(inputs: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Any]:
        out, aux = _split_aux(func(*pytrees.unflatten(spec, inputs)), has_aux)
        leaves, out_spec = flatten_output(API, out)
        return leaves, (leaves, out_spec, aux)

    recorded, (outs, out_spec, aux) = run_recorded(run, flat, primals)
    recorded.end_inputs()
    zeros = [torch.zeros_like(x) for x in outs]
    differentiable = [i for i, x in enumerate(outs) if autograd.is_differentiable(x)]

    def pullback(*cotangents: torch.Tensor) -> Any:
        return recorded.pullback(with_replaced(zeros, differentiable, cotangents), retain=True)

    _, pushforward = vjp(pullback, *[zeros[i] for i in differentiable])

    @boundary("the pushforward of linearize", func)
    def jvp_fn(*tangents: Any) -> Any:
        matched = _match(tangents, flat, spec)
        tangents_out = list(zeros)
        for i, tangent in zip(differentiable, pushforward(matched), strict=True):
            tangents_out[i] = tangent
        return pytrees.unflatten(out_spec, tangents_out)

    output = pytrees.unflatten(out_spec, [recorded.released(out) for out in outs])
    return (output, jvp_fn, *recorded.released_aux(aux))


def _split_aux(output: Any, has_aux: bool) -> tuple[Any, list[Any]]:
    """Return the output, and a list with the auxiliary part if there is one."""
    output, aux = split_aux(API, output, has_aux)
    return output, [aux] if has_aux else []


def _match(tangents: Any, primals: Sequence[torch.Tensor], spec: Any) -> list[torch.Tensor]:
    """Return the flattened tangents; raise if they do not match the primals."""
    flat = flatten_matching(
        "jvp_fn(*tangents)", tangents, spec,
        "Expected the tangents to have the same argspec as the primals that were linearized at: "
        "expected {expected}, got {got}.",
    )  # fmt: skip
    for i, (t, x) in enumerate(zip(flat, primals, strict=True)):
        facts = [
            ("shape", same_sizes(t, x), sizes_text(x), sizes_text(t)),
            ("dtype", t.dtype == x.dtype, x.dtype, t.dtype),
            ("device", t.device == x.device, x.device, t.device),
        ]
        for name, equal, expected, got in facts:
            if not equal:
                raise RuntimeError(
                    f"jvp_fn(*tangents): the tangent at position {i} in flattened pytree doesn't "
                    f"match the {name} of its primal: expected {expected}, got {got}."
                )
    return flat
