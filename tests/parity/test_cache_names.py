"""A causal language model whose cache is called `cache`, as in transformers from 5.24 on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Cache, LlamaConfig, LlamaForCausalLM

from attngraph import optimize_decoder
from attngraph.frontend.interface.modalities import cache_parameter
from tests.models.kit import VOCABULARY, peaked
from tests.parity.test_decode import common


class Renamed(LlamaForCausalLM):
    """As the class is in 5.24, in whichever version is installed."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
    ) -> Any:
        given = {cache_parameter(super().forward): cache}
        return super().forward(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=use_cache,
            **given,
        )


def test_the_tokens_are_those_of_the_model_without_a_cache() -> None:
    torch.manual_seed(0)
    model = peaked(
        Renamed(LlamaConfig(**common(num_key_value_heads=1, num_hidden_layers=1))).eval()
    )
    decoder = optimize_decoder(model)
    ids = torch.randint(VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(1))
    found = decoder.generate(ids, max_new_tokens=6)
    with torch.no_grad():
        for _ in range(6):
            following = model(ids, torch.ones_like(ids), use_cache=False).logits[:, -1].argmax(-1)
            ids = torch.cat([ids, following[:, None]], 1)
    assert torch.equal(found, ids)
    assert "past_key_values.0.key" in decoder.session.input_names  # what runtimes look for


class Old(nn.Module):
    def forward(self, x: Tensor, past_key_values: Any = None, cache: Cache | None = None) -> Tensor:
        return x


class New(nn.Module):
    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        return x


class Dictionary(nn.Module):
    """As XLM's, which is none of transformers' caches."""

    def forward(self, x: Tensor, cache: dict[str, Tensor] | None = None) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("kind", "name"), [(Old, "past_key_values"), (New, "cache"), (Dictionary, "past_key_values")]
)
def test_a_cache_is_told_by_its_name_and_annotation(kind: type[nn.Module], name: str) -> None:
    assert cache_parameter(kind.forward) == name
