"""Triangular systems, in every form of the call; the other triangle holds numbers as well."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from attngraph.errors import AttngraphError
from attngraph.export.lowering.lower import lower
from attngraph.frontend.capture import capture
from tests.export.lowered import module, run, session_of

pytestmark = pytest.mark.wide

FORMS: tuple[tuple[Mapping[str, bool], tuple[int, ...], tuple[int, ...]], ...] = (
    ({"upper": False}, (2, 7, 7), (2, 7, 3)),
    ({"upper": True}, (2, 8, 8), (2, 8, 3)),
    ({"upper": False, "unitriangular": True}, (3, 1, 16, 16), (4, 16, 2)),
    ({"upper": True, "unitriangular": True}, (5, 5), (2, 5, 1)),
    ({"upper": False, "left": False}, (2, 7, 7), (2, 3, 7)),
    ({"upper": True, "left": False, "unitriangular": True}, (6, 6), (2, 3, 6)),
    ({"upper": False, "unitriangular": True}, (2, 1, 1), (3, 1, 1, 2)),
    ({"upper": False}, (1, 1), (2, 1, 4)),
)


@pytest.mark.parametrize(("form", "matrix", "given"), FORMS, ids=str)
def test_a_triangle_is_solved(
    form: Mapping[str, bool], matrix: tuple[int, ...], given: tuple[int, ...]
) -> None:
    def solved(a: Tensor, b: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(a, b, **form)

    torch.manual_seed(0)
    size = matrix[-1]
    args = (0.3 * torch.randn(matrix) + 2 * torch.eye(size), torch.randn(given))
    actual = run(session_of(lower(capture(module(solved, 2), args).graph)), args)[0]
    wide = solved(*(each.double() for each in args))
    torch.testing.assert_close(actual, wide.float(), rtol=2e-6, atol=2e-6)


def test_a_large_triangle_is_refused() -> None:
    args = (torch.eye(65), torch.randn(65, 1))
    with pytest.raises(AttngraphError, match=r"linalg_solve_triangular"):
        lower(
            capture(
                module(lambda a, b: torch.linalg.solve_triangular(a, b, upper=False), 2), args
            ).graph
        )
