"""merge-heads: attentions written one by one, and brought together, become one attention."""

from __future__ import annotations

from collections.abc import Sequence

from attngraph.analysis.branches import ATTENTION, Family, Reader
from attngraph.ir import Builder, Graph, Node, Remark, Value, remark_on
from attngraph.ir.dead import erase_dead
from attngraph.ir.loc import fuse_locs
from attngraph.ir.ops import attribute, input_of
from attngraph.passes.attention.stacking.joins import Join, read_join
from attngraph.passes.attention.stacking.stacking import Stacking
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.rewriting.findings import findings_of
from attngraph.passes.rewriting.manager import GraphPass
from attngraph.passes.rewriting.trials import ATTENTION as ATTENTION_TRIALS

_SUMMED = "a sum over heads inside one product"


class MergeHeads(GraphPass, name="merge-heads", exact=False):
    """Merges isomorphic branches of a concatenation, stack or sum that hold an attention each.

    The merged attention has their heads in the order in which they are joined; keys and values
    that several branches share stay shared (multi-query, grouped-query). Projections of one input
    get one weight; output projections of single heads that are summed become one as well.

    What a branch shares with the others feeds each of them at the same place, so it can't depend
    on the attention of any: no path leaves the merged region and comes back.

    `exact_only` leaves sums as they are, and heads whose scales differ apart.
    """

    exact_only: bool = False

    def run(self, graph: Graph) -> list[Remark]:
        if sum(node.op == ATTENTION for node in graph) < 2:
            return []
        merger = _Merger(graph, self.exact_only)
        for node in graph:
            merger.visit(node)
        if merger.changed:
            graph.sort()
        return merger.remarks


class _Merger:
    """Visits the nodes of one graph at which branches may come together."""

    def __init__(self, graph: Graph, exact_only: bool) -> None:
        self.graph = graph
        self.exact_only = exact_only
        self.build = Builder(graph)
        self.reader = Reader(set(graph.outputs))
        self.checked = Checked(
            graph, MergeHeads.name, ATTENTION_TRIALS, depth=None, exact_only=exact_only
        )
        self.remarks = self.checked.remarks
        self.changed = False

    def visit(self, node: Node) -> None:
        """Merges what comes together at a node, until nothing more does."""
        following: Node | None = node
        while following is not None and following.graph is self.graph:
            join = read_join(following, self.reader.returned)
            if join is None or not self.checked.allows(_SUMMED * (join.kind == "sum")):
                return
            families = self.reader.families(join.operands)
            following = next(filter(None, (self._merge(join, f) for f in families)), None)

    def _merge(self, join: Join, family: Family) -> Node | None:
        """Merges one family at a join; returns the node that joins what there is then."""
        all_of_them = len(family.members) == len(join.operands)
        roots = set(family.column(family.first.root))
        if len(roots) < max(2, len(family.members)):
            return None
        if not family.first.attentions and not all_of_them:
            return None
        stacking = Stacking(family, self.exact_only)
        plan = join.plan(stacking)
        if plan is None:
            return None
        heads = [node for branch in family.branches for node in branch.attentions]
        self.build.at(join.node, fuse_locs([*heads, join.node], join.node))
        new = plan(self.build)
        leaves = {source for branch in family.branches for source in branch.leaves.values()}
        biases = [bias for node in heads if (bias := input_of(node, "bias")) is not None]
        beside = join.operands_beside(family.members)
        reason = _reassociates(join, stacking)
        if not self._replace([(join.node.output, new)], [*leaves, *beside], biases, reason):
            return None
        self.changed = True
        self.build.at(None)
        for nodes, merged in reversed(stacking.merged):  # readers before what they read
            self._read_parts(nodes, merged, [*leaves], biases)
            if merged.op == ATTENTION:
                names = [node.outputs[0].name for node in nodes]
                findings_of(self.graph).became |= dict.fromkeys(names, merged.outputs[0].name)
                self.remarks.append(_remark(nodes, merged))
        return new.producer

    def _read_parts(
        self, nodes: Sequence[Node], merged: Node, leaves: Sequence[Value], biases: Sequence[Value]
    ) -> None:
        """What else reads one of the merged nodes' results reads a part of the new one."""
        for index, whole in enumerate(merged.outputs):
            old = [node.outputs[index] for node in nodes]
            if not any(v.uses or v in self.reader.returned for v in old):
                continue
            axis = 1 if index else len(whole.shape) - 1  # all but the context are (B, H, …)
            sizes = [value.shape[axis] for value in old]
            cut = self.build.node("aten.split_with_sizes", whole, split_sizes=sizes, dim=axis)
            self._replace(list(zip(old, cut.outputs, strict=True)), leaves, biases)
        for node in nodes:
            if node.graph is self.graph:
                erase_dead(self.graph, [node])

    def _replace(
        self,
        pairs: Sequence[tuple[Value, Value]],
        leaves: Sequence[Value],
        biases: Sequence[Value],
        reassociates: str = "",
    ) -> bool:
        """Puts what was built in the place of the old values, unless it is something else."""
        if not self.checked.replace(pairs, leaves=leaves, biases=biases, reassociates=reassociates):
            return False
        for old, new in pairs:
            if old in self.reader.returned:
                self.reader.returned.discard(old)
                self.reader.returned.add(new)
        for old, _ in pairs:
            if old.producer is not None:
                erase_dead(self.graph, [old.producer])
        return True


def _reassociates(join: Join, stacking: Stacking) -> str:
    """What becomes of the roundings of the heads, if anything does."""
    if join.kind == "sum":
        return _SUMMED
    heads = [nodes for nodes, merged in stacking.merged if merged.op == ATTENTION]
    if any(len({attribute(node, "scale") for node in nodes}) > 1 for nodes in heads):
        return "scales of single heads in the query"
    return ""


def _remark(nodes: Sequence[Node], merged: Node) -> Remark:
    heads, kv_heads = attribute(merged, "heads"), attribute(merged, "kv_heads")
    plural = "s" if kv_heads > 1 else ""
    shared = "" if kv_heads == heads else f" and {kv_heads} key-value head{plural}"
    reason = f"{len(nodes)} attentions are one of {heads} heads{shared}."
    return remark_on(merged, "note", "merged", reason)
