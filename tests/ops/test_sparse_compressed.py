"""Batches of sparse tensors in compressed layouts, and calls without a batched kernel in torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as nnf

from tsfunc import grad, jvp, vmap
from tsfunc.errors import DataDependentError, SlowFallbackWarning

# torch warns about compressed layouts.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC) tensor support is in beta")

_R = torch.Generator().manual_seed(0)
WHERE = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]])
DENSE = (torch.rand(4, 2, 3, generator=_R) + 0.5) * WHERE
OTHER = torch.randn(4, 2, 3, generator=_R)
Y = torch.randn(4, 3, 5, generator=_R)
V = torch.randn(4, 3, generator=_R)
W = torch.randn(4, 6, 2, generator=_R)
LEFT, RIGHT = torch.randn(4, 2, 7, generator=_R), torch.randn(4, 7, 3, generator=_R)
NUMBERS = torch.rand(4, generator=_R) + 1
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    ONE = DENSE[0].to_sparse_csr()
UNEVEN = OTHER * (OTHER > 0)


def dense(x: Any) -> Any:
    return x if x.layout is torch.strided else x.to_dense()


def check(
    f: Callable[..., Tensor], *args: Tensor, in_dims: Sequence[int | None] | None = None
) -> None:
    """Compare with the loop over examples, layouts included; vmap itself may not loop."""
    dims = [0] * len(args) if in_dims is None else in_dims
    each = [
        f(*[x if d is None else x.select(d, i) for x, d in zip(args, dims, strict=True)])
        for i in range(4)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error", SlowFallbackWarning)
        got = vmap(f, in_dims=tuple(dims))(*args)
    assert got.layout is each[0].layout
    torch.testing.assert_close(dense(got), torch.stack([dense(x) for x in each]))


ONE_BATCH: dict[str, Callable[[Tensor], Tensor]] = {
    "to_dense": lambda x: x.to_dense(),
    "to_sparse": lambda x: x.to_sparse(),
    "functions of the elements": lambda x: -x.sin().abs() * 3,
    "transposed": lambda x: x.t(),
    "sum": lambda x: x.sum(),
    "a matrix": lambda x: x @ Y[0],
    "a vector": lambda x: x @ V[0],
    "from the left": lambda x: W[0] @ x,
    "addmm": lambda x: torch.addmm(torch.ones(2, 5), x, Y[0], beta=2.0, alpha=0.5),
    "sparse.mm": lambda x: torch.sparse.mm(x, Y[0]),
    "shape": lambda x: torch.ones(x.shape) * x._nnz() * x.dim(),
    "layout": lambda x: x * (x.layout in (torch.sparse_csr, torch.sparse_csc)),
}


@pytest.mark.parametrize("name", ONE_BATCH)
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc])
def test_a_batch(name: str, layout: torch.layout) -> None:
    check(ONE_BATCH[name], DENSE.to_sparse(layout=layout))


def test_its_members() -> None:
    x = DENSE.to_sparse_csr()
    check(lambda x: x.values() * 2, x)
    check(lambda x: x.crow_indices(), x)
    check(lambda x: x.col_indices(), x)
    check(lambda x: x.ccol_indices() + x.row_indices().sum(), DENSE.to_sparse_csc())


TWO: dict[str, tuple[Callable[..., Tensor], Tensor]] = {
    "matrix": (lambda x, y: x @ y, Y),
    "vector": (lambda x, v: x @ v, V),
    "from the left": (lambda x, w: w @ x, W),
    "times dense": (lambda x, y: x * y, OTHER),
    "dense times": (lambda x, y: y * x, OTHER),
    "times a number": (lambda x, y: x * y, NUMBERS),
    "plus dense": (lambda x, y: y + x, OTHER),
    "weights": (lambda x, y: nnf.linear(y.T, x), Y),
    "weights of a vector": (lambda x, y: nnf.linear(y, x), V),
}


@pytest.mark.parametrize("name", TWO)
def test_a_batch_and_dense_tensors(name: str) -> None:
    f, y = TWO[name]
    x = DENSE.to_sparse_csr()
    check(f, x, y)
    check(lambda x: f(x, y[0]), x)
    check(lambda y: f(ONE, y), y)


def test_weights_with_a_bias() -> None:
    bias = torch.randn(4, 2)
    check(lambda x, y, b: nnf.linear(y.T, x, b), DENSE.to_sparse_csr(), Y, bias)
    check(lambda y: nnf.linear(y, ONE), torch.randn(5, 3, 4), in_dims=[2])


def test_two_batches() -> None:
    x, y = DENSE.to_sparse_csr(), (DENSE * OTHER).to_sparse_csr()
    check(lambda x, y: x * y, x, y)
    with pytest.raises(NotImplementedError, match="two batches of tensors of layout"):
        vmap(lambda x, y: x + y)(x, y)


@pytest.mark.parametrize("to", ["csr", "csc", "bsr", "bsc"])
def test_to_compressed_layouts(to: str) -> None:
    blocks = ((1, 3),) if to.startswith("bs") else ()
    check(lambda x: getattr(x, f"to_sparse_{to}")(*blocks).to_dense(), DENSE)
    if to.startswith("cs"):
        check(lambda x: getattr(x, f"to_sparse_{to}")().to_dense(), DENSE.to_sparse())


def test_examples_that_store_differing_numbers() -> None:
    with pytest.raises(DataDependentError, match=r"to_sparse\(\) instead"):
        vmap(lambda x: x.to_sparse_csr())(UNEVEN)
    got = vmap(lambda x, y: x.to_sparse_csr() @ y, data_dependent="split")(UNEVEN, Y)
    torch.testing.assert_close(got, UNEVEN @ Y)


def test_made_inside() -> None:
    rows, columns = ONE.crow_indices(), ONE.col_indices()

    def made(values: Tensor, y: Tensor) -> Tensor:
        x = torch.sparse_csr_tensor(rows, columns, values, (2, 3), check_invariants=False)
        return x @ y

    values = torch.randn(4, 4)
    check(made, values, Y)
    check(grad(lambda v, y: made(v, y).square().sum()), values, Y)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_masks(layout: torch.layout) -> None:
    masks = DENSE.to_sparse(layout=layout)
    one = DENSE[0].to_sparse(layout=layout)
    check(lambda x, mask: x.sparse_mask(mask.coalesce() if mask.is_sparse else mask), OTHER, masks)
    check(lambda x: x.sparse_mask(one), OTHER)


def test_products_that_store_other_numbers_of_elements_are_refused() -> None:
    """The blocks of a batch must store equally many elements, and these products do not."""
    x = torch.eye(2).expand(2, 2, 2).to_sparse_csr()
    y = torch.tensor([[[1.0, 0.0], [0.0, 2.0]], [[0.0, 3.0], [0.0, 4.0]]]).to_sparse_csr()
    with pytest.raises(DataDependentError, match=r"aten::mul\.Tensor.*Use to_dense\(\) first"):
        vmap(lambda x, y: x * y)(x, y)


def test_sampled_products() -> None:
    x = DENSE.to_sparse_csr()
    check(lambda x, a, b: torch.sparse.sampled_addmm(x, a, b, beta=0.5), x, LEFT, RIGHT)
    check(lambda a: torch.sparse.sampled_addmm(ONE, a, RIGHT[0], alpha=2.0), LEFT)
    check(
        grad(lambda a: torch.sparse.sampled_addmm(ONE, a, RIGHT[0]).to_dense().square().sum()),
        LEFT,
    )


@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "amin"])
def test_reduced_products(reduce: str) -> None:
    x = (DENSE * torch.tensor([[1.0], [0.0]])).to_sparse_csr()  # a row without stored elements

    def loss(y: Tensor, x: Tensor) -> Tensor:
        out: Tensor = torch.sparse.mm(x, y, reduce)
        return out.square().sum()

    check(lambda x, y: torch.sparse.mm(x, y, reduce), x, Y)
    check(lambda x: torch.sparse.mm(x, Y[0], reduce), x)
    check(grad(loss), Y, x)
    check(lambda y: grad(loss)(y, ONE), Y)
    got = vmap(lambda x, y: grad(loss, 1)(y, x).to_dense())(x, Y)
    want = [grad(loss, 1)(Y[i], x[i]).to_dense() for i in range(4)]
    torch.testing.assert_close(got, torch.stack(want))


def test_derivatives_by_the_dense_factor() -> None:
    x = DENSE.to_sparse_csr()
    check(grad(lambda y, x: (x @ y).square().sum()), Y, x)
    check(grad(lambda y, x: torch.sparse.mm(x, y).square().sum()), Y, x)
    check(grad(lambda y: torch.sparse.mm(ONE, y).square().sum()), Y)
    with pytest.raises(NotImplementedError, match="Use x @ y"):
        vmap(grad(lambda x: torch.sparse.mm(x, Y[0]).square().sum()))(x)


COO: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda x, y: x + y,
    "difference": lambda x, y: x - y,
    "product": lambda x, y: x * y,
    "product of matrices": lambda x, y: x @ y.t(),
    "sparse.mm": lambda x, y: torch.sparse.mm(x, y.t()),
}


@pytest.mark.parametrize("name", COO)
def test_two_of_coordinates(name: str) -> None:
    x, y = DENSE.to_sparse(), UNEVEN.to_sparse()
    check(COO[name], x, y)
    check(COO[name], x, y[0].coalesce(), in_dims=(0, None))
    check(COO[name], x[0].coalesce(), y, in_dims=(None, 0))


def test_coordinates_and_dense_tensors() -> None:
    x = UNEVEN.to_sparse()
    for y in (OTHER, NUMBERS):
        check(lambda x, y: x * y, x, y)
        check(lambda y: x[0].coalesce() * y, y)
    check(lambda x, y: x / y, x, NUMBERS)
    check(lambda x, y: y + x, x, OTHER)
    check(lambda x: OTHER[0] + x, x)
    check(lambda y: y + x[0], OTHER)
    with pytest.raises(RuntimeError, match="Sparse division"):
        vmap(lambda x, y: y / x)(x, OTHER)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_gradients_by_sparse_tensors(layout: torch.layout) -> None:
    x = DENSE[0].to_sparse(layout=layout)
    losses: list[Callable[[Tensor], Tensor]] = [
        lambda x: x.to_dense().square().sum(),
        lambda x: torch.sparse.mm(x, Y[0]).sum(),
    ]
    for loss in losses:
        other = x.clone().requires_grad_()
        (want,) = torch.autograd.grad(loss(other), other)
        got = grad(loss)(x)
        assert got.layout is want.layout
        torch.testing.assert_close(dense(got), dense(want))
    batch = DENSE.to_sparse(layout=layout)
    check(grad(lambda x: (x @ Y[0]).square().sum()), batch)
    got = vmap(grad(lambda x: x.to_dense().square().sum()))(batch)
    torch.testing.assert_close(dense(got), 2 * DENSE)


def test_tangents_through_sparse_tensors() -> None:
    def tangent(x: Tensor, t: Tensor) -> Tensor:
        return jvp(lambda x: (x.to_sparse() * 2).to_dense(), (x,), (t,))[1]

    check(tangent, UNEVEN, OTHER)


def test_one_vmap_in_another() -> None:
    x = DENSE.to_sparse_csr()
    each = torch.stack([torch.stack([m @ y for y in Y]) for m in DENSE])
    torch.testing.assert_close(vmap(lambda x: vmap(lambda y: x @ y)(Y))(x), each)
    torch.testing.assert_close(vmap(lambda y: vmap(lambda x: x @ y)(x), out_dims=1)(Y), each)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_an_output_that_is_the_same_for_all(layout: torch.layout) -> None:
    x = DENSE[0].to_sparse(layout=layout)
    out = vmap(lambda y: x)(Y)
    assert out.layout is layout
    torch.testing.assert_close(out.to_dense(), DENSE[:1].expand(4, 2, 3))


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_some_examples_at_a_time(layout: torch.layout) -> None:
    x = DENSE.to_sparse(layout=layout)
    by_threes = vmap(lambda x: (x @ Y[0], x * 2), chunk_size=3)(x)
    torch.testing.assert_close(by_threes[0], DENSE @ Y[0])
    torch.testing.assert_close(by_threes[1].to_dense(), 2 * DENSE)

    def either(x: Tensor) -> Tensor:
        return x.to_dense() if x.sum() > DENSE[0].sum() else -x.to_dense()

    got = vmap(either, data_dependent="split")(x)
    sums = DENSE.sum((1, 2))
    torch.testing.assert_close(got, DENSE * torch.where(sums > sums[0], 1, -1)[:, None, None])
