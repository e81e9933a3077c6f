"""What attentions hide of keys, whatever the query: held against the masks, index by index."""

from __future__ import annotations

import pytest
import torch

from attngraph.analysis.masks.key_masks import Masked, attentions
from attngraph.analysis.masks.predicates import TRUE
from attngraph.ir import parse
from tests.analysis.masks.graphs import box, holds

B, S = 2, 4
HEAD = f"""graph @main {{
  input %x : f32[{B}, {S}, 8]
  input %past : f32[{B}, 2, 3, 4]
  input %there : i64[{B}, {S}]
  input %n : i64[{B}]
  parameter %w : f32[1, 8]
  %there4 = aten.reshape(%there) {{shape = [{B}, 1, 1, {S}]}}
  %padding = aten.ne.Scalar(%there4) {{other = 0}}
  %i = aten.arange() {{end = {S}}}
  %q = aten.reshape(%i) {{shape = [{S}, 1]}}
  %k = aten.reshape(%i) {{shape = [1, {S}]}}
  %lower = aten.le.Tensor(%k, %q)
  %both = aten.logical_and(%lower, %padding)
  %score = aten.linear(%x, %w)
  %row = aten.reshape(%score) {{shape = [{B}, 1, 1, {S}]}}
  %chosen = aten.gt.Scalar(%row) {{other = 0.0}}
"""


def _masked(given: str, attrs: str = "") -> Masked:
    results = "%y, %k2, %v2" if "past" in given else "%y"
    graph = parse(
        f"{HEAD}  {results} = attn.attention(%x, %x, %x, {given})"
        f" {{heads = 2, kv_heads = 2, scale = 0.5{attrs}}}\n  return %y\n}}"
    )
    (found,) = attentions(graph)
    return found


@pytest.mark.parametrize("mask", ["padding", "both"])
def test_what_a_mask_says_of_keys_alone_is_padding(mask: str) -> None:
    found = _masked(f"none, %{mask}")
    assert found.hides
    assert found.rows == (B, S)
    there = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0]])
    known = {"there": there, "padding": (there != 0).reshape(B, 1, 1, S)}
    for places in box(B, 1, 1, S):
        b, *_, k = places.values()
        assert holds(found.shown, places, known) == bool(there[b, k])


@pytest.mark.parametrize("given", ["none, %lower", "none, %chosen", "none", "none, none"])
def test_what_depends_on_the_query_or_on_weights_is_none(given: str) -> None:
    found = _masked(given)
    assert not found.hides
    assert found.shown == TRUE


def test_keys_of_a_past_are_no_rows() -> None:
    found = _masked("none, none, none, %past, %past")
    assert not found.hides
    assert found.own is None


@pytest.mark.parametrize(
    ("given", "attrs", "has_key", "alike"),
    [
        ("none, %padding", "", True, True),
        ("none, %both", "", True, False),
        ("none, %padding", ", causal = true", True, False),
        ("none, %padding", ", causal = true, window = 2", True, False),
        ("none, none, none, none, none, %n", "", False, True),
    ],
)
def test_a_token_sees_itself_where_that_is_proved(
    given: str, attrs: str, has_key: bool, alike: bool
) -> None:
    found = _masked(given, attrs)
    assert found.has_own_key(found.shown) is has_key
    assert found.sees_alike is alike


def test_a_mask_above_the_diagonal_leaves_no_key_of_ones_own() -> None:
    text = HEAD.replace("aten.le.Tensor", "aten.gt.Tensor")
    graph = parse(
        f"{text}  %y = attn.attention(%x, %x, %x, none, %both)"
        " {heads = 2, kv_heads = 2, scale = 0.5}\n  return %y\n}"
    )
    (found,) = attentions(graph)
    assert found.hides
    assert not found.has_own_key(found.shown)
