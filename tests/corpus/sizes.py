"""A config of an architecture made tiny, by the names that the architectures give their sizes."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# A config is shrunk in those that it has.
NAMES: dict[int, str] = {
    120: "vocab_size vocab_size_per_layer_input",
    96: "intermediate_size ffn_dim d_ff n_inner hidden_dim encoder_ffn_dim decoder_ffn_dim",
    64: "hidden_size d_model n_embd dim emb_dim embedding_size encoder_hidden_size "
    "max_position_embeddings n_positions n_ctx max_source_positions max_target_positions",
    48: "moe_intermediate_size",
    32: "q_lora_rank kv_lora_rank projection_dim image_size",
    16: "hidden_size_per_layer_input head_dim d_kv qk_nope_head_dim v_head_dim num_mel_bins",
    8: "rotary_dim qk_rope_head_dim patch_size",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads "
    "decoder_attention_heads num_experts num_local_experts n_routed_experts",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers "
    "num_decoder_layers num_key_value_heads num_experts_per_tok num_codebooks eos_token_id",
    1: "n_group topk_group first_k_dense_replace bos_token_id image_token_id image_token_index",
    0: "pad_token_id",
}
SMALL = {name: size for size, names in NAMES.items() for name in names.split()}
# Sizes that stay equal where they are: of attentions whose keys are of one latent vector.
LATENT = (("head_dim", "qk_rope_head_dim"), ("num_key_value_heads", "num_attention_heads"))


def shrink(config: PreTrainedConfig) -> None:
    """Makes the config and its parts tiny, with two layers: one of each of its first two kinds."""
    from transformers import PreTrainedConfig

    for part in [*vars(config).values()]:
        if isinstance(part, PreTrainedConfig):
            shrink(part)
    of_layers = _of_layers(config)
    equal = [pair for pair in LATENT if _are_equal(config, *pair)]
    for name, value in SMALL.items():
        if isinstance(getattr(config, name, None), int | float):
            # A config may compute the size from another, or refuse ours: then it keeps its own.
            with contextlib.suppress(AttributeError, TypeError, ValueError, NotImplementedError):
                setattr(config, name, value)
    for name, other in equal:
        setattr(config, name, getattr(config, other))
    if kinds := list(dict.fromkeys(getattr(config, "layer_types", None) or [])):
        with contextlib.suppress(AttributeError):  # some compute the kinds from other options
            config.layer_types = (kinds * 2)[:2]
    if of_layers:
        config.per_layer_config = of_layers


def _are_equal(config: PreTrainedConfig, name: str, other: str) -> bool:
    return getattr(config, name, None) == getattr(config, other, None) is not None


def _of_layers(config: PreTrainedConfig) -> dict[int, dict[str, Any]]:
    """Takes the sizes out that layers have of their own; those of the two layers, small.

    A size that is twice that of other layers stays twice the small one.
    """
    if not getattr(config, "is_heterogeneous", False):
        return {}
    own = config._heterogeneity_spec.per_layer_overrides
    kinds = getattr(config, "layer_types", None) or getattr(config, "mlp_layer_types", None) or []
    config.per_layer_config = None
    first = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    return {
        place: {name: _in_proportion(config, name, size) for name, size in own[layer].items()}
        for place, layer in enumerate((first * 2)[:2])
        if layer in own
    }


def _in_proportion(config: PreTrainedConfig, name: str, size: Any) -> Any:
    usual = getattr(config, name, None)
    if name not in SMALL or not usual or not size:
        return size
    return max(1, SMALL[name] * size // usual)
