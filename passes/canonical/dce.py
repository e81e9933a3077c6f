"""dce: removes what nothing reads."""

from __future__ import annotations

from attngraph.ir import Graph, Remark
from attngraph.ir.dead import eliminate_dead_code
from attngraph.passes.rewriting.manager import GraphPass


class DeadCodeElimination(GraphPass, name="dce", exact=True, bitwise=True):
    """Erases unread nodes and constants. Graph inputs stay: they are the model's signature.

    A node that defines a dim (`nonzero`'s u0) lives as long as a type or an attribute names it.
    """

    def run(self, graph: Graph) -> list[Remark]:
        eliminate_dead_code(graph)
        return []
