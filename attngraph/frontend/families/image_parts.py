"""The parts of a model of transformers that reads images, as modules, and the whole of it."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attngraph.frontend.families.causal_lm import places
from attngraph.frontend.families.image_grids import ENDS, SEGMENTS, patches_placed, within_segments
from attngraph.frontend.families.image_sizes import Tiles, images_apart
from attngraph.frontend.families.layer_inputs import (
    LAYER_INPUTS,
    deep_rows,
    embedded,
    takes_layer_inputs,
)
from attngraph.frontend.families.sounds import sound_rows
from attngraph.frontend.families.together import Together
from attngraph.frontend.interface.modalities import (
    GRID,
    IMAGES,
    IN_ROWS,
    PATCH_PLACES,
    PIXELS,
    SHOWN,
    SIZES,
    SOUNDS,
    encoding,
)

KINDS = "token_type_ids"
Seen = Literal["images", "prompt"]
"""What its tokens see as a whole, by what `KINDS` says of each: 1 where one stands for a piece of
an image (Gemma 3), or 0 where it is of the prompt and 1 behind that (PaliGemma).
"""
_OF_PROCESSORS = "mm_token_type_ids"
"""The name of `KINDS` in newer classes, in which processors tell images, 1, from sounds."""
POSITIONS = "position_ids"
FEATURES, DEEP = "image_features", "deepstack_features"
_NO_LENGTH = {"image_max_window_seqlen": 1}
_PADDED = {SHOWN, PATCH_PLACES}
"""The inputs of models whose images have no features where they are padded."""


class Vision(nn.Module):
    """Images, or sounds, to the rows (N, H) that take the places of their tokens, and where first
    layers of the decoder add some too, those (L, N, H).

    Where images are encoded `apart`, it takes one at a time, of the size that its pixels have.
    """

    def __init__(self, model: nn.Module, *, apart: bool = False) -> None:
        super().__init__()
        self.model, self.apart = model, apart

    def forward(self, images: dict[str, Tensor]) -> dict[str, Tensor]:
        model: Any = self.model
        if SOUNDS in images:
            return {FEATURES: sound_rows(model, images)}
        given, grids = dict[str, Any](images), images.get(GRID)
        tiles = Tiles.of(model) if SIZES in images else None
        with contextlib.ExitStack() as held:
            if grids is not None:
                vision = model.config.vision_config
                count, side = images[PIXELS].shape[0], _table_side(model)
                merged, window = int(vision.spatial_merge_size), window_of(vision)
                given |= patches_placed(grids, count, merged, window, side)
                given |= {"image_max_seqlen": 1} | ({} if window is None else _NO_LENGTH)
                held.enter_context(within_segments(model, given[ENDS], given.pop(SEGMENTS)))
            if self.apart:
                given[SIZES] = [tuple(images[PIXELS].shape[2:])]
            if tiles is not None:
                held.enter_context(tiles.as_arithmetic(model, images))
                given |= {PIXELS: images[PIXELS].flatten(0, 1), SIZES: [tiles.resolutions[0]]}
                given.pop(IN_ROWS, None)
            listed = grids is not None or self.apart or not images.keys().isdisjoint(_PADDED)
            held.enter_context(Together(grids=listed, tiles=tiles is not None))
            encode: Any = encoding(model, IMAGES)
            encoded = encode(**given, return_dict=True)
            rows, deep = _projected(model, encoded), deep_rows(encoded)
        rows = rows if isinstance(rows, Tensor) else torch.cat(list(rows))
        found = {FEATURES: rows.reshape(-1, rows.shape[-1])}
        return found if deep is None else {**found, DEEP: deep}

    def encoded(self, images: dict[str, Tensor], unit: int) -> dict[str, Tensor]:
        """The features of all images, those `apart` one behind the other."""
        if not self.apart:
            found: dict[str, Tensor] = self(images)
            return found
        every = [self(each) for each in images_apart(images, unit)]
        return {name: torch.cat([each[name] for each in every], -2) for name in every[0]}


def _projected(model: Any, encoded: Any) -> Any:
    """The rows that an encoder returned, or where it leaves the projection to forward, those."""
    if encoded.pooler_output is not None:
        return encoded.pooler_output
    return model.multi_modal_projector(encoded.last_hidden_state.flatten(0, -2))


class Embed(nn.Module):
    """Ids (B, S) to embeddings (B, S, H); the tokens of images and sounds have some of their own
    only if they are in the table."""

    def __init__(self, model: nn.Module, *tokens: int) -> None:
        super().__init__()
        self.table: nn.Module = table_of(model)
        self.tokens = tokens

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        for token in self.tokens:
            if token >= rows_of(self.table):
                input_ids = input_ids.masked_fill(input_ids == token, 0)
        return {"inputs_embeds": self.table(input_ids)}


class HandedEmbed(nn.Module):
    """As `Embed`: what the class hands its decoder for ids, where layers of that may have inputs of
    their own for each token (B, S, L, D) beside the embeddings. What stands for a video is a token
    like others there."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        given = embedded(self.model, input_ids)
        names = ("inputs_embeds", LAYER_INPUTS)
        return {name: given[name] for name in names if given.get(name) is not None}


