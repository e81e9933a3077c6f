"""Rows of tables, and time series."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch

from tests.corpus.packages.kit import row

_CATEGORIES = (5, 3, 7)


def _table(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Three columns of categories and four of numbers."""
    kinds = [torch.randint(0, number, (batch,)) for number in _CATEGORIES]
    return torch.stack(kinds, dim=1), torch.randn(batch, 4)


@row("tab-transformer-pytorch TabTransformer", others=())
def _tab() -> Any:
    from tab_transformer_pytorch import TabTransformer

    model = TabTransformer(
        categories=_CATEGORIES,
        num_continuous=4,
        dim=32,
        depth=2,
        heads=4,
        dim_head=8,
        mlp_act=torch.nn.ReLU(),
    )
    return model, lambda b, n: _table(b)


@row("tab-transformer-pytorch FTTransformer", others=())
def _ft() -> Any:
    from tab_transformer_pytorch import FTTransformer

    model = FTTransformer(
        categories=_CATEGORIES, num_continuous=4, dim=32, depth=2, heads=4, dim_head=8
    )
    return model, lambda b, n: _table(b)


@row("rtdl-revisiting-models FTTransformer", others=())
def _rtdl() -> Any:
    from rtdl_revisiting_models import FTTransformer

    model = FTTransformer(
        n_cont_features=4,
        cat_cardinalities=list(_CATEGORIES),
        d_out=2,
        n_blocks=2,
        d_block=32,
        attention_n_heads=4,
        attention_dropout=0.1,
        ffn_d_hidden_multiplier=1.5,
        ffn_dropout=0.1,
        residual_dropout=0.0,
    )
    return model, lambda b, n: _table(b)[::-1]


@row("rtdl-revisiting-models FTTransformer, linformer", others=())
def _rtdl_linformer() -> Any:
    from rtdl_revisiting_models import FTTransformer

    model = FTTransformer(
        n_cont_features=4,
        cat_cardinalities=list(_CATEGORIES),
        d_out=2,
        n_blocks=2,
        d_block=32,
        attention_n_heads=4,
        attention_dropout=0.1,
        ffn_d_hidden_multiplier=1.5,
        ffn_dropout=0.1,
        residual_dropout=0.0,
        linformer_kv_compression_ratio=0.5,
        linformer_kv_compression_sharing="headwise",
    )
    return model, lambda b, n: _table(b)[::-1]


@row("itransformer whole", others=())
def _inverted() -> Any:
    from iTransformer import iTransformer

    model = iTransformer(
        num_variates=5,
        lookback_len=24,
        dim=32,
        depth=2,
        heads=4,
        dim_head=8,
        pred_length=(6, 12),
        num_tokens_per_variate=1,
        use_reversible_instance_norm=True,
    )
    return model, lambda b, n: (torch.randn(b, 24, 5),)


@row("itransformer two dimensions", others=())
def _two() -> Any:
    from iTransformer import iTransformer2D

    model = iTransformer2D(
        num_variates=5,
        num_time_tokens=4,
        lookback_len=24,
        dim=32,
        depth=1,
        heads=4,
        dim_head=8,
        pred_length=(6,),
        use_reversible_instance_norm=True,
    )
    return model, lambda b, n: (torch.randn(b, 24, 5),)


@row("momentfm reconstruction", others=())
def _moment() -> Any:
    from momentfm.models.moment import MOMENT

    config = Namespace(
        task_name="reconstruction",
        transformer_backbone="t5",
        transformer_type="encoder_only",
        d_model=32,
        seq_len=64,
        patch_len=8,
        patch_stride_len=8,
        randomly_initialize_backbone=True,
        t5_config={
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": 8,
            "feed_forward_proj": "gated-gelu",
        },
        enable_gradient_checkpointing=False,
        device="cpu",
    )
    model = MOMENT(config)

    def inputs(batch: int, length: int) -> Any:
        seen = torch.arange(64) >= 64 - torch.randint(24, 65, (batch, 1))
        return {
            "x_enc": torch.randn(batch, 3, 64),
            "input_mask": seen.long(),
            "mask": torch.ones(batch, 64, dtype=torch.long),
        }

    return model, inputs


@row("uni2ts moirai 2")
def _moirai() -> Any:
    from uni2ts.model.moirai2.module import Moirai2Module

    model = Moirai2Module(
        d_model=384,
        d_ff=64,
        num_layers=1,
        patch_size=8,
        max_seq_len=64,
        attn_dropout_p=0.0,
        dropout_p=0.0,
    )

    def inputs(batch: int, length: int) -> Any:
        places = torch.arange(length).expand(batch, length).contiguous()
        return {
            "target": torch.randn(batch, length, 8),
            "observed_mask": torch.rand(batch, length, 8) > 0.1,
            "sample_id": torch.ones(batch, length, dtype=torch.long),
            "time_id": places,
            "variate_id": torch.zeros(batch, length, dtype=torch.long),
            "prediction_mask": places >= length - 3,
            "training_mode": False,
        }

    return model, inputs
