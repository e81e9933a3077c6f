"""fuse-quantized: a product with a weight that is stored in codes becomes one op."""

from __future__ import annotations

from attngraph.analysis.values.matching import producer
from attngraph.ir import Graph, Node, Remark
from attngraph.ir.ops import attribute, input_of, inputs_of
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.rewriting.manager import GraphPass
from attngraph.passes.rewriting.rewriter import Replacement, Rewriter, rule


class FuseQuantized(GraphPass, name="fuse-quantized", exact=True):
    """Exact: the same weight. Until here it is a value of its own beside a plain linear, which is
    what all analyses know; what isn't the weight of a linear is dequantized where it is read.
    """

    def run(self, graph: Graph) -> list[Remark]:
        checked = Checked(graph, self.name)
        Rewriter(graph, [quantized], checked).run()
        return checked.remarks


@rule("aten.linear")
def quantized(rewriter: Rewriter, node: Node) -> Replacement:
    stored = producer(input_of(node, "weight"), "attn.dequantize")
    if stored is None or input_of(node, "input").dtype != stored.output.dtype:
        return None
    codes, scales, zeros = inputs_of(stored, "codes", "scales", "zeros")
    inputs = (input_of(node, "input"), codes, scales, input_of(node, "bias"))
    points = () if zeros is None else (zeros,)
    bits = {"bits": attribute(stored, "bits")}
    return rewriter.emit("attn.quantized_linear", (*inputs, *points), bits, at=node)
