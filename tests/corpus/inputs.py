"""Sample inputs for a model of the corpus, by the names of its forward's parameters."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tests.corpus.patches import EQUAL, GRIDS, grid_name, patches, placed_patches
from tests.models import present, states, tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tests.corpus.rows import Row

BATCH, LENGTH = 3, 16
FRAMES, SAMPLES = 128, 4000  # of audio: a spectrogram's, a waveform's
CLIP = 4  # frames of a video

_WRITTEN = re.compile(r"(int|float|ones)\[([\d,]+)\](?:<(\d+))?")


class UnknownInputError(NotImplementedError):
    """No sample input is known for what the model asks for."""


def sample_inputs(model: PreTrainedModel, row: Row) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Those that the model can't do without, the masks beside them, and those of the row.

    The second ones are fixed: the row says that they never change.
    """
    length = row.length or LENGTH
    names = inspect.signature(model.forward).parameters
    fixed = {name: torch.tensor(value) for name, value in row.fixed.items()}
    written = fixed | {name: _written(name, value) for name, value in row.inputs.items()}
    needed = [name for name in names if _is_required(names[name])]
    grid = grid_name(names)
    if grid is not None and grid not in fixed and (grid in needed or _takes_image(model, written)):
        grids = GRIDS if grid in needed else EQUAL
        fixed[grid] = torch.tensor(grids)
        main = "hidden_states" if "hidden_states" in needed else "pixel_values"
        written = {main: patches(model.config, grids), grid: fixed[grid]} | written
    feed = _main(model, length, names, written, needed)
    needed = [name for name in needed if name not in feed]
    feed |= {name: _named(name, model, length) for name in needed if name not in written}
    feed |= {name: value for name, value in written.items() if value is not None}
    feed = {name: value for name, value in feed.items() if written.get(name, value) is not None}
    feed = _with_placeholders(model, feed, length)
    return {name: feed[name] for name in feed if name not in fixed}, fixed


def _is_required(parameter: inspect.Parameter) -> bool:
    named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    return named and parameter.default is parameter.empty


def _main(
    model: PreTrainedModel,
    length: int,
    names: Mapping[str, Any],
    written: Mapping[str, Any],
    needed: Sequence[str],
) -> dict[str, Tensor]:
    mains = model.main_input_name
    feed: dict[str, Tensor] = {}
    for main in [mains] if isinstance(mains, str) else mains:
        if main not in names and "flattened_patches" in names:
            main = "flattened_patches"
        if main in written or (needed and main not in names):
            continue
        feed[main] = _named(main, model, length)
        if main == "input_ids" and "attention_mask" in names:
            feed["attention_mask"] = present(BATCH, length).long()
        if main == "input_ids" and "pixel_values" in names and _takes_image(model, written):
            feed["pixel_values"] = _named("pixel_values", model, length)
        if main == "pixel_values" and "noise" in names:  # else the model draws its own, and no
            config: Any = model.config  # two runs agree
            side = feed[main].shape[-1] // config.patch_size
            feed["noise"] = states(BATCH, side**2)
    if "decoder_input_ids" in names and "decoder_input_ids" not in written:
        feed["decoder_input_ids"] = tokens(BATCH, length // 2, seed=1)
    return feed


def _takes_image(model: PreTrainedModel, written: Mapping[str, Any]) -> bool:
    """Whether the model has a vision part that says the size of its images; the row gives none."""
    vision = getattr(model.config, "vision_config", None)
    given = "pixel_values" in written
    return not given and isinstance(getattr(vision, "image_size", None), int)


def _named(name: str, model: PreTrainedModel, length: int) -> Tensor:
    config: Any = model.config
    match name:
        case "input_ids":
            return tokens(BATCH, length)
        case "attention_mask":
            return present(BATCH, length).long()
        case "pixel_values":
            return states(BATCH, *_image(config))
        case "pixel_values_videos":
            return states(BATCH, CLIP, *_image(config))
        case "input_features":
            bins = getattr(config, "num_mel_bins", None) or 80
            return states(BATCH, bins, FRAMES)
        case "input_features_mask":
            return torch.ones(BATCH, FRAMES, dtype=torch.long)
        case "flattened_patches":
            return placed_patches(config, BATCH)
        case "input_values":
            return states(BATCH, SAMPLES)
        case "hidden_states" | "inputs_embeds":
            return states(BATCH, length, config.hidden_size)
        case other:
            raise UnknownInputError(f"no sample input is known for {other}")


def _image(config: Any) -> tuple[int, int, int]:
    """(C, H, W) of the images that the model, or its vision part, says it takes."""
    for part in (config, getattr(config, "vision_config", None)):
        if side := getattr(part, "image_size", None):
            height, width = (side, side) if isinstance(side, int) else side
            return getattr(part, "num_channels", 3), height, width
    return getattr(config, "num_channels", 3), 32, 32


def _written(name: str, value: Any) -> Tensor | None:
    """The input that a row describes: see tests/corpus/rows.py."""
    if value is None or isinstance(value, list):
        return None if value is None else torch.tensor(value)
    if (found := _WRITTEN.fullmatch(str(value))) is None:
        raise ValueError(f"inputs.{name}={value} is no list, int[…]<n, float[…], ones[…] or None")
    kind, sizes, below = found.groups()
    shape = [int(size) for size in sizes.split(",")]
    if kind == "float":
        return states(*shape)
    if kind == "ones":
        return torch.ones(shape, dtype=torch.long)
    return torch.randint(int(below or 120), shape, generator=torch.Generator().manual_seed(0))


def _with_placeholders(
    model: PreTrainedModel, feed: dict[str, Tensor], length: int
) -> dict[str, Tensor]:
    """Adds to the tokens one placeholder for each row of features that an image is made into."""
    config: Any = model.config
    token = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
    image = {name: feed[name] for name in feed if "pixel" in name or "image" in name}
    if token is None or not image or "input_ids" not in feed:
        return feed
    owner: Any = next((m for m in model.modules() if hasattr(m, "get_image_features")), None)
    if owner is None:
        return feed
    with torch.no_grad():
        found = owner.get_image_features(**image, return_dict=True)
    rows = getattr(found, "pooler_output", found)
    rows = torch.cat([*rows]) if isinstance(rows, list | tuple) else rows.flatten(0, -2)
    batch, count = feed["input_ids"].shape[0], len(rows) // feed["input_ids"].shape[0]
    places = torch.full((batch, count), token)
    ids = feed["input_ids"]
    feed["input_ids"] = torch.cat([ids[:, :3], places, ids[:, 3:]], 1)
    if "attention_mask" in feed:
        feed["attention_mask"] = present(batch, length + count).long()
    if grid_name(image) and "position_ids" not in feed:  # else it counts them by the ids' values
        seed = torch.Generator().manual_seed(0)
        shape = (3, batch, length + count)
        feed["position_ids"] = torch.randint(length + count, shape, generator=seed)
    return feed
