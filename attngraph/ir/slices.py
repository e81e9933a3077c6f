"""Slices: what values are computed from, and what is computed from them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from attngraph.ir.graph import Node, Value


def forward_slice(values: Iterable[Value], nodes: Iterable[Node]) -> set[Value]:
    """These values and all that is computed from them; `nodes` come in the order of a graph."""
    reached = set(values)
    for node in nodes:
        if any(value in reached for value in node.inputs):
            reached.update(node.outputs)
    return reached


def backward_slice(
    roots: Iterable[Value], is_leaf: Callable[[Value], bool], depth: int | None = None
) -> tuple[list[Value], list[Node]]:
    """The leaves under the roots, and the nodes between, inputs first.

    Values more than `depth` nodes above every root count as leaves too.
    """
    roots = list(roots)
    within = None if depth is None else _within(roots, is_leaf, depth)
    sampled: list[Value] = []
    nodes: dict[Node, None] = {}
    seen: set[Value] = set()
    stack = [(root, False) for root in roots]
    while stack:
        value, done = stack.pop()
        if done:
            if value.producer is not None:
                nodes.setdefault(value.producer)
            continue
        if value in seen:
            continue
        seen.add(value)
        node = value.producer
        if node is None or is_leaf(value) or (within is not None and node not in within):
            sampled.append(value)
            continue
        stack.append((value, True))
        stack.extend((source, False) for source in node.operands)
    return sampled, list(nodes)


def depends_on(values: Iterable[Value], nodes: Collection[Node]) -> bool:
    """Whether one of the values is computed from a result of one of the nodes."""
    leaves, _ = backward_slice(values, lambda value: value.producer in nodes)
    return any(leaf.producer in nodes for leaf in leaves)


def unmade(values: Collection[Value]) -> list[Value]:
    """Those of the values that are computed from no other one of them."""
    own = set(values)

    def above(value: Value) -> list[Value]:
        made = [] if value.producer is None else value.producer.inputs
        return backward_slice([source for source in made if source], own.__contains__)[0]

    return [value for value in values if not own & set(above(value))]


def _within(roots: Iterable[Value], is_leaf: Callable[[Value], bool], depth: int) -> set[Node]:
    """The nodes at most `depth` above a root, not past leaves."""
    found: set[Node] = set()
    level = list(roots)
    for _ in range(depth):
        above: dict[Node, None] = {}
        for value in level:
            if value.producer is not None and value.producer not in found and not is_leaf(value):
                above[value.producer] = None
        found.update(above)
        level = [value for node in above for value in node.operands]
    return found
