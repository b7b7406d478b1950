"""Jacobians and Hessians: ``vmap`` over a basis, of the pullback or of the pushforward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec

import torch

from tsfunc import pytrees
from tsfunc.bridge.grad import autograd
from tsfunc.bridge.tracers.batch_tracer import BatchTracer
from tsfunc.bridge.tracers.boundaries import boundary, check_function
from tsfunc.bridge.tracers.dtensors import is_dtensor
from tsfunc.bridge.tracers.dynamo import delegate_in_dynamo
from tsfunc.bridge.tracers.functorch import TORCH_FUNC, delegate
from tsfunc.bridge.tracers.user_queries import statically_known_true
from tsfunc.transforms.argnums import (
    Argnums,
    flatten_selected,
    flatten_tensors,
    level_to_record_on,
    refuse_complex,
    replace_selected,
)
from tsfunc.transforms.chunks import check_chunks
from tsfunc.transforms.forward import jvp
from tsfunc.transforms.reverse import vjp
from tsfunc.transforms.transformed import Transformed, named_as
from tsfunc.transforms.vmap import vmap
from tsfunc.user_code import folding

_Params = ParamSpec("_Params")


def _basis_vectors(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return a stack of tangents for each tensor: together the unit vectors of all entries."""
    total = sum(x.numel() for x in tensors)
    bases, start = [], 0
    for x in tensors:
        size = x.numel()
        basis = torch.zeros(total, size, dtype=x.dtype, device=x.device)
        basis.diagonal(-start).fill_(1)
        bases.append(basis.view([total, *x.shape]))
        start += size
    return bases


