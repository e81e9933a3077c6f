"""Vision transformers and what is built of them."""

from __future__ import annotations

from typing import Any

import torch

from tests.corpus.packages.kit import row

CLASSES = 5


def images(size: int) -> Any:
    return lambda b, n: (torch.randn(b, 3, size, size),)


def _timm(name: str, size: int = 32, **options: Any) -> Any:
    import timm

    return timm.create_model(name, num_classes=CLASSES, **options), images(size)


_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
for _name, _size, _options in (
    ("vit_tiny_patch16_224", 32, _VIT),
    ("deit_tiny_distilled_patch16_224", 32, _VIT),
    ("eva02_tiny_patch14_224", 32, _VIT),
    ("beit_base_patch16_224", 32, _VIT),
    ("vit_base_patch16_siglip_224", 32, _VIT),
    ("vit_medium_patch16_reg4_gap_256", 32, _VIT),
    ("flexivit_small", 32, _VIT),
    ("cait_xxs24_224", 32, _VIT),
    ("xcit_nano_12_p16_224", 32, {"img_size": 32, "depth": 2}),
    (
        "swin_tiny_patch4_window7_224",
        56,
        {"img_size": 56, "embed_dim": 16, "depths": (1, 1), "num_heads": (1, 2)},
    ),
    (
        "swinv2_tiny_window8_256",
        64,
        {"img_size": 64, "embed_dim": 16, "depths": (1, 1), "num_heads": (1, 2)},
    ),
    (
        "swinv2_cr_tiny_224",
        56,
        {"img_size": 56, "window_size": 7, "embed_dim": 16, "depths": (1, 1), "num_heads": (1, 2)},
    ),
    ("maxvit_rmlp_pico_rw_256", 64, {"img_size": 64}),
    ("coat_tiny", 64, {"img_size": 64}),
    ("crossvit_tiny_240", 240, {}),
    (
        "convit_tiny",
        32,
        {
            "img_size": 32,
            "patch_size": 8,
            "depth": 4,
            "local_up_to_layer": 2,
            "num_heads": 2,
            "embed_dim": 16,
        },
    ),
    (
        "davit_tiny",
        64,
        {"depths": (1, 1), "embed_dims": (16, 32), "num_heads": (1, 2)},
    ),
    ("efficientformer_l1", 224, {}),
    ("edgenext_xx_small", 64, {}),
    ("focalnet_tiny_srf", 64, {}),
    ("gcvit_xxtiny", 224, {}),
    ("levit_128s", 224, {}),
    ("mobilevit_xxs", 64, {}),
    ("mobilevitv2_050", 64, {}),
    ("mvitv2_tiny", 64, {"img_size": 64}),
    ("nest_tiny", 64, {"img_size": 64}),
    ("pit_ti_224", 224, {}),
    ("poolformer_s12", 64, {}),
    ("pvt_v2_b0", 64, {}),
    ("sequencer2d_s", 224, {}),
    ("tiny_vit_5m_224", 224, {}),
    ("tnt_s_legacy_patch16_224", 224, {}),
    ("twins_pcpvt_small", 224, {}),
    ("visformer_tiny", 224, {}),
    ("volo_d1_224", 224, {}),
    ("fastvit_t8", 64, {}),
    ("hiera_tiny_224", 224, {}),
    ("repvit_m0_9", 64, {}),
    ("halonet26t", 256, {}),
    ("lambda_resnet26t", 256, {}),
    ("botnet26t_256", 256, {}),
    ("vitamin_small_224", 224, {}),
    ("naflexvit_base_patch16_gap", 64, {"depth": 2, "embed_dim": 32, "num_heads": 2}),
):
    row(f"timm {_name}", others=())(lambda m=_name, s=_size, o=_options: _timm(m, s, **o))


def _vit(module: str, name: str, size: int = 32, **options: Any) -> Any:
    import importlib

    factory = getattr(importlib.import_module(f"vit_pytorch.{module}"), name)
    return factory(**options), images(size)


