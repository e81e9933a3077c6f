"""constant-fold: computes now what doesn't depend on the model's inputs."""

from __future__ import annotations

import math

import torch

from attngraph.ir import Graph, Node, Remark, TensorType
from attngraph.ir.dead import discard
from attngraph.ir.dims import symbols_of
from attngraph.ir.effects import is_function
from attngraph.ir.ops import evaluate
from attngraph.ir.traits import DEQUANTIZED
from attngraph.passes.rewriting.manager import GraphPass

MEBIBYTE = 2**20


class ConstantFold(GraphPass, name="constant-fold", exact=True, bitwise=True):
    """Evaluates nodes whose inputs are constants and whose attributes are plain numbers.

    A result above `max_bytes` is stored only if it takes the place of its inputs: it is no larger
    than they are and nobody else reads them. So a weight is never kept twice, nor blown up, and one
    that is stored in codes stays so.
    """

    max_bytes: int = MEBIBYTE

    def run(self, graph: Graph) -> list[Remark]:
        for node in graph:
            if self._folds(graph, node):
                _fold(graph, node)
        return []

    def _folds(self, graph: Graph, node: Node) -> bool:
        sources = list(dict.fromkeys(node.operands))
        if not all(value.data is not None and not value.data.is_meta for value in sources):
            return False
        if not all(isinstance(v.type, TensorType) and v.type.is_static for v in node.outputs):
            return False
        if symbols_of(list(node.attrs.values())) or not is_function(node):
            return False
        if node.op in DEQUANTIZED:
            return False
        result = sum(_bytes(value.dtype, value.shape) for value in node.outputs)
        if result <= self.max_bytes:
            return True
        replaced = all(v.users == (node,) and v not in graph.outputs for v in sources)
        return replaced and result <= sum(_bytes(v.dtype, v.shape) for v in sources)


def _bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return dtype.itemsize * math.prod(shape)


def _fold(graph: Graph, node: Node) -> None:
    sources = node.operands
    with torch.no_grad():
        tensors = [None if value is None else value.data for value in node.inputs]
        results = evaluate(node, tensors, {})
    for value, result in zip(node.outputs, results, strict=True):
        stem = node.op.split(".")[1]
        name = f"{sources[0].name}.{stem}" if sources else value.name
        graph.replace_uses(value, graph.add_constant(name, _owned(result)))
    graph.erase(node)
    discard(graph, sources)


def _owned(result: torch.Tensor) -> torch.Tensor:
    """A view of all of its storage stays a view; one of a part, or a broadcast one, is copied."""
    result = result.detach()
    if result.untyped_storage().nbytes() == result.nbytes:
        return result
    return result.clone(memory_format=torch.contiguous_format)
