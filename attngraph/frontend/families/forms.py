"""The forms in which a model that keeps states computes tokens, and how far each is off."""

from __future__ import annotations

from dataclasses import dataclass

from attngraph.frontend.families.looped import Mixer


@dataclass(frozen=True)
class Error:
    """Of logits from a cache, relative to the largest: of rows alone, and of rows whose first
    tokens are hidden, both compared with the rows alone and without a cache. `failure` says what
    rows alone got in place of such logits."""

    alone: float
    padded: float
    failure: str = ""


@dataclass(frozen=True)
class Forms:
    """How far the forms of a model are from its logits without a cache.

    `pieces` is that of several tokens behind others, `steps` that of one at a time. `is_chunked`: a
    prompt is computed in a loop over its tokens, or over chunks that it is padded to, of `chunk`
    tokens where these are found. Where that or `pieces` leaves no graph of several tokens, `loops`
    is the error with `mixers` run token by token, None where these aren't found.
    """

    pieces: Error
    steps: Error
    tolerance: float
    is_chunked: bool
    loops: Error | None = None
    mixers: tuple[Mixer, ...] = ()
    chunk: int | None = None

    @property
    def takes_several(self) -> bool:
        """Whether any form computes several tokens behind others as the model without a cache."""
        if self.loops is not None:
            return self.loops.alone <= self.tolerance
        return self.pieces.alone <= self.tolerance and not (self.is_chunked and self.goes_on)

    @property
    def goes_on(self) -> bool:
        """Whether one token a call gives what the model computes without a cache."""
        return self.steps.alone <= self.tolerance

    @property
    def sampled(self) -> int:
        """How many tokens a trace takes at least: two chunks and a part, where it has chunks."""
        in_chunks = self.loops is None and self.is_chunked and self.takes_several
        return 5 * (self.chunk or 0) // 2 if in_chunks else 0


NOT_TRIED = Forms(Error(0.0, 0.0), Error(0.0, 0.0), 0.0, False)
