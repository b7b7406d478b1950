"""The laws; each raises an AssertionError that names the part of the result that differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec

import optree
import torch

from tsfunc import pytrees
from tsfunc.testing.precision import (
    epsilon,
    in_float64,
    is_narrow,
    largest,
    relative_tolerance,
    rounded_otherwise,
    uncertainty,
    wide,
)
from tsfunc.transforms.forward import jvp
from tsfunc.transforms.reverse import vjp
from tsfunc.transforms.specialize import specialize
from tsfunc.transforms.vmap import vmap
from tsfunc.user_code import folding

P = ParamSpec("P")


class _BrokenLaw(AssertionError):
    """A law does not hold; other assertions are those of the function."""


def law(check: Callable[P, None]) -> Callable[P, None]:
    """Decorate a law: the tracebacks of its errors have no frames of libraries."""
    return folding(check.__name__)(check)


@law
def check_vmap(
    func: Callable[..., Any],
    *args: Any,
    in_dims: Any = 0,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Check that ``vmap(func)`` equals the stacked loop.

    Args:
        func: takes and returns pytrees; its non-tensor results are those of any one example.
        args: inputs with the mapped dim.
        in_dims: as for ``vmap``.
        rtol, atol: as for ``torch.testing.assert_close``.

    Raises:
        AssertionError: the results differ in a value, a shape, a dtype or the structure.

    Example:
        >>> from tsfunc.testing import check_vmap
        >>> check_vmap(lambda x, y: x @ y, torch.ones(3, 2), torch.ones(2), in_dims=(0, None))
    """
    dims = pytrees.broadcast_prefix(in_dims, args, lambda dim: dim is None or isinstance(dim, int))
    flat, tree = pytrees.flatten(args)
    mapped = [x for x, dim in zip(flat, dims, strict=True) if dim is not None]
    if not mapped or not all(isinstance(x, torch.Tensor) for x in mapped):
        raise ValueError(f"check_vmap: expected tensors with a mapped dim, got {mapped!r}.")
    (size, *_) = (x.shape[d] for x, d in zip(flat, dims, strict=True) if d is not None)
    outs = []
    for i in range(size):
        example = [x if d is None else x.select(d, i) for x, d in zip(flat, dims, strict=True)]
        outs.append(func(*pytrees.unflatten(tree, example)))
    parts = zip(*[pytrees.leaves_of(out) for out in outs], strict=True)
    want = pytrees.unflatten(pytrees.structure_of(outs[0]), [_stack(part) for part in parts])
    same("vmap(f) and the stacked loop", vmap(func, in_dims)(*args), want, rtol, atol)


def _stack(parts: Sequence[Any]) -> Any:
    """Stack one result over all examples; a non-tensor result is the first example's."""
    return torch.stack(list(parts)) if isinstance(parts[0], torch.Tensor) else parts[0]


