"""A graph that a test draws: its dims, its dtypes, and what it is made with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st

from attngraph.ir import Builder, Dim, DimInfo, Graph, TensorType, Value
from attngraph.ir.dims import symbol

Draw = Callable[[st.SearchStrategy[Any]], Any]

DIMS = {"a": DimInfo(1, None, 3), "b": DimInfo(1, None, 5), "past": DimInfo(0, None, 2)}
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.uint8)
DTYPES = (*FLOATS, *INTEGERS, torch.bool)
SIZES: list[Dim] = [1, 1, 2, 3, *map(symbol, DIMS), 0]


@dataclass
class Making:
    """A graph that is being drawn."""

    draw: Draw
    graph: Graph
    build: Builder

    def one_of(self, choices: Sequence[Any]) -> Any:
        return self.draw(st.sampled_from(list(choices)))

    def number(self, low: int, high: int) -> int:
        found: int = self.draw(st.integers(low, high))
        return found

    def flag(self) -> bool:
        found: bool = self.draw(st.booleans())
        return found

    def shape(self, least: int = 0, most: int = 3) -> list[Dim]:
        return [self.one_of(SIZES) for _ in range(self.number(least, most))]

    def input(self, dtype: torch.dtype, shape: Sequence[Dim]) -> Value:
        return self.graph.add_input(f"i{len(self.graph.inputs)}", TensorType(dtype, tuple(shape)))

    def constant(self, number: float, dtype: torch.dtype) -> Value:
        """One element, in as many axes as any."""
        shape = [1] * self.number(0, 2)
        return self.build.constant(torch.full(shape, number, dtype=dtype))

    def ended(self, outputs: Sequence[Value]) -> Graph:
        self.graph.set_outputs(outputs, [f"o{place}" for place in range(len(outputs))])
        return self.graph

    def axis(self, rank: int) -> int:
        assume(rank)
        return self.number(-rank, rank - 1)


def begun(draw: Draw) -> Making:
    """A graph of one input, which binds every dim."""
    graph = Graph("g")
    graph.dims.update(DIMS)
    make = Making(draw, graph, Builder(graph))
    make.input(torch.float32, [symbol(name) for name in DIMS])
    return make
