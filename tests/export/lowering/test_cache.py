"""Attention with a past: ONNX's past and present give what the reference gives, at every size."""

from __future__ import annotations

import pytest

from attngraph.export.lowering.lower import lower
from attngraph.ir import interpret
from tests.export.lowered import assert_same, graph_of, op_types, random_inputs, run, session_of

SIZES = (
    {"batch": 2, "seq": 5, "keys": 7},
    {"batch": 1, "seq": 1, "keys": 9},
    {"batch": 3, "seq": 6, "keys": 0},
    {"batch": 2, "seq": 1, "keys": 0},
)
"""`keys` is the length of the past."""
CACHED = """
  input %q : f32[batch, seq, 32]
  input %k : f32[batch, seq, {kv}]
  input %v : f32[batch, seq, {kv}]
  input %pk : f32[batch, {groups}, keys, 8]
  input %pv : f32[batch, {groups}, keys, 8]
  {mask}
  {outputs} = attn.attention(%q, %k, %v, {bias}, {used}, none, %pk, %pv) {{{attrs}}} : {types}
  return {outputs}
"""
MASKS = {
    "none": "",
    "padding": "bool[batch, 1, 1, keys + seq]",
    "per-query": "bool[batch, 1, seq, keys + seq]",
    "bias": "f32[4, seq, keys + seq]",
}


def cached(
    mask: str, *, groups: int = 4, causal: bool = True, rows: str = "zero", weights: bool = False
) -> str:
    types = ["f32[batch, seq, 32]", *[f"f32[batch, {groups}, keys + seq, 8]"] * 2]
    outputs = ["%y", "%keys", "%values"]
    if weights:
        types.insert(1, "f32[batch, 4, seq, keys + seq]")
        outputs.insert(1, "%w")
    attrs = [f"heads = 4, kv_heads = {groups}, scale = 0.3, masked_rows = {rows!r}"]
    attrs += ["causal = true"] * causal + ["weights = true"] * weights
    return CACHED.format(
        kv=8 * groups,
        groups=groups,
        mask=f"input %m : {MASKS[mask]}" if MASKS[mask] else "",
        bias="%m" if mask == "bias" else "none",
        used="%m" if mask in ("padding", "per-query") else "none",
        outputs=", ".join(outputs),
        types=", ".join(types),
        attrs=", ".join(attrs).replace("'", '"'),
    )


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("causal", [True, False])
def test_past_and_present(mask: str, groups: int, causal: bool) -> None:
    _agrees(cached(mask, groups=groups, causal=causal))


@pytest.mark.parametrize("rows", ["zero", "mean", "nan"])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("mask", ["padding", "per-query"])
def test_rows_without_keys(rows: str, weights: bool, mask: str) -> None:
    _agrees(cached(mask, groups=2, rows=rows, weights=weights))


def test_the_op_joins_them_itself() -> None:
    model = lower(graph_of(cached("none")))
    assert sorted(op_types(model)) == ["Attention", "Mul"]
    node = next(node for node in model.graph if node.op_type == "Attention")
    assert [None if value is None else value.name for value in node.inputs[1:]] == [
        "k", "v", None, "pk", "pv",
    ]  # fmt: skip
    assert len(node.outputs) == 3


def _agrees(body: str) -> None:
    graph = graph_of(body)
    session = session_of(lower(graph))
    for size in SIZES:
        inputs = random_inputs(graph, size)
        if len(inputs) > 5 and not inputs[5].dtype.is_floating_point:
            inputs[5][0] = False
        for found, wanted in zip(run(session, inputs), interpret(graph, inputs), strict=True):
            assert_same(found, wanted, str(size))
