"""A compiled model that reads images, or sounds, among its text: an encoder and a decoder of
embeddings.

The files are called as transformers.js calls them: `vision_encoder.onnx` gives `image_features`
(N, H), `embed_tokens.onnx` gives `inputs_embeds` (B, S, H) of ids, with what layers are given for
each token where they are, and `decoder_model_merged.onnx` goes on from these, in each step and with
an empty past in the first one. `join_images.onnx` holds the rule by which features take the places
of their tokens, and where images lie on grids, `image_positions.onnx` that of the positions
(3, B, S). Of sounds the files are `audio_encoder.onnx`, which gives `audio_features`, and
`join_sounds.onnx`; a model that reads both has all of these.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attngraph.decoding.caches import Cache, owned
from attngraph.decoding.decoder import Decoder
from attngraph.decoding.parts import OfParts
from attngraph.decoding.rules import Rules
from attngraph.decoding.stream import TokenStream
from attngraph.decoding.tokens import Fed, Seen, shown_tokens, token_ids
from attngraph.errors import UsageError
from attngraph.export.runtime.session import Session
from attngraph.export.target import parse_target
from attngraph.frontend.families.image_parts import kinds_of
from attngraph.frontend.families.image_sizes import images_apart
from attngraph.frontend.families.joining import Joining
from attngraph.frontend.interface.modalities import (
    FILE_NAMES,
    GRID,
    IMAGES,
    IN_ROWS,
    MODALITIES,
    PIXELS,
    SHOWN,
    SIZES,
    Modality,
)
from attngraph.optimized import Optimized

ENCODERS = tuple(each.encoder for each in MODALITIES)
VISION, EMBED, PLACES, DECODER = (
    IMAGES.encoder,
    "embed_tokens.onnx",
    "image_positions.onnx",
    "decoder_model_merged.onnx",
)
Images = Mapping[str, torch.Tensor]


class Multimodal(OfParts):
    """A model that reads images, or sounds, among its text, in onnxruntime."""

    decoder_file = DECODER

    def __init__(
        self,
        parts: Mapping[str, Optimized | Session],
        decoder: Decoder,
        joinings: Sequence[Joining],
        rules: Rules,
    ) -> None:
        super().__init__(parts, decoder, joinings[0], rules)
        self.joinings = tuple(joinings)

    @property
    def joining(self) -> Joining:
        """How images join the text, or sounds where there are none."""
        return self.joinings[0]

    @property
    def files(self) -> dict[str, Optimized]:
        found = super().files
        for each in self.joinings:
            found[each.modality.encoder].model.metadata_props[each.key] = each.to_json()
        return found

    @classmethod
    def load(cls, folder: str | Path, target: str = "cpu", **options: Any) -> Multimodal:
        """From a folder that `save` wrote; `options` are those of `Session.open`.

        Raises LoadError where it isn't one, ProviderError where the target can't be used.
        """
        folder = Path(folder)
        device = parse_target(target)
        decoder = Decoder.load(folder / DECODER, target, **options)
        kinds = encoded_by(folder)
        placed = [] if decoder.layout.positions is None else [PLACES]
        names = (EMBED, *(name for each in kinds for name in (each.encoder, each.join)), *placed)
        parts = {name: Session.open(folder / name, device, **options) for name in names}
        said = {folder / each.encoder: parts[each.encoder].metadata for each in kinds}
        joinings = [Joining.of_file(found, path) for path, found in said.items()]
        path = next(iter(said))
        return cls(parts, decoder, joinings, Rules.of_file(said[path], path))

    def __call__(
        self,
        ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        images: Images | None = None,
    ) -> tuple[torch.Tensor, Cache]:
        """Logits of ids (B, S) that follow a cache, and the cache with them; see `Decoder`.

        `images` are those whose tokens are among `ids`, by the names of the vision encoder's
        inputs, in the order of batch and sequence. Raises UsageError where their number isn't that
        of the tokens, and as the decoder does.
        """
        fed = self.fed(ids, attention_mask, cache, images)
        return self.decoder(ids, attention_mask, cache, fed=fed)

    def fed(
        self,
        ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        cache: Cache | None,
        images: Images | None,
    ) -> Fed:
        """What the decoder takes of new ids (B, S) behind a cache, beside mask and cache."""
        layout = self.decoder.layout
        assert layout.vocabulary is not None
        if cache is not None:
            owned(cache, self.decoder.owner, len(ids))
        known = max(layout.vocabulary, *(each.token + 1 for each in self.joinings))
        ids = token_ids(ids, known).cpu()
        is_image = ids == self.joining.token
        embeds, *layered = self._run(EMBED, {"input_ids": ids}, "The table of embeddings")
        added: list[torch.Tensor] = []
        for joining, own in self._of_each(images):
            kind, stands = joining.modality, ids == joining.token
            features = self._features(own, joining)
            _require_as_many(features[kind.rows], stands, joining.token, kind)
            if joining is self.joining:
                self._require_apart(stands, cache)
            given = {"input_ids": ids, "text_embeds": embeds, **features}
            embeds, *added = self._run(kind.join, given, f"The joining of {kind.what}")
        fed = {layout.ids: embeds}
        if layout.layered is not None:
            fed[layout.layered] = layered[0]
        if layout.kinds is not None:
            fed[layout.kinds] = self._kinds(is_image, cache, images)
        if layout.added is not None:
            layers = self.decoder.session.input_shape(layout.added)[0]
            assert isinstance(layers, int)
            fed[layout.added] = added[0] if added else embeds.new_zeros(layers, *embeds.shape)
        if layout.positions is None:
            return Fed(fed)
        fed[layout.positions], shift = self._placed(ids, attention_mask, cache, images)
        return Fed(fed, shift)

    def _of_each(self, images: Images | None) -> Iterator[tuple[Joining, Images]]:
        """The inputs by the kind that they belong to. Raises UsageError for any other."""
        if images is None:
            return
        first = self.joining if len(self.joinings) == 1 else None
        own = {id(j): dict[str, torch.Tensor]() for j in self.joinings}
        for name, each in images.items():
            found = (j for j in self.joinings if j is first or name in j.modality.taken)
            joining = next(found, None)
            if joining is None:
                taken = [name for j in self.joinings for name in self._taken(j)]
                raise UsageError(f"There is no input {name}; there are {', '.join(taken)}.")
            own[id(joining)][name] = each
        yield from ((j, own[id(j)]) for j in self.joinings if own[id(j)] or j is first)

    def _taken(self, joining: Joining) -> list[str]:
        """The inputs of an encoder, by the names that they are given under."""
        names = self.session(joining.modality.encoder).input_names
        return [FILE_NAMES.get(name, name) for name in names]

    def _kinds(
        self, is_image: torch.Tensor, cache: Cache | None, images: Images | None
    ) -> torch.Tensor:
        """What is said of each new token: see `Seen`."""
        if self.joining.sees == "prompt":
            is_prompt = cache is None or not cache.seen.ids.shape[1]
            return kinds_of("prompt", is_image, None if is_prompt else 0)
        return is_image & (images is not None)

    def _placed(
        self,
        ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        cache: Cache | None,
        images: Images | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The positions (3, B, S) of ids behind a cache, and the shift of what follows them."""
        batch, length = ids.shape
        held = Seen.nothing(batch) if cache is None else cache.seen
        before = held.ids.shape[1]
        shown = shown_tokens(attention_mask, batch, before, length)
        every = torch.ones(batch, before + length) if shown is None else shown
        mask = every[:, before:].long()
        shift = torch.zeros(batch, 1, dtype=torch.int64) if held.shift is None else held.shift
        begin = every[:, :before].long().sum(1, keepdim=True) + shift
        if images is None:
            places = (mask.cumsum(1) - 1).expand(3, batch, length)
        else:
            grid = images[GRID]
            given = {"input_ids": ids, "attention_mask": mask, GRID: grid}
            places, more = self._run(PLACES, given, "The positions of images")
            shift = shift + more
        return (places + begin).masked_fill(mask == 0, 0), shift

    def generate(
        self,
        input_ids: torch.Tensor,
        max_new_tokens: int,
        attention_mask: torch.Tensor | None = None,
        **how: Any,
    ) -> torch.Tensor:
        """The prompt ids (B, S) with up to `max_new_tokens` more, as `transformers`' generate.

        Takes what `stream` takes, and raises as that does.
        """
        stream = self.stream(input_ids, max_new_tokens, attention_mask, **how)
        return stream.finished().to(input_ids.device)

    def stream(
        self,
        input_ids: torch.Tensor,
        max_new_tokens: int,
        attention_mask: torch.Tensor | None = None,
        *,
        pixel_values: torch.Tensor | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        cache: Cache | None = None,
        **images: torch.Tensor,
    ) -> TokenStream:
        """The tokens of `generate`, each (B,) as soon as it is drawn.

        `pixel_values` and `images` are the images of the prompt by the names of the vision
        encoder's inputs; with a `cache`, those of the ids behind it. The tokens that end a row and
        that fill it are by default those of `rules`. The rest is as `Decoder.stream` has it.

        Raises UsageError as that does, where the images give another number of features than the
        prompt has tokens for, and where it has such tokens and no image is given.
        """
        given = images if pixel_values is None else {"pixel_values": pixel_values, **images}
        given = {name: each for name, each in given.items() if each is not None}
        step = _Conversation(self, given or None)
        stream = self._stream(
            input_ids,
            max_new_tokens,
            attention_mask,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            cache=cache,
            step=step,
        )
        step.begin(stream.ids[:, 0 if cache is None else cache.length :], stream, cache)
        return stream

    def _features(self, images: Images, joining: Joining) -> dict[str, torch.Tensor]:
        file, tiles = joining.modality.encoder, joining.tiles
        wanted = self.session(file)
        part = "audio" if joining.sound else "vision"
        for own in wanted.input_names:
            name = FILE_NAMES.get(own, own)
            if isinstance(tensor := images.get(name), torch.Tensor):
                is_float = wanted.input_dtype(own).is_floating_point
                if tensor.dtype.is_floating_point != is_float:
                    kind = "floating, as the preprocessor gives them" if is_float else "integers"
                    dtype = str(tensor.dtype).removeprefix("torch.")
                    raise UsageError(f"{name} is {dtype}; its numbers must be {kind}.")
        if isinstance(grid := images.get(GRID), torch.Tensor):
            _require_grid(grid, images, joining.merged)
        if SHOWN in images:  # rows of images, where the file takes one; those of zeros are padding
            images = {n: t.flatten(0, 1)[None] if _is_rows(t) else t for n, t in images.items()}
        if tiles is not None:
            if IN_ROWS in wanted.input_names and IN_ROWS not in images and SIZES in images:
                images = {**images, IN_ROWS: torch.ones(len(images[SIZES]), dtype=torch.int64)}
            tiles.require(images)
        every = [images] if joining.unit is None else _apart(images, joining.unit)
        found = [self._run(file, each, f"The {part} encoder") for each in every]
        joined = (torch.cat(each, -2) for each in zip(*found, strict=True))
        return dict(zip(wanted.output_names, joined, strict=True))

    def _run(self, name: str, given: Mapping[str, Any], what: str) -> tuple[torch.Tensor, ...]:
        return tuple(self.session(name).run(self._feeds_of(name, given, what, FILE_NAMES)))

    def _require_apart(self, is_image: torch.Tensor, cache: Cache | None) -> None:
        """Raises UsageError where an image goes on behind a cache: its tokens see each other."""
        held = None if cache is None or self.decoder.layout.kinds is None else cache.seen.ids
        if held is None or not held.shape[1]:
            return
        if self.joining.sees == "prompt":
            raise UsageError(
                "Images stand in the first ids alone, all of which see each other: give these ids "
                "and images at once, without a cache."
            )
        if bool((is_image[:, 0] & (held[:, -1] == self.joining.token)).any()):
            raise UsageError(
                "The ids behind the cache begin within an image: give all of its tokens at once."
            )


