"""Operators as capture leaves them: no side effects, no blocks, and one form of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import one_hot, scaled_dot_product_attention

import attngraph
from attngraph.frontend.capture import capture
from attngraph.ir import format_graph, interpret
from attngraph.ir.ops import op_def
from tests.capture.formula import BATCH, BOTH, Formula, X, assert_identical, check, ops, states


def test_an_in_place_op_on_a_temporary_needs_no_retrace(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Formula, x: Tensor, y: None) -> Any:
        mask = torch.zeros_like(x)
        earlier = mask + 1
        mask.masked_fill_(x > 0, 1.0)
        mask += x
        return mask * 2, earlier

    monkeypatch.delattr(torch.export.ExportedProgram, "run_decompositions")
    check(forward, X, dims=({0: BATCH},), further=(states(4, 9),))


def _through_a_view(self: Formula, x: Tensor, y: None) -> Any:
    mask = torch.zeros_like(x)
    mask[:, 0] = 1
    return mask


def _under_a_view(self: Formula, x: Tensor, y: None) -> Any:
    mask = torch.zeros_like(x)
    view = mask.t()
    mask.add_(x)
    return view


def _under_an_alias(self: Formula, x: Tensor, y: None) -> Any:
    mask = torch.zeros_like(x)
    alias = mask.detach()
    alias.add_(x)
    return mask


def _other_dtype(self: Formula, x: Tensor, y: None) -> Any:
    return torch.zeros_like(x).gt_(-1)


@pytest.mark.parametrize("forward", [_through_a_view, _under_a_view, _under_an_alias, _other_dtype])
def test_other_mutation_is_functionalized_too(forward: Callable[..., Any]) -> None:
    result = check(forward, X, dims=({0: BATCH},), further=(states(4, 9),))
    assert not any(op_def(op).mutates for op in ops(result))


def test_a_buffer_that_is_updated_is_read_and_noted() -> None:
    def forward(self: Formula, x: Tensor, y: None) -> Tensor:
        self.steps.add_(1)
        return x + self.steps

    result = capture(Formula(forward), (X,))
    assert "updates steps" in result.notes[0]
    assert result.output_names == ("output_0",)
    assert_identical(interpret(result.graph, (X,)), [X + 2])


def test_grad_and_disabled_autocast_blocks_are_inlined() -> None:
    def forward(self: Formula, x: Tensor, y: None) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            y = self.linear(x)
        with torch.enable_grad():
            return torch.sin(y) + torch.tensor([1.0] * 9)

    result = check(forward, X, dims=({0: BATCH},), further=(states(4, 9),))
    assert ops(result) == ["aten.linear", "aten.sin", "aten.add.Tensor"]


def test_enabled_autocast_becomes_casts() -> None:
    def forward(self: Formula, x: Tensor, y: None) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.linear(x)

    result = check(forward, X, dims=({0: BATCH},), further=(states(4, 9),))
    assert ops(result).count("aten._to_copy") == 3


def test_a_mask_function_under_vmap_becomes_plain_operators() -> None:
    def forward(self: Formula, x: Tensor, y: None) -> Tensor:
        def allowed(query: Tensor, key: Tensor) -> Tensor:
            return (query - key < 3) & (key <= query)

        position = torch.arange(9)
        over_keys = torch.vmap(allowed, in_dims=(None, 0))
        mask = torch.vmap(over_keys, in_dims=(0, None))(position, position)
        return x @ mask.to(x.dtype)

    result = check(forward, X, dims=({0: BATCH},), further=(states(4, 9),))
    assert all(op.startswith("aten.") for op in ops(result))


def test_no_ops_vanish_and_casts_and_reshapes_have_one_form() -> None:
    def forward(self: Formula, x: Tensor, y: None) -> Tensor:
        x = nn.functional.dropout(x.detach().float().contiguous(), 0.5, False)
        return x.view(-1).double().to(torch.float32).reshape(x.shape).t().contiguous()

    result = check(forward, X, dims=(BOTH,), further=(states(5, 4),))
    assert ops(result) == [
        "aten.reshape",
        "aten._to_copy",
        "aten._to_copy",
        "aten.reshape",
        "aten.t",
        "aten.clone",
    ]


def test_numbers_in_place_of_tensors_are_attributes() -> None:
    def forward(self: Formula, x: Tensor, y: None) -> Any:
        return (
            x + 2, 3 - x, 2**x, x / 2, x * True, (x > 0) & True, x % 2,
            7 // (x.abs().int() + 1), x.int() + 1.5, torch.where(x > 0, x, -torch.inf),
            x * x.shape[0] ** -0.5, x + x.shape[1] // 2, torch.full_like(x, torch.nan),
        )  # fmt: skip

    result = check(forward, X, dims=(BOTH,), further=(states(5, 4),))
    assert "sym_size" not in format_graph(result.graph)


def test_a_fraction_read_by_item_stays_a_tensor() -> None:
    def forward(self: Formula, x: Tensor, y: None) -> Tensor:
        return x[x > 0].sum() * self.scale.item()

    check(forward, X, dims=(BOTH,), further=(states(5, 4),))


def test_data_is_the_tensor_itself() -> None:
    def forward(self: Formula, x: Tensor, y: None) -> Any:
        scores = x * 2
        scores.data.masked_fill_(x > 0, -1.0)
        return scores + 1, x.gt(0).type_as(scores.data)

    check(forward, X, dims=({0: BATCH},), further=(states(4, 9),))


def test_classes_may_be_as_many_as_a_size() -> None:
    def forward(self: Formula, x: Tensor, y: None) -> Any:
        nearest = (x @ x.mT).argmax(-1)
        of_size = one_hot(nearest, x.shape[1])
        return of_size, one_hot(num_classes=9, input=nearest.clamp(max=8))

    check(forward, states(2, 4, 8), dims=(BOTH,), further=(states(3, 9, 8),))


class CausalBias(nn.Module):
    """Queries (B, S, 8) see keys (B, T, 8) up to their own place, from the first or from the last:
    then the first of more queries than keys see none.
    """

    def forward(self, x: Tensor, y: Tensor) -> Any:
        masks = [make(x.shape[1], y.shape[1]) for make in (causal_upper_left, causal_lower_right)]
        return [scaled_dot_product_attention(x, y, y, mask).nan_to_num() for mask in masks]


@pytest.mark.filterwarnings("ignore:Lower right causal bias")
def test_a_causal_bias_of_torch_is_a_mask() -> None:
    dims = ({0: BATCH, 1: Dim("queries")}, {0: BATCH, 1: Dim("keys")})
    optimized = attngraph.optimize(
        CausalBias(), (states(2, 4, 8), states(2, 5, 8)), dynamic_shapes=dims
    )
    assert [site.status for site in optimized.report.sites] == ["fused", "fused"]
    for queries, keys in ((4, 5), (6, 2), (3, 3), (1, 7)):
        pair = states(3, queries, 8), states(3, keys, 8)
        torch.testing.assert_close(optimized(*pair), CausalBias()(*pair))


@pytest.mark.parametrize("spelling", ["int", "float"])
def test_a_count_in_floats_has_a_length_that_others_compare_with(spelling: str) -> None:
    def forward(self: Formula, x: Tensor, y: None) -> Any:
        step = -1 if spelling == "int" else -1.0
        size = x.shape[1]
        table = torch.arange(size - 1, -size, step, dtype=torch.float32)[:, None] * x[:1, :1]
        shifted = torch.cat([table.new_zeros(1, 1), table]).view(2, size)
        return torch.arange(size - 1, -1, -1.0) + x, shifted

    check(forward, X, dims=(BOTH,), further=(states(2, 4),))


def test_heads_along_the_batch_are_split_again() -> None:
    def forward(self: Formula, x: Tensor, y: None) -> Any:
        heads = torch.cat(x.split(3, 2))
        again = torch.cat(torch.cat(torch.chunk(x, 3, dim=2)).chunk(3), -1)
        return torch.cat(heads.split(x.size(0), 0), 2), again

    check(forward, states(3, 5, 9), dims=({0: BATCH},), further=(states(4, 5, 9),))
