"""Models of many kinds, each the only one of its package, that were new to the compiler."""

from __future__ import annotations

from typing import Any

import torch

from tests.corpus.packages.kit import CLASSES, images, row
from tests.corpus.packages.text import VOCABULARY, ids, padding


@row("deformable-attention two dimensions", others=())
def _deformable() -> Any:
    from deformable_attention import DeformableAttention2D

    model = DeformableAttention2D(dim=32, dim_head=8, heads=4)
    return model, lambda b, n: (torch.randn(b, 32, 16, 16),)


@row("charformer-pytorch tokenizer", length=16, others=(27, 9))
def _charformer() -> Any:
    from charformer_pytorch import GBST

    model = GBST(num_tokens=VOCABULARY, dim=32, max_block_size=4, downsample_factor=4)
    return model, lambda b, n: (ids(b, n), ~padding(b, n))


@row("aft-pytorch full")
def _aft() -> Any:
    from aft_pytorch import AFTFull

    return AFTFull(max_seqlen=32, dim=32), lambda b, n: (torch.randn(b, n, 32),)


@row("glom-pytorch columns", others=())
def _glom() -> Any:
    from glom_pytorch import Glom

    return Glom(dim=32, levels=3, image_size=32, patch_size=8), images(32)


@row("htm-pytorch attention", length=16, others=(24, 19))
def _htm() -> Any:
    from htm_pytorch import HTMAttention

    model = HTMAttention(dim=32, heads=4, dim_head=8, topk_mems=2, mem_chunk_size=4)
    return model, lambda b, n: (torch.randn(b, 6, 32), torch.randn(b, n, 32))


@row("mmdit block", others=(17, 8))
def _mmdit() -> Any:
    from mmdit import MMDiT

    model = MMDiT(depth=1, dim_text=32, dim_image=16, dim_cond=24, dim_head=8, heads=4)
    return model, lambda b, n: {
        "text_tokens": torch.randn(b, n, 32),
        "image_tokens": torch.randn(b, 9, 16),
        "text_mask": ~padding(b, n),
        "time_cond": torch.randn(b, 24),
    }


@row("palm-pytorch language model")
def _palm() -> Any:
    from palm_pytorch import PaLM

    model = PaLM(num_tokens=VOCABULARY, dim=32, depth=2, heads=4, dim_head=8)
    return model, lambda b, n: (ids(b, n),)


@row("rela-transformer language model")
def _rela() -> Any:
    from rela_transformer import ReLATransformer

    model = ReLATransformer(
        num_tokens=VOCABULARY, dim=32, depth=2, heads=4, dim_head=8, max_seq_len=64
    )
    return model, lambda b, n: (ids(b, n),)


@row("segformer-pytorch segmentation", others=())
def _segformer() -> Any:
    from segformer_pytorch import Segformer

    model = Segformer(
        dims=(16, 16, 32, 32), heads=(1, 2, 2, 4), num_layers=1, decoder_dim=16, num_classes=4
    )
    return model, images(64)


@row("stam-pytorch video", others=())
def _stam() -> Any:
    from stam_pytorch import STAM

    model = STAM(
        dim=32, image_size=32, patch_size=16, num_frames=3, num_classes=CLASSES, space_depth=1,
        space_heads=4, space_mlp_dim=64, time_depth=1, time_heads=4, time_mlp_dim=64,
        space_dim_head=8, time_dim_head=8,
    )  # fmt: skip
    return model, lambda b, n: (torch.randn(b, 3, 3, 32, 32),)


@row("uformer-pytorch restoration", others=())
def _uformer() -> Any:
    from uformer_pytorch import Uformer

    model = Uformer(dim=16, stages=2, num_blocks=1, window_size=8, dim_head=8, heads=2, ff_mult=2)
    return model, images(32)


@row("x-unet denoiser", others=())
def _x_unet() -> Any:
    from x_unet import XUnet

    model = XUnet(
        dim=8, dim_mults=(1, 2), num_blocks_per_stage=(1, 1), num_self_attn_per_stage=(0, 1),
        nested_unet_depths=(0, 0),
    )  # fmt: skip
    return model, images(32)


@row("fast-transformer-pytorch language model")
def _fastformer() -> Any:
    from fast_transformer_pytorch import FastTransformer

    model = FastTransformer(
        num_tokens=VOCABULARY, dim=32, depth=2, heads=4, dim_head=8, max_seq_len=64,
        absolute_pos_emb=True,
    )  # fmt: skip
    return model, lambda b, n: (ids(b, n), ~padding(b, n))


@row("en-transformer molecules")
def _equivariant() -> Any:
    from en_transformer import EnTransformer

    model = EnTransformer(dim=32, depth=1, dim_head=32, heads=2)
    return model, lambda b, n: {
        "feats": torch.randn(b, n, 32),
        "coors": torch.randn(b, n, 3),
    }


@row("infini-transformer-pytorch segment")
def _infini() -> Any:
    from infini_transformer_pytorch import InfiniTransformer

    model = InfiniTransformer(num_tokens=VOCABULARY, dim=32, depth=1, dim_head=8, heads=4)
    return model, lambda b, n: (ids(b, n),)
