"""Volumes, restored images: what returns a picture."""

from __future__ import annotations

from typing import Any

import torch

from tests.corpus.packages.kit import CLASSES, row


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


@row("spandrel RetinexFormer", length=16, others=(24, 32))
def _retinexformer() -> Any:
    from spandrel.architectures.RetinexFormer.__arch.retinexformer_arch import RetinexFormer

    return RetinexFormer(n_feat=8, stage=1), lambda b, n: (torch.rand(b, 3, n, n),)


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
