"""Whether a slice of a table lies contiguously is not asked of sizes.

`table[:n]` of 32 rows is contiguous along its other axes only where n is 32. torch.export asks, and
takes the answer for a condition on n that the largest size breaks. A graph has no strides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import _prims_common
from torch.fx.experimental import symbolic_shapes

_not: Callable[[Any], Any] = torch.sym_not
_EXCLUDED = re.compile(r"satisfy the generated guard (?:.+ != \d+|\d+ != .+)\.?$", re.M)


def excludes_a_size(message: str) -> bool:
    """Whether the trace relies on a dim not having one certain size, which its range has."""
    return bool(_EXCLUDED.search(message))


@contextmanager
def undecided_contiguity() -> Iterator[None]:
    """A tensor counts as contiguous only where it is for all sizes, and no condition remains.

    What the model's own code asks of a size is a condition as before.
    """
    check: Callable[..., bool] = _prims_common.check_contiguous_sizes_strides

    def certainly(sizes: Any, strides: Any, false_if_dde: bool = False) -> bool:
        with (
            patch.object(symbolic_shapes, "guard_or_true", _certain_or(True)),
            patch.object(symbolic_shapes, "guard_or_false", _certain_or(False)),
        ):
            return check(sizes, strides, false_if_dde=True)

    with patch.object(_prims_common, "check_contiguous_sizes_strides", certainly):
        yield


def _certain_or(default: bool) -> Callable[[Any], bool]:
    def answer(condition: Any) -> bool:
        if isinstance(condition, bool):
            return condition
        if symbolic_shapes.statically_known_true(condition):
            return True
        if symbolic_shapes.statically_known_true(_not(condition)):
            return False
        return default

    return answer
