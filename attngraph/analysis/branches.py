"""Parallel isomorphic branches: which operands of one node are computed alike, node for node.

The branch of an operand is what only that operand needs, up to what it shares with others. Two
branches are alike if their graphs are isomorphic, with equal ops, attributes, types and the same
shared values at the same places; weights may differ. networkx finds the correspondence, so that
the order of a sum's operands doesn't matter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import networkx as nx
from networkx.algorithms.isomorphism import DiGraphMatcher

from attngraph.ir import Node, Value
from attngraph.ir.hashing import hashable
from attngraph.ir.ops import attribute
from attngraph.ir.traits import COMMUTATIVE, LAYOUT, PART, SCALE, SHIFT

ATTENTION = "attn.attention"
_MOST_NODES = 64  # of a branch: a head with rotary embeddings, norms and a mask has 40


@dataclass(frozen=True)
class Branch:
    """The graph of values above `root`, and where it ends: `leaves` maps a value to its source.

    The source of a leaf is the value it is a part of (a slice, a select), or the leaf itself.
    """

    root: Value
    graph: nx.DiGraph
    leaves: Mapping[Value, Value]
    attentions: Sequence[Node]

    @property
    def invariant(self) -> Hashable:
        """Equal for isomorphic branches."""
        labels = Counter(label for _, label in self.graph.nodes(data="label"))
        return frozenset(labels.items()), self.graph.number_of_edges()


@dataclass
class Family:
    """Isomorphic branches: `columns` gives the values of all of them that correspond to one."""

    members: list[int]
    branches: list[Branch]
    mappings: list[Mapping[Value, Value]]

    @property
    def first(self) -> Branch:
        return self.branches[0]

    def column(self, value: Value) -> tuple[Value, ...]:
        """What corresponds, branch by branch, to a value of the first."""
        return tuple(mapping[value] for mapping in self.mappings)

    def every(self, step: int) -> Family:
        """The family of each `step`-th branch."""
        return Family(self.members[::step], self.branches[::step], self.mappings[::step])


@dataclass
class Reader:
    """Reads branches of one graph. `returned` are the graph's outputs."""

    returned: set[Value]
    _labels: dict[Hashable, int] = field(default_factory=dict)

    def families(self, roots: Sequence[Value]) -> list[Family]:
        """The operands by isomorphism, in their order; one that can't be read is left out."""
        regions = [_region(root, self.returned) for root in roots]
        attended = [r for r in regions if r and any(n.op == ATTENTION for n in r.inside)]
        if len(attended) < 2 and any(r is None or r.inside for r in regions):
            return []
        found: dict[Hashable, list[Family]] = {}
        order: list[Family] = []
        for position, (root, region) in enumerate(zip(roots, regions, strict=True)):
            if region is None:
                continue
            branch = self._branch(root, region)
            alike = found.setdefault(branch.invariant, [])
            for family in alike:
                mapping = _correspondence(family.first, branch)
                if mapping is not None:
                    family.members.append(position)
                    family.branches.append(branch)
                    family.mappings.append(mapping)
                    break
            else:
                identity = {value: value for value in branch.graph}
                alike.append(Family([position], [branch], [identity]))
                order.append(alike[-1])
        return order

    def _branch(self, root: Value, region: _Region) -> Branch:
        inside, owned = region.inside, region.owned
        graph = nx.DiGraph()
        leaves: dict[Value, Value] = {}
        stack = [root]
        while stack:
            value = stack.pop()
            if value in graph and "label" in graph.nodes[value]:
                continue
            node = value.producer
            source = _source(value, inside, owned)
            if value.is_constant:
                graph.add_node(value, label=self._label("constant", value.type, value is root))
            elif node is None or source is not None:
                leaves[value] = source or value
                graph.add_node(value, label=self._label(leaves[value], value.type, value is root))
            else:
                label = (node.op, value.index, value.type, _attributes(node), value is root)
                graph.add_node(value, label=self._label(*label))
                for operand, place in _places(node).items():
                    graph.add_edge(operand, value, at=place)
                    stack.append(operand)
        return Branch(root, graph, leaves, [node for node in inside if node.op == ATTENTION])

    def _label(self, *what: Hashable) -> int:
        return self._labels.setdefault(what, len(self._labels))


