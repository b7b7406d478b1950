"""Functions around the derivatives: ``stop_gradient``, ``hvp``, ``linear_transpose``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tsfunc import pytrees
from tsfunc.bridge.grad import autograd
from tsfunc.bridge.tracers.dynamo import outside_dynamo
from tsfunc.bridge.tracers.tracebacks import boundary
from tsfunc.bridge.tracers.tracer import Tracer
from tsfunc.errors import DescriptorError
from tsfunc.transforms.arguments import flatten_output
from tsfunc.transforms.forward import jvp
from tsfunc.transforms.reverse import Recorded, grad, match_cotangents, record
from tsfunc.transforms.vmap_spec import name_of
from tsfunc.types import MetaTensorType


def stop_gradient(tree: Any) -> Any:
    """The same values, constants for every derivative, of either mode and of any order.

    Args:
        tree: a pytree; what is no tensor in it is returned as it is.

    Example:
        >>> import torch
        >>> from tsfunc import grad, stop_gradient
        >>> grad(lambda x: x * stop_gradient(x))(torch.tensor(3.))
        tensor(3.)

    As ``jax.lax.stop_gradient``; ``Tensor.detach`` of each leaf.
    """
    return pytrees.tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, tree)


@boundary("hvp")
def hvp(func: Callable[..., Any], primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
    """The product of a function's Hessian with a vector, without the Hessian.

    Args:
        func: takes pytrees of tensors, returns a tensor without dims.
        primals: the arguments, as a tuple; the Hessian is that by all of them.
        tangents: the vector: the same structure, shapes and types.

    Returns:
        What has the structure of the argument, or of the tuple where there are several.

    Raises:
        RuntimeError: primals and tangents do not match; the result is not a scalar tensor.

    Example:
        >>> import torch
        >>> from tsfunc import hvp
        >>> hvp(lambda x: (x ** 3).sum(), (torch.ones(2),), (torch.tensor([1., 2.]),))
        tensor([ 6., 12.])

    Forward mode over reverse mode, as ``hvp`` of JAX's documentation: Pearlmutter, "Fast exact
    multiplication by the Hessian" (1994). ``torch.autograd.functional.hvp`` returns the value too.
    """
    several = isinstance(primals, tuple) and len(primals) > 1
    argnums = tuple(range(len(primals))) if several else 0
    return jvp(grad(func, argnums), primals, tangents)[1]


@outside_dynamo
def linear_transpose(func: Callable[..., Any], *primals: Any) -> Callable[[Any], tuple[Any, ...]]:
    """The transpose of a linear function.

    Args:
        func: a linear function of pytrees of tensors; returns a pytree of tensors.
        primals: its arguments, of which only the types count: tensors, or a
            :class:`MetaTensorType` of a type and fixed sizes for each.

    Returns:
        A function that takes what has the structure of ``func``'s result and returns a tuple,
        with what has the structure of each argument. For complex tensors it is the transpose
        without conjugation.

    Raises:
        ValueError: the function is seen not to be linear: its derivative depends on its
            arguments, or it does not map zeros to zeros.
        DescriptorError: a description leaves the type or a size open.
        RuntimeError: an output is no tensor; at a call, the argument does not fit.

    Example:
        >>> import torch
        >>> from tsfunc import MetaTensorType, linear_transpose
        >>> sums = linear_transpose(lambda x: x.cumsum(0), MetaTensorType([3], dtype=torch.float32))
        >>> sums(torch.tensor([1., 2., 3.]))
        (tensor([6., 5., 3.]),)

    As ``jax.linear_transpose``. The transpose is found by reverse mode, so operators whose
    backward formula is not that of their derivative have another transpose.
    """
    what = f"linear_transpose({name_of(func)})"
    flat, spec = pytrees.flatten(primals)
    zeros = [_zeros(what, leaf) for leaf in flat]

    def run(inputs: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Any]:
        leaves, out_spec = flatten_output(what, func(*pytrees.unflatten(spec, inputs)))
        return leaves, (leaves, out_spec)

    recorded, (leaves, out_spec) = record(run, zeros, primals)
    _check_linear(what, recorded)

    @boundary("linear_transpose", func)
    def transposed(cotangents: Any) -> tuple[Any, ...]:
        given = match_cotangents(f"{what}(cotangents)", cotangents, leaves, out_spec)
        pulled = recorded.pull([_conjugate(ct) for ct in given], retain=True)
        found: tuple[Any, ...] = pytrees.unflatten(spec, [_conjugate(ct) for ct in pulled])
        return found

    return transposed


def _conjugate(x: torch.Tensor) -> torch.Tensor:
    """Reverse mode gives the conjugate transpose."""
    return x.conj() if x.is_complex() else x


def _zeros(what: str, leaf: Any) -> torch.Tensor:
    if isinstance(leaf, torch.Tensor):
        return torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device)
    if not isinstance(leaf, MetaTensorType):
        raise ValueError(
            f"{what}: expected tensors or MetaTensorTypes as primals, got {type(leaf).__name__}."
        )
    shape = leaf.shape
    if leaf.dtype is None or shape is None or not all(isinstance(n, int) for n in shape):
        raise DescriptorError(
            f"{what}: expected a description with a dtype and fixed sizes, such as "
            f"MetaTensorType([3, 4], dtype=torch.float32), got {leaf!r}."
        )
    sizes: list[Any] = list(shape)
    return torch.zeros(sizes, dtype=leaf.dtype, device=leaf.device)


def _check_linear(what: str, recorded: Recorded) -> None:
    """Refuses a derivative that depends on the arguments, and a value at zero that is not zero."""
    level = recorded.level
    for i, out in enumerate(recorded.outputs):
        known = not isinstance(out, Tracer)
        if known and bool(out.detach().count_nonzero()):
            raise ValueError(
                f"{what}: the function is not linear: it does not map zeros to zeros (flattened "
                f"output {i}). Leave out what is added to the linear part."
            )
    with autograd.recording(level):
        seeds = [autograd.lift(torch.zeros_like(out), level) for out in recorded.outputs]
        found = autograd.backward(
            recorded.outputs, seeds, recorded.inputs, create_graph=True, retain_graph=True
        )
    pulled = [ct for ct in found if ct is not None]
    for i, x in enumerate(recorded.inputs):
        if autograd.depends_on(pulled, x):
            raise ValueError(
                f"{what}: the function is not linear: its derivative depends on the value of "
                f"flattened argument {i}. For the transpose of its derivative at a point use vjp."
            )