_OLD = {
    "image_size": 32,
    "patch_size": 8,
    "num_classes": CLASSES,
    "dim": 32,
    "depth": 2,
    "heads": 2,
    "mlp_dim": 64,
    "dim_head": 16,
}
_MULTI = {
    "image_size": 64,
    "patch_size": 8,
    "num_classes": CLASSES,
    "dim": 16,
    "depth": 2,
    "heads": 2,
}
for _module, _name, _size, _options in (
    ("vit", "ViT", 32, _OLD),
    ("simple_vit", "SimpleViT", 32, _OLD),
    ("simple_flash_attn_vit", "SimpleViT", 32, {**_OLD, "use_flash": True}),
    ("simple_vit_with_qk_norm", "SimpleViT", 32, _OLD),
    ("simple_vit_with_register_tokens", "SimpleViT", 32, _OLD),
    ("simple_vit_with_value_residual", "SimpleViT", 32, _OLD),
    (
        "vit_with_patch_merger",
        "ViT",
        32,
        {**_OLD, "patch_merge_layer": 1, "patch_merge_num_tokens": 4},
    ),
    ("deepvit", "DeepViT", 32, _OLD),
    ("cait", "CaiT", 32, {**_OLD, "cls_depth": 1}),
    ("parallel_vit", "ViT", 32, {**_OLD, "num_parallel_branches": 2}),
    ("vit_for_small_dataset", "ViT", 32, _OLD),
    ("learnable_memory_vit", "ViT", 32, _OLD),
    ("rvt", "RvT", 32, _OLD),
    (
        "t2t",
        "T2TViT",
        32,
        {
            "image_size": 32,
            "num_classes": CLASSES,
            "dim": 32,
            "depth": 2,
            "heads": 2,
            "mlp_dim": 64,
        },
    ),
    (
        "cct",
        "CCT",
        32,
        {
            "img_size": 32,
            "embedding_dim": 32,
            "num_layers": 2,
            "num_heads": 2,
            "mlp_ratio": 2,
            "num_classes": CLASSES,
        },
    ),
    (
        "cross_vit",
        "CrossViT",
        64,
        {
            "image_size": 64,
            "num_classes": CLASSES,
            "sm_dim": 16,
            "lg_dim": 32,
            "sm_patch_size": 8,
            "depth": 1,
        },
    ),
    (
        "crossformer",
        "CrossFormer",
        224,
        {"num_classes": CLASSES, "dim": (32, 64, 64, 64), "depth": (1, 1, 1, 1)},
    ),
    ("cvt", "CvT", 64, {"num_classes": CLASSES}),
    ("efficient", "ViT", 32, None),
    (
        "levit",
        "LeViT",
        64,
        {
            "image_size": 64,
            "num_classes": CLASSES,
            "dim": (32, 48, 64),
            "depth": 1,
            "heads": (2, 3, 4),
            "mlp_mult": 2,
            "stages": 3,
        },
    ),
    (
        "max_vit",
        "MaxViT",
        224,
        {
            "num_classes": CLASSES,
            "dim_conv_stem": 16,
            "dim": 16,
            "dim_head": 8,
            "depth": (1, 1),
            "window_size": 7,
        },
    ),
    (
        "mobile_vit",
        "MobileViT",
        64,
        {
            "image_size": (64, 64),
            "dims": [16, 24, 32],
            "channels": [8, 8, 16, 16, 24, 24, 32, 32, 48, 48, 64],
            "num_classes": CLASSES,
        },
    ),
    (
        "nest",
        "NesT",
        64,
        {
            "image_size": 64,
            "patch_size": 4,
            "dim": 16,
            "heads": 2,
            "num_hierarchies": 3,
            "block_repeats": (1, 1, 1),
            "num_classes": CLASSES,
        },
    ),
    (
        "pit",
        "PiT",
        64,
        {
            "image_size": 64,
            "patch_size": 8,
            "dim": 32,
            "num_classes": CLASSES,
            "depth": (1, 1),
            "heads": 2,
            "mlp_dim": 64,
        },
    ),
    (
        "regionvit",
        "RegionViT",
        224,
        {"dim": (32, 64, 64, 64), "depth": (1, 1, 1, 1), "num_classes": CLASSES},
    ),
    (
        "scalable_vit",
        "ScalableViT",
        256,
        {
            "num_classes": CLASSES,
            "dim": 16,
            "heads": (1, 2, 2, 4),
            "depth": (1, 1, 1, 1),
            "ssa_dim_key": (8, 8, 8, 8),
            "reduction_factor": (8, 4, 2, 1),
            "window_size": (64, 32, None, None),
        },
    ),
    (
        "sep_vit",
        "SepViT",
        224,
        {
            "num_classes": CLASSES,
            "dim": 16,
            "dim_head": 8,
            "heads": (1, 2, 2, 4),
            "depth": (1, 1, 1, 1),
            "window_size": 7,
        },
    ),
    (
        "twins_svt",
        "TwinsSVT",
        224,
        {
            "num_classes": CLASSES,
            "s1_emb_dim": 16,
            "s2_emb_dim": 16,
            "s3_emb_dim": 16,
            "s4_emb_dim": 16,
            "s3_depth": 1,
        },
    ),
    ("xcit", "XCiT", 32, {**_OLD, "cls_depth": 1}),
    ("ats_vit", "ViT", 32, {**_OLD, "max_tokens_per_depth": (16, 8)}),
    ("normalized_vit", "nViT", 32, _OLD),
    (
        "look_vit",
        "LookViT",
        64,
        {
            "dim": 32,
            "image_size": 64,
            "num_classes": CLASSES,
            "depth": 2,
            "patch_size": 8,
            "highres_patch_size": 4,
            "heads": 2,
            "dim_head": 16,
        },
    ),
    (
        "vit_1d",
        "ViT",
        0,
        {
            "seq_len": 64,
            "patch_size": 8,
            "num_classes": CLASSES,
            "dim": 32,
            "depth": 2,
            "heads": 2,
            "mlp_dim": 64,
            "dim_head": 16,
        },
    ),
    (
        "vivit",
        "ViViT",
        -1,
        {
            **_OLD,
            "image_patch_size": 8,
            "frames": 4,
            "frame_patch_size": 2,
            "spatial_depth": 1,
            "temporal_depth": 1,
        },
    ),
    (
        "simple_vit_3d",
        "SimpleViT",
        -1,
        {**_OLD, "image_patch_size": 8, "frames": 4, "frame_patch_size": 2},
    ),
):
    if _options is None:
        continue
    _given = {k: v for k, v in _options.items() if not (k in ("patch_size", "depth") and _size < 0)}
    if _module == "simple_vit_3d":
        _given["depth"] = 2

    def _make(m: str = _module, c: str = _name, s: int = _size, o: Any = _given) -> Any:
        model, inputs = _vit(m, c, s, **o)
        if s == 0:
            return model, lambda b, n: (torch.randn(b, 3, 64),)
        if s < 0:
            return model, lambda b, n: (torch.randn(b, 3, 4, 32, 32),)
        return model, inputs

    row(f"vit-pytorch {_module}", others=())(_make)


