"""Reads a softmax over a window of keys around each query, whichever way the window is laid out.

Scores S[…, i, j] are kept for the keys i + `first` + `step` · j alone (Longformer, Beltagy et al.,
2020): blocks of queries meet blocks of keys that overlap, diagonals become columns by a pad and a
reshape, parts are written into a tensor of zeros, and ends are filled. Nothing of that is matched.
At given sizes every score is followed (followed.py) to the product that it is an element of, and
that to the rows of queries and keys; every weight is followed from its product with the values to
the softmax. What is then known number by number is fitted by one affine layout, exactly, at all of
the sizes, or the reading ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from attngraph.analysis.layout.axes import Axes, fresh_axes
from attngraph.analysis.layout.contraction import Contraction, read_contraction
from attngraph.analysis.layout.digits import Placed
from attngraph.ir import Dim, Node, Value

FEATURE = -1
"""The axis of features, of queries and keys or of values; axes of the scores count from 0."""


@dataclass(frozen=True, slots=True)
class Scores:
    """`factor` · ⟨query, key⟩ over `features`; without a query, the sum of the key's features."""

    query: Placed | None
    key: Placed
    factor: float
    features: Dim


@dataclass(frozen=True, slots=True)
class Windows:
    """`gain` · softmax(Σ `scores`) · `value`, each query of which has a window of keys.

    Query i along the axis `position` of the scores meets the keys i + `first` + `step` · j, with j
    along the axis `window`; those off the ends are hidden. Rows of which one of `cleared` is true
    become zero. The softmax and what follows it before the weights move are `chain`. `root` is the
    product with the values, of `features` each, which stores its axes in `order`.
    """

    softmax: Node
    root: Node
    position: int
    window: int
    first: int
    step: int
    scores: tuple[Scores, ...]
    value: Placed
    features: Dim
    gain: float
    cleared: tuple[Value, ...]
    chain: tuple[Node, ...]
    order: tuple[int, ...]

    @property
    def offsets(self) -> range:
        """Key minus query, for each place of the window."""
        count = int(self.softmax.output.shape[self.window])
        return range(self.first, self.first + self.step * count, self.step)


@dataclass(frozen=True, slots=True)
class Below:
    """What follows a softmax, as `Windows` has it."""

    root: Node
    chain: tuple[Node, ...]
    cleared: tuple[Value, ...]
    gain: float


def read_product(node: Node) -> tuple[Contraction, Axes] | None:
    """A product and the axes of its result."""
    axes = fresh_axes(node.output.shape) if len(node.outputs) == 1 else ()
    found = read_contraction(node, axes) if axes else None
    return None if found is None or found.addends else (found, axes)
