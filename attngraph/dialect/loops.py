"""`attn.scan`: a loop over a sequence, as `torch._higher_order_ops.scan` and ONNX's Scan are."""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from attngraph.errors import IRError
from attngraph.ir.graph import Graph
from attngraph.ir.interpreter import interpret
from attngraph.ir.ops import op
from attngraph.ir.traits import RECURRENCE
from attngraph.ir.types import TensorType


@op("attn.scan", [RECURRENCE], outputs=None)
def scan(
    tensors: list[torch.Tensor], *, body: Graph, carried: int, scanned: int
) -> tuple[torch.Tensor, ...]:
    """Runs `body` once per step, and hands what it carries from each step to the next.

    `tensors` are the initial values of what is carried, then what is scanned along its first axis
    (T, …), then what every step reads as it is. The inputs of `body` are the same with the scanned
    ones as one step's (…); it returns the next carried values, then what the step gives.

    Returns the last carried values, then what the steps gave, stacked (T, …). T is at least 1.
    """
    states, fixed = list(tensors[:carried]), list(tensors[carried + scanned :])
    sequences = tensors[carried : carried + scanned]
    steps = sequences[0].shape[0]
    if any(isinstance(tensor, FakeTensor) for tensor in tensors):
        operands = [*states, *(sequence[0] for sequence in sequences), *fixed]
        return tuple(_results(body, operands, carried, steps))
    stacks: list[list[torch.Tensor]] = [[] for _ in body.outputs[carried:]]
    for step in range(steps):
        results = interpret(body, [*states, *(each[step] for each in sequences), *fixed])
        states = list(results[:carried])
        for stack, result in zip(stacks, results[carried:], strict=True):
            stack.append(result)
    return (*states, *map(torch.stack, stacks))


def _results(
    graph: Graph, operands: Sequence[torch.Tensor], carried: int, steps: int
) -> list[torch.Tensor]:
    """Fake results, whose sizes come from the body's own types."""
    sizes: dict[sympy.Expr, int] = {}
    for value, operand in zip(graph.inputs, operands, strict=True):
        for dim, size in zip(value.shape, operand.shape, strict=True):
            if not isinstance(dim, int):
                sizes[dim] = size

    def shape(type: TensorType) -> list[int]:
        return [_size(dim, sizes) for dim in type.shape]

    results = []
    for at, value in enumerate(graph.outputs):
        lead = [] if at < carried else [steps]
        results.append(operands[0].new_empty([*lead, *shape(value.tensor_type)], dtype=value.dtype))
    return results


def _size(dim: int | sympy.Expr, sizes: dict[sympy.Expr, int]) -> int:
    """A size that an input has, whole or in symbols. It may be one of torch's own."""
    if isinstance(dim, int):
        return dim
    if dim in sizes:
        return sizes[dim]
    if missing := sorted(map(str, dim.free_symbols - sizes.keys())):
        raise IRError(f"A loop's body makes the size {missing[0]}, which its inputs don't have.")
    size: int = sympy_interp(PythonReferenceAnalysis, sizes, dim)
    return size
