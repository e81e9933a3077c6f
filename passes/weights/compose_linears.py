"""compose-linears: linear after linear, and sums of linears of one input, become one linear.

W₂ (W₁ x + b₁) + b₂ is (W₂ W₁) x + (W₂ b₁ + b₂), and W x + B (A x), a low-rank update (Hu et al.
2021) beside the weight that it adapts, is (W + B A) x. A low-rank pair by itself stays: its product
would be more work and more bytes than its factors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from attngraph.analysis.values.matching import only_read_by, same_type, without_trailing
from attngraph.analysis.values.scalars import number
from attngraph.analysis.values.weights import Owners, is_known, weight_bytes, wide
from attngraph.ir import Graph, Node, Remark, Value
from attngraph.ir.dead import discard
from attngraph.ir.graph import fuse_locs
from attngraph.ir.ops import attribute, input_of
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.rewriting.manager import register
from attngraph.passes.rewriting.trials import LINEAR

_SUMS = {"aten.add.Tensor": 1.0, "aten.sub.Tensor": -1.0}
_MOST_LINEARS = 16


@register
@dataclass(frozen=True)
class ComposeLinears:
    """Multiplies and adds weights ahead of time where neither work nor bytes grow.

    Nothing may lie between the linears, nobody else may read what they compute, and the bytes of a
    weight with another reader count as kept.
    """

    name: ClassVar[str] = "compose-linears"
    exact: ClassVar[bool] = False

    def run(self, graph: Graph) -> list[Remark]:
        checked = Checked(graph, self.name, LINEAR, depth=None)
        owners = Owners(graph)
        for node in reversed(graph):
            merged: Node | None = node
            while merged is not None:
                best = _best(_maps(graph, merged), owners)
                merged = None if best is None else _apply(checked, merged, best)
        return checked.remarks[::-1]


@dataclass(frozen=True, slots=True)
class _Map:
    """What `nodes`, the last reader first, make of `source`: a tree of sums and linears."""

    source: Value
    nodes: tuple[Node, ...]

    @property
    def linears(self) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.op == "aten.linear")


def _maps(graph: Graph, node: Node) -> list[_Map]:
    """The node's value as a map of each value from which only linears lead to it."""
    if node.op in _SUMS:
        return _sums(graph, node)
    if node.op != "aten.linear":
        return []
    source, weight, bias = (input_of(node, name) for name in ("input", "weight", "bias"))
    if source is None or source.is_constant or not is_known(weight):
        return []
    if weight.dtype != source.dtype or (bias is not None and not is_known(bias)):
        return []
    found = [_Map(source, (node,))]
    inner = source.producer
    if inner is not None and only_read_by(graph, source, node):
        found += [_Map(item.source, (node, *item.nodes)) for item in _maps(graph, inner)]
    return [item for item in found if len(item.linears) <= _MOST_LINEARS]


def _sums(graph: Graph, node: Node) -> list[_Map]:
    left, right = node.inputs
    if number(attribute(node, "alpha")) is None or left is None or right is None or left is right:
        return []
    sides = []
    for value in (left, right):
        if not same_type(value, node.output) or not only_read_by(graph, value, node):
            return []
        sides.append([] if value.producer is None else _maps(graph, value.producer))
    return [
        _Map(a.source, (node, *a.nodes, *b.nodes))
        for a in sides[0]
        for b in sides[1]
        if a.source is b.source and len(a.linears) + len(b.linears) <= _MOST_LINEARS
    ]


def _best(maps: list[_Map], owners: Owners) -> _Map | None:
    """The map that saves most work as one product; None where none pays."""
    best, most = None, -1
    for item in maps:
        if len(item.linears) < 2:
            continue
        rows, columns = int(item.nodes[0].output.shape[-1]), int(item.source.shape[-1])
        dtype = item.source.dtype
        weights = [input_of(linear, "weight") for linear in item.linears]
        biases = [input_of(linear, "bias") for linear in item.linears]
        has_bias = any(bias is not None for bias in biases)
        saved = sum(int(w.shape[0]) * int(w.shape[1]) for w in weights) - rows * columns
        stored = weight_bytes(dtype, [rows, columns + has_bias])
        if saved > most and stored <= owners.freed([*weights, *biases]) and saved >= 0:
            best, most = item, saved
    return best


def _numbers(value: Value | None, source: Value) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight (out, in) and bias (out) of a value as a map of the source, in float64."""
    node = value.producer if value is not None else None
    assert node is not None
    if node.op in _SUMS:
        factor = _SUMS[node.op] * float(attribute(node, "alpha"))
        left, right = (_numbers(side, source) for side in node.inputs)
        return left[0] + factor * right[0], _plus(left[1], right[1], factor)
    inner, weight, bias = (input_of(node, name) for name in ("input", "weight", "bias"))
    matrix, vector = wide(weight), None if bias is None else wide(bias)
    if inner is source:
        return matrix, vector
    below, shift = _numbers(inner, source)
    return matrix @ below, _plus(vector, None if shift is None else matrix @ shift, 1.0)


def _plus(
    left: torch.Tensor | None, right: torch.Tensor | None, factor: float
) -> torch.Tensor | None:
    if right is None:
        return left
    return factor * right if left is None else left + factor * right


def _apply(checked: Checked, node: Node, item: _Map) -> Node | None:
    """One linear in the place of the map; None where it turns out to compute something else."""
    graph = checked.graph
    weight, bias = _numbers(node.output, item.source)
    dtype, first = item.source.dtype, item.linears[0].inputs[1]
    assert first is not None
    unrounded = {graph.add_constant(f"{first.name}.composed", weight.to(dtype)): weight}
    if bias is not None:
        unrounded[graph.add_constant(f"{first.name}.bias", bias.to(dtype))] = bias
    merged = graph.create(
        "aten.linear",
        without_trailing(item.source, *unrounded),
        types=[node.output.type],
        loc=fuse_locs(item.nodes, node),
        before=node,
    )
    what = f"{len(item.linears)} linears are multiplied or added into one."
    pair = node.output, merged.output
    if not checked.replace([pair], unrounded=unrounded, reassociates=what):
        return None
    constants = [value for linear in item.linears for value in linear.inputs[1:]]
    for dead in item.nodes:
        graph.erase(dead)
    discard(graph, constants)
    return merged
