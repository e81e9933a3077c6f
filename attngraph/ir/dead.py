"""Dead code: nodes and constants that nothing reads."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from attngraph.ir.dims import symbols_of
from attngraph.ir.effects import dim_definers, dims_of
from attngraph.ir.graph import Graph, Node, Value
from attngraph.ir.ops import op_def


def eliminate_dead_code(graph: Graph) -> None:
    """Erases every unread node and constant. Graph inputs stay: they are the model's signature.

    A node that defines a dim (`nonzero`'s u0) lives as long as a type or an attribute names it.
    """
    definers = dim_definers(graph)
    named: set[str] = set()
    returned = set(graph.outputs)
    for node in reversed(graph):
        read = any(value in returned or value.uses for value in node.outputs)
        if read or op_def(node.op).mutates or not named.isdisjoint(definers.get(node, ())):
            if definers:
                named |= symbols_of(list(node.attrs.values()))
                named = named.union(*map(dims_of, node.outputs))
        else:
            graph.erase(node)
    discard(graph, list(graph.constants.values()))


def erase_dead(
    graph: Graph,
    nodes: Iterable[Node | None],
    *,
    definers: Collection[Node] = (),
    since: int = -1,
) -> None:
    """Erases those of the nodes that nothing reads, then the nodes and constants only they read.

    `definers` of dims (effects.py) stay, and so do nodes whose number is at most `since`.
    """
    returned = set(graph.outputs)
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node is None or node.graph is not graph or node.number <= since or node in definers:
            continue
        read = any(value.uses or value in returned for value in node.outputs)
        if read or op_def(node.op).mutates:
            continue
        sources = dict.fromkeys(node.operands)
        graph.erase(node)
        pending += [source.producer for source in sources]
        discard(graph, sources)


def discard(graph: Graph, constants: Iterable[Value | None]) -> None:
    """Erases those of the constants that nothing reads, and lets go of their memory."""
    for value in dict.fromkeys(constants):
        if value is None or graph.constants.get(value.name) is not value:
            continue
        if not value.uses and value not in graph.outputs:
            graph.erase_constant(value)
            value.data = None  # erased nodes still refer to it until they are collected
