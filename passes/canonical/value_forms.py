"""Forms of ops that compute values: casts, tensors of one number, choices, softmaxes, products."""

from __future__ import annotations

from typing import Any

import torch

from attngraph.ir import Node, TensorType, Value
from attngraph.ir.dims import Dim
from attngraph.ir.ops import attribute, input_of
from attngraph.ir.traits import DROPOUT
from attngraph.passes.rewriting.rewriter import Replacement, Rewriter, rule

_CASTS = (
    "aten._to_copy",
    "aten.to.dtype",
    "aten.to.dtype_layout",
    "aten.to.device",
    "aten.to.other",
    "aten.type_as",
)
_CHOICES = {  # the arguments in the order of `where`
    "aten.where.Scalar": ("condition", "self", "other"),
    "aten.where.ScalarOther": ("condition", "self", "other"),
    "aten.where.ScalarSelf": ("condition", "self", "other"),
    "aten.masked_fill.Scalar": ("mask", "value", "self"),
    "aten.masked_fill.Tensor": ("mask", "value", "self"),
}
FILLS: dict[str, str | int] = {  # the number, or the attribute that holds it
    "aten.full": "fill_value",
    "aten.full_like": "fill_value",
    "aten.new_full": "fill_value",
    "aten.fill.Scalar": "value",
    "aten.scalar_tensor": "s",
    "aten.ones": 1,
    "aten.ones_like": 1,
    "aten.new_ones": 1,
    "aten.zeros": 0,
    "aten.zeros_like": 0,
    "aten.new_zeros": 0,
}
_SOFTMAXES = {
    f"aten.{name}": f"aten.{name.removeprefix('special_').strip('_').removesuffix('.int')}.int"
    for name in (
        *("softmax.int", "special_softmax", "_softmax"),
        *("log_softmax.int", "special_log_softmax", "_log_softmax"),
    )
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
    return node.source


@rule(*DROPOUT)
def dropout(rewriter: Rewriter, node: Node) -> Replacement:
    """Dropout that is off, or drops nothing."""
    off = attribute(node, "train") is False or attribute(node, "p") == 0
    return node.source if off else None


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
    """Every change of dtype is `_to_copy`; a cast of a lossless cast is one cast."""
    source, dtype = node.source, node.output.dtype
    inner = rewriter.above(source)
    merged = (
        inner is not None and inner.op in _CASTS and _skips(inner.source.dtype, source.dtype, dtype)
    )
    if inner is not None and merged:
        source = inner.source
    if source.dtype == dtype:
        return source
    if node.op == "aten._to_copy" and not merged and node.attrs == {"dtype": dtype}:
        return None
    fused = [inner] if merged else []
    return rewriter.emit("aten._to_copy", [source], {"dtype": dtype}, at=node, fused=fused)


def filled(node: Node) -> Any:
    """The number that a node of `FILLS` makes a tensor of."""
    number = FILLS[node.op]
    return node.attrs[number] if isinstance(number, str) else number


@rule(*FILLS)
def fill(rewriter: Rewriter, node: Node) -> Replacement:
    """A tensor of one number is `full`, whatever other tensor lent its shape or dtype."""
    shape, dtype = list(node.output.shape), node.output.dtype
    attrs = {"size": shape, "fill_value": filled(node), "dtype": dtype}
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


@rule(*_CHOICES, keeps_name=True)
def where(rewriter: Rewriter, node: Node) -> Replacement:
    """Every choice by a predicate is `where` of two tensors; a number has no dims."""
    names = _CHOICES[node.op]
    operands: list[Value] = []
    for name in names:
        if name in node.attrs:
            operands += _filled(rewriter, node, (), node.attrs[name])
            continue
        value: Value = input_of(node, name)
        if name == "value" and value.dtype != node.output.dtype:
            kind = [TensorType(node.output.dtype, value.shape)]
            attrs = {"dtype": node.output.dtype}
            (value,) = rewriter.emit("aten._to_copy", [value], attrs, at=node, types=kind)
        operands.append(value)
    return rewriter.emit("aten.where.self", operands, {}, at=node)


def _filled(
    rewriter: Rewriter, node: Node, shape: tuple[Dim, ...], number: Any
) -> tuple[Value, ...]:
    """A tensor of one number, of the dtype of the node."""
    dtype = node.output.dtype
    attrs = {"size": list(shape), "fill_value": number, "dtype": dtype}
    kind = [TensorType(dtype, shape)]
    return rewriter.emit("aten.full", [], attrs, at=node, types=kind, names=["fill"])


@rule(*_SOFTMAXES, keeps_name=True)
def softmax(rewriter: Rewriter, node: Node) -> Replacement:
    """A softmax names its axis only; one that computes in another dtype is that of a cast."""
    op, source, dtype = _SOFTMAXES[node.op], node.source, node.output.dtype
    if node.op == op and attribute(node, "dtype") is None:
        return None
    if source.dtype != dtype:
        kind = [TensorType(dtype, source.shape)]
        (source,) = rewriter.emit("aten._to_copy", [source], {"dtype": dtype}, at=node, types=kind)
    return rewriter.emit(op, [source], {"dim": attribute(node, "dim")}, at=node)


@rule("aten.mm", "aten.bmm", "aten.mv", "aten.dot", keeps_name=True)
def matmul(rewriter: Rewriter, node: Node) -> Replacement:
    """Every product of two matrices is `matmul`, whatever their ranks."""
    return rewriter.emit("aten.matmul", node.inputs, {}, at=node)


@rule("aten.rms_norm")
def default_epsilon(rewriter: Rewriter, node: Node) -> Replacement:
    """The ε that is left out is that of the dtype torch computes in, which another may take."""
    x = node.source
    if x is None or attribute(node, "eps") is not None:
        return None
    epsilon = torch.finfo(x.dtype if x.dtype == torch.float64 else torch.float32).eps
    return rewriter.emit(node.op, node.inputs, {**node.attrs, "eps": epsilon}, at=node)


VALUE_FORMS = [
    nothing,
    dropout,
    cast,
    fill,
    identity,
    where,
    softmax,
    matmul,
    default_epsilon,
]
