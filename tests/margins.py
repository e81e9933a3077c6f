"""Comparisons that come near to their tolerance: on another CPU they may fail.

Libraries sum in other orders from one CPU to the next, so a figure moves by a few roundings. A test
that has less than that left is mended before such a CPU is met: by sums that don't cancel, or by a
tolerance that says which roundings there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.testing._comparison import default_tolerances
from torch.utils import _pytree as pytree

NEAR = "near"
"""Under which a test's report has that one of its comparisons is near."""


def watched(compare: Callable[..., None], share: float, found: list[tuple[str, object]]) -> Any:
    """`torch.testing.assert_close`, which notes in `found` what is equal by its tolerances, and not
    by this share of them. Equal bits are asked for by tolerances of 0, which leave nothing to note.
    """

    def compared(
        actual: Any, expected: Any, *args: Any, rtol: Any = None, atol: Any = None, **kwargs: Any
    ) -> None:
        compare(actual, expected, *args, rtol=rtol, atol=atol, **kwargs)
        if rtol is None:
            tensors = [x for x in pytree.tree_leaves(expected) if isinstance(x, torch.Tensor)]
            if not tensors:
                return
            rtol, atol = default_tolerances(*tensors)
        try:
            compare(actual, expected, *args, rtol=rtol * share, atol=atol * share, **kwargs)
        except AssertionError:
            found.append((NEAR, share))

    return compared
