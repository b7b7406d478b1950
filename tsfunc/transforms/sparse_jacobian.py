"""``sparse_jacobian``: Jacobians with many zeros, with one derivative for each color.

NOTE [coloring]
Columns that share no nonzero row can be computed together: the derivative along the sum of their
unit vectors has the entries of all of them, each in another row. The columns are therefore colored
so that two columns with an entry in the same row have different colors, and one pushforward is
computed for each color. Alternatively, the rows are colored, for pullbacks. The pattern determines
which columns share a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec

import torch

from tsfunc import pytrees
from tsfunc.bridge.tracers.boundaries import boundary
from tsfunc.bridge.tracers.dynamo import outside_dynamo
from tsfunc.errors import DataDependentError
from tsfunc.program.graphs.dependence import dependence
from tsfunc.transforms.argnums import Argnums
from tsfunc.transforms.closures import convert_closure
from tsfunc.transforms.forward import jvp
from tsfunc.transforms.reverse import vjp
from tsfunc.transforms.sparse_blocks import Blocks, ResultShape, blocks_of, joined_pattern
from tsfunc.transforms.transformed import Transformed, named_as
from tsfunc.transforms.vmap import vmap
from tsfunc.user_code import folding

API = "sparse_jacobian"
_Params = ParamSpec("_Params")
Mode = Literal["forward", "reverse"] | None


@folding("sparse_jacobian")
@outside_dynamo
def sparse_jacobian(
    func: Callable[_Params, Any],
    argnums: Argnums = 0,
    *,
    has_aux: bool = False,
    sparsity: Any = None,
    mode: Mode = None,
    layout: torch.layout = torch.sparse_coo,
    chunk_size: int | None = None,
) -> Transformed[_Params, Any]:
    """Return the Jacobian as a sparse tensor, with one derivative for each color.

    Args:
        func: takes and returns pytrees of real tensors; with ``has_aux``, returns a tuple of such
            a pytree and an auxiliary value.
        argnums: the positional arguments to differentiate by: an int, or a tuple of ints.
        has_aux: if True, ``func`` returns an auxiliary value.
        sparsity: the pattern of entries that may be nonzero: a tensor, dense or sparse, with the
            output's shape followed by the argument's, or a matrix by their numbers of entries. For
            several tensors it is a tensor for each block, or one matrix of all. By default
            :func:`jacobian_sparsity` computes it at each call.
        mode: "forward" for a pushforward for each color of the columns, "reverse" for a pullback
            for each color of the rows; None takes the mode with fewer colors.
        layout: ``torch.sparse_coo``, for a result with the output's shape followed by the
            argument's; or ``torch.sparse_csr``, for a matrix by their numbers of entries.
        chunk_size: the number of colors that are evaluated at a time; by default all.

    Returns:
        A function of the same arguments that returns the Jacobian; for several tensors, a block
        for each pair in the structure of ``jacrev``; with ``has_aux`` ``(jacobian, aux)``. Its
        values are differentiable like those of ``jacfwd``. The blocks are colored together. For
        several tensors or ``has_aux``, ``func`` may run once more.

    Raises:
        ValueError: ``sparsity``, ``mode`` or ``layout`` has an invalid value, an argument to
            differentiate by is not a tensor, or the dtypes of the arguments differ.
        RuntimeError: ``argnums`` does not fit the arguments, an argument or an output is not real,
            or a result of ``func`` is not a tensor.

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
        raise ValueError(f'{API}: mode: expected None, "forward" or "reverse", got {mode!r}.')
    if layout not in (torch.sparse_coo, torch.sparse_csr):
        raise ValueError(
            f"{API}: layout: expected torch.sparse_coo or torch.sparse_csr, got {layout!r}."
        )

    @named_as(func)
    @boundary("sparse_jacobian", func)
    def jacobian(*args: Any, **kwargs: Any) -> Any:
        blocks = blocks_of(API, func, argnums, has_aux, args, kwargs)
        pairs, values = entries(blocks)

        def block(row: int, column: int, out: ResultShape, x: torch.Tensor) -> torch.Tensor:
            inside, positions = blocks.block_entries(pairs, row, column, out, x)
            entries = values[inside.to(values.device)].to(out.dtype)
            return _laid_out(positions, entries, out.shape, x.shape, layout)

        jacobian = blocks.map_blocks(block)
        return (jacobian, func(*args, **kwargs)[1]) if has_aux else jacobian

    def entries(blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the positions and values of the entries that may be nonzero."""
        pairs = pattern_of(blocks) if sparsity is None else _given_pattern(blocks, sparsity)
        columns, rows = colors(pairs), colors(pairs.flip(0))
        forward = mode == "forward" or (mode is None and _count(columns) <= _count(rows))
        by, chosen = (_by_columns, columns) if forward else (_by_rows, rows)
        return pairs, by(blocks.function, blocks.vector, pairs, chosen, chunk_size)[1]

    return jacobian


@folding("jacobian_sparsity")
@outside_dynamo
def jacobian_sparsity(
    func: Callable[_Params, Any], argnums: Argnums = 0, *, has_aux: bool = False
) -> Transformed[_Params, Any]:
    """Return a function that computes the pattern of the entries that may be nonzero.

    The pattern holds for all values of the arguments.

    Args:
        func: takes and returns pytrees of real tensors; with ``has_aux``, returns a tuple of such
            a pytree and an auxiliary value.
        argnums: the positional arguments to differentiate by: an int, or a tuple of ints.
        has_aux: if True, ``func`` returns an auxiliary value, which is dropped.

    Returns:
        A function of the same arguments that returns a sparse bool tensor with the output's shape
        followed by the argument's; for several tensors, one for each block. For operators without
        a known pattern, and functions that write into tensors, all entries count as nonzero.

    Raises:
        DataDependentError: the function uses a tensor as a Python number or bool.

    Example:
        >>> import torch
        >>> from tsfunc import jacobian_sparsity
        >>> jacobian_sparsity(lambda x: x.flip(0).sin())(torch.zeros(2)).to_dense()
        tensor([[False,  True],
                [ True, False]])

    Griewank and Walther, "Evaluating Derivatives" (2008), chapter 7: propagation of index sets.
    """

    @named_as(func)
    @boundary("jacobian_sparsity", func)
    def pattern(*args: Any, **kwargs: Any) -> Any:
        blocks = blocks_of(API, func, argnums, has_aux, args, kwargs)
        pairs = pattern_of(blocks)

        def block(row: int, column: int, out: ResultShape, x: torch.Tensor) -> torch.Tensor:
            inside, positions = blocks.block_entries(pairs, row, column, out, x)
            return _coo(positions, inside[inside], out.shape, x.shape)

        return blocks.map_blocks(block)

    return pattern


def pattern_of(blocks: Blocks) -> torch.Tensor:
    """Return the rows and columns of the entries that may be nonzero."""
    x = blocks.vector
    graph = convert_closure(API, blocks.function, [x])
    (out,) = next(node for node in graph.graph.nodes if node.op == "output").args[0]
    if type(x.shape[0]) is int and any(type(size) is not int for size in out.meta["val"].shape):
        raise DataDependentError(
            f"{API}: expected a function whose results have fixed sizes, got a result whose size "
            f"depends on data. Keep all entries, and set some to zero with torch.where."
        )
    any_values = torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype)
    with torch.no_grad():
        return dependence(graph.graph, [any_values, *graph.closed])


def _given_pattern(blocks: Blocks, sparsity: Any) -> torch.Tensor:
    """Return the rows and columns of the entries of a given pattern."""
    tensors = blocks.inputs[0]
    is_single = len(tensors) == 1
    if not is_single:
        sparsity = joined_pattern(API, blocks, sparsity)
    elif not isinstance(sparsity, torch.Tensor):
        leaves = pytrees.leaves_of(sparsity)
        sparsity = leaves[0] if len(leaves) == 1 else joined_pattern(API, blocks, sparsity)
    if not isinstance(sparsity, torch.Tensor):
        raise ValueError(f"{API}: sparsity: expected a tensor, got {type(sparsity).__name__}.")
    x = tensors[0] if is_single else blocks.vector
    sparse = sparsity.to_dense() if sparsity.layout is not torch.sparse_coo else sparsity
    if sparse.layout is not torch.sparse_coo:
        sparse = sparse.to_sparse()
    positions, shape = sparse.coalesce().indices(), tuple(sparse.shape)
    rank = 1 if len(shape) == 2 and shape[1] == x.numel() else len(shape) - x.dim()
    sizes = shape[rank:]
    if sizes not in (tuple(x.shape), (x.numel(),)):
        raise ValueError(
            f"{API}: sparsity: expected the output's shape followed by the argument's, "
            f"{tuple(x.shape)}, or a matrix of their numbers of entries, got the shape {shape}."
        )
    return torch.stack(
        [_flat_indices(positions[:rank], shape[:rank]), _flat_indices(positions[rank:], sizes)]
    )


def _flat_indices(positions: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return the flat indices of multi-dimensional positions."""
    numbers = torch.zeros(positions.shape[1], dtype=torch.long)
    for position, size in zip(positions, shape, strict=True):
        numbers = numbers * size + position
    return numbers


def _unravel_index(numbers: torch.Tensor, shape: Sequence[int]) -> list[torch.Tensor]:
    """Return the multi-dimensional positions of flat indices."""
    positions = []
    for size in reversed(shape):
        positions.append(numbers % size)
        numbers = numbers // size
    return positions[::-1]


def colors(pairs: torch.Tensor) -> dict[int, int]:
    """Return a color for each column with entries; columns that share a row have different colors.

    Args:
        pairs: the rows and the columns of a matrix's entries.

    The coloring is greedy, columns with the most entries first.
    """
    rows_of: dict[int, list[int]] = {}
    for row, column in pairs.T.tolist():
        rows_of.setdefault(column, []).append(row)
    used: dict[int, set[int]] = {}
    chosen: dict[int, int] = {}
    for column in sorted(rows_of, key=lambda column: -len(rows_of[column])):
        rows = rows_of[column]
        used_colors = set().union(*(used.setdefault(row, set()) for row in rows))
        color = next(i for i in range(len(used_colors) + 1) if i not in used_colors)
        chosen[column] = color
        for row in rows:
            used[row].add(color)
    return chosen


def _count(chosen: dict[int, int]) -> int:
    return max(chosen.values(), default=-1) + 1


def _seeds(chosen: dict[int, int], like: torch.Tensor) -> torch.Tensor:
    """Return for each color the sum of the unit vectors of its columns."""
    seeds = torch.zeros(_count(chosen), like.numel(), dtype=like.dtype, device=like.device)
    if chosen:
        positions = torch.tensor([*chosen.items()], device=like.device)
        seeds[positions[:, 1], positions[:, 0]] = 1
    return seeds.view(-1, *like.shape)


def _colors_of(numbers: torch.Tensor, chosen: dict[int, int]) -> torch.Tensor:
    return torch.tensor([chosen[number] for number in numbers.tolist()], dtype=torch.long)


def _by_columns(
    func: Callable[[Any], Any], x: torch.Tensor, pairs: torch.Tensor, chosen: dict[int, int],
    chunk_size: int | None,
) -> tuple[Sequence[int], torch.Tensor]:  # fmt: skip
    """Return the output's shape and the Jacobian's entries, from its products with the seeds."""
    if not chosen:
        out = func(x)
        return out.shape, out.new_zeros(0)

    def pushforward(seed: torch.Tensor) -> torch.Tensor:
        return jvp(func, (x,), (seed,))[1]

    products = vmap(pushforward, chunk_size=chunk_size)(_seeds(chosen, x))
    at = _colors_of(pairs[1], chosen) * products[0].numel() + pairs[0]
    return products.shape[1:], products.reshape(-1)[at.to(x.device)]


def _by_rows(
    func: Callable[[Any], Any], x: torch.Tensor, pairs: torch.Tensor, chosen: dict[int, int],
    chunk_size: int | None,
) -> tuple[Sequence[int], torch.Tensor]:  # fmt: skip
    """Return the output's shape and the Jacobian's entries, from the seeds' products with it."""
    out, pullback = vjp(func, x)
    if not chosen:
        return out.shape, out.new_zeros(0)
    (products,) = vmap(pullback, chunk_size=chunk_size)(_seeds(chosen, out))
    at = _colors_of(pairs[0], chosen) * x.numel() + pairs[1]
    return out.shape, products.reshape(-1)[at.to(x.device)]


def _coo(
    pairs: torch.Tensor, values: torch.Tensor, shape: Sequence[int], sizes: Sequence[int]
) -> torch.Tensor:
    positions = [*_unravel_index(pairs[0], shape), *_unravel_index(pairs[1], sizes)]
    indices = (
        torch.stack(positions) if positions else torch.zeros(0, pairs.shape[1], dtype=torch.long)
    )
    indices = indices.to(values.device)
    return torch.sparse_coo_tensor(indices, values, [*shape, *sizes], check_invariants=True)


def _laid_out(
    pairs: torch.Tensor, values: torch.Tensor, shape: Sequence[int], sizes: Sequence[int],
    layout: torch.layout,
) -> torch.Tensor:  # fmt: skip
    """Return the result in the given layout, its entries in row order."""
    if layout is torch.sparse_coo:
        return _coo(pairs, values, shape, sizes).coalesce()
    size = [math.prod(shape), math.prod(sizes)]
    return _coo(pairs, values, size[:1], size[1:]).coalesce().to_sparse_csr()
