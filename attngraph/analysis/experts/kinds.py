"""What the elements of a value are to a mixture of experts, and of what adds, multiplies or gathers
such values; uniform.py says why.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias


class Kind(Enum):
    """What the elements of a value are, if not floats of rows."""

    FIXED = auto()  # the same at any number of rows
    SIZED = auto()  # of sizes
    CHOSEN = auto()  # numbers of experts
    MATCH = auto()  # a function of one of these
    PLACE = auto()  # of rows, or of choices
    COUNT = auto()  # of rows


@dataclass(frozen=True, slots=True)
class Rows:
    """Floats: sums of products, each with so many factors that are weights, matches, and numbers of
    rows, which are those of x and what experts give.
    """

    weights: int = 0
    matches: int = 0
    features: int = 0


What: TypeAlias = Kind | Rows


class SwitchError(Exception):
    """An operator that isn't known to do the same to all values of this kind."""


def require(holds: bool) -> None:
    if not holds:
        raise SwitchError


def summed(given: Iterable[What]) -> What:
    """Elements of any of these, or sums of them."""
    kinds = [*given]
    rows = [kind for kind in kinds if isinstance(kind, Rows)]
    others = {kind for kind in kinds if isinstance(kind, Kind)} - {Kind.FIXED}
    if rows:
        require(others <= {Kind.MATCH})
        matches = max(kind.matches for kind in rows)
        return Rows(
            max(kind.weights for kind in rows),
            max(matches, len(others)),
            max(kind.features for kind in rows),
        )
    if not others:
        return Kind.FIXED
    if others <= {Kind.PLACE, Kind.COUNT}:
        return Kind.COUNT if Kind.COUNT in others else Kind.PLACE
    require(len(others) == 1)
    (kind,) = others
    require(kind is not Kind.CHOSEN or Kind.FIXED not in kinds)
    return kind


def multiplied(given: Iterable[What]) -> What:
    kinds = [kind for kind in given if kind is not Kind.FIXED]
    if kinds == [Kind.MATCH]:
        return Kind.MATCH
    if not kinds:
        return Kind.FIXED
    require(all(isinstance(kind, Rows) or kind is Kind.MATCH for kind in kinds))
    rows = [Rows(matches=1) if kind is Kind.MATCH else kind for kind in kinds]
    made = Rows(
        sum(kind.weights for kind in rows if isinstance(kind, Rows)),
        sum(kind.matches for kind in rows if isinstance(kind, Rows)),
        sum(kind.features for kind in rows if isinstance(kind, Rows)),
    )
    require(made.weights <= 1 and made.matches <= 1 and made.features <= 1)
    require(any(isinstance(kind, Rows) for kind in kinds))
    return made


def gathered(source: What, indices: list[What]) -> What:
    """Elements of the source at places."""
    require(all(isinstance(kind, Kind) and kind is not Kind.SIZED for kind in indices))
    if source is Kind.FIXED:
        require({*indices} <= {Kind.CHOSEN, Kind.FIXED})
        return Kind.MATCH
    if isinstance(source, Rows) and Kind.CHOSEN in indices:
        return multiplied([source, Kind.MATCH])
    return source
