"""Slices that may be cut short in a trace: `x[:, :4]` of fewer than 4 rows, `x[:, -2:] = 0` of 1.

A trace takes the sample's length of a slice for that of all sizes, and begins a dim where it is.
Another one has these slices as long as the axis lets them be, and is compared with the model below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from attngraph.frontend.rewording.contiguity import undecided_contiguity
from attngraph.ir.open_slices import Met, open_slices

_UNKNOWN = 2
"""torch's answer where it can't tell whether a tensor's elements overlap in memory."""


@contextmanager
def short_slices(met: Met, *, opens: bool) -> Iterator[None]:
    """Tells `met` of each such slice; if it `opens` them, no condition follows from strides."""
    if not opens:
        with open_slices(met, opens=False):
            yield
        return
    overlaps: Callable[[torch.Tensor], int] = torch._debug_has_internal_overlap

    def unasked(tensor: torch.Tensor) -> int:
        is_open = any(isinstance(size, torch.SymInt) for size in tensor.shape)
        return _UNKNOWN if is_open else overlaps(tensor)

    with (
        open_slices(met),
        undecided_contiguity(),
        patch.object(torch, "_debug_has_internal_overlap", unasked),
    ):
        yield
