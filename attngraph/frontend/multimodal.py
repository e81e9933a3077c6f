"""A model of `transformers` that reads images among its text, as modules with explicit parts.

Its class says itself where they meet: `get_image_features` gives one row for each token that stands
for a piece of an image, `config.image_token_id` is that token, and forward takes `inputs_embeds`.
The rows take the places of these tokens' embeddings, in their order.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from attngraph.errors import UsageError, reason_of
from attngraph.frontend.cache import Layout
from attngraph.frontend.causal_lm import Cached, Layers, places
from attngraph.frontend.image_grids import Places, patches_placed, within_segments
from attngraph.frontend.image_samples import SHAPES, parts_shown, sample_images
from attngraph.frontend.modalities import (
    GRID,
    OF_QWEN2_VL,
    PIXELS,
    SHOWN,
    is_multimodal,
    places_otherwise,
    refuse_mixed,
)
from attngraph.frontend.model import Model
from attngraph.frontend.together import Together
from attngraph.inference import inference
from attngraph.ir import Graph

KINDS = "token_type_ids"
"""1 where a token stands for a piece of an image, which all of its image see."""
POSITIONS = "position_ids"
_NO_LENGTH = {"image_max_window_seqlen": 1}
_ROUNDINGS, _MOST = 1e3, 2.0**-5
"""How far the parts may be from the whole, of its largest logit: roundings, few of halves."""
_TEXT = 4  # tokens before an image, and behind it, in what parts are traced and tried with


@dataclass(frozen=True)
class Parts:
    """Such a model as the models that are compiled.

    `vision` takes images as a dict and gives their rows (N, H), `embed` and `join` make embeddings
    (B, S, H) of ids and rows, and `decoder` takes these with a cache. Where images lie on grids,
    `places` gives the positions (3, B, S) of ids. `whole` takes images, ids and their mask, and
    returns the logits (B, S, V) without any cache. `token` stands for a piece of an image, of
    `merged` patches by as many; `drawn` makes so many images, and says how many tokens each takes.
    """

    vision: Model
    embed: Model
    join: Model
    decoder: Model
    whole: nn.Module
    token: int
    drawn: Callable[[int, torch.Generator], tuple[dict[str, Tensor], list[int]]]
    places: Model | None = None
    merged: int = 1


class Vision(nn.Module):
    """Images to the rows (N, H) that take the places of their tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: dict[str, Tensor]) -> dict[str, Tensor]:
        model: Any = self.model
        given, grids = dict[str, Any](images), images.get(GRID)
        with contextlib.ExitStack() as held:
            if grids is not None:
                vision = model.config.vision_config
                merged, window = int(vision.spatial_merge_size), _window(vision)
                given |= patches_placed(grids, images[PIXELS].shape[0], merged, window)
                given |= {"image_max_seqlen": 1} | ({} if window is None else _NO_LENGTH)
                held.enter_context(within_segments(model))
            held.enter_context(Together(grids=grids is not None or SHOWN in images))
            rows = model.get_image_features(**given, return_dict=True).pooler_output
        rows = rows if isinstance(rows, Tensor) else torch.cat(list(rows))
        return {"image_features": rows.reshape(-1, rows.shape[-1])}


class Embed(nn.Module):
    """Ids (B, S) to embeddings (B, S, H); an image's token has one of its own only if it is in the
    table."""

    def __init__(self, model: nn.Module, token: int) -> None:
        super().__init__()
        self.table: nn.Module = _table(model)
        self.token = token

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        if self.token >= _rows(self.table):
            input_ids = input_ids.masked_fill(input_ids == self.token, 0)
        return {"inputs_embeds": self.table(input_ids)}


class Join(nn.Module):
    """Puts rows (N, H) where ids (B, S) are the image's token, in the order of batch and sequence.

    There must be as many as such tokens, which a graph can't check: a caller has to.
    """

    def __init__(self, token: int) -> None:
        super().__init__()
        self.token = token

    def forward(
        self, input_ids: Tensor, text_embeds: Tensor, image_features: Tensor
    ) -> dict[str, Tensor]:
        is_image = input_ids == self.token
        order = is_image.flatten().long().cumsum(0) - 1
        order = order.clamp(0, image_features.shape[0] - 1).reshape(input_ids.shape)
        joined = torch.where(is_image[..., None], image_features[order], text_embeds)
        return {"inputs_embeds": joined}


