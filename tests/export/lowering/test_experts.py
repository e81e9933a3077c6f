"""A mixture's experts: rows sorted by expert, any load, empty experts and rows of none."""

from __future__ import annotations

import pytest
import torch

from tests.export.lowered import check

GROUPED = """
  input %x : f32[rows, 8]
  input %offsets : i32[4]
  parameter %w : f32[4, 8, 4]
  %r = aten._grouped_mm(%x, %w, %offsets) : f32[rows, 4]
  return %r
"""
DIM = "  dim rows = 7 in 1..64\n"
LOADS = [(2, 3, 5, 7), (0, 0, 7, 7), (7, 7, 7, 7), (0, 1, 1, 7), (0, 0, 0, 7)]


@pytest.mark.parametrize("ends", LOADS)
def test_each_row_meets_the_matrix_of_its_group(ends: tuple[int, ...]) -> None:
    inputs = [torch.randn(7, 8), torch.tensor(ends, dtype=torch.int32)]
    model = check(DIM + GROUPED, {"w": torch.randn(4, 8, 4)}, inputs=inputs)
    assert not {"Loop", "Scan", "If"} & {node.op_type for node in model.graph}


def test_rows_of_no_group_are_zero() -> None:
    transformers = pytest.importorskip("transformers.integrations.moe")
    assert transformers
    body = GROUPED.replace("aten._grouped_mm", "transformers.grouped_mm_fallback")
    inputs = [torch.randn(9, 8), torch.tensor([2, 2, 5, 6], dtype=torch.int32)]
    check(DIM + body, {"w": torch.randn(4, 8, 4)}, inputs=inputs)


def test_a_matrix_per_block_of_rows() -> None:
    check(
        "  input %x : f32[4, seq, 8]\n  parameter %w : f32[4, 8, 4]\n"
        "  %r = aten._grouped_mm(%x, %w) : f32[4, seq, 4]\n  return %r",
        {"w": torch.randn(4, 8, 4)},
    )


@pytest.mark.parametrize(
    "bounds",
    [
        "bins = 4, min = 0, max = 3",
        "bins = 2, min = 1, max = 4",
        "bins = 8, min = -1, max = 2",
        "bins = 5, min = -0.5, max = 3.75",
    ],
)
def test_values_are_counted_by_bin(bounds: str) -> None:
    body = f"  input %x : f32[seq]\n  %r = aten.histc(%x) {{{bounds}}} : f32[{bounds[7]}]\n"
    check(body + "  return %r")
    values = torch.tensor([0.0, 1.0, 1.5, 2.0, 3.0, 3.0, 3.75, 4.0, -1.0, 9.0])
    check(body + "  return %r", inputs=[values])


def test_the_best_experts_and_their_scores() -> None:
    check("  input %x : f32[seq, 8]\n  %r, %i = aten.topk(%x) {k = 2}\n  return %r, %i")
