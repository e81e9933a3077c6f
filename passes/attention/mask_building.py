"""Builds a predicate as one bool tensor that broadcasts to (B, H, S, T).

A tensor of the graph that holds the predicate, or a part of it, is used again. Nodes are placed as
early as their inputs allow, so that every later attention can read them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import sympy
from sympy.core.function import AppliedUndef

from attngraph.analysis.layout.index_maps import ZERO, Index
from attngraph.analysis.masks.predicates import (
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
    elements,
    negation,
)
from attngraph.analysis.masks.reading import Reader
from attngraph.analysis.masks.terms import Tree
from attngraph.analysis.values.scalars import is_cast
from attngraph.ir import Builder, Dim, Graph, Loc, Node, Value
from attngraph.ir.dims import as_dim, same, same_shape, symbols_of
from attngraph.ir.hashing import hashable


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


def build(make: EarlyBuilder, loc: Loc, predicate: Predicate, reader: Reader) -> Value:
    """The predicate as a bool tensor of rank 4. Raises Unbuildable."""
    domain = reader.domain
    if predicate in reader.known:
        try:
            return _laid_out(make, loc, *reader.known[predicate], domain)
        except Unbuildable:
            pass
    match predicate:
        case Dense(value, index):
            return _laid_out(make, loc, make.adopt(value), index, domain)
        case Not(operand):
            return make(loc, "aten.logical_not", build(make, loc, operand, reader))
        case And() | Or():
            op = "aten.logical_and" if isinstance(predicate, And) else "aten.logical_or"
            parts = _covered(predicate, reader)
            total, *others = [build(make, loc, part, reader) for part in parts]
            for other in others:
                total = make(loc, op, total, other)
            return total
        case Linear(expr):
            if negation(predicate) in reader.known:
                held = build(make, loc, negation(predicate), reader)
                return make(loc, "aten.logical_not", held)
            return _compared(make, loc, expr, reader)
        case Const():
            raise Unbuildable("A constant needs no tensor.")


def _covered(predicate: And | Or, reader: Reader) -> list[Predicate]:
    """Its operands, those that a tensor of the graph holds together as one."""
    kind, left = type(predicate), dict.fromkeys(predicate.operands)
    held = [p for p in reader.known if isinstance(p, kind) and p != predicate]
    together = []
    for part in sorted(held, key=lambda p: -len(p.operands)):
        if left.keys() >= set(part.operands):
            together.append(part)
            for operand in part.operands:
                del left[operand]
    return [*left, *together]


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


def _compared(make: EarlyBuilder, loc: Loc, expr: Expr, reader: Reader) -> Value:
    """expr ≤ 0, as a comparison of what is added with what is subtracted."""
    sides: tuple[list[Expr], list[Expr]] = ([], [])
    offset = ZERO
    for term, coefficient in sympy.expand(expr).as_coefficients_dict().items():
        if not coefficient.is_Integer:
            raise Unbuildable(f"{expr} is not of integers.")
        if not (term.free_symbols & set(VARIABLES) or elements(term)):
            offset += coefficient * term
        elif elements(term) and abs(coefficient) != 1:
            raise Unbuildable(f"{expr} may be out of the range of integers.")
        else:
            sides[bool(coefficient < 0)].append(abs(coefficient) * term)
    if not any(sides):
        raise Unbuildable(f"{expr} is of sizes only.")
    left, right = sides
    strict = offset == 1
    if strict:
        offset = ZERO
    if not left or not right:
        if not offset.is_Integer:
            raise Unbuildable(f"{expr} is compared with a size.")
        whole = _total(make, loc, left or right, ZERO, reader)
        if left:
            return make(loc, "aten.le.Scalar", whole, other=-int(offset) - strict)
        return make(loc, "aten.ge.Scalar", whole, other=int(offset) + strict)
    # An offset joins positions, which are small: an element might wrap around.
    first = _total(make, loc, left, offset if _moves(left) else ZERO, reader)
    second = _total(make, loc, right, ZERO if _moves(left) else -offset, reader)
    return make(loc, "aten.lt.Tensor" if strict else "aten.le.Tensor", first, second)


def _moves(terms: Sequence[Expr]) -> bool:
    return any(term in VARIABLES for term in terms) and not any(map(elements, terms))


def _total(
    make: EarlyBuilder, loc: Loc, terms: Sequence[Expr], offset: Expr, reader: Reader
) -> Value:
    """The sum of the terms and an offset, as integers of rank 4."""
    total: Value | None = None
    for term in sorted(terms, key=str):
        start = offset if term in VARIABLES else ZERO
        made = _integers(make, loc, term, start, reader)
        offset = offset - start
        total = made if total is None else make(loc, "aten.add.Tensor", total, made)
    assert total is not None
    if offset.is_Integer and offset != 0 and not any(map(elements, terms)):
        return make(loc, "aten.add.Scalar", total, other=int(offset))
    if offset != 0:
        raise Unbuildable(f"{offset} is added to {terms}.")
    return total


def _integers(make: EarlyBuilder, loc: Loc, term: Expr, start: Expr, reader: Reader) -> Value:
    """A variable from `start` on, an element, or a multiple, quotient or remainder of such."""
    domain = reader.domain
    if term in VARIABLES:
        end = {"end": as_dim(sympy.sympify(start + domain.sizes[term]))}
        if start == 0:
            places = make(loc, "aten.arange", **end)
        else:
            places = make(loc, "aten.arange.start", start=as_dim(sympy.sympify(start)), **end)
        shape = [domain.sizes[term] if v == term else 1 for v in VARIABLES]
        return _reshaped(make, loc, places, shape)
    if isinstance(term, AppliedUndef):
        value = reader.integers[term.func.__name__]
        return _laid_out(make, loc, value, term.args, domain)
    coefficient, rest = term.as_coeff_Mul()
    if coefficient != 1 and coefficient.is_Integer:
        whole = _integers(make, loc, rest, ZERO, reader)
        return make(loc, "aten.mul.Scalar", whole, other=int(coefficient))
    if isinstance(term, sympy.floor | sympy.Mod):
        is_quotient = isinstance(term, sympy.floor)
        inner, by = term.args[0].as_numer_denom() if is_quotient else term.args
        if by.is_Integer and not elements(inner):
            parts = sympy.expand(inner).as_coefficients_dict()
            moved = {t: c for t, c in parts.items() if t.free_symbols & set(VARIABLES)}
            if all(c == 1 for c in moved.values()):
                offset = sum((c * t for t, c in parts.items() if t not in moved), ZERO)
                whole = _total(make, loc, list(moved), offset, reader)
                if is_quotient:
                    mode = {"other": int(by), "rounding_mode": "floor"}
                    return make(loc, "aten.div.Scalar_mode", whole, **mode)
                return make(loc, "aten.remainder.Scalar", whole, other=int(by))
    raise Unbuildable(f"{term} is not a sum of positions.")


def rebuild(make: EarlyBuilder, loc: Loc, tree: Tree) -> Value | None:
    """Emits what is left of a bias; it broadcasts to the bias's shape."""
    if tree is None or isinstance(tree, Value):
        return tree
    inputs = [rebuild(make, loc, item) for item in tree.inputs]
    node, result = tree.value.producer, inputs[0]
    assert node is not None
    assert result is not None
    if tree.same_op:
        if len(inputs) == 1 and not is_cast(node):
            source = node.source
            if not same_shape(result.shape, source.shape):
                inputs = [make(loc, "aten.expand", result, size=list(source.shape))]
        result = make(loc, node.op, *inputs, *node.inputs[len(inputs) :], **node.attrs)
    if result.dtype != tree.value.dtype:
        result = make(loc, "aten._to_copy", result, dtype=tree.value.dtype)
    return result