def _unit(index: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return one unit vector over the entries of all tensors, in the shapes of the tensors."""
    units, start = [], 0
    for x in tensors:
        positions = torch.arange(start, start + x.numel(), device=x.device)
        unit = (positions == index.to(x.device)).to(x.dtype)
        units.append(unit.view(x.shape))
        start += x.numel()
    return units


def _flat_function(
    api: str, func: Callable[..., Any], argnums: Argnums, args: Sequence[Any], kwargs: Any
) -> tuple[list[torch.Tensor], Any, Callable[..., Any]]:
    """Return the flat arguments to differentiate by, their structure, and the function of them."""
    positions, flat, spec = flatten_selected(api, func, args, argnums)
    refuse_complex(api, "inputs", flat)

    def of_leaves(*leaves: Any) -> Any:
        new = pytrees.unflatten(spec, leaves)
        level = level_to_record_on(leaves)

        def lifted(x: Any) -> Any:
            return autograd.lift(x, level) if isinstance(x, torch.Tensor) else x

        # The other arguments are lifted too: the function may write values that depend on the
        # chosen arguments into them, which plain tensors next to a level's tracers can't hold.
        others = [lifted(arg) for arg in args]
        options = {name: lifted(arg) for name, arg in kwargs.items()}
        return func(*replace_selected(others, positions, new), **options)

    return flat, spec, of_leaves


def _jacrev_in_dynamo(
    func: Callable[..., Any], argnums: Argnums = 0, *, memory_budget: Any = None, **options: Any
) -> Any:
    """Return torch.func's jacrev; NotImplemented if it does not take the arguments."""
    if memory_budget is not None or options.get("chunk_size") == "auto":
        return NotImplemented
    return TORCH_FUNC["jacrev"](func, argnums, **options)


@folding("jacrev")
@delegate_in_dynamo(_jacrev_in_dynamo)
def jacrev(
    func: Callable[_Params, Any],
    argnums: Argnums = 0,
    *,
    has_aux: bool = False,
    chunk_size: int | Literal["auto"] | None = None,
    memory_budget: float | None = None,
    _preallocate_and_copy: bool = False,
) -> Transformed[_Params, Any]:
    """Return the Jacobian by reverse mode: one pullback for each entry of the output, batched.

    Args:
        func: takes and returns pytrees of real tensors; with ``has_aux``, returns a tuple of such
            a pytree and an auxiliary value.
        argnums: the positional arguments to differentiate by: an int, or a tuple of ints.
        has_aux: if True, ``func`` returns an auxiliary value.
        chunk_size: the number of rows that are pulled back at a time. None takes all rows at once,
            "auto" as many as fit into ``memory_budget``, as for :func:`vmap`. With 1, the rows are
            pulled back without a vmap, for backward passes that a vmap refuses. A single row and
            the rows of DTensors always are.
        memory_budget: the bytes that the pullbacks may take in addition to the function's own run.

    Returns:
        A function of the same arguments. For an output of shape ``o`` and an argument of shape
        ``i`` it returns a tensor of shape ``o + i``. The result has the structure of the output,
        and inside of it that of the argument (a tuple for a tuple of ``argnums``); with
        ``has_aux`` it is ``(jacobian, aux)``.

    Raises:
        ValueError: ``chunk_size`` is not positive, or an argument to differentiate by is not a
            tensor.
        RuntimeError: ``argnums`` does not fit the arguments, an argument is not real, or an output
            is not a real tensor.

    Example:
        >>> import torch
        >>> from tsfunc import jacrev
        >>> jacrev(torch.sin)(torch.zeros(2))
        tensor([[1., 0.],
                [0., 1.]])

    Corresponds to ``torch.func.jacrev`` and ``jax.jacrev``.
    """
    chunks = check_chunks("jacrev", chunk_size, memory_budget)

    @named_as(func)
    @boundary("jacrev", func, traceable=chunks != "auto")
    def jacobian(*args: Any, **kwargs: Any) -> Any:
        if chunks != "auto" and (other := delegate("jacrev")) is not None:
            return other(func, argnums, has_aux=has_aux, chunk_size=chunks)(*args, **kwargs)
        flat, spec, of_leaves = _flat_function("jacrev", func, argnums, args, kwargs)
        out, pullback, *rest = vjp(of_leaves, *flat, has_aux=has_aux)
        outs, out_spec = flatten_tensors("jacrev", "the output", out)
        refuse_complex("jacrev", "outputs", outs)

        def pull_flat(cotangents: Sequence[torch.Tensor]) -> Any:
            return pullback(pytrees.unflatten(out_spec, cotangents))

        count = sum(out.numel() for out in outs)
        if chunk_size == 1 or statically_known_true(count == 1) or any(map(is_dtensor, outs)):
            # A batch of plain cotangents can't be replicated as DTensors, and one row needs no
            # batch: in a jvp, operators on a batch and a saved value are pushed forward twice.
            rows = _rows_without_vmap(pull_flat, outs)
        elif chunks is None:
            rows = vmap(pull_flat)(_basis_vectors(outs))
        else:
            # Each chunk makes its rows of the basis; the whole basis has the square of the
            # output's size.
            numbers = torch.arange(count)
            mapped = vmap(lambda i: pull_flat(_unit(i, outs)), chunk_size=chunks,
                          memory_budget=memory_budget)  # fmt: skip
            rows = mapped(numbers)
        blocks = [_split_rows(by_input, outs) for by_input in rows]
        nested = [pytrees.unflatten(spec, [block[i] for block in blocks]) for i in range(len(outs))]
        result = pytrees.unflatten(out_spec, nested)
        return (result, rest[0]) if has_aux else result

    return jacobian


def _rows_without_vmap(
    pullback: Callable[[Sequence[torch.Tensor]], Any], outs: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """Compute the rows without vmap, for backward passes that can't be batched."""
    numbers = torch.arange(sum(out.numel() for out in outs))
    if not len(numbers):
        return vmap(pullback)(_basis_vectors(outs))
    rows = [pullback(_unit(number, outs)) for number in numbers]
    return [torch.stack(entries) for entries in zip(*rows, strict=True)]


def _split_rows(rows: torch.Tensor, outs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Split rows over the entries of all outputs into one tensor for each output, in its shape."""
    parts = rows.split([out.numel() for out in outs], dim=0) if len(outs) > 1 else [rows]
    rest = rows.shape[1:]
    return [part.reshape([*out.shape, *rest]) for part, out in zip(parts, outs, strict=True)]


@folding("jacfwd")
@delegate_in_dynamo(TORCH_FUNC["jacfwd"])
def jacfwd(
    func: Callable[_Params, Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    *,
    randomness: str = "error",
) -> Transformed[_Params, Any]:
    """Return the Jacobian by forward mode: one pushforward for each entry of the input, batched.

    Args:
        func: takes and returns pytrees of real tensors; with ``has_aux``, returns a tuple of such
            a pytree and an auxiliary value.
        argnums: the positional arguments to differentiate by: an int, or a tuple of ints.
        has_aux: if True, ``func`` returns an auxiliary value.
        randomness: the mode of random operators in the ``vmap`` over directions, as for
            :func:`vmap`.

    Returns:
        A function of the same arguments. For an output of shape ``o`` and an argument of shape
        ``i`` it returns a tensor of shape ``o + i``, in the structure that :func:`jacrev`
        describes; with ``has_aux`` it returns ``(jacobian, aux)``.

    Raises:
        ValueError: an argument to differentiate by is not a tensor.
        RuntimeError: ``argnums`` does not fit the arguments, an argument is not real, or an output
            is not a real tensor.

    Example:
        >>> import torch
        >>> from tsfunc import jacfwd
        >>> jacfwd(torch.sin)(torch.zeros(2))
        tensor([[1., 0.],
                [0., 1.]])

    Corresponds to ``torch.func.jacfwd`` and ``jax.jacfwd``.
    """

    @named_as(func)
    @boundary("jacfwd", func, traceable=True)
    def jacobian(*args: Any, **kwargs: Any) -> Any:
        if (other := delegate("jacfwd")) is not None:
            return other(func, argnums, has_aux, randomness=randomness)(*args, **kwargs)
        flat, spec, of_leaves = _flat_function("jacfwd", func, argnums, args, kwargs)

        def pushforward(directions: Sequence[torch.Tensor]) -> Any:
            out, tangent, *rest = jvp(of_leaves, tuple(flat), tuple(directions), has_aux=has_aux)
            refuse_complex("jacfwd", "outputs", pytrees.leaves_of(out))
            return (tangent, *rest)

        columns, *rest = _with_unmapped_aux(pushforward, randomness)(_basis_vectors(flat))
        leaves, out_spec = pytrees.flatten(columns)
        nested = [pytrees.unflatten(spec, _split_columns(leaf, flat)) for leaf in leaves]
        result = pytrees.unflatten(out_spec, nested)
        return (result, rest[0]) if has_aux else result

    return jacobian


def _with_unmapped_aux(pushforward: Callable[..., Any], randomness: str) -> Callable[..., Any]:
    """vmap a function over directions; its auxiliary result is the same for every direction."""
    aux: list[Any] = []

    def tangent_only(directions: Any) -> Any:
        tangent, *rest = pushforward(directions)
        aux.extend(rest)
        return tangent

    def run(directions: Any) -> Any:
        columns = vmap(tangent_only, out_dims=-1, randomness=randomness)(directions)
        return (columns, *[pytrees.tree_map(_without_batch, a) for a in aux])

    return run


def _without_batch(value: Any) -> Any:
    if isinstance(value, BatchTracer) and not value.dispatch_level.alive:
        return value.value if value.bdim is None else value.value.select(value.bdim, 0)
    return value


def _split_columns(columns: torch.Tensor, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Split columns over the entries of all inputs into a tensor for each input."""
    parts = columns.split([x.numel() for x in inputs], dim=-1) if len(inputs) > 1 else [columns]
    return [
        part.reshape([*columns.shape[:-1], *x.shape]) for part, x in zip(parts, inputs, strict=True)
    ]


@folding("hessian")
@delegate_in_dynamo(TORCH_FUNC["hessian"])
def hessian(func: Callable[_Params, Any], argnums: Argnums = 0) -> Transformed[_Params, Any]:
    """Return the matrix of second derivatives: forward mode over reverse mode.

    Args:
        func: takes and returns pytrees of real tensors.
        argnums: the positional arguments to differentiate by, twice.

    Returns:
        A function of the same arguments. For an output of shape ``o`` and an argument of shape
        ``i`` it returns a tensor of shape ``o + i + i``.

    Raises:
        ValueError: an argument to differentiate by is not a tensor.
        RuntimeError: as for :func:`jacrev`.

    Example:
        >>> import torch
        >>> from tsfunc import hessian
        >>> hessian(lambda x: (x ** 2).sum())(torch.ones(2))
        tensor([[2., 0.],
                [0., 2.]])

    Corresponds to ``torch.func.hessian`` and ``jax.hessian``.
    """
    check_function("hessian", func)
    return jacfwd(jacrev(func, argnums), argnums)
