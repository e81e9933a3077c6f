"""Rewrites that depend on masks, broken on purpose: each policy and source of masks is seen.

A site is masked from some source by some fill. What is planted gives rows without a key something
else than the model does, or hides other keys. It is taken back, whatever decides the mask.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from attngraph.analysis.masks.masking import Masking
from attngraph.ir import Graph, format_graph
from attngraph.passes import run
from attngraph.passes.attention import bound_keys, fold_masks
from attngraph.passes.attention.hidden_rows import Settler
from attngraph.passes.padding import pack_tokens
from tests.passes.test_checked import Change, _tamper, graph_of

SOURCES = {
    "bools": "\n  input %keep : bool[batch, seq]",
    "pad id": """
  input %ids : i64[batch, seq]
  %keep = aten.ne.Scalar(%ids) {other = 5}""",
    "counted pads": """
  input %ids : i64[batch, seq]
  %real = aten.ne.Scalar(%ids) {other = 5}
  %n = aten.cumsum(%real) {dim = 1}
  %keep = aten.gt.Scalar(%n) {other = 0}""",
    "lengths": """
  input %n : i64[batch, 1]
  %i = aten.arange() {end = seq}
  %keep = aten.lt.Tensor(%i, %n)""",
    "lengths of pads": """
  input %ids : i64[batch, seq]
  %real = aten.ne.Scalar(%ids) {other = 151643}
  %n = aten.sum.dim_IntList(%real) {dim = [1], keepdim = true}
  %i = aten.arange() {end = seq}
  %keep = aten.lt.Tensor(%i, %n)""",
    "a feature sum": """
  input %f : f32[batch, seq, 4]
  %size = aten.abs(%f)
  %s = aten.sum.dim_IntList(%size) {dim = [-1]}
  %keep = aten.ne.Scalar(%s) {other = 0}""",
    "a threshold": """
  input %f : f32[batch, seq]
  %keep = aten.lt.Scalar(%f) {other = 250.0}""",
}
LOW = "-3.4028234663852886e+38"
FILLS = {"nan": "-inf", "mean": LOW}
MASKED = """
  %k = aten.reshape(%keep) {shape = [batch, 1, 1, seq]}
  %hide = aten.logical_not(%k)
  %fill = aten.full() {size = [], fill_value = FILL, dtype = f32}
  %x = aten.where.self(%hide, %fill, %scores)"""
ATTENTION = """
  input %q : f32[batch, 2, seq, 8]
  input %v : f32[batch, 2, seq, 8]
  %t = aten.permute(%q) {dims = [0, 1, 3, 2]}
  %scores = aten.matmul(%q, %t)MASKED
  %p = aten.softmax.int(%x) {dim = -1}
  %y = aten.matmul(%p, %v)
  return %y"""
SPELLED = """
  input %scores : f32[batch, 2, seq, seq]MASKED
  %e = aten.exp(%x)
  %z = aten.sum.dim_IntList(%e) {dim = [-1], keepdim = true}
  %y = aten.div.Tensor(%e, %z)
  return %y"""
FOLDED = """
  input %q : f32[batch, seq, 8]
  %k = aten.reshape(%keep) {shape = [batch, 1, 1, seq]}
  %low = aten.full() {size = [], fill_value = FILL, dtype = f32}
  %zero = aten.full() {size = [], fill_value = 0.0, dtype = f32}
  %b = aten.where.self(%k, %zero, %low)
  %y = attn.attention(%q, %q, %q, %b) {heads = 2, kv_heads = 2, scale = 0.5, masked_rows = "nan"}
  return %y"""
HEADS = """
  input %q : f32[batch, seq, 8]
  parameter %q0 : f32[4, 8]
  parameter %q1 : f32[4, 8]
  %a = aten.linear(%q, %q0)
  %b = aten.linear(%q, %q1)
  %k = aten.reshape(%keep) {shape = [batch, 1, 1, seq]}
  %h0 = attn.attention(%a, %a, %a, none, %k) {heads = 1, kv_heads = 1, scale = 0.5ROWS}
  %h1 = attn.attention(%b, %b, %b, none, %k) {heads = 1, kv_heads = 1, scale = 0.5ROWS}
  %y = aten.cat(%h0, %h1) {dim = -1}
  return %y"""
CACHED = """
  input %q : f32[batch, seq, 8]
  input %kn : f32[batch, 1, seq, 8]
  input %vn : f32[batch, 1, seq, 8]
  input %pk : f32[batch, 1, 3, 8]
  input %pv : f32[batch, 1, 3, 8]
  %keys = aten.cat(%pk, %kn) {dim = 2}
  %values = aten.cat(%pv, %vn) {dim = 2}
  %kp = aten.reshape(%keys) {shape = [batch, seq + 3, 8]}
  %vp = aten.reshape(%values) {shape = [batch, seq + 3, 8]}
  %past = aten.full() {size = [batch, 3], fill_value = false, dtype = bool}
  %both = aten.cat(%past, %keep) {dim = 1}
  %k = aten.reshape(%both) {shape = [batch, 1, 1, seq + 3]}
  %y = attn.attention(%q, %kp, %vp, none, %k) {heads = 1, kv_heads = 1, scale = 0.5ROWS}
  return %y, %keys, %values"""
PADDED = """
  input %x : f32[batch, seq, 8]
  parameter %q0 : f32[8, 8]
  parameter %k0 : f32[8, 8]
  parameter %v0 : f32[8, 8]
  %q = aten.linear(%x, %q0)
  %key = aten.linear(%x, %k0)
  %v = aten.linear(%x, %v0)
  %k = aten.reshape(%keep) {shape = [batch, 1, 1, seq]}
  %y = attn.attention(%q, %key, %v, none, %k) {heads = 1, kv_heads = 1, scale = 0.5ROWS}
  return %y"""
POLICIES = ("zero", "mean", "nan")


def _graph(body: str, source: str, **words: str) -> Graph:
    text = SOURCES[source] + body.replace("MASKED", MASKED)
    for word, text_of in words.items():
        text = text.replace(word, text_of)
    return graph_of(text)


def _rows(policy: str) -> str:
    return "" if policy == "zero" else f', masked_rows = "{policy}"'


def _others(policy: str) -> list[str]:
    return [other for other in POLICIES if other != policy]


def _under(policy: str) -> Change:
    return lambda inputs, attrs: attrs.update(masked_rows=policy)


def _hard(policy: str) -> Change:
    """A mask in the place of a bias of its fill."""

    def change(inputs: list[Any], attrs: dict[str, Any]) -> None:
        inputs[3:] = [None, inputs[3].producer.inputs[0]]
        attrs.update(masked_rows=policy)

    return change


def _unmasked(inputs: list[Any], attrs: dict[str, Any]) -> None:
    inputs[3:] = []


@pytest.mark.defect
@pytest.mark.parametrize("policy", FILLS)
@pytest.mark.parametrize("source", SOURCES)
def test_an_attention_with_another_policy_or_mask(
    source: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = [_unmasked, *map(_hard if policy == "mean" else _under, _others(policy))]
    for change in changes:
        graph = _graph(ATTENTION, source, FILL=FILLS[policy])
        with monkeypatch.context() as patch:
            changed = _tamper(patch, "attn.attention", change)
            (result,) = run(graph, "fuse-attention")
        run(graph, "dce")
        assert changed
        assert [remark.code for remark in result.remarks] == ["unequal"]
        assert "attn.attention" not in {node.op for node in graph}
    graph = _graph(ATTENTION, source, FILL=FILLS[policy])
    run(graph, "fuse-attention")
    assert "attn.attention" in {node.op for node in graph}


@pytest.mark.defect
@pytest.mark.parametrize("source", SOURCES)
def test_a_softmax_in_the_place_of_zero_over_zero(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a finite fill, exp(x) / Σ exp(x) is NaN in a row without keys; softmax(x) is a mean."""
    graph = _graph(SPELLED, source, FILL=LOW)
    before = format_graph(graph)
    monkeypatch.setattr(Settler, "settle", lambda self, node, x, *rest: x)
    (result,) = run(graph, "raise-softmax")
    assert [remark.code for remark in result.remarks] == ["unequal"]
    assert format_graph(graph) == before