class CachedEmbeds(Cached):
    """As `CausalLM`, for embeddings (B, S, H) in place of ids.

    With `sees_images` it takes `token_type_ids` (B, S) too, 1 at an image's tokens, which see each
    other; all tokens of an image come in one call. Where it is `placed` it takes the positions
    (3, B, S) that these have on grids.
    """

    def __init__(
        self, model: nn.Module, embeds: Tensor, *, sees_images: bool, placed: bool
    ) -> None:
        super().__init__(model)
        self.embeds, self.sees_images, self.placed = embeds, sees_images, placed

    def forward(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor | None,
        token_type_ids: Tensor | None,
        past: Layers,
    ) -> dict[str, Any]:
        (batch, length), before = inputs_embeds.shape[:2], past[0]["key"].shape[2]
        fits: Any = torch._check
        fits(attention_mask.shape[1] == before + length)
        tokens = {"inputs_embeds": inputs_embeds}
        if token_type_ids is not None:
            held = token_type_ids.new_zeros(batch, before)
            tokens[KINDS] = torch.cat([held, token_type_ids], 1)
        if position_ids is None:
            position_ids = places(attention_mask)[:, -length:]
        return self._run(tokens, attention_mask, position_ids, past)

    def sample(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Inputs to trace with, and the dynamic shapes for torch.export."""
        batch, seq = self.embeds.shape[:2]
        inputs, shapes = self._drawn(batch, seq, 5)
        axes = shapes.pop("input_ids")
        kinds = torch.arange(seq).expand(batch, -1) % 2 if self.sees_images else None
        placed = torch.arange(5, 5 + seq).expand(3, batch, -1) if self.placed else None
        shapes = {
            "inputs_embeds": axes,
            POSITIONS: {1: axes[0], 2: axes[1]} if self.placed else None,
            KINDS: axes if self.sees_images else None,
            **shapes,
        }
        names = ("inputs_embeds", "attention_mask", POSITIONS, KINDS, "past")
        args = (self.embeds, inputs["attention_mask"], placed, kinds, inputs["past"])
        return args, {name: shapes[name] for name in names}

    def layout(self, graph: Graph) -> Layout:
        """The parts of the decoder that the graph of this module is."""
        values = {value.name: value for value in graph.inputs}
        pasts = [name for name in self.names.values() if name in values]
        embeds = values["inputs_embeds"]
        return Layout(
            "inputs_embeds",
            "logits",
            tuple(pasts),
            tuple(name.replace("past_key_values", "present") for name in pasts),
            str(embeds.shape[0]),
            str(values[pasts[0]].shape[2]),
            "attention_mask",
            vocabulary=_rows(_table(self.model)),
            embeds=True,
            positions=POSITIONS if self.placed else None,
            kinds=KINDS if KINDS in values else None,
        )


class Whole(nn.Module):
    """The model on images and all tokens so far, placed as its generate places them."""

    def __init__(self, model: nn.Module, token: int, *, sees_images: bool) -> None:
        super().__init__()
        self.model, self.token, self.sees_images = model, token, sees_images

    def forward(self, images: dict[str, Tensor], ids: Tensor, mask: Tensor) -> Tensor:
        given = dict(images)
        if self.sees_images:
            given[KINDS] = (ids == self.token).long()
        if GRID in images:  # the model places them itself
            given["mm_token_type_ids"] = ((ids == self.token) & (mask != 0)).int()
        else:
            given[POSITIONS] = places(mask)
        logits: Tensor = self.model(
            input_ids=ids, attention_mask=mask, use_cache=False, **given
        ).logits
        return logits


def of_images(
    module: nn.Module,
    images: Mapping[str, Tensor] | None,
    shapes: Mapping[str, Any] | None,
    name: str,
) -> Parts:
    """The parts of a model of transformers that reads images.

    `images` are samples by the names of its inputs, with torch.export's dynamic `shapes`; without
    them two images are made of the size that its config says. Raises UsageError where that isn't
    known, and for a model whose rule is another than the one above.
    """
    if not is_multimodal(module):
        refuse_mixed(type(module), name)
    if images is None:
        images, shapes = sample_images(module, name)
    config: Any = module.config
    token = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
    if not isinstance(token, int):
        raise UsageError(f"The config of {name} names no image_token_id, so images have no places.")
    try:
        tried = _Tried(module.eval(), dict(images), token, name)
        sees_images = tried.sees_images()
        whole = Whole(module, token, sees_images=sees_images)
        rows, ids, embeds, mask = tried.rows, tried.ids, tried.embeds, torch.ones_like(tried.ids)
        tried.require_rule(whole, mask)
    except Exception as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"{name} can't be compiled with its images: it doesn't take two of them in two rows of "
            f"text, as its class says that it does ({reason_of(error)})."
        ) from error
    text = tried.embeds[:, :3]
    placed = GRID in images
    grids = OF_QWEN2_VL if config.model_type == "qwen2_vl" else GRID
    cached = CachedEmbeds(module, text, sees_images=sees_images, placed=placed)
    args, decoder_shapes = cached.sample()
    batch, seq, count = Dim("batch_size"), Dim("seq"), Dim("image_rows")
    axes = {0: batch, 1: seq}
    return Parts(
        Model(
            Vision(module),
            None,
            (dict(images),),
            {},
            {"images": {each: (shapes or {}).get(each) for each in images}},
            f"the vision encoder of {name}",
            names={f"images_{each}": grids if each == GRID else each for each in images},
        ),
        Model(
            Embed(module, token), None, (ids,), {}, {"input_ids": axes}, f"the embeddings of {name}"
        ),
        Model(
            Join(token),
            None,
            (ids, embeds, rows),
            {},
            {"input_ids": axes, "text_embeds": axes, "image_features": {0: count}},
            f"the joining of images of {name}",
        ),
        Model(
            cached,
            None,
            args,
            {},
            decoder_shapes,
            f"the decoder of {name}",
            names=cached.names,
        ),
        whole,
        token,
        tried.drawn,
        Model(
            Places(token, tried.merged),
            None,
            (ids, mask, images[GRID]),
            {},
            {"input_ids": axes, "attention_mask": axes, GRID: {0: Dim("images")}},
            f"the positions of images of {name}",
        )
        if placed
        else None,
        tried.merged,
    )


class _Tried:
    """The parts run eagerly on samples: two rows with an image each, if there are two."""

    def __init__(self, module: nn.Module, images: dict[str, Tensor], token: int, name: str) -> None:
        self.module, self.images, self.token, self.name = module, images, token, name
        self.table, random = _table(module), torch.Generator().manual_seed(0)
        with inference(module):
            self.rows = Vision(module)(images)["image_features"]
            plain = torch.randint(_rows(self.table), (2, 2 * _TEXT), generator=random)
            plain = plain.where(plain != token, (token + 1) % _rows(self.table))
            half = len(counts := self.counts(images)) // 2
            both = (sum(counts[half:]), sum(counts[:half]))[::-1]
            self.ids = torch.cat([plain, plain[:, :1].expand(-1, max(both))], 1)
            for row, count in enumerate(both):
                self.ids[row, _TEXT + row : _TEXT + row + count] = token
            self.embeds = Embed(module, token)(self.ids)["inputs_embeds"]

    @property
    def merged(self) -> int:
        """How many patches by as many become one token, where images lie on grids."""
        config: Any = self.module.config
        return int(config.vision_config.spatial_merge_size) if GRID in self.images else 1

    def counts(self, images: Mapping[str, Tensor]) -> list[int]:
        """How many tokens each image takes."""
        if GRID in images:
            found: list[int] = (images[GRID].prod(-1) // self.merged**2).tolist()
            return found
        own, given = (self.pixels(each).shape[0] for each in (self.images, images))
        return [len(self.rows) // own] * given

    def pixels(self, images: Mapping[str, Tensor]) -> Tensor:
        """Those of all images (N, …), whatever rows they come in."""
        return images[PIXELS].flatten(0, 1) if SHOWN in images else images[PIXELS]

    def drawn(self, count: int, random: torch.Generator) -> tuple[dict[str, Tensor], list[int]]:
        """So many other images, and how many tokens each takes."""
        found = {}
        pixels = self.pixels(self.images)
        if GRID in self.images:
            sizes = [(1, *SHAPES[each % len(SHAPES)]) for each in range(count)]
            found[GRID] = torch.tensor(sizes).reshape(-1, 3) * torch.tensor(
                [1, self.merged, self.merged]
            )
            count = int(found[GRID].prod(-1).sum())
        shape = (count, *pixels.shape[1:])
        found[PIXELS] = torch.randn(shape, generator=random).to(pixels.dtype)
        if SHOWN in self.images:
            found[SHOWN] = parts_shown(found[PIXELS])[None]
            found[PIXELS] = found[PIXELS][None]
        found = {name: found[name] for name in self.images}
        return found, self.counts(found)

    def sees_images(self) -> bool:
        """Whether what is said of the tokens' kinds changes what the model computes."""
        if KINDS not in inspect.signature(self.module.forward).parameters:
            return False
        model: Any = self.module
        kinds = (self.ids == self.token).long()
        with inference(model):
            with_kinds, without = (
                model(inputs_embeds=self.embeds, use_cache=False, **each).logits
                for each in ({KINDS: kinds}, {})
            )
        return not torch.equal(with_kinds, without)

    def require_rule(self, whole: Whole, mask: Tensor) -> None:
        """Raises UsageError where the model doesn't join images as `Join` does, or its generate
        places tokens otherwise than by their number."""
        model: Any = self.module
        joined = Join(self.token)
        with inference(model):
            expected = whole(self.images, self.ids, mask)
            embeds = joined(self.ids, self.embeds, self.rows)["inputs_embeds"]
            own = places(mask)
            if GRID in self.images:
                own = Places(self.token, self.merged)(self.ids, mask, self.images[GRID])[POSITIONS]
            kinds = {KINDS: (self.ids == self.token).long()} if whole.sees_images else {}
            found = model(
                inputs_embeds=embeds,
                attention_mask=mask,
                position_ids=own,
                use_cache=False,
                **kinds,
            ).logits
            otherwise = places_otherwise(model, self.ids)
        error = (found - expected).abs().max()
        limit = min(_ROUNDINGS * torch.finfo(found.dtype).eps, _MOST)
        if otherwise or not error <= limit * expected.abs().max():
            refuse_mixed(type(model), self.name)


def _window(vision: Any) -> int | None:
    """How many tokens by as many attend to each other, where not all of an image do."""
    size = getattr(vision, "window_size", None)
    return None if size is None else size // vision.spatial_merge_size // vision.patch_size


def _table(model: Any) -> Any:
    return model.get_input_embeddings()


def _rows(table: Any) -> int:
    return int(table.weight.shape[0])
