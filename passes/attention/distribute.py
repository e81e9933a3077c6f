"""distribute: (a·P₁ ± b·P₂) V becomes a·P₁ V ± b·P₂ V, so that each softmax meets the values.

Differential attention (Ye et al. 2024) subtracts two attention maps before it applies them.
"""

from __future__ import annotations

from attngraph.analysis.walks import walk
from attngraph.ir import Builder, Graph, Node, Remark, Value
from attngraph.ir.traits import ADDITIVE, CAST, LAYOUT, MATMUL, MULTIPLICATION, SOFTMAX
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.rewriting.manager import GraphPass


class Distribute(GraphPass, name="distribute", exact=False):
    """Applies each of two subtracted attention maps to the values by itself."""

    def run(self, graph: Graph) -> list[Remark]:
        build, checked = Builder(graph), Checked(graph, self.name)
        for node in list(graph):
            if node.graph is None or node.op not in MATMUL:
                continue
            _distribute(build, checked, node)
        return checked.remarks


def _distribute(build: Builder, checked: Checked, product: Node) -> bool:
    for side in product.inputs:
        path = _path_to_sum(side) if side is not None else None
        if path is None or side is None:
            continue
        total = path[-1]
        if not all(value is not None and _is_probability(value) for value in total.inputs):
            continue
        if any(value is not None and value.shape != total.output.shape for value in total.inputs):
            continue
        build.at(product, product.loc)
        terms = []
        for addend in total.inputs:
            value = addend
            for layout in reversed(path[:-1]):
                value = build.again(layout, layout.inputs[0], value)
            terms.append(build.again(product, side, value))
        what = "The values are multiplied with each of two weights, then subtracted."
        pair = product.output, build(total.op, *terms, **total.attrs)
        return checked.replace([pair], reassociates=what)
    return False


def _path_to_sum(value: Value) -> list[Node] | None:
    """Layout ops up to a sum, the sum last."""
    path: list[Node] = []
    while (node := value.producer) is not None and len(path) < 16:
        path.append(node)
        if node.op in ADDITIVE:
            return path
        if node.op not in LAYOUT | CAST or node.inputs[0] is None or len(node.outputs) != 1:
            return None
        value = node.inputs[0]
    return None


def _is_probability(value: Value) -> bool:
    """A softmax, or one that was scaled or laid out anew."""

    def above(value: Value) -> list[Value]:
        node = value.producer
        if node is None:
            return []
        if node.op in MULTIPLICATION:
            return node.operands
        return node.operands[:1] if node.op in LAYOUT | CAST else []

    found = (value.producer for value in walk([value], above))
    return any(node is not None and node.op in SOFTMAX for node in found)
