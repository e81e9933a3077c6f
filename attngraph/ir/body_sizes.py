"""Sizes that a loop's body reads and that none of its inputs has, such as x.shape[1] in a step.

A body is a graph that can be evaluated on its inputs alone. So the loop hands it each such size as
that of an input without elements, f32[size, 0]: it costs nothing to make, and lowering reads the
size in the graph around the loop.
"""

from __future__ import annotations

import torch

from attngraph.ir.builder import Builder
from attngraph.ir.dims import symbol, symbols_of, tells
from attngraph.ir.graph import Graph, Value
from attngraph.ir.types import TensorType


def missing_sizes(body: Graph) -> list[str]:
    """The dims that nodes read before any value tells them."""
    known = set[str]().union(*map(_told, body.inputs))
    missing: set[str] = set()
    for node in body:
        missing |= symbols_of(list(node.attrs.values())) - known
        known = known.union(*map(_told, node.outputs))
    return sorted(missing)


def _told(value: Value) -> frozenset[str]:
    """The dims that a value tells by its size, or by being one."""
    if not isinstance(value.type, TensorType):
        return value.type.symbols
    return frozenset().union(*map(symbols_of, filter(tells, value.type.shape)))


def give_sizes(body: Graph, build: Builder) -> list[Value]:
    """Adds the inputs that tell a body its missing sizes; returns what to hand it, as operands."""
    operands = []
    for name in missing_sizes(body):
        dim = symbol(name)
        body.add_input(f"size_{name}", TensorType(torch.float32, (dim, 0)))
        operands.append(build("aten.full", size=[dim, 0], fill_value=0.0))
    return operands
