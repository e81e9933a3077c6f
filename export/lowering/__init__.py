"""One ONNX form per op: our own where onnxruntime has a better one, else torchlib's."""

from __future__ import annotations

from attngraph.export.lowering import (
    activations,
    attention,
    creation,
    elementwise,
    grouped,
    histogram,
    indexing,
    linear,
    loops,
    norms,
    packed_attention,
    random,
    recurrent,
    reduction,
    rotary,
    shape,
    softmax,
)
from attngraph.export.lowering.registry import Lowering, registered

__all__ = [
    "activations",
    "attention",
    "creation",
    "elementwise",
    "find_lowering",
    "grouped",
    "histogram",
    "indexing",
    "linear",
    "loops",
    "norms",
    "packed_attention",
    "random",
    "recurrent",
    "reduction",
    "registered",
    "rotary",
    "shape",
    "softmax",
]


def find_lowering(op: str) -> Lowering | None:
    """The lowering of an op: a registered one, else torchlib's, else None."""
    if own := registered(op):
        return own
    # onnxscript takes half a second to import, and many models need nothing of it.
    from attngraph.export.lowering.torchlib import torchlib_lowering

    return torchlib_lowering(op)
