"""`attn.rotary`: rotary position embedding over packed heads."""

from __future__ import annotations

import torch

from attngraph.ir.ops import op
from attngraph.ir.traits import ROTARY


@op("attn.rotary", [ROTARY])
def rotary(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    heads: int,
    interleaved: bool = False,
) -> torch.Tensor:
    """Turns pairs of features of each head by an angle per position (Su et al. 2021).

    x (B, S, H·D) with H = `heads`; cos and sin (B, S, R/2) in x's dtype, R ≤ D. A pair (a, b)
    becomes (a·cos − b·sin, b·cos + a·sin). Pair i of the first R features of a head is
    (i, i + R/2) or, if `interleaved`, (2i, 2i + 1); features from R on stay as they are.
    """
    split = x.reshape(x.shape[0], x.shape[1], heads, x.shape[2] // heads)
    width = cos.shape[-1]
    turned, rest = split[..., : 2 * width], split[..., 2 * width :]
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    if interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]
    else:
        first, second = turned[..., :width], turned[..., width:]
    pair = [first * cos - second * sin, second * cos + first * sin]
    both = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([both, rest], -1).reshape(x.shape)
