"""Linear algebra against the loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tsfunc
import tsfunc.ops
from tests.ops.harness import check, normal

aten = torch.ops.aten


def positive(*shape: int) -> torch.Tensor:
    x = normal(*shape)
    return x @ x.mT + torch.eye(shape[-1], dtype=x.dtype)


# Operators that torch removed after 2.13.
OLDER = [aten.cholesky] if hasattr(aten, "cholesky") else []
LEADS: list[tuple[int, ...]] = [(), (2,)]


@pytest.mark.parametrize("lead", LEADS)
def test_functions_of_one_matrix(lead: tuple[int, ...]) -> None:
    x, s = normal(*lead, 4, 4), positive(*lead, 4, 4)
    for op in (
        aten.linalg_inv_ex, aten.linalg_cholesky_ex, *OLDER, aten._linalg_eigh,
        aten._linalg_det, aten._linalg_slogdet, aten.linalg_lu, aten.linalg_lu_factor_ex,
        aten.linalg_ldl_factor_ex, aten.linalg_matrix_exp, aten._linalg_svd, aten.linalg_eig,
        aten._linalg_eigvals,
    ):  # fmt: skip
        assert check(op.default, s)
    assert check(aten.cholesky_inverse.default, aten.linalg_cholesky(s))
    assert check(aten.linalg_lu.default, x[..., :3], pivot=True)
    assert check(aten._linalg_eigh.default, s, "U", False)
    assert check(aten._linalg_svd.default, x[..., :3], False, False)
    for mode in ("reduced", "complete", "r"):
        assert check(aten.linalg_qr.default, x[..., :3], mode)
    assert check(aten.geqrf.default, x[..., :3])
    assert check(aten.linalg_pinv.atol_rtol_tensor, x[..., :3])


def test_matrix_exp_of_many_matrices() -> None:
    """The kernel accepts matrices along several dims only if those dims are contiguous."""
    x = normal(5, 4, 4, 2) / 4
    want = torch.stack([torch.matrix_exp(e) for e in x.unbind(-1)])
    torch.testing.assert_close(tsfunc.vmap(torch.matrix_exp, -1)(x), want)


@pytest.mark.parametrize("lead", LEADS)
def test_functions_of_several_matrices(lead: tuple[int, ...]) -> None:
    x = normal(*lead, 4, 3)
    a, tau = aten.geqrf(x)
    assert check(aten.linalg_householder_product.default, a, tau)
    assert check(aten.ormqr.default, a, tau, normal(*lead, 4, 2), choices=[(0,), (2,), (0, 1, 2)])
    lu, pivots = aten.linalg_lu_factor(normal(*lead, 4, 4))
    assert check(aten.lu_unpack.default, lu, pivots, choices=[(0,)])
    ld, places, _ = aten.linalg_ldl_factor_ex(positive(*lead, 4, 4))
    choices = [(0,), (2,), (0, 2)]
    assert check(aten.linalg_ldl_solve.default, ld, places, normal(*lead, 4, 2), choices=choices)


@pytest.mark.parametrize("dim", [-1, 0])
def test_cross(dim: int) -> None:
    assert check(aten.linalg_cross.default, normal(3, 3), normal(3, 3) * 2, dim=dim)
    assert check(aten.linalg_cross.default, normal(2, 3), normal(1, 3))
    assert check(aten.linalg_cross.default, normal(3), normal(3))


SOLVE_SHAPES = [
    ((4, 4), (4, 2)), ((4, 4), (4,)), ((2, 4, 4), (2, 4, 3)), ((2, 4, 4), (4, 3)),
    ((4, 4), (2, 4, 3)), ((2, 4, 4), (2, 4)),
]  # fmt: skip


@pytest.mark.parametrize("shapes", SOLVE_SHAPES)
def test_solve(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    a, b = positive(*shapes[0]), normal(*shapes[1])
    op = aten._linalg_solve_ex.default
    assert check(op, a, b, choices=[(0,), (1,), (0, 1)])
    if len(shapes[1]) > 1 and shapes != SOLVE_SHAPES[-1]:
        assert check(op, a, b.mT, left=False)


@pytest.mark.parametrize("shapes", [s for s in SOLVE_SHAPES if len(s[1]) > 1][:-1])
def test_solve_with_factors(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    a, b = positive(*shapes[0]), normal(*shapes[1])
    for upper in (False, True):
        assert check(aten.linalg_solve_triangular.default, a, b, upper=upper)
        assert check(aten.linalg_solve_triangular.default, a, b.mT, upper=upper, left=False)
        assert check(aten.triangular_solve.default, b, a, upper)
        assert check(aten.cholesky_solve.default, b, aten.linalg_cholesky(a, upper=upper), upper)
    lu, pivots = aten.linalg_lu_factor(a)
    choices = [(0,), (2,), (0, 2)]
    assert check(aten.linalg_lu_solve.default, lu, pivots, b, choices=choices)
    assert check(aten.linalg_lu_solve.default, lu, pivots, b.mT, left=False, choices=choices)
    assert check(aten.linalg_lu_solve.default, lu, pivots, b, adjoint=True, choices=choices)


@pytest.mark.parametrize("driver", ["gels", "gelsy", "gelsd", "gelss"])
def test_lstsq(driver: str) -> None:
    for lead in LEADS:
        for m, n in ((5, 3), (3, 5), (4, 4)):
            args = (normal(*lead, m, n), normal(*lead, m, 2))
            assert check(aten.linalg_lstsq.default, *args, driver=driver)
            if lead:  # without leading dims the kernel refuses a vector
                args = (normal(*lead, m, n), normal(*lead, m))
                check(aten.linalg_lstsq.default, *args, driver=driver)


@pytest.mark.parametrize("hermitian", [False, True])
@pytest.mark.parametrize("names", [("rtol",), ("atol",), ("atol", "rtol")])
def test_one_matrix_and_several_tolerances(names: tuple[str, ...], hermitian: bool) -> None:
    x = positive(4, 4)
    tolerances = torch.linspace(0, 2, 6) * torch.linalg.svdvals(x).median()

    def rank(tolerance: torch.Tensor) -> torch.Tensor:
        given = {"atol": tolerance, "rtol": tolerance / 20}
        chosen = {name: given[name] for name in names}
        return torch.linalg.matrix_rank(x, hermitian=hermitian, **chosen)

    assert torch.equal(tsfunc.vmap(rank)(tolerances), torch.stack([rank(t) for t in tolerances]))


@pytest.mark.parametrize("names", [("atol",), ("rtol",), ("atol", "rtol")])
@pytest.mark.parametrize("op", [torch.linalg.matrix_rank, torch.linalg.pinv])
@pytest.mark.parametrize("in_dims", [(0, 0), (0, None), (2, 0), (None, 0)])
def test_a_tolerance_for_each_example(
    in_dims: tuple[int | None, int | None], op: Any, names: tuple[str, ...]
) -> None:
    whole = torch.randn(3, 2, 4, 2, dtype=torch.float64)
    x = whole[0] if in_dims[0] is None else whole.movedim(0, in_dims[0])
    tolerances = torch.tensor([0.1, 0.5, 2.0], dtype=torch.float64)
    tolerance = tolerances[1] if in_dims[1] is None else tolerances

    def f(x: torch.Tensor, tolerance: torch.Tensor) -> Any:
        return op(x, **{name: tolerance / (i + 1) for i, name in enumerate(names)})

    examples = [
        (x if in_dims[0] is None else whole[i], tolerance if in_dims[1] is None else tolerances[i])
        for i in range(3)
    ]
    expected = torch.stack([f(*example) for example in examples])
    torch.testing.assert_close(tsfunc.vmap(f, in_dims)(x, tolerance), expected)


@pytest.mark.parametrize("columns", [None, 1, 3])
@pytest.mark.parametrize("choices", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("left", [True, False])
def test_solutions_have_the_shape_of_the_right_side(
    left: bool, choices: tuple[int, ...], columns: int | None
) -> None:
    a, wide = normal(4, 4) + 4 * torch.eye(4), normal(4, columns or 1)
    b = wide[:, 0] if columns is None else wide if left else wide.mT.contiguous()
    if columns is None and not left:
        return
    op = torch.ops.aten._linalg_solve_ex.default
    assert check(op, a, b, left=left, choices=[choices])
    assert check(torch.ops.aten.linalg_solve.default, a, b, left=left, choices=[choices])


def test_an_error_names_the_example_that_it_is_about() -> None:
    codes, bad = torch.zeros(3, 4, dtype=torch.int32), int(torch.randint(3, ()))
    codes[bad, 2] = 2

    def checked(code: torch.Tensor) -> torch.Tensor:
        torch.ops.aten._linalg_check_errors(code, "linalg.inv", is_matrix=True)
        return code + 1

    with pytest.raises(RuntimeError, match=rf"\(Batch element {bad}\): The diagonal element 2"):
        tsfunc.vmap(checked)(codes[:, 2])
    nested = tsfunc.vmap(tsfunc.vmap(checked), 1, 1)
    with pytest.raises(RuntimeError, match="The diagonal element 2"):
        nested(codes)
    assert nested(codes * 0).eq(1).all()
