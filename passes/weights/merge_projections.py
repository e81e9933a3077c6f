"""merge-projections: linears that read one input become one product and a split."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Mapping, Sequence
from itertools import combinations

import networkx as nx

from attngraph.analysis.values.affine import Linear, read_linear
from attngraph.analysis.values.matching import without_trailing
from attngraph.analysis.values.weights import Owners, bytes_of
from attngraph.ir import Graph, Node, Remark, TensorType, Value
from attngraph.ir.dead import discard
from attngraph.ir.loc import UNKNOWN, fuse_locs
from attngraph.ir.traits import (
    ACTIVATION,
    ADDITIVE,
    ATTENTION,
    CAST,
    FEATURE_NORM,
    JOIN,
    LAYOUT,
    MULTIPLICATION,
    NEGATION,
    PLAIN_SOFTMAX,
    ROTARY,
    SCALE,
)
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.rewriting.manager import GraphPass
from attngraph.passes.weights.folding import stacked

_ATTENTIONS = ATTENTION | PLAIN_SOFTMAX
_MOVED = LAYOUT | JOIN | CAST
_ONTO_ATTENTION = _MOVED | ADDITIVE | MULTIPLICATION | NEGATION | FEATURE_NORM | ROTARY
_ONTO_PRODUCT = ACTIVATION | CAST | SCALE
_PRODUCTS = ("aten.mul.Tensor",)
_REACH = 64


class MergeProjections(GraphPass, name="merge-projections", exact=True):
    """Concatenates the weights of sibling projections: Q, K and V, gate and up, any widths.

    Siblings read one value, and feed one attention, or are keys and values that several attentions
    take from one memory, or are multiplied with each other, or are children of one module with no
    attention between them, so that no result waits long for its reader. Those without a bias get
    zeros where another has one. A weight that is also read elsewhere stays, since merging it would
    store it twice.

    Each element is the same sum of products as before; how a GEMM blocks the sum may depend on its
    width, so the last bit may differ.

    Weights of a graph that has at least `apart_from` bytes of them stay: on a CPU their products
    take so long that their number doesn't matter, and a joined weight is a second copy.
    """

    apart_from: int | None = None

    def run(self, graph: Graph) -> list[Remark]:
        if self.apart_from is not None and bytes_of(graph) >= self.apart_from:
            return []
        checked = Checked(graph, self.name)
        found: dict[Value, list[Linear]] = {}
        owners = Owners(graph)
        passed: dict[Node, int] = {}
        attentions = 0
        for node in graph:
            attentions += node.op in _ATTENTIONS
            passed[node] = attentions
            linear = read_linear(node)
            if linear is None or linear.source.is_constant or not owners.is_sole(linear.weight):
                continue
            found.setdefault(linear.source, []).append(linear)
        for candidates in found.values():
            if len(candidates) > 1:
                for group in _groups(candidates, passed):
                    _merge(graph, checked, group)
        return checked.remarks


def _groups(candidates: Sequence[Linear], passed: Mapping[Node, int]) -> list[list[Linear]]:
    """The candidates that belong together, each group in execution order.

    `passed` counts the attentions before each node.
    """
    attentions = [_reachable(item.node, _ATTENTIONS, _ONTO_ATTENTION) for item in candidates]
    products = [_reachable(item.node, _PRODUCTS, _ONTO_PRODUCT) for item in candidates]
    is_memory = [
        bool(found) and not _feeds_queries(c.node)
        for c, found in zip(candidates, attentions, strict=True)
    ]
    related = nx.Graph()
    related.add_nodes_from(range(len(candidates)))
    for first, second in combinations(range(len(candidates)), 2):
        a, b = candidates[first].node, candidates[second].node
        if (
            attentions[first] & attentions[second]
            or (is_memory[first] and is_memory[second])
            or products[first] & products[second]
            or (passed[a] == passed[b] and _same_parent(a, b))
        ):
            related.add_edge(first, second)
    groups = (sorted(group) for group in nx.connected_components(related))
    return [[candidates[index] for index in group] for group in groups if len(group) > 1]


def _same_parent(a: Node, b: Node) -> bool:
    """Children of one module, or calls in one module. Nothing is known without a location."""
    if UNKNOWN in (a.loc, b.loc):
        return False
    one, other = a.loc.module, b.loc.module
    return one == other or one.rpartition(".")[0] == other.rpartition(".")[0]


def _feeds_queries(start: Node) -> bool:
    """Whether an attention takes its queries from the node's result."""
    attentions = _reachable(start, _ATTENTIONS, _ONTO_ATTENTION)
    sources = {node.inputs[0].producer for node in attentions if node.inputs[0] is not None}
    return start in sources or any(
        node in sources for node in _reachable(start, _ONTO_ATTENTION, _ONTO_ATTENTION)
    )


def _reachable(start: Node, targets: Container[str], through: Container[str]) -> set[Node]:
    """The targets that read the node's result, directly or through ops of `through`."""
    found: set[Node] = set()
    seen = {start}
    queue = deque([start])
    while queue and len(seen) < _REACH:
        for value in queue.popleft().outputs:
            for user in value.users:
                if user.op in targets:
                    found.add(user)
                elif user.op in through and user not in seen:
                    seen.add(user)
                    queue.append(user)
    return found


def _merge(graph: Graph, checked: Checked, group: Sequence[Linear]) -> None:
    first = group[0]
    nodes = [item.node for item in group]
    loc = fuse_locs(nodes, first.node)
    kind = first.node.output.tensor_type
    sizes = [item.width for item in group]
    weight = stacked(checked, [item.weight for item in group], sizes)
    bias = stacked(checked, [item.bias for item in group], sizes)
    merged = graph.create(
        "aten.linear",
        without_trailing(first.source, weight, bias),
        types=[TensorType(kind.dtype, (*kind.shape[:-1], sum(sizes)))],
        loc=loc,
        before=first.node,
    )
    axis = kind.rank - 1
    parts = graph.create(
        "aten.split_with_sizes",
        [merged.output],
        {"split_sizes": sizes} | ({"dim": axis} if axis else {}),
        types=[node.output.type for node in nodes],
        loc=loc,
        before=first.node,
    )
    pairs = zip((node.output for node in nodes), parts.outputs, strict=True)
    if not checked.replace(pairs):
        return
    for node in nodes:
        graph.erase(node)
    discard(graph, [constant for item in group for constant in (item.weight, item.bias)])
