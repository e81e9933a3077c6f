"""vit-pytorch: the papers' variants of a vision transformer."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from tests.corpus.packages.kit import CLASSES, images, row


def _vit(module: str, name: str, size: int = 32, **options: Any) -> Any:
    factory = getattr(importlib.import_module(f"vit_pytorch.{module}"), name)
    return factory(**options), images(size)


def _without(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in names}


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
            "lg_patch_size": 16,
            "depth": 1,
        },
    ),
    (
        "crossformer",
        "CrossFormer",
        224,
        {"num_classes": CLASSES, "dim": (64, 128, 128, 128), "depth": (1, 1, 1, 1)},
    ),
    ("cvt", "CvT", 64, {"num_classes": CLASSES}),
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
            "patch_size": 16,
            "highres_patch_size": 8,
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
            **_without(_OLD, "patch_size", "depth"),
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
        {
            **_without(_OLD, "patch_size"),
            "image_patch_size": 8,
            "frames": 4,
            "frame_patch_size": 2,
        },
    ),
):

    def _make(m: str = _module, c: str = _name, s: int = _size, o: Any = _options) -> Any:
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
