"""What a formula gives for a row of weights when masks hide some or all of its keys.

A softmax is written in many ways, which agree while every key is visible and part where none is:
the mean of the values, their sum, zero, NaN. Which one it is depends on the formula, on the number
that hides a key, and on the dtype: exp underflows, a log of the number of keys vanishes beside a
large fill, two fills overflow together. Nothing of it is listed here. A formula is evaluated, in
its dtype, on rows of every kind that the masks can make (fills.py), next to what is to take its
place. The weights of a row are a function of its logits alone, and one hidden key is like another,
so rows of every kind are all there are, as long as logits stay away from the fills.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

WEAKEST_FILL = -9e3
"""Below it a finite fill is a mask: the logits of a trained model don't reach it."""
ABSORBING_FILL = -1e20
"""float32 adds any logit or bias to it without changing it."""

_LOGITS = (0.25, -1.75, 2.5, 1.0, -0.5, 3.25)
_KINDS = 3  # in one row: what hides most, what hides less, and what is visible
_MOST_ROWS = 1 << 14
_TOLERANCE = 1e-2
"""How far weights may part, relative: x - logsumexp(x) rounds by eps · |fill|."""


@dataclass(frozen=True, slots=True)
class Formula:
    """A softmax as it is written: exp(x − shift) over the sum of these.

    `shift` is "" for none, "maximum" for that of the row, or "positive" for that or 0, whichever
    is larger. `total` is how the sum enters: "" as it is, "quotient" as exp(logsumexp x),
    "exponent" as exp(x − logsumexp x), "summed" as exp(x − log Σ exp x). `addend` is one more logit
    in the sum, which is 0. `normalised` says that the exponentials are a softmax already.
    """

    shift: str = ""
    total: str = ""
    addend: bool = False
    normalised: bool = False

    def weights(self, x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """The weights of rows of logits (R, T); `kept` is 0 where exponentials are zeroed."""
        shift = torch.zeros_like(x[..., :1])
        if self.shift:
            shift = x.amax(-1, keepdim=True)
        if self.shift == "positive":
            shift = shift.clamp_min(0)
        y = x - shift
        terms = (torch.softmax(x, -1) if self.normalised else y.exp()) * kept
        match self.total:
            case "exponent":
                return (x - x.logsumexp(-1, keepdim=True)).exp()
            case "summed":
                return (y - terms.sum(-1, keepdim=True).log()).exp()
            case "quotient":
                return terms / (x.logsumexp(-1, keepdim=True) - shift).exp()
        total = terms.sum(-1, keepdim=True)
        return terms / (total + (-shift).exp() if self.addend else total)

    def raised(self, x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """The weights of the op that takes its place: a softmax, or one with the sink 0."""
        x = x.masked_fill(kept == 0, -math.inf)
        if not self.addend:
            return torch.softmax(x, -1)
        return torch.softmax(torch.nn.functional.pad(x, (0, 1)), -1)[..., :-1]

    @property
    def may_overflow(self) -> bool:
        """Whether it takes exponentials of logits as they are, which above 88 are infinite."""
        return not self.shift and not self.normalised and self.total != "exponent"


SOFTMAX = Formula(shift="maximum")


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of keys (R, T): of one kind, of two or of three.

    A kind of key is a combination of what masks say of it: `atoms` tell where each predicate
    holds, and `unknown` hold a number for each bias of which nothing is known.
    """

    logits: torch.Tensor
    atoms: tuple[torch.Tensor, ...]
    unknown: tuple[torch.Tensor, ...]
    is_wide: bool = False

    def wide(self) -> Rows:
        """The same numbers in float64, whatever dtypes a graph has."""
        unknown = tuple(each.double() for each in self.unknown)
        return Rows(self.logits.double(), self.atoms, unknown, is_wide=True)


def rows(atoms: int, unknown: int, dtype: torch.dtype) -> Rows | None:
    """Rows of every kind, for so many predicates and biases; None where they are too many."""
    lowest = torch.finfo(dtype).min
    numbers = (0.0, max(-1e4, lowest), max(-1e9, lowest), lowest, -math.inf)
    count_of_kinds = 2**atoms * len(numbers) ** unknown
    if sum(math.comb(count_of_kinds, count) for count in range(1, _KINDS + 1)) > _MOST_ROWS:
        return None
    kinds = list(itertools.product(*[(True, False)] * atoms, *[numbers] * unknown))
    found: list[Sequence[tuple[float, ...]]] = []
    for count in range(1, _KINDS + 1):
        found += itertools.combinations(kinds, count)
    width = len(_LOGITS)
    # Each kind of a row has several keys whose logits differ: that tells a mean from a softmax.
    keys = [[row[place * len(row) // width] for place in range(width)] for row in found]
    table = torch.tensor(keys, dtype=torch.float64).reshape(len(keys), width, atoms + unknown)
    columns = table.unbind(-1)
    logits = torch.tensor(_LOGITS, dtype=dtype).expand(len(keys), width)
    return Rows(
        logits,
        tuple(column.bool() for column in columns[:atoms]),
        tuple(column.to(dtype) for column in columns[atoms:]),
    )


def agree(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether weights are equal, NaN for NaN, up to what the formula itself rounds away."""
    least = max(_TOLERANCE, 8 * torch.finfo(old.dtype).eps)
    return torch.allclose(new.double(), old.double(), rtol=least, atol=least / 1e3, equal_nan=True)


def of_softmax(*, guarded: bool) -> str:
    """The `masked_rows` of a softmax: −inf in a whole row is NaN, which a guard replaces by zero.

    A finite fill is part of the logits still, and makes the mean by itself.
    """
    return "zero" if guarded else "nan"


def of_mask(
    policy: str, *, masked: bool, infinite: int, finite: int, absorbs: bool, has_key: bool
) -> str | None:
    """The `masked_rows` once fills of the bias join the bool mask; None where none is equal.

    `policy` is that of −inf. There are `infinite` and `finite` fills, and a mask besides if
    `masked`; `absorbs` says that what else is added vanishes beside a finite one. Where each row
    `has_key`, all policies are alike. Without, a row under one finite fill alone is one number
    throughout: the mean. Under two it holds two numbers, and beside −inf the fill's keys alone.
    """
    if finite and not absorbs:
        return None
    if not finite or has_key:
        return policy
    return "mean" if finite == 1 and not infinite and not masked else None


def absorbs(fill: float, bound: float, dtype: torch.dtype) -> bool:
    """Whether adding numbers up to `bound` to a fill changes nothing, in a dtype."""
    return bound < abs(fill) * torch.finfo(dtype).eps / 4
