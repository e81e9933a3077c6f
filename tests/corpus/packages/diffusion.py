"""Denoisers and autoencoders of diffusers."""

from __future__ import annotations

from typing import Any

import torch

from tests.corpus.packages.kit import row


@row("diffusers UNet2DCondition", length=16, others=(24, 32))
def _unet() -> Any:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(16, 32),
        layers_per_block=1,
        cross_attention_dim=32,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        attention_head_dim=8,
        norm_num_groups=4,
    )
    return model, lambda b, n: {
        "sample": torch.randn(b, 4, n, n),
        "timestep": torch.tensor(7),
        "encoder_hidden_states": torch.randn(b, 9, 32),
    }


@row("diffusers UNet2D", length=16, others=(24, 32))
def _unet2d() -> Any:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
        norm_num_groups=4,
    )
    return model, lambda b, n: {"sample": torch.randn(b, 3, n, n), "timestep": torch.tensor(7)}


@row("diffusers AutoencoderKL", length=16, others=(24, 32))
def _vae() -> Any:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        block_out_channels=(16, 32),
        norm_num_groups=4,
        sample_size=16,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )
    return model, lambda b, n: (torch.randn(b, 3, n, n),)


@row("diffusers DiT", others=())
def _dit() -> Any:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=10,
        norm_type="ada_norm_zero",
    )
    return model, lambda b, n: {
        "hidden_states": torch.randn(b, 4, 8, 8),
        "timestep": torch.randint(0, 10, (b,)),
        "class_labels": torch.randint(0, 10, (b,)),
    }


@row("diffusers PixArt", others=())
def _pixart() -> Any:
    from diffusers import PixArtTransformer2DModel

    model = PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        cross_attention_dim=16,
        caption_channels=12,
    )
    return model, lambda b, n: {
        "hidden_states": torch.randn(b, 4, 8, 8),
        "encoder_hidden_states": torch.randn(b, 6, 12),
        "timestep": torch.randint(0, 10, (b,)),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


@row("diffusers SD3", others=())
def _sd3() -> Any:
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pooled_projection_dim=16,
        out_channels=4,
    )
    return model, lambda b, n: {
        "hidden_states": torch.randn(b, 4, 8, 8),
        "encoder_hidden_states": torch.randn(b, 6, 16),
        "pooled_projections": torch.randn(b, 16),
        "timestep": torch.rand(b),
    }


@row("diffusers Flux")
def _flux() -> Any:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    return model, lambda b, n: {
        "hidden_states": torch.randn(b, n, 4),
        "encoder_hidden_states": torch.randn(b, 6, 32),
        "pooled_projections": torch.randn(b, 32),
        "timestep": torch.rand(b),
        "img_ids": torch.arange(3 * n).view(n, 3).float(),
        "txt_ids": torch.zeros(6, 3),
    }


@row("diffusers AuraFlow", others=())
def _aura() -> Any:
    from diffusers import AuraFlowTransformer2DModel

    model = AuraFlowTransformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_projection_dim=16,
        joint_attention_dim=16,
        out_channels=4,
        pos_embed_max_size=64,
    )
    return model, lambda b, n: {
        "hidden_states": torch.randn(b, 4, 8, 8),
        "encoder_hidden_states": torch.randn(b, 6, 16),
        "timestep": torch.rand(b),
    }


@row("diffusers StableAudio", others=())
def _stable_audio() -> Any:
    from diffusers import StableAudioDiTModel

    model = StableAudioDiTModel(
        sample_size=4,
        in_channels=4,
        num_layers=2,
        attention_head_dim=4,
        num_attention_heads=4,
        num_key_value_attention_heads=2,
        out_channels=4,
        cross_attention_dim=4,
        time_proj_dim=8,
        global_states_input_dim=8,
        cross_attention_input_dim=8,
    )
    return model, lambda b, n: {
        "hidden_states": torch.randn(b, 4, 12),
        "timestep": torch.rand(b),
        "encoder_hidden_states": torch.randn(b, 5, 8),
        "global_hidden_states": torch.randn(b, 1, 8),
        "rotary_embedding": (torch.randn(13, 2), torch.randn(13, 2)),
    }


@row("diffusers CogVideoX", others=())
def _cogvideo() -> Any:
    from diffusers import CogVideoXTransformer3DModel

    model = CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        time_embed_dim=2,
        text_embed_dim=8,
        num_layers=2,
        sample_width=8,
        sample_height=8,
        sample_frames=8,
        patch_size=2,
        max_text_seq_length=6,
    )
    return model, lambda b, n: {
        "hidden_states": torch.randn(b, 2, 4, 8, 8),
        "encoder_hidden_states": torch.randn(b, 6, 8),
        "timestep": torch.randint(0, 10, (b,)),
    }


@row("diffusers Wan", others=())
def _wan() -> Any:
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
    )
    return model, lambda b, n: {
        "hidden_states": torch.randn(b, 4, 2, 8, 8),
        "encoder_hidden_states": torch.randn(b, 6, 16),
        "timestep": torch.randint(0, 10, (b,)),
    }


@row("diffusers Kandinsky prior", others=())
def _prior() -> Any:
    from diffusers import PriorTransformer

    model = PriorTransformer(
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        embedding_dim=16,
        num_embeddings=6,
        additional_embeddings=4,
    )
    return model, lambda b, n: {
        "hidden_states": torch.randn(b, 16),
        "timestep": torch.tensor(3),
        "proj_embedding": torch.randn(b, 16),
        "encoder_hidden_states": torch.randn(b, 6, 16),
    }


@row("diffusers Sana", others=())
def _sana() -> Any:
    from diffusers import SanaTransformer2DModel

    model = SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=4,
        num_layers=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=4,
        cross_attention_dim=8,
        caption_channels=8,
        sample_size=8,
        patch_size=1,
    )
    return model, lambda b, n: {
        "hidden_states": torch.randn(b, 4, 8, 8),
        "encoder_hidden_states": torch.randn(b, 6, 8),
        "timestep": torch.randint(0, 10, (b,)),
    }
