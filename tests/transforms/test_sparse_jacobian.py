"""sparse_jacobian: the Jacobian of jacrev, by one derivative for each color."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor

import tsfunc
from tests.transforms.support import same
from tsfunc import grad, jacobian_sparsity, jacrev, pytrees, sparse_jacobian
from tsfunc.errors import DataDependentError
from tsfunc.transforms.sparse_jacobian import colors

X = torch.linspace(0.2, 1.7, 12, dtype=torch.float64)
BANDED = torch.diag(torch.ones(12)) - torch.diag(torch.ones(11), 1)
BANDED = BANDED.double()
KERNEL = torch.tensor([[[1.0, -2.0, 0.0]]], dtype=torch.float64)
ORDER = torch.tensor([3, 0, 7, 7, 1])


def burgers(x: Tensor) -> Tensor:
    left, right = x.roll(1), x.roll(-1)
    return x * (right - left) / 2 - 0.1 * (right - 2 * x + left)


# Functions of twelve entries, the number of colors of the smaller side, and True if the pattern has
# no entry that is zero.
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "entry by entry": (lambda x: x.sin() * x + 2, 1),
    "differences": (lambda x: x.diff() ** 2, 2),
    "a stencil": (burgers, 3),
    "moved": (lambda x: x.view(3, 4).T.flip(0)[1:].exp(), 1),
    "gathered": (lambda x: x[ORDER] ** 2, 1),
    "put together": (lambda x: torch.cat([x[:3], torch.ones(2, dtype=x.dtype), x[3:] ** 2]), 1),
    "stacked": (lambda x: torch.stack([x.sin(), x.cos()]), 1),
    "padded": (lambda x: nnf.pad(x, (2, 1)) ** 2, 1),
    "sums": (lambda x: x.view(3, 4).sum(1), 1),
    "norms": (lambda x: x.view(3, 4).norm(dim=0), 1),
    "largest": (lambda x: x.view(2, 3, 2).amax((0, 2)), 1),
    "softmax of rows": (lambda x: x.view(3, 4).softmax(1), 4),
    "renormed rows": (lambda x: x.view(3, 4).renorm(2, 0, 0.5), 12),
    "shifted": (lambda x: torch.fft.fftshift(x) ** 2, 1),
    "running sums": (lambda x: x.view(3, 4).cumsum(0), 3),
    "a banded matrix": (lambda x: BANDED @ x.sin(), 2),
    "a product of matrices": (lambda x: (BANDED[:3, :3] @ x.view(3, 4)) ** 2, 2),
    "a convolution": (lambda x: nnf.conv1d(x.view(1, 1, -1), KERNEL).exp(), 2),
    "a branch": (lambda x: torch.where(x > 1, x.sin(), x.flip(0)), 2),
    "parts": (lambda x: x[:6].chunk(2)[1] * x.view(4, 3).unbind(0)[0], 1),
    "constant": (lambda x: torch.ones(3, dtype=x.dtype), 0),
    "without a derivative": (lambda x: x.detach() + x.argmax(), 0),
    "of one entry": (lambda x: x[3], 1),
    "all of all": (lambda x: torch.linalg.norm(x) * x, 12),
    "written into": (lambda x: torch.zeros_like(x).copy_(x * 2), 12),
}


def dense(func: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return tsfunc.jacrev(func)(x)


@pytest.mark.parametrize("mode", [None, "forward", "reverse"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_is_the_jacobian(name: str, mode: Any) -> None:
    func, _ = FUNCTIONS[name]
    found = sparse_jacobian(func, mode=mode)(X)
    assert found.layout is torch.sparse_coo and found.is_coalesced()
    same(found.to_dense(), dense(func, X))
    other = X.flip(0) - 0.8  # the pattern holds for other values, too
    pattern = jacobian_sparsity(func)(X)
    same(sparse_jacobian(func, sparsity=pattern, mode=mode)(other).to_dense(), dense(func, other))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_as_many_derivatives_as_colors(name: str) -> None:
    func, most = FUNCTIONS[name]
    calls: list[int] = []

    def counted(x: Tensor) -> Tensor:
        calls.append(1)
        return func(x)

    pattern = jacobian_sparsity(func)(X)
    sparse_jacobian(counted, sparsity=pattern, mode="forward", chunk_size=1)(X)
    columns = jacobian_sparsity(lambda x: func(x).reshape(-1))(X).coalesce().indices()
    columns = columns if len(columns) == 2 else torch.stack([columns[0] * 0, columns[0]])
    number = len(set(colors(columns).values()))
    assert len(calls) == max(number, 1)
    assert min(number, len(set(colors(columns.flip(0)).values()))) == most


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_shapes_and_layouts() -> None:
    def func(x: Tensor, y: Tensor, *, scale: float) -> Tensor:
        return scale * x.sum(1) * y

    x, y = X.view(3, 4), torch.ones(2, 3, dtype=torch.float64)
    found = sparse_jacobian(func)(x, y, scale=2.0)
    assert found.shape == (2, 3, 3, 4)
    same(found.to_dense(), tsfunc.jacrev(func)(x, y, scale=2.0))
    by_y = sparse_jacobian(func, argnums=-1)(x, y, scale=2.0)
    same(by_y.to_dense(), tsfunc.jacrev(func, 1)(x, y, scale=2.0))
    matrix = sparse_jacobian(func, layout=torch.sparse_csr)(x, y, scale=2.0)
    assert matrix.layout is torch.sparse_csr
    same(matrix.to_dense(), found.to_dense().view(6, 12))
    given = torch.ones(6, 12, dtype=torch.bool)
    for sparsity in (given, given.view(2, 3, 3, 4), given.to_sparse(), given.to_sparse_csr()):
        again = sparse_jacobian(func, sparsity=sparsity)(x, y, scale=2.0)
        same(again.to_dense(), found.to_dense())


def test_a_large_system_takes_few_derivatives() -> None:
    x = torch.linspace(0, 1, 3000, dtype=torch.float64)
    found = sparse_jacobian(burgers)(x)
    assert found.values().numel() == 9000
    v = x.cos()
    same(torch.sparse.mm(found, v[:, None])[:, 0], tsfunc.jvp(burgers, (x,), (v,))[1])


def test_it_can_be_differentiated() -> None:
    def total(jacobian: Any) -> Callable[[Tensor], Any]:
        return lambda x: jacobian(x).sin().sum()

    for mode in ("forward", "reverse"):
        ours = total(lambda x, m=mode: sparse_jacobian(burgers, mode=m)(x).to_dense())
        same(tsfunc.grad(ours)(X), tsfunc.grad(total(tsfunc.jacrev(burgers)))(X))


def test_colors() -> None:
    pairs = torch.tensor([[0, 0, 1, 1, 2], [0, 1, 1, 2, 0]])
    found = colors(pairs)
    assert set(found) == {0, 1, 2} and len(set(found.values())) == 2
    assert found[0] != found[1] != found[2]


def test_errors() -> None:
    with pytest.raises(ValueError, match='mode: expected None, "forward" or "reverse"'):
        sparse_jacobian(burgers, mode="both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="layout: expected"):
        sparse_jacobian(burgers, layout=torch.strided)
    with pytest.raises(ValueError, match=r"differentiate by to only contain Tensors.*got .*float"):
        sparse_jacobian(lambda x: x[0])([X, 2.0])
    with pytest.raises(ValueError, match="expected one dtype"):
        sparse_jacobian(lambda x: x[0])([X.float(), X.double()])
    with pytest.raises(ValueError, match="have no tensor"):
        sparse_jacobian(lambda x: X)([])
    with pytest.raises(RuntimeError, match="to return only tensors"):
        sparse_jacobian(lambda x: (x, 2.0))(X)
    with pytest.raises(ValueError, match="or the structure of the result, a tensor for each"):
        sparse_jacobian(lambda x: x[0] * x[1], sparsity=[X, X, X])([X, X])
    with pytest.raises(RuntimeError, match="complex"):
        sparse_jacobian(burgers)(X.to(torch.complex128))
    with pytest.raises(ValueError, match=r"sparsity: expected the output's shape.*\(3, 4\)"):
        sparse_jacobian(burgers, sparsity=torch.ones(3, 4))(X)
    with pytest.raises(RuntimeError, match="Got argnum=2, but only 1 positional inputs"):
        sparse_jacobian(burgers, argnums=2)(X)


def coupled(state: Any, scale: Any) -> Any:
    """Return results in a pytree, from a pytree and a matrix."""
    u, v = state["u"], state["v"]
    return {"out": (u.roll(1) * scale - v, v[:2] ** 2)}


@pytest.mark.parametrize("mode", ["forward", "reverse", None])
@pytest.mark.parametrize("argnums", [0, 1, (0, 1), (1, 0)])
def test_pytrees_of_tensors_give_blocks(argnums: Any, mode: Any) -> None:
    state = {"u": torch.rand(4), "v": torch.rand(4)}
    args = state, torch.rand(3, 4)
    want = jacrev(coupled, argnums)(*args)

    def check(found: Any) -> None:
        assert pytrees.structure_of(found) == pytrees.structure_of(want)
        for block, dense in zip(pytrees.leaves_of(found), pytrees.leaves_of(want), strict=True):
            assert block.layout is torch.sparse_coo
            torch.testing.assert_close(block.to_dense(), dense)

    check(sparse_jacobian(coupled, argnums, mode=mode)(*args))
    pattern = jacobian_sparsity(coupled, argnums)(*args)
    for block, dense in zip(pytrees.leaves_of(pattern), pytrees.leaves_of(want), strict=True):
        assert block.dtype is torch.bool and not (dense != 0)[~block.to_dense()].any()
    check(sparse_jacobian(coupled, argnums, mode=mode, sparsity=pattern)(*args))

    def with_aux(*args: Any) -> Any:
        return coupled(*args), "aux"

    found, aux = sparse_jacobian(with_aux, argnums, has_aux=True, mode=mode)(*args)
    assert aux == "aux"
    check(found)
    several = pytrees.leaves_of(pattern)
    pytrees.leaves_of(jacobian_sparsity(with_aux, argnums, has_aux=True)(*args))
    assert len(several) == len(pytrees.leaves_of(want))


def test_all_blocks_together_are_colored() -> None:
    calls = 0

    def f(x: Any, y: Any) -> Any:
        nonlocal calls
        calls += 1
        return x * y, x.flip(0) - y

    x, y = torch.rand(50), torch.rand(50)
    pattern = jacobian_sparsity(f, (0, 1))(x, y)
    matrix = torch.cat([torch.cat([b.to_dense() for b in row], 1) for row in pattern])
    calls = 0
    blocks = sparse_jacobian(f, (0, 1), sparsity=matrix, chunk_size=1)(x, y)
    assert 2 <= calls <= 4
    torch.testing.assert_close(blocks[0][1].to_dense(), x.diag())
    torch.testing.assert_close(blocks[1][0].to_dense(), torch.eye(50).flip(0))
    grads = grad(lambda x: sparse_jacobian(f, (0, 1))(x, y)[0][1].values().sum())(x)
    assert grads.tolist() == [1.0] * 50


@pytest.mark.parametrize("name", ["mask", "nonzero", "unique"])
def test_results_whose_size_is_data_are_refused(name: str) -> None:
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "mask": lambda x: x[x > 0],
        "nonzero": lambda x: x[(x > 0).nonzero()[:, 0]],
        "unique": torch.unique,
    }
    with pytest.raises(DataDependentError, match="whose size depends on data"):
        sparse_jacobian(functions[name])(torch.randn(6))
