"""defer-layout: `linear` of permuted or regrouped rows becomes permuted rows of a `linear`.

A projection works row by row, so its rows' order can wait; the layout op meets its inverse, or the
attention's own layout, below.
"""

from __future__ import annotations

from attngraph.ir import Builder, Graph, Node, Remark, Value
from attngraph.ir.dims import same
from attngraph.ir.ops import attribute
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.rewriting.manager import GraphPass


class DeferLayout(GraphPass, name="defer-layout", exact=True):
    """Moves permutes and reshapes of rows from above a `linear` to below it."""

    def run(self, graph: Graph) -> list[Remark]:
        build, checked = Builder(graph), Checked(graph, self.name)
        for node in list(graph):
            if node.op == "aten.linear":
                _defer(build, checked, node)
        return checked.remarks


def _defer(build: Builder, checked: Checked, linear: Node) -> None:
    value = linear.inputs[0]
    above: list[Node] = []
    while value is not None and (node := value.producer) is not None and _keeps_rows(node):
        above.append(node)
        value = node.inputs[0]
    if not above or value is None or len(value.shape) < 2:
        return
    build.at(linear, linear.loc)
    result = build("aten.linear", value, *linear.inputs[1:])
    for node in reversed(above):
        result = _again(build, node, result)
    checked.replace([(linear.output, result)])


def _keeps_rows(node: Node) -> bool:
    """Whether a layout op leaves the last axis as it is."""
    source = node.inputs[0] if node.inputs else None
    if source is None or not source.shape:
        return False
    if node.op == "aten.permute":
        return bool(attribute(node, "dims")[-1] % len(source.shape) == len(source.shape) - 1)
    return node.op == "aten.reshape" and same(source.shape[-1], node.output.shape[-1])


def _again(build: Builder, node: Node, value: Value) -> Value:
    if node.op == "aten.permute":
        return build("aten.permute", value, dims=attribute(node, "dims"))
    return build("aten.reshape", value, shape=[*node.output.shape[:-1], value.shape[-1]])
