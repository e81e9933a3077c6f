"""Predicates over the index (b, h, q, k) of a score: a small algebra, simplified by proof only.

A predicate is And, Or and Not over three leaves: a constant, `expr ≤ 0` for an integer expression,
and an element of a bool tensor that isn't understood any further. Elements of integer tensors that
aren't understood (segment ids, lengths, positions from a caller) are functions of their index, of
which nothing else is known. Index variables count from 0; their sizes, and so everything that is
proved, may depend on the graph's named dims.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
from sympy.core.function import AppliedUndef

from attngraph.ir import Dim, DimInfo, Value

Expr: TypeAlias = Any
"""An integer expression of sympy over index variables and dims."""

BATCH, HEAD, QUERY, KEY = VARIABLES = sympy.symbols("b h q k", integer=True, nonnegative=True)


@dataclass(frozen=True, slots=True)
class Const:
    value: bool


@dataclass(frozen=True, slots=True)
class Linear:
    """expr ≤ 0. The name says what is usual; proofs pass over an expr that isn't linear."""

    expr: Expr


@dataclass(frozen=True, slots=True)
class Dense:
    """An element of a bool tensor, at one index per dim."""

    value: Value
    index: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Not:
    operand: Dense


@dataclass(frozen=True, slots=True)
class And:
    operands: tuple[Predicate, ...]


@dataclass(frozen=True, slots=True)
class Or:
    operands: tuple[Predicate, ...]


Predicate: TypeAlias = Const | Linear | Dense | Not | And | Or

TRUE, FALSE = Const(True), Const(False)


def element(name: str, index: Sequence[Expr]) -> Expr:
    """An element of the integer tensor of that name, at one index per dim."""
    return sympy.Function(name, integer=True)(*index)


def elements(expr: Expr) -> list[Expr]:
    """The elements of integer tensors in an expression; `e.func.__name__` is the tensor's name."""
    return sorted(sympy.sympify(expr).atoms(AppliedUndef), key=str)


def at_most(expr: Expr) -> Predicate:
    """expr ≤ 0, with |x| written out as two comparisons."""
    expr = sympy.sympify(expr)
    if expr.is_Integer:
        return Const(bool(expr <= 0))
    for absolute in expr.atoms(sympy.Abs):
        sign, inner = expr.coeff(absolute), absolute.args[0]
        rest = expr - sign * absolute
        if sign == 1:
            return conjunction(at_most(rest + inner), at_most(rest - inner))
        if sign == -1:
            return disjunction(at_most(rest + inner), at_most(rest - inner))
    return Linear(expr)


def equal(a: Expr, b: Expr) -> Predicate:
    """a = b."""
    return conjunction(at_most(a - b), at_most(b - a))


def negation(predicate: Predicate) -> Predicate:
    """Not, carried down to the leaves."""
    match predicate:
        case Const(value):
            return Const(not value)
        case Linear(expr):
            return Linear(1 - expr)
        case Dense():
            return Not(predicate)
        case Not(operand):
            return operand
        case And(operands):
            return disjunction(*map(negation, operands))
        case Or(operands):
            return conjunction(*map(negation, operands))


def conjunction(*predicates: Predicate) -> Predicate:
    """And, without what is true or said twice."""
    kept = _flat(And, predicates, TRUE)
    if FALSE in kept or any(negation(p) in kept for p in kept):
        return FALSE
    return kept[0] if len(kept) == 1 else And(tuple(kept)) if kept else TRUE


def disjunction(*predicates: Predicate) -> Predicate:
    """Or, without what is false or said twice."""
    kept = _flat(Or, predicates, FALSE)
    if TRUE in kept or any(negation(p) in kept for p in kept):
        return TRUE
    return kept[0] if len(kept) == 1 else Or(tuple(kept)) if kept else FALSE


def _flat(
    kind: type[And] | type[Or], predicates: Iterable[Predicate], neutral: Const
) -> list[Predicate]:
    parts: list[Predicate] = []
    for predicate in predicates:
        parts.extend(predicate.operands if isinstance(predicate, kind) else (predicate,))
    return [part for part in dict.fromkeys(parts) if part != neutral]


def conjuncts(predicate: Predicate) -> tuple[Predicate, ...]:
    """What must all hold; nothing for a predicate that is always true."""
    if predicate == TRUE:
        return ()
    return predicate.operands if isinstance(predicate, And) else (predicate,)


def from_table(inputs: Sequence[Predicate], table: Sequence[bool]) -> Predicate:
    """The predicate with this truth table: 2ⁿ rows, all inputs true first, the last fastest."""
    if all(table):
        return TRUE
    if not any(table):
        return FALSE
    first, half = inputs[0], len(table) // 2
    high, low = from_table(inputs[1:], table[:half]), from_table(inputs[1:], table[half:])
    if high == low:
        return high
    if high == TRUE:
        return disjunction(first, low)
    if high == FALSE:
        return conjunction(negation(first), low)
    if low == TRUE:
        return disjunction(negation(first), high)
    if low == FALSE:
        return conjunction(first, high)
    return disjunction(conjunction(first, high), conjunction(negation(first), low))


