"""split-projections: a product that is split at once becomes one product for each piece.

One product of Q, K and V saves launches on a GPU. On the CPU there are none to save: the split
copies what the product has just written, which costs more than it brings (bench/kernels.py).
"""

from __future__ import annotations

import math
from itertools import zip_longest

import torch

from attngraph.analysis.values.affine import Linear, read_linear
from attngraph.analysis.values.matching import without_trailing
from attngraph.analysis.values.weights import Owners
from attngraph.ir import Graph, Node, Remark, Value
from attngraph.ir.dead import discard
from attngraph.ir.ops import attribute
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.rewriting.manager import GraphPass
from attngraph.passes.weights.folding import cut

_FEW_ROWS = 32  # up to which the copy costs no more than the calls


class SplitProjections(GraphPass, name="split-projections", exact=True):
    """Takes apart what merge-projections made, or the model has packed, for the CPU.

    The pieces' weights are views into the packed one. A bias of zeros goes. Products of at most 32
    rows stay, if their number is known.

    Each element is the same sum of products as before; how a GEMM blocks the sum may depend on its
    width, so the last bit may differ.
    """

    def run(self, graph: Graph) -> list[Remark]:
        checked = Checked(graph, self.name)
        owners = Owners(graph)
        for node in list(graph):
            if node.op == "aten.split_with_sizes" and node.inputs[0] is not None:
                linear = _read(graph, node, node.inputs[0], owners)
                if linear is not None:
                    _split(graph, checked, linear, node)
        return checked.remarks


def _read(graph: Graph, split: Node, packed: Value, owners: Owners) -> Linear | None:
    if packed.producer is None or packed in graph.outputs or len(packed.uses) != 1:
        return None
    if attribute(split, "dim") % len(packed.shape) != len(packed.shape) - 1:
        return None
    if not all(isinstance(part.shape[-1], int) for part in split.outputs):
        return None
    rows = packed.shape[:-1]
    if all(isinstance(dim, int) for dim in rows) and math.prod(map(int, rows)) <= _FEW_ROWS:
        return None
    linear = read_linear(packed.producer)
    return linear if linear is not None and owners.is_sole(linear.weight) else None


def _split(graph: Graph, checked: Checked, whole: Linear, split: Node) -> None:
    rows = [int(value.shape[-1]) for value in split.outputs]
    weights = cut(checked, whole.weight, rows)
    biases = [] if whole.bias is None else cut(checked, whole.bias, rows)
    parts = [
        graph.create(
            "aten.linear",
            without_trailing(whole.source, weight, bias),
            types=[old.type],
            loc=whole.node.loc,
            before=split,
        )
        for weight, bias, old in zip_longest(weights, map(_unless_zero, biases), split.outputs)
    ]
    pairs = zip(split.outputs, (part.output for part in parts), strict=True)
    if checked.replace(pairs):
        graph.erase(split)
        graph.erase(whole.node)
    discard(graph, [whole.weight, whole.bias, *weights, *biases])


def _unless_zero(bias: Value) -> Value | None:
    data = bias.data
    return bias if data is None or data.is_meta or torch.any(data) else None
