"""Bounds on what it takes to evaluate an expression of a `.pt2` file, from its syntax tree alone.

Python computes `9**9**9**9` where it stands, and sympy multiplies sums out and compares the
arguments of a maximum in pairs. So each node has a bound on the bits of its value, with 64 for a
symbol, and on the number of terms of its expansion; where one of them passes a limit that no size
of a tensor needs, the expression is refused before anything evaluates it.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence

LONGEST = 16_384
"""Characters of an expression that is parsed."""
_MOST_NODES = 1_000
_DEEPEST = 100
_MOST_BITS = 4_096
_MOST_TERMS = 256
_MOST_COMPARED = 32
_WIDEST = 64
"""Bits of a number, and the largest exponent and shift."""

_POWERS = frozenset(["Pow", "PowByNatural", "FloatPow"])
_SHIFTS = frozenset(["LShift", "RShift"])
_COMPARED = frozenset(
    [
        "Max",
        "Min",
        "max",
        "min",
        "And",
        "Or",
        "Xor",
        "ITE",
        "Piecewise",
        "Where",
        "IsNonOverlappingAndDenseIndicator",
    ]
)


class _TooCostly(Exception):
    """A node passes a limit."""


class _Cost:
    """Bits and terms of the nodes of one expression."""

    def __init__(self) -> None:
        self.compared = 0

    def of(self, node: ast.AST, depth: int = 0) -> tuple[int, int]:
        """(bits, terms) of a node."""
        if depth > _DEEPEST:
            raise _TooCostly
        bits, terms = self._of(node, depth + 1)
        if bits > _MOST_BITS or terms > _MOST_TERMS:
            raise _TooCostly
        return bits, terms

    def _of(self, node: ast.AST, depth: int) -> tuple[int, int]:
        match node:
            case ast.Constant(value=value):
                return _number_bits(value), 1
            case ast.Call(func=ast.Name(id="Symbol")) | ast.Name():
                return _WIDEST, 1
            case ast.Call(func=ast.Name(id="Float"), args=[ast.Constant(value=str(value))]):
                return _number_bits(_float(value)), 1
            case ast.Call(func=func, args=arguments):
                parts = [self.of(argument, depth) for argument in arguments]
                name = func.id if isinstance(func, ast.Name) else ""
                return self._call(name, arguments, parts)
            case ast.BinOp(left=left, op=op, right=right):
                pair = [self.of(left, depth), self.of(right, depth)]
                return self._call(_name_of(op), [left, right], pair)
            case ast.BoolOp(values=values):
                return self._call("And", values, [self.of(value, depth) for value in values])
        parts = [self.of(child, depth) for child in ast.iter_child_nodes(node)]
        return max((bits for bits, _ in parts), default=0), sum(terms for _, terms in parts) or 1

    def _call(
        self, name: str, arguments: Sequence[ast.AST], parts: Sequence[tuple[int, int]]
    ) -> tuple[int, int]:
        total = sum(bits for bits, _ in parts)
        if name in _COMPARED:
            self.compared += len(arguments)
            if self.compared > _MOST_COMPARED:
                raise _TooCostly
        if name == "Mul":
            return total, math.prod(terms for _, terms in parts)
        if name == "Add":
            return max((b for b, _ in parts), default=0) + 8, sum(terms for _, terms in parts)
        if name == "RoundDecimal" and len(arguments) == 2:
            _constant(arguments[1])
            return total, 1
        if name not in _POWERS and name not in _SHIFTS:
            return total, 1
        if len(arguments) != 2:
            raise _TooCostly
        (bits, terms), by = parts[0], abs(_constant(arguments[1]))
        if name in _SHIFTS:
            return bits + math.ceil(by), terms
        return bits * max(1, math.ceil(by)), terms ** max(1, math.ceil(by))


def cost(tree: ast.AST) -> int | None:
    """The number of nodes; None where the expression takes more than a tensor's size does."""
    nodes = sum(1 for _ in ast.walk(tree))
    if nodes > _MOST_NODES:
        return None
    try:
        _Cost().of(tree)
    except (_TooCostly, RecursionError):
        return None
    return nodes


def _name_of(op: ast.operator) -> str:
    match op:
        case ast.Pow():
            return "Pow"
        case ast.LShift() | ast.RShift():
            return "LShift"
        case ast.Mult():
            return "Mul"
        case ast.Add() | ast.Sub():
            return "Add"
    return ""


def _constant(node: ast.AST) -> float:
    """The value of a number that is written out, small enough for an exponent or a shift."""
    match node:
        case ast.Constant(value=int() | float() as value):
            found = float(value) if abs(value) <= _WIDEST else math.inf
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            found = -_constant(operand)
        case ast.Call(func=ast.Name(id="Integer"), args=[argument]):
            found = _constant(argument)
        case ast.Call(func=ast.Name(id="Float"), args=[ast.Constant(value=str(value))]):
            found = _float(value)
        case ast.Call(func=ast.Name(id="Rational"), args=[above, below]):
            divisor = _constant(below)
            found = _constant(above) / divisor if divisor else math.inf
        case _:
            raise _TooCostly
    if not abs(found) <= _WIDEST:
        raise _TooCostly
    return found


def _float(text: str) -> float:
    """A number in digits: mpmath takes any exponent, and multiplies it out."""
    value = float(text)
    if len(text) > _WIDEST or not math.isfinite(value):
        raise _TooCostly
    return value


def _number_bits(value: object) -> int:
    if isinstance(value, int) and value.bit_length() > _WIDEST:
        raise _TooCostly
    return _WIDEST
