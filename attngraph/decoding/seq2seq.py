"""A compiled encoder-decoder: what is encoded once, and a decoder that attends to it in each step.

The files and their inputs and outputs are called as optimum calls them, which other runtimes know:
`encoder_model.onnx` gives `last_hidden_state` and the keys and values of all cross-attentions,
which `decoder_with_past_model.onnx` takes as inputs, in every step and with an empty past in the
first one. `decoder_model_merged.onnx` is for runtimes that begin with the hidden states
(attngraph/export/files/merged.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Unpack

import torch

from attngraph.decoding.caches import Cache
from attngraph.decoding.decoder import Decoder
from attngraph.decoding.parts import OfParts
from attngraph.decoding.rules import Rules
from attngraph.decoding.sampling import SamplingKeywords
from attngraph.decoding.tokens import shown_tokens, token_ids
from attngraph.errors import LoadError, UsageError
from attngraph.export.runtime.session import OrtValue, Session
from attngraph.export.target import parse_target
from attngraph.frontend.families.described import Described
from attngraph.optimized import Optimized

ENCODER, DECODER, MERGED = (
    "encoder_model.onnx",
    "decoder_with_past_model.onnx",
    "decoder_model_merged.onnx",
)


@dataclass(frozen=True)
class Wiring(Described):
    """How an encoder and a decoder belong together.

    `memory` maps inputs of the decoder to outputs, or inputs, of the encoder. The encoder's first
    input is what it encodes; `mask` is its mask (B, T), 1 where there is something. `vocabulary` is
    how many ids the encoder has rows for, where it takes ids.
    """

    memory: Mapping[str, str]
    mask: str | None = None
    vocabulary: int | None = None

    key: ClassVar[str] = "attngraph.encoder"
    unlike: ClassVar[str] = (
        "what a decoder takes of it: it wasn't compiled as the encoder of an encoder-decoder"
    )


class Seq2Seq(OfParts):
    """An encoder-decoder in onnxruntime. What the encoder gives stays on the device between steps.

    `encoder` and `merged` are the compiled models, None where the files were loaded; so is `merged`
    where none was asked for.
    """

    decoder_file = DECODER

    def __init__(
        self,
        encoder: Optimized | Session,
        decoder: Decoder,
        wiring: Wiring,
        rules: Rules,
        merged: Optimized | None = None,
    ) -> None:
        super().__init__({ENCODER: encoder}, decoder, wiring, rules)
        self.encoder = encoder if isinstance(encoder, Optimized) else None
        self.wiring = wiring
        self.merged = merged

    @classmethod
    def load(cls, folder: str | Path, target: str = "cpu", **options: Any) -> Seq2Seq:
        """From a folder that `save` wrote; `options` are those of `Session.open`.

        Raises LoadError where it isn't one, ProviderError where the target can't be used.
        """
        folder = Path(folder)
        path = folder / ENCODER
        session = Session.open(path, parse_target(target), **options)
        wiring = Wiring.of_file(session.metadata, path)
        decoder = Decoder.load(folder / DECODER, target, **options)
        if missing := [name for name in decoder.layout.memory if name not in wiring.memory]:
            raise LoadError(
                f"{folder / DECODER} takes {', '.join(missing)}, which {path} doesn't give: they "
                "are of two models."
            )
        return cls(session, decoder, wiring, Rules.of_file(session.metadata, path))

    @property
    def files(self) -> dict[str, Optimized]:
        """As in `OfParts`, with the merged file where there is one."""
        merged = {} if self.merged is None else {MERGED: self.merged}
        return {**super().files, **merged}

    def start(
        self,
        source: torch.Tensor | Mapping[str, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
    ) -> Cache:
        """Encodes, and gives the cache without a token with which the decoder begins.

        `source` is what is encoded, with the batch first: token ids (B, T), features, images; or
        all inputs by name. `attention_mask` (B, T) is 0 where there is padding, on whichever side.
        Raises UsageError for what the encoder doesn't take.
        """
        feeds = self._feeds(source, attention_mask)
        session, layout = self.encoder_session, self.decoder.layout
        wanted = {name: self.wiring.memory[name] for name in layout.memory}
        memory: dict[str, torch.Tensor | OrtValue] = {
            name: feeds[origin] for name, origin in wanted.items() if origin in feeds
        }
        outputs = {name: origin for name, origin in wanted.items() if name not in memory}
        taken = self.decoder.session.input_dtype
        fetched = {n: o for n, o in outputs.items() if session.output_dtype(o) != taken(n)}
        kept = {name: origin for name, origin in outputs.items() if name not in fetched}
        found = session.step(feeds, {}, list(fetched.values()), list(kept.values()))
        for names, values in zip((fetched, kept), found, strict=True):
            memory.update(zip(names, values, strict=True))
        return self.decoder.start(memory, len(feeds[session.input_names[0]]))

    def __call__(self, ids: torch.Tensor, cache: Cache) -> tuple[torch.Tensor, Cache]:
        """Logits (B, S, V) of ids that follow a cache, and the cache with them; see `Decoder`."""
        return self.decoder(ids, None, cache)

    def generate(
        self,
        source: torch.Tensor | Mapping[str, torch.Tensor],
        max_new_tokens: int,
        attention_mask: torch.Tensor | None = None,
        *,
        decoder_input_ids: torch.Tensor | None = None,
        **how: Unpack[SamplingKeywords],
    ) -> torch.Tensor:
        """The decoder's tokens (B, S), as `transformers`' generate gives them with one beam.

        Whisper's own generate also puts language and task in front, which are to be given, and cuts
        all of these off. They begin with `decoder_input_ids` (B, S), by default the start token of
        `rules`, which also name the tokens that end a row and that fill it. The rest is as
        `Decoder.stream` has it. Raises UsageError as `start` and `Decoder.stream` do.
        """
        cache = self.start(source, attention_mask)
        if decoder_input_ids is None:
            if not self.rules.start:
                raise UsageError(
                    "The model's generation config names no decoder_start_token_id: give "
                    "decoder_input_ids."
                )
            decoder_input_ids = torch.tensor([self.rules.start]).expand(cache.batch, -1)
        stream = self._stream(decoder_input_ids, max_new_tokens, cache=cache, **how)
        return stream.finished().to(decoder_input_ids.device)

    @property
    def encoder_session(self) -> Session:
        """The encoder's session. Raises ProviderError where it can't be opened."""
        return self.session(ENCODER)

    def _feeds(
        self,
        source: torch.Tensor | Mapping[str, torch.Tensor],
        attention_mask: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        session, mask = self.encoder_session, self.wiring.mask
        main = session.input_names[0]
        given = dict(source) if isinstance(source, Mapping) else {main: source}
        if attention_mask is not None:
            if mask is None:
                raise UsageError(
                    f"The encoder takes no mask; it takes {', '.join(session.input_names)}."
                )
            given[mask] = attention_mask
        first = given.get(main)
        if self.wiring.vocabulary is not None:
            first = given[main] = token_ids(first, self.wiring.vocabulary)
        if not isinstance(first, torch.Tensor):
            raise UsageError(f"{main} must be a torch.Tensor, not {type(first).__name__}.")
        if mask is not None:
            batch, length = self._shape_of_mask(first)
            shown = shown_tokens(given.get(mask), batch, 0, length)
            given[mask] = torch.ones(batch, length) if shown is None else shown
        return self._feeds_of(ENCODER, given, "The encoder")

    def _shape_of_mask(self, first: torch.Tensor) -> tuple[int, int]:
        """(B, T): T is the size of the axis of what is encoded that has the mask's dim."""
        session, mask = self.encoder_session, self.wiring.mask
        assert mask is not None
        length = session.input_shape(mask)[1]
        if isinstance(length, int):
            return len(first), length
        declared = session.input_shape(session.input_names[0])
        axis = declared.index(length) if length in declared else 1
        return len(first), first.shape[axis]
