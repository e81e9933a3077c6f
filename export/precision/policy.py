"""Which ops compute in a half dtype, which follow their operands, and which stay in float32.

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

from attngraph.analysis.masks.reach import is_bounded
from attngraph.export.formats import Precision
from attngraph.export.target import Provider
from attngraph.ir import Node, Value
from attngraph.ir.traits import (
    ACTIVATION,
    ARITHMETIC,
    ATTENTION,
    CAUSAL_CONVOLUTION,
    CHOICE,
    CLAMP,
    CONVOLUTION,
    EMBEDDING,
    GATHERED,
    JOIN,
    LAYOUT,
    MAGNITUDE,
    MAXIMUM,
    MINIMUM,
    NORM,
    PAD,
    PRODUCT,
    ROLL,
    ROTARY,
    SOFTMAX,
    TRIANGLE,
)

DTYPES: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


_PRODUCTS = PRODUCT | CONVOLUTION | CAUSAL_CONVOLUTION
TAKES = _PRODUCTS | ATTENTION | NORM | ROTARY | EMBEDDING
_CHOSEN = CHOICE | CLAMP | MAXIMUM | MINIMUM
_MOVED = LAYOUT | ROLL | JOIN | PAD | TRIANGLE | GATHERED
FOLLOWS = ARITHMETIC | MAGNITUDE | _CHOSEN | _MOVED | ACTIVATION | SOFTMAX

_KINDS = (
    ("norms", NORM),
    ("activations", ACTIVATION),
    ("attention", ATTENTION | SOFTMAX | ROTARY),
    ("embeddings", EMBEDDING),
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
