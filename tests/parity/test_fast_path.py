"""torch.nn's fused fast path computes other numbers where masks hide: the file says so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import attngraph

X = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(0))
PADDED = torch.arange(7).expand(3, 7) > 4


def _notes(optimized: attngraph.Optimized) -> list[str]:
    return [note for note in optimized.report.notes if "fast path" in note]


@pytest.mark.parametrize("layers", [1, 2])
def test_an_encoder_with_padding_follows_the_code(layers: int) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    module = nn.TransformerEncoder(layer, layers).eval()
    optimized = attngraph.optimize(module, (X,), kwargs={"src_key_padding_mask": PADDED})
    assert len(_notes(optimized)) == 1
    found = optimized(X, src_key_padding_mask=PADDED)
    torch.testing.assert_close(found, module(X, src_key_padding_mask=PADDED).detach())
    with torch.no_grad():
        fused = module(X, src_key_padding_mask=PADDED)
    assert not torch.allclose(found, fused, atol=1e-2)


def test_what_agrees_is_not_told() -> None:
    torch.manual_seed(0)
    module = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    assert not _notes(attngraph.optimize(module, (X,)))
