"""Inserts nodes whose types are inferred."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attngraph.ir.dims import Dim, same_shape
from attngraph.ir.graph import Graph, Node, Value
from attngraph.ir.infer import TypeInference
from attngraph.ir.loc import UNKNOWN, Loc
from attngraph.ir.ops import op_def


class Builder:
    """Adds nodes before `before` (None: at the end), all with the location `loc`."""

    def __init__(self, graph: Graph, before: Node | None = None, loc: Loc = UNKNOWN) -> None:
        self.graph = graph
        self.before = before
        self.loc = loc
        self._inference = TypeInference(graph.dims, graph.conditions)

    def at(self, before: Node | None, loc: Loc | None = None) -> Builder:
        """Moves the builder, and returns it. Keeps the inference's cache."""
        self.before = before
        self.loc = self.loc if loc is None else loc
        return self

    def node(
        self, op: str, /, *inputs: Value | None, names: Sequence[str] | None = None, **attrs: Any
    ) -> Node:
        """Inserts an op, dropping attributes that equal their defaults.

        Raises IRError where the op's evaluation rejects the inputs.
        """
        definition = op_def(op)
        kept = definition.stored(attrs)
        flat = list(inputs)
        while flat and flat[-1] is None:
            flat.pop()
        types = self._inference.infer(definition, flat, kept)
        return self.graph.create(
            op, flat, kept, types=types, names=names, loc=self.loc, before=self.before
        )

    def __call__(self, op: str, /, *inputs: Value | None, **attrs: Any) -> Value:
        """As `node`, returning the only output."""
        return self.node(op, *inputs, **attrs).output

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        """The value in that dtype; itself where it has it."""
        return value if value.dtype == dtype else self("aten._to_copy", value, dtype=dtype)

    def reshape(self, value: Value, shape: Sequence[Dim]) -> Value:
        """The value in another shape; itself where that is its own."""
        is_own = same_shape(value.shape, shape)
        return value if is_own else self("aten.reshape", value, shape=list(shape))

    def again(self, node: Node, old: Value | None, new: Value | None) -> Value:
        """A node's op on its own inputs, but for one of them."""
        inputs = [new if value is old else value for value in node.inputs]
        return self(node.op, *inputs, **node.attrs)

    def constant(self, data: torch.Tensor, name: str = "constant") -> Value:
        return self.graph.add_constant(name, data)
