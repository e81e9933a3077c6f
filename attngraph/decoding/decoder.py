"""A compiled decoder: one ONNX graph for the prompt and for every token after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import torch

from attngraph.decoding.caches import Cache, GrowingCache, Slots, StaticCache, begun, owned
from attngraph.decoding.extent import Extent
from attngraph.decoding.rules import NO_RULES, Rules
from attngraph.decoding.sampling import Sampling, SamplingKeywords
from attngraph.decoding.stream import Step, TokenStream
from attngraph.decoding.tokens import (
    Fed,
    Seen,
    end_tokens,
    pieces,
    positions,
    shown_tokens,
    token_id,
    token_ids,
)
from attngraph.errors import UsageError
from attngraph.export.lowering.emission.buffers import CAPACITY, axes_of_rows, by_row, row_of
from attngraph.export.runtime.bound_steps import BoundSteps
from attngraph.export.runtime.session import OrtValue, Session
from attngraph.export.runtime.tensors import to_ort, to_torch
from attngraph.export.target import parse_target
from attngraph.frontend.families.cache import METADATA_KEY, Layout
from attngraph.ir.ranges import Ranges
from attngraph.numeric import whole
from attngraph.optimized import Optimized
from attngraph.reports.report import Report

_AHEAD = 4096
"""Steps of a `generate` whose sizes are checked before the first; later ones are as they come."""


class Decoder:
    """A causal language model in onnxruntime. Its cache stays on the device between steps.

    A growing cache is new tensors after each step, and the one before is left as it is. A static
    cache is buffers of `max_length` tokens that are made once; a step writes into them, and so uses
    up the cache that it was given (see `StaticCache`).

    `optimized` is the compiled model, None for a decoder that was loaded from a file. `session` is
    by default that of the compiled model, opened on first use. `rules` are those of a checkpoint's
    generation config; of any other model there are none.
    """

    def __init__(
        self, session: Session | None, layout: Layout, optimized: Optimized | None = None
    ) -> None:
        self._session = session
        self.layout = layout
        self.optimized = optimized
        self.owner = object()  # whose the caches are that its steps give
        self.ranges = Ranges({}) if optimized is None else optimized.ranges
        self.rules = NO_RULES

    @classmethod
    def of(cls, optimized: Optimized, layout: Layout) -> Decoder:
        """From a compiled model; its metadata gets the layout of the cache."""
        optimized.model.metadata_props[METADATA_KEY] = layout.to_json()
        return cls(None, layout, optimized)

    @classmethod
    def load(cls, path: str | Path, target: str = "cpu", **options: Any) -> Decoder:
        """A decoder from a file that `save` wrote; `options` are those of `Session.open`.

        Raises LoadError where the file isn't one, ProviderError where the target can't be used.
        """
        session = Session.open(Path(path), parse_target(target), **options)
        said = session.metadata
        decoder = cls(session, Layout.from_json(said.get(METADATA_KEY), str(path)))
        decoder.ranges = Ranges.of_file(said, path)
        if Rules.key in said:
            decoder.rules = Rules.of_file(said, path)
        return decoder

    def keep_rules(self, rules: Rules) -> None:
        """Makes these the rules of calls that name no others, and stores them in the file."""
        self.rules = rules
        self._compiled.model.metadata_props[rules.key] = rules.to_json()

    @property
    def session(self) -> Session:
        """The session that the steps run in. Raises ProviderError where it can't be opened."""
        if self._session is None:
            self._session = self._compiled.session
        return self._session

    def save(self, path: str | Path) -> None:
        """Writes the ONNX file; its metadata says which inputs are the cache.

        Raises OutputError, and UsageError for a decoder that was loaded: copy its file.
        """
        self._compiled.save(path)

    @property
    def report(self) -> Report:
        """What was done and measured. Raises UsageError for a decoder that was loaded."""
        return self._compiled.report

    def start(self, memory: Mapping[str, torch.Tensor | OrtValue], batch: int) -> Cache:
        """The cache without a token, for so many rows, that holds what all steps attend to.

        Raises UsageError where `memory` lacks one of the inputs that stay the same in all steps.
        """
        if missing := [name for name in self.layout.memory if name not in memory]:
            raise UsageError(
                f"The decoder attends to {', '.join(missing)}; give it from the start."
            )
        return self._empty(batch, {name: memory[name] for name in self.layout.memory})

    @property
    def _compiled(self) -> Optimized:
        if self.optimized is None:
            raise UsageError(
                "This decoder was loaded from a file: copy that file; its report is not in it."
            )
        return self.optimized

    def __call__(
        self,
        ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        *,
        fed: Fed | None = None,
    ) -> tuple[torch.Tensor, Cache]:
        """Logits of ids (B, S) that follow a cache of P tokens, and the cache with them in it.

        `ids` are int64 or int32. `attention_mask` (B, P + S), bool or an integer like ids, is 0
        where there is padding; without it there is none. It says of the tokens in the cache what it
        said when they came. The logits are (B, S, V), or those of the last position (B, 1, V) where
        the model was compiled so.

        Raises UsageError, before anything is computed, for tensors that are not that, for ids that
        the model doesn't know, for a cache of another decoder, where a static cache has no room
        for the tokens or was written over, and for more tokens than the model has positions for.
        Where the model would compute what is in the cache otherwise for so many tokens, as LongRoPE
        does behind a length, all of them are computed again.

        A decoder of a model that reads images takes embeddings; `fed` has these (see
        `Multimodal`).
        """
        if self.layout.embeds and fed is None:
            raise UsageError(
                "This decoder takes embeddings, into which images are joined: load its folder with "
                "Multimodal.load."
            )
        ids = token_ids(ids, self.layout.vocabulary)
        batch, length = ids.shape
        cache = self.start({}, batch) if cache is None else owned(cache, self.owner, batch)
        extent, total = self.extent, cache.length + length
        extent.require_room(total)
        extent.require_sizes(batch, length, cache.length)
        shown = shown_tokens(attention_mask, batch, cache.length, length)
        cache.seen.require_same(shown)
        seen = cache.seen.then(ids, shown)
        if fed is not None:
            seen = replace(seen, shift=fed.shift)
        if self.layout.states:
            seen.require_left()
        extent.require_rows(seen.counts)
        if self._is_outdated(cache.seen, seen):
            if fed is not None:
                raise UsageError(
                    f"The model computes the keys of all tokens anew behind {cache.length}: give "
                    "all of them as one prompt, with their images."
                )
            extent.require_sizes(batch, total, 0)
            logits, grown = self._compute(seen.ids, self._emptied(cache), seen)
            return logits[:, -length:], grown
        return self._compute(ids, cache, seen, fed)

    def _compute(
        self,
        ids: torch.Tensor,
        cache: Cache,
        seen: Seen,
        fed: Fed | None = None,
    ) -> tuple[torch.Tensor, Cache]:
        """The logits of ids (B, S) behind a cache, and the cache of what is `seen` then."""
        parts = pieces(cache.length, seen.ids.shape[1], self.layout.piece)
        if len(parts) > 1:
            found = []
            for start, stop in parts:
                each, before = ids[:, : stop - start], seen.upto(stop)
                logits, cache = self._compute(each, cache, before)
                ids = ids[:, stop - start :]
                found.append(logits)
            return (torch.cat(found, 1) if self._gives_all else found[-1]), cache
        feeds = self._feeds(ids, seen.shown, cache.length, fed)
        if isinstance(cache, StaticCache):
            return self._write(feeds, cache, seen)
        kept = {**dict(zip(self.layout.pasts, cache.values, strict=True)), **cache.memory}
        fetched = (self.layout.logits,)
        results = self.session.step(feeds, kept, fetched, self.layout.presents)
        total, memory = seen.ids.shape[1], cache.memory
        grown = GrowingCache(results[1], cache.batch, total, self.owner, seen, memory)
        return results[0][0], grown

    @property
    def _gives_all(self) -> bool:
        """Whether the logits are those of all new tokens; of one token a call they are."""
        declared = self.session.output_shape(self.layout.logits)
        return declared[1] == self.session.input_shape(self.layout.ids)[1]

    def _is_outdated(self, before: Seen, after: Seen) -> bool:
        """Whether what a cache holds is to be computed anew, as the model does without a cache.

        Raises UsageError if every step from here on would need that.
        """
        if before.ids.shape[1] == 0:
            return False
        self.extent.require_steps(after.counts)
        spans = list(zip(before.counts, after.counts, strict=True))
        return any(low <= place < high for place in self.layout.switches for low, high in spans)

    def _emptied(self, cache: Cache) -> Cache:
        """A cache without a token, in the same buffers if there are any."""
        if isinstance(cache, StaticCache):
            return cache.slots.restart(cache)
        return self._empty(cache.batch, cache.memory)

    def _feeds(
        self,
        ids: torch.Tensor,
        shown: torch.Tensor | None,
        held: int,
        fed: Fed | None = None,
    ) -> dict[str, torch.Tensor]:
        """The inputs beside the cache, for new ids (B, S) behind `held` tokens."""
        layout, (batch, length) = self.layout, ids.shape
        given = {layout.ids: ids} if fed is None else fed.inputs
        feeds = {name: self._cast(name, each) for name, each in given.items()}
        if layout.mask is not None:
            mask = torch.ones(batch, held + length) if shown is None else shown
            feeds[layout.mask] = self._cast(layout.mask, mask if layout.past else mask[:, held:])
        elif shown is not None:
            raise UsageError("The model takes no mask, so no row can be padded.")
        if layout.positions is not None and layout.positions not in feeds:
            places = positions(shown, held, length)
            declared = self.session.input_shape(layout.positions)
            if len(declared) == 2 and declared[0] != 1:
                places = places.expand(batch, length)
            elif bool((places != places[0]).any()):
                raise UsageError(
                    "The model takes one row of positions, so its rows can't be padded differently."
                )
            else:
                places = places[:1] if len(declared) == 2 else places[0]
            feeds[layout.positions] = self._cast(layout.positions, places)
        return feeds

    @property
    def extent(self) -> Extent:
        """How many rows and tokens it takes."""
        seq = str(self.session.input_shape(self.layout.ids)[1])
        return Extent(self.layout, self.ranges, seq)

    @property
    def is_static(self) -> bool:
        return self.layout.max_length is not None

    def _write(
        self, feeds: dict[str, torch.Tensor], cache: StaticCache, seen: Seen
    ) -> tuple[torch.Tensor, StaticCache]:
        """A step in the buffers, of all rows at once where the operator takes them so."""
        slots, new = cache.slots, seen.ids.shape[1] - cache.length
        slots.rewind(cache)
        if self.layout.length is not None:
            feeds[self.layout.length] = torch.tensor([cache.length])
        feeds |= {**slots.memory, **cache.states}
        if by_row(cache.batch, new, cache.length):
            rows = range(cache.batch)
            axes = self._axes_of_rows
            each = [self._bound_steps(slots, r).step(row_of(feeds, r, axes)) for r in rows]
            results = [torch.cat(parts) for parts in zip(*each, strict=True)]
        else:
            results = self._bound_steps(slots, None).step(feeds)
        states = dict(zip(self.layout.replaced, results[1:], strict=True))
        return results[0], slots.grown(seen, states)

    def _bound_steps(self, slots: Slots, row: int | None) -> BoundSteps:
        if row not in slots.steps:
            layout = self.layout
            buffers = slots.buffers
            if row is not None:
                buffers = row_of(buffers, row, self._axes_of_rows)
            made = layout.replaced.values()
            slots.steps[row] = BoundSteps(
                self.session, buffers, layout.growing, [layout.logits], made
            )
        return slots.steps[row]

    @property
    def _axes_of_rows(self) -> dict[str, int]:
        shapes = {name: self.session.input_shape(name) for name in self.session.input_names}
        return axes_of_rows(shapes, self.layout.batch)

    def _cast(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.session.input_dtype(name))

    def _empty(self, batch: int, memory: Mapping[str, torch.Tensor | OrtValue]) -> Cache:
        layout = self.layout
        if layout.max_length is not None:
            sizes = {layout.batch: batch, CAPACITY: layout.max_length}
            buffers = {name: self.session.zeros(name, sizes) for name in layout.growing}
            states = {name: self.session.zeros(name, sizes) for name in layout.states}
            return Slots(buffers, batch, self.owner, self._tensors(memory), states).start()
        sizes = {self.layout.batch: batch, self.layout.past: 0}
        values = tuple(self.session.empty(name, sizes) for name in layout.pasts)
        kept = {
            name: to_ort(self._cast(name, each)) if isinstance(each, torch.Tensor) else each
            for name, each in memory.items()
        }
        return GrowingCache(values, batch, 0, self.owner, Seen.nothing(batch), kept)

    def _tensors(self, memory: Mapping[str, torch.Tensor | OrtValue]) -> dict[str, torch.Tensor]:
        dtypes = {name: self.session.input_dtype(name) for name in memory}
        return {
            name: each if isinstance(each, torch.Tensor) else to_torch(each, dtypes[name])
            for name, each in memory.items()
        }

    def generate(
        self,
        ids: torch.Tensor,
        max_new_tokens: int,
        attention_mask: torch.Tensor | None = None,
        *,
        cache: Cache | None = None,
        rules: Rules | None = None,
        **how: Unpack[SamplingKeywords],
    ) -> torch.Tensor:
        """The prompt ids (B, S) with up to `max_new_tokens` more, as `transformers`' generate.

        Takes what `stream` takes, and raises as that does.
        """
        stream = self.stream(ids, max_new_tokens, attention_mask, cache=cache, rules=rules, **how)
        return stream.finished().to(ids.device)

    def stream(
        self,
        ids: torch.Tensor,
        max_new_tokens: int,
        attention_mask: torch.Tensor | None = None,
        *,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        cache: Cache | None = None,
        rules: Rules | None = None,
        step: Step | None = None,
    ) -> TokenStream:
        """The tokens of `generate`, each (B,) as soon as it is drawn.

        Greedy at temperature 0, else drawn (see `Sampling`). Rows of different lengths are padded
        on the left, where `attention_mask` (B, S) is 0. A row that has given `eos_token_id` goes on
        with `pad_token_id` (by default that token); when all have, it ends early. With a `cache` of
        how ids begin, such as that of a `stream` before, only the rest is computed. `rules` say
        which tokens are forced, or not to be chosen, and which end and fill a row where that isn't
        said; by default they are the decoder's own. No token ends a row with an empty list. `step`
        is called in the place of this decoder, where more than ids is given to it.

        Raises UsageError, before the first token, for what a step or `Sampling` doesn't take, for
        rows padded on the right, whose last position is no token, where a static cache has no room
        for the prompt and what may follow, and for a cache of other ids.
        """
        sampling = Sampling(temperature, top_k, top_p, seed)
        count, known = whole("max_new_tokens", max_new_tokens, 0), self.layout.vocabulary
        prompt = token_ids(ids, known)
        batch, length = prompt.shape
        held = 0 if cache is None else begun(owned(cache, self.owner, batch), prompt)
        shown = shown_tokens(attention_mask, batch, 0, length)
        if shown is not None and not bool(shown[:, -1].all()):
            row = int((~shown[:, -1]).nonzero()[0])
            raise UsageError(
                f"Row {row} of attention_mask ends in padding; pad on the left, so that the last "
                "position of each row is a token."
            )
        if cache is not None:
            cache.seen.require_same(shown)
        extent, more = self.extent, max(count - 1, 0)  # the last token is not fed
        extent.require_room(length + more)
        total, places = Seen.nothing(batch).then(prompt, shown).counts
        extent.require_rows((total + more, places + more))
        if more:
            extent.require_steps((total + more, places + more))
        if count:
            extent.require_sizes(batch, length - held, held)
        ahead = range(length, length + more)  # an end token may come long before the last of them
        for past in (*ahead[:_AHEAD], *ahead[_AHEAD:][-1:]):
            extent.require_sizes(batch, 1, past)
        rules = (self.rules if rules is None else rules).known(known)
        ends = list(rules.eos_token_id)
        if eos_token_id is not None:
            ends = end_tokens(eos_token_id, known)
        filler = ends[0] if ends else 0
        if pad_token_id is not None:
            filler = token_id("pad_token_id", pad_token_id, known)
        elif rules.pad_token_id is not None:
            filler = rules.pad_token_id
        taken = self if step is None else step
        return TokenStream(prompt, shown, cache, taken, count, sampling, rules, ends, filler)
