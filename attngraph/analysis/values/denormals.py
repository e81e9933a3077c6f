"""Denormal numbers that a model computes with: those of its code, and exponentials that it divides.

e / Σ e of scores from which no maximum is taken is the softmax for scores of −100 too: the quotient
of two denormals is an ordinary number, and 0 / 0 where they count as zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from attngraph.analysis.walks import behind
from attngraph.ir import Graph, Node, TensorType, Value
from attngraph.ir.traits import (
    ADDITIVE,
    CAST,
    CHOICE,
    CLAMP,
    EXPONENTIAL,
    LAYOUT,
    MAXIMUM_ALONG,
    MULTIPLICATIVE,
    SUM,
    Trait,
)

KEPT_KEY = "attngraph.denormals"
"""The key of a file's metadata that says that its numbers below the least normal one count."""


_FEW = 16  # elements of a constant that is written in code; weights may hold anything


_SUMS = SUM | LAYOUT | CAST | MULTIPLICATIVE | CHOICE
_SHIFTS = ADDITIVE | LAYOUT | CAST | MULTIPLICATIVE | CHOICE | CLAMP


def denormal_at(graph: Graph) -> Node | None:
    """A node that computes with a denormal number, for certain or at some inputs."""
    return next((node for node in graph if _is_written(node) or _divides(node)), None)


def _is_written(node: Node) -> bool:
    """Whether it computes with a denormal number of the model's own code."""
    dtypes = {value.dtype for value in node.outputs if isinstance(value.type, TensorType)}
    for dtype in dtypes & {torch.float32, torch.bfloat16}:
        least = torch.finfo(dtype).tiny
        numbers = [number for number in node.attrs.values() if isinstance(number, float)]
        for value in node.inputs:
            data = None if value is None else value.data
            if data is not None and not data.is_meta and data.numel() <= _FEW:
                numbers += data.flatten().tolist() if data.is_floating_point() else []
        if any(math.isfinite(n) and 0 < abs(n) < least for n in numbers):
            return True
    return False


def _divides(node: Node) -> bool:
    """Whether it divides by a sum of exponentials that may all be denormal."""
    if node.op != "aten.div.Tensor" or node.inputs[1] is None:
        return False
    found = [each for each in _above(node.inputs[1], _SUMS) if each.op in EXPONENTIAL]
    summed = any(each.op in SUM for each in _above(node.inputs[1], _SUMS))
    return summed and any(
        not any(
            part.op in MAXIMUM_ALONG for value in each.inputs for part in _above(value, _SHIFTS)
        )
        for each in found
    )


def _above(value: Value | None, through: Trait) -> Iterator[Node]:
    """What a value is made of: nodes up to the first that isn't one of `through`, and those."""
    start = [] if value is None else [value]
    for each in behind(start, lambda node: node.op in through, limit=None):
        if each.producer is not None:
            yield each.producer
