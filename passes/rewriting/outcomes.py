"""What a comparison of two forms came to, and how many of each a pass met."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Equal:
    """The new form gave the old one's values in every trial that the old one could run."""


@dataclass(frozen=True, slots=True)
class Different:
    """In some trial the new form gave other values, or none."""

    reason: str


@dataclass(frozen=True, slots=True)
class NotEvaluated:
    """No trial could tell. A rewrite stands on this only beside a proof for all sizes."""

    reason: str


class Unreached(NotEvaluated):
    """Equal in every trial, none of which has seen both sides of some condition."""


Outcome: TypeAlias = Equal | Different | NotEvaluated


@dataclass(slots=True)
class Tally:
    """Rewrites of one pass: made `by_proof`, made `by_evaluation`, and left out because their two
    forms were `different` or `not_evaluated`.
    """

    by_proof: int = 0
    by_evaluation: int = 0
    different: int = 0
    not_evaluated: int = 0

    @property
    def left_out(self) -> int:
        """The rewrites that were not made."""
        return self.different + self.not_evaluated

    def to_dict(self) -> dict[str, int]:
        """The four counts by name."""
        return asdict(self)

    def count(self, outcome: Outcome, *, proved: bool = False) -> None:
        """Counts one rewrite. One that was `proved` stands unless evaluation contradicts it."""
        if isinstance(outcome, Different):
            self.different += 1
        elif isinstance(outcome, Equal):
            self.by_evaluation += 1
        elif proved:
            self.by_proof += 1
        else:
            self.not_evaluated += 1

    def add(self, other: Tally) -> None:
        """Takes the counts of another tally in, as of a loop's body."""
        self.by_proof += other.by_proof
        self.by_evaluation += other.by_evaluation
        self.different += other.different
        self.not_evaluated += other.not_evaluated
