"""A compiled decoder: one ONNX graph for the prompt and for every token after it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from attngraph.caches import Cache, GrowingCache, Slots, StaticCache
from attngraph.errors import UsageError
from attngraph.export.buffers import CAPACITY, by_row, row_of
from attngraph.export.in_place import InPlace
from attngraph.export.session import Session
from attngraph.export.target import parse_target
from attngraph.frontend.cache import METADATA_KEY, Layout
from attngraph.optimized import Optimized
from attngraph.report import Report
from attngraph.sampling import Sampling


class Decoder:
    """A causal language model in onnxruntime. Its cache stays on the device between steps.

    A growing cache is new tensors after each step, and the one before is left as it is. A static
    cache is buffers of `max_length` tokens that are made once; a step writes into them, and so uses
    up the cache that it was given (see `StaticCache`).

    `optimized` is the compiled model, None for a decoder that was loaded from a file. `session` is
    by default that of the compiled model, opened on first use.
    """

    def __init__(
        self, session: Session | None, layout: Layout, optimized: Optimized | None = None
    ) -> None:
        self._session = session
        self.layout = layout
        self.optimized = optimized

    @classmethod
    def of(cls, optimized: Optimized, layout: Layout) -> Decoder:
        """From a compiled model, whose file will then say what its inputs are."""
        optimized.model.metadata_props[METADATA_KEY] = layout.to_json()
        return cls(None, layout, optimized)

    @classmethod
    def load(cls, path: str | Path, target: str = "cpu", **options: Any) -> Decoder:
        """A decoder that `save` wrote; `options` are those of `Session.open`.

        Raises LoadError where the file isn't one, ProviderError where the target can't be used.
        """
        session = Session.open(Path(path), parse_target(target), **options)
        return cls(session, Layout.from_json(session.metadata.get(METADATA_KEY), str(path)))

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

    @property
    def _compiled(self) -> Optimized:
        if self.optimized is None:
            raise UsageError("This decoder was loaded from a file, which holds no more than it.")
        return self.optimized

    def __call__(
        self,
        ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
    ) -> tuple[torch.Tensor, Cache]:
        """Logits of ids (B, S) that follow a cache of P tokens, and the cache with them in it.

        `attention_mask` (B, P + S) is 0 where there is padding; without it there is none. The
        logits are (B, S, V), or those of the last position (B, 1, V) where the model was compiled
        so. Raises UsageError for shapes that don't fit, and before anything is computed where a
        static cache has no room for the tokens or was written over.
        """
        layout = self.layout
        if ids.ndim != 2 or ids.shape[1] == 0:
            raise UsageError(f"ids has shape {tuple(ids.shape)}; it must be (batch, length).")
        batch, length = ids.shape
        cache = cache or self._empty(batch)
        if cache.batch != batch:
            raise UsageError(f"ids has {batch} rows, and the cache {cache.batch}.")
        if isinstance(cache, StaticCache) is not self.is_static:
            raise UsageError("This cache is that of another decoder.")
        total = cache.length + length
        self._require_room(total)
        if attention_mask is not None and tuple(attention_mask.shape) != (batch, total):
            raise UsageError(
                f"attention_mask has shape {tuple(attention_mask.shape)}; for {cache.length} "
                f"tokens in the cache and {length} new ones it must be {(batch, total)}."
            )
        feeds = {layout.ids: self._cast(layout.ids, ids)}
        if layout.mask is not None:
            mask = torch.ones(batch, total) if attention_mask is None else attention_mask
            feeds[layout.mask] = self._cast(layout.mask, mask)
        elif attention_mask is not None and not bool(attention_mask.all()):
            raise UsageError("The model takes no mask, so no row can be padded.")
        if layout.positions is not None:
            places = _positions(attention_mask, cache.length, length)
            if len(self.session.input_shape(layout.positions)) == 2:
                places = places.expand(batch, length)
            elif len(places) > 1:
                raise UsageError("The model takes one row of positions, so no row can be padded.")
            else:
                places = places[0]
            feeds[layout.positions] = self._cast(layout.positions, places)
        if isinstance(cache, StaticCache):
            return self._write(feeds, cache, length)
        pasts = dict(zip(layout.pasts, cache.values, strict=True))
        results = self.session.step(feeds, pasts, (layout.logits,), layout.presents)
        return results[0][0], GrowingCache(results[1], batch, total)

    @property
    def is_static(self) -> bool:
        return self.layout.max_length is not None

    def _require_room(self, total: int) -> None:
        room = self.layout.max_length
        if room is not None and total > room:
            raise UsageError(
                f"The static cache has room for {room} tokens, and {total} would be in it: compile "
                "with a larger max_length, or with a growing cache."
            )

    def _write(
        self, feeds: dict[str, torch.Tensor], cache: StaticCache, new: int
    ) -> tuple[torch.Tensor, StaticCache]:
        """A step in the buffers, of all rows at once where the operator takes them so."""
        assert self.layout.length is not None
        slots = cache.slots
        slots.rewind(cache)
        feeds[self.layout.length] = torch.tensor([cache.length])
        if by_row(cache.batch, new, cache.length):
            rows = range(cache.batch)
            logits = torch.cat([self._in_place(slots, r).step(row_of(feeds, r)) for r in rows])
        else:
            logits = self._in_place(slots, None).step(feeds)
        return logits, slots.grown(cache, new)

    def _in_place(self, slots: Slots, row: int | None) -> InPlace:
        if row not in slots.steps:
            layout = self.layout
            buffers = slots.buffers if row is None else row_of(slots.buffers, row)
            presents = dict(zip(layout.pasts, layout.presents, strict=True))
            slots.steps[row] = InPlace(self.session, buffers, presents, layout.logits)
        return slots.steps[row]

    def _cast(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.session.input_dtype(name))

    def _empty(self, batch: int) -> Cache:
        layout = self.layout
        if layout.max_length is not None:
            sizes = {layout.batch: batch, CAPACITY: layout.max_length}
            buffers = {name: self.session.zeros(name, sizes) for name in layout.pasts}
            return Slots(buffers, batch).start()
        sizes = {self.layout.batch: batch, self.layout.past: 0}
        values = tuple(self.session.empty(name, sizes) for name in self.layout.pasts)
        return GrowingCache(values, batch, 0)

    def generate(
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
    ) -> torch.Tensor:
        """The prompt ids (B, S) with up to `max_new_tokens` more, as `transformers`' generate.

        Greedy at temperature 0, else drawn (see `Sampling`). Rows of different lengths are padded
        on the left, where `attention_mask` (B, S) is 0. A row that has given `eos_token_id` goes on
        with `pad_token_id` (by default that token); when all have, it ends early.

        Raises UsageError for rows padded on the right, whose last position is no token, and where a
        static cache has no room for the prompt and what may follow.
        """
        sampling = Sampling(temperature, top_k, top_p, seed)
        if ids.ndim != 2:
            raise UsageError(f"ids has shape {tuple(ids.shape)}; it must be (batch, length).")
        if attention_mask is not None and not bool(attention_mask[:, -1].all()):
            row = int((attention_mask[:, -1] == 0).nonzero()[0])
            raise UsageError(
                f"Row {row} of attention_mask ends in padding; pad on the left, so that the last "
                "position of each row is a token."
            )
        batch, length = ids.shape
        self._require_room(length + max_new_tokens - 1)
        ends = torch.tensor([] if eos_token_id is None else eos_token_id, dtype=ids.dtype).reshape(
            -1
        )
        filler = int(ends[0]) if pad_token_id is None and len(ends) else (pad_token_id or 0)
        mask = attention_mask
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(batch, max_new_tokens)], 1)
        random, done = sampling.generator(), torch.zeros(batch, dtype=torch.bool)
        whole, new, cache = [ids], ids, None
        for total in range(length, length + max_new_tokens):
            logits, cache = self(new, None if mask is None else mask[:, :total], cache)
            token = sampling.choose(logits[:, -1].cpu(), random).to(ids.dtype)
            token = torch.where(done, filler, token)
            new = token[:, None]
            whole.append(new)
            done |= torch.isin(token, ends)
            if bool(done.all()):
                break
        return torch.cat(whole, 1)


def _positions(mask: torch.Tensor | None, past: int, length: int) -> torch.Tensor:
    """(1 | B, S): how many tokens come before each."""
    if mask is None:
        return torch.arange(past, past + length)[None]
    return (mask.long().cumsum(-1) - 1).clamp_min(0)[:, -length:]
