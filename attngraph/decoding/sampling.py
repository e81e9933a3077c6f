"""The next token from logits: the likeliest, or drawn at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch

from attngraph.errors import UsageError
from attngraph.numeric import real, whole


class SamplingKeywords(TypedDict, total=False):
    """How `generate` chooses tokens and ends rows: the keywords that `Decoder.stream` explains."""

    eos_token_id: int | Sequence[int] | None
    pad_token_id: int | None
    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int | None


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; a `temperature` of 0 takes the likeliest.

    `top_k` keeps the k likeliest tokens, `top_p` the fewest whose probabilities reach p (Holtzman
    et al. 2020); both after the temperature, as transformers does. Raises UsageError for values
    that leave nothing to draw from, or are no numbers.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if (temperature := real("temperature", self.temperature)) < 0:
            raise UsageError(f"temperature is {temperature:g}; it must be 0 or more.")
        if self.top_k is not None:
            whole("top_k", self.top_k, 1)
        if self.top_p is not None and not 0 < (share := real("top_p", self.top_p)) <= 1:
            raise UsageError(f"top_p is {share:g}; it must be above 0 and at most 1.")
        if self.seed is not None:
            whole("seed", self.seed, -(1 << 63), (1 << 64) - 1)

    def generator(self) -> torch.Generator:
        """The source of randomness of one `generate`; the same seed gives the same tokens."""
        source = torch.Generator()
        if self.seed is None:
            source.seed()
        else:
            source.manual_seed(int(self.seed))
        return source

    def choose(self, logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """(B,) token ids for logits (B, V). Raises UsageError where they are NaN, or all −∞."""
        likeliest = logits.argmax(-1, keepdim=True)
        # argmax takes a NaN for the largest number, and −∞ only where there is nothing else
        largest = logits.gather(-1, likeliest)
        lost = (largest.isnan() | (largest == -torch.inf)).squeeze(-1)
        if bool(lost.any()):
            row = int(lost.nonzero()[0])
            raise UsageError(
                f"No token can be chosen for row {row}: the model's logits are NaN or all -inf."
            )
        if self.temperature == 0:
            return likeliest.squeeze(-1)
        # the largest becomes 0, so that no temperature, however small, gives inf - inf
        logits = (logits.double() - largest.double()).nan_to_num(0.0, 0.0, -torch.inf)
        logits = logits / float(self.temperature)
        if self.top_k is not None:
            least = logits.topk(min(int(self.top_k), logits.shape[-1]), -1).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        probabilities = logits.float().softmax(-1)
        if self.top_p is not None:
            ordered, places = probabilities.sort(-1, descending=True)
            before = ordered.double().cumsum(-1) - ordered  # the least p is no 0 there
            dropped = torch.zeros_like(before, dtype=torch.bool)
            dropped.scatter_(-1, places, before >= float(self.top_p))
            probabilities = probabilities.masked_fill(dropped, 0.0)
        return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)
