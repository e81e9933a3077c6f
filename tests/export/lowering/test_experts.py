"""A mixture's experts: rows sorted by expert, any load, empty experts and rows of none."""

from __future__ import annotations

import pytest
import torch

from attngraph.dialect.experts import ACTIVATIONS, GATED
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
    assert len(list(model.graph)) <= 4 + 16, "a product for each group, and how rows are split"
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


MIXTURE = """
  input %x : f32[seq, 8]
  input %scores : f32[seq, 4]
  parameter %up : f32[4, {width}, 8]
  parameter %down : f32[4, 8, 12]
  parameter %b : f32[4, {width}]
  parameter %c : f32[4, 8]
  %negated = aten.neg(%x)
  {chosen}
  %r = aten.neg(%y)
  return %r
"""
ROUTED = (
    "%y = attn.routed_moe(%negated, %scores, %up, %down, %b, %c) "
    "{{activation = {kind}, count = {count}, normalized = {normalized}{more}}}"
)
GIVEN = """%weights, %experts = aten.topk(%scores) {k = 2}
  %positive = aten.relu(%weights)
  %y = attn.moe(%negated, %positive, %experts, %up, %down) {activation = "silu"}"""


def _weights(width: int) -> dict[str, torch.Tensor]:
    shapes = {"up": (4, width, 8), "down": (4, 8, 12), "b": (4, width), "c": (4, 8)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("normalized", ["true", "false"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_mixture_between_two_nodes(count: int, normalized: str) -> None:
    """There a kernel may be handed its input's buffer for its output."""
    node = ROUTED.format(kind='"silu"', count=count, normalized=normalized, more="")
    model = check(MIXTURE.format(width=12, chosen=node), _weights(12))
    assert sum(node.op_type == "MoE" for node in model.graph) == 1
    assert len(list(model.graph)) <= 12


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_each_activation(kind: str) -> None:
    more = ", alpha = 1.5, beta = 0.5, limit = 0.75" if kind == GATED else ""
    width = 24 if kind == GATED else 12
    node = ROUTED.format(kind=f'"{kind}"', count=2, normalized="true", more=more)
    check(MIXTURE.format(width=width, chosen=node), _weights(width))


@pytest.mark.parametrize("normalized", ["true", "false"])
def test_rows_whose_scores_have_no_softmax_are_nan(normalized: str) -> None:
    """The kernel by itself gives numbers."""
    node = ROUTED.format(kind='"silu"', count=2, normalized=normalized, more="")
    scores = torch.randn(5, 4)
    scores[0] = -torch.inf
    scores[1, 2] = torch.nan
    scores[2, 1] = torch.inf
    scores[3, 1] = -torch.inf
    check(MIXTURE.format(width=12, chosen=node), _weights(12), inputs=[torch.randn(5, 8), scores])


CODES = """
  input %x : f32[seq, 64]
  input %scores : f32[seq, 4]
  parameter %up : u8[4, 192, 32]
  parameter %down : u8[4, 64, 48]
  parameter %s : f32[4, 192, 2]
  parameter %t : f32[4, 64, 3]
  parameter %b : f32[4, 192]
  {chosen}
  return %y
"""


@pytest.mark.parametrize(
    "chosen",
    [
        "%y = attn.routed_moe(%x, %scores, %up, %down, %b, none, %s, %t) "
        '{activation = "swiglu", count = 2, normalized = false}',
        "%w, %e = aten.topk(%scores) {k = 2}\n  %p = aten.relu(%w)\n  "
        '%y = attn.moe(%x, %p, %e, %up, %down, %b, none, %s, %t) {activation = "swiglu"}',
    ],
)
def test_matrices_in_codes_of_4_bits(chosen: str) -> None:
    weights = {
        "up": torch.randint(0, 256, (4, 192, 32), dtype=torch.uint8),
        "down": torch.randint(0, 256, (4, 64, 48), dtype=torch.uint8),
        "s": torch.rand(4, 192, 2) / 32,
        "t": torch.rand(4, 64, 3) / 32,
        "b": torch.randn(4, 192),
    }
    model = check(CODES.format(chosen=chosen), weights)
    assert sum(node.op_type == "QMoE" for node in model.graph) == 1


def test_no_rows_and_many() -> None:
    node = ROUTED.format(kind='"silu"', count=2, normalized="false", more="")
    for rows in (0, 1000):
        inputs = [torch.randn(rows, 8), torch.randn(rows, 4)]
        check(MIXTURE.format(width=12, chosen=node), _weights(12), inputs=inputs)


def test_weights_of_any_sum_and_none_at_all() -> None:
    scores = torch.randn(5, 4)
    scores[0] = -1  # no weight
    scores[1] = torch.tensor([-1.0, 3, -1, -1])  # one
    inputs = [torch.randn(5, 8), scores]
    model = check(MIXTURE.format(width=12, chosen=GIVEN), _weights(12), inputs=inputs)
    assert len(list(model.graph)) <= 12 + 3, "a top-k, a ReLU and two negations are the test's"
    assert sum(node.op_type == "MoE" for node in model.graph) == 1


def test_an_expert_that_is_named_twice_counts_twice() -> None:
    body = """
  input %x : f32[3, 8]
  input %weights : f32[3, 2]
  input %experts : i64[3, 2]
  parameter %up : f32[4, 12, 8]
  parameter %down : f32[4, 8, 12]
  %y = attn.moe(%x, %weights, %experts, %up, %down) {activation = "relu"}
  return %y
"""
    inputs = [torch.randn(3, 8), torch.rand(3, 2), torch.tensor([[1, 1], [0, 3], [2, 2]])]
    check(body, {name: _weights(12)[name] for name in ("up", "down")}, inputs=inputs)
