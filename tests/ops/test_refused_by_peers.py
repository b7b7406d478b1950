"""Calls that torch.vmap computes wrongly, loops over or refuses, compared with the Python loop.

Each operator or kind of call has one test. ``check`` calls the function for every example and
stacks the results; tsfunc may not loop.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tsfunc
from tsfunc import vmap
from tsfunc.errors import DataDependentError, SlowFallbackWarning

B = 3  # the batch size


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + 10 * len(shape))
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype, generator=generator)
    return torch.randint(0, 3, shape, dtype=dtype, generator=generator)


def tensors(out: Any) -> list[Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, Tensor)]


def check(f: Callable[..., Any], *args: Tensor, in_dims: Any = 0, **options: Any) -> None:
    """Check that ``vmap(f)`` is the stacked loop, and runs no loop itself."""
    dims = (in_dims,) * len(args) if in_dims is None or isinstance(in_dims, int) else in_dims
    pairs = list(zip(args, dims, strict=True))
    size = next(x.shape[d] for x, d in pairs if d is not None)
    own = [[x.clone() if d is None else x.select(d, i).clone() for x, d in pairs]
           for i in range(size)]  # fmt: skip
    want = [tensors(f(*example)) for example in own]
    with warnings.catch_warnings():
        warnings.simplefilter("error", SlowFallbackWarning)
        got = tensors(vmap(f, in_dims=tuple(dims), **options)(*[x.clone() for x in args]))
    assert len(got) == len(want[0])
    for mine, examples in zip(got, zip(*want, strict=True), strict=True):
        torch.testing.assert_close(mine, torch.stack(examples), equal_nan=True)


def everywhere(f: Callable[..., Any], *examples: Tensor) -> None:
    """``check`` every choice of batched arguments, with the batch dim first, last and between."""
    several = [torch.stack([x, x.roll(1) if x.dim() else x, x.flip(0) if x.dim() else x])
               for x in examples]  # fmt: skip
    for chosen in itertools.product((True, False), repeat=len(examples)):
        if not any(chosen):
            continue
        for bdim in (0, -1, "between"):
            args, dims = [], []
            for one, all_of_them, batched in zip(examples, several, chosen, strict=True):
                place = bdim if isinstance(bdim, int) else one.dim() // 2
                args.append(all_of_them.movedim(0, place) if batched else one)
                dims.append(place if batched else None)
            check(f, *args, in_dims=tuple(dims))


def refused_but_split(f: Callable[..., Any], *args: Tensor, in_dims: Any = 0) -> None:
    """Check for a clear error, and for the loop's results with ``data_dependent="split"``."""
    with pytest.raises(DataDependentError, match="split"):
        vmap(f, in_dims=in_dims)(*args)
    check(f, *args, in_dims=in_dims, data_dependent="split")


# Shapes and layouts.


def test_roll_of_a_number() -> None:
    everywhere(lambda x: torch.roll(x, 2), rand())
    everywhere(lambda x: torch.roll(x, 1), rand(4))
    everywhere(lambda x: torch.roll(x, (1, -1), (0, 1)), rand(4, 3))


def test_column_stack() -> None:
    everywhere(lambda x, y: torch.column_stack((x, y)), rand(4), rand(4, 2))
    everywhere(lambda x, y: torch.column_stack((x, y)), rand(), rand())


@pytest.mark.parametrize("name", ["to", "float", "double", "half", "int", "bool", "clone"])
def test_casts_with_a_memory_format(name: str) -> None:
    """The strides of each example agree, too."""
    images = rand(B, 2, 3, 4, 5)
    args = (torch.float64,) if name == "to" else ()

    def cast(x: Tensor, seen: list[Any]) -> Tensor:
        out: Tensor = getattr(x, name)(*args, memory_format=torch.channels_last)
        seen.append(out.is_contiguous(memory_format=torch.channels_last))
        return out

    seen: list[Any] = []
    for bdim in (0, 1, 4):
        check(lambda x: cast(x, seen), images.movedim(0, bdim), in_dims=bdim)
    assert all(seen)


