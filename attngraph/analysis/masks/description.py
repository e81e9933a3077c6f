"""Says in a few words what masks an attention, and what became of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import sympy

from attngraph.analysis.layout.index_maps import ZERO
from attngraph.analysis.masks.masking import Masking, Scores
from attngraph.analysis.masks.predicates import (
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
    elements,
    variables,
)
from attngraph.analysis.masks.reading import Reader
from attngraph.analysis.masks.terms import Tree, leaves
from attngraph.analysis.walks import above, walk
from attngraph.ir import Value

_FAR = 200


def describe(allowed: Predicate, scores: Scores, after: Masking, rest: Tree) -> str:
    """The reason of an attention's remark, such as `causal ∧ padding (bool)`.

    `allowed` is what masks the scores, `after` what their masking became, with `rest` as its bias.
    """
    parts, before = [], scores.masking
    namer = _Namer(allowed, scores)
    ordered = sorted(conjuncts(allowed), key=lambda part: part != scores.lower)
    names = namer.all_of(ordered)
    if len(ordered) == 1 and names[0].startswith(_DENSE):
        parts.append(f"dense, kept: {names[0].removeprefix(_DENSE).strip(' ()')}")
    elif names:
        parts.append(" ∧ ".join(names))
    elif before.bias is None and before.mask is None:
        parts.append("no mask")
    elif before != after and after.mask is None and rest is None:
        parts.append("all true, removed")
    if after.masked_rows == "mean":
        parts.append("finite fill, rows without keys average all values (bool mask)")
    parts += [_bias(value, scores.reader) for value in leaves(rest)]
    return "; ".join(parts)


_DENSE = "dense"


class _Namer:
    """Names predicates over the scores of one attention."""

    def __init__(self, allowed: Predicate, scores: Scores) -> None:
        self.causal = scores.lower
        self.past = sympy.sympify(scores.masking.past)
        self.has_end = any(
            expr.coeff(KEY) == 1 and expr.coeff(QUERY) == -1 for expr in _comparisons(allowed)
        )
        self.reader = scores.reader

    def all_of(self, parts: Sequence[Predicate]) -> list[str]:
        """What must all hold, two opposite comparisons as an equality."""
        names, left = [], list(parts)
        while left:
            part = left.pop(0)
            opposite = Linear(-part.expr) if isinstance(part, Linear) else None
            if isinstance(part, Linear) and opposite in left:
                left.remove(opposite)
                names.append(self._equality(part.expr))
            else:
                names.append(self._name(part))
        return list(dict.fromkeys(names))

    def _name(self, part: Predicate, *, first: bool = False) -> str:
        if part == self.causal:
            return "causal"
        match part:
            case Linear(expr):
                return self._comparison(expr, first=first)
            case Dense(value):
                is_padding = variables(part) <= {BATCH, KEY}
                return "padding (bool)" if is_padding else self._dense(value)
            case Not(operand):
                return self._name(operand)
            case And(operands):
                return f"({' ∧ '.join(self.all_of(operands))})"
            case Or(operands):
                ordered = sorted(operands, key=lambda item: item != self.causal)
                return f"({self._any_of(ordered)})"
            case _:
                return "nothing allowed"

    def _any_of(self, parts: Sequence[Predicate]) -> str:
        names = [self._name(part, first=True) for part in parts]
        for part, other in itertools.combinations(parts, 2):
            match part, other:
                case Linear(a), Linear(b) if sympy.expand(a + b - 2) == 0:
                    return f"not {self._equality(a - 1)}"
        return " ∨ ".join(dict.fromkeys(names))

    def _comparison(self, expr: Expr, *, first: bool) -> str:
        """`window 4` for q + P - k - 3 ≤ 0; `prefix 4` for k - 3 ≤ 0 beside causal."""
        found = elements(expr)
        if len(found) == 2 and _is_earlier(expr, found):
            return f"causal by {self._of(found)}"
        query, key = expr.coeff(QUERY), expr.coeff(KEY)
        rest = sympy.expand(expr - query * QUERY - key * KEY)
        plain = rest.xreplace(dict.fromkeys(found, ZERO))
        if not {query, key} <= {-1, 0, 1} or plain.free_symbols & set(VARIABLES):
            return self._unnamed(expr)
        if found:
            return self._against(expr, found, (query, key), plain, first=first)
        match query, key:
            case (-1, 1):
                return f"causal with offset {-rest}"
            case (1, -1):
                width = 1 + self.past - rest
                is_window = self.has_end and width.is_positive
                if is_window:
                    return f"window {width}"
                return f"keys from q + {rest}" if rest != 0 else "keys from q"
            case (0, 1):
                return f"prefix {1 - rest}" if first else f"keys up to {-rest}"
            case (0, -1):
                return f"keys from {rest}"
            case (1, 0):
                return f"queries up to {-rest}"
            case (-1, 0):
                return f"queries from {rest}"
        return self._unnamed(expr)

    def _against(
        self, expr: Expr, found: list[Expr], places: tuple[Expr, Expr], rest: Expr, *, first: bool
    ) -> str:
        """A comparison of a key's position with an integer of a tensor."""
        (one, *more), (_, key) = found, places
        of, sign = self._of(found), expr.coeff(one)
        if more or places[0] != 0 or abs(sign) != 1:
            return self._unnamed(expr)
        over = one.free_symbols & set(VARIABLES)
        match key, sign:
            case (1, -1) if over <= {BATCH} and rest == 1:
                return f"prefix of lengths {of}" if first else f"padding (lengths {of})"
            case (1, -1) if QUERY in over:
                return f"causal at positions {of}" + (f" with offset {-rest}" if rest else "")
            case (-1, 1) if QUERY in over and rest.is_Integer and rest <= 0:
                return f"window {1 - rest} at positions {of}"
        return self._unnamed(expr)

    def _equality(self, expr: Expr) -> str:
        """`chunk 4` for ⌊q / 4⌋ = ⌊k / 4⌋, `segments of ids` for ids[b, q] = ids[b, k]."""
        found = elements(expr)
        if len(found) == 2 and sympy.expand(expr) in (found[0] - found[1], found[1] - found[0]):
            sides = {QUERY in item.free_symbols for item in found}
            if sides == {True, False}:
                return f"segments of {self._of(found)}"
        quotients = expr.atoms(sympy.floor)
        if len(quotients) == 2:
            widths = {item.args[0].as_numer_denom()[1] for item in quotients}
            total = sum(quotients) if expr.coeff(next(iter(quotients))) == 0 else expr
            if len(widths) == 1 and total.xreplace(dict.fromkeys(quotients, ZERO)) == 0:
                return f"chunk {widths.pop()}"
        remainders = expr.atoms(sympy.Mod)
        if len(remainders) == 1 and not found:
            return f"every {next(iter(remainders)).args[1]} positions"
        if not found and {expr.coeff(QUERY), expr.coeff(KEY)} == {1, -1}:
            return "the diagonal"
        return self._unnamed(expr)

    def _unnamed(self, expr: Expr) -> str:
        found = elements(expr)
        if found:
            return f"{_DENSE} (depends on {self._of(found)})"
        return f"{_DENSE} (positions)"

    def _of(self, found: Sequence[Expr]) -> str:
        values = [self.reader.integers[item.func.__name__] for item in found]
        origins = [_origin(value) or f"%{value.name}" for value in values]
        return " and ".join(dict.fromkeys(origin.removeprefix("input ") for origin in origins))

    def _dense(self, value: Value) -> str:
        if origin := _origin(value):
            return f"{_DENSE} (depends on {origin})"
        assert value.producer is not None
        return f"{_DENSE} (built by {value.producer.op})"


def _is_earlier(expr: Expr, found: Sequence[Expr]) -> bool:
    """x[k] - x[q] ≤ 0."""
    first, second = sorted(found, key=lambda item: QUERY in item.free_symbols)
    same = first.func.__name__ == second.func.__name__
    return bool(same and expr == first - second and first.xreplace({KEY: QUERY}) == second)


def _comparisons(predicate: Predicate) -> Iterator[Expr]:
    match predicate:
        case Linear(expr):
            yield expr
        case And(operands) | Or(operands):
            for operand in operands:
                yield from _comparisons(operand)


def _bias(value: Value, reader: Reader) -> str:
    if value in reader.numbers:
        fill = min(reader.numbers[value])
        return f"fill of {fill:g}, kept as a float bias"
    origin = _origin(value)
    return "dense float bias, kept" + (f": depends on {origin}" if origin else "")


def _origin(value: Value) -> str:
    """The nearest input of the graph that a value is computed from, else the nearest constant."""

    constant = ""
    for current in walk([value], above, limit=_FAR):
        if current.producer is None and not current.is_constant:
            return f"input {current.name}"
        if current.is_constant:
            constant = constant or f"constant {current.name}"
    return constant
