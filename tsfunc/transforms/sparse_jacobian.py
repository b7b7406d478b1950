"""``sparse_jacobian``: Jacobians with many zeros, by as many derivatives as it takes colors.

NOTE [colors]
Columns of which no two have an entry in the same row can be found together: the derivative along
the sum of their unit vectors has the entries of all of them, each in a row of its own. So the
columns are colored such that those that meet in a row differ, and one pushforward is made for each
color; or the rows are, for pullbacks. Which columns meet follows from the pattern.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from tsfunc.bridge.dynamo import outside_dynamo
from tsfunc.program.dependence import dependence
from tsfunc.transforms.arguments import like, refuse_complex, with_chosen
from tsfunc.transforms.closures import converted
from tsfunc.transforms.forward import jvp
from tsfunc.transforms.reverse import vjp
from tsfunc.transforms.vmap import vmap

API = "sparse_jacobian"
Mode = Literal["forward", "reverse"] | None


def sparse_jacobian(
    func: Callable[..., Any],
    argnums: int = 0,
    *,
    sparsity: torch.Tensor | None = None,
    mode: Mode = None,
    layout: torch.layout = torch.sparse_coo,
    chunk_size: int | None = None,
) -> Callable[..., torch.Tensor]:
    """The Jacobian as a sparse tensor, by one derivative for each color of its columns or rows.

    Args:
        func: takes a real tensor as one of its arguments, and returns a real tensor.
        argnums: which positional argument that is.
        sparsity: where the Jacobian may be other than zero: a tensor, dense or sparse, of the
            output's shape and then the argument's, or a matrix of their numbers of entries. By
            default :func:`jacobian_sparsity` finds it, anew at each call.
        mode: "forward" for a pushforward for each color of the columns, "reverse" for a pullback
            for each color of the rows; None takes the one with fewer colors.
        layout: ``torch.sparse_coo``, for a result of the output's shape and then the argument's;
            or ``torch.sparse_csr``, for a matrix of their numbers of entries.
        chunk_size: how many colors are evaluated at a time, all by default.

    Returns:
        A function of the same arguments. Its values are differentiable as those of ``jacfwd``.

    Raises:
        ValueError: ``sparsity``, ``mode`` or ``layout`` is none of these.
        TypeError: the argument, or what ``func`` returns, is no tensor.
        RuntimeError: the argument or the output is not real.

    Example:
        >>> import torch
        >>> from tsfunc import sparse_jacobian
        >>> sparse_jacobian(lambda x: x.diff() ** 2)(torch.tensor([0., 1., 3.])).to_dense()
        tensor([[-2.,  2.,  0.],
                [ 0., -4.,  4.]])

    Curtis, Powell and Reid, "On the estimation of sparse Jacobian matrices" (1974); Gebremedhin,
    Manne and Pothen, "What color is your Jacobian?" (2005).
    """
    if mode not in (None, "forward", "reverse"):
        raise ValueError(f'{API}: mode must be None, "forward" or "reverse", got {mode!r}.')
    if layout not in (torch.sparse_coo, torch.sparse_csr):
        raise ValueError(
            f"{API}: layout must be torch.sparse_coo or torch.sparse_csr, got {layout!r}."
        )

    @like(func)
    @outside_dynamo
    def jacobian(*args: Any, **kwargs: Any) -> torch.Tensor:
        x, of_x = _of_argument(func, argnums, args, kwargs)
        pairs = _pairs(func, argnums, sparsity, args, kwargs)
        columns, rows = colors(pairs), colors(pairs.flip(0))
        forward = mode == "forward" or (mode is None and _count(columns) <= _count(rows))
        if forward:
            shape, values = _by_columns(of_x, x, pairs, columns, chunk_size)
        else:
            shape, values = _by_rows(of_x, x, pairs, rows, chunk_size)
        return _laid_out(pairs, values, shape, x.shape, layout)

    return jacobian


def jacobian_sparsity(func: Callable[..., Any], argnums: int = 0) -> Callable[..., torch.Tensor]:
    """Where a function's Jacobian may be other than zero, whatever the values of its argument.

    Args:
        func: takes a real tensor as one of its arguments, and returns a real tensor.
        argnums: which positional argument that is.

    Returns:
        A function of the same arguments that returns a sparse tensor of bools, of the output's
        shape and then the argument's. Of operators whose pattern is not known, and of functions
        that write into tensors, it takes all entries to be other than zero.

    Raises:
        DataDependentError: the function uses a tensor as a Python number or bool.

    Example:
        >>> import torch
        >>> from tsfunc import jacobian_sparsity
        >>> jacobian_sparsity(lambda x: x.flip(0).sin())(torch.zeros(2)).to_dense()
        tensor([[False,  True],
                [ True, False]])
    """

    @like(func)
    @outside_dynamo
    def pattern(*args: Any, **kwargs: Any) -> torch.Tensor:
        x, of_x = _of_argument(func, argnums, args, kwargs)
        shape: list[int] = []

        def one(x: torch.Tensor) -> torch.Tensor:
            out = _one_tensor(of_x(x))
            shape[:] = out.shape
            return out

        found = converted(API, one, [x])
        any_values = torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype).view(x.shape)
        with torch.no_grad():
            pairs = dependence(found.graph, [any_values, *found.closed])
        true = torch.ones(pairs.shape[1], dtype=torch.bool)
        return _coo(pairs, true, shape, x.shape)

    return pattern


def _of_argument(
    func: Callable[..., Any], argnums: int, args: Sequence[Any], kwargs: Any
) -> tuple[torch.Tensor, Callable[[Any], Any]]:
    """The argument to differentiate by, and the function of it."""
    if not isinstance(argnums, int) or not -len(args) <= argnums < len(args):
        raise RuntimeError(
            f"{API}: expected argnums to be the position of one of the {len(args)} positional "
            f"arguments, got {argnums!r}."
        )
    place = argnums % len(args)
    x = args[place]
    if not isinstance(x, torch.Tensor):
        raise TypeError(
            f"{API}: the argument to differentiate by must be one tensor, got "
            f"{type(x).__name__}. For a pytree flatten it to a tensor inside of a function."
        )
    refuse_complex(API, "inputs", [x])
    return x, lambda new: func(*with_chosen(args, place, new), **kwargs)


def _one_tensor(out: Any) -> torch.Tensor:
    if not isinstance(out, torch.Tensor):
        raise TypeError(
            f"{API}: expected the function to return one tensor, got {type(out).__name__}."
        )
    refuse_complex(API, "outputs", [out])
    return out


def _pairs(
    func: Callable[..., Any], argnums: int, sparsity: Any, args: Sequence[Any], kwargs: Any
) -> torch.Tensor:
    """The numbers of the rows and columns of the entries that may be other than zero."""
    if sparsity is None:
        sparsity = jacobian_sparsity(func, argnums)(*args, **kwargs)
    if not isinstance(sparsity, torch.Tensor):
        raise ValueError(f"{API}: sparsity must be a tensor, got {type(sparsity).__name__}.")
    x = args[argnums % len(args)]
    found = sparsity.to_dense() if sparsity.layout is not torch.sparse_coo else sparsity
    if found.layout is not torch.sparse_coo:
        found = found.to_sparse()
    places, shape = found.coalesce().indices(), tuple(found.shape)
    rank = 1 if len(shape) == 2 and shape[1] == x.numel() else len(shape) - x.dim()
    sizes = shape[rank:]
    if sizes not in (tuple(x.shape), (x.numel(),)):
        raise ValueError(
            f"{API}: sparsity must be of the output's shape and then the argument's, "
            f"{tuple(x.shape)}, or a matrix of their numbers of entries; got the shape {shape}."
        )
    return torch.stack([_number(places[:rank], shape[:rank]), _number(places[rank:], sizes)])


def _number(places: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Entries' places as their numbers."""
    found = torch.zeros(places.shape[1], dtype=torch.long)
    for place, size in zip(places, shape, strict=True):
        found = found * size + place
    return found


