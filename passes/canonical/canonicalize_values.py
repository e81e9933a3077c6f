"""Rules for elementwise ops: neutral elements, double negation, casts, tensors of one number."""

from __future__ import annotations

import math
from typing import Any

import torch

from attngraph.errors import IRError
from attngraph.ir import Node, TensorType, Value
from attngraph.ir.dims import same_shape
from attngraph.ir.ops import attribute, input_of
from attngraph.passes.rewriting.rewriter import Replacement, Rewriter, rule

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
_NEGATIONS = ("aten.bitwise_not", "aten.logical_not")
_EXACT_BITS = {  # the widest integers that a dtype holds without rounding
    torch.float16: 11,
    torch.bfloat16: 8,
    torch.float32: 24,
    torch.float64: 53,
}


def source_of(node: Node) -> Value:
    """The first input, which must be there."""
    source = node.inputs[0]
    if source is None:
        raise IRError(f"{node!r} lacks its first input.")
    return source


def same_type(a: Value, b: Value) -> bool:
    """Equal dtype and provably equal shape."""
    if not isinstance(a.type, TensorType) or not isinstance(b.type, TensorType):
        return a.type == b.type
    return a.dtype == b.dtype and same_shape(a.shape, b.shape)


@rule("aten.positive", "aten.resolve_conj", "aten.resolve_neg")
def nothing(rewriter: Rewriter, node: Node) -> Replacement:
    """Ops that return their input."""
    return source_of(node)


@rule("aten.dropout", "aten.feature_dropout", "aten.alpha_dropout", "aten.feature_alpha_dropout")
def dropout(rewriter: Rewriter, node: Node) -> Replacement:
    """Dropout that is off, or drops nothing."""
    off = attribute(node, "train") is False or attribute(node, "p") == 0
    return source_of(node) if off else None


@rule("aten.pad", "aten.constant_pad_nd")
def padded_by_nothing(rewriter: Rewriter, node: Node) -> Replacement:
    """Zero elements more on each side."""
    return source_of(node) if all(amount == 0 for amount in attribute(node, "pad")) else None


def _number(node: Node, name: str) -> Any:
    """The other operand where it is one number: an attribute, or a constant of one element."""
    if name in node.attrs:
        return node.attrs[name]
    other = node.inputs[1] if len(node.inputs) > 1 else None
    return None if other is None else _element(other)


def _element(value: Value) -> Any:
    data = value.data
    return data.item() if data is not None and not data.is_meta and data.numel() == 1 else None


def _only(node: Node, source: Value | None) -> Value | None:
    """`source` where it has the type of the result: no broadcast and no promotion is lost."""
    return source if source is not None and same_type(source, node.output) else None


@rule("aten.mul.Tensor", "aten.mul.Scalar")
def times_one(rewriter: Rewriter, node: Node) -> Replacement:
    """x · 1 and 1 · x."""
    if _number(node, "other") == 1:
        return _only(node, node.inputs[0])
    return _only(node, node.inputs[1]) if _element(source_of(node)) == 1 else None


@rule("aten.div.Tensor", "aten.div.Scalar")
def over_one(rewriter: Rewriter, node: Node) -> Replacement:
    """x / 1."""
    return _only(node, node.inputs[0]) if _number(node, "other") == 1 else None


@rule("aten.pow.Tensor_Scalar")
def power_of_one(rewriter: Rewriter, node: Node) -> Replacement:
    """x¹."""
    return _only(node, node.inputs[0]) if attribute(node, "exponent") == 1 else None


@rule("aten.add.Tensor", "aten.add.Scalar", "aten.sub.Tensor", "aten.sub.Scalar")
def plus_zero(rewriter: Rewriter, node: Node) -> Replacement:
    """x + 0 and x − 0. In floating point −0 + 0 is +0, so there the zero's sign must be right."""
    if attribute(node, "alpha") != 1:
        return None
    adds = node.op.startswith("aten.add")
    if _is_neutral(_number(node, "other"), node.output.dtype, negative=adds):
        return _only(node, node.inputs[0])
    if adds and _is_neutral(_element(source_of(node)), node.output.dtype, negative=True):
        return _only(node, node.inputs[1])
    return None


def _is_neutral(number: Any, dtype: torch.dtype, *, negative: bool) -> bool:
    if not isinstance(number, (int, float)) or number != 0 or dtype.is_complex:
        return False
    return not dtype.is_floating_point or (math.copysign(1.0, number) < 0) == negative


@rule("aten.__and__.Tensor", "aten.bitwise_and.Tensor", "aten.logical_and")
def and_true(rewriter: Rewriter, node: Node) -> Replacement:
    """x & true, for bools."""
    return _beside(node, True)


@rule("aten.__or__.Tensor", "aten.bitwise_or.Tensor", "aten.logical_or")
def or_false(rewriter: Rewriter, node: Node) -> Replacement:
    """x | false, for bools."""
    return _beside(node, False)


def _beside(node: Node, neutral: bool) -> Value | None:
    left, right = source_of(node), node.inputs[1]
    if right is not None and _element(right) is neutral:
        return _only(node, left)
    return _only(node, right) if _element(left) is neutral else None


@rule("aten.index_put")
def assigned_under_mask(rewriter: Rewriter, node: Node) -> Replacement:
    """x[:, mask] = number, with one bool mask over neighbouring axes."""
    x, indices, values = (input_of(node, name) for name in ("self", "indices", "values"))
    masks = [index for index in indices if index is not None]
    if attribute(node, "accumulate") or len(masks) != 1 or indices[-1] is None:
        return None
    (mask,) = masks
    if mask.dtype != torch.bool or values.tensor_type.numel != 1 or values.dtype != x.dtype:
        return None
    after = len(x.shape) - (len(indices) - 1) - len(mask.shape)
    shape = [*mask.shape, *[1] * after]
    types = [TensorType(torch.bool, tuple(shape))]
    (spread,) = rewriter.emit("aten.reshape", [mask], {"shape": shape}, at=node, types=types)
    (number,) = rewriter.emit(
        "aten.reshape", [values], {"shape": []}, at=node, types=[TensorType(x.dtype, ())]
    )
    return rewriter.emit("aten.where.self", [spread, number, x], {}, at=node, types=[x.type])


@rule("aten.neg", "aten.bitwise_not", "aten.logical_not")
def double_negation(rewriter: Rewriter, node: Node) -> Replacement:
    """−(−x), ~~x, and not not x of a bool, for which both kinds of not are one."""
    source = source_of(node)
    inner = source.producer
    if inner is None or inner.op not in (_NEGATIONS if source.dtype == torch.bool else (node.op,)):
        return None
    return _only(node, source_of(inner))


@rule("aten.where.self")
def where_of_equals(rewriter: Rewriter, node: Node) -> Replacement:
    """where(c, x, x) is x."""
    _, chosen, other = node.inputs
    return _only(node, chosen) if chosen is other else None


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
    inner = source.producer
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


VALUE_RULES = [
    nothing,
    dropout,
    padded_by_nothing,
    times_one,
    over_one,
    power_of_one,
    plus_zero,
    and_true,
    or_false,
    assigned_under_mask,
    double_negation,
    where_of_equals,
    cast,
    fill,
    identity,
    special,
    default_epsilon,
]
