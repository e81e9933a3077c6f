"""Regions of large static sizes, read as regions of any size.

Every large axis of a leaf becomes an unknown of its own (any_size.py), and the nodes are followed
(shape_reader.py) to see which sizes go together: a product's summed axes, what is added, the dims
of a reshape. What has no rule for its sizes keeps them, and so do its operands. The sizes among the
attributes follow. Evaluated at some small sizes, a node whose result has another shape than was
read here ends the trial (regions.py): a wrong reading costs time and proves nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attngraph.analysis.layout.any_size import Sizes
from attngraph.analysis.layout.product_rules import PRODUCTS
from attngraph.analysis.layout.shape_reader import FEWEST, Reader, Rule, Shape, elementwise
from attngraph.analysis.layout.shape_rules import SHAPES, reduced
from attngraph.ir import DimInfo, Node, ScalarType, Value
from attngraph.ir.traits import (
    ANY_CONVOLUTION,
    ATTENTION,
    LINEAR,
    OPAQUE,
    PAD,
    RECURRENCE,
    REDUCTION,
    REPEAT,
    ROLL,
    SCATTER,
)

RULES = {**SHAPES, **PRODUCTS}
# Where they have no rule: ops whose results have a size of their own, or whose attributes count.
_SIZED = SCATTER | PAD | ROLL | REPEAT | ANY_CONVOLUTION | RECURRENCE | ATTENTION | LINEAR | OPAQUE


@dataclass(frozen=True)
class Generalized:
    """The shapes of all values of a region, and the attributes of its nodes, over more dims."""

    shapes: Mapping[Value, Shape]
    attrs: Mapping[Node, Mapping[str, Any]]
    infos: Mapping[str, DimInfo]


def generalized(
    leaves: Iterable[Value],
    nodes: Sequence[Node],
    pairs: Iterable[tuple[Value, Value]],
    kept: Collection[Value],
    dims: Iterable[str],
) -> Generalized | None:
    """A region with unknowns in the place of large sizes; None where none is left.

    The values of each pair have one shape. The leaves in `kept` keep their sizes. `dims` are the
    graph's own.
    """
    reader = Reader(Sizes(dims), _rule_of)
    for value in leaves:
        if isinstance(value.type, ScalarType):
            return None
        shape = value.shape if value in kept else tuple(map(reader.sizes.fresh, value.shape))
        reader.shapes[value] = shape
    for node in nodes:
        if any(isinstance(value.type, ScalarType) for value in node.outputs):
            return None
        reader.read(node)
    sizes = reader.sizes
    for old, new in pairs:
        for first, second in zip(reader.shapes[old], reader.shapes[new], strict=True):
            sizes.unify(first, second)
    if not sizes.unknowns:
        return None
    return Generalized(
        {value: sizes.resolved(shape) for value, shape in reader.shapes.items()},
        {node: sizes.resolved(attrs) for node, attrs in reader.resolved_attrs()},
        sizes.infos(FEWEST),
    )


def _rule_of(op: str) -> Rule:
    if op in RULES:
        return RULES[op]
    if op in REDUCTION:
        return reduced
    return _kept if op in _SIZED else elementwise


def _kept(reader: Reader, node: Node) -> None:
    """An op whose result has a size of its own, or whose attributes count elements."""
    return
