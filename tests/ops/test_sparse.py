"""Sparse tensors: batches of them, and sparse tensors that all examples share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.harness import rows_of
from tsfunc import explain, grad, jvp, vmap
from tsfunc.errors import DataDependentError, SlowFallbackWarning

# torch warns about compressed layouts.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC) tensor support is in beta")

_R = torch.Generator().manual_seed(0)
DENSE = torch.randn(4, 2, 3, generator=_R) * (torch.rand(4, 2, 3, generator=_R) > 0.4)
Y = torch.randn(4, 3, 5, generator=_R)
V = torch.randn(4, 3, generator=_R)
W = torch.randn(4, 6, 2, generator=_R)


def dense(x: Tensor) -> Tensor:
    return x if x.layout is torch.strided else x.to_dense()


def check(f: Callable[..., Tensor], *args: Tensor, in_dims: Sequence[int | None]) -> None:
    """Compare with the loop over examples; vmap itself may not loop."""
    pairs = list(zip(args, in_dims, strict=True))
    want = [dense(f(*[x if d is None else x.select(d, i) for x, d in pairs])) for i in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", SlowFallbackWarning)
        got: Any = vmap(f, in_dims=tuple(in_dims))(*args)
    torch.testing.assert_close(dense(got), torch.stack(want))


BATCHED: dict[str, Callable[[Tensor], Tensor]] = {
    "arithmetic": lambda x: x * 2 + x,
    "sin": lambda x: x.sin(),
    "sum": lambda x: x.sum(),
    "sum over one dim": lambda x: torch.sparse.sum(x, 0),
    "sum over the last dim": lambda x: torch.sparse.sum(x, -1),
    "sum over all dims": lambda x: torch.sparse.sum(x, (0, 1)),
    "softmax": lambda x: torch.sparse.softmax(x, 1),
    "log_softmax": lambda x: torch.sparse.log_softmax(x, 0),
    "to_dense": lambda x: x.to_dense(),
    "coalesce": lambda x: (x + x).coalesce(),
    "to_dense of to_sparse": lambda x: x.to_dense().to_sparse().to_dense(),
    "layout": lambda x: x.to_dense() * (x.layout is torch.sparse_coo and x.is_sparse),
    "sparse_dim and dense_dim": lambda x: x * (x.sparse_dim() * 10 + x.dense_dim()),
    "sum of all": lambda x: torch.sparse.sum(x),
    "sparse_mask": lambda x: torch.ones(2, 3).sparse_mask(x),
    "t": lambda x: x.t(),
    "mm": lambda x: torch.sparse.mm(x, Y[0]),
    "matmul": lambda x: x @ Y[0],
    "mv": lambda x: x @ V[0],
    "addmm": lambda x: torch.sparse.addmm(torch.ones(2, 5), x, Y[0], beta=2.0, alpha=0.5),
    "dense times sparse": lambda x: W[0] @ x,
    "vector times sparse": lambda x: V[0, :2] @ x,
}


@pytest.mark.parametrize("name", BATCHED)
def test_a_batch_of_sparse_tensors(name: str) -> None:
    check(BATCHED[name], DENSE.to_sparse(), in_dims=(0,))


SHARED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor]] = {
    "mm": (lambda y, x: torch.sparse.mm(x, y), Y),
    "torch.mm": (lambda y, x: torch.mm(x, y), Y),
    "matmul": (lambda y, x: x @ y, Y),
    "mv": (lambda y, x: x @ y, V),
    "addmm": (lambda y, x: torch.sparse.addmm(torch.ones(2, 5), x, y), Y),
    "dense times sparse": (lambda y, x: y @ x, W),
}


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("bdim", [0, -1])
def test_one_sparse_tensor_for_all(name: str, layout: torch.layout, bdim: int) -> None:
    f, y = SHARED[name]
    x = DENSE[0].to_sparse(layout=layout)
    check(f, y.movedim(0, bdim), x, in_dims=(bdim, None))


@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "amin"])
def test_products_reduced(reduce: str) -> None:
    x = DENSE[0].to_sparse_csr()
    check(lambda y: torch.sparse.mm(x, y, reduce), Y, in_dims=(0,))


def test_both_batched() -> None:
    x = DENSE.to_sparse()
    check(lambda x, y: x @ y, x, Y, in_dims=(0, 0))
    check(lambda x, y: torch.sparse.mm(x, y), x, Y.movedim(0, -1), in_dims=(0, -1))
    check(lambda x, v: x @ v, x, V, in_dims=(0, 0))


def test_to_sparse() -> None:
    check(lambda x: x.to_sparse(), DENSE, in_dims=(0,))
    check(lambda x: x.to_sparse(1), DENSE.movedim(0, 1), in_dims=(1,))


@pytest.mark.parametrize("options", [
    {"layout": torch.sparse_coo},
    {"layout": torch.sparse_csr},
    {"layout": torch.sparse_csc},
    {"layout": torch.sparse_bsr, "blocksize": (1, 3)},
    {"layout": torch.sparse_bsc, "blocksize": (2, 1)},
])  # fmt: skip
def test_to_sparse_of_a_layout(options: dict[str, Any]) -> None:
    full = torch.randn(4, 2, 3) + 3  # compressed batches store as many elements in each example
    check(lambda x: x.to_sparse(**options), full, in_dims=(0,))

    def layout_and_parts(x: Tensor) -> Any:
        made = x.to_sparse(**options)
        assert made.layout is options["layout"]
        values = made.coalesce().values() if made.layout is torch.sparse_coo else made.values()
        return values * 1

    found = vmap(layout_and_parts)(full)
    torch.testing.assert_close(found, torch.stack([layout_and_parts(x) for x in full]))


@pytest.mark.parametrize("times", [torch.matmul, torch.sparse.mm])
def test_gradients_by_a_shared_matrix(times: Callable[[Tensor, Tensor], Tensor]) -> None:
    """The gradient by the matrix of ``sparse.mm`` has the matrix's sparsity."""
    x = DENSE[0].to_sparse().requires_grad_()
    vmap(lambda y: times(x, y))(Y).square().sum().backward()
    other = DENSE[0].to_sparse().requires_grad_()
    torch.stack([times(other, y) for y in Y]).square().sum().backward()
    assert x.grad is not None and other.grad is not None
    torch.testing.assert_close(dense(x.grad), dense(other.grad))


