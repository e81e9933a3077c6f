"""One way to walk a graph: nearest first, each node once, and no further than an attention goes."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from itertools import islice
from typing import TypeVar

from attngraph.ir import Node, Value

T = TypeVar("T")

FAR = 64
"""How many places a walk visits. What lies further from a softmax is outside its attention."""


def walk(
    starts: Iterable[T], onward: Callable[[T], Iterable[T]], limit: int | None = FAR
) -> Iterator[T]:
    """The starts and what `onward` leads to from each, breadth first and without repetition."""
    queue = list(dict.fromkeys(starts))
    seen = set(queue)
    for place in queue:  # grows while it is read
        yield place
        for further in onward(place):
            if further not in seen and (limit is None or len(queue) < limit):
                seen.add(further)
                queue.append(further)


def users(node: Node) -> Iterator[Node]:
    """The nodes that read a result of this one."""
    return (user for value in node.outputs for user in value.users)


def readers(node: Node, through: Callable[[Node], bool], limit: int | None = FAR) -> Iterator[Node]:
    """What reads a node, directly or by way of nodes that satisfy `through`, nearest first."""
    found = walk([node], lambda at: users(at) if at is node or through(at) else (), limit)
    return islice(found, 1, None)


def above(value: Value) -> list[Value]:
    """What a value is computed from directly."""
    return [] if value.producer is None else value.producer.operands


def behind(
    values: Iterable[Value], through: Callable[[Node], bool], limit: int | None = FAR
) -> Iterator[Value]:
    """Values, and past nodes that satisfy `through` what they are made of, nearest first."""

    def onward(value: Value) -> list[Value]:
        node = value.producer
        return node.operands if node is not None and through(node) else []

    return walk(values, onward, limit)


def ahead(
    value: Value, through: Callable[[Node], bool], limit: int | None = FAR
) -> Iterator[Value]:
    """A value, and what nodes that satisfy `through` make of it, nearest first."""

    def onward(value: Value) -> list[Value]:
        return [out for node in value.users if through(node) for out in node.outputs]

    return walk([value], onward, limit)


def made_of(value: Value) -> Iterator[Value]:
    """A value and everything that it is computed from, nearest first."""
    return walk([value], above, limit=None)


def varying(node: Node) -> list[Value]:
    """The inputs that are no constants."""
    return [value for value in node.operands if not value.is_constant]


def stripped(value: Value, ops: Container[str]) -> Value:
    """What a value is made of beneath such ops, by the first input of each."""
    while (node := value.producer) is not None and node.op in ops and node.inputs[0] is not None:
        value = node.inputs[0]
    return value


def origin(value: Value, through: Callable[[Node], bool]) -> Value:
    """What a value is made of: up from it past nodes that satisfy `through`.

    Of several inputs the one that matters is an activation with most dims: a mask or a bias
    broadcasts to the scores, not the other way round.
    """

    def onward(value: Value) -> list[Value]:
        node = value.producer
        if node is None or not through(node):
            return []
        inputs = [source for source in varying(node) if source.dtype.is_floating_point]
        return [max(inputs, key=lambda source: len(source.shape))] if inputs else []

    *_, last = walk([value], onward)
    return last
