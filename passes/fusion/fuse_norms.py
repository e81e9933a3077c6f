"""fuse-norms: RMS norm in every spelling, and the residual sum and bias in front of a norm."""

from __future__ import annotations

from typing import Any

import torch

from attngraph.analysis.values.matching import (
    equals,
    offset_of,
    only_read_by,
    producer,
    same_type,
    without_trailing,
)
from attngraph.analysis.values.scalars import scale_of
from attngraph.analysis.values.weights import weights_of
from attngraph.ir import Graph, Node, Remark, Value
from attngraph.ir.dims import same, same_shape
from attngraph.ir.loc import fuse_locs
from attngraph.ir.ops import attribute, input_of
from attngraph.ir.traits import MEAN, SUM
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.rewriting.manager import GraphPass
from attngraph.passes.rewriting.rewriter import Replacement, Rewriter, rule

_KERNELS = (torch.float32, torch.float16, torch.bfloat16)
_RMS = "attn.rms_norm"


class FuseNorms(GraphPass, name="fuse-norms", exact=True):
    """Reads norms over the last axis, then takes in what is added in front of them.

    - x · rsqrt(mean(x²) + ε) [· w] with its casts → `attn.rms_norm`; `aten.rms_norm` likewise
    - layer_norm(x + skip) → `attn.skip_layer_norm`, with the bias of a linear that made x
    - rms_norm(x + skip) → `attn.skip_rms_norm`

    x and skip must have one shape, (B, S, H) or (S, H): onnxruntime's kernels take no other. Where
    a model squares half-precision numbers without a cast, the statistics become more precise.
    """

    def run(self, graph: Graph) -> list[Remark]:
        checked = Checked(graph, self.name, rounds=True)
        Rewriter(graph, [rms_norm, aten_rms_norm, rms_of_cast, weighted_rms], checked).run()
        for node in graph:
            if node.op in ("aten.layer_norm", _RMS):
                _take_sum(graph, checked, node)
        return checked.remarks


def _source(node: Node) -> Value | None:
    return node.inputs[0] if node.inputs else None


def _under_root(value: Value | None) -> Value | None:
    """v, where the value is √v."""
    node = producer(value, "aten.sqrt", "aten.pow.Tensor_Scalar")
    if node is None or (node.op != "aten.sqrt" and attribute(node, "exponent") != 0.5):
        return None
    return _source(node)


def _under_inverse_root(value: Value | None) -> Value | None:
    """v, where the value is 1 / √v."""
    node = producer(value, "aten.rsqrt", "aten.reciprocal", "aten.pow.Tensor_Scalar")
    if node is None:
        return None
    if node.op == "aten.reciprocal":
        return _under_root(_source(node))
    if node.op != "aten.rsqrt" and attribute(node, "exponent") != -0.5:
        return None
    return _source(node)


def _square(value: Value | None) -> Value | None:
    """x, where the value is x²."""
    node = producer(value, "aten.pow.Tensor_Scalar", "aten.square", "aten.mul.Tensor")
    if node is None or (node.op == "aten.mul.Tensor" and node.inputs[0] is not node.inputs[1]):
        return None
    if node.op == "aten.pow.Tensor_Scalar" and attribute(node, "exponent") != 2:
        return None
    return _source(node)


def _mean(value: Value) -> Value | None:
    """x, where the value is x's mean over the last axis, which stays with size 1."""
    node, scale = value.producer, 1.0
    if node is not None and (scaling := scale_of(node)) is not None:
        node, scale = scaling[0].producer, scaling[1]
    if node is None or node.op not in SUM | MEAN:
        return None
    source = _source(node)
    if source is None or attribute(node, "keepdim") is not True:
        return None
    rank, width = len(source.shape), source.shape[-1] if source.shape else 1
    if [dim % rank for dim in attribute(node, "dim") or []] != [rank - 1]:
        return None
    if attribute(node, "dtype") not in (None, source.dtype) or not isinstance(width, int):
        return None
    expected = 1.0 if node.op == "aten.mean.dim" else 1 / width
    return source if equals(scale, expected, value.dtype) else None


@rule("aten.mul.Tensor", "aten.div.Tensor")
def rms_norm(rewriter: Rewriter, node: Node) -> Replacement:
    """x · rsqrt(mean(x²) + ε) and x / sqrt(mean(x²) + ε)."""
    first, second = node.inputs
    if node.op == "aten.div.Tensor":
        orders = [(first, _under_root(second))]
    else:
        orders = [(first, _under_inverse_root(second)), (second, _under_inverse_root(first))]
    for x, variance in orders:
        if x is None or variance is None or variance.producer is None:
            continue
        offset = offset_of(variance.producer)
        base = _square(_mean(offset[0])) if offset is not None else None
        if offset is None or base is None or offset[1] < 0:
            continue
        if (base is x or _cast_source(base) is x) and same_type(base, node.output):
            return rewriter.emit(_RMS, [base], {"eps": offset[1]}, at=node, fused=[base.producer])
    return None


