"""Matrix operators as decompositions that can be differentiated any number of times.

torch's derivative formulas of these operators solve with factors that the operator has saved, and
take the factors as constants. Other formulas have tangents that are wrong for some arguments
(``cholesky_inverse``, ``triangular_solve``), or that their pullbacks do not transpose (``eigh``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def _signs(pivots: Tensor) -> Tensor:
    """Return the signs of the permutations that the pivots of LU factors describe."""
    positions = torch.arange(1, pivots.shape[-1] + 1, device=pivots.device)
    return 1 - 2 * ((pivots != positions).sum(-1) % 2)


def _diagonal(factors: Tensor) -> Tensor:
    return factors.diagonal(dim1=-2, dim2=-1)


def _swap_with_last(position: Tensor, size: int) -> Tensor:
    """Return the permutation that swaps a position with the last one."""
    positions = torch.arange(size, device=position.device)
    position = position.unsqueeze(-1)
    moved = torch.where(positions == position, size - 1, positions)
    return torch.where(positions == size - 1, position, moved)


def linalg_det(a: Tensor) -> Any:
    """``aten::_linalg_det``, even for singular matrices with one zero singular value.

    The row and the column with the largest minor become the last ones. The determinant is that
    minor times its Schur complement, which is smooth where it is zero.
    """
    size = a.shape[-1]
    if size == 0:
        return NotImplemented
    # The factors below are constants: they choose the minor.
    factors, pivots, _ = torch.linalg.lu_factor_ex(a.detach())
    tiny = torch.finfo(a.dtype).eps
    diagonal = _diagonal(factors)
    regular = factors + torch.diag_embed(torch.where(diagonal == 0, tiny, 0.0).to(a.dtype))
    eye = torch.eye(size, dtype=a.dtype, device=a.device).expand(a.shape)
    inverse = torch.linalg.lu_solve(regular, pivots, eye)
    position = inverse.abs().flatten(-2).argmax(-1)
    row, column = position % size, position // size

    rows = _swap_with_last(row, size).unsqueeze(-1).expand(a.shape)
    columns = _swap_with_last(column, size).unsqueeze(-2).expand(a.shape)
    moved = a.gather(-2, rows).gather(-1, columns)
    swaps = (row != size - 1).to(torch.long) + (column != size - 1).to(torch.long)
    det = moved[..., -1, -1]
    if size > 1:
        minor, order, _ = torch.linalg.lu_factor_ex(moved[..., :-1, :-1])
        solved = torch.linalg.lu_solve(minor, order, moved[..., :-1, -1:])
        det = det - (moved[..., -1:, :-1] @ solved)[..., 0, 0]
        det = det * _diagonal(minor).prod(-1) * _signs(order)
    return det * (1 - 2 * (swaps % 2)), factors, pivots


def linalg_slogdet(a: Tensor) -> tuple[Tensor, ...]:
    """``aten::_linalg_slogdet``."""
    factors, pivots, _ = torch.linalg.lu_factor_ex(a)
    diagonal = _diagonal(factors)
    sign = diagonal.sgn().prod(-1) * _signs(pivots)
    return sign, diagonal.abs().log().sum(-1), factors.detach(), pivots


def linalg_solve(
    a: Tensor, b: Tensor, *, left: bool = True, check_errors: bool = False
) -> tuple[Tensor, ...]:
    """``aten::_linalg_solve_ex``."""
    factors, pivots, info = torch.linalg.lu_factor_ex(a, check_errors=check_errors)
    is_vector = b.dim() == 1 or (b.dim() == a.dim() - 1 and b.shape == a.shape[:-1])
    matrix = b.unsqueeze(-1) if is_vector else b
    result = torch.linalg.lu_solve(factors, pivots, matrix, left=left)
    return result.squeeze(-1) if is_vector else result, factors.detach(), pivots, info


def triangular_solve(
    b: Tensor, a: Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Tensor, Tensor]:
    """``aten::triangular_solve``, which also returns the matrix."""
    matrix = a.mT if transpose else a
    solve = torch.linalg.solve_triangular
    return solve(matrix, b, upper=upper != transpose, unitriangular=unitriangular), a.clone()


def cholesky_inverse(factor: Tensor, upper: bool = False) -> Tensor:
    """``aten::cholesky_inverse``, with torch's derivative for cotangents.

    The value depends on one triangle of the factor, and the derivative on the whole factor.
    """

    def product(x: Tensor) -> Tensor:
        return x.mH @ x if upper else x @ x.mH

    whole = product(factor)
    beyond = product(factor.detach()) - product(
        factor.detach().triu() if upper else factor.detach().tril()
    )
    return torch.linalg.inv(whole - beyond)


def _first_order(a: Tensor) -> tuple[Tensor, Tensor]:
    """Return a tensor without its tangent, and zeros with this tangent."""
    primal: Tensor = forward_ad.unpack_dual(a).primal
    return primal, a - primal


def _between_eigenvectors(values: Tensor, change: Tensor) -> Tensor:
    """Return a change of a matrix, in the basis of its eigenvectors, divided by their gaps.

    The result has a diagonal of zeros.
    """
    eye = torch.eye(values.shape[-1], dtype=values.dtype, device=values.device)
    gaps = values.unsqueeze(-2) - values.unsqueeze(-1) + eye
    return change / gaps * (1 - eye)


def linalg_eig(a: Tensor) -> tuple[Tensor, Tensor]:
    """``aten::linalg_eig``, with torch's choice of the eigenvectors' lengths and phases.

    Values and vectors are those of the matrix without its tangent, plus a perturbation of first
    order. The same vectors are in both, so that a derivative of the two together does not depend on
    phases.
    """
    primal, change = _first_order(a)
    values, vectors = torch.linalg.eig(primal)
    moved = torch.linalg.solve(vectors, change.to(vectors.dtype) @ vectors)
    turned = vectors @ _between_eigenvectors(values, moved)
    lengths = (vectors.conj() * turned).sum(-2, keepdim=True).real
    return values + _diagonal(moved), vectors + turned - vectors * lengths


def linalg_eigh(a: Tensor, UPLO: str = "L", compute_v: bool = True) -> Any:
    """``aten::_linalg_eigh``, as :func:`linalg_eig`.

    The tangent stands for its Hermitian part, as cotangents do in torch's backward formula.
    """
    if not compute_v:
        return NotImplemented
    primal, change = _first_order(a)
    values, vectors = torch.linalg.eigh(primal, UPLO=UPLO)
    moved = vectors.mH @ ((change + change.mH) / 2) @ vectors
    turned = vectors @ _between_eigenvectors(values, moved)
    return values + _diagonal(moved).real, vectors + turned


def diagonal_scatter(x: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> Any:
    """``aten::diagonal_scatter`` of real values in a complex tensor, as in the formula of ``eigh``.

    The cotangent of the values is real, and torch's is complex.
    """
    if not x.is_complex() or source.is_complex():
        return NotImplemented
    return torch.diagonal_scatter(x, source.to(x.dtype), *args, **kwargs)


# torch's formulas take the factors as constants.
FACTORED: dict[str, Callable[..., Any]] = {
    "aten::_linalg_slogdet": linalg_slogdet,
    "aten::_linalg_solve_ex": linalg_solve,
}
# torch's tangents can't be differentiated.
PERTURBED: dict[str, Callable[..., Any]] = {"aten::linalg_eig": linalg_eig}
# torch's tangents are wrong, or are not those that its pullbacks transpose.
PUSHED: dict[str, Callable[..., Any]] = {
    "aten::_linalg_eigh": linalg_eigh,
    "aten::triangular_solve": triangular_solve,
    "aten::cholesky_inverse": cholesky_inverse,
}
# torch's formulas are parts of backward formulas that can't be differentiated.
BACKWARD: dict[str, Callable[..., Any]] = {"aten::diagonal_scatter": diagonal_scatter}
