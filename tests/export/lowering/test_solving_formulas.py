"""Systems of equations, factors of matrices, and what is made of them, beside torch in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.export import Dim

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
    ({"upper": False}, (2, 65, 65), (2, 65, 3)),
    ({"upper": True, "unitriangular": True}, (70, 70), (3, 70, 2)),
    ({"upper": True, "left": False}, (2, 66, 66), (1, 3, 66)),
)


def _definite(x: Tensor) -> Tensor:
    """(…, n, n) whose eigenvalues are 1 and more."""
    return x @ x.mT / x.shape[-1] + torch.eye(x.shape[-2], dtype=x.dtype)


def _swapped(x: Tensor) -> Tensor:
    """(…, n, n) without a number on its diagonal but the last, so that each pivot is elsewhere."""
    return _definite(x).roll(1, -2)


MADE: dict[str, Callable[[Tensor], Any]] = {
    "inverse": lambda x: torch.linalg.inv(_swapped(x)),
    "inverse and info": lambda x: torch.linalg.inv_ex(_swapped(x)),
    "solve": lambda x: torch.linalg.solve(_swapped(x), x),
    "solve for a vector": lambda x: torch.linalg.solve(_swapped(x), x[..., 0]),
    "solve for one vector": lambda x: torch.linalg.solve(_swapped(x[0]), x[0, :, 0]),
    "solve from the right": lambda x: torch.linalg.solve(_swapped(x), x.mT, left=False),
    "solve broadcast": lambda x: torch.linalg.solve(_swapped(x[:1]), x),
    "factors": lambda x: torch.linalg.lu(_swapped(x)),
    "log determinant": lambda x: torch.linalg.slogdet(_swapped(x)),
    "log of determinant": lambda x: torch.logdet(40 * _definite(x)),
    "cholesky": lambda x: torch.linalg.cholesky(_definite(x)),
    "cholesky, upper": lambda x: torch.linalg.cholesky(_definite(x).triu(), upper=True),
    "cholesky and info": lambda x: torch.linalg.cholesky_ex(_definite(x)),
    "cholesky_solve": lambda x: torch.cholesky_solve(x, torch.linalg.cholesky(_definite(x))),
    "cholesky_inverse": lambda x: torch.cholesky_inverse(_definite(x).triu(), upper=True),
    "exponential": lambda x: torch.matrix_exp(x @ x.mT / 16),
    "exponential of a large one": lambda x: torch.matrix_exp(3 * (x @ x.mT - x @ x.mT * 2)),
}
QR: dict[str, Callable[[Tensor], Any]] = {
    "tall": torch.linalg.qr,
    "tall, all of it": lambda x: torch.linalg.qr(x, mode="complete"),
    "wide": lambda x: torch.linalg.qr(x.mT),
    "square": lambda x: torch.linalg.qr(x[..., :5, :]),
    "zero below the diagonal": lambda x: torch.linalg.qr(x.triu()),
}


@pytest.mark.parametrize(("form", "matrix", "given"), FORMS, ids=str)
def test_a_triangle_is_solved(
    form: Mapping[str, bool], matrix: tuple[int, ...], given: tuple[int, ...]
) -> None:
    def solved(a: Tensor, b: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(a, b, **form)

    torch.manual_seed(0)
    size = matrix[-1]
    args = (0.1 * torch.randn(matrix) + 2 * torch.eye(size), torch.randn(given))
    actual = run(session_of(lower(capture(module(solved, 2), args).graph)), args)[0]
    wide = solved(*(each.double() for each in args))
    torch.testing.assert_close(actual, wide.float(), rtol=2e-6, atol=2e-6)


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


def _agree(session: Any, function: Callable[[Tensor], Any], x: Tensor) -> None:
    """Within 8 times of what eager itself is off by in float32, or of a rounding of each."""
    actual = run(session, (x,))
    wide, eager = (_flat(function(each)) for each in (x.double(), x))
    for ours, theirs, exact in zip(actual, eager, wide, strict=True):
        assert ours.dtype == theirs.dtype
        scale = float(exact.double().norm()) + 1e-30
        errors = [float((each.double() - exact).norm()) / scale for each in (ours, theirs)]
        assert errors[0] <= 8 * max(errors[1], 2**-24), errors


def _flat(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


@pytest.mark.parametrize("name", MADE)
def test_matrices_of_any_size(name: str) -> None:
    """From one row to more than are solved by halves."""
    torch.manual_seed(0)
    shapes = ({0: Dim("batch"), 1: Dim("size")},)
    captured = capture(module(MADE[name], 1), (torch.randn(2, 7, 5),), dynamic_shapes=shapes)
    session = session_of(lower(captured.graph))
    for batch, size in ((1, 1), (2, 2), (3, 16), (1, 70)):
        _agree(session, MADE[name], torch.randn(batch, size, 5))


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("size", [1, 6, 66])
def test_matrices_of_one_size(name: str, size: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, size, 5)
    _agree(session_of(lower(capture(module(MADE[name], 1), (x,)).graph)), MADE[name], x)


@pytest.mark.parametrize("name", QR)
def test_orthogonal_factors_have_the_signs_of_torch(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 9, 5)
    captured = capture(module(QR[name], 1), (x,), dynamic_shapes=({0: Dim("batch")},))
    session = session_of(lower(captured.graph))
    for given in (x, torch.randn(1, 9, 5), torch.randn(4, 9, 5)):
        _agree(session, QR[name], given)


def test_what_torch_raises_an_error_for_is_no_number() -> None:
    singular, indefinite = torch.ones(1, 3, 3), torch.diag(torch.tensor([1.0, -1.0, 2.0]))[None]
    session = session_of(lower(capture(module(torch.linalg.inv, 1), (torch.eye(3)[None],)).graph))
    assert not torch.isfinite(run(session, (singular,))[0]).any()
    roots = module(torch.linalg.cholesky, 1)
    session = session_of(lower(capture(roots, (torch.eye(3)[None],)).graph))
    assert torch.isnan(run(session, (indefinite,))[0]).any()


@pytest.mark.parametrize(
    "rows",
    [
        [[0.0, 0, 0], [0, 0, 0], [0, 0, 0]],
        [[1.0, 1, 2], [1, 1, 4], [3, 3, 7]],
        [[0.0, 1, 2], [0, 3, 4], [0, 5, 1]],
        [[1.0, 2, 4], [2, 4, 8], [0, 0, 1]],
    ],
    ids=str,
)
def test_pivots_are_those_of_torch_where_several_will_do(rows: list[list[float]]) -> None:
    def made(x: Tensor) -> tuple[Tensor, ...]:
        order, lower, upper = torch.linalg.lu(x)
        return order, order @ lower @ upper, upper.diagonal(), *torch.linalg.slogdet(x)

    x = torch.tensor(rows)
    actual = run(session_of(lower(capture(module(made, 1), (x,)).graph)), (x,))
    for ours, theirs in zip(actual, made(x), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_info_tells_where_a_factor_ends() -> None:
    singular = torch.tensor(
        [[[1.0, 2, 3], [2, 4, 6], [0, 1, 1]], [[1, 0, 0], [0, 2, 0], [0, 0, 3]]]
    )
    made = module(torch.linalg.inv_ex, 1)
    info = run(session_of(lower(capture(made, (singular,)).graph)), (singular,))[1]
    torch.testing.assert_close(info, torch.linalg.inv_ex(singular).info)
    indefinite = torch.diag_embed(torch.tensor([[1.0, -1.0, 2.0], [1.0, 1.0, 2.0]]))
    made = module(torch.linalg.cholesky_ex, 1)
    info = run(session_of(lower(capture(made, (indefinite,)).graph)), (indefinite,))[1]
    torch.testing.assert_close(info, torch.linalg.cholesky_ex(indefinite).info)
