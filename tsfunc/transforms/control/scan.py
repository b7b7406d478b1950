"""``scan``, ``map`` and ``associative_scan``: a function along a dim, with or without a carry.

The number of steps is a size, and is the same for all examples of a vmap. Under vmap and the
derivatives, the operators are therefore plain loops on batched values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import optree
import torch

from tsfunc import pytrees
from tsfunc.bridge.grad.autograd import is_differentiable
from tsfunc.bridge.trace.trace_level import current_trace
from tsfunc.bridge.tracers.boundaries import boundary
from tsfunc.bridge.tracers.dynamo import torch_records
from tsfunc.transforms.abstract_eval import abstract_results
from tsfunc.transforms.control import dynamo_forms
from tsfunc.transforms.control.call_forms import also_called, check_callable
from tsfunc.transforms.control.control_operators import AssociativeScan, Scan, run_by
from tsfunc.transforms.control.control_recording import (
    ELEMENTS,
    record_associative_scan,
    record_scan,
)
from tsfunc.transforms.control.derived_operators import (
    DerivativeOperands,
    Pullback,
    Pushforward,
    derivative_rule,
    run_jvp,
    run_pullback,
    run_pushforward,
    with_zeros,
)
from tsfunc.transforms.control.loop_values import LoopValues
from tsfunc.transforms.control.outputs import (
    check_carried,
    check_pair,
    slice_like,
    stack_of_no_steps,
    stacked_dim,
)
from tsfunc.transforms.control.prefixes import prefixes
from tsfunc.transforms.vmap import vmap
from tsfunc.types.values import array_advice

_Carry = TypeVar("_Carry")
_Y = TypeVar("_Y")
_Elems = TypeVar("_Elems")

P = ParamSpec("P")
R = TypeVar("R")
_ONE_TYPE = "They must have one type."
_ADVICE = (
    "The carry keeps its structure, types and shapes from step to step: convert the first result "
    "of the function (x.to(dtype)), or start with a carry of its type."
)


@boundary("scan", traceable=True)
@also_called(combine_fn="f")
def scan(
    f: Callable[[_Carry, Any], tuple[_Carry, _Y]],
    init: _Carry,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    dim: int = 0,
) -> tuple[_Carry, _Y]:
    """Call a function along a dim with a carry from step to step, and stack its results.

    Args:
        f: takes the carry and a pytree of slices of ``xs``; returns the next carry, of the same
            type, and a pytree of results.
        init: the first carry, any pytree.
        xs: a pytree of tensors, which have the same size in ``dim``; or None.
        length: the number of steps; needed if ``xs`` has no tensor.
        reverse: True to begin with the last slice. The results have the order of their slices.
        unroll: a positive int or a bool, accepted for compatibility with JAX, without effect: a
            longer loop body does not make a step cheaper.
        dim: the dim of ``xs`` to scan, and the dim of the stacked results. A step result with too
            few dims is stacked along a new first dim.

    Returns:
        The last carry, and the stacked results.

    Raises:
        ValueError: there is no tensor to scan, sizes differ, or ``unroll`` is not positive.
        TypeError: ``f`` does not return a pair, or a result of a step is not a tensor or a number.
        TypeCheckError: the carry changes its type.

    Example:
        >>> import torch
        >>> from tsfunc import scan
        >>> scan(lambda total, x: (total + x, total + x), torch.tensor(0), torch.arange(4))
        (tensor(6), tensor([0, 1, 3, 6]))

    Corresponds to ``jax.lax.scan``; ``dim`` comes from torch's scan, and so does the name
    ``combine_fn``.
    """
    check_callable("scan", f=f)
    if not isinstance(unroll, int) or (unroll < 1 and unroll is not False):
        raise ValueError(f"scan: unroll: expected a bool or a positive int, got {unroll!r}.")
    if torch_records():
        last, ys = dynamo_forms.scan(f, init, xs, length, reverse, dim)
        return last, ys
    every, spec = pytrees.flatten(xs)
    leaves = [leaf for leaf in every if leaf is not None]
    count = _length("scan", "xs", xs, leaves, length, dim)
    none = isinstance(count, int) and count == 0  # without a guard on a symbolic size
    if current_trace() is not None and not none:
        return record_scan("scan", f, init, xs, length, reverse, dim, _ADVICE)
    slices = [None if leaf is None else leaf.unbind(dim) for leaf in every]
    step = ScanStep("scan", f)
    carry, ys = init, []
    for i in reversed(range(count)) if reverse else range(count):
        x = optree.tree_unflatten(spec, [None if part is None else part[i] for part in slices])
        carry, y = step(carry, x)
        ys.append(y)
    if none:
        x = optree.tree_unflatten(
            spec, [None if leaf is None else slice_like(leaf, dim) for leaf in every]
        )
        return init, stack_of_no_steps(abstract_results("scan", step, (init, x), {})[1], dim)
    if reverse:
        ys.reverse()
    return carry, stack_results(ys, dim)


@run_by(Scan)
def _scan_again(
    op: Scan, carry: Sequence[Any], along: Sequence[Any], rest: Sequence[Any]
) -> tuple[Any, ...]:
    """Scan in a trace of the program: the operator becomes one of the trace."""
    (body,) = op.bodies

    def step(carry: Sequence[Any], x: Any) -> tuple[Any, Any]:
        results = body(*carry, *(x if along else ()), *rest)
        return results[: op.carried], results[op.carried :]

    last, ys = scan(step, tuple(carry), tuple(along) or None, op.length, op.reverse)
    return (*last, *ys)


@derivative_rule(Pullback, Scan)
def _pullback(
    op: Scan, count: int, wrt: Sequence[int], results: Sequence[int], *operands: Any
) -> Any:
    """Scan for the carries, and scan back with the pullback of a step."""
    parts = DerivativeOperands.of(operands, count, len(results))
    stop = op.carried + op.along
    carry, along = parts.inputs[: op.carried], parts.inputs[op.carried : stop]
    (body,) = op.bodies
    return run_pullback_through(
        body, (carry, along, (*parts.inputs[stop:], *parts.numbers)), wrt,
        dict(zip(results, parts.derivatives, strict=True)), op.length, op.reverse,
    )  # fmt: skip


def run_pullback_through(
    step: Callable[..., Sequence[Any]],
    operands: tuple[Sequence[Any], Sequence[Any], Sequence[Any]],
    wrt: Sequence[int],
    cotangents: Mapping[int, Any],
    length: int | None,
    reverse: bool,
) -> tuple[Any, ...]:
    """Return the cotangents of a scan's operands ``wrt``.

    Args:
        step: takes a carry, slices, and the other operands; returns the next carry and more.
        operands: the first carry, the scanned tensors, and the other operands.
        wrt: the positions of the operands that it is differentiated by.
        cotangents: the cotangents of the last carry and of the stacked results, by position.
        length: the number of steps, if nothing is scanned.
        reverse: True if the scan begins with the last slice.
    """
    carry, along, rest = operands
    carried, stop = len(carry), len(carry) + len(along)

    def save(before: Sequence[Any], x: Any) -> tuple[Any, Any]:
        after = step(*before, *(x if along else ()), *rest)
        return tuple(after[:carried]), tuple(before)

    xs = tuple(along) or None
    _, saved = scan(save, tuple(carry), xs, length, reverse)
    moved = [i for i, x in enumerate(carry) if is_differentiable(x)]
    others = [i for i in wrt if i >= carried]
    outer = [i for i in others if i >= stop]
    stacked = {j: ct for j, ct in cotangents.items() if j >= carried}
    count = stop + len(rest)

    def back(state: Any, x: Any) -> tuple[Any, Any]:
        cts_in, sums = state
        before, slices, numbers = x
        cts = run_pullback(
            step, count, [*moved, *others], [*moved, *stacked],
            *before, *slices, *rest, *cts_in, *numbers,
        )  # fmt: skip
        cts_of = dict(zip(others, cts[len(moved) :], strict=True))
        more = tuple(total + cts_of[i] for total, i in zip(sums, outer, strict=True))
        return (cts[: len(moved)], more), tuple(cts_of[i] for i in others if i < stop)

    last = with_zeros(cotangents, carry, moved)
    none = tuple(torch.zeros_like(rest[i - stop]) for i in outer)
    state, slices = scan(
        back, (last, none), (saved, tuple(along), tuple(stacked.values())), None, not reverse
    )
    results = dict(zip([*moved, *outer], [*state[0], *state[1]], strict=True))
    results |= dict(zip([i for i in others if i < stop], slices, strict=True))
    return tuple(results[i] for i in wrt)


@derivative_rule(Pushforward, Scan)
def _pushforward(op: Scan, count: int, wrt: Sequence[int], *operands: Any) -> Any:
    """Scan with a carry of values and tangents."""
    parts = DerivativeOperands.of(operands, count, len(wrt))
    carried, stop = op.carried, op.carried + op.along
    carry, along, rest = parts.inputs[:carried], parts.inputs[carried:stop], parts.inputs[stop:]
    tangents = dict(zip(wrt, parts.derivatives, strict=True))
    moved = [i for i, x in enumerate(carry) if is_differentiable(x)]
    scanned = [i for i in wrt if carried <= i < stop]
    outer = [i for i in wrt if i >= stop]
    (body,) = op.bodies

    chosen = [*moved, *scanned, *outer]

    def step(state: Any, x: Any) -> tuple[Any, Any]:
        before, tangents_in = state
        slices, more = x if along else ((), ())
        values = (*before, *slices, *rest)
        directions = (*tangents_in, *more, *(tangents[i] for i in outer))
        after, tangents_after = run_jvp(body, values, chosen, directions, parts.numbers)
        carried_on = tuple(after[:carried]), tuple(tangents_after[i] for i in moved)
        return carried_on, tuple(tangents_after[carried:])

    xs = (tuple(along), tuple(tangents[i] for i in scanned)) if along else None
    first = with_zeros(tangents, carry, moved)
    (_, last), ys = scan(step, (tuple(carry), first), xs, op.length, op.reverse)
    carries = with_zeros(dict(zip(moved, last, strict=True)), carry, range(carried))
    return (*carries, *ys)


class ScanStep:
    """One step of a scan; the type of the first result is checked."""

    def __init__(self, label: str, f: Callable[[Any, Any], tuple[Any, Any]]) -> None:
        self.label, self.f = label, f
        self.checked = False
        self.values = LoopValues()

    def __call__(self, carry: Any, x: Any) -> tuple[Any, Any]:
        pair: Any
        carry, pair = self.values.call(self.f, carry, x)
        if not self.checked:
            check_pair(self.label, pair)
            names = ("the carry", "the carry that the function returns")
            check_carried(self.label, names, (carry, pair[0]), _ADVICE)
            self.checked = True
        new, y = pair
        return self.values.next_carry(carry, new), self.values.result(y)


def _length(
    label: str, name: str, tree: Any, leaves: Sequence[Any], length: int | None, dim: int
) -> int:
    """Return the number of steps; ``leaves`` are the tensors of an argument."""
    sizes = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            advice = array_advice(leaf) or (" Close over values that all steps share.")
            raise TypeError(
                f"{label}: expected tensors to go along, got {type(leaf).__name__}.{advice}"
            )
        if not -leaf.dim() <= dim < leaf.dim():
            raise ValueError(
                f"{label}: expected a dim of a tensor of shape {tuple(leaf.shape)}, got {dim}."
            )
        sizes.append(leaf.shape[dim])
    if length is not None:
        sizes.append(length)
    if not sizes:
        also = "; give length=" if label == "scan" else ""
        raise ValueError(f"{label}: there is no tensor to go along{also}.")
    if any(size != sizes[0] for size in sizes):
        values, structure = pytrees.flatten(tree)
        at_paths = zip(structure.paths(), values, strict=True)
        paths = [path for path, value in at_paths if value is not None]
        names = [name + "".join(f"[{key!r}]" for key in path) for path in paths]
        names += [] if length is None else ["length"]
        each = ", ".join(f"{size} in {name}" for name, size in zip(names, sizes, strict=True))
        raise ValueError(f"{label}: expected one size in dim {dim}, got {sizes}: {each}.")
    return sizes[0]


def stack_results(ys: Sequence[Any], dim: int) -> Any:
    """Return the results of the steps as one pytree of stacked tensors."""
    flat = [pytrees.flatten(y) for y in ys]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return optree.tree_unflatten(flat[0][1], [_stack(column, dim) for column in columns])


def _stack(column: Sequence[Any], dim: int) -> Any:
    if all(leaf is None for leaf in column):
        return None
    tensors = [_as_tensor(leaf) for leaf in column]
    return torch.stack(tensors, stacked_dim(tensors[0].dim(), dim))


def _as_tensor(leaf: Any) -> torch.Tensor:
    try:
        return torch.as_tensor(leaf)
    except (TypeError, RuntimeError):
        raise TypeError(
            f"scan or map: expected tensors and numbers as the results of a step, which are "
            f"stacked, got {leaf!r} of type {type(leaf).__name__}. Return it from the function "
            f"around the loop instead."
        ) from None


@boundary("map", traceable=True)
def map(f: Callable[..., _Y], xs: Any, *args: Any, batch_size: int | None = None) -> _Y:
    """Call a function with each slice along the first dim, in order, and stack the results.

    Args:
        f: takes a pytree of slices, and ``args``; returns a pytree.
        xs: a pytree of tensors, which have the same size in their first dim.
        args: further arguments, the same for every call.
        batch_size: the number of slices that are taken at a time, by ``vmap``. By default one,
            with the memory of one call.

    Returns:
        The results, stacked along a new first dim.

    Raises:
        ValueError: there is no tensor to map over, or sizes differ.
        TypeError: a result is not a tensor or a number.

    Example:
        >>> import torch
        >>> import tsfunc
        >>> tsfunc.map(torch.sum, torch.ones(3, 2))
        tensor([2., 2., 2.])

    Corresponds to ``jax.lax.map``; further ``args`` are those of torch's ``map``.
    """
    check_callable("map", f=f)
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"map: batch_size: expected at least 1, got {batch_size}.")
    if torch_records():
        return dynamo_forms.map_(f, xs, args)
    if batch_size is not None:
        mapped = vmap(lambda x: f(x, *args), randomness="different", chunk_size=batch_size)
        return mapped(xs)
    _length("map", "xs", xs, pytrees.flatten(xs)[0], None, 0)
    return scan(lambda carry, x: (carry, f(x, *args)), None, xs)[1]


def _dim_third(func: Callable[P, R]) -> Callable[P, R]:
    """Let ``associative_scan`` take torch's third argument, the dim, with ``reverse`` by name."""

    @functools.wraps(func)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if len(args) == 3 and "reverse" in kwargs:
            kwargs["dim"], args = args[2], args[:2]  # type: ignore[assignment]
        return func(*args, **kwargs)

    return call