def _cast_source(value: Value) -> Value | None:
    """x, where the value is x in a wider float type."""
    node = producer(value, "aten._to_copy")
    source = None if node is None else _source(node)
    narrow = (torch.float16, torch.bfloat16)
    return source if source is not None and source.dtype in narrow else None


@rule("aten.rms_norm")
def aten_rms_norm(rewriter: Rewriter, node: Node) -> Replacement:
    """torch's own, over one axis. canonicalize has written its ε."""
    x, weight, eps = input_of(node, "input"), input_of(node, "weight"), attribute(node, "eps")
    if len(attribute(node, "normalized_shape")) != 1 or eps is None:
        return None
    if weight is not None and weight.dtype != x.dtype:
        return None
    return rewriter.emit(_RMS, without_trailing(x, weight), {"eps": float(eps)}, at=node)


def _plain_rms(rewriter: Rewriter, value: Value | None, reader: Node) -> Node | None:
    """The RMS norm without a weight that makes the value, if only `reader` reads it."""
    node = producer(value, _RMS)
    if node is None or value is None or len(node.inputs) > 1:
        return None
    return node if only_read_by(rewriter.graph, value, reader) else None


@rule("aten._to_copy")
def rms_of_cast(rewriter: Rewriter, node: Node) -> Replacement:
    """A norm between a cast up and the cast back is what the op does by itself."""
    inner = _plain_rms(rewriter, _source(node), node)
    source = None if inner is None or inner.inputs[0] is None else _cast_source(inner.inputs[0])
    if inner is None or source is None or source.dtype != node.output.dtype:
        return None
    return rewriter.emit(_RMS, [source], inner.attrs, at=node, fused=[inner])


@rule("aten.mul.Tensor")
def weighted_rms(rewriter: Rewriter, node: Node) -> Replacement:
    """The weight, on either side."""
    first, second = node.inputs
    for value, weight in ((first, second), (second, first)):
        inner = _plain_rms(rewriter, value, node)
        if inner is None or weight is None or len(weight.shape) != 1:
            continue
        x = inner.inputs[0]
        if x is not None and same(weight.shape[0], x.shape[-1]):
            return rewriter.emit(_RMS, [x, weight], inner.attrs, at=node, fused=[inner])
    return None


def _take_sum(graph: Graph, checked: Checked, norm: Node) -> None:
    """The norm of a sum becomes one node, in the place of the sum: others may read that earlier."""
    total = norm.inputs[0]
    add = producer(total, "aten.add.Tensor")
    if add is None or total is None or not _is_residual(add):
        return
    parts = weights_of(norm) or {}
    weight, bias = parts.get("weight"), parts.get("bias")
    affine = [value for value in (weight, bias) if value is not None]
    if weight is None or any(v.producer is not None or v.dtype != total.dtype for v in affine):
        return
    attrs: dict[str, Any] = {"eps": float(attribute(norm, "eps"))}
    first, second = add.operands
    op, inputs = "attn.skip_rms_norm", without_trailing(first, second, weight)
    if norm.op != _RMS:
        x, skip, x_bias = _biased(graph, add, first, second)
        op, inputs = "attn.skip_layer_norm", without_trailing(x, skip, weight, bias, x_bias)
    types, loc = [norm.output.type, total.type], fuse_locs([add, norm], norm)
    node = graph.create(op, inputs, attrs, types=types, loc=loc, before=add)
    if not checked.replace([(norm.output, node.outputs[0]), (total, node.outputs[1])]):
        return
    graph.erase(norm)
    graph.erase(add)
    for value in (first, second):
        made = value.producer
        if made is not None and made.op == "aten.linear" and not value.uses:
            graph.erase(made)


def _is_residual(add: Node) -> bool:
    """Whether onnxruntime's kernels take this sum: one type on both sides, of rank 2 or 3."""
    if attribute(add, "alpha") != 1 or add.output.dtype not in _KERNELS:
        return False
    alike = all(value is not None and same_type(value, add.output) for value in add.inputs)
    return alike and len(add.output.shape) in (2, 3)


def _biased(
    graph: Graph, add: Node, first: Value, second: Value
) -> tuple[Value, Value, Value | None]:
    """(x, skip, the bias of x): a linear in the sum leaves its bias to the norm's kernel.

    A matrix product by Gemm adds its bias for nothing, so it keeps it.
    """
    for x, skip in ((first, second), (second, first)):
        linear = producer(x, "aten.linear")
        bias = None if linear is None else input_of(linear, "bias")
        if linear is None or bias is None or len(x.shape) == 2:
            continue
        if not only_read_by(graph, x, add):
            continue
        if bias.dtype != x.dtype or not same_shape(bias.shape, x.shape[-1:]):
            continue
        return graph.twin(linear, linear.inputs[:2]).output, skip, bias
    return first, second, None
