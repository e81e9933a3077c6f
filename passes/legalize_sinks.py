"""legalize-sinks: sinks become one more key with a zero value, for targets without a sink kernel.

The added key is zero, so its logit is the sink alone, which the bias brings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from attngraph.ir import Builder, Dim, Graph, Node, Remark, Value
from attngraph.ir.ops import attribute, input_of
from attngraph.passes.checked import Checked
from attngraph.passes.manager import register
from attngraph.passes.trials import ATTENTION


@register
@dataclass(frozen=True)
class LegalizeSinks:
    """Turns sinks into one more key with a zero value, where no kernel has sinks."""

    name: ClassVar[str] = "legalize-sinks"
    exact: ClassVar[bool] = True

    def run(self, graph: Graph) -> list[Remark]:
        build, checked = Builder(graph), Checked(graph, self.name, kinds=ATTENTION)
        for node in list(graph):
            if node.op == "attn.attention" and input_of(node, "sinks") is not None:
                _legalize(build, checked, node)
        return checked.remarks


def _legalize(build: Builder, checked: Checked, node: Node) -> None:
    query, key, value, sinks = (input_of(node, name) for name in ("query", "key", "value", "sinks"))
    heads, keys = attribute(node, "heads"), key.shape[1]
    build.at(node, node.loc)
    bias = _bias(build, node, query, keys)
    if len(sinks.shape) == 1:
        sinks = build("aten.reshape", sinks, shape=[1, heads, 1, 1])
    batch, _, rows, _ = (b if a == 1 else a for a, b in zip(bias.shape, sinks.shape, strict=True))
    wide = build("aten.expand", bias, size=[batch, heads, rows, keys])
    sink = build("aten.expand", sinks, size=[batch, heads, rows, 1])
    attrs = {**node.attrs, "causal": False, "masked_rows": "zero"}
    legal = build.node(
        "attn.attention",
        query,
        _with_zero_key(build, key),
        _with_zero_key(build, value),
        build("aten.cat", wide, sink, dim=3),
        **attrs,
    )
    pairs = [(node.outputs[0], legal.outputs[0])]
    if len(node.outputs) > 1:
        weights = build("aten.slice.Tensor", legal.outputs[1], dim=3, start=0, end=keys)
        pairs.append((node.outputs[1], weights))
    given = input_of(node, "bias")
    if checked.replace(pairs, biases=[] if given is None else [given]):
        checked.graph.erase(node)


def _with_zero_key(build: Builder, value: Value) -> Value:
    shape = [value.shape[0], 1, value.shape[2]]
    zero = build("aten.full", size=shape, fill_value=0.0, dtype=value.dtype)
    return build("aten.cat", value, zero, dim=1)


def _bias(build: Builder, node: Node, query: Value, keys: Dim) -> Value:
    """Everything that is added to the logits, -inf where a mask forbids: rank 4, all T keys."""
    bias, mask = input_of(node, "bias"), input_of(node, "mask")
    rows = query.shape[1]
    if attribute(node, "causal"):
        square = build("aten.full", size=[1, 1, rows, keys], fill_value=True, dtype=torch.bool)
        lower = build("aten.tril", square)
        mask = lower if mask is None else build("aten.logical_and", mask, lower)
    if bias is None:
        bias = build("aten.full", size=[1, 1, 1, keys], fill_value=0.0, dtype=query.dtype)
    else:
        bias = build("aten.expand", bias, size=[*bias.shape[:3], keys])
    if mask is None:
        return bias
    low = build.constant(torch.tensor(-torch.inf, dtype=query.dtype), "masked")
    return build("aten.where.self", mask, bias, low)
