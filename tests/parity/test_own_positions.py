"""A decoder whose positions are an input puts tokens where its caller says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import attngraph
from attngraph.errors import UsageError
from attngraph.export.runtime.session import Session
from attngraph.export.target import parse_target
from attngraph.frontend.families.causal_lm import PlacedCausalLM
from attngraph.frontend.model import Model
from attngraph.verification.verify import verify_file
from tests.models.kit import peaked
from tests.parity.test_decode import common, prompts


@pytest.mark.wide
def test_it_is_what_the_model_computes_at_any_positions(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    module = peaked(LlamaForCausalLM(LlamaConfig(**common(num_hidden_layers=1))).eval())
    made = attngraph.optimize_decoder(module, all_logits=True, position_ids=True)
    assert made.layout.positions == "position_ids"
    ids, mask = prompts(3)
    expected = module.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    assert torch.equal(made.generate(ids, 6, mask), expected)  # by default those of the mask
    rows, length = ids.shape
    two = torch.arange(length) % 4  # as where texts are packed behind each other
    places = torch.stack([two, two.flip(0), torch.arange(length) + 9])
    empty = {name: torch.zeros(_shape(made, name, rows)) for name in made.layout.pasts}
    given = {"input_ids": ids, "attention_mask": mask, "position_ids": places, **empty}
    found = made.session.run(given)[0]
    with torch.no_grad():
        eager = module(ids, attention_mask=mask, position_ids=places).logits
        usual = module(ids, attention_mask=mask).logits
    shown = mask.bool()
    torch.testing.assert_close(found[shown], eager[shown], rtol=0, atol=2e-5)
    assert (eager - usual)[shown].abs().max() > 1e-2
    file = tmp_path / "model.onnx"
    made.save(file)
    session = Session.open(file, parse_target("cpu"))
    assert verify_file(Model(module, None, (), {}, None, "Llama"), file, session).parity.passed


def _shape(made: attngraph.Decoder, name: str, rows: int) -> tuple[int, ...]:
    _, heads, _, width = made.session.input_shape(name)
    assert isinstance(heads, int)
    assert isinstance(width, int)
    return rows, heads, 0, width


def test_a_model_without_positions_is_refused() -> None:
    from transformers import BloomConfig, BloomForCausalLM, LlamaConfig, LlamaForCausalLM

    bloom = BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=1, n_head=2, vocab_size=90))
    with pytest.raises(UsageError, match="BloomForCausalLM takes no position_ids"):
        PlacedCausalLM(bloom)
    llama = LlamaForCausalLM(LlamaConfig(**common(num_hidden_layers=1)))
    with pytest.raises(UsageError, match="keep the padding"):
        attngraph.optimize_decoder(llama, position_ids=True, padding=False)
