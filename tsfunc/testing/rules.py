"""``check_custom_rule``: a check of custom rules against the function that they belong to."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch

from tsfunc import pytrees
from tsfunc.bridge.grad.autograd import is_differentiable
from tsfunc.errors import CustomRuleError
from tsfunc.testing.laws import inner, same
from tsfunc.transforms.argnums import with_replaced
from tsfunc.transforms.custom_jvp import custom_jvp
from tsfunc.transforms.forward import jvp
from tsfunc.transforms.reverse import vjp
from tsfunc.transforms.vmap import vmap


def check_custom_rule(
    func: Callable[..., Any],
    *args: Any,
    order: Literal[1, 2] = 1,
    eps: float = 1e-6,
    rtol: float = 1e-4,
    atol: float = 1e-6,
) -> None:
    """Check that the custom rules of a function agree with the function and with each other.

    Under ``vmap`` the function and its pullback are compared with the loop. All arguments are
    batched together and each alone, along the first and the last dim, for a batch of one example
    and a batch that is larger than any dim of the arguments. The derivatives are checked in
    ``float64``: forward mode against central differences, and reverse mode against central
    differences and against the transpose of forward mode. The values that the rules return are
    compared with the function's own.
    In the dtypes of the given arguments, the results of the rules must have the function's dtypes.
    For complex tensors the real and the imaginary parts are checked, by torch's definition of
    gradients. A function without forward mode is checked without it.

    Args:
        func: a ``custom_vmap``, ``custom_jvp`` or ``custom_vjp`` function, the ``apply`` of a
            ``torch.autograd.Function``, or any function; takes and returns pytrees.
        args: arguments for one example. Further examples are these times factors near 1; floating
            point tensors are converted to ``float64``.
        order: with 2, the derivative by reverse mode is differentiated and checked too.
        eps: the step of the differences.
        rtol, atol: as for ``torch.testing.assert_close``.

    Raises:
        AssertionError: a check fails; the message names the check, the part of the result, and the
            size of the difference.

    Example:
        >>> import torch
        >>> from tsfunc import custom_vjp
        >>> from tsfunc.testing import check_custom_rule
        >>> @custom_vjp
        ... def square(x):
        ...     return x * x
        >>> square.defvjp(lambda x: (x * x, x), lambda x, ct: (2 * x * ct,))
        >>> check_custom_rule(square, torch.rand(3))

    Similar to ``torch.autograd.gradcheck`` and ``jax.test_util.check_grads``; covers ``vmap`` too.
    """
    try:
        _check_rule(func, args, order, eps, rtol, atol)
    except CustomRuleError as error:
        raise AssertionError(f"A rule does not return what it must. {error}") from error


def _check_rule(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    order: int,
    eps: float,
    rtol: float,
    atol: float,
) -> None:
    originals, tree = pytrees.flatten(args)
    leaves = [_to_double(leaf) for leaf in originals]
    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    wrt = [i for i in positions if is_differentiable(leaves[i])]

    def of_leaves(*values: Any) -> Any:
        return func(*pytrees.unflatten(tree, values))

    if isinstance(func, custom_jvp):
        _check_value(func, pytrees.unflatten(tree, leaves), rtol, atol)
    for bdims in _batchings(leaves, positions):
        what = f"vmap(f) over {_bdims_text(bdims)} and the stacked loop"
        _check_loop(what, of_leaves, leaves, bdims, rtol, atol)
    if not wrt:
        return

    def of_chosen(*values: Any, leaves: Sequence[Any] = leaves) -> tuple[torch.Tensor, ...]:
        flat = pytrees.leaves_of(of_leaves(*with_replaced(leaves, wrt, values)))
        return tuple(x for x in flat if is_differentiable(x))

    primals = [leaves[i] for i in wrt]
    cotangents = [torch.randn_like(x) for x in of_chosen(*primals)]
    if not cotangents:
        return
    if any(originals[i].dtype != leaves[i].dtype for i in wrt):
        _check_types(functools.partial(of_chosen, leaves=originals), [originals[i] for i in wrt])
    _check_derivatives(of_chosen, primals, cotangents, eps, rtol, atol)

    def cts_in(*values: Any) -> Any:
        return vjp(of_chosen, *values)[1](tuple(cotangents))

    if order == 2:
        second = [torch.randn_like(x) for x in primals]
        where = "of the second order: "
        _check_derivatives(cts_in, primals, second, eps, rtol, atol, where)

    for bdims in _batchings(primals, range(len(primals))):
        what = f"vmap of reverse mode over {_bdims_text(bdims)} and the stacked loop"
        _check_loop(what, cts_in, primals, bdims, rtol, atol)


def _check_value(func: custom_jvp[Any], args: tuple[Any, ...], rtol: float, atol: float) -> None:
    """Check the value that a jvp rule returns: transforms use the function's value instead."""
    fixed, rest = func.fixed(func.positional(args, {}))
    if func.rule is None:
        return
    zeros = pytrees.tree_map(
        lambda x: torch.zeros_like(x) if isinstance(x, torch.Tensor) else x, rest
    )
    value = func.rule(*fixed, rest, zeros)[0]
    same("the value that the jvp rule returns and the function", value, func(*args), rtol, atol)


