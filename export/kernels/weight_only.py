"""What quantized weights cost on onnxruntime's CPU provider, as bench/weight_only.py measured."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib.resources import files

FORMS: Mapping[str, str] = {
    "int8": "int8, block 32: two of 4 bits",
    "int4": "int4, block 32: MatMulNBits, accuracy 1",
}
"""The form that a linear with such weights is lowered to there, by the name it was measured under.

`MatMulNBits` of 8 bits has no fast kernel that computes in float32: it is many times slower than
the product in float32, and at accuracy level 4 it rounds activations. That of 4 bits has one.
"""


@functools.cache
def _measured() -> Mapping[str, Mapping[str, float]]:
    text = files("attngraph.export.kernels").joinpath("weight_only.json").read_text()
    found: Mapping[str, Mapping[str, float]] = json.loads(text)["times_of_float32"]
    return found


def cost_on_cpu(weights: str, *, portable: bool = False) -> str:
    """A sentence on the time of a linear with such weights, over that in float32.

    A portable file has the standard's operator, for which onnxruntime has no fast kernel.
    """
    form = f"{weights}, block 32: DequantizeLinear" if portable else FORMS[weights]
    times = _measured()[form]
    said = " and ".join(
        f"{ratio:g} × the time of float32 for {rows} row{'s' if rows != '1' else ''}"
        for rows, ratio in times.items()
    )
    slower = any(ratio > 1 for ratio in times.values())
    advice = "; --weights int4 is faster" if slower and weights == "int8" else ""
    advice = "; leave out --portable where onnxruntime runs it" if portable else advice
    return f"Linears in {weights} were measured on onnxruntime's CPU provider at {said}{advice}."