@boundary("associative_scan", traceable=True)
@_dim_third
@also_called(combine_fn="fn", xs="elems")
def associative_scan(
    fn: Callable[[_Elems, _Elems], _Elems],
    elems: _Elems,
    reverse: bool | int = False,
    axis: int | bool = 0,
    combine_mode: str | None = None,
    *,
    dim: int | None = None,
) -> _Elems:
    """Combine the slices along a dim from the left, in a logarithmic number of steps.

    Args:
        fn: an associative function of two pytrees like ``elems``. It is called with many slices at
            a time, and must combine them pointwise along ``axis``, as elementwise functions and
            ``vmap(g)`` do.
        elems: a pytree of tensors, which have the same size in ``axis``.
        reverse: True to combine from the right.
        axis: the dim to scan.
        combine_mode: torch's "pointwise" or "generic", which select torch's meaning of ``fn``, a
            function of single slices; both modes run in the same way.
        dim: torch's name of ``axis``, which selects torch's meaning of ``fn``.

    Returns:
        A pytree like ``elems``: each slice is the combination of all slices up to it.

    Raises:
        ValueError: sizes differ, or ``combine_mode`` is invalid.
        TypeCheckError: ``fn`` returns another type than it takes.

    Example:
        >>> import torch
        >>> from tsfunc import associative_scan
        >>> associative_scan(torch.mul, torch.tensor([1, 2, 3, 4]))
        tensor([ 1,  2,  6, 24])

    Corresponds to ``jax.lax.associative_scan``: Blelloch, "Prefix sums and their applications"
    (1990). torch's argument order is accepted too, with the dim third and ``reverse`` fourth or by
    name, and so are its names ``combine_fn`` and ``xs``.
    """
    check_callable("associative_scan", fn=fn)
    if combine_mode not in (None, "pointwise", "generic"):
        raise ValueError(
            f'associative_scan: combine_mode: expected "pointwise" or "generic", got '
            f"{combine_mode!r}."
        )
    if type(reverse) is int:
        dim, reverse = reverse, bool(axis)
    if dim is None and combine_mode is not None:
        dim = int(axis)
    at = int(axis) if dim is None else dim
    if torch_records():
        return dynamo_forms.associative_scan(fn, elems, at, bool(reverse), dim is not None)
    leaves, spec = pytrees.flatten(elems)
    size = _length("associative_scan", "elems", elems, leaves, None, at)
    axes = [at % leaf.dim() for leaf in leaves]
    if current_trace() is not None and not (isinstance(size, int) and size < 2):
        one = fn if dim is not None else _of_slices(fn, at)
        scanned = record_associative_scan(one, elems, axes, bool(reverse), _ONE_TYPE)
        if scanned is not None:
            return scanned
    if dim is not None:
        fn = vmap(fn, in_dims=dim, out_dims=dim)
    if reverse:
        leaves = [leaf.flip(at) for leaf, at in zip(leaves, axes, strict=True)]

    values = LoopValues()

    def combine(left: Sequence[Any], right: Sequence[Any]) -> Sequence[Any]:
        operands = optree.tree_unflatten(spec, left), optree.tree_unflatten(spec, right)
        _, combined = values.call(lambda _, *both: fn(*both), None, *operands)
        check_carried("associative_scan", ELEMENTS, (operands[0], combined), _ONE_TYPE)
        return pytrees.flatten(combined)[0]

    done = prefixes(combine, leaves, axes, size)
    if reverse:
        done = [leaf.flip(at) for leaf, at in zip(done, axes, strict=True)]
    scanned = optree.tree_unflatten(spec, list(done))
    return scanned


