"""Which ops compute in a half dtype, which in whatever their operands have, which in float32.

`TAKES` are the ops with a half kernel whose sums are accumulated in float32: products, norms,
attention. `FOLLOWS` are elementwise ops and layouts: they stay in the dtype that reaches them. All
others (arithmetic of positions, tables of cosines, exponentials, reductions, losses) stay in
float32.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from attngraph.export.formats import Precision
from attngraph.export.lowering.attention.masks import is_bounded
from attngraph.export.target import Provider
from attngraph.ir import Node, Value

DTYPES: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


def _aten(names: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" for name in names.split())


_PRODUCTS = _aten(
    "linear matmul bmm mm mv dot addmm baddbmm einsum conv1d conv2d conv3d conv1d.padding "
    "conv2d.padding conv3d.padding"
)
_ATTENTION = _aten("scaled_dot_product_attention softmax.int _softmax") | {
    "attn.attention",
    "attn.packed_attention",
    "attn.additive",
    "attn.rotary",
    "attn.sink_softmax",
}
_NORMS = _aten("layer_norm rms_norm group_norm") | {
    "attn.rms_norm",
    "attn.skip_layer_norm",
    "attn.skip_rms_norm",
}
_ACTIVATIONS = _aten("gelu silu relu sigmoid tanh leaky_relu hardswish") | {
    "attn.bias_gelu",
    "attn.quick_gelu",
}
_TABLES = _aten("embedding")

TAKES = (
    (_PRODUCTS | _ATTENTION | _NORMS | _TABLES)
    - _aten("softmax.int _softmax")
    - {"attn.sink_softmax"}
)
_ELEMENTWISE = _aten(
    "add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Scalar mul.Tensor mul.Scalar div.Tensor "
    "div.Scalar neg maximum minimum where.self where.ScalarSelf where.ScalarOther where.Scalar "
    "masked_fill.Scalar masked_fill.Tensor clamp clamp_min clamp_max abs dropout"
)
_LAYOUT = _aten(
    "view reshape _unsafe_view flatten.using_ints unflatten.int unsqueeze squeeze squeeze.dim "
    "squeeze.dims permute transpose.int t expand expand_as slice.Tensor select.int narrow "
    "contiguous clone alias detach cat stack repeat split.Tensor split_with_sizes chunk unbind.int "
    "index_select gather index.Tensor flip roll tril triu pad constant_pad_nd movedim.int "
    "movedim.intlist"
)
FOLLOWS = (
    _ELEMENTWISE | _LAYOUT | _ACTIVATIONS | _aten("softmax.int _softmax") | {"attn.sink_softmax"}
)

_KINDS = (
    ("norms", _NORMS),
    ("activations", _ACTIVATIONS),
    ("attention", _ATTENTION),
    ("embeddings", _TABLES),
    ("projections", _PRODUCTS),
)
KINDS = ("norms", "activations", "elementwise", "attention", "embeddings", "projections")
"""Kinds of nodes, from the cheapest to the dearest to keep in float32."""

_LAYER = re.compile(r"^(?:.*?\.)?\d+(?=\.|$)")
_MODERATE: dict[torch.dtype, float] = {torch.float16: 100.0, torch.bfloat16: 1e12}


class Group(NamedTuple):
    """Nodes of one kind in one layer, such as ("norms", "encoder.layers.3"); "" lies in none."""

    kind: str
    layer: str

    def __str__(self) -> str:
        return f"{self.kind} of {self.layer}" if self.layer else self.kind


@dataclass(frozen=True)
class Plan:
    """The dtype to convert to, for a provider, and the groups that stay in float32.

    The CPU provider computes products in float32 only: for it, weights are stored in the half
    dtype and widened where they are read.
    """

    dtype: torch.dtype
    provider: Provider = "cuda"
    keep: frozenset[Group] = frozenset()


def group_of(node: Node) -> Group:
    """The group of a node: by its op, and by the first numbered module that ran it."""
    kind = next((kind for kind, ops in _KINDS if node.op in ops), "elementwise")
    found = _LAYER.match(node.loc.module)
    return Group(kind, found[0] if found else "")


def holds(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a half dtype has a finite number for every finite element; −inf stays what it is."""
    if not tensor.numel() or tensor.is_meta:
        return True
    size = tensor.detach().abs()
    largest = torch.where(torch.isfinite(size), size, 0.0).max()
    return bool(largest <= torch.finfo(dtype).max)


def fits_numbers(node: Node, dtype: torch.dtype) -> bool:
    """Whether a half dtype has the numbers among a node's attributes, without over- or underflow.

    A mask's fill, or the ε of a division, is then as good in it. Not asked of norms and the like,
    whose kernels compute with ε in float32.
    """
    if node.op in TAKES:
        return True
    return all(_fits(value, dtype) for value in node.attrs.values())


def _fits(value: Any, dtype: torch.dtype) -> bool:
    if isinstance(value, torch.dtype):
        return value != torch.float32
    if not isinstance(value, float):
        return True
    limits = torch.finfo(dtype)
    return value == 0 or abs(value) == torch.inf or limits.tiny <= abs(value) <= limits.max


def narrows_scores(bias: Value, dtype: torch.dtype) -> bool:
    """Whether what is added to scores is small enough for the sum to keep them in a half dtype.

    A fill such as −1e4 is in bfloat16's range, but next to it scores are multiples of 64, which
    shows in rows where every key has it.
    """
    if not narrows(bias, dtype):
        return False
    return bias.data is not None or is_bounded(bias, _MODERATE[torch.float16])


def narrows(value: Value, dtype: torch.dtype) -> bool:
    """Whether a float32 value is provably within a half dtype's range, by a factor to spare.

    −inf is: it stays −inf. A constant scalar must not underflow either.
    """
    if value.data is not None:
        data = value.data
        if data.numel() == 1 and not _fits(float(data), dtype):
            return False
        finite = torch.where(torch.isfinite(data), data.abs(), 0.0)
        small = not data.numel() or bool(finite.max() <= torch.finfo(dtype).max / 2)
        return small and not bool(data.isnan().any())
    return is_bounded(value, _MODERATE[dtype])
