"""Forms of ops that compute values: casts, tensors of one number, softmaxes."""

from __future__ import annotations

import torch

from attngraph.ir import Node, TensorType, Value
from attngraph.ir.ops import attribute
from attngraph.ir.traits import DROPOUT
from attngraph.passes.rewriting.rewriter import Replacement, Rewriter, rule, source_of

_CASTS = (
    "aten._to_copy",
    "aten.to.dtype",
    "aten.to.dtype_layout",
    "aten.to.device",
    "aten.to.other",
    "aten.type_as",
)
_FILLS = {
    "aten.full": None,
    "aten.full_like": None,
    "aten.new_full": None,
    "aten.ones": 1,
    "aten.ones_like": 1,
    "aten.new_ones": 1,
    "aten.zeros": 0,
    "aten.zeros_like": 0,
    "aten.new_zeros": 0,
}
_EXACT_BITS = {  # the widest integers that a dtype holds without rounding
    torch.float16: 11,
    torch.bfloat16: 8,
    torch.float32: 24,
    torch.float64: 53,
}


@rule("aten.positive", "aten.resolve_conj", "aten.resolve_neg")
def nothing(rewriter: Rewriter, node: Node) -> Replacement:
    """Ops that return their input."""
    return source_of(node)


@rule(*DROPOUT)
def dropout(rewriter: Rewriter, node: Node) -> Replacement:
    """Dropout that is off, or drops nothing."""
    off = attribute(node, "train") is False or attribute(node, "p") == 0
    return source_of(node) if off else None


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether `wide` has every value of `narrow`."""
    if wide == narrow or narrow == torch.bool:
        return True
    if wide.is_complex or narrow.is_complex or wide == torch.bool:
        return False
    if narrow.is_floating_point:
        floats = (torch.float32, torch.float64)
        return wide in floats and narrow.itemsize < wide.itemsize
    integer = torch.iinfo(narrow)
    if wide in _EXACT_BITS:
        return integer.max.bit_length() <= _EXACT_BITS[wide]
    if wide.is_floating_point:
        return False
    return torch.iinfo(wide).min <= integer.min and integer.max <= torch.iinfo(wide).max


def _skips(source: torch.dtype, middle: torch.dtype, target: torch.dtype) -> bool:
    """Whether casting source → middle → target is casting source → target.

    A float cast to an integer is out of it where the range may overflow: that is undefined.
    """
    if not _holds(middle, source):
        return False
    undefined = middle.is_floating_point and not target.is_floating_point
    return not undefined or target == torch.bool or _holds(target, source)


@rule(*_CASTS)
def cast(rewriter: Rewriter, node: Node) -> Replacement:
    """A cast of a lossless cast is one cast; to the same dtype, it is its source."""
    source, dtype = source_of(node), node.output.dtype
    inner = rewriter.above(source)
    merged = (
        inner is not None
        and inner.op in _CASTS
        and _skips(source_of(inner).dtype, source.dtype, dtype)
    )
    if inner is not None and merged:
        source = source_of(inner)
    if source.dtype == dtype:
        return source
    if node.op == "aten._to_copy" and not merged and node.attrs == {"dtype": dtype}:
        return None
    fused = [inner] if merged else []
    return rewriter.emit("aten._to_copy", [source], {"dtype": dtype}, at=node, fused=fused)


@rule(*_FILLS)
def fill(rewriter: Rewriter, node: Node) -> Replacement:
    """A tensor of one number is `full`, whatever other tensor lent its shape or dtype."""
    number = _FILLS[node.op]
    number = node.attrs["fill_value"] if number is None else number
    shape, dtype = list(node.output.shape), node.output.dtype
    attrs = {"size": shape, "fill_value": number, "dtype": dtype}
    return (
        None
        if node.op == "aten.full" and node.attrs == attrs
        else rewriter.emit("aten.full", [], attrs, at=node)
    )


@rule("aten.eye", "aten.eye.m")
def identity(rewriter: Rewriter, node: Node) -> Replacement:
    """eye(n, m) says where row and column are equal, as masks say it of positions."""
    (rows, columns), dtype = node.output.shape, node.output.dtype
    if dtype.is_complex:
        return None
    lines: list[Value] = []
    for shape in ((rows, 1), (1, columns)):
        size = max(shape, key=lambda dim: dim != 1)
        kind = [TensorType(torch.int64, (size,))]
        line = rewriter.emit("aten.arange", [], {"end": size}, at=node, types=kind)
        kind = [TensorType(torch.int64, shape)]
        lines += rewriter.emit("aten.reshape", line, {"shape": list(shape)}, at=node, types=kind)
    kind = [TensorType(torch.bool, (rows, columns))]
    equal = rewriter.emit("aten.eq.Tensor", lines, {}, at=node, types=kind)
    if dtype == torch.bool:
        return equal
    return rewriter.emit("aten._to_copy", equal, {"dtype": dtype}, at=node)


@rule("aten.special_softmax", "aten.special_log_softmax")
def special(rewriter: Rewriter, node: Node) -> Replacement:
    """The other names of softmax and log_softmax."""
    op = f"{node.op.replace('special_', '')}.int"
    return rewriter.emit(op, node.inputs, node.attrs, at=node)


@rule("aten.rms_norm")
def default_epsilon(rewriter: Rewriter, node: Node) -> Replacement:
    """The ε that is left out is that of the dtype torch computes in, which another may take."""
    x = source_of(node)
    if x is None or attribute(node, "eps") is not None:
        return None
    epsilon = torch.finfo(x.dtype if x.dtype == torch.float64 else torch.float32).eps
    return rewriter.emit(node.op, node.inputs, {**node.attrs, "eps": epsilon}, at=node)


VALUE_FORMS = [nothing, dropout, cast, fill, identity, special, default_epsilon]
