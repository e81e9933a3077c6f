"""dce: removes what nothing reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attngraph.ir import Graph, Remark
from attngraph.ir.dead import eliminate_dead_code
from attngraph.passes.rewriting.manager import register


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
        eliminate_dead_code(graph)
        return []