def test_channels_last_is_kept() -> None:
    images = rand(B, 2, 3, 4, 5)
    images = torch.stack([x.contiguous(memory_format=torch.channels_last) for x in images])
    images = images.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    seen = []

    def f(x: Tensor) -> Tensor:
        out = (x * 2).relu() + x
        seen.append([x.stride(), out.stride(), torch.empty_like(out).stride()])
        return out

    check(f, images)
    assert seen[0] == seen[-1]  # the strides of plain examples, and those of the batch


def test_not_contiguous() -> None:
    x = rand(B, 4, 10)[:, :, ::2].mT
    for f in (torch.cumsum, torch.softmax, torch.sort, torch.argsort, torch.logsumexp):
        check(lambda x, f=f: f(x, 0), x)
    check(lambda x: x.reshape(-1), x)
    check(lambda x: x.contiguous().view(-1), x)


def test_batches_and_dims_of_size_zero() -> None:
    assert vmap(torch.mm)(rand(0, 2, 3), rand(0, 3, 4)).shape == (0, 2, 4)
    assert vmap(lambda x: x.sort(0)[1], in_dims=1)(rand(4, 0)).shape == (0, 4)
    check(torch.mm, rand(B, 2, 0), rand(B, 0, 4))
    check(lambda x: x.sum(0), rand(B, 0, 4))
    check(lambda x, i: x[i], rand(B, 4, 2), torch.zeros(B, 0, dtype=torch.int64))
    check(lambda x: torch.cat([x, x], 1), rand(B, 2, 0))


def test_examples_without_dims() -> None:
    """Examples without dims."""
    for f in (torch.sum, torch.cumsum, torch.softmax, torch.sort, torch.argmax, torch.median):
        check(lambda x, f=f: f(x, 0), rand(B))
    check(lambda x: x.squeeze(0), rand(B))
    check(lambda x, i: x.index_select(0, i), rand(B), torch.zeros(B, 1, dtype=torch.int64))


def test_slices() -> None:
    check(lambda x: x[1:2] - x[:1], rand(B, 4))
    check(lambda x: x[..., ::2], rand(B, 4, 5), in_dims=-1)
    check(lambda x: x[None, 1:, 0], rand(4, B, 5), in_dims=1)


def test_slices_from_a_batched_place() -> None:
    x, i = rand(B, 6), torch.tensor([0, 3, 5])
    check(lambda x, i: x[i : i + 1], x, i)
    check(lambda x, i: x[i], x, i)
    check(lambda x, i: x[i], x[0], i, in_dims=(None, 0))
    # Indexing a plain tensor by a slice, torch reads the bounds as Python numbers in any case.
    refused_but_split(lambda x, i: x[i : i + 1], x[0], i, in_dims=(None, 0))
    check(lambda x, i: x.narrow(0, i, 1), x[0], i, in_dims=(None, 0))


def test_writes_to_slices_from_a_batched_place() -> None:
    def f(x: Tensor, i: Tensor) -> Tensor:
        x = x.clone()
        x[i : i + 1] = 9.0
        return x

    check(f, rand(B, 6), torch.tensor([0, 3, 5]))


def test_narrow_from_a_tensor() -> None:
    start = torch.tensor([0, 2, -3])
    check(lambda x, i: torch.narrow(x, 0, i, 2), rand(B, 5, 2), start)
    check(lambda x, i: x.narrow(1, i, 2), rand(B, 2, 5), start)
    check(lambda i: torch.arange(5.0).narrow(0, i, 2), start)


# Indices, masks and search.


def test_index_fill_with_a_batched_value() -> None:
    index = torch.tensor([[0, 2], [1, 1], [2, 0]])
    value = rand(B)
    check(lambda x, i, v: x.index_fill(0, i, v), rand(B, 4, 2), index, value)
    check(lambda x, i, v: x.index_fill(1, i, v), rand(2, 4), index, value, in_dims=(None, 0, 0))
    check(lambda x, i, v: x.clone().index_fill_(-1, i, v), rand(4, B), index, value,
          in_dims=(1, 0, 0))  # fmt: skip


