"""A slope diag(w) + b ⊗ a of a step's state, read by another key than it is written by.

What stands beside the diagonal is b_i a_j. So for each vector a of the step there is one b that
explains a column's other elements, and it must explain those of all columns. b is looked up as a
multiple of a vector, of it times one rate or two, of two vectors, element by element, or of these
times a rate; so is a, as the product of two vectors, where it is none: a step that reads the state
behind its decay reads w ∘ a, or writes by the rate and the decay of its head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, combinations_with_replacement
from typing import TypeAlias

import torch

from attngraph.analysis.values.running import is_near
from attngraph.ir import Value

Vector: TypeAlias = tuple[Value, torch.Tensor]
"""A value of a step and its numbers (B, H, D)."""

_FEWEST = 2  # features of a key without which nothing stands beside a diagonal
_MOST = 40  # vectors of which products are tried
_LEAST = 1e-6  # numbers that a product is multiplied by, or divided


@dataclass(frozen=True)
class Correction:
    """turn · b ⊗ a, a being the product of `reads`, b that of `writes`, beside the diagonal `decay`
    (B, H, dk)."""

    reads: tuple[Value, ...]
    writes: tuple[Value, ...]
    turn: float
    decay: torch.Tensor


def first_of_each(vectors: Sequence[Vector]) -> Mapping[Value, Value]:
    """Each value of those listed, last ones first, with the first that has its numbers."""
    found: dict[Value, Value] = {}
    known: list[Vector] = []
    for value, x in reversed(vectors):
        alike = next((each for each, y in known if torch.equal(x, y)), None)
        if alike is None:
            known.append((value, x))
        found[value] = value if alike is None else alike
    return found


@dataclass(frozen=True)
class Corrections:
    """Those of which vectors (B, H, dk) and rates (B, H, 1) are the factors."""

    vectors: Sequence[Vector]
    rates: Sequence[Vector]

    def of(self, slope: torch.Tensor) -> Iterator[Correction]:
        """The ways to read a slope (B, H, dk, dk)."""
        if slope.shape[-1] < _FEWEST:
            return
        beside = slope - torch.diag_embed(slope.diagonal(dim1=-2, dim2=-1))
        if is_near(slope, slope - beside):
            return
        for parts, a in (*self._single(), *self._double()):
            b = other_factor(beside, a)
            if b is None:
                continue
            for others, c, turn in self._multiples(b):
                decay = (slope - turn * c[..., None] * a[..., None, :]).diagonal(dim1=-2, dim2=-1)
                yield Correction(parts, others, turn, decay)

    def _single(self) -> Iterator[tuple[tuple[Value, ...], torch.Tensor]]:
        for value, x in self.vectors:
            yield (value,), x

    def _double(self) -> Iterator[tuple[tuple[Value, ...], torch.Tensor]]:
        if len(self.vectors) <= _MOST:
            for (one, x), (other, y) in combinations_with_replacement(self.vectors, 2):
                yield (one, other), x * y

    def _multiples(
        self, b: torch.Tensor
    ) -> Iterator[tuple[tuple[Value, ...], torch.Tensor, float]]:
        """Products of which b is a multiple, and by what."""
        no_rate: tuple[tuple[Value, ...], torch.Tensor | None] = (), None
        one = [no_rate, *(((value,), r) for value, r in self.rates)]
        two = [((p, q), r * s) for (p, r), (q, s) in combinations(self.rates, 2)]
        for whole, rates in ((self._single(), [*one, *two]), (self._double(), one)):
            for parts, x in whole:
                for rate, r in rates:
                    product = x if r is None else x * r
                    turn = float((product * b).sum() / product.square().sum())
                    if not _LEAST < abs(turn) < 1 / _LEAST:
                        continue
                    near = float(round(turn))
                    turn = near if abs(turn - near) < 1e-8 else turn
                    if is_near(product * turn, b):
                        yield (*parts, *rate), product, turn


def other_factor(beside: torch.Tensor, a: torch.Tensor) -> torch.Tensor | None:
    """b of b ⊗ a, of which what stands beside a diagonal is known."""
    without = a.square().sum(-1, keepdim=True) - a.square()
    if not bool((without > 0).all()):
        return None
    b = (beside * a[..., None, :]).sum(-1) / without
    found = b[..., None] * a[..., None, :]
    found = found - torch.diag_embed(found.diagonal(dim1=-2, dim2=-1))
    return b if is_near(found, beside) else None
