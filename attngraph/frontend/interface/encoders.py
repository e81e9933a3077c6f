"""Encoders of models of transformers whose class has no method for their features.

Each gives what such a method does: the features as `pooler_output`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch


def _of_qwen2_audio(
    model: Any, input_features: Any, feature_attention_mask: Any, **_: Any
) -> SimpleNamespace:
    """As the forward of its model computes them, where a prompt has a token for each."""
    from transformers.masking_utils import create_bidirectional_mask

    tower = model.model.audio_tower
    held, given = tower._get_feat_extract_output_lengths(feature_attention_mask.sum(-1))
    frames = (input_features.shape[2] - 2) // 2 + 1
    shown = torch.arange(frames)[None] < held[:, None]
    empty = input_features.new_zeros(input_features.shape[0], frames, 1)
    mask = create_bidirectional_mask(
        config=tower.config, inputs_embeds=empty, attention_mask=shown.long()
    )
    encoded = tower(input_features, attention_mask=mask).last_hidden_state
    rows = model.model.multi_modal_projector(encoded)
    return SimpleNamespace(pooler_output=rows[torch.arange(rows.shape[1])[None] < given[:, None]])


WITHOUT_METHOD: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"Qwen2AudioForConditionalGeneration": _of_qwen2_audio}
)
"""How features are computed, by the name of the class."""