def test_masked_scatter() -> None:
    mask = torch.tensor([[True, False, True, True], [False] * 4, [False, True, False, False]])
    source = rand(B, 4)
    check(lambda x, m, s: x.masked_scatter(m, s), rand(B, 4), mask, source)
    check(lambda m, s: torch.zeros(2, 4).masked_scatter(m, s), mask, rand(B, 8))
    check(lambda x, m, s: x.clone().masked_scatter_(m, s), rand(B, 4), mask, source)


def test_assignments_by_masks() -> None:
    def clipped(b: Tensor) -> Tensor:
        b = b.clone()
        b[b > 0] = 0.0
        return b

    def rows(b: Tensor, m: Tensor) -> Tensor:
        b = b.clone()
        b[m] = b.sum()
        return b

    check(clipped, rand(B, 4))
    check(clipped, rand(4, 2, B), in_dims=-1)
    check(rows, rand(B, 4, 2), torch.tensor([[True, False, True, True]] * B))


def test_isin() -> None:
    x, y = rand(4, dtype=torch.int64), rand(2, dtype=torch.int64)
    everywhere(torch.isin, x, y)
    everywhere(lambda x, y: torch.isin(x, y, invert=True), x.view(2, 2), y)
    check(lambda x: torch.isin(x, 1), rand(B, 4, dtype=torch.int64))
    check(lambda y: torch.isin(1, y), rand(B, 4, dtype=torch.int64))


@pytest.mark.parametrize("right", [False, True])
def test_searchsorted(right: bool) -> None:
    sequence = rand(5).sort().values
    sequences = torch.stack([sequence, sequence - 1, sequence * 2])

    def f(s: Tensor, v: Tensor) -> Tensor:
        return torch.searchsorted(s, v, right=right)

    for values in (rand(4), rand(2, 2), rand()):
        several = torch.stack([values, values + 1, -values], -1)
        check(f, sequences, several, in_dims=(0, -1))
        check(f, sequence, several, in_dims=(None, -1))
        check(f, sequences.T, values, in_dims=(-1, None))


def test_embedding() -> None:
    index = torch.tensor([[0, 2], [1, 1], [3, 0]])
    check(lambda i, w: F.embedding(i, w), index, rand(B, 4, 2))
    check(lambda i, w: F.embedding(i, w, padding_idx=1), index, rand(4, B, 2), in_dims=(0, 1))
    check(lambda i, w: F.embedding(i, w), index[0], rand(4, 2, B), in_dims=(None, -1))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bag(mode: str) -> None:
    index = torch.tensor([[0, 2, 1], [1, 1, 3], [3, 0, 0]])
    bags = torch.tensor([0, 1])
    check(lambda i, w: F.embedding_bag(i, w, bags, mode=mode), index, rand(B, 4, 2))
    check(lambda i, w: F.embedding_bag(i, w, bags, mode=mode), index, rand(4, 2), in_dims=(0, None))
    check(lambda i, w: F.embedding_bag(i, w, bags, mode=mode), index[0], rand(4, 2, B),
          in_dims=(None, -1))  # fmt: skip


