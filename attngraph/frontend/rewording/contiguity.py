"""Keeps sizes open that torch would fix to know strides: a graph has no strides and no storage.

`table[:n]` of 32 rows is contiguous along its other axes only where n is 32, and `table[32 - n:]`
begins at the table's own first element. torch.export asks, and takes the answer for a condition on
n that the largest size breaks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import _prims_common
from torch._subclasses import fake_impls
from torch.fx.experimental import symbolic_shapes
from torch.fx.passes import shape_prop

_not: Callable[[Any], Any] = torch.sym_not
_viewed: Callable[..., torch.Tensor] = torch._refs._reshape_view_helper
_EXCLUDED = re.compile(r"satisfy the generated guard (?:.+ != \d+|\d+ != .+)\.?$", re.M)


def excludes_a_size(message: str) -> bool:
    """Whether the trace relies on a dim not having one certain size, which its range has."""
    return bool(_EXCLUDED.search(message))


@contextmanager
def unasked_formats() -> Iterator[None]:
    """No node's metadata says how its result lies in memory, which nothing reads.

    torch asks each result, and an answer that is the sample's alone stays as a condition: of
    `x[:, :n]`, cut out of what was padded to a multiple of 3, that n is one.
    """
    name = "is_contiguous_for_memory_format_or_false"
    with patch.object(shape_prop, name, lambda *_, **__: False, create=True):
        yield


class Copies:
    """Copies in the place of what torch copies at some sizes, and at others gives as it is.

    They are that only where neither the tensor nor its copy is written to later: torch counts the
    writes to a tensor and to all views of it.
    """

    def __init__(self) -> None:
        self._counts: list[tuple[torch.Tensor, int]] = []

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone(memory_format=torch.contiguous_format)
        self._counts += [(each, each._version) for each in (tensor, copy)]
        return copy

    @property
    def are_written(self) -> bool:
        return any(each._version != count for each, count in self._counts)


def lies_contiguous(tensor: torch.Tensor) -> bool | None:
    """Whether a tensor is contiguous at all sizes or, False, at none; None where that changes."""
    known = symbolic_shapes.statically_known_true
    expected: Any = 1
    is_sure = True
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if known(size == 1):
            continue
        if known(stride != expected) and known(size > 1):
            return False
        is_sure &= known(stride == expected)
        expected = expected * size
    return True if is_sure else None


@contextmanager
def undecided_contiguity() -> Iterator[None]:
    """A tensor counts as contiguous only where it is for all sizes, and no condition remains.

    The same holds for views that fit every size, and for what else torch asks with a default for
    sizes that it can't tell. What the model's own code asks of a size is a condition as before.
    """
    check: Callable[..., bool] = _prims_common.check_contiguous_sizes_strides

    def with_defaults(sizes: Any, strides: Any, false_if_dde: bool = False) -> bool:
        return check(sizes, strides, false_if_dde=True)

    with (
        patch.object(symbolic_shapes, "guard_or_true", _certain_or(True)),
        patch.object(symbolic_shapes, "guard_or_false", _certain_or(False)),
        patch.object(_prims_common, "check_contiguous_sizes_strides", with_defaults),
        patch.object(fake_impls, "_view_has_unbacked_input", _fits_every_size),
        patch.object(torch._refs, "_reshape_view_helper", _viewed_or_copied),
    ):
        yield


def _fits_every_size(tensor: torch.Tensor, shape: Any) -> bool:
    """Whether a view has as many elements as its tensor for all sizes: then only strides differ."""
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], (list, tuple)) else shape
    count: Any = math.prod(sizes)
    return bool(symbolic_shapes.statically_known_true(tensor.numel() == count))


def _viewed_or_copied(tensor: torch.Tensor, *shape: Any, allow_copy: bool = False) -> torch.Tensor:
    """A view or, where its strides can't be shown to fit, a copy: the sample's own fit in eager.

    Those of a size u that may be 0 have max(1, u) in them, and aren't u times another stride.
    """
    try:
        return _viewed(tensor, *shape, allow_copy=allow_copy)
    except ValueError:
        return _viewed(tensor, *shape, allow_copy=True)


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
