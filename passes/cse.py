"""cse: computes and stores each thing once."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from attngraph.ir import Graph, Node, Remark, Value
from attngraph.ir.graph import fuse_locs
from attngraph.passes.effects import dim_definers, is_function
from attngraph.passes.manager import register

COMPARED_ELEMENTS = 1024


@register
@dataclass(frozen=True)
class CommonSubexpressionElimination:
    """Merges equal nodes, and constants that share storage or are small and equal bit for bit.

    The earlier one stays. A random op is not equal to its twin.
    """

    name: ClassVar[str] = "cse"
    exact: ClassVar[bool] = True
    bitwise: ClassVar[bool] = True

    def run(self, graph: Graph) -> list[Remark]:
        _merge_constants(graph)
        definers = dim_definers(graph)
        seen: dict[Hashable, Node] = {}
        merged: dict[Node, list[Node]] = {}
        for node in graph:
            if node in definers or not is_function(node):
                continue
            kept = seen.setdefault((node.op, node.inputs, hashable(node.attrs)), node)
            if kept is not node:
                for old, new in zip(node.outputs, kept.outputs, strict=True):
                    graph.replace_uses(old, new)
                merged.setdefault(kept, [kept]).append(node)
                graph.erase(node)
        for kept, nodes in merged.items():
            kept.loc = fuse_locs(nodes, kept)
        return []


def _merge_constants(graph: Graph) -> None:
    seen: dict[Hashable, Value] = {}
    for constant in list(graph.constants.values()):
        for key in _constant_keys(constant):
            kept = seen.setdefault((constant.type, *key), constant)
            if kept is not constant:
                graph.replace_uses(constant, kept)
                graph.erase_constant(constant)
                break


def _constant_keys(constant: Value) -> list[tuple[Hashable, ...]]:
    """What tells a constant from others: where its elements lie, and what they are."""
    data = constant.data
    if data is None or data.layout != torch.strided:
        return []
    storage = data.untyped_storage()._cdata
    keys: list[tuple[Hashable, ...]] = [
        ("storage", storage, data.storage_offset(), tuple(data.stride()), data.dtype)
    ]
    if data.numel() <= COMPARED_ELEMENTS and data.device.type == "cpu":
        flat = data.detach().contiguous().reshape(-1)
        keys.append(("content", flat.view(torch.uint8).numpy().tobytes()))
    return keys


def hashable(value: Any) -> Hashable:
    """A key that is equal for equal attributes only: 1, 1.0 and True differ, and so do ±0.0."""
    if isinstance(value, dict):
        return tuple(sorted((name, hashable(item)) for name, item in value.items()))
    if isinstance(value, (list, tuple)):
        return tuple(map(hashable, value))
    if isinstance(value, float):
        return float, value.hex()
    if isinstance(value, (bool, int)):
        return type(value), value
    result: Hashable = value
    return result
