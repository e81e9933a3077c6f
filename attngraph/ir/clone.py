"""Independent copies of a graph and of parts; constants share their data, nodes their regions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from attngraph.ir.graph import Graph, Node, Value
from attngraph.ir.slices import backward_slice


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
    copy_nodes(graph, copy, known)
    copy.set_outputs([known[value] for value in graph.outputs], graph.output_names)
    return copy


def extract(graph: Graph, inputs: Sequence[Value], outputs: Sequence[Value]) -> Graph:
    """The part of a graph that makes some of its values from others, and from its constants."""
    made = Graph(graph.name)
    made.dims, made.conditions = dict(graph.dims), graph.conditions
    known = {value: made.add_input(value.name, value.type) for value in inputs}
    leaves, nodes = backward_slice(outputs, known.__contains__)
    for leaf in leaves:
        if leaf not in known:
            known[leaf] = made.add_constant(leaf.name, leaf.data, leaf.type)
    copy_nodes(nodes, made, known)
    names = [f"result_{at}" for at in range(len(outputs))]
    made.set_outputs([known[value] for value in outputs], names)
    return made


def copy_nodes(nodes: Iterable[Node], into: Graph, known: dict[Value, Value]) -> None:
    """Adds twins of the nodes; `known` maps what they read to twins, and is extended."""
    for node in nodes:
        twin = into.create(
            node.op,
            [None if value is None else known[value] for value in node.inputs],
            node.attrs,
            types=[value.type for value in node.outputs],
            names=[value.name for value in node.outputs],
            loc=node.loc,
        )
        known.update(zip(node.outputs, twin.outputs, strict=True))
