"""The number formats that are asked for by name. No torch here: options are checked before that."""

from __future__ import annotations

from typing import Literal

Precision = Literal["fp32", "fp16", "bf16"]
"""What a model computes in."""
Weights = Literal["int8", "int4"]
"""What the weights of linears may be stored in."""
Activations = Literal["int8"]
"""What the inputs of such linears may be rounded to while it runs."""