@dataclass(frozen=True)
class _Region:
    """The nodes of a branch, and those of them that nothing else needs."""

    inside: dict[Node, None] = field(default_factory=dict)
    owned: set[Node] = field(default_factory=set)


def _region(root: Value, returned: Collection[Value]) -> _Region | None:
    """The nodes of a branch; None where it is too long to be a head.

    An attention or a projection belongs to it even where others read it too: they will read a part
    of the merged one.
    """
    seen: Counter[Node] = Counter()
    region = _Region()
    inside, owned = region.inside, region.owned
    stack = [(root, False)]
    while stack:
        value, above_attention = stack.pop()
        node = value.producer
        if node is None:
            continue
        seen[node] += 1
        readers = sum(len(v.uses) + (v in returned) for v in node.outputs)
        if seen[node] == readers:
            owned.add(node)
        is_attention = node.op == ATTENTION and not above_attention
        if node in inside or not (node in owned or is_attention or is_projection(node)):
            continue
        if node.op == ATTENTION and above_attention:
            continue
        inside[node] = None
        if len(inside) > _MOST_NODES:
            return None
        above = above_attention or is_attention
        stack.extend((v, above) for v in node.operands if not v.is_constant)
    return region


def is_projection(node: Node) -> bool:
    """Whether a node is a `linear` whose weight and bias are constants."""
    return node.op == "aten.linear" and all(v is None or v.is_constant for v in node.inputs[1:])


def _source(value: Value, inside: Collection[Node], owned: Collection[Node]) -> Value | None:
    """Where the branch ends at this value: the value it is a part of, or itself; None inside."""
    above, is_part = value, False
    while (node := above.producer) is not None and node.op in LAYOUT and node.inputs[0]:
        is_part = is_part or node.op in PART
        above = node.inputs[0]
    if value.producer not in inside:
        return above if is_part else value
    return above if is_part and above.producer not in owned else None


def _attributes(node: Node) -> Hashable:
    """The attributes that must be equal: numbers that scale or shift may differ, as weights may."""
    free = {"scale"} if node.op == ATTENTION else {"other"} if node.op in SHIFT | SCALE else set()
    return hashable({name: value for name, value in node.attrs.items() if name not in free})


def _places(node: Node) -> dict[Value, tuple[int, ...]]:
    """The positions at which a node reads each value; none where their order doesn't matter."""
    free = node.op in COMMUTATIVE
    if free and node.op == "aten.add.Tensor":
        free = attribute(node, "alpha") == 1
    places: dict[Value, tuple[int, ...]] = {}
    for position, value in enumerate(node.inputs):
        if value is not None:
            places[value] = (*places.get(value, ()), -1 if free else position)
    return places


def _correspondence(one: Branch, other: Branch) -> Mapping[Value, Value] | None:
    """The values of one branch by those of the other. Most are alike operand by operand."""
    return _in_order(one, other) or _isomorphism(one, other)


def _in_order(one: Branch, other: Branch) -> Mapping[Value, Value] | None:
    found: dict[Value, Value] = {}
    pending = [(one.root, other.root)]
    while pending:
        a, b = pending.pop()
        if a in found:
            if found[a] is not b:
                return None
            continue
        found[a] = b
        if one.graph.nodes[a]["label"] != other.graph.nodes[b]["label"]:
            return None
        above, beside = one.graph.pred[a], other.graph.pred[b]
        if [edge["at"] for edge in above.values()] != [edge["at"] for edge in beside.values()]:
            return None
        pending.extend(zip(above, beside, strict=True))
    return found if len(set(found.values())) == len(found) else None


def _isomorphism(one: Branch, other: Branch) -> Mapping[Value, Value] | None:
    matcher = DiGraphMatcher(
        one.graph,
        other.graph,
        node_match=lambda a, b: a["label"] == b["label"],
        edge_match=lambda a, b: a["at"] == b["at"],
    )
    return dict(matcher.mapping) if matcher.is_isomorphic() else None