def test_the_refusals_of_dense_values_hold() -> None:
    with pytest.raises(RuntimeError):
        vmap(torch.mm)(Y, Y)
    with pytest.raises(RuntimeError):
        vmap(lambda y: DENSE[0].T.to_sparse() @ y)(Y)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_matrix_times_a_stack_is_refused_as_for_one_example(layout: torch.layout) -> None:
    x, stacks = DENSE[0].to_sparse(layout=layout), torch.randn(4, 6, 3, 5)
    products: list[Callable[[Tensor], Tensor]] = [lambda y: x @ y, lambda y: y.mT @ x.t()]
    for product in products:
        with pytest.raises(RuntimeError):
            product(stacks[0])
        with pytest.raises(RuntimeError):
            vmap(product)(stacks)


SAMPLED = torch.randn(3, 2, generator=_R), torch.randn(2, 3, generator=_R)


def there_and_back(x: Tensor) -> Tensor:
    return x.to_sparse().to_dense()


def of_members(values: Tensor) -> Tensor:
    return torch.sparse_compressed_tensor(
        torch.arange(4), torch.arange(3), values, (3, 3), layout=torch.sparse_csr,
        check_invariants=False,
    )  # fmt: skip


AS_MANY = torch.stack([torch.eye(3) * (i + 1) for i in range(4)]).to_sparse()


def test_the_stored_values() -> None:
    check(lambda x: x.coalesce().values() * 2, AS_MANY, in_dims=[0])
    check(lambda x: x.coalesce().indices(), AS_MANY, in_dims=[0])
    check(lambda x: x.to_dense() * x._nnz(), AS_MANY + AS_MANY, in_dims=[0])
    uneven = DENSE.to_sparse()
    with pytest.raises(DataDependentError, match="examples that store as many elements"):
        vmap(lambda x: x.coalesce().values())(uneven)
    parts = vmap(lambda x: x.coalesce().values(), data_dependent="split", ragged="list")(uneven)
    for part, one in zip(parts, DENSE, strict=True):
        torch.testing.assert_close(part, one[one != 0])


@pytest.mark.parametrize("in_dims", [(0, None), (None, 0), (0, 0)])
def test_sparse_tensors_made_inside(in_dims: tuple[int | None, ...]) -> None:
    places = torch.tensor([[0, 1, 2], [2, 0, 1]])
    places = places if in_dims[0] is None else torch.stack([places.roll(i, 1) for i in range(4)])
    values = torch.randn(3) if in_dims[1] is None else torch.randn(4, 3)

    def f(places: Tensor, values: Tensor) -> Tensor:
        made = torch.sparse_coo_tensor(places, values, (3, 4), check_invariants=False)
        return made.to_dense() * 2

    check(f, places, values, in_dims=in_dims)


def _sum_over(x: Tensor, dim: int | tuple[int, ...] | None) -> Tensor:
    return dense(torch.sparse.sum(x.to_sparse(), dim))


DERIVED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mm": lambda x, y: torch.sparse.mm(x.to_sparse(), y),
    "matmul": lambda x, y: x.to_sparse() @ y,
    "sum of rows": lambda x, y: _sum_over(x, 0) * y[:, 0],
    "sum of columns": lambda x, y: _sum_over(x, 1).square(),
    "sum over two dims": lambda x, y: _sum_over(x, (0, 1)).square(),
    "sum": lambda x, y: _sum_over(x, None).square(),
    "softmax": lambda x, y: torch.sparse.softmax(x.to_sparse(), 1).to_dense() @ y,
    "log_softmax": lambda x, y: torch.sparse.log_softmax(x.to_sparse(), 0).to_dense() @ y,
}


