"""Language models and their parts."""

from __future__ import annotations

from typing import Any

import torch

from tests.corpus.packages.kit import row

VOCABULARY = 64


def ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (batch, length))


def padding(batch: int, length: int) -> torch.Tensor:
    """True where a token is none: behind lengths that differ."""
    lengths = torch.randint(max(length // 2, 1), length + 1, (batch, 1))
    return torch.arange(length) >= lengths


def _x_decoder(**options: Any) -> Any:
    from x_transformers import Decoder, TransformerWrapper

    model = TransformerWrapper(
        num_tokens=VOCABULARY,
        max_seq_len=64,
        attn_layers=Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, **options),
    )
    return model, lambda b, n: (ids(b, n),)


def _x_encoder(**options: Any) -> Any:
    from x_transformers import Encoder, TransformerWrapper

    model = TransformerWrapper(
        num_tokens=VOCABULARY,
        max_seq_len=64,
        attn_layers=Encoder(dim=32, depth=2, heads=4, attn_dim_head=8, **options),
    )
    return model, lambda b, n: {"x": ids(b, n), "mask": ~padding(b, n)}


for _name, _options in {
    "plain": {},
    "rotary": {"rotary_pos_emb": True},
    "alibi": {"alibi_pos_bias": True},
    "t5 bias": {"rel_pos_bias": True},
    "dynamic bias": {"dynamic_pos_bias": True},
    "flash": {"attn_flash": True},
    "qk norm": {"attn_qk_norm": True},
    "one kv head": {"attn_one_kv_head": True},
    "grouped heads": {"attn_kv_heads": 2},
    "talking heads": {"attn_pre_talking_heads": True},
    "sinks": {"attn_num_mem_kv": 2},
    "sparse topk": {"attn_sparse_topk": 4},
    "gated": {"attn_gate_values": True},
    "rmsnorm glu": {"use_rmsnorm": True, "ff_glu": True, "ff_swish": True},
    "macaron": {"macaron": True},
    "residual attention": {"residual_attn": True},
    "sandwich": {"sandwich_norm": True},
    "shifted tokens": {"shift_tokens": 1},
    "xpos": {"rotary_xpos": True},
}.items():
    row(f"x-transformers decoder, {_name}")(lambda o=_options: _x_decoder(**o))
for _name, _options in {
    "mask": {},
    "mask, rotary": {"rotary_pos_emb": True},
    "mask, alibi": {"alibi_pos_bias": True},
    "mask, t5 bias": {"rel_pos_bias": True},
    "mask, flash": {"attn_flash": True},
    "mask, sinks": {"attn_num_mem_kv": 2},
}.items():
    row(f"x-transformers encoder, {_name}")(lambda o=_options: _x_encoder(**o))


def _litgpt(name: str, **options: Any) -> Any:
    from litgpt import GPT, Config

    given = {
        "n_layer": 2,
        "n_embd": 32,
        "n_head": 4,
        "block_size": 64,
        "padded_vocab_size": VOCABULARY,
        "vocab_size": VOCABULARY,
        **options,
    }
    return GPT(Config.from_name(name, **given)), lambda b, n: (ids(b, n),)


for _name, _options in {
    "pythia-14m": {},
    "Llama-3-8B": {"n_query_groups": 2, "intermediate_size": 64},
    "Gemma-2b": {"intermediate_size": 64, "head_size": 8},
    "Gemma-2-2b": {"intermediate_size": 64, "head_size": 8, "n_query_groups": 2},
    "phi-2": {"intermediate_size": 64},
    "falcon-7b": {"n_query_groups": 1},
    "Mixtral-8x7B-v0.1": {"n_query_groups": 2, "intermediate_size": 64, "n_expert": 4},
}.items():
    row(f"litgpt {_name}")(lambda m=_name, o=_options: _litgpt(m, **o))


@row("local-attention transformer", length=16, others=(32, 8))
def _local() -> Any:
    from local_attention import LocalTransformer

    model = LocalTransformer(
        num_tokens=VOCABULARY,
        dim=32,
        depth=2,
        max_seq_len=64,
        heads=4,
        dim_head=8,
        local_attn_window_size=8,
        causal=True,
    )
    return model, lambda b, n: (ids(b, n),)


@row("performer-pytorch language model")
def _performer() -> Any:
    from performer_pytorch import PerformerLM

    model = PerformerLM(
        num_tokens=VOCABULARY, max_seq_len=64, dim=32, depth=2, heads=4, dim_head=8, causal=False
    )
    return model, lambda b, n: (ids(b, n),)


@row("linear-attention-transformer language model")
def _linear() -> Any:
    from linear_attention_transformer import LinearAttentionTransformerLM

    model = LinearAttentionTransformerLM(
        num_tokens=VOCABULARY, dim=32, heads=4, depth=2, max_seq_len=64, causal=False
    )
    return model, lambda b, n: (ids(b, n),)


@row("reformer-pytorch language model", length=16, others=(32, 48))
def _reformer() -> Any:
    from reformer_pytorch import ReformerLM

    model = ReformerLM(
        num_tokens=VOCABULARY,
        dim=32,
        depth=1,
        max_seq_len=64,
        heads=4,
        bucket_size=8,
        n_hashes=2,
        full_attn_thres=64,
    )
    return model, lambda b, n: (ids(b, n),)


@row("perceiver-pytorch perceiver io")
def _perceiver_io() -> Any:
    from perceiver_pytorch import PerceiverIO

    model = PerceiverIO(
        dim=32,
        queries_dim=32,
        logits_dim=10,
        depth=2,
        num_latents=8,
        latent_dim=32,
        cross_heads=1,
        latent_heads=4,
        cross_dim_head=8,
        latent_dim_head=8,
    )
    return model, lambda b, n: {
        "data": torch.randn(b, n, 32),
        "mask": ~padding(b, n),
        "queries": torch.randn(b, 5, 32),
    }


@row("perceiver-pytorch language model")
def _perceiver_lm() -> Any:
    from perceiver_pytorch import PerceiverLM

    model = PerceiverLM(
        num_tokens=VOCABULARY,
        dim=32,
        depth=2,
        max_seq_len=64,
        num_latents=8,
        latent_dim=32,
        cross_heads=1,
        latent_heads=4,
        cross_dim_head=8,
        latent_dim_head=8,
    )
    return model, lambda b, n: {"x": ids(b, n), "mask": ~padding(b, n)}


@row("torchscale encoder")
def _torchscale_encoder() -> Any:
    from torchscale.architecture.config import EncoderConfig
    from torchscale.architecture.encoder import Encoder

    config = EncoderConfig(
        vocab_size=VOCABULARY,
        encoder_embed_dim=32,
        encoder_attention_heads=4,
        encoder_layers=2,
        encoder_ffn_embed_dim=64,
    )
    embed = torch.nn.Embedding(VOCABULARY, 32)
    model = Encoder(config, embed_tokens=embed)
    return model, lambda b, n: {
        "src_tokens": ids(b, n),
        "encoder_padding_mask": padding(b, n),
    }


@row("torchscale decoder")
def _torchscale_decoder() -> Any:
    from torchscale.architecture.config import DecoderConfig
    from torchscale.architecture.decoder import Decoder

    config = DecoderConfig(
        vocab_size=VOCABULARY,
        decoder_embed_dim=32,
        decoder_attention_heads=4,
        decoder_layers=2,
        decoder_ffn_embed_dim=64,
    )
    embed = torch.nn.Embedding(VOCABULARY, 32)
    return Decoder(config, embed_tokens=embed), lambda b, n: (ids(b, n),)


@row("torchscale retnet")
def _retnet() -> Any:
    from torchscale.architecture.config import RetNetConfig
    from torchscale.architecture.retnet import RetNetDecoder

    config = RetNetConfig(
        vocab_size=VOCABULARY,
        decoder_embed_dim=32,
        decoder_value_embed_dim=32,
        decoder_retention_heads=2,
        decoder_layers=2,
        decoder_ffn_embed_dim=64,
    )
    embed = torch.nn.Embedding(VOCABULARY, 32)
    return RetNetDecoder(config, embed_tokens=embed), lambda b, n: (ids(b, n),)


@row("xlstm language model", length=16, others=(24, 8))
def _xlstm() -> Any:
    from dacite import from_dict
    from omegaconf import OmegaConf
    from xlstm import xLSTMLMModel, xLSTMLMModelConfig

    given = {
        "vocab_size": VOCABULARY,
        "context_length": 32,
        "embedding_dim": 32,
        "num_blocks": 2,
        "mlstm_block": {"mlstm": {"num_heads": 2}},
        "slstm_at": [],
    }
    config = from_dict(xLSTMLMModelConfig, OmegaConf.to_container(OmegaConf.create(given)))
    return xLSTMLMModel(config), lambda b, n: (ids(b, n),)


@row("torch transformer")
def _torch_transformer() -> Any:
    model = torch.nn.Transformer(32, 4, 2, 2, 64, batch_first=True)
    return model, lambda b, n: {
        "src": torch.randn(b, n, 32),
        "tgt": torch.randn(b, n - 3, 32),
        "src_key_padding_mask": padding(b, n),
        "tgt_mask": torch.nn.Transformer.generate_square_subsequent_mask(n - 3),
    }


@row("torch decoder layer")
def _torch_decoder() -> Any:
    model = torch.nn.TransformerDecoderLayer(32, 4, 64, batch_first=True)
    return model, lambda b, n: {
        "tgt": torch.randn(b, n, 32),
        "memory": torch.randn(b, n + 2, 32),
        "memory_key_padding_mask": padding(b, n + 2),
    }
