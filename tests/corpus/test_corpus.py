"""A dozen architectures of the corpus: right, and each attention fused or declined as recorded."""

from __future__ import annotations

import pytest

from tests.corpus.trial import attempt

pytestmark = pytest.mark.wide

# (architecture, attention) → (fused sites, declined sites by code)
RECORDED: dict[tuple[str, str], tuple[int, dict[str, int]]] = {
    ("beit", "sdpa"): (2, {}),  # a bias by relative position
    ("bert", "eager"): (2, {}),
    ("deberta-v2", "eager"): (2, {}),  # disentangled
    ("gemma3_text", "sdpa"): (2, {}),  # grouped queries, a window, norms of queries and keys
    ("gpt_neo", "eager"): (2, {}),  # a window in a buffer, no scale
    ("llama4_text", "eager"): (2, {}),  # complex rotary, chunks, experts
    ("longt5", "eager"): (6, {}),  # blocks of a local encoder, cross-attention
    ("modernbert", "sdpa"): (2, {}),  # packed projections, a window on both sides
    ("olmoe", "eager"): (2, {}),  # experts by groups of rows
    ("opt", "sdpa"): (2, {}),
    ("wav2vec2-conformer", "eager"): (2, {}),
    ("xlnet", "eager"): (2, {}),  # einsum, relative positions by shifting
}


@pytest.mark.parametrize(
    ("model", "attention"), RECORDED, ids=[f"{name}-{kind}" for name, kind in RECORDED]
)
def test_an_architecture_is_right_and_its_sites_are_as_recorded(model: str, attention: str) -> None:
    record = attempt(model, attention)
    assert record["outcome"] == "right", record["error"]
    assert record["unequal"] == []
    assert (record["fused"], record["declined"]) == RECORDED[model, attention]
