"""Reads by numbers, slices, indices and masks."""

from __future__ import annotations

from tools.fuzz.draw import Draw


def _index_item(d: Draw, size: int) -> str:
    """Return one index of a dim of this size."""
    kind = d.rng.randrange(7)
    if kind == 0:
        return str(d.place(size))
    if kind == 1:
        return f"{d.rng.randrange(max(size, 1))}:"
    if kind == 2:
        return f":{d.rng.randrange(1, size + 1) if size else 0}"
    if kind == 3:
        return "::2"
    if kind == 4:
        return d.indices(size, [d.rng.choice([1, 2, 3])])
    if kind == 5:
        return d.indices(size, [])
    return ":"


def subscript(d: Draw, x: str) -> str:
    shape = d.shape(x)
    if not shape:
        return d.one_of("...", "None", "()")
    items = [_index_item(d, size) for size in shape[: d.rng.randrange(1, len(shape) + 1)]]
    if d.chance(0.15):
        items.insert(d.rng.randrange(len(items) + 1), d.pick("None", "..."))
    return ", ".join(items)


def index(d: Draw) -> None:
    x = d.float()
    d.let(f"{x}[{subscript(d, x)}]")


def index_negative_axes(d: Draw) -> None:
    x = d.float(min_rank=1)
    items = [_index_item(d, size) for size in d.shape(x)[-1:]]
    d.let(f"{x}[..., {items[0]}]")


def select_by_data(d: Draw) -> None:
    x = d.float(min_rank=1)
    dim = d.dim(x)
    d.let(f"{x}.index_select({dim}, {d.indices(d.size(x, dim), [2])})")


def gather(d: Draw) -> None:
    x = d.float(min_rank=1)
    dim = d.dim(x)
    shape = list(d.shape(x))
    shape[dim] = d.rng.choice([1, 2, 3])
    d.let(f"{x}.gather({dim}, {d.indices(d.size(x, dim), shape)})")


def take(d: Draw) -> None:
    x = d.float()
    d.let(f"torch.take({x}, {d.indices(int(d.env[x].numel()), [2])})")


def one_of_example(d: Draw) -> None:
    x = d.float(min_rank=1)
    d.let(f"{x}[{d.indices(d.size(x, 0), [])}]")


def embedding(d: Draw) -> None:
    x = d.float(min_rank=2, max_rank=2)
    d.let(f"F.embedding({d.indices(d.size(x, 0), [2, 1])}, {x})")


def by_argument(d: Draw) -> None:
    """Index by an integer argument."""
    x, i = d.float(min_rank=1), d.variable("index")
    d.let(f"{x}[{i} % {max(1, d.size(x, 0))}]")


def by_mask_argument(d: Draw) -> None:
    m = d.variable("mask")
    x = d.variable("float", lambda v: tuple(v.shape) == d.shape(m))
    d.let(d.pick(f"torch.where({m}, {x}, 0.5)", f"{x} * {m}", f"{x}.masked_fill(~{m}, 2.0)"))


def selected(d: Draw) -> None:
    """Read by a mask, in forms that need no data-dependent size."""
    x = d.float(min_rank=1)
    m = d.mask(x)
    d.let(
        d.pick(
            f"{x}[{m}].sum()", f"{x}[{m}].sin().sum()", f"({x}[{m}] * {d.number()}).square().sum()"
        )
    )
