"""Factors of float64 as onnxruntime leaves them as they are."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import torch

from attngraph.export.lowering.emission.context import LoweringContext


def keep_doubles(context: LoweringContext) -> None:
    """Writes what a float64 tensor is multiplied by, or divided, along its last axis.

    onnxruntime makes one number beside a product of matrices an attribute of that product, which is
    a float32: x Wᵀ · 0.1 was off by 1e-8.
    """
    for node in context.nodes:
        if node.op_type not in ("Mul", "Div") or node.domain:
            continue
        for place, (value, other) in enumerate(
            zip(node.inputs, reversed(node.inputs), strict=True)
        ):
            width = _width(other)
            if value is None or value.const_value is None or width < 2:
                continue
            numbers = value.const_value.numpy()
            is_lost = numbers.size == 1 and numbers.dtype == np.float64
            if is_lost and float(np.float32(numbers.item())) != numbers.item():
                along = np.full((width,), numbers.item())
                node.replace_input_with(place, context.constant(along.tolist(), torch.float64))


def _width(value: ir.Value | None) -> int:
    """The size of the last axis; 0 where it isn't known."""
    shape = None if value is None else value.shape
    size = shape[-1] if shape is not None and len(shape) else None
    return size if isinstance(size, int) else 0
