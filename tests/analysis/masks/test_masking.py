"""What masks an attention, read as predicates: against the tensors, index by index."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import sympy

from attngraph.analysis.masks.masking import Masking, Scores, masking_of, scores_shape
from attngraph.analysis.masks.predicates import KEY, QUERY, TRUE, Linear, Predicate, substitute
from attngraph.ir import Graph, parse

TEXT = """graph @main {
  dim batch = 2 in 1..8
  dim seq = 5 in 1..64
  input %q : f32[batch, seq, 8]
  input %pk : f32[batch, 2, 3, 4]
  input %n : i64[batch]
  input %b : f32[seq, KEYS]
  %i = aten.arange() {end = KEYS}
  %j = aten.reshape(%i) {shape = [1, KEYS]}
  %r = aten.arange() {end = seq}
  %c = aten.reshape(%r) {shape = [seq, 1]}
  %m = aten.lt.Tensor(%c, %j)
  %keep = aten.logical_not(%m)
  %y = attn.attention(%q, %q, %q, GIVEN) {heads = 2, kv_heads = 2, scale = 0.5ATTRS}
  return %y
}"""
PAST = "none, %keep, none, %pk, %pk"


def _site(given: str = "%b, %keep", attrs: str = "", keys: str = "seq") -> tuple[Graph, Any]:
    text = TEXT.replace("GIVEN", given).replace("ATTRS", attrs).replace("KEYS", keys)
    if given == PAST:
        text = text.replace("%y = ", "%y, %ks, %vs = ")
    graph = parse(text)
    return graph, next(node for node in graph if node.op == "attn.attention")


def test_a_masking_is_all_that_masks() -> None:
    _, site = _site("%b, %keep, none, none, none, %n", ", causal = true, window = 3")
    found = masking_of(site)
    assert [value.name for value in found.values] == ["b", "keep", "n"]
    assert (found.causal, found.window, found.masked_rows, found.past) == (True, 3, "zero", 0)
    assert found.is_bounded
    assert not found.is_open
    assert not found.is_band


@pytest.mark.parametrize(
    ("masking", "is_open", "is_band"),
    [
        (Masking(None, None, False, "zero"), True, True),
        (Masking(None, None, True, "zero"), True, True),
        (Masking(None, None, True, "zero", window=4), False, True),
    ],
)
def test_what_is_open_and_what_is_a_band(masking: Masking, is_open: bool, is_band: bool) -> None:
    assert (masking.is_open, masking.is_band) == (is_open, is_band)


def test_keys_of_a_past_come_first() -> None:
    graph, site = _site(PAST, keys="seq + 3")
    seq = graph.inputs[0].shape[1]
    assert scores_shape(site)[2:] == (seq, seq + 3)
    assert masking_of(site).past == 3
    scores = Scores(masking_of(site), scores_shape(site), graph.dims)
    assert scores.lower == Linear(KEY - QUERY - 3)


def _holds(predicate: Predicate, scores: Scores, q: int, k: int) -> bool:
    at = substitute(substitute(predicate, QUERY, sympy.Integer(q)), KEY, sympy.Integer(k))
    return scores.domain.simplify(at) == TRUE


@pytest.mark.parametrize("causal", [True, False])
def test_what_is_visible_is_the_mask_and_causality(causal: bool) -> None:
    graph, site = _site(attrs=", causal = true" * causal)
    scores = Scores(masking_of(site), scores_shape(site), graph.dims)
    for q, k in itertools.product(range(5), repeat=2):
        assert _holds(scores.mask, scores, q, k) == (not q < k)
        assert _holds(scores.visible, scores, q, k) == (q >= k and (k <= q or not causal))


def test_without_a_mask_all_is_visible() -> None:
    graph, site = _site("%b")
    scores = Scores(masking_of(site), scores_shape(site), graph.dims)
    assert scores.mask == TRUE
    assert scores.visible == TRUE


def test_an_axis_of_one_has_one_index() -> None:
    _, site = _site()
    scores = Scores(masking_of(site), (1, 2, 1, 7), {})
    assert scores.index[0] == 0
    assert scores.index[2] == 0
    assert scores.at(masking_of(site).mask) == (0, KEY)
