"""Keys that are equal for equal attributes only, and for nodes that compute the same."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from attngraph.ir.graph import Graph, Node, Value
from attngraph.ir.printer import format_graph, is_inline


def hashable(value: Any) -> Hashable:
    """A key that is equal for equal attributes only: 1, 1.0 and True differ, and so do ±0.0."""
    if isinstance(value, dict):
        return tuple(sorted((name, hashable(item)) for name, item in value.items()))
    if isinstance(value, (list, tuple)):
        return tuple(map(hashable, value))
    if isinstance(value, Graph):
        weights = [v.data for v in value.constants.values() if not is_inline(v)]
        return Graph, format_graph(value), tuple(map(id, weights))
    if isinstance(value, float):
        return float, value.hex()
    if isinstance(value, (bool, int)):
        return type(value), value
    result: Hashable = value
    return result


def structure(nodes: Iterable[Node], number: dict[Value, int]) -> Hashable:
    """Equal for nodes that differ in names alone; `number` has what they read, and is extended."""
    body = []
    for node in nodes:
        inputs = tuple(None if value is None else number[value] for value in node.inputs)
        body.append((node.op, inputs, hashable(node.attrs)))
        for value in node.outputs:
            number.setdefault(value, len(number))
    return tuple(body)
