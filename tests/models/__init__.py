"""The suite's real models, as data: tiny, random, and built so that a wrong attention shows.

`CASES` lists every model whose attention must be fused, `KEPT` those whose attention has no fused
operator; `case.build()` makes one. A model is static when it is captured without its
`dynamic_shapes`, dynamic with them. Weights are re-initialised so that attention is peaked: under
the default init it is nearly uniform and a dropped mask goes unseen. Biases are not zero and norm
weights are not one, so that a dropped one shows too. Rows of a batch are padded on the left by
different lengths and have a hole, and no two of batch, sequence, heads and key-value heads are
equal.
"""

from __future__ import annotations

from tests.models import examples, hub, torch_nn
from tests.models.kit import HEADS, TRACED, Args, Built, Case, peaked, present, states, tokens

CASES: tuple[Case, ...] = (*torch_nn.CASES, *hub.CASES, *examples.CASES)
KEPT: tuple[Case, ...] = (examples.ADDITIVE,)

__all__ = [
    "CASES",
    "HEADS",
    "KEPT",
    "TRACED",
    "Args",
    "Built",
    "Case",
    "peaked",
    "present",
    "states",
    "tokens",
]
