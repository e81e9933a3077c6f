"""fold-scales: what scales or shifts a linear or convolution goes into its weights.

Layer scale, a temperature per head, inference batch norm (Ioffe and Szegedy 2015), a vector added
after a product: through any layout ops between, as long as the factor differs by feature only.
"""

from __future__ import annotations

import torch

from attngraph.analysis.values.affine import product_above
from attngraph.analysis.values.elementwise import read_scaling
from attngraph.analysis.values.weights import Owners
from attngraph.ir import Graph, Remark
from attngraph.passes.rewriting.manager import GraphPass
from attngraph.passes.weights.folding import before, checked_weights, fold, grows, is_exact

_WHAT = "A constant factor or offset is folded into the weights before it."


class FoldScales(GraphPass, name="fold-scales", exact=False):
    """Multiplies constant factors into the weights of the product before them, and adds offsets.

    Only where the weights have no other reader, and no more bytes are stored afterwards. Exact are
    powers of two, and an offset where there was no bias.
    """

    exact_only: bool = False
    stored_in: torch.dtype | None = None

    def run(self, graph: Graph) -> list[Remark]:
        checked = checked_weights(graph, self.name, self.stored_in, exact_only=self.exact_only)
        owners = Owners(graph)
        for node in graph:
            scaling = read_scaling(node)
            laid = None if scaling is None else product_above(graph, scaling.source, node)
            if scaling is None or laid is None:
                continue
            features = scaling.of_product(laid)
            plan = None if features is None else before(laid.product, features, owners)
            if plan is None or grows(plan, owners, scaling.constants):
                continue
            fold(
                checked,
                plan,
                laid.path,
                {node.outputs[0]: scaling.source},  # a batch norm may have others, unread
                constants=scaling.constants,
                reassociates="" if is_exact(plan) else _WHAT,
            )
        return checked.remarks
