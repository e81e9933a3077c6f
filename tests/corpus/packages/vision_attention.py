"""Videos, windows, lambdas, prompts and memories of frames."""

from __future__ import annotations

from typing import Any

import torch

from tests.corpus.packages.kit import CLASSES, row


@row("timesformer-pytorch whole", others=())
def _timesformer() -> Any:
    from timesformer_pytorch import TimeSformer

    model = TimeSformer(
        dim=32,
        image_size=32,
        patch_size=8,
        num_frames=4,
        num_classes=CLASSES,
        depth=2,
        heads=4,
        dim_head=8,
        shift_tokens=True,
    )
    return model, lambda b, n: {
        "video": torch.randn(b, 4, 3, 32, 32),
        "mask": torch.arange(4) < torch.randint(2, 5, (b, 1)),
    }


@row("lambda-networks global", others=())
def _lambda() -> Any:
    from lambda_networks import LambdaLayer

    model = LambdaLayer(dim=16, dim_out=16, n=8, dim_k=8, heads=4, dim_u=2)
    return model, lambda b, n: (torch.randn(b, 16, 8, 8),)


@row("lambda-networks local", length=8, others=(12, 6))
def _lambda_local() -> Any:
    from lambda_networks import LambdaLayer

    model = LambdaLayer(dim=16, dim_out=16, r=5, dim_k=8, heads=4, dim_u=2)
    return model, lambda b, n: (torch.randn(b, 16, n, n),)


@row("halonet-pytorch attention", length=8, others=(12, 4))
def _halo() -> Any:
    from halonet_pytorch import HaloAttention

    model = HaloAttention(dim=16, block_size=4, halo_size=2, dim_head=8, heads=2)
    return model, lambda b, n: (torch.randn(b, 16, n, n),)


@row("flamingo-pytorch resampler", length=3, others=(4, 2))
def _resampler() -> Any:
    from flamingo_pytorch import PerceiverResampler

    model = PerceiverResampler(
        dim=32, depth=2, dim_head=8, heads=4, num_latents=6, num_media_embeds=4
    )
    return model, lambda b, n: (torch.randn(b, n, 9, 32),)


@row("flamingo-pytorch gated cross attention")
def _gated() -> Any:
    from flamingo_pytorch import GatedCrossAttentionBlock

    model = GatedCrossAttentionBlock(dim=32, dim_head=8, heads=4)
    torch.nn.init.constant_(model.attn_gate, 0.7)
    torch.nn.init.constant_(model.ff_gate, 0.4)
    return model, lambda b, n: {
        "x": torch.randn(b, n, 32),
        "media": torch.randn(b, 2, 6, 32),
        "media_locations": torch.rand(b, n) > 0.7,
    }


@row("coca-pytorch logits")
def _coca() -> Any:
    from coca_pytorch import CoCa

    model = CoCa(
        dim=32,
        num_tokens=64,
        unimodal_depth=2,
        multimodal_depth=2,
        num_img_queries=6,
        image_dim=24,
        heads=4,
        dim_head=8,
    )

    def inputs(batch: int, length: int) -> Any:
        text = torch.randint(1, 64, (batch, length))
        text[0, -2:] = 0
        return {"text": text, "image_tokens": torch.randn(batch, 9, 24)}

    return model, inputs


@row("sam2 memory attention", others=())
def _memory() -> Any:
    from sam2.modeling.memory_attention import MemoryAttention, MemoryAttentionLayer
    from sam2.modeling.sam.transformer import RoPEAttention

    layer = MemoryAttentionLayer(
        activation="relu",
        cross_attention=RoPEAttention(
            embedding_dim=32, num_heads=1, kv_in_dim=16, feat_sizes=[4, 4], rope_k_repeat=True
        ),
        d_model=32,
        dim_feedforward=64,
        dropout=0.0,
        pos_enc_at_attn=False,
        pos_enc_at_cross_attn_keys=True,
        pos_enc_at_cross_attn_queries=False,
        self_attention=RoPEAttention(embedding_dim=32, num_heads=1, feat_sizes=[4, 4]),
    )
    model = MemoryAttention(d_model=32, pos_enc_at_input=True, layer=layer, num_layers=2)
    return model, lambda b, n: {
        "curr": torch.randn(16, b, 32),
        "memory": torch.randn(36, b, 16),
        "curr_pos": torch.randn(16, b, 32),
        "memory_pos": torch.randn(36, b, 16),
        "num_obj_ptr_tokens": 4,
    }


@row("denoising-diffusion-pytorch U-Net", others=())
def _unet() -> Any:
    from denoising_diffusion_pytorch.denoising_diffusion_pytorch import Unet

    model = Unet(dim=16, dim_mults=(1, 2), attn_dim_head=8, attn_heads=2)
    return model, lambda b, n: (torch.randn(b, 3, 16, 16), torch.randint(0, 100, (b,)))
