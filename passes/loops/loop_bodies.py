"""loop-bodies: runs the other passes on the body of each loop."""

from __future__ import annotations

from dataclasses import replace

from attngraph.ir import Graph, Node, Remark, Value, clone
from attngraph.ir.ops import attribute
from attngraph.ir.printer import format_graph, is_inline
from attngraph.passes.rewriting.findings import findings_of
from attngraph.passes.rewriting.manager import GraphPass, Pass, run


class LoopBodies(GraphPass, name="loop-bodies", exact=True):
    """The constants that a body reads are its own while the passes run, so they fold and merge.

    `stages` are the passes; equal bodies over equal constants are done once each.
    """

    stages: tuple[Pass, ...] = ()

    def run(self, graph: Graph) -> list[Remark]:
        remarks: list[Remark] = []
        for node in graph:
            if node.op == "attn.scan" and self.stages:
                remarks += self._optimise(graph, node)
        return remarks

    def _optimise(self, graph: Graph, node: Node) -> list[Remark]:
        held: Graph = attribute(node, "body")
        own = attribute(node, "carried") + attribute(node, "scanned")
        bound, read = {}, []
        for name, value in zip(held.inputs[own:], node.inputs[own:], strict=True):
            if value is not None and value.data is not None:
                bound[name] = value.data
            else:
                read.append(value)
        body = clone(held, bound=bound)
        remarks = self.run(body)
        for result in run(body, self.stages):
            findings_of(graph).add(result.findings, node.outputs[0].name)
            remarks += [replace(r, node=f"{node.outputs[0].name}/{r.node}") for r in result.remarks]
        weights = [value for value in body.constants.values() if not is_inline(value)]
        closed = clone(body, freed=weights)
        if format_graph(closed) == format_graph(held):
            return remarks
        made = graph.create(
            node.op,
            [*node.inputs[:own], *read, *(_lifted(graph, node, value) for value in weights)],
            {**node.attrs, "body": closed},
            types=[value.type for value in node.outputs],
            names=[value.name for value in node.outputs],
            loc=node.loc,
            before=node,
        )
        graph.replace(node, made.outputs)
        return remarks


def _lifted(graph: Graph, node: Node, value: Value) -> Value:
    """A body's constant as one of the graph's; the one that already has that memory, if any."""
    for known in graph.constants.values():
        if known.data is value.data:
            return known
    return graph.add_constant(f"{node.outputs[0].name}.{value.name}", value.data)
