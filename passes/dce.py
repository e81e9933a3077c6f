"""dce: removes what nothing reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attngraph.ir import Graph, Remark
from attngraph.ir.dims import symbols_of
from attngraph.ir.ops import op_def
from attngraph.passes.effects import dim_definers, dims_of
from attngraph.passes.manager import register


@register
@dataclass(frozen=True)
class DeadCodeElimination:
    """Erases unread nodes and constants. Graph inputs stay: they are the model's signature.

    A node that defines a dim (`nonzero`'s u0) lives as long as a type or an attribute names it.
    """

    name: ClassVar[str] = "dce"
    exact: ClassVar[bool] = True
    bitwise: ClassVar[bool] = True

    def run(self, graph: Graph) -> list[Remark]:
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
        for constant in list(graph.constants.values()):
            if not constant.uses and constant not in returned:
                graph.erase_constant(constant)
        return []
