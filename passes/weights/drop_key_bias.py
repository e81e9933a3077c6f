"""drop-key-bias: the bias of the keys goes where it adds one number to all scores of a row.

⟨q, k + b⟩ = ⟨q, k⟩ + ⟨q, b⟩, and ⟨q, b⟩ is the same for every key, which a softmax doesn't see. Not
so with a cap on the scores, with sinks, or with anything but a change of layout between the
projection and the attention: rotary embeddings, a norm, keys from a cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attngraph.analysis.layout.axes import Operand, climb, fresh_axes
from attngraph.analysis.values.matching import only_read_by
from attngraph.ir import Graph, Node, Remark
from attngraph.ir.ops import attribute, input_of
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.rewriting.manager import register
from attngraph.passes.rewriting.trials import ATTENTION
from attngraph.passes.weights.folding import Folded, fold

_KEY = 1
_FEATURES = 2


@register
@dataclass(frozen=True)
class DropKeyBias:
    """Takes the bias off a key projection that only one attention reads."""

    name: ClassVar[str] = "drop-key-bias"
    exact: ClassVar[bool] = False

    def run(self, graph: Graph) -> list[Remark]:
        checked = Checked(graph, self.name, ATTENTION)
        for node in graph:
            path = _projection(graph, node) if node.op == "attn.attention" else None
            if path is None:
                continue
            bare = Folded(path[0], None, None, drops_bias=True)
            parts = ("query", "value", "bias", "mask")
            query, value, added, mask = (input_of(node, name) for name in parts)
            leaves = [item for item in (path[0].inputs[0], query, value, added, mask) if item]
            biases = [] if added is None else [added]
            what = "The bias of the keys is dropped: it is one number for all keys of a query."
            fold(checked, [bare], path, leaves=leaves, biases=biases, reassociates=what)
        return checked.remarks


def _projection(graph: Graph, attention: Node) -> list[Node] | None:
    """The linear with a bias whose features are the keys' features, and all up to the attention."""
    key = attention.inputs[_KEY]
    joined = any(input_of(attention, name) is not None for name in ("sinks", "past_key"))
    if key is None or joined or attribute(attention, "softcap"):
        return None
    axes = fresh_axes(key.shape)
    operand, reader, path = Operand(key, axes), attention, [attention]
    while only_read_by(graph, operand.value, reader):
        producer = operand.value.producer
        if producer is None:
            return None
        path.insert(0, producer)
        if producer.op == "aten.linear":
            within = set(Operand(key, axes).dims[_FEATURES])
            has_bias = input_of(producer, "bias") is not None
            return path if has_bias and set(operand.dims[-1]) <= within else None
        above = climb(operand)
        if above is None:
            return None
        operand, reader = above, producer
    return None
