"""What depends on lengths alone is built once for all layers; with static lengths it folds."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim
from transformers import T5Config, T5EncoderModel

from attngraph.compiler import Model, analyse


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = T5Config(d_model=32, d_kv=8, num_heads=4, d_ff=64, num_layers=3, vocab_size=50)
        self.model = T5EncoderModel(config)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.model(input_ids=ids).last_hidden_state
        return hidden


@pytest.mark.parametrize("dynamic", [True, False])
def test_the_buckets_of_t5_are_computed_once_or_never(dynamic: bool) -> None:
    dims: Any = ({0: Dim("batch", max=8), 1: Dim("seq", max=64)},) if dynamic else None
    model = Model(Encoder().eval(), None, (torch.randint(0, 50, (2, 9)),), {}, dims)
    graph, _ = analyse(model)
    ops = Counter(node.op for node in graph)
    assert ops["attn.attention"] == 3
    buckets = [ops[op] for op in ("aten.log", "aten.arange", "aten.where.self")]
    assert buckets == ([1, 1, 1] if dynamic else [0, 0, 0])
