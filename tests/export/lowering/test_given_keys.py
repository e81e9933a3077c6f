"""Keys that the graph is given by head, as those of cross-attentions are, aren't packed first."""

from __future__ import annotations

import itertools
from typing import Any

import onnx_ir as ir
import pytest

from attngraph.export.lowering.lower import lower
from attngraph.export.target import Target
from tests.export.lowered import check, graph_of

SIZES = [
    dict(zip(("batch", "seq", "keys"), sizes, strict=True))
    for sizes in itertools.product((1, 2), (1, 3), (1, 7))
]


def attended(
    *,
    queries: int | str = 1,
    groups: int = 4,
    dims: str = "[0, 2, 1, 3]",
    mask: str = "",
    **how: str,
) -> str:
    """One attention of 4 heads of 8, its keys and values given as (B, G, T, D)."""
    inner = f"batch, keys, {groups}" if dims == "[0, 2, 1, 3]" else f"batch, {groups}, keys"
    given = f"f32[batch, {groups}, keys, 8]"
    attrs = ", ".join(f"{name} = {value}" for name, value in {"scale": "0.4", **how}.items())
    return f"""
  input %q : f32[batch, {queries}, 32]
  input %k : {given}
  input %v : {given}
{f"  input %m : bool[{mask}]" if mask else ""}
  %kt = aten.permute(%k) {{dims = {dims}}} : f32[{inner}, 8]
  %vt = aten.permute(%v) {{dims = {dims}}} : f32[{inner}, 8]
  %kp = aten.reshape(%kt) {{shape = [batch, keys, {8 * groups}]}}
  %vp = aten.reshape(%vt) {{shape = [batch, keys, {8 * groups}]}}
  %y = attn.attention(%q, %kp, %vp, none, {"%m" if mask else "none"})
      {{heads = 4, kv_heads = {groups}, {attrs}}}
  return %y""".replace("\n      {heads", " {heads")


def readers(model: ir.Model) -> list[str]:
    """The operators that read keys and values, outside of branches."""
    return [
        n.op_type for n in model.graph if {"k", "v"} & {v.name for v in n.inputs if v is not None}
    ]


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"groups": 2},
        {"groups": 1, "softcap": "2.0"},
        {"mask": "batch, 1, 1, keys", "masked_rows": '"mean"'},
        {"mask": "batch, 4, 1, keys", "masked_rows": '"zero"'},
        {"queries": 3, "causal": "true"},
    ],
    ids=str,
)
def test_they_are_read_as_they_lie(how: dict[str, Any]) -> None:
    assert "Attention" in readers(check(attended(**how), sizes=SIZES))


def test_a_branch_for_many_queries_packs_them_itself() -> None:
    """MultiHeadAttention wants them packed: no work of a call with one query."""
    model = check(attended(queries="seq"), sizes=SIZES)
    assert readers(model) == []
    assert [n.op_type for n in model.graph].count("If") == 1


def test_another_layout_is_none_of_them() -> None:
    """Heads and tokens are one axis here, in the order in which they lie."""
    assert "Attention" not in readers(check(attended(dims="[0, 1, 2, 3]"), sizes=SIZES))
    graph = graph_of(attended())
    assert readers(lower(graph, target=Target("cpu", portable=True))) == ["Transpose"] * 2
