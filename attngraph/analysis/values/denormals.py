"""Denormal numbers that the code of a model computes with."""

from __future__ import annotations

import math

import torch

from attngraph.ir import Graph, Node, TensorType

KEPT_KEY = "attngraph.denormals"
"""The key of a file's metadata that says that its numbers below the least normal one count."""


_FEW = 16  # elements of a constant that is written in code; weights may hold anything


def written_in(graph: Graph) -> Node | None:
    """A node that computes with a denormal number of the model's own code."""
    for node in graph:
        dtypes = {value.dtype for value in node.outputs if isinstance(value.type, TensorType)}
        for dtype in dtypes & {torch.float32, torch.bfloat16}:
            least = torch.finfo(dtype).tiny
            numbers = [number for number in node.attrs.values() if isinstance(number, float)]
            for value in node.inputs:
                data = None if value is None else value.data
                if data is not None and not data.is_meta and data.numel() <= _FEW:
                    numbers += data.flatten().tolist() if data.is_floating_point() else []
            if any(math.isfinite(n) and 0 < abs(n) < least for n in numbers):
                return node
    return None
