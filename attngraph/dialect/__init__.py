"""The `attn` dialect: ops with a reference in plain torch. Importing registers them."""

from attngraph.dialect import (
    activations,
    attention,
    experts,
    loops,
    norms,
    quantized,
    recurrent,
    rotary,
    states,
)

__all__ = [
    "activations",
    "attention",
    "experts",
    "loops",
    "norms",
    "quantized",
    "recurrent",
    "rotary",
    "states",
]
