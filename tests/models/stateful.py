"""Tiny models of the families of transformers that keep states, and a page of how they decode.

`python -m tests.models.stateful` compiles each and writes docs/decoders.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import attngraph
from attngraph.errors import AttngraphError

PAGE = Path(__file__).parents[2] / "docs" / "decoders.md"
VOCABULARY, CHUNK = 96, 8


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
    "Zamba2": (
        "Zamba2",
        _config(
            n_mamba_heads=4,
            mamba_ngroups=1,
            mamba_headdim=16,
            mamba_d_state=8,
            chunk_size=CHUNK,
            num_mem_blocks=1,
            layers_block_type=["mamba", "hybrid"],
            hybrid_layer_ids=[1],
        )
        | {"num_key_value_heads": 4},
    ),
    "NemotronH": (
        "NemotronH",
        _config(
            layers_block_type=["mamba", "attention", "mlp"],
            mamba_num_heads=4,
            mamba_head_dim=8,
            ssm_state_size=8,
            n_groups=2,
            chunk_size=CHUNK,
        )
        | {"num_hidden_layers": 3},
    ),
    "Rwkv": (
        "Rwkv",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "attention_hidden_size": 16,
            "intermediate_size": 32,
        },
    ),
    "RecurrentGemma": (
        "RecurrentGemma",
        _config(lru_width=32, block_types=["recurrent", "recurrent", "attention"])
        | {"num_hidden_layers": 3},
    ),
}
REFUSED = {
    "Rwkv": r"fed one token at a time get logits \(2, 2, 96\) of tokens \(2, 1\)",
}
"""Families that aren't decoded with their cache, and what their sentence says."""


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


def rows() -> Iterator[str]:
    """A line of the table for each family: how it takes a prompt, padding, and what is noted."""
    for name in FAMILIES:
        try:
            decoder = attngraph.optimize_decoder(built(name))
        except AttngraphError as error:
            yield f"| {name} | refused |  |  | {error} |"
            continue
        layout, report = decoder.layout, decoder.report
        kinds = dict.fromkeys(past.rpartition(".")[2] for past in layout.pasts)
        prompt = "in pieces of any length" if layout.piece is None else "token by token"
        padding = "rows padded on the left" if layout.mask else "no row padded"
        assert report.parity is not None
        yield f"| {name} | {prompt} | {padding} | {', '.join(kinds)} | |"


def write() -> None:
    """Writes the page."""
    lines = [
        "# Decoders that keep states",
        "",
        "Written by `python -m tests.models.stateful`, which compiles a tiny model of each family",
        "with `optimize_decoder`: parity passed over a prompt and steps, against the model without",
        "a cache, where the table doesn't give the sentence of its refusal. How a family's states",
        "are found is in [decoding.md](decoding.md#states).",
        "",
        "| family | a prompt is fed | padding | kept | refused |",
        "| --- | --- | --- | --- | --- |",
        *rows(),
        "",
    ]
    PAGE.write_text("\n".join(lines), "utf-8")


if __name__ == "__main__":
    write()
