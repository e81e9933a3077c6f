"""The driver for models that read images or listen: each part, and all over several steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import torch

from attngraph.compiling.compiler import compile_model
from attngraph.decoding.checking import Encoded
from attngraph.decoding.compile import compile_decoder
from attngraph.decoding.compile_seq2seq import rules_of
from attngraph.decoding.decoder import Decoder
from attngraph.decoding.multimodal import DECODER, EMBED, PLACES, Multimodal
from attngraph.decoding.rules import Rules
from attngraph.export.files.staged import Staged
from attngraph.frontend.families.image_parts import kinds_of
from attngraph.frontend.families.multimodal import Parts, Side, of_images
from attngraph.frontend.interface.modalities import is_multimodal, refuse_mixed
from attngraph.frontend.model import Model
from attngraph.keywords import CacheKeywords, read, spelled_out
from attngraph.options import DEFAULTS, DecoderOptions, Options
from attngraph.stages import Progress, telling

_STEPS = 3


@spelled_out(CacheKeywords)
def optimize_multimodal(
    module: torch.nn.Module,
    images: Mapping[str, torch.Tensor] | None = None,
    *,
    image_shapes: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    **options: Unpack[CacheKeywords],
) -> Multimodal:
    """Compiles a model of transformers that reads images, or sounds, among its text, and checks it
    over steps.

    `images` are samples of either by the names of the model's inputs, and `image_shapes` their
    dynamic dims as torch.export has them; without them they are made of the size in the config. The
    rest is as in `optimize_decoder`.

    Raises UsageError where the rule by which the model joins them to text isn't known here, and
    as `optimize_decoder` does.
    """
    name = type(module).__name__
    if not is_multimodal(module):
        refuse_mixed(type(module), name)
    parts = of_images(module, images, image_shapes, name)
    chosen, decoding = read(options)
    with telling(progress):
        return compile_multimodal(parts, rules_of(module), decoding, chosen)


def compile_multimodal(
    parts: Parts,
    rules: Rules,
    decoding: DecoderOptions,
    options: Options = DEFAULTS,
    *,
    staged: Callable[[str], Staged | None] = lambda name: None,
) -> Multimodal:
    """As `optimize_multimodal`, for a model in parts; large weights are `staged`, by the file.

    Raises ParityError where a part is out of its error budget, or the steps of the whole are.
    """
    joinings, rest = [side.joining for side in parts.sides], without_codes(options)
    encoders = {each.modality.encoder for each in joinings}
    made = {
        file: compile_model(part, options if file in encoders else rest, staged=staged(file))
        for file, part in beside_decoder(parts).items()
    }

    def encoded(decoder: Decoder) -> Iterator[Encoded]:
        return seen_images(parts, Multimodal(made, decoder, joinings, rules))

    decoder = compile_decoder(
        parts.decoder,
        decoding,
        options,
        encoded=encoded,
        staged=staged(DECODER),
    )
    decoder.report.notes += [*parts.notes, *rules.notes]
    return Multimodal(made, decoder, joinings, rules)


def without_codes(options: Options) -> Options:
    """The options of a part that has no linear, whose weights can't be stored in codes."""
    return replace(options, weights=None, activations=None, budget=None, calibrate=None)


def beside_decoder(parts: Parts) -> dict[str, Model]:
    """The parts beside the decoder, by the names of their files."""
    found: dict[str, Model] = {}
    for side in parts.sides:
        kind = side.joining.modality
        found |= {kind.encoder: side.vision, EMBED: parts.embed, kind.join: side.join}
        found |= {} if side.places is None else {PLACES: side.places}
    return found


def seen_images(parts: Parts, model: Multimodal) -> Iterator[Encoded]:
    """The inputs of a check over steps: text alone, an image in each row, two images in a row; the
    same with sounds, and each beside the other.

    Prompts are padded differently. Those that the decoder has no room for are left out.
    """
    first_side = parts.first.joining
    plain = partial(Encoded, pad=first_side.token, cache=None, whole=parts.whole)
    rows = 4

    def fed(
        ids: torch.Tensor, mask: torch.Tensor, first: int, images: Any
    ) -> dict[str, torch.Tensor]:
        inputs, kinds = dict(model.fed(ids, mask, None, images).inputs), model.decoder.layout.kinds
        if kinds is not None and first_side.sees == "prompt":
            inputs[kinds] = kinds_of("prompt", ids == first_side.token, first)
        return inputs

    nothing: dict[str, torch.Tensor] = {}
    yield plain("text alone", rows, given=(nothing,), step=model, fed=partial(fed, images=None))
    for label, places in _shown(parts.sides):
        images, ids, mask, first = _prompt(parts, model, places)
        decoder = model.decoder
        room = decoder.layout.max_length
        total = ids.shape[1]
        if (room is not None and total > room) or not decoder.extent.takes(len(ids), first, total):
            continue
        yield plain(
            label,
            len(ids),
            given=(images,),
            step=_First(model, images),
            fed=partial(fed, images=images),
            prompt=(ids, mask, first),
        )


class _First:
    """A step whose first ids have the images."""

    def __init__(self, model: Multimodal, images: dict[str, torch.Tensor]) -> None:
        self.model, self.images = model, images

    def __call__(self, ids: Any, mask: Any, cache: Any) -> Any:
        return self.model(ids, mask, cache, self.images if cache is None else None)


def _shown(sides: Sequence[Side]) -> Iterator[tuple[str, list[list[int]]]]:
    """A label, and the sides that each row of a prompt holds, in order."""
    for place, side in enumerate(sides):
        one = side.joining.modality.one
        yield f"{one} in each of two rows", [[place], [place]]
        yield f"{one} and another in a row", [[place, place]]
    if len(sides) > 1:
        every = list(range(len(sides)))
        yield "each in one prompt", [every, every[::-1]]


def _prompt(
    parts: Parts, model: Multimodal, places: Sequence[Sequence[int]]
) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor, int]:
    """(images, ids, mask, tokens of the prompt) where each row has one of each side that it
    names."""
    random, sides = torch.Generator().manual_seed(1), parts.sides
    vocabulary = model.decoder.layout.vocabulary
    assert vocabulary is not None
    chosen: dict[str, torch.Tensor] = {}
    pieces: dict[int, list[int]] = {}
    for place in sorted({place for row in places for place in row}):
        rows = [row.count(place) for row in places]
        given, pieces[place] = sides[place].drawn(sum(rows), random, rows)
        chosen |= given
    most = max(size for sizes in pieces.values() for size in sizes)
    length = max(map(len, places)) * (most + 2) + len(places)
    ids = torch.randint(vocabulary, (len(places), length + _STEPS), generator=random)
    tokens = {side.joining.token for side in sides}
    plain = next(each for each in range(len(tokens) + 1) if each not in tokens)
    for token in tokens:
        ids = ids.where(ids != token, plain)
    mask = torch.ones(ids.shape, dtype=torch.bool)
    for row, those in enumerate(places):
        mask[row, :row] = False
        start = row + 1
        for place in those:
            size = pieces[place].pop(0)
            ids[row, start : start + size] = sides[place].joining.token
            start += size + 1
    return chosen, ids, mask, length
