"""Nodes and tensors in float64, whatever the dtypes of the graph."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from attngraph.ir import Graph, TensorType, clone


@dataclass(frozen=True, slots=True)
class _Again:
    """An op with other attributes than its node has."""

    op: str
    attrs: Mapping[str, Any]


def wide_node(node: Any) -> Any:
    """The node to evaluate on float64 in its place: its dtype attributes ask for no less."""
    if not any(isinstance(value, torch.dtype | Graph) for value in node.attrs.values()):
        return node
    return _Again(node.op, {name: _wide(value) for name, value in node.attrs.items()})


@functools.lru_cache(maxsize=64)
def _wide_region(region: Graph) -> Graph:
    """A region whose nodes compute in float64."""
    body = clone(region)
    for value in body.constants.values():
        value.data = widened(value.data)
        value.type = TensorType(_wide(value.dtype), value.shape)
    for node in body:
        node.attrs = dict(wide_node(node).attrs)
    return body


def _wide(value: Any) -> Any:
    if isinstance(value, Graph):
        return _wide_region(value)
    if isinstance(value, torch.dtype) and value.is_complex:
        return torch.complex128
    is_narrow = isinstance(value, torch.dtype) and value.is_floating_point
    return torch.float64 if is_narrow else value


def widened(value: Any) -> Any:
    """A tensor of floats in float64; anything else as it is."""
    return value.to(_wide(value.dtype)) if isinstance(value, torch.Tensor) else value
