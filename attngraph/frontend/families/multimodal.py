"""A model of `transformers` that reads images, or sounds, among its text, as modules with explicit
parts. Here "images" are either; `Modality` tells them apart.

Its class says itself where they meet: `get_image_features` gives one row for each token that stands
for a piece of an image, `config.image_token_id` is that token, and forward takes `inputs_embeds`.
The rows take the places of these tokens' embeddings, in their order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from attngraph.errors import UsageError, reason_of
from attngraph.frontend.families.causal_lm import places
from attngraph.frontend.families.deep_features import added_in_layers
from attngraph.frontend.families.embedded_lm import ADDED, CachedEmbeds
from attngraph.frontend.families.image_grids import Places
from attngraph.frontend.families.image_parts import (
    DEEP,
    FEATURES,
    KINDS,
    POSITIONS,
    Embed,
    Join,
    Seen,
    Vision,
    Whole,
    kinds_of,
    rows_of,
    table_of,
)
from attngraph.frontend.families.image_samples import (
    APART,
    SHAPES,
    parts_shown,
    sample_images,
    sides,
)
from attngraph.frontend.families.image_sizes import Tiles, images_apart, sizes_taken
from attngraph.frontend.families.joining import Joining
from attngraph.frontend.families.kept import kept_states
from attngraph.frontend.families.sounds import drawn_sounds, sample_sounds
from attngraph.frontend.families.stateful_embeds import StatefulEmbeds
from attngraph.frontend.interface.modalities import (
    GRID,
    IN_ROWS,
    OF_QWEN2_VL,
    PIXELS,
    PLACED_OTHERWISE,
    SHOWN,
    SIZES,
    SOUND,
    SOUNDS,
    TEXT_ALONE,
    first_place,
    joined_by,
    refuse_mixed,
)
from attngraph.frontend.model import Model
from attngraph.inference import inference

_ROUNDINGS, _MOST = 1e3, 2.0**-5
"""How far the parts may be from the whole, of its largest logit: roundings, few of halves."""
_SEEN: tuple[Seen, ...] = ("images", "prompt")
_TEXT = 4  # tokens before an image, and behind it, in what parts are traced and tried with


@dataclass(frozen=True)
class Parts:
    """Such a model as the models that are compiled.

    `vision` takes images as a dict and gives their rows (N, H), `embed` and `join` make embeddings
    (B, S, H) of ids and rows, and `decoder` takes these with a cache. Where images lie on grids,
    `places` gives the positions (3, B, S) of ids. `whole` takes images, ids and their mask, and
    returns the logits (B, S, V) without any cache. `joining` says which ids stand for images, and
    `drawn` makes so many images, in such rows, and says how many tokens each takes.
    """

    vision: Model
    embed: Model
    join: Model
    decoder: Model
    whole: nn.Module
    joining: Joining
    drawn: Callable[..., tuple[dict[str, Tensor], list[int]]]
    places: Model | None = None


def of_images(
    module: nn.Module,
    images: Mapping[str, Tensor] | None,
    shapes: Mapping[str, Any] | None,
    name: str,
) -> Parts:
    """The parts of a model of transformers that reads images, or sounds.

    `images` are samples by the names of its inputs, with torch.export's dynamic `shapes`; without
    them two are made of the size that its config says. Raises UsageError where that isn't
    known, and for a model whose rule is another than the one above.
    """
    modality = joined_by(type(module))
    if modality is None:
        refuse_mixed(type(module), name)
    what = modality.what
    if images is None:
        images, shapes = (sample_sounds if modality is SOUND else sample_images)(module, name)
    config: Any = module.config
    token = next(
        (t for t in (getattr(config, n, None) for n in modality.tokens) if t is not None), None
    )
    if not isinstance(token, int):
        raise UsageError(
            f"The config of {name} names no {modality.tokens[0]}, so {what} have no places."
        )
    try:
        tried = _Tried(module.eval(), dict(images), token, name)
        begin, sees, placed = tried.begin(), tried.sees(), tried.is_placed()
        whole = Whole(module, token, sees=sees, begin=begin, placed=placed)
        ids, embeds, mask = tried.ids, tried.embeds, torch.ones_like(tried.ids)
        tried.require_rule(whole, mask)
    except Exception as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"{name} can't be compiled with its {what}: what its class names as its parts, run on "
            f"two of them in two rows of text, fails ({reason_of(error)}). {TEXT_ALONE}"
        ) from error
    text = tried.embeds[:, :3]
    grids = OF_QWEN2_VL if config.model_type == "qwen2_vl" else GRID
    cached = tried.decoder(whole, text)
    args, decoder_shapes = cached.sample()
    batch, seq, count = (
        Dim("batch_size"),
        Dim("seq"),
        Dim(modality.rows.replace("features", "rows")),
    )
    axes = {0: batch, 1: seq}
    joining, samples = replace(tried.joining, sees=sees), dict(images)
    if joining.unit is not None:
        samples = images_apart(samples, joining.unit)[0]
    rows: dict[str, Any] = {FEATURES: {0: count}, DEEP: {1: count}}
    return Parts(
        Model(
            tried.vision,
            None,
            (samples,),
            {},
            {"images": {each: (shapes or {}).get(each) for each in samples}},
            f"the {'audio' if modality is SOUND else 'vision'} encoder of {name}",
            names={
                FEATURES: modality.rows,
                **{f"images_{each}": grids if each == GRID else each for each in samples},
            },
        ),
        Model(
            Embed(module, token), None, (ids,), {}, {"input_ids": axes}, f"the embeddings of {name}"
        ),
        Model(
            Join(token),
            None,
            (ids, embeds, *tried.rows.values()),
            {},
            {"input_ids": axes, "text_embeds": axes} | {each: rows[each] for each in tried.rows},
            f"the joining of {what} of {name}",
            names={FEATURES: modality.rows},
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
        joining,
        tried.drawn,
        Model(
            Places(token, joining.merged),
            None,
            (ids, mask, images[GRID]),
            {},
            {"input_ids": axes, "attention_mask": axes, GRID: {0: Dim("images")}},
            f"the positions of images of {name}",
        )
        if placed
        else None,
    )


class _Tried:
    """The parts run eagerly on samples: two rows with an image each, if there are two."""

    def __init__(self, module: nn.Module, images: dict[str, Tensor], token: int, name: str) -> None:
        self.module, self.images, self.token, self.name = module, images, token, name
        self.table, random = table_of(module), torch.Generator().manual_seed(0)
        self.joining = self._joining()
        self.vision = Vision(module, apart=self.joining.unit is not None)
        with inference(module):
            self.rows = self.vision.encoded(images, self.joining.unit or 1)
            plain = torch.randint(rows_of(self.table), (2, 2 * _TEXT), generator=random)
            plain = plain.where(plain != token, (token + 1) % rows_of(self.table))
            half = len(counts := self.counts(images)) // 2
            both = (sum(counts[half:]), sum(counts[:half]))[::-1]
            self.ids = torch.cat([plain, plain[:, :1].expand(-1, max(both))], 1)
            for row, count in enumerate(both):
                self.ids[row, _TEXT + row : _TEXT + row + count] = token
            self.embeds = Embed(module, token)(self.ids)["inputs_embeds"]
            self.joined = Join(token)(self.ids, self.embeds, **self.rows)

    def _joining(self) -> Joining:
        config: Any = self.module.config
        if SOUNDS in self.images:
            return Joining(self.token, sound=True)
        if GRID in self.images:
            return Joining(self.token, int(config.vision_config.spatial_merge_size))
        if SIZES not in self.images:
            return Joining(self.token)
        if sizes_taken(self.module):
            return Joining(self.token, unit=sides(config))
        return Joining(self.token, tiles=Tiles.of(self.module))

    def counts(self, images: Mapping[str, Tensor]) -> list[int]:
        """How many tokens each image takes."""
        joining, sizes = self.joining, images.get(SIZES)
        if joining.sound:
            with inference(self.module):
                each = [
                    {n: t[i : i + 1] for n, t in images.items()} for i in range(len(images[SOUNDS]))
                ]
                return [len(self.vision(one)[FEATURES]) for one in each]
        if GRID in images:
            found: list[int] = (images[GRID].prod(-1) // joining.merged**2).tolist()
            return found
        if joining.unit is not None:
            assert sizes is not None
            return [int(count) for count in (sizes // joining.unit).prod(-1)]
        if joining.tiles is not None:
            assert sizes is not None
            return joining.tiles.tokens(sizes, joining.tiles.alone(images))
        own, given = (self.pixels(each).shape[0] for each in (self.images, images))
        return [len(self.rows[FEATURES]) // own] * given

    def pixels(self, images: Mapping[str, Tensor]) -> Tensor:
        """Those of all images (N, …), whatever rows they come in."""
        return images[PIXELS].flatten(0, 1) if SHOWN in images else images[PIXELS]

    def drawn(
        self, count: int, random: torch.Generator, rows: Sequence[int] | None = None
    ) -> tuple[dict[str, Tensor], list[int]]:
        """So many other images, and how many tokens each takes; `rows` have so many of them each,
        or one."""
        found, joining = {}, self.joining
        if joining.sound:
            found = drawn_sounds(self.images, count, random)
            return found, self.counts(found)
        pixels = self.pixels(self.images)
        known = SHAPES if joining.unit is None else APART
        listed = [known[each % len(known)] for each in range(count)]
        shapes = torch.tensor(listed).reshape(-1, 2)
        shape = (count, *pixels.shape[1:])
        if GRID in self.images:
            found[GRID] = torch.cat([torch.ones(count, 1).long(), shapes * joining.merged], 1)
            shape = (int(found[GRID].prod(-1).sum()), *shape[1:])
        if joining.unit is not None:
            found[SIZES] = shapes * joining.unit
            shape = (*shape[:2], *(found[SIZES].amax(0).tolist() if count else shape[2:]))
        if joining.tiles is not None:
            found[SIZES] = joining.tiles.drawn(count)
            found[IN_ROWS] = torch.tensor([1] * count if rows is None else list(rows))
        found[PIXELS] = torch.randn(shape, generator=random).to(pixels.dtype)
        if SHOWN in self.images:
            found[SHOWN] = parts_shown(found[PIXELS])[None]
            found[PIXELS] = found[PIXELS][None]
        found = {name: found[name] for name in self.images}
        return found, self.counts(found)

    def begin(self) -> int:
        """The position of the first token. Raises UsageError where generate counts otherwise."""
        begin = first_place(self.module, self.ids)
        if begin is None:
            refuse_mixed(type(self.module), self.name, PLACED_OTHERWISE)
        return begin

    def is_placed(self) -> bool:
        """Whether the tokens of images that lie on grids have the positions of these, as in
        Qwen2-VL, and not those of other tokens, as in EXAONE 4.5."""
        if GRID not in self.images:
            return False
        mask = torch.ones_like(self.ids)
        ways = (Whole(self.module, self.token, placed=each) for each in (True, False))
        with inference(self.module):
            own, plain = (whole(self.images, self.ids, mask) for whole in ways)
        return not torch.equal(own, plain)

    def decoder(self, whole: Whole, text: Tensor) -> CachedEmbeds | StatefulEmbeds:
        """The decoder of embeddings like `text` (B, S, H). Raises UsageError."""
        added = self.joined.get(ADDED)
        how: dict[str, Any] = {"placed": whole.placed, "begin": whole.begin}
        first = None if added is None else added[:, :, 2 : 2 + text.shape[1]]
        try:
            return CachedEmbeds(self.module, text, sees=whole.sees, added=first, **how)
        except UsageError:
            kept = kept_states(self.module)
            if kept is None or whole.sees is not None or added is not None:
                raise
        return StatefulEmbeds(self.module, kept, text, **how)

    def sees(self) -> Seen | None:
        """What tokens see as a whole: what changes where their kinds are those of text."""
        if KINDS not in inspect.signature(self.module.forward).parameters:
            return None
        model: Any = self.module
        is_image = self.ids == self.token
        told = [{}, *({KINDS: kinds_of(sees, is_image)} for sees in _SEEN)]
        with inference(model):
            plain, *found = (
                model(inputs_embeds=self.embeds, use_cache=False, **each).logits for each in told
            )
        sees = [
            name for name, each in zip(_SEEN, found, strict=True) if not torch.equal(each, plain)
        ]
        return sees[-1] if sees else None

    def require_rule(self, whole: Whole, mask: Tensor) -> None:
        """Raises UsageError where the model doesn't join images as `Join` does, or its generate
        places tokens otherwise than by their number."""
        model: Any = self.module
        joined = dict(self.joined)
        with inference(model), added_in_layers(model, joined.pop(ADDED, None)):
            own = places(mask) + whole.begin
            if whole.placed:
                placed = Places(self.token, self.joining.merged)
                own = placed(self.ids, mask, self.images[GRID])[POSITIONS]
            kinds = {KINDS: kinds_of(whole.sees, self.ids == self.token)} if whole.sees else {}
            found = model(
                **joined, attention_mask=mask, position_ids=own, use_cache=False, **kinds
            ).logits
        with inference(model):
            expected = whole(self.images, self.ids, mask)
        error = (found - expected).abs().max()
        limit = min(_ROUNDINGS * torch.finfo(found.dtype).eps, _MOST)
        if not error <= limit * expected.abs().max():
            what = self.joining.modality.what
            because = f"its {what} don't just take the places of their tokens, in their order"
            refuse_mixed(type(model), self.name, because)
