"""Systems of linear equations, inverses and determinants, by factors of their matrices.

The factors themselves, and triangles that are large, are loops (export/lowering/ops/solving.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attngraph.export.lowering.fallback.pointwise_formulas import formula

_MOST_ROWS = 64  # of each there is a quotient in the file


_MOST_SQUARES = 20


def is_small(size: Any) -> bool:
    """Whether a triangle of as many rows is solved by halves, and not in a loop over its rows."""
    return isinstance(size, int) and size <= _MOST_ROWS


@formula("aten.linalg_solve_triangular")
def _solve_triangular(
    matrix: Tensor, given: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Any:
    """Substitution, by halves: what the first half gives is taken from the second's equations.

    Of the matrix (…, n, n) only the triangle is read. No inverse is made, so the error is that of
    eager's substitution.
    """
    size = matrix.shape[-1]
    if size == 0 or (left and not upper and not is_small(size)):
        return NotImplemented
    if not left:  # X A = B
        matrix, given, upper = matrix.mT, given.mT, not upper
    if upper:  # the last equation has one unknown
        matrix, given = matrix.flip(-2, -1), given.flip(-2)
    if is_small(size):
        found = _substituted(matrix, given, unitriangular)
    else:
        found = torch.linalg.solve_triangular(
            matrix, given, upper=False, unitriangular=unitriangular
        )
    found = found.flip(-2) if upper else found
    return found if left else found.mT


def _substituted(lower: Tensor, given: Tensor, is_unit: bool) -> Tensor:
    size = lower.shape[-1]
    if size == 1:
        return given * torch.ones_like(lower) if is_unit else given / lower
    half = size // 2
    first = _substituted(lower[..., :half, :half], given[..., :half, :], is_unit)
    rest = given[..., half:, :] - lower[..., half:, :half] @ first
    return torch.cat([first, _substituted(lower[..., half:, half:], rest, is_unit)], -2)


@formula("aten._linalg_solve_ex")
def _solve(
    matrix: Tensor, given: Tensor, *, left: bool = True, check_errors: bool = False
) -> tuple[Tensor | None, ...]:
    """X of A X = B, or of X A = B; B may be one vector (…, n) for each matrix (…, n, n)."""
    is_vector = given.ndim == 1 or (
        given.ndim == matrix.ndim - 1 and given.shape == matrix.shape[:-1]
    )
    given = given[..., None] if is_vector else given
    if not left:
        matrix, given = matrix.mT, given.mT
    found, upper = _solved(matrix, given)
    found = found if left else found.mT
    return found[..., 0] if is_vector else found, None, None, _first_zero(upper)


@formula("aten.linalg_inv_ex")
def _inverse(matrix: Tensor, *, check_errors: bool = False) -> tuple[Tensor, Tensor]:
    unit = torch.eye(matrix.shape[-1], dtype=matrix.dtype)
    found, upper = _solved(matrix, unit)
    return found, _first_zero(upper)


def _solved(matrix: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
    """A⁻¹ B, and U of A = P L U."""
    order, lower, upper = torch.linalg.lu(matrix)
    half = torch.linalg.solve_triangular(lower, order.mT @ given, upper=False, unitriangular=True)
    return torch.linalg.solve_triangular(upper, half, upper=True), upper


def _first_zero(upper: Tensor) -> Tensor:
    """LAPACK's info: the number of the first pivot that is 0, from 1 on, or 0."""
    zeros = (upper.diagonal(dim1=-2, dim2=-1) == 0).to(torch.int32)
    return torch.where(zeros.amax(-1) > 0, zeros.argmax(-1) + 1, 0).to(torch.int32)


@formula("aten._linalg_slogdet")
def _log_determinant(matrix: Tensor) -> tuple[Tensor | None, ...]:
    """The determinant's sign and the logarithm of its size, by the pivots."""
    order, _, upper = torch.linalg.lu(matrix)
    pivots = upper.diagonal(dim1=-2, dim2=-1)
    return torch.det(order) * pivots.sign().prod(-1), pivots.abs().log().sum(-1), None, None


@formula("aten.logdet")
def _log_of_determinant(matrix: Tensor) -> Tensor:
    """Of a matrix whose determinant may be too large or small for its dtype."""
    sign, log = torch.linalg.slogdet(matrix)
    return torch.where(sign < 0, torch.nan, log)


@formula("aten.cholesky_solve")
def _cholesky_solve(given: Tensor, factor: Tensor, upper: bool = False) -> Tensor:
    """X of L Lᵀ X = B."""
    lower = factor.mT if upper else factor
    half = torch.linalg.solve_triangular(lower, given, upper=False)
    found: Tensor = torch.linalg.solve_triangular(lower.mT, half, upper=True)
    return found


@formula("aten.cholesky_inverse")
def _cholesky_inverse(factor: Tensor, upper: bool = False) -> Any:
    return _cholesky_solve(torch.eye(factor.shape[-1], dtype=factor.dtype), factor, upper)


@formula("aten.linalg_matrix_exp")
def _matrix_exponential(matrix: Tensor) -> Any:
    """e^A as e^(A / 2ˢ) squared s times, where the largest sum of a column of |A| / 2ˢ is ≤ 2.

    Taylor's sum of the small one ends where the next term is below the dtype's rounding. Beyond
    2²¹ it is NaN: no digit of e^A would be left.
    """
    terms = 18 if matrix.dtype == torch.float32 else 28  # 2ⁿ / n! is below an ulp of e⁻²
    largest = matrix.abs().sum(-2, keepdim=True).amax(-1, keepdim=True)
    count = torch.clamp(torch.ceil(torch.log2(largest)) - 1, 0, None)
    small = matrix * torch.exp2(-count)
    unit = torch.eye(matrix.shape[-1], dtype=matrix.dtype)
    power = unit + small / terms
    for term in range(terms - 1, 0, -1):  # Horner: 1 + x (1 + x/2 (1 + x/3 …))
        power = unit + small @ power / term
    for step in range(_MOST_SQUARES):
        power = torch.where(step < count, power @ power, power)
    return torch.where(count > _MOST_SQUARES, torch.nan, power)
