"""Numbers of occurrences that Python reads: `torch.bincount(experts, minlength=n).tolist()`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch


@contextmanager
def counted_bins() -> Iterator[None]:
    """Within it, `torch.bincount` counts into as many bins as its `minlength`, where it has one.

    It gives more where a value is as large, so that their number is known only at run time. In the
    graph such a value is an index out of range, which a run reports.
    """
    plain = torch.bincount

    def counted(
        input: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0
    ) -> torch.Tensor:
        if isinstance(minlength, int) and minlength <= 0:
            return plain(input, weights, minlength)
        if weights is None:
            weights = torch.ones_like(input, dtype=torch.int64)
        elif weights.dtype != torch.float32:
            weights = weights.double()
        bins = torch.zeros(minlength, dtype=weights.dtype, device=weights.device)
        return bins.scatter_add(0, input.long(), weights)

    with patch.object(torch, "bincount", counted), patch.object(torch.Tensor, "bincount", counted):
        yield
