"""Nodes of a region run one by one on numbers, and whether two results are the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from attngraph.analysis.values.widening import wide_node, widened
from attngraph.errors import IRError
from attngraph.ir import Node, TensorType, Value
from attngraph.ir.ops import evaluate
from attngraph.ir.traits import POINTWISE

_FAILURES = (IRError, LookupError, RuntimeError, TypeError, ValueError)

Observer = Callable[[Node, Sequence[Any], Sequence[Any]], None]
"""Takes a node, its operands and its results."""


def run_nodes(
    nodes: Iterable[Node],
    memory: dict[Value, Any],
    sizes: Mapping[str, int],
    observe: Observer | None = None,
    *,
    wide: bool = True,
) -> dict[Value, Any] | None:
    """`memory` with what the nodes give, in float64 if `wide`; None from one on that can't run."""
    with torch.no_grad():
        for node in nodes:
            try:
                given = [None if value is None else memory[value] for value in node.inputs]
                if wide and _makes_floats(node):
                    given = list(map(_as_float, given))
                made = evaluate(wide_node(node) if wide else node, given, sizes)
                results = list(map(widened, made)) if wide else made
                memory.update(zip(node.outputs, results, strict=True))
            except _FAILURES:
                return None
            if observe is not None:
                observe(node, given, results)
    return memory


def is_near(a: torch.Tensor, b: torch.Tensor, by: float = 1e-8) -> bool:
    """Whether a is b, element by element, up to `by` of the largest of b; never if not finite."""
    if a.shape != b.shape or not a.numel() or not bool(a.isfinite().all()):
        return False
    return bool((a - b).abs().max() <= by * b.abs().max().clamp(min=1e-300))


def _makes_floats(node: Node) -> bool:
    """Whether torch would give float32 of its integers, as of 0.9 ** (i - j)."""
    values = (*node.outputs[:1], *node.operands)
    dtypes = [value.dtype for value in values if isinstance(value.type, TensorType)]
    is_float = [dtype.is_floating_point for dtype in dtypes]
    return node.op in POINTWISE and is_float[0] and not any(is_float[1:])


def _as_float(x: Any) -> Any:
    is_integer = isinstance(x, torch.Tensor) and x.dtype in (torch.int64, torch.int32)
    return x.double() if is_integer else x
