"""Tokens of a decoder one after the other, as they are drawn."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from attngraph.decoding.caches import Cache
from attngraph.decoding.rules import Rules
from attngraph.decoding.sampling import Sampling

Step = Callable[[torch.Tensor, "torch.Tensor | None", "Cache | None"], "tuple[torch.Tensor, Cache]"]
"""New ids (B, S), the mask (B, P + S) and the cache of P tokens to logits and the cache behind."""


@dataclass
class TokenStream(Iterator[torch.Tensor]):
    """The next token of each row, (B,), with each `next`; nothing is computed before.

    `ids` (B, T) are the prompt and the tokens so far, and `attention_mask` is their mask, None
    where no row is padded. `cache` holds all of them but the last: with more ids behind them, both
    go on in another call. It ends after `count` tokens, or when each row has given one of the
    `ends`; a row that has goes on with `filler`.
    """

    ids: torch.Tensor
    attention_mask: torch.Tensor | None
    cache: Cache | None
    step: Step
    count: int
    sampling: Sampling
    rules: Rules
    ends: Sequence[int]
    filler: int
    _drawn: int = field(init=False, default=0)
    _random: torch.Generator = field(init=False)
    _done: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._random = self.sampling.generator()
        self._done = torch.zeros(len(self.ids), dtype=torch.bool)

    def finished(self) -> torch.Tensor:
        """The prompt and all tokens (B, T). Raises as a step of the decoder does."""
        collections.deque(self, maxlen=0)
        return self.ids

    def __next__(self) -> torch.Tensor:
        """Raises as a step of the decoder does."""
        if self._drawn == self.count or bool(self._done.all()):
            raise StopIteration
        held = 0 if self.cache is None else self.cache.length
        logits, self.cache = self.step(self.ids[:, held:], self.attention_mask, self.cache)
        last, ends = logits[:, -1].cpu(), list(self.ends)
        scores = self.rules.applied(last, self.ids, self._drawn, self.count, ends)
        drawn = self.sampling.choose(scores, self._random).to(self.ids.dtype)
        token = torch.where(self._done, self.filler, drawn)
        self._done |= torch.isin(token, torch.tensor(self.ends, dtype=token.dtype))
        self.ids = torch.cat([self.ids, token[:, None]], 1)
        if self.attention_mask is not None:
            one = torch.ones(len(token), 1, dtype=torch.bool)
            self.attention_mask = torch.cat([self.attention_mask, one], 1)
        self._drawn += 1
        return token
