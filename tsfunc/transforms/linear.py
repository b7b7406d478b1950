"""Functions around the derivatives: ``stop_gradient``, ``hvp``, ``linear_transpose``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from tsfunc import pytrees
from tsfunc.bridge.grad import autograd
from tsfunc.bridge.tracers.boundaries import boundary, check_function
from tsfunc.bridge.tracers.dynamo import outside_dynamo
from tsfunc.bridge.tracers.tracer import Tracer
from tsfunc.transforms.argnums import flatten_output
from tsfunc.transforms.forward import jvp
from tsfunc.transforms.reverse import RecordedRun, grad, match_cotangents, run_recorded
from tsfunc.types import MetaTensorType
from tsfunc.types.meta import sizes_and_dtype
from tsfunc.user_code import folding, name_of

_Tree = TypeVar("_Tree")


def stop_gradient(tree: _Tree) -> _Tree:
    """Return a tree with the same values as constants, for every derivative in both modes.

    The function raises no errors of its own, and is the identity where nothing is differentiated.

    Args:
        tree: a pytree of tensors of any shapes and dtypes, and of other values.

    Returns:
        A pytree like ``tree``. Its tensors share the memory of those in ``tree``, and have no
        gradients or tangents; other leaves are returned unchanged.

    Example:
        >>> import torch
        >>> from tsfunc import grad, stop_gradient
        >>> grad(lambda x: x * stop_gradient(x))(torch.tensor(3.))
        tensor(3.)

    Corresponds to ``jax.lax.stop_gradient``; applies ``Tensor.detach`` to each leaf.
    """
    return pytrees.tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, tree)


@boundary("hvp", traceable=True)
def hvp(func: Callable[..., Any], primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
    """Return the product of a function's Hessian with a vector, without the Hessian.

    Args:
        func: takes pytrees of tensors and returns a tensor of shape ``()``.
        primals: the arguments, as a tuple; the Hessian is by all of them.
        tangents: the vector, with the same structure, shapes and dtypes.

    Returns:
        A pytree like the argument, or like the tuple of arguments if there are several.

    Raises:
        RuntimeError: the primals and tangents do not match, or the result is not a scalar tensor.

    Example:
        >>> import torch
        >>> from tsfunc import hvp
        >>> hvp(lambda x: (x ** 3).sum(), (torch.ones(2),), (torch.tensor([1., 2.]),))
        tensor([ 6., 12.])

    Forward mode over reverse mode, as ``hvp`` in JAX's documentation: Pearlmutter, "Fast exact
    multiplication by the Hessian" (1994). Unlike ``torch.autograd.functional.hvp``, it does not
    return the value of ``func``.
    """
    check_function("hvp", func)
    several = isinstance(primals, tuple) and len(primals) > 1
    argnums = tuple(range(len(primals))) if several else 0
    return jvp(grad(func, argnums), primals, tangents)[1]


@outside_dynamo
@folding("linear_transpose")
def linear_transpose(
    func: Callable[..., _Tree], *primals: Any
) -> Callable[[_Tree], tuple[Any, ...]]:
    """Return the transpose of a linear function.

    Args:
        func: a linear function from pytrees of tensors to a pytree of tensors.
        primals: the arguments, of which only shapes and dtypes matter: tensors, or for each a
            :class:`MetaTensorType` with a dtype and fixed sizes.

    Returns:
        A function that takes a pytree like the result of ``func`` and returns a tuple with a
        pytree like each argument. For complex tensors it is the transpose without conjugation.

    Raises:
        ValueError: the function is found to be nonlinear: its derivative depends on its
            arguments, or it does not map zeros to zeros.
        DescriptorError: a description lacks the dtype or a size.
        RuntimeError: an output is not a tensor; at a call, the argument does not fit.

    Example:
        >>> import torch
        >>> from tsfunc import MetaTensorType, linear_transpose
        >>> sums = linear_transpose(lambda x: x.cumsum(0), MetaTensorType([3], dtype=torch.float32))
        >>> sums(torch.tensor([1., 2., 3.]))
        (tensor([6., 5., 3.]),)

    Corresponds to ``jax.linear_transpose``. The transpose is computed by reverse mode. An operator
    whose backward formula differs from the transpose of its derivative gets the backward formula.
    """
    check_function("linear_transpose", func)
    label = f"linear_transpose({name_of(func)})"
    flat, spec = pytrees.flatten(primals)
    zeros = [_zeros(label, leaf) for leaf in flat]

    def run(inputs: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Any]:
        leaves, out_spec = flatten_output(label, func(*pytrees.unflatten(spec, inputs)))
        return leaves, (leaves, out_spec)

    recorded, (leaves, out_spec) = run_recorded(run, zeros, primals)
    _check_linear(label, recorded)
    recorded.end_inputs()

    @boundary("linear_transpose", func)
    def transposed(cotangents: Any) -> tuple[Any, ...]:
        matched = match_cotangents(f"{label}(cotangents)", cotangents, leaves, out_spec)
        cts_in = recorded.pullback([_conjugate(ct) for ct in matched], retain=True, outlives=True)
        return pytrees.unflatten(spec, [_conjugate(ct) for ct in cts_in])

    return transposed


def _conjugate(x: torch.Tensor) -> torch.Tensor:
    """Return the complex conjugate: reverse mode computes the conjugate transpose."""
    return x.conj() if x.is_complex() else x


def _zeros(label: str, leaf: Any) -> torch.Tensor:
    if isinstance(leaf, torch.Tensor):
        return torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device)
    if not isinstance(leaf, MetaTensorType):
        raise ValueError(
            f"{label}: expected tensors or MetaTensorTypes as primals, got {type(leaf).__name__}."
        )
    sizes, dtype = sizes_and_dtype(label, leaf)
    return torch.zeros(sizes, dtype=dtype, device=leaf.device)


def _check_linear(label: str, recorded: RecordedRun) -> None:
    """Raise if the derivative depends on the arguments, or the value at zero is not zero."""
    level = recorded.level
    for i, out in enumerate(recorded.outputs):
        is_plain = not isinstance(out, Tracer)
        if is_plain and bool(out.detach().count_nonzero()):
            raise ValueError(
                f"{label}: the function is not linear: it does not map zeros to zeros (flattened "
                f"output {i}). Remove the constant part of the function."
            )
    with autograd.recording_at(level):
        seeds = [autograd.lift(torch.zeros_like(out), level) for out in recorded.outputs]
        cotangents = autograd.backward(
            recorded.outputs, seeds, recorded.inputs, create_graph=True, retain_graph=True
        )
    cts_in = [ct for ct in cotangents if ct is not None]
    for i, x in enumerate(recorded.inputs):
        if autograd.depends_on(cts_in, x):
            raise ValueError(
                f"{label}: the function is not linear: its derivative depends on the value of "
                f"flattened argument {i}. For the transpose of its derivative at a point use vjp."
            )
