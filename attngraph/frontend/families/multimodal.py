"""A model of `transformers` that reads images, or sounds, among its text, as modules with explicit
parts. Here "images" are either; `Modality` tells them apart.

Its class says itself where they meet: `get_image_features` gives one row for each token that stands
for a piece of an image, `config.image_token_id` is that token, and forward takes `inputs_embeds`.
The rows take the places of these tokens' embeddings, in their order. Of a class that reads both,
each is tried by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from attngraph.errors import UsageError, reason_of
from attngraph.frontend.families.image_grids import Places
from attngraph.frontend.families.image_parts import DEEP, FEATURES, Join, embedder_of
from attngraph.frontend.families.image_samples import sample_images
from attngraph.frontend.families.image_sizes import images_apart
from attngraph.frontend.families.image_trials import Tried
from attngraph.frontend.families.joining import Joining
from attngraph.frontend.families.sounds import sample_sounds
from attngraph.frontend.interface.modalities import (
    GRID,
    OF_QWEN2_VL,
    SOUND,
    TEXT_ALONE,
    Modality,
    joined_by,
    refuse_mixed,
)
from attngraph.frontend.model import Model


@dataclass(frozen=True)
class Side:
    """What is read beside text, of one kind: `vision` takes images as a dict and gives their rows
    (N, H), which `join` puts among embeddings (B, S, H) of ids. `joining` says which ids stand for
    images, and `drawn` makes so many, in such rows, and says how many tokens each takes. Where
    images lie on grids, `places` gives the positions (3, B, S) of ids.
    """

    vision: Model
    join: Model
    joining: Joining
    drawn: Callable[..., tuple[dict[str, Tensor], list[int]]]
    places: Model | None = None


@dataclass(frozen=True)
class Parts:
    """Such a model as the models that are compiled.

    `sides` are of what is read beside text. `embed` makes embeddings (B, S, H) of ids, and
    `decoder` takes these with a cache. `whole` takes images, ids and their mask, and returns the
    logits (B, S, V) without any cache. `notes` are sentences on what can't be read.
    """

    sides: tuple[Side, ...]
    embed: Model
    decoder: Model
    whole: nn.Module
    notes: tuple[str, ...] = ()

    @property
    def first(self) -> Side:
        """The side of images, where the model reads any."""
        return self.sides[0]


def of_images(
    module: nn.Module,
    images: Mapping[str, Tensor] | None,
    shapes: Mapping[str, Any] | None,
    name: str,
) -> Parts:
    """The parts of a model of transformers that reads images, or sounds, or both.

    `images` are samples by the names of its inputs, with torch.export's dynamic `shapes`; without
    them two are made of the size that its config says. Of a class that reads both, what can't be
    joined, or has no samples, is left out with a note. Raises UsageError where nothing is left:
    where that isn't known, and for a model whose rule is another than the one above.
    """
    known = [each for each in joined_by(type(module)) if not each.is_left_out(module.config)]
    if not known:
        refuse_mixed(type(module), name)
    found: list[tuple[Tried, dict[str, Any]]] = []
    failed: list[tuple[Modality, UsageError]] = []
    for modality in known:
        try:
            found.append(_tried(module, modality, images, shapes, name))
        except UsageError as error:
            failed.append((modality, error))
    if not found:
        raise failed[0][1]
    notes = tuple(
        f"{name} takes {modality.what} as well, which the files don't: {error}"
        for modality, error in failed
        if images is None or modality.main in images
    )
    (first, _), tokens = found[0], [tried.token for tried, _ in found]
    whole = first.whole
    cached = first.decoder()
    args, decoder_shapes = cached.sample()
    axes = {0: Dim("batch_size"), 1: Dim("seq")}
    return Parts(
        tuple(_side(tried, own, axes) for tried, own in found),
        Model.of_module(
            embedder_of(module, *tokens),
            (first.ids,),
            {"input_ids": axes},
            f"the embeddings of {name}",
        ),
        Model.of_module(cached, args, decoder_shapes, f"the decoder of {name}", names=cached.names),
        whole,
        notes,
    )


def _tried(
    module: nn.Module,
    modality: Modality,
    images: Mapping[str, Tensor] | None,
    shapes: Mapping[str, Any] | None,
    name: str,
) -> tuple[Tried, dict[str, Any]]:
    """Samples of one kind, run, and their dynamic dims. Raises UsageError."""
    what = modality.what
    if images is None:
        images, shapes = (sample_sounds if modality is SOUND else sample_images)(module, name)
    elif modality.main not in images:
        raise UsageError(f"There are no samples of {what}.")
    config: Any = module.config
    token = next(
        (t for t in (getattr(config, n, None) for n in modality.tokens) if t is not None), None
    )
    if not isinstance(token, int):
        raise UsageError(
            f"The config of {name} names no {modality.tokens[0]}, so {what} have no places."
        )
    own = {each: images[each] for each in images if each in modality.taken}
    try:
        tried = Tried(module.eval(), own, token, name)
        tried.require_rule()
    except Exception as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"{name} can't be compiled with its {what}: what its class names as its parts, run on "
            f"two of them in two rows of text, fails ({reason_of(error)}). {TEXT_ALONE}"
        ) from error
    return tried, {each: (shapes or {}).get(each) for each in own}


def _side(tried: Tried, shapes: Mapping[str, Any], axes: dict[int, Any]) -> Side:
    joining, samples, name = tried.joining, dict(tried.images), tried.name
    modality, images = joining.modality, tried.images
    config: Any = tried.module.config
    grids = OF_QWEN2_VL if config.model_type == "qwen2_vl" else GRID
    count = Dim(modality.rows.replace("features", "rows"))
    if joining.unit is not None:
        samples = images_apart(samples, joining.unit)[0]
    rows: dict[str, Any] = {FEATURES: {0: count}, DEEP: {1: count}}
    return Side(
        Model.of_module(
            tried.vision,
            (samples,),
            {"images": {each: shapes.get(each) for each in samples}},
            f"the {'audio' if modality is SOUND else 'vision'} encoder of {name}",
            names={
                FEATURES: modality.rows,
                **{f"images_{each}": grids if each == GRID else each for each in samples},
            },
        ),
        Model.of_module(
            Join(tried.token),
            (tried.ids, tried.embeds, *tried.rows.values()),
            {"input_ids": axes, "text_embeds": axes} | {each: rows[each] for each in tried.rows},
            f"the joining of {modality.what} of {name}",
            names={FEATURES: modality.rows},
        ),
        joining,
        tried.drawn,
        Model.of_module(
            Places(tried.token, joining.merged),
            (tried.ids, torch.ones_like(tried.ids), images[GRID]),
            {"input_ids": axes, "attention_mask": axes, GRID: {0: Dim("images")}},
            f"the positions of images of {name}",
        )
        if tried.whole.placed
        else None,
    )
