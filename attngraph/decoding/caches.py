"""The keys and values that a decoder keeps: a cache that grows, or one in buffers.

Either may hold a `memory` beside them: inputs that stay the same in all steps, by name.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from attngraph.decoding.tokens import Seen
from attngraph.errors import UsageError
from attngraph.export.runtime.bound_steps import BoundSteps
from attngraph.export.runtime.session import OrtValue


@dataclass(frozen=True)
class GrowingCache:
    """Keys and values of the tokens so far, where the provider computes; a step leaves it as is."""

    values: tuple[OrtValue, ...]
    batch: int
    length: int
    owner: object
    seen: Seen
    memory: Mapping[str, OrtValue] = field(default_factory=dict)


@dataclass(frozen=True)
class StaticCache:
    """The first `length` tokens of buffers, which a step writes behind and doesn't copy.

    So a step uses up what it was given: from one cache, go on once. An earlier cache may be used
    again: that drops the tokens behind it, and every cache that holds those is refused from then
    on. `states` have one size, and are the cache's own: a step makes new ones.
    """

    slots: Slots
    batch: int
    length: int
    mark: int
    seen: Seen
    states: Mapping[str, torch.Tensor]

    @property
    def owner(self) -> object:
        """The decoder that made it."""
        return self.slots.owner


@dataclass
class Slots:
    """The buffers (B, G, max_length, D) of one batch, by input, and the caches that are valid.

    `states` are those before the first token. `marks` are those of caches of growing length, the
    last one of all tokens written.
    """

    buffers: Mapping[str, torch.Tensor]
    batch: int
    owner: object
    memory: Mapping[str, torch.Tensor] = field(default_factory=dict)
    states: Mapping[str, torch.Tensor] = field(default_factory=dict)
    marks: list[int] = field(default_factory=list)
    steps: dict[int | None, BoundSteps] = field(default_factory=dict)
    _count: itertools.count[int] = field(default_factory=itertools.count)

    def start(self) -> StaticCache:
        """The cache without a token."""
        return self._marked(Seen.nothing(self.batch), self.states)

    def restart(self, cache: StaticCache) -> StaticCache:
        """The empty cache, in which to compute a cache's content anew. Raises as `rewind` does."""
        self.rewind(cache)
        self.marks.clear()
        return self.start()

    def rewind(self, cache: StaticCache) -> None:
        """Drops what was written behind a cache. Raises UsageError if the cache was overwritten."""
        if cache.mark not in self.marks:
            raise UsageError(
                f"This cache of {cache.length} tokens was overwritten: a static cache holds one "
                "sequence. Go on from the last cache, or compile with a growing one."
            )
        del self.marks[self.marks.index(cache.mark) + 1 :]

    def grown(self, seen: Seen, states: Mapping[str, torch.Tensor]) -> StaticCache:
        """The cache of these tokens, of which a step has written the last."""
        return self._marked(seen, states)

    def _marked(self, seen: Seen, states: Mapping[str, torch.Tensor]) -> StaticCache:
        mark = next(self._count)
        self.marks.append(mark)
        return StaticCache(self, self.batch, seen.ids.shape[1], mark, seen, states)


Cache = GrowingCache | StaticCache


def owned(cache: Any, owner: object, batch: int) -> Cache:
    """A cache that is this owner's, of as many rows. Raises UsageError."""
    if not isinstance(cache, Cache):
        raise UsageError(
            f"cache is a {type(cache).__name__}; it must be one that this decoder returned."
        )
    if cache.owner is not owner:
        raise UsageError("This cache is that of another decoder.")
    if cache.batch != batch:
        raise UsageError(f"ids has {batch} rows, and the cache {cache.batch}.")
    return cache


def begun(cache: Cache, prompt: torch.Tensor) -> int:
    """How many tokens of a prompt a cache holds. Raises UsageError where they are others, or all of
    them."""
    held = cache.length
    if held >= prompt.shape[1]:
        raise UsageError(
            f"The cache holds {held} tokens and ids has {prompt.shape[1]}: give the ids that "
            "it holds with more behind them."
        )
    if not torch.equal(cache.seen.ids, prompt[:, :held].to(cache.seen.ids.dtype)):
        raise UsageError(
            "ids don't begin with the tokens that the cache holds: give those, with more "
            "behind them, or leave out the cache."
        )
    return held
