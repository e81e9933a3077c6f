"""Branches on a tensor's values in a decoder: its steps are what the sides are compared in."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from attngraph.export.runtime.session import Session
from attngraph.export.target import parse_target
from attngraph.frontend.model import Model
from attngraph.verification.verify import verify_file

pytestmark = pytest.mark.wide

HEADS, WIDTH = 2, 8
BATCH, SEQ, PAST = Dim("batch", max=8), Dim("seq", max=32), Dim("past", max=32)
SHAPES = (
    {0: BATCH, 1: SEQ},
    {0: BATCH, 1: Dim("total", max=64)},
    {0: BATCH, 2: PAST},
    {0: BATCH, 2: PAST},
)


class Shortcut(nn.Module):
    """One attention over a past; a mask that hides nothing is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(32, 16), nn.Embedding(64, 16)
        self.projections, self.head = nn.Linear(16, 48), nn.Linear(16, 32)

    def forward(
        self, ids: Tensor, mask: Tensor, past_key: Tensor, past_value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        (batch, new), past = ids.shape, past_key.shape[2]
        x = self.embed(ids) + self.places((mask.cumsum(1) - 1).clamp(min=0)[:, past:])
        parts = self.projections(self.shown(x, mask)).view(batch, new, 3, HEADS, WIDTH)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        key, value = torch.cat([past_key, key], 2), torch.cat([past_value, value], 2)
        visible = torch.arange(past + new) <= torch.arange(past, past + new)[:, None]
        visible = visible[None, None]
        if not mask.all():
            visible = visible & mask[:, None, None].bool()
        scores = (query @ key.mT / WIDTH**0.5).masked_fill(~visible, -torch.inf)
        attended = scores.softmax(-1).nan_to_num() @ value
        return self.head(attended.transpose(1, 2).flatten(2)), key, value

    def shown(self, x: Tensor, mask: Tensor) -> Tensor:
        return x


class Differs(Shortcut):
    def shown(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * 2 if mask.all() else x


def _compiled(kind: type[Shortcut]) -> tuple[Shortcut, tuple[Tensor, ...], Any]:
    torch.manual_seed(0)
    module = kind().eval()
    past = torch.randn(2, 2, HEADS, 3, WIDTH)
    args = (torch.randint(0, 32, (2, 4)), torch.ones(2, 7, dtype=torch.long), *past)
    presents = {"past_key": "output_1", "past_value": "output_2"}
    return (
        module,
        args,
        attngraph.optimize_decoder(module, args, dynamic_shapes=SHAPES, presents=presents),
    )


@pytest.mark.parametrize(
    ("kind", "said"), [(Shortcut, "chooses by a tensor's values"), (Differs, "computes both sides")]
)
def test_branches_are_followed_in_the_steps(
    kind: type[Shortcut], said: str, tmp_path: Path
) -> None:
    module, args, decoder = _compiled(kind)
    notes = [note for note in decoder.report.notes if said in note]
    assert "test_decoder_branches.py" in notes[0]
    ids = torch.randint(0, 32, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 12, dtype=torch.long)
    nothing = torch.zeros(2, 2, HEADS, 0, WIDTH)
    for hidden in (0, 3):
        mask[0, :hidden] = 0
        _, cache = decoder(ids[:, :8], mask[:, :8])
        with torch.no_grad():
            expected = module(ids, mask, *nothing)[0][:, 8:]
        torch.testing.assert_close(decoder(ids[:, 8:], mask, cache)[0], expected)
    path = tmp_path / "decoder.onnx"
    decoder.save(path)
    model = Model(module, None, args, {}, SHAPES, "Shortcut")
    assert verify_file(model, path, Session.open(path, parse_target("cpu"))).parity.passed


@pytest.mark.slow
def test_angles_that_grow_with_the_length_are_decoded_up_to_where_they_do() -> None:
    """Dynamic NTK in transformers asks in each call whether the sequence is a longer one."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    decoder = attngraph.optimize_decoder(model, all_logits=True)
    assert decoder.layout.last == 16
    ids = torch.randint(3, 64, (2, 40))
    with torch.no_grad():
        for length in (40, 12, 30):  # a prompt takes any length, in any order
            fresh = copy.deepcopy(model)  # it keeps the angles of its longest sequence
            expected = fresh(ids[:, :length], use_cache=False).logits
            found, _ = decoder(ids[:, :length])
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
        _, cache = decoder(ids[:, :12])
        found, _ = decoder(ids[:, 12:16], cache=cache)
        expected = copy.deepcopy(model)(ids[:, :16], use_cache=False).logits[:, 12:]
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
        with pytest.raises(attngraph.errors.UsageError, match="no cache can go on to 17 tokens"):
            decoder(ids[:, 12:17], cache=cache)
