"""How many rows and tokens a decoder takes, and the sentence for more."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from attngraph.decoding.tokens import pieces
from attngraph.errors import UsageError
from attngraph.frontend.families.cache import Layout
from attngraph.ir.ranges import Ranges


@dataclass(frozen=True, slots=True)
class Extent:
    """What the layout of a cache and the ranges of a model's dims leave; `seq` is the dim of the
    new tokens.
    """

    layout: Layout
    ranges: Ranges
    seq: str

    def takes(self, batch: int, prompt: int, total: int) -> bool:
        """Whether the model takes rows of a prompt and of steps up to a total of tokens."""
        steps = [(prompt, 0), *((1, past) for past in range(prompt, total))]
        return not any(self._broken(batch, new, past) for new, past in steps)

    def longest(self, most: int) -> int:
        """How many tokens, at most `most`, a row may have: one after the other, from one prompt or
        from several, and with what the cache holds of each unchanged.
        """
        layout = self.layout
        known = (layout.max_length, layout.last, layout.most, layout.most_positions)
        most = min([most, *layout.switches[:1], *(limit for limit in known if limit is not None)])

        def fits(total: int) -> bool:
            return not any(self._broken(1, new, total - new) for new in {1, total})

        return bisect.bisect_left(range(1, most + 1), True, key=lambda total: not fits(total))

    def require_room(self, total: int) -> None:
        room = self.layout.max_length
        if room is not None and total > room:
            raise UsageError(
                f"The static cache has room for {room} tokens, and {total} would be in it: compile "
                "with a larger max_length, or with a growing cache."
            )

    def require_rows(self, counts: tuple[int, int]) -> None:
        """Raises UsageError where the model's tables have no row for a token."""
        limits = (self.layout.most, self.layout.most_positions)
        for most, count, what in zip(limits, counts, ("tokens", "positions"), strict=True):
            if most is not None and count > most:
                raise UsageError(
                    f"The model's tables have rows for {most} {what}, and there would be {count}: "
                    "shorten the prompt, or ask for fewer tokens."
                )

    def require_steps(self, counts: tuple[int, int]) -> None:
        last, total = self.layout.last, max(counts)
        if last is not None and total > last:
            raise UsageError(
                f"The model computes the keys of all tokens anew at each length behind {last}, so "
                f"no cache can go on to {total} tokens: give all of them as one prompt."
            )

    def require_sizes(self, batch: int, new: int, past: int) -> None:
        if broken := self._broken(batch, new, past):
            raise UsageError(
                f"The decoder was compiled for sizes with {broken}, and these are {batch} rows of "
                f"{new} new tokens after {past}: beyond that the model's own code takes another "
                "branch, or the range that was asked for ends."
            )

    def _broken(self, batch: int, new: int, past: int) -> str:
        """Which range of the model's dims a step breaks; empty if it breaks none."""
        layout = self.layout
        calls = pieces(past, past + new, layout.piece)
        sizes = ({layout.batch: batch, self.seq: b - a, layout.past: a} for a, b in calls)
        return next((broken for each in sizes if (broken := self.ranges.broken(each))), "")
