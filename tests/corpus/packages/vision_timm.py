"""timm's classifiers: vision transformers of every kind."""

from __future__ import annotations

from typing import Any

from tests.corpus.packages.kit import CLASSES, images, row


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
        {},
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
