"""The laws; each raises an AssertionError that names the part of the result that differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optree
import torch

from tsfunc import pytrees
from tsfunc.transforms.forward import jvp
from tsfunc.transforms.reverse import vjp
from tsfunc.transforms.specialize import specialize
from tsfunc.transforms.vmap import vmap


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
    dims = pytrees.broadcast_prefix(in_dims, args, _is_dim)
    flat, tree = pytrees.flatten(args)
    (size, *_) = (x.shape[d] for x, d in zip(flat, dims, strict=True) if d is not None)
    outs = []
    for i in range(size):
        one = [x if d is None else x.select(d, i) for x, d in zip(flat, dims, strict=True)]
        outs.append(func(*pytrees.unflatten(tree, one)))
    parts = zip(*[pytrees.leaves_of(out) for out in outs], strict=True)
    want = pytrees.unflatten(pytrees.structure_of(outs[0]), [_stacked(part) for part in parts])
    same("vmap(f) and the stacked loop", vmap(func, in_dims)(*args), want, rtol, atol)


def _stacked(parts: Sequence[Any]) -> Any:
    """Stack one result over all examples; a non-tensor result is the first example's."""
    return torch.stack(list(parts)) if isinstance(parts[0], torch.Tensor) else parts[0]


def _is_dim(value: Any) -> bool:
    return value is None or isinstance(value, int)


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


def check_grads(
    func: Callable[..., Any],
    *args: Any,
    eps: float = 1e-5,
    rtol: float = 1e-4,
    atol: float = 1e-5,
) -> None:
    """Check both modes against each other and against central differences.

    The check uses random directions and cotangents.

    Args:
        func: takes float64 tensors and returns a pytree of them.
        args: the point of differentiation; the check is by all arguments.
        eps: the step of the differences.

    Raises:
        AssertionError: the forward-mode derivative is not the difference quotient, or the two
            modes are not transposes of each other.

    Example:
        >>> from tsfunc.testing import check_grads
        >>> check_grads(lambda x, y: x.sin() * y, torch.rand(3).double(), torch.rand(3).double())
    """
    directions = tuple(torch.randn_like(x) for x in args)
    out, pushed = jvp(func, args, directions)
    after = func(*(x + eps * t for x, t in zip(args, directions, strict=True)))
    before = func(*(x - eps * t for x, t in zip(args, directions, strict=True)))
    quotient = optree.tree_map(
        lambda a, b: (a - b) / (2 * eps), after, before, namespace=pytrees.NAMESPACE
    )
    same("jvp(f) and central differences", pushed, quotient, rtol, atol)
    cotangents = pytrees.tree_map(torch.randn_like, out)
    pulled = vjp(func, *args)[1](cotangents)
    same(
        "<cotangent, jvp(direction)> and <vjp(cotangent), direction>",
        inner(cotangents, pushed),
        inner(pulled, directions),
        rtol,
        atol,
    )


def check_compose(
    func: Callable[..., Any],
    *args: torch.Tensor,
    eps: float = 1e-5,
    rtol: float = 1e-4,
    atol: float = 1e-6,
) -> None:
    """Check compositions of ``vmap``, ``grad``, ``jvp`` and ``specialize`` against loops.

    The derivatives of each example are compared with central differences. Pairs of these
    transforms, in both orders and as programs, are then compared with the loop over the examples.

    Args:
        func: takes float64 tensors, of one example each, and returns a tensor.
        args: batches, with the batch dim first.
        eps: the step of the differences.

    Raises:
        AssertionError: the message names the pair of transforms and the place of the difference.

    Example:
        >>> from tsfunc.testing import check_compose
        >>> check_compose(lambda x, y: (x * y).sin().sum(), torch.rand(3, 2).double(),
        ...               torch.rand(3, 2).double())
    """

    def scalar(*one: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = func(*one).sum()
        return found

    def gradient(*one: torch.Tensor) -> Any:
        return vjp(scalar, *one)[1](torch.ones_like(scalar(*one)))

    def pushed(*one: torch.Tensor) -> Any:
        return jvp(func, one, tuple(x.cos() for x in one))[1]

    def pushed_gradient(*one: torch.Tensor) -> Any:
        return jvp(gradient, one, tuple(x.cos() for x in one))[1]

    def total_gradient(*batch: torch.Tensor) -> Any:
        return vjp(lambda *b: vmap(scalar)(*b).sum(), *batch)[1](batch[0].new_ones(()))

    examples = [tuple(x[i] for x in args) for i in range(args[0].shape[0])]
    for one in examples:
        check_grads(func, *one, eps=eps, rtol=rtol, atol=atol)
    pairs: list[tuple[str, Callable[..., Any], Callable[..., Any]]] = [
        ("vmap(f)", vmap(func), func),
        ("vmap(grad(f))", vmap(gradient), gradient),
        ("grad(vmap(f))", total_gradient, gradient),
        ("vmap(jvp(f))", vmap(pushed), pushed),
        ("jvp(vmap(f))", _pushed_batch(func), pushed),
        ("vmap(jvp(grad(f)))", vmap(pushed_gradient), pushed_gradient),
    ]
    for what, transformed, one_by_one in pairs:
        outs = [pytrees.flatten(one_by_one(*one)) for one in examples]
        columns = zip(*(leaves for leaves, _ in outs), strict=True)
        want = pytrees.unflatten(outs[0][1], [_stacked(column) for column in columns])
        same(f"{what} and the stacked loop", transformed(*args), want, rtol, atol)
        same(f"specialize({what}) and the stacked loop", specialize(transformed)(*args), want,
             rtol, atol)  # fmt: skip
        twice = vmap(transformed)(*(torch.stack([x, x]) for x in args))
        both = pytrees.tree_map(lambda x: torch.stack([x, x]), want)
        same(f"vmap({what}) and the stacked loop", twice, both, rtol, atol)


def _pushed_batch(func: Callable[..., Any]) -> Callable[..., Any]:
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
        raise AssertionError(f"{what} differ in structure: {got_tree}, expected {want_tree}")
    paths = optree.tree_paths(want, none_is_leaf=True, namespace=pytrees.NAMESPACE)
    for path, a, b in zip(paths, got_leaves, want_leaves, strict=True):
        if not isinstance(b, torch.Tensor):
            if a != b:
                raise AssertionError(f"{what} differ at {path}: {a!r}, expected {b!r}")
            continue
        torch.testing.assert_close(
            a, b, rtol=rtol, atol=atol, equal_nan=True, msg=_message(what, path)
        )


def _message(what: str, path: Any) -> Callable[[str], str]:
    where = f" at {path}" if path else ""
    return lambda text: f"{what} differ{where}: {text}"
