"""fuse-activations: GELU and SiLU that were spelled out, and the bias before a GELU."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from attngraph.analysis.values.matching import (
    equals,
    is_polynomial,
    offset_of,
    only_read_by,
    polynomial,
    producer,
    same_type,
    scalings,
    without_trailing,
)
from attngraph.ir import Graph, Node, Remark, Value
from attngraph.ir.ops import attribute, input_of
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.rewriting.manager import GraphPass
from attngraph.passes.rewriting.rewriter import Replacement, Rewriter, rule

_ERF = {1: math.sqrt(0.5)}
_TANH = {1: math.sqrt(2 / math.pi), 3: math.sqrt(2 / math.pi) * 0.044715}
_KERNELS = (torch.float32, torch.float16, torch.bfloat16)


class FuseActivations(GraphPass, name="fuse-activations", exact=True):
    """Reads c · x · gate(p(x)), with p a polynomial in x, whatever the order of the factors.

    - ½ x (1 + erf(x / √2)) → `aten.gelu`
    - ½ x (1 + tanh(√(2/π) (x + 0.044715 x³))) → `aten.gelu`, approximate="tanh"
    - x sigmoid(x), x / (1 + exp(−x)) → `aten.silu`
    - x sigmoid(α x) → `attn.quick_gelu`
    - gelu(linear(x, W, b)) → `attn.bias_gelu`(linear(x, W), b), and the same for gelu(x + b)

    Constants must be those of the formula to the rounding of the dtype.
    """

    def run(self, graph: Graph) -> list[Remark]:
        checked = Checked(graph, self.name, rounds=True)
        Rewriter(graph, [gated_product, bias_gelu], checked).run()
        return checked.remarks


@dataclass(frozen=True, slots=True)
class _Gate:
    """factor · (1 + erf(argument)) and the like; `kind` is the op inside."""

    kind: str
    argument: Value
    factor: float
    nodes: tuple[Node, ...]


def _gate(value: Value) -> _Gate | None:
    for source, factor in scalings(value):
        node = source.producer
        if node is None:
            return None
        if node.op == "aten.sigmoid" and node.inputs[0] is not None:
            return _Gate("aten.sigmoid", node.inputs[0], factor, (node,))
        if (offset := offset_of(node)) is not None:
            return _raised(node, *offset, factor)
    return None


def _raised(node: Node, value: Value, added: float, factor: float) -> _Gate | None:
    """c + c·u, for u one of erf, tanh and exp."""
    for source, scale in scalings(value):
        inner = producer(source, "aten.erf", "aten.tanh", "aten.exp")
        if inner is not None and inner.inputs[0] is not None:
            if not equals(scale, added, source.dtype):
                return None
            return _Gate(inner.op, inner.inputs[0], factor * added, (inner, node))
    return None


def _form(gate: _Gate, x: Value, scale: float) -> tuple[str, dict[str, Any]] | None:
    """The op that scale · x · gate is, with its attributes."""
    match gate.kind:
        case "aten.erf" if equals(scale, 0.5, x.dtype) and is_polynomial(gate.argument, x, _ERF):
            return "aten.gelu", {}
        case "aten.tanh" if equals(scale, 0.5, x.dtype) and is_polynomial(gate.argument, x, _TANH):
            return "aten.gelu", {"approximate": "tanh"}
        case "aten.sigmoid" | "aten.exp" if equals(scale, 1.0, x.dtype):
            found = polynomial(gate.argument, x)
            if found is None or found.keys() != {1}:
                return None
            alpha = found[1] if gate.kind == "aten.sigmoid" else -found[1]
            if equals(alpha, 1.0, x.dtype):
                return "aten.silu", {}
            return "attn.quick_gelu", {"alpha": alpha}
    return None


@rule("aten.mul.Tensor", "aten.mul.Scalar", "aten.div.Tensor", "aten.div.Scalar")
def gated_product(rewriter: Rewriter, node: Node) -> Replacement:
    """scale · x · gate, or scale · x / (1 + exp(…))."""
    for value, scale in scalings(node.output):
        product = producer(value, "aten.mul.Tensor", "aten.div.Tensor")
        if product is None:
            continue
        first, second = product.operands
        divides = product.op == "aten.div.Tensor"
        orders = [(first, second)] if divides else [(first, second), (second, first)]
        for factor, other in orders:
            gate = _gate(other)
            if gate is None or (gate.kind == "aten.exp") != divides:
                continue
            by_gate = 1 / gate.factor if divides else gate.factor
            for x, by_x in scalings(factor):
                if not same_type(x, node.output):  # a length may be a factor, of integers
                    continue
                form = _form(gate, x, scale * by_gate * by_x)
                if form is not None:
                    fused = (*gate.nodes, product)
                    return rewriter.emit(form[0], [x], form[1], at=node, fused=fused)
    return None


@rule("aten.gelu")
def bias_gelu(rewriter: Rewriter, node: Node) -> Replacement:
    """The bias of a product moves into the GELU; a matrix product by Gemm adds it for nothing."""
    source = node.inputs[0]
    if source is None or attribute(node, "approximate") != "none" or source.dtype not in _KERNELS:
        return None
    inner = producer(source, "aten.linear", "aten.add.Tensor")
    if inner is None or not only_read_by(rewriter.graph, source, node):
        return None
    if inner.op == "aten.add.Tensor":
        x, bias = inner.inputs
        if x is not None and not x.is_constant and bias is not None and bias.is_constant:
            plain = attribute(inner, "alpha") == 1 and same_type(x, source)
            if plain and _is_bias(bias, x):
                return rewriter.emit("attn.bias_gelu", [x, bias], {}, at=node, fused=[inner])
        return None
    bias = input_of(inner, "bias")
    if bias is None or len(source.shape) == 2 or not _is_bias(bias, source):
        return None
    inputs = without_trailing(*inner.inputs[:2])
    (product,) = rewriter.emit("aten.linear", inputs, {}, at=inner)
    return rewriter.emit("attn.bias_gelu", [product, bias], {}, at=node, fused=[inner])


def _is_bias(bias: Value, x: Value) -> bool:
    return len(bias.shape) == 1 and bias.dtype == x.dtype and bias.shape[0] == x.shape[-1]
