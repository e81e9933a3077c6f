"""Projections: the products of a value with a constant matrix, in any of aten's spellings."""

from __future__ import annotations

from dataclasses import dataclass

from attngraph.analysis.values.weights import Owners
from attngraph.ir import Node, Value
from attngraph.ir.ops import attribute, input_of


@dataclass(frozen=True, slots=True)
class Projection:
    """source · weight + bias. The weight is (N, K) in the family "linear", else (K, N)."""

    node: Node
    weight: Value
    bias: Value | None
    family: str

    @property
    def source(self) -> Value:
        """What the node reads now: it may itself have been merged with others since."""
        source = self.node.inputs[1 if self.node.op == "aten.addmm" else 0]
        assert source is not None
        return source

    @property
    def axis(self) -> int:
        """The weight's axis of outputs."""
        return 0 if self.family == "linear" else 1

    @property
    def width(self) -> int:
        return int(self.weight.shape[self.axis])

    def product(self, weight: Value, bias: Value | None) -> tuple[str, list[Value]]:
        """The op and inputs of the same product with another weight and bias."""
        if self.family != "matrix":
            op = "aten.linear" if self.family == "linear" else "aten.matmul"
            return op, [self.source, weight] if bias is None else [self.source, weight, bias]
        if bias is None:
            return "aten.mm", [self.source, weight]
        return "aten.addmm", [bias, self.source, weight]


def read_projection(node: Node, owners: Owners) -> Projection | None:
    """The projection a node computes with weights that only it reads, if it is one."""
    match node.op:
        case "aten.linear":
            source, weight, bias = (input_of(node, name) for name in ("input", "weight", "bias"))
            family = "linear"
        case "aten.addmm" if attribute(node, "alpha") == 1 and attribute(node, "beta") == 1:
            bias, source, weight = node.inputs
            family = "matrix"
        case "aten.mm" | "aten.matmul":
            (source, weight), bias = node.inputs, None
            family = "matrix" if source is not None and len(source.shape) == 2 else "batched"
        case _:
            return None
    if source is None or weight is None or source.is_constant or not weight.is_constant:
        return None
    if len(weight.shape) != 2 or not owners.is_sole(weight):
        return None
    projection = Projection(node, weight, bias, family)
    if bias is not None and (not bias.is_constant or bias.shape != (projection.width,)):
        return None
    return projection