# Sampling, pooling and losses.


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_grid_sample(mode: str, padding: str) -> None:
    def f(x: Tensor, grid: Tensor) -> Tensor:
        return F.grid_sample(x, grid, mode=mode, padding_mode=padding, align_corners=False)

    x, grid = rand(B, 2, 3, 4, 5), rand(B, 2, 3, 2, 2)
    for p, q in ((0, 0), (-1, -1), (-1, 0), (2, -1)):
        check(f, x.movedim(0, p), grid.movedim(0, q), in_dims=(p, q))
    check(f, x[0], grid.movedim(0, -1), in_dims=(None, -1))
    check(f, x.movedim(0, -1), grid[0], in_dims=(-1, None))


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_max_unpool(rank: int) -> None:
    pool = getattr(F, f"max_pool{rank}d")
    unpool = getattr(F, f"max_unpool{rank}d")
    x = rand(B, 2, 3, *[4] * rank)
    out, places = pool(x.flatten(0, 1), 2, return_indices=True)
    out, places = (v.unflatten(0, (B, 2)) for v in (out, places))
    check(lambda o, p: unpool(o, p, 2), out, places)
    check(lambda o, p: unpool(o, p, 2), out.movedim(0, -1), places, in_dims=(-1, 0))
    check(lambda o, p: unpool(o, p, 2), out, places[0], in_dims=(0, None))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_ctc_loss(reduction: str) -> None:
    logits = rand(B, 6, 2, 4).log_softmax(-1)
    targets = torch.tensor([[[1, 2], [3, 1]], [[2, 2], [1, 3]], [[3, 3], [2, 1]]])
    lengths, sizes = torch.tensor([6, 5]), torch.tensor([2, 1])

    def f(x: Tensor, t: Tensor) -> Tensor:
        return F.ctc_loss(x, t, lengths, sizes, reduction=reduction, zero_infinity=True)

    check(f, logits, targets)
    check(f, logits.movedim(0, -1), targets[0], in_dims=(-1, None))
    check(f, logits[0], targets, in_dims=(None, 0))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_ctc_loss_with_lengths_in_lists(reduction: str) -> None:
    logits = rand(B, 6, 2, 4).log_softmax(-1)
    targets = torch.tensor([[[1, 2], [3, 1]], [[2, 2], [1, 3]], [[3, 3], [2, 1]]])

    lengths: Any = (6, 5)  # torch's annotation says tensors
    sizes: Any = (2, 1)

    def f(x: Tensor, t: Tensor) -> Tensor:
        return F.ctc_loss(x, t, lengths, sizes, reduction=reduction)

    check(f, logits, targets)
    check(lambda x: f(x, targets[0]), logits)
    check(lambda t: f(logits[0], t), targets)


def test_ctc_loss_with_lengths_of_each_example() -> None:
    logits = rand(B, 6, 2, 4).log_softmax(-1)
    targets = torch.tensor([[[1, 2], [3, 1]]] * B)
    lengths = torch.tensor([[6, 5], [4, 6], [3, 3]])
    sizes = torch.tensor([[2, 1], [1, 1], [2, 2]])
    check(F.ctc_loss, logits, targets, lengths, sizes)


# Reductions and statistics.


@pytest.mark.parametrize("kind", ["linear", "lower", "higher", "midpoint", "nearest"])
def test_quantile(kind: str) -> None:
    q = torch.tensor([0.1, 0.5, 0.9])
    for f in (torch.quantile, torch.nanquantile):
        everywhere(lambda x, q, f=f: f(x, q, interpolation=kind), rand(5), q)
        everywhere(lambda x, f=f: f(x, 0.3, dim=0, keepdim=True, interpolation=kind), rand(5, 2))
        check(lambda x, q, f=f: f(x, q, dim=1, interpolation=kind), rand(B, 2, 5), q)


def test_cov_with_weights() -> None:
    counts, weights = torch.tensor([[1, 2, 1, 3]] * B), rand(B, 4).abs()
    check(lambda x, n, w: torch.cov(x, fweights=n, aweights=w), rand(B, 2, 4), counts, weights)
    check(lambda x, w: torch.cov(x, aweights=w), rand(2, 4), weights, in_dims=(None, 0))
    check(lambda x, n: torch.cov(x, correction=0, fweights=n), rand(2, B, 4), counts[0],
          in_dims=(1, None))  # fmt: skip
    check(torch.cov, rand(B, 4))
    check(torch.corrcoef, rand(4, 2, B), in_dims=-1)


def test_histc() -> None:
    check(lambda x: torch.histc(x, 4, -1.0, 1.0), rand(B, 9))
    check(lambda x: torch.histc(x, 4), rand(3, B, 3), in_dims=1)


def test_histogram() -> None:
    edges = torch.tensor([-1.0, 0.0, 0.5, 2.0])
    check(lambda x: torch.histogram(x, edges), rand(B, 9))
    check(lambda x, w: torch.histogram(x, 4, range=(-1.0, 1.0), weight=w), rand(B, 9), rand(B, 9))
    check(lambda x, e: torch.histogram(x, e), rand(9), torch.stack([edges, edges - 1, edges * 2]),
          in_dims=(None, 0))  # fmt: skip


