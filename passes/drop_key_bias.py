"""drop-key-bias: the bias of the keys goes where it adds one number to all scores of a row.

⟨q, k + b⟩ = ⟨q, k⟩ + ⟨q, b⟩, and ⟨q, b⟩ is the same for every key, which a softmax doesn't see. Not
so with a cap on the scores, with sinks, or with anything but a change of layout between the
projection and the attention: rotary embeddings, a norm, keys from a cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attngraph.ir import Graph, Node, Remark
from attngraph.ir.ops import attribute, input_of
from attngraph.passes.axes import Operand, climb, fresh_axes
from attngraph.passes.evidence import Evidence
from attngraph.passes.labels import reassociated
from attngraph.passes.manager import register
from attngraph.passes.matching import only_read_by
from attngraph.passes.weights import discard

_KEY = 1
_FEATURES = 2


@register
@dataclass(frozen=True)
class DropKeyBias:
    """Takes the bias off a key projection that only one attention reads."""

    name: ClassVar[str] = "drop-key-bias"
    exact: ClassVar[bool] = False

    def run(self, graph: Graph) -> list[Remark]:
        evidence = Evidence(graph)
        remarks = []
        for node in graph:
            if node.op != "attn.attention":
                continue
            linear = _projection(graph, node)
            if linear is not None and _drop(graph, evidence, node, linear):
                what = "The bias of the keys is dropped: it is one number for all keys of a query."
                remarks.append(reassociated(linear, what))
        return remarks


def _projection(graph: Graph, attention: Node) -> Node | None:
    """The linear with a bias whose features are the keys' features, and nothing else."""
    key = attention.inputs[_KEY]
    joined = any(input_of(attention, name) is not None for name in ("sinks", "past_key"))
    if key is None or joined or attribute(attention, "softcap"):
        return None
    axes = fresh_axes(key.shape)
    operand, reader = Operand(key, axes), attention
    while only_read_by(graph, operand.value, reader):
        producer = operand.value.producer
        if producer is None:
            return None
        if producer.op == "aten.linear":
            within = set(Operand(key, axes).dims[_FEATURES])
            has_bias = input_of(producer, "bias") is not None
            return producer if has_bias and set(operand.dims[-1]) <= within else None
        above = climb(operand)
        if above is None:
            return None
        operand, reader = above, producer
    return None


def _drop(graph: Graph, evidence: Evidence, attention: Node, linear: Node) -> bool:
    """Leaves the bias out, unless the attention turns out to notice."""
    source, weight, bias = (input_of(linear, name) for name in ("input", "weight", "bias"))
    bare = graph.create(
        "aten.linear", [source, weight], types=[linear.output.type], loc=linear.loc, before=linear
    )
    trial = _replayed(graph, attention, linear, bare)
    query, _, value, added, mask = (
        input_of(attention, name) for name in ("query", "key", "value", "bias", "mask")
    )
    leaves = [leaf for leaf in (source, query, value, added, mask) if leaf is not None]
    biases = [] if added is None else [added]
    pairs = list(zip(attention.outputs, trial[-1].outputs, strict=True))
    differs = evidence.disagreement(pairs, leaves, biases) is not None
    for node in reversed(trial):
        graph.erase(node)
    if differs:
        graph.erase(bare)
        return False
    graph.replace_uses(linear.output, bare.output)
    graph.erase(linear)
    discard(graph, [bias])
    return True


def _replayed(graph: Graph, attention: Node, linear: Node, bare: Node) -> list[Node]:
    """Copies of what lies between the projection and the attention, and of the attention."""
    path = [attention]
    while (value := path[-1].inputs[_KEY if path[-1] is attention else 0]) is not None:
        if value is linear.output or value.producer is None:
            break
        path.append(value.producer)
    copies, renamed = [], {linear.output: bare.output}
    for node in reversed(path):
        twin = graph.create(
            node.op,
            [None if v is None else renamed.get(v, v) for v in node.inputs],
            node.attrs,
            types=[value.type for value in node.outputs],
            loc=node.loc,
            before=attention,
        )
        renamed.update(zip(node.outputs, twin.outputs, strict=True))
        copies.append(twin)
    return copies
