"""Says in a few words what masks an attention, and what became of it."""

from __future__ import annotations

from collections import deque

import sympy

from attngraph.ir import Value
from attngraph.passes.mask_evidence import Masking
from attngraph.passes.mask_reading import Reader
from attngraph.passes.mask_terms import Tree, leaves
from attngraph.passes.predicates import (
    BATCH,
    KEY,
    QUERY,
    VARIABLES,
    And,
    Dense,
    Expr,
    Linear,
    Not,
    Or,
    Predicate,
    conjuncts,
    variables,
)

_FAR = 200


def describe(
    allowed: Predicate,
    causal: Linear,
    before: Masking,
    after: Masking,
    rest: Tree,
    reader: Reader,
) -> str:
    """The reason of an attention's remark, such as `causal ∧ padding (bool)`."""
    parts = []
    ordered = sorted(conjuncts(allowed), key=lambda part: part != causal)
    names = [_name(part, causal) for part in ordered]
    if names:
        parts.append(" ∧ ".join(dict.fromkeys(names)))
    elif before.bias is None and before.mask is None:
        parts.append("no mask")
    elif before != after and after.mask is None and rest is None:
        parts.append("all true, removed")
    if after.masked_rows == "mean":
        parts.append("finite fill, rows without keys average all values (bool mask)")
    parts += [_bias(value, reader) for value in leaves(rest)]
    return "; ".join(parts)


def _name(part: Predicate, causal: Linear) -> str:
    if part == causal:
        return "causal"
    match part:
        case Linear(expr):
            return _comparison(expr)
        case Dense():
            return "padding (bool)" if variables(part) <= {BATCH, KEY} else "bool mask"
        case Not(operand):
            return _name(operand, causal)
        case And(operands) | Or(operands):
            sign = " ∧ " if isinstance(part, And) else " ∨ "
            return f"({sign.join(dict.fromkeys(_name(item, causal) for item in operands))})"
        case _:
            return "nothing allowed"


def _comparison(expr: Expr) -> str:
    """`window of 4` for q - k - 3 ≤ 0, `k ≤ q + 2` for k - q - 2 ≤ 0."""
    if expr.has(sympy.floor):
        return "chunks"
    query, key = expr.coeff(QUERY), expr.coeff(KEY)
    rest = expr - query * QUERY - key * KEY
    if rest.free_symbols & set(VARIABLES) or not {query, key} <= {-1, 0, 1}:
        return "bool mask"
    match query, key:
        case (-1, 1):
            return f"causal with offset {-rest}"
        case (1, -1) if rest.is_Integer and rest <= 0:
            return f"window of {1 - rest}"
        case (1, -1):
            return f"k ≥ q + {rest}"
        case (0, 1):
            return f"keys up to {-rest}"
        case (0, -1):
            return f"keys from {rest}"
    return "bool mask"


def _bias(value: Value, reader: Reader) -> str:
    if value in reader.numbers:
        fill = min(reader.numbers[value])
        return f"fill of {fill:g}, kept as a float bias"
    origin = _origin(value)
    return "dense float bias, kept" + (f": depends on {origin}" if origin else "")


def _origin(value: Value) -> str:
    """The nearest input of the graph that a value is computed from, else the nearest constant."""
    queue, seen, constant = deque([value]), {value}, ""
    while queue and len(seen) < _FAR:
        current = queue.popleft()
        if current.producer is None and not current.is_constant:
            return f"input {current.name}"
        if current.is_constant:
            constant = constant or f"constant {current.name}"
        for source in current.producer.inputs if current.producer is not None else ():
            if source is not None and source not in seen:
                seen.add(source)
                queue.append(source)
    return constant
