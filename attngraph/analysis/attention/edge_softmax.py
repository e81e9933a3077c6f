"""Attention over the edges of a graph: a softmax whose sums are scattered, one for each target.

As torch_geometric and DGL write it (Veličković et al., 2018). No operator has keys that differ from
query to query by an index; it is named, so that nobody has to wonder.
"""

from __future__ import annotations

from collections.abc import Iterator

from attngraph.analysis.attention.exponentials import EXP, added
from attngraph.analysis.attention.logits import Declined
from attngraph.analysis.layout.axes import COPIES, LAYOUTS, RESHAPES
from attngraph.analysis.values.scalars import is_cast
from attngraph.ir import Graph, Node, Value

_GATHERS = frozenset(["aten.index_select", "aten.gather", "aten.index.Tensor"])
_SCATTERS = frozenset(["aten.scatter_add", "aten.index_add", "aten.scatter_reduce.two"])
_FAR = 16


def edge_softmaxes(graph: Graph) -> Iterator[tuple[Node, Declined]]:
    """Each division by scattered sums of exponentials, and what it is."""
    named: set[Node] = set()
    for node in graph:
        if node.op != "aten.div.Tensor":
            continue
        scatter = _above(node.inputs[1], _SCATTERS)
        if scatter is None or scatter.attrs.get("reduce", "sum") != "sum":
            continue
        exponential = _above(scatter.inputs[2], frozenset([EXP]))
        if exponential is None or exponential in named:
            continue
        named.add(exponential)
        yield (
            node,
            Declined(
                "graph-attention",
                "This is attention over the edges of a graph: the softmax is over those that an "
                "index gives to each target, and its sums are scattered.",
                scatter,
                "It is kept as it is; in a dense form, with a mask for the edges, it would fuse.",
            ),
        )


def _above(value: Value | None, wanted: frozenset[str]) -> Node | None:
    """The first of these ops above a value, past layout, gathers and a small number."""
    for _ in range(_FAR):
        node = None if value is None else value.producer
        if node is None or node.op in wanted:
            return node
        is_layout = node.op in RESHAPES or node.op in COPIES or node.op in LAYOUTS or is_cast(node)
        if not is_layout and node.op not in _GATHERS and added(node) is None:
            return None
        value = node.inputs[0]
    return None
