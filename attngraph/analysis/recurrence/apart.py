"""Which places along an axis depend on which, however small a coefficient is.

A NaN stays one in any sum or product. Each pair of places is told apart by a bit of their numbers:
with NaN where a bit is 1, then where it is 0, for each bit, everything that is read from another
place shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from attngraph.analysis.rows.batching import tracks
from attngraph.ir import Node, Value


def is_tracked(nodes: Sequence[Node], given: Mapping[Value, int], output: Value, own: int) -> bool:
    """Whether each place along an axis of the output is made of the same place of those given.

    By batching rules alone, where the axis keeps its track: no run is needed then. `given` maps
    values to their axis, all of one size, and `nodes` make the output of them.
    """
    at = dict(given)
    for node in nodes:
        carried = [(place, value) for place, value in enumerate(node.inputs) if value in at]
        if not carried:
            continue
        found = tracks(node)
        axes = {None if found is None else found[place][at[value]] for place, value in carried}
        axis = axes.pop()
        if axis is None or axes:
            return False
        at.update(dict.fromkeys(node.outputs, axis))
    return at.get(output) == own


def places(size: int) -> Iterator[torch.Tensor]:
    """Which places are told from the others, so that each pair is told apart both ways."""
    numbers = torch.arange(size)
    for bit in range((size - 1).bit_length()):
        is_set = (numbers >> bit) % 2 == 1
        yield is_set
        yield ~is_set


def with_nan(x: torch.Tensor, axis: int, at: torch.Tensor) -> torch.Tensor:
    """x with NaN at some places of an axis, or at as many runs of them, as heads in groups are."""
    whole = at.repeat_interleave(x.shape[axis] // len(at))
    return x.index_fill(axis, whole.nonzero()[:, 0], torch.nan)


def is_apart(x: torch.Tensor, axis: int, at: torch.Tensor) -> bool:
    """Whether nothing is NaN at the other places."""
    whole = at.repeat_interleave(x.shape[axis] // len(at))
    return not bool(x.index_select(axis, (~whole).nonzero()[:, 0]).isnan().any())
