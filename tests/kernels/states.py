"""Calls of the ops that hand on a state."""

from __future__ import annotations

import torch

from tests.kernels.runner import Call, Case
from tests.kernels.values import ordinary

_HALF = (torch.float32, torch.float16)


def _convolutions(dtype: torch.dtype) -> list[Call]:
    """Fewer places than the state has, one and several, with and without it; and so many that it
    is a `Conv`."""
    calls: list[Call] = []
    for length in (1, 2, 5, 20):
        for silu in ("none", "silu"):
            attrs = f'{{activation = "{silu}", dilation = {2 if length == 5 else 1}}}'
            reach = 6 if length == 5 else 3
            shapes = (2, 6, length), (6, 1, 4), (6,), (2, 6, reach)
            operands = [ordinary(dtype, *shape, seed=at) for at, shape in enumerate(shapes)]
            text = f"attn.causal_conv(%0, %1, %2, %3) {attrs}"
            calls.append(Call(text, tuple(operands), 2))
            calls.append(Call(f"attn.causal_conv(%0, %1) {attrs}", tuple(operands[:2]), 2))
    return calls


CASES = [Case("causal_conv", _convolutions, _HALF, ulps=64, scale=8.0)]
