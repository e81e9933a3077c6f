"""Proteins, time series, tables, graphs and attentions by themselves."""

from __future__ import annotations

from typing import Any

import torch

from tests.corpus.packages.kit import row


@row("fair-esm ESM-2")
def _esm2() -> Any:
    from esm.data import Alphabet
    from esm.model.esm2 import ESM2

    alphabet = Alphabet.from_architecture("ESM-1b")
    model = ESM2(num_layers=2, embed_dim=32, attention_heads=2, alphabet=alphabet)

    def inputs(batch: int, length: int) -> Any:
        tokens = torch.randint(4, 24, (batch, length))
        tokens[0, -2:] = alphabet.padding_idx
        return (tokens,)

    return model, inputs


@row("fair-esm MSA transformer", others=())
def _msa() -> Any:
    import argparse

    from esm.data import Alphabet
    from esm.model.msa_transformer import MSATransformer

    alphabet = Alphabet.from_architecture("msa_transformer")
    options = argparse.Namespace(
        layers=2,
        embed_dim=32,
        ffn_embed_dim=64,
        attention_heads=2,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        max_tokens_per_msa=4096,
        max_tokens=4096,
        embed_positions_msa=True,
        embed_positions_msa_dim=32,
        max_positions=64,
    )
    model = MSATransformer(options, alphabet)
    return model, lambda b, n: (torch.randint(4, 24, (b, 5, 12)),)


@row("chronos bolt", others=())
def _chronos() -> Any:
    from chronos.chronos_bolt import ChronosBoltModelForForecasting
    from transformers import T5Config

    config = T5Config(
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        vocab_size=2,
        pad_token_id=0,
        decoder_start_token_id=0,
        feed_forward_proj="relu",
    )
    config.chronos_config = {
        "context_length": 64,
        "prediction_length": 8,
        "input_patch_size": 8,
        "input_patch_stride": 8,
        "quantiles": [0.1, 0.5, 0.9],
        "use_reg_token": True,
    }
    return ChronosBoltModelForForecasting(config), lambda b, n: (torch.randn(b, 64),)


@row("torch_geometric aggregation", others=())
def _pyg() -> Any:
    from torch_geometric.nn import TransformerConv

    model = TransformerConv(16, 8, heads=2)
    edges = torch.tensor([[0, 1, 2, 3, 3, 4], [1, 2, 3, 0, 1, 2]])
    return model, lambda b, n: (torch.randn(5, 16), edges)


@row("torch_geometric GAT", others=())
def _gat() -> Any:
    from torch_geometric.nn import GATv2Conv

    model = GATv2Conv(16, 8, heads=2)
    edges = torch.tensor([[0, 1, 2, 3, 3, 4], [1, 2, 3, 0, 1, 2]])
    return model, lambda b, n: (torch.randn(5, 16), edges)


@row("nystrom-attention nystromformer", length=16, others=(24, 8))
def _nystrom() -> Any:
    from nystrom_attention import NystromAttention

    model = NystromAttention(
        dim=32, dim_head=8, heads=4, num_landmarks=4, pinv_iterations=6, residual=True
    )
    return model, lambda b, n: {
        "x": torch.randn(b, n, 32),
        "mask": torch.arange(n) < torch.randint(n // 2, n + 1, (b, 1)),
    }


@row("linformer whole", others=())
def _linformer() -> Any:
    from linformer import Linformer

    model = Linformer(dim=32, seq_len=16, depth=2, heads=4, k=8, one_kv_head=True, share_kv=True)
    return model, lambda b, n: (torch.randn(b, 16, 32),)


@row("axial-attention image", others=())
def _axial() -> Any:
    from axial_attention import AxialAttention

    model = AxialAttention(dim=16, dim_index=1, heads=2, num_dimensions=2)
    return model, lambda b, n: (torch.randn(b, 16, 6, 5),)


@row("local-attention alone", length=16, others=(32, 8))
def _local() -> Any:
    from local_attention import LocalAttention

    model = LocalAttention(dim=8, window_size=8, causal=True, look_backward=1, autopad=True)
    return model, lambda b, n: tuple(torch.randn(b, 2, n, 8) for _ in range(3))


@row("perceiver-pytorch images", others=())
def _perceiver() -> Any:
    from perceiver_pytorch import Perceiver

    model = Perceiver(
        num_freq_bands=3,
        depth=2,
        max_freq=5.0,
        input_channels=3,
        input_axis=2,
        num_latents=8,
        latent_dim=32,
        cross_heads=1,
        latent_heads=4,
        cross_dim_head=8,
        latent_dim_head=8,
        num_classes=5,
    )
    return model, lambda b, n: (torch.randn(b, 6, 6, 3),)


@row("sentence-transformers pooling")
def _pooling() -> Any:
    from sentence_transformers.models import Pooling

    model = Pooling(32, pooling_mode="mean")
    return model, lambda b, n: (
        {
            "token_embeddings": torch.randn(b, n, 32),
            "attention_mask": torch.ones(b, n, dtype=torch.long),
        },
    )