def variables(predicate: Predicate) -> frozenset[Expr]:
    """The index variables that a predicate depends on."""
    match predicate:
        case Linear(expr):
            found = expr.free_symbols
        case Dense(_, index):
            found = frozenset().union(*(sympy.sympify(item).free_symbols for item in index))
        case Not(operand):
            return variables(operand)
        case And(operands) | Or(operands):
            found = frozenset().union(*map(variables, operands))
        case _:
            return frozenset()
    return frozenset(found) & frozenset(VARIABLES)


def substitute(predicate: Predicate, variable: Expr, by: Expr) -> Predicate:
    """The predicate with an index variable replaced."""
    match predicate:
        case Linear(expr):
            return at_most(expr.xreplace({variable: sympy.sympify(by)}))
        case Dense(value, index):
            places = {variable: sympy.sympify(by)}
            return Dense(value, tuple(sympy.sympify(i).xreplace(places) for i in index))
        case Not(operand):
            return negation(substitute(operand, variable, by))
        case And(operands):
            return conjunction(*(substitute(p, variable, by) for p in operands))
        case Or(operands):
            return disjunction(*(substitute(p, variable, by) for p in operands))
        case _:
            return predicate


class Domain:
    """The box of indices: 0 ≤ b < B, 0 ≤ h < H, 0 ≤ q < S, 0 ≤ k < T, for every size of the dims.

    A dim is taken to be at least 1, or 0 where its range says so.
    """

    def __init__(self, sizes: Sequence[Dim], dims: Mapping[str, DimInfo]) -> None:
        self.sizes = dict(zip(VARIABLES, sizes, strict=True))
        self.dims = dims
        self._proved: dict[Expr, bool] = {}

    def index(self, variable: Expr) -> Expr:
        """The variable, or 0 where it can have no other value."""
        return sympy.Integer(0) if self.sizes[variable] == 1 else variable

    def never_positive(self, expr: Expr) -> bool:
        """Whether expr ≤ 0 is proved."""
        expr = sympy.sympify(expr)
        if expr not in self._proved:
            self._proved[expr] = self._bounded(expr)
        return self._proved[expr]

    def _bounded(self, expr: Expr) -> bool:
        if elements(expr):
            return False
        while expr.free_symbols:
            symbol = min(expr.free_symbols, key=lambda s: (s not in self.sizes, s.name))
            low, high = self._range(symbol)
            coefficient = expr.coeff(symbol)
            rest = expr - coefficient * symbol
            if not coefficient.is_Integer or symbol in rest.free_symbols:
                return bool(symbol not in self.sizes and expr.is_nonpositive)
            bound = high if coefficient > 0 else low
            if bound is None:
                return False
            expr = sympy.expand(rest + coefficient * bound)
        return bool(expr <= 0)

    def _range(self, symbol: Expr) -> tuple[Dim, Dim | None]:
        if symbol in self.sizes:
            return 0, self.sizes[symbol] - 1
        info = self.dims.get(symbol.name, DimInfo())
        return min(info.low, 1), info.high

    def simplify(self, predicate: Predicate) -> Predicate:
        """An equal predicate on the box, without comparisons that always or never hold."""
        match predicate:
            case Linear(expr):
                if self.never_positive(expr):
                    return TRUE
                return FALSE if self.never_positive(1 - expr) else predicate
            case And(operands):
                found = conjunction(*map(self.simplify, operands))
                return conjunction(*self._strongest(conjuncts(found)))
            case Or(operands):
                return negation(self.simplify(negation(predicate))) if operands else FALSE
            case _:
                return predicate

    def _strongest(self, parts: Sequence[Predicate]) -> list[Predicate]:
        """The predicates, but for comparisons that another one implies."""
        kept: list[Predicate] = list(parts)
        for part in parts:
            others = [p for p in kept if isinstance(p, Linear) and p is not part]
            if isinstance(part, Linear) and any(
                self.never_positive(part.expr - other.expr) for other in others
            ):
                kept.remove(part)
        return kept

    def always_a_key(self, predicate: Predicate) -> bool:
        """Whether for each (b, h, q) some key k is proved to satisfy the predicate."""
        query, last = self.index(QUERY), self.sizes[KEY] - 1
        candidates = [sympy.Integer(0), last]
        if self.never_positive(query - last):
            candidates.append(query)
        ahead = last + 1 - self.sizes[QUERY]
        if ahead != 0 and self.never_positive(-ahead):
            candidates.append(query + ahead)
        return any(
            self.simplify(substitute(predicate, KEY, key)) == TRUE for key in candidates
        ) or _constant_rows(predicate, self.sizes[KEY])


def _constant_rows(predicate: Predicate, keys: Dim) -> bool:
    """Whether the predicate is a constant tensor with a true element for each query."""
    if not isinstance(predicate, Dense) or predicate.value.data is None:
        return False
    data, index = predicate.value.data, predicate.index
    if KEY not in index or sum(KEY in place.free_symbols for place in index) != 1:
        return False
    dim = index.index(KEY)
    return data.shape[dim] == keys and bool(data.any(dim).all())
