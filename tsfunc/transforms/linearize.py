"""The derivative of a function at one point, as a linear function: ``linearize``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tsfunc import pytrees
from tsfunc.bridge import autograd
from tsfunc.bridge.dynamo import outside_dynamo
from tsfunc.bridge.functorch import delegate
from tsfunc.transforms.arguments import flatten_output, flatten_tensors
from tsfunc.transforms.reverse import record, vjp

API = "linearize(f, *primals)"


@outside_dynamo
def linearize(func: Callable[..., Any], *primals: Any) -> tuple[Any, Callable[..., Any]]:
    """The value of a function, and its derivative there as a function of the direction.

    ``jvp`` runs the function for each direction; here it runs once, and each direction costs as
    much as a backward pass.

    Args:
        func: takes pytrees of tensors, returns a pytree of tensors.
        primals: where it is linearized.

    Returns:
        ``(output, jvp_fn)``. ``jvp_fn(*tangents)`` takes what has the structure, shapes and types
        of the primals and returns what has the output's.

    Raises:
        RuntimeError: an output is no tensor; the tangents are not like the primals.
        ValueError: a primal is no tensor.

    Example:
        >>> import torch
        >>> from tsfunc import linearize
        >>> out, jvp_fn = linearize(torch.sin, torch.zeros(2))
        >>> jvp_fn(torch.tensor([1., 2.]))
        tensor([1., 2.])

    As ``torch.func.linearize`` and ``jax.linearize``. The pullback is linear in the cotangent, and
    its own pullback is the derivative: operators whose backward formula can't be differentiated
    can't be linearized.
    """
    if (other := delegate("linearize")) is not None:
        return other(func, *primals)  # type: ignore[no-any-return]
    if torch.is_inference_mode_enabled():
        return autograd.out_of_inference(linearize, func, *primals)  # type: ignore[no-any-return]
    flat, spec = flatten_tensors(API, "primals", primals)

    def run(inputs: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Any]:
        leaves, out_spec = flatten_output(API, func(*pytrees.unflatten(spec, inputs)))
        return leaves, (leaves, out_spec)

    recorded, (outs, out_spec) = record(run, flat, primals)
    zeros = [torch.zeros_like(x) for x in outs]
    smooth = [i for i, x in enumerate(outs) if x.is_floating_point() or x.is_complex()]

    def pull_smooth(*cotangents: torch.Tensor) -> Any:
        every = list(zeros)
        for i, cotangent in zip(smooth, cotangents, strict=True):
            every[i] = cotangent
        return recorded.pull(every, retain=True)

    _, push = vjp(pull_smooth, *[zeros[i] for i in smooth])

    @outside_dynamo
    def jvp_fn(*tangents: Any) -> Any:
        given = _match(tangents, flat, spec)
        # Else nobody has a use for the graph of the pullback, which goes back to ``inputs``.
        graph = any(autograd.requires_grad(tangent, recorded.level) for tangent in given)
        pushed = list(zeros)
        for i, tangent in zip(smooth, push(given), strict=True):
            pushed[i] = tangent if graph else recorded.released(tangent)
        return pytrees.unflatten(out_spec, pushed)

    return pytrees.unflatten(out_spec, [recorded.released(out) for out in outs]), jvp_fn


def _match(tangents: Any, primals: Sequence[torch.Tensor], spec: Any) -> list[torch.Tensor]:
    """The flattened tangents, which must be like the primals."""
    flat: list[torch.Tensor]
    flat, given = pytrees.flatten(tangents)
    if given != spec:
        raise RuntimeError(
            f"jvp_fn(*tangents): Expected the tangents to have the same argspec as the primals "
            f"that were linearized at: got {given}, expected {spec}."
        )
    for i, (t, x) in enumerate(zip(flat, primals, strict=True)):
        if not isinstance(t, torch.Tensor):
            raise RuntimeError(f"jvp_fn(*tangents): Expected Tensors, got {type(t)}")
        for name in ("shape", "dtype", "device"):
            got, wanted = getattr(t, name), getattr(x, name)
            if got != wanted:
                raise RuntimeError(
                    f"jvp_fn(*tangents): the tangent at position {i} in flattened pytree doesn't "
                    f"match the {name} of its primal: got {got}, expected {wanted}."
                )
    return flat
