"""simplify-layout: a chain of reshapes, permutes, selects and expands becomes the shortest one.

Each chain is read as axes (axes.py) and written again from the point that needs least copying.
"""

from __future__ import annotations

from attngraph.analysis.layout.axes import Operand, climb, fresh_axes
from attngraph.analysis.layout.cost import cost, layout_cost
from attngraph.ir import Builder, Graph, Node, Remark, traits
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.rewriting.manager import GraphPass
from attngraph.passes.rewriting.materialize import materialize
from attngraph.passes.rewriting.trials import LAYOUT


class SimplifyLayout(GraphPass, name="simplify-layout", exact=True, bitwise=True):
    """Replaces each chain of layout ops by the shortest one that moves the same data."""

    def run(self, graph: Graph) -> list[Remark]:
        build = Builder(graph)
        checked = Checked(graph, self.name, kinds=LAYOUT, exact=True)
        for node in list(graph):
            if node.graph is not None and node.op in traits.LAYOUT and _is_last(graph, node):
                for value in node.outputs:
                    if value.uses or value in graph.outputs:
                        _shorten(build, checked, Operand(value, fresh_axes(value.shape)))
        return checked.remarks


def _is_last(graph: Graph, node: Node) -> bool:
    """Whether something other than a layout op reads the node."""
    values = set(node.outputs)
    return bool(values & set(graph.outputs)) or any(
        user.op not in traits.LAYOUT for value in node.outputs for user in value.users
    )


def _shorten(build: Builder, checked: Checked, operand: Operand) -> None:
    """Rewrites the chain above one value, if that saves anything.

    Ops that others read as well stay whatever happens, so only the rest of the chain can be saved.
    """
    value, target = operand.value, operand.axes
    node = value.producer
    spent, shared = 0, False
    best: tuple[int, Operand] | None = None
    while node is not None and (above := climb(operand)) is not None:
        shared = shared or (operand.value is not value and len(operand.value.users) > 1)
        spent += 0 if shared else layout_cost(node)
        operand, node = above, above.value.producer
        needed = cost(operand, target)
        if needed is not None and needed < spent and (best is None or needed - spent < best[0]):
            best = (needed - spent, operand)
    if best is None or value.producer is None:
        return
    build.at(value.producer, value.producer.loc)
    checked.replace([(value, materialize(build, best[1], target))])
