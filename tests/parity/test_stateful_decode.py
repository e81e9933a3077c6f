"""Decoders that keep states give the tokens of the model without a cache, padded and in pieces."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph import Decoder
from attngraph.errors import UsageError
from attngraph.frontend.kept import find_kept
from attngraph.frontend.stateful_lm import Forms, WithoutCache
from attngraph.runtimes.genai import Generation, genai_config

VOCABULARY, CHUNK = 96, 8
# On both sides of the convolutions' width of 4 and of one and two chunks.
LENGTHS = (1, 2, 3, 5, 7, 8, 9, 17)


def _config(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        **more,
    }


_SCAN = {"vocab_size": VOCABULARY, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 1}
_HEADS = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": CHUNK}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_ATTENDS_LAST = {"layer_types": ["conv", "full_attention"]}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Lfm2": ("Lfm2", _config(**_ATTENDS_LAST)),
    "Mamba": ("Mamba", _SCAN),
    "FalconMamba": ("FalconMamba", _SCAN),
    "Mamba2": (
        "Mamba2",
        _SCAN | {"num_heads": 4, "head_dim": 8, "n_groups": 2, "chunk_size": CHUNK},
    ),
    "Qwen3Next": ("Qwen3Next", _config(**_DELTA, **_EXPERTS, shared_expert_intermediate_size=16)),
    "Qwen3_5": ("Qwen3_5Text", _config(**_DELTA)),
    "OlmoHybrid": (
        "OlmoHybrid",
        _config(**_DELTA | {"linear_num_key_heads": 4}, pad_token_id=0),
    ),
    "FalconH1": (
        "FalconH1",
        _config(**_HEADS | {"mamba_n_heads": 4}, mamba_d_ssm=32),
    ),
    "Bamba": ("Bamba", _config(**_HEADS, attn_layer_indices=[1])),
    "GraniteMoeHybrid": (
        "GraniteMoeHybrid",
        _config(
            **_HEADS,
            layer_types=["mamba", "attention"],
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=16,
        ),
    ),
    "Jamba": (
        "Jamba",
        _config(
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            num_experts=2,
            num_experts_per_tok=1,
            mamba_d_state=4,
            mamba_dt_rank=4,
        ),
    ),
    "MiniMax": (
        "MiniMax",
        _config(
            layer_types=["linear_attention", "full_attention"],
            block_size=CHUNK,
            num_local_experts=4,
            num_experts_per_tok=2,
        ),
    ),
    "Zamba": (
        "Zamba",
        _config(mamba_d_state=4, mamba_dt_rank=4)
        | {"layers_block_type": ["mamba", "hybrid", "hybrid"], "num_hidden_layers": 3}
        | {"num_key_value_heads": 4},
    ),
    "KimiLinear": (
        "KimiLinear",
        _config(
            **_EXPERTS,
            layer_types=["linear_attention", "full_attention"],
            kv_lora_rank=8,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=8,
            linear_num_heads=4,
            linear_head_dim=8,
            pad_token_id=0,
        )
        | {"num_key_value_heads": 4},
    ),
    "Lfm2Moe": ("Lfm2Moe", _config(**_ATTENDS_LAST, **_EXPERTS, num_dense_layers=1)),
}
IN_PIECES = {"Lfm2", "Lfm2Moe"}
UNPADDED = {"MiniMax"}
CHEAP = ("Lfm2", "Mamba")
NAMES = [
    pytest.param(name, marks=() if name in CHEAP else pytest.mark.slow, id=name)
    for name in FAMILIES
]


def built(name: str, **more: Any) -> nn.Module:
    """With weights that make all of it matter; what a recurrence forgets by is as the class has."""
    import transformers

    config, values = FAMILIES[name]
    torch.manual_seed(0)
    made = getattr(transformers, f"{config}Config")(**values, **more)
    module: nn.Module = getattr(transformers, f"{name}ForCausalLM")(made).eval()
    with torch.no_grad():
        for called, weight in module.named_parameters():
            if weight.ndim > 1 and "A_log" not in called:
                weight.normal_(0, 1.5 / weight[0].numel() ** 0.5)
    return module


@functools.cache
def compiled(name: str) -> tuple[nn.Module, Decoder]:
    module = built(name)
    return module, attngraph.optimize_decoder(module)


def greedy(module: nn.Module, ids: Tensor, mask: Tensor, count: int) -> Tensor:
    """What the model gives without a cache."""
    whole = WithoutCache(module)
    for _ in range(count):
        with torch.no_grad():
            logits = whole(ids, mask, {})["logits"][:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
        mask = torch.cat([mask, torch.ones(len(mask), 1, dtype=mask.dtype)], 1)
    return ids


def prompt(batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Ids and a mask that hides half of the second row."""
    random = torch.Generator().manual_seed(length)
    ids = torch.randint(VOCABULARY, (batch, length), generator=random)
    mask = torch.ones_like(ids)
    mask[1:, : length // 2] = 0
    return ids, mask


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_without_a_cache(name: str, tmp_path: Path) -> None:
    module, decoder = compiled(name)
    assert decoder.layout.states
    assert (decoder.layout.piece is None) == (name in IN_PIECES)
    decoder.save(tmp_path / "model.onnx")
    loaded = Decoder.load(tmp_path / "model.onnx")
    for length in LENGTHS:
        for batch in (1, 2):
            ids, mask = prompt(batch, length)
            shown = torch.ones_like(ids)
            found = decoder.generate(ids, 3)
            assert torch.equal(found, greedy(module, ids, shown, 3)), (length, batch)
            assert torch.equal(found, loaded.generate(ids, 3))
            if batch > 1 and name not in UNPADDED:
                padded = decoder.generate(ids, 3, mask)
                assert torch.equal(padded, greedy(module, ids, mask, 3)), length
                assert torch.equal(padded, loaded.generate(ids, 3, mask))


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_in_pieces_and_many_steps(name: str) -> None:
    module, decoder = compiled(name)
    ids, _ = prompt(2, 5)
    found = decoder.generate(ids, 70)
    assert torch.equal(found, greedy(module, ids, torch.ones_like(ids), 70))
    first, cache = decoder(found[:, :7])
    rest, _ = decoder(found[:, 7:20], None, cache)
    again, _ = decoder(found[:, 7:20], None, cache)  # a growing cache is left as it is
    whole, _ = decoder(found[:, :20])
    assert torch.equal(rest, again)
    torch.testing.assert_close(rest[:, -1], whole[:, -1], rtol=1e-4, atol=1e-4)
    assert torch.equal(first[:, -1].argmax(-1), found[:, 7])


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_generates_the_same(name: str) -> None:
    module, decoder = compiled(name)
    generate: Callable[..., Tensor] = module.generate  # type: ignore[assignment]
    ids, mask = prompt(2, 9)
    for shown in [torch.ones_like(ids)] + [mask] * (name not in UNPADDED):
        given = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        expected = generate(ids, attention_mask=shown, **given)
        assert torch.equal(decoder.generate(ids, 12, shown), expected)


def test_what_each_part_is() -> None:
    kept = find_kept(built("FalconH1"))
    assert kept.argument == "past_key_values"
    assert [(part.name, part.shape, part.rows, part.tokens) for part in kept.parts[:4]] == [
        ("0_key", (None, 2, None, 8), 0, 2),
        ("0_value", (None, 2, None, 8), 0, 2),
        ("0_conv_state", (None, 48, 4), 0, None),
        ("0_recurrent_state", (None, 4, 8, 8), 0, None),
    ]
    assert find_kept(built("Mamba")).argument == "cache_params"
    names = [part.name for part in find_kept(built("MiniMax")).parts]
    assert names == ["1_key", "1_value", "0_linear_cache"]


@pytest.mark.parametrize(
    ("name", "goes_on", "is_chunked"),
    [
        ("Lfm2", True, False),
        ("Mamba", False, True),
        ("Bamba", True, True),
        ("MiniMax", False, True),
    ],
)
def test_forms_that_go_on_from_a_state(name: str, goes_on: bool, is_chunked: bool) -> None:
    module = built(name)
    forms = Forms.of(module, find_kept(module))
    assert (forms.pieces.alone <= forms.tolerance) == goes_on
    assert forms.is_chunked == is_chunked
    assert forms.steps.alone <= forms.tolerance
    assert (forms.steps.padded <= forms.tolerance) == (name not in UNPADDED)


def test_what_states_do_not_take() -> None:
    _, decoder = compiled("Lfm2")
    ids, mask = prompt(2, 4)
    mask[1] = torch.tensor([1, 0, 1, 1])
    with pytest.raises(UsageError, match=r"0 at row 1, place 1, behind a token: .* on the left"):
        decoder(ids, mask)
    with pytest.raises(UsageError, match=r"keeps states.* static"):
        attngraph.optimize_decoder(built("Lfm2"), cache="static", max_length=16)
    with pytest.raises(UsageError, match=r"past_key_values\.0\.conv_state: run it with"):
        genai_config(decoder, Generation())


@pytest.mark.slow
def test_a_family_whose_steps_are_other_formulas_is_refused() -> None:
    from transformers import Zamba2Config, Zamba2ForCausalLM

    sizes = {"n_mamba_heads": 4, "mamba_ngroups": 1, "mamba_headdim": 16, "chunk_size": CHUNK}
    blocks = {"layers_block_type": ["mamba", "hybrid"], "hybrid_layer_ids": [1]}
    more = _config(**sizes, **blocks, mamba_d_state=8, num_mem_blocks=1)
    torch.manual_seed(0)
    module = Zamba2ForCausalLM(Zamba2Config(**more | {"num_key_value_heads": 4})).eval()
    with torch.no_grad():
        for weight in module.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 1.5 / weight[0].numel() ** 0.5)
    with pytest.raises(UsageError, match=r"one token at a time gets logits that are .* off"):
        attngraph.optimize_decoder(module)
