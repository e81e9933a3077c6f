"""Sounds among the text of a model of transformers: their features, and samples of them."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim
from torch.nn.functional import pad

from attngraph.errors import UsageError
from attngraph.frontend.families.image_grids import attend_within, attending_by
from attngraph.frontend.interface.encoders import WITHOUT_METHOD
from attngraph.frontend.interface.modalities import FRAMES_SHOWN, SOUND, SOUNDS, encoding
from attngraph.inference import inference

_LENGTHS = (1.0, 0.6, 0.35, 0.85)  # of sounds in checks, of the length that an encoder takes
_FRAMES = 50  # of a sample, where an encoder takes any number
_BINS = (128, 80, 64, 160, 40)  # of spectrograms, where a config doesn't say
_STRIDE = 2  # of frames to places in an encoder like Whisper's


def sound_rows(model: Any, sounds: dict[str, Tensor]) -> Tensor:
    """The rows (N, H) of all sounds, one behind the other."""
    shown: Tensor | None = None
    method = WITHOUT_METHOD.get(type(model).__name__)
    encode: Any = encoding(model, SOUND)
    if method is not None:
        rows = method(model, **sounds).pooler_output
    elif (tower := _in_chunks(model)) is not None:
        given = {"cu_seqlens": _ends(tower, sounds[_mask(sounds)]), "max_seqlen": 1}
        with attending_by(model, _between_ends):
            rows = encode(**sounds, **given, return_dict=True).pooler_output
    else:
        encoded = encode(**sounds, return_dict=True)
        rows, shown = encoded.pooler_output, getattr(encoded, "attention_mask", None)
    if shown is None:
        shown = next((sounds[name] for name in FRAMES_SHOWN if name in sounds), None)
    if shown is not None and rows.ndim == 3 and shown.shape == rows.shape[:2]:
        rows = rows[shown.bool()]  # a mask of rows, which forward applies
    found: Tensor = rows if rows.ndim == 2 else rows.reshape(-1, rows.shape[-1])
    return found


def _in_chunks(model: Any) -> Any | None:
    """The encoder of a model, if it cuts spectrograms into chunks that it packs into one row."""
    for part in model.modules():
        if hasattr(part, "n_window_infer") and hasattr(part, "_post_cnn_length"):
            return part
    return None


def _mask(sounds: dict[str, Tensor]) -> str:
    return next(name for name in FRAMES_SHOWN if name in sounds)


def _ends(tower: Any, shown: Tensor) -> Tensor:
    """Where the windows end in the row that sounds are packed into, of which `shown` (N, frames)
    are frames: (N · chunks + 1,), each chunk's that of its window."""
    chunk, windows = 2 * tower.n_window, tower.n_window_infer // (2 * tower.n_window)
    counts = tower._post_cnn_length(shown.reshape(shown.shape[0], -1, chunk).sum(-1).long())
    each = torch.arange(counts.shape[1])
    last = ((each // windows + 1) * windows).clamp(max=counts.shape[1]) - 1
    ends = counts.flatten().cumsum(0).reshape(counts.shape)[:, last]
    return pad(ends.flatten(), (1, 0))


def _between_ends(
    module: Any, query: Tensor, *args: Any, cu_seq_lens_q: Tensor, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention (1, H, P, D) within the windows that end there."""
    every = torch.arange(query.shape[2])
    numbers = (every[:, None] >= cu_seq_lens_q[1:]).sum(-1)
    return attend_within(module, query, *args, numbers=numbers, **kwargs)


def sample_sounds(model: Any, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Two sounds of the length that the encoder takes, or of any number of its chunks or frames, of
    which the second is padded where a mask says so, and their dynamic dims.

    Raises UsageError where the config doesn't say how many bins they have.
    """
    config = model.config
    audio = getattr(config, "audio_config", None) or getattr(config, "encoder_config", None)
    bins = getattr(audio, "num_mel_bins", None)
    masks = [each for each in FRAMES_SHOWN if each in inspect.signature(model.forward).parameters]
    places = getattr(audio, "max_source_positions", None)
    places = places or getattr(audio, "max_position_embeddings", None)
    if isinstance(places, int) and isinstance(bins, int):
        like, shapes = _of_spectrograms(model, bins, places, masks)
        if _runs(model, like):
            return drawn_sounds(like, 2, torch.Generator().manual_seed(0)), shapes
    width = getattr(audio, "input_size", None) or bins
    if not isinstance(width, int):
        width = next((n for n in _BINS if _runs(model, _of_frames(model, n, places, masks)[0])), 0)
    if not width:
        raise UsageError(
            f"The config of {name} says no num_mel_bins of its sounds: give samples, such as "
            f"images={{{SOUNDS!r}: tensor}} with image_shapes."
        )
    like, shapes = _of_frames(model, width, places, masks)
    return drawn_sounds(like, 2, torch.Generator().manual_seed(0)), shapes


def _of_spectrograms(
    model: Any, bins: int, places: int, masks: list[str]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """One sound (1, bins, frames) of the length that the encoder takes, or of some chunks."""
    axes: dict[int, Any] = {0: Dim("sounds")}
    frames, along = _STRIDE * places, {}
    if (tower := _in_chunks(model)) is not None:
        chunk = 2 * tower.n_window
        frames, along = 3 * chunk, {-1: chunk * Dim("chunks")}
    like = {SOUNDS: torch.zeros(1, bins, frames, dtype=model.dtype)}
    like |= {each: torch.ones(1, frames, dtype=torch.int64) for each in masks}
    shapes = {
        name: axes | {each.ndim + at: dim for at, dim in along.items()}
        for name, each in like.items()
    }
    return like, shapes


def _of_frames(
    model: Any, width: int, places: int | None, masks: list[str]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """One sound (1, frames, width) of any length that there are `places` for; a mask is of frames
    where the encoder takes it, and else of the rows that it gives."""
    most = None if places is None else places - 1  # some count them from one
    frames = _FRAMES if most is None else min(_FRAMES, most)
    axes: dict[int, Any] = {0: Dim("sounds")}
    along = axes | {1: Dim("frames", max=most)}
    like = {SOUNDS: torch.zeros(1, frames, width, dtype=model.dtype)}
    taken = _taken(model)
    if not taken.issuperset(masks):
        with inference(model):
            rows = len(sound_rows(model, like))
        like |= {each: torch.ones(1, rows, dtype=torch.bool) for each in masks}
        return like, {SOUNDS: along} | {each: axes | {1: Dim.AUTO} for each in masks}
    like |= {each: torch.ones(1, frames, dtype=torch.int64) for each in masks}
    if _indexes_by_masks(model, like):
        like |= {each: like[each].bool() for each in masks}
    return like, dict.fromkeys(like, along)


def _indexes_by_masks(model: Any, like: dict[str, Tensor]) -> bool:
    """Whether an encoder gives back masks of numbers as such, by which forward takes rows: as
    indices, where it is given those."""
    encode: Any = encoding(model, SOUND)
    if encode is None:
        return False
    try:
        with inference(model):
            shown = getattr(encode(**like, return_dict=True), "attention_mask", None)
    except Exception:  # told where it is run for its rows
        return False
    return isinstance(shown, Tensor) and shown.dtype is torch.int64


def _taken(model: Any) -> set[str]:
    """The parameters of the methods that encode sounds, the model's and its base model's."""
    methods = (getattr(part, SOUND.encode, None) for part in (model, model.base_model))
    return {name for each in methods if each for name in inspect.signature(each).parameters}


def _runs(model: Any, sounds: dict[str, Tensor]) -> bool:
    """Whether the model encodes these."""
    try:
        with inference(model):
            sound_rows(model, sounds)
    except Exception:
        return False
    return True


def drawn_sounds(like: dict[str, Tensor], count: int, random: torch.Generator) -> dict[str, Tensor]:
    """`count` sounds of the shape of others, of different lengths where a mask says them."""
    sounds, masks = like[SOUNDS], {name: each for name, each in like.items() if name != SOUNDS}
    drawn = torch.randn(count, *sounds.shape[1:], generator=random).to(sounds.dtype)
    parts = torch.tensor([_LENGTHS[n % len(_LENGTHS)] for n in range(count)])
    shown = {
        name: torch.arange(each.shape[1])[None] < (parts * each.shape[1]).long()[:, None]
        for name, each in masks.items()
    }
    return {SOUNDS: drawn} | {name: each.to(masks[name].dtype) for name, each in shown.items()}