def test_each_row_is_met() -> None:
    inside: list[Callable[[Tensor], object]] = [
        lambda x: (x._indices(), x._values(), x._nnz(), x.is_coalesced()),
        lambda x: (x.coalesce().indices(), x.coalesce().values()),
        lambda x: torch.sparse.sum(x, dtype=torch.float64),
        lambda x: (x.to_dense().to_sparse(1), x.to_dense().to_sparse()),
        lambda x: torch.sparse_coo_tensor(
            x._indices(), x._values(), (3, 3), check_invariants=False
        ),
        lambda x: torch.ops.aten._coalesce(x),
    ]
    square = AS_MANY.to_dense()[:, :2].to_sparse()
    one, all_rows = DENSE[0].to_sparse_csr(), AS_MANY.to_dense().to_sparse_csr()
    calls = [explain(vmap(f), AS_MANY) for f in inside]
    calls += [explain(vmap(f), square) for f in BATCHED.values()]
    calls += [
        explain(vmap(grad(lambda x, y, f=f: f(x, y).sum())), DENSE, Y) for f in DERIVED.values()
    ]
    calls.append(explain(vmap(lambda y: torch.sparse.mm(one, y, "sum")), Y))
    calls.append(explain(vmap(grad(lambda y: torch.sparse.mm(one, y, "amax").sum())), Y))
    calls.append(explain(vmap(lambda x: torch.sparse.sampled_addmm(x, *SAMPLED)), all_rows))
    calls.append(explain(vmap(of_members), all_rows.values()))
    calls.append(explain(vmap(lambda x: jvp(there_and_back, (x,), (x,))[1]), DENSE))
    for to, (first, second), blocks in (
        ("csr", ("crow", "col"), ()),
        ("csc", ("ccol", "row"), ()),
        ("bsr", ("crow", "col"), [(1, 1)]),
        ("bsc", ("ccol", "row"), [(1, 1)]),
    ):
        for space in (Tensor, torch.ops.aten):
            begin = "to_sparse" if space is Tensor else "_to_sparse"
            make = getattr(space, f"{begin}_{to}")
            calls.append(explain(vmap(lambda x, f=make, b=blocks: f(x, *b)), AS_MANY.to_dense()))
        for name in [f"{of}_indices{copy}" for of in (first, second) for copy in ("", "_copy")]:
            get = getattr(torch.ops.aten, name)
            calls.append(explain(vmap(get), make(AS_MANY.to_dense(), *blocks)))
    met = {use["operator"] for call in calls for use in call.to_dict()["operators"]}
    assert set(rows_of("sparse.py", "compressed.py")) <= met


@pytest.mark.parametrize("name", DERIVED)
def test_derivatives_on_both_sides_of_vmap(name: str) -> None:
    def total(x: Tensor, y: Tensor) -> Tensor:
        return DERIVED[name](x, y).sum()

    want = torch.stack([grad(total)(x, y) for x, y in zip(DENSE, Y, strict=True)])
    torch.testing.assert_close(vmap(grad(total), strict=True)(DENSE, Y), want)
    outside = grad(lambda x: vmap(total, strict=True)(x, Y).sum())(DENSE)
    torch.testing.assert_close(outside, want)


def test_stacks_of_sparse_matrices() -> None:
    check(lambda x, y: torch.bmm(x[None].to_sparse(), y[None]), DENSE, Y, in_dims=(0, 0))
    check(lambda x, y: torch.bmm(x[None].to_sparse(), y[None]), DENSE[0], Y, in_dims=(None, 0))
    got = vmap(vmap(lambda x, y: torch.sparse.mm(x.to_sparse(), y)), (0, None))(
        torch.stack([DENSE, DENSE.flip(0)]), Y
    )
    torch.testing.assert_close(got, torch.stack([DENSE @ Y, DENSE.flip(0) @ Y]))


def test_a_sparse_factor_and_a_batch_dim_that_is_last() -> None:
    others = torch.randn(2, 3, 4)
    check(lambda x, y: x.to_sparse() * y, DENSE[0], others, in_dims=(None, 2))
    check(lambda x, y: y * x.to_sparse(), DENSE[0], others, in_dims=(None, 2))


def test_products_with_dense_values_are_coalesced() -> None:
    x, y = DENSE.to_sparse(), torch.randn(4, 2, 3)
    assert vmap(lambda x, y: x * y)(x, y).is_coalesced()
    assert vmap(lambda x, y: (x * y).coalesce().indices() * 1)(AS_MANY, AS_MANY.to_dense()).numel()


def test_a_product_added_to_batched_values() -> None:
    added = torch.randn(4, 2, 5)
    check(
        lambda c, x, y: torch.sparse.addmm(c, x.to_sparse(), y, beta=2.0, alpha=0.5),
        added, DENSE[0], Y[0], in_dims=(0, None, None),
    )  # fmt: skip