def _places(numbers: torch.Tensor, shape: Sequence[int]) -> list[torch.Tensor]:
    """Entries' numbers as their places."""
    found = []
    for size in reversed(shape):
        found.append(numbers % size)
        numbers = numbers // size
    return found[::-1]


def colors(pairs: torch.Tensor) -> dict[int, int]:
    """A color for each column that has entries: two that meet in a row have different ones.

    Args:
        pairs: the rows and the columns of a matrix's entries.

    Greedily, the columns with the most entries first.
    """
    rows_of: dict[int, list[int]] = {}
    for row, column in pairs.T.tolist():
        rows_of.setdefault(column, []).append(row)
    used: dict[int, set[int]] = {}
    chosen: dict[int, int] = {}
    for column in sorted(rows_of, key=lambda column: -len(rows_of[column])):
        rows = rows_of[column]
        taken = set().union(*(used.setdefault(row, set()) for row in rows))
        color = next(i for i in range(len(taken) + 1) if i not in taken)
        chosen[column] = color
        for row in rows:
            used[row].add(color)
    return chosen


def _count(chosen: dict[int, int]) -> int:
    return max(chosen.values(), default=-1) + 1


def _seeds(chosen: dict[int, int], like: torch.Tensor) -> torch.Tensor:
    """For each color the sum of the unit vectors of that color."""
    seeds = torch.zeros(_count(chosen), like.numel(), dtype=like.dtype, device=like.device)
    if chosen:
        places = torch.tensor([*chosen.items()], device=like.device)
        seeds[places[:, 1], places[:, 0]] = 1
    return seeds.view(-1, *like.shape)


