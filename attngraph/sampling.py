"""The next token from logits: the likeliest, or drawn at random."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attngraph.errors import UsageError


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; a `temperature` of 0 takes the likeliest.

    `top_k` keeps the k likeliest tokens, `top_p` the fewest whose probabilities reach p (Holtzman
    et al. 2020); both after the temperature, as transformers does. Raises UsageError for values
    that leave nothing to draw from.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise UsageError(f"The temperature is {self.temperature:g}; it can be 0 or more.")
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"top_k is {self.top_k}; it must be at least 1.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UsageError(f"top_p is {self.top_p:g}; it must be above 0 and at most 1.")

    def generator(self) -> torch.Generator:
        """The source of randomness of one `generate`; the same seed gives the same tokens."""
        source = torch.Generator()
        if self.seed is None:
            source.seed()
        else:
            source.manual_seed(self.seed)
        return source

    def choose(self, logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """(B,) token ids for logits (B, V)."""
        if self.temperature == 0:
            return logits.argmax(-1)
        logits = logits.float() / self.temperature
        if self.top_k is not None:
            least = logits.topk(min(self.top_k, logits.shape[-1]), -1).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        probabilities = logits.softmax(-1)
        if self.top_p is not None:
            ordered, places = probabilities.sort(-1, descending=True)
            before = ordered.cumsum(-1) - ordered
            dropped = torch.zeros_like(before, dtype=torch.bool)
            dropped.scatter_(-1, places, before >= self.top_p)
            probabilities = probabilities.masked_fill(dropped, 0.0)
        return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)