# Linear algebra and spectra.


def test_pinv_with_a_batched_rtol() -> None:
    rtol = torch.tensor([1e-5, 0.3, 0.6])
    check(lambda x, r: torch.linalg.pinv(x, rtol=r), rand(B, 3, 2), rtol)
    check(lambda x, r: torch.linalg.pinv(x, rtol=r), rand(3, 2), rtol, in_dims=(None, 0))
    check(lambda x, r: torch.linalg.pinv(x, atol=r), rand(3, 2, B), rtol, in_dims=(-1, 0))


@pytest.mark.parametrize("pivot", [True, False])
def test_lu(pivot: bool) -> None:
    x = rand(B, 3, 3) + 3 * torch.eye(3)
    check(lambda x: tuple(torch.linalg.lu_factor(x)), x)
    if pivot:
        check(lambda x: tuple(torch.linalg.lu(x)), x.movedim(0, -1), in_dims=-1)
        check(lambda x: tuple(torch.linalg.lu(x)), rand(B, 2, 4, 3))
        check(lambda x: tuple(torch.linalg.lu_factor_ex(x)), x)


ADDED: dict[str, Callable[..., Tensor]] = {
    "addmm_": lambda x, a, b: x.addmm_(a, b),
    "addmm_ with factors": lambda x, a, b: x.addmm_(a, b, beta=2, alpha=0.5),
    "addmv_": lambda x, a, b: x[0].addmv_(a, b[:, 0]),
    "addr_": lambda x, a, b: x.addr_(a[:, 0], b[0, :2]),
    "addbmm_": lambda x, a, b: x.addbmm_(a[None], b[None]),
    "baddbmm_": lambda x, a, b: x.unsqueeze(0).baddbmm_(a[None], b[None]),
}


