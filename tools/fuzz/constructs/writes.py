"""Writes into tensors that the function made, scatter, and factories."""

from __future__ import annotations

from tools.fuzz.constructs.indexing import subscript
from tools.fuzz.draw import Draw


def _written(d: Draw, min_rank: int = 0, *, own: bool = False) -> str:
    """Return a tensor that the function may write into; ``own``: made in the same block."""
    shared = [name for name in d.shared if len(d.shape(name)) >= min_rank]
    if shared and not own and d.chance(0.5):
        return str(d.rng.choice(shared))
    x = d.float(min_rank=min_rank)
    made = d.pick(
        f"{x}.clone()",
        f"{x}.clone()",
        f"{x} * {d.number()}",
        f"torch.zeros({', '.join(map(str, d.shape(x))) or '()'}, dtype=torch.float64)",
        f"torch.zeros_like({x})",
        f"{x}.new_ones({x}.shape)",
        f"torch.cat([{x}.unsqueeze(0), {x}.sin().unsqueeze(0)])",
        f"{x}.transpose(0, -1).clone()" if d.shape(x) else f"{x}.clone()",
        f"{x}.permute({tuple(reversed(range(len(d.shape(x)))))})"
        ".clone(memory_format=torch.contiguous_format)",
    )
    return d.let(made)


def write_item(d: Draw) -> None:
    y = _written(d, 1)
    text = subscript(d, y)
    value = d.pick(d.number(), d.float(max_rank=0) if d.chance(0.5) else d.number(), d.float())
    d.do(f"{y}[{text}] {d.pick('=', '=', '+=', '*=')} {value}")


def write_mask(d: Draw) -> None:
    y = _written(d, 1)
    x = d.variable("float", lambda v: tuple(v.shape) == d.shape(y))
    m = d.mask(x)
    d.do(
        d.pick(
            f"{y}[{m}] = {d.number()}",
            f"{y}[{m}] *= {d.number()}",
            f"{y}[{m}] = {x}[{m}].sin()",
            f"{y}[{m}] += {x}[{m}] * 2",
            f"{y}.masked_fill_({m}, {d.number()})",
            f"{y}[{m}] = {y}[{m}].cos()",
        )
    )


def write_view(d: Draw) -> None:
    y = _written(d, 1)
    dim, other = d.dim(y), d.dim(y)
    view = d.pick(
        f"{y}[0]",
        f"{y}[..., -1]",
        f"{y}.reshape(-1)",
        f"{y}.view(-1)",
        f"{y}.flatten()",
        f"{y}.transpose({dim}, {other})",
        f"{y}.mT",
        f"{y}.select({dim}, {d.place(d.size(y, dim))})",
        f"{y}.narrow({dim}, 0, 1)",
        f"{y}.diagonal()",
        f"{y}.unsqueeze({dim})",
        f"{y}.chunk(2, {dim})[0]",
        f"{y}.unbind({dim})[0]",
        f"{y}.movedim({dim}, 0)",
        f"{y}[::2]",
        f"{y}.squeeze()",
    )
    if d.chance(0.5):
        view = d.let(view)
    value = d.like(y) if d.chance(0.3) else d.number()
    d.do(
        d.pick(
            f"{view}[0] = {d.number()}",
            f"{view}[-1] = {value}",
            f"{view}.mul_({value})",
            f"{view}.add_({value})",
            f"{view}.sin_()",
            f"{view}.fill_({d.number()})",
            f"{view}.copy_({view}.cos())",
            f"{view}.zero_()",
            f"{view}.clamp_(-0.41, 0.43)",
        )
    )
    if d.chance(0.3) and view.isalnum():
        d.do(f"{y}.mul_({d.number()})")
        d.let(f"{view} + 1")


def write_inplace_view(d: Draw) -> None:
    """Change a tensor's own shape in place."""
    y = _written(d, 1, own=True)
    dim, other = d.dim(y), d.dim(y)
    d.do(
        d.pick(
            f"{y}.t_()",
            f"{y}.transpose_({dim}, {other})",
            f"{y}.unsqueeze_({dim})",
            f"{y}.squeeze_()",
            f"{y}.swapaxes_({dim}, {other})",
        )
    )
    if d.chance(0.5):
        d.do(f"{y}.add_({d.number()})")


