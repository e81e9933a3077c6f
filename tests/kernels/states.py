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


def _recurrences(dtype: torch.dtype) -> list[Call]:
    """Each update rule, with and without a state, one token and more than a chunk of 64; heads that
    share keys, or queries; a decay for each feature; a negative scale."""
    calls: list[Call] = []
    for heads, groups in ((2, 2), (4, 2), (2, 4)):
        for length in (1, 3, 70):
            for place in range(8):
                with_past, gated, delta = (bool(place >> bit & 1) for bit in range(3))
                narrow = groups if length == 3 else groups * 4
                shapes = [(2, length, heads * 4), (2, length, groups * 4), (2, length, groups * 6)]
                shapes += [(2, groups, 4, 6), (2, length, narrow), (2, length, groups)]
                drawn = [ordinary(dtype, *shape, seed=at) for at, shape in enumerate(shapes)]
                drawn[1] = drawn[1] / drawn[1].norm(dim=-1, keepdim=True)
                drawn[4], drawn[5] = -drawn[4].abs(), drawn[5].sigmoid()
                given = [True, True, True, with_past, gated, delta]
                names = iter(f"%{at}" for at in range(6))
                text = ", ".join(next(names) if there else "none" for there in given)
                attrs = f"{{heads = {heads}, kv_heads = {groups}, scale = -0.5}}"
                operands = tuple(x for x, there in zip(drawn, given, strict=True) if there)
                text = f"attn.linear_attention({text}) {attrs}"
                calls.append(Call(text, operands, 2, modes=("computed",)))
    return calls


def _generalized(dtype: torch.dtype) -> list[Call]:
    """Without and with a state; one token, some, and several chunks of 16; each kind of decay."""
    calls: list[Call] = []
    for length in (1, 5, 40):
        for place in range(6):
            width = (0, 2, 8)[place // 2]
            shapes = [(2, length, 8)] * 4 + [(2, length, 12), (2, 2, 4, 6), (2, length, width)]
            q, k, a, b, v, past, decay = (
                ordinary(dtype, *shape, seed=at) for at, shape in enumerate(shapes)
            )
            a, b, decay = 0.3 * a, -0.3 * b, -decay.abs()
            operands = [q, k, v, a, b, *([past] if place % 2 else []), *([decay] if width else [])]
            names = iter(f"%{at}" for at in range(len(operands)))
            given = [True] * 5 + [bool(place % 2), bool(width)]
            text = ", ".join(next(names) if there else "none" for there in given)
            text = f"attn.generalized_delta_rule({text}) {{heads = 2, scale = -0.5}}"
            calls.append(Call(text, tuple(operands), 2, modes=("computed",)))
    return calls


CASES = [
    Case("causal_conv", _convolutions, _HALF, ulps=64, scale=8.0),
    Case("linear_attention", _recurrences, _HALF, ulps=64, scale=16.0),
    Case("generalized_delta_rule", _generalized, _HALF, ulps=64, scale=16.0),
]
