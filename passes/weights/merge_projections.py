"""merge-projections: linears that read one input become one product and a split."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar

import torch

from attngraph.analysis.values.projection import Projection, read_projection
from attngraph.analysis.values.weights import Owners
from attngraph.ir import Graph, Node, Remark, TensorType, Value
from attngraph.ir.dead import discard
from attngraph.ir.graph import UNKNOWN, fuse_locs
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.rewriting.manager import register

_ATTENTIONS = frozenset(
    ["attn.attention", "aten.scaled_dot_product_attention", "aten.softmax.int", "aten._softmax"]
)
_BEFORE_ATTENTION = """aten.reshape aten.permute aten.expand aten.split_with_sizes aten.slice.Tensor
    aten.select.int aten.unbind.int aten.repeat_interleave.self_int aten.cat aten.neg aten._to_copy
    aten.mul.Tensor aten.mul.Scalar aten.div.Scalar aten.add.Tensor aten.sub.Tensor aten.layer_norm
    aten.rms_norm attn.rms_norm attn.rotary"""
_BEFORE_PRODUCT = """aten.silu aten.gelu aten.relu aten.sigmoid aten.tanh attn.quick_gelu
    attn.bias_gelu aten._to_copy aten.mul.Scalar"""
_ONTO_ATTENTION = frozenset(_BEFORE_ATTENTION.split())
_ONTO_PRODUCT = frozenset(_BEFORE_PRODUCT.split())
_PRODUCTS = frozenset(["aten.mul.Tensor"])
_REACH = 64


@register
@dataclass(frozen=True)
class MergeProjections:
    """Concatenates the weights of sibling projections: Q, K and V, gate and up, any widths.

    Siblings read one value, and feed one attention, or are keys and values that several attentions
    take from one memory, or are multiplied with each other, or are children of one module with no
    attention between them, so that no result waits long for its reader. Those without a bias get
    zeros where another has one. A weight that is also read elsewhere stays, since merging it would
    store it twice.

    Each element is the same sum of products as before; how a GEMM blocks the sum may depend on its
    width, so the last bit may differ.
    """

    name: ClassVar[str] = "merge-projections"
    exact: ClassVar[bool] = True

    def run(self, graph: Graph) -> list[Remark]:
        checked = Checked(graph, self.name)
        found: dict[tuple[Value, str], list[Projection]] = {}
        owners = Owners(graph)
        order: dict[Node, tuple[int, int]] = {}
        attentions = 0
        for position, node in enumerate(graph):
            attentions += node.op in _ATTENTIONS
            order[node] = (position, attentions)
            projection = read_projection(node, owners)
            if projection is not None:
                key = (projection.source, projection.family)
                found.setdefault(key, []).append(projection)
        for candidates in found.values():
            if len(candidates) > 1:
                for group in _groups(candidates, order):
                    _merge(graph, checked, group)
        return checked.remarks


def _groups(
    candidates: Sequence[Projection], order: Mapping[Node, tuple[int, int]]
) -> list[list[Projection]]:
    """The candidates that belong together, each group in execution order."""
    attentions = [_reachable(item.node, _ATTENTIONS, _ONTO_ATTENTION) for item in candidates]
    products = [_reachable(item.node, _PRODUCTS, _ONTO_PRODUCT) for item in candidates]
    is_memory = [
        bool(found) and not _feeds_queries(c.node)
        for c, found in zip(candidates, attentions, strict=True)
    ]
    leader = list(range(len(candidates)))
    for first, second in combinations(range(len(candidates)), 2):
        a, b = candidates[first].node, candidates[second].node
        if candidates[first].weight.dtype != candidates[second].weight.dtype:
            continue
        together = (
            attentions[first] & attentions[second]
            or (is_memory[first] and is_memory[second])
            or products[first] & products[second]
            or (order[a][1] == order[b][1] and _same_parent(a, b))
        )
        if together:
            old, new = leader[second], leader[first]
            leader = [new if item == old else item for item in leader]
    groups: dict[int, list[Projection]] = {}
    for index, item in enumerate(candidates):
        groups.setdefault(leader[index], []).append(item)
    return [group for group in groups.values() if len(group) > 1]


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


def _reachable(start: Node, targets: frozenset[str], through: frozenset[str]) -> set[Node]:
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


def _merge(graph: Graph, checked: Checked, group: Sequence[Projection]) -> None:
    first = group[0]
    nodes = [item.node for item in group]
    loc = fuse_locs(nodes, first.node)
    weight = _concatenated(checked, [item.weight for item in group], first.axis)
    bias = _biases(checked, group)
    kind = first.node.output.tensor_type
    sizes = [item.width for item in group]
    merged = graph.create(
        *first.product(weight, bias),
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


def _concatenated(checked: Checked, weights: Sequence[Value], axis: int) -> Value:
    """One constant of all weights."""
    shape = list(weights[0].shape)
    shape[axis] = sum(int(weight.shape[axis]) for weight in weights)
    kind = TensorType(weights[0].dtype, tuple(shape))
    name = _joined([weight.name for weight in weights])
    return checked.derive(name, kind, weights, lambda data: torch.cat(list(data), axis))


def _biases(checked: Checked, group: Sequence[Projection]) -> Value | None:
    """All biases as one constant, zeros for those that have none; None where none has."""
    given = [item.bias for item in group if item.bias is not None]
    if not given:
        return None
    kind = TensorType(given[0].dtype, (sum(item.width for item in group),))

    def joined(data: Sequence[torch.Tensor]) -> torch.Tensor:
        there = iter(data)
        parts = [
            data[0].new_zeros(item.width) if item.bias is None else next(there) for item in group
        ]
        return torch.cat(parts)

    return checked.derive(_joined([bias.name for bias in given]), kind, given, joined)


def _joined(names: Iterable[str]) -> str:
    """`attn.q.weight`, `attn.k.weight` → `attn.q-k.weight`."""
    parts = [name.split(".") for name in dict.fromkeys(names)]
    if len(parts) == 1:
        return ".".join(parts[0])
    shortest = min(map(len, parts))
    head = next((i for i in range(shortest) if len({p[i] for p in parts}) > 1), shortest)
    room = shortest - head
    tail = next((i for i in range(room) if len({p[-1 - i] for p in parts}) > 1), room)
    middle = "-".join(".".join(p[head : len(p) - tail]) for p in parts)
    return ".".join([*parts[0][:head], middle, *parts[0][len(parts[0]) - tail :]])