@pytest.mark.parametrize("name", ADDED)
def test_products_added_in_place(name: str) -> None:
    x = rand(B, 2, 2)

    def f(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return ADDED[name](x.clone(), a, b)

    a, b = rand(B, 2, 3), rand(B, 3, 2)
    check(f, x, a, b)
    check(f, x, a[0], b.movedim(0, -1), in_dims=(0, None, -1))
    check(f, x[0], a, b[0], in_dims=(None, 0, None))


def test_stft() -> None:
    window = torch.hann_window(8)
    check(lambda x: torch.stft(x, 8, window=window, return_complex=True), rand(B, 20))
    check(lambda x, w: torch.stft(x, 8, 4, window=w, return_complex=True), rand(20, B),
          torch.stack([window, window + 1, window * 2]), in_dims=(1, 0))  # fmt: skip
    check(lambda x: torch.stft(x, 8, window=window, center=False, return_complex=True),
          rand(B, 2, 20))  # fmt: skip


# In place, and into what is given.


@pytest.mark.parametrize("name", "eq_ ne_ lt_ le_ gt_ ge_ logical_and_ logical_xor_".split())
def test_comparisons_in_place(name: str) -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        x = x.clone()
        out: Tensor = getattr(x, name)(y)
        assert out is x
        return x

    check(f, rand(B, 4), rand(B, 4))
    check(f, rand(B, 4), rand(4), in_dims=(0, None))
    check(f, rand(4), rand(4, B), in_dims=(None, 1))


OUT: dict[str, Callable[..., Tensor]] = {
    "sin": lambda x, out: torch.sin(x, out=out),
    "add": lambda x, out: torch.add(x, 1, out=out),
    "cumsum": lambda x, out: torch.cumsum(x, 0, out=out),
    "cat": lambda x, out: torch.cat([x, x], out=out),
    "mul": lambda x, out: torch.mul(x, x[0], out=out),
    "norm": lambda x, out: torch.linalg.norm(x, out=out),
}


@pytest.mark.parametrize("name", OUT)
def test_out_arguments(name: str) -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.zeros_like(OUT[name](x, None))
        return OUT[name](x, out), out

    check(f, rand(B, 4))
    check(f, rand(4, B), in_dims=-1)


def test_out_of_several_results() -> None:
    def f(x: Tensor) -> list[Tensor]:
        outs = torch.zeros(3), torch.zeros(3, dtype=torch.int64)
        return [*torch.topk(x, 3, out=outs), *outs]

    check(f, rand(B, 5))


# Recurrent networks.


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("both", [True, False])
def test_recurrent_networks(kind: Any, first: bool, both: bool) -> None:
    network = kind(2, 3, num_layers=2, batch_first=first, bidirectional=both)
    x = rand(B, 4, 5, 2)
    with torch.no_grad():
        check(network, x)
        check(network, x.movedim(0, -1), in_dims=-1)
        check(network, rand(B, 5, 2))  # without a batch of its own


@pytest.mark.parametrize("kind", [torch.nn.LSTMCell, torch.nn.GRUCell, torch.nn.RNNCell])
def test_recurrent_cells(kind: Any) -> None:
    cell = kind(2, 3)
    with torch.no_grad():
        check(cell, rand(B, 4, 2))
        check(cell, rand(2, B), in_dims=1)


def test_an_ensemble_of_recurrent_networks() -> None:
    networks = [torch.nn.LSTM(2, 3) for _ in range(B)]
    params, buffers = tsfunc.stack_module_state(networks)
    x = rand(5, 4, 2)

    def call(params: Any, buffers: Any, x: Tensor) -> Any:
        return tsfunc.functional_call(networks[0], (params, buffers), (x,))

    out, (h, c) = vmap(call, (0, 0, None))(params, buffers, x)
    for i, network in enumerate(networks):
        want, (hidden, cell) = network(x)
        torch.testing.assert_close([out[i], h[i], c[i]], [want, hidden, cell])


# Complex numbers.


COMPLEX: dict[str, Callable[[Tensor], Any]] = {
    "abs": torch.abs,
    "angle": torch.angle,
    "conj": torch.conj,
    "parts": lambda x: x.real * x.imag,
    "view_as_real": torch.view_as_real,
    "product": lambda x: x.mH @ x,
    "fft": torch.fft.fft,
    "inv": torch.linalg.inv,
    "eigvalsh": lambda x: torch.linalg.eigvalsh(x + x.mH),
    "cumprod": lambda x: x.cumprod(0),
    "part of a conjugate": lambda x: x.conj().imag,
}


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_numbers(name: str) -> None:
    x = rand(B, 2, 2, dtype=torch.complex64)
    check(COMPLEX[name], x)
    check(COMPLEX[name], x.movedim(0, -1), in_dims=-1)
    check(COMPLEX[name], x.movedim(0, 1).conj(), in_dims=1)


# Calls whose sizes or Python values depend on data: an error with a remedy, or right by splitting.


def test_bincount() -> None:
    x, weights = torch.tensor([[0, 1, 1], [4, 0, 2], [1, 1, 0]]), rand(B, 3)
    refused_but_split_sizes(lambda x: torch.bincount(x), x)
    refused_but_split_sizes(lambda x, w: torch.bincount(x, w), x, weights)
    check(lambda x: torch.bincount(x, minlength=7)[:7], x, data_dependent="split")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize(
    "weighed", [None, torch.float32, torch.float64, torch.float16, torch.int32]
)
def test_bincount_with_a_number_of_bins(dtype: torch.dtype, weighed: torch.dtype | None) -> None:
    """One size serves all examples: ``minlength``, or numbers that the examples share."""
    seed = torch.seed()
    print("seed", seed)
    for n in (0, 1, 5):
        x = torch.randint(0, 4, (B, n)).to(dtype)
        if weighed is None:
            check(lambda x: torch.bincount(x, minlength=6), x)
            check(lambda x: torch.bincount(x, None, 4), x.T, in_dims=1)
            continue
        weights = (torch.rand(B, n) * 9).to(weighed)
        check(lambda x, w: torch.bincount(x, w, 6), x, weights)
        check(lambda x, w: torch.bincount(x, w, minlength=6), x.T, weights, in_dims=(1, 0))
        check(lambda x, w: torch.bincount(x, w, minlength=6), x, weights[0], in_dims=(0, None))
        check(lambda x, w: torch.bincount(x, weights=w), x[0], weights, in_dims=(None, 0))
        check(lambda x, w: torch.bincount(x, w, 3), x[0], weights.T, in_dims=(None, 1))


@pytest.mark.parametrize("number", [3, -1])
def test_bincount_of_a_number_without_a_bin(number: int) -> None:
    x = torch.tensor([[0, 1], [2, number]])
    with pytest.raises(DataDependentError, match=r"expected numbers from 0 to 2.*minlength=3.*got"):
        vmap(lambda x: torch.bincount(x, minlength=3))(x)
    with pytest.raises(RuntimeError, match=r"index -?[0-9] is out of bounds"):
        tsfunc.specialize(vmap(lambda x: torch.bincount(x, minlength=3)))(x)


def refused_but_split_sizes(f: Callable[..., Any], *args: Tensor) -> None:
    """Results of different sizes come back as a list or a nested tensor."""
    with pytest.raises(DataDependentError, match="split"):
        vmap(f)(*args)
    got = vmap(f, data_dependent="split")(*args)
    for i in range(B):
        torch.testing.assert_close(got[i], f(*[x[i] for x in args]))


def test_unique() -> None:
    x = torch.tensor([[0, 1, 1], [4, 0, 2], [1, 1, 1]])
    refused_but_split_sizes(torch.unique, x)
    refused_but_split_sizes(torch.unique_consecutive, x)


def test_nonzero_and_selection_by_masks() -> None:
    x = torch.tensor([[0.0, 1, 1], [4, 0, 0], [1, 1, 1]])
    refused_but_split_sizes(torch.nonzero, x)
    refused_but_split_sizes(lambda x: x[x > 0], x)
    refused_but_split_sizes(lambda x: torch.masked_select(x, x > 0), x)
    refused_but_split_sizes(torch.argwhere, x)


def test_equal_and_allclose() -> None:
    x = torch.tensor([[1.0, 2], [3, 4], [5, 6]])
    y = torch.tensor([[1.0, 2], [3, 9], [5, 6 + 1e-9]])
    refused_but_split(lambda x, y: x if torch.equal(x, y) else -y, x, y)
    refused_but_split(lambda x, y: x if torch.allclose(x, y) else -y, x, y)


def test_numbers_of_python() -> None:
    x = torch.tensor([2.0, 3.0, 2.0])
    refused_but_split(lambda x: torch.ones(2) * x.item(), x)
    refused_but_split(lambda x: x + 1 if x > 2 else x - 1, x)
    refused_but_split(lambda x: x + torch.tensor(x.tolist()), x)


def test_repeat_interleave_by_a_tensor() -> None:
    refused_but_split_sizes(torch.repeat_interleave, torch.tensor([[1, 2], [0, 2], [3, 1]]))


# Lists and numbers among the arguments.


def test_lists_of_batched_and_plain_tensors() -> None:
    check(lambda x, y: torch.stack([x, y, x]), rand(B, 2), rand(2), in_dims=(0, None))
    check(lambda x, y: torch.cat([x, y]), rand(2, B), rand(3), in_dims=(1, None))
    check(lambda x, y: torch.block_diag(x, y), rand(B, 2, 2), rand(3), in_dims=(0, None))
    check(lambda x, y: torch.meshgrid(x, y, indexing="ij"), rand(B, 2), rand(3), in_dims=(0, None))
    check(lambda x, y: torch.einsum("ij,jk->ik", x, y), rand(2, 3, B), rand(B, 3, 2),
          in_dims=(-1, 0))  # fmt: skip
    check(lambda x, y: torch._foreach_add([x, y], [y, x]), rand(B, 2), rand(2), in_dims=(0, None))


def test_every_place_of_the_batch_dim() -> None:
    x = rand(3, 3, 3, 3)
    for bdim in range(-4, 4):
        check(lambda x: x.sort(1).values - x.mean(0) @ x.amax(2), x, in_dims=bdim)
