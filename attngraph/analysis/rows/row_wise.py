"""Ops that compute row (b, t) of their results from row (b, t) of their operands alone.

A value has rows where its first two dims are (B, T). What two rows share, a weight or a table of
positions, is no row: it is read by all of them alike. batching.py says how each op acts.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeAlias, TypeVar

from networkx.utils import UnionFind

from attngraph.analysis.rows.batching import rule_of
from attngraph.ir import Dim, Node, TensorType, Value
from attngraph.ir.dims import same_shape

Rows: TypeAlias = tuple[Dim, Dim]
"""(B, T): elements of a batch, and positions."""
T = TypeVar("T", bound=Hashable)


def has_rows(value: Value | None, rows: Rows) -> bool:
    """Whether the first two dims are those of the rows."""
    if value is None or not isinstance(value.type, TensorType):
        return False
    return len(value.shape) >= 2 and same_shape(value.shape[:2], rows)


def lead(value: Value, rank: int) -> Rows | None:
    """The first two dims once a value is broadcast to that rank; None where it has more."""
    missing = rank - len(value.shape)
    if missing < 0 or rank < 2:
        return None
    shape = (1,) * missing + tuple(value.shape)
    return shape[0], shape[1]


def broadcasts(node: Node) -> bool:
    """Whether operands may be one for all rows along B, along T or both."""
    rule = rule_of(node)
    return rule is not None and rule.broadcasts()


def row_operands(node: Node, rows: Rows) -> list[Value] | None:
    """The operands with rows that a node reads row by row; None where it isn't row-wise.

    The other operands are read by every row, as they are or at the row's own place along B or T.
    """
    rule = rule_of(node)
    tracks = None if rule is None else rule.tracks(node)
    if rule is None or tracks is None or not all(has_rows(value, rows) for value in node.outputs):
        return None
    found = []
    for value, track in zip(node.inputs, tracks, strict=True):
        if value is not None and track[:2] == (0, 1) and has_rows(value, rows):
            found.append(value)
        elif not {0, 1}.isdisjoint(track) and not rule.broadcasts():
            return None
    return found or None


def linked(groups: Iterable[Iterable[T]]) -> list[set[T]]:
    """Everything in the groups, where groups that overlap are one; in the order of first sight."""
    union: UnionFind[T] = UnionFind()
    for group in groups:
        union.union(*group)
    return list(union.to_sets())
