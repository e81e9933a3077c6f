"""Systems of equations whose matrix is a triangle, as in formulas.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attngraph.export.lowering.fallback.pointwise_formulas import formula

_MOST_ROWS = 64  # of each there is a quotient in the file


@formula("aten.linalg_solve_triangular")
def _solve_triangular(
    matrix: Tensor, given: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Any:
    """Substitution, by halves: what the first half gives is taken from the second's equations.

    Of the matrix (…, n, n) only the triangle is read. No inverse is made, so the error is that of
    eager's substitution.
    """
    size = matrix.shape[-1]
    if not isinstance(size, int) or not 0 < size <= _MOST_ROWS:
        return NotImplemented
    if not left:  # X A = B
        matrix, given, upper = matrix.mT, given.mT, not upper
    if upper:  # the last equation has one unknown
        matrix, given = matrix.flip(-2, -1), given.flip(-2)
    found = _substituted(matrix, given, unitriangular)
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
