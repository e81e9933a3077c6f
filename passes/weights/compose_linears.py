"""compose-linears: linear after linear, and sums of linears of one input, become one linear.

W₂ (W₁ x + b₁) + b₂ is (W₂ W₁) x + (W₂ b₁ + b₂), and W x + B (A x), a low-rank update (Hu et al.
2021) beside the weight that it adapts, is (W + B A) x. A low-rank pair by itself stays: its product
would be more work and more bytes than its factors.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch

from attngraph.analysis.values.affine import Affine, Linear, numbers, read_linear
from attngraph.analysis.values.matching import only_read_by, same_type
from attngraph.analysis.values.scalars import number
from attngraph.analysis.values.weights import Owners, weight_bytes
from attngraph.ir import Graph, Node, Remark, Value
from attngraph.ir.dead import discard
from attngraph.ir.loc import fuse_locs
from attngraph.ir.ops import attribute
from attngraph.ir.traits import ADDITIVE
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.rewriting.manager import GraphPass
from attngraph.passes.weights.folding import checked_weights, store

_MOST_LINEARS = 16


class ComposeLinears(GraphPass, name="compose-linears", exact=False):
    """Multiplies and adds weights ahead of time where neither work nor bytes grow.

    Nothing may lie between the linears, nobody else may read what they compute, and the bytes of a
    weight with another reader count as kept.
    """

    stored_in: torch.dtype | None = None

    def run(self, graph: Graph) -> list[Remark]:
        checked = checked_weights(graph, self.name, self.stored_in)
        owners = Owners(graph)
        for node in reversed(graph):
            merged: Node | None = node
            while merged is not None:
                best = _best(_trees(graph, merged), owners)
                merged = None if best is None else _apply(checked, merged, best)
        return checked.remarks[::-1]


@dataclass(frozen=True, slots=True)
class _Tree:
    """Sums of linears of linears: what `nodes`, the last reader first, make of `source`."""

    source: Value
    nodes: tuple[Node, ...]

    @property
    def linears(self) -> list[Linear]:
        return [linear for linear in map(read_linear, self.nodes) if linear is not None]

    def multiplied(self, value: Value | None) -> Affine:
        """The map from the source to a value of the tree."""
        node = value.producer if value is not None else None
        assert node is not None
        if node.op in ADDITIVE:
            left, right = map(self.multiplied, node.inputs)
            factor = float(attribute(node, "alpha"))
            return left.plus(right, -factor if node.op == "aten.sub.Tensor" else factor)
        linear = read_linear(node)
        assert linear is not None
        if linear.source is self.source:
            return linear.map
        return linear.map.after(self.multiplied(linear.source))


def _trees(graph: Graph, node: Node) -> list[_Tree]:
    """The node's value as a tree of each value from which only linears lead to it."""
    if node.op in ADDITIVE:
        return _sums(graph, node)
    linear = read_linear(node)
    if linear is None or not linear.is_known or linear.source.is_constant:
        return []
    found = [_Tree(linear.source, (node,))]
    inner = linear.source.producer
    if inner is not None and only_read_by(graph, linear.source, node):
        found += [_Tree(item.source, (node, *item.nodes)) for item in _trees(graph, inner)]
    return [item for item in found if len(item.linears) <= _MOST_LINEARS]


def _sums(graph: Graph, node: Node) -> list[_Tree]:
    left, right = node.inputs
    if number(attribute(node, "alpha")) is None or left is None or right is None or left is right:
        return []
    sides = []
    for value in (left, right):
        if not same_type(value, node.output) or not only_read_by(graph, value, node):
            return []
        sides.append([] if value.producer is None else _trees(graph, value.producer))
    return [
        _Tree(a.source, (node, *a.nodes, *b.nodes))
        for a, b in product(*sides)
        if a.source is b.source and len(a.linears) + len(b.linears) <= _MOST_LINEARS
    ]


def _best(trees: list[_Tree], owners: Owners) -> _Tree | None:
    """The tree that saves most work as one product; None where none pays."""
    best, most = None, -1
    for item in trees:
        linears = item.linears
        if len(linears) < 2:
            continue
        rows, columns = linears[0].width, int(item.source.shape[-1])
        constants = [value for linear in linears for value in (linear.weight, linear.bias)]
        has_bias = any(linear.bias is not None for linear in linears)
        saved = sum(int(linear.weight.tensor_type.numel) for linear in linears) - rows * columns
        stored = weight_bytes(item.source.dtype, [rows, columns + has_bias])
        if saved > most and stored <= owners.freed(constants):
            best, most = item, saved
    return best


def _apply(checked: Checked, node: Node, item: _Tree) -> Node | None:
    """One linear in the place of the tree; None where it turns out to compute something else."""
    graph, linears, found = checked.graph, item.linears, item.multiplied(node.output)
    first = linears[0].weight
    unrounded: dict[Value, torch.Tensor] = {}
    weights = [
        store(graph, f"{first.name}.{what}", numbers(data), first.dtype, unrounded)
        for what, data in (("composed", found.factor), ("bias", found.shift))
        if data is not None
    ]
    loc = fuse_locs(item.nodes, node)
    merged = graph.twin(node, [item.source, *weights], {}, op="aten.linear", loc=loc)
    what = f"{len(linears)} linears are multiplied or added into one."
    pair = node.output, merged.output
    if not checked.replace([pair], unrounded=unrounded, reassociates=what):
        return None
    for dead in item.nodes:
        graph.erase(dead)
    discard(graph, [value for linear in linears for value in (linear.weight, linear.bias)])
    return merged