@dataclass
class _Conversation:
    """The step of a stream whose first ids have images, which are encoded once."""

    model: Multimodal
    images: Images | None
    fed: Fed | None = None

    def begin(self, ids: torch.Tensor, stream: TokenStream, cache: Cache | None) -> None:
        """Joins the images to the first ids. Raises UsageError where they don't fit."""
        given: Collection[str] = () if self.images is None else self.images
        for joining in self.model.joinings:
            count, kind = int((ids == joining.token).sum()), joining.modality
            if count and not (self.images if len(self.model.joinings) == 1 else kind.main in given):
                raise UsageError(
                    f"The prompt has {count} tokens {joining.token}, which stand for {kind.what}: "
                    f"give {kind.main}."
                )
        self.fed = self.model.fed(ids, stream.attention_mask, cache, self.images)

    def __call__(
        self, ids: torch.Tensor, mask: torch.Tensor | None, cache: Cache | None
    ) -> tuple[torch.Tensor, Cache]:
        fed, self.fed = self.fed or self.model.fed(ids, mask, cache, None), None
        return self.model.decoder(ids, mask, cache, fed=fed)


def _is_rows(images: object) -> bool:
    return isinstance(images, torch.Tensor) and images.ndim > 1


def _apart(images: Images, unit: int) -> Sequence[Images]:
    """Each of them without what pads it. Raises UsageError for other inputs, and shapes."""
    pixels, rest = images.get(PIXELS), images.keys() - {PIXELS, SIZES}
    fits = isinstance(pixels, torch.Tensor) and pixels.ndim == 4 and len(pixels) > 0
    if rest or not fits or not isinstance(images.get(SIZES, pixels), torch.Tensor):
        return [images]  # what is wrong is told as of any other part
    return images_apart(images, unit)


