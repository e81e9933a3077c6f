"""Writes what masks an attention into its node."""

from __future__ import annotations

from attngraph.analysis.masks.masking import (
    Masking,
)
from attngraph.ir import Graph, Node, Value
from attngraph.ir.ops import attribute, input_of, op_def


def apply_masking(graph: Graph, site: Node, after: Masking) -> None:
    """Makes it what masks an `attn.attention`."""
    rest = [input_of(site, name) for name in ("sinks", "past_key", "past_value")]
    inputs: list[Value | None] = [*site.inputs[:3], after.bias, after.mask, *rest, after.lengths]
    while inputs[-1] is None:
        inputs.pop()
    graph.set_inputs(site, inputs)
    changed = {
        "causal": after.causal,
        "masked_rows": after.masked_rows,
        "window": after.window,
    }
    if all(attribute(site, name) == value for name, value in changed.items()):
        return
    kept = site.attrs | changed
    args = op_def(site.op).args
    site.attrs = {a.name: kept[a.name] for a in args if kept.get(a.name, a.default) != a.default}
    graph.epoch += 1
