"""Rows of a sequence that a top-k chooses for a block: expert choice, and mixtures of depths.

A router that gives each expert its rows, and one that gives a block some of them, go the other way
than one that gives each row its experts: a row's result depends on the scores of the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attngraph.analysis.walks import ahead, readers, walk
from attngraph.ir import Dim, Graph, Node, Value
from attngraph.ir.dims import same
from attngraph.ir.ops import attribute
from attngraph.ir.traits import (
    CAST,
    COMPARISON,
    GATHERED,
    LAYOUT,
    ONE_HOT,
    POINTWISE,
    PRODUCT,
    SCATTER,
    SOFTMAX,
    SORTED,
)


@dataclass(frozen=True, slots=True)
class RowsChosen:
    """`node` chooses `count` rows for each of the `experts`, or for one block where that is 1, by
    scores whose `softmax` there may be.
    """

    node: Node
    experts: int
    count: Dim
    softmax: Node | None


def rows_chosen(graph: Graph) -> Iterator[RowsChosen]:
    """Each choice whose rows are gathered, go through products, and are put back."""
    for node in graph:
        if node.op != "aten.topk" or node.inputs[0] is None or not attribute(node, "largest"):
            continue
        scores = node.inputs[0]
        dim = attribute(node, "dim") % len(scores.shape)
        moved = ahead(node.outputs[1], lambda user: user.op in LAYOUT | CAST | SORTED)
        users = [user for value in moved for user in value.users]
        gathers = [user for user in users if _takes_rows(user, scores.shape[dim])]
        is_put_back = any(user.op in SCATTER | ONE_HOT | COMPARISON for user in users)
        if not is_put_back or not any(map(_is_multiplied, gathers)):
            continue
        above = [value.producer for value in walk([scores], _router)]
        softmax = next((each for each in above if each and each.op in SOFTMAX), None)
        widths = [each.output.shape[-1] for each in above if each and each.op in PRODUCT]
        if not widths or not isinstance(widths[0], int) or same(widths[0], scores.shape[dim]):
            continue  # the last: each row has chosen among them
        yield RowsChosen(node, widths[0], node.outputs[1].shape[dim], softmax)


def _takes_rows(node: Node, size: Dim) -> bool:
    """Whether rows of something that is computed are gathered, along an axis of that size."""
    source = node.inputs[0] if node.op in GATHERED else None
    if source is None or source.is_constant or not source.dtype.is_floating_point:
        return False
    return len(source.shape) > 1 and any(same(size, each) for each in source.shape[:-1])


def _is_multiplied(gather: Node) -> bool:
    """Whether what is gathered soon meets weights."""
    return any(user.op in PRODUCT for user in readers(gather, lambda node: True))


def _router(value: Value) -> Iterator[Value]:
    node = value.producer
    if node is not None and node.op in LAYOUT | CAST | POINTWISE | SOFTMAX:
        yield from node.operands