@row("vit-pytorch recorder", others=())
def _recorder() -> Any:
    from vit_pytorch.recorder import Recorder
    from vit_pytorch.vit import ViT

    return Recorder(ViT(**_OLD)), images(32)


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


@row("monai ViT", others=())
def _monai_vit() -> Any:
    from monai.networks.nets import ViT

    model = ViT(
        in_channels=1,
        img_size=(16, 16, 16),
        patch_size=(8, 8, 8),
        hidden_size=24,
        mlp_dim=48,
        num_layers=2,
        num_heads=2,
        classification=True,
        num_classes=CLASSES,
    )
    return model, lambda b, n: (torch.randn(b, 1, 16, 16, 16),)


@row("monai UNETR", others=())
def _unetr() -> Any:
    from monai.networks.nets import UNETR

    model = UNETR(
        in_channels=1,
        out_channels=2,
        img_size=(32, 32, 32),
        feature_size=8,
        hidden_size=24,
        mlp_dim=48,
        num_heads=2,
    )
    return model, lambda b, n: (torch.randn(b, 1, 32, 32, 32),)


@row("monai SwinUNETR", others=())
def _swin_unetr() -> Any:
    from monai.networks.nets import SwinUNETR

    model = SwinUNETR(
        in_channels=1, out_channels=2, feature_size=12, depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 4)
    )
    return model, lambda b, n: (torch.randn(b, 1, 64, 64, 64),)


@row("spandrel SwinIR", length=16, others=(24, 32))
def _swinir() -> Any:
    from spandrel.architectures.SwinIR.__arch.SwinIR import SwinIR

    model = SwinIR(
        img_size=16,
        embed_dim=16,
        depths=[2],
        num_heads=[2],
        window_size=8,
        mlp_ratio=2,
        upscale=2,
        upsampler="pixelshuffledirect",
    )
    return model, lambda b, n: (torch.rand(b, 3, n, n),)


@row("spandrel HAT", others=())
def _hat() -> Any:
    from spandrel.architectures.HAT.__arch.HAT import HAT

    model = HAT(
        img_size=16,
        embed_dim=16,
        depths=[2],
        num_heads=[2],
        window_size=8,
        mlp_ratio=2,
        upscale=2,
        upsampler="pixelshuffle",
        compress_ratio=3,
        squeeze_factor=4,
        overlap_ratio=0.5,
    )
    return model, lambda b, n: (torch.rand(b, 3, 16, 16),)


@row("spandrel Restormer", length=16, others=(24, 32))
def _restormer() -> Any:
    from spandrel.architectures.Restormer.__arch.restormer_arch import Restormer

    model = Restormer(dim=8, num_blocks=[1, 1, 1, 1], num_refinement_blocks=1, heads=[1, 2, 2, 4])
    return model, lambda b, n: (torch.rand(b, 3, n, n),)


@row("spandrel DAT", others=())
def _dat() -> Any:
    from spandrel.architectures.DAT.__arch.DAT import DAT

    model = DAT(
        img_size=16,
        embed_dim=16,
        depth=[2],
        num_heads=[2],
        split_size=[4, 8],
        expansion_factor=2,
        upscale=2,
        upsampler="pixelshuffledirect",
    )
    return model, lambda b, n: (torch.rand(b, 3, 16, 16),)
