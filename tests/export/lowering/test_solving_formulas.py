"""Triangular systems, in every form of the call; the other triangle holds numbers as well."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.export import Dim

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
    with pytest.raises(
        AttngraphError, match=r"solve_triangular.* no ONNX lowering for these sizes"
    ):
        lower(
            capture(
                module(lambda a, b: torch.linalg.solve_triangular(a, b, upper=False), 2), args
            ).graph
        )


def test_triangles_of_a_number_of_chunks_that_is_open_are_solved() -> None:
    """As a delta rule in chunks has them: torch asks how many chunks there are, to copy or not."""

    def solved(x: Tensor) -> Tensor:
        split = x.unflatten(-1, (2, 4)).transpose(1, 2)
        heads = F.pad(split, (0, 0, 0, -x.shape[1] % 5)).unflatten(2, (-1, 5))
        below = torch.eye(5, dtype=x.dtype) + (heads @ heads.mT / 4).tril(-1)
        form = {"upper": False, "unitriangular": True}
        return torch.linalg.solve_triangular(below, heads, **form).sum((1, 2))

    torch.manual_seed(0)
    shapes = ({0: Dim("batch"), 1: Dim("length")},)
    captured = capture(module(solved, 1), (torch.randn(2, 13, 8),), dynamic_shapes=shapes)
    session = session_of(lower(captured.graph))
    for batch, length in ((1, 1), (2, 5), (3, 6), (1, 10), (2, 67)):
        x = torch.randn(batch, length, 8)
        wide = solved(x.double())
        torch.testing.assert_close(run(session, (x,))[0], wide.float(), rtol=1e-5, atol=1e-5)
