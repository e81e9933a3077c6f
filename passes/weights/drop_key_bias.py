"""drop-key-bias: the bias of the keys goes where it adds one number to all scores of a row.

⟨q, k + b⟩ = ⟨q, k⟩ + ⟨q, b⟩, and ⟨q, b⟩ is the same for every key, which a softmax doesn't see. Not
so with a cap on the scores, with sinks, or with anything but a change of layout between the
projection and the attention: rotary embeddings, a norm, keys from a cache.
"""

from __future__ import annotations

from attngraph.analysis.layout.axes import resolve
from attngraph.analysis.values.affine import Affine, LaidOut, product_above
from attngraph.ir import Graph, Node, Remark
from attngraph.ir.ops import attribute, input_of, inputs_of
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.rewriting.manager import GraphPass
from attngraph.passes.rewriting.trials import ATTENTION
from attngraph.passes.weights.folding import fold

_FEATURES = 2  # the dim of a key's features
_WHAT = "The bias of the keys is dropped: it is one number for all keys of a query."


class DropKeyBias(GraphPass, name="drop-key-bias", exact=False):
    """Takes the bias off a key projection that only one attention reads."""

    def run(self, graph: Graph) -> list[Remark]:
        checked = Checked(graph, self.name, ATTENTION)
        for node in graph:
            laid = _projection(graph, node) if node.op == "attn.attention" else None
            if laid is None:
                continue
            bare = {laid.product: Affine(laid.product.inputs[1])}
            parts = ("query", "value", "bias", "mask")
            query, value, added, mask = inputs_of(node, *parts)
            leaves = [v for v in (laid.product.inputs[0], query, value, added, mask) if v]
            biases = [] if added is None else [added]
            path = [*laid.path, node]
            fold(checked, bare, path, leaves=leaves, biases=biases, reassociates=_WHAT)
        return checked.remarks


def _projection(graph: Graph, attention: Node) -> LaidOut | None:
    """The linear with a bias whose features are features of the keys."""
    key = input_of(attention, "key")
    joined = any(input_of(attention, name) is not None for name in ("sinks", "past_key"))
    if key is None or joined or attribute(attention, "softcap"):
        return None
    laid = product_above(graph, key, attention)
    if laid is None or laid.product.op != "aten.linear":
        return None
    if input_of(laid.product, "bias") is None:
        return None
    return laid if set(laid.features) <= set(resolve(laid.axes[_FEATURES])) else None
