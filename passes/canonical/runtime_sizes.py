"""Sizes that seemed to need a run, but follow from other dims.

`torch.tensor(x.size(1)).item()` gives the trace a dim that it knows nothing of, at each call a new
one. Where the tensor is understood, the dim is an expression, and what was built twice is equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import sympy
from torch.utils._sympy import functions as torch_sympy

from attngraph.analysis.masks.predicates import VARIABLES, Domain, elements
from attngraph.analysis.masks.reading import Reader, integer
from attngraph.ir import Dim, DimInfo, Graph, Node, ScalarType
from attngraph.ir.dims import as_dim, at_least, rewritten, symbols_of
from attngraph.ir.effects import dim_definers, dims_of
from attngraph.ir.ops import attribute
from attngraph.ir.settling import settled

ITEM = "aten.item"
SLICE = "aten.slice.Tensor"


def resolve_sizes(graph: Graph) -> bool:
    """Writes each dim that follows from others as their expression; whether there was one."""
    items = {_name(node): node for node in graph if node.op == ITEM}
    known = _readable(graph, _known(graph, items))
    if not known:
        return False
    graph.define_dims(known)
    for name in known:
        graph.erase(items[name])
    for node in dim_definers(graph):
        if length := _length(graph, node):
            graph.define_dims(length)
    return True


def _name(node: Node) -> str:
    kind = node.output.type
    return kind.name or "" if isinstance(kind, ScalarType) else ""


def _known(graph: Graph, items: Mapping[str, Node]) -> dict[str, Dim]:
    """The dims that are read from understood tensors, in terms of those that aren't."""
    known: dict[str, Dim] = {}
    reader = Reader(Domain((1, 1, 1, 1), graph.dims))
    for name, node in items.items():
        (source,) = node.inputs
        if not name or source is None or node.output.uses or node.output in graph.outputs:
            continue
        reading = reader.read(source, (sympy.Integer(0),) * len(source.shape))
        size = None if reading is None else integer(reading)
        size = None if size is None else _as_dim(rewritten(size, known), graph.dims)
        if size is not None and name not in symbols_of(size):
            known[name] = size
    return known


def _readable(graph: Graph, known: dict[str, Dim]) -> dict[str, Dim]:
    """The known dims, but for those that a slice reads whose places have no certain order.

    There torch compares the places, and takes what holds for the sample as holding for all sizes.
    """
    slices = [node for node in graph if known and node.op == SLICE]
    while True:
        unsure = [
            node for node in slices if _reads(node, known) and not _places(node, known, graph.dims)
        ]
        if not unsure:
            return known
        dropped = frozenset().union(*(_reads(node, known) for node in unsure))
        known = {name: size for name, size in known.items() if name not in dropped}


def _reads(node: Node, known: Mapping[str, Dim]) -> frozenset[str]:
    return symbols_of(list(node.attrs.values())) & known.keys()


def _as_dim(expr: Any, dims: Mapping[str, DimInfo]) -> Dim | None:
    """An integer expression in the functions that dims are made of; None where it has others."""

    def quotient(inner: sympy.Expr) -> sympy.Expr:
        return torch_sympy.FloorDiv(*sympy.fraction(sympy.together(inner)))

    expr = sympy.sympify(expr).replace(sympy.floor, quotient)
    if elements(expr) or expr.free_symbols & set(VARIABLES) or not expr.is_integer:
        return None
    return as_dim(settled(expr, dims))


def _length(graph: Graph, node: Node) -> dict[str, Dim]:
    """The dim that a slice between known places brings in."""
    if node.op != SLICE:
        return {}
    given = frozenset().union(*map(dims_of, graph.inputs))
    name = node.output.shape[_axis(node)]
    places = _places(node, {}, graph.dims)
    if places is None or not isinstance(name, sympy.Symbol) or not symbols_of(places) <= given:
        return {}
    length = as_dim(sympy.expand(sympy.sympify(places[1]) - places[0]))
    step = attribute(node, "step")
    if step != 1:
        length = as_dim(torch_sympy.FloorDiv(length + step - 1, step))
    return {name.name: length}


def _places(
    node: Node, known: Mapping[str, Dim], dims: Mapping[str, DimInfo]
) -> tuple[Dim, Dim] | None:
    """Where a slice starts and ends, if 0 ≤ start ≤ end; None where that isn't proved."""
    size = node.source.shape[_axis(node)]
    start, end = (attribute(node, name) for name in ("start", "end"))
    start = 0 if start is None else rewritten(start, known)
    end = size if end is None else rewritten(end, known)
    if at_least(sympy.sympify(end) - size, 0, dims):
        end = size
    ordered = [0, start, end, size]
    steps = [sympy.sympify(b) - a for a, b in itertools.pairwise(ordered)]
    return (start, end) if all(at_least(step, 0, dims) for step in steps) else None


def _axis(node: Node) -> int:
    return int(attribute(node, "dim")) % len(node.output.shape)
