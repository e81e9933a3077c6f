"""Detectors, matchers and encoders of images, and what joins them to text."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.corpus.packages.kit import CLASSES, images, row


@row("segment-anything image encoder", others=())
def _sam_image() -> Any:
    from segment_anything.modeling import ImageEncoderViT

    model = ImageEncoderViT(
        img_size=64,
        patch_size=8,
        embed_dim=32,
        depth=2,
        num_heads=2,
        out_chans=16,
        use_rel_pos=True,
        window_size=3,
        global_attn_indexes=(1,),
    )
    return model, images(64)


@row("segment-anything mask decoder", others=())
def _sam_mask() -> Any:
    from segment_anything.modeling import MaskDecoder, TwoWayTransformer

    transformer = TwoWayTransformer(depth=2, embedding_dim=32, num_heads=2, mlp_dim=64)
    model = MaskDecoder(transformer_dim=32, transformer=transformer)
    return model, lambda b, n: {
        "image_embeddings": torch.randn(1, 32, 8, 8),
        "image_pe": torch.randn(1, 32, 8, 8),
        "sparse_prompt_embeddings": torch.randn(b, 3, 32),
        "dense_prompt_embeddings": torch.randn(b, 32, 8, 8),
        "multimask_output": True,
    }


@row("open_clip CLIP")
def _clip() -> Any:
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    model = CLIP(
        16,
        CLIPVisionCfg(layers=2, width=32, head_width=16, patch_size=8, image_size=32),
        CLIPTextCfg(context_length=12, vocab_size=64, width=32, heads=2, layers=2),
    )
    return model, lambda b, n: (torch.randn(b, 3, 32, 32), torch.randint(1, 64, (b, 12)))


@row("open_clip CoCa")
def _coca() -> Any:
    from open_clip.coca_model import CoCa

    vision = {
        "layers": 2,
        "width": 32,
        "head_width": 16,
        "patch_size": 8,
        "image_size": 32,
        "attentional_pool": True,
        "attn_pooler_heads": 2,
        "output_tokens": True,
    }
    text = {
        "context_length": 12,
        "vocab_size": 64,
        "width": 32,
        "heads": 2,
        "layers": 2,
        "embed_cls": True,
        "output_tokens": True,
    }
    model = CoCa(
        32,
        multimodal_cfg={
            "context_length": 12,
            "vocab_size": 64,
            "width": 32,
            "heads": 2,
            "layers": 2,
            "mlp_ratio": 2,
        },
        text_cfg=text,
        vision_cfg=vision,
    )
    # The class leaves this to what memory holds.
    nn.init.normal_(model.text_decoder.text_projection, std=0.2)
    return model, lambda b, n: (torch.randn(b, 3, 32, 32), torch.randint(1, 64, (b, 11)))


@row("torchvision vit_b_16", others=())
def _tv_vit() -> Any:
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=CLASSES), images(32)


@row("torchvision swin_t", others=())
def _tv_swin() -> Any:
    from torchvision.models import SwinTransformer

    return SwinTransformer([4, 4], 16, [1, 1], [1, 2], [7, 7], num_classes=CLASSES), images(56)


@row("torchvision swin_v2_t", others=())
def _tv_swin2() -> Any:
    from torchvision.models.swin_transformer import (
        PatchMergingV2,
        SwinTransformer,
        SwinTransformerBlockV2,
    )

    model = SwinTransformer(
        [4, 4],
        16,
        [1, 1],
        [1, 2],
        [8, 8],
        num_classes=CLASSES,
        block=SwinTransformerBlockV2,
        downsample_layer=PatchMergingV2,
    )
    return model, images(64)


@row("torchvision maxvit", others=())
def _tv_maxvit() -> Any:
    from torchvision.models import MaxVit

    model = MaxVit(
        input_size=(56, 56),
        stem_channels=16,
        partition_size=7,
        block_channels=[16, 32],
        block_layers=[1, 1],
        head_dim=8,
        stochastic_depth_prob=0.0,
        num_classes=CLASSES,
    )
    return model, images(56)


@row("kornia LoFTR", others=())
def _loftr() -> Any:
    from kornia.feature.loftr.loftr_module import LocalFeatureTransformer

    model = LocalFeatureTransformer(
        {"d_model": 32, "nhead": 2, "layer_names": ["self", "cross"], "attention": "full"}
    )
    return model, lambda b, n: (torch.randn(b, 12, 32), torch.randn(b, 9, 32))


@row("kornia vit", others=())
def _kornia_vit() -> Any:
    from kornia.models.vit import VisionTransformer

    model = VisionTransformer(image_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2)
    return model, images(32)
