"""One ONNX form per op: our own where onnxruntime has a better one, else torchlib's."""

from __future__ import annotations

# Importing a file of lowerings registers them.
from attngraph.export.lowering.attention import lower as attention
from attngraph.export.lowering.attention import packed as packed_attention
from attngraph.export.lowering.emission.registry import Lowering, registered
from attngraph.export.lowering.ops import (
    activations,
    counting,
    creation,
    division,
    elementwise,
    experts,
    generalized_delta,
    indexing,
    layout,
    linear,
    loops,
    norms,
    quantized,
    recurrent,
    reduction,
    resize,
    rotary,
    solving,
    states,
)

__all__ = [
    "activations",
    "attention",
    "counting",
    "creation",
    "division",
    "elementwise",
    "experts",
    "find_lowering",
    "generalized_delta",
    "indexing",
    "layout",
    "linear",
    "loops",
    "norms",
    "packed_attention",
    "quantized",
    "recurrent",
    "reduction",
    "registered",
    "resize",
    "rotary",
    "solving",
    "states",
]


def find_lowering(op: str) -> Lowering | None:
    """The lowering of an op: a registered one, else torchlib's, else None."""
    if own := registered(op):
        return own
    # onnxscript takes half a second to import, and many models need nothing of it.
    from attngraph.export.lowering.fallback.torchlib import torchlib_lowering

    return torchlib_lowering(op)
