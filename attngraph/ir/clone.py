"""An independent copy of a graph; constants share their data, nodes their regions."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from attngraph.ir.graph import Graph, Value


def clone(
    graph: Graph,
    *,
    bound: Mapping[Value, torch.Tensor] | None = None,
    freed: Collection[Value] = (),
) -> Graph:
    """Same names, types, locations and order. Changing one leaves the other alone.

    Inputs that are `bound` to data become constants; constants that are `freed` become inputs, the
    last ones.
    """
    data = bound or {}
    copy = Graph(graph.name)
    copy.dims, copy.conditions = dict(graph.dims), graph.conditions
    known: dict[Value, Value] = {}
    for value in graph.inputs:
        if value in data:
            known[value] = copy.add_constant(value.name, data[value], value.type)
        else:
            known[value] = copy.add_input(value.name, value.type)
    for value in graph.constants.values():
        if value in freed:
            known[value] = copy.add_input(value.name, value.type)
        else:
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
