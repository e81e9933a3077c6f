"""Random graphs of the ops that local rules look at, and values that tell two graphs apart."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from hypothesis import assume
from hypothesis import strategies as st

from attngraph.errors import IRError
from attngraph.ir import Graph, Value, interpret
from attngraph.ir.dims import substitute
from tests.passes.arguments import ARGUMENTS
from tests.passes.making import DTYPES, FLOATS, Draw, begun

_EDGES = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, -1.0, 3e38]


def drawn(draw: Draw, ops: Sequence[str], longest: int = 3) -> Graph:
    """A chain of at most so many of these ops."""
    make = begun(draw)
    dtype = make.one_of(FLOATS if draw(st.booleans()) else DTYPES)
    value = make.input(dtype, make.shape())
    outputs: list[Value] = [value]
    for _ in range(make.number(1, longest)):
        op = make.one_of(ops)
        inputs, attrs = ARGUMENTS[op](make, value)
        try:
            node = make.build.node(op, *inputs, **attrs)
        except IRError:
            assume(False)
        outputs += node.outputs
        value = make.one_of(node.outputs)
    return make.ended(outputs)


def values_for(draw: Draw, graph: Graph) -> list[torch.Tensor]:
    """Tensors for the inputs at drawn sizes: numbers of each dtype's edges among others."""
    sizes = {name: draw(st.integers(info.low, 4)) for name, info in graph.dims.items()}
    seed = torch.Generator().manual_seed(draw(st.integers(0, 1 << 16)))
    made = []
    for value in graph.inputs:
        shape = [int(substitute(dim, sizes)) for dim in value.shape]
        made.append(_values(value.dtype, shape, seed))
    return made


def _values(dtype: torch.dtype, shape: list[int], seed: torch.Generator) -> torch.Tensor:
    choice = torch.randint(0, 16, shape, generator=seed)
    if dtype == torch.bool:
        return choice < 8
    if dtype.is_floating_point:
        edges = torch.tensor(_EDGES, dtype=torch.float64)
        plain = torch.randn(shape, generator=seed, dtype=torch.float64)
        return torch.where(choice < len(_EDGES), edges[choice % len(_EDGES)], plain).to(dtype)
    info = torch.iinfo(dtype)
    edges = torch.tensor([info.min, info.max, 0, 1, info.max // 2 + 1], dtype=torch.int64)
    return torch.where(choice < 5, edges[choice % 5], choice).to(dtype)


def same_bits(old: Graph, new: Graph, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether both graphs give the same dtypes, shapes, numbers and signs of zeros."""
    results = [interpret(graph, inputs) for graph in (old, new)]
    return all(_same(first, second) for first, second in zip(*results, strict=True))


def _same(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    if not first.dtype.is_floating_point:
        return torch.equal(first, second)
    absent = first.isnan()
    signs = torch.where(absent, False, first.signbit() != second.signbit())
    return torch.equal(absent, second.isnan()) and bool(
        ((first == second) | absent).all() and not signs.any()
    )
