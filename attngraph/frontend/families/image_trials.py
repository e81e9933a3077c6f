"""Samples of a model that reads images, or sounds, run through its parts: what these must be like.

Where the parts together don't give what the model gives, it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attngraph.errors import UsageError
from attngraph.frontend.families.causal_lm import places
from attngraph.frontend.families.embedded_lm import ADDED, CachedEmbeds
from attngraph.frontend.families.image_grids import Places
from attngraph.frontend.families.image_parts import (
    FEATURES,
    POSITIONS,
    Join,
    Seen,
    Vision,
    Whole,
    embedder_of,
    kinds_of,
    kinds_parameter,
    rows_of,
    table_of,
)
from attngraph.frontend.families.image_samples import APART, SHAPES, parts_shown, patches_at, sides
from attngraph.frontend.families.image_sizes import Tiles, sizes_taken
from attngraph.frontend.families.joining import Joining
from attngraph.frontend.families.kept import kept_states
from attngraph.frontend.families.layer_inputs import LAYER_INPUTS, added_in_layers
from attngraph.frontend.families.sounds import drawn_sounds
from attngraph.frontend.families.stateful_embeds import StatefulEmbeds
from attngraph.frontend.interface.modalities import (
    GRID,
    IN_ROWS,
    PATCH_PLACES,
    PIXELS,
    PLACED_OTHERWISE,
    SHOWN,
    SIZES,
    SOUNDS,
    first_place,
    refuse_mixed,
)
from attngraph.inference import inference

_ROUNDINGS, _MOST = 1e3, 2.0**-5
"""How far the parts may be from the whole, of its largest logit: roundings, few of halves."""
_SEEN: tuple[Seen, ...] = ("images", "prompt")
_TEXT = 4  # tokens before an image, and behind it, in what parts are traced and tried with
_FIRST = 3  # tokens that the decoder is traced with


class Tried:
    """The parts run eagerly on samples: two rows with an image each, if there are two."""

    def __init__(self, module: nn.Module, images: dict[str, Tensor], token: int, name: str) -> None:
        self.module, self.images, self.token, self.name = module, images, token, name
        self.table, random = table_of(module), torch.Generator().manual_seed(0)
        self.told = kinds_parameter(module)
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
            embedded = embedder_of(module, token)(self.ids)
            self.embeds, self.layered = embedded["inputs_embeds"], embedded.get(LAYER_INPUTS)
            self.joined = Join(token)(self.ids, self.embeds, **self.rows)
        sees = self._sees()
        self.joining = replace(self.joining, sees=sees)
        begin, placed = self._begin(), self._is_placed()
        self.whole = Whole(module, token, sees=sees, begin=begin, placed=placed)

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
        if PATCH_PLACES in images:
            all_shown = int((self.images[PATCH_PLACES][..., 0] >= 0).sum())
            shown = (images[PATCH_PLACES][..., 0] >= 0).sum(-1)
            return [int(n) * len(self.rows[FEATURES]) // all_shown for n in shown]
        if joining.unit is not None:
            assert sizes is not None
            return [int(count) for count in (sizes // joining.unit).prod(-1)]
        if joining.tiles is not None:
            assert sizes is not None
            return joining.tiles.tokens(sizes, joining.tiles.alone(images))
        own, given = (self.pixels(each).shape[0] for each in (self.images, images))
        return [len(self.rows[FEATURES]) // own] * given

    def pixels(self, images: Mapping[str, Tensor]) -> Tensor:
        """The pixels of all images (N, …), whatever rows they come in."""
        return images[PIXELS].flatten(0, 1) if SHOWN in images else images[PIXELS]

    def drawn(
        self, count: int, random: torch.Generator, rows: Sequence[int] | None = None
    ) -> tuple[dict[str, Tensor], list[int]]:
        """`count` other images, and how many tokens each takes; `rows` have so many of them each,
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
        if PATCH_PLACES in self.images:
            found[PATCH_PLACES] = patches_at(self.module.config, shapes, shape[1])
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

    def _begin(self) -> int:
        """The position of the first token. Raises UsageError where generate counts otherwise."""
        begin = first_place(self.module, self.ids)
        if begin is None:
            refuse_mixed(type(self.module), self.name, PLACED_OTHERWISE)
        return begin

    def _is_placed(self) -> bool:
        """Whether the tokens of images that lie on grids have the positions of these, as in
        Qwen2-VL, and not those of other tokens, as in EXAONE 4.5."""
        if GRID not in self.images:
            return False
        mask = torch.ones_like(self.ids)
        ways = (Whole(self.module, self.token, placed=each) for each in (True, False))
        with inference(self.module):
            own, plain = (whole(self.images, self.ids, mask) for whole in ways)
        return not torch.equal(own, plain)

    def decoder(self) -> CachedEmbeds | StatefulEmbeds:
        """The decoder of embeddings like those of the first tokens. Raises UsageError."""
        text, whole, added = self.embeds[:, :_FIRST], self.whole, self.joined.get(ADDED)
        how: dict[str, Any] = {"placed": whole.placed, "begin": whole.begin}
        first = None if added is None else added[:, :, 2 : 2 + _FIRST]
        layered = None if self.layered is None else self.layered[:, :_FIRST]
        given: dict[str, Any] = {**how, "sees": whole.sees, "added": first, "layered": layered}
        try:
            found = CachedEmbeds(self.module, text, **given)
            if whole.sees is None or self._goes_on(found):
                return found
            return CachedEmbeds(self.module, text, **given, always_first=True)
        except UsageError:
            kept = kept_states(self.module)
            if kept is None or any(e is not None for e in (whole.sees, added, layered)):
                raise
        return StatefulEmbeds(self.module, kept, text, **how)

    def _goes_on(self, decoder: CachedEmbeds) -> bool:
        """Whether it reads the tokens' kinds behind a cache that says what it holds, and gives
        images there the logits that they have without one."""
        embeds, kinds = self.joined["inputs_embeds"], self.ids == self.token
        mask, past = torch.ones_like(self.ids), decoder.without_cache(len(self.ids))
        own = None if self.layered is None else self.layered
        with inference(self.module):
            for piece in (slice(_TEXT), slice(_TEXT, None)):
                layered = None if own is None else own[:, piece]
                told, shown = kinds[:, piece].long(), mask[:, : piece.stop]
                found = decoder(embeds[:, piece], shown, None, told, None, layered, past)
                past = found["present"]
            expected = self.whole(self.images, self.ids, mask)[:, -1:]
        return _are_near(found["logits"], expected)

    def _sees(self) -> Seen | None:
        """What tokens see as a whole: what changes where their kinds are those of text."""
        if self.told is None or self.joining.sound or GRID in self.images:
            return None
        model: Any = self.module
        is_image = self.ids == self.token
        told = [{}, *({self.told: kinds_of(sees, is_image)} for sees in _SEEN)]
        own = self._of_layers()
        with inference(model):
            plain, *found = (
                model(inputs_embeds=self.embeds, use_cache=False, **own, **each).logits
                for each in told
            )
        sees = [
            name for name, each in zip(_SEEN, found, strict=True) if not torch.equal(each, plain)
        ]
        return sees[-1] if sees else None

    def _of_layers(self) -> dict[str, Tensor]:
        """What layers are given for the ids, by the model's name."""
        return {} if self.layered is None else {LAYER_INPUTS: self.layered}

    def require_rule(self) -> None:
        """Raises UsageError where the model doesn't join images as `Join` does, or its generate
        places tokens otherwise than by their number."""
        model: Any = self.module
        whole, mask = self.whole, torch.ones_like(self.ids)
        joined = {**self.joined, **self._of_layers()}
        with inference(model), added_in_layers(model, joined.pop(ADDED, None)):
            own = places(mask) + whole.begin
            if whole.placed:
                placed = Places(self.token, self.joining.merged)
                own = placed(self.ids, mask, self.images[GRID])[POSITIONS]
            kinds = {}
            if whole.sees is not None and self.told is not None:
                kinds = {self.told: kinds_of(whole.sees, self.ids == self.token)}
            found = model(
                **joined, attention_mask=mask, position_ids=own, use_cache=False, **kinds
            ).logits
        with inference(model):
            expected = whole(self.images, self.ids, mask)
        if not _are_near(found, expected):
            what = self.joining.modality.what
            because = f"its {what} don't just take the places of their tokens, in their order"
            refuse_mixed(type(model), self.name, because)


def _are_near(found: Tensor, expected: Tensor) -> bool:
    limit = min(_ROUNDINGS * torch.finfo(found.dtype).eps, _MOST)
    return bool((found - expected).abs().max() <= limit * expected.abs().max())
