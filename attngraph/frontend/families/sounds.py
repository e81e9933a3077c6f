"""Sounds among the text of a model of transformers: their features, and samples of them."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim

from attngraph.errors import UsageError
from attngraph.frontend.interface.encoders import WITHOUT_METHOD
from attngraph.frontend.interface.modalities import FRAMES_SHOWN, SOUND, SOUNDS

_LENGTHS = (1.0, 0.6, 0.35, 0.85)  # of sounds in checks, of the length that an encoder takes
_STRIDE = 2  # of frames to places in an encoder like Whisper's


def sound_rows(model: Any, sounds: dict[str, Tensor]) -> Tensor:
    """The rows (N, H) of all sounds, one behind the other."""
    method = WITHOUT_METHOD.get(type(model).__name__)
    if method is not None:
        rows = method(model, **sounds).pooler_output
    else:
        rows = getattr(model, SOUND.encode)(**sounds, return_dict=True).pooler_output
    found: Tensor = rows.reshape(-1, rows.shape[-1])
    return found


def sample_sounds(model: Any, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Two sounds of the length that the encoder takes, of which the second is padded where a mask
    says so, and their dynamic dims. Raises UsageError where the config doesn't say the length."""
    audio = getattr(model.config, "audio_config", None)
    bins = getattr(audio, "num_mel_bins", None)
    places = getattr(audio, "max_source_positions", None)
    places = places or getattr(audio, "max_position_embeddings", None)
    if not isinstance(bins, int) or not isinstance(places, int):
        raise UsageError(
            f"The config of {name} says no num_mel_bins and max_source_positions of its sounds: "
            f"give samples, such as images={{{SOUNDS!r}: tensor}} with image_shapes."
        )
    masks = [each for each in FRAMES_SHOWN if each in inspect.signature(model.forward).parameters]
    like = {SOUNDS: torch.zeros(1, bins, _STRIDE * places, dtype=model.dtype)}
    like |= {each: torch.ones(1, _STRIDE * places, dtype=torch.int64) for each in masks}
    axes = {0: Dim("sounds")}
    return drawn_sounds(like, 2, torch.Generator().manual_seed(0)), dict.fromkeys(like, axes)


def drawn_sounds(like: dict[str, Tensor], count: int, random: torch.Generator) -> dict[str, Tensor]:
    """So many sounds of the shape of others, of different lengths where a mask says them."""
    kept, (bins, frames) = like[SOUNDS], like[SOUNDS].shape[1:]
    found = {SOUNDS: torch.randn(count, bins, frames, generator=random).to(kept.dtype)}
    lengths = torch.tensor([int(frames * _LENGTHS[n % len(_LENGTHS)]) for n in range(count)])
    shown = torch.arange(frames)[None] < lengths.reshape(-1, 1)
    return found | {name: shown.to(like[name].dtype) for name in like if name != SOUNDS}
