"""Batching rules: how each op acts along axes that it doesn't compute over, as JAX's vmap has them.

A rule answers three questions about a node:

- `tracks`: which axis of the results does each axis of an operand become? An axis has such a track
  only if every index along it is computed by itself. So a node computes row by row where the axes
  of the rows keep their tracks, whatever else it does.
- `batched`: what is the node over operands with one more axis, and where do its results have it?
- `resized`: what is it over other rows: fewer of them, or the same in another order?

The place of a new axis is given by the number of dims behind it. Broadcasting aligns shapes at the
right, so operands of different ranks share that number where they share the axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from attngraph.analysis.layout.element_ids import is_pointwise
from attngraph.analysis.rows import batching_rules as rules
from attngraph.analysis.rows.batching_rules import Batched, Behind, Rule, Track
from attngraph.ir import Dim, Node, TensorType
from attngraph.ir.effects import is_function
from attngraph.ir.traits import PERMUTE, RESHAPE


def rule_of(node: Node) -> Rule | None:
    """The rule of a node; None where its op has none, or an operand is no tensor."""
    values = [value for value in (*node.inputs, *node.outputs) if value is not None]
    if not node.outputs or not any(node.inputs) or not is_function(node):
        return None
    if not all(isinstance(value.type, TensorType) for value in values):
        return None
    if node.op == _INDEX and [v is None or v.dtype for v in node.inputs[1:]] != [torch.int64]:
        return None  # several indices, or a mask
    return _RULES.get(node.op) or (_POINTWISE if is_pointwise(node) else None)


def tracks(node: Node) -> Sequence[Track] | None:
    """The track of each input, empty for one that is absent; None where nothing is known."""
    rule = rule_of(node)
    return None if rule is None else rule.tracks(node)


def batched(node: Node, behind: Behind, size: Dim) -> Batched | None:
    """The node over inputs some of which have a new axis of that size; None where none is known.

    An input that broadcasts along the new axis may have it with size 1, or dims of size 1 in front.
    """
    rule = rule_of(node)
    if rule is None or all(place is None for place in behind):
        return None
    if any(p is not None and at not in rule.carriers(node) for at, p in enumerate(behind)):
        return None
    return rule.batched(node, behind, size)


def resized(node: Node, lead: Sequence[Dim]) -> tuple[str, Mapping[str, Any]]:
    """The op and attributes of a node whose first axes, which pass through, get these sizes."""
    rule = rule_of(node)
    return (node.op, node.attrs) if rule is None else rule.resized(node, lead)


_INDEX = "aten.index.Tensor"
_POINTWISE = rules.Aligned()
_KINDS: tuple[tuple[Rule, str], ...] = (
    (rules.Aligned(rules.one, 1), "aten.linear attn.rms_norm attn.bias_gelu attn.quick_gelu"),
    (rules.Aligned(rules.normalised, 1), "aten.layer_norm aten.rms_norm"),
    (rules.Aligned(rules.one, 2, any_rank=False), "attn.skip_layer_norm attn.skip_rms_norm"),
    (rules.Aligned(rules.one, any_rank=False), "attn.rotary"),
    (rules.Along(), "aten.softmax.int aten._softmax aten.log_softmax.int aten.cumsum aten.cat"),
    (rules.Along(), "aten.slice.Tensor aten.split.Tensor aten.split_with_sizes aten.chunk"),
    (rules.Along(), "aten.slice_scatter aten.repeat_interleave.self_int aten.glu"),
    (rules.Along(name="dims"), "aten.flip aten.roll"),
    (rules.Along(rules.removes), "aten.select.int aten.unbind.int"),
    (rules.Along(rules.reduces), "aten.mean.dim aten.sum.dim_IntList aten.prod.dim_int"),
    (rules.Along(rules.reduces), "aten.linalg_vector_norm aten.logsumexp"),
    (rules.Along(rules.reduces), "aten.var.correction aten.std.correction"),
    (rules.Along(rules.reduces), "aten.var.dim aten.std.dim aten.any.dim aten.all.dim"),
    (rules.Along(rules.reduces), "aten.max.dim aten.min.dim aten.amax aten.amin"),
    (rules.Product(), "aten.matmul aten.mm aten.bmm"),
    (rules.Einsum(), "aten.einsum"),
    (rules.Embedding(), f"aten.embedding {_INDEX}"),
    (rules.Stack(), "aten.stack"),
    (rules.Pad(), "aten.pad aten.constant_pad_nd"),
    (rules.SelectScatter(), "aten.select_scatter"),
    (rules.Permute(), " ".join(PERMUTE)),
    (rules.Expand(), "aten.expand"),
    (rules.Repeat(), "aten.repeat"),
    (rules.Reshape(), " ".join(RESHAPE)),
)
_RULES: Mapping[str, Rule] = {op: rule for rule, ops in _KINDS for op in ops.split()}