@pytest.mark.parametrize("policy", [*FILLS])
@pytest.mark.parametrize("source", SOURCES)
def test_a_mask_that_is_folded_to_another_policy(
    source: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = fold_masks._build

    def other_policy(*args: Any) -> Masking:
        after = built(*args)
        found = policy if after.masked_rows == policy else after.masked_rows
        return replace(after, masked_rows=_others(found)[0])

    graph = _graph(FOLDED, source, FILL=FILLS[policy])
    monkeypatch.setattr(fold_masks, "_build", other_policy)
    (result,) = run(graph, "fold-masks")
    (site,) = [node for node in graph if node.op == "attn.attention"]
    assert site.attrs["masked_rows"] == "nan", "as it was"
    assert site.inputs[3] is not None
    assert result.tally.different == 1


@pytest.mark.parametrize("source", [name for name in SOURCES if name.startswith("lengths")])
def test_bounds_of_other_lengths(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body = HEADS.replace("%h1", "%h2").replace("  %y = aten.cat(%h0, %h2) {dim = -1}\n", "")
    graph = _graph(body.replace("return %y", "return %h0, %h2"), source, ROWS="")
    monkeypatch.setattr(bound_keys, "replace", _windowed)
    (result,) = run(graph, "bound-keys")
    assert not any(len(node.inputs) > 5 for node in graph if node.op == "attn.attention")
    assert result.tally.different


def _windowed(masking: Masking, **fields: Any) -> Masking:
    return replace(masking, **{**fields, "window": 1})


@pytest.mark.defect
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("source", SOURCES)
def test_heads_that_are_merged_under_another_policy(
    source: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in _others(policy):
        graph = _graph(HEADS, source, ROWS=_rows(policy))
        before = format_graph(graph)
        with monkeypatch.context() as patch:
            changed = _tamper(patch, "attn.attention", _under(other))
            (result,) = run(graph, "merge-heads")
        assert changed
        assert "unequal" in {remark.code for remark in result.remarks}
        assert format_graph(graph) == before


@pytest.mark.defect
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("source", SOURCES)
def test_a_cache_that_is_joined_under_another_policy(
    source: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in _others(policy):
        graph = _graph(CACHED, source, ROWS=_rows(policy))
        before = format_graph(graph)
        with monkeypatch.context() as patch:
            changed = _tamper(patch, "attn.attention", _under(other))
            (result,) = run(graph, "fuse-cache")
        assert changed
        assert "unequal" in {remark.code for remark in result.remarks}
        assert format_graph(graph) == before


def _packed(source: str, policy: str) -> tuple[Graph, list[str]]:
    """The graph after pack-tokens, and the codes of what it said."""
    graph = _graph(PADDED, source, ROWS=_rows(policy))
    (result,) = run(graph, "pack-tokens")
    run(graph, "dce")
    return graph, [remark.code for remark in result.remarks]


@pytest.mark.defect
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("source", SOURCES)
def test_rows_that_are_packed_but_no_padding_or_come_back_elsewhere(
    source: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, build = _graph(PADDED, source, ROWS=_rows(policy)), pack_tokens.build
    run(whole, "dce")

    def opposite(make: Any, loc: Any, *rest: Any) -> Any:
        return make(loc, "aten.logical_not", build(make, loc, *rest))

    with monkeypatch.context() as patch:
        patch.setattr(pack_tokens, "build", opposite)
        graph, said = _packed(source, policy)
    assert "unequal" in said
    assert format_graph(graph) == format_graph(whole)
    with monkeypatch.context() as patch:
        changed = _tamper(patch, "aten.sub.Scalar", lambda inputs, attrs: attrs.update(other=2))
        graph, said = _packed(source, policy)
    assert changed
    assert "unequal" in said
    assert format_graph(graph) == format_graph(whole)
    graph, said = _packed(source, policy)
    assert "packed" in said
    assert "aten.nonzero" in {node.op for node in graph}