def _require_grid(grid: torch.Tensor, images: Images, merged: int) -> None:
    """Raises UsageError where grids are not those of the patches."""
    is_grid = grid.ndim == 2 and grid.shape[1] == 3 and bool((grid > 0).all())
    if not is_grid or bool((grid[:, 1:] % merged).any()):
        raise UsageError(
            f"{GRID} must be (images, 3): frames, and rows and columns of patches, each a "
            f"multiple of {merged}."
        )
    said, pixels = int(grid.prod(-1).sum()), images.get("pixel_values")
    if isinstance(pixels, torch.Tensor) and len(pixels) != said:
        raise UsageError(
            f"{GRID} has places for {said} patches, and pixel_values has {len(pixels)}."
        )


def encoded_by(folder: Path) -> tuple[Modality, ...]:
    """What the encoders in a folder are for; images, where there is none."""
    found = tuple(each for each in MODALITIES if (folder / each.encoder).exists())
    return found or (IMAGES,)


def _require_as_many(
    features: torch.Tensor, stands: torch.Tensor, token: int, kind: Modality
) -> None:
    count = int(stands.sum())
    if len(features) != count:
        raise UsageError(
            f"The ids have {count} tokens {token}, which stand for {kind.what}, and the "
            f"{kind.what} give {len(features)} features: there must be one token for each, as the "
            "model's processor puts them."
        )
