"""One masking in the place of another: what trials see, in which dtypes and at which sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from attngraph.analysis.masks.masking import Masking, Scores, masking_of, scores_shape
from attngraph.dialect.attention import attention, masked_softmax
from attngraph.ir import Graph, Node, parse
from attngraph.passes.attention.remasking import Remasking
from attngraph.passes.rewriting.regions import Region


def _site(*, batch: str = "2", keys: str = "6", rows: str = "zero", body: str = "") -> Graph:
    text = f"""graph @main {{
  dim seq = 7 in 1..4096
  input %q : f32[{batch}, {keys}, 4]
  input %keep : bool[{batch}, {keys}]
  %k = aten.reshape(%keep) {{shape = [{batch}, 1, 1, {keys}]}}
  %places = aten.arange() {{end = {keys}}}
  %row = aten.reshape(%places) {{shape = [{keys}, 1]}}{body}
  %y = attn.attention(%q, %q, %q, BIAS, MASK)
      {{heads = 2, kv_heads = 2, scale = 0.5, masked_rows = "{rows}"}}
  return %y
}}"""
    given = {"BIAS": "%bias" if "%bias =" in text else "none"}
    given["MASK"] = "%mask" if "%mask =" in text else "none"
    for word, name in given.items():
        text = text.replace(word, name)
    return parse(text.replace(")\n      {heads", ") {heads"))


def _attention(graph: Graph) -> Node:
    (site,) = [node for node in graph if node.op == "attn.attention"]
    return site


def _proved(graph: Graph, every_row: bool = True, **changed: Any) -> str:
    """Why the site's masking, so changed, can't take its place."""
    site = _attention(graph)
    scores = Scores(masking_of(site), scores_shape(site), graph.dims)
    after = replace(scores.masking, **changed)
    return Remasking(graph).proved(scores, after, lambda v: False, every_row=every_row)


def _value(graph: Graph, name: str) -> Any:
    return next(value for value in graph.values() if value.name == name)


WINDOW = """
  %first = aten.sub.Scalar(%row) {other = 1500}
  %mask = aten.gt.Tensor(%places, %first)"""


def test_a_wide_window_is_told_from_its_neighbour() -> None:
    graph = _site(keys="2048", body=WINDOW)
    assert _proved(graph, mask=None, window=1500) == ""
    for other in (1499, 1501, 0):
        assert "other values" in _proved(graph, mask=None, window=other)


BATCHES = """
  %lower = aten.le.Tensor(%places, %row)
  %mask = aten.logical_and(%lower, %k)"""


def test_a_large_batch_is_compared_on_a_few_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = [0]
    run = Region.run

    def seen(self: Region, *args: Any) -> Mapping[Any, Any]:
        memory = run(self, *args)
        sizes = [t.numel() for t in memory.values() if isinstance(t, torch.Tensor)]
        largest[0] = max(largest[0], *sizes)
        return memory

    monkeypatch.setattr(Region, "run", seen)
    graph = _site(batch="64", keys="256", body=BATCHES)
    assert _proved(graph, mask=_value(graph, "k"), causal=True) == ""
    assert 0 < largest[0] < 256 * 256
    assert "other values" in _proved(graph, mask=_value(graph, "k"))
    assert "other values" in _proved(graph, mask=None, causal=True)


FILLED = """
  %zero = aten.full() {size = [], fill_value = 0.0, dtype = f32}
  %low = aten.full() {size = [], fill_value = FILL, dtype = f32}
  %once = aten.where.self(%k, %zero, %low)
  %bias = aten.add.Tensor(%once, OTHER)"""


@pytest.mark.parametrize(
    ("fill", "other", "policy"),
    [("-3e+38", "%zero", "mean"), ("-3e+38", "%once", "nan"), ("-inf", "%zero", "nan")],
)
def test_a_fill_is_what_its_dtype_makes_of_it(fill: str, other: str, policy: str) -> None:
    """In float64 twice -3e38 would be a number, and a row of it a mean."""
    graph = _site(rows="nan", body=FILLED.replace("FILL", fill).replace("OTHER", other))
    for rows in ("zero", "mean", "nan"):
        found = _proved(graph, bias=None, mask=_value(graph, "k"), masked_rows=rows)
        assert (found == "") == (rows == policy)


def test_rows_without_keys_count_as_zero_where_there_are_said_to_be_none() -> None:
    graph = _site(rows="nan", body=FILLED.replace("FILL", "-3e+38").replace("OTHER", "%zero"))
    mask = _value(graph, "k")
    assert _proved(graph, every_row=False, bias=None, mask=mask, masked_rows="zero") == ""
    assert "other values" in _proved(graph, every_row=False, bias=None, masked_rows="zero")


@pytest.mark.parametrize("rows", ["zero", "mean", "nan"])
@pytest.mark.parametrize("given", ["bias", "mask", "lengths", "causal", "window", "past"])
def test_masked_softmax_is_what_attention_computes(given: str, rows: str) -> None:
    batch, heads, queries, past, width = 2, 2, 5, 3 * (given == "past"), 4
    keys = queries + past
    seed = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(batch, queries, heads * width, generator=seed) for _ in range(3))
    mask = torch.rand(batch, 1, queries, keys, generator=seed) < 0.5
    mask[0, :, 1] = False
    bias = torch.randn(heads, queries, keys, generator=seed)
    bias[:, 2] = -torch.inf
    tensors = {"bias": bias, "mask": mask, "lengths": torch.tensor([0, 3])}
    chosen = {name: tensor for name, tensor in tensors.items() if name == given}
    attrs: dict[str, Any] = {"causal": given in ("causal", "window", "past")}
    attrs |= {"window": 2 * (given == "window"), "masked_rows": rows}
    pasts = {}
    if past:
        made = (torch.randn(batch, heads, past, width, generator=seed) for _ in range(2))
        pasts = dict(zip(("past_key", "past_value"), made, strict=True))
    sizes = {"heads": heads, "kv_heads": heads, "scale": 0.5}
    results = attention(q, k, v, weights=True, **chosen, **pasts, **sizes, **attrs)
    split = [x.reshape(batch, queries, heads, width).transpose(1, 2) for x in (q, k)]
    whole = torch.cat([*[pasts[name] for name in pasts if name == "past_key"], split[1]], 2)
    logits = split[0] @ whole.mT * 0.5
    for count in (queries, 3, 1):
        some = torch.linspace(0, queries - 1, count).long()
        found = masked_softmax(logits[:, :, some], **chosen, queries=queries, past=past, **attrs)
        torch.testing.assert_close(found, results[1][:, :, some], equal_nan=True)


def test_a_masking_that_stays_is_equal_to_itself() -> None:
    graph = _site(body="\n  %mask = aten.logical_not(%k)")
    assert _proved(graph) == ""
    assert masking_of(_attention(graph)) == Masking(None, _value(graph, "mask"), False, "zero")
