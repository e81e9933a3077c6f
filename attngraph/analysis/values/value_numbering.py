"""Value numbering: equal numbers mean equal elements, made by the same ops of the same sources."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

from attngraph.ir import Graph, Node, Value
from attngraph.ir.effects import is_function
from attngraph.ir.hashing import hashable
from attngraph.ir.slices import backward_slice

_COMPARED_ELEMENTS = 16


def number_values(
    graph: Graph, roots: Iterable[Value], definers: Mapping[Node, frozenset[str]]
) -> dict[Value, int]:
    """A number for each root and all it is computed from.

    Constants are compared by content where they are tiny. The results of `definers`, whose sizes
    only a run can tell, and of random ops are equal to nothing else.
    """
    numbers: dict[Value, int] = {}
    seen: dict[Hashable, int] = {}
    above = set(backward_slice(roots, lambda value: False)[1])
    for value in graph.inputs:
        numbers[value] = seen.setdefault(value, len(seen))
    for value in graph.constants.values():
        numbers[value] = seen.setdefault(_constant_key(value), len(seen))
    for node in graph:
        if node not in above:
            continue
        key: Hashable = node
        if node not in definers and is_function(node):
            sources = tuple(None if value is None else numbers[value] for value in node.inputs)
            key = (node.op, sources, hashable(node.attrs))
        for value in node.outputs:
            numbers[value] = seen.setdefault((key, value.index), len(seen))
    return numbers


def _constant_key(value: Value) -> Hashable:
    data = value.data
    if data is None or data.is_meta or data.numel() > _COMPARED_ELEMENTS:
        return value
    return (value.type, hashable(data.flatten().tolist()))
