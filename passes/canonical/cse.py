"""cse: computes and stores each thing once."""

from __future__ import annotations

from collections.abc import Hashable

import sympy
import torch

from attngraph.ir import Dim, Graph, Node, Remark, ScalarType, Value
from attngraph.ir.dims import symbol
from attngraph.ir.effects import dim_definers, is_function
from attngraph.ir.hashing import hashable
from attngraph.ir.loc import fuse_locs
from attngraph.ir.storage import memory_of
from attngraph.passes.rewriting.manager import GraphPass

COMPARED_ELEMENTS = 1024


class CommonSubexpressionElimination(GraphPass, name="cse", exact=True, bitwise=True):
    """Merges equal nodes, and constants that share storage or are small and equal bit for bit.

    The earlier one stays. A random op is not equal to its twin. Sizes that only a run can tell are
    one size if equal nodes define them.
    """

    def run(self, graph: Graph) -> list[Remark]:
        _merge_constants(graph)
        definers = dim_definers(graph)
        seen: dict[Hashable, Node] = {}
        merged: dict[Node, list[Node]] = {}
        for node in graph:
            if not is_function(node):
                continue
            kept = seen.setdefault((node.op, node.inputs, hashable(node.attrs)), node)
            if kept is not node and (names := definers.get(node)):
                same = _same_dims(node, kept)
                if not names <= same.keys():
                    continue
                graph.define_dims({name: same[name] for name in names})
            if kept is not node:
                merged.setdefault(kept, [kept]).append(node)
                graph.replace(node, kept.outputs)
        for kept, nodes in merged.items():
            kept.loc = fuse_locs(nodes, kept)
        return []


def _same_dims(node: Node, kept: Node) -> dict[str, Dim]:
    """What the twin of a node calls its sizes."""
    found: dict[str, Dim] = {}
    for ours, theirs in zip(node.outputs, kept.outputs, strict=True):
        for size, other in zip(_sizes(ours), _sizes(theirs), strict=True):
            if isinstance(size, sympy.Symbol):
                found[size.name] = other
    return found


def _sizes(value: Value) -> tuple[Dim, ...]:
    if isinstance(value.type, ScalarType):
        return () if value.type.name is None else (symbol(value.type.name),)
    return value.shape


def _merge_constants(graph: Graph) -> None:
    seen: dict[Hashable, Value] = {}
    for constant in list(graph.constants.values()):
        keys = [(constant.type, *key) for key in _constant_keys(constant)]
        kept = next((seen[key] for key in keys if key in seen), constant)
        seen.update(dict.fromkeys(keys, kept))
        if kept is not constant:
            graph.replace_uses(constant, kept)
            graph.erase_constant(constant)


def _constant_keys(constant: Value) -> list[tuple[Hashable, ...]]:
    """What tells a constant from others: where its elements lie, and what they are."""
    data = constant.data
    if data is None or data.layout != torch.strided:
        return []
    at = memory_of(data), data.storage_offset(), tuple(data.stride()), data.dtype
    keys: list[tuple[Hashable, ...]] = [("storage", *at)]
    if data.numel() <= COMPARED_ELEMENTS and data.device.type == "cpu":
        # contiguous() leaves the stride 0 of one element that was expanded, which has no bytes
        flat = data.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
        keys.append(("content", flat.view(torch.uint8).numpy().tobytes()))
    return keys
