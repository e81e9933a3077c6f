"""Slices that may be cut short in a trace: `x[:, :4]` of fewer than 4 rows, `x[:, -2:] = 0` of 1.

A trace takes the sample's length of a slice for that of all sizes, and begins a dim where it is.
Another one has these slices as long as the axis lets them be, and is compared with the model below.
So are the largest few of an axis, `scores.topk(4)`, of which there are no more than it has: behind
`if 4 < n` that is often what the model does without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from attngraph.frontend.rewording.contiguity import undecided_contiguity
from attngraph.frontend.rewording.tied_sizes import Ties
from attngraph.frontend.watching.questions import unguarded_starts
from attngraph.ir.open_slices import Met, may_lack, open_slices

_TOPK = (torch.topk, torch.Tensor.topk)
_FEWER: Callable[..., Any] = torch.sym_min
_UNKNOWN = 2
"""torch's answer where it can't tell whether a tensor's elements overlap in memory."""


@contextmanager
def short_slices(met: Met, chosen: Met, ties: Ties, *, opens: bool, most: int) -> Iterator[None]:
    """Tells `met` of each such slice; if it `opens` them, no condition follows from strides.

    `chosen` is told of choices of some of an axis, of which an earlier trace had so many at `most`:
    whether there are as many is a question that leaves no guard. `ties` know the dims that were
    asked for, and where they begin.
    """
    if not opens:
        with open_slices(met, opens=False), _Largest(chosen, ties, opens=False):
            yield
        return
    overlaps: Callable[[torch.Tensor], int] = torch._debug_has_internal_overlap

    def unasked(tensor: torch.Tensor) -> int:
        is_open = any(isinstance(size, torch.SymInt) for size in tensor.shape)
        return _UNKNOWN if is_open else overlaps(tensor)

    with (
        open_slices(met),
        _Largest(chosen, ties, opens=True),
        unguarded_starts(most + 1) if most else nullcontext(),
        undecided_contiguity(),
        patch.object(torch, "_debug_has_internal_overlap", unasked),
    ):
        yield


@dataclass(frozen=True)
class _Choice:
    """The arguments of a `topk`."""

    input: torch.Tensor
    k: Any
    dim: int = -1
    largest: bool = True
    sorted: bool = True


class _Largest(TorchFunctionMode):
    def __init__(self, met: Met, ties: Ties, *, opens: bool) -> None:
        super().__init__()
        self._met, self._ties, self._opens = met, ties, opens

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        named = dict(kwargs or {})
        if func not in _TOPK or "out" in named:
            return func(*args, **named)
        given = _Choice(*args, **named)
        size: Any = given.input.shape[given.dim] if given.input.dim() else 1
        k = given.k
        lows = {own.node.expr: each.low or 1 for each, own in self._ties.sizes.items()}
        if type(k) is int and may_lack(size, k, lows):
            self._met(size, k)
            k = _FEWER(k, size) if self._opens else k
        return func(given.input, k, given.dim, given.largest, given.sorted)
