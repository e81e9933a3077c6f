"""Recognises triangles, bands and ranges in the data of a constant."""

from __future__ import annotations

import torch

from attngraph.analysis.layout.index_maps import Index
from attngraph.analysis.masks.predicates import Expr, Predicate, at_most, conjunction, negation


def band(allowed: torch.Tensor, index: Index) -> Predicate | None:
    """The predicate of a bool tensor whose true (or false) elements fill a band or a range.

    With at most two dims longer than 1, i before j: low ≤ j - i ≤ high, or low ≤ j ≤ high.
    """
    long = [dim for dim, size in enumerate(allowed.shape) if size != 1]
    if not 1 <= len(long) <= 2:
        return None
    columns = torch.arange(allowed.shape[long[-1]])
    if len(long) == 2:
        place = index[long[1]] - index[long[0]]
        offsets = columns[None, :] - torch.arange(allowed.shape[long[0]])[:, None]
    else:
        place, offsets = index[long[0]], columns
    allowed = allowed.reshape(offsets.shape)
    found = _within(allowed, offsets, place)
    if found is not None:
        return found
    found = _within(~allowed, offsets, place)
    return None if found is None else negation(found)


def _within(allowed: torch.Tensor, offsets: torch.Tensor, place: Expr) -> Predicate | None:
    inside = offsets[allowed]
    if not inside.numel():
        return None
    low, high = int(inside.min()), int(inside.max())
    if not torch.equal(allowed, (offsets >= low) & (offsets <= high)):
        return None
    bounds = []
    if high < int(offsets.max()):
        bounds.append(at_most(place - high))
    if low > int(offsets.min()):
        bounds.append(at_most(low - place))
    return conjunction(*bounds)


def progression(data: torch.Tensor, index: Index) -> Expr | None:
    """start + step · i, where integers along the only dim longer than 1 grow by a fixed step."""
    long = [dim for dim, size in enumerate(data.shape) if size != 1]
    if len(long) != 1:
        return None
    flat = data.flatten().to(torch.int64)
    start, step = int(flat[0]), int(flat[1] - flat[0])
    if not torch.equal(flat, start + step * torch.arange(len(flat))):
        return None
    return start + step * index[long[0]]
