"""An independent copy of a graph; constants share their data."""

from __future__ import annotations

from attngraph.ir.graph import Graph, Value


def clone(graph: Graph) -> Graph:
    """Same names, types, locations and order. Changing one leaves the other alone."""
    copy = Graph(graph.name)
    copy.dims, copy.conditions = dict(graph.dims), graph.conditions
    known: dict[Value, Value] = {}
    for value in graph.inputs:
        known[value] = copy.add_input(value.name, value.type)
    for value in graph.constants.values():
        known[value] = copy.add_constant(value.name, value.data, value.type)
    for node in graph:
        twin = copy.create(
            node.op,
            [None if value is None else known[value] for value in node.inputs],
            node.attrs,
            types=[value.type for value in node.outputs],
            names=[value.name for value in node.outputs],
            loc=node.loc,
        )
        known.update(zip(node.outputs, twin.outputs, strict=True))
    copy.set_outputs([known[value] for value in graph.outputs], graph.output_names)
    return copy
