"""Builds a predicate as one bool tensor that broadcasts to (B, H, S, T).

A tensor of the graph that holds the predicate, or a part of it, is used again. Nodes are placed as
early as their inputs allow, so that every later attention can read them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import sympy

from attngraph.ir import Builder, Dim, Graph, Loc, Node, Value
from attngraph.ir.dims import as_dim, same, symbols_of
from attngraph.passes.cse import hashable
from attngraph.passes.index_maps import Index
from attngraph.passes.predicates import (
    VARIABLES,
    And,
    Const,
    Dense,
    Domain,
    Expr,
    Linear,
    Not,
    Or,
    Predicate,
    negation,
)

Known = Mapping[Predicate, tuple[Value, Index]]


class Unbuildable(Exception):
    """A predicate reads a tensor at an index that no slice and no permutation gives."""


class EarlyBuilder:
    """Inserts nodes right after the last of their inputs; equal ones once.

    `definers` are the nodes that bring in dims, which attributes may name. `made` is what it made.
    """

    def __init__(self, graph: Graph, definers: Mapping[Node, frozenset[str]]) -> None:
        self.made: list[Node] = []
        self._nodes = list(graph)
        self._build = Builder(graph)
        self._place: dict[Value, int] = {
            value: place for place, node in enumerate(self._nodes) for value in node.outputs
        }
        self._dims = {
            name: place
            for place, names in enumerate(map(definers.get, self._nodes))
            for name in names or ()
        }
        self._memory: dict[Hashable, Value] = {}

    def __call__(self, loc: Loc, op: str, *inputs: Value | None, **attrs: Any) -> Value:
        """One op with one output."""
        key = (op, inputs, hashable(attrs))
        found = self._memory.get(key)
        if found is None:
            sources = [self._place.get(value, -1) for value in inputs if value is not None]
            dims = [self._dims.get(name, -1) for name in symbols_of(list(attrs.values()))]
            place = max([*sources, *dims], default=-1)
            before = self._nodes[place + 1] if place + 1 < len(self._nodes) else None
            node = self._build.at(before, loc).node(op, *inputs, **attrs)
            found = node.output
            self.made.append(node)
            self._place[found] = place
            self._memory[key] = found
        return found

    def adopt(self, value: Value) -> Value:
        """A constant of the graph with a free constant's data."""
        if value.data is None or not value.is_constant:
            return value
        graph = self._build.graph
        if graph.constants.get(value.name) is value:
            return value
        key = ("constant", value)
        if key not in self._memory:
            self._memory[key] = graph.add_constant(value.name, value.data)
        return self._memory[key]


def build(
    make: EarlyBuilder, loc: Loc, predicate: Predicate, known: Known, domain: Domain
) -> Value:
    """The predicate as a bool tensor of rank 4. Raises Unbuildable."""
    if predicate in known:
        try:
            return _laid_out(make, loc, *known[predicate], domain)
        except Unbuildable:
            pass
    match predicate:
        case Dense(value, index):
            return _laid_out(make, loc, make.adopt(value), index, domain)
        case Not(operand):
            return make(loc, "aten.logical_not", build(make, loc, operand, known, domain))
        case And(operands) | Or(operands):
            op = "aten.logical_and" if isinstance(predicate, And) else "aten.logical_or"
            total, *others = [build(make, loc, part, known, domain) for part in operands]
            for other in others:
                total = make(loc, op, total, other)
            return total
        case Linear(expr):
            if negation(predicate) in known:
                held = build(make, loc, negation(predicate), known, domain)
                return make(loc, "aten.logical_not", held)
            return _compared(make, loc, expr, domain)
        case Const():
            raise Unbuildable("A constant needs no tensor.")


def _laid_out(make: EarlyBuilder, loc: Loc, value: Value, index: Index, domain: Domain) -> Value:
    """The elements at `index`, with dims in the order (b, h, q, k) and 1 where one is missing."""
    order = [_variable(place) for place in index]
    used = [variable for variable in order if variable is not None]
    if len(set(used)) != len(used):
        raise Unbuildable(f"%{value.name} is read along a diagonal.")
    for dim, (place, variable) in enumerate(zip(index, order, strict=True)):
        start = place if variable is None else place - variable
        length: Dim = 1 if variable is None else domain.sizes[variable]
        if same(value.shape[dim], length) and start == 0:
            continue
        if not domain.never_positive(-start):
            raise Unbuildable(f"%{value.name} is read from an offset of unknown sign.")
        end = as_dim(sympy.sympify(start + length))
        value = make(loc, "aten.slice.Tensor", value, dim=dim, start=as_dim(start), end=end)
    ranks = [-1 if variable is None else VARIABLES.index(variable) for variable in order]
    if sorted(rank for rank in ranks if rank >= 0) != [rank for rank in ranks if rank >= 0]:
        dims = sorted(range(len(ranks)), key=lambda dim: ranks[dim])
        value = make(loc, "aten.permute", value, dims=dims)
    shape = [domain.sizes[variable] if variable in used else 1 for variable in VARIABLES]
    return _reshaped(make, loc, value, shape)


def _variable(place: Expr) -> Expr | None:
    """The variable of an index `variable + constant`; None for a constant."""
    found = [variable for variable in VARIABLES if variable in place.free_symbols]
    if not found:
        return None
    if len(found) > 1 or (place - found[0]).free_symbols & set(VARIABLES):
        raise Unbuildable(f"{place} is no slice.")
    return found[0]


def _reshaped(make: EarlyBuilder, loc: Loc, value: Value, shape: Sequence[Dim]) -> Value:
    if len(shape) == len(value.shape) and all(map(same, shape, value.shape)):
        return value
    return make(loc, "aten.reshape", value, shape=list(shape))


def _compared(make: EarlyBuilder, loc: Loc, expr: Expr, domain: Domain) -> Value:
    """expr ≤ 0 from one arange for each variable."""
    rest = expr
    terms = []
    for variable in VARIABLES:
        coefficient = rest.coeff(variable)
        if coefficient == 0:
            continue
        rest = rest - coefficient * variable
        if not coefficient.is_Integer:
            raise Unbuildable(f"{expr} is not linear.")
        terms.append((variable, int(coefficient)))
    if not terms or not rest.is_Integer:
        raise Unbuildable(f"{expr} is not linear with a constant.")
    total: Value | None = None
    for variable, coefficient in terms:
        places = make(loc, "aten.arange", end=domain.sizes[variable])
        shape = [domain.sizes[variable] if v == variable else 1 for v in VARIABLES]
        places = _reshaped(make, loc, places, shape)
        if coefficient != 1:
            places = make(loc, "aten.mul.Scalar", places, other=coefficient)
        total = places if total is None else make(loc, "aten.add.Tensor", total, places)
    assert total is not None
    return make(loc, "aten.le.Scalar", total, other=int(-rest))