@run_by(AssociativeScan)
def _associative_scan_again(
    op: AssociativeScan, along: Sequence[Any], rest: Sequence[Any]
) -> tuple[Any, ...]:
    """Run an associative scan again, as ``associative_scan`` of its body."""
    (body,) = op.bodies

    def combine(left: Sequence[Any], right: Sequence[Any]) -> tuple[Any, ...]:
        return body(*left, *right, *rest)

    return associative_scan(combine, tuple(along), dim=0)


@derivative_rule(Pullback, AssociativeScan)
def _pullback_of_prefixes(
    op: AssociativeScan, count: int, wrt: Sequence[int], results: Sequence[int], *operands: Any
) -> Any:
    """Pull back through a scan that combines the slices one after the other."""
    return run_pullback(functools.partial(_in_order, op), count, wrt, results, *operands)


@derivative_rule(Pushforward, AssociativeScan)
def _pushforward_of_prefixes(
    op: AssociativeScan, count: int, wrt: Sequence[int], *operands: Any
) -> Any:
    """Push forward through a scan that combines the slices one after the other."""
    return run_pushforward(functools.partial(_in_order, op), count, wrt, *operands)


def _in_order(op: AssociativeScan, *operands: Any) -> tuple[Any, ...]:
    """Compute an associative scan by combining the slices one after the other."""
    along, rest = operands[: op.along], operands[op.along :]
    (body,) = op.bodies

    def step(left: Sequence[Any], right: Sequence[Any]) -> tuple[Any, Any]:
        combined = body(*left, *right, *rest)
        return combined, combined

    _, ys = scan(step, tuple(x[0] for x in along), tuple(x[1:] for x in along))
    return tuple(torch.cat([x[:1], y]) for x, y in zip(along, ys, strict=True))


def _of_slices(fn: Callable[[Any, Any], Any], axis: int) -> Callable[[Any, Any], Any]:
    """Return a function of single slices, from a function that combines slices pointwise."""

    def one(left: Any, right: Any) -> Any:
        trees = [pytrees.tree_map(lambda x: x.unsqueeze(axis), tree) for tree in (left, right)]
        return pytrees.tree_map(
            lambda x: x.squeeze(axis) if isinstance(x, torch.Tensor) and x.dim() else x, fn(*trees)
        )

    return one