def _check_types(
    func: Callable[..., tuple[torch.Tensor, ...]], primals: Sequence[torch.Tensor]
) -> None:
    """Check that both modes keep the shapes and dtypes of the arguments and results."""

    def types(values: Sequence[torch.Tensor]) -> list[str]:
        return [f"{x.dtype} of shape {tuple(x.shape)}" for x in values]

    result = func(*primals)
    where = f"for arguments of {', '.join(types(primals))}: the types of "
    values, pullback = vjp(func, *primals)
    _check_equal(f"{where}the value under reverse mode and of the function", values, result, types)
    cts_in = pullback(tuple(torch.ones_like(x) for x in values))
    _check_equal(f"{where}the cotangents and of the arguments", cts_in, primals, types)
    duals = _forward(func, primals, [torch.ones_like(x) for x in primals])
    if duals is not None:
        _check_equal(
            f"{where}the value under forward mode and of the function", duals[0], result, types
        )
        _check_equal(f"{where}the tangents and of the results", duals[1], result, types)


def _check_equal(what: str, got: Any, want: Any, types: Callable[[Any], list[str]]) -> None:
    if types(got) != types(want):
        raise AssertionError(
            f"{what} differ: expected {', '.join(types(want))}; got {', '.join(types(got))}."
        )


def _forward(
    func: Callable[..., tuple[torch.Tensor, ...]],
    primals: Sequence[torch.Tensor],
    directions: Sequence[torch.Tensor],
) -> Any:
    """Return the value and tangents; None for an ``autograd.Function`` without forward mode."""
    try:
        return jvp(func, tuple(primals), tuple(directions))
    except (NotImplementedError, RuntimeError) as error:
        if "jvp" not in str(error) or "implement" not in str(error):
            raise
        return None


def _check_derivatives(
    func: Callable[..., tuple[torch.Tensor, ...]],
    primals: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor],
    eps: float,
    rtol: float,
    atol: float,
    where: str = "",
) -> None:
    """Check both modes along a random direction."""
    directions = [torch.randn_like(x) for x in primals]
    after = func(*(x + eps * t for x, t in zip(primals, directions, strict=True)))
    before = func(*(x - eps * t for x, t in zip(primals, directions, strict=True)))
    quotient = tuple((a - b) / (2 * eps) for a, b in zip(after, before, strict=True))
    values, pullback = vjp(func, *primals)
    result = func(*primals)
    same(f"{where}the value under reverse mode and the function", values, result, rtol, atol)
    cts_in = pullback(tuple(cotangents))
    product = inner(cts_in, directions)
    what = f"{where}reverse mode, <vjp(cotangent), direction>, and central differences"
    same(what, product, inner(cotangents, quotient), rtol, atol)
    forward = _forward(func, primals, directions)
    if forward is None:
        return
    values, tangents_out = forward
    same(f"{where}the value under forward mode and the function", values, result, rtol, atol)
    same(
        f"{where}forward mode, jvp(direction), and central differences",
        tangents_out,
        quotient,
        rtol,
        atol,
    )
    what = f"{where}reverse mode, <vjp(cotangent), direction>, and forward mode transposed"
    same(what, product, inner(cotangents, tangents_out), rtol, atol)


Batching = list[int | None]


def _batchings(leaves: Sequence[Any], positions: Sequence[int]) -> Iterator[Batching]:
    """Yield the batch dims: all tensors batched, then each alone; along the first and last dim."""
    chosen = [tuple(positions), *[(i,) for i in positions if len(positions) > 1]]
    for batched in chosen if positions else []:
        for last in (False, True):
            if last and all(leaves[i].dim() == 0 for i in batched):
                continue
            yield [
                (leaf.dim() if last else 0) if i in batched else None
                for i, leaf in enumerate(leaves)
            ]


def _check_loop(
    what: str,
    func: Callable[..., Any],
    leaves: Sequence[Any],
    bdims: Batching,
    rtol: float,
    atol: float,
) -> None:
    sizes = [n for x in leaves if isinstance(x, torch.Tensor) for n in x.shape if n < 8]
    # Larger than any dim of the arguments, so that no other dim passes for the batch dim.
    _check_batch(what, func, leaves, bdims, max([2, *sizes]) + 1, rtol, atol)
    if all(dim in (None, 0) for dim in bdims):
        _check_batch(f"for a batch of 1, {what}", func, leaves, bdims, 1, rtol, atol)


def _check_batch(
    what: str,
    func: Callable[..., Any],
    leaves: Sequence[Any],
    bdims: Batching,
    size: int,
    rtol: float,
    atol: float,
) -> None:
    rows = [
        [
            leaf
            if dim is None
            else (leaf * (1 + i / 16) if is_differentiable(leaf) else leaf.clone())
            for leaf, dim in zip(leaves, bdims, strict=True)
        ]
        for i in range(size)
    ]
    outs = [pytrees.flatten(func(*row)) for row in rows]
    want = [
        torch.stack(list(column)) if isinstance(column[0], torch.Tensor) else column[0]
        for column in zip(*(out for out, _ in outs), strict=True)
    ]
    columns = zip(leaves, bdims, zip(*rows, strict=True), strict=True)
    inputs = [
        leaf if dim is None else torch.stack(list(column), dim) for leaf, dim, column in columns
    ]
    try:
        got = vmap(func, tuple(bdims))(*inputs)
    except CustomRuleError:
        raise
    except Exception as error:
        raise AssertionError(
            f"{what}: of {size} examples the loop runs, and vmap raises {type(error).__name__}: "
            f"{error}"
        ) from error
    same(what, got, pytrees.unflatten(outs[0][1], want), rtol, atol)


def _to_double(leaf: Any) -> Any:
    if is_differentiable(leaf):
        return leaf.detach().to(torch.complex128 if leaf.is_complex() else torch.float64)
    return leaf


def _bdims_text(bdims: Batching) -> str:
    """Name the batched tensors by their flattened positions, with the batch dims."""
    batched = [f"{i} (dim {dim})" for i, dim in enumerate(bdims) if dim is not None]
    return f"tensor{'s' if len(batched) > 1 else ''} {', '.join(batched)}"