@law
def check_specialize(
    func: Callable[..., Any],
    *args: Any,
    descriptors: Mapping[str, object] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Check that ``specialize(func)`` equals ``func``, at its first call and at a later call.

    Args:
        func: takes and returns pytrees; free of side effects, since it is called several times.
        args: the arguments of ``func``.
        descriptors: as for ``specialize``.

    Raises:
        AssertionError: the results differ.

    Example:
        >>> from tsfunc.testing import check_specialize
        >>> check_specialize(lambda x: x.sin() + 1, torch.ones(3))
    """
    program = specialize(func, descriptors)
    want = func(*args)
    same("specialize(f), traced, and f", program(*args), want, rtol, atol)
    same("specialize(f), called again, and f", program(*args), want, rtol, atol)


@law
def check_grads(
    func: Callable[..., Any],
    *args: Any,
    eps: float | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Check both modes against each other and against central differences.

    The check uses random directions and cotangents. Derivatives at tensors of less than double
    precision are checked in float64, and then in their own dtype with tolerances for the dtype and
    for the condition of the function. A function that can't run in float64 is compared with
    differences in its own dtype, which have few digits.

    Args:
        func: takes tensors and returns a pytree of them.
        args: the point of differentiation; the check is by all arguments.
        eps: the step of the differences; by default 1e-5 in double precision.
        rtol, atol: tolerances in place of those for the dtype.

    Raises:
        AssertionError: the forward-mode derivative is not the difference quotient, or the two
            modes are not transposes of each other.

    Example:
        >>> from tsfunc.testing import check_grads
        >>> check_grads(lambda x, y: x.sin() * y, torch.rand(3), torch.rand(3))
    """
    if not args or not all(isinstance(x, torch.Tensor) for x in pytrees.leaves_of(args)):
        raise ValueError(f"check_grads: expected tensors, got {args!r}.")
    if not is_narrow(args):
        _check_differences(
            func, args, _zeros_like(args), _difference_steps(eps, 1e-5), rtol or 1e-4, atol or 1e-5
        )
        return
    directions = _zeros_like(args)
    widely, wide_args, wide_directions = in_float64(func), wide(args), wide(directions)
    try:
        widely(*wide_args)
    except Exception:  # it has a check of dtypes, or an operator without float64
        step = eps or epsilon(args) ** (1 / 3)
        scale = 1 + largest(func(*args))
        near = atol or 16 * step * scale
        _check_differences(
            func, args, directions, _difference_steps(eps, step), rtol or 16 * step, near
        )
        return
    _check_differences(
        widely,
        wide_args,
        wide_directions,
        _difference_steps(eps, 1e-5),
        rtol or 1e-4,
        atol or 1e-5,
        " in float64",
    )
    out, tangents_out = jvp(func, args, directions)
    want = jvp(widely, wide_args, wide_directions)[1]
    moved = jvp(widely, rounded_otherwise(wide_args, epsilon(args)), wide_directions)[1]
    unsure = uncertainty(moved, want, epsilon(args))
    close = rtol or relative_tolerance(args)
    same("jvp(f) and jvp(f) in float64", wide(tangents_out), want, close, atol or unsure)
    cotangents = _zeros_like(out)
    cts_in = vjp(func, *args)[1](cotangents)
    size = largest(cotangents) * sum(leaf.numel() for leaf in pytrees.leaves_of(out))
    same(
        "<cotangent, jvp(direction)> and <vjp(cotangent), direction>",
        inner(wide(cotangents), wide(tangents_out)),
        inner(wide(cts_in), wide_directions),
        close,
        atol or 2 * size * unsure,
    )


def _zeros_like(tree: Any) -> Any:
    return pytrees.tree_map(torch.randn_like, tree)


def _difference_steps(step: float | None, default: float) -> Sequence[float]:
    """Return the steps of difference quotients: the one that the user gave, or smaller and smaller.

    A derivative is right if it agrees with the quotient of one step.
    """
    return (step,) if step else (default, default / 10, default / 100)


def _check_differences(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    directions: Any,
    steps: Sequence[float],
    rtol: float,
    atol: float,
    where: str = "",
) -> None:
    """Check ``jvp(func)`` against central differences, and ``vjp(func)`` against ``jvp(func)``."""
    out, tangents_out = jvp(func, args, directions)
    _check_quotients(
        f"jvp(f){where} and central differences",
        tangents_out,
        lambda step: func(*(x + step * t for x, t in zip(args, directions, strict=True))),
        steps,
        rtol,
        atol,
    )
    cotangents = _zeros_like(out)
    cts_in = vjp(func, *args)[1](cotangents)
    same(
        f"<cotangent, jvp(direction)> and <vjp(cotangent), direction>{where}",
        inner(cotangents, tangents_out),
        inner(cts_in, directions),
        rtol,
        atol,
    )


def _check_quotients(
    label: str,
    tangents_out: Any,
    along: Callable[[float], Any],
    steps: Sequence[float],
    rtol: float,
    atol: float,
) -> None:
    """Check a derivative along a line against difference quotients of the function on the line.

    The function may vary on the scale of the step, as a logarithm does near zero: then the quotient
    of a smaller step decides. At a kink, the derivative has to lie between the one-sided quotients.
    """

    def central(a: Any, b: Any) -> Any:
        return (a - b) / (2 * step)

    def nearest(derivative: Any, a: Any, middle: Any, b: Any) -> Any:
        if derivative.is_complex():
            parts = (torch.view_as_real(x.resolve_conj()) for x in (derivative, a, middle, b))
            return torch.view_as_complex(nearest(*parts))
        sides = (a - middle) / step, (middle - b) / step
        return derivative.clamp(torch.minimum(*sides), torch.maximum(*sides))

    def mapped(function: Callable[..., Any], *trees: Any) -> Any:
        return optree.tree_map(function, *trees, namespace=pytrees.NAMESPACE)

    first: AssertionError | None = None
    for step in steps:
        try:
            same(label, tangents_out, mapped(central, along(step), along(-step)), rtol, atol)
            return
        except AssertionError as error:
            first = first or error
    assert first is not None
    if len(steps) == 1:  # a step that the user gave may be long
        raise first
    between = mapped(nearest, tangents_out, along(step), along(0.0), along(-step))
    try:
        same(label, tangents_out, between, rtol, atol)
    except AssertionError:
        raise first from None


@law
def check_compose(
    func: Callable[..., Any],
    *args: torch.Tensor,
    eps: float | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Check compositions of ``vmap``, ``grad``, ``jvp`` and ``specialize`` against loops.

    The derivatives of each example are compared with central differences. Pairs of these
    transforms, in both orders and as programs, are then compared with the loop over the examples.

    Args:
        func: takes tensors of one example each, and returns a tensor.
        args: batches, with the batch dim first.
        eps: the step of the differences.
        rtol, atol: tolerances; by default those of :func:`check_grads` for the dtype.

    Raises:
        AssertionError: the message names the pair of transforms and the place of the difference.

    Example:
        >>> from tsfunc.testing import check_compose
        >>> check_compose(lambda x, y: (x * y).sin().sum(), torch.rand(3, 2), torch.rand(3, 2))
    """
    if not args or not all(isinstance(x, torch.Tensor) and x.ndim for x in args):
        raise ValueError(
            f"check_compose: expected batches, tensors of at least one dim, got {args!r}."
        )
    examples = [tuple(x[i] for x in args) for i in range(args[0].shape[0])]
    for one in examples:
        check_grads(func, *one, eps=eps, rtol=rtol, atol=atol)
    if not is_narrow(args):
        _check_pairs(func, args, rtol or 1e-4, atol or 1e-6)
        return
    widely, wide_args = in_float64(func), wide(args)
    try:
        widely(*wide(examples[0]))
    except Exception:  # as in check_grads
        scale = 1 + largest(func(*examples[0]))
        _check_pairs(
            func, args, rtol or relative_tolerance(args), atol or relative_tolerance(args) * scale
        )
        return
    _check_pairs(widely, wide_args, rtol or 1e-4, atol or 1e-6)
    _check_pairs(func, args, rtol or relative_tolerance(args), atol, widely)


def _check_pairs(
    func: Callable[..., Any],
    args: tuple[torch.Tensor, ...],
    rtol: float,
    atol: float | None,
    widely: Callable[..., Any] | None = None,
) -> None:
    """Compare pairs of transforms with the loop over the examples.

    Args:
        rtol, atol: the tolerances; without ``atol`` it is measured.
        widely: the function in float64, which measures the errors of rounding.
    """
    examples = [tuple(x[i] for x in args) for i in range(args[0].shape[0])]
    exact: list[Any] = [None] * len(_transform_pairs(func))
    if widely is not None:
        wide_examples = [wide(one) for one in examples]
        exact = [_loop(one_by_one, wide_examples) for _, _, one_by_one in _transform_pairs(widely)]
    for (what, transformed, one_by_one), true in zip(_transform_pairs(func), exact, strict=True):
        want = _loop(one_by_one, examples)
        close = atol
        if close is None:
            close = uncertainty(wide(want), true, epsilon(args))
        same(f"{what} and the stacked loop", transformed(*args), want, rtol, close)
        same(f"specialize({what}) and the stacked loop", specialize(transformed)(*args), want,
             rtol, close)  # fmt: skip
        twice = vmap(transformed)(*(torch.stack([x, x]) for x in args))
        both = pytrees.tree_map(lambda x: torch.stack([x, x]), want)
        same(f"vmap({what}) and the stacked loop", twice, both, rtol, close)


def _loop(one_by_one: Callable[..., Any], examples: Sequence[tuple[Any, ...]]) -> Any:
    outs = [pytrees.flatten(one_by_one(*one)) for one in examples]
    columns = zip(*(leaves for leaves, _ in outs), strict=True)
    return pytrees.unflatten(outs[0][1], [_stack(column) for column in columns])


Pair = tuple[str, Callable[..., Any], Callable[..., Any]]


def _transform_pairs(func: Callable[..., Any]) -> Sequence[Pair]:
    """Return pairs of transforms of a function: the name, the pair, and the loop's function."""

    def scalar(*one: torch.Tensor) -> torch.Tensor:
        return func(*one).sum()

    def gradient(*one: torch.Tensor) -> Any:
        return vjp(scalar, *one)[1](torch.ones_like(scalar(*one)))

    def tangents_out(*one: torch.Tensor) -> Any:
        return jvp(func, one, tuple(x.cos() for x in one))[1]

    def jvp_of_gradient(*one: torch.Tensor) -> Any:
        return jvp(gradient, one, tuple(x.cos() for x in one))[1]

    def total_gradient(*batch: torch.Tensor) -> Any:
        return vjp(lambda *b: vmap(scalar)(*b).sum(), *batch)[1](batch[0].new_ones(()))

    return [
        ("vmap(f)", vmap(func), func),
        ("vmap(grad(f))", vmap(gradient), gradient),
        ("grad(vmap(f))", total_gradient, gradient),
        ("vmap(jvp(f))", vmap(tangents_out), tangents_out),
        ("jvp(vmap(f))", _jvp_of_vmap(func), tangents_out),
        ("vmap(jvp(grad(f)))", vmap(jvp_of_gradient), jvp_of_gradient),
    ]


def _jvp_of_vmap(func: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *batch: jvp(vmap(func), batch, tuple(x.cos() for x in batch))[1]


def inner(a: Any, b: Any) -> torch.Tensor:
    """Return the inner product of two pytrees; complex numbers count as pairs of reals."""
    pairs = zip(pytrees.leaves_of(a), pytrees.leaves_of(b), strict=True)
    parts = [(x.conj() * y).real if x.is_complex() or y.is_complex() else x * y for x, y in pairs]
    return torch.stack([part.sum() for part in parts]).sum()


def same(what: str, got: Any, want: Any, rtol: float | None, atol: float | None) -> None:
    got_leaves, got_tree = pytrees.flatten(got)
    want_leaves, want_tree = pytrees.flatten(want)
    if got_tree != want_tree:
        raise _BrokenLaw(
            f"{what} differ in structure: expected {pytrees.structure_text(want_tree)}, got "
            f"{pytrees.structure_text(got_tree)}"
        )
    paths = optree.tree_paths(want, none_is_leaf=True, namespace=pytrees.NAMESPACE)
    for path, a, b in zip(paths, got_leaves, want_leaves, strict=True):
        if not isinstance(b, torch.Tensor):
            if a != b:
                raise _BrokenLaw(f"{what} differ at {path}: expected {b!r}, got {a!r}")
            continue
        try:
            torch.testing.assert_close(
                a, b, rtol=rtol, atol=atol, equal_nan=True, msg=_message(what, path)
            )
        except AssertionError as error:
            raise _BrokenLaw(str(error)) from None


def _message(what: str, path: Any) -> Callable[[str], str]:
    where = f" at {path}" if path else ""
    return lambda text: f"{what} differ{where}: {text}"