def embedder_of(model: nn.Module, *tokens: int) -> nn.Module:
    """What makes embeddings of ids, among which are `tokens`."""
    return HandedEmbed(model) if takes_layer_inputs(model) else Embed(model, *tokens)


class Join(nn.Module):
    """Puts rows (N, H) where ids (B, S) are the image's token, in the order of batch and sequence,
    and those of layers (L, N, H) into zeros (L, B, S, H).

    There must be as many as such tokens, which a graph can't check: a caller has to.
    """

    def __init__(self, token: int) -> None:
        super().__init__()
        self.token = token

    def forward(
        self,
        input_ids: Tensor,
        text_embeds: Tensor,
        image_features: Tensor,
        deepstack_features: Tensor | None = None,
    ) -> dict[str, Tensor]:
        is_image = input_ids == self.token
        order = is_image.flatten().long().cumsum(0) - 1
        order = order.clamp(0, image_features.shape[0] - 1).reshape(input_ids.shape)
        joined = torch.where(is_image[..., None], image_features[order], text_embeds)
        found = {"inputs_embeds": joined}
        if deepstack_features is None:
            return found
        added = torch.where(is_image[..., None], deepstack_features[:, order], 0)
        return {**found, "deepstack_embeds": added}


class Whole(nn.Module):
    """The model on images and all tokens so far, placed as its generate places them: from `begin`
    on, or on grids where it is `placed`. The first `prompt` of them are the prompt, all where it
    isn't said."""

    def __init__(
        self,
        model: nn.Module,
        token: int,
        *,
        sees: Seen | None = None,
        begin: int = 0,
        placed: bool = False,
    ) -> None:
        super().__init__()
        self.model, self.token, self.sees, self.begin = model, token, sees, begin
        self.placed = placed
        self.told = kinds_parameter(model)

    def forward(
        self, images: dict[str, Tensor], ids: Tensor, mask: Tensor, prompt: int | None = None
    ) -> Tensor:
        given = dict(images)
        if self.sees is not None and self.told is not None:
            given[self.told] = kinds_of(self.sees, ids == self.token, prompt)
        if self.placed and GRID in images:  # the model places them itself
            given["mm_token_type_ids"] = ((ids == self.token) & (mask != 0)).int()
        else:
            given[POSITIONS] = places(mask) + self.begin
        logits: Tensor = self.model(
            input_ids=ids, attention_mask=mask, use_cache=False, **given
        ).logits
        return logits


def kinds_parameter(model: Any) -> str | None:
    """The name of `KINDS` in a model's forward, if it takes them."""
    taken = inspect.signature(model.forward).parameters
    return next((name for name in (KINDS, _OF_PROCESSORS) if name in taken), None)


def kinds_of(sees: Seen, is_image: Tensor, prompt: int | None = None) -> Tensor:
    """The `KINDS` of tokens (B, S), of which the first `prompt` are the prompt, or all."""
    if sees == "images":
        return is_image.long()
    behind = torch.zeros(is_image.shape, dtype=torch.int64, device=is_image.device)
    if prompt is not None:
        behind[:, prompt:] = 1
    return behind


def window_of(vision: Any) -> int | None:
    """How many tokens by as many attend to each other, where not all of an image do."""
    size = getattr(vision, "window_size", None)
    return None if size is None else size // vision.spatial_merge_size // vision.patch_size


def _table_side(model: nn.Module) -> int | None:
    """How many places by as many a table of positions has that is resampled to each image, corners
    to corners and between four of them."""
    for part in model.modules():
        side, mode = (getattr(part, n, None) for n in ("num_grid_per_side", "interpolation_mode"))
        corners = getattr(part, "interpolation_align_corners", False)
        if isinstance(side, int) and mode == "bilinear" and corners:
            return side
    return None


def table_of(model: Any) -> Any:
    """The table of embeddings of a model."""
    return model.get_input_embeddings()


def rows_of(table: Any) -> int:
    """How many tokens a table has."""
    return int(table.weight.shape[0])