def write_whole(d: Draw) -> None:
    y = _written(d)
    x = d.like(y)
    d.do(
        d.pick(
            f"{y}.add_({x})",
            f"{y}.mul_({x}.sin())",
            f"{y} += {x}",
            f"{y} *= {d.number()}",
            f"{y}.copy_({x})",
            f"{y}.copy_({d.number()})",
            f"{y}.sigmoid_()",
            f"{y}.addcmul_({y}, {x})",
            f"{y}.lerp_({x}, 0.3)",
            f"{y}.fill_diagonal_(0.5)",
            f"{y}.square_()",
            f"{y}.sub_({x}, alpha=2)",
            f"{y}.fill_({x}.sum())",
            f"torch.add({y}, {x}, out={y})",
            f"F.relu({y}, inplace=True)",
        )
    )


def write_by_index(d: Draw) -> None:
    y = _written(d, 1)
    dim = d.dim(y)
    size = d.size(y, dim)
    rows = d.indices(size, [2])
    shape = list(d.shape(y))
    shape[dim] = 2
    factor = d.float(max_rank=0) if d.chance(0.5) else d.number()
    values = f"torch.ones({', '.join(map(str, shape))}, dtype=torch.float64) * {factor}"
    full = d.indices(size, shape)
    d.do(
        d.pick(
            f"{y}.index_add_({dim}, {rows}, {values})",
            f"{y}.index_fill_({dim}, {rows}, {d.number()})",
            f"{y}.scatter_add_({dim}, {full}, {values})",
            f"{y}.scatter_({dim}, {full}, {d.number()})",
            f"{y}.scatter_reduce_({dim}, {full}, {values}, 'amax')",
            f"{y}.index_put_(({d.indices(d.size(y, 0), [2])},), {y}[0] * 2, accumulate=True)",
        )
    )


def scatter(d: Draw) -> None:
    y = d.float(min_rank=1)
    dim = d.dim(y)
    size = d.size(y, dim)
    shape = list(d.shape(y))
    shape[dim] = 2
    full = d.indices(size, shape)
    values = f"torch.ones({', '.join(map(str, shape))}, dtype=torch.float64) * {d.number()}"
    along = ", ".join("-1" if i == dim % len(shape) else "1" for i in range(len(shape)))
    places = f"torch.arange({size}).reshape({along}).expand_as({y})"
    d.let(
        d.pick(
            f"{y}.scatter_add({dim}, {full}, {values})",
            f"{y}.index_add({dim}, {d.indices(size, [2])}, {values})",
            f"{y}.index_fill({dim}, {d.indices(size, [2])}, {d.number()})",
            f"{y}.scatter({dim}, {places}, {y}.sin())",
            f"{y}.scatter_reduce({dim}, {full}, {values}, 'sum')",
            f"{y}.scatter_reduce({dim}, {full}, {values}, 'mean')",
            f"{y}.select_scatter({y}.select({dim}, 0).sin(), {dim}, -1)",
            f"{y}.slice_scatter({y}.narrow({dim}, 0, 1).sin(), {dim}, 1, 2)",
            f"{y}.diagonal_scatter({y}.diagonal().cos())",
            f"{y}.masked_scatter({d.mask(y)}, {y}.sin())",
            f"torch.index_put({y}, ({d.indices(d.size(y, 0), [1])},), {y}[:1].cos())",
        )
    )


def factory(d: Draw) -> None:
    x = d.float()
    n = d.rng.choice([2, 3, 4])
    d.let(
        d.pick(
            f"torch.arange({n}, dtype=torch.float64) * {x}.sum()",
            f"torch.eye({n}, dtype=torch.float64) * {x}.mean()",
            f"torch.full_like({x}, {d.number()}) * {x}",
            f"torch.linspace(0, 1, {n}, dtype=torch.float64) + {x}.sum()",
            f"torch.tensor([1.0, {d.number()}], dtype=torch.float64) * {x}.sum()",
            f"torch.ones({n}, dtype=torch.float64)",
            f"{x}.new_full(({n},), 0.3) * {x}.sum()",
            f"torch.stack([{x}.sum(), {x}.mean()])",
            f"torch.meshgrid({x}.reshape(-1)[:2], {x}.reshape(-1)[:3], indexing='ij')[1]",
            f"torch.combinations({x}.reshape(-1)[:3])",
            f"torch.cartesian_prod({x}.reshape(-1)[:2], {x}.reshape(-1)[:2])",
            f"torch.tril_indices({n}, {n}).double() * {x}.sum()",
            f"torch.scalar_tensor(2.0, dtype=torch.float64) * {x}",
        )
    )
