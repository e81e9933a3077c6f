"""`as_strided` as a gather: the elements that it reads, by their place in the tensor.

It is the one operator that reads how its operand lies in memory, which the trace knows and a graph
does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any

import sympy
import torch
from torch.utils._sympy import functions as torch_sympy

from attngraph.errors import CaptureError
from attngraph.ir.graph import Graph, Value
from attngraph.ir.loc import Loc
from attngraph.ir.types import TensorType


def gather_strided(
    graph: Graph,
    source: Value,
    lies: Sequence[Any],
    size: Sequence[Any],
    stride: Sequence[Any],
    offset: Any,
    loc: Loc,
) -> Value:
    """The elements at offset + Σ iₐ · strideₐ behind the first one of `source`.

    `lies` are the strides of `source` in the trace. Raises CaptureError where its elements don't
    fill the memory between its first and its last, because the others are in no tensor of a graph.
    """
    shape = source.tensor_type.shape
    order = _memory_order(shape, lies)
    if order is None:
        raise CaptureError(
            f"as_strided at {loc} reads a part of a larger tensor, and memory outside of it; call "
            ".contiguous() first."
        )
    block = _block(shape, order, size, stride, offset)
    dtype, count = source.dtype, len(size) - len(block)

    def make(op: str, *inputs: Value, to: Sequence[Any], of: torch.dtype, **attrs: Any) -> Value:
        return graph.create(op, inputs, attrs, types=[TensorType(of, tuple(to))], loc=loc).output

    if order != sorted(order):
        to = [shape[axis] for axis in order]
        source = make("aten.permute", source, to=to, of=dtype, dims=order)
    flat = [prod(shape) // prod(block), *block]
    rows = make("aten.reshape", source, to=flat, of=dtype, shape=flat)
    whole = torch.int64
    place = make(
        "aten.full", to=[], of=whole, size=[], fill_value=offset // prod(block), dtype=whole
    )
    for axis, (length, step) in enumerate(zip(size[:count], stride, strict=False)):
        line = make("aten.arange", to=[length], of=whole, end=length)
        line = make("aten.mul.Scalar", line, to=[length], of=whole, other=step // prod(block))
        column = [length] + [1] * (count - axis - 1)
        line = make("aten.reshape", line, to=column, of=whole, shape=column)
        to = [*size[: axis + 1], *column[1:]]
        place = make("aten.add.Tensor", place, line, to=to, of=whole)
    return make("aten.index.Tensor", rows, place, to=size, of=dtype)


def _memory_order(shape: Sequence[Any], lies: Sequence[Any]) -> list[int] | None:
    """The axes from the slowest to the fastest, if the elements lie side by side."""
    left, order, step = set(range(len(shape))), list[int](), 1
    while left:
        ones = [axis for axis in left if shape[axis] == 1]
        fitting = ones or [axis for axis in left if _equal(_of_sizes(lies[axis]), step)]
        if not fitting:
            return None
        axis = max(fitting)
        left.remove(axis)
        order.insert(0, axis)
        step *= shape[axis]
    return order


def _of_sizes(step: Any) -> Any:
    """A stride of a tensor that isn't empty: torch writes max(1, n) for each size n in it."""
    if not isinstance(step, sympy.Basic):
        return step

    def size(part: sympy.Basic) -> sympy.Basic:
        others = [each for each in part.args if each != 1]
        return others[0] if len(others) == 1 and len(part.args) == 2 else part

    kinds = (sympy.Max, torch_sympy.Max)
    return step.replace(lambda part: isinstance(part, kinds), size)


def _block(
    shape: Sequence[Any], order: Sequence[int], size: Sequence[Any], stride: Sequence[Any], at: Any
) -> list[Any]:
    """The last axes of the result that are whole last axes of memory, and read as such."""
    inner = [shape[axis] for axis in order if shape[axis] != 1]
    best: list[Any] = []
    for count in range(1, min(len(inner), len(size)) + 1):
        block = list(size[len(size) - count :])
        steps = [1, *accumulate(reversed(block), mul)]
        read = zip(reversed(stride), steps, strict=False)
        same = all(_equal(a, b) for a, b in zip(block, inner[-count:], strict=True))
        if not same or not all(_equal(a, b) for a, b in list(read)[:count]):
            break
        if all(_equal(item % steps[-1], 0) for item in (*stride[: len(size) - count], at)):
            best = block
    return best


def _equal(a: Any, b: Any) -> bool:
    return bool(sympy.expand(a - b) == 0)