def _colors_of(numbers: torch.Tensor, chosen: dict[int, int]) -> torch.Tensor:
    return torch.tensor([chosen[number] for number in numbers.tolist()], dtype=torch.long)


def _by_columns(
    func: Callable[[Any], Any], x: torch.Tensor, pairs: torch.Tensor, chosen: dict[int, int],
    chunk_size: int | None,
) -> tuple[Sequence[int], torch.Tensor]:  # fmt: skip
    """The output's shape, and the entries of the Jacobian, from its products with the seeds."""
    if not chosen:
        out = _one_tensor(func(x))
        return out.shape, out.new_zeros(0)

    def push(seed: torch.Tensor) -> torch.Tensor:
        return _one_tensor(jvp(func, (x,), (seed,))[1])

    pushed = vmap(push, chunk_size=chunk_size)(_seeds(chosen, x))
    at = _colors_of(pairs[1], chosen) * pushed[0].numel() + pairs[0]
    return pushed.shape[1:], pushed.reshape(-1)[at.to(x.device)]


def _by_rows(
    func: Callable[[Any], Any], x: torch.Tensor, pairs: torch.Tensor, chosen: dict[int, int],
    chunk_size: int | None,
) -> tuple[Sequence[int], torch.Tensor]:  # fmt: skip
    """As :func:`_by_columns`, from the seeds' products with the Jacobian."""
    out, pull = vjp(lambda x: _one_tensor(func(x)), x)
    if not chosen:
        return out.shape, out.new_zeros(0)
    (pulled,) = vmap(pull, chunk_size=chunk_size)(_seeds(chosen, out))
    at = _colors_of(pairs[0], chosen) * x.numel() + pairs[1]
    return out.shape, pulled.reshape(-1)[at.to(x.device)]


def _coo(
    pairs: torch.Tensor, values: torch.Tensor, shape: Sequence[int], sizes: Sequence[int]
) -> torch.Tensor:
    places = [*_places(pairs[0], shape), *_places(pairs[1], sizes)]
    indices = torch.stack(places) if places else torch.zeros(0, pairs.shape[1], dtype=torch.long)
    indices = indices.to(values.device)
    return torch.sparse_coo_tensor(indices, values, [*shape, *sizes], check_invariants=True)


def _laid_out(
    pairs: torch.Tensor, values: torch.Tensor, shape: Sequence[int], sizes: Sequence[int],
    layout: torch.layout,
) -> torch.Tensor:  # fmt: skip
    """The result: its entries in the order of their rows."""
    if layout is torch.sparse_coo:
        return _coo(pairs, values, shape, sizes).coalesce()
    size = [math.prod(shape), math.prod(sizes)]
    return _coo(pairs, values, size[:1], size[1:]).coalesce().to_sparse_csr()
