"""A file isn't told how its inputs lie in memory: a note says where a model computes by that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import attngraph

Ask = Callable[[Tensor], Tensor]


class Asking(nn.Module):
    """(B, N, 8)."""

    def __init__(self, ask: Ask) -> None:
        super().__init__()
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        x = self.ask(x)
        return (x @ x.mT / 4).softmax(-1) @ x


def _in_order(x: Tensor) -> Tensor:
    return 2 * x if x.is_contiguous() else x


def _by_stride(x: Tensor) -> Tensor:
    return 2 * x if x.stride(-1) == 1 else x


def _of_what_is_made_of_it(x: Tensor) -> Tensor:
    """A pointwise operator keeps the order of its input."""
    return x if (x + 1).is_contiguous() else x - 1


def _made_contiguous(x: Tensor) -> Tensor:
    if not x.is_contiguous():
        x = x.contiguous()
    return x.view(-1).view(x.shape)


def _view_or_copy(x: Tensor) -> Tensor:
    flat = x.view(-1) if x.is_contiguous() else x.reshape(-1)
    return flat.view(x.shape)


def _of_its_own(x: Tensor) -> Tensor:
    """Of what is never contiguous, whatever is given."""
    rows = (x @ torch.eye(8)).mT
    return rows.mT if rows.is_contiguous() else 2 * rows.mT


def _notes(ask: Ask, x: Tensor) -> list[str]:
    notes = attngraph.optimize(Asking(ask).eval(), (x,)).report.notes
    return [note for note in notes if "lie in memory" in note]


@pytest.mark.parametrize("ask", [_in_order, _by_stride, _of_what_is_made_of_it])
@pytest.mark.parametrize("x", [torch.randn(2, 6, 8), torch.randn(2, 8, 6).mT], ids=["rows", "mT"])
def test_what_is_computed_by_the_order_in_memory_is_told(ask: Ask, x: Tensor) -> None:
    (note,) = _notes(ask, x)
    assert "test_strides.py" in note
    assert "is_contiguous()" in note or "stride(-1)" in note


@pytest.mark.parametrize("ask", [_made_contiguous, _view_or_copy, _of_its_own])
@pytest.mark.parametrize("x", [torch.randn(2, 6, 8), torch.randn(2, 8, 6).mT], ids=["rows", "mT"])
def test_what_only_spares_a_copy_is_not(ask: Ask, x: Tensor) -> None:
    assert not _notes(ask, x)
